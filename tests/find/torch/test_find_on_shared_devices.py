"""find on real machines: other programs on the card, memory held already, drivers, autotuning, islands."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from examples import examples
from fake_cuda import AsyncCuda, FakeCuda, MiB
from hypothesis import given
from hypothesis import strategies as st

import batchfit
from batchfit._engine.device import gpu as caching_memory
from batchfit._engine.device.gpu import CudaDevice
from batchfit._engine.trial import guarded_steps
from batchfit._engine.trial import in_process as here_module
from batchfit._engine.trial.in_process import FrozenGarbage
from batchfit._files import locked
from batchfit._find import driver as trials_module
from batchfit.errors import NothingFitsError, ResultFileError
from batchfit.testing import FakeDevice


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials_module, "_PAUSE_S", 0.0)
    monkeypatch.setattr(trials_module, "_PATIENCE_S", 0.02)


class Program:
    """A step on a fake card: 10 MiB held, 2 MiB a sample; `during[i]` happens in the middle of step i."""

    def __init__(self, cuda: FakeCuda, during: dict[int, Callable[[], None]] | None = None) -> None:
        self.cuda, self.during, self.steps = cuda, during or {}, 0
        self.device = CudaDevice(0, backend=cuda)
        cuda.allocate(10 * MiB)

    def step(self, size: int) -> None:
        self.during.get(self.steps, lambda: None)()
        self.steps += 1
        self.cuda.allocate(2 * size * MiB)
        self.cuda.free(2 * size * MiB)

    def find(self, **settings: Any) -> batchfit.FitResult:
        settings = {"predict": False, "steps": 2, "soak_steps": 4, **settings}
        workload = batchfit.Workload(self.step, state=[])
        try:
            return batchfit.find_batch_size(workload, device=self.device, **settings)
        finally:
            assert self.cuda.live[0] == 10 * MiB
            assert caching_memory.limits_set_by_us == {}
            assert self.cuda.allowed.get(0, self.cuda.total) == self.cuda.total, "the limit was put back"


def takes(cuda: FakeCuda, count_bytes: int) -> Callable[[], None]:
    def take() -> None:
        cuda.others = count_bytes

    return take


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize(("asked", "steps"), [(None, 10), (25, 25), (12, 12)])
def test_a_soak_is_as_long_as_was_asked_and_ends_early_only_where_nobody_asked(
    asked: int | None, steps: int
) -> None:
    program = Program(FakeCuda())
    fit = program.find(soak_steps=asked)
    assert fit.batch_size in range(470, 496)
    assert (fit.survived_steps, fit.sustained) == (steps, True)
    assert fit.trials[-1].settled is (asked is None)
    said = "survived 10 steps, and from there on its memory repeats itself"
    assert (said in fit.summary) is (asked is None)
    assert fit.summary.count(f"survived {steps} steps") == 1


class Accumulating:
    """Adam in a loop that adds sixteen batches up: 300 MiB of its state come in its first step."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.steps = cuda, 0
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.optimizer = torch.optim.Adam([self.weight])

    def step(self, size: int) -> None:
        self.cuda.allocate(2 * size * MiB)
        self.cuda.free(2 * size * MiB)
        self.weight.sum().backward()
        self.steps += 1
        if self.steps % 16 == 0:
            self.cuda.allocate(300 * MiB)
            self.cuda.free(300 * MiB)
            self.optimizer.step()
            self.optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore:the step's state is not declared")
@pytest.mark.parametrize("declared", [True, False])
def test_a_soak_waits_for_optimizers_and_for_those_that_nobody_declared(declared: bool) -> None:
    program = Accumulating(FakeCuda())
    state = [program.weight, program.optimizer] if declared else None
    device = CudaDevice(0, backend=program.cuda)
    fit = batchfit.find_batch_size(
        batchfit.Workload(program.step, state=state), device=device, predict=False, max_size=64
    )
    assert (fit.survived_steps, fit.trials[-1].settled) == (25, False)
    assert program.steps >= 16


def test_a_soak_has_at_least_the_steps_of_a_trial() -> None:
    assert Program(FakeCuda()).find(steps=12, soak_steps=None, max_size=64).survived_steps == 25


# Other programs on the card


def test_without_others_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="batchfit")
    fit = Program(FakeCuda()).find(tolerance=0.0)
    assert fit.batch_size == 495
    assert fit.shrunk_from_bytes is None
    assert all(record.getMessage().startswith("batch size") for record in caplog.records)


@pytest.mark.parametrize("at_step", [1, 3, 5, 8])
def test_memory_that_goes_for_good_lowers_the_budget(caplog: pytest.LogCaptureFixture, at_step: int) -> None:
    cuda = FakeCuda()
    fit = Program(cuda, {at_step: takes(cuda, 300 * MiB)}).find(tolerance=0.0)
    assert fit.batch_size == 345
    assert fit.sustained
    assert (fit.budget_bytes, fit.shrunk_from_bytes) == (700 * MiB, 1000 * MiB)
    (said,) = warnings_of(caplog)
    assert said.startswith("300.0 MiB of cuda:0 went to other programs during the search")
    assert "searching on within 700.0 MiB" in said
    assert batchfit.FitResult.from_json(fit.to_json()) == fit


def test_a_size_that_only_ran_with_more_is_not_the_answer() -> None:
    cuda = FakeCuda()
    # the first trial, of 400, runs with all of the card; then two thirds of it go
    fit = Program(cuda, {2: takes(cuda, 600 * MiB)}).find(start=400, tolerance=0.0)
    sizes = {trial.size: trial.fits for trial in fit.trials}
    assert sizes[400] is True
    assert fit.batch_size == 195


def test_less_than_the_slack_is_not_noticed(caplog: pytest.LogCaptureFixture) -> None:
    cuda = FakeCuda()
    fit = Program(cuda, {1: takes(cuda, 60 * MiB)}).find(tolerance=0.0)
    assert fit.batch_size == 465, "what runs out runs out"
    assert fit.shrunk_from_bytes is None
    assert warnings_of(caplog) == []


class Spike(FakeCuda):
    """Another program takes memory, and gives it back once it has been looked at twice."""

    looks = 0

    def mem_get_info(self, index: int) -> tuple[int, int]:
        if self.others:
            self.looks += 1
            if self.looks > 2:
                self.others = 0
        return super().mem_get_info(index)


def test_memory_that_comes_back_makes_a_failed_trial_run_again(caplog: pytest.LogCaptureFixture) -> None:
    cuda = Spike()
    seen: list[int] = []
    program = Program(cuda, {0: takes(cuda, 900 * MiB)})
    fit = program.find(start=400, tolerance=0.0, on_trial=lambda trial, budget: seen.append(trial.size))
    assert fit.batch_size == 495
    assert fit.shrunk_from_bytes is None
    assert (fit.trials[0].size, fit.trials[0].fits) == (400, True), "the failure does not count"
    assert seen == [trial.size for trial in fit.trials]
    (said,) = warnings_of(caplog)
    assert said.startswith("batch size 400 was out of memory while another program held memory of cuda:0")


def test_a_failure_of_the_size_itself_is_not_run_again(caplog: pytest.LogCaptureFixture) -> None:
    program = Program(FakeCuda())
    fit = program.find(strategy="halve", start=800)
    assert [(trial.size, trial.fits) for trial in fit.trials] == [(800, False), (400, True)]
    assert program.steps == 1 + 4
    assert warnings_of(caplog) == []


def test_memory_that_becomes_free_is_not_taken(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="batchfit")
    cuda = FakeCuda(used_by_others=500 * MiB)
    fit = Program(cuda, {1: takes(cuda, 0)}).find(tolerance=0.0)
    assert fit.batch_size == 245
    assert (fit.budget_bytes, fit.shrunk_from_bytes) == (500 * MiB, None)
    last = caplog.records[-1].getMessage()
    assert last == (
        "1000.0 MiB are free on cuda:0 now, and 500.0 MiB were when the search began: its answer is for that"
    )


def test_a_budget_of_the_users_is_not_compared_with_what_is_free(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="batchfit")
    cuda = FakeCuda(used_by_others=500 * MiB)
    fit = Program(cuda, {1: takes(cuda, 700 * MiB)}).find(tolerance=0.0, budget="200MiB")
    assert (fit.batch_size, fit.budget_bytes, fit.shrunk_from_bytes) == (95, 200 * MiB, None)
    assert all(record.getMessage().startswith("batch size") for record in caplog.records)


def test_all_memory_gone_is_reported_with_what_is_left() -> None:
    cuda = FakeCuda()
    program = Program(cuda, {0: takes(cuda, 990 * MiB)})
    with pytest.raises(NothingFitsError) as caught:
        program.find()
    assert caught.value.budget_bytes == 10 * MiB


@given(
    taken=st.dictionaries(st.integers(0, 40), st.integers(0, 900), max_size=4),
    strategy=st.sampled_from(["guided", "bisect", "powers"]),
    tolerance=st.sampled_from([0.0, 0.02]),
)
@examples(10)  # `test_shared_device.py` tries more of them, on the search alone
def test_whatever_others_do_the_answer_ran_within_its_budget(
    taken: dict[int, int], strategy: str, tolerance: float
) -> None:
    cuda = FakeCuda()
    during = {at: takes(cuda, count * MiB) for at, count in taken.items()}
    fit = Program(cuda, during).find(strategy=strategy, tolerance=tolerance)
    assert fit.sustained
    assert len(fit.trials) <= 60
    (soak,) = [one for one in fit.trials if one.size == fit.batch_size and one.soak and one.fits][-1:]
    assert (soak.reserved_bytes or 0) <= fit.budget_bytes + 64 * MiB
    assert (fit.shrunk_from_bytes is None) == (fit.budget_bytes == 1000 * MiB)


def test_a_search_that_lost_memory_is_resumed_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "search.json"
    cuda = FakeCuda()
    program = Program(cuda, {3: takes(cuda, 300 * MiB)})
    stopped = program.find(tolerance=0.0, resume=path, max_trials=4)
    kept = json.loads(path.read_text())
    assert len(kept["trials"]) == len(kept["search"]["observations"]) == len(stopped.trials) == 4
    assert kept["search"]["budget_bytes"] == 700 * MiB
    fit = program.find(tolerance=0.0, resume=path)
    assert fit.trials_resumed == 4
    assert fit.trials[:4] == stopped.trials
    assert (fit.batch_size, fit.budget_bytes) == (345, 700 * MiB)


# Memory that the program holds already


def test_memory_of_the_programs_own_counts_and_stays() -> None:
    cuda = FakeCuda(used_by_others=100 * MiB)
    program = Program(cuda)
    cuda.allocate(290 * MiB)
    fit = batchfit.find_batch_size(
        batchfit.Workload(program.step, state=[]), device=program.device, predict=False, tolerance=0.0
    )
    assert (fit.batch_size, fit.budget_bytes) == (300, 900 * MiB), "held memory is part of the budget"
    assert cuda.live[0] == 300 * MiB


class InACycle:
    """Device memory that only a garbage collection frees."""

    def __init__(self, cuda: FakeCuda, size_bytes: int) -> None:
        self.cuda, self.size_bytes, self.me = cuda, size_bytes, self
        cuda.allocate(size_bytes)

    def __del__(self) -> None:
        self.cuda.free(self.size_bytes)


@pytest.mark.parametrize("replaces", [False, True])
def test_memory_that_is_garbage_does_not_count(replaces: bool) -> None:
    cuda = FakeCuda()
    program = Program(cuda)
    kept = [InACycle(cuda, 200 * MiB)]

    def step(size: int) -> None:
        if replaces and kept[0].size_bytes > MiB:
            kept[0] = InACycle(cuda, MiB)  # what it replaces was alive when the search began
        program.step(size)

    if not replaces:
        kept.clear()
    work = batchfit.Workload(step, state=[])
    fit = batchfit.find_batch_size(work, device=program.device, predict=False, tolerance=0.0)
    assert fit.batch_size == (494 if replaces else 495)
    if replaces:
        assert all(trial.fits for trial in fit.trials if trial.size <= 494), "freed after the first trial"


def test_garbage_does_not_hide_behind_large_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 of 900 MiB are no more than blocks are rounded up by, and a twelfth of what is left."""
    cuda = FakeCuda()
    device = CudaDevice(0, backend=cuda)
    cuda.allocate(900 * MiB)
    monkeypatch.setattr(here_module, "own_bytes", lambda *_, **__: 900 * MiB)
    InACycle(cuda, 8 * MiB)
    here_module.collect_garbage(batchfit.Workload(lambda n: None, state=[]), device)
    assert cuda.live[0] == 900 * MiB


def test_collections_that_could_free_nothing_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(FrozenGarbage, "thorough", lambda _: done.append("after a trial"))
    monkeypatch.setattr(here_module.gc, "collect", lambda: done.append("before"))
    cuda = FakeCuda()
    program = Program(cuda)

    def find() -> None:
        work = batchfit.Workload(program.step, state=[])
        batchfit.find_batch_size(work, device=program.device, predict=False, max_size=64)

    with monkeypatch.context() as patch:
        patch.setattr(guarded_steps, "gc", types.SimpleNamespace(collect=lambda: 0))
        find()
        assert done == ["before"], "something is held that is not declared, and it stays"
        done.clear()
        cuda.free(10 * MiB)
        find()
    assert done == []


@pytest.mark.parametrize("ballast_mib", [0, 16, 48])
def test_tensors_beside_the_workload_count_and_are_not_touched(living_bytes: int, ballast_mib: int) -> None:
    ballast = torch.arange(ballast_mib * MiB // 4, dtype=torch.int32)
    before = ballast.clone().sum()

    def step(size: int) -> None:
        torch.empty(size * MiB, dtype=torch.uint8)

    fit = batchfit.find_batch_size(
        batchfit.Workload(step, state=[]), budget=living_bytes + 64 * MiB, device="cpu", tolerance=0.0
    )
    assert 64 - ballast_mib - 2 <= fit.batch_size <= 64 - ballast_mib  # in blocks of 2 MiB
    assert ballast.sum() == before
    assert torch.equal(ballast, torch.arange(ballast_mib * MiB // 4, dtype=torch.int32))


# Allocators and drivers


@pytest.mark.parametrize("budget", [None, "600MiB"])
def test_a_search_with_another_allocator(budget: str | None) -> None:
    fit = Program(AsyncCuda()).find(tolerance=0.0, budget=budget)
    assert fit.batch_size == (495 if budget is None else 295)
    assert all(trial.reserved_bytes is None for trial in fit.trials)


def test_a_driver_that_spills_is_held_to_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(used_by_others=200 * MiB)
    monkeypatch.setattr(
        cuda, "may_reserve", lambda segments, index: segments <= cuda.allowed.get(index, 2**60)
    )
    monkeypatch.setattr(caching_memory, "spills_to_ram", lambda: True)
    assert Program(cuda).find(tolerance=0.0, max_size=4000).batch_size == 395
    cuda.free(10 * MiB)
    cuda.allowed.clear()
    monkeypatch.setattr(caching_memory, "spills_to_ram", lambda: False)
    assert Program(cuda).find(tolerance=0.0, max_size=4000).batch_size == 4000, "the fake does spill"


# Autotuning


class Tuning(Program):
    """cudnn.benchmark: the first step of a size tries algorithms with all the workspace that there is."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__(cuda)
        self.tuned: set[int] = set()

    def step(self, size: int) -> None:
        if torch.backends.cudnn.benchmark and size not in self.tuned:
            self.tuned.add(size)
            self.cuda.allocate(2 * size * MiB)
            rest = self.device.budget_bytes() - self.cuda.live[0]
            self.cuda.allocate(rest)
            self.cuda.free(rest + 2 * size * MiB)
        super().step(size)


@pytest.mark.parametrize("tolerance", [0.0, 0.02])
def test_a_search_is_not_fooled_by_autotuning(tolerance: float) -> None:
    plain = Tuning(FakeCuda()).find(tolerance=tolerance)
    with torch.backends.cudnn.flags(enabled=True, benchmark=True):
        tuned = Tuning(FakeCuda()).find(tolerance=tolerance)
        assert torch.backends.cudnn.benchmark, "the flag is the user's"
    assert tuned.batch_size == plain.batch_size >= (475 if tolerance else 495)
    assert [one.size for one in tuned.trials] == [one.size for one in plain.trials]
    short = [one.peak_bytes for one in tuned.trials if not one.soak and one.fits]
    assert short == [one.peak_bytes for one in plain.trials if not one.soak and one.fits]


# Memory that does not only grow with the size


@pytest.mark.parametrize("strategy", ["guided", "bisect"])
def test_a_size_that_needs_more_than_a_larger_one_is_a_bound(strategy: str) -> None:
    """96 needs more than 128 does. What lies above it is not trusted, and the answer has run."""

    def need(size: int) -> int:
        return (900 if size == 96 else 2 * size) * MiB

    device = FakeDevice(400 * MiB, peak=need)
    workload = batchfit.Workload(device.step, state=[])
    fit = batchfit.find_batch_size(
        workload, device=device, strategy=strategy, start=96, tolerance=0.0, steps=2, soak_steps=3
    )
    assert (fit.trials[0].size, fit.trials[0].fits) == (96, False)
    assert fit.batch_size == 95
    assert fit.sustained


# One search at a time in a file


def test_a_file_in_use_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "search.json"

    def again(trial: batchfit.Trial, budget_bytes: int) -> None:
        Program(FakeCuda()).find(resume=path)

    with pytest.raises(ResultFileError, match=r"search\.json is in use by another search\. Wait"):
        Program(FakeCuda()).find(resume=path, on_trial=again)
    assert [one.name for one in tmp_path.iterdir()] == ["search.json"], "the lock went with its search"
    assert Program(FakeCuda()).find(resume=path).batch_size > 1


@pytest.mark.skipif(os.name != "posix", reason="needs posix: file locks")
def test_a_killed_search_leaves_no_lock_in_the_way(tmp_path: Path) -> None:
    path = tmp_path / "search.json"
    code = f"""
        from pathlib import Path
        from batchfit._files import locked
        with locked(Path({str(path)!r})):
            print("inside", flush=True)
            input()
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "inside\n"
        with pytest.raises(ResultFileError, match="in use by another search"), locked(path):
            pass
        other.send_signal(signal.SIGKILL)
        other.wait(30)
    assert (tmp_path / ".search.json.lock").exists(), "it could not clean up"
    with locked(path), pytest.raises(ResultFileError), locked(path):
        pass
    assert list(tmp_path.iterdir()) == []
