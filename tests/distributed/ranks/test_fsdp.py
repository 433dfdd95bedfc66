"""FSDP2: the self-test says what is true of this torch, sizes are agreed, a lone failure is told to all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import run_ranks
from parallel_models import make
from torch import nn

from batchfit._engine.distributed import fsdp
from batchfit._engine.distributed.ranks import Ranks
from batchfit._engine.snapshot import parallel

gloo = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo: torch.distributed without it"
)


def _never(seed: int) -> Any:
    raise AssertionError("nobody asked for a seed")


def everything(rank: int) -> Any:
    ranks = Ranks.current(60)
    world = make("fsdp2")
    plain = nn.Linear(2, 2)
    mesh = fsdp.mesh_of(world.model)
    found: dict[str, Any] = {"sharded": [fsdp.is_sharded(world.model), fsdp.is_sharded(plain)]}
    found["meshes"] = [mesh is not None, fsdp.mesh_of(plain) is None]
    state = torch.get_rng_state()
    seed, torch.manual_seed = torch.manual_seed, _never  # it would reach the generators of all devices
    test = fsdp.self_test(mesh)
    torch.manual_seed = seed
    found["test"] = [test.forward, test.backward, test.why, torch.equal(state, torch.get_rng_state())]
    found["kept"] = fsdp.self_test(mesh) is test

    # Without the reset a backward that failed must not pass: the self-test can tell.
    fsdp.verdicts.clear()
    settle, parallel.settle = parallel.settle, lambda module, **_: None
    broken = fsdp.self_test(mesh)
    parallel.settle = settle
    found["broken"] = [broken.passed, broken.backward, broken.why]

    found["size"] = fsdp.agreed_size(8 + rank, ranks)
    found["less"] = fsdp.agreed_size(8, ranks, peak_bytes=100 if rank else 50, budget_bytes=80, headroom=0.5)
    told = []
    for failed in (False, True, rank == 1):
        try:
            fsdp.lone_failure(ranks, failed, doing="a step")
            told.append("")
        except Exception as error:  # noqa: BLE001
            told.append(str(error))
    found["told"] = told
    ranks.settle()
    return found


@gloo
def test_the_parts_for_training_with_fsdp2() -> None:
    outcomes = run_ranks(everything, world_size=2, timeout_s=100)
    for outcome in outcomes:
        assert outcome.error is None, outcome.trace
    first = outcomes[0].value
    assert first == outcomes[1].value
    assert first["sharded"] == [True, False]
    assert first["meshes"] == [True, True]
    assert first["test"] == [True, True, "", True], "torch 2.13 can be reset"
    assert first["kept"]
    assert first["broken"][:2] == [False, False]
    assert "after a failure in backward" in first["broken"][2]
    assert (first["size"], first["less"]) == (8, 3)
    quiet, all_failed, alone = first["told"]
    assert (quiet, all_failed) == ("", "")
    assert "rank 1 ran out of memory alone" in alone
