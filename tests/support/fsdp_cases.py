"""What real ranks run in the tests of `Microbatcher` under FSDP2: many cases in one launch.

A case is data; every rank runs it and compares its shards, gathered, with one process on the joined batches.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from ddp_cases import (
    FEATURES,
    Faults,
    Tagger,
    batch_of,
    digest,
    digests,
    joined,
    loss_of,
    settled_down,
    tagging,
    tokens_of,
)
from launch import end_process
from microbatcher import context_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from batchfit._engine.batch.split import Batch
from batchfit._engine.distributed import fsdp_reset
from batchfit._engine.distributed.collectives import begun_since, counts
from batchfit._engine.distributed.ranks import Ranks
from batchfit._engine.snapshot import wrappers
from batchfit._engine.torch_private import fsdp2
from batchfit._microbatch.microbatcher import Microbatcher
from batchfit._noise.gradient_noise import GradientNoise
from batchfit.errors import SnapshotError
from batchfit.testing import count_operations, fail_at, simulated_oom, virtual_memory

PHASES = ("copy", "forward", "middle", "backward", "late", "state", "step")


MESHES: dict[tuple[str, ...], DeviceMesh] = {}


class Between(nn.Module):
    """Between two sharded layers: fails in its forward or in its backward."""

    def __init__(self, faults: Faults | None) -> None:
        super().__init__()
        self.faults = faults

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.faults is not None and len(x) > 1:  # not in the rehearsal
            self.faults.check("middle")
            if x.requires_grad:
                x.register_hook(lambda _: self.faults.check("late"))  # type: ignore[no-untyped-call,union-attr]
        return x


def make_model(faults: Faults | None = None, *, norm: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    parts = [nn.Linear(FEATURES, 7), Between(faults), nn.GELU(), nn.Linear(7, 5), nn.Linear(5, 3)]
    if norm:
        parts.insert(1, nn.BatchNorm1d(7))
    return nn.Sequential(*parts).double()


def shard(model: nn.Sequential, how: str = "nested", *, mesh: DeviceMesh | None = None) -> nn.Sequential:
    """`nested` (each layer), `root` (one group), `parts` (layers only), `kept` (not resharded), `hybrid`."""
    if mesh is None:
        size = dist.get_world_size()
        hybrid = how == "hybrid"
        shape, names = ((2, size // 2), ("replicas", "shards")) if hybrid else ((size,), ("shards",))
        if names not in MESHES:
            MESHES[names] = init_device_mesh("cpu", shape, mesh_dim_names=names)
        mesh = MESHES[names]
    options: dict[str, Any] = {"mesh": mesh}
    if how == "kept":
        options["reshard_after_forward"] = False
    if how == "mixed":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)
    for part in model:
        if how != "root" and any(True for _ in part.parameters()):
            fully_shard(part, **options)
    if how != "parts":
        fully_shard(model, **options)
    return model


def full(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


class CutOff(torch.optim.AdamW):
    """Moves its first parameter, and then runs out."""

    # Not an attribute of the optimizer: what hangs off that is restored with it.
    faults: ClassVar[list[Faults]] = []

    def step(self, closure: Any = None) -> Any:
        faults = self.faults[-1]
        if faults.left.get("step", 0) > 0:
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1.0)
            faults.check("step")
        return super().step(closure)


@contextmanager
def installed(faults: Faults) -> Iterator[None]:
    """The places that are not in the user's code."""
    from batchfit._engine.optimizer_step import step as stepping

    fed, make_state = Batch.fed, stepping.make_state

    def failing_fed(whole: Batch, micros: Any, device: Any) -> Iterator[Any]:
        for at, micro in enumerate(fed(whole, micros, device)):
            if at == len(micros) - 1:
                faults.check("copy")
            yield micro

    def failing_state(optimizer: Any) -> None:
        make_state(optimizer)
        faults.check("state")

    Batch.fed, stepping.make_state = failing_fed, failing_state  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        Batch.fed, stepping.make_state = fed, make_state  # type: ignore[method-assign]


def rows_of(case: dict[str, Any], rank: int, step: int) -> int:
    rows = case.get("rows", [33, 28, 36, 30])
    return int(rows[rank % len(rows)]) - (2 if step == case.get("steps", 3) - 1 and "rows" not in case else 0)


def reference(case: dict[str, Any], world_size: int) -> list[torch.Tensor]:
    """One process with the joined batches, by hand."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(case.get("steps", 3)):
        batches = [batch_of(rank, step, rows_of(case, rank, step)) for rank in range(world_size)]
        optimizer.zero_grad()
        loss_of(model, joined(batches)).backward()
        if case.get("clip"):
            nn.utils.clip_grad_norm_(model.parameters(), case["clip"])
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def run_case(rank: int, world_size: int, case: dict[str, Any]) -> dict[str, Any]:
    faults = Faults()
    model = shard(make_model(faults), case.get("how", "nested"))
    kind = CutOff if case["phase"] == "step" else torch.optim.AdamW
    optimizer: Any = kind(model.parameters(), lr=1e-2)
    CutOff.faults.append(faults)
    mb = Microbatcher(model, microbatch_size=case.get("microbatch_size"), timeout_s=20)

    def fn(micro: dict[str, torch.Tensor]) -> torch.Tensor:
        if len(micro["x"]) == 1:
            return nn.functional.cross_entropy(model(micro["x"]), micro["y"])
        faults.check("forward")
        out = model(micro["x"])
        out.register_hook(lambda _: faults.check("backward"))
        return nn.functional.cross_entropy(out, micro["y"])

    retries, losses = 0, []
    with installed(faults):
        for step in range(case.get("steps", 3)):
            if rank in case["failing"] and step == case["at"]:
                faults.left = {case["phase"]: case["times"]}
            optimizer.zero_grad()
            report = mb.backward(fn, batch_of(rank, step, rows_of(case, rank, step)))
            retries += report.retries
            losses.append(float(report.loss))
            mb.step(optimizer, clip_norm=case.get("clip"), rollback=case["phase"] == "step")
    mine = [full(parameter) for parameter in model.parameters()]
    wanted = reference(case, world_size)
    return {
        "same": len(set(digests(digest(mine)))) == 1,
        "error": max(float((a - b).abs().max()) for a, b in zip(mine, wanted, strict=True)),
        "fired": faults.fired,
        "retries": retries,
    }


def run_cases(rank: int, cases: list[dict[str, Any]]) -> list[Any]:
    settled_down()
    return [run_case(rank, dist.get_world_size(), case) for case in cases]


# a fault at every operation of a try


def compared(model: nn.Module, wanted: nn.Module) -> float:
    """The largest difference of gradients; where one has none, so must the other."""
    worst = 0.0
    for a, b in zip(model.parameters(), wanted.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None and b.grad is not None:
            worst = max(worst, float((full(a.grad) - full(b.grad)).abs().max()))
    return worst


def sweep(rank: int, how: str, every: int) -> list[dict[str, Any]]:
    """Each rank in turn runs out before each operation of a batch, up to the vote."""
    settled_down()
    model = shard(make_model(), how)
    rows = [4, 3]
    wanted = make_model()
    loss_of(wanted, joined([batch_of(r, 0, rows[r]) for r in range(2)])).backward()
    batch = batch_of(rank, 0, rows[rank])

    def fn(micro: Any) -> torch.Tensor:
        return loss_of(model, micro)

    first = Microbatcher(model, microbatch_size=2, timeout_s=20)
    first.backward(fn, batch)  # rehearses

    def run(at: int | None) -> tuple[int, bool]:
        """Fail before that operation; None: only count those before the vote."""
        mb = Microbatcher(model, microbatch_size=2, timeout_s=20)
        context_of(mb).ranks = context_of(first).ranks
        model.zero_grad()
        gather, seen_at = Ranks.gather, []
        with count_operations() if at is None else fail_at(at) as seen:

            def counting(self: Ranks, value: Any, *, doing: str) -> list[Any]:
                seen_at.append(seen.operations)
                return gather(self, value, doing=doing)

            Ranks.gather = counting  # type: ignore[method-assign]
            try:
                mb.backward(fn, batch)
            finally:
                Ranks.gather = gather  # type: ignore[method-assign]
        return seen_at[1], seen.fired

    found = []
    for failing in range(2):
        most = [int(one) for one in digests(str(run(None)[0]))][failing]
        fired, worst, tried = 0, 0.0, 0
        for at in range(failing, most, every):
            fired += run(at if rank == failing else None)[1]
            worst, tried = max(worst, compared(model, wanted)), tried + 1
        found.append({"tried": tried, "fired": fired, "error": worst, "operations": most})
    return found


# what is exact


def batches_of(rows: list[int], step: int = 0) -> list[dict[str, torch.Tensor]]:
    return [batch_of(rank, step, count) for rank, count in enumerate(rows)]


def answer(model: nn.Module, wanted: nn.Module, **more: Any) -> dict[str, Any]:
    grads = [full(p.grad) for p in model.parameters() if p.grad is not None]
    return {"error": compared(model, wanted), "same": len(set(digests(digest(grads)))) == 1, **more}


def exact_unequal(rank: int, world_size: int) -> Any:
    """Ranks with 1, few and many samples, in every way of sharding; the finer cut teaches nothing."""
    found = []
    ways = ["nested", "root", "parts", "kept", *(["hybrid"] if world_size == 4 else [])]
    for how in ways:
        model, wanted = shard(make_model(), how), make_model()
        mb = Microbatcher(model, microbatch_size=4, timeout_s=20)
        rows = [1, 13, 5, 2][:world_size]
        for step in range(2):
            model.zero_grad()
            wanted.zero_grad()
            batches = batches_of(rows, step)
            report = mb.backward(lambda m: loss_of(model, m), batches[rank])  # noqa: B023
            loss_of(wanted, joined(batches)).backward()
            own = float(loss_of(wanted, batches[rank]).detach())
        found.append(
            answer(
                model,
                wanted,
                sizes=list(report.microbatch_sizes),
                loss=abs(float(report.loss) - own) < 1e-12,
            )
        )
    return found


def exact_empty(rank: int, world_size: int) -> Any:
    """A rank without samples, with None or an empty batch, after a first batch that all have a part of."""
    model, wanted = shard(make_model()), make_model()
    mb = Microbatcher(model, microbatch_size=2, timeout_s=20)

    def fn(m: Any) -> torch.Tensor:
        return loss_of(model, m)

    found: list[Any] = []
    too_early = outcome_of(lambda: mb.backward(fn, None if rank == 1 else batch_of(rank, 0, 5)))
    mb.backward(fn, batch_of(rank, 0, 3))
    for empty in (None, batch_of(1, 0, 0)):
        model.zero_grad()
        wanted.zero_grad()
        batches = batches_of([5] * world_size)
        report = mb.backward(fn, empty if rank == 1 else batches[rank])
        loss_of(wanted, joined([b for r, b in enumerate(batches) if r != 1])).backward()
        found.append(answer(model, wanted, sizes=list(report.microbatch_sizes)))
    nobody = outcome_of(lambda: mb.backward(fn, None))
    mb._weighing._skips = True
    model.zero_grad()
    skipped = mb.backward(fn, None).skipped
    return found, too_early, nobody, skipped, all(p.grad is None for p in model.parameters())


def exact_accumulation(rank: int, world_size: int) -> Any:
    """Several calls add up; one of them is done again."""
    faults = Faults()
    model, wanted = shard(make_model(faults)), make_model()
    mb = Microbatcher(model, timeout_s=20)
    for step in range(3):
        if rank == 0 and step == 1:
            faults.left = {"late": 1}
        batches = batches_of([4, 6, 3, 5][:world_size], step)
        mb.backward(lambda m: loss_of(model, m), batches[rank])
        loss_of(wanted, joined(batches)).backward()
    return answer(model, wanted, fired=faults.fired)


def exact_tokens(rank: int, world_size: int) -> Any:
    """Ragged batches of tokens, weighed by their valid labels; `lengths` sorts and trims; samples without."""
    found = []
    for lengths in (None, "mask"):
        for hidden in (False, True):
            model, wanted = shard_tagger(), Tagger()
            mb = Microbatcher(
                model,
                weight=lambda m: (m["labels"] != -100).sum(),
                lengths=lengths,
                microbatch_size=1 if hidden else 2,
                timeout_s=20,
            )
            batches = [tokens_of(r) for r in range(world_size)]

            def fn(m: Any) -> torch.Tensor:
                return tagging(model, m)  # noqa: B023

            if hidden:  # the first samples of rank 0 and all of rank 1 count nothing
                mb.backward(fn, batches[rank])
                model.zero_grad()
                batches[0]["labels"][:2] = -100
                batches[1]["labels"][:] = -100
            mb.backward(fn, batches[rank])
            tagging(wanted, joined(batches)).backward()
            found.append(answer(model, wanted))
    return found


def shard_tagger() -> Tagger:
    model = Tagger()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model.out, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def exact_options(rank: int, world_size: int) -> Any:
    """Sums, another divide factor, and a batch that gets gradients itself."""
    found = []
    rows = [3, 8, 5, 2][:world_size]
    batches = batches_of(rows)
    for factor, sums in ((None, True), (1.0, False), (3.0, True)):
        model, wanted = shard(make_model()), make_model()
        if factor:
            for part in fsdp_reset.sharded_modules(model.modules()):
                part.set_gradient_divide_factor(factor)
        mb = Microbatcher(model, microbatch_size=3, reduction="sum" if sums else "mean", timeout_s=20)

        def loss(net: Any, m: Any) -> torch.Tensor:
            kind = "sum" if sums else "mean"  # noqa: B023
            return nn.functional.cross_entropy(net(m["x"]), m["y"], reduction=kind)

        mine = {"x": batches[rank]["x"].clone().requires_grad_(), "y": batches[rank]["y"]}
        mb.backward(lambda m: loss(model, m), mine)  # noqa: B023
        whole = joined(batches)
        whole["x"].requires_grad_()
        loss(wanted, whole).backward()
        assert mine["x"].grad is not None
        assert whole["x"].grad is not None
        part = whole["x"].grad.split(rows)[rank]
        found.append(answer(model, wanted, inputs=float((mine["x"].grad - part).abs().max())))
    return found


def exact_norm(rank: int, world_size: int) -> Any:
    """Samples that count nothing leave no trace in a BatchNorm's statistics, nor in random numbers."""
    model, alone = shard(make_model(norm=True)), make_model(norm=True)
    mb = Microbatcher(model, batch_norm="ignore", microbatch_size=4, timeout_s=20)
    rows = 5 if rank == 0 else 12

    def fn(m: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(m["x"]) + 0 * torch.rand(()), m["y"])

    torch.manual_seed(rank)
    batch = batch_of(rank, 0, rows)
    report = mb.backward(fn, batch)
    after = float(torch.rand(()))
    begin = 0
    torch.manual_seed(rank)
    for size in report.microbatch_sizes:
        alone(batch["x"][begin : begin + size])
        torch.rand(())
        begin += size
    pairs = zip(model.buffers(), alone.buffers(), strict=True)
    return {
        "buffers": all(torch.equal(a, b) for a, b in pairs),
        "random": after == float(torch.rand(())),
        "sizes": list(report.microbatch_sizes),
    }


def exact_map(rank: int, world_size: int) -> Any:
    """Outputs in order, with unequal batches or none, and a rank that runs out; then training."""
    faults = Faults()
    model, plain = shard(make_model(faults)), make_model()
    mb = Microbatcher(model, microbatch_size=3, timeout_s=20)
    found = []
    for step in range(4):
        if rank == 1 and step == 1:
            faults.left = {"middle": 1}
        batch = None if rank == 1 and step == 3 else batch_of(rank, step, 7 if rank else 2)
        out = mb.map(lambda m: model(m["x"]), batch)
        found.append(out is None if batch is None else torch.allclose(out, plain(batch["x"]), 0, 1e-12))
    batches = batches_of([4] * world_size)
    mb.backward(lambda m: loss_of(model, m), batches[rank])
    loss_of(plain, joined(batches)).backward()
    return answer(model, plain, maps=found, fired=faults.fired)


def exact_scaler(rank: int, world_size: int) -> Any:
    """An infinity on one rank skips the step on all."""
    model, wanted = shard(make_model()), make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=100)
    mb = Microbatcher(model, microbatch_size=2, timeout_s=20)
    scales = []
    for step in range(3):
        optimizer.zero_grad()
        batches = batches_of([4] * world_size, step)

        def fn(m: Any) -> torch.Tensor:
            bad = rank == 1 and step == 1 and len(m["x"]) > 1  # noqa: B023
            return loss_of(model, m) * (float("inf") if bad else 1.0)

        mb.backward(fn, batches[rank], scaler=scaler)
        mb.step(optimizer, scaler=scaler, clip_norm=0.5)
        scales.append(scaler.get_scale())
        if step != 1:
            wanted.zero_grad()
            loss_of(wanted, joined(batches)).backward()
            nn.utils.clip_grad_norm_(wanted.parameters(), 0.5)
            with torch.no_grad():
                for p in wanted.parameters():
                    assert p.grad is not None
                    p -= 0.1 * p.grad
    pairs = zip(model.parameters(), wanted.parameters(), strict=True)
    return {"error": max(float((full(a) - b).abs().max()) for a, b in pairs), "scales": scales}


def exact_norms(rank: int, world_size: int) -> Any:
    """The norm that `step` returns is that of all shards, a plain tensor; gradients are clipped as by torch.

    torch 2.8 adds its 1e-6 to the norm of each shard: what it clips differs from unsharded gradients.
    """
    model, sharded, wanted = shard(make_model()), shard(make_model()), make_model()
    mb = Microbatcher(model, timeout_s=20)
    batches = batches_of([4] * world_size)
    mb.backward(lambda m: loss_of(model, m), batches[rank])
    loss_of(wanted, joined(batches)).backward()
    norm = mb.step(torch.optim.SGD(model.parameters(), lr=0.1), clip_norm=0.01)
    assert norm is not None
    loss_of(sharded, batches[rank]).backward()
    nn.utils.clip_grad_norm_(sharded.parameters(), 0.01)
    right = nn.utils.clip_grad_norm_(wanted.parameters(), 0.01)
    return answer(model, sharded, norm=abs(float(norm) - float(right)) < 1e-12, plain=type(norm).__name__)


def exact_mixed(rank: int, world_size: int) -> Any:
    """A mixed-precision policy: what a plain loop over the same microbatches makes, bit for bit."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def made() -> nn.Sequential:
        model = make_model().float()
        for part in (model[0], model[3], model):
            fully_shard(part, mp_policy=policy)
        return model

    model, plain = made(), made()
    batch = {"x": batch_of(rank, 0, 8)["x"].float(), "y": batch_of(rank, 0, 8)["y"]}
    mb = Microbatcher(model, microbatch_size=4, timeout_s=20)
    mb.backward(lambda m: loss_of(model, m), batch)
    for at in (0, 4):
        (loss_of(plain, {name: one[at : at + 4] for name, one in batch.items()}) * 0.5).backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return all(torch.equal(full(a.grad), full(b.grad)) for a, b in pairs)


def exact_count(rank: int, world_size: int) -> Any:
    """Collectives of the models in a steady batch: those of plain accumulation, all reductions included."""
    model = shard(make_model())
    mb = Microbatcher(model, microbatch_size=2, timeout_s=20)
    batch = batch_of(rank, 0, 6)

    def fn(m: Any) -> torch.Tensor:
        return loss_of(model, m)

    mb.backward(fn, batch)
    before = counts()
    mb.backward(fn, batch)
    ours = sum(begun_since(before).values())
    before = counts()
    for at in (0, 2, 4):
        loss_of(model, {name: one[at : at + 2] for name, one in batch.items()}).backward()
    return ours, sum(begun_since(before).values())


EXACT: tuple[Callable[[int, int], Any], ...] = (
    exact_unequal,
    exact_empty,
    exact_accumulation,
    exact_tokens,
    exact_options,
    exact_norm,
    exact_map,
    exact_scaler,
    exact_norms,
    exact_mixed,
    exact_count,
)


def run_exact(rank: int) -> dict[str, Any]:
    settled_down()
    return {one.__name__: one(rank, dist.get_world_size()) for one in EXACT}


# who fails for good


def failures(rank: int) -> list[Any]:
    """Rank 1 has a bug, or nothing fits there: all raise, nothing has moved, and all go on."""
    settled_down()
    model, wanted = shard(make_model()), make_model()
    mb = Microbatcher(model, timeout_s=20)
    how = ""

    def fn(m: Any) -> torch.Tensor:
        if rank == 1 and how == "bug":
            raise OSError("a bug of mine: the database timed out")
        out = model(m["x"])
        if rank == 1 and how == "hook":
            out.register_hook(lambda _: 1 / 0)
        if rank == 1 and how == "never":
            raise simulated_oom("cuda")
        return nn.functional.cross_entropy(out, m["y"])

    mb.backward(fn, batch_of(rank, 0, 4))  # rehearses
    model.zero_grad()
    found = []
    for how in ("bug", "hook", "never", "batch"):
        batch: Any = batch_of(rank, 0, 4)
        bad = 3 if rank == 1 and how == "batch" else batch
        before = torch.get_rng_state()
        told = outcome_of(lambda: mb.backward(fn, bad))  # noqa: B023
        untouched = all(p.grad is None for p in model.parameters())
        untouched = untouched and torch.equal(before, torch.get_rng_state())
        how = ""
        mb.backward(fn, batch)
        wanted.zero_grad()
        loss_of(wanted, joined(batches_of([4, 4]))).backward()
        found.append([*told, untouched, compared(model, wanted) < 1e-10])
        model.zero_grad()
        mb.load_state_dict(
            Microbatcher(nn.Linear(1, 1)).state_dict()
        )  # what was learned is that 1 is too much
    return found


def outcome_of(call: Callable[[], Any]) -> list[str]:
    try:
        call()
    except BaseException as error:  # noqa: BLE001
        return [type(error).__name__, str(error)]
    return ["value", ""]


def learned_elsewhere(rank: int, state: dict[str, Any] | None) -> dict[str, Any]:
    """What a run learns, and what one that begins with it knows: with other shards, nothing."""
    settled_down()
    model, events = shard(make_model()), []
    mb = Microbatcher(model, timeout_s=20, on_event=lambda event: events.append(event.kind))
    if state is not None:
        mb.load_state_dict(state)
    known = bool(mb.state_dict()["learned"]["shapes"])

    def fn(m: Any) -> torch.Tensor:
        if state is None and len(m["x"]) > 2:
            raise simulated_oom("cuda")
        return loss_of(model, m)

    mb.backward(fn, batch_of(rank, 0, 4))
    return {"state": mb.state_dict(), "known": known, "relearned": events.count("relearned")}


def unresettable(rank: int, how: str) -> Any:
    """A torch that cannot put FSDP2 at rest, or where doing it again is wrong: an error on all ranks."""
    settled_down()
    settle = wrappers.settle

    def refuses(module: nn.Module, *, cut_off: bool = True) -> None:
        if how == "refuses" and fsdp2.is_root(module):
            raise SnapshotError("this torch cannot")

    wrappers.settle = refuses
    fsdp_reset.verdicts.clear()
    if how == "refuses":
        fsdp2.can_reset = lambda: False
    faults = Faults()
    model = shard(make_model(faults))
    mb = Microbatcher(model, timeout_s=20)

    def fn(m: Any) -> torch.Tensor:
        return loss_of(model, m)

    mb.backward(fn, batch_of(rank, 0, 4))
    faults.left = {"late": 1} if rank == 1 else {}
    begun = time.monotonic()
    told = outcome_of(lambda: mb.backward(fn, batch_of(rank, 0, 4)))
    elapsed_s = time.monotonic() - begun
    wrappers.settle = settle
    dist.barrier()
    return *told, elapsed_s


def careful(rank: int) -> Any:
    """Where nothing can be done again, sizes begin with one sample and grow as readings allow."""
    settled_down()
    fsdp2.can_reset = lambda: False
    model = shard(wide())
    sizes = []
    with virtual_memory("64MiB" if rank == 0 else "12MiB"):
        mb = Microbatcher(model, timeout_s=20)
        for step in range(6):
            model.zero_grad()
            report = mb.backward(lambda m: loss_of(model, m), batch_of(rank, step, 64))
            sizes.append(max(report.microbatch_sizes))
    return sizes, report.retries


def refusals(rank: int) -> list[Any]:
    """What is refused, with the reason, on all ranks."""
    settled_down()
    model = shard(make_model())
    plain = make_model()
    fully_shard(plain[0])
    batch = batch_of(rank, 0, 4)
    other = shard(make_model())
    found = [
        outcome_of(lambda: Microbatcher(model, sync="overlap")),
        outcome_of(lambda: Microbatcher(model, nn.parallel.DistributedDataParallel(make_model()))),
        outcome_of(lambda: Microbatcher(plain).backward(lambda m: loss_of(plain, m), batch)),
        outcome_of(lambda: Microbatcher(model).backward_cached(model, torch.sum, batch["x"])),
        outcome_of(lambda: Microbatcher(model).backward(lambda m: loss_of(other, m), batch)),
        outcome_of(lambda: Microbatcher(make_model()).backward(lambda m: loss_of(other, m), batch)),
    ]
    model.set_requires_gradient_sync(False)
    found.append(outcome_of(lambda: Microbatcher(model).backward(lambda m: loss_of(model, m), batch)))
    model.set_requires_gradient_sync(True)

    def talks(m: Any) -> torch.Tensor:
        every = [torch.empty_like(m["x"]) for _ in range(2)]
        dist.all_to_all(every, [m["x"], m["x"]]) if len(every) > 2 else dist.broadcast(every[0], 0)
        return loss_of(model, m)

    found.append(outcome_of(lambda: Microbatcher(model).backward(talks, batch)))
    other[0].set_gradient_divide_factor(2.0)
    found.append(outcome_of(lambda: Microbatcher(other)))
    noise = GradientNoise(model)
    found.append(outcome_of(lambda: Microbatcher(model, noise=noise)))
    return found


def lost(rank: int, how: str) -> Any:
    """Rank 1 is killed, hangs, or is interrupted in the second batch."""
    settled_down()
    group = dist.new_group(timeout=timedelta(seconds=3))
    model = shard(make_model(), mesh=DeviceMesh.from_group(group, "cpu"))
    mb = Microbatcher(model, timeout_s=2)
    begun = time.monotonic()

    def fn(m: Any) -> torch.Tensor:
        if rank == 1 and step == 1:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "hangs":
                time.sleep(8)
            raise KeyboardInterrupt
        return loss_of(model, m)

    outcome = ["value", ""]
    for step in range(2):
        outcome = outcome_of(lambda: mb.backward(fn, batch_of(rank, step, 4)))  # noqa: B023
    elapsed_s = time.monotonic() - begun
    if rank == 1:
        end_process(3)
    if rank == 0:
        time.sleep(1)
    return *outcome, elapsed_s


# real limits, and a long run

REAL = [("64MiB", "6MiB"), ("6MiB", "64MiB"), ("4MiB", "8MiB")]


def wide() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 256), nn.GELU(), nn.Linear(256, 3)).double()


def real_limits(rank: int) -> list[Any]:
    """Each rank runs out where its own memory ends."""
    settled_down()
    found = []
    for limits in REAL:
        model, wanted = shard(wide()), wide()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        by_hand = torch.optim.AdamW(wanted.parameters(), lr=1e-2)
        retries = 0
        with virtual_memory(limits[rank]):
            mb = Microbatcher(model, timeout_s=20)
            for step in range(2):
                optimizer.zero_grad()
                report = mb.backward(lambda m: loss_of(model, m), batch_of(rank, step, 2000))  # noqa: B023
                retries += report.retries
                mb.step(optimizer)
        for step in range(2):
            by_hand.zero_grad()
            loss_of(wanted, joined([batch_of(r, step, 2000) for r in range(2)])).backward()
            by_hand.step()
        mine = [full(p) for p in model.parameters()]
        pairs = zip(mine, wanted.parameters(), strict=True)
        found.append(
            {
                "error": max(float((a - b).abs().max()) for a, b in pairs),
                "same": len(set(digests(digest(mine)))) == 1,
                "sizes": list(report.microbatch_sizes),
                "retries": retries,
            }
        )
    return found


def soak(rank: int, steps: int) -> dict[str, Any]:
    """Random sizes on each rank and random faults; the same batches by hand without any."""
    settled_down()
    chance = random.Random(11)
    faults = Faults()
    model, wanted = shard(make_model(faults)), make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    by_hand = torch.optim.AdamW(wanted.parameters(), lr=1e-2)
    mb = Microbatcher(model, timeout_s=60)

    def fn(micro: dict[str, torch.Tensor]) -> torch.Tensor:
        if len(micro["x"]) == 1:
            return loss_of(model, micro)
        faults.check("forward")
        out = model(micro["x"])
        out.register_hook(lambda _: faults.check("backward"))
        return nn.functional.cross_entropy(out, micro["y"])

    world_size, worst = dist.get_world_size(), 0.0
    with installed(faults):
        for step in range(steps):
            rows = [chance.randint(0 if step % 9 == 8 else 1, 12) for _ in range(world_size)]
            rows[0] = max(rows[0], 1)
            plan = [chance.choice([*PHASES[1:5], "", "", ""]) for _ in range(world_size)]
            faults.left = {plan[rank]: 1} if plan[rank] else {}
            optimizer.zero_grad()
            report = mb.backward(fn, batch_of(rank, step, rows[rank]))
            mb.step(optimizer, clip_norm=1.0)
            by_hand.zero_grad()
            loss = loss_of(wanted, joined([batch_of(r, step, rows[r]) for r in range(world_size)]))
            loss.backward()
            nn.utils.clip_grad_norm_(wanted.parameters(), 1.0)
            by_hand.step()
            told = report.loss.detach().double() * rows[rank] / sum(rows)
            dist.all_reduce(told)
            worst = max(worst, float((told - loss.detach()).abs()))
            if step % 10 == 9:
                mb.load_state_dict(Microbatcher(nn.Linear(1, 1)).state_dict())  # large sizes again
    mine = [full(p) for p in model.parameters()]
    worst = max(worst, *(float((a - b).abs().max()) for a, b in zip(mine, wanted.parameters(), strict=True)))
    return {"error": worst, "same": len(set(digests(digest(mine)))) == 1, "fired": faults.fired}
