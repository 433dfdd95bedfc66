"""`batchfit predict` and `batchfit explain` as a person or a script meets them."""

from __future__ import annotations

import inspect
import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from child_path import CHILD_PATH
from cli_runner import runner
from typer.testing import Result

import batchfit
from batchfit._charts.text_charts import as_text
from batchfit._cli import png
from batchfit._cli.commands import explain, predict
from batchfit._cli.commands.explain import explain_target
from batchfit._cli.commands.predict import Row, predict_target
from batchfit._cli.delivery import Delivery
from batchfit._cli.exits import Code, CommandFailed
from batchfit._cli.target import NO_GPU, TOO_LARGE, TargetCall
from batchfit._engine.allocator.gpus import GPUS
from batchfit._explain.pure.options import ExplainOptions
from batchfit._options import flags_in
from batchfit._predict.pure.options import PredictOptions
from batchfit._report.files import Source
from batchfit._report.sections import charts
from batchfit.results import MemoryExplanation, Prediction

GIB = 2**30

# A sample is 4 KiB on the host, and 4 MiB for each layer on the device.
TRAIN = """
import sys
import torch
from torch import nn
import batchfit

WIDTH = 2**10

def loss_fn(model, batch):
    return model(batch.expand(-1, -1, WIDTH)).square().mean()

def make_batch(size):
    return torch.ones(size, 2**10, 1)

def make(loss_fn=loss_fn, device="cpu"):
    with torch.device(device):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.AdamW(model.parameters())
    return batchfit.training(model, optimizer, loss_fn, make_batch)

def on_meta():
    return make(device="meta")

def noisy():
    print("the factory prints")
    return make()

def reads_a_value():
    def loss_fn(model, batch):
        loss = model(batch.expand(-1, -1, WIDTH)).square().mean()
        return loss * 2 if loss.item() > 1 else loss
    return make(loss_fn)

def wrong_shape():
    return make(lambda model, batch: model(batch).mean())

def no_scalar():
    return make(lambda model, batch: model(batch.expand(-1, -1, WIDTH)))

def on_cuda():
    raise AssertionError("Torch not compiled with CUDA enabled")

def no_driver():
    raise RuntimeError("Found no NVIDIA driver on your system. Please check ...")

def too_large():
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 2199023255552 B")

def leaves():
    sys.exit(3)

def in_ddp():
    work = make()
    model = nn.parallel.DistributedDataParallel(work.model)
    return batchfit.training(model, torch.optim.AdamW(model.parameters()), loss_fn, make_batch)
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "train.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    yield tmp_path
    sys.path[:] = path
    sys.modules.pop("train", None)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "batchfit", *arguments]


def environment(**more: str) -> dict[str, str]:
    known = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "NO_COLOR", "FORCE_COLOR")
    }
    return {**known, "PYTHONPATH": CHILD_PATH, "OMP_NUM_THREADS": "1", **more}


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), env=environment(**variables), capture_output=True, text=True, timeout=240
    )


def run_here(*arguments: str) -> Result:
    """Without a process of its own: starting one takes seconds."""
    from batchfit._cli.app import app

    return runner().invoke(app, arguments)


def predict_here(
    target: str, *, delivery: Delivery | None = None, full_traceback: bool = False, **changes: object
) -> Code:
    flags = {"budget": None, **changes}
    return predict_target(TargetCall(target, flags, delivery or Delivery(), full_traceback))


def explain_here(target: str, *, delivery: Delivery | None = None, **changes: object) -> Code:
    settings: dict[str, object] = {
        "batch_size": 8, "budget": None, "gpu": "rtx4090", "what_if": True, **changes
    }  # fmt: skip
    return explain_target(TargetCall(target, settings, delivery or Delivery()))


def keywords(function: object) -> dict[str, object]:
    parameters = inspect.signature(function).parameters  # type: ignore[arg-type]
    return {name: one.default for name, one in parameters.items() if name != "workload"}


OWN = {"context", "target", "json", "output", "plot", "traceback", "list_gpus", "env", "set_"}


class TestFlags:
    def test_flags_are_the_keywords_of_the_functions(self) -> None:
        from batchfit._cli import app

        flags = {n: p.default for n, p in inspect.signature(app.predict).parameters.items() if n not in OWN}
        assert flags == keywords(batchfit.predict_batch_size)
        assert set(flags) == {name for name, *_ in flags_in(PredictOptions)}
        flags = {n: p.default for n, p in inspect.signature(app.explain).parameters.items() if n not in OWN}
        assert flags == keywords(batchfit.explain_memory)
        assert set(flags) == {name for name, *_ in flags_in(ExplainOptions)}

    @pytest.mark.parametrize(
        ("name", "given"),
        [
            (
                "predict",
                {
                    "budget": ["24GiB", "80GiB"], "gpu": ["h100", "t4"], "max_size": 64, "margin": 0.5,
                    "calibrate": True, "expandable_segments": True,
                    "ranks": 8, "shard": "hsdp:2x4,bf16", "offload": True,
                },
            ),
            (
                "predict",
                {
                    "budget": ["24GiB"], "gpu": None, "max_size": None, "margin": None,
                    "calibrate": False, "expandable_segments": False,
                    "ranks": None, "shard": None, "offload": True,
                },
            ),
            (
                "explain",
                {
                    "batch_size": 32, "budget": "24GiB", "gpu": "h100", "what_if": False,
                    "ranks": 8, "shard": "fsdp2", "offload": True,
                },
            ),
        ],
    )  # fmt: skip
    def test_every_flag_is_spelled_like_its_keyword_and_reaches_it(
        self, name: str, given: dict[str, object], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from batchfit._cli.app import app

        arguments = [name, "train.py:make", "--json", "--output", "a.json", "--plot", "a.png"]
        for word, value in given.items():
            flag = word.replace("_", "-")
            if isinstance(value, bool):
                arguments.append(f"--{flag}" if value else f"--no-{flag}")
            elif value is not None:
                for one in value if isinstance(value, list) else [value]:
                    arguments += [f"--{flag}", str(one)]
        seen: list[object] = []

        def catch(call: TargetCall) -> Code:
            seen.extend([call.target, call.flags, call.delivery])
            return Code.FOUND

        monkeypatch.setattr({"predict": predict, "explain": explain}[name], f"{name}_target", catch)
        ran = runner().invoke(app, arguments)
        assert ran.exit_code == 0, ran.output
        assert seen == [
            "train.py:make",
            given,
            Delivery(as_json=True, output=Path("a.json"), plot=Path("a.png")),
        ]


class TestPredict:
    def test_a_table_a_picture_and_what_supports_it(self, project: Path) -> None:
        flags = ("--budget", "24GiB", "--budget", "4GiB", "--output", "p.json")
        ran = run_here("predict", "train.py:make", *flags)
        assert ran.exit_code == Code.FOUND, ran.stderr
        reported = Prediction.from_json(Path("p.json").read_text())
        large, small = (one.batch_size for one in reported.answers)
        assert large > small > 50
        assert re.search(rf"h200   24.0 GiB +{large} ", ran.stdout)
        assert re.search(rf"h200   4.00 GiB +{small} ", ran.stdout)
        assert f"24.0 GiB: {large}" in ran.stdout  # at the end of its line in the picture
        assert ran.stdout.count("●") == 2
        assert "2.0% of each budget left free" in ran.stdout
        assert (
            f"next       batchfit explain train.py:make --batch-size {large} --budget 24.0GiB" in ran.stdout
        )
        assert "saved      p.json" in ran.stdout
        assert max(map(len, ran.stdout.splitlines())) <= 80
        assert "\x1b" not in ran.stdout + ran.stderr

    def test_json_is_alone_on_stdout(self, project: Path) -> None:
        ran = run("predict", "train:noisy", "--gpu", "h200", "--json", PYTHONIOENCODING="ascii")
        assert ran.returncode == Code.FOUND, ran.stderr
        reported = Prediction.from_json(ran.stdout)
        assert reported.card == "h200"
        assert "the factory prints" in ran.stderr
        assert f"batch size {reported.batch_size} is predicted to fit in 139.3 GiB" in ran.stderr
        assert f"use it     DataLoader(dataset, batch_size={reported.batch_size})" in ran.stderr
        assert ran.stderr.isascii()  # what the stream cannot write is drawn with what it can

    def test_several_gpus_are_a_list_and_one_that_is_too_small_is_in_it(
        self, project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from batchfit._engine.allocator import gpus

        tiny = gpus.Gpu("tiny", 40 * 2**20, (8, 0), 10)
        monkeypatch.setitem(GPUS, "tiny", tiny)
        flags = {"gpu": ["H200", "h200", "tiny", "T4"], "max_size": 3000}
        assert predict_here("train.py:make", delivery=Delivery(output=Path("p.json")), **flags) == Code.FOUND
        out = capsys.readouterr().out
        found = json.loads(Path("p.json").read_text())
        assert [(one["kind"], one["card"]) for one in found] == [
            ("prediction", "h200"), ("prediction", "t4"), ("nothing_fits", "tiny"),
        ]  # fmt: skip
        assert re.search(r"tiny +40.0 MiB +none", out)
        assert f"h200: {found[0]['batch_size']}" in out
        assert "t4 itself: not measured by us" in out
        assert predict_here("train.py:make", gpu=["a100-40gb", "h200", "a100"], max_size=8) == Code.FOUND
        assert "this is for" not in capsys.readouterr().out, "it was named in full, and is there once"
        assert predict_here("train.py:make", gpu=["a100"], max_size=8) == Code.FOUND
        out = " ".join(capsys.readouterr().out.split())
        assert "'a100' is made with several memories: this is for a100-40gb, not a100-80gb" in out
        with pytest.raises(CommandFailed, match="a batch of 1 does not fit on tiny") as caught:
            predict_here("train.py:make", gpu=["tiny"])
        assert caught.value.code == Code.NOTHING_FITS

    def test_a_dataset_smaller_than_the_answer_is_noted_for_several_gpus_too(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        from batchfit._charts.text_charts import as_text
        from batchfit._cli.commands.predict import Predicted, prediction_lines

        data = Path(__file__).parents[2] / "data" / "report" / "cards.json"
        gpus = [Prediction.model_validate(one) for one in json.loads(data.read_text())]
        few = tuple(one.model_copy(update={"samples": 5000}) for one in gpus)
        rows = [Row(one.card, True, one.budget_bytes, one.batch_size, one.peak_bytes) for one in few]
        text = as_text(prediction_lines(Predicted(tuple(rows), few), next_command="", width=80, plain=True))
        assert "dataset    it has 5000 samples: no batch of it is larger" in text
        assert "use it" not in text
        # Of a program the answer is its command, and what is explained next has two batches of its samples.
        one = Predicted(tuple(rows[:1]), few[:1])
        after = predict.next_command(one, "batchfit explain", " -- python t.py {}", most=2500)
        text = as_text(
            prediction_lines(one, next_command=after, width=80, plain=True, use="python t.py {}".format)
        )
        assert "use it     python t.py 4088" in text
        assert "batchfit explain --batch-size 2500 " in text

    def test_a_model_that_has_no_memory_is_predicted_alike(
        self, project: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for target in ("make", "on_meta"):
            predict_here(f"train.py:{target}", budget=["4GiB"])
        sizes = re.findall(r"batch size (\d+) is predicted", capsys.readouterr().out)
        assert len(sizes) == 2
        assert sizes[0] == sizes[1]

    @pytest.mark.parametrize(
        ("target", "code", "words"),
        [
            (
                "reads_a_value",
                Code.UNTRACEABLE,
                r"\.item\(\) at train.py:\d+.*batchfit find measures instead",
            ),
            (
                "wrong_shape",
                Code.UNTRACEABLE,
                r"raised RuntimeError: .* at train.py:\d+ \(aten\.\S+\) while it was traced.*batchfit find",
            ),
            ("no_scalar", Code.RAISED, r"a step of train.py:no_scalar raised ValueError"),
            ("on_cuda", Code.RAISED, "raised AssertionError at train.py:.*" + re.escape(NO_GPU)),
            ("no_driver", Code.RAISED, "raised RuntimeError at train.py:.*" + re.escape(NO_GPU)),
            ("too_large", Code.RAISED, "raised RuntimeError at train.py:.*" + re.escape(TOO_LARGE)),
            ("leaves", Code.USAGE, "ended the program"),
            ("missing", Code.USAGE, "there is no 'missing'"),
        ],
    )
    def test_what_cannot_be_predicted_says_why_and_what_to_do(
        self, target: str, code: Code, words: str, project: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with pytest.raises(CommandFailed, match=words) as caught:
            predict_here(f"train.py:{target}", budget=["4GiB"])
        assert caught.value.code == code
        assert "_cli" not in caught.value.details
        assert not caplog.records  # torch logs the traceback of an error in a fake kernel
        with pytest.raises(CommandFailed, match=words):
            explain_here(f"train.py:{target}")

    def test_what_may_be_an_error_of_the_user_is_shown_as_one(self, project: Path) -> None:
        with pytest.raises(CommandFailed) as caught:
            predict_here("train.py:wrong_shape", budget=["4GiB"])
        assert "train.py" in caught.value.details
        assert "site-packages" not in caught.value.details
        with pytest.raises(CommandFailed) as caught:
            predict_here("train.py:reads_a_value", budget=["4GiB"])
        assert caught.value.details == ""

    def test_a_traceback_shows_what_stood_in_the_way(self, project: Path) -> None:
        with pytest.raises(CommandFailed) as caught:
            predict_here("train.py:wrong_shape", budget=["4GiB"], full_traceback=True)
        assert "Traceback" in caught.value.details
        assert "loss_fn" in caught.value.details or "<lambda>" in caught.value.details

    def test_no_budget_and_no_gpu_is_usage(self, project: Path) -> None:
        with pytest.raises(CommandFailed, match="budget must be given") as caught:
            predict_here("train.py:make")
        assert caught.value.code == Code.USAGE

    def test_a_bug_of_ours_is_not_blamed_on_a_flag(
        self, project: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from batchfit._predict import predict as _predict

        def fail(*_: object, **__: object) -> None:
            raise ValueError("zip() argument 2 is shorter")

        monkeypatch.setattr(_predict, "rules_for", fail)
        with pytest.raises(ValueError, match="zip"):
            predict_here("train.py:make", budget=["4GiB"])

    @pytest.mark.parametrize(
        ("number", "code"), [(signal.SIGINT, Code.INTERRUPTED), (signal.SIGTERM, Code.TERMINATED)]
    )
    def test_an_interrupt_has_its_code(
        self, number: signal.Signals, code: Code, project: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from batchfit._predict import predict as _predict

        monkeypatch.setattr(_predict, "rules_for", lambda *_: signal.raise_signal(number))
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
        try:
            with pytest.raises(CommandFailed, match="interrupted before there was an answer") as caught:
                predict_here("train.py:make", budget=["4GiB"])
        finally:
            signal.signal(signal.SIGINT, before)
        assert caught.value.code == code

    @pytest.mark.parametrize(
        ("based_on", "named", "words"),
        [
            ("no GPU", True, "no GPU used; 1.0% of each budget left free"),
            ("no GPU", False, "no GPU used (kernels of an h200); 1.0%"),
            ("GPU, not run", False, "this GPU's kernels, nothing was run; 1.0%"),
            ("calibrated", False, "calibrated by 2 small runs; 1.0%"),
        ],
    )
    def test_how_sure_it_is_is_said(self, based_on: str, named: bool, words: str) -> None:
        gpu = "h200" if based_on == "no GPU" else "NVIDIA H200"
        trial = {"size": 1, "outcome": "fits", "steps_run": 3}
        reported = Prediction(
            batch_size=64, budget_bytes=80 * GIB, peak_bytes=70 * GIB, peak_phase="backward", margin=0.01,
            based_on=based_on, card=gpu, curve=[{"size": 1, "peak_bytes": GIB, "reserved_bytes": GIB}],
            trials=[trial, trial] if based_on == "calibrated" else [],
        )  # type: ignore[arg-type]  # fmt: skip
        row = Row(gpu, True, 80 * GIB, 64, 70 * GIB)
        found = predict.Predicted((row,), (reported,), gpu_named=named)
        command = predict.next_command(found, "batchfit explain train.py:make")
        text = as_text(predict.prediction_lines(found, next_command=command, width=80, plain=True))
        assert words in " ".join(text.split())
        memory = " --budget 80.0GiB" if based_on == "no GPU" else ""
        assert f"next       batchfit explain train.py:make --batch-size 64{memory}" in text.splitlines()[-1]

    def test_what_stops_the_next_size_is_said_of_each_row(
        self, project: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        predict_here("train.py:make", budget=["4GiB"], max_size=9)
        assert "  no larger  max_size is reached\n" in capsys.readouterr().out
        predict_here("train.py:make", budget=["4GiB", "8GiB"], max_size=9)
        out = capsys.readouterr().out
        assert "  no larger  h200, 4.00 GiB: max_size is reached\n" in out
        assert "  no larger  h200, 8.00 GiB: max_size is reached\n" in out

    def test_a_rank_that_is_not_the_first_is_silent(
        self, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("RANK", "1")
        assert predict_here("train.py:make", budget=["4GiB"], delivery=Delivery(output=Path("p.json"))) == 0
        assert capsys.readouterr() == ("", "")
        assert not Path("p.json").exists()

    @pytest.mark.slow
    def test_a_terminal_has_colours_and_its_own_width(self, project: Path) -> None:
        parent, child = pty.openpty()
        process = subprocess.Popen(
            command("predict", "train.py:make", "--budget", "4GiB"),
            env=environment(TERM="xterm-256color", COLUMNS="110"),
            stdin=subprocess.DEVNULL,
            stdout=child,
            stderr=child,
        )
        os.close(child)
        parts: list[bytes] = []
        try:
            while part := os.read(parent, 4096):
                parts.append(part)
        except OSError:
            pass  # how a terminal says that nobody writes to it any more
        finally:
            os.close(parent)
        text = b"".join(parts).decode()
        assert process.wait(timeout=60) == Code.FOUND, text
        plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
        assert re.search(r"\x1b\[[0-9;]*3[0-7]", text)
        assert "\x1b[?25h" in text  # the cursor is back
        assert 90 <= max(len(line) for line in plain.splitlines() if "┄┄┄" in line) <= 110


class TestExplain:
    def test_one_screen_with_kinds_modules_lines_and_changes(self, project: Path) -> None:
        flags = ("--batch-size", "64", "--gpu", "rtx4090", "--output", "e.json")
        ran = run_here("explain", "train.py:make", *flags)
        assert ran.exit_code == Code.FOUND, ran.stderr
        reported = MemoryExplanation.from_json(Path("e.json").read_text())
        assert ran.stdout.splitlines()[0] == reported.summary
        assert f"batch size 64 needs {reported.peak_bytes / GIB:.2f} GiB of 23.0 GiB" in ran.stdout
        assert "activations ██" in ran.stdout
        assert "source lines" in ran.stdout
        assert "train.py:" in ran.stdout
        rows = ran.stdout.splitlines()
        assert max(map(len, rows)) <= 80
        assert len(rows) <= 40

    def test_json_and_no_what_ifs(self, project: Path, capfd: pytest.CaptureFixture[str]) -> None:
        assert explain_here("train.py:make", what_if=False, delivery=Delivery(as_json=True)) == Code.FOUND
        out, err = capfd.readouterr()
        assert MemoryExplanation.from_json(out).what_ifs == ()
        assert "batch size 8 needs" in err  # for whoever looks on


class TestPlot:
    def test_a_missing_matplotlib_is_said_before_any_work(
        self, project: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(png.importlib.util, "find_spec", lambda name: None)
        for here in (predict_here, explain_here):
            with pytest.raises(CommandFailed, match=re.escape('pip install "batchfit[plot]"')) as caught:
                here("train.py:missing", delivery=Delivery(plot=Path("a.png")))
            assert caught.value.code == Code.USAGE

    @pytest.mark.parametrize("name", ["a.gif", "a", "missing/a.png"])
    def test_a_file_that_cannot_be_drawn_is_refused(self, name: str, project: Path) -> None:
        with pytest.raises(CommandFailed, match="plot must ") as caught:
            png.check_plot(Path(name))
        assert caught.value.code == Code.USAGE

    @pytest.mark.parametrize("name", ["a.png", "a.svg"])
    def test_pictures_are_drawn(self, name: str, project: Path) -> None:
        pytest.importorskip("matplotlib")
        png.check_plot(Path(name))
        answer = {"budget_bytes": 80 * GIB, "batch_size": 64, "peak_bytes": 70 * GIB}
        curve = [{"size": n, "peak_bytes": n * GIB, "reserved_bytes": n * GIB} for n in (1, 40, 80)]
        reported = Prediction(
            **answer, peak_phase="backward", margin=0.02, based_on="no GPU", card="h100",
            answers=(answer,), curve=curve,
        )  # type: ignore[arg-type]  # fmt: skip
        png.draw_charts(charts([Source(reported)]), Path(name), title="train.py:make")
        begins = b"\x89PNG" if name.endswith("png") else b"<?xml"
        assert Path(name).read_bytes().startswith(begins)
        explain_here("train.py:make", what_if=False, delivery=Delivery(plot=Path(f"b.{name}")))
        assert Path(f"b.{name}").read_bytes().startswith(begins)
        assert not [file for file in project.iterdir() if file.name.startswith(".")]

    def test_a_picture_that_cannot_be_saved_leaves_the_answer(
        self, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def full(*_: object, **__: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(png, "check_plot", lambda path: None)
        monkeypatch.setattr(png, "draw_charts", full)
        with pytest.raises(CommandFailed, match=r"could not be saved to a.png: No space left") as caught:
            predict_here("train.py:make", budget=["4GiB"], delivery=Delivery(plot=Path("a.png")))
        assert caught.value.code == Code.BROKEN
        assert "is predicted to fit in 4.00 GiB" in capsys.readouterr().out


class TestRanks:
    def test_a_plain_target_is_spread_and_the_next_command_says_how(
        self, project: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        code = predict_here("train.py:make", budget=["256MiB"], ranks=4, shard="zero1")
        shown = " ".join(capsys.readouterr().out.split())
        assert code is Code.FOUND
        assert "x 4 ranks = global batch" in shown
        assert re.search(r"per rank \w+ [\d.]+ MiB, ", shown)
        assert "--ranks 4 --shard zero1" in shown
        assert "not confirmed on GPUs" in shown

    def test_a_target_may_wrap_its_model_itself(
        self, project: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        delivery = Delivery(output=Path("p.json"))
        assert predict_here("train.py:in_ddp", budget=["256MiB"], ranks=4, delivery=delivery) is Code.FOUND
        found = Prediction.from_json(Path("p.json").read_text())
        assert (found.ranks, found.shard) == (4, "")
        assert found.per_rank is not None
        assert found.per_rank.communication_bytes > 8 * 2**20, "buckets"
        assert explain_here("train.py:in_ddp", ranks=4, what_if=False) is Code.FOUND
        assert "communication" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"ranks": 4, "shard": None}, "shard must be given with ranks"),
            ({"shard": "fsdp2"}, "ranks must be given with shard='fsdp2'"),
            ({"ranks": 4, "shard": "fsdp"}, "shard must be one of ddp, fsdp2"),
            ({"ranks": 1, "shard": "ddp"}, "ranks must be"),
        ],
    )
    def test_what_is_wrong_is_said_by_name(
        self, project: Path, changes: dict[str, object], words: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(CommandFailed) as caught:
            predict_here("train.py:make", budget=["256MiB"], **changes)
        assert words in str(caught.value)
        assert caught.value.code is Code.USAGE

    def test_a_command_after_two_dashes_has_no_ranks(self, project: Path) -> None:
        flags = ["--gpu", "h100", "--ranks", "8", "--shard", "ddp"]
        done = run_here("predict", *flags, "--", "python", "train.py", "{}")
        assert done.exit_code == Code.USAGE
        assert "ranks must be left out for a command" in done.output
