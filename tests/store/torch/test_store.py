"""find_batch_size with the store: an answer is used again only if one trial confirms it."""

from __future__ import annotations

import gc
import logging
import os
import re
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from child_path import CHILD_PATH
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import batchfit
from batchfit import FitResult
from batchfit._cli.commands.find import find_target
from batchfit._cli.commands.find_answer import facts, format_age
from batchfit._cli.delivery import Delivery
from batchfit._cli.exits import Code, CommandFailed
from batchfit._cli.target import TargetCall
from batchfit._engine.device.device import CpuDevice
from batchfit._engine.distributed.ranks import Ranks
from batchfit._engine.store.key import rank_digest
from batchfit._engine.store.sqlite import Store
from batchfit._find.pure.search import Observation, Request, Search
from batchfit._find.recall import Known, confirm, recall
from batchfit.errors import SearchStoppedError
from batchfit.results import REASONS
from batchfit.testing import FakeDevice

MIB = 2**20


def workload(*, width: int = 64, each: int = 1) -> batchfit.Workload:
    model = nn.Linear(width, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return batchfit.training(
        model, optimizer, lambda model, x: model(x).square().mean(), lambda n: torch.randn(n, each, width)
    )


def find(work: Any, **changes: Any) -> FitResult:
    defaults: dict[str, Any] = {"budget": "2MiB", "soak_steps": 4, "store": True}
    return batchfit.find_batch_size(work, **{**defaults, **changes})


class TestConfirmed:
    def test_the_second_search_is_one_trial(self) -> None:
        first = find(workload())
        assert not first.from_store
        assert first.stored_age_s is None
        assert len(first.trials) > 1
        second = find(workload())
        assert second.batch_size == first.batch_size
        assert second.from_store
        assert second.stored_age_s is not None
        assert 0 <= second.stored_age_s < 60
        assert second.stopped_because == "stored"
        assert second.reason == REASONS["stored"]
        assert [(trial.size, trial.soak) for trial in second.trials] == [(first.batch_size, True)]
        assert second.sustained
        assert second.survived_steps == 4
        assert FitResult.from_json(second.to_json()) == second

    def test_without_a_soak_the_trial_is_a_short_one(self) -> None:
        first = find(workload(), soak_steps=0)
        second = find(workload(), soak_steps=0)
        assert second.from_store
        assert [(trial.size, trial.soak, trial.steps_run) for trial in second.trials] == [
            (first.batch_size, False, 3)
        ]

    def test_a_confirmed_answer_is_not_stored_again_but_counts_as_used(self) -> None:
        find(workload())

        def rows(table: str) -> list[Any]:
            with sqlite3.connect(Store().path) as db:
                found = db.execute(f"SELECT * FROM {table}").fetchall()
            db.close()
            return found

        before, begun = rows("answers"), time.time()
        assert find(workload()).from_store
        assert rows("answers") == before
        ((_, used_at),) = rows("uses")
        assert used_at >= begun

    def test_state_and_random_numbers_are_put_back(self) -> None:
        work = workload()
        weight = work.model.weight.detach().clone()
        for _ in range(2):
            torch.manual_seed(5)
            before = torch.get_rng_state()
            find(work)
            assert torch.equal(torch.get_rng_state(), before)
        assert torch.equal(work.model.weight, weight)
        assert work.model.weight.grad is None


def key_of(
    work: batchfit.Workload | None = None, *, budget: int | None = None, steps: int = 3, **changes: Any
) -> str:
    """The key under which a search with these settings is stored; nothing is run."""
    search = Search(budget_bytes=budget or 2 * MIB, **changes)
    digest = rank_digest(work or workload(), CpuDevice(), name=None, sample_size=1, asked_bytes=budget)
    soak_steps = 25 if search.soak else 0
    found = recall(lambda: digest, search, Ranks.current(), fresh=False, steps=steps, soak_steps=soak_steps)
    assert found is not None
    return found.key


class TestKey:
    def test_other_settings_are_another_search(self) -> None:
        others: list[dict[str, Any]] = [
            {},
            {"budget": 3 * MIB},
            {"budget": 3 * MIB + 1},
            {"multiple_of": 8},
            {"power_of_two": True},
            {"max_size": 200},
            {"min_size": 2},
            {"tolerance": 0.1},
            {"strategy": "bisect"},
            {"strategy": "grow", "start": 4},
            {"strategy": "grow", "start": 5},
            {"strategy": "grow", "start": 5, "attempts": 6},
            {"soak": False},
            {"steps": 4},
        ]
        assert len({key_of(**one) for one in others}) == len(others)

    def test_limits_and_hints_are_not(self) -> None:
        hints: list[dict[str, Any]] = [{}, {"max_trials": 30}, {"start": 4}, {"attempts": 3}]
        assert len({key_of(**one) for one in hints}) == 1

    def test_another_workload_is_another_search(self) -> None:
        assert len({key_of(), key_of(workload(width=65)), key_of(workload(each=2))}) == 3

    def test_what_is_free_is_not_in_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        first = key_of()
        monkeypatch.setattr(CpuDevice, "budget_bytes", lambda self: 12345)
        assert key_of() == first
        monkeypatch.setattr(CpuDevice, "total_bytes", lambda self: 123456)
        assert key_of() != first  # another machine

    def test_a_rank_more_is_another_search(self) -> None:
        class Two:
            is_main = True

            def gather(self, value: object, *, doing: str) -> list[object]:
                return [value, value]  # as if the other rank held the same

        rest: dict[str, Any] = {"fresh": False, "steps": 3, "soak_steps": 25}
        two = recall(lambda: "a digest", Search(), cast(Ranks, Two()), **rest)
        one = recall(lambda: "a digest", Search(), Ranks.current(), **rest)
        assert one is not None
        assert two is not None
        assert one.key != two.key


class TestNotConfirmed:
    def fake(self, store: Store, each: Callable[[int], int], **changes: Any) -> FitResult:
        """A search on a device that is no device, under a name."""
        device = FakeDevice(1000 * MIB, peak=each)
        work = batchfit.Workload(device.step, state=())
        settings = {"device": device, "key": "mine", **changes}
        return batchfit.find_batch_size(work, **settings)

    def test_a_size_that_no_longer_fits_is_searched_below_and_replaced(self) -> None:
        store = Store()
        first = self.fake(store, lambda n: 100 * MIB + n * MIB)
        assert 860 < first.batch_size <= 900
        second = self.fake(store, lambda n: 100 * MIB + n * MIB * 21 // 20)
        assert second.trials[0].size == first.batch_size
        assert not second.trials[0].fits
        assert not second.from_store
        assert 820 <= second.batch_size <= 857  # 96 % of it: after its one OOM a search keeps off 872
        assert second.trials[1].size >= 700  # the stored size was an estimate, and rarely far off
        assert len(second.trials) <= 6
        third = self.fake(store, lambda n: 100 * MIB + n * MIB * 21 // 20)
        assert (third.from_store, third.batch_size) == (True, second.batch_size)

    def test_a_trial_that_needs_less_than_it_did_goes_on_upwards(self) -> None:
        store = Store()
        first = self.fake(store, lambda n: 100 * MIB + n * MIB)
        second = self.fake(store, lambda n: 100 * MIB + n * MIB // 2)
        assert second.trials[0].size == first.batch_size
        assert second.trials[0].sustained
        assert not second.from_store
        assert second.batch_size >= 1700
        assert self.fake(store, lambda n: 100 * MIB + n * MIB // 2).from_store

    def test_retries_in_the_soak_are_no_confirmation(self) -> None:
        device = FakeDevice(1000 * MIB, peak=lambda n: n * MIB, cached=0.1)
        work = batchfit.Workload(device.step, state=())
        first = batchfit.find_batch_size(work, device=device, key="mine")
        device = FakeDevice(1000 * MIB, peak=lambda n: n * MIB, cached=0.3, settles_after=None)
        work = batchfit.Workload(device.step, state=())
        second = batchfit.find_batch_size(work, device=device, key="mine")
        assert second.trials[0].size == first.batch_size
        assert second.trials[0].verdict == "retries"
        assert not second.from_store
        assert second.batch_size < first.batch_size

    def test_an_error_of_the_users_comes_out_as_ever(self) -> None:
        find(workload())
        broken = workload()

        def step(size: int) -> None:
            raise LookupError("no such column")

        with pytest.raises(LookupError, match="no such column"):
            find(broken._watched(step))
        gc.collect()  # the error's traceback holds what the search held, and the budget has no room for it
        assert find(workload()).from_store

    def test_a_batch_that_cannot_be_made_is_raised_by_the_trial(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        def make_batch(n: int) -> torch.Tensor:
            raise LookupError("no such file")

        model = nn.Linear(2, 2)
        work = batchfit.training(model, None, lambda model, x: model(x).sum(), make_batch)
        with pytest.raises(LookupError, match="no such file") as caught:
            find(work)
        assert any("batch size" in note for note in caught.value.__notes__)
        assert caplog.text == ""  # said once, where it happens


class TestBudget:
    def free(self, budget: int, **changes: Any) -> FitResult:
        """A search within what is free of a device of 1000 MiB."""
        device = FakeDevice(1000 * MIB, peak=lambda n: 100 * MIB + n * MIB)
        work = batchfit.Workload(device.step, state=())
        with device.limit(budget):
            return batchfit.find_batch_size(work, device=device, key="mine", **changes)

    @pytest.mark.slow
    def test_what_is_free_may_vary_a_little(self) -> None:
        first = self.free(900 * MIB)
        assert self.free(905 * MIB).from_store
        assert self.free(900 * MIB - 4096).from_store
        more = self.free(960 * MIB)
        assert not more.from_store
        assert more.batch_size > first.batch_size

    def test_a_size_that_cannot_run_in_it_is_not_tried(self) -> None:
        first = self.free(900 * MIB)
        less = self.free(700 * MIB)
        assert not less.from_store
        assert all(trial.fits for trial in less.trials)
        assert first.batch_size not in [trial.size for trial in less.trials]

    @pytest.mark.slow
    def test_answers_for_several_budgets_stand_beside_each_other(self) -> None:
        sizes = {budget: self.free(budget * MIB).batch_size for budget in (500, 700, 900)}
        for budget, size in sizes.items():
            again = self.free(budget * MIB)
            assert (again.from_store, again.batch_size) == (True, size)

    @pytest.mark.slow
    def test_an_exact_search_wants_the_exact_budget(self) -> None:
        self.free(900 * MIB, tolerance=0)
        assert not self.free(901 * MIB, tolerance=0).from_store
        assert self.free(901 * MIB, tolerance=0).from_store

    def test_an_explicit_budget_counts_exactly(self) -> None:
        find(workload(), budget=2 * MIB)
        assert find(workload(), budget="2MiB").from_store
        assert not find(workload(), budget=2 * MIB + 1).from_store


class TestUse:
    def test_a_program_uses_the_store_only_when_asked(self) -> None:
        find(workload(), store=False)
        assert not Store().path.parent.exists()
        find(workload())
        assert not find(workload(), store=False).from_store

    def test_fresh_searches_and_replaces(self) -> None:
        first = find(workload())
        with sqlite3.connect(Store().path) as db:
            db.execute("UPDATE answers SET found_at = found_at - 1000")
        db.close()
        again = find(workload(), fresh=True)
        assert not again.from_store
        assert again.batch_size == first.batch_size
        found = find(workload())
        assert found.stored_age_s is not None
        assert found.stored_age_s < 900

    def test_a_plain_step_needs_a_name(self) -> None:
        work = batchfit.Workload(workload().step, state=[])
        with pytest.raises(ValueError, match="key must be given to store the answer of a step without"):
            find(work)
        first = find(work, store=False, key="mine")
        assert not first.from_store
        assert find(work, store=False, key="mine").from_store
        assert not find(work, key="another").from_store

    @pytest.mark.slow
    def test_a_name_does_not_cover_another_shape(self) -> None:
        find(workload(width=64), key="mine")
        assert not find(workload(width=96), key="mine").from_store
        assert find(workload(width=64), key="mine").from_store

    @pytest.mark.parametrize(
        ("changes", "error", "words"),
        [
            ({"store": 1}, TypeError, "store must be True or False, not 1"),
            ({"fresh": None}, TypeError, "fresh must be True or False, not None"),
            ({"key": " "}, ValueError, "key must be a name or None, not ' '"),
            ({"key": 5}, ValueError, "key must be a name or None, not 5"),
            ({"store": False, "fresh": True}, ValueError, "fresh must be False without store=True or key"),
        ],
        ids=str,
    )
    def test_wrong_arguments(self, changes: dict[str, Any], error: type[Exception], words: str) -> None:
        with pytest.raises(error, match=words):
            find(workload(), **changes)

    @pytest.mark.parametrize("limit", [{"max_trials": 2}, {"time_limit_s": 1e-9}], ids=str)
    def test_what_a_limit_cut_short_is_not_kept(self, limit: dict[str, Any]) -> None:
        try:
            find(workload(), **limit)
        except SearchStoppedError:
            assert limit != {"max_trials": 2}
        assert not find(workload()).from_store

    def test_a_time_limit_ends_a_search_before_its_confirmation(self) -> None:
        find(workload())
        with pytest.raises(SearchStoppedError):
            find(workload(), time_limit_s=1e-9)

    def test_a_store_that_cannot_be_used_is_a_warning_and_the_search_runs(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        (tmp_path / "file").write_text("in the way")
        monkeypatch.setenv("BATCHFIT_CACHE", str(tmp_path / "file"))
        assert find(workload()).sustained
        assert "cannot be" in caplog.text
        assert (tmp_path / "file").read_text() == "in the way"

    def test_a_python_without_sqlite_searches_all_the_same(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setitem(sys.modules, "batchfit._engine.store.sqlite", None)
        assert find(workload()).sustained
        assert "found sizes are not stored" in caplog.text

    def test_an_object_that_cannot_be_read_is_a_warning(self, caplog: pytest.LogCaptureFixture) -> None:
        class Shy(nn.Linear):
            def extra_repr(self) -> str:
                raise LookupError("not today")

        model = Shy(64, 64)
        work = batchfit.training(model, None, lambda model, x: model(x).sum(), torch.zeros(2, 64))
        assert find(work).sustained
        assert "reading it raised LookupError: not today. Pass key=" in caplog.text

    def test_a_damaged_store_is_set_aside_and_the_search_runs(self, caplog: pytest.LogCaptureFixture) -> None:
        Store().path.parent.mkdir(parents=True)
        Store().path.write_text("no database " * 1000)
        assert not find(workload()).from_store
        assert "was damaged" in caplog.text
        assert find(workload()).from_store

    def test_a_stored_size_that_is_not_allowed_is_not_tried(self) -> None:
        first = find(workload(), multiple_of=8)
        with sqlite3.connect(Store().path) as db:
            wrong = f'"batch_size":{first.batch_size + 1}'
            db.execute(
                "UPDATE answers SET result = replace(result, ?, ?)",
                (f'"batch_size":{first.batch_size}', wrong),
            )
        db.close()
        assert find(workload(), multiple_of=8).batch_size == first.batch_size


# --- the decision, without a device --------------------------------------------------------------

KNOWN = Known(size=100, peak_bytes=900, used_bytes=950, budget_bytes=1000, age_s=1.0)


@given(st.integers(1, 3000), st.floats(0, 0.5), st.booleans())
def test_a_size_is_tried_only_where_it_may_be_the_answer(budget: int, tolerance: float, reads: bool) -> None:
    known = KNOWN if reads else replace(KNOWN, used_bytes=None)
    tried = known.may_answer(Search(budget_bytes=budget, tolerance=tolerance))
    assert tried == ((950 if reads else 1000) <= budget <= 1000 * (1 + tolerance / 2))
    exact = known.may_answer(Search(strategy="bisect", budget_bytes=budget, tolerance=tolerance))
    assert exact == (tried and budget <= 1000)


def test_a_search_goes_on_from_what_the_trial_taught() -> None:
    asked: list[Request] = []

    def attempt(request: Request) -> Observation:
        asked.append(request)
        return Observation(size=request.size, fits=False, soak=request.soak)

    search, confirmed = confirm(Search(budget_bytes=1000), KNOWN, attempt)
    assert asked == [Request(100, True)]
    assert not confirmed
    assert [one.size for one in search.observations] == [100]
    request = search.ask()
    assert request is not None
    assert 50 < request.size < 100
    for strategy in ("bisect", "halve", "grow", "powers"):
        search, _ = confirm(
            Search(strategy=strategy, start=64, max_size=128), replace(KNOWN, size=64), attempt
        )
        request = search.ask()
        assert request is not None
        assert request.size < 64


@settings(deadline=None)
@given(
    st.sampled_from(["guided", "bisect", "halve", "grow", "powers"]),
    st.integers(1, 400),
    st.integers(1, 400),
    st.sampled_from([0.0, 0.02]),
)
def test_whatever_was_stored_the_answer_has_run_and_survived(
    strategy: str, stored: int, truth: int, tolerance: float
) -> None:
    """A linear device on which `truth` is the largest size, and a store that says `stored`."""
    survived: set[int] = set()

    def attempt(request: Request) -> Observation:
        if request.size <= truth and request.soak:
            survived.add(request.size)
        return Observation(
            size=request.size,
            fits=request.size <= truth,
            soak=request.soak,
            allocated_bytes=min(request.size, truth) * 10,
        )

    search = Search(
        strategy=strategy,
        max_size=512,
        start=64,
        attempts=20,
        budget_bytes=truth * 10 + 9,
        tolerance=tolerance,
    )
    if stored not in search.sizes:
        return
    known = Known(
        size=stored, peak_bytes=stored * 10, used_bytes=stored * 10, budget_bytes=stored * 10, age_s=0
    )
    search, confirmed = confirm(search, known, attempt)
    assert confirmed == (stored <= truth)
    for _ in range(60):
        request = search.ask()
        if confirmed or request is None:
            break
        search = search.tell(attempt(request))
    if truth >= search.sizes.first:
        assert search.best in survived


# --- the command line ----------------------------------------------------------------------------

TRAIN = """
import torch
import batchfit

WIDTH = 64

def make():
    model = torch.nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return batchfit.training(
        model, optimizer, lambda model, x: model(x).square().mean(), lambda n: torch.randn(n, WIDTH)
    )

def plain():
    work = make()
    return batchfit.Workload(work.step, state=work.state)
"""
FLAGS = ("--budget", "2MiB", "--soak-steps", "3")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def run(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "batchfit", *arguments],
        cwd=project,
        env={**os.environ, "PYTHONPATH": CHILD_PATH, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
def test_the_command_remembers_and_says_so(project: Path) -> None:
    first = run(project, "find", "train.py:make", *FLAGS)
    assert "stored " not in first.stdout
    second = run(project, "find", "train.py:make", *FLAGS)
    said = r"^stored   found \d+ seconds? ago, confirmed now; --fresh searches again$"
    assert re.search(said, second.stdout, re.MULTILINE)
    assert f"because {REASONS['stored']}" in second.stdout
    assert second.stderr.count("trial ") == 1


class TestCommandHere:
    """The same without a process of its own."""

    @pytest.fixture(autouse=True)
    def _in_the_project(self, project: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.chdir(project)
        path = list(sys.path)
        yield
        sys.path[:] = path

    def find(self, target: str, **changes: Any) -> FitResult:
        flags = {"budget": "2MiB", "soak_steps": 3, "store": True, **changes}
        given = dict(flags)
        output = Path("fit.json")
        assert find_target(TargetCall(target, given, Delivery(output=output))) == Code.FOUND
        sys.modules.pop("train", None)
        return FitResult.from_json(output.read_text())

    @pytest.mark.parametrize(
        ("target", "changes", "words"),
        [
            ("train.py:make", {"isolate": True}, "store must be False with isolate=True, not True"),
            ("train.py:make_step", {}, "key must be given to store the answer of a step without a model"),
        ],
    )
    def test_a_store_that_is_asked_for_and_cannot_be_is_refused(
        self, target: str, changes: dict[str, Any], words: str
    ) -> None:
        """As a default the store is left out there; asked for, it must not be."""
        with Path("train.py").open("a") as file:
            file.write("\n\ndef make_step():\n    return lambda batch_size: None\n")
        flags = {"budget": "2MiB", "store": True, **changes}
        given = dict(flags)
        with pytest.raises(CommandFailed, match=words) as caught:
            find_target(TargetCall(target, given), store_asked=True)
        assert caught.value.code == Code.USAGE
        sys.modules.pop("train", None)

    @pytest.mark.slow
    def test_fresh_and_no_store(self) -> None:
        assert not self.find("train.py:make").from_store
        assert not self.find("train.py:make", store=False).from_store
        assert not self.find("train.py:make", fresh=True).from_store
        assert self.find("train.py:make").from_store
        with pytest.raises(CommandFailed, match="fresh must be False without") as caught:
            self.find("train.py:make", store=False, fresh=True)
        assert caught.value.code == Code.USAGE

    def test_an_edit_of_the_file_is_noticed_by_the_trial_and_a_comment_is_no_edit(
        self, project: Path
    ) -> None:
        first = self.find("train.py:make")
        (project / "train.py").write_text("# a comment\n" + TRAIN)
        assert self.find("train.py:make").from_store
        edited = TRAIN.replace("model(x).square()", "(2.0 * model(x)).exp().square()")
        (project / "train.py").write_text(edited)
        heavier = self.find("train.py:make")
        assert not heavier.from_store
        assert not heavier.trials[0].fits  # the stored size, tried once
        assert heavier.batch_size < first.batch_size
        assert self.find("train.py:make").from_store
        (project / "train.py").write_text(TRAIN)
        lighter = self.find("train.py:make")
        assert lighter.trials[0].size == heavier.batch_size
        assert lighter.trials[0].fits  # with less memory than it took before, so the search continues
        assert not lighter.from_store
        assert lighter.batch_size >= first.batch_size

    @pytest.mark.slow
    def test_a_plain_step_is_stored_under_a_name_only(self) -> None:
        assert not self.find("train.py:plain").from_store
        assert not self.find("train.py:plain", fresh=True).from_store
        assert not self.find("train.py:plain", store=False).from_store
        assert not Store().path.exists()
        assert not self.find("train.py:plain", key="mine").from_store
        assert self.find("train.py:plain", key="mine").from_store


def test_doctor_shows_the_store(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from batchfit._cli.commands import doctor

    monkeypatch.setattr(doctor, "_small_search", lambda: (doctor.EXPECTED_SIZES[0], True))
    doctor.examine(as_json=False)
    out = capsys.readouterr().out
    assert str(Store().path) in out
    assert "nothing yet" in out
    find(workload())
    doctor.examine(as_json=False)
    assert re.search(r"holds +1 answer, \d", capsys.readouterr().out)
    Store().path.write_text("damage " * 1000)
    doctor.examine(as_json=False)
    out = capsys.readouterr().out
    assert "note: the store cannot be used: file is not a database" in out
    assert "batchfit works here." in out
    assert Store().path.read_text() == "damage " * 1000  # doctor looks, and leaves things as they are


def test_ages_read_well() -> None:
    ages = {
        0.4: "0 seconds",
        1: "1 second",
        59: "59 seconds",
        60: "1 minute",
        3600: "1 hour",
        7201: "2 hours",
    }
    for age_s, text in {**ages, 86400: "1 day", 86400 * 40: "40 days"}.items():
        assert format_age(age_s) == text


def test_the_age_stands_in_the_answer() -> None:
    find(workload())
    fit = find(workload()).model_copy(update={"stored_age_s": 3 * 86400.0})
    assert facts(fit, saved=None)[0] == ("stored", "found 3 days ago, confirmed now; --fresh searches again")


def test_the_cost_of_a_key_is_small(caplog: pytest.LogCaptureFixture) -> None:
    from batchfit._engine.store.key import workload_digest

    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(500)))
    work = batchfit.training(model, None, lambda model, x: model(x).sum(), torch.zeros(2, 8))
    begun = time.perf_counter()
    with caplog.at_level(logging.WARNING):
        workload_digest(work, sample_size=1)
    assert time.perf_counter() - begun < 5  # 0.1 s on an idle machine
