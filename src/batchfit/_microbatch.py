"""Microbatcher: a batch of any size, in pieces that fit, with the gradients of the whole.

Rules
- `backward` adds to `.grad` what the full batch would have added. The weights of all microbatches are known
  before the first backward.
- A try that runs out of memory is taken back as a whole (`Rewind`) and done again smaller: a retried call
  ends as one that began at that size. It is handled outside `except`, with no frame of the user's alive.
- Nothing waits for the device in the steady state: no `.item()`, no `empty_cache`, one reading a batch.
- A batch that ran is never repeated; what it taught (`Sizing`) is for the next one.
- Where splitting would change the result, that is said (BatchNorm) or refused (collectives, captured graphs).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple, final

import torch
from torch import nn
from torch.optim import Optimizer

from batchfit._decide.split import MicrobatchEvent, Piece
from batchfit._decide.units import parse_bytes
from batchfit._noise import GradientNoise
from batchfit._torch.attempt import attempt, recover, twice
from batchfit._torch.batch_parts import Split, Whole
from batchfit._torch.coverage import Coverage, modules_held
from batchfit._torch.device import CudaDevice, Device, check_budget, resolve_device
from batchfit._torch.in_step import Work, sample_of
from batchfit._torch.lockstep import Sharded, code_of
from batchfit._torch.lockstep import Turn as InStep
from batchfit._torch.norms import BatchNorm, batch_norms, norms_in, told
from batchfit._torch.packing import Packing, RaggedCall
from batchfit._torch.ragged import Lengths, attention_without_plans
from batchfit._torch.rewind import Buffers, Rewind, leaves_of
from batchfit._torch.shortage import owned_bytes
from batchfit._torch.sizing import Call, Sizing
from batchfit._torch.splittable import (
    check_callable,
    check_models,
    check_options,
    check_ragged,
    generators_of,
    is_compiled,
    where,
)
from batchfit._torch.stepping import step
from batchfit._torch.sync import Alone, Outcome, Together, together
from batchfit._torch.tries import (
    NOBODY,
    Around,
    BackwardTry,
    CachedTry,
    Judgement,
    MapTry,
    Planned,
    Watch,
    judge_loss,
)
from batchfit._torch.weighing import Weighing, Weight, warn_of_reduction
from batchfit.errors import BatchfitError
from batchfit.results import StepReport
from batchfit.workload import check_loss

log = logging.getLogger("batchfit")

Tables = list[dict[str, Any]]
AnyCall = Call | RaggedCall


class _Opened(NamedTuple):
    """A batch and the models, as a call finds them."""

    call: AnyCall | None  # None: this rank has no samples
    leaves: list[torch.Tensor]
    shared: int  # how many of the leaves are the models': the others are the batch's own
    tables: Tables
    modules: list[nn.Module]


@final
class Microbatcher:
    """Runs a batch in microbatches that fit, exactly; learns which sizes do.

        mb = Microbatcher(model)
        for batch in loader:
            optimizer.zero_grad()
            report = mb.backward(lambda micro: loss_fn(model, micro), batch)   # batch of any size
            mb.step(optimizer)

    Pass every model (or parameter) that gets gradients in `backward`: what is not passed could not be put
    back when a try runs out of memory, so that is an error. The device's peak counters are begun anew when a
    size runs for the first time.

    Args:
        models: the modules that `fn` runs; single parameters too (a learned temperature).
        weight: what a microbatch counts in the batch's mean: `weight(micro) -> number`, or the name of a part
            of the batch whose sum it is. Count what the loss divides by: for a causal language model
            `lambda micro: (micro["labels"][:, 1:] != -100).sum()`, since the first token has no target.
            Evaluated where the batch is, before anything moves: keep batches on the host, or each batch waits
            for the device once. Default: its samples.
        split: `split(batch, sizes) -> list of microbatches`, for batches that cannot be cut by rows.
        lengths: for padded batches: the name of a part (a mask such as "attention_mask", or the lengths), or
            a callable that takes the batch. Samples of about one length then share a microbatch and are
            trimmed to it, in few shapes. A mean over tokens needs `weight` too. Keep batches on the host,
            padded to multiples of 64.
        pad_keys, pad_dim, padding_side: the names of the padded parts, their padded dimension, and "left" or
            "right", where shapes and masks do not tell.
        microbatch_size: the most samples a microbatch may have; default: the whole batch.
        budget: bytes that the program may use ("20GiB"). Enforced while a size is new, trusted afterwards.
        reduction: what `fn` returns for a microbatch, the "mean" or the "sum" of its losses.
        on_zero_weight: "raise" or "skip" a batch whose weight is zero.
        batch_norm: "warn" once, "error", "exact" (running statistics of the full batch; normalisation is
            still that of each microbatch), or "ignore".
        on_event: called with each `MicrobatchEvent` (a size changed, and why), for TensorBoard or W&B.
        noise: a `GradientNoise` that measures the noise scale from the microbatches of `backward`.
        device: where microbatches go and whose memory counts; default: where the models are.
        sync: under DDP, "safe": an out-of-memory on any rank is survived; gradients are reduced once all
            ranks have theirs. "overlap": a batch whose sizes have run before is reduced while the last
            microbatch is in backward, and running out there is an error on all ranks.
        timeout_s: under DDP or FSDP2, how long this rank waits for others' work on a batch; default: 600.

    Models wrapped in DistributedDataParallel: each rank calls with its local batch, and gradients are those
    of one process with the joined batch, whatever the sizes. A rank without samples passes None. Models under
    FSDP2 too: all ranks then run as many microbatches, and do a batch again together.
    """

    def __init__(
        self,
        *models: nn.Module | torch.Tensor,
        weight: Weight | None = None,
        split: Split | None = None,
        lengths: str | Callable[[Any], Any] | None = None,
        pad_keys: Sequence[str | int] | None = None,
        pad_dim: int | None = None,
        padding_side: Literal["left", "right"] | None = None,
        microbatch_size: int | None = None,
        budget: int | str | None = None,
        reduction: Literal["mean", "sum"] = "mean",
        on_zero_weight: Literal["raise", "skip"] = "raise",
        batch_norm: Literal["warn", "error", "exact", "ignore"] = "warn",
        on_event: Callable[[MicrobatchEvent], object] | None = None,
        noise: GradientNoise | None = None,
        device: str | torch.device | Device | None = None,
        sync: Literal["safe", "overlap"] = "safe",
        timeout_s: float | None = None,
    ) -> None:
        check_models(models)
        check_options(weight, split, microbatch_size, reduction, on_zero_weight, batch_norm, on_event)
        check_ragged(lengths, split, pad_keys, pad_dim, padding_side)
        if noise is not None and not isinstance(noise, GradientNoise):
            raise TypeError(f"noise must be a GradientNoise, not {noise!r:.80}")
        budget_bytes = None if budget is None else parse_bytes(budget)
        self._device = resolve_device(device, near=models)
        if budget_bytes is not None:
            check_budget(self._device, budget_bytes)
        self._models = models
        self._split = split
        self._lengths = lengths
        self._reduction = reduction
        self._weighing = Weighing(weight, reduction=reduction, skips=on_zero_weight == "skip")
        self._batch_norm = batch_norm
        self._noise = noise
        self._target = where(device, models)
        self._sizing = Sizing(
            self._device,
            budget_bytes=budget_bytes,
            most=microbatch_size,
            on_event=on_event,
            models_bytes=lambda: owned_bytes(models, "cpu" if self._target is None else self._target.type),
        )
        self._packing = Packing(
            self._sizing,
            most=microbatch_size,
            pad_keys=pad_keys,
            pad_dim=pad_dim,
            padding_side=padding_side,
        )
        self._coverage = Coverage()
        self._buffers = Buffers()
        self._marks = Buffers()  # those of one microbatch of `map`
        self._generators = generators_of(models)
        modules = leaves_of(models)[2]
        self._compiled = any(is_compiled(module) for module in modules)
        self._sync: Together | Sharded | Alone = together(
            modules, sums=reduction == "sum", sync=sync, timeout_s=timeout_s
        )
        if isinstance(self._sync, Sharded):
            self._sizing.shards = self._sync.ranks.world_size
        if noise is not None and self._sync.in_step:
            raise BatchfitError(
                "noise is not measured under FSDP2: each rank holds a part of each gradient, and no rank the "
                "norm of its own batch's"
            )
        self._containers: set[str] = set()  # lists of the batch that hold parts, not samples
        self._reduction_checked = self._sync.in_step  # sharded: calls that only some ranks would make
        self._leaf_count = -1
        self._modules: list[nn.Module] = []
        self._norms: list[BatchNorm] = []

    def backward(
        self, fn: Callable[[Any], Any], batch: Any, *, lengths: Lengths | None = None, scaler: Any = None
    ) -> StepReport:
        """Forward and backward of the whole batch, in microbatches; adds to `.grad` what the batch would.

            report = mb.backward(lambda micro: criterion(model(micro["x"]), micro["y"]), batch)

        `fn(micro)` gets a part of the batch, on the device, and returns its loss. It may be called again with
        the same samples: after an out-of-memory the whole batch begins anew, with gradients, random numbers,
        buffers and scaler where they were. The first batch that is split also calls `fn` without gradients,
        for two samples and for the same two again twice and four times, to see that `reduction` is right.
        Hooks on parameters see the gradient of each microbatch. An error of your own leaves everything as
        the call found it. `lengths`, those of this batch's samples, goes before that of `Microbatcher`.
        """

        def make(whole: Whole, plan: Sequence[Piece], around: Around) -> tuple[BackwardTry | None, float]:
            micros = whole.micros(plan)
            shares, weight = self._weighing.shares(micros, plan)
            if shares is None:
                return None, weight
            if self._noise is not None and around.is_local:
                sizes = [piece.size for piece in plan]
                factors = [part * around.scale for part in (sizes if self._reduction == "sum" else shares)]
                watch = self._noise.watching(around.watch, sizes, factors, scaler)
                around = replace(around, watch=watch)
            return BackwardTry(fn, micros, shares, around), weight

        opened, plan, done, outcome = self._run(batch, "backward", {"fn": fn}, lengths, scaler, make)
        call = opened.call
        if outcome == "nothing":
            self._weighing.check_zero()
            size = plan[0].size if plan else 0
            self._sizing.tell("skipped", size, size, "the batch has no weight")
        if call is None or done is None:
            return StepReport(torch.zeros((), device=self._target), (), skipped=outcome == "nothing")
        if self._noise is not None:
            self._noise.keep(is_sorted=call.whole.trimmer is not None)
        if len(plan) > 1:
            advice = self._weighing.advice(batch, is_ragged=call.whole.trimmer is not None)
            if advice:
                self._sizing.warn_once("tokens", advice)
        # Not for compiled code: it would be compiled again for sizes that are never needed.
        if len(plan) > 1 and not (self._reduction_checked or call.compiled) and call.whole.can_take:
            self._check_reduction(fn, call.whole, max(plan, key=lambda piece: piece.size), opened.tables)
        return _report(call, plan, done)

    def backward_cached(
        self,
        encode: Callable[[Any], Any],
        loss_fn: Callable[[Any], Any],
        batch: Any,
        *,
        lengths: Lengths | None = None,
        scaler: Any = None,
    ) -> StepReport:
        """A loss over the whole batch's representations (in-batch negatives), the encoder in chunks: exact.

            report = mb.backward_cached(lambda micro: encoder(micro), contrastive_loss, batch)

        `encode(micro)` returns tensors with one row a sample, alone or in tuples and dicts; `loss_fn` gets
        those of the whole batch, in its order; with `lengths`, one value a token is padded to the batch's
        width. More than one chunk costs one forward more, without a graph; dropout is the
        same in both. Parameters of `loss_fn` get gradients too: pass them to `Microbatcher`.
        """

        def make(whole: Whole, plan: Sequence[Piece], around: Around) -> tuple[CachedTry, float]:
            return CachedTry(encode, loss_fn, whole, plan, around), float(whole.length)

        fns = {"encode": encode, "loss_fn": loss_fn}
        opened, plan, done, outcome = self._run(batch, "cached", fns, lengths, scaler, make)
        if opened.call is None:
            return StepReport(torch.zeros((), device=self._target), (), skipped=outcome == "nothing")
        return _report(opened.call, plan, done)

    def map(self, fn: Callable[[Any], Any], batch: Any, *, lengths: Lengths | None = None) -> Any:
        """`fn` of each microbatch under `torch.inference_mode`, the outputs joined in the batch's order.

            model.eval()
            logits = mb.map(model, batch)

        The mode of the model is yours to set. Tensors are joined along their first dimension, in any
        structure; lists have one item a sample; outputs stay where `fn` left them. After an out-of-memory
        only what has not been done is done again, so nothing is counted twice. Sizes are learned apart from
        those of training, so they may be larger. With `lengths`, outputs with one value a token are filled
        with zeros up to the batch's width.
        """
        if isinstance(self._sync, Sharded):
            return self._map_in_step(self._sync, fn, batch, lengths)
        check_callable(fn, "fn")
        opened = self._open(batch, "map", fn, lengths)
        call, tables = opened.call, opened.tables
        assert call is not None
        sizer = self._sizer(call)
        outputs: list[Any] = []
        done: list[Piece] = []
        marks = Buffers() if self._buffers.busy else self._marks
        begin = partial(self._rewinding, [], tables, None, marks)
        with (
            torch.inference_mode(),
            self._sync.quiet(),
            self._rewinding([], tables, None) as rewind,
            self._inside(call),
        ):
            while sum(piece.size for piece in done) < call.whole.length:
                plan = sizer.plan(call, done)
                run = MapTry(fn, call.whole, plan, self._target, begin, outputs, done, call.watch or NOBODY)
                failure = sizer.attempt(call, run)
                mark, at = run.mark, max(run.at, 0)
                del run
                if failure is not None:
                    if mark is not None:
                        mark.back()
                    sizer.shrink(call, failure, at)
            sizer.finish(call, done)
            answer = self._joined(call.whole, outputs, done)
            rewind.keep()
            return answer

    def step(
        self,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        scaler: torch.amp.GradScaler | None = None,
        clip_norm: float | None = None,
        rollback: bool = False,
    ) -> torch.Tensor | None:
        """An optimizer step that running out of memory cannot leave half done; returns the gradient norm.

            norm = mb.step(optimizer, scaler=scaler, clip_norm=1.0)

        Unscales, clips, steps and updates the scaler; several optimizers step together. Running out before
        anything has moved is a `torch.OutOfMemoryError` that says so, and otherwise a `StepInterruptedError`.
        `rollback=True` copies what a step moves to host memory first, so that it can always be undone.
        """
        ranks: Any = self._sync
        norm = step(optimizer, scaler=scaler, clip_norm=clip_norm, rollback=rollback, ranks=ranks)
        gathered: Any = getattr(norm, "full_tensor", None)  # of shards: a sum over the ranks, on all of them
        return norm if gathered is None else gathered()

    def state_dict(self) -> dict[str, Any]:
        """What was learned, as plain data."""
        return {**self._sizing.state_dict(), "ragged": self._packing.to_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what was learned; on another device or budget it is learned anew, and that is logged.

        Under FSDP2 with another number of ranks too: each then holds other shards.
        """
        if self._sizing.load_state_dict(state):
            self._packing.load(state.get("ragged", {}))
        else:
            self._packing.forget()

    def _run(
        self,
        batch: Any,
        kind: str,
        fns: Mapping[str, Callable[[Any], Any]],
        lengths: Lengths | None,
        scaler: Any,
        make: Callable[[Whole, Sequence[Piece], Around], tuple[Any, float]],
    ) -> tuple[_Opened, tuple[Piece, ...], Any, Outcome]:
        """A batch on this rank, in tries that `make` makes; then all ranks together (`sync`)."""
        plan: tuple[Piece, ...] = ()
        done, weight = None, 0.0
        with self._sync.turn(self._device) as turn:
            for name, fn in fns.items():
                check_callable(fn, name)
            if self._sync.in_step and kind == "cached":
                raise BatchfitError(
                    "backward_cached is not supported for models under FSDP2: each chunk runs forward twice, "
                    "and ranks with other numbers of chunks would have other collectives. Use DDP"
                )
            opened = self._open(batch, kind, next(iter(fns.values())), lengths)
            call, leaves, shared = opened.call, opened.leaves, opened.leaves[: opened.shared]
            look = self._coverage.look(list(fns.values()), leaves, kind)
            if look is not None and not self._sync.in_step:
                self._sync.check_reached(modules_held(fns.values()))
                look = turn.looking(look)
            with self._rewinding(leaves, opened.tables, scaler) as rewind:
                finish = partial(turn.reserve, rewind, shared)

                def weigh() -> float:
                    prepare(self._sizer(call).plan(call))
                    return weight

                def prepare(plan: Sequence[Piece]) -> Any:
                    nonlocal weight
                    assert call is not None
                    layers = self._layers(call, opened.modules, plan)
                    watch: Watch = call.watch or NOBODY
                    if isinstance(turn, InStep):
                        watch = turn.watching(watch)
                    around = Around(
                        device=self._target,
                        rewind=rewind,
                        finish=finish,
                        scale=turn.guess,
                        last=turn.last,
                        is_local=not turn.overlapped,
                        scaler=scaler,
                        layers=layers,
                        look=None if self._sync.in_step else look,
                        watch=watch,
                    )
                    made, weight = make(call.whole, plan, around)
                    if made is None:
                        finish()
                    return made

                with turn.quiet():
                    if isinstance(turn, InStep):
                        work = self._work(opened, kind, fns["fn"], rewind, prepare, weigh)
                        plan, done = turn.run(work)
                    elif turn.overlaps(rewind, shared, weigh if self._is_proven(call, kind) else None):
                        plan, done = self._overlapped(call, prepare, turn)
                    elif call is None:
                        finish()
                    else:
                        plan, done = self._until_it_fits(call, rewind, prepare)
                outcome = turn.settle(rewind, weight, shared)
        return opened, plan, done, outcome

    def _open(self, batch: Any, kind: str, fn: Any, lengths: Lengths | None) -> _Opened:
        """What every call begins with: look at the batch, the models and the device."""
        if isinstance(self._device, CudaDevice) and torch.cuda.is_current_stream_capturing():
            raise BatchfitError(
                "a CUDA graph is being captured: it would replay one split for ever. Capture inside fn"
            )
        whole = None
        joins = self._sync.joins_empty and (kind != "map" or self._sync.in_step)
        if batch is not None or not joins:
            whole = Whole.of(batch, split=self._split, mode=self._mode(kind), containers=self._containers)
            if whole.length == 0 and not joins:
                raise ValueError("batch must hold at least one sample, not 0")
        leaves, tables, modules = leaves_of(self._models)
        shared = len(leaves)
        if kind != "map":
            # Looked at again where others get gradients than before: it takes as long as all else here.
            if shared != self._leaf_count:
                self._look_at(leaves)
            self._leaf_count = shared
            leaves += [] if whole is None else whole.gradient_leaves()
        if whole is None or whole.length == 0:
            return _Opened(None, leaves, shared, tables, modules)
        compiled = self._compiled or is_compiled(fn)
        lengths = self._lengths if lengths is None else lengths
        call: AnyCall
        if lengths is None:
            call = self._sizing.begin(whole, compiled=compiled)
            call.needs_two = compiled and kind != "map" and bool(self._training_norms(modules))
        elif self._split is not None:
            raise ValueError(f"lengths must be None where split is given, not {lengths!r:.80}")
        else:
            trains, joins = kind != "map", kind != "backward"
            call = self._packing.begin(whole, lengths, compiled=compiled, trains=trains, joins=joins)
        return _Opened(call, leaves, shared, tables, modules)

    def _look_at(self, leaves: list[torch.Tensor]) -> None:
        """What gets gradients is not what it was: may it?"""
        self._sync.check(leaves)
        if any(getattr(leaf, "_post_accumulate_grad_hooks", None) for leaf in leaves):
            self._sizing.warn_once(
                "hooks",
                "a parameter has a post-accumulate-grad hook, which runs after each microbatch: an "
                "optimizer that steps there steps on a part of the batch's gradient",
            )

    def _sizer(self, call: AnyCall | None) -> Any:
        """Who decides on the microbatches of this call."""
        return self._packing if isinstance(call, RaggedCall) else self._sizing

    @contextmanager
    def _inside(self, call: AnyCall) -> Iterator[None]:
        """What is set while a call's tries run."""
        with self._sizer(call).limited(call), self._attention(call.whole):
            yield

    def _attention(self, whole: Whole) -> AbstractContextManager[None]:
        """Ragged batches come in many shapes: no back-end that plans for each of them."""
        return nullcontext() if whole.trimmer is None else attention_without_plans(self._target)

    def _until_it_fits(
        self, call: AnyCall, rewind: Rewind, make: Callable[[Sequence[Piece]], Any]
    ) -> tuple[tuple[Piece, ...], Any]:
        """Try smaller and smaller until the batch ran: (its plan, the try), or (..., None) for no work."""
        sizer, loss_failed = self._sizer(call), False
        with self._inside(call):
            while True:
                plan = sizer.plan(call)
                versions = call.whole.versions()
                run = Planned(make, plan)
                failure = sizer.attempt(call, run)
                if failure is None:
                    if run.made is not None:
                        sizer.finish(call, plan)
                    return plan, run.made
                at, in_loss = max(run.at, 0), run.in_loss and failure.verdict != "ambiguous"
                del run
                if versions != call.whole.versions():
                    raise BatchfitError(
                        "fn changed the batch in place and then ran out of memory: a second try would see "
                        "the changed batch. Clone what fn writes into"
                    )
                rewind.back()
                if in_loss:
                    size = max(piece.size for piece in plan)
                    self._sizing.loss_ran_out(call, size, failure, again=loss_failed)
                    loss_failed = True
                else:
                    sizer.shrink(call, failure, at)

    def _work(
        self, opened: _Opened, kind: str, fn: Callable[[Any], Any], rewind: Rewind, prepare: Any, weigh: Any
    ) -> Work:
        """A batch as ranks run it that are in step."""
        call, everybody = opened.call, self._sync
        trains = kind != "map"
        shared = opened.leaves[: opened.shared]
        least = 2 if self._training_norms(opened.modules) else 1

        def idle(micro: Any) -> None:
            found = fn(micro)
            if not trains:
                return
            check_loss(found, "fn")
            if isinstance(
                everybody, Sharded
            ):  # parameters that are known exist in a graph by their twins only
                look = self._coverage.look([fn], [*opened.leaves, *everybody.twins()], kind)
                if look is not None:
                    look([found])
            (found * 0.0).backward()

        def weigh_one(micro: Any) -> float:
            return self._weighing.shares([micro], [Piece(slice(0, 1), 1)])[1]

        def spare() -> Any:
            weigh_it = weigh_one if trains else None
            return None if call is None else sample_of(call.whole, weigh_it, times=least)

        return Work(
            key=(self._mode(kind), len(shared), code_of(fn)),
            call=call,
            sizer=self._sizer(call),
            sizing=self._sizing,
            rewind=rewind,
            prepare=prepare,
            weigh=weigh,
            spare=spare,
            idle=idle,
            check=lambda: everybody.check_reached(modules_held([fn])),
            inside=lambda: nullcontext() if call is None else self._inside(call),
            device=self._target,
            least=least,
        )

    def _map_in_step(
        self, everybody: Sharded, fn: Callable[[Any], Any], batch: Any, lengths: Lengths | None
    ) -> Any:
        """`map` of a sharded model: all ranks call it, in as many microbatches; None for no samples."""
        with everybody.turn(self._device) as turn:
            check_callable(fn, "fn")
            opened = self._open(batch, "map", fn, lengths)
            call, tables = opened.call, opened.tables
            outputs: list[Any] = []
            marks = Buffers()

            def prepare(plan: Sequence[Piece]) -> MapTry:
                assert call is not None
                outputs.clear()
                watch = turn.watching(call.watch or NOBODY)
                begin = partial(self._rewinding, [], tables, None, marks)
                return MapTry(fn, call.whole, plan, self._target, begin, outputs, [], watch)

            def weigh() -> float:
                return 0.0 if call is None else float(call.whole.length)

            # Not in inference mode: parameters that FSDP2 gathers there could not be trained afterwards.
            with torch.no_grad(), self._rewinding([], tables, None) as rewind:
                plan, _ = turn.run(self._work(opened, "map", fn, rewind, prepare, weigh))
                answer = None if call is None else self._joined(call.whole, outputs, plan)
                rewind.keep()
                return answer

    def _is_proven(self, call: AnyCall | None, kind: str) -> bool:
        """Whether a batch can be trusted to run without a second try."""
        if kind != "backward" or call is None:
            return False
        self._sizer(call).plan(call)  # a split in equal parts may be smaller than what may be tried
        return bool(self._sizer(call).is_proven(call))

    def _overlapped(
        self, call: Any, make: Callable[[Sequence[Piece]], Any], turn: Any
    ) -> tuple[tuple[Piece, ...], Any]:
        """Once, in sizes that have run before, with the collectives of the models in the last microbatch."""
        sizer = self._sizer(call)
        plan = sizer.plan(call)
        run = Planned(make, plan)
        with self._inside(call), turn.overlapping():
            failure = sizer.attempt(call, run)
            if failure is not None:
                raise turn.cut_off(failure.message)
        sizer.finish(call, plan)
        return plan, run.made

    def _joined(self, whole: Whole, outputs: list[Any], plan: Sequence[Piece]) -> Any:
        answer: list[Any] = []
        why = ""
        for _ in range(2):
            failure = attempt(
                lambda: answer.append(whole.joined(outputs, plan)),
                device=self._device,
                last=True,
                note=lambda: "batchfit: raised while the outputs of all microbatches were joined",
            )
            if failure is None:
                return answer[0]
            why = failure.message
            recover(self._device)
        raise BatchfitError(f"the joined outputs do not fit: {why}. Return them on the host (.cpu()) from fn")

    def _check_reduction(self, fn: Callable[[Any], Any], whole: Whole, piece: Piece, tables: Tables) -> None:
        """Once: does `fn` return what `reduction` says? Only a clear answer is told."""
        self._reduction_checked = True
        found: Judgement = "unclear"
        with self._rewinding([], tables, None), self._attention(whole), self._sync.quiet():
            try:
                found = judge_loss(fn, whole, piece, self._target)
            except Exception as error:  # noqa: BLE001 - a check that cannot be made says nothing
                log.debug("reduction could not be checked: %s", type(error).__name__)
        warn_of_reduction(found, self._reduction)

    def _training_norms(self, modules: list[nn.Module]) -> list[BatchNorm]:
        if modules != self._modules:
            self._modules, self._norms = modules, norms_in(modules)
        return batch_norms(self._norms)

    def _layers(self, call: AnyCall, modules: list[nn.Module], plan: Sequence[Piece]) -> list[BatchNorm]:
        """BatchNorm where a batch is split: told, refused, or the layers whose statistics are to be exact."""
        if len(plan) == 1 or self._batch_norm == "ignore":
            return []
        layers = self._training_norms(modules)
        if not layers or self._batch_norm == "exact":
            return layers
        text = told([piece.size for piece in plan], call.whole.length, len(layers))
        if self._batch_norm == "error":
            raise BatchfitError(text)
        self._sizing.warn_once("batch_norm", text)
        return []

    def _mode(self, kind: str) -> str:
        training = any(isinstance(model, nn.Module) and model.training for model in self._models)
        mode = f"{kind},{'train' if training else 'eval'}"
        place = "cpu" if self._target is None else self._target.type
        if torch.is_autocast_enabled(place):
            mode += f",{torch.get_autocast_dtype(place)}"
        return mode

    def _rewinding(
        self, leaves: list[torch.Tensor], tables: Tables, scaler: Any, buffers: Buffers | None = None
    ) -> Rewind:
        """A way back; without `leaves`, not for gradients."""
        if buffers is None:
            buffers = (
                Buffers() if self._buffers.busy else self._buffers
            )  # busy: `map` inside a `backward`, say
        note = "batchfit: raised while the models' buffers were copied"
        twice(lambda: buffers.take(tables), device=self._device, note=note)
        return Rewind(leaves, buffers=buffers, scaler=scaler, generators=self._generators)


def _report(call: AnyCall, plan: Sequence[Piece], done: Any) -> StepReport:
    sizes = tuple(piece.size for piece in plan)
    return StepReport(done.loss, sizes, call.retries, call.peak_bytes)
