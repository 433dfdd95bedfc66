"""Generation in a trace: the prompt, some of the tokens' passes, and from these all of them.

Memory is highest while the prompt goes through the model, or at the last token, when every layer's keys and
values are as long as they get and one layer's are being copied into longer ones. But what they are copied out
of on the way leaves holes that nothing later fits into, and what `generate` itself keeps from one token to
the next (the scores of the last one) lies between them: up to a quarter of the memory. So `generate` runs as
it is, for some tokens, and the passes of all tokens are written from these.

Rules:
- The model's `forward` counts the passes, and ends `generate` when there are enough of them.
- A cache that does not grow by a token in each pass is refused, and so are ways to generate that make several
  tokens in one. What cannot be traced is named, and measured instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, final

import torch
from torch import Tensor

from batchfit._decide.passes import Loop
from batchfit._torch.blocks import Blocks
from batchfit.errors import UntraceableError
from batchfit.workload import Workload

# Kernels want masks of a multiple of eight, so that one pass in eight is another. The two that stand for all
# are eight apart, where keys are this many beyond a multiple: not that one, and not the one after it.
_EIGHT, _BEYOND = 8, 4
# What makes several tokens in a pass, or compiles it.
_OTHERWISE = (
    "cache_implementation",
    "assistant_model",
    "prompt_lookup_num_tokens",
    "penalty_alpha",
    "dola_layers",
)


_BEAMS_GO_ON = "_beam_search_has_unfinished_sequences"


class _EnoughError(Exception):
    """There are enough passes."""


@contextlib.contextmanager
def short_generation(workload: Workload, blocks: Blocks) -> Iterator[None]:
    """Inside, the model's `generate` ends early, and `blocks` are told of the passes that it left out."""
    model: Any = workload.model
    if workload.kind != "generation":
        yield
        return
    if model is None:
        raise UntraceableError("generate", "", "it is a function of yours, not transformers'")
    whole = model.generate

    def generate(*args: Any, **options: Any) -> Tensor:
        return _shortened(model, whole, args, options, blocks)

    with _instead(model, "generate", generate):
        yield


def _shortened(model: Any, whole: Any, args: Any, options: dict[str, Any], blocks: Blocks) -> Tensor:
    ids = _checked(model, args, options)
    count = int(options["max_new_tokens"]) - 1  # the prompt's pass makes the first token
    encodes = model.config.is_encoder_decoder
    begins = 1 if encodes else ids.shape[1]
    early = 3 + (_BEYOND - begins - 3) % _EIGHT
    late = early + _EIGHT
    passes = _Passes(model.forward, min(count, late), blocks)
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.suppress(_EnoughError))
        stack.enter_context(_instead(model, "forward", passes.forward))
        if hasattr(model, _BEAMS_GO_ON):
            stack.enter_context(_instead(model, _BEAMS_GO_ON, lambda *_, **__: True))
        whole(*args, **options)
    if count > late:
        spans = passes.spans
        both = (early - 1, early), (late - 1, late)
        first, (a, b), (c, d) = spans[1], *((spans[one], spans[two]) for one, two in both)
        blocks.looped(Loop(first, (a, b), (c, d), (early, late), count))
    kept = begins if encodes else ids.shape[1]
    made: Tensor = ids.new_zeros((ids.shape[0], kept + count + 1), dtype=torch.long)
    return made


@final
class _Passes:
    """A model's `forward`, which notes where its passes begin; the prompt's is number 0."""

    def __init__(self, forward: Any, most: int, blocks: Blocks) -> None:
        self._forward, self._most, self._blocks = forward, most, blocks
        self._begins: list[int] = []

    def forward(self, *args: Any, **options: Any) -> Any:
        self._begins.append(self._blocks.position())
        if len(self._begins) > self._most + 1:
            raise _EnoughError
        out = self._forward(*args, **options)
        _check_cache(getattr(out, "past_key_values", None))
        return out

    @property
    def spans(self) -> list[tuple[int, int]]:
        return list(zip(self._begins, self._begins[1:], strict=False))


@contextlib.contextmanager
def _instead(model: Any, name: str, function: Any) -> Iterator[None]:
    """Inside, this one instance of the model has another method."""
    own = vars(model).get(name)
    model.__dict__[name] = function
    try:
        yield
    finally:
        if own is None:
            del model.__dict__[name]
        else:
            model.__dict__[name] = own


def _checked(model: Any, args: Any, options: dict[str, Any]) -> Tensor:
    """The prompts; refuse what is known to go another way."""

    def refuse(why: str) -> UntraceableError:
        return UntraceableError(f"{type(model).__name__}.generate", "", why)

    if getattr(model, "config", None) is None or not hasattr(model, "prepare_inputs_for_generation"):
        raise refuse("it is not transformers' own")
    for name in _OTHERWISE:
        if options.get(name):
            raise refuse(f"{name} is not traced")
    given = {**options, **args[0]} if args and isinstance(args[0], Mapping) else options
    first = next((one for one in args if isinstance(one, Tensor)), None)
    for name in ("input_ids", "input_features", "inputs", "pixel_values"):
        first = given.get(name) if first is None else first
    if not isinstance(first, Tensor):
        raise refuse("the batch has no input_ids")
    return first


def _check_cache(cache: Any) -> None:
    """Refuse a cache that does not grow token by token."""
    cache = getattr(cache, "self_attention_cache", cache)  # of an encoder and a decoder
    layers = getattr(cache, "layers", None)
    if layers is None:
        raise UntraceableError("generate", "", f"the cache {type(cache).__name__} is not known")
    for layer in layers:
        if getattr(layer, "is_sliding", False) or not isinstance(getattr(layer, "keys", None), Tensor):
            raise UntraceableError("generate", "", f"the cache {type(layer).__name__} is not known")
