"""Results travel as JSON and print as tables; a file that cannot be read says why."""

from __future__ import annotations

import json

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from notebook import notebook_html
from pydantic import ValidationError

from batchfit.errors import NothingFitsError, RankMissingError, ResultFileError, StepInterruptedError
from batchfit.results import REASONS, FitResult, Trial

COUNT = st.none() | st.integers(0, 2**48)
TRIALS = st.builds(
    Trial,
    size=st.integers(1, 2**30),
    outcome=st.sampled_from(["fits", "oom", "too_large", "killed", "timeout"]),
    steps_run=st.integers(0, 1000),
    peak_bytes=COUNT,
    reserved_bytes=COUNT,
    split_bytes=COUNT,
    held_bytes=COUNT,
    alloc_retries=st.integers(0, 99),
    settled_retries=st.integers(0, 99),
    step_s=st.none() | st.floats(0, 1e6),
    elapsed_s=st.floats(0, 1e6),
    soak=st.booleans(),
    ambiguous=st.booleans(),
    phase=st.none() | st.sampled_from(["forward", "backward"]),
    message=st.text(max_size=40),
)
FITS = st.builds(
    FitResult,
    batch_size=st.integers(1, 2**30),
    trials=st.lists(TRIALS, max_size=4).map(tuple),
    survived_steps=st.integers(0, 1000),
    stopped_because=st.sampled_from(sorted(REASONS)),
    budget_bytes=st.integers(1, 2**48),
    peak_bytes=COUNT,
    device=st.sampled_from(["cpu", "cuda:0"]),
    strategy=st.just("guided"),
    elapsed_s=st.floats(0, 1e6),
)


def fit() -> FitResult:
    trial = Trial(size=8, outcome="fits", steps_run=25, peak_bytes=2**30, soak=True, step_s=0.125)
    return FitResult(
        batch_size=8,
        trials=(Trial(size=16, outcome="oom", steps_run=1, soak=True, message="<b>"), trial),
        survived_steps=25,
        stopped_because="within_tolerance",
        budget_bytes=2**31,
        peak_bytes=2**30,
        device="cuda:0",
        strategy="guided",
        elapsed_s=1.5,
    )


@examples(60)
@given(FITS)
def test_json_round_trip_changes_nothing(result: FitResult) -> None:
    assert FitResult.from_json(result.to_json()) == result
    assert FitResult.from_json(result.to_json(indent=None).encode()) == result
    assert len(str(result).splitlines()) >= len(result.trials) + 2
    assert notebook_html(result).count("<tr>") == len(result.trials) + 1


def test_a_table_and_a_sentence() -> None:
    text = str(fit())
    assert text.splitlines()[0].split() == [
        "size",
        "verdict",
        "steps",
        "peak",  # no trial says what was reserved
        "of",
        "budget",
        "s/step",
    ]
    assert "oom, step 2" in text
    assert "sustained" in text
    assert "batch size 8 on cuda:0, peak 1.00 GiB of 2.00 GiB, survived 25 steps; 2 trials in 1.5 s" in text
    assert fit().sustained
    assert str(fit().trials[1]).splitlines()[1].split()[:2] == ["8", "sustained"]


def test_html_is_escaped() -> None:
    shown = notebook_html(fit().model_copy(update={"device": "<script>"}))
    assert "<script>" not in shown
    assert "&lt;script&gt;" in shown


def test_results_are_frozen_and_checked() -> None:
    with pytest.raises(ValidationError):
        fit().batch_size = 9  # type: ignore[misc]
    with pytest.raises(ValidationError):
        Trial(size=0, outcome="fits", steps_run=1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"batch_size": 0}, ["batch_size", "greater than or equal to 1"]),
        ({"batch_size": "many"}, ["batch_size", "many"]),
        ({"trials": [{"size": 3}]}, ["trials.0.outcome", "required"]),
        ({"trials": [{"size": 3, "outcome": "perhaps", "steps_run": 1}]}, ["trials.0.outcome", "perhaps"]),
        ({"schema_version": 99}, ["schema_version is 99", "Upgrade"]),
        ({"schema_version": "new"}, ["schema_version", "new"]),
    ],
    ids=str,
)
def test_a_file_that_cannot_be_read_says_which_field_and_why(
    change: dict[str, object], words: list[str]
) -> None:
    data = json.loads(fit().to_json()) | change
    with pytest.raises(ResultFileError) as caught:
        FitResult.from_json(json.dumps(data))
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '"fit"'])
def test_what_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(ResultFileError):
        FitResult.from_json(text)


def test_fields_of_later_versions_are_passed_over() -> None:
    data = json.loads(fit().to_json()) | {"colour": "blue"}
    assert FitResult.from_json(json.dumps(data)) == fit()


def test_messages_carry_their_numbers_and_what_to_do() -> None:
    error = NothingFitsError(1, device="cuda:0", budget_bytes=85 * 10**9, peak_bytes=84 * 10**9)
    assert str(error) == (
        "a batch of 1 does not fit on cuda:0 (peak 78.2 GiB of 79.2 GiB). "
        "Shrink the model or the sequence length, or turn on activation checkpointing."
    )
    text = (
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 1.50 MiB. This is virtual memory on CPU, "
        "no GPU is involved: it has a total capacity of 4.00 MiB of which 1.00 MiB is free; live tensors"
    )
    short = NothingFitsError(1, device="cpu", budget_bytes=4 * 2**20, peak_bytes=3 * 2**20, detail=text)
    assert "on cpu (needs at least 4.50 MiB: 3.00 MiB in use + 1.50 MiB requested, of 4.00 MiB). " in str(
        short
    )
    real = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.2 GiB of which"
    full = NothingFitsError(1, device="cuda:0", budget_bytes=85 * 10**9, peak_bytes=84 * 10**9, detail=real)
    assert "(peak 78.2 GiB of 79.2 GiB, and 2.00 GiB more requested). " in str(full)
    assert "min_size" in str(NothingFitsError(8, device="cpu", budget_bytes=1))
    assert isinstance(error, RuntimeError)  # as seed 000 has it
    for size in (1, 8):
        state = str(NothingFitsError(size, device="cuda:0", budget_bytes=2**30, state_bytes=3 * 2**30))
        assert "with gradients and optimizer state, take at least 3.00 GiB" in state
        optimizer = str(NothingFitsError(size, device="cuda:0", budget_bytes=2**30, phase="optimizer"))
        assert "Out of memory in the optimizer's step" in optimizer
        for text in (state, optimizer):
            assert "LoRA" in text
            assert "sequence" not in text
            assert "min_size" not in text
    for more in ({"state_bytes": 2**29}, {"phase": "backward"}):
        activations = str(NothingFitsError(1, device="cuda:0", budget_bytes=2**30, **more))  # type: ignore[arg-type]
        assert "the sequence length" in activations
    missing = RankMissingError([3], doing="the size", timeout_s=30)
    assert str(missing).startswith(
        "rank 3 did not answer within 30 s while all ranks had to agree on the size."
    )
    left = RankMissingError([1, 2], doing="the size", timeout_s=30, why="rank 1 has left: ValueError")
    assert str(left).startswith("ranks 1, 2 did not come (rank 1 has left: ValueError) while")


def test_errors_name_who_holds_the_most_and_what_shows_more() -> None:
    held = [("transformer.wte", 3 * 2**30), ("state of AdamW", 2**30)]
    nothing = NothingFitsError(1, device="cuda:0", budget_bytes=2**30, holders=held, detail="the OOM")
    interrupted = StepInterruptedError("scaler", optimizers=["SGD"], holders=held)
    for error in (nothing, interrupted):
        assert error.holders == tuple(held)
        assert "Most of what was held: transformer.wte 3.00 GiB, state of AdamW 1.00 GiB." in str(error)
        assert "batchfit why oom.pickle" in str(error)
    assert str(nothing).endswith("(the OOM)")
    traced = NothingFitsError(1, device="cuda:0", budget_bytes=2**30, holders=held, traced=True)
    assert "by a trace of the step: transformer.wte 3.00 GiB" in str(traced)
    assert "More: batchfit explain" in str(traced)
    assert "Most of" not in str(NothingFitsError(1, device="cuda:0", budget_bytes=2**30))
