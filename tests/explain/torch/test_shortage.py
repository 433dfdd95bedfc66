"""Why a size does not fit: who holds its peak, and changes that really make it fit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import batchfit
from batchfit._explain import shortage
from batchfit._explain.shortage import Shortage, shortage_of
from batchfit._units import parse_bytes
from batchfit.errors import NothingFitsError

MIB = 2**20


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.relu(self.up(x)))
        return out


class Model(nn.Module):
    def __init__(self, width: int, words: int, blocks: int = 4) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, words)

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def of_tokens(
    *, width: int, words: int, length: int, change: Callable[[nn.Module], None] | None = None
) -> batchfit.Workload:
    model = Model(width, words)
    if change is not None:
        change(model)
    optimizer = torch.optim.AdamW(model.parameters())

    def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(batch["x"])
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["x"].flatten())

    def make(size: int) -> dict[str, Tensor]:
        return {"x": torch.zeros(size, length, dtype=torch.long)}

    return batchfit.training(model, optimizer, loss_fn, make)


def short(work: batchfit.Workload, budget: str, **asked: Any) -> Shortage:
    found = shortage_of(work, size=1, budget_bytes=parse_bytes(budget), on_cpu=True, limit_s=600, **asked)
    assert found is not None
    return found


def names(found: Shortage) -> list[str]:
    return [name for name, _ in found.changes]


def checkpointed(model: nn.Module) -> None:
    for block in model.blocks:  # type: ignore[union-attr]
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def test_the_top_holder_is_named_and_so_is_the_change_that_it_asks_for() -> None:
    logits = short(of_tokens(width=32, words=8192, length=512), "50MiB")
    assert "cross_entropy" in logits.holders[0][0] or "log_softmax" in logits.holders[0][0]
    assert names(logits) == ["a cross-entropy in chunks, its gradient in the place of the logits"]
    activations = short(of_tokens(width=64, words=64, length=4096), "26MiB")
    assert "relu" in activations.holders[0][0]
    assert names(activations) == ["activation checkpointing of each of 4 Block"]
    state = short(of_tokens(width=256, words=64, length=16), "30MiB")
    assert [one for one, _ in state.holders] == ["optimizer state", "weights", "gradients"]
    assert names(state) == ["an 8-bit AdamW"]
    frozen = short(of_tokens(width=256, words=64, length=16), "14MiB")
    assert names(frozen) == ["LoRA (rank 16)"]
    for found in (logits, activations, state, frozen):
        assert found.changed_bytes is not None
        assert found.changed_bytes < found.peak_bytes


@pytest.mark.slow
def test_what_is_named_makes_it_fit_in_a_real_run() -> None:
    """Activation checkpointing, written as the error says, under `virtual_memory`."""
    made = functools.partial(of_tokens, width=64, words=64, length=4096)
    with pytest.raises(NothingFitsError, match="By prediction it fits with activation checkpointing") as told:
        batchfit.find_batch_size(made(), budget="26MiB")
    assert "use_reentrant=False" in str(told.value)
    assert told.value.traced
    assert "by a trace of the step: test_shortage.py:" in str(told.value)
    assert batchfit.find_batch_size(made(change=checkpointed), budget="26MiB").batch_size == 1


def test_changes_that_only_fit_together() -> None:
    found = short(of_tokens(width=256, words=2048, length=1024), "60MiB")
    assert len(found.changes) > 1
    for left_out in range(len(found.changes)):  # none of them is there for nothing
        kept = [one for at, one in enumerate(names(found)) if at != left_out]
        assert peak_with(kept, of_tokens(width=256, words=2048, length=1024)) > 60 * MIB * 0.98
    assert peak_with(names(found), of_tokens(width=256, words=2048, length=1024)) == found.changed_bytes


def peak_with(chosen: list[str], work: batchfit.Workload) -> int:
    """The peak of the changed step, by the names of its changes."""
    from batchfit._engine.trace.workload import rules_for
    from batchfit._engine.workload.reachable import reach_of

    room = shortage._Allowance(60 * MIB, shortage.allocator_rules(), on_cpu=True)
    study = shortage._ShortStudy(reach_of(work), rules_for(work), 1, room, float("inf"))
    study._trace((), first=(study._traits,))
    known = {one.name: one for one in (*study._with_less_activations(), *study._with_less_state())}
    traced = study._with([known[name] for name in chosen])
    assert traced is not None
    return shortage.peak_bytes(traced)


def test_where_no_change_helps_that_is_said() -> None:
    work = of_tokens(width=256, words=64, length=16)
    with pytest.raises(NothingFitsError, match=r"it does not fit with .* either") as told:
        batchfit.predict_batch_size(work, budget="1MiB")
    assert told.value.changes == ()
    assert "LoRA (rank 16)" in told.value.tried
    assert "shard the weights" in str(told.value)


def test_nothing_is_traced_before_a_size_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    traces: list[object] = []
    monkeypatch.setattr(shortage, "trace", lambda *a, **k: traces.append(a))
    batchfit.find_batch_size(of_tokens(width=32, words=64, length=16), budget="64MiB", max_size=4)
    assert traces == []


def test_a_step_that_cannot_be_traced_says_what_is_known_without() -> None:
    model = nn.Linear(256, 256)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        out = model(x)
        return out.square().mean() * (2.0 if out.sum().item() > 0 else 1.0)

    optimizer = torch.optim.SGD(model.parameters())
    work = batchfit.training(model, optimizer, loss_fn, lambda n: torch.randn(n, 8192, 256))
    with pytest.raises(NothingFitsError) as told:
        batchfit.find_batch_size(work, budget="12MiB")
    assert not told.value.traced
    assert told.value.holders[0][0] == "activations and other tensors"
    assert "batchfit why" in str(told.value)


def test_what_goes_wrong_before_the_trace_hides_nothing_either(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, living_bytes: int
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("no kernels are known")

    monkeypatch.setattr(shortage, "rules_for", broken)
    work = of_tokens(width=32, words=64, length=64)
    with pytest.raises(NothingFitsError, match="a batch of 1 does not fit"):
        batchfit.find_batch_size(work, budget=living_bytes + 2**17, max_size=1)
    assert "no memory breakdown of the size that failed: RuntimeError: no kernels" in caplog.text


def test_the_state_is_as_it_was() -> None:
    work = of_tokens(width=64, words=64, length=4096)
    before = {name: one.clone() for name, one in work.model.state_dict().items()}
    assert len(short(work, "6MiB").changes or short(work, "6MiB").tried) > 1
    assert all(torch.equal(one, before[name]) for name, one in work.model.state_dict().items())
    assert all(one.requires_grad and one.grad is None for one in work.model.parameters())
    assert len(work.optimizer.param_groups[0]["params"]) == len(list(work.model.parameters()))
    assert not work.optimizer.state
    assert not any("forward" in vars(module) for module in work.model.modules())
    assert "step" not in vars(work.optimizer)


@pytest.mark.slow
def test_a_child_answers_as_this_process_does(tmp_path: Path) -> None:
    here = short(of_tokens(width=64, words=64, length=4096), "26MiB")
    (tmp_path / "made_in_child.py").write_text(CHILD)
    with pytest.raises(NothingFitsError) as told:
        batchfit.find_batch_size(f"{tmp_path}/made_in_child.py:make", budget="26MiB", isolate=True)
    assert told.value.changes == here.changes
    assert [size for _, size in told.value.holders] == [size for _, size in here.holders]


CHILD = f"""
import sys
sys.path.insert(0, {str(__file__.rpartition("/")[0])!r})
from test_shortage import of_tokens

def make():
    return of_tokens(width=64, words=64, length=4096)
"""
