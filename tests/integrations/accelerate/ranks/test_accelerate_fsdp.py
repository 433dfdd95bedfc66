"""Accelerate under FSDP2 on gloo ranks: `backward` in its loops, its checkpoint, and the decorator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import run_ranks, values

from batchfit._engine.torch_private import fsdp2

pytest.importorskip("accelerate", reason="needs accelerate")
pytestmark = [
    pytest.mark.skipif(
        not (dist.is_available() and dist.is_gloo_available()),
        reason="needs gloo: torch.distributed without it",
    ),
    pytest.mark.skipif(
        not (fsdp2.runs_on_cpu() and fsdp2.can_reset()),
        reason=f"FSDP2 of torch {torch.__version__} cannot run on a CPU, or cannot be reset",
    ),
]


def everything(rank: int, folder: str) -> Any:
    import accelerate_fsdp_cases as cases

    return cases.everything(rank, folder)


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = str(tmp_path_factory.mktemp("ranks"))
    return values(run_ranks(everything, world_size=request.param, args=(folder,), timeout_s=200))


@pytest.mark.parametrize("name", ["split", "oom"])
def test_accumulated_batches_end_as_the_plain_loop(found: list[dict[str, Any]], name: str) -> None:
    for rank, one in enumerate(found):
        assert one[name]["weights"] == pytest.approx(one["plain"]["weights"], abs=1e-10)
        assert one[name]["retries"] == (name == "oom")  # all ranks retry, wherever the OOM was
        assert one[name]["fired"] == (name == "oom" and rank % 2 == 1)


def test_so_they_do_in_single_precision(found: list[dict[str, Any]]) -> None:
    for one in found:
        plain, split = (torch.tensor(one[f"{name}, single"]["weights"]) for name in ("plain", "split"))
        assert 0 < (split - plain).norm() < 1e-5 * plain.norm()


def test_a_loop_goes_on_from_the_state_that_accelerate_saved(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert one["resumed"]["weights"] == pytest.approx(one["plain"]["weights"], abs=1e-10)


def test_the_decorator_finds_one_size_for_all_by_the_workload(found: list[dict[str, Any]]) -> None:
    sizes = found[0]["found"]
    assert all(one["found"] == sizes for one in found)
    assert len(sizes) == 1
    assert 100 < sizes[0] < 4096


def test_fsdp1_is_refused_with_the_way(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert "fsdp_version=2" in one["fsdp1"]
