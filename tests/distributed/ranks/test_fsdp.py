"""FSDP2: the self-test says what is true of this torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import run_ranks
from parallel_models import make
from torch_private import take_away_fsdp2_reset

from batchfit._engine.distributed import fsdp_reset
from batchfit._engine.distributed.ranks import Ranks
from batchfit._engine.snapshot import wrappers
from batchfit._engine.torch_private import fsdp2, needs

gloo = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo: torch.distributed without it"
)

resets = pytest.mark.skipif(
    not (fsdp2.runs_on_cpu() and fsdp2.can_reset()),
    reason=f"FSDP2 of torch {torch.__version__} cannot run on a CPU, or cannot be reset",
)


def _never(seed: int) -> Any:
    raise AssertionError("nobody asked for a seed")


def everything(rank: int, whose: str) -> Any:
    if whose == "ours":
        take_away_fsdp2_reset()  # for good: it is a process of its own
        if fsdp2.lost_to_reset():
            return None
    ranks = Ranks.current(60)
    mesh: Any = next(make("fsdp2").model.parameters()).device_mesh
    found: dict[str, Any] = {}
    state = torch.get_rng_state()
    seed, torch.manual_seed = torch.manual_seed, _never  # it would reach the generators of all devices
    with torch.no_grad():  # as where the first OOM is one of an evaluation
        test = fsdp_reset.self_test(mesh)
    torch.manual_seed = seed
    found["test"] = [test.forward, test.backward, test.why, torch.equal(state, torch.get_rng_state())]
    found["kept"] = fsdp_reset.self_test(mesh) is test

    # Without the reset a backward that failed must not pass: the self-test can tell.
    fsdp_reset.verdicts.clear()
    settle, wrappers.settle = wrappers.settle, lambda module, **_: None
    broken = fsdp_reset.self_test(mesh)
    wrappers.settle = settle
    found["broken"] = [broken.passed, broken.backward, broken.why]

    ranks.settle()
    return found


@gloo
@resets
@pytest.mark.parametrize("whose", ["of this torch", "ours"])
def test_the_self_test_of_fsdp2(whose: str) -> None:
    outcomes = run_ranks(everything, world_size=2, args=(whose,), timeout_s=100)
    for outcome in outcomes:
        assert outcome.error is None, outcome.trace
    first = outcomes[0].value
    assert first == outcomes[1].value
    if first is None:
        pytest.skip(f"torch {torch.__version__} needs no reset of ours")
    assert first["test"] == [True, True, "", True]
    assert first["kept"]
    assert first["broken"][:2] == [False, False]
    assert "after a failure in backward" in first["broken"][2]


def test_where_fsdp2_cannot_run_the_self_test_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mesh:
        device_type = "cpu"
        shape = (7,)

    monkeypatch.setattr(fsdp_reset, "verdicts", {})
    monkeypatch.setattr(fsdp2, "runs_on_cpu", lambda: False)
    test = fsdp_reset.self_test(Mesh())
    assert not test.passed
    assert test.why == needs.FSDP2_ON_CPU.why()
