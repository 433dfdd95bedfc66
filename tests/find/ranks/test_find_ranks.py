"""find_batch_size on several ranks: the same sizes, the same answer, and nobody hangs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import run_ranks
from torch import nn

import batchfit
from batchfit.testing import FakeDevice

gloo = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo: torch.distributed without it"
)


def step_of(each_bytes: int) -> Any:
    def step(n: int) -> None:
        torch.empty(n * each_bytes, dtype=torch.uint8)

    return step


def unequal_ranks(rank: int) -> Any:
    """Rank 1 needs twice the memory a sample: its limit is everyone's."""
    seen: list[int] = []
    workload = batchfit.Workload(step_of((1 << 16) * (rank + 1)), state=[])
    fit = batchfit.find_batch_size(
        workload, budget="8MiB", tolerance=0, device="cpu", on_trial=lambda trial, _: seen.append(trial.size)
    )
    return fit.to_json(), seen


@gloo
def test_one_ranks_oom_is_everyones_and_all_get_the_same_result() -> None:
    outcomes = run_ranks(unequal_ranks, world_size=2)
    assert [outcome.error for outcome in outcomes] == [None, None], outcomes[0].trace + outcomes[1].trace
    (first, seen), (second, silent) = (outcome.value for outcome in outcomes)
    assert first == second
    fit = batchfit.FitResult.from_json(first)
    assert 60 <= fit.batch_size <= 64
    assert fit.stopped_because == "bracketed"
    assert seen == [trial.size for trial in fit.trials]
    assert silent == []


def unequal_datasets(rank: int) -> Any:
    """Rank 0 has no dataset but a function; the others' are of unequal lengths."""
    model = nn.Linear(4, 4)
    data: Any = lambda n: [torch.zeros(n, 4)]  # noqa: E731
    if rank:
        data = torch.utils.data.TensorDataset(torch.zeros(20 - 4 * rank, 4))
    work = batchfit.training(model, None, lambda m, batch: m(batch[0]).sum(), data)
    fit = batchfit.find_batch_size(work, budget="8MiB", max_size=32, soak_steps=0)
    return fit.samples, fit.to_json(), batchfit.predict_batch_size(work, budget="1GiB", max_size=32).samples


@gloo
def test_the_smallest_dataset_counts_for_all() -> None:
    outcomes = run_ranks(unequal_datasets, world_size=3)
    assert [outcome.error for outcome in outcomes] == [None] * 3, "".join(one.trace for one in outcomes)
    assert [(one.value[0], one.value[2]) for one in outcomes] == [(12, 12)] * 3
    assert len({one.value[1] for one in outcomes}) == 1


def others_on_one_card(rank: int) -> Any:
    """Another program takes memory of rank 1's card, before the third trial."""
    mib = 2**20
    device = FakeDevice(1000 * mib, peak=lambda size: size * mib)
    trials, limit = 0, device.budget_bytes

    def reachable() -> int:
        return min(limit(), 600 * mib if rank == 1 and trials >= 2 else 1000 * mib)

    def step(n: int) -> None:
        nonlocal trials
        trials += device._uses == 0  # the first since a reset
        device.step(n)

    device.budget_bytes = reachable  # type: ignore[method-assign]
    workload = batchfit.Workload(step, state=[])
    return batchfit.find_batch_size(workload, device=device, tolerance=0, predict=False).to_json()


@gloo
def test_memory_that_one_rank_loses_is_lost_to_all() -> None:
    outcomes = run_ranks(others_on_one_card, world_size=2)
    assert [outcome.error for outcome in outcomes] == [None, None], outcomes[0].trace + outcomes[1].trace
    assert outcomes[0].value == outcomes[1].value
    fit = batchfit.FitResult.from_json(outcomes[0].value)
    assert (fit.batch_size, fit.budget_bytes, fit.shrunk_from_bytes) == (600, 600 * 2**20, 1000 * 2**20)


def one_raises(rank: int) -> Any:
    def step(n: int) -> None:
        if rank == 1 and n > 1:
            raise ValueError("no such column")
        torch.empty(n << 16, dtype=torch.uint8)

    return batchfit.find_batch_size(batchfit.Workload(step, state=[]), budget="8MiB", device="cpu").batch_size


@gloo
def test_an_error_on_one_rank_ends_the_search_on_all() -> None:
    main, failed = run_ranks(one_raises, world_size=2, timeout_s=30)
    assert failed.error == "ValueError"
    assert main.error == "RankMissingError"
    assert "rank 1" in main.text
    assert "no such column" in main.text


def other_settings(rank: int) -> Any:
    workload = batchfit.Workload(step_of(1 << 16), state=[])
    return batchfit.find_batch_size(workload, budget="8MiB", device="cpu", max_size=32 + rank).batch_size


@gloo
def test_ranks_with_different_settings_are_reported_so() -> None:
    for outcome in run_ranks(other_settings, world_size=2, timeout_s=30):
        assert outcome.error == "RanksDisagreeError"
        assert "settings of the search" in outcome.text


def data_parallel(rank: int) -> Any:
    """A DDP model: trials run with its collectives, and its parameters are put back on every rank."""
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    workload = batchfit.training(
        model, optimizer, lambda m, x: m(x).square().mean(), lambda n: torch.randn(n, 64)
    )
    fit = batchfit.find_batch_size(workload, budget="2MiB", max_size=64)
    same = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    return fit.batch_size, same, len(optimizer.state)


@gloo
def test_a_ddp_model_is_put_back_on_every_rank() -> None:
    outcomes = run_ranks(data_parallel, world_size=2)
    assert [outcome.value for outcome in outcomes] == [[64, True, 0]] * 2, outcomes[0].trace


def in_two_runs(rank: int, path: str) -> Any:
    """Ranks with states of different sizes; the file is rank 0's."""
    settings: dict[str, Any] = {"budget": "8MiB", "strategy": "bisect", "max_size": 64, "soak_steps": 0}
    settings |= {"device": "cpu", "resume": path}
    workload = batchfit.Workload(step_of(1 << 16), state=[torch.zeros(rank + 1)])
    batchfit.find_batch_size(workload, max_trials=2, **settings)
    return batchfit.find_batch_size(workload, **settings).to_json()


@gloo
def test_a_search_is_resumed_on_all_ranks(tmp_path: Path) -> None:
    outcomes = run_ranks(in_two_runs, world_size=2, args=(str(tmp_path / "search.json"),))
    assert [outcome.error for outcome in outcomes] == [None, None], outcomes[0].trace + outcomes[1].trace
    assert outcomes[0].value == outcomes[1].value
    fit = batchfit.FitResult.from_json(outcomes[0].value)
    assert fit.trials_resumed == 2
    sizes = [trial.size for trial in fit.trials]
    assert len(sizes) == len(set(sizes)) > 2
    assert [path.name for path in tmp_path.iterdir()] == ["search.json"]


def remembered(rank: int, folder: str) -> Any:
    """Two searches; a rank that is not the first has a cache folder of its own, and must not use it."""
    os.environ["BATCHFIT_CACHE"] = f"{folder}/{rank}"
    found = []
    for _ in range(2):
        model = nn.Linear(64 * (rank + 1), 64)  # ranks need not hold the same
        workload = batchfit.training(
            model, None, lambda m, x: m(x).square().mean(), lambda n: torch.randn(n, 64 * (rank + 1))
        )
        found.append(batchfit.find_batch_size(workload, budget="2MiB", soak_steps=3, store=True).to_json())
    return found


@gloo
def test_the_first_rank_reads_and_writes_the_store_and_sends_it_to_the_others(tmp_path: Path) -> None:
    outcomes = run_ranks(remembered, world_size=2, args=(str(tmp_path),))
    assert [outcome.error for outcome in outcomes] == [None, None], outcomes[0].trace + outcomes[1].trace
    assert outcomes[0].value == outcomes[1].value
    first, second = (batchfit.FitResult.from_json(text) for text in outcomes[0].value)
    assert (first.from_store, second.from_store) == (False, True)
    assert second.batch_size == first.batch_size
    assert len(second.trials) == 1
    assert sorted(file.name for file in tmp_path.rglob("*")) == ["0", "store.sqlite3"]
