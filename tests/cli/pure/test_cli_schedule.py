"""`batchfit schedule show`: the plan as a table, as JSON and as a picture, without torch."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_runner import runner

import batchfit
from batchfit._charts.text_charts import as_text
from batchfit._cli.app import app
from batchfit._cli.commands import schedule as command
from batchfit._cli.commands import schedule_flags
from batchfit._cli.commands.schedule import followed, schedule_lines
from batchfit._cli.commands.schedule_flags import ShowSettings
from batchfit._cli.commands.schedule_limit import ScheduleLimit
from batchfit._cli.exits import Code

STEP = '{"type": "step", "step_size": 20, "gamma": 2, "max_batch_size": 2048}'


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "step.json").write_text(STEP)
    return tmp_path


def show(*arguments: str) -> Any:
    return runner().invoke(app, ["schedule", "show", *arguments])


RUN = ("--samples", "50000", "--epochs", "100")


def test_the_table(project: Path) -> None:
    ran = show("step.json", *RUN, "--initial", "256", "--lr", "0.1", "--lr-rule", "sqrt", "--fits", "600")
    assert ran.exit_code == Code.FOUND, ran.stderr
    lines = [line.rstrip("█▏▎▍▌▋▊▉ ") for line in ran.stdout.splitlines()]
    assert lines[:5] == [
        "  epochs  from step  batch size  updates      LR",
        "    0-19          0         256    3,920     0.1",
        "   20-39      3,920         512    1,960  0.1414",
        "   40-59      5,880       1,024      980     0.2",
        "   60-99      6,860       2,048    1,000  0.2828",
    ]
    assert "7,860 updates in 100 epochs of 50,000 samples" in lines
    assert "  59.9% fewer than with a constant 256 (19,600)" in lines
    reported = " ".join(ran.stdout.split())
    assert "from epoch 40 on 1024 is more than the 600 that fit: run it as 2 microbatches of 512" in reported
    assert "from epoch 60 on 2048 is more than the 600 that fit: run it as 4 microbatches of 512" in reported
    assert all(len(line) <= 80 for line in lines)


@pytest.mark.parametrize("name", ["fit", "cards", "profile"])
def test_memory_of_each_phase_where_a_result_is_given(name: str, project: Path) -> None:
    data = Path(__file__).parents[2] / "data" / "report" / f"{name}.json"
    results = json.loads(data.read_text())
    result = results[0] if isinstance(results, list) else results
    largest, budget = result["largest" if name == "profile" else "batch_size"], result["budget_bytes"]
    plan = f"0:{largest} 1:{2 * largest}"
    ran = show(plan, "--samples", "100000", "--epochs", "2", "--fits", str(data), "--json")
    assert ran.exit_code == Code.FOUND, ran.stderr
    reported = json.loads(ran.stdout)
    first, second = (phase["peak_bytes"] for phase in reported["phases"])
    assert (reported["fits"], reported["budget_bytes"]) == (largest, budget)
    assert 0.5 * budget < first <= budget < second < 2 * budget
    assert len(reported["more_than_fits"]) == 1
    halved = show(
        plan, "--samples", "100000", "--epochs", "2", "--fits", str(data), "--world-size", "2", "--json"
    )
    assert json.loads(halved.stdout)["phases"][1]["peak_bytes"] == first
    table = show(plan, "--samples", "100000", "--epochs", "2", "--fits", str(data)).stdout.splitlines()
    assert table[0].split()[-3:] == ["memory", "of", "budget"]
    assert [row.rstrip("█▏▎▍▌▋▊▉ ").split()[-1] for row in table[1:3]] == [
        f"{first / budget:.0%}",
        f"{second / budget:.0%}",
    ]
    assert all(len(line) <= 80 for line in table)


def test_memory_between_and_beyond_what_was_run() -> None:
    room = ScheduleLimit(30, 4000, ((10, 1000), (20, 2000), (30, 4000)))
    assert [room.peak_bytes_at(size) for size in (5, 10, 15, 20, 25, 30, 35)] == [
        500,
        1000,
        1500,
        2000,
        3000,
        4000,
        5000,
    ]
    assert ScheduleLimit(30, 4000, ((30, 4000),)).peak_bytes_at(30) == 4000
    assert ScheduleLimit(30, 4000, ((30, 4000),)).peak_bytes_at(31) is None
    assert ScheduleLimit(30).peak_bytes_at(30) is None


def test_json_is_alone_on_stdout_and_in_the_file(project: Path) -> None:
    ran = show("0:256 20:512", "--samples", "50k", "--epochs", "60", "--json", "--output", "plan.json")
    assert ran.exit_code == Code.FOUND, ran.stderr
    plan = json.loads(ran.stdout)
    assert plan == json.loads((project / "plan.json").read_text())
    assert plan["updates"] == 7840
    assert plan["updates_at_constant_size"] == 11_760
    assert plan["updates_saved"] == pytest.approx(1 / 3)
    assert [(row["from_epoch"], row["to_epoch"], row["batch_size"]) for row in plan["phases"]] == [
        (0, 19, 256), (20, 59, 512),
    ]  # fmt: skip
    assert [row["updates"] for row in plan["phases"]] == [3920, 3920]


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_picture(suffix: str, project: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    file = project / f"plan.{suffix}"
    ran = show("step.json", *RUN, "--initial", "256", "--lr-rule", "seesaw", "--plot", str(file))
    assert ran.exit_code == Code.FOUND, ran.stderr
    assert file.stat().st_size > 5000
    if suffix == "svg":
        assert "learning rate" in file.read_text() or "<svg" in file.read_text()


def test_yaml(project: Path) -> None:
    pytest.importorskip("yaml")
    (project / "s.yaml").write_text("type: milestone\nunit: tokens\nmilestones: {0: 768, 1M: 1536}\n")
    ran = show("s.yaml", "--samples", "10k", "--epochs", "1", "--tokens-per-sample", "512", "--json")
    assert [row["batch_size"] for row in json.loads(ran.stdout)["phases"]] == [768, 1536]


def test_a_function_of_the_users(project: Path) -> None:
    (project / "plans_of_mine.py").write_text(
        "def more(epoch, size):\n    return 100 if epoch == 1 else 0\n"
        "def broken(progress):\n    return 1 // 0\n"
        "def half(progress):\n    return 0.5\n"
    )
    run = ("--samples", "1000", "--epochs", "3", "--initial", "100")
    more = '{"type": "increase", "function": "plans_of_mine:more"}'
    ran = show(more, *run, "--json")
    assert [row["batch_size"] for row in json.loads(ran.stdout)["phases"]] == [100, 200], ran.stderr
    capped = '{"type": "increase", "function": "plans_of_mine:more", "max_batch_size": 150}'
    assert [row["batch_size"] for row in json.loads(show(capped, *run, "--json").stdout)["phases"]] == [100]
    ran = show('{"type": "custom", "function": "plans_of_mine:broken"}', *run)
    assert ran.exit_code == Code.RAISED
    assert "ZeroDivisionError" in ran.stderr
    assert "raised by the schedule's function at epoch 0" in ran.stderr
    ran = show('{"type": "custom", "function": "plans_of_mine:half"}', *run)
    assert ran.exit_code == Code.USAGE
    assert "must be a positive integer, not 0.5" in ran.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("step.json", *RUN), "initial must be given, such as --initial 256, not None"),
        (("none.json", *RUN), "the file 'none.json' cannot be read: No such file or directory"),
        (("quickly", *RUN), "source must be a file (.json, .yaml, .yml) or text such as '0:256 20:512'"),
        (("20:256 10:512", *RUN), "milestones must be in increasing order, not 10 after 20"),
        (('{"type": "step", "step_size": 1, "gamma": 1}', *RUN), "gamma must be at least 2, not 1"),
        (('{"type": "noise"}', *RUN), "config must be a schedule that can be foreseen, not one by noise"),
        (
            ("step.json", *RUN, "--initial", "4096"),
            "max_batch_size must be at least the initial batch size 4096",
        ),
        (("step.json", *RUN, "--initial", "0"), "initial must be a positive integer, not 0"),
        (("0:256", *RUN, "--initial", "128"), "initial_batch_size must be 256, which milestones says at 0"),
        (("0:256", "--samples", "many", "--epochs", "3"), "samples must be a whole number or text"),
        (("0:256", "--samples", "9", "--epochs", "0"), "epochs must be a positive integer, not 0"),
        (("0:256", *RUN, "--lr", "-1"), "lr must be more than 0, not -1.0"),
        (("0:256", *RUN, "--lr-rule", "cubic"), "lr_rule must be 'none', 'linear'"),
        (("0:256", *RUN, "--fits", "0"), "fits must be a positive integer, not '0'"),
        (("0:256", *RUN, "--fits", "gone.json"), "fits must be a number or a result file, not 'gone.json'"),
        (
            ("0:256", *RUN, "--fits", "step.json"),
            "fits must be a result of find, predict or profile: step.json",
        ),
        (
            ("0:4 20:512", *RUN, "--world-size", "8"),
            "initial_batch_size must be at least 8, so that no rank of 8",
        ),
        (("0:64 9:1M tokens", *RUN), "tokens must be counted"),
        (("0:256", *RUN, "--plot", "a.jpg"), "plot must end in .png or .svg"),
        (("0:256", *RUN, "--output", "no/such/folder.json"), "output must be a file that can be written"),
    ],
)
def test_bad_usage(arguments: tuple[str, ...], words: str, project: Path) -> None:
    ran = show(*arguments)
    assert ran.exit_code == Code.USAGE
    assert words in ran.stderr
    assert ran.stdout == ""


def test_what_is_wrong_in_a_file_is_named(project: Path) -> None:
    (project / "s.json").write_text('{"type": "step", "step_size": 0}')
    ran = show("s.json", *RUN)
    assert ran.exit_code == Code.USAGE
    assert ran.stderr == "error: s.json: step_size must be a positive integer, not 0\n"
    (project / "s.json").write_text("{")
    ran = show("s.json", *RUN)
    assert ran.stderr.startswith("error: 's.json' must be JSON, and is not: ")
    assert "--help" not in ran.stderr
    assert "--help lists the flags" in show("0:8", "--samples", "100", "--epochs", "0").stderr


def test_a_run_without_an_update_is_refused(project: Path) -> None:
    ran = show("0:256", "--samples", "100", "--epochs", "3", "--drop-last")
    assert ran.exit_code == Code.USAGE
    assert "samples must be at least a batch of 256 with --drop-last, not 100" in ran.stderr


def test_every_flag_is_a_setting_and_reaches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"config", "json", "output", "plot"}
    flags = {name: one.default for name, one in inspect.signature(schedule_flags.show).parameters.items()}
    fields = {name: one.default for name, one in inspect.signature(ShowSettings).parameters.items()}
    assert {name: default for name, default in flags.items() if name not in own} == fields
    seen: list[Any] = []
    monkeypatch.setattr(
        command, "show_schedule", lambda config, settings, delivery: seen.append(settings) or Code.FOUND
    )
    wanted = ShowSettings(
        samples="1k", epochs=2, initial=3, lr=0.5, lr_rule="sqrt", fits="4", world_size=5, microbatch_size=6,
        tokens_per_sample=7, drop_last=True,
    )  # fmt: skip
    arguments: list[str] = []
    for name in fields:
        value = getattr(wanted, name)
        arguments += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    assert show("0:256", *arguments).exit_code == 0
    assert seen == [wanted]


def test_many_sizes_are_shortened_with_advice() -> None:
    text = '{"type": "linear", "final_batch_size": 512, "over": 100}'
    shown = followed(text, ShowSettings(samples="1000", epochs=100, initial=64))
    lines = as_text(schedule_lines(shown, width=80, plain=True)).splitlines()
    assert len(shown.phases) == 100
    assert any("... 76 more; every= in the schedule makes fewer sizes" in line for line in lines)
    assert len(lines) < 32
    lines_of_text = as_text(schedule_lines(shown, width=80, plain=True))
    assert lines_of_text.isascii()


def test_ranks_microbatches_and_the_last_batch() -> None:
    settings = ShowSettings(
        samples="1000", epochs=1, world_size=8, microbatch_size=4, fits="20", drop_last=True
    )
    shown = followed("0:250", settings)
    assert [(phase.size, phase.updates) for phase in shown.phases] == [(224, 4)]
    assert "224 (28 on a rank) is more than the 20 that fit: run it as 2 microbatches of 14" in shown.over[0]


def test_sizes_are_shared_by_the_ranks_as_the_scheduler_would() -> None:
    shown = followed("0:10 2:22", ShowSettings(samples="500", epochs=4, world_size=4))
    assert [phase.size for phase in shown.phases] == [8, 20]


def test_more_updates_are_reported_as_such() -> None:
    shown = followed("0:512 1:256", ShowSettings(samples="1024", epochs=3))
    assert shown.saved == pytest.approx(1 - 10 / 6)
    assert "66.7% more than with a constant 512 (6)" in as_text(schedule_lines(shown, width=80, plain=True))


def test_a_batch_that_is_larger_than_an_epoch_is_reported() -> None:
    shown = followed("0:256 1:1024 2:128 3:1024", ShowSettings(samples="300", epochs=4))
    assert [(phase.size, phase.updates) for phase in shown.phases] == [
        (256, 2),
        (1024, 1),
        (128, 3),
        (1024, 1),
    ]
    assert shown.beyond == (
        "from epoch 1 on 1024 is more than the 300 samples of an epoch, which are one batch, with the "
        "learning rate of 1024. Set max_batch_size",
    )
    assert "from epoch 1 on 1024 is more than" in as_text(schedule_lines(shown, width=80, plain=True))
    assert json.loads(shown.to_json())["more_than_an_epoch"] == list(shown.beyond)
    shown = followed("0:256 1:1024", ShowSettings(samples="300", epochs=4, drop_last=True))
    assert [(phase.size, phase.updates, phase.to_epoch) for phase in shown.phases] == [
        (256, 1, 0),
        (1024, 0, 3),
    ]
    assert "--drop-last leaves them out: nothing is trained" in shown.beyond[0]


def test_neither_torch_nor_numpy_is_loaded() -> None:
    program = (
        "import atexit, sys\nfrom batchfit._cli import main\nheavy = {'torch', 'numpy'}\n"
        "atexit.register(lambda: print(heavy & set(sys.modules) or 'none', file=sys.stderr))\nmain()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(batchfit.__file__).parent.parent)}
    arguments = [sys.executable, "-c", program, "schedule", "show", "0:256 20:512", *RUN]
    ran = subprocess.run(arguments, capture_output=True, text=True, timeout=60, env=environment)
    assert ran.returncode == 0
    assert ran.stderr.strip() == "none"
