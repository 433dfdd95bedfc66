"""Inspects the user's loss before a batch is cut for the first time: can it be cut at all?

Rules
- `fn` runs without gradients on a few samples of the batch, alone and joined; `_microbatch.pure.loss_kind`
  decides. How many samples does not depend on the microbatches: those may be of one sample.
- Modules are in eval mode meanwhile (the attribute; no method of theirs is called), since dropout moves a
  loss, and BatchNorm compares samples by itself, which is said elsewhere. Where `fn` cannot run so, only
  those two kinds of layers are. What is random all the same is read several times.
- An OOM here means fewer samples, never an error. Buffers and random numbers are the caller's to restore.
"""

from __future__ import annotations

import logging
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, Literal, final

import torch
from torch import nn

from batchfit._engine.batch.pure.microbatch import Microbatch
from batchfit._engine.batch.split import Batch
from batchfit._engine.device.device import Device
from batchfit._engine.device.oom import recover, run_guarded
from batchfit._engine.device.tensors import loss_and_outputs
from batchfit._engine.torch_private.dispatch import TorchDispatchMode
from batchfit._engine.torch_private.modules import BatchNorm, Dropout
from batchfit._microbatch.context import loss_key
from batchfit._microbatch.pure.loss_kind import (
    Join,
    Kind,
    LossReading,
    after,
    differs,
    finite,
    is_noisy,
    kind_of,
    scale_of,
)
from batchfit.errors import BatchfitError, CollectivesError

log = logging.getLogger("batchfit")

# How often a random loss is read: at first, and at most, where the difference may be noise.
_READINGS: Final = 8
_MOST_READINGS: Final = 32
# Samples in each of the two sets. More where few show nothing: losses of zero (a margin that all samples
# keep, no two samples of one class), or no number (no label counts).
_FEW: Final = 2
_MORE: Final = 8
# As far as shares of two sets may be apart and still count the same: they are exact numbers.
_SAME_SHARE: Final = 1e-6
# Losses over labels, and the number that torch gives to the reduction "mean".
_LABEL_LOSSES: Final = (torch.ops.aten.nll_loss_forward.default, torch.ops.aten.nll_loss2d_forward.default)
_MEAN: Final = 1
# Batches that are inspected where nothing is seen, and functions that are remembered.
_MOST_INSPECTIONS: Final = 8
_MOST_FUNCTIONS: Final = 64

OnCompared = Literal["error", "warn", "ignore"]
Weigh = Callable[[Sequence[Any], Sequence[Microbatch]], tuple[Sequence[float] | None, float]]

# What to do, by what an inspection of the loss has shown.
_ADVICE: Final = {
    "compared": "Use backward_cached(encode, loss_fn, batch), which is exact for any loss over the outputs "
    "of a batch, or a batch that fits whole. compared='warn' cuts it all the same",
    "mean": "Pass reduction='mean'",
    "sum": "Pass reduction='sum'",
}


@final
@dataclass(frozen=True, slots=True)
class InspectedLoss:
    """What an inspection of the loss has shown."""

    kind: Kind
    samples: int = 0  # in both sets together
    losses: tuple[float, ...] = ()  # of the two sets, of both together, and of what was joined to them
    weighed: float | None = None  # what the weights make of the sets' losses, where that is another loss
    labels: tuple[float, float] | None = None  # that the sets' means count, where the weights are others


@final
class LossCheck:
    """Which functions have been inspected; warns of a loss or refuses it."""

    def __init__(self, *, reduction: str, on_compared: OnCompared, advice: Mapping[str, str] | None) -> None:
        self._reduction = reduction
        self._on_compared = on_compared
        self._advice = _checked(advice)
        self.settled: set[object] = set()  # functions that need no further inspection, by `loss_key`
        self._unclear: Counter[object] = Counter()  # inspections that have shown nothing, by function

    def run(self, inspection: LossInspection) -> None:
        """Inspect the loss; refuse one that cannot be cut, and warn of one that is not what it should be."""
        found, key = inspection.inspect(), loss_key(inspection.fn)
        if len(self.settled) + len(self._unclear) >= _MOST_FUNCTIONS:
            self.settled.clear()
            self._unclear.clear()
        self._unclear[key] += 1
        if found.kind != "unclear" or self._unclear[key] == _MOST_INSPECTIONS:
            del self._unclear[key]
            self.settled.add(key)
        if found.kind == "compared" and self._on_compared == "warn":
            log.warning("%s", self._why(found))
        elif found.kind == "compared":
            self.settled.remove(key)  # a later batch of the function is refused too
            raise BatchfitError(self._why(found))
        elif found.kind in ("mean", "sum") and found.kind != self._reduction:
            log.warning(
                "fn returns a %s over its samples, and with reduction=%r the gradients are not those of the "
                "batch. %s",
                found.kind,
                self._reduction,
                self._advice[found.kind],
            )
        elif found.weighed is not None:
            log.warning(
                "fn returns a mean, but not over what microbatches are weighted by: the loss of %d samples "
                "is %.4g, and the weights make %.4g of those of its two halves (%.4g and %.4g), so the "
                "gradients are not those of the batch. Pass weight=, which counts what the loss divides by",
                found.samples,
                found.losses[2],
                found.weighed,
                *found.losses[:2],
            )
        elif found.labels is not None:
            log.warning(
                "fn returns a mean over labels that count, and microbatches are weighted by something else: "
                "%g labels count in one half of %d samples and %g in the other, so the gradients are not "
                "those of the batch. Pass weight=, which counts what the loss divides by",
                found.labels[0],
                found.samples,
                found.labels[1],
            )

    def _why(self, found: InspectedLoss) -> str:
        more = f", and {found.losses[3]:.4g} where more samples are joined to them" * (len(found.losses) > 3)
        return (
            "fn's loss is neither a mean nor a sum over its samples, so microbatches do not add up to the "
            f"batch: {found.samples} samples give {found.losses[2]:.4g}, their two halves "
            f"{found.losses[0]:.4g} and {found.losses[1]:.4g}{more}. Samples are compared with each other "
            "(in-batch negatives, mined triplets), or some terms are means and others sums. "
            + self._advice["compared"]
        )


@final
@dataclass(frozen=True, slots=True)
class LossInspection:
    """Inspects one function with samples of one batch."""

    fn: Callable[[Any], Any]
    whole: Batch
    plan: Sequence[Microbatch]
    modules: Sequence[nn.Module]
    compiled: bool
    target: torch.device | None  # where microbatches go
    device: Device
    weigh: (
        Weigh | None
    )  # the shares of microbatches in the batch's mean, and its weight; None: losses are sums
    check: Callable[[], None]  # called after each call of `fn`: refuses one with collectives

    def inspect(self) -> InspectedLoss:
        """What kind of loss it is; "unclear" where nothing could be seen."""
        most = self.whole.length // 2
        few = min(_FEW, most)
        found = self._with(few)
        if found is None and few > 1:
            return self._with(1) or InspectedLoss("unclear")
        if found is not None and found.kind == "unclear" and most > few:
            found = self._with(min(_MORE, most)) or found
        return found or InspectedLoss("unclear")

    def _with(self, count: int) -> InspectedLoss | None:
        """Inspect two sets of `count` samples; None: out of memory."""
        for only in (None, (BatchNorm, Dropout)):
            found: list[InspectedLoss] = []
            try:
                with _in_eval_mode(self.modules, only), _eagerly(self.compiled), torch.no_grad():
                    failure = run_guarded(
                        lambda into=found: into.append(self._inspected(count)),  # type: ignore[misc]
                        device=self.device,
                        last=False,
                        note=lambda: "batchfit: raised while the loss of a few samples was inspected",
                    )
            except CollectivesError:
                raise
            except Exception as error:  # noqa: BLE001 - in eval mode, say, it returns no loss
                log.debug("the loss of a few samples could not be inspected: %r", error)
                continue
            finally:
                torch.clear_autocast_cache()
            if failure is not None:
                recover(self.device)
                return None
            return found[0]
        return InspectedLoss("unclear")

    def _inspected(self, count: int) -> InspectedLoss:
        sets = self._sets(count)
        values: dict[str, list[float]] = {name: [] for name in sets}
        counted: dict[str, float | None] = {}

        def read(times: int) -> list[Join]:
            for name, micro in sets.items():
                while len(values[name]) < times:
                    with _LabelCounts() as labels_of:
                        values[name].append(self._loss(micro(), alone=name.isdecimal()))
                    counted[name] = labels_of.only
            return finite(_joins({name: LossReading(tuple(found)) for name, found in values.items()}))

        values["ab"] = [self._loss(sets["ab"]()) for _ in range(2)]
        joins = read(_READINGS if LossReading(tuple(values["ab"])).is_random else 1)
        if is_noisy(joins):
            joins = read(_MOST_READINGS)
        means = {name: LossReading(tuple(found)).mean for name, found in values.items()}
        losses = tuple(means[name] for name in ("a", "b", "ab", "abab", "abc") if name in means)
        kind, weighed, labels = kind_of(joins), None, None
        if kind == "mean" and self.weigh is not None:
            shares, _ = self.weigh([sets["a"](), sets["b"]()], [Microbatch(slice(0, count), count)] * 2)
            if shares is not None and all(map(math.isfinite, losses[:3])):
                wanted = shares[0] * losses[0] + shares[1] * losses[1]
                weighed = (
                    wanted if differs(LossReading(tuple(values["ab"])), wanted, scale_of(joins)) else None
                )
            if shares is not None and weighed is None:
                labels = _other_labels(counted.get("a"), counted.get("b"), shares[0])
        return InspectedLoss(kind, 2 * count, losses, weighed, labels)

    def _sets(self, count: int) -> dict[str, Callable[[], Any]]:
        """Microbatches by name; made for each call, since `fn` may write into what it gets."""
        whole = self.whole
        if not whole.can_take:
            rest = min(2 * count, whole.length - 2 * count)
            cuts = {"a": (0, count), "b": (count, 2 * count), "ab": (0, 2 * count)}
            if rest:
                cuts.update(c=(2 * count, 2 * count + rest), abc=(0, 2 * count + rest))
            if count == _FEW:
                cuts.update({str(at): (at, at + 1) for at in range(2 * count)})
            return {name: _cutting(whole, *cut) for name, cut in cuts.items()}
        order: Sequence[int] = range(whole.length)
        length = None
        if whole.trimmer is not None:
            order = [at for microbatch in self.plan for at in microbatch.indices(whole.length)]
            length = max(microbatch.length or 0 for microbatch in self.plan)
        # From both ends: a batch may be sorted by class, and a miner needs two of one and one of another.
        a, b = order[:count], order[-count:]
        lists = {"a": a, "b": b, "ab": [*a, *b], "abab": [*a, *b, *a, *b], "aab": [*a, *a, *b]}
        if count == _FEW:
            lists.update({str(at): [at] for at in lists["ab"]})
        return {name: lambda one=one: whole.take(one, length) for name, one in lists.items()}  # type: ignore[misc]

    def _loss(self, micro: Any, *, alone: bool = False) -> float:
        """The loss; `alone`: one sample, which some losses cannot be of."""
        (micro,) = self.whole.fed([micro], self.target)
        try:
            found = float(loss_and_outputs(self.fn(micro))[0])
        except (ValueError, TypeError, IndexError, ZeroDivisionError):
            if not alone:
                raise
            found = math.nan
        self.check()
        return found


class _LabelCounts(TorchDispatchMode):  # type: ignore[no-untyped-call]  # its __init_subclass__
    """Sees what means over labels divide by: the labels that count, or their weights."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._totals: list[float | None] = []

    @property
    def only(self) -> float | None:
        """Of the one such mean; None where there is none, or several."""
        return self._totals[0] if len(self._totals) == 1 else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _LABEL_LOSSES:
            self._totals.append(float(out[1]) if args[3] == _MEAN else None)
        return out


def _other_labels(one: float | None, two: float | None, share: float) -> tuple[float, float] | None:
    """The labels that count in two sets, where the weights count something else.

    The losses of a new model say little: it loses about as much for each label.
    """
    if one is None or two is None or one + two <= 0:
        return None
    return (one, two) if abs(one / (one + two) - share) > _SAME_SHARE else None


def _checked(advice: Mapping[str, str] | None) -> Mapping[str, str]:
    """What warnings advise: ours, or what a framework has given in its place."""
    if advice is None:
        return _ADVICE
    if not isinstance(advice, Mapping):
        raise TypeError(f"advice must be a mapping or None, not {advice!r:.80}")
    for name, text in advice.items():
        if name not in _ADVICE or not isinstance(text, str):
            raise ValueError(f"advice must hold texts for {', '.join(_ADVICE)}, not {name!r}: {text!r:.80}")
    return {**_ADVICE, **advice}


def _joins(read: dict[str, LossReading]) -> list[Join]:
    a, b, ab = read["a"], read["b"], read["ab"]
    joins = [Join((a, b), ab)]
    if "abc" in read:
        joins.append(Join((ab, read["c"]), read["abc"]))
    if "abab" in read:
        joins.append(Join((ab, ab), read["abab"]))
        joins.append(Join((a, ab), read["aab"], None if ab.is_random else after(joins[0])))
    alone = tuple(found for name, found in read.items() if name.isdecimal())
    if alone:
        joins.append(Join(alone, ab))
    if alone and "abab" in read:
        joins.append(Join(alone * 2, read["abab"]))
    return joins


def _cutting(whole: Batch, begin: int, end: int) -> Callable[[], Any]:
    sizes = [begin, end - begin, whole.length - end]
    return lambda: whole.cut([size for size in sizes if size])[1 if begin else 0]


@contextmanager
def _in_eval_mode(modules: Sequence[nn.Module], only: tuple[type, ...] | None) -> Iterator[None]:
    """Inside, these modules (`only`: those of these kinds) do not train."""
    training = [one for one in modules if one.training and (only is None or isinstance(one, only))]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


def _eagerly(compiled: bool) -> AbstractContextManager[Any]:
    """Compiled code as it was written: or torch would compile it for sizes that are never needed."""
    if not compiled or "torch._dynamo" not in sys.modules:
        return nullcontext()
    eager: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return eager
