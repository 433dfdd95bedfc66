"""Hugging Face's Trainer under FSDP2 on gloo ranks: all agree, and end as one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import run_ranks, values

from batchfit._engine.torch_private import fsdp2

pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("accelerate", reason="needs transformers")
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

import hf_fsdp_cases as cases  # noqa: E402
from hf_models import Tokens, arguments, gpt2, parameters_of  # noqa: E402
from transformers import Trainer  # noqa: E402

from batchfit.integrations.transformers import adapt  # noqa: E402

ONCE = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1}


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def answers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank has to say, of all cases."""
    folder = str(tmp_path_factory.mktemp("ranks"))
    settings: dict[str, Any] = {"timeout_s": 280, "preload": "hf_fsdp_cases"}
    return values(run_ranks(cases.everything, world_size=request.param, args=(folder,), **settings))


def near(found: list[float], wanted: torch.Tensor) -> bool:
    return torch.allclose(torch.tensor(found, dtype=torch.float64), wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", cases.MODELS)
def test_ranks_that_are_out_of_memory_try_again_with_all_and_end_as_one_process(
    name: str, tmp_path: Path, answers: list[dict[str, Any]]
) -> None:
    model = cases.MODELS[name]()
    one = Trainer(
        model,
        arguments(tmp_path, **ONCE, per_device_eval_batch_size=5 * len(answers)),
        train_dataset=cases.data_of(name),
        eval_dataset=cases.data_of(name, 20),
    )
    one.train()
    loss = one.evaluate()["eval_loss"]
    for rank, answer in enumerate(answers):
        found, fired, steps, evaluated = answer[name]
        assert fired == (["train", "evaluate"] if rank % 2 else [])
        assert steps == 6
        assert near(found, parameters_of(model))
        # Trainer's own mean over ranks is not one over tokens where the loss is a mean.
        assert evaluated == pytest.approx(loss, rel=1e-5 if name == "gpt2" else 0.02)


def test_a_forced_split_ends_as_the_plain_trainer_under_fsdp2(answers: list[dict[str, Any]]) -> None:
    for answer in answers:
        (plain, steps), (split, taken) = answer["split"]
        assert taken == steps > 2
        assert near(split, torch.tensor(plain, dtype=torch.float64))


def test_so_it_does_in_single_precision(answers: list[dict[str, Any]]) -> None:
    for answer in answers:
        plain, split = (torch.tensor(weights) for weights, _ in answer["single"])
        assert 0 < (split - plain).norm() < 1e-5 * plain.norm()


def test_all_ranks_find_what_fits_on_the_smallest(answers: list[dict[str, Any]]) -> None:
    found, steps = answers[0]["find"]
    assert all(answer["find"] == [found, steps] for answer in answers)
    assert 1 <= found < 16
    assert steps == 2


def test_a_schedule_is_that_of_one_process_and_resumes_from_its_checkpoint(
    tmp_path: Path, answers: list[dict[str, Any]]
) -> None:
    model = gpt2()
    trainer: Any = Trainer(model, arguments(tmp_path), train_dataset=Tokens())
    adapt(trainer, schedule="0:8 3:16 step", lr="sqrt", find=False).train()
    for answer in answers:
        whole, resumed, saved = answer["schedule"]
        assert near(whole, parameters_of(model))
        assert whole == resumed
        assert near(saved, parameters_of(model))


@pytest.mark.slow
def test_a_rank_that_fails_where_the_loss_is_probed_stops_all_with_the_reason(tmp_path: Path) -> None:
    well, ill = run_ranks(cases.fail_in_the_probe, world_size=2, args=(str(tmp_path),), timeout_s=150)
    assert (ill.error, well.error) == ("ValueError", "RankMissingError")
    assert "no loss in eval mode" in ill.text
    assert "Set trainer.loss_is_scaled_for_ga" in ill.text
    assert "rank 1" in well.text
