"""`explain_oom`: the post-mortem of an OOM, from the memory snapshots that PyTorch writes.

Rules:
- A file is a stranger's: it is read by `pure/pickle_reader.py`, which runs nothing, and what cannot be read
  is a `ResultFileError` with the file and the reason in one line.
- One file is in memory at a time. Of several (ranks, devices) the one that was out of memory first is
  explained, and all are listed.
- What no snapshot says (the memory of the GPU, a cap, the batch) comes from the caller or from `record_oom`;
  without it the answer says what is not known.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import batchfit
from batchfit._why.pure.causes import causes_of
from batchfit._why.pure.findings import DeviceFindings, examine
from batchfit._why.pure.holders import LivePart
from batchfit._why.pure.options import WhyOptions
from batchfit._why.pure.pickle_reader import PickleRefused
from batchfit._why.pure.snapshot import MemorySnapshot, read_snapshot
from batchfit.errors import ResultFileError
from batchfit.results import (
    Holder,
    LastStep,
    MemoryGrowth,
    Moment,
    OomCause,
    OomExplanation,
    RankMemory,
    SettingReplay,
)

_MOST_PARTS = 100  # of a list; what is less is one entry at its end


def explain_oom(
    snapshot: str | Path | Iterable[str | Path],
    *,
    budget: int | str | None = None,
    gpu: str | None = None,
    batch_size: int | None = None,
    what_if: bool = True,
) -> OomExplanation:
    """Explain why a process was out of memory, from the memory snapshot that PyTorch wrote.

    ```python
    why = batchfit.explain_oom("snapshot.pickle", gpu="h100")
    print(why)
    print(why.causes[0].name, why.causes[0].advice)
    ```

    Neither a GPU nor torch is needed. The file is a pickle, and nothing in it is run: containers, numbers and
    strings are read, anything else is refused by its name.

    Args:
        snapshot: the file of `torch.cuda.memory._dump_snapshot` or `batchfit.record_oom`, also packed with
            gzip; or several, one for each rank.
        budget: memory that the process could use ("80GiB"). No snapshot says it; with it, memory that other
            processes hold is known.
        gpu: the GPU it ran on ("h100"), in place of `budget`.
        batch_size: the batch size of the step that failed, to say in samples what would have fitted.
        what_if: also replay the allocator under other settings.

    Returns:
        An `OomExplanation` with the causes, the holders at the end and at the peak, what grew from step to
        step, and a timeline.

    Raises:
        ResultFileError: a file cannot be read; names it and the reason.
        ValueError: there is no file, or an option is wrong.
    """
    options = WhyOptions(budget=budget, gpu=gpu, batch_size=batch_size, what_if=what_if)
    paths = [Path(snapshot)] if isinstance(snapshot, str | Path) else [Path(one) for one in snapshot]
    if not paths:
        raise ValueError("snapshot must be a file, or several, not an empty list")
    return explain_files(paths, options)


@dataclass(frozen=True, slots=True)
class _Explained:
    answer: OomExplanation
    row: RankMemory
    at_us: int  # of the OOM


def explain_files(paths: Sequence[Path], options: WhyOptions) -> OomExplanation:
    """Explain some snapshots as the options say."""
    begun = time.perf_counter()
    found = [one for path in paths for one in _explained(path, options)]
    first = min(found, key=lambda one: (not one.row.has_oom, one.at_us, -one.row.live_bytes))
    return first.answer.model_copy(
        update={
            "ranks": tuple(one.row for one in found) if len(found) > 1 else (),
            "elapsed_s": time.perf_counter() - begun,
        }
    )


def _explained(path: Path, options: WhyOptions) -> Iterator[_Explained]:
    """The explanation of each device of a file."""
    snapshot = _read(path)
    devices = snapshot.devices
    if not devices:
        raise ResultFileError(
            f"{path}: an empty snapshot: nothing was allocated on a GPU, or it was not recorded. Call "
            "torch.cuda.memory._record_memory_history() before the program's first allocation."
        )
    for device in devices:
        name = path.name if len(devices) == 1 else f"{path.name}, device {device}"
        try:
            found = examine(snapshot, device, options)
        except OverflowError:
            raise _refused(path, "sizes that no memory has") from None
        yield _answer(name, found)


def _read(path: Path) -> MemorySnapshot:
    try:
        with path.open("rb") as stream:
            return read_snapshot(stream)
    except OSError as error:
        raise ResultFileError(f"{path}: {error.strerror or error}") from None
    except PickleRefused as error:
        raise _refused(path, str(error)) from None


def _refused(path: Path, why: str) -> ResultFileError:
    return ResultFileError(
        f"{path}: refused: {why}. A memory snapshot holds plain containers, numbers and strings only; "
        "nothing in the file was run."
    )


def _answer(name: str, seen: DeviceFindings) -> _Explained:
    evidence, lives = seen.evidence, seen.lives
    oom = lives.has_oom
    answer = OomExplanation(
        name=name,
        rank=seen.notes.rank,
        device=seen.device,
        is_virtual=seen.notes.is_virtual,
        entries=len(lives.history),
        requested_bytes=evidence.asked if oom else None,
        requested_at=evidence.line if oom else "",
        phase=seen.phase,
        stack=seen.stack,
        live_bytes=evidence.live,
        reserved_bytes=evidence.reserved,
        cached_bytes=seen.free.cached,
        fragmented_bytes=evidence.split,
        largest_free_bytes=evidence.largest_free,
        awaiting_bytes=seen.free.awaiting,
        free_bytes=evidence.free if oom else None,
        outside_bytes=evidence.outside,
        total_bytes=evidence.total,
        short_bytes=evidence.short if oom else None,
        short_is_most=evidence.short_is_most,
        fewer_samples=evidence.fewer_samples,
        batch_size=seen.batch_size,
        step=seen.notes.step,
        batch=seen.notes.batch,
        peak_bytes=seen.peak_bytes,
        causes=tuple(
            OomCause(name=one.name, evidence=one.evidence, advice=one.advice)
            for one in (causes_of(evidence) if oom else ())
        ),
        kinds=_holders(seen.end.by_kind()),
        modules=_holders(seen.end.by_module()),
        lines=_holders(seen.end.by_line()),
        peak_kinds=_holders(seen.at_peak.by_kind() if seen.at_peak else []),
        peak_modules=_holders(seen.at_peak.by_module() if seen.at_peak else []),
        peak_lines=_holders(seen.at_peak.by_line() if seen.at_peak else []),
        growth=tuple(
            MemoryGrowth(
                name=one.name,
                bytes_per_step=one.bytes_per_step,
                steps=one.steps,
                of_steps=one.of_steps,
                total_bytes=one.size,
            )
            for one in evidence.leaks
        ),
        steps=len(seen.loop.steps),
        last_step=_last_step(seen),
        settings=tuple(
            SettingReplay(setting=one.setting, fits=one.fits, reserved_bytes=one.reserved_bytes)
            for one in evidence.settings.outcomes
        ),
        timeline=tuple(Moment(at=one.entry, phase=one.phase, kinds=one.kinds) for one in seen.timeline),
        reserved_timeline=tuple(one.reserved for one in seen.timeline),
        unseen=seen.caveats,
        batchfit_version=batchfit.__version__,
        torch_version=seen.notes.torch,
    )
    return _Explained(answer, _row(answer), lives.history.times_us[lives.end] if oom else 2**63)


def _last_step(seen: DeviceFindings) -> LastStep | None:
    long = seen.evidence.long
    if long is None:
        return None
    return LastStep(
        number=long.number,
        grew_bytes=long.grew_bytes,
        typical_bytes=long.typical_bytes,
        longest_bytes=long.longest_bytes,
        name=long.name,
        size=long.size,
        typical_size=long.typical_size,
    )


def _row(answer: OomExplanation) -> RankMemory:
    most = answer.lines[0] if answer.lines else None
    return RankMemory(
        name=answer.name,
        rank=answer.rank,
        device=answer.device,
        has_oom=answer.requested_bytes is not None,
        requested_bytes=answer.requested_bytes,
        live_bytes=answer.live_bytes,
        peak_bytes=answer.peak_bytes,
        reserved_bytes=answer.reserved_bytes,
        most=most.name if most else "",
        most_bytes=most.peak_bytes if most else 0,
    )


def _holders(parts: Sequence[LivePart]) -> tuple[Holder, ...]:
    total = sum(one.size for one in parts)
    rest = parts[_MOST_PARTS:]
    if rest:
        kinds: Counter[str] = Counter()
        for one in rest:
            kinds.update(one.kinds)
        size, blocks = sum(one.size for one in rest), sum(one.blocks for one in rest)
        parts = [*parts[:_MOST_PARTS], LivePart(f"{len(rest)} more", size, blocks, dict(kinds))]
    return tuple(
        Holder(
            name=one.name,
            peak_bytes=one.size,
            share=one.size / max(total, 1),
            count=one.blocks,
            kinds=one.kinds,
            operations=one.functions,
        )
        for one in parts
        if one.size
    )
