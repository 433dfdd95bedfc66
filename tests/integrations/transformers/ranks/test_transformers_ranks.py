"""Hugging Face's Trainer on two gloo ranks: all agree, and end as one process with the joined batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import run_ranks, values

pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("accelerate", reason="needs transformers")
pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo: torch.distributed without it"
)

import hf_cases as cases  # noqa: E402
from hf_models import arguments, gpt2, parameters_of  # noqa: E402
from transformers import Trainer  # noqa: E402

from batchfit.integrations.transformers import adapt  # noqa: E402


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank has to say of a search and of a schedule."""
    folder = str(tmp_path_factory.mktemp("ranks"))
    settings: dict[str, Any] = {"timeout_s": 200, "preload": "hf_cases"}
    return values(run_ranks(cases.find_and_follow, world_size=2, args=(folder,), **settings))


@pytest.fixture(scope="module")
def trained() -> list[dict[str, Any]]:
    """How training with an OOM on one rank ended on each."""
    return values(run_ranks(cases.train_all, world_size=2, timeout_s=200, preload="hf_cases"))


@pytest.mark.parametrize("name", cases.MODELS)
@pytest.mark.slow
def test_a_rank_that_is_out_of_memory_tries_again_and_all_end_as_one_process(
    name: str, tmp_path: Path, trained: list[dict[str, Any]]
) -> None:
    reported = [answer[name] for answer in trained]
    given = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1}
    model = cases.MODELS[name]()
    one = Trainer(
        model,
        arguments(tmp_path, **given, per_device_eval_batch_size=10),
        train_dataset=cases.data_of(name),
        eval_dataset=cases.data_of(name, 20),
    )
    one.train()
    loss = one.evaluate()["eval_loss"]
    assert [one[1] for one in reported] == [0, 2]  # rank 1 had an OOM, in training and in evaluation
    assert [one[2] for one in reported] == [6, 6]
    assert reported[0][0] == reported[1][0]
    assert torch.allclose(torch.tensor(reported[0][0], dtype=torch.float64), parameters_of(model), atol=1e-11)
    # Trainer's own mean over ranks is not one over tokens where the loss is a mean.
    assert reported[0][3] == pytest.approx(loss, rel=1e-5 if name == "gpt2" else 0.02)


def test_all_ranks_find_what_fits_on_the_smallest(answers: list[dict[str, Any]]) -> None:
    found, steps = answers[0]["find"]
    assert answers[1]["find"] == [found, steps]
    assert 1 <= found < 16
    assert steps == 2


def test_a_schedule_on_two_ranks_is_that_of_one(tmp_path: Path, answers: list[dict[str, Any]]) -> None:
    assert answers[0]["schedule"] == answers[1]["schedule"]
    whole, resumed = answers[0]["schedule"]
    assert whole == resumed
    model = gpt2()
    trainer: Any = Trainer(model, arguments(tmp_path), train_dataset=cases.Tokens())
    adapt(trainer, schedule="0:8 3:16 step", lr="sqrt", find=False).train()
    assert torch.allclose(torch.tensor(whole, dtype=torch.float64), parameters_of(model), atol=1e-11)
