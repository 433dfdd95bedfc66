"""The noise scale on a real device: the same numbers as on the CPU, and nothing that waits for the device."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from batchfit import GradientNoise, Microbatcher
from batchfit._noise.gradient_norms import Later

pytestmark = pytest.mark.gpu


def world(device: str) -> tuple[nn.Module, torch.Tensor, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4)).double().to(device)
    batch = torch.randn(32, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return model, batch, lambda micro: model(micro).square().mean()


@pytest.mark.parametrize("mode", ["cheap", "exact"])
def test_a_device_says_what_the_cpu_says(mode: Any) -> None:
    states = []
    for device in ("cpu", "cuda"):
        model, batch, loss = world(device)
        noise = GradientNoise(model, mode=mode)
        mb = Microbatcher(model, microbatch_size=8, noise=noise)
        for step in range(70):  # more than may be on their way at once
            model.zero_grad()
            mb.backward(loss, batch * (1 + step))
        states.append(noise.state_dict())
    assert states[1]["steps"] == 70
    for name in ("noise", "signal", "square_nn", "square_ss"):
        assert states[1][name] == pytest.approx(states[0][name], rel=1e-6)


def test_a_step_waits_no_more_than_without() -> None:
    model, batch, loss = world("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    counts = []
    for noise in (None, GradientNoise(model)):
        mb = Microbatcher(model, microbatch_size=8, noise=noise)
        for step in range(12):
            with warnings.catch_warnings():  # torch says once that this mode is a prototype
                warnings.simplefilter("ignore")
                torch.cuda.set_sync_debug_mode("warn" if step == 11 else "default")
            try:
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    optimizer.zero_grad()
                    mb.backward(loss, batch)
                    mb.step(optimizer, clip_norm=1.0)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        counts.append(sum("synchroniz" in str(one.message) for one in caught))
    assert counts[1] == counts[0]


def test_numbers_come_in_order_and_none_is_lost_when_the_device_is_behind() -> None:
    later, seen = Later(), []
    busy = torch.randn(2048, 2048, device="cuda")
    for number in range(200):
        busy = busy @ busy / busy.norm()
        later.send(torch.full((2,), float(number), device="cuda"), seen.append)
    later.wait()
    assert seen == [[float(number)] * 2 for number in range(200)]
