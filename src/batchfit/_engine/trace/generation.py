"""Generation in a trace: the prompt, some of the tokens' passes, and from these all of them.

Memory is highest while the prompt goes through the model, or at the last token, when every layer's keys and
values are as long as they get and one layer's are being copied into longer ones. But what they are copied out
of on the way leaves inactive split blocks that nothing later fits into. What `generate` itself keeps from one
token to the next (the scores of the last one) lies between them: up to a quarter of the memory. So `generate`
runs as it is, for some tokens, and the passes of all tokens are written from these.

Rules:
- The `forward` of whatever generates counts the passes, and ends `generate` when there are enough of them. It
  has the signature of the one that it wraps: transformers reads it.
- A pass makes one token of a cache that grows with it; anything else is refused. What cannot be traced is
  named, and measured instead.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, final

import torch
from torch import Tensor

from batchfit._engine.allocator.token_loops import TokenLoop
from batchfit._engine.torch_private.replaced import replaced
from batchfit._engine.trace.blocks import Blocks
from batchfit._engine.trace.program_lines import calling_frame
from batchfit.errors import UntraceableError
from batchfit.workload import Workload

# Kernels want masks of a multiple of eight, so that one pass in eight is another. The two that stand for all
# are eight apart, where keys are this many beyond a multiple: not that one, and not the one after it.
_EIGHT, _BEYOND = 8, 4
# What makes several tokens in a pass, or several passes for a token, or compiles it, or ends it early; and
# what it may be.
_OTHERWISE: dict[str, tuple[Any, ...]] = {
    "cache_implementation": ("dynamic",),
    "assistant_model": (),
    "prompt_lookup_num_tokens": (),
    "penalty_alpha": (),
    "dola_layers": (),
    "prefill_chunk_size": (),
    "guidance_scale": (1, 1.0),
    "max_time": (),
    "stop_strings": (),
}
_MOST_ANSWERS = 1000  # for one pass: it has no end that a pass would bring
_GENERATION_PACKAGE = "transformers.generation"
_BEAMS_GO_ON = "_beam_search_has_unfinished_sequences"


class _EnoughError(Exception):
    """There are enough passes."""


@final
class Generating:
    """Whether `generate` runs as far as it is counted: then it is answered that no sample has ended yet."""

    def __init__(self) -> None:
        self.passes: _Passes | None = None

    def asks(self) -> bool:
        """Whether it is `generate` that reads a value now."""
        return self.passes is not None and asked_by_generate()

    def goes_on(self) -> bool:
        """One more such question; whether it may be answered."""
        if self.passes is None or not self.asks():
            return False
        self.passes.questions += 1
        if self.passes.questions > _MOST_ANSWERS:
            raise UntraceableError("generate", "", "it goes on without a pass through the model")
        return True


def asked_by_generate() -> bool:
    """Whether the function that reads a value is transformers' own code of `generate`.

    The functions that ask cannot be wrapped: `generate` asks about padding in its own body, between calls of
    processors and criteria that may be the program's. So the module of the reading function decides.
    """
    frame = calling_frame()
    name = str(frame.f_globals.get("__name__", "")) if frame is not None else ""
    return name.startswith(f"{_GENERATION_PACKAGE}.")


@contextlib.contextmanager
def short_generation(workload: Workload, blocks: Blocks, generating: Generating) -> Iterator[None]:
    """Inside, the model's `generate` ends early, and `blocks` hears of the passes that it left out."""
    model: Any = workload.model
    if model is None:
        raise UntraceableError("generate", "", "it is a function of yours, not transformers'")
    whole = model.generate

    def generate(*args: Any, **options: Any) -> Tensor:
        return _shortened(model, whole, args, options, blocks, generating)

    with replaced(model, "generate", generate):
        yield


def _shortened(
    model: Any, whole: Any, args: Any, options: dict[str, Any], blocks: Blocks, generating: Generating
) -> Tensor:
    # A wrapper's `generate` is that of what it wraps; a forward pass within another is no pass of its own.
    inner = [one for one in model.modules() if hasattr(type(one), "prepare_inputs_for_generation")]
    if not inner:
        raise UntraceableError(f"{type(model).__name__}.generate", "", "it is not transformers' own")
    ids = _checked(inner[0], args, options)
    count = int(options["max_new_tokens"]) - 1  # the prompt's pass makes the first token
    begins = 1 if inner[0].config.is_encoder_decoder else ids.shape[1]
    early = 3 + (_BEYOND - begins - 3) % _EIGHT
    late = early + _EIGHT
    passes = _Passes(min(count, late), blocks)
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, generating, "passes", None)
        generating.passes = passes
        stack.enter_context(contextlib.suppress(_EnoughError))
        for one in inner:
            stack.enter_context(replaced(one, "forward", passes.counted(one.forward)))
            if hasattr(one, _BEAMS_GO_ON):
                stack.enter_context(replaced(one, _BEAMS_GO_ON, lambda *_, **__: True))
        whole(*args, **options)
    if count > late:
        spans = passes.spans
        if len(spans) <= late:
            raise UntraceableError("generate", "", "it ended before all tokens were made")
        two, last = ((spans[one - 1], spans[one]) for one in (early, late))
        blocks.looped(TokenLoop(spans[1], two, last, (early, late), count))
    made: Tensor = ids.new_zeros((ids.shape[0], begins + count + 1), dtype=torch.long)
    return made


@final
class _Passes:
    """Notes where the passes of `forward` begin; the prompt's is number 0."""

    def __init__(self, most: int, blocks: Blocks) -> None:
        self._most, self._blocks = most, blocks
        self._begins: list[int] = []
        self._inside = False
        self._length: int | None = None
        self.questions = 0

    @property
    def spans(self) -> list[tuple[int, int]]:
        return list(zip(self._begins, self._begins[1:], strict=False))

    def counted(self, forward: Any) -> Any:
        @functools.wraps(forward)
        def counting(*args: Any, **options: Any) -> Any:
            if self._inside:
                return forward(*args, **options)
            self._begins.append(self._blocks.position())
            if len(self._begins) > self._most + 1:
                raise _EnoughError
            self._inside, self.questions = True, 0
            try:
                out = forward(*args, **options)
            finally:
                self._inside = False
            self._check(getattr(out, "past_key_values", None))
            return out

        return counting

    def _check(self, cache: Any) -> None:
        """Refuse a cache that does not grow by a token in each pass."""
        _check_cache(cache)
        before, self._length = self._length, int(cache.get_seq_length())
        if before is not None and self._length != before + 1:
            raise UntraceableError("generate", "", "it has passes that do not make one token each")


def _checked(model: Any, args: Any, options: dict[str, Any]) -> Tensor:
    """The prompts; refuse what is known to go another way."""
    config = options.get("generation_config") or getattr(model, "generation_config", None)
    for name, fine in _OTHERWISE.items():
        value = options.get(name, getattr(config, name, None))
        if value is not None and value not in fine:
            raise UntraceableError(f"{type(model).__name__}.generate", "", f"{name} is not traced")
    first = next((one for one in args if isinstance(one, Tensor)), None)
    for name in ("input_ids", "input_features", "inputs", "pixel_values"):
        first = options.get(name) if first is None else first
    if not isinstance(first, Tensor):
        raise UntraceableError(f"{type(model).__name__}.generate", "", "the batch has no input_ids")
    if "attention_mask" not in options and not model.config.is_encoder_decoder and first.dim() == 2:
        # As `generate` makes it where no prompt has padding, which a trace cannot see.
        options["attention_mask"] = torch.ones_like(first)
    return first


def _check_cache(cache: Any) -> None:
    """Refuse a cache that is not known to grow token by token."""
    cache = getattr(cache, "self_attention_cache", cache)  # of an encoder and a decoder
    layers = getattr(cache, "layers", None)
    if layers is None:
        raise UntraceableError("generate", "", f"the cache {type(cache).__name__} is not known")
    for layer in layers:
        other = getattr(layer, "is_sliding", False) or getattr(layer, "is_compileable", False)
        if other or not isinstance(getattr(layer, "keys", None), Tensor):
            raise UntraceableError("generate", "", f"the cache {type(layer).__name__} is not known")
