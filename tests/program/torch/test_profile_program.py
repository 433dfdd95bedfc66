"""A command profiled: times of real runs, taken while nothing slows them, and the answer that they make."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_runner import runner
from short_temp import short_temp

from batchfit._cli.app import app
from batchfit._cli.exits import Code
from batchfit._profile.pure.options import ProfileOptions
from batchfit._program.profile import profile_program
from batchfit._program.pure.template import CommandTemplate
from batchfit._program.trials import ProgramTarget
from batchfit.errors import NothingFitsError, ProgramError
from batchfit.results import ThroughputPoint, ThroughputProfile

# A step takes 20 ms and half a millisecond a sample: 320 samples/s would be the best of all.
TRAIN = """
import sys, time, torch
from torch.utils._python_dispatch import _get_current_dispatch_mode
size = int(sys.argv[1])
passes = eval(sys.argv[2])
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(1000):
    for _ in range(passes):
        model(torch.randn(size, 64)).sum().backward()
        time.sleep(0.02 + 0.0005 * size)
    optimizer.step()
    with open("counting", "a") as stream:
        stream.write(f"{_get_current_dispatch_mode() is not None}\\n")
"""


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Programs run in a folder of their own, and leave no file of ours."""
    with short_temp(monkeypatch) as temp:
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        monkeypatch.chdir(tmp_path)
        Path("train.py").write_text(TRAIN)
        yield
        assert list(temp.glob("batchfit*")) == []


def profile(*sizes: int, passes: str = "1", budget: str = "16MiB", **options: object) -> ThroughputProfile:
    template = CommandTemplate(words=(sys.executable, "train.py", "{}", passes))
    asked = ProfileOptions(sizes=sizes or None, budget=budget, **options)  # type: ignore[arg-type]
    return profile_program(ProgramTarget(template=template, budget_bytes=asked.budget_bytes), asked)


def test_two_sizes_are_timed_and_the_faster_is_recommended() -> None:
    seen: list[ThroughputPoint] = []
    found = profile(4, 64, on_point=seen.append)
    small, large = found.points
    assert [one.size for one in seen] == [4, 64]
    # It slept so long at least; how much longer depends on what else runs here.
    assert small.step_s >= 0.022
    assert large.step_s >= 0.052
    assert large.samples_per_s == pytest.approx(64 / large.step_s)
    assert found.recommended == 64
    assert found.device == "cpu"
    assert found.budget_bytes == 16 * 2**20
    assert 0 < (small.peak_bytes or 0) < (large.peak_bytes or 0) < 16 * 2**20
    assert small.steps_warmed >= 1
    assert found.world_size == 1
    # Memory is counted in the first steps of each run; those that are timed run as they would without us.
    # The third step waits within the optimizer, where counting ends.
    counting = Path("counting").read_text().split()
    first = counting[: counting.index("True", 2)]
    assert first[:2] == ["True"] * 2
    assert set(first[2:]) == {"False"}
    assert ThroughputProfile.from_json(found.to_json()) == found


@pytest.mark.slow  # three runs of a program
def test_a_size_without_memory_is_too_large() -> None:
    found = profile(4, 100_000)
    assert [one.size for one in found.points] == [4]
    assert found.too_large == (100_000,)
    with pytest.raises(NothingFitsError, match="a batch of 100000 does not fit"):
        profile(100_000)


@pytest.mark.slow  # two runs of a program
def test_forward_passes_are_compared_where_their_number_follows_the_size() -> None:
    found = profile(4, 16, passes="16 // size")
    small, large = found.points
    assert small.samples_per_s == pytest.approx(16 / small.step_s)
    assert large.samples_per_s == pytest.approx(16 / large.step_s)
    assert any("1 to 4 forward passes" in note for note in found.notes)


@pytest.mark.slow  # one run of a program on two ranks
def test_all_ranks_count() -> None:
    template = CommandTemplate(
        words=(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "ranks.py", "{}")
    )
    Path("ranks.py").write_text(
        "import torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "import sys\nsys.argv.append('1')\n" + TRAIN
    )
    found = profile_program(ProgramTarget(template=template), ProfileOptions(sizes=[8]))
    assert found.world_size == 2
    assert found.at(8).samples_per_s == pytest.approx(2 * 8 / found.at(8).step_s)


def test_a_program_that_fails_is_its_own_error() -> None:
    with pytest.raises(ProgramError, match="raised ZeroDivisionError"):
        profile(4, passes="1 // 0")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a TARGET"),
        (["--within", "2", "--", "python", "{}"], "within must be"),
        (["--", "python", "train.py"], "no place for the batch size"),
        (["--env", "SIZE", "train.py:make"], "--env is for a command"),
    ],
)
def test_wrong_flags_are_refused_before_anything_is_run(arguments: list[str], message: str) -> None:
    ran = runner().invoke(app, ["profile", *arguments])
    assert ran.exit_code == 2
    assert message in " ".join(ran.stderr.split())
    assert not Path("counting").exists()


def test_a_program_that_does_not_fit_says_who_holds_the_memory(capfd: pytest.CaptureFixture[str]) -> None:
    """Its probe saw the model, its gradients and optimizer at the OOM; the rest is what the step has made."""
    Path("train.py").write_text(LARGE)
    arguments = ["find", "--budget", "24MiB", "--", sys.executable, "train.py", "{}"]
    found = runner().invoke(app, arguments)
    assert found.exit_code == Code.NOTHING_FITS
    told = found.stderr + capfd.readouterr().err
    assert "Most of what was held: activations and other tensors 1" in told
    assert "Linear 4.00 MiB" in told
    assert f"More: batchfit explain --batch-size 1 -- {sys.executable} train.py {{}}" in told


LARGE = """
import sys, torch
model = torch.nn.Sequential(torch.nn.Linear(1024, 1024))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(5):
    model(torch.randn(int(sys.argv[1]), 1024, 1024)).square().relu().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
