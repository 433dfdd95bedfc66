"""Which size a whole program is run at next, after it ran out of memory.

Rules
- The first run is at the size asked for, to its end. While nothing fails, nothing is tried.
- A run that reached its end is the answer: no program is run again that has done its work.
- After a failure the sizes below are probed: the program runs for a few steps and is stopped. Probes halve
  the size until one survives, then bisect between what survived and what failed. The survivor runs on to its
  end, from the start.
- A run that fails late, past what a probe sees, says that the size is nearly right: the next one is a tenth
  smaller, then a fifth, two fifths, a half, and each goes to its end.
- A probe that was stopped after forward passes without gradients may have seen an evaluation before the
  training: once two runs have failed at sizes that it vouched for, only optimizer steps count.
- Every size asked for is smaller than every size that failed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, final

Ending = Literal["done", "cut", "oom"]


@final
@dataclass(frozen=True, slots=True)
class RunRequest:
    """A run to make: at `size`, stopped after `steps` steps (None: never); whether forwards are steps too."""

    size: int
    steps: int | None = None
    forwards: bool = False


@final
@dataclass(frozen=True, slots=True)
class RunObservation:
    """How a run ended: by itself, stopped by us, or out of memory; after how many optimizer steps."""

    ask: RunRequest
    ending: Ending
    steps: int = 0

    @property
    def by_forwards(self) -> bool:
        """It was stopped after forward passes, and no optimizer has stepped."""
        return self.ending == "cut" and self.steps == 0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Rerun:
    """The runs so far, as a value: `ask()` says what comes next, `tell` makes the next one."""

    start: int
    probe_steps: int = 3
    tolerance: float = 0.05
    observations: tuple[RunObservation, ...] = ()

    def tell(self, observation: RunObservation) -> Rerun:
        return replace(self, observations=(*self.observations, observation))

    @property
    def failed(self) -> int | None:
        """The smallest size that ran out of memory."""
        return min((one.ask.size for one in self.observations if one.ending == "oom"), default=None)

    @property
    def answer(self) -> int | None:
        """The size at which the program reached its end."""
        return next((one.ask.size for one in self.observations if one.ending == "done"), None)

    def ask(self) -> RunRequest | None:
        """The next run; None where the program has ended, or nothing is left below what failed."""
        failed = self.failed
        if self.answer is not None or failed == 1:
            return None
        if failed is None:
            return RunRequest(self.start)
        late = self._late()
        if late:
            return RunRequest(failed - max(1, failed * min(2 ** (late - 1), 5) // 10))
        if not self.probe_steps:
            return RunRequest(failed // 2)
        misled = self._misled()
        if misled == 1:
            return RunRequest(failed - max(1, failed // 10))
        survived = max(
            (
                one.ask.size
                for one in self.observations
                if one.ending == "cut" and one.ask.size < failed and not (misled and one.by_forwards)
            ),
            default=0,
        )
        if survived and failed - survived <= max(1, int(self.tolerance * survived)):
            return RunRequest(survived)
        return RunRequest((survived + failed) // 2, self.probe_steps, forwards=not misled)

    def _late(self) -> int:
        """How many runs have failed past what a probe sees."""
        proven = max(
            (one.ask.size for one in self.observations if one.ending == "cut" and one.steps), default=0
        )
        return sum(
            one.ending == "oom"
            and one.ask.steps is None
            and (one.ask.size <= proven or one.steps > max(self.probe_steps, 1))
            for one in self.observations
        )

    def _misled(self) -> int:
        """How many runs have failed at sizes that forward passes had vouched for."""
        vouched = max((one.ask.size for one in self.observations if one.by_forwards), default=0)
        return sum(
            one.ending == "oom" and one.ask.steps is None and one.ask.size <= vouched
            for one in self.observations
        )
