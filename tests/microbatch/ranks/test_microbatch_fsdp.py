"""Microbatcher under FSDP2: real gloo ranks, faults on each in each phase, and the joined batch's result.

Every case is compared with one process on the joined batches (fp64: 1e-10) and, bit for bit, between ranks.
"""

from __future__ import annotations

from typing import Any

import fsdp_cases as cases
import pytest
import torch
import torch.distributed as dist
from launch import run_ranks, values

from batchfit._engine.torch_private import fsdp2

pytestmark = [
    pytest.mark.skipif(
        not (dist.is_available() and dist.is_gloo_available()),
        reason="needs gloo: torch.distributed without it",
    ),
    pytest.mark.skipif(not fsdp2.can_reset(), reason=f"torch {torch.__version__} cannot reset FSDP2"),
]

CASES_AT_LEAST = 40


def faults(world_size: int) -> list[dict[str, Any]]:
    """Each rank and several at once, each phase, first step and later, in turn in each way of sharding."""
    groups = [[0], [1], [0, 1]] if world_size == 2 else [[2, 3]]
    ways = ["nested", "kept", "root", "parts"] if world_size == 2 else ["nested", "hybrid"]
    found: list[dict[str, Any]] = []
    for failing in groups:
        for phase in cases.PHASES:
            for at in (0, 1) if world_size == 2 else (1,):
                if phase == "state" and at == 1:
                    continue  # state is made once
                found.append(
                    {
                        "failing": failing,
                        "phase": phase,
                        "at": at,
                        "times": 1 if phase in ("state", "step") else 1 + len(found) % 2,
                        "steps": 2,
                        "clip": 0.3 if len(found) % 3 == 0 else None,
                        "microbatch_size": 4 if len(found) % 4 == 1 else None,
                        "how": ways[len(found) % len(ways)],
                    }
                )
    return found


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_an_oom_on_any_rank_in_any_phase_changes_nothing(world_size: int) -> None:
    wanted = faults(world_size)
    answers = values(run_ranks(cases.run_cases, world_size=world_size, args=(wanted,), timeout_s=300))
    for at, case in enumerate(wanted):
        found = [answer[at] for answer in answers]
        assert all(one["same"] for one in found), case
        assert max(one["error"] for one in found) < 1e-10, (case, found)
        fired = [one["fired"] for one in found]
        assert fired == [case["times"] * (rank in case["failing"]) for rank in range(world_size)], case
        if case["phase"] not in ("state", "step"):
            assert all(one["retries"] >= 1 for one in found), case  # all ranks do it again


def test_enough_cases_are_run() -> None:
    assert len(faults(2)) + len(faults(4)) >= CASES_AT_LEAST


EVERY = [
    ("nested", 29),
    *(pytest.param(how, 1, marks=pytest.mark.slow) for how in ("nested", "kept", "root")),
]


@pytest.mark.parametrize(("how", "every"), EVERY)
def test_an_oom_at_every_operation_of_a_try(how: str, every: int) -> None:
    for found in zip(
        *values(run_ranks(cases.sweep, world_size=2, args=(how, every), timeout_s=500)), strict=True
    ):
        assert found[0]["operations"] >= 100
        assert sum(one["fired"] for one in found) == found[0]["tried"]
        assert max(one["error"] for one in found) < 1e-10


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_gradients_are_those_of_the_joined_batch(world_size: int) -> None:
    for rank, found in enumerate(values(run_ranks(cases.run_exact, world_size=world_size, timeout_s=200))):
        unequal = found["exact_unequal"]
        for one in (
            *unequal,
            *found["exact_empty"][0],
            found["exact_accumulation"],
            *found["exact_tokens"],
            *found["exact_options"],
            found["exact_map"],
            found["exact_norms"],
        ):
            assert one["same"], one
            assert one["error"] < 1e-10, one
        # four microbatches on all: 13 samples at 4 need as many
        assert [one["sizes"] for one in unequal] == [
            [[1], [4, 3, 3, 3], [2, 2, 1], [1, 1]][rank] for _ in unequal
        ]
        assert all(one["loss"] for one in unequal)
        empty, early, nobody, skipped, untouched = found["exact_empty"]
        assert [one["sizes"] for one in empty] == ([[], []] if rank == 1 else [[2, 2, 1]] * 2)
        assert early[0] == "BatchfitError"
        assert "ranks [1] have no sample that counts" in early[1]
        assert "the weight of the batch is zero" in nobody[1]
        assert skipped
        assert untouched
        assert found["exact_accumulation"]["fired"] == (rank == 0)
        assert all(one["inputs"] < 1e-10 for one in found["exact_options"])
        norm = found["exact_norm"]
        assert norm["buffers"]
        assert norm["random"]
        assert norm["sizes"] == ([3, 2] if rank == 0 else [4, 4, 4])
        assert found["exact_map"]["maps"] == [True] * 4
        assert found["exact_map"]["fired"] == (rank == 1)
        assert found["exact_scaler"]["error"] < 1e-10
        assert found["exact_scaler"]["scales"] == [64.0, 32.0, 32.0]
        assert found["exact_norms"]["norm"]
        assert found["exact_norms"]["plain"] == "Tensor"
        assert found["exact_mixed"] is True
        ours, plain = found["exact_count"]
        assert ours == plain > 0


def test_a_rank_that_fails_for_good_makes_all_raise_and_go_on() -> None:
    well, ill = values(run_ranks(cases.failures, world_size=2, timeout_s=100))
    assert [one[0] for one in ill] == ["OSError", "ZeroDivisionError", "NothingFitsError", "TypeError"]
    assert [one[0] for one in well] == ["RankFailedError"] * 4
    for mine, other in zip(well, ill, strict=True):
        assert mine[2:] == other[2:] == [True, True], (mine, other)  # nothing has moved; all go on
        assert "rank 1 raised" in mine[1]
        assert other[0] in mine[1]


@pytest.mark.parametrize("how", ["refuses", "wrong"])
def test_where_it_cannot_be_retried_all_ranks_stop_at_once(how: str) -> None:
    for kind, text, elapsed_s in values(run_ranks(cases.unresettable, world_size=2, args=(how,))):
        assert kind == "BatchfitError"
        assert "cannot be retried" in text
        assert "rank 1: OutOfMemoryError" in text
        assert "after a failure in backward: " in text
        assert elapsed_s < 15


@pytest.mark.slow
def test_where_it_cannot_be_retried_sizes_grow_with_care() -> None:
    found = values(run_ranks(cases.careful, world_size=2))
    for sizes, retries in found:
        assert sizes[0] == 1
        assert sizes == sorted(sizes)
        assert sizes[-1] > 8
        assert retries == 0


def test_refused_with_the_reason() -> None:
    for found in values(run_ranks(cases.refusals, world_size=2)):
        expected = [
            ("ValueError", "sync must be 'safe' for models under FSDP2"),
            ("BatchfitError", "under DDP or under FSDP2, not some under each"),
            ("BatchfitError", "4 of the parameters that get gradients are not under FSDP2"),
            ("BatchfitError", "backward_cached is not supported for models under FSDP2"),
            ("BatchfitError", "that Microbatcher was not given"),
            ("BatchfitError", "that Microbatcher was not given"),
            ("BatchfitError", "set_requires_gradient_sync(False) keeps gradients unsharded"),
            ("CollectivesError", "beside FSDP2 (broadcast_)"),
            ("BatchfitError", "set_gradient_divide_factor() must be the same"),
            ("BatchfitError", "noise is not measured under FSDP2"),
        ]
        for (kind, text), (wanted_kind, wanted) in zip(found, expected, strict=True):
            assert kind == wanted_kind, text
            assert wanted in text


@pytest.mark.parametrize("how", ["killed", "hangs", pytest.param("interrupted", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_rank_that_dies_or_hangs_is_named(how: str) -> None:
    outcomes = run_ranks(cases.lost, world_size=3, args=(how,), timeout_s=60)
    assert outcomes[1].exitcode == (-9 if how == "killed" else 3)
    for rank in (0, 2):
        kind, text, elapsed_s = values([outcomes[rank]])[0]
        assert kind == "RankMissingError"
        assert "rank 1" in text
        assert elapsed_s < 20


def test_real_limits_that_differ_from_rank_to_rank() -> None:
    answers = values(run_ranks(cases.real_limits, world_size=2, timeout_s=100))
    for found in answers:
        for one in found:
            assert one["same"], one
            assert one["error"] < 1e-10, one
            assert one["retries"] > 0
    for mine, other in zip(*answers, strict=True):
        assert len(mine["sizes"]) == len(other["sizes"]) > 1


SOAK = [25, pytest.param(500, marks=pytest.mark.slow)]


@pytest.mark.parametrize("steps", SOAK)
def test_soak_is_the_run_without_faults(steps: int) -> None:
    answers = values(run_ranks(cases.soak, world_size=2, args=(steps,), timeout_s=550))
    assert sum(found["fired"] for found in answers) > steps / 5
    for found in answers:
        assert found["error"] < 1e-10
        assert found["same"]


@pytest.mark.slow
def test_sizes_of_another_number_of_shards_are_learned_again() -> None:
    learned = values(run_ranks(cases.learned_elsewhere, world_size=2, args=(None,)))[0]["state"]
    for world_size in (2, 1):
        for found in values(run_ranks(cases.learned_elsewhere, world_size=world_size, args=(learned,))):
            assert (found["known"], found["relearned"]) == ((True, 0) if world_size == 2 else (False, 1))
