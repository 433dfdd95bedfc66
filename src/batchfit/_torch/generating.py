"""Generation in a trace: the prompt, a few of the tokens' passes, and from these all of them.

Memory is highest while the prompt goes through the model, or at the last token, when every layer's keys and
values are as long as they get and one layer's are being copied into longer ones. But what they are copied out
of on the way leaves holes that nothing later fits into, up to a quarter of the memory: of a Llama of 1 B with
128 tokens and 256 more under 24 GiB, 1456 samples would run by those two moments; 1112 do in a replay of all
passes, and an H200 ran 1129 and not 1439. So five passes are traced, and the rest is written from them.

Rules: only transformers' own `generate` with its growing cache is known well enough for this; anything else
is named as untraceable, and measured instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from batchfit._decide.passes import Loop
from batchfit._torch.blocks import Blocks
from batchfit.errors import UntraceableError
from batchfit.workload import Workload

_ALL = 20  # passes, if there are no more than these
# Kernels want masks of a multiple of eight, so that one pass in eight is another. Passes are traced where the
# keys are this many beyond one: the pass is not that one, and not the one after it.
_BEYOND_EIGHT = 4
# What makes another cache, another loop or another output: not traced.
_OTHERWISE = (
    "cache_implementation",
    "past_key_values",
    "assistant_model",
    "prompt_lookup_num_tokens",
    "output_scores",
    "output_logits",
    "output_attentions",
    "output_hidden_states",
    "num_return_sequences",
    "penalty_alpha",
    "dola_layers",
)


@contextlib.contextmanager
def short_generation(workload: Workload, blocks: Blocks) -> Iterator[None]:
    """Inside, the model's `generate` does a few of its forward passes, and `blocks` are told of the rest."""
    model: Any = workload.model
    if workload.kind != "generation":
        yield
        return
    if model is None:
        raise UntraceableError("generate", "", "it is a function of yours, not transformers'")
    own = vars(model).get("generate")

    def generate(*args: Any, **options: Any) -> Tensor:
        return _few_passes(model, args, options, blocks)

    model.__dict__["generate"] = generate
    try:
        yield
    finally:
        if own is None:
            del model.__dict__["generate"]
        else:
            model.__dict__["generate"] = own


def _few_passes(model: Any, args: Any, options: dict[str, Any], blocks: Blocks) -> Tensor:
    inputs, new_tokens, beams = _checked(model, args, options)
    ids = inputs.pop("input_ids")
    mask = inputs.pop("attention_mask", None)
    if mask is None:
        mask = torch.ones(ids.shape, dtype=torch.long, device=ids.device)
    if beams > 1:
        ids, mask = ids.repeat_interleave(beams, dim=0), mask.repeat_interleave(beams, dim=0)
    out = model(input_ids=ids, attention_mask=mask, use_cache=True, logits_to_keep=1, **inputs)
    cache, scores = out.past_key_values, _scores(out)
    if beams > 1:
        torch.log_softmax(scores, dim=-1)
    del out, scores
    _check_cache(cache)
    prompt = ids.shape[1]
    last = torch.zeros((ids.shape[0], 1), dtype=torch.long, device=ids.device)
    spans: list[tuple[int, int]] = []
    count = new_tokens - 1  # the prompt's pass makes the first token
    numbers = _traced_passes(prompt, count)
    for before, number in pairwise((0, *numbers)):
        if number - before > 1:
            _stretch(cache, number - before - 1)
            # As what they were: of a mask it is asked whether it hides anything, which not all tensors know.
            ids, mask = (_longer(one, number - before - 1) for one in (ids, mask))
        begin = blocks.position()
        if beams > 1:
            cache.reorder_cache(torch.zeros(ids.shape[0], dtype=torch.long, device=ids.device))
        mask = _longer(mask, 1)
        out = model(
            input_ids=last, attention_mask=mask, past_key_values=cache, use_cache=True, logits_to_keep=1
        )
        _scores(out)
        del out
        ids = _longer(ids, 1)
        spans.append((begin, blocks.position()))
    if len(numbers) < count:
        first, *both = spans
        blocks.looped(Loop(first, (both[0], both[1]), (both[2], both[3]), (numbers[2], numbers[4]), count))
    whole: Tensor = ids.new_zeros((ids.shape[0] // beams, prompt + new_tokens))
    return whole


def _traced_passes(prompt: int, count: int) -> tuple[int, ...]:
    """The numbers of the passes to trace: all of few; of many the first, and two early and two late ones."""
    if count <= _ALL:
        return tuple(range(1, count + 1))
    early = 3 + (_BEYOND_EIGHT - prompt - 3) % 8
    late = count - (prompt + count - _BEYOND_EIGHT) % 8
    return 1, early - 1, early, late - 1, late


def _longer(tokens: Tensor, by: int) -> Tensor:
    return torch.cat([tokens, tokens.new_ones((tokens.shape[0], by))], dim=-1)


def _scores(out: Any) -> Tensor:
    """The last token's logits, in fp32 as `generate` takes them."""
    scores: Tensor = out.logits[:, -1, :].to(copy=True, dtype=torch.float32)
    return scores


def _checked(model: Any, args: Any, options: dict[str, Any]) -> tuple[dict[str, Any], int, int]:
    def refuse(why: str) -> UntraceableError:
        return UntraceableError(f"{type(model).__name__}.generate", "", why)

    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "prepare_inputs_for_generation"):
        raise refuse("it is not transformers' own")
    if getattr(config, "is_encoder_decoder", False):
        raise refuse("an encoder and a decoder are not traced")
    for name in _OTHERWISE:
        if options.get(name):
            raise refuse(f"{name} is not traced")
    inputs = {name: value for name, value in options.items() if isinstance(value, Tensor)}
    if args:
        first = args[0]
        inputs = dict(first) if isinstance(first, Mapping) else {"input_ids": first, **inputs}
    if "input_ids" not in inputs:
        raise refuse("the batch has no input_ids")
    return inputs, int(options["max_new_tokens"]), int(options.get("num_beams") or 1)


def _check_cache(cache: Any) -> None:
    """Refuse a cache that does not grow token by token."""
    layers = getattr(cache, "layers", None)
    if layers is None:
        raise UntraceableError("generate", "", f"the cache {type(cache).__name__} is not known")
    for layer in layers:
        if getattr(layer, "is_sliding", False) or not isinstance(getattr(layer, "keys", None), Tensor):
            raise UntraceableError("generate", "", f"the cache {type(layer).__name__} is not known")


def _stretch(cache: Any, by: int) -> None:
    """Each layer's keys and values that many tokens longer, the shorter ones freed after each."""
    for layer in cache.layers:
        for name in ("keys", "values"):
            before = getattr(layer, name)
            shape = (*before.shape[:-2], before.shape[-2] + by, before.shape[-1])
            setattr(layer, name, None)
            longer = before.new_empty(shape)
            del before
            setattr(layer, name, longer)
