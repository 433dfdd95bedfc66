"""A prediction changes nothing that the user has, whatever the classes of it refuse and whatever raises."""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from state_judge import Notes, fingerprint
from torch import nn
from torch.optim import lr_scheduler

import batchfit
from batchfit._engine.snapshot.contents import items_of, put_items
from batchfit._engine.snapshot.rng import UndoStack
from batchfit.errors import SnapshotError, UntraceableError


class FrozenDict(OrderedDict[str, Any]):
    """As diffusers' configs are: once made it refuses whatever would change it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.frozen = True

    def __delitem__(self, *_: Any, **__: Any) -> Any:
        raise Exception("You cannot use ``__delitem__`` on a FrozenDict instance.")

    def __setitem__(self, key: Any, value: Any) -> None:
        if getattr(self, "frozen", False):
            raise Exception("You cannot use ``__setitem__`` on a FrozenDict instance.")
        super().__setitem__(key, value)

    update = pop = setdefault = __delitem__  # type: ignore[assignment]


class Model(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.internal = FrozenDict(width=4, act="silu")


VERBS: dict[str, Callable[[batchfit.Workload], object]] = {
    "predict": lambda work: batchfit.predict_batch_size(work, budget="1GiB"),
    "explain": lambda work: batchfit.explain_memory(work, batch_size=2),
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_table_that_refuses_changes_is_as_it_was(verb: str) -> None:
    model, twin = Model(), Model()
    twin.load_state_dict(model.state_dict())
    optimizers = [torch.optim.AdamW(one.parameters()) for one in (model, twin)]

    def step_of(one: Model, optimizer: torch.optim.Optimizer, n: int) -> None:
        one(torch.ones(n, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    config = model.internal
    work = batchfit.Workload(lambda n: step_of(model, optimizers[0], n), state=[model, optimizers[0]])
    VERBS[verb](work)
    assert model.internal is config
    assert list(config.items()) == [("width", 4), ("act", "silu")]
    for one, optimizer in zip((model, twin), optimizers, strict=True):
        step_of(one, optimizer, 2)
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("kind", ["sequential", "chained", "both"])
@pytest.mark.parametrize("declared", [True, False])
def test_schedules_inside_schedules_stay_where_they_were(verb: str, kind: str, declared: bool) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    warm = lr_scheduler.LinearLR(optimizer, total_iters=3)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, 10)
    schedule: Any
    if kind == "chained":
        schedule = lr_scheduler.ChainedScheduler([warm, cosine])
    else:
        schedule = lr_scheduler.SequentialLR(optimizer, [warm, cosine], milestones=[3])
        if kind == "both":
            schedule = lr_scheduler.ChainedScheduler([schedule, lr_scheduler.ExponentialLR(optimizer, 0.9)])

    def step(n: int) -> None:
        model(torch.ones(n, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()

    step(2)
    before = copy.deepcopy(schedule.state_dict()), schedule.get_last_lr(), optimizer.param_groups[0]["lr"]
    judged = fingerprint(model, optimizer, schedule)
    VERBS[verb](batchfit.Workload(step, state=[model, optimizer, *([schedule] if declared else [])]))
    assert (schedule.state_dict(), schedule.get_last_lr(), optimizer.param_groups[0]["lr"]) == before
    assert fingerprint(model, optimizer, schedule) == judged


def test_what_is_unchanged_is_not_touched() -> None:
    model = nn.Linear(4, 4)
    model.recent = deque([1, 2, 3])  # type: ignore[assignment]
    reading = iter(model.recent)  # type: ignore[arg-type]
    assert next(reading) == 1
    work = batchfit.inference(model, lambda n: torch.ones(n, 4))
    batchfit.predict_batch_size(work, budget="1GiB")
    assert list(reading) == [2, 3]  # a deque that was emptied and filled again would refuse


class Key:
    """One that cannot be found any more, once it is told so."""

    broken = Notes()

    def __hash__(self) -> int:
        if len(self.broken):
            raise RuntimeError("no hash today")
        return 1


def test_one_undo_that_raises_stops_no_other() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    first, table, last = {"n": 1}, {Key(): 1}, [1.0]
    key = next(iter(table))

    def step(n: int) -> None:
        model(torch.ones(n, 4)).sum().backward()
        optimizer.step()
        first["n"] += 1
        table[key] += 1
        last.append(2.0)
        Key.broken.append(1)

    work = batchfit.Workload(step, state=[first, model, optimizer, table, last])
    judged = fingerprint(model, optimizer)
    try:
        with pytest.raises(SnapshotError, match=r"of the state could not be restored.*no hash today"):
            batchfit.predict_batch_size(work, budget="1GiB")
    finally:
        Key.broken.clear()
    assert first == {"n": 1}
    assert last == [1.0]
    assert fingerprint(model, optimizer) == judged


def test_all_is_undone_in_reverse_order_and_then_one_error_says_what_was_not() -> None:
    done: list[int] = []
    undo = UndoStack()

    def failing(number: int) -> Callable[[], None]:
        def fail() -> None:
            done.append(number)
            raise KeyError(number)

        return fail

    for number in range(4):
        undo.push(f"part {number}", failing(number) if number % 2 else lambda n=number: done.append(n))
    with pytest.raises(SnapshotError, match=r"2 parts .*part 3 \(KeyError: 3\); part 1") as raised:
        undo.run()
    assert done == [3, 2, 1, 0]
    assert isinstance(raised.value.__cause__, KeyError)
    undo.run()  # nothing is left, and nothing is done twice
    assert done == [3, 2, 1, 0]


@pytest.mark.parametrize("kind", [dict, OrderedDict, FrozenDict])
@pytest.mark.parametrize(
    "now", [{}, {"a": 1}, {"b": 2, "a": 1}, {"a": 1, "b": 3}, {"c": 1, "a": 1, "b": 2}, {"b": 2}, {"d": 4}]
)
def test_a_table_gets_its_pairs_and_its_order_again(kind: type[dict[str, int]], now: dict[str, int]) -> None:
    wanted = kind({"a": 1, "b": 2})
    items = items_of(wanted)
    table = kind(now)
    put_items(table, items)
    assert list(table.items()) == [("a", 1), ("b", 2)]
    assert list(reversed(table)) == ["b", "a"]  # an OrderedDict has an order of its own


def test_an_error_of_the_steps_comes_out_and_the_state_is_as_it_was() -> None:
    model = Model()

    def step(n: int) -> None:
        model(torch.ones(n, 4)).sum().backward()
        model.extra = model.weight
        raise ValueError("mine")

    before = fingerprint(model)
    with pytest.raises(UntraceableError, match="mine"):
        batchfit.predict_batch_size(batchfit.Workload(step, state=[model]), budget="1GiB")
    assert fingerprint(model) == before
