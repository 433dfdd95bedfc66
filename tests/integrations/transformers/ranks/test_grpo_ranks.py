"""TRL's trainers that generate on two gloo ranks, of which one is out of memory in both phases."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import run_ranks, values

pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("trl", reason="needs trl")
pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo: torch.distributed without it"
)

import grpo_cases as cases  # noqa: E402


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank has to say, of all cases."""
    folder = str(tmp_path_factory.mktemp("ranks"))
    settings: dict[str, Any] = {"timeout_s": 300, "preload": "grpo_cases"}
    return values(run_ranks(cases.everything, world_size=2, args=(folder,), **settings))


@pytest.mark.parametrize("name", cases.CASES)
@pytest.mark.slow
def test_a_rank_that_is_out_of_memory_in_both_phases_ends_with_the_weights_of_the_plain_trainer(
    name: str, answers: list[dict[str, Any]]
) -> None:
    for plain, ours in (answer[name] for answer in answers):
        weights, expected = torch.tensor(ours["weights"]), torch.tensor(plain["weights"])
        torch.testing.assert_close(weights, expected, rtol=1e-6, atol=1e-7)
        assert len(ours["logs"]) == len(plain["logs"]) == 2
        for mine, theirs in zip(ours["logs"], plain["logs"], strict=True):
            assert mine.keys() == theirs.keys()
            for key, value in theirs.items():
                assert mine[key] == (value and pytest.approx(value, rel=1e-4, abs=1e-5)), key
    assert answers[0][name][1]["weights"] == answers[1][name][1]["weights"]
    assert 1 in answers[1][name][1]["sizes"]


def test_all_ranks_find_what_fits_on_the_smallest(answers: list[dict[str, Any]]) -> None:
    assert answers[0]["find"] == answers[1]["find"] == [2, 3]


def test_what_would_need_collectives_in_the_loss_is_refused(answers: list[dict[str, Any]]) -> None:
    assert "Set entropy_coef=0.0" in answers[0]["refused"]
