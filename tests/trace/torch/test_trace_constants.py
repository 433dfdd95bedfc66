"""Tensors of the program that are neither parameters nor buffers: noise schedules, tables, means."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import batchfit
from batchfit._engine.trace.trace import trace
from batchfit._engine.trace.workload import rules_for
from batchfit.errors import UntraceableError

LONG = 50
ALPHAS = torch.linspace(1, 0.01, LONG)
NUMPY = np.linspace(1, 0.01, LONG)
MEAN = torch.tensor([0.5, 0.4, 0.3]).view(1, 3, 1)
HELD = SimpleNamespace(table=ALPHAS, tables=[ALPHAS, ALPHAS[:, None]])


def wide(values: Tensor) -> Tensor:
    return values.view(-1, 1, 1)


def times(out: Tensor) -> Tensor:
    """A time for each sample, on the device of `out`."""
    return torch.randint(0, LONG, (out.shape[0],), device=out.device)


def chosen(out: Tensor) -> Tensor:
    """A place in the table for each sample, computed on the device."""
    return out.flatten(1).argmax(1) % LONG


def written(out: Tensor) -> Tensor:
    table = torch.zeros(LONG)
    table[chosen(out)] = out.detach().mean((1, 2))
    table.scatter_(0, chosen(out), 1.0)
    table.index_add_(0, chosen(out), torch.ones(out.shape[0]))
    return table.sum()


WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "index": lambda out: wide(ALPHAS[times(out)]),
    "index computed": lambda out: wide(ALPHAS[chosen(out)]),
    "index of two dimensions": lambda out: wide(HELD.tables[1][chosen(out), 0]),
    "index after None": lambda out: wide(ALPHAS[None, chosen(out)]),
    "index on the host": lambda out: wide(ALPHAS[chosen(out).cpu()]),
    "index of a computed table": lambda out: wide(ALPHAS.cumprod(0)[chosen(out)]),
    "index of numpy": lambda out: wide(torch.from_numpy(NUMPY).float()[chosen(out)]),
    "index of an attribute": lambda out: wide(HELD.table[chosen(out)]),
    "gather": lambda out: wide(ALPHAS.gather(0, times(out))),
    "index_select": lambda out: wide(ALPHAS.index_select(0, times(out))),
    "take": lambda out: wide(torch.take(ALPHAS, chosen(out))),
    "embedding": lambda out: nn.functional.embedding(times(out), ALPHAS[:, None])[:, None],
    "where": lambda out: torch.where(out > 0, out, ALPHAS[0]),
    "bucketize": lambda out: ALPHAS[torch.bucketize(out, ALPHAS.flip(0)).clamp(max=LONG - 1)],
    "scalar": lambda out: torch.tensor(3.0) * ALPHAS[3],
    "mean and deviation": lambda out: (out - MEAN) / MEAN,
    "joined": lambda out: torch.cat([out.flatten(), ALPHAS]).mean(),
    "written": written,
    "cpu() and back by a product": lambda out: out.detach().cpu() + 1,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_constant_is_traced_and_stays_as_it_was(way: str) -> None:
    model = nn.Conv1d(3, 3, 3, padding=1)
    optimizer = torch.optim.AdamW(model.parameters())

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        out = model(batch)
        return (out * WAYS[way](out)).mean()

    work = batchfit.training(model, optimizer, loss_fn, torch.randn(4, 3, 16))
    before = ALPHAS.clone(), NUMPY.copy(), MEAN.clone()
    found = batchfit.predict_batch_size(work, budget="1GiB")
    assert found.batch_size > 100
    assert all(type(one) is Tensor for one in (ALPHAS, MEAN))
    assert torch.equal(ALPHAS, before[0])
    assert np.array_equal(NUMPY, before[1])
    assert torch.equal(MEAN, before[2])
    work.step(4)  # and it runs as it did


def test_a_table_of_the_programs_counts_as_one_that_is_moved_by_hand() -> None:
    model = nn.Conv1d(3, 3, 3, padding=1)

    def peak(look: Callable[[Tensor], Tensor]) -> int:
        def step(n: int) -> None:
            out = model(torch.ones(n, 3, 16))
            (out * wide(look(out))).mean().backward()

        work = batchfit.Workload(step, state=[model])
        return int(batchfit.predict_batch_size(work, budget="1GiB").batch_size)

    by_hand = peak(lambda out: ALPHAS.to(out.device)[chosen(out)])
    assert peak(lambda out: ALPHAS[chosen(out)]) == by_hand


def test_the_device_of_a_trace_is_never_named() -> None:
    model = nn.Linear(4, 4)

    def step(n: int) -> None:
        out = model(torch.ones(n, 4))
        if out.device.type != "meta":
            raise RuntimeError(f"everything was to be on the host, not on {out.device}")

    work = batchfit.Workload(step, state=[model])
    with pytest.raises(UntraceableError, match="not on cuda") as raised:
        trace(work, 2, rules=rules_for(work))
    assert "cpu:1" not in str(raised.value)


def test_a_program_that_names_its_gpu_and_forgets_a_table_on_the_host_gets_torchs_own_words() -> None:
    model = nn.Linear(4, 4)

    def step(n: int) -> None:
        out = model(torch.ones(n, 4, device="cuda"))
        (out * out.detach().cpu()).sum().backward()

    work = batchfit.Workload(step, state=[model])
    with pytest.raises(UntraceableError) as raised:
        trace(work, 2, rules=rules_for(work))
    assert "cpu:1" not in str(raised.value)
    assert "cuda" in str(raised.value)
