"""Microbatcher under DDP: real gloo ranks, faults on each in each phase, and the joined batch's result.

Every case is compared with one process on the joined batches (fp64: 1e-10) and, bit for bit, between ranks.
"""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import ddp_cases as cases
import pytest
import torch.distributed as dist
from launch import run_ranks, values

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo: torch.distributed without it"
)

ROOT = Path(__file__).parents[3]
CASES_AT_LEAST = 200
OPERATIONS_AT_LEAST = 60  # of a batch of two microbatches, up to the vote


def faults(world_size: int) -> list[dict[str, Any]]:
    """Each rank and several at once, each phase, first step and later, once and twice in a row."""
    groups = [[0], [1], [0, 1]] if world_size == 2 else [[0], [3], [1, 2], [0, 1, 2, 3]]
    found = []
    for failing in groups:
        for phase in cases.PHASES:
            for at in (0, 1):
                for times in (1, 2) if world_size == 2 else (1,):
                    once = phase in ("state", "step") and times == 2
                    if once or (phase == "state" and at == 1):
                        continue  # two in a row is an error there (`failures`); state is made once
                    clip = 0.3 if times == 2 else None
                    found.append(
                        {
                            "failing": failing,
                            "phase": phase,
                            "at": at,
                            "times": times,
                            "steps": 2,
                            "clip": clip,
                            "microbatch_size": 4 if at and times == 1 else None,
                        }
                    )
    return found


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_an_oom_on_any_rank_in_any_phase_changes_nothing(world_size: int) -> None:
    wanted = faults(world_size)
    answers = values(run_ranks(cases.run_cases, world_size=world_size, args=(wanted,), timeout_s=200))
    for at, case in enumerate(wanted):
        found = [answer[at] for answer in answers]
        assert all(one["same"] for one in found), case
        assert max(one["error"] for one in found) < 1e-10, (case, found)
        fired = [one["fired"] for one in found]
        assert fired == [case["times"] * (rank in case["failing"]) for rank in range(world_size)], case


@pytest.mark.slow
def test_an_oom_at_every_operation_before_the_vote() -> None:
    for found in zip(*values(run_ranks(cases.sweep, world_size=2, timeout_s=200)), strict=True):
        operations = found[0]["operations"]
        assert operations >= OPERATIONS_AT_LEAST
        assert sum(one["fired"] for one in found) == operations
        assert max(one["error"] for one in found) < 1e-10


def test_enough_cases_are_run() -> None:
    injected = len(faults(2)) + len(faults(4)) + 2 * OPERATIONS_AT_LEAST
    assert injected + len(cases.REAL) >= CASES_AT_LEAST


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_gradients_are_those_of_the_joined_batch(world_size: int) -> None:
    for rank, found in enumerate(values(run_ranks(cases.run_exact, world_size=world_size, timeout_s=100))):
        for one in (
            *found["exact_tokens"],
            *found["exact_empty"][0],
            *found["exact_accumulation"],
            found["exact_misuse"][1],
            found["exact_branches"],
            *found["exact_models"],
            found["exact_scaler"],
            found["exact_zero"][1],
        ):
            assert one["same"], one
            assert one["error"] < 1e-10, one
        sizes = [one["sizes"] for one in found["exact_empty"][0]]
        assert sizes == ([[], []] if rank == 1 else [[2, 2, 1]] * 2)
        counts, buckets = found["exact_count"]
        assert counts == [counts[0]] * 2
        assert 1 < counts[0] <= buckets
        whole, some, many = found["exact_buckets"]
        assert all(one["right"] and one["sent"] for one in (whole, some, many))
        # three types of gradients and two of buffers; below, more buckets than slots
        assert whole["collectives"] == 5
        assert whole["collectives"] < some["collectives"] < many["collectives"]
        (raised, skipped), untouched = found["exact_empty"][1], found["exact_empty"][2]
        assert "the weight of the batch is zero" in raised
        assert skipped is True
        assert untouched
        # one collective a batch, none under no_sync
        assert [one["collectives"] for one in found["exact_accumulation"]] == [
            [1, 1, 1, 1],
            [0, 1, 1, 1],
            [1, 0, 1, 1],
            [0, 0, 1, 1],
            [0, 1, 0, 1],
            [1, 0, 0, 1],
        ]
        local, half = found["exact_misuse"][0]
        assert "gradients are local to each rank" in local
        assert "only some ranks are inside no_sync() ([0])" in half
        branches = found["exact_branches"]
        assert branches["buffers"]
        assert branches["unused"]
        # gradients once a batch, and buffers of two types, as DDP would
        assert branches["seen"] == ["all_reduce", "broadcast", "broadcast"] * 2
        assert found["exact_scaler"]["scales"] == [64.0, 32.0, 32.0, 32.0]
        kind, text = found["exact_zero"][0]
        assert kind == "BatchfitError"
        assert "ZeroRedundancyOptimizer sends parameters" in text
        assert found["exact_map"] == [True, True, True]


def test_a_rank_that_fails_for_good_makes_all_raise_and_go_on() -> None:
    well, ill = values(run_ranks(cases.failures, world_size=2, timeout_s=100))
    kinds = ["KeyError", "ZeroDivisionError", "NothingFitsError", "TypeError", *["OutOfMemoryError"] * 2]
    assert [one[0] for one in ill] == [*kinds, "TypeError"]
    assert [one[0] for one in well] == [
        *["RankFailedError"] * 4,
        *["OutOfMemoryError"] * 2,
        "RankFailedError",
    ]
    for mine, other in zip(well, ill, strict=True):
        assert mine[2:] == other[2:] == [True, True], (mine, other)  # nothing has moved; all go on alike
        assert "rank 1 raised" in mine[1]
        assert other[0] in mine[1]


def test_zeros_are_made_again_after_an_oom_only() -> None:
    """Released memory cures an OOM and no other error, which all ranks get at once."""
    for retried, failed in values(run_ranks(cases.zeros_that_fail, world_size=2, timeout_s=60)):
        assert retried[0] == "value", retried
        assert retried[2] > 0
        assert retried[3]
        assert failed[0] == "RankFailedError"
        assert "rank 0 raised ValueError: a bug of zeros" in failed[1]
        assert failed[2] == 0


def test_a_step_that_was_cut_off_is_reported_to_the_others_at_once() -> None:
    well, ill = values(run_ranks(cases.cut_off_step, world_size=2, timeout_s=60))
    assert ill[0] == "StepInterruptedError"
    assert well[0] == "RankMissingError"
    assert "rank 1 has left: StepInterruptedError" in well[1]
    assert well[2] < 15  # of a time-out of 20 s


def test_ctrl_c_on_one_rank_is_reported_to_the_others() -> None:
    first, ill, last = values(run_ranks(cases.interrupted, world_size=3, timeout_s=60))
    assert ill[0] == "KeyboardInterrupt"
    for well in (first, last):
        assert well[0] == "RankMissingError"
        assert "rank 1 has left: KeyboardInterrupt" in well[1]
        assert well[2] < 15


def test_ctrl_c_in_a_vote_is_reported_to_the_others_too() -> None:
    well, ill = values(run_ranks(cases.interrupted_in_vote, world_size=2, timeout_s=60))
    assert ill[0] == "KeyboardInterrupt"
    assert well[0] == "RankMissingError"
    assert "rank 1 has left: KeyboardInterrupt)" in well[1]
    assert well[2] < 15  # of a time-out of 20 s


def test_a_function_that_talks_to_other_ranks_is_refused() -> None:
    for found in values(run_ranks(cases.talkative, world_size=2, timeout_s=60)):
        for first, again, hooked, after in (found[:4], found[4:]):
            for kind, text in (first, again, hooked):
                assert kind == "CollectivesError"
                assert "fn issues collectives (in its first microbatch: 1)" in text
            assert after["same"]
            assert after["error"] < 1e-10


def test_ranks_go_on_after_one_that_failed_before_a_batch_that_overlaps() -> None:
    well, ill = values(run_ranks(cases.overlap_misfits, world_size=2, timeout_s=60))
    assert [one[0] for one in well] == ["RankFailedError", "value", "RanksDisagreeError", "value"]
    assert [one[0] for one in ill] == ["TypeError", "value", "value"]
    assert "rank 1 went on to the next batch without this optimizer step" in well[2][1]
    assert "rank 1 raised TypeError: batch must hold tensors" in well[0][1]
    assert max(one[2] for one in (*well[::2], *ill[::2])) < 15  # of a time-out of 20 s


@pytest.mark.parametrize("how", ["killed", "hangs", "reducing"])
def test_a_rank_that_dies_or_hangs_is_named(how: str) -> None:
    outcomes = run_ranks(cases.killed, world_size=3, args=(how,), timeout_s=60)
    if how != "hangs":
        assert outcomes[1].exitcode == -9
    for rank in (0, 2):
        kind, text, elapsed_s = values([outcomes[rank]])[0]
        assert kind == "RankMissingError"
        assert "rank 1 did not answer within 2 s" in text
        assert elapsed_s < 20


def test_an_error_after_the_vote_is_one_of_all_ranks() -> None:
    outcomes = run_ranks(cases.killed, world_size=3, args=("breaks",), timeout_s=60)
    found = values(outcomes)
    assert found[1][0] == "BatchfitError"
    assert "could not be reduced, so the ranks are no longer alike" in found[1][1]
    for rank in (0, 2):
        assert found[rank][0] == "RankMissingError"
        assert "rank 1 has left: OutOfMemoryError" in found[rank][1]


def test_overlap_is_exact() -> None:
    for found in values(run_ranks(cases.overlap, world_size=2, timeout_s=100)):
        for one in found:
            assert one["same"], one
            assert one["error"] < 1e-10, one
        # our own reduction for the first batch, for an empty one, and where gradients wait or are views
        plain, views = [1, 0, 0, 0, 1, 0], [1, 0, 0, 0, 1, 1]
        assert [one["ours"] for one in found if "ours" in one] == [plain, views, plain]


def test_overlap_reduces_what_ddp_does_not_know() -> None:
    for found in values(run_ranks(cases.overlap_thawed, world_size=2, timeout_s=60)):
        for one in found:
            assert one["same"], one
            assert one["error"] < 1e-10, one
        # our own reduction where other parameters get gradients than when DDP was made
        assert [one["ours"] for one in found if "ours" in one] == [[1, 0, 1, 1, 0, 0], [1] * 6]


SLOW = [pytest.param(how, marks=pytest.mark.slow) for how in ("forward", "bug", "unwrapped")]


@pytest.mark.parametrize("how", ["backward", "lives", *SLOW])
def test_an_oom_under_overlap_is_a_clean_error_on_all_ranks(how: str) -> None:
    outcomes = run_ranks(cases.overlap_fails, world_size=3, args=(how,), timeout_s=60)
    assert outcomes[1].exitcode == (4 if how == "bug" else 3)
    for rank in (0, 2):
        kind, text, elapsed_s = values([outcomes[rank]])[0]
        if how == "unwrapped":
            assert "fn must call the wrapped model" in text
            continue
        assert kind == "RankMissingError"
        assert "rank 1 has left" in text
        assert ("a bug of mine" if how == "bug" else "sync='safe' survives this") in text
        # at once when the failed process ends, or with the group's time-out if it lives on
        assert elapsed_s < 15


def test_real_limits_that_differ_from_rank_to_rank() -> None:
    answers = values(run_ranks(cases.real_limits, world_size=2, timeout_s=100))
    for found in answers:
        assert len(found) == len(cases.REAL)
        for one in found:
            assert one["same"], one
            assert one["error"] < 1e-10, one
    # the rank with less memory has cut its batch smaller than the other one
    for limits, mine, other in zip(cases.REAL, *answers, strict=True):
        less = int(limits[0][:-3]) < int(limits[1][:-3])
        assert (max(mine["sizes"]) < max(other["sizes"])) == less
        assert (mine if less else other)["retries"] > 0


def test_short_soak_is_the_run_without_faults() -> None:
    answers = values(run_ranks(cases.soak, world_size=2, args=(40,), timeout_s=100))
    assert sum(found["fired"] for found in answers) > 10
    for found in answers:
        assert found["error"] < 1e-10
        assert found["same"]


@pytest.mark.slow
def test_the_example_runs_under_torchrun() -> None:
    path = ROOT / "examples" / "ddp.py"
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 150
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *launcher, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if "terminate called without an active exception" in done.stderr and done.stdout.count(", step ") == 6:
        # All was done and found when a thread of torch's ended its process (seen once, not in 42 other runs).
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "rank 0, step 0: 2048, out of memory 0 times" in done.stdout
    assert "rank 1, step 0: 896 + 896, out of memory 1 times" in done.stdout
    assert "rank 1, step 9: no samples" in done.stdout


@pytest.mark.slow
def test_the_benchmark_runs_on_a_cpu(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    script, out = ROOT / "benchmarks" / "ranks_gpu.py", tmp_path / "smoke.json"
    for arguments in (["run", "--smoke", "--out", str(out)], ["page", str(out)]):
        done = subprocess.run(
            [sys.executable, str(script), *arguments],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
    for part in ("many", "one"):
        for name in ("ddp", "late", "safe", "overlap"):
            assert f"| {part} | `{name}` |" in done.stdout


def test_a_rank_whose_loss_has_no_graph_counts_as_zero() -> None:
    for one, refused in values(run_ranks(cases.without_a_graph, world_size=2)):
        assert one["error"] < 1e-12
        assert one["same"]
        assert "no rank has a loss that requires grad" in refused


def errors_between_calls(world_size: int, count: int) -> list[dict[str, Any]]:
    """Random loops: which ranks raise, in which batches, after backward or after the step."""
    draw = random.Random(world_size)
    found = []
    for at in range(count):
        faults = [
            {
                "rank": draw.randrange(world_size),
                "batch": draw.randrange(6),
                "place": draw.choice(["between", "between", "after"]),
                "oom": draw.random() < 0.5,
            }
            for _ in range(draw.choice([1, 1, 2, 3]))
        ]
        found.append(
            {
                "faults": faults,
                "batches": 7,
                "sync": ["safe", "overlap"][at % 2],
                "plain": at % 4 > 1,
                "repair": at % 8 > 3 and at % 4 > 1,
            }
        )
    return found


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_an_error_between_two_calls_leaves_ranks_alike_or_is_reported(world_size: int) -> None:
    """No rank trains on with parameters that differ, none waits for a rank that went on, and none hangs."""
    faults = errors_between_calls(world_size, 32)
    outcomes = values(run_ranks(cases.between_calls, world_size=world_size, args=(faults,), timeout_s=150))
    apart = 0
    for at, case in enumerate(faults):
        ranks = [outcome[at] for outcome in outcomes]
        kinds = {kind for rank in ranks for _, kind, _ in rank["errors"]}
        assert "RankMissingError" not in kinds, case
        found = [
            [[batch, text] for batch, kind, text in rank["errors"] if kind == "RanksDisagreeError"]
            for rank in ranks
        ]
        left_out = {
            (fault["rank"], fault["batch"]) for fault in case["faults"] if fault["place"] == "between"
        }
        if not case["plain"]:  # a step that one rank leaves out is one that no rank takes
            assert all(rank["stepped"] == ranks[0]["stepped"] for rank in ranks), case
            assert ranks[0]["stepped"] == [b for b in range(7) if b not in {one for _, one in left_out}], case
            assert all("went on to the next batch" in text for texts in found for _, text in texts), case
            assert all(rank["same"] for rank in ranks), case
        elif case["repair"]:
            assert all(rank["same"] for rank in ranks) or left_out & {(r, 6) for r in range(world_size)}, case
        elif not ranks[0]["same"]:  # never without a word, but for a step after which nothing was called
            apart += 1
            first = min(batch for _, batch in left_out)
            assert first == 6 or all(
                [batch for batch, _ in texts] == list(range(first + 1, 7)) for texts in found
            ), (case, found)
            assert all("rank 0" in text and "optimizer steps" in text for texts in found for _, text in texts)
    assert apart


@pytest.mark.slow
def test_soak_of_500_steps_is_the_run_without_faults() -> None:
    answers = values(run_ranks(cases.soak, world_size=2, args=(500,), timeout_s=500))
    assert sum(found["fired"] for found in answers) > 100
    for found in answers:
        assert found["error"] < 1e-10
        assert found["same"]
