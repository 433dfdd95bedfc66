"""Why a process was out of memory: what speaks for each cause, and what to do about it.

Rules:
- A cause is named only with its figures; several can be true, and the one that explains most comes first.
- "The batch is too large" is what is left when nothing else is seen.
- Advice is what the evidence supports: a setting of the allocator only where the replay granted the request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, final

from batchfit._units import format_bytes
from batchfit._why.pure.replayed_settings import ReplayedSettings
from batchfit._why.pure.stacks import ACTIVATIONS, GRADIENTS, OPTIMIZER, TEMPORARIES
from batchfit._why.pure.steps import LeakingLine, LongStep

GIB = 2**30
CauseName = Literal[
    "other process", "leak", "long batch", "fragmentation", "optimizer state", "optimizer step", "too large"
]
# A CUDA context with NCCL and the kernels of a few libraries takes up to about this.
_ORDINARY_OUTSIDE = 2 * GIB
_OUTSIDE_SHARE = 0.1
_LEAK_SHARE = 0.1  # of what is live
_LONG_RATIO = 1.5
_SPLIT_SHARE = 0.1  # of what is reserved


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class OomEvidence:
    """What the causes are judged by."""

    asked: int
    live: int
    reserved: int
    split: int
    largest_free: int
    free: int  # that the GPU reported
    outside: int | None  # held outside torch; None where it is not known
    outside_is_least: bool  # at least that much
    total: int | None
    kind: int  # of the request that failed
    line: str
    short: int  # bytes that were missing for the request
    short_is_most: bool  # at most that many
    fewer_samples: int | None
    leaks: Sequence[LeakingLine]
    long: LongStep | None
    settings: ReplayedSettings


@final
@dataclass(frozen=True, slots=True)
class FoundCause:
    """One cause, with its figures and what to do."""

    name: CauseName
    evidence: str
    advice: str


def causes_of(seen: OomEvidence) -> list[FoundCause]:
    """The causes, the one that explains most first; never none."""
    found = [
        one
        for cause in (_other_process, _leak, _long_batch, _fragmentation, _optimizer)
        for one in cause(seen)
    ]
    return found or [_too_large(seen)]


def _other_process(seen: OomEvidence) -> Iterator[FoundCause]:
    outside = seen.outside
    if outside is None or outside < max(_ORDINARY_OUTSIDE, _OUTSIDE_SHARE * (seen.total or 0)):
        return
    least = "at least " if seen.outside_is_least else ""
    yield FoundCause(
        "other process",
        f"{least}{format_bytes(outside)} of the GPU are held outside this process's allocator; it had "
        f"{format_bytes(seen.reserved)} reserved, and {format_bytes(seen.free)} were free",
        "Look with nvidia-smi: end what else runs there, or give this job a GPU of its own. What this "
        "process itself holds outside torch (NCCL, a second framework) counts too.",
    )


def _leak(seen: OomEvidence) -> Iterator[FoundCause]:
    size = sum(one.size for one in seen.leaks)
    if not seen.leaks or size < max(seen.asked, _LEAK_SHARE * seen.live):
        return
    most = seen.leaks[0]
    per_step = sum(one.bytes_per_step for one in seen.leaks)
    graph = any(one.kind in (ACTIVATIONS, GRADIENTS) for one in seen.leaks)
    what = (
        "Something keeps a tensor with its graph from step to step: keep loss.item() or loss.detach(), and "
        "look for lists, caches and hooks that hold outputs."
        if graph
        else "Something keeps these tensors from step to step: look for lists, caches and logs that hold "
        "them."
    )
    yield FoundCause(
        "leak",
        f"{format_bytes(per_step)} more per step, left behind by {most.steps} of {most.of_steps} earlier "
        f"steps: {format_bytes(size)} of the {format_bytes(seen.live)} that are live, most of it allocated "
        f"at {most.name}",
        what,
    )


def _long_batch(seen: OomEvidence) -> Iterator[FoundCause]:
    long = seen.long
    if long is None or long.ratio < _LONG_RATIO or long.grew_bytes - long.typical_bytes < seen.asked:
        return
    where = ""
    if long.name:
        times = long.size / max(long.typical_size, 1)
        where = f". It differs first at {long.name}: {format_bytes(long.size)}, {times:.3g} times the "
        where += "largest before"
    yield FoundCause(
        "long batch",
        f"step {long.number} needed {format_bytes(long.grew_bytes)} and more, the steps before it "
        f"{format_bytes(long.typical_bytes)} (x{long.ratio:.1f}){where}",
        "Cut the batch by its length: batchfit.Microbatcher(model, lengths=...) does so before the OOM. "
        "Or limit the length, and try the longest samples first.",
    )


def _fragmentation(seen: OomEvidence) -> Iterator[FoundCause]:
    helps = [one.setting for one in seen.settings.outcomes if one.fits]
    if seen.split < seen.asked or not (helps or seen.split >= _SPLIT_SHARE * seen.reserved):
        return
    advice = (
        f"Set PYTORCH_CUDA_ALLOC_CONF={helps[0]}: replayed with it, the request is granted."
        if helps
        else "No setting that was replayed grants the request. Allocate large blocks before small ones that "
        "stay, or take fewer different sizes (pad to a few lengths)."
    )
    yield FoundCause(
        "fragmentation",
        f"{format_bytes(seen.split)} of the {format_bytes(seen.reserved)} reserved are free, but in inactive "
        f"split blocks: the largest has {format_bytes(seen.largest_free)}, and {format_bytes(seen.asked)} "
        "were asked for as one block",
        advice,
    )


def _optimizer(seen: OomEvidence) -> Iterator[FoundCause]:
    if seen.kind == OPTIMIZER:
        yield FoundCause(
            "optimizer state",
            f"the request is optimizer state, made in the first step, at {seen.line}: forward and backward "
            "had fitted",
            "State does not depend on the batch size: take an optimizer with less (8-bit Adam, Adafactor, "
            "SGD), shard it (FSDP), train fewer weights (LoRA), or leave it room.",
        )
    elif seen.kind == TEMPORARIES:
        yield FoundCause(
            "optimizer step",
            f"the request is a temporary of the optimizer's step, at {seen.line}",
            "Use fused=True, or foreach=False: both need no temporaries of the size of the weights.",
        )


def _too_large(seen: OomEvidence) -> FoundCause:
    short = f"{'at most ' if seen.short_is_most else ''}{format_bytes(seen.short)}"
    missing = f", and {short} were missing for it" if seen.short else ""
    fewer = ""
    if seen.fewer_samples:
        some = "1 sample" if seen.fewer_samples == 1 else f"{seen.fewer_samples} samples"
        fewer = f" For this request {some} fewer would do; what the step asks for next is in no snapshot."
    return FoundCause(
        "too large",
        f"{format_bytes(seen.live)} were live when {format_bytes(seen.asked)} were asked for{missing}; no "
        "leak, longer batch or fragmentation was seen that would explain it",
        "The batch is too large for the memory: batchfit find says what fits, batchfit.Microbatcher runs it "
        f"in microbatches, and batchfit explain shows what would change it.{fewer}",
    )
