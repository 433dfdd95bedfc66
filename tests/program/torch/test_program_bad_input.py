"""What is wrong with a program gets a message of its own, with its last lines; nothing is left running."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from short_temp import short_temp

from batchfit._find.find import find_with
from batchfit._find.pure.options import FindOptions
from batchfit._program.find import program_trials
from batchfit._program.pure.template import CommandTemplate
from batchfit._program.trials import ProgramTarget
from batchfit.errors import ProgramError
from batchfit.results import FitResult

# A loop as people write it, with a place for what is wrong with it.
LOOP = """
import sys, torch
size = int(sys.argv[1])
{before}
model = torch.nn.Linear(256, 256)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(1000):
    {inside}
    loss = model(torch.randn({samples}, 256)).square().mean()
    loss.backward()
    {update}
"""
STEP = "optimizer.step(); optimizer.zero_grad()"


def program(*, before: str = "", inside: str = "", samples: str = "size", update: str = STEP) -> str:
    return LOOP.format(before=before, inside=inside, samples=samples, update=update)


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Programs run in a folder of their own; the probe leaves neither a process nor a file."""
    with short_temp(monkeypatch) as temp:
        monkeypatch.setenv("BATCHFIT_TEST_MARK", str(tmp_path))
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
        monkeypatch.chdir(tmp_path)
        yield
        assert list(temp.iterdir()) == []
        assert _living(str(tmp_path)) == []


def _living(mark: str) -> list[str]:
    found = []
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        if name.isdigit() and int(name) != os.getpid():
            try:
                if f"BATCHFIT_TEST_MARK={mark}".encode() in Path(f"/proc/{name}/environ").read_bytes():
                    found.append(Path(f"/proc/{name}/cmdline").read_text())
            except OSError:
                continue
    return found


def find(text: str, *command: str, start: int = 8, timeout_s: float | None = None) -> FitResult:
    Path("train.py").write_text(text)
    words = command or (sys.executable, "train.py", "{}")
    options = FindOptions(budget="8MiB", start=start, isolate=True, timeout_s=timeout_s)
    target = ProgramTarget(template=CommandTemplate(words=words))
    return find_with(program_trials(target, options), lambda: options)


def refused(text: str, *command: str, start: int = 8, timeout_s: float | None = None) -> ProgramError:
    with pytest.raises(ProgramError) as caught:
        find(text, *command, start=start, timeout_s=timeout_s)
    return caught.value


@pytest.mark.parametrize(
    ("text", "message", "last_line"),
    [
        (
            program(before="print('no data'); sys.exit(0)"),
            "the program ended before its first step, at batch size 8",
            "no data",
        ),
        pytest.param(
            program(before="print('usage: train'); sys.exit(2)"),
            "the program exited by itself with code 2 before its first step, at batch size 8",
            "usage: train",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            program(before="name = input('run name: ')"),
            "the program asks for input, and a probe has none, at batch size 8",
            "EOFError: EOF when reading a line",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "name = input('run name: ')",
            "the program asks for input, and a probe has none, at batch size 8",
            "EOFError: EOF when reading a line",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            program(before="raise FileNotFoundError('data.csv')"),
            "the program raised FileNotFoundError: data.csv, at batch size 8",
            "FileNotFoundError: data.csv",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            program(inside="if step == 1: raise KeyError('label')"),
            "the program raised KeyError: 'label', at batch size 8",
            "KeyError: 'label'",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "import torch\nfor _ in range(9): print('tokenizing', flush=True)",
            "the program ended before its first step, at batch size 8",
            "tokenizing",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            program(update="if step == 19: print('all done'); break"),
            "the program ended without a step of its optimizer, after 20 forward passes, at batch size 8",
            "all done",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            program(
                before="import os; os.environ |= {'LOCAL_WORLD_SIZE': '1', 'WORLD_SIZE': '2'}; print('2')"
            ),
            "the program has 2 ranks, 1 of them on this node: a search runs on one node",
            "2",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_program_that_fails_by_itself(text: str, message: str, last_line: str) -> None:
    error = refused(text)
    assert str(error).startswith(message)
    assert error.lines[-1] == last_line


@pytest.mark.slow
def test_a_program_that_never_steps() -> None:
    text = program(before="import time\nwhile True: print('waiting', flush=True); time.sleep(0.2)")
    error = refused(text, timeout_s=8)
    assert str(error) == (
        "the program took no step within 8 s (timeout_s sets how long to wait), at batch size 8"
    )
    assert error.lines[-1] == "waiting"


@pytest.mark.slow
def test_a_program_that_does_not_use_the_size() -> None:
    error = refused(program(before="print('batch size 32')", samples="32"))
    assert "the size changes nothing: at 8 and at " in str(error)
    assert "the forward passes have 32 samples and the peak is the same" in str(error)
    assert error.lines == ("batch size 32",)


@pytest.mark.slow
def test_a_program_that_accumulates_is_shown_both_sizes() -> None:
    accumulates = "for _ in range(size // 8 - 1): model(torch.randn(8, 256)).square().mean().backward()"
    error = refused(program(inside=accumulates, samples="8"))
    assert "the program cuts its batch itself (gradient accumulation): at 8 a step is 1 x 8" in str(error)


@pytest.mark.slow
def test_a_dataset_that_ends_bounds_the_search() -> None:
    fit = find(program(samples="min(size, 50)"))
    assert fit.samples == 50
    assert fit.batch_size <= 50


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "message"),
    [
        (("true", "{}"), "no Python was seen in the program: true is none"),
        (("sh", "-c", "exit 3 # {}"), "the program exited by itself with code 3 before its first step"),
        (("./train.py", "{}"), r"the command could not be started: ./train.py: Permission denied"),
    ],
)
def test_a_command_without_a_program_to_measure(command: tuple[str, ...], message: str) -> None:
    assert str(refused("", *command)).startswith(message)


def test_a_python_that_ignores_its_environment_is_refused_before_it_runs() -> None:
    with pytest.raises(ValueError, match=r"the command must start Python without -I, with which it ignores"):
        find("open('ran', 'w')", sys.executable, "-I", "train.py", "{}")
    assert not Path("ran").exists()
