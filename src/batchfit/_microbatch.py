"""Microbatcher: a batch of any size, in pieces that fit, with the gradients of the whole.

Rules
- `backward` adds to `.grad` what the full batch would have added. Weights of all microbatches are known before
  the first backward.
- A try that runs out of memory is taken back as a whole (`Rewind`) and done again smaller: a retried call ends
  as one that began at that size. The error is handled outside `except`, with no frame of the user's alive.
- Nothing waits for the device in the steady state: no `.item()`, no `empty_cache`, one reading a batch.
- A size that ran is never tried again for a batch that it served; what was learned is for the next one.
- Where splitting would change the result, that is said (BatchNorm) or refused (collectives, captured graphs).
"""

from __future__ import annotations

import importlib
import logging
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, cast, final

import torch
from torch import nn

from batchfit._decide.split import Bounds, Event, EventKind, Learned, Piece, Shape, balanced, equal, pieces
from batchfit._decide.units import format_bytes, parse_bytes
from batchfit._microbatch_tries import BackwardTry, CachedTry, MapTry, loss_ratio
from batchfit._torch import attempt as trying
from batchfit._torch.attempt import Failure, Reading, attempt, recover
from batchfit._torch.batch_parts import Split, Whole, joined
from batchfit._torch.batches import takes_arguments
from batchfit._torch.device import CudaDevice, Device, check_budget, resolve_device
from batchfit._torch.norms import ExactStatistics, batch_norms
from batchfit._torch.parallel import is_parallel
from batchfit._torch.rewind import Buffers, Rewind, leaves_of
from batchfit.errors import BatchfitError, NothingFitsError
from batchfit.results import StepReport

log = logging.getLogger("batchfit")

Weight = Callable[[Any], Any] | str
_STATE_VERSION = 1


@dataclass(slots=True)
class _Call:
    """One batch on its way through a call."""

    whole: Whole
    size: int
    bounds: Bounds
    held_bytes: int | None
    compiled: bool
    retries: int = 0
    peak_bytes: int | None = None
    same_again: bool = False  # whether this size was already tried a second time

    @property
    def total(self) -> int:
        return self.whole.length


@final
class Microbatcher:
    """Runs a batch in microbatches that fit, exactly; learns which sizes do.

        mb = Microbatcher(model)
        for batch in loader:
            optimizer.zero_grad()
            report = mb.backward(lambda micro: loss_fn(model, micro), batch)   # batch of any size
            mb.step(optimizer)

    Pass every model (or parameter) that gets gradients in `backward`: what is not passed is not put back when
    a try runs out of memory.

    Args:
        models: the modules that `fn` runs; single parameters too (a learned temperature).
        weight: what a microbatch counts in the batch's mean: `weight(micro) -> number`, or the name of a part
            of the batch whose sum it is ("attention_mask"). Evaluated where the batch is, before anything
            moves: keep batches on the host, or each batch waits for the device once. Default: its samples.
        split: `split(batch, sizes) -> list of microbatches`, for batches that cannot be cut by rows.
        microbatch_size: the most samples a microbatch may have; default: the whole batch.
        budget: bytes that the program may use ("20GiB"). Enforced while a size is new, trusted afterwards.
        reduction: what `fn` returns for a microbatch, the "mean" or the "sum" of its losses.
        on_zero_weight: "raise" or "skip" a batch whose weight is zero.
        batch_norm: "warn" once, "error", "exact" (running statistics of the full batch; normalisation is still
            that of each microbatch), or "ignore".
        on_event: called with each `Event` (a size changed, and why), for TensorBoard or W&B.
        device: where microbatches go and whose memory counts; default: where the models are.
    """

    def __init__(
        self,
        *models: nn.Module | torch.Tensor,
        weight: Weight | None = None,
        split: Split | None = None,
        microbatch_size: int | None = None,
        budget: int | str | None = None,
        reduction: Literal["mean", "sum"] = "mean",
        on_zero_weight: Literal["raise", "skip"] = "raise",
        batch_norm: Literal["warn", "error", "exact", "ignore"] = "warn",
        on_event: Callable[[Event], object] | None = None,
        device: str | torch.device | Device | None = None,
    ) -> None:
        _check_models(models)
        _check_options(weight, split, microbatch_size, reduction, on_zero_weight, batch_norm, on_event)
        self._models = models
        self._weight = weight
        self._split = split
        self._most = microbatch_size
        self._reduction = reduction
        self._skips = on_zero_weight == "skip"
        self._batch_norm = batch_norm
        self._on_event = on_event
        self._device = resolve_device(device, near=models)
        self._target = _target(device, models)
        self._budget = None if budget is None else parse_bytes(budget)
        if self._budget is not None:
            check_budget(self._device, self._budget)
        self._limit_bytes: int | None = None
        self._learned = Learned()
        self._buffers = Buffers()
        self._generators = _generators(models)
        self._compiled = any(_is_compiled(module) for module in leaves_of(models)[2])
        self._last: tuple[Shape, int, int] | None = None
        self._retries_seen: int | None = None
        self._peaks: dict[tuple[Shape, int], int] = {}
        self._compiled_sizes: dict[str, set[int]] = {}
        self._said: set[str] = set()

    # --- the verbs

    def backward(self, fn: Callable[[Any], Any], batch: Any, *, scaler: Any = None) -> StepReport:
        """Forward and backward of the whole batch, in microbatches; adds to `.grad` what the batch would.

            report = mb.backward(lambda micro: criterion(model(micro["x"]), micro["y"]), batch)

        `fn(micro)` gets a part of the batch, on the device, and returns its loss. It may be called again with
        the same samples: after an out-of-memory the whole batch begins anew, with gradients, random numbers,
        buffers and scaler where they were. Hooks on parameters see the gradient of each microbatch.
        """
        _check_callable(fn, "fn")
        call, leaves, tables, modules = self._open(batch, "backward", fn)
        with self._rewinding(leaves, tables, scaler) as rewind, self._statistics(call, modules) as exact:

            def make(plan: Sequence[Piece]) -> BackwardTry | None:
                micros = call.whole.micros(plan)
                shares = self._shares(micros, plan)
                if shares is None:
                    return None
                return BackwardTry(
                    fn, micros, shares, device=self._target, rewind=rewind, scaler=scaler, exact=exact
                )

            sizes, done = self._until_it_fits(call, modules, rewind, make)
            if done is None:
                rewind.keep()
                return self._skipped(call)
        if len(sizes) > 1 and call.whole.can_take:
            self._check_reduction(fn, call.whole, tables)
        return StepReport(done.loss, sizes, call.retries, call.peak_bytes)

    def backward_cached(
        self,
        encode: Callable[[Any], Any],
        loss_fn: Callable[[Any], Any],
        batch: Any,
        *,
        scaler: Any = None,
    ) -> StepReport:
        """A loss over the whole batch's representations (in-batch negatives), the encoder in chunks: exact.

            report = mb.backward_cached(lambda micro: encoder(micro), contrastive_loss, batch)

        `encode(micro)` returns tensors with one row a sample, alone or in tuples and dicts; `loss_fn` gets
        those of the whole batch. More than one chunk costs one forward more, without a graph; dropout is the
        same in both.
        """
        _check_callable(encode, "encode")
        _check_callable(loss_fn, "loss_fn")
        call, leaves, tables, modules = self._open(batch, "cached", encode)
        with self._rewinding(leaves, tables, scaler) as rewind, self._statistics(call, modules) as exact:

            def make(plan: Sequence[Piece]) -> CachedTry:
                return CachedTry(
                    encode,
                    loss_fn,
                    call.whole.micros(plan),
                    [piece.count for piece in plan],
                    device=self._target,
                    rewind=rewind,
                    scaler=scaler,
                    exact=exact if len(plan) > 1 else None,
                )

            sizes, done = self._until_it_fits(call, modules, rewind, make)
        assert done is not None
        return StepReport(done.loss, sizes, call.retries, call.peak_bytes)

    def map(self, fn: Callable[[Any], Any], batch: Any) -> Any:
        """`fn` of each microbatch under `torch.inference_mode`, the outputs joined in the batch's order.

            logits = mb.map(model, batch)

        The mode of the model is yours to set (`model.eval()`). Tensors are joined along their first dimension,
        in any structure; lists have one item a sample. After an out-of-memory only what has not been done is
        done again, so nothing is counted twice. Sizes are learned apart from those of training.
        """
        _check_callable(fn, "fn")
        call, _, tables, modules = self._open(batch, "map", fn)
        outputs: list[Any] = []
        counts: list[int] = []
        with torch.inference_mode(), self._limited(call):
            while sum(counts) < call.total:
                sizes = self._sizes(call, call.total - sum(counts))
                micros = self._left(call.whole, counts, sizes)
                run = MapTry(
                    fn,
                    micros,
                    sizes,
                    device=self._target,
                    mark=lambda: self._mark(tables),
                    outputs=outputs,
                    counts=counts,
                )
                failure = self._one_try(call, run)
                rewind = run.rewind
                del run, micros
                if failure is not None:
                    self._shrink(call, failure, rewind)
            self._finish(call)
            return self._joined(outputs, counts)

    def step(
        self, optimizer: Any, *, scaler: Any = None, clip_norm: float | None = None, rollback: bool = False
    ) -> Any:
        """An optimizer step that running out of memory cannot leave half done; returns the gradient norm."""
        stepping: Any = importlib.import_module("batchfit._torch.stepping")
        return stepping.step(optimizer, scaler=scaler, clip_norm=clip_norm, rollback=rollback)

    # --- what was learned

    def state_dict(self) -> dict[str, Any]:
        """What was learned, as plain data."""
        return {"version": _STATE_VERSION, **self._circumstances(), "learned": self._learned.to_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what was learned; on another device or budget it is learned anew, and that is logged."""
        if not isinstance(state, Mapping) or state.get("version") != _STATE_VERSION:
            raise ValueError(f"state must be what state_dict() returned, not {state!r:.80}")
        now = self._circumstances()
        changed = [name for name in ("device", "total_bytes", "budget_bytes") if state.get(name) != now[name]]
        if changed:
            why = ", ".join(f"{name} was {state.get(name)!r} and is {now[name]!r}" for name in changed)
            self._learned = Learned()
            self._tell("relearned", 0, 0, why)
            return
        if state.get("torch") != now["torch"]:
            log.info("sizes were learned with torch %s, and this is %s", state.get("torch"), now["torch"])
        self._learned = Learned.from_dict(state["learned"])

    def _circumstances(self) -> dict[str, Any]:
        name = self._device.name
        if isinstance(self._device, CudaDevice):
            name = torch.cuda.get_device_name(self._device.index)
        total = self._device.total_bytes() if name != "cpu" else None
        return {
            "device": name,
            "total_bytes": total,
            "budget_bytes": self._budget,
            "torch": str(torch.__version__),
        }

    # --- one call

    def _open(
        self, batch: Any, kind: str, fn: Any
    ) -> tuple[_Call, list[torch.Tensor], list[dict[str, Any]], list[nn.Module]]:
        leaves, tables, modules = leaves_of(self._models)
        if isinstance(self._device, CudaDevice) and torch.cuda.is_current_stream_capturing():
            raise BatchfitError(
                "a CUDA graph is being captured: it would replay one split for ever. Capture inside fn instead"
            )
        if self._reduction_hooks(leaves):
            self._say(
                "hooks",
                "a parameter has a post-accumulate-grad hook, which runs after each microbatch: an optimizer "
                "that steps there steps on parts of the batch's gradient",
            )
        whole = Whole.of(batch, split=self._split, mode=self._mode(kind))
        if whole.length == 0:
            raise ValueError("batch must hold at least one sample, not 0")
        for path, tensor in whole.leaves:
            if tensor.requires_grad and kind != "map":
                if not tensor.is_leaf:
                    raise ValueError(
                        f"batch must not carry a graph, and {path} requires grad and was computed: every "
                        "microbatch would run through that graph again. Detach it, or compute it in fn"
                    )
                leaves.append(tensor)
        reading = self._read()
        compiled = self._compiled or hasattr(fn, "_torchdynamo_orig_callable") or _is_compiled(fn)
        room = self._room(reading, fresh=self._learned.of(whole.shape) is None)
        bounds = self._learned.of(whole.shape) or Bounds()
        size = self._learned.begin(whole.shape, whole.length, room, compiled=compiled)
        size = min(size, self._most or size)
        if bounds.good and size > bounds.size > 0 and size > bounds.good and size < whole.length:
            self._tell("grown", bounds.size, size, f"after {bounds.calm} calm batches", shape=whole.shape)
        return _Call(whole, size, bounds, reading.held_bytes, compiled), leaves, tables, modules

    def _until_it_fits(
        self, call: _Call, modules: list[nn.Module], rewind: Rewind, make: Callable[[Sequence[Piece]], Any]
    ) -> tuple[tuple[int, ...], Any]:
        """Try smaller and smaller until the batch ran; (its sizes, the try that ran or None for no work)."""
        with self._limited(call):
            while True:
                sizes = self._sizes(call, call.total)
                if len(sizes) > 1:
                    self._mind_batch_norm(call, modules, sizes)
                versions = _versions(call.whole)
                run = make(pieces(sizes))
                if run is None:
                    return (), None
                failure = self._one_try(call, run)
                if failure is None:
                    self._finish(call)
                    return sizes, run
                del run
                if versions != _versions(call.whole):
                    raise BatchfitError(
                        "fn changed the batch in place and then ran out of memory: a second try would see the "
                        "changed batch. Clone what fn writes into"
                    )
                self._shrink(call, failure, rewind)

    def _one_try(self, call: _Call, run: Any) -> Failure | None:
        new = self._is_new(call)
        if new:
            trying.begin_peak(self._device)
        failure = attempt(
            run,
            device=self._device,
            last=call.size == 1,
            note=lambda: f"batchfit: raised in microbatch {run.at + 1}, of at most {call.size} samples",
        )
        if failure is None and new:
            call.peak_bytes = trying.peak(self._device)
        return failure

    def _shrink(self, call: _Call, failure: Failure, rewind: Rewind | None) -> None:
        """Take the try back, free what it left, and choose what to try next."""
        if rewind is not None:
            rewind.back()
        recover(self._device)
        call.retries += 1
        reading = self._read(after_failure=True)
        call.held_bytes = reading.held_bytes
        room = self._room(reading, fresh=True)
        if failure.fragmented and not call.same_again:
            call.same_again = True
            self._tell("retry", call.size, call.size, f"memory was fragmented ({failure.message})")
            return
        if call.size == 1:
            raise NothingFitsError(
                1,
                device=self._device.name,
                budget_bytes=self._limit(fresh=True),
                detail=f"batch of {call.total}, {call.whole.shape.key}; {failure.message}",
            )
        before = call.size
        call.bounds = call.bounds.ran_out(before, call.total, compiled=call.compiled)
        call.size = call.bounds.size
        most = call.bounds.most(room)
        if most is not None:
            call.size = max(1, min(call.size, most))
        call.same_again = False
        self._tell("shrunk", before, call.size, failure.message, shape=call.whole.shape)

    def _finish(self, call: _Call) -> None:
        """Learn from a batch that ran."""
        used = None
        if call.peak_bytes is not None and call.held_bytes is not None:
            used = max(0, call.peak_bytes - call.held_bytes)
        shape = call.whole.shape
        bounds = call.bounds.ran(call.size, call.total, used_bytes=used)
        self._learned.put(shape, bounds)
        self._last = (shape, call.size, call.total)
        if call.peak_bytes is not None:
            if len(self._peaks) > 1024:
                self._peaks.clear()
            self._peaks[shape, call.size] = call.peak_bytes
        else:
            call.peak_bytes = self._peaks.get((shape, call.size))

    def _is_new(self, call: _Call) -> bool:
        return call.retries > 0 or call.bounds.good < call.size

    def _sizes(self, call: _Call, left: int) -> tuple[int, ...]:
        """The plan for what is left of the batch; `call.size` becomes its largest piece."""
        sizes = equal(left, min(call.size, left)) if call.compiled else balanced(left, call.size)
        if left == call.total:
            call.size = sizes[0]
        if call.compiled:
            self._count_compiled(call.whole.shape, sizes)
        return sizes

    def _left(self, whole: Whole, counts: Sequence[int], sizes: Sequence[int]) -> list[Any]:
        if not whole.can_take:
            return whole.cut([*counts, *sizes])[len(counts) :]
        start = sum(counts)
        return [
            whole.take(slice(start + piece.samples.start, start + piece.samples.stop))
            for piece in pieces(tuple(sizes))
            if isinstance(piece.samples, slice)
        ]

    def _joined(self, outputs: list[Any], counts: list[int]) -> Any:
        answer: list[Any] = []
        failure = attempt(
            lambda: answer.append(joined(outputs, counts)),
            device=self._device,
            last=True,
            note=lambda: "batchfit: raised while outputs were joined",
        )
        if failure is None:
            return answer[0]
        recover(self._device)
        try:
            return joined(outputs, counts)
        except Exception as error:
            error.add_note(
                "batchfit: the outputs do not fit together. Let fn return them on the host (.cpu())"
            )
            raise

    # --- weights

    def _shares(self, micros: Sequence[Any], plan: Sequence[Piece]) -> list[float] | None:
        """The share of each microbatch in the batch's mean; None: the batch has no weight and is skipped."""
        if self._reduction == "sum":
            return [1.0] * len(plan)
        if self._weight is None:
            if len(plan) == 1:
                return [1.0]
            total = sum(piece.count for piece in plan)
            return [piece.count / total for piece in plan]
        weights = _numbers([self._weigh(micro) for micro in micros])
        whole = math.fsum(weights)
        if whole == 0:
            if self._skips:
                return None
            raise BatchfitError(
                "the weight of the batch is zero, so its mean is not defined. Leave such batches out, or pass "
                "on_zero_weight='skip'"
            )
        return [weight / whole for weight in weights]

    def _weigh(self, micro: Any) -> Any:
        if callable(self._weight):
            return self._weight(micro)
        name = cast(str, self._weight)
        part = micro[name] if isinstance(micro, Mapping) or not hasattr(micro, name) else getattr(micro, name)
        return part.sum() if hasattr(part, "sum") else sum(part)

    def _skipped(self, call: _Call) -> StepReport:
        self._tell("skipped", call.size, call.size, "the batch has no weight", shape=call.whole.shape)
        return StepReport(torch.zeros((), device=self._target), (), call.retries, None, skipped=True)

    def _check_reduction(self, fn: Callable[[Any], Any], whole: Whole, tables: list[dict[str, Any]]) -> None:
        """Once: does `fn` return what `reduction` says? A few samples, and the same samples twice."""
        if "reduction" in self._said:
            return
        self._said.add("reduction")
        expected = {"mean": 1.0, "sum": 2.0}
        ratio = None
        with self._mark(tables):
            try:
                ratio = loss_ratio(fn, whole, self._target)
            except Exception as error:  # noqa: BLE001 - a check that cannot be made says nothing
                log.debug("reduction could not be checked: %s", type(error).__name__)
        other = "sum" if self._reduction == "mean" else "mean"
        if ratio is not None and abs(ratio - expected[other]) < 0.1 < abs(ratio - expected[self._reduction]):
            log.warning(
                "fn's loss is %.3g times as large for every sample taken twice: it returns a %s, and "
                "reduction=%r would weigh microbatches wrongly. Pass reduction=%r",
                ratio,
                other,
                self._reduction,
                other,
            )

    # --- BatchNorm

    def _statistics(
        self, call: _Call, modules: list[nn.Module]
    ) -> AbstractContextManager[ExactStatistics | None]:
        if self._batch_norm != "exact":
            return nullcontext()
        return ExactStatistics(batch_norms(modules))

    def _mind_batch_norm(self, call: _Call, modules: list[nn.Module], sizes: tuple[int, ...]) -> None:
        if self._batch_norm in ("ignore", "exact") or "batch_norm" in self._said:
            return
        layers = batch_norms(modules)
        if not layers:
            return
        what = (
            f"{len(layers)} BatchNorm layers see microbatches of {min(sizes)} to {max(sizes)} instead of the "
            f"batch of {call.total}"
        )
        if self._batch_norm == "error":
            raise BatchfitError(
                f"{what}, which changes the result. Use GroupNorm, a smaller batch, or batch_norm='exact' for "
                "exact running statistics"
            )
        self._say(
            "batch_norm",
            f"{what}: they normalise with other statistics and update theirs {len(sizes)} times a batch. "
            "Use GroupNorm, or batch_norm='exact' for exact running statistics",
        )

    # --- the device

    def _mode(self, kind: str) -> str:
        training = any(isinstance(model, nn.Module) and model.training for model in self._models)
        mode = f"{kind},{'train' if training else 'eval'}"
        place = "cpu" if self._target is None else self._target.type
        if torch.is_autocast_enabled(place):
            mode += f",{torch.get_autocast_dtype(place)}"
        return mode

    def _read(self, *, after_failure: bool = False) -> Reading:
        """One reading a batch; allocation retries since the last one lower the size of that shape."""
        reading = trying.read(self._device)
        seen, self._retries_seen = self._retries_seen, reading.retries
        if self._last is None or after_failure or seen is None or reading.retries is None:
            return reading
        shape, size, total = self._last
        bounds = self._learned.of(shape)
        if bounds is None:
            return reading
        if reading.retries > seen:
            lower = bounds.thrashed(size, total, compiled=self._compiled)
            if lower.size != bounds.size and lower.bad == size:
                why = f"allocations were retried ({reading.retries - seen} times)"
                self._tell("shrunk", size, lower.size, why, shape=shape)
            self._learned.put(shape, lower)
        elif bounds.thrash:
            self._learned.put(shape, bounds.settled())
        return reading

    def _limit(self, *, fresh: bool) -> int:
        """Bytes that may be used; asking the device takes a while, so the answer is kept."""
        if fresh or self._limit_bytes is None or not isinstance(self._device, CudaDevice):
            free = self._device.budget_bytes()
            self._limit_bytes = free if self._budget is None else min(free, self._budget)
        return self._limit_bytes

    def _room(self, reading: Reading, *, fresh: bool) -> int | None:
        return None if reading.held_bytes is None else self._limit(fresh=fresh) - reading.held_bytes

    def _limited(self, call: _Call) -> AbstractContextManager[None]:
        """A size that never ran does so under the budget; one that did is trusted."""
        if self._budget is None or not self._is_new(call):
            return nullcontext()
        return self._device.limit(min(self._budget, self._device.total_bytes()))

    # --- going back

    def _rewinding(self, leaves: list[torch.Tensor], tables: list[dict[str, Any]], scaler: Any) -> Rewind:
        self._take_buffers(tables)
        return Rewind(leaves, buffers=self._buffers, scaler=scaler, generators=self._generators)

    def _mark(self, tables: list[dict[str, Any]]) -> Rewind:
        self._take_buffers(tables)
        return Rewind((), buffers=self._buffers, generators=self._generators)

    def _take_buffers(self, tables: list[dict[str, Any]]) -> None:
        failure = attempt(
            lambda: self._buffers.take(tables),
            device=self._device,
            last=False,
            note=lambda: "batchfit: raised while the models' buffers were copied",
        )
        if failure is not None:
            recover(self._device)
            self._buffers.take(tables)

    # --- telling

    def _tell(
        self, kind: EventKind, before: int, after: int, why: str, *, shape: Shape | None = None
    ) -> None:
        peak = self._peaks.get((shape, before)) if shape is not None else None
        event = Event(kind, before, after, why, peak, shape.key if shape is not None else "")
        log.log(logging.INFO if kind in ("grown", "skipped") else logging.WARNING, "%s", event)
        if self._on_event is not None:
            self._on_event(event)

    def _say(self, topic: str, text: str) -> None:
        if topic not in self._said:
            self._said.add(topic)
            log.warning("%s", text)

    def _reduction_hooks(self, leaves: Sequence[torch.Tensor]) -> bool:
        return "hooks" not in self._said and any(
            getattr(leaf, "_post_accumulate_grad_hooks", None) for leaf in leaves
        )

    def _count_compiled(self, shape: Shape, sizes: Sequence[int]) -> None:
        seen = self._compiled_sizes.setdefault(shape.key, set())
        seen.update(sizes)
        limit = _recompile_limit()
        if limit is not None and len(seen) >= limit - 1:
            self._say(
                "compiled",
                f"{len(seen)} microbatch sizes have been compiled, and torch gives up at {limit}: then the "
                "model runs uncompiled. Keep the batch size the same, or pass microbatch_size",
            )

    def __repr__(self) -> str:
        budget = "" if self._budget is None else f", budget {format_bytes(self._budget)}"
        return f"Microbatcher({len(self._models)} models on {self._device.name}{budget}, {len(self._learned)} shapes)"


def _versions(whole: Whole) -> list[int]:
    """Counts of in-place writes: a batch that was written into cannot be tried again."""
    return [tensor._version for _, tensor in whole.leaves if not tensor.is_inference()]


def _numbers(weights: Sequence[Any]) -> list[float]:
    """As plain numbers; those on a device are fetched together."""
    if weights and all(isinstance(one, torch.Tensor) for one in weights):
        values = torch.stack([one.detach().double().reshape(()) for one in weights]).tolist()
    else:
        values = [float(one) for one in weights]
    for value in values:
        if not value >= 0 or math.isinf(value):
            raise ValueError(f"weight must be a finite number of at least 0, not {value!r}")
    return cast(list[float], values)


def _target(device: Any, models: Sequence[Any]) -> torch.device | None:
    """Where microbatches go."""
    if isinstance(device, str | torch.device):
        wanted = torch.device(device)
        if wanted.type == "cuda" and wanted.index is None:
            return torch.device("cuda", torch.cuda.current_device())
        return wanted
    for model in models:
        tensors = [model] if isinstance(model, torch.Tensor) else [*model.parameters(), *model.buffers()]
        for tensor in tensors:
            if not tensor.is_meta:
                return tensor.device
    return None


def _generators(models: Sequence[Any]) -> list[object]:
    """Generators that modules keep as attributes."""
    found: dict[int, object] = {}
    for module in leaves_of(models)[2]:
        for value in vars(module).values():
            if isinstance(value, torch.Generator):
                found[id(value)] = value
    return list(found.values())


def _is_compiled(thing: Any) -> bool:
    return hasattr(thing, "_orig_mod") or getattr(thing, "_compiled_call_impl", None) is not None


def _recompile_limit() -> int | None:
    config: Any = getattr(sys.modules.get("torch._dynamo"), "config", None)
    limit = getattr(config, "recompile_limit", getattr(config, "cache_size_limit", None))
    return limit if isinstance(limit, int) else None


def _check_models(models: Sequence[Any]) -> None:
    if not models:
        raise TypeError("models must be at least one module, not none")
    for model in models:
        if not isinstance(model, nn.Module | torch.Tensor):
            raise TypeError(f"models must be modules or parameters, not {model!r:.80}")
        if isinstance(model, torch.Tensor) and not model.is_leaf:
            raise TypeError("models must be modules or parameters, not a tensor that was computed")
    distributed: Any = sys.modules.get("torch.distributed.tensor")
    sharded = getattr(distributed, "DTensor", None)
    leaves, _, modules = leaves_of(models)
    for module in modules:
        if is_parallel(module):
            raise BatchfitError(
                f"models must not be wrapped for several ranks so far, and one is {type(module).__name__}: one "
                "rank alone that tries again would leave the others waiting"
            )
        if isinstance(module, nn.SyncBatchNorm):
            raise BatchfitError(
                "SyncBatchNorm talks to the other ranks in forward: one rank alone that tries again would leave "
                "them waiting. Use BatchNorm or GroupNorm"
            )
    if sharded is not None and any(isinstance(leaf, sharded) for leaf in leaves):
        raise BatchfitError(
            "parameters are spread over ranks (DTensor): one rank alone that tries again would leave the others "
            "waiting"
        )


def _check_options(
    weight: Any, split: Any, size: Any, reduction: Any, on_zero: Any, batch_norm: Any, on_event: Any
) -> None:
    if weight is not None and not isinstance(weight, str) and not callable(weight):
        raise TypeError(f"weight must be a callable, the name of a part of the batch or None, not {weight!r}")
    for name, value in (("split", split), ("on_event", on_event)):
        if value is not None and not callable(value):
            raise TypeError(f"{name} must be a callable or None, not {value!r}")
    if size is not None and (isinstance(size, bool) or not isinstance(size, int)):
        raise TypeError(f"microbatch_size must be a positive integer or None, not {size!r}")
    if size is not None and size < 1:
        raise ValueError(f"microbatch_size must be a positive integer or None, not {size!r}")
    for name, value, allowed in (
        ("reduction", reduction, ("mean", "sum")),
        ("on_zero_weight", on_zero, ("raise", "skip")),
        ("batch_norm", batch_norm, ("warn", "error", "exact", "ignore")),
    ):
        if value not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, not {value!r}")
    if reduction == "sum" and weight is not None:
        raise ValueError("weight must be None where reduction is 'sum', which needs none")


def _check_callable(fn: Any, name: str) -> None:
    if not callable(fn) or not takes_arguments(fn, 1):
        raise TypeError(f"{name} must be a callable {name}(micro), not {fn!r}")
