"""Steps of one workload timed at one size after another, on all ranks, each time from the same state.

Rules:
- What was measured is the same on all ranks: the slowest rank's times and the highest readings, so that all
  decide the same.
- A CPU's memory is counted by a mode that makes every operation slower, so there memory is read in a short
  trial of its own, and times are taken without it. Under a `virtual_memory` of the caller's both are one.
- FLOPs are counted in one more step at the end of one timing, when times and peaks have been read: restoring
  the state once for both makes it cheap.
- A reading beside the timing (`briefly`) starts from the same state and leaves it as it was; after an OOM it
  is None.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict
from functools import partial
from typing import Any, Self, TypeVar, final

import torch
from torch import nn

from batchfit._engine.device import oom
from batchfit._engine.device.device import CpuDevice, Device, Peaks, counts_memory
from batchfit._engine.device.gpu import CudaDevice
from batchfit._engine.device.tensors import top_holders, trained_in
from batchfit._engine.distributed.ranks import Ranks
from batchfit._engine.snapshot.snapshot import Snapshot
from batchfit._engine.torch_private.dynamo import (
    DEFAULT_LIMIT,
    compilations,
    is_compiled_model,
    recompile_limit,
)
from batchfit._engine.trial.guarded_steps import Step, guarded_steps
from batchfit._engine.trial.in_process import FrozenGarbage, collect_garbage
from batchfit._engine.trial.trial import run_trial
from batchfit._engine.virtual_memory.memory import eagerly
from batchfit._explain.shortage import for_error
from batchfit._profile.measuring import Rates
from batchfit._profile.memory_outlook import MemoryOutlook
from batchfit._profile.model_inputs import InputsSeen, watched_inputs
from batchfit._profile.pure.peak_flops import peak_flops
from batchfit._profile.pure.steady import Timing
from batchfit._profile.readings import flops_of, refuses_to_count
from batchfit._profile.timing import TimedRun, run_timed
from batchfit._units import in_use_bytes
from batchfit.workload import Workload

T = TypeVar("T")
_SIZES_MANY = 8  # torch.compile gives up on a function after that many versions of it


@final
class Bench:
    """Times a workload; used as a context, within which the budget holds."""

    def __init__(
        self, work: Workload, device: Device, ranks: Ranks, *, budget_bytes: int, deadline_s: float | None
    ) -> None:
        self.work, self.device, self.ranks = work, device, ranks
        self.budget_bytes, self.deadline_s = budget_bytes, deadline_s
        # This rank's step time by size, before the slowest one's replaces it.
        self.own_s: dict[int, float] = {}
        self.seen: dict[int, InputsSeen] = {}
        self.flops_per_sample: float | None = None  # where they were counted
        self.model = work.model
        self._memory: dict[int, TimedRun] = {}
        self._outlook = MemoryOutlook(budget_bytes)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._snapshot = Snapshot.take(self.work.state)
        self._parameters = trained_in(self.work.state)
        collect_garbage(self.work, self.device)
        with ExitStack() as stack:
            self._collections = stack.enter_context(FrozenGarbage())
            if counts_memory(self.device):
                stack.enter_context(self.device.limit(self.budget_bytes))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.__exit__(*error)  # type: ignore[arg-type]

    def time(
        self,
        size: int,
        timing: Timing,
        *,
        smallest: bool = False,
        step: Step | None = None,
        count_flops: bool = False,
    ) -> TimedRun:
        """Time steps at `size`; `step` stands for the workload's own.

        `count_flops`: one step more, after the timed ones, for `flops_per_sample`.
        """
        memory = self._memory_trial(size, smallest=smallest) if step is None else None
        if memory is not None and not memory.fits:
            return memory
        with watched_inputs(self.model) as seen:
            run = run_timed(
                self.work.step if step is None else step,
                size,
                device=self.device,
                snapshot=self._snapshot,
                timing=timing,
                deadline_s=self.deadline_s,
                agree=self._agree(size),
                raise_ambiguous=smallest,
                after=partial(self._count_flops, size) if count_flops else None,
                parameters=self._parameters,
            )
        if not run.fits:
            self._collections.thorough()
        if step is None:
            self.seen[size] = seen
        if self.model is None and not compilations():
            # A step of the caller's own: its first module is watched once it is clear that nothing is
            # compiled, for a hook on a part of a compiled function would make that compile again.
            self.model = next((one for one in self.work.state if isinstance(one, nn.Module)), None)
        if run.times_s and step is None:
            self.own_s[size] = run.interval.median
        if memory is not None:
            run.peaks, run.held_bytes = memory.peaks, memory.held_bytes
        run = self._of_all(run)
        if step is None:
            self._outlook.learn(run)
        return run

    def limit(self) -> int | None:
        """The largest size that memory allows, as the readings have it; None where they say nothing."""
        return self._outlook.limit()

    # --- what a profile asks of whatever times the sizes (`SizeTimer`)

    @property
    def world_size(self) -> int:
        """How many ranks step together."""
        return self.ranks.world_size

    @property
    def device_name(self) -> str:
        """As torch has it."""
        return self.device.name

    @property
    def device_model(self) -> str:
        """`NVIDIA H200`; empty where torch does not say."""
        if isinstance(self.device, CudaDevice):
            with suppress(RuntimeError, AssertionError):
                return torch.cuda.get_device_name(self.device.index)
        return ""

    @property
    def is_main(self) -> bool:
        """Whether this process speaks."""
        return self.ranks.is_main

    def is_late(self) -> bool:
        """Whether the time is over, on any rank."""
        late = self.deadline_s is not None and time.perf_counter() >= self.deadline_s
        return self.ranks.any(late, doing="the time that is left")

    def pace_s(self, run: TimedRun) -> float:
        """Seconds that sizes are compared by."""
        return run.interval.median

    def rates(self, run: TimedRun, *, tokens_per_sample: int | None) -> Rates:
        """What a step of this run gets done."""
        step_s, seen = run.interval.median, self.seen[run.size]
        passes = self.work._passes  # a step accumulates the gradients of this many times `size` samples
        per_s = run.size * passes * self.world_size / step_s
        flops = self.flops_per_sample * run.size * passes / step_s if self.flops_per_sample else None
        peak = peak_flops(self.device_model, seen.precision)
        if tokens_per_sample is None and seen.tokens:
            tokens_per_s: float | None = seen.tokens * passes * self.world_size / step_s
        else:
            tokens_per_s = None if tokens_per_sample is None else tokens_per_sample * per_s
        return Rates(per_s, tokens_per_s, flops, flops / peak if flops is not None and peak else None)

    def why_out_of_memory(self, run: TimedRun) -> dict[str, Any]:
        """What the error says of the smallest size: keywords of `NothingFitsError`."""
        kind = self.device.name.partition(":")[0]
        if kind not in ("cpu", "cuda"):
            return {}
        on_cpu, budget_bytes = kind == "cpu", self.budget_bytes
        found = for_error(self.work, size=run.size, budget_bytes=budget_bytes, on_cpu=on_cpu)
        live_bytes = in_use_bytes(run.message)
        held = top_holders(self.work.state, on=torch.device(kind), live_bytes=live_bytes)
        return found or {"holders": held}

    def notes(self, runs: Mapping[int, TimedRun]) -> Iterator[str]:
        """What is to be known of the times beside what the points say."""
        if self.model is not None and is_compiled_model(self.model) and len(runs) >= _SIZES_MANY:
            yield (
                f"{len(runs)} sizes of a compiled model: past recompile_limit "
                f"({recompile_limit() or DEFAULT_LIMIT}) torch runs new ones eagerly"
            )
        if isinstance(self.device, CpuDevice) and counts_memory(self.device):
            yield "timed under virtual_memory, which makes every operation slower"

    def _count_flops(self, size: int) -> bool:
        """Count the operations of one more step within the timing; False where it was cut off."""
        ambient = sys.exception()
        try:
            with eagerly():
                counted = flops_of(self.work.step, size)
        except Exception as error:
            if oom.classify(error, ambient=ambient) not in ("oom", "too_large") and not refuses_to_count(
                error
            ):
                raise
            return False
        self.flops_per_sample = counted / (size * self.work._passes) if counted else None
        return True

    def briefly(self, read: Callable[[], T]) -> T | None:
        """What `read` returns, which may run steps; None on an OOM. The state is restored."""
        answers: list[T] = []
        device = self.device if counts_memory(self.device) else None
        with guarded_steps(self._snapshot, device=device) as guarded:
            guarded.run(lambda _: answers.append(read()), raise_ambiguous=True)
            guarded.completed = bool(answers) and answers[0] is not None
        return answers[0] if answers else None

    def _agree(self, size: int) -> Callable[[bool, bool], bool | None]:
        def agree(wants_more: bool, failed: bool) -> bool | None:
            if self.ranks.world_size == 1:
                return None if failed else wants_more
            answers = self.ranks.gather([wants_more, failed], doing=f"timing batch size {size}")
            return None if any(one[1] for one in answers) else any(one[0] for one in answers)

        return agree

    def _of_all(self, run: TimedRun) -> TimedRun:
        """One run that stands for all ranks': the slowest's times, the highest readings."""
        if self.ranks.world_size == 1:
            return run
        runs = self.ranks.gather(asdict(run), doing=f"the times of batch size {run.size}")
        failed = next((one for one in runs if one["outcome"] != "fits"), None)
        slowest = failed or max(runs, key=lambda one: sorted(one["times_s"])[len(one["times_s"]) // 2])
        peaks = [one["peaks"] for one in runs if one["peaks"] is not None]
        merged = TimedRun(**{**slowest, "peaks": None})
        merged.alloc_retries = max(one["alloc_retries"] for one in runs)
        merged.held_bytes = min(
            (one["held_bytes"] for one in runs if one["held_bytes"] is not None), default=None
        )
        if peaks:
            merged.peaks = Peaks(**{name: _highest(one[name] for one in peaks) for name in peaks[0]})
        return merged

    def _memory_trial(self, size: int, *, smallest: bool) -> TimedRun | None:
        """On a CPU whose memory is not counted: its peak at this size, or its OOM; once per size."""
        if counts_memory(self.device):
            return None
        if size in self._memory:
            return self._memory[size]
        with eagerly(), self.device.limit(self.budget_bytes):
            trial = run_trial(
                self.work.step,
                size,
                device=self.device,
                snapshot=self._snapshot,
                parameters=self._parameters,
                steps=2,
                raise_ambiguous=smallest,
            )
        outcome: Any = "too_large" if trial.outcome == "too_large" else "oom"
        if self.ranks.any(not trial.fits, doing=f"the memory of batch size {size}"):
            return TimedRun(size, outcome="oom" if trial.fits else outcome, message=trial.message)
        run = TimedRun(size, peaks=Peaks(trial.peak_bytes or 0), held_bytes=trial.held_bytes)
        self._memory[size] = run
        return run


def _highest(values: Any) -> Any:
    return max((value for value in values if value is not None), default=None)
