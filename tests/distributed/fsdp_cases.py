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
from typing import Any

import torch
import torch.distributed as dist
from ddp_cases import FEATURES, Faults, batch_of, digest, digests, joined, loss_of, settled_down
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from batchfit._microbatch import Microbatcher
from batchfit._torch import fsdp, parallel, tries
from batchfit._torch.collectives import begun_since, counts
from batchfit.testing import simulated_oom, virtual_memory

PHASES = ("copy", "forward", "middle", "backward", "late", "state", "step")


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
        mesh = init_device_mesh("cpu", (2, size // 2) if how == "hybrid" else (size,))
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

    faults: Faults | None = None

    def step(self, closure: Any = None) -> Any:
        if self.faults is not None and self.faults.left.get("step", 0) > 0:
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1.0)
            self.faults.check("step")
        return super().step(closure)


@contextmanager
def installed(faults: Faults) -> Iterator[None]:
    """The places that are not in the user's code."""
    from batchfit._torch import stepping

    feed, make_state = tries.feed, stepping.make_state

    def failing_feed(micros: Any, device: Any) -> Iterator[Any]:
        for at, micro in enumerate(feed(micros, device)):
            if at == len(micros) - 1:
                faults.check("copy")
            yield micro

    def failing_state(optimizer: Any) -> None:
        make_state(optimizer)
        faults.check("state")

    tries.feed, stepping.make_state = failing_feed, failing_state  # type: ignore[assignment]
    try:
        yield
    finally:
        tries.feed, stepping.make_state = feed, make_state  # type: ignore[assignment]


def rows_of(case: dict[str, Any], rank: int, step: int) -> int:
    rows = case.get("rows", [9, 6, 11, 7])
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
    optimizer.faults = faults
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
