"""The callbacks of `batchfit.integrations.lightning` under FSDP2 (`ModelParallelStrategy`), on gloo ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import run_ranks, values

from batchfit._engine.torch_private import fsdp2

pytest.importorskip("lightning", reason="needs lightning")
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
    import lightning_fsdp_cases as cases

    return cases.everything(rank, folder)


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def reported(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    folder = str(tmp_path_factory.mktemp("ranks"))
    settings: dict[str, Any] = {"timeout_s": 280, "preload": "lightning_fsdp_cases"}
    return values(run_ranks(everything, world_size=request.param, args=(folder,), **settings))


@pytest.mark.parametrize("name", ["oom", "split"])
def test_weights_are_those_of_plain_training(reported: list[dict[str, Any]], name: str) -> None:
    """With accumulation and clipping; "oom": some ranks are out of memory, and all retry together."""
    for one in reported:
        plain, steps, _, samples = one["plain"]
        found, taken, retries, counted = one[name]
        assert found == pytest.approx(plain, abs=1e-10)
        assert taken == steps
        assert counted == samples  # by a metric, which counts each sample once
        assert (retries > 0) == (name == "oom")


def test_so_they_are_in_single_precision(reported: list[dict[str, Any]]) -> None:
    for one in reported:
        plain, split = (torch.tensor(one[name]) for name in ("single", "single/split"))
        assert 0 < (split - plain).norm() < 1e-5 * plain.norm()


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_a_run_goes_on_from_its_checkpoint(reported: list[dict[str, Any]], kind: str) -> None:
    for one in reported:
        (whole, steps), (resumed, taken) = one[kind]
        assert resumed == pytest.approx(whole, abs=1e-10)
        assert taken == steps


def test_ranks_find_one_size_that_all_can_run(reported: list[dict[str, Any]]) -> None:
    size, sizes, steps, _ = reported[0]["find"]
    assert size == 60
    assert steps == len(sizes) > 1
    assert all(one["find"] == reported[0]["find"] for one in reported)


def test_an_oom_of_some_ranks_in_validation_holds_nobody_up(reported: list[dict[str, Any]]) -> None:
    for one in reported:
        assert one["validation cut"] == pytest.approx(one["validation whole"], abs=1e-10)


def test_a_value_that_is_no_mean_is_refused_on_all_ranks(reported: list[dict[str, Any]]) -> None:
    """Also on those whose own batch fits."""
    for one in reported:
        assert "the logged value 'odd' is no mean over samples" in one["no mean"]


def test_ranks_find_a_size_without_a_run(reported: list[dict[str, Any]]) -> None:
    assert [one["tuner"] for one in reported] == [[60, 0]] * len(reported)


def test_tensor_parallelism_is_refused_with_the_way(reported: list[dict[str, Any]]) -> None:
    for one in reported:
        assert "tensor parallelism" in one["tensor parallel"].lower()
        assert "tensor_parallel_size=1" in one["tensor parallel"]
