"""`Microbatcher.backward`: forward and backward of each microbatch, weighed by its share of the batch.

Rules
- A pass is called and either ends or raises; what it leaves in gradients, buffers and generators is undone
  by `BatchRun`. It holds views of the batch, and no tensor of the user's once it has raised.
- The user's function is called in a frame that is gone before the next microbatch is touched.
- Losses stay on the device: nothing here synchronizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, final

import torch
from torch import nn

from batchfit._engine.batch.pure.pieces import Piece
from batchfit._engine.batch.split import Batch
from batchfit._engine.batch.structure import mapped
from batchfit._engine.device.oom_guard import run_guarded
from batchfit._engine.device.readings import recover
from batchfit._engine.sizing.interface import NO_WATCH
from batchfit._engine.workload.checks import check_loss, check_scalar, loss_and_outputs, without_graph
from batchfit._microbatch.batch_norm import ExactStatistics, norms_in
from batchfit._microbatch.batch_run import BatchRun, MicrobatchCall, PassTerms
from batchfit._microbatch.loss_check import LossCheck, LossInspection
from batchfit._microbatch.weights import Weighing
from batchfit._noise.gradient_noise import GradientNoise
from batchfit.results import StepReport


@final
class BackwardCall(MicrobatchCall):
    """One call of `Microbatcher.backward`."""

    kind = "backward"

    def __init__(
        self,
        fn: Callable[[Any], Any],
        *,
        scaler: Any,
        weighing: Weighing,
        loss_check: LossCheck,
        noise: GradientNoise | None,
    ) -> None:
        self.functions = {"fn": fn}
        self.scaler = scaler
        self._fn = fn
        self._weighing = weighing
        self._loss_check = loss_check
        self._noise = noise
        self._is_measured = False  # the last pass was prepared for `noise`

    def weigh(self, whole: Batch, plan: Sequence[Piece]) -> float:
        return self._weighing.shares(whole.micros(plan), plan)[1]

    def weigh_sample(self, micro: Any) -> float:
        return self._weighing.weight_of(micro)

    def prepare(
        self, whole: Batch, plan: Sequence[Piece], terms: PassTerms
    ) -> tuple[BackwardPass | None, float]:
        micros = whole.micros(plan)
        shares, weight = self._weighing.shares(micros, plan)
        if shares is None:
            return None, weight
        self._is_measured = self._noise is not None and terms.ranks.collectives == "none"
        if self._is_measured:
            terms = self._measured(plan, shares, terms)
        return BackwardPass(self._fn, whole, plan, micros, shares, terms), weight

    def _measured(self, plan: Sequence[Piece], shares: Sequence[float], terms: PassTerms) -> PassTerms:
        """With a watch that measures gradient noise: gradients are this rank's alone during a pass."""
        assert self._noise is not None
        sizes = [piece.size for piece in plan]
        parts = sizes if self._weighing.sums else shares
        factors = [part * terms.ranks.scale for part in parts]
        return replace(
            terms, watch=self._noise.watching(terms.watch or NO_WATCH, sizes, factors, self.scaler)
        )

    def report(self, run: BatchRun) -> StepReport:
        """What the call did, once the batch has run on all ranks."""
        events, is_skipped = run.context.events, run.outcome == "nothing"
        if is_skipped:
            self._weighing.check_zero()
            size = run.plan[0].size if run.plan else 0
            events.report("skipped", size, size, "the batch has no weight")
        if not run.has_run:
            return run.report()
        is_sorted = run.whole.trimmer is not None
        if self._is_measured and self._noise is not None:
            self._noise.keep(is_sorted=is_sorted)
        if len(run.plan) > 1:
            advice = self._weighing.advice(run.whole.batch, is_ragged=is_sorted)
            if advice:
                events.once("tokens", advice)
        return run.report()

    def needs_inspection(self, modules: Sequence[nn.Module]) -> bool:
        # BatchNorm without running statistics compares samples in every mode, which is said elsewhere.
        return self._loss_check.is_due(self._fn) and not any(
            layer.running_mean is None for layer in norms_in(modules)
        )

    def inspect(self, run: BatchRun, plan: Sequence[Piece]) -> None:
        whole, device = run.whole, run.context.device
        # A wrong cut is refused before `fn` gets any of it. One that does not fit is for the pass itself.
        note = "batchfit: raised while the batch was cut"
        failure = run_guarded(lambda: whole.micros(plan), device=device, last=False, note=lambda: note)
        if failure is not None:
            recover(device)
        self._loss_check.run(
            LossInspection(
                fn=self._fn,
                whole=whole,
                plan=plan,
                modules=run.opened.modules,
                compiled=run.sized is not None and run.sized.compiled,
                target=run.device,
                device=device,
                weigh=self._loss_check.weigh,
                check=run.check_collectives,
            )
        )


@final
class BackwardPass:
    """Forward and backward of each microbatch, each loss scaled by its share of the batch's weight.

    A microbatch whose loss has no graph (all its rows are masked) adds nothing, where another one has one.
    """

    in_loss = False

    def __init__(
        self,
        fn: Callable[[Any], Any],
        whole: Batch,
        plan: Sequence[Piece],
        micros: Sequence[Any],
        shares: Sequence[float],
        terms: PassTerms,
    ) -> None:
        # A microbatch without weight adds nothing to the result, and its mean would be 0/0.
        self._indices = [index for index, share in enumerate(shares) if share]
        self._micros = micros
        self._whole = whole
        self._plan = plan
        self._shares = shares
        self._fn = fn
        self._terms = terms
        self._check_graph = terms.check_graph
        self._parts: dict[int, Any] = {}  # outputs, by microbatch
        self._graphs = 0  # losses that had one
        self.at = -1
        self.count = len(self._indices)
        self.loss: Any = None
        self.outputs: Any = None

    def __call__(self) -> None:
        terms = self._terms
        total: torch.Tensor | None = None
        micros = [self._micros[index] for index in self._indices]
        with ExactStatistics(terms.layers) if terms.layers else nullcontext() as exact:
            for index, micro in zip(self._indices, self._whole.fed(micros, terms.device), strict=True):
                self.at = index
                if exact is not None:
                    exact.next_microbatch()
                terms.begin(index)
                if index == self._indices[-1]:
                    with terms.ranks.last_microbatch():
                        loss = self._run_one(micro, index)
                else:
                    loss = self._run_one(micro, index)
                terms.ended(index)
                del micro  # or it would stay allocated while the next one is copied
                total = loss if total is None else total + loss
            if exact is not None:
                exact.apply()
        if terms.ranks.is_alone and not self._graphs:
            raise without_graph("fn")
        if self._parts:
            self.outputs = self._joined()
        self.loss = terms.end_with(total)

    def _run_one(self, micro: Any, index: int) -> torch.Tensor:
        terms = self._terms
        loss, outputs = loss_and_outputs(self._fn(micro))
        # Other ranks wait for the collectives of this backward, so there must be one.
        collectives = terms.ranks.collectives
        sends = collectives == "every" or (collectives == "last" and index == self._indices[-1])
        (check_loss if sends else check_scalar)(loss, "fn")
        if outputs is not None:
            self._parts[index] = mapped(outputs, detached)
        self._graphs += loss.requires_grad
        check_graph = self._check_graph
        if loss.requires_grad:
            self._check_graph = None
        return terms.backward(loss, share=self._shares[index], check_graph=check_graph)

    def _joined(self) -> Any:
        """The outputs of all microbatches, in order; microbatches without weight run now, for theirs."""
        left = [index for index in range(len(self._plan)) if index not in self._indices]
        if left and self._terms.ranks.collectives == "every":
            raise ValueError(
                f"fn must return the loss alone where {len(left)} of {len(self._plan)} microbatches have no "
                "weight under FSDP2, not (loss, outputs): they are not run"
            )
        with torch.no_grad():
            for index in left:
                (micro,) = self._whole.fed([self._micros[index]], self._terms.device)
                self._parts[index] = mapped(loss_and_outputs(self._fn(micro))[1], detached)
        if len(self._parts) < len(self._plan):
            raise ValueError(
                f"fn must return (loss, outputs) for all {len(self._plan)} microbatches or for none, not for "
                f"{len(self._parts)}"
            )
        parts = [self._parts.pop(index) for index in range(len(self._plan))]
        return self._whole.joined(parts, self._plan, "fn's outputs")


def detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf
