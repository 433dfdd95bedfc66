"""TRL's trainers on two gloo ranks, whose losses gather metrics: ranks cut their batches differently."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import run_ranks, values

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo: torch.distributed without it"
)


@pytest.fixture(scope="module")
def answers() -> list[dict[str, Any]]:
    """What each rank has to say, of all cases."""
    pytest.importorskip("trl", reason="needs trl")
    import trl_rank_cases as cases

    return values(run_ranks(cases.everything, world_size=2, timeout_s=200, preload="trl_rank_cases"))


@pytest.mark.slow  # two processes that import TRL
@pytest.mark.parametrize("name", ["SFT packed", "DPO", "KTO"])
def test_ranks_end_as_plain_ddp(name: str, answers: list[dict[str, Any]]) -> None:
    of_ranks = [answer[name] for answer in answers]
    wanted, losses = of_ranks[0]["plain"]
    wanted = torch.tensor(wanted, dtype=torch.float64)
    for one in of_ranks:
        found, found_losses = one["adapted"]
        difference = torch.tensor(found, dtype=torch.float64) - wanted
        assert float(difference.norm() / wanted.norm()) < 1e-10
        assert found_losses == pytest.approx(losses, rel=1e-4)
