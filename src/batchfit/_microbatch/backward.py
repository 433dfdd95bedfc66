"""`Microbatcher.backward`: forward and backward of each microbatch, weighed by its share of the batch.

Rules
- All shares are known before the first backward, and add up to one: what the microbatches add to the
  gradients is then what the batch would have added. Weights on a device are fetched together: at most one
  synchronization per batch, and none for host batches.
- A pass is called and either ends or raises; what it leaves in gradients, buffers and generators is undone
  by `BatchRun`. It holds views of the batch, and no tensor of the user's once it has raised.
- The user's function is called in a frame that is gone before the next microbatch is touched.
- Losses stay on the device: nothing else here synchronizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Final, Literal, cast, final

import torch

from batchfit._engine.batch.pure.microbatch import Microbatch
from batchfit._engine.batch.split import Batch
from batchfit._engine.batch.structure import mapped
from batchfit._engine.device.oom import recover, run_guarded
from batchfit._engine.device.tensors import check_loss, check_scalar, loss_and_outputs, without_graph
from batchfit._engine.sizing.interface import NO_WATCH
from batchfit._engine.torch_private.modules import BatchNorm
from batchfit._microbatch.batch_norm import ExactStatistics
from batchfit._microbatch.batch_run import BatchRun, MicrobatchCall, PassTerms
from batchfit._microbatch.context import loss_key
from batchfit._microbatch.loss_check import LossCheck, LossInspection
from batchfit._noise.gradient_noise import GradientNoise
from batchfit.errors import BatchfitError
from batchfit.results import StepReport

_IGNORED: Final = -100  # the label that torch's and Hugging Face's losses leave out
# How many batches are checked for it: to read labels on a device synchronizes.
_HOST_CHECKS: Final = 8
_DEVICE_CHECKS: Final = 2

Weight = Callable[[Any], Any] | str


@final
class Weighing:
    """How the microbatches of one Microbatcher are weighed."""

    def __init__(self, weight: Weight | None, *, reduction: Literal["mean", "sum"], skips: bool) -> None:
        self._weight = weight
        self.sums = reduction == "sum"  # losses are sums over samples, not means
        self._skips = skips
        self._checks = 0  # of `advice`

    def advice(self, batch: Any, *, is_ragged: bool) -> str:
        """Advice on the first batches that were cut; "" for none."""
        if self._weight is not None or self.sums or self._checks > _HOST_CHECKS:
            return ""
        self._checks += 1
        return _advice_on_tokens(batch, is_ragged=is_ragged, checks=self._checks)

    def shares(self, micros: Sequence[Any], plan: Sequence[Microbatch]) -> tuple[list[float] | None, float]:
        """The share of each microbatch in the batch's mean, None where it has no weight; and that weight."""
        if self.sums or (self._weight is None and len(plan) == 1):
            return [1.0] * len(plan), float(sum(microbatch.size for microbatch in plan))
        if self._weight is None:
            weights = [float(microbatch.size) for microbatch in plan]
        else:
            weights = _numbers([self._weigh(micro) for micro in micros])
        total = math.fsum(weights)
        if total == 0:
            return None, 0.0
        return [weight / total for weight in weights], total

    def weight_of(self, micro: Any) -> float:
        """What a microbatch of one sample counts."""
        return self.shares([micro], [Microbatch(slice(0, 1), 1)])[1]

    def check_zero(self) -> None:
        """A batch has no weight, on any rank: an error unless such batches are skipped."""
        if not self._skips:
            raise BatchfitError(
                "the weight of the batch is zero, so its mean is not defined. Leave such batches out, or "
                "pass on_zero_weight='skip'"
            )

    def _weigh(self, micro: Any) -> Any:
        if callable(self._weight):
            return self._weight(micro)
        name = cast(str, self._weight)
        try:
            part = micro[name] if hasattr(micro, "keys") else getattr(micro, name)
        except (KeyError, AttributeError):
            parts = f" ({', '.join(map(str, micro))})" if hasattr(micro, "keys") else ""
            raise ValueError(f"weight must name a part of the batch{parts}, not {name!r}") from None
        return part.sum() if hasattr(part, "sum") else sum(part)


def _numbers(weights: Sequence[Any]) -> list[float]:
    """As plain numbers; those on a device are fetched together."""
    for one in weights:
        if isinstance(one, torch.Tensor) and one.numel() != 1:
            raise ValueError(f"weight must be one number, not a tensor of shape {tuple(one.shape)}")
    if all(isinstance(one, torch.Tensor) for one in weights):
        values = torch.stack([one.detach().double().reshape(()) for one in weights]).tolist()
    else:
        values = [_number(one) for one in weights]
    for value in values:
        if not 0 <= value < math.inf:
            raise ValueError(f"weight must be a finite number of at least 0, not {value!r}")
    return cast(list[float], values)


def _number(weight: Any) -> float:
    try:
        return float(weight)
    except (TypeError, ValueError):
        raise TypeError(f"weight must be a number, not {weight!r:.80}") from None


def _advice_on_tokens(batch: Any, *, is_ragged: bool, checks: int) -> str:
    """For samples that count alike and a loss that is likely a mean over tokens."""
    labels: Any = batch.get("labels") if hasattr(batch, "get") else getattr(batch, "labels", None)
    shown = "batches are ragged"
    has_rows = isinstance(labels, torch.Tensor) and labels.dim() > 0
    if has_rows and checks <= (_HOST_CHECKS if labels.device.type == "cpu" else _DEVICE_CHECKS):
        if bool((labels == _IGNORED).any()):
            shown, is_ragged = f"labels hold {_IGNORED}", True
        elif labels.dim() == 1:  # one per sample
            is_ragged = False
    elif has_rows:
        return ""
    if not is_ragged:
        return ""
    plain, causal = (f"weight=lambda micro: (micro['labels']{at} != -100).sum()" for at in ("", "[:, 1:]"))
    both = f"{causal} for a causal model, {plain} for others"
    line = plain if has_rows and labels.dim() == 1 else both
    return (
        f"microbatches are weighted by their samples, but {shown}: if the loss is a mean over tokens, as "
        f"Hugging Face's is, the gradients are not those of the batch. Pass {line}"
    )


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
        loss_check: LossCheck | None,
        noise: GradientNoise | None,
    ) -> None:
        self.functions = {"fn": fn}
        self.scaler = scaler
        self._fn = fn
        self._weighing = weighing
        self._loss_check = loss_check
        self._noise = noise
        self._is_measured = False  # the last pass was prepared for `noise`

    def weigh(self, whole: Batch, plan: Sequence[Microbatch]) -> float:
        return self._weighing.shares(whole.micros(plan), plan)[1]

    def weigh_sample(self, micro: Any) -> float:
        return self._weighing.weight_of(micro)

    def prepare(
        self, whole: Batch, plan: Sequence[Microbatch], terms: PassTerms
    ) -> tuple[BackwardPass | None, float]:
        micros = whole.micros(plan)
        shares, weight = self._weighing.shares(micros, plan)
        if shares is None:
            return None, weight
        self._is_measured = self._noise is not None and terms.run.ranks.collectives == "none"
        if self._is_measured:
            terms = self._measured(plan, shares, terms)
        return BackwardPass(self._fn, whole, plan, micros, shares, terms), weight

    def _measured(self, plan: Sequence[Microbatch], shares: Sequence[float], terms: PassTerms) -> PassTerms:
        """With a watch that measures gradient noise: gradients are this rank's alone during a pass."""
        assert self._noise is not None
        sizes = [microbatch.size for microbatch in plan]
        parts = sizes if self._weighing.sums else shares
        factors = [part * terms.run.ranks.scale for part in parts]
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

    def needs_inspection(self, norms: Sequence[BatchNorm]) -> bool:
        # BatchNorm without running statistics compares samples in every mode, which is said elsewhere.
        if self._loss_check is None or loss_key(self._fn) in self._loss_check.settled:
            return False
        return not any(layer.running_mean is None for layer in norms)

    def inspect(self, run: BatchRun, plan: Sequence[Microbatch]) -> None:
        whole, device = run.whole, run.context.device
        # A wrong cut is refused before `fn` gets any of it. One that does not fit is for the pass itself.
        note = "batchfit: raised while the batch was cut"
        failure = run_guarded(lambda: whole.micros(plan), device=device, last=False, note=lambda: note)
        if failure is not None:
            recover(device)
        assert self._loss_check is not None
        self._loss_check.run(
            LossInspection(
                fn=self._fn,
                whole=whole,
                plan=plan,
                modules=run.opened.modules,
                compiled=run.sized is not None and run.sized.compiled,
                target=run.device,
                device=device,
                weigh=None if self._weighing.sums else self._weighing.shares,
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
        plan: Sequence[Microbatch],
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
            for index, micro in zip(self._indices, self._whole.fed(micros, terms.run.device), strict=True):
                self.at = index
                if exact is not None:
                    exact.next_microbatch()
                terms.begin(index)
                if index == self._indices[-1]:
                    with terms.run.ranks.last_microbatch():
                        loss = self._run_one(micro, index)
                else:
                    loss = self._run_one(micro, index)
                terms.ended(index)
                del micro  # or it would stay allocated while the next one is copied
                total = loss if total is None else total + loss
            if exact is not None:
                exact.apply()
        if terms.run.ranks.is_alone and not self._graphs:
            raise without_graph("fn")
        if self._parts:
            self.outputs = self._joined()
        self.loss = terms.end_with(total)

    def _run_one(self, micro: Any, index: int) -> torch.Tensor:
        terms = self._terms
        loss, outputs = loss_and_outputs(self._fn(micro))
        # Other ranks wait for the collectives of this backward, so there must be one.
        collectives = terms.run.ranks.collectives
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
        if left and self._terms.run.ranks.collectives == "every":
            raise ValueError(
                f"fn must return the loss alone where {len(left)} of {len(self._plan)} microbatches have no "
                "weight under FSDP2, not (loss, outputs): they are not run"
            )
        with torch.no_grad():
            for index in left:
                (micro,) = self._whole.fed([self._micros[index]], self._terms.run.device)
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
