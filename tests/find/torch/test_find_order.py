"""What a search begins with: what a file holds, then a stored answer, then a prediction."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from stopping import Stop, stop_after
from torch import nn

import batchfit
from batchfit import FitResult
from batchfit._cli.commands.find import find_target
from batchfit._cli.exits import Code, CommandFailed
from batchfit._cli.target import TargetCall
from batchfit._engine.device.resolve import resolve_device
from batchfit._engine.trial.in_process import InProcess
from batchfit._find import find as _find
from batchfit._find import predict_first, session
from batchfit._find.pure.options import FindOptions
from batchfit._find.pure.search import Observation, Request, Search
from batchfit._find.recall import Known, confirm
from batchfit.errors import SearchStoppedError

MAKE = """
import batchfit
import torch


def step(batch_size):
    torch.zeros(batch_size, 1 << 18)


def make():
    return batchfit.Workload(step, state=[])
"""


def workload(*, copies: Callable[[], int] = lambda: 1) -> batchfit.Workload:
    """Some 1150 samples in 32 MiB. `copies` changes what a sample takes, unseen by a key that is given."""
    model = nn.Linear(64, 64)
    return batchfit.training(
        model,
        None,
        lambda model, x: model(x.repeat(copies(), 1, 1)).square().mean(),
        lambda n: torch.randn(n, 16, 64),
    )


def find(work: batchfit.Workload, **changes: Any) -> FitResult:
    return batchfit.find_batch_size(work, **{"budget": "32MiB", "soak_steps": 4, **changes})


def tried(fit: FitResult) -> list[tuple[int, bool]]:
    return [(trial.size, trial.soak) for trial in fit.trials]


class Sight:
    """A prediction that is made up: it counts how often a step is traced, and what it is compared with."""

    def __init__(self, end: int, look: int | None = 8) -> None:
        self.end, self.look, self.traces = end, look, 0
        self.corrections: list[int] = []
        self.budget_bytes = 32 * 2**20
        self.wrong: list[str] = []  # names of those that a real run does not bear out
        self.short_runs = 0

    def of(self, work: batchfit.Workload, *, budget_bytes: int, name: str = "prediction") -> Seen:
        self.traces += 1
        assert budget_bytes == self.budget_bytes
        return Seen(self, work._parts.get("options", {}).get("max_new_tokens"), name)


class Seen:
    """One prediction; `tokens` are those of its workload, `peak_bytes` what it was compared with."""

    def __init__(self, sight: Sight, tokens: int | None, name: str) -> None:
        self.sight, self.tokens, self.name = sight, tokens, name
        self.budget_bytes, self.peak_bytes = sight.budget_bytes, 0

    def size_to_confirm(self) -> int | None:
        return self.sight.look

    def corrected(self, size: int, peak_bytes: int) -> Seen | None:
        self.sight.corrections.append(size)
        self.peak_bytes = peak_bytes
        return None if self.name in self.sight.wrong else self

    def as_corrected(self, other: Seen) -> Seen:
        assert (self.name, self.tokens, self.peak_bytes) == ("prediction", 16, 0)
        assert (other.name, other.tokens) == ("prediction of a few tokens", 4)
        assert 8 * 4 * 2**14 <= other.peak_bytes < 8 * 6 * 2**14, "what four tokens need"
        self.sight.short_runs += 1
        return self

    def largest(self, most: int | None = None) -> int:
        return self.sight.end if most is None else min(self.sight.end, most)


@pytest.fixture
def sight(monkeypatch: pytest.MonkeyPatch) -> Sight:
    made = Sight(1130)
    monkeypatch.setattr(predict_first, "Foresight", made)
    monkeypatch.setattr(session, "is_traceable", lambda work, device: work.declared)
    return made


class TestPrediction:
    def test_a_small_size_is_looked_at_and_then_the_predicted_one_is_soaked(self, sight: Sight) -> None:
        fit = find(workload())
        assert tried(fit) == [(8, False), (1130, True)]
        assert fit.stopped_because == "predicted"
        assert (sight.traces, sight.corrections) == (1, [8])

    @pytest.mark.parametrize("changes", [{"predict": False}, {"start": 4}, {"strategy": "powers"}])
    def test_there_is_none_where_it_is_not_wanted(self, sight: Sight, changes: dict[str, Any]) -> None:
        assert find(workload(), **changes).stopped_because != "predicted"
        assert sight.traces == 0

    def test_a_look_leaves_a_trial_for_the_answer(self, sight: Sight) -> None:
        for max_trials in (1, 2):
            assert find(workload(), max_trials=max_trials).stopped_because == "max_trials"
        assert sight.traces == 0
        assert tried(find(workload(), max_trials=3)) == [(8, False), (1130, True)]

    def test_one_that_is_no_flag_is_refused(self) -> None:
        with pytest.raises(TypeError, match="predict must be True or False, not 'yes'"):
            find(workload(), predict="yes")


class Writer(nn.Module):
    """Generates; 16 KiB a sample and token. It fails where it is told to."""

    def __init__(
        self,
        fails: Callable[[int, int], bool] = lambda size, tokens: False,
        message: str = "at least 16 tokens",
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))
        self.fails, self.message = fails, message
        calls: list[tuple[int, int]] = []  # a list of its own would be put back
        self.note, self.noted = calls.append, lambda: calls

    def generate(self, ids: torch.Tensor, *, max_new_tokens: int, min_new_tokens: int) -> torch.Tensor:
        assert max_new_tokens == min_new_tokens
        self.note((len(ids), max_new_tokens))
        if self.fails(len(ids), max_new_tokens):
            raise RuntimeError(self.message)
        torch.zeros(len(ids), max_new_tokens, 1 << 12)
        self.weight.data += 1
        return torch.cat([ids, ids.new_zeros(len(ids), max_new_tokens)], dim=1)


def generates(writer: Writer, tokens: int = 16, make: Any = None) -> batchfit.Workload:
    source = make or (lambda n: torch.zeros(n, 4, dtype=torch.long))
    return batchfit.generation(writer, source, max_new_tokens=tokens)


class TestGlimpse:
    """A prediction of generation is compared with a few tokens."""

    @pytest.fixture(autouse=True)
    def _sight(self, sight: Sight) -> None:
        self.sight = sight
        sight.end = 123

    def test_a_few_tokens_are_enough_to_look(self) -> None:
        writer = Writer()
        fit = find(generates(writer), soak_steps=None)
        assert writer.noted() == [(8, 4), *[(123, 16)] * 3]
        assert tried(fit) == [(123, True)]
        assert fit.stopped_because == "predicted"
        assert (self.sight.traces, self.sight.corrections, self.sight.short_runs) == (2, [8], 1)

    def test_what_it_changes_is_put_back(self) -> None:
        writer = Writer()
        work = generates(writer)
        here = InProcess(work, resolve_device("cpu"))
        brief = work._brief(4)
        assert brief is not None
        with pytest.raises(RuntimeError, match="needs `trying`"):
            here.run_shortened(brief, 8)
        with here.trying(32 * 2**20):
            assert here.run_shortened(brief, 8).fits
            assert writer.weight.tolist() == [0.0] * 4
        assert writer.noted() == [(8, 4)]

    def test_short_answers_are_looked_at_as_they_are(self) -> None:
        writer = Writer()
        assert tried(find(generates(writer, 15)))[:2] == [(8, False), (123, True)]
        assert {tokens for _, tokens in writer.noted()} == {15}

    def test_a_function_is_looked_at_as_it_is(self) -> None:
        tokens = []

        def write(batch: torch.Tensor, max_new_tokens: int) -> None:
            tokens.append(max_new_tokens)
            torch.zeros(len(batch), max_new_tokens, 1 << 12)

        work = batchfit.generation(write, lambda n: torch.zeros(n, 4), max_new_tokens=16)
        assert tried(find(work))[0] == (8, False)
        assert set(tokens) == {16}
        assert self.sight.traces == 1

    def test_a_step_around_it_is_looked_at_as_it_is(self) -> None:
        work = generates(Writer())
        assert tried(find(work.with_step(work.step))) == [(8, False), (123, True)]

    def test_one_that_cannot_make_a_few_makes_all(self) -> None:
        writer = Writer(lambda size, tokens: tokens < 16)
        assert tried(find(generates(writer))) == [(8, False), (123, True)]
        assert writer.noted()[:2] == [(8, 4), (8, 16)]
        assert writer.weight.tolist() == [0.0] * 4

    def test_one_that_is_broken_comes_out_of_the_trial(self) -> None:
        writer = Writer(lambda size, tokens: True)
        with pytest.raises(RuntimeError, match="at least 16 tokens") as caught:
            find(generates(writer))
        assert writer.noted() == [(8, 4), (8, 16)]
        assert "batch size 8" in caught.value.__notes__[0]

    def test_one_that_kills_the_device_comes_out_at_once(self) -> None:
        writer = Writer(lambda size, tokens: True, "CUDA error: device-side assert triggered")
        with pytest.raises(RuntimeError, match="device-side assert") as caught:
            find(generates(writer))
        assert writer.noted() == [(8, 4)]
        assert "the device context is dead" in caught.value.__notes__[0]

    def test_one_that_is_out_of_memory_is_followed_by_a_trial(self) -> None:
        def make(n: int) -> torch.Tensor:
            return torch.zeros(n, 4 if n < 8 else 1 << 20, dtype=torch.long)

        fit = find(generates(Writer(), make=make))
        assert tried(fit)[0] == (8, False)
        assert fit.batch_size == 7
        assert fit.stopped_because != "predicted"

    def test_a_short_run_that_differs_is_followed_by_a_trial(self) -> None:
        self.sight.wrong = ["prediction of a few tokens"]
        writer = Writer()
        assert tried(find(generates(writer))) == [(8, False), (123, True)]
        assert writer.noted()[:2] == [(8, 4), (8, 16)]

    def test_it_is_no_trial(self) -> None:
        for max_trials in (1, 2):
            assert tried(find(generates(Writer()), max_trials=max_trials)) == [(123, True)]
        self.sight.wrong = ["prediction of a few tokens"]
        assert (123, True) not in tried(find(generates(Writer()), max_trials=2))

    def test_there_is_none_where_the_time_is_over(self) -> None:
        writer = Writer()
        with pytest.raises(SearchStoppedError):
            find(generates(writer), time_limit_s=1e-9)
        assert writer.noted() == []

    def test_a_prediction_that_is_a_little_too_large_costs_little(self) -> None:
        self.sight.end = 130
        fit = find(generates(Writer()))
        assert tried(fit)[0] == (130, True)
        assert 120 <= fit.batch_size < 130
        assert len(fit.trials) <= 5


class TestStoredThenPredicted:
    def test_nothing_is_traced_where_the_stored_size_is_confirmed(self, sight: Sight) -> None:
        first = find(workload(), store=True)
        assert (first.stopped_because, sight.traces) == ("predicted", 1)
        second = find(workload(), store=True)
        assert second.from_store
        assert tried(second) == [(1130, True)]
        assert sight.traces == 1

    def test_a_prediction_follows_a_stored_size_that_fails(self, sight: Sight) -> None:
        copies = [1]
        find(workload(copies=lambda: copies[0]), store=True, key="one")
        copies[0], sight.end = 12, 40
        fit = find(workload(copies=lambda: copies[0]), store=True, key="one")
        assert tried(fit) == [(1130, True), (8, False), (40, True)]
        assert (fit.stopped_because, fit.from_store, sight.traces) == ("predicted", False, 2)
        assert tried(find(workload(copies=lambda: copies[0]), store=True, key="one")) == [(40, True)]

    def test_no_look_where_the_stored_size_has_failed(self, sight: Sight) -> None:
        copies = [1]
        first = find(workload(copies=lambda: copies[0]), store=True, key="one").batch_size
        copies[0], sight.look, sight.end = 12, first + 20, first + 60
        fit = find(workload(copies=lambda: copies[0]), store=True, key="one")
        sizes = [size for size, _ in tried(fit)]
        assert sizes[0] == first
        assert max(sizes[1:]) < first
        assert fit.stopped_because != "predicted"

    def test_without_prediction_is_another_search(self, sight: Sight) -> None:
        assert find(workload(), store=True).batch_size == 1130
        measured = find(workload(), store=True, predict=False)
        assert not measured.from_store
        assert measured.stopped_because == "within_tolerance"
        assert find(workload(), store=True, predict=False).from_store
        assert sight.traces == 1


class TestResumedFirst:
    def test_a_resumed_search_does_not_look_again(self, sight: Sight, tmp_path: Path) -> None:
        path = tmp_path / "search.json"
        sight.end = 400
        with pytest.raises(Stop):
            find(workload(), resume=path, tolerance=0, max_size=404, on_trial=stop_after(2))
        assert json.loads(path.read_text())["search"]["predicted"] == 400
        fit = find(workload(), resume=path, tolerance=0, max_size=404)
        assert sight.traces == 1
        assert [size for size, _ in tried(fit)[:2]] == [8, 400]
        assert fit.trials_resumed == 2
        assert tried(fit) == tried(find(workload(), tolerance=0, max_size=404))

    def test_a_stored_size_does_not_cut_into_a_resumed_search(self, tmp_path: Path) -> None:
        path = tmp_path / "search.json"
        with pytest.raises(Stop):
            find(workload(), resume=path, on_trial=stop_after(1))
        answer = find(workload(), store=True)
        fit = find(workload(), resume=path, store=True)
        assert not fit.from_store
        assert tried(fit) == tried(answer)
        assert fit.trials_resumed == 1

    def test_the_file_of_a_confirmed_answer_is_that_answer(self, tmp_path: Path) -> None:
        path = tmp_path / "search.json"
        answer = find(workload(), store=True)
        first = find(workload(), resume=path, store=True)
        assert first.from_store
        again = find(workload(), resume=path, store=True)
        assert again.from_store
        assert tried(again) == [(answer.batch_size, True)]
        assert again.trials_resumed == 1
        # Without the store it is a search of which one trial has been run.
        alone = find(workload(), resume=path)
        assert not alone.from_store
        assert alone.trials_resumed == 1

    def test_a_stored_size_that_failed_leaves_the_file_with_the_settings_of_the_user(
        self, tmp_path: Path
    ) -> None:
        path, copies = tmp_path / "search.json", [1]
        find(workload(copies=lambda: copies[0]), store=True, key="one")
        copies[0] = 30
        with pytest.raises(Stop):
            find(workload(copies=lambda: copies[0]), key="one", resume=path, on_trial=stop_after(2))
        fit = find(workload(copies=lambda: copies[0]), key="one", resume=path)
        assert fit.trials_resumed == 2
        assert not fit.from_store

    def test_a_search_that_had_ended_is_not_stored(self, tmp_path: Path) -> None:
        path = tmp_path / "search.json"
        ended = find(workload(), resume=path)
        again = find(workload(), resume=path, store=True)
        assert again.trials_resumed == len(again.trials) == len(ended.trials)
        assert not find(workload(), store=True).from_store


class TestConfirm:
    known = Known(size=10, peak_bytes=1000, used_bytes=1000, budget_bytes=2000, age_s=1.0)

    def refuse(self, request: Request) -> Observation | None:
        raise AssertionError(f"{request} was run")

    @pytest.mark.parametrize(
        ("told", "confirmed"),
        [
            (Observation(size=10, fits=True, soak=True, allocated_bytes=1000), True),
            (Observation(size=10, fits=True, soak=True, allocated_bytes=500), False),
            (Observation(size=10, fits=True, soak=False, allocated_bytes=1000), False),
            (Observation(size=10, fits=False, soak=True), False),
            (Observation(size=11, fits=True, soak=True, allocated_bytes=1000), False),
        ],
        ids=["as it was", "needs less", "no soak", "failed", "another size"],
    )
    def test_what_a_resumed_search_was_reported_counts(self, told: Observation, confirmed: bool) -> None:
        search = Search(budget_bytes=2000, max_size=100).tell(told)
        assert confirm(search, self.known, self.refuse) == (search, confirmed)


class TestIsolated:
    @pytest.mark.parametrize(
        ("changes", "name"),
        [({"store": True}, "store"), ({"key": "one"}, "key"), ({"store": True, "fresh": True}, "fresh")],
    )
    def test_there_is_no_store_for_children(self, changes: dict[str, Any], name: str) -> None:
        with pytest.raises(ValueError, match=rf"^{name} must be (None|False) with isolate=True, not "):
            batchfit.find_batch_size("somewhere.else:make", isolate=True, **changes)

    def test_the_command_switches_it_off_unless_it_is_asked_for(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "train.py").write_text(MAKE)
        monkeypatch.chdir(tmp_path)
        seen: list[FindOptions] = []

        def catch(workload: object, make_options: Callable[[], FindOptions]) -> FitResult:
            seen.append(make_options())
            raise SearchStoppedError("caught")

        def command(**changes: Any) -> CommandFailed:
            settings = {"isolate": True, "store": True, **changes}
            with pytest.raises(CommandFailed) as failed:
                find_target(TargetCall("train.py:make", settings))
            return failed.value

        monkeypatch.setattr(_find, "find_with", catch)
        assert command().code == Code.STOPPED
        assert command(store=False).code == Code.STOPPED
        assert [(one.store, one.key) for one in seen] == [(False, None)] * 2
        assert "--no-store" in str(command(store=False, key="one"))
        for wrong in ({"key": "one"}, {"fresh": True}):
            error = command(**wrong)
            assert error.code == Code.USAGE
            assert "with isolate=True" in str(error)
        assert len(seen) == 2
