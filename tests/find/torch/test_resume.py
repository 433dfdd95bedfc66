"""`resume=`: a search that was stopped, or whose process was killed, goes on where it was."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import faulty_targets
import pytest
import torch
from child_path import CHILD_PATH
from stopping import Stop, stop_after

import batchfit
from batchfit._cli.exits import Code
from batchfit._engine.device import device as device_module
from batchfit._engine.device.device import Ram
from batchfit.errors import NothingFitsError, ResultFileError, SettingsDifferError
from batchfit.results import FitResult, Trial

SETTINGS: dict[str, Any] = {"budget": "8MiB", "soak_steps": 4, "strategy": "bisect", "max_size": 32}


def tried(fit: FitResult) -> list[tuple[int, bool]]:
    return [(trial.size, trial.soak) for trial in fit.trials]


def no_step(batch_size: int) -> None:
    raise AssertionError("a step ran")


def test_a_search_in_two_runs_is_the_search_in_one(tmp_path: Path) -> None:
    path = tmp_path / "search.json"
    whole = batchfit.find_batch_size(faulty_targets.make(), **SETTINGS)
    with pytest.raises(Stop):
        batchfit.find_batch_size(faulty_targets.make(), resume=path, on_trial=stop_after(2), **SETTINGS)
    assert len(json.loads(path.read_text())["trials"]) == 2
    ran: list[Trial] = []
    second = batchfit.find_batch_size(
        faulty_targets.make(), resume=str(path), on_trial=lambda trial, _: ran.append(trial), **SETTINGS
    )
    assert tried(second) == tried(whole)
    assert second.batch_size == whole.batch_size
    assert second.trials_resumed == 2
    assert "(2 of them in an earlier run)" in str(second)
    assert list(second.trials[2:]) == ran
    assert second.elapsed_s >= sum(trial.elapsed_s for trial in second.trials)


@pytest.mark.parametrize(("now_mib", "answer"), [(985, 2000), (800, 1600)])
def test_with_much_less_memory_than_then_the_search_goes_on_within_it(
    now_mib: int,
    answer: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Memory comes and goes: 15 of 1000 MiB are nothing, 200 are not. What ran with more counts no more."""
    path = tmp_path / "search.json"
    settings: dict[str, Any] = {"strategy": "bisect", "max_size": 4000, "soak_steps": 4, "resume": path}

    def free(mib: int) -> None:
        ram = Ram(total_bytes=2**40, available_bytes=4 * (mib * 2**20 * 10 // 9 + 1))  # a quarter is used
        monkeypatch.setattr(device_module, "read_ram", lambda: ram)

    def step(size: int) -> None:
        torch.empty(size, 2**19, dtype=torch.uint8)

    work = batchfit.Workload(step, state=[])
    free(1000)
    with pytest.raises(Stop):
        batchfit.find_batch_size(work, on_trial=stop_after(4), **settings)
    free(now_mib)
    fit = batchfit.find_batch_size(work, **settings)
    assert answer - 8 <= fit.batch_size <= answer  # what other tests left alive counts too
    assert ("searching on within what is free" in caplog.text) is (now_mib == 800)


def test_a_finished_search_answers_at_once_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "search.json"
    work = faulty_targets.make()
    first = batchfit.find_batch_size(work, resume=path, **SETTINGS)
    caplog.set_level(logging.INFO, "batchfit")
    again = batchfit.find_batch_size(work.with_step(no_step), resume=path, **SETTINGS)
    assert again.trials == first.trials
    assert again.batch_size == first.batch_size
    assert "(all of them in an earlier run)" in str(again)
    assert "had ended before: nothing was run" in caplog.text
    assert FitResult.from_json(again.to_json()) == again


def test_a_file_that_can_be_kept_no_more_does_not_end_the_search(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first trial is kept, then there is a folder in the file's place; the answer is the same."""
    path = tmp_path / "search.json"

    def in_the_way(trial: Trial, _: int) -> None:
        if path.is_file():
            path.unlink()
            path.mkdir()

    fit = batchfit.find_batch_size(faulty_targets.make(), resume=path, on_trial=in_the_way, **SETTINGS)
    assert fit.batch_size == 15
    said = [record.getMessage() for record in caplog.records]
    assert said[0].startswith("the search could not be kept after batch size 8: ")
    assert len(said) == len(fit.trials) - 1


def test_a_search_in_which_nothing_fitted_says_so_again(tmp_path: Path) -> None:
    path = tmp_path / "search.json"
    settings = {**SETTINGS, "budget": "300KiB"}
    for step in (faulty_targets.make().step, no_step):
        work = batchfit.Workload(step, state=[])
        with pytest.raises(NothingFitsError, match="a batch of 1 does not fit"):
            batchfit.find_batch_size(work, resume=path, **settings)


def test_what_differs_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "search.json"
    work = faulty_targets.make()
    with pytest.raises(Stop):
        batchfit.find_batch_size(work, resume=path, on_trial=stop_after(1), **SETTINGS)
    other = batchfit.Workload(no_step, state=[])
    with pytest.raises(SettingsDifferError, match="state_elements: 8 then, 0 now"):
        batchfit.find_batch_size(other, resume=path, **SETTINGS)
    with pytest.raises(SettingsDifferError, match="soak_steps: 4 then, 5 now"):
        batchfit.find_batch_size(work, resume=path, **{**SETTINGS, "soak_steps": 5})


def test_another_file_is_never_written_over(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    with pytest.raises(ResultFileError, match=r"notes.txt cannot be resumed from: not JSON"):
        batchfit.find_batch_size(batchfit.Workload(no_step, state=[]), resume=path, **SETTINGS)
    assert path.read_text() == "mine"


@pytest.mark.parametrize("value", [7, True, b"search.json"])
def test_a_path_is_a_path(value: Any) -> None:
    with pytest.raises(TypeError, match="resume must be the path of a file"):
        batchfit.find_batch_size(batchfit.Workload(no_step, state=[]), resume=value, **SETTINGS)


class TestCommand:
    """The same with real processes, one of which is killed in the middle of a trial."""

    ARGUMENTS = (
        "--budget", "8MiB", "--soak-steps", "4", "--strategy", "halve", "--start", "8", "--max-size", "8",
        "--resume", "search.json",
    )  # fmt: skip

    def command(self, *more: str) -> list[str]:
        target = f"{faulty_targets.FILE}:faulty"
        return [sys.executable, "-m", "batchfit", "find", target, *self.ARGUMENTS, *more]

    def environment(self, folder: Path, fault: str) -> dict[str, str]:
        more = {"PYTHONPATH": CHILD_PATH, "FAULT": fault, "ABOVE": "4", "DIARY": str(folder / "diary")}
        return {**os.environ, **more}

    def steps(self, folder: Path) -> list[str]:
        lines = (folder / "diary").read_text().splitlines() if (folder / "diary").exists() else []
        return [line.partition(" ")[2] for line in lines]

    @pytest.mark.parametrize("isolate", [False, pytest.param(True, marks=pytest.mark.slow)])
    def test_it_survives_the_death_of_its_own_process(self, isolate: bool, tmp_path: Path) -> None:
        """Trial 1 (a soak of 8 that ran out) is kept; the process is killed in trial 2 and then goes on."""
        flags = ("--isolate",) if isolate else ()
        # A budget under which 8 does not fit; 4 hangs.
        small = ("--budget", "3MiB", *flags)
        environment = {**self.environment(tmp_path, "hang"), "ABOVE": "3"}
        process = subprocess.Popen(
            self.command(*small), cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL
        )
        try:
            deadline = time.monotonic() + 60
            while "hangs" not in self.steps(tmp_path):
                assert time.monotonic() < deadline, "the second trial was never reached"
                assert process.poll() is None
                time.sleep(0.05)
        finally:
            process.kill()
            process.wait()
        kept = json.loads((tmp_path / "search.json").read_text())
        assert [(trial["size"], trial["outcome"]) for trial in kept["trials"]] == [(8, "oom")]
        (tmp_path / "diary").unlink()
        ran = subprocess.run(
            self.command(*small, "--json"),
            cwd=tmp_path,
            env=self.environment(tmp_path, "none"),
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert ran.returncode == Code.FOUND, ran.stderr
        fit = FitResult.from_json(ran.stdout)
        assert fit.batch_size == 4
        assert fit.sustained
        assert [trial.size for trial in fit.trials].count(8) == 1
        assert fit.trials_resumed == 1
        assert "step 8" not in self.steps(tmp_path)
        assert "going on with the search in search.json: 1 trial in it" in ran.stderr
        assert "trial 1:" not in ran.stderr
        assert "trial 2: size 4:" in ran.stderr
        assert sorted(file.name for file in tmp_path.iterdir()) == ["diary", "search.json"]
