"""The callbacks of `batchfit.integrations.lightning` under Lightning's DDP, on two real ranks with gloo."""

from __future__ import annotations

import os
from typing import Any

import pytest
from launch import run_ranks

pytest.importorskip("lightning", reason="needs lightning")

LIMITS = (100, 60)  # samples that a step of each rank can take


def _fit(
    rank: int, *names: str, limits: tuple[int | None, int | None], **options: Any
) -> tuple[Any, Any, Any]:
    """A module, its Trainer and its callbacks after `fit` on two ranks that have a process group already."""
    os.environ.update(
        LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1"
    )
    import warnings

    import lightning_cases as cases
    import torch
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.strategies import DDPStrategy
    from torch.utils.data import DataLoader

    import batchfit.integrations.lightning as ours

    warnings.simplefilter("ignore")

    class Double(cases.Net):
        def __init__(self) -> None:
            super().__init__(dropout=0.0, width=8, limit=limits[rank])
            self.register_buffer("held", torch.ones(3))  # which DDP broadcasts in each forward
            self.double()

        def validation_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            self.log("val_loss", self.loss(batch), sync_dist=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)

    made = {
        "find": lambda: ours.BatchSizeFinder(tolerance=0.0, soak_steps=4),
        "oom": lambda: ours.OomProofTraining(timeout_s=30.0),
        "schedule": lambda: ours.BatchSizeSchedule("0:32 1:80"),
        "theirs": lambda: cases.pl.callbacks.BatchSizeFinder(),
    }
    callbacks = [made[name]() for name in names]
    strategy = DDPStrategy(cluster_environment=TorchElasticEnvironment(), process_group_backend="gloo")
    size, val, tunes = options.pop("size", 64), options.pop("val", None), options.pop("tunes", False)
    run = cases.trainer(*callbacks, strategy=strategy, devices=2, **options)
    module = cases.seeded(Double)
    loader = DataLoader(cases.data(320, dtype=torch.float64), batch_size=size)
    if tunes:
        return module, run, ours.Tuner(run).scale_batch_size(module, loader, tolerance=0.0, soak_steps=4)
    run.fit(module, loader, None if val is None else DataLoader(loader.dataset, batch_size=val))
    return module, run, callbacks


def _numbers(module: Any) -> list[float]:
    return [float(parameter.detach().sum()) for parameter in module.parameters()]


def everything(rank: int) -> dict[str, Any]:
    """All cases one after the other: most of their time is that of importing Lightning."""
    reported: dict[str, Any] = {}
    module, run, (finder,) = _fit(rank, "find", limits=LIMITS)
    reported["find"] = [finder.optimal_batch_size, module.sizes, run.global_step, _numbers(module)]
    try:
        _fit(rank, "theirs", limits=LIMITS)
    except Exception as error:  # noqa: BLE001 - the test reads it
        reported["theirs"] = f"{type(error).__name__}: {error}"
    for accumulate in (1, 2):
        options = {"accumulate_grad_batches": accumulate, "max_epochs": 2, "gradient_clip_val": 0.1}
        module, run, _ = _fit(rank, limits=(None, None), **options)
        reported[f"plain {accumulate}"] = [_numbers(module), run.global_step]
        module, run, (proof,) = _fit(rank, "oom", limits=(1000, 40), **options)
        reported[f"proof {accumulate}"] = [_numbers(module), run.global_step]
        reported[f"retries {accumulate}"] = proof.retries
    for name, limits in (("whole", (None, None)), ("cut", (1000, 40))):
        names = ("oom",) if name == "cut" else ()
        module, run, _ = _fit(rank, *names, limits=limits, size=32, val=64, max_epochs=2)
        reported[f"validation {name}"] = [float(run.callback_metrics["val_loss"]), *_numbers(module)]
    module, run, size = _fit(rank, limits=LIMITS, tunes=True)
    reported["tuner"] = [size, run.global_step]
    module, run, _ = _fit(rank, "schedule", limits=(None, None), size=16, max_epochs=2)
    reported["schedule"] = [module.sizes, run.global_step, _numbers(module)]
    return reported


@pytest.fixture(scope="module")
def reported() -> list[dict[str, Any]]:
    outcomes = run_ranks(everything, world_size=2, timeout_s=150, preload="lightning_cases")
    assert [one.error for one in outcomes] == [None, None], outcomes
    return [one.value for one in outcomes]


def test_ranks_find_one_size_that_both_can_run(reported: list[dict[str, Any]]) -> None:
    """Lightning's own refuses."""
    size, sizes, steps, _ = reported[0]["find"]
    assert size == 60
    assert sizes == [60, 60, 40]
    assert steps == 3
    assert reported[0]["find"] == reported[1]["find"]
    for one in reported:
        assert one["theirs"].startswith("MisconfigurationException")
        assert "not supported with distributed" in one["theirs"]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_rank_that_is_out_of_memory_alone_tries_again_and_weights_are_as_without(
    reported: list[dict[str, Any]], accumulate: int
) -> None:
    for one in reported:
        (plain, steps), (proof, taken) = one[f"plain {accumulate}"], one[f"proof {accumulate}"]
        assert proof == pytest.approx(plain, abs=1e-10)
        assert taken == steps
    assert [one[f"retries {accumulate}"] > 0 for one in reported] == [False, True]


def test_a_schedule_is_of_all_ranks_and_each_loads_its_part(reported: list[dict[str, Any]]) -> None:
    assert reported[0]["schedule"] == reported[1]["schedule"]
    assert reported[0]["schedule"][0] == [16] * 10 + [40] * 4
    assert reported[0]["schedule"][1] == 14


def test_a_rank_that_is_out_of_memory_alone_in_validation_holds_nobody_up(
    reported: list[dict[str, Any]],
) -> None:
    for one in reported:
        assert one["validation cut"] == pytest.approx(one["validation whole"], abs=1e-10)


def test_ranks_find_a_size_without_a_run(reported: list[dict[str, Any]]) -> None:
    assert [one["tuner"] for one in reported] == [[60, 0]] * 2
