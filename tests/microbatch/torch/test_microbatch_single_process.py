"""Microbatcher in one process: no code of DDP or FSDP2, and nothing that outlives a call."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import batchfit
from batchfit import Microbatcher

SOURCE = Path(batchfit.__file__).parent


def modules_entered(call: Callable[[], object]) -> set[str]:
    """The modules of batchfit whose functions run during a call."""
    found: set[str] = set()

    def note(frame: Any, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(SOURCE):
            found.add(".".join(path.relative_to(SOURCE).with_suffix("").parts))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def calls_of(model: nn.Module, mb: Microbatcher, batch: Callable[[], torch.Tensor]) -> dict[str, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {
        "backward": lambda: mb.backward(lambda micro: (model(micro).mean(), model(micro)), batch()),
        "cached": lambda: mb.backward_cached(model, lambda rows: rows.square().mean(), batch()),
        "map": lambda: mb.map(model, batch()),
        "step": lambda: mb.step(optimizer),
    }


@pytest.mark.parametrize("kind", ["backward", "cached", "map", "step"])
def test_one_process_enters_no_code_of_ddp_or_fsdp2(kind: str) -> None:
    model = nn.Linear(4, 2)
    calls = calls_of(model, Microbatcher(model, microbatch_size=4), lambda: torch.randn(8, 4))
    calls["backward"]()
    entered = modules_entered(calls[kind])
    assert any(name.startswith("_engine") for name in entered)
    strategies = {name for name in entered if name.startswith("_engine.data_parallel")}
    assert strategies <= {"_engine.data_parallel.single", "_engine.data_parallel.pure.protocol"}
    assert not {name for name in entered if name.startswith("_engine.distributed")}


def test_backward_enters_few_modules() -> None:
    """22 when this was written: a reader of one call follows no more."""
    model = nn.Linear(4, 2)
    mb, batch = Microbatcher(model), (torch.randn(8, 4), torch.randn(8))
    loss = lambda micro: (model(micro[0]).sum(1) - micro[1]).square().mean()  # noqa: E731
    mb.backward(loss, batch)
    assert len(modules_entered(lambda: mb.backward(loss, batch))) <= 22


@pytest.mark.parametrize("kind", ["backward", "cached", "map"])
def test_a_batch_is_freed_with_the_call_that_ran_it(kind: str) -> None:
    """Without the garbage collector: a cycle would keep the memory of a batch allocated."""
    model = nn.Linear(4, 2)
    batches: list[weakref.ref[torch.Tensor]] = []

    def batch() -> torch.Tensor:
        made = torch.randn(8, 4)
        batches.append(weakref.ref(made))
        return made

    calls = calls_of(model, Microbatcher(model, microbatch_size=4), batch)
    calls[kind]()
    gc.collect()
    gc.disable()
    try:
        calls[kind]()
        assert batches[-1]() is None
    finally:
        gc.enable()
