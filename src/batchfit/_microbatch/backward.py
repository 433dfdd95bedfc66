"""Forward and backward of a batch on this rank, in tries, until it has run; then all ranks together.

Rules
- A try that runs out of memory is taken back as a whole (`Rewind`) and done again smaller: a retried call
  ends as one that began at that size. It is handled outside `except`, with no frame of the user's alive.
- A batch that ran is never repeated; what it taught (`Sizing`, `Packing`) is for the next one.
- A rank that raises tells the others first (`sync`); ranks in step (`lockstep`) try and fail together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

from batchfit._engine.batch.padding import Lengths
from batchfit._engine.batch.pure.pieces import Piece
from batchfit._engine.batch.split import Batch
from batchfit._engine.data_parallel.ddp import Outcome
from batchfit._engine.data_parallel.fsdp import FsdpBatch as InStep
from batchfit._engine.data_parallel.fsdp import FsdpRanks, code_of
from batchfit._engine.data_parallel.fsdp_batch import FsdpWork, sample_of
from batchfit._engine.device.oom_guard import run_guarded
from batchfit._engine.device.readings import read, recover
from batchfit._engine.sizing.watch import NOBODY, PassWatch
from batchfit._engine.snapshot.coverage import modules_held
from batchfit._engine.snapshot.rewind import Rewind
from batchfit._engine.workload.checks import check_loss, loss_and_outputs
from batchfit._microbatch.batch_norm import norms_in
from batchfit._microbatch.checks import check_callable
from batchfit._microbatch.context import CHANGED, AnyCall, MicrobatchContext, PreparedBatch
from batchfit._microbatch.loss_check import LossCheck, LossLook
from batchfit._microbatch.passes import Around, PlannedPass
from batchfit.errors import BatchfitError

Examine = Callable[[Sequence[Piece]], None]


def run_batch(
    setting: MicrobatchContext,
    batch: Any,
    kind: Literal["backward", "cached"],
    fns: Mapping[str, Callable[[Any], Any]],
    *,
    lengths: Lengths | None,
    scaler: Any,
    make: Callable[[Batch, Sequence[Piece], Around], tuple[Any, float]],
    weigh_one: Callable[[Any], float],
    check: LossCheck | None = None,
) -> tuple[PreparedBatch, tuple[Piece, ...], Any, Outcome]:
    """A batch on this rank, in tries that `make` makes; then all ranks together (`sync`).

    `check` looks at the loss before the batch is cut, where this function has not been looked at.
    """
    plan: tuple[Piece, ...] = ()
    done, weight = None, 0.0
    with setting.sync.turn(setting.device) as turn:
        for name, fn in fns.items():
            check_callable(fn, name)
        if scaler is not None and not callable(getattr(scaler, "scale", None)):
            raise TypeError(f"scaler must be a torch.amp.GradScaler or None, not {scaler!r:.80}")
        if setting.sync.in_step and kind == "cached":
            raise BatchfitError(
                "backward_cached is not supported for models under FSDP2: each chunk runs forward twice, "
                "and ranks with other numbers of chunks would have other collectives. Use DDP"
            )
        opened = setting.open(batch, kind, list(fns.values()), lengths)
        call, leaves, shared = opened.call, opened.leaves, opened.leaves[: opened.shared]
        look = setting.coverage.look(list(fns.values()), leaves, kind)
        if look is not None and not setting.sync.in_step:
            setting.sync.check_reached(modules_held(fns.values()))
            look = turn.looking(look)
        with setting.rewinding(opened, leaves, scaler) as rewind:
            finish = partial(turn.reserve, rewind, shared)

            def weigh() -> float:
                prepare(setting.sizer(call).plan(call))
                return weight

            def prepare(plan: Sequence[Piece]) -> Any:
                nonlocal weight
                assert call is not None
                layers = setting.layers(call, opened.modules, plan)
                watch: PassWatch = call.watch or NOBODY
                if isinstance(turn, InStep):
                    watch = turn.watching(watch)
                around = Around(
                    device=setting.target,
                    rewind=rewind,
                    finish=finish,
                    scale=turn.guess,
                    last=turn.last,
                    is_local=not turn.overlapped,
                    scaler=scaler,
                    layers=layers,
                    look=None if setting.sync.in_step else look,
                    watch=watch,
                    in_step=setting.sync.in_step,
                    alone=turn.is_alone,
                )
                made, weight = make(call.whole, plan, around)
                if made is None:
                    finish()
                return made

            examine: Examine | None = None
            if check is not None and call is not None and not isinstance(turn, InStep):
                examine = _examining(setting, opened, fns["fn"], rewind, turn.refuse_sent, check)

            with turn.quiet():
                if isinstance(turn, InStep):
                    work = work_in_step(setting, opened, kind, fns["fn"], rewind, prepare, weigh, weigh_one)
                    plan, done = turn.run(work)
                elif turn.overlaps(
                    rewind, shared, weigh if _is_proven(setting, call, kind, examine) else None
                ):
                    plan, done = _overlapped(setting, call, prepare, turn)
                elif call is None:
                    finish()
                else:
                    plan, done = _until_it_fits(setting, call, rewind, prepare, examine)
            outcome = turn.settle(rewind, weight, shared)
    return opened, plan, done, outcome


def _examining(
    setting: MicrobatchContext,
    opened: PreparedBatch,
    fn: Callable[[Any], Any],
    rewind: Rewind,
    refuse_sent: Callable[[], None],
    check: LossCheck,
) -> Examine | None:
    """What to call before the batch is cut; None where this function's loss is known."""
    # BatchNorm without running statistics compares samples in every mode, which is said elsewhere.
    if not check.is_due(fn) or any(layer.running_mean is None for layer in norms_in(opened.modules)):
        return None
    return partial(_examine, setting, opened, fn, rewind, refuse_sent, check)


def _examine(
    setting: MicrobatchContext,
    opened: PreparedBatch,
    fn: Callable[[Any], Any],
    rewind: Rewind,
    refuse_sent: Callable[[], None],
    check: LossCheck,
    plan: Sequence[Piece],
) -> None:
    """Before a batch is cut: is its loss one that can be? What that moved is restored."""
    assert opened.call is not None
    whole = opened.call.whole
    # A wrong cut is refused before `fn` sees any of it. One that does not fit is for the try itself.
    note = "batchfit: raised while the batch was cut"
    if (
        run_guarded(lambda: whole.micros(plan), device=setting.device, last=False, note=lambda: note)
        is not None
    ):
        recover(setting.device)
    check.run(
        LossLook(
            fn=fn,
            whole=whole,
            plan=plan,
            modules=opened.modules,
            compiled=opened.call.compiled,
            target=setting.target,
            device=setting.device,
            weigh=check.weigh,
            check=refuse_sent,
        )
    )
    rewind.back()
    setting.sizing.retries_seen = read(setting.device).retries  # those of the look are not the batch's


def _until_it_fits(
    setting: MicrobatchContext,
    call: AnyCall,
    rewind: Rewind,
    make: Callable[[Sequence[Piece]], Any],
    examine: Examine | None,
) -> tuple[tuple[Piece, ...], Any]:
    """Try smaller and smaller until the batch ran: (its plan, the try), or (..., None) for no work."""
    sizer, loss_failed = setting.sizer(call), False
    with setting.inside(call):
        while True:
            plan = sizer.plan(call)
            if examine is not None and len(plan) > 1:
                examine(plan)
                examine = None
            versions = call.whole.versions()
            run = PlannedPass(make, plan)
            failure = sizer.attempt(call, run)
            if failure is None:
                if run.made is not None:
                    sizer.finish(call, plan)
                return plan, run.made
            at, in_loss = max(run.at, 0), run.in_loss and failure.verdict != "ambiguous"
            del run
            if versions != call.whole.versions():
                raise BatchfitError(CHANGED)
            rewind.back()
            if in_loss:
                size = max(piece.size for piece in plan)
                setting.sizing.loss_ran_out(call, size, failure, again=loss_failed)
                loss_failed = True
            else:
                sizer.shrink(call, failure, at)


def _overlapped(
    setting: MicrobatchContext, call: Any, make: Callable[[Sequence[Piece]], Any], turn: Any
) -> tuple[tuple[Piece, ...], Any]:
    """Once, in sizes that have run before, with the collectives of the models in the last microbatch."""
    sizer = setting.sizer(call)
    plan = sizer.plan(call)
    run = PlannedPass(make, plan)
    with setting.inside(call), turn.overlapping():
        failure = sizer.attempt(call, run)
        if failure is not None:
            raise turn.cut_off(failure.message)
    sizer.finish(call, plan)
    return plan, run.made


def _is_proven(setting: MicrobatchContext, call: AnyCall | None, kind: str, examine: Examine | None) -> bool:
    """Whether a batch can be trusted to run without a second try."""
    if kind != "backward" or call is None:
        return False
    plan = setting.sizer(call).plan(call)  # a split in equal parts may be smaller than what may be tried
    if examine is not None and len(plan) > 1:
        return False
    return bool(setting.sizer(call).is_proven(call))


def work_in_step(
    setting: MicrobatchContext,
    opened: PreparedBatch,
    kind: str,
    fn: Callable[[Any], Any],
    rewind: Rewind,
    prepare: Callable[[Sequence[Piece]], Any],
    weigh: Callable[[], float],
    weigh_one: Callable[[Any], float] | None = None,
) -> FsdpWork:
    """A batch as ranks run it that are in step; `weigh_one` weighs a sample, where there are gradients."""
    call, everybody = opened.call, setting.sync
    trains = kind != "map"
    shared = opened.leaves[: opened.shared]
    least = 2 if setting.training_norms(opened.modules) else 1

    def idle(micro: Any) -> None:
        found = fn(micro)
        if not trains:
            return
        found, _ = loss_and_outputs(found)
        check_loss(found, "fn")
        if isinstance(everybody, FsdpRanks):
            # Parameters that are known exist in a graph by their twins only.
            look = setting.coverage.look([fn], [*opened.leaves, *everybody.twins()], kind)
            if look is not None:
                look([found])
        (found * 0.0).backward()

    def spare() -> Any:
        return None if call is None else sample_of(call.whole, weigh_one, times=least)

    return FsdpWork(
        key=(setting.mode(kind), len(shared), code_of(fn)),
        call=call,
        sizer=setting.sizer(call),
        sizing=setting.sizing,
        rewind=rewind,
        prepare=prepare,
        weigh=weigh,
        spare=spare,
        idle=idle,
        check=lambda: everybody.check_reached(modules_held([fn])),
        inside=lambda: nullcontext() if call is None else setting.inside(call),
        device=setting.target,
        least=least,
    )
