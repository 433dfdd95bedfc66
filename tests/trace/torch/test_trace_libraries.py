"""What libraries keep elsewhere than on the GPU, or run as kernels that a trace does not know."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

import batchfit
from batchfit.errors import UntraceableError
from batchfit.results import MemoryExplanation

MIB = 2**20
WIDTH = 512  # weights of 512 x 512 are above what bitsandbytes begins to page at


class EightBit(torch.optim.Optimizer):
    """As those of bitsandbytes: a table that the first step makes, buffers by a method of its own."""

    def __init__(self, parameters: Any, *, is_paged: bool = False) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.name2qmap: dict[str, Tensor] = {}
        self.is_paged = is_paged

    def get_state_buffer(self, parameter: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros_like(parameter, dtype=dtype)

    def prefetch_state(self, parameter: Tensor) -> None:
        assert not getattr(self.state[parameter]["state1"], "is_paged", False), "a pointer would be needed"

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                if not self.state[one]:
                    if "dynamic" not in self.name2qmap:
                        self.name2qmap["dynamic"] = torch.linspace(-1, 1, 256)
                    self.name2qmap["dynamic"] = self.name2qmap["dynamic"].to(one.device)
                    self.state[one]["state1"] = self.get_state_buffer(one, torch.uint8)
                    self.state[one]["qmap1"] = self.name2qmap["dynamic"]
                self.prefetch_state(one)
                one.sub_(one.grad, alpha=group["lr"])


def workload(
    optimizer: Callable[[Any], torch.optim.Optimizer],
    saving: Callable[[], Any] = contextlib.nullcontext,
) -> batchfit.Workload:
    torch.manual_seed(0)
    model = nn.Sequential(*(one for _ in range(4) for one in (nn.Linear(WIDTH, WIDTH), nn.GELU())))

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with saving():
            out: Tensor = model(x).square().mean()
        return out

    return batchfit.training(
        model, optimizer(model.parameters()), loss, lambda n: torch.zeros(n, WIDTH), keep_outputs=False
    )


def explained(work: batchfit.Workload, size: int = 8) -> MemoryExplanation:
    return batchfit.explain_memory(work, batch_size=size, gpu="h100", what_if=False)


def bytes_of(told: MemoryExplanation, kind: str) -> int:
    return next((one.peak_bytes for one in told.kinds if one.name == kind), 0)


def test_what_an_optimizer_makes_in_its_first_step_is_made_in_every_trace() -> None:
    """Kept from one trace to the next, each size took another way, and was traced: ten times as long."""
    work = workload(EightBit)
    predicted = batchfit.predict_batch_size(work, gpu="h100", max_size=64)
    assert not [note for note in predicted.unseen if "in another order" in note]
    assert work.optimizer.name2qmap == {}, "and a fake of it was left in the program"


def test_paged_state_is_no_memory_of_the_gpu() -> None:
    plain, paged = (
        workload(lambda parameters, on=on: EightBit(parameters, is_paged=on)) for on in (False, True)
    )
    held = explained(plain)
    told = explained(paged)
    weights = 4 * WIDTH * WIDTH  # a byte each; biases are too small to be paged
    assert bytes_of(held, "optimizer") - bytes_of(told, "optimizer") == weights
    assert [note for note in told.unseen if note.startswith("paged optimizer state: managed memory")]
    assert not [note for note in held.unseen if "paged" in note]
    assert "get_state_buffer" not in vars(paged.optimizer)


@pytest.mark.parametrize("pinned", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("kind", ["training", "step"])
def test_activations_that_are_saved_on_the_cpu_are_not_counted(pinned: bool, kind: str) -> None:
    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    kept = workload(sgd)
    moved = workload(sgd, lambda: save_on_cpu(pin_memory=pinned))
    if kind == "step":
        kept, moved = (
            batchfit.Workload(work.step, state=[work.model, work.optimizer]) for work in (kept, moved)
        )
    before, after = explained(kept, 16384), explained(moved, 16384)
    block = 16384 * WIDTH * 4
    # Eight activations are kept for backward; moved, backward brings one back at a time.
    assert before.peak_bytes - after.peak_bytes >= 4 * block
    assert bytes_of(after, "activations") < block
    assert bytes_of(after, "batch") <= 2 * block


@pytest.mark.parametrize("learns", [True, False])
def test_flex_attention_is_refused_for_what_it_is(learns: bool) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    model = nn.Linear(64, 192)

    def attend(model: nn.Module, x: Tensor) -> Tensor:
        parts = (one.unflatten(-1, (4, 16)).transpose(1, 2) for one in model(x).chunk(3, -1))
        out: Tensor = flex_attention(*parts).sum()
        return out

    def make(n: int) -> Tensor:
        return torch.zeros(n, 32, 64)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    work = batchfit.training(model, optimizer, attend, make)
    if not learns:
        work = batchfit.Workload(torch.no_grad()(lambda n: attend(model, make(n))), state=[model])
    with pytest.raises(UntraceableError, match=r"flex_attention at .*: on a GPU it is a compiled kernel"):
        explained(work)


@pytest.mark.parametrize("name", ["AdamW8bit", "PagedAdamW8bit", "PagedAdamW"])
def test_the_real_bitsandbytes(name: str) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    work = workload(getattr(bitsandbytes.optim, name))
    tables = {key: id(value) for key, value in work.optimizer.name2qmap.items()}
    predicted = batchfit.predict_batch_size(work, gpu="h100", max_size=64)
    assert not [note for note in predicted.unseen if "in another order" in note]
    each = {"AdamW8bit": 2, "PagedAdamW8bit": 0, "PagedAdamW": 0}[name]
    assert bytes_of(explained(work), "optimizer") == pytest.approx(each * 4 * WIDTH * WIDTH, abs=MIB / 8)
    assert {key: id(value) for key, value in work.optimizer.name2qmap.items()} == tables
