"""profile_throughput on a real CUDA device: the knee, the readings, and planted bottlenecks."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

import batchfit
from batchfit._engine.device.gpu import CudaDevice
from batchfit._profile.readings import busy_time

pytestmark = pytest.mark.gpu

WIDTH = 2048


def wide(depth: int = 8, host_s: float = 0.0) -> batchfit.Workload:
    """Matrices large enough to keep the device busy; `host_s` of work on the host between layers."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth)).cuda()
    optimizer = torch.optim.AdamW(layers.parameters(), fused=True)

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            if host_s:
                time.sleep(host_s)
            batch = nn.functional.gelu(layer(batch))
        return batch.float().square().mean()

    return batchfit.training(
        layers,
        optimizer,
        loss_fn,
        lambda n: torch.randn(n, 256, WIDTH, device="cuda"),
        autocast=torch.bfloat16,
    )


def test_the_curve_has_a_knee_and_state_is_restored() -> None:
    work = wide()
    before = [one.detach().clone() for one in work.model.parameters()]
    profile = batchfit.profile_throughput(work, budget="24GiB")
    assert all(torch.equal(one, two) for one, two in zip(before, work.model.parameters(), strict=True))
    chosen = profile.at(profile.recommended)
    assert chosen.samples_per_s >= 0.9 * profile.best.samples_per_s
    assert chosen.peak_bytes is not None
    assert chosen.host_s is not None
    assert chosen.flops_share is None or 0.05 < chosen.flops_share < 1
    assert chosen.steady
    assert chosen.steps_timed >= 5
    assert len(profile.points) <= 8
    assert profile.bottlenecks == (), profile
    assert profile.too_large == ()


def test_the_step_that_counts_flops_is_in_no_peak() -> None:
    """It is run at the first size only: a size that is the first has the peaks that it has as the second."""
    work = wide()
    alone = batchfit.profile_throughput(work, sizes=[8], budget="24GiB", diagnose=False).at(8)
    after = batchfit.profile_throughput(work, sizes=[4, 8], budget="24GiB", diagnose=False).at(8)
    assert alone.peak_bytes == pytest.approx(after.peak_bytes, rel=0.01)
    assert alone.reserved_bytes == pytest.approx(after.reserved_bytes, rel=0.05)
    assert alone.flops_per_s is not None
    assert after.flops_per_s is not None
    assert alone.flops_per_s * alone.step_s == pytest.approx(after.flops_per_s * after.step_s, rel=0.001)


def test_the_device_is_busy_no_longer_than_the_step_takes() -> None:
    work = wide()
    for _ in range(3):
        work.step(64)
    torch.cuda.synchronize()
    begun = time.perf_counter()
    work.step(64)
    torch.cuda.synchronize()
    step_s = time.perf_counter() - begun
    busy = busy_time(work.step, 64, device=CudaDevice(0))
    assert busy is not None
    assert 0.3 * step_s < busy.busy_s < 1.2 * step_s
    assert busy.kernels > 20


def test_host_work_between_launches_is_named() -> None:
    profile = batchfit.profile_throughput(wide(host_s=0.01), sizes=[8])
    assert [one.kind for one in profile.bottlenecks] == ["host-bound"], profile
    assert profile.diagnosis[0].share is not None
    assert profile.diagnosis[0].share > 0.4


def test_a_budget_that_makes_the_allocator_retry_is_named() -> None:
    """Each step needs a block a little larger than all before: what is cached is never large enough."""
    calls = 0

    def grows(size: int) -> None:
        nonlocal calls
        calls += 1
        torch.empty((360 + 2 * calls) * 2**20, dtype=torch.uint8, device="cuda").fill_(1)

    def stays(size: int) -> None:
        torch.empty(360 * 2**20, dtype=torch.uint8, device="cuda").fill_(1)

    named = []
    for step in (grows, stays):
        work = batchfit.Workload(step, state=[])
        profile = batchfit.profile_throughput(work, sizes=[8], budget="700MiB", device="cuda:0")
        assert (profile.at(8).alloc_retries > 0) is (step is grows), profile
        named.append("memory-bound" in [one.kind for one in profile.bottlenecks])
    assert named == [True, False]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(512, 3 * 512)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            query, key, value = (
                part.unflatten(-1, (8, 64)).transpose(1, 2) for part in self.project(batch).chunk(3, dim=-1)
            )
            out = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            batch = out.transpose(1, 2).flatten(2)
        return batch


@pytest.mark.parametrize("ragged", [True, False])
def test_ragged_shapes_are_named_where_a_new_one_costs(ragged: bool) -> None:
    if torch.cuda.get_device_capability(0)[0] != 9:
        pytest.skip("only Hopper builds a plan for each shape")
    torch.manual_seed(1 + ragged)
    model = Attention().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def make_batch(n: int) -> torch.Tensor:
        length = int(torch.randint(100, 900, ())) if ragged else 256
        return torch.randn(n, length, 512, device="cuda")

    work = batchfit.training(
        model,
        optimizer,
        lambda model, batch: model(batch).square().mean(),
        make_batch,
        autocast=torch.bfloat16,
    )
    profile = batchfit.profile_throughput(work, sizes=[24])
    named = "shape-bound" in [one.kind for one in profile.bottlenecks]
    assert named is ragged, profile


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*TensorFloat32:UserWarning")
def test_compiled_steps_are_warmed_and_not_timed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512)).cuda()
    compiled = torch.compile(model)
    work = batchfit.inference(compiled, lambda n: torch.randn(n, 512, device="cuda"))
    profile = batchfit.profile_throughput(work, sizes=[64, 128, 256], diagnose=False)
    first = profile.points[0]
    assert first.recompilations >= 1
    assert first.first_step_s > 20 * first.step_s
    assert all(point.step_s < 0.05 for point in profile.points)
