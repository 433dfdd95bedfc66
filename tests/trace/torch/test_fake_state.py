"""The user's state during and after a trace: fakes inside, and outside nothing that shows there was one."""

from __future__ import annotations

import copy
import functools
import gc
import math
import random
import sys
import types
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from state_judge import Bag, Notes, fingerprint, rich_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch_private import storage_address

import batchfit
from batchfit._engine.trace.fake_state import Faked
from batchfit._engine.trace.trace import trace
from batchfit._engine.trace.workload import rules_for
from batchfit._engine.workload import loop
from batchfit._engine.workload.reachable import reach_of, reached
from batchfit.errors import UntraceableError

HERE = torch.device("cpu", 1)


class Stop(BaseException):
    """As KeyboardInterrupt: no `except Exception` catches it."""


class World:
    """Everything that a training loop may own, warm: two steps have been run."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 4))
        self.model[3].eval()
        self.model[0].weight.mark = "mine"  # type: ignore[assignment]
        self.model.register_forward_hook(lambda *_: None)
        self.seen = Notes()
        self.model[0].register_forward_hook(lambda module, args, out: self.seen.append(type(out)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.scaler = torch.amp.GradScaler("cpu", growth_interval=1)
        self.generator = torch.Generator().manual_seed(5)
        self.queue = torch.randn(6, 4)
        self.extra = Bag(losses=[1.0], cache={"a": [1, torch.ones(2)]}, recent=deque([1], maxlen=2))
        self.break_in = ""
        self.error: BaseException = ValueError("mine")
        for _ in range(2):
            self.step(3)

    @property
    def state(self) -> list[Any]:
        return [
            self.model,
            self.optimizer,
            self.schedule,
            self.scaler,
            self.generator,
            self.queue,
            self.extra,
        ]

    def at(self, place: str) -> None:
        if place == self.break_in:
            raise self.error

    def step(self, n: int) -> None:
        self.at("batch")
        x = torch.randn(n, 4, generator=self.generator) + random.random() + float(np.random.rand())
        self.queue[:1].copy_(x[:1])
        self.queue.mul_(0.5)
        self.optimizer.zero_grad(set_to_none=n % 2 == 0)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = self.model(x)
            self.at("forward")
            loss = nn.functional.mse_loss(out, self.queue[:1].expand_as(out))
        out.register_hook(lambda gradient: self.at("backward"))
        self.scaler.scale(loss).backward()
        self.at("before the optimizer")
        self.scaler.step(self.optimizer)
        self.at("after the optimizer")
        self.scaler.update()
        self.schedule.step()
        self.extra.losses.append(loss)
        self.extra.losses = list(self.extra.losses)
        self.extra.cache["a"].append(loss)
        self.extra.recent.append(loss)
        self.extra.new = loss
        self.model.aux = loss  # type: ignore[assignment]
        self.model[1].register_buffer("late", loss.detach())

    def judged(self) -> object:
        return fingerprint(
            *self.state, list(self.model.parameters()), [p.grad for p in self.model.parameters()]
        )


def hooks_of(module: nn.Module) -> object:
    tables = [name for name in vars(module) if "hook" in name]
    mine = [(name, list((vars(one)[name] or {}).items())) for one in module.modules() for name in tables]
    everywhere = torch.nn.modules.module
    names = [name for name in vars(everywhere) if name.startswith("_global_") and "hook" in name]
    return mine, [(name, list(getattr(everywhere, name) or ())) for name in names]


def autocast_on_cpu() -> object:
    """What CPU autocast does with an operation that CUDA's lists treat in another way."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        one = torch.ones(2, 2)
        low = one @ one
        return low.dtype, torch.exp(low).dtype, torch.nn.functional.mse_loss(low, low).dtype


@pytest.fixture
def world() -> Iterator[World]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the schedule is stepped by hand
        made = World()
    yield made
    vars(made).clear()  # it keeps losses whose graph has a hook that keeps it: no collector sees that circle


PLACES = ["", "batch", "forward", "backward", "before the optimizer", "after the optimizer"]


@pytest.mark.parametrize("kind_of_error", [ValueError, KeyboardInterrupt, Stop])
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.replace(" ", "_") or "none")
def test_nothing_is_changed_wherever_a_trace_ends(
    world: World, place: str, kind_of_error: type[BaseException]
) -> None:
    error = kind_of_error("mine")
    work = batchfit.Workload(world.step, state=world.state)
    mode = [module.training for module in world.model.modules()]
    before, hooks = world.judged(), hooks_of(world.model)
    lists = vars(world.extra).copy()
    cast = autocast_on_cpu()
    made = torch.autocast.__init__, torch.autocast.__enter__, torch.clear_autocast_cache
    world.break_in, world.error = place, error
    if not place:
        trace(work, 3, rules=rules_for(work))
    else:
        with pytest.raises(UntraceableError if isinstance(error, Exception) else type(error)):
            trace(work, 3, rules=rules_for(work))
    assert any(kind is FakeTensor for kind in world.seen) is (place != "batch")
    assert world.judged() == before
    assert hooks_of(world.model) == hooks
    assert [module.training for module in world.model.modules()] == mode
    assert all(vars(world.extra)[name] is value for name, value in lists.items())
    assert autocast_on_cpu() == cast
    assert (torch.autocast.__init__, torch.autocast.__enter__, torch.clear_autocast_cache) == made
    assert _get_current_dispatch_mode_stack() == []
    assert not torch.is_autocast_enabled("cpu")
    assert loop.current_phase() is None
    assert gc.isenabled()


def test_a_trained_step_goes_on_as_if_nothing_had_been(world: World) -> None:
    """The same numbers after a trace as without one, to the last bit."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        twin = World()
    work = batchfit.Workload(world.step, state=world.state)
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    trace(work, 3, rules=rules_for(work))
    for one in (world, twin):
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
        one.step(3)
    for mine, theirs in zip(world.model.state_dict().values(), twin.model.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)
    assert torch.equal(world.queue, twin.queue)
    vars(twin).clear()


def test_garbage_collection_stays_off_where_it_was_off(world: World) -> None:
    work = batchfit.Workload(world.step, state=world.state)
    gc.disable()
    try:
        trace(work, 3, rules=rules_for(work), steps=1)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_fresh_optimizer_stays_fresh() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    state, groups, group = optimizer.state, optimizer.param_groups, optimizer.param_groups[0]
    keys = dict(group)
    work = batchfit.training(model, optimizer, lambda m, b: m(b).sum(), lambda n: torch.randn(n, 4))
    trace(work, 2, rules=rules_for(work))
    assert optimizer.state is state
    assert not state
    assert optimizer.param_groups is groups
    assert groups == [group]
    assert group == keys
    assert group["foreach"] is None
    assert group["params"][0] is model.weight


def test_transformers_sees_the_truth_again(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = types.ModuleType("transformers.utils.import_utils")
    fake.is_fake_tensor = original = lambda value: isinstance(value, FakeTensor)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers.utils.import_utils", fake)
    told = Notes()

    def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(3, device=model.weight.device)
        told.append((fake.is_fake_tensor(positions), fake.is_fake_tensor(model.weight)))
        if len(told) == 3:
            raise RuntimeError("third")
        return model(batch).sum()

    work = batchfit.training(nn.Linear(2, 2), None, loss, lambda n: torch.randn(n, 2))
    trace(work, 2, rules=rules_for(work))
    assert fake.is_fake_tensor is original
    with pytest.raises(UntraceableError, match="third"):
        trace(work, 2, rules=rules_for(work))
    assert fake.is_fake_tensor is original
    assert told == [(False, True)] * 3  # what shapes alone say is known, a weight is not


# ---------------------------------------------------------------- inside


def faked(*parts: Any) -> Faked:
    return Faked(list(parts), HERE)


def test_inside_everything_is_a_fake_of_the_same_shape() -> None:
    model = rich_model()
    optimizer = torch.optim.AdamW(model.parameters())
    shapes = [(p.shape, p.dtype, p.requires_grad, p.stride()) for p in model.parameters()]
    with faked(model, optimizer):
        inside = list(model.parameters())
        assert all(isinstance(one, FakeTensor) and isinstance(one, nn.Parameter) for one in inside)
        assert [(p.shape, p.dtype, p.requires_grad, p.stride()) for p in inside] == shapes
        assert all(one.device == HERE for one in [*inside, *model.buffers()])
        assert [id(one) for one in optimizer.param_groups[0]["params"]] == [id(one) for one in inside]
        assert model[0].weight.mark == "mine"  # type: ignore[union-attr]
        assert isinstance(model[0].weight.grad, FakeTensor)
        assert model[2].weight.grad is None
    assert not any(isinstance(one, FakeTensor) for one in [*model.parameters(), *model.buffers()])


def test_tied_weights_are_one_block() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(50, 8)
            self.head = nn.Linear(8, 50, bias=False)
            self.head.weight = self.embed.weight
            whole = torch.zeros(100)
            self.register_buffer("left", whole[:60])
            self.register_buffer("right", whole[40:])

        def forward(self, ids: torch.Tensor) -> Any:
            return self.head(self.embed(ids))

    model = Tied()
    work = batchfit.training(model, None, lambda m, b: m(b).sum(), lambda n: torch.zeros(n, 3).long())
    with Faked.of(reach_of(work), device=HERE) as state:
        assert model.head.weight is model.embed.weight
        places = {storage_address(one) for _, one, _ in state.held()}
        assert len(places) == 2
        assert model.right.storage_offset() == 40
    found = trace(work, 2, rules=rules_for(work))
    assert [found.sizes[event] for event in found.events[: found.begins]] == [100 * 4, 50 * 8 * 4]
    assert model.head.weight is model.embed.weight


def test_views_of_another_dtype_share_their_memory() -> None:
    model = nn.Module()
    whole = torch.zeros(16, dtype=torch.uint8)
    model.register_buffer("bytes", whole)
    model.register_buffer("numbers", whole.view(torch.float32)[1:])
    with faked(model) as state:
        assert model.numbers.shape == (3,)
        assert {one.untyped_storage().nbytes() for _, one, _ in state.held()} == {16}
        assert len({storage_address(one) for _, one, _ in state.held()}) == 1


def held(work: batchfit.Workload) -> dict[str, int]:
    found = trace(work, 2, rules=rules_for(work), steps=1)
    kinds: dict[str, int] = {}
    for event in found.events[: found.begins]:
        kind = found.origins[event].kind
        kinds[kind] = kinds.get(kind, 0) + found.sizes[event]
    return kinds


def test_a_warm_optimizer_and_old_gradients_are_held() -> None:
    model = nn.Linear(10, 10)
    optimizer = torch.optim.AdamW(model.parameters())
    work = batchfit.training(model, optimizer, lambda m, b: m(b).sum(), lambda n: torch.randn(n, 10))
    assert held(work) == {"weights": 440}
    work.step(2)
    assert held(work) == {"weights": 440, "gradients": 440, "optimizer": 880}
    optimizer.zero_grad()
    assert held(work) == {"weights": 440, "optimizer": 880}


def test_a_warm_optimizer_takes_as_much_as_a_fresh_one_after_a_step() -> None:
    def made(*, warm: bool) -> batchfit.Workload:
        model = nn.Linear(64, 64)
        optimizer = torch.optim.AdamW(model.parameters())
        work = batchfit.training(model, optimizer, lambda m, b: m(b).sum(), lambda n: torch.randn(n, 64))
        if warm:
            work.step(2)
        return work

    peaks = [trace(work, 4, rules=rules_for(work)).peak_bytes for work in (made(warm=False), made(warm=True))]
    assert peaks[0] == peaks[1]


@pytest.mark.parametrize(
    ("make", "foreach"),
    [
        (torch.optim.AdamW, True),
        (torch.optim.SGD, True),
        (partial(torch.optim.AdamW, foreach=False), False),
        (partial(torch.optim.AdamW, fused=True), None),
        (partial(torch.optim.AdamW, lr=torch.tensor(0.1)), False),
        (partial(torch.optim.SGD, differentiable=True), False),
        (torch.optim.Adafactor, None),
    ],
)
def test_foreach_is_what_a_gpu_would_choose(make: Callable[..., Any], foreach: bool | None) -> None:
    model = nn.Linear(2, 2)
    optimizer = make(model.parameters())
    with faked(model, optimizer):
        assert optimizer.param_groups[0]["foreach"] is foreach
    assert optimizer.param_groups[0]["foreach"] is (
        False if make.__class__ is partial and "foreach" in make.keywords else None
    )  # type: ignore[attr-defined]


def test_a_failure_while_faking_puts_back_what_was_done() -> None:
    class Odd(torch.optim.SGD):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, lr=0.1)
            self.state["no tensor"] = {"a": 1}

    model = nn.Linear(2, 2)
    weight = model.weight
    told = pytest.raises(UntraceableError, match=r"stood in for by fake tensors \(AttributeError")
    with told, faked(model, Odd(model.parameters())):
        pass
    assert model.weight is weight


def test_a_model_on_the_meta_device_is_counted_like_any_other() -> None:
    with torch.device("meta"):
        model = nn.Linear(1000, 1000)
    work = batchfit.training(model, None, lambda m, b: m(b).sum(), lambda n: torch.randn(n, 1000))
    assert held(work) == {"weights": 4_004_000}
    assert model.weight.device.type == "meta"


# ---------------------------------------------------------------- what the step reaches

MODEL = nn.Linear(3, 3)
UNUSED = nn.Linear(3, 3)


def helper(x: Any) -> Any:
    return MODEL(x)


def global_step(n: int) -> Any:
    return [helper(torch.randn(n, 3)) for _ in range(2)]


class Trainer:
    def __init__(self) -> None:
        self.model = nn.Linear(3, 3)
        self.parts = {"optimizer": torch.optim.SGD(self.model.parameters(), lr=0.1)}
        self.name = "UNUSED"

    def step(self, n: int) -> Any:
        return self.model(torch.randn(n, 3))

    __call__ = step


def test_models_are_found_where_the_step_finds_them() -> None:
    inner = nn.Linear(3, 3)

    def closes(n: int, scale: float = 2.0) -> Any:
        return inner(torch.randn(n, 3)) * scale

    def nested(n: int) -> Any:
        return [closes(n) for _ in range(2)]

    trainer = Trainer()
    assert reached(closes).parts == reached(nested).parts == reached(partial(nested)).parts == [inner]
    assert reached(lambda n: (lambda: inner)()).parts == [inner]
    assert reached(global_step).parts == [MODEL]
    assert (
        reached(trainer.step).parts == reached(trainer).parts == [trainer.model, trainer.parts["optimizer"]]
    )
    assert reached(lambda n, model=inner: model(n)).parts == [inner]
    assert reached(print).parts == reached(lambda n: n).parts == []
    recursive: list[Any] = []
    recursive.append(recursive)
    assert reached(lambda n: recursive).parts == []


def test_a_name_that_is_not_bound_yet_is_passed_over() -> None:
    def step(n: int) -> Any:
        return later

    assert reached(step).parts == []
    later = nn.Linear(1, 1)
    assert reached(step).parts == [later]


def test_a_frozen_teacher_need_not_be_declared() -> None:
    student, teacher = nn.Linear(16, 16), nn.Linear(16, 16).requires_grad_(False)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    weight = teacher.weight

    def step(n: int) -> None:
        x = torch.randn(n, 16)
        with torch.no_grad():
            target = teacher(x)
        optimizer.zero_grad()
        nn.functional.mse_loss(student(x), target).backward()
        optimizer.step()

    work = batchfit.Workload(step, state=[student, optimizer])
    assert held(work) == {"weights": 2 * 16 * 17 * 4}
    assert teacher.weight is weight


HISTORY: list[Any] = [1.5]


class Loop:
    """A training loop as people write it, none of whose own state is declared."""

    def __init__(self) -> None:
        self.model = nn.Linear(4, 2)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 10)
        self.meters: dict[str, list[Any]] = defaultdict(list)
        self.count = 0
        self.last: Any = None

    def step(self, n: int) -> None:
        self.optimizer.zero_grad()
        self.last = self.model(torch.randn(n, 4)).sum()
        self.last.backward()
        self.optimizer.step()
        self.schedule.step()
        self.count += 1
        self.meters["loss"].append(self.last.item())
        HISTORY.append(self.last.item())


def test_what_the_step_notes_down_is_as_it_was() -> None:
    loop = Loop()
    loop.step(2)
    before = copy.deepcopy(loop.schedule.state_dict()), loop.last, list(loop.meters["loss"]), list(HISTORY)
    meters = loop.meters
    work = batchfit.Workload(loop.step, state=[loop.model, loop.optimizer])
    trace(work, 2, rules=rules_for(work))
    assert loop.schedule.state_dict() == before[0]
    assert (loop.last is before[1], loop.count, loop.meters is meters) == (True, 1, True)
    assert (meters["loss"], HISTORY) == before[2:]


def test_what_is_copied_of_a_state_is_not_its_tensors() -> None:
    """A trace of a model that fills the machine must not need the room twice."""
    model = nn.Linear(8, 8)
    shadow = copy.deepcopy(model.state_dict())
    places = [one.data_ptr() for one in [*model.parameters(), *shadow.values()]]
    with faked(model, shadow):
        shadow["weight"] = model.weight
    assert [one.data_ptr() for one in [*model.parameters(), *shadow.values()]] == places


def test_a_model_that_talks_to_other_ranks_is_refused() -> None:
    class Wrapped(nn.parallel.DistributedDataParallel):
        def __init__(self, module: nn.Module) -> None:
            nn.Module.__init__(self)
            self.module = module

    model = Wrapped(nn.Linear(4, 4))
    work = batchfit.training(model, None, lambda m, b: m.module(b).sum(), lambda n: torch.randn(n, 4))
    with pytest.raises(UntraceableError, match="is Wrapped, which issues collectives"):
        trace(work, 2, rules=rules_for(work))


def test_parameters_in_a_list_of_the_programs_are_those_of_the_model() -> None:
    model = nn.Linear(3, 3)
    listed = list(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    before = [one.grad for one in listed]
    seen = Notes()

    def step(n: int) -> None:
        model(torch.randn(n, 3)).sum().backward()
        seen.append([one.grad is not None for one in listed])
        for one in listed:
            one.grad = None
        seen.append([one.grad is not None for one in model.parameters()])

    work = batchfit.Workload(step, state=[model])
    trace(work, 2, rules=rules_for(work), steps=2)
    assert seen == [[True, True], [False, False]] * 2
    assert all(a is b for a, b in zip(listed, model.parameters(), strict=True))
    assert all(one.grad is grad for one, grad in zip(listed, before, strict=True))


def test_a_gradient_that_the_step_takes_in_a_way_of_its_own_is_restored() -> None:
    model = nn.Linear(3, 3)
    model(torch.ones(1, 3)).sum().backward()
    weight, before = model.weight, model.weight.grad
    found = iter([weight] * 9)  # where no search finds it

    def step(n: int) -> None:
        model(torch.randn(n, 3)).sum().backward()
        next(found).grad = None

    work = batchfit.Workload(step, state=[model])
    trace(work, 2, rules=rules_for(work))
    assert model.weight is weight
    assert weight.grad is before


COUNT, LAST = 0, None


def test_names_stand_for_fakes_in_a_trace_and_for_what_they_stood_for_after_it() -> None:
    """The state of a recurrent net from step to step, a sum of losses, weights by names of their own."""
    model = nn.GRU(4, 4)
    weight, both = model.weight_ih_l0, (model.weight_hh_l0, "and a text")
    hidden: Any = None
    total = 0.0
    steps = Notes()

    def step(n: int) -> None:
        nonlocal hidden, total, late
        global COUNT, LAST
        out, state = model(torch.randn(5, n, 4), hidden)
        hidden = state.detach()
        loss = out.sum() + weight.sum() + both[0].sum()
        loss.backward()
        steps.append((weight.grad is model.weight_ih_l0.grad, both[0].grad is model.weight_hh_l0.grad))
        model.zero_grad()
        total += loss.item()
        late = LAST = loss
        COUNT += 1

    late: Any = None
    del late
    was = both
    work = batchfit.Workload(step, state=[model])
    trace(work, 2, rules=rules_for(work))
    assert steps == [(True, True)] * 2
    assert (hidden, total, COUNT) == (None, 0.0, 0)
    assert (LAST, both is was, weight is model.weight_ih_l0) == (None, True, True)
    with pytest.raises(NameError):
        late  # noqa: B018, F821
    step(3)
    assert (type(hidden), COUNT) == (torch.Tensor, 1)
    assert math.isfinite(total)


def test_a_tensor_that_only_an_optimizer_knows_is_counted() -> None:
    prompt = torch.zeros(1000, 8, requires_grad=True)
    prompt.sum().backward()
    frozen = nn.Linear(8, 8).requires_grad_(False)
    optimizer = torch.optim.Adam([prompt])

    def step(n: int) -> None:
        (frozen(torch.randn(n, 8)) @ prompt.T).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    work = batchfit.Workload(step, state=[frozen, optimizer])
    grad = prompt.grad
    found = trace(work, 2, rules=rules_for(work))
    kinds: dict[str, int] = defaultdict(int)
    for size, origin in zip(found.sizes, found.origins, strict=True):
        kinds[origin.kind] += size
    own = prompt.numel() * 4
    assert (kinds["weights"] - own, kinds["gradients"], kinds["optimizer"]) == (4 * 72, 2 * own, 2 * own)
    assert (prompt.grad is grad, type(prompt), dict(optimizer.state)) == (True, torch.Tensor, {})


@pytest.mark.parametrize("way", ["name", "declared", "table", "declared table"])
def test_a_tensor_that_learns_by_hand_is_counted(way: str) -> None:
    weight = torch.zeros(1000, 8, requires_grad=True)
    table = {"weight": weight}
    steps = Notes()

    def by_name(n: int) -> None:
        (torch.randn(n, 8) @ weight.T).sum().backward()
        with torch.no_grad():
            weight.sub_(weight.grad, alpha=0.1)
        weight.grad = None

    def by_table(n: int) -> None:
        (torch.randn(n, 8) @ table["weight"].T).sum().backward()
        with torch.no_grad():
            table["weight"] -= 0.1 * table["weight"].grad  # type: ignore[operator]
        steps.append(type(table["weight"]))

    step, state = {
        "name": (by_name, []),
        "declared": (by_name, [weight]),
        "table": (by_table, []),
        "declared table": (by_table, [table]),
    }[way]
    work = batchfit.Workload(step, state=state)
    found = trace(work, 2, rules=rules_for(work))
    held = [n for n, o in zip(found.sizes, found.origins, strict=True) if o.kind == "weights"]
    assert held == [4 * weight.numel()]
    assert found.peak_bytes > 2 * 4 * weight.numel()
    assert (table["weight"] is weight, type(weight), weight.grad) == (True, torch.Tensor, None)
    assert not weight.any()


def test_a_weight_that_the_step_replaces_is_gone() -> None:
    """As the momentum encoder of MoCo and SAM do it."""
    model = nn.Linear(64, 64, bias=False)

    def step(_: int) -> None:
        with torch.no_grad():
            for one in model.parameters():
                one.data = one.data * 0.99

    before = model.weight.data_ptr()
    work = batchfit.Workload(step, state=[model])
    assert trace(work, 2, rules=rules_for(work)).peak_bytes == 2 * 64 * 64 * 4
    assert model.weight.data_ptr() == before


class Inside(torch.optim.Optimizer):
    """As SAM and Lookahead are: with another optimizer inside, and its groups."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base.param_groups

    def step(self, closure: Any = None) -> None:
        self.base.step()


def test_an_optimizer_inside_another_is_left_as_it_was() -> None:
    model = nn.Linear(8, 8)
    outer = Inside(model.parameters())

    def step(n: int) -> None:
        outer.zero_grad()
        model(torch.randn(n, 8)).sum().backward()
        outer.step()

    before = fingerprint(model, outer.base, outer)
    work = batchfit.Workload(step, state=[model, outer])
    found = trace(work, 2, rules=rules_for(work))
    kept = sum(n for n, o in zip(found.sizes, found.origins, strict=True) if o.kind == "optimizer")
    assert kept == 4 * sum(one.numel() for one in model.parameters())
    assert fingerprint(model, outer.base, outer) == before
    step(2)
    assert len(outer.base.state) == 2


class Named(list[Any]):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name


def test_a_list_of_a_class_of_its_own_may_be_declared() -> None:
    model = nn.Linear(4, 4)
    listed = Named("weights")
    listed += model.parameters()
    seen = Notes()

    def step(n: int) -> None:
        model(torch.randn(n, 4)).sum().backward()
        seen.append([one.grad is two.grad for one, two in zip(listed, model.parameters(), strict=True)])
        model.zero_grad()

    work = batchfit.Workload(step, state=[model, listed])
    trace(work, 2, rules=rules_for(work), steps=1)
    assert seen == [[True, True]]
    assert all(one is two for one, two in zip(listed, model.parameters(), strict=True))


def test_lists_tables_and_queues_hold_what_they_held() -> None:
    """Lines of a log, samples that were taken from a queue, counts."""
    model = nn.Linear(4, 4)
    lines, counts, ids = ["begun"], {"steps": 3, "other": 1}, {1}
    waiting = deque(torch.randn(2, 4) for _ in range(9))
    first = waiting[0]

    def step(n: int) -> None:
        loss = model(waiting.popleft()).sum()
        loss.backward()
        lines.append(f"loss {loss.item():.2f}")
        counts["steps"] += 1
        counts["new"] = counts.pop("other", 1)
        ids.add(n)

    work = batchfit.Workload(step, state=[model])
    trace(work, 2, rules=rules_for(work))
    assert (lines, list(counts.items()), ids) == (["begun"], [("steps", 3), ("other", 1)], {1})
    assert (len(waiting), waiting[0] is first) == (9, True)


def test_an_optimizer_that_steps_in_backward_is_traced() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    optimizers = {one: torch.optim.Adam([one]) for one in model.parameters()}
    halved = Notes()

    def update(parameter: nn.Parameter) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    handles = [one.register_post_accumulate_grad_hook(update) for one in model.parameters()]
    handles.append(model[0].weight.register_hook(lambda gradient: halved.append(1) or gradient * 0.5))
    work = batchfit.Workload(
        lambda n: model(torch.randn(n, 64)).sum().backward(), state=[model, *optimizers.values()]
    )
    found = trace(work, 2, rules=rules_for(work))
    kept = sum(n for n, o in zip(found.sizes, found.origins, strict=True) if o.kind == "optimizer")
    assert kept >= 2 * 4 * sum(one.numel() for one in model.parameters())
    assert len(halved) == 2
    assert list(map(id, optimizers)) == list(map(id, model.parameters()))
    for handle in handles:  # torch keeps what they close over
        handle.remove()


@functools.cache
def cached_ones(n: int) -> torch.Tensor:
    return torch.ones(n, n, device=Cached.device)


class Cached(nn.Module):
    """Keeps masks where all its instances find them."""

    device: Any = None
    masks: dict[int, torch.Tensor] = {}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    @staticmethod
    @functools.lru_cache(maxsize=4)
    def lower(n: int) -> torch.Tensor:
        return torch.ones(n, n, device=Cached.device).tril()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Cached.device = x.device
        if 8 not in Cached.masks:
            Cached.masks[8] = torch.eye(8, device=x.device)
        out: torch.Tensor = self.layer(x) @ Cached.masks[8] @ self.lower(8) @ cached_ones(8)
        return out


def test_caches_of_classes_and_functions_hold_no_fakes_afterwards() -> None:
    work = batchfit.training(Cached(), None, lambda m, b: m(b).sum(), lambda n: torch.randn(n, 8))
    trace(work, 2, rules=rules_for(work))
    assert not Cached.masks
    work.step(2)
    trace(work, 2, rules=rules_for(work))
    work.step(2)
    assert not any(isinstance(one, FakeTensor) for one in Cached.masks.values())
    Cached.masks.clear()
    Cached.lower.cache_clear()
    cached_ones.cache_clear()
