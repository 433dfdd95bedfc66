"""The probe comes into every Python of a program, however that is started, and takes nothing away from it."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from short_temp import short_temp

from batchfit._engine.trial.trial import TrialRequest
from batchfit._program.pure.template import CommandTemplate
from batchfit._program.trials import ProgramTarget, ProgramTrials
from batchfit.errors import ProgramError
from batchfit.results import Trial

TRAIN = """
import sys, torch
def main():
    size = int(sys.argv[-1])
    model = torch.nn.Linear(256, 256)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(1000):
        model(torch.randn(size, 256)).square().mean().backward()
        optimizer.step()
    open("finished", "w").close()
if __name__ == "__main__":
    main()
"""


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder with the program, and a PATH with this Python first."""
    with short_temp(monkeypatch) as temp:
        (tmp_path / "train.py").write_text(TRAIN)
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
        monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
        monkeypatch.chdir(tmp_path)
        yield
        assert list(temp.iterdir()) == []
        assert not Path("finished").exists()


def trial_of(*words: str, size: int = 8, budget: int = 8 * 2**20) -> Trial:
    target = ProgramTarget(template=CommandTemplate(words=words), budget_bytes=budget)
    runner = ProgramTrials(target, TrialRequest(size, steps=3))
    with runner.trying(budget) as run:
        trial = run(TrialRequest(size, steps=3))
    assert trial is not None
    return trial


def script(name: str, text: str) -> str:
    Path(name).write_text(text)
    Path(name).chmod(stat.S_IRWXU)
    return f"./{name}"


@pytest.mark.slow  # a start of torch each
@pytest.mark.parametrize(
    "words",
    [
        ("python", "train.py", "{}"),
        ("python", "-m", "train", "{}"),
        ("env", "FOO=1", "python3", "train.py", "{}"),
        ("env", "PYTHONPATH=src", "python", "train.py", "{}"),
        ("sh", "-c", "PYTHONPATH=src:. exec python train.py {}"),
        ("sh", "-c", "python train.py {} || echo failed >&2; sleep 5; touch finished"),
        ("bash", "-c", "set -e; python train.py {}"),
        ("nice", "python", "train.py", "{}"),
        ("accelerate", "launch", "--cpu", "--num_processes", "1", "train.py", "{}"),
        ("torchrun", "--standalone", "--nproc-per-node", "2", "train.py", "{}"),
    ],
    ids=lambda words: " ".join(words)[:40],
)
def test_the_ways_to_start_a_program(words: tuple[str, ...]) -> None:
    trial = trial_of(*words)
    assert trial.outcome == "fits"
    assert trial.steps_run >= 3
    assert (trial.peak_bytes or 0) > 2 * 2**18


@pytest.mark.slow
def test_a_console_script_and_a_launcher_with_an_environment_of_its_own() -> None:
    script(
        "console", f"#!{sys.executable}\nimport sys; sys.path.insert(0, '.')\nimport train\ntrain.main()\n"
    )
    # As deepspeed's launcher does: a subprocess for each rank, with a copy of the environment, changed.
    script(
        "launcher",
        f"#!{sys.executable}\nimport os, subprocess, sys\n"
        "env = {'PATH': os.environ['PATH'], 'OMP_NUM_THREADS': '1', 'PYTHONPATH': os.getcwd()}\n"
        "env |= {'RANK': '0', 'WORLD_SIZE': '1', 'TORCHINDUCTOR_CACHE_DIR': os.getcwd() + '/compiled'}\n"
        "sys.exit(subprocess.Popen([sys.executable, '-u', 'train.py', *sys.argv[1:]], env=env).wait())\n",
    )
    # As `uv run` does: another process becomes the Python of a virtual environment.
    script("uv", f'#!/bin/sh\nshift\nVIRTUAL_ENV=.venv; export VIRTUAL_ENV\nexec {sys.executable} "$@"\n')
    assert trial_of("./console", "{}").fits
    assert trial_of("./launcher", "{}").fits
    assert trial_of("./uv", "run", "train.py", "{}").fits


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_ranks_that_the_program_starts_itself(method: str) -> None:
    Path("ranks.py").write_text(
        "import sys\nimport torch.multiprocessing as mp\nimport train\n"
        "def rank(index):\n    import os\n    os.environ['RANK'] = str(index)\n    train.main()\n"
        f"if __name__ == '__main__':\n    mp.start_processes(rank, nprocs=2, start_method={method!r})\n"
    )
    assert trial_of("python", "ranks.py", "{}").fits
    large = trial_of("python", "ranks.py", "{}", size=100_000)
    assert large.outcome == "oom"


LOADER = """
import os, signal, sys, time, torch
from torch.utils.data import DataLoader, Dataset
size, what = int(sys.argv[1]), sys.argv[2]
class Samples(Dataset):
    def __len__(self):
        return 100_000
    def __getitem__(self, index):
        worker = torch.utils.data.get_worker_info()
        if worker is not None and what == "killed" and size > 8:
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "raises" and size > 8:
            raise MemoryError
        scale = torch.nn.Linear(8, 8)  # a module that is called in the worker is no pass
        scale(torch.ones(8)).sum()
        return torch.zeros(256)
def main():
    how = dict(num_workers=2, multiprocessing_context=sys.argv[3], persistent_workers=True)
    loader = DataLoader(Samples(), batch_size=size, **how)
    model = torch.nn.Linear(256, 256)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x in loader:
        model(x).square().mean().backward()
        optimizer.step()
if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("context", ["fork", "spawn"])
@pytest.mark.parametrize(("what", "outcome"), [("runs", "fits"), ("killed", "killed"), ("raises", "oom")])
def test_the_workers_of_a_loader_are_no_ranks(context: str, what: str, outcome: str) -> None:
    if context == "spawn" and what != "runs":
        pytest.skip("how a worker ends is the same")
    Path("loads.py").write_text(LOADER)
    words = ("python", "loads.py", "{}", what, context)
    target = ProgramTarget(template=CommandTemplate(words=words), budget_bytes=8 * 2**20)
    runner = ProgramTrials(target, TrialRequest(8, steps=3))
    with runner.trying(8 * 2**20) as run:
        outcomes = [getattr(run(TrialRequest(size, steps=3)), "outcome", None) for size in (8, 16)]
    assert outcomes == ["fits", outcome]
    assert runner.world_size == 1


@pytest.mark.slow
def test_a_rank_that_is_killed_is_one_that_did_not_fit() -> None:
    Path("dies.py").write_text(
        "import os, signal, sys, torch\nimport torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "size = int(sys.argv[1])\nmodel = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for step in range(1000):\n"
        "    if size > 8 and step == 1 and dist.get_rank() == 1:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    model(torch.randn(size, 8)).sum().backward()\n    optimizer.step()\n"
    )
    words = ("torchrun", "--standalone", "--nproc-per-node", "2", "dies.py", "{}")
    target = ProgramTarget(template=CommandTemplate(words=words), budget_bytes=8 * 2**20)
    runner = ProgramTrials(target, TrialRequest(8, steps=3))
    with runner.trying(8 * 2**20) as run:
        outcomes = [getattr(run(TrialRequest(size, steps=3)), "outcome", None) for size in (8, 16)]
    assert outcomes == ["fits", "killed"]


def test_what_the_program_sets_itself_stays_and_its_folder_is_as_it_was() -> None:
    """One run: its own sitecustomize, a hook of its own, trackers, and `{out}`."""
    Path("site").mkdir()
    Path("site/sitecustomize.py").write_text("import os\nos.environ['OWN_SITE'] = 'yes'\n")
    Path("tensorboardX").mkdir()
    Path("tensorboardX/__init__.py").write_text("from tensorboardX.writer import SummaryWriter\n")
    Path("tensorboardX/writer.py").write_text(
        "import os\nclass SummaryWriter:\n    def __init__(self, logdir=None, **kwargs):\n"
        "        self.logdir = logdir or 'runs'\n        os.makedirs(self.logdir)\n"
    )
    Path("tells.py").write_text(
        "import json, os, sys\nimport torch\n"
        "from tensorboardX import SummaryWriter\n"
        "def hook(*_):\n    print('own hook')\n"
        "sys.excepthook = hook\n"
        "SummaryWriter('runs/first')\n"
        "open(os.path.join(sys.argv[2], 'model.pt'), 'w').close()\n"
        "names = ('OWN_SITE', 'BATCHFIT_PROBE', 'WANDB_MODE', 'MLFLOW_ALLOW_FILE_STORE')\n"
        "print(json.dumps([os.environ.get(name) for name in names]))\n"
        "print(any('inject' in one for one in sys.path))\n"
        "raise KeyError('after all')\n"
    )
    before = sorted(Path().rglob("*"))
    with pytest.raises(ProgramError, match=r"the program raised KeyError: 'after all'") as caught:
        trial_of(
            "env",
            f"PYTHONPATH={os.getcwd()}/site",
            "PYTHONDONTWRITEBYTECODE=1",
            "python",
            "tells.py",
            "{}",
            "{out}",
        )
    assert json.loads(caught.value.lines[0]) == ["yes", "1", "disabled", "true"]
    assert caught.value.lines[1:] == ("False", "own hook")
    assert [one for one in sorted(Path().rglob("*")) if "compiled" not in one.parts] == before


def test_a_pythons_own_environment_needs_nothing_of_ours() -> None:
    """The program's Python may have neither pydantic nor typer."""
    Path("blocked").mkdir()
    for name in ("pydantic", "typer", "rich", "click"):
        Path(f"blocked/{name}.py").write_text("raise ImportError('not here')\n")
    trial = trial_of("env", f"PYTHONPATH={os.getcwd()}/blocked", "python", "train.py", "{}")
    assert trial.outcome == "fits"
