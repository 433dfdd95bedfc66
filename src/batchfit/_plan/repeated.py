"""Traces shallow models, chosen by `layers.py`, and extends them to the deep one (`pure/repetition.py`).

Rules: the first trace that is asked for shows how layers repeat; each other one is of the middle depth, and
is extended. Where layers do not repeat word for word, or another size makes another stream that does not, the
whole model is traced. A model is built when its first trace is asked for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import final

from batchfit._engine.allocator.footprint import ShapeChangedError, Trace
from batchfit._engine.cuda_model.dispatch import CudaRules
from batchfit._engine.sharding.pure.layout import ShardLayout
from batchfit._engine.sharding.sharding import changes_for
from batchfit._engine.trace.trace import WorkloadTraces
from batchfit._engine.workload.reachable import StepReach, reach_of
from batchfit._plan.layers import Depths
from batchfit._plan.pure.model_shape import ModelShape
from batchfit._plan.pure.repetition import NotRepeatedError, Repetition
from batchfit.workload import Workload

log = logging.getLogger("batchfit")


@final
class DepthReaches:
    """What steps of a setting reach, at each depth; each is built once."""

    def __init__(
        self, whole: ModelShape, depths: Sequence[Depths], build: Callable[[ModelShape], Workload]
    ) -> None:
        self.whole = whole
        self.depths = depths
        self._build = build
        self._reaches: dict[int, StepReach] = {}
        self._shapes: list[ModelShape] = []  # kept, since their ids are the keys

    def of(self, shape: ModelShape) -> StepReach:
        if id(shape) not in self._reaches:
            self._shapes.append(shape)
            self._reaches[id(shape)] = reach_of(self._build(shape))
        return self._reaches[id(shape)]

    def counted(self, count: Callable[[StepReach], float]) -> float:
        """Something that every layer adds as much to, of the whole model."""
        if not self.depths:
            return count(self.of(self.whole))
        used = self.depths[0]
        few, some = count(self.of(used.shallow)), count(self.of(used.middle))
        return some + (some - few) * used.more


@final
@dataclass(frozen=True, slots=True)
class RepeatedTraces:
    """A source of traces that extends those of shallow models; `learned` is shared among like GPUs."""

    reaches: DepthReaches
    rules: CudaRules
    learned: list[tuple[Depths, Repetition]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    layout: ShardLayout | None = None  # how each model is spread over ranks, in a group of as many

    @property
    def steps(self) -> int:
        return self._plain.steps

    @property
    def may_retry(self) -> bool:
        return self._plain.may_retry

    @property
    def samples(self) -> int | None:
        return self._plain.samples

    @property
    def made_of(self) -> str:
        return self._plain.made_of

    @property
    def most_size(self) -> None:
        """A batch on the meta device has any size."""

    def caveats(self) -> tuple[str, ...]:
        return self._plain.caveats()

    def for_rules(self, rules: CudaRules) -> RepeatedTraces:
        """The same for a GPU with the same kernels."""
        return replace(self, rules=rules)

    def trace(self, size: int, *, steps: int, limit_s: float | None = None) -> Trace:
        for depths, learned in self.learned:
            middle = self._at(depths.middle).trace(size, steps=steps, limit_s=limit_s)
            try:
                return learned.extended(middle)
            except ShapeChangedError:
                continue
        if not self.refused:
            for depths in self.reaches.depths:
                found = self._learn(depths, size, steps, limit_s)
                if found is not None:
                    return found
        return self._at(self.reaches.whole).trace(size, steps=steps, limit_s=limit_s)

    def _learn(self, depths: Depths, size: int, steps: int, limit_s: float | None) -> Trace | None:
        """Traces of three depths, and what follows from them; None where layers do not repeat."""
        shallow, middle, deep = (self._at(one) for one in (depths.shallow, depths.middle, depths.deep))
        if not self.learned and not self.refused:
            shallow.trace(size, steps=1, limit_s=limit_s)  # what torch does once is not a layer's doing
        traces = (one.trace(size, steps=self.steps, limit_s=limit_s) for one in (shallow, middle, deep))
        try:
            learned = Repetition.learned(*traces, more=depths.more)
        except NotRepeatedError as error:
            log.info("%s: %s", self.reaches.whole.name, error)
            if depths is self.reaches.depths[-1]:
                self.refused.append(str(error))
            return None
        self.learned.append((depths, learned))
        return learned.extended(learned.middle.beginning(steps))

    @property
    def _plain(self) -> WorkloadTraces:
        depths = self.reaches.depths
        return self._at(depths[0].middle if depths else self.reaches.whole)

    def _at(self, shape: ModelShape) -> WorkloadTraces:
        reach = self.reaches.of(shape)
        changes = () if self.layout is None else changes_for(reach, self.layout)
        return WorkloadTraces(reach, self.rules, changes)
