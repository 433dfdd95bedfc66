"""find on a real card: other processes on it, memory held already, allocators, autotuning, UUIDs."""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpu_targets
import pytest
import torch
from torch import nn

import batchfit
from batchfit._engine.device import gpu
from batchfit._engine.device.gpu import CudaDevice
from batchfit._engine.device.resolve import known_devices, resolve_device
from batchfit._find import driver as trials_module

pytestmark = pytest.mark.gpu

MiB = 2**20
GiB = 2**30
QUICK: dict[str, Any] = {"predict": False, "steps": 2, "soak_steps": 4}

# Another program: says when it is there, takes 24 GiB for so many seconds when it is told to.
OTHER = """
import sys, time, torch
torch.zeros(1, device="cuda:0")
print("ready", flush=True)
for line in sys.stdin:
    block = torch.empty(24 * 2**30, dtype=torch.uint8, device="cuda:0")
    print("taken", flush=True)
    time.sleep(float(line))
    del block
    torch.cuda.empty_cache()
    print("free", flush=True)
"""


class Other:
    """The other program, as this one sees it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.hears("ready")

    def take_for(self, seconds: float) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seconds}\n")
        self._process.stdin.flush()
        self.hears("taken")

    def hears(self, word: str) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == word + "\n"

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def other() -> Iterator[Other]:
    program = Other()
    yield program
    program.end()


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    gc.collect()
    torch.cuda.empty_cache()
    torch.zeros(1, device="cuda:0")
    held = torch.cuda.memory_allocated(0)
    yield
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated(0) <= held + 256 * MiB  # workspaces of cuBLAS stay
    assert gpu.limits_set_by_us == {}


def blocks(size: int) -> None:
    """A step of half a GiB a sample, which computes next to nothing."""
    torch.empty(size * GiB // 2, dtype=torch.uint8, device="cuda:0")[:8].fill_(1)


def test_memory_that_another_process_takes_lowers_the_budget(other: Other) -> None:
    def after(trial: batchfit.Trial, budget_bytes: int) -> None:
        if trial.size == 1:
            other.take_for(600)  # until it is killed

    workload = batchfit.Workload(blocks, state=[])
    fit = batchfit.find_batch_size(workload, device="cuda:0", on_trial=after, **QUICK)
    assert fit.shrunk_from_bytes is not None
    assert 23 * GiB < fit.shrunk_from_bytes - fit.budget_bytes < 27 * GiB
    assert fit.sustained
    assert 0.9 * fit.budget_bytes < fit.batch_size * GiB // 2 <= fit.budget_bytes


def test_memory_that_another_process_has_for_a_moment_costs_one_trial(
    other: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials_module, "_PATIENCE_S", 20.0)
    free = CudaDevice(0).budget_bytes()
    size = int((free - 8 * GiB) / (GiB // 2))  # fits, but not beside the 24 GiB of the other
    calls = 0

    def step(n: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            other.take_for(4)
        blocks(n)

    fit = batchfit.find_batch_size(
        batchfit.Workload(step, state=[]), device="cuda:0", strategy="halve", start=size, **QUICK
    )
    assert [(trial.size, trial.outcome) for trial in fit.trials] == [(size, "fits")]
    assert calls == 1 + 4
    assert fit.shrunk_from_bytes is None


def test_memory_that_the_program_holds_counts_and_stays() -> None:
    work = gpu_targets.small_net()
    held = torch.cuda.memory_reserved(0)
    plain = batchfit.find_batch_size(work, budget=held + 2 * GiB, predict=False)
    ballast = torch.arange(GiB, dtype=torch.int64, device="cuda:0")  # 8 GiB
    beside = batchfit.find_batch_size(work, budget=held + 10 * GiB, predict=False)
    assert abs(beside.batch_size - plain.batch_size) <= 0.05 * plain.batch_size
    assert int(ballast[-1]) == GiB - 1
    assert int(ballast.sum()) == GiB * (GiB - 1) // 2
    del ballast, work


def run_python(code: str, **variables: str) -> Any:
    """What the code prints as JSON, in a process of its own."""
    package, support = Path(batchfit.__file__).parent.parent, Path(gpu_targets.__file__).parent
    path = os.pathsep.join([str(package), str(support), *sys.path])
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": path, **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


FIND = """
    import json, batchfit, gpu_targets, torch
    fit = batchfit.find_batch_size(gpu_targets.small_net(), budget="2GiB", predict=False)
    beyond = torch.empty(3 * 2**30, dtype=torch.uint8, device="cuda:0")  # the limit is gone
    del beyond
    torch.cuda.empty_cache()
    said = None
    if torch.cuda.get_allocator_backend() == "native":
        work = gpu_targets.small_net()
        said = batchfit.predict_batch_size(work, budget="2GiB", calibrate=False, margin=0.0).batch_size
    torch.cuda.set_per_process_memory_fraction(2 * 2**30 / torch.cuda.get_device_properties(0).total_memory)
    work = gpu_targets.small_net()
    for _ in range(60):
        work.step(fit.batch_size)
    torch.cuda.synchronize()
    print(json.dumps([fit.batch_size, fit.sustained, torch.cuda.get_allocator_backend(), said]))
"""


@pytest.mark.parametrize(
    "settings",
    [
        "expandable_segments:True",
        "garbage_collection_threshold:0.8,max_split_size_mb:128",
        "backend:cudaMallocAsync",
    ],
)
def test_a_search_under_settings_of_the_allocator(settings: str) -> None:
    """They decide how much fits, by a sixth here: what a replay of the allocator says is the measure."""
    size, sustained, backend, said = run_python(FIND, PYTORCH_CUDA_ALLOC_CONF=settings)
    assert sustained
    if "Async" in settings:
        assert (backend, said) == ("cudaMallocAsync", None)
        plain = batchfit.find_batch_size(gpu_targets.small_net(), budget="2GiB", predict=False)
        assert size >= 0.9 * plain.batch_size  # it keeps nothing in pieces
    else:
        assert backend == "native"
        assert 0.9 * said <= size <= 1.1 * said


def test_the_device_is_found_by_its_uuid() -> None:
    uuid = known_devices()[0].uuid
    assert re.fullmatch(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", uuid)
    assert resolve_device(uuid) == resolve_device(uuid[:12]) == resolve_device(0) == CudaDevice(0)
    with pytest.raises(ValueError, match=re.escape(f"'cuda:0' ({uuid})")):
        resolve_device("GPU-zzzz")
    code = f"""
        import json
        from batchfit._engine.device.resolve import resolve_device
        print(json.dumps([resolve_device(spec).name for spec in ({uuid!r}, {uuid[:12]!r}, 0, "cuda")]))
    """
    assert run_python(code, CUDA_VISIBLE_DEVICES=uuid) == ["cuda:0"] * 4


def conv_net() -> batchfit.Workload:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3 if i == 0 else 32, 32, 3, padding=1) for i in range(4)]
    model = nn.Sequential(*[part for layer in layers for part in (layer, nn.ReLU())]).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return batchfit.training(
        model, optimizer, lambda model, x: model(x).square().mean(), lambda n: torch.randn(n, 3, 128, 128)
    )


def test_a_search_under_cudnn_benchmark() -> None:
    settings: dict[str, Any] = {"budget": "2GiB", "predict": False}
    plain = batchfit.find_batch_size(conv_net(), **settings)
    with torch.backends.cudnn.flags(enabled=True, benchmark=True):
        work = conv_net()
        tuned = batchfit.find_batch_size(work, **settings)
        assert torch.backends.cudnn.benchmark
        with CudaDevice(0).limit(2 * GiB):
            for _ in range(10):
                work.step(tuned.batch_size)
    assert tuned.sustained
    # other algorithms are chosen, with other workspaces
    assert 0.7 * plain.batch_size <= tuned.batch_size <= 1.3 * plain.batch_size
    del work


def test_a_cap_at_what_is_free_is_set_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows and WSL, where the driver would give out RAM."""
    monkeypatch.setattr(gpu, "spills_to_ram", lambda: True)
    device = CudaDevice(0)
    free = device.budget_bytes()
    with device.limit(device.total_bytes()):
        assert gpu.limits_set_by_us != {}
        assert device.budget_bytes() <= free + 64 * MiB
        with pytest.raises(torch.OutOfMemoryError):
            blocks(int(free / (GiB // 2)) + 1)
    assert device.budget_bytes() >= free - 64 * MiB
