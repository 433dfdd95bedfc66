"""What real ranks run in the tests of `Microbatcher` under DDP: many cases in one launch.

A case is data (which rank fails where, and when); every rank runs it, compares itself with one process on the
joined batches, and tells the others a digest of its parameters. Faults are raised at named places: in the
copy of a microbatch, in forward, in backward, where the reduction's memory is taken, where optimizer state is
made, and inside the optimizer's step.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from launch import end_process
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from batchfit._engine.batch.split import Batch
from batchfit._engine.data_parallel import ddp
from batchfit._engine.distributed.ranks import Ranks
from batchfit._engine.optimizer_step import step as stepping
from batchfit._microbatch.microbatcher import Microbatcher
from batchfit.errors import BatchfitError, RanksDisagreeError
from batchfit.testing import Operations, count_operations, fail_at, simulated_oom, virtual_memory

FEATURES = 6
PHASES = ("copy", "forward", "backward", "reserve", "state", "step")


class Faults:
    """Fails at a named place as often as it is told to."""

    def __init__(self) -> None:
        self.left: dict[str, int] = {}
        self.fired = 0

    def check(self, phase: str) -> None:
        if self.left.get(phase, 0) > 0:
            self.left[phase] -= 1
            self.fired += 1
            raise simulated_oom("cuda")


@contextmanager
def installed(faults: Faults) -> Iterator[None]:
    """The places that are not in the user's code."""
    fed, reduction, make_state = Batch.fed, ddp.Reduction, stepping.make_state

    def failing_fed(whole: Batch, micros: Any, device: Any) -> Iterator[Any]:
        for at, micro in enumerate(fed(whole, micros, device)):
            if at == len(micros) - 1:
                faults.check("copy")
            yield micro

    def failing_reduction(*args: Any, **kwargs: Any) -> Any:
        faults.check("reserve")
        return reduction(*args, **kwargs)

    def failing_state(optimizer: Any) -> None:
        make_state(optimizer)
        faults.check("state")

    Batch.fed, ddp.Reduction = failing_fed, failing_reduction  # type: ignore[assignment, method-assign, misc]
    stepping.make_state = failing_state  # type: ignore[assignment]
    try:
        yield
    finally:
        Batch.fed, ddp.Reduction, stepping.make_state = fed, reduction, make_state  # type: ignore[method-assign, misc]


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


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.GELU(), nn.Linear(8, 3))
    return model.double()


def batch_of(rank: int, step: int, rows: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(rows, FEATURES, dtype=torch.float64, generator=generator)
    return {"x": x, "y": torch.randint(0, 3, (rows,), generator=generator)}


def joined(batches: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def loss_of(model: Callable[..., Any], micro: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(micro["x"]), micro["y"])


def digest(tensors: Any) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def digests(value: str) -> list[str]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def rows_of(case: dict[str, Any], rank: int, step: int) -> int:
    """Unequal local batches, and a shorter last one."""
    return int(case.get("rows", [9, 6, 11, 7])[rank % 4]) - (2 if step == case.get("steps", 3) - 1 else 0)


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
    """`case`: ranks that fail, the phase, the step, how often; answers what a test looks at."""
    faults = Faults()
    inner = make_model()
    model = DistributedDataParallel(inner, **case.get("ddp", {}))
    kind = CutOff if case["phase"] == "step" else torch.optim.AdamW
    optimizer: Any = kind(inner.parameters(), lr=1e-2)
    CutOff.faults.append(faults)
    mb = Microbatcher(model, microbatch_size=case.get("microbatch_size"), timeout_s=20)

    def fn(micro: dict[str, torch.Tensor]) -> torch.Tensor:
        faults.check("forward")
        out = model(micro["x"])
        out.register_hook(lambda _: faults.check("backward"))
        return nn.functional.cross_entropy(out, micro["y"])

    retries = 0
    with installed(faults):
        for step in range(case.get("steps", 3)):
            if rank in case["failing"] and step == case["at"]:
                faults.left = {case["phase"]: case["times"]}
            optimizer.zero_grad()
            report = mb.backward(fn, batch_of(rank, step, rows_of(case, rank, step)))
            retries += report.retries
            mb.step(optimizer, clip_norm=case.get("clip"), rollback=case["phase"] == "step")
    mine = [parameter.detach() for parameter in inner.parameters()]
    wanted = reference(case, world_size)
    error = max(float((a - b).abs().max()) for a, b in zip(mine, wanted, strict=True))
    return {
        "same": len(set(digests(digest(mine)))) == 1,
        "error": error,
        "fired": faults.fired,
        "retries": retries,
    }


def settled_down() -> None:
    """Quick recoveries: what torch has loaded is not looked through each time. And no log."""
    gc.collect()
    gc.freeze()
    logging.getLogger("batchfit").setLevel(logging.CRITICAL)


def run_cases(rank: int, cases: list[dict[str, Any]]) -> list[Any]:
    settled_down()
    world_size = dist.get_world_size()
    return [run_case(rank, world_size, case) for case in cases]


# a fault at every operation before the vote


def sweep(rank: int) -> list[dict[str, Any]]:
    """Each rank in turn runs out before each operation of a batch, up to its vote."""
    settled_down()
    inner = make_model()
    model = DistributedDataParallel(inner)
    rows = [4, 3]
    wanted = make_model()
    loss_of(wanted, joined([batch_of(r, 0, rows[r]) for r in range(2)])).backward()
    batch = batch_of(rank, 0, rows[rank])

    def run(at: int | None) -> Operations:
        """Fail before that operation; None: only count those before the vote."""
        mb = Microbatcher(model, microbatch_size=2, timeout_s=20)
        model.zero_grad()
        gather, before_vote = Ranks.gather, []
        with count_operations() if at is None else fail_at(at) as seen:

            def counting(self: Ranks, value: Any, *, doing: str) -> list[Any]:
                before_vote.append(seen.operations)
                return gather(self, value, doing=doing)

            Ranks.gather = counting if at is None else gather  # type: ignore[method-assign]
            try:
                mb.backward(lambda micro: loss_of(model, micro), batch)
            finally:
                Ranks.gather = gather  # type: ignore[method-assign]
        return Operations(before_vote[0] if at is None else 0, "", seen.fired)

    found = []
    for failing in range(2):
        counts = [int(one) for one in digests(str(run(None).operations))]
        fired, worst = 0, 0.0
        for at in range(counts[failing]):
            fired += run(at if rank == failing else None).fired
            worst = max(worst, compared(inner, wanted))
        found.append({"operations": counts[failing], "fired": fired, "error": worst})
    return found


# what is exact


def compared(model: nn.Module, wanted: nn.Module) -> float:
    """The largest difference of gradients; where one has none, so must the other."""
    worst = 0.0
    for a, b in zip(model.parameters(), wanted.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None and b.grad is not None:
            worst = max(worst, float((a.grad - b.grad).abs().max()))
    return worst


def answer(model: nn.Module, wanted: nn.Module) -> dict[str, Any]:
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return {"error": compared(model, wanted), "same": len(set(digests(digest(grads)))) == 1}


def exact_tokens(rank: int, world_size: int) -> Any:
    """Ragged batches of tokens, weighed by their valid labels; `lengths` sorts and trims."""
    found = []
    for lengths in (None, "mask"):
        inner = Tagger()
        mb = Microbatcher(
            model := DistributedDataParallel(inner),
            weight=lambda m: (m["labels"] != -100).sum(),
            lengths=lengths,
            microbatch_size=2,
        )
        mb.backward(lambda m: tagging(model, m), tokens_of(rank))
        wanted = Tagger()
        tagging(wanted, joined([tokens_of(r) for r in range(world_size)])).backward()
        found.append(answer(inner, wanted))
    return found


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inside = nn.Embedding(11, 4, dtype=torch.float64)
        self.out = nn.Linear(4, 3, dtype=torch.float64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(self.inside(ids).cumsum(1))
        return found


def tokens_of(rank: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    lengths = torch.tensor([[9, 3, 5, 2], [4, 8, 1, 7], [6, 6, 2, 3], [1, 2, 9, 9]][rank % 4])
    mask = (torch.arange(10)[None] < lengths[:, None]).long()
    ids = torch.randint(0, 11, (4, 10), generator=generator) * mask
    labels = torch.randint(0, 3, (4, 10), generator=generator).masked_fill(mask == 0, -100)
    return {"ids": ids, "labels": labels, "mask": mask}


def tagging(model: Callable[..., Any], micro: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(micro["ids"]).flatten(0, 1), micro["labels"].flatten())


def exact_empty(rank: int, world_size: int) -> Any:
    """Rank 1 has no samples left: an empty batch, then None; all must have some, once."""
    found = []
    for empty in (batch_of(1, 0, 0), None):
        inner = make_model()
        model = DistributedDataParallel(inner)
        mb = Microbatcher(model, microbatch_size=2)
        report = mb.backward(lambda m: loss_of(model, m), empty if rank == 1 else batch_of(rank, 0, 5))  # noqa: B023
        wanted = make_model()
        others = [r for r in range(world_size) if r != 1]
        loss_of(wanted, joined([batch_of(r, 0, 5) for r in others])).backward()
        found.append({**answer(inner, wanted), "sizes": list(report.microbatch_sizes)})
    errors = []
    for on_zero in ("raise", "skip"):
        mb = Microbatcher(model, on_zero_weight=on_zero)  # type: ignore[arg-type]
        model.zero_grad()
        try:
            errors.append(mb.backward(lambda m: loss_of(model, m), None).skipped)
        except BatchfitError as error:
            errors.append(str(error))
    return found, errors, all(p.grad is None for p in inner.parameters())


def exact_accumulation(rank: int, world_size: int) -> Any:
    """Two batches and two calls; `no_sync` around some; gradients that were there before."""
    found = []
    for quiet in ((), (0,), (1,), (0, 1), (0, 2), (1, 2)):
        inner = make_model()
        model = DistributedDataParallel(inner)
        mb = Microbatcher(model, microbatch_size=3)
        wanted = make_model()
        collectives = []
        for step in range(4):
            with model.no_sync() if step in quiet else nullcontext(), counted_collectives() as seen:
                mb.backward(lambda m: loss_of(model, m), batch_of(rank, step, 3 + 2 * rank))  # noqa: B023
            collectives.append(len(seen))
            loss_of(wanted, joined([batch_of(r, step, 3 + 2 * r) for r in range(world_size)])).backward()
        found.append({**answer(inner, wanted), "collectives": collectives})
    return found


@contextmanager
def counted_collectives() -> Iterator[list[str]]:
    """The collectives of a block, by their names."""
    seen: list[str] = []
    reduce_all, send_all = dist.all_reduce, dist.broadcast

    def all_reduce(*args: Any, **kwargs: Any) -> Any:
        seen.append("all_reduce")
        return reduce_all(*args, **kwargs)

    def broadcast(*args: Any, **kwargs: Any) -> Any:
        seen.append("broadcast")
        return send_all(*args, **kwargs)

    dist.all_reduce, dist.broadcast = all_reduce, broadcast  # type: ignore[assignment]
    try:
        yield seen
    finally:
        dist.all_reduce, dist.broadcast = reduce_all, send_all


def exact_misuse(rank: int, world_size: int) -> Any:
    """A step on local gradients, no_sync on one rank only: errors on all ranks, and one can go on."""
    inner = make_model()
    model = DistributedDataParallel(inner)
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
    mb = Microbatcher(model)

    def fn(micro: Any) -> Any:
        return loss_of(model, micro)

    told = []
    with model.no_sync():
        mb.backward(fn, batch_of(rank, 0, 4))
    for act in (lambda: mb.step(optimizer), lambda: half_quiet(rank, model, mb, fn)):
        try:
            act()
            told.append("")
        except BatchfitError as error:
            told.append(str(error))
    optimizer.zero_grad()
    mb.backward(fn, batch_of(rank, 0, 4))
    mb.step(optimizer)
    wanted = make_model()
    loss_of(wanted, joined([batch_of(r, 0, 4) for r in range(world_size)])).backward()
    return told, answer(inner, wanted)


def exact_zero(rank: int, world_size: int) -> Any:
    """An optimizer whose step sends is refused on all ranks; its own step is what it always was."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    inner, wanted = make_model(), make_model()
    model = DistributedDataParallel(inner)
    optimizer = ZeroRedundancyOptimizer(inner.parameters(), torch.optim.AdamW, lr=1e-2)
    mb = Microbatcher(model, microbatch_size=3)
    mb.backward(lambda m: loss_of(model, m), batch_of(rank, 0, 4 + rank))
    told = outcome_of(lambda: mb.step(optimizer))
    loss_of(wanted, joined([batch_of(r, 0, 4 + r) for r in range(world_size)])).backward()
    found = answer(inner, wanted)
    optimizer.step()
    torch.optim.AdamW(wanted.parameters(), lr=1e-2).step()
    pairs = zip(inner.parameters(), wanted.parameters(), strict=True)
    found["error"] = max(found["error"], *(float((a - b).detach().abs().max()) for a, b in pairs))
    return told, found


def half_quiet(rank: int, model: Any, mb: Microbatcher, fn: Any) -> None:
    with model.no_sync() if rank == 0 else nullcontext():
        mb.backward(fn, batch_of(rank, 0, 4))


class Branches(nn.Module):
    """Parameters that only some ranks use, and one that nobody does; BatchNorm's buffers; a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared = nn.Linear(FEATURES, 3, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(3, dtype=torch.float64)
        self.rare = nn.Linear(3, 3, dtype=torch.float64)
        self.unused = nn.Linear(2, 2, dtype=torch.float64)
        self.frozen = nn.Linear(3, 3, dtype=torch.float64).requires_grad_(False)

    def forward(self, x: torch.Tensor, rare: bool) -> torch.Tensor:
        out: torch.Tensor = self.frozen(self.norm(self.shared(x)))
        return self.rare(out) if rare else out


def exact_branches(rank: int, world_size: int) -> Any:
    """Gradients on one rank only count as zeros elsewhere; none anywhere stays None; rank 0's buffers win."""
    inner = Branches().train()
    model = DistributedDataParallel(inner, find_unused_parameters=True)
    mb = Microbatcher(model, batch_norm="ignore")
    with counted_collectives() as seen:
        for step in range(2):
            mb.backward(
                lambda m: nn.functional.cross_entropy(model(m["x"], rank == 1), m["y"]),
                batch_of(rank, step, 4),
            )
    wanted = Branches()
    buffers = []
    for r in range(world_size):
        one = Branches().train()
        for step in range(2):
            batch = batch_of(r, step, 4)
            # in its own statistics, as each rank has it; rank 0's buffers go on to the next batch
            (nn.functional.cross_entropy(one(batch["x"], r == 1), batch["y"]) / world_size).backward()
        for a, b in zip(wanted.parameters(), one.parameters(), strict=True):
            if b.grad is not None:
                a.grad = b.grad.clone() if a.grad is None else a.grad + b.grad
        buffers.append([buffer.clone() for buffer in one.buffers()])
    alike = all(torch.equal(a, b) for a, b in zip(inner.buffers(), buffers[0], strict=True))
    return {
        **answer(inner, wanted),
        "buffers": alike,
        "unused": inner.unused.weight.grad is None,
        "seen": seen,
    }


def zeros_that_fail(rank: int) -> list[Any]:
    """Rank 0 makes zeros for gradients that only rank 1 has: out of memory once, then with another error."""
    settled_down()
    make_zeros, outcomes = ddp._zeros, []
    for error in (simulated_oom("cuda"), ValueError("a bug of zeros")):
        model = DistributedDataParallel(Branches().train(), find_unused_parameters=True)
        mb = Microbatcher(model, batch_norm="ignore", timeout_s=20)
        left: list[Exception] = [error] if rank == 0 else []

        def failing(leaf: torch.Tensor, left: list[Exception] = left) -> torch.Tensor:
            if left:
                raise left.pop()
            return make_zeros(leaf)

        def fn(micro: dict[str, torch.Tensor], model: Any = model) -> torch.Tensor:
            return nn.functional.cross_entropy(model(micro["x"], rank == 1), micro["y"])

        ddp._zeros = failing
        try:
            outcome = outcome_of(lambda: mb.backward(fn, batch_of(rank, 0, 4)))  # noqa: B023
        finally:
            ddp._zeros = make_zeros
        grads = [one.grad for one in model.parameters() if one.grad is not None]
        outcomes.append([*outcome[:2], len(grads), len(set(digests(digest(grads)))) == 1])
    return outcomes


def exact_models(rank: int, world_size: int) -> Any:
    """Two wrapped models that share a parameter, `reduction="sum"`, gradient_as_bucket_view, compiled."""
    found = []
    for kind in ("two", "sum", "view", "compiled", "cached"):
        first, second = make_model(), make_model(1)
        again, other = make_model(), make_model(1)
        for a, b in ((first, second), (again, other)):
            b[2].weight = a[2].weight  # type: ignore[union-attr]
        view = {"gradient_as_bucket_view": kind == "view"}
        one, two = DistributedDataParallel(first, **view), DistributedDataParallel(second, **view)
        run: Any = torch.compile(one, backend="eager") if kind == "compiled" else one
        sums = kind == "sum"
        mb = Microbatcher(run, two, microbatch_size=2, reduction="sum" if sums else "mean")

        def total(a: Any, b: Any, micro: Any) -> Any:
            each = {"reduction": "sum" if sums else "mean"}  # noqa: B023
            out = a(micro["x"]) + b(micro["x"])
            return nn.functional.cross_entropy(out, micro["y"], **each)

        for step in range(2):
            if kind == "cached":
                mb.backward_cached(
                    lambda m: (one(m["x"]), two(m["x"])),  # noqa: B023
                    lambda pair: (pair[0] @ pair[1].T).logsumexp(1).mean(),
                    batch_of(rank, step, 4 + rank),
                )
                for r in range(world_size):
                    x = batch_of(r, step, 4 + r)["x"]
                    share = (4 + r) / sum(4 + s for s in range(world_size))
                    ((again(x) @ other(x).T).logsumexp(1).mean() * share).backward()
                continue
            mb.backward(lambda m: total(run, two, m), batch_of(rank, step, 4 + rank))  # noqa: B023
            total(again, other, joined([batch_of(r, step, 4 + r) for r in range(world_size)])).backward()
        both = nn.ModuleList([first, second]), nn.ModuleList([again, other])
        found.append({"kind": kind, **answer(*both)})
    return found


def exact_scaler(rank: int, world_size: int) -> Any:
    """GradScaler: an infinity on one rank skips the step on all of them; the rest is as in one process."""
    inner = make_model()
    model = DistributedDataParallel(inner)
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    mb = Microbatcher(model, microbatch_size=3)
    wanted = make_model()
    by_hand = torch.optim.SGD(wanted.parameters(), lr=0.1, momentum=0.9)
    scales = []
    for step in range(4):
        optimizer.zero_grad()
        batch = batch_of(rank, step, 4 + rank)
        bad = step == 1 and rank == 1
        mb.backward(lambda m: loss_of(model, m) * (float("inf") if bad else 1.0), batch, scaler=scaler)  # noqa: B023
        mb.step(optimizer, scaler=scaler, clip_norm=0.5)
        scales.append(scaler.get_scale())
        if step != 1:
            by_hand.zero_grad()
            loss_of(wanted, joined([batch_of(r, step, 4 + r) for r in range(world_size)])).backward()
            nn.utils.clip_grad_norm_(wanted.parameters(), 0.5)
            by_hand.step()
    pairs = zip(inner.parameters(), wanted.parameters(), strict=True)
    worst = max(float((a - b).detach().abs().max()) for a, b in pairs)
    return {"error": worst, "same": len(set(digests(digest(inner.parameters())))) == 1, "scales": scales}


def exact_map(rank: int, world_size: int) -> Any:
    """`map` talks to nobody, though DDP sends buffers in each forward: ranks call it unequally often."""
    inner = nn.Sequential(nn.Linear(FEATURES, 3), nn.BatchNorm1d(3)).double().eval()
    model = DistributedDataParallel(inner)
    mb = Microbatcher(model, microbatch_size=2)
    x = batch_of(rank, 0, 3 + 4 * rank)["x"]
    ok = all(torch.equal(mb.map(model, x), torch.cat([inner(p) for p in x.split(2)])) for _ in range(rank))
    return ok, model.require_forward_param_sync, model.require_backward_grad_sync


def exact_buckets(rank: int, world_size: int) -> Any:
    """Many buckets in few slots, several types, odd strides on one rank only, large tensors in place."""
    found = []
    for cap_bytes in (1 << 20, 512, 64):
        generator = torch.Generator().manual_seed(3)
        parameters: list[torch.Tensor] = []
        for number, dtype in enumerate([torch.float64, torch.float32, torch.float64, torch.bfloat16] * 6):
            shape = [(3,), (2, 3, 2, 2), (5, 4), ()][number % 4] if number % 7 else (4, 6, 3, 3)
            tensor = torch.zeros(shape, dtype=dtype)
            if tensor.dim() == 4 and number % 3 == 0:
                tensor = tensor.contiguous(memory_format=torch.channels_last)
            parameters.append(nn.Parameter(tensor))
        parameters.append(nn.Parameter(torch.zeros(10, 8, dtype=torch.float64)[:, ::2]))  # with holes
        wanted = []
        for number, one in enumerate(parameters):
            drawn = [torch.randint(-8, 9, one.shape, generator=generator).to(one.dtype) for _ in range(4)]
            wanted.append(torch.stack(drawn[:world_size]).sum(0))
            mine = drawn[rank]
            if one.dim() == 4 and number % 2 and rank == 1:  # another layout than on the other ranks
                mine = mine.contiguous(memory_format=torch.channels_last)
            elif one.dim() > 1:
                mine = torch.empty_like(one).copy_(mine)
            one.grad = mine
        buffers = [torch.full((70,), float(rank)), torch.full((2,), rank), torch.full((9,), rank + 1.0)]
        reduction = ddp.Reduction(parameters, buffers, group=dist.group.WORLD, cap_bytes=cap_bytes)
        with count_operations() as seen, no_new_memory():
            count = reduction.run(parameters, [one.grad for one in parameters], buffers)  # type: ignore[misc]
        right = all(torch.equal(one.grad, sum_) for one, sum_ in zip(parameters, wanted, strict=True))  # type: ignore[arg-type]
        sent = [float(buffer.unique()) for buffer in buffers] == [0.0, 0.0, 1.0]
        found.append({"right": right, "sent": sent, "collectives": count, "operations": seen.operations > 0})
    return found


@contextmanager
def no_new_memory() -> Iterator[None]:
    """Inside, an operation that makes a tensor with memory of its own is an error."""

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = str(func)
            made = ("empty", "zeros", "clone", "new_", "cat", "stack", "_to_copy", "contiguous")
            assert not any(word in name for word in made), name
            return func(*args, **(kwargs or {}))

    with Watch():
        yield


def exact_count(rank: int, world_size: int) -> Any:
    """As many collectives as DDP has buckets, and no vote among them."""
    inner = nn.Sequential(*(nn.Linear(256, 256) for _ in range(12)))
    model = DistributedDataParallel(inner, bucket_cap_mb=1)
    for _ in range(3):
        model(torch.randn(2, 256)).mean().backward()
    told = model._get_ddp_logging_data()
    buckets = str(told.get("rebuilt_bucket_sizes") or told["bucket_sizes"]).split(",")
    mb = Microbatcher(model, microbatch_size=2)
    counts = []
    for _ in range(2):
        with counted_collectives() as seen:
            mb.backward(lambda x: model(x).square().mean(), torch.randn(6, 256))
        counts.append(len(seen))
    return counts, len(buckets)


EXACT = (
    exact_count,
    exact_buckets,
    exact_tokens,
    exact_empty,
    exact_accumulation,
    exact_misuse,
    exact_branches,
    exact_models,
    exact_scaler,
    exact_zero,
    exact_map,
)


def run_exact(rank: int) -> dict[str, Any]:
    settled_down()
    return {case.__name__: case(rank, dist.get_world_size()) for case in EXACT}


# ranks that fail


def outcome_of(act: Callable[[], Any]) -> list[str]:
    try:
        return ["value", str(act())]
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - the test looks at it
        return [type(error).__name__, "\n".join([str(error), *getattr(error, "__notes__", [])])]


def state_of(inner: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    tensors = [*inner.parameters(), *(p.grad for p in inner.parameters() if p.grad is not None)]
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return digest(tensors)


def failures(rank: int) -> list[Any]:
    """One rank fails for good, in many ways: all raise, nothing has changed anywhere, and all can go on."""
    settled_down()
    faults = Faults()
    inner = make_model()
    model = DistributedDataParallel(inner)
    optimizer = torch.optim.AdamW(inner.parameters(), lr=1e-2)
    mb = Microbatcher(model, timeout_s=20)

    def fn(micro: dict[str, torch.Tensor], bug: str = "") -> torch.Tensor:
        out = model(micro["x"])
        if bug == "forward" and rank == 1:
            raise KeyError("a bug of mine")
        if bug == "backward" and rank == 1:
            out.register_hook(lambda _: 1 / 0)
        if bug == "oom" and rank == 1:
            raise simulated_oom("cuda")
        return nn.functional.cross_entropy(out, micro["y"])

    def backward(bug: str = "", batch: Any = None) -> Any:
        batch = batch_of(rank, 0, 4) if batch is None else batch
        return mb.backward(lambda micro: fn(micro, bug), batch)

    def step(phase: str, *, rollback: bool = False) -> Any:
        if rank == 1:
            faults.left = {phase: 9}
        kind = CutOff if phase == "step" else torch.optim.AdamW
        other: Any = kind(inner.parameters(), lr=1e-2)
        CutOff.faults.append(faults)
        return mb.step(other, rollback=rollback)

    told = []
    with installed(faults):
        for act in (
            lambda: backward("forward"),
            lambda: backward("backward"),
            lambda: backward("oom"),
            lambda: backward(batch="no batch" if rank == 1 else None),
            lambda: step("state"),
            lambda: step("step", rollback=True),
            lambda: mb.step(optimizer if rank == 0 else None),  # type: ignore[arg-type]
        ):
            optimizer.zero_grad()
            faults.left = {}
            backward()
            before = state_of(inner, optimizer)
            outcome = outcome_of(act)
            alike = state_of(inner, optimizer) == before
            faults.left = {}
            mb.step(optimizer)  # all can go on
            same = len(set(digests(digest(inner.parameters())))) == 1
            told.append([*outcome, alike, same])
    return told


def cut_off_step(rank: int) -> Any:
    """Without a host copy rank 1 is half way through its step: the other is told at its next agreement."""
    settled_down()
    faults = Faults()
    inner = make_model()
    model = DistributedDataParallel(inner)
    optimizer = torch.optim.AdamW(inner.parameters(), lr=1e-2)
    mb = Microbatcher(model, timeout_s=20)
    begun = time.monotonic()

    def run() -> None:
        for step in range(3):
            mb.backward(lambda m: loss_of(model, m), batch_of(rank, step, 4))
            if step == 1 and rank == 1:
                optimizer.register_step_pre_hook(lambda *_: faults.check("step"))
                faults.left = {"step": 1}
            mb.step(optimizer)

    return *outcome_of(run), time.monotonic() - begun


def interrupted(rank: int) -> Any:
    """Ctrl-C on rank 1: the others hear of it at once."""
    settled_down()
    inner = make_model()
    model = DistributedDataParallel(inner)
    mb = Microbatcher(model, timeout_s=20)
    begun = time.monotonic()

    def fn(micro: Any) -> Any:
        if rank == 1:
            raise KeyboardInterrupt
        return loss_of(model, micro)

    outcome = outcome_of(lambda: mb.backward(fn, batch_of(rank, 0, 4)))
    elapsed_s = time.monotonic() - begun
    if rank == 0:
        time.sleep(1)  # it keeps the store, and a busy machine may let the others look late
    return *outcome, elapsed_s


def interrupted_in_vote(rank: int) -> Any:
    """Ctrl-C on rank 1 while it waits for the others' votes on a batch, and lives on."""
    settled_down()
    model = DistributedDataParallel(make_model())
    mb = Microbatcher(model, timeout_s=20)
    gather = Ranks.gather

    def fn(micro: Any) -> Any:
        if rank == 0:
            while not Ranks.current().flagged("rank 1 waits"):
                time.sleep(0.01)
        return loss_of(model, micro)

    def waiting(self: Ranks, value: Any, *, doing: str) -> list[Any]:
        previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        try:
            return gather(self, value, doing=doing)
        finally:
            signal.signal(signal.SIGALRM, previous)
            self.flag("rank 1 waits")

    mb.backward(lambda micro: loss_of(model, micro), batch_of(rank, 0, 4))
    if rank == 1:
        Ranks.gather = waiting  # type: ignore[method-assign]
    begun = time.monotonic()
    outcome = outcome_of(lambda: mb.backward(fn, batch_of(rank, 0, 4)))
    elapsed_s = time.monotonic() - begun
    digests("nobody ends before")
    return *outcome, elapsed_s


def talkative(rank: int) -> list[Any]:
    """Functions that talk to other ranks, with unequal microbatches; then one that does not."""
    settled_down()
    found = []
    for sync_ in ("safe", "overlap"):
        inner, wanted = make_model(), make_model()
        model = DistributedDataParallel(inner)
        mb = Microbatcher(model, microbatch_size=4, sync=sync_, timeout_s=20)  # type: ignore[arg-type]

        def logs(micro: Any) -> Any:
            loss = loss_of(model, micro)  # noqa: B023
            dist.all_reduce(loss.detach().clone())
            return loss

        def hooked(micro: Any) -> Any:
            loss = loss_of(model, micro)  # noqa: B023
            loss.register_hook(lambda gradient: dist.all_reduce(gradient.clone()))
            return loss

        rows = [8, 3]
        for fn in (logs, logs):
            found.append(outcome_of(lambda: mb.backward(fn, batch_of(rank, 0, rows[rank]))))  # noqa: B023
        found.append(outcome_of(lambda: mb.backward(hooked, batch_of(rank, 0, 4))))  # noqa: B023
        # One plain step: DDP sorts its buckets in the next forward, and that is no collective of fn's.
        loss_of(model, batch_of(rank, 0, 4)).backward()
        model.zero_grad()
        for step in range(2):
            mb.backward(lambda m: loss_of(model, m), batch_of(rank, step, rows[rank]))  # noqa: B023
            loss_of(wanted, joined([batch_of(r, step, rows[r]) for r in range(2)])).backward()
        found.append(answer(inner, wanted))
    return found


def overlap_misfits(rank: int) -> list[Any]:
    """Under `overlap` a rank fails before all agree how to reduce, or leaves out a step: then all go on."""
    settled_down()
    inner = make_model()
    model = DistributedDataParallel(inner)
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
    mb = Microbatcher(model, sync="overlap", timeout_s=20)

    def backward(batch: Any) -> Any:
        return mb.backward(lambda m: loss_of(model, m), batch).microbatch_sizes

    good, told = batch_of(rank, 0, 4), []
    for _ in range(2):
        backward(good)
    for act in (
        lambda: backward("no batch" if rank == 1 else good),
        lambda: backward(good) if rank == 1 else mb.step(optimizer),
    ):
        begun = time.monotonic()
        told.append([*outcome_of(act), time.monotonic() - begun])
        if rank == 0 or len(told) < 3:  # rank 1 left out the step, and waited in this batch for the other
            told.append(outcome_of(lambda: backward(good)))
    return told


def killed(rank: int, how: str) -> Any:
    """Rank 1 dies or hangs in its second batch, or in the reduction, or fails there by itself."""
    settled_down()
    inner = make_model()
    model = DistributedDataParallel(inner)
    mb = Microbatcher(model, timeout_s=2)
    begun = time.monotonic()

    def fn(micro: Any) -> Any:
        if rank == 1 and step == 1:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "hangs":
                time.sleep(5)
        return loss_of(model, micro)

    run = ddp.Reduction.run

    def dying(self: Any, *args: Any, **kwargs: Any) -> Any:
        if how == "reducing" and rank == 1 and step == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "breaks" and rank == 1 and step == 1:
            raise simulated_oom("cuda")
        return run(self, *args, **kwargs)

    ddp.Reduction.run = dying  # type: ignore[method-assign]
    outcome = ["value", ""]
    for step in range(2):
        outcome = outcome_of(lambda: mb.backward(fn, batch_of(rank, step, 4)))  # noqa: B023
    elapsed_s = time.monotonic() - begun
    if rank == 0:
        time.sleep(1)
    return *outcome, elapsed_s


# real limits, and a long run

# Bytes of virtual memory for each of two ranks: what a rank's batch needs is about 13 MiB.
REAL = [
    ("64MiB", "6MiB"),
    ("6MiB", "64MiB"),
    ("4MiB", "8MiB"),
    ("8MiB", "4MiB"),
    ("64MiB", "3MiB"),
]


def wide(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 256), nn.GELU(), nn.Linear(256, 3)).double()


def real_limits(rank: int) -> list[Any]:
    """Each rank runs out where its own memory ends."""
    settled_down()
    found = []
    for limits in REAL:
        inner, wanted = wide(), wide()
        model = DistributedDataParallel(inner)
        optimizer = torch.optim.AdamW(inner.parameters(), lr=1e-2)
        by_hand = torch.optim.AdamW(wanted.parameters(), lr=1e-2)
        retries = 0
        with virtual_memory(limits[rank]):
            mb = Microbatcher(model, timeout_s=20)
            for step in range(3):
                batch = batch_of(rank, step, 2000)
                optimizer.zero_grad()
                report = mb.backward(lambda m: loss_of(model, m), batch)  # noqa: B023
                retries += report.retries
                mb.step(optimizer)
                del batch
        for step in range(3):
            by_hand.zero_grad()
            loss_of(wanted, joined([batch_of(r, step, 2000) for r in range(2)])).backward()
            by_hand.step()
        pairs = zip(inner.parameters(), wanted.parameters(), strict=True)
        found.append(
            {
                "error": max(float((a - b).detach().abs().max()) for a, b in pairs),
                "same": len(set(digests(digest(inner.parameters())))) == 1,
                "sizes": list(report.microbatch_sizes),
                "retries": retries,
            }
        )
    return found


def soak(rank: int, steps: int) -> dict[str, Any]:
    """Random sizes on each rank and random faults; the same batches by hand without any."""
    settled_down()
    chance = random.Random(7)
    faults = Faults()
    inner, wanted = make_model(), make_model()
    model = DistributedDataParallel(inner)
    optimizer = torch.optim.AdamW(inner.parameters(), lr=1e-2)
    by_hand = torch.optim.AdamW(wanted.parameters(), lr=1e-2)
    mb = Microbatcher(model, timeout_s=60)

    def fn(micro: dict[str, torch.Tensor]) -> torch.Tensor:
        faults.check("forward")
        out = model(micro["x"])
        out.register_hook(lambda _: faults.check("backward"))
        return nn.functional.cross_entropy(out, micro["y"])

    world_size, worst = dist.get_world_size(), 0.0
    with installed(faults):
        for step in range(steps):
            rows = [chance.randint(0 if step % 9 == 0 else 1, 12) for _ in range(world_size)]
            if not any(rows):
                rows[0] = 3
            plan = [chance.choice([*PHASES[:4], "", "", ""]) for _ in range(world_size)]
            faults.left = {plan[rank]: 1} if plan[rank] and rows[rank] > 1 else {}
            optimizer.zero_grad()
            report = mb.backward(fn, batch_of(rank, step, rows[rank]))
            mb.step(optimizer, clip_norm=1.0)
            if max(report.microbatch_sizes, default=2) == 1:  # a fault at one sample is an error, rightly
                mb = Microbatcher(model, timeout_s=60)
            by_hand.zero_grad()
            whole = joined([batch_of(r, step, rows[r]) for r in range(world_size)])
            loss = loss_of(wanted, whole)
            loss.backward()
            nn.utils.clip_grad_norm_(wanted.parameters(), 1.0)
            by_hand.step()
            # The global loss from the local ones, as a user would: weighted by samples.
            told = report.loss.detach().double() * rows[rank] / sum(rows)
            dist.all_reduce(told)
            worst = max(worst, float((told - loss.detach()).abs()))
    pairs = zip(inner.parameters(), wanted.parameters(), strict=True)
    worst = max(worst, *(float((a - b).detach().abs().max()) for a, b in pairs))
    return {"error": worst, "same": len(set(digests(digest(inner.parameters())))) == 1, "fired": faults.fired}


# sync="overlap"


def overlap(rank: int) -> Any:
    """Exact, with DDP's own reductions once sizes are known; unequal, empty and accumulated batches too."""
    settled_down()
    world_size = dist.get_world_size()
    found = []
    for options in ({}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}):
        inner, wanted = make_model(), make_model()
        model = DistributedDataParallel(inner, **options)
        mb = Microbatcher(model, microbatch_size=3, sync="overlap", timeout_s=20)
        ours = []
        for step in range(6):
            quiet, empty, more = step == 3, step == 4 and rank == 1, step == 5
            if not more:
                model.zero_grad()
                wanted.zero_grad()
            rows = [4, 5, 7][rank]
            batch = None if empty else batch_of(rank, step, rows)
            with counted_collectives() as seen, model.no_sync() if quiet else nullcontext():
                mb.backward(lambda m: loss_of(model, m), batch)  # noqa: B023
            ours.append(len(seen))
            if quiet:  # reduced with the next one
                mb.backward(lambda m: loss_of(model, m), batch)  # noqa: B023
            who = [r for r in range(world_size) if not (step == 4 and r == 1)]
            for _ in range(1 + quiet):
                loss_of(wanted, joined([batch_of(r, step, [4, 5, 7][r]) for r in who])).backward()
            found.append(answer(inner, wanted))
        found[-1]["ours"] = ours
    return found


def overlap_thawed(rank: int) -> list[Any]:
    """Parameters are thawed and frozen between batches, after DDP was made: it does not hear of that."""
    settled_down()
    found = []
    for late in (False, True):
        inner, wanted = make_model(), make_model()
        parts: list[Any] = [inner[0], wanted[0]]  # type: ignore[index]
        for one in parts:
            one.requires_grad_(False)
        model = DistributedDataParallel(inner)
        if late:
            parts[0].requires_grad_(True)
        mb = Microbatcher(model, sync="overlap", timeout_s=20)
        parts[0].requires_grad_(False)
        ours = []
        for step in range(6):
            for one in parts:
                one.requires_grad_(step in (2, 3))
            for one in (model, wanted):
                one.zero_grad()
            with counted_collectives() as seen:
                mb.backward(lambda m: loss_of(model, m), batch_of(rank, step, 4))  # noqa: B023
            ours.append(len(seen))
            loss_of(wanted, joined([batch_of(r, step, 4) for r in range(2)])).backward()
            found.append(answer(inner, wanted))
        found[-1]["ours"] = ours
    return found


def overlap_fails(rank: int, how: str) -> Any:
    """Rank 1 runs out, or has a bug, in a batch that is reduced while it runs."""
    settled_down()
    inner = make_model()
    patience = dist.new_group(timeout=timedelta(seconds=3)) if how == "lives" else None
    model = DistributedDataParallel(inner, process_group=patience)
    mb = Microbatcher(model, sync="overlap", timeout_s=20)
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)

    def fn(micro: Any) -> Any:
        out = (model.module if how == "unwrapped" and step == 1 else model)(micro["x"])
        if rank == 1 and step == 1 and how in ("forward", "lives"):
            raise simulated_oom("cuda")
        if rank == 1 and step == 1 and how == "backward":
            inner[0].weight.register_hook(lambda _: (_ for _ in ()).throw(simulated_oom("cuda")))  # type: ignore[union-attr]
        if rank == 1 and step == 1 and how == "bug":
            raise OSError("a bug of mine: the database timed out")
        return nn.functional.cross_entropy(out, micro["y"])

    def run() -> None:
        nonlocal step
        for step in range(3):
            optimizer.zero_grad()
            mb.backward(fn, batch_of(rank, step % 1, 4))
            mb.step(optimizer)

    step = 0
    begun = time.monotonic()
    outcome = outcome_of(run)
    elapsed_s = time.monotonic() - begun
    if rank == 1:
        time.sleep(4.5 if how == "lives" else 0)  # a program that goes on after the error
        end_process(write_and_leave(outcome))
    if rank == 0:
        time.sleep(1)
    return *outcome, elapsed_s


def write_and_leave(outcome: list[str]) -> int:
    """The exit status of a rank that ends at once, as one does that raises: 3 for our own clean error."""
    return {"BatchfitError": 3, "OSError": 4}.get(outcome[0], 5)


# errors of the user's own code between two calls of ours


def between_calls(rank: int, cases: list[dict[str, Any]]) -> list[Any]:
    """Loops that go on after an error; a case says on which rank, in which batch and where it comes."""
    settled_down()
    return [_loop_with_errors(rank, case) for case in cases]


def _loop_with_errors(rank: int, case: dict[str, Any]) -> dict[str, Any]:
    inner = make_model()
    model = DistributedDataParallel(inner)
    optimizer = torch.optim.SGD(inner.parameters(), lr=1e-2)
    mb = Microbatcher(model, microbatch_size=4, sync=case["sync"], timeout_s=15)

    def fail(batch: int, place: str) -> None:
        for fault in case["faults"]:
            if fault["rank"] == rank and fault["batch"] == batch and fault["place"] == place:
                raise simulated_oom("cuda") if fault["oom"] else ValueError("mine")

    errors: list[Any] = []
    stepped: list[int] = []
    for batch in range(case["batches"]):
        try:
            optimizer.zero_grad()
            mb.backward(lambda micro: loss_of(model, micro), batch_of(rank, batch, 6 + rank))
            fail(batch, "between")
            if case["plain"]:
                optimizer.step()
            else:
                mb.step(optimizer)
            stepped.append(batch)
            fail(batch, "after")
        except RanksDisagreeError as error:  # all ranks have it, at the same time
            errors.append([batch, "RanksDisagreeError", str(error)])
            if case["repair"]:
                for parameter in inner.parameters():
                    dist.broadcast(parameter.detach(), 0)
        except Exception as error:  # noqa: BLE001 - what a loop that is to live through anything does
            errors.append([batch, type(error).__name__, str(error)])
    mine = digest([parameter.detach() for parameter in inner.parameters()])
    return {"errors": errors, "stepped": stepped, "same": len(set(digests(mine))) == 1}


def without_a_graph(rank: int) -> list[Any]:
    """All rows of rank 1 are masked, so that its loss has no graph; then those of all ranks."""
    found: list[Any] = []
    for masked in ([1], [0, 1]):
        inner = make_model()
        model = DistributedDataParallel(inner)

        def fn(
            micro: dict[str, torch.Tensor], masked: list[int] = masked, model: Any = model
        ) -> torch.Tensor:
            if rank in masked:
                return torch.zeros((), dtype=torch.float64)
            return nn.functional.cross_entropy(model(micro["x"]), micro["y"], reduction="sum")

        mb = Microbatcher(model, microbatch_size=2, reduction="sum", timeout_s=20)
        try:
            mb.backward(fn, batch_of(rank, 0, 5))
        except BatchfitError as error:
            found.append(str(error))
            continue
        wanted = make_model()
        batch = batch_of(0, 0, 5)
        nn.functional.cross_entropy(wanted(batch["x"]), batch["y"], reduction="sum").backward()
        found.append(answer(inner, wanted))
    return found
