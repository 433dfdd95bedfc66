"""What a prediction proposes to a search, size by size."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from batchfit._engine.allocator.replay import upper_bound
from batchfit._engine.device.readings import is_capped
from batchfit._engine.trace.workload import glance, rules_for
from batchfit._engine.workload.placement import device_to_run
from batchfit._predict.oracle import MARGINS, WORKSPACE_BYTES, Oracle, allocator_rules, held_beside
from batchfit.errors import UntraceableError
from batchfit.workload import Workload

log = logging.getLogger("batchfit")

_PATIENCE_S = 6.0  # a search that measures only takes no longer than a few traces of a huge step


_PATIENCE_GENERATION_S = 15.0  # nor than those of a few tokens, if it has to make all of them


# How far a trace may be above and below a real run, as a share of its peak, and still be believed.
_TOO_MUCH = 0.05


_TOO_LITTLE = 0.25


@dataclass(frozen=True, slots=True)
class Foresight:
    """A prediction for a search on the GPU, which a run of a small size corrects."""

    oracle: Oracle
    budget_bytes: int
    margin: float
    unsure_bytes: int  # that may be held for good besides what the oracle knows of
    name: str = "prediction"  # what the log calls it

    @classmethod
    def of(cls, work: Workload, *, budget_bytes: int, name: str = "prediction") -> Foresight | None:
        """None where the step cannot be traced: then the search measures only.

        Traced as if there were no GPU: whatever a program does with a fake tensor, its real device is safe.
        A search needs no prediction, so nothing that goes wrong here ends it: what is wrong with the step
        itself comes out of the first trial.
        """
        here = rules_for(work)
        if here.device.type != "cuda":
            return None
        rules = rules_for(work, here.gpu)
        try:
            limit_s = _PATIENCE_GENERATION_S if work.kind == "generation" else _PATIENCE_S
            traced = glance(work, rules=rules, budget_bytes=budget_bytes, limit_s=limit_s)
            settings = allocator_rules(capped=is_capped(device_to_run(work), budget_bytes))
        except UntraceableError as error:
            log.info("no %s: %s", name, str(error))
            return None
        except Exception as error:  # noqa: BLE001
            log.warning("no %s, measuring: %s: %s", name, type(error).__name__, str(error))
            return None
        if traced.footprint is None:
            log.info("no %s: memory is no straight line in the batch size", name)
            return None
        beside, unsure = held_beside(traced.reach.parts, rules.gpu)
        oracle = Oracle(traced, settings, (float(beside), 0.0))
        return cls(oracle, budget_bytes, MARGINS["calibrated"], unsure, name)

    def largest(self, most: int | None = None) -> int | None:
        """The largest size, the margin taken off; None where not even one sample fits."""
        found = self.oracle.largest(round(self.budget_bytes * (1 - self.margin)), most)
        return None if found is None else found.size

    def size_to_confirm(self) -> int | None:
        """A small size above the last knee, to compare the prediction with; None where none is small."""
        footprint = self.oracle.traced.footprint
        if footprint is None:
            return None
        end = upper_bound(footprint, self.budget_bytes, self.oracle.residual)
        if end < 8:
            return None
        knee = max(piece.size for piece in footprint.pieces(end))
        return min(max(int(knee) + 1, end // 8), end // 3)

    def corrected(self, size: int, peak_bytes: int) -> Foresight | None:
        """The same with what a real run of `size` needed beyond the trace: little is fixed, more per sample.

        None where the two are too far apart: the step is not what was traced, or no line in the size.
        """
        gap = peak_bytes - self.oracle.peak(size)
        if not -_TOO_MUCH * peak_bytes <= gap <= _TOO_LITTLE * peak_bytes:
            log.info("no %s: the trace says %+.0f %% at %d", self.name, -100 * gap / peak_bytes, size)
            return None
        fixed, slope = self.oracle.residual
        # A workspace that was not seen, as a rule, or held beside the step: no part of each sample.
        small = gap < WORKSPACE_BYTES + self.unsure_bytes
        residual = (fixed + gap, slope) if small else (fixed, slope + gap / size)
        return replace(self, oracle=replace(self.oracle, residual=residual))

    def as_corrected(self, other: Foresight) -> Foresight:
        """The same with what a real run of another workload, a part of this one, needed beyond its trace."""
        return replace(self, oracle=replace(self.oracle, residual=other.oracle.residual))
