"""Workloads: a step is what a loop written by hand does, bit for bit and byte for byte."""

from __future__ import annotations

import copy
import functools
import gc
import re
import runpy
import threading
import weakref
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import batchfit
from batchfit._engine.workload import loop
from batchfit.workload import Workload, as_workload, batches, generation, inference, training

FEATURES, CLASSES = 6, 5


def make_model() -> nn.Module:
    """BatchNorm and dropout, so that buffers and the RNG take part."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, CLASSES)
    )


def make_batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, FEATURES), torch.randint(0, CLASSES, (size,))


def cross_entropy(model: Any, batch: Any) -> torch.Tensor:
    x, y = batch
    return nn.functional.cross_entropy(model(x).float(), y)


def make_training(loss_fn: Any = cross_entropy, source: Any = make_batch, **settings: Any) -> Workload:
    model = make_model()
    return training(model, torch.optim.AdamW(model.parameters()), loss_fn, source, **settings)


@pytest.fixture(autouse=True)
def _no_phase() -> None:
    loop.clear_phase()


# Workload


def test_workload_keeps_its_step_and_state() -> None:
    def step(batch_size: int) -> None: ...

    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loose = torch.zeros(2)
    workload = Workload(step, state=[model, optimizer, loose])
    assert workload.step is step
    assert workload.state[0] is model
    assert workload.state[1] is optimizer
    assert workload.state[2] is loose
    assert (workload.declared, workload.kind, workload.model, workload.optimizer) == (
        True,
        "step",
        None,
        None,
    )


def test_workload_without_state_is_not_declared() -> None:
    workload = Workload(lambda batch_size: None)
    assert (workload.declared, workload.state) == (False, ())
    for empty in ([], ()):
        workload = Workload(lambda batch_size: None, state=empty)
        assert (workload.declared, workload.state) == (True, ())


class Averaged:
    """A user's own object with state."""

    def __init__(self) -> None:
        self.weight = torch.zeros(2)


def test_one_thing_alone_is_accepted_as_state() -> None:
    model = make_model()  # iterable: it must not be taken apart
    parameter = torch.zeros(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    scaler, ema = torch.amp.GradScaler("cpu"), {"weight": torch.zeros(2)}
    for part in (
        model,
        parameter,
        optimizer,
        scheduler,
        scaler,
        torch.Generator(),
        ema,
        np.zeros(2),
        Averaged(),
    ):
        workload = Workload(lambda batch_size: None, state=part)
        assert len(workload.state) == 1
        assert workload.state[0] is part


def test_state_may_come_from_a_generator() -> None:
    parts = [torch.zeros(1), torch.ones(1)]
    for state in ((part for part in parts), tuple(parts)):
        workload = Workload(lambda batch_size: None, state=state)
        assert list(map(id, workload.state)) == list(map(id, parts))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Workload(3), "step must be a callable step(batch_size), not 3"),  # type: ignore[arg-type]
        (
            lambda: Workload(lambda batch_size: None, state=7),
            "state must hold modules, optimizers, schedulers, scalers or tensors, not 7",
        ),
        (
            lambda: Workload(lambda batch_size: None, state="model"),
            "state must hold modules, optimizers, schedulers, scalers or tensors, not 'model'",
        ),
        (
            lambda: Workload(lambda batch_size: None, state=[torch.zeros(1), "model"]),
            "state must hold modules, optimizers, schedulers, scalers or tensors, not 'model'",
        ),
        (
            lambda: Workload(lambda batch_size: None, state=[nn.Linear]),
            "state must hold modules, optimizers, schedulers, scalers or tensors, not "
            "<class 'torch.nn.modules.linear.Linear'>",
        ),
        (lambda: as_workload(3), "workload must be a Workload or a callable step(batch_size), not 3"),
        (
            lambda: as_workload("train.py:make"),
            "workload must be a Workload or a callable step(batch_size), not 'train.py:make'; a function is "
            "named like that with isolate=True only",
        ),
        (lambda: as_workload(None), "workload must be a Workload or a callable step(batch_size), not None"),
        (
            lambda: as_workload(make_model()),
            "workload must be a Workload or a callable step(batch_size), not the model Sequential",
        ),
        (
            lambda: as_workload(Workload),
            "workload must be a Workload or a callable step(batch_size), not "
            "<class 'batchfit.workload.Workload'>",
        ),
    ],
)
def test_wrong_workloads(make: Callable[[], object], text: str) -> None:
    with pytest.raises(TypeError) as caught:
        make()
    assert str(caught.value) == text


def test_step_must_take_the_size() -> None:
    ran: list[int] = []

    def factory() -> None:
        ran.append(1)

    for make in (Workload, as_workload):
        with pytest.raises(
            TypeError, match=r"^step must take the batch size as its one positional argument, not <f"
        ):
            make(factory)  # type: ignore[operator]
    with pytest.raises(TypeError, match=r"has to be called first$"):
        Workload(lambda first, second: None)  # type: ignore[arg-type, misc]
    with pytest.raises(TypeError, match=r"^step must take the batch size"):
        Workload(lambda *, batch_size: None)  # type: ignore[arg-type, misc]
    assert not ran


def test_as_workload() -> None:
    workload = make_training()
    assert as_workload(workload) is workload
    for step in (lambda size: None, lambda size, verbose=False: None, functools.partial(int, base=10), abs):
        plain = as_workload(step)
        assert plain.step is step
        assert not plain.declared


def test_workload_cannot_be_changed_but_copied() -> None:
    workload = make_training()
    with pytest.raises(AttributeError, match="cannot assign to field 'step'"):
        workload.step = abs
    with pytest.raises(AttributeError):
        workload.other = 1  # type: ignore[attr-defined]
    twin = copy.copy(workload)
    assert twin.step is workload.step
    assert twin.model is workload.model


def test_workload_says_what_it_is() -> None:
    def my_step(batch_size: int) -> None: ...

    assert repr(make_training()) == "<Workload training Sequential, state: Sequential, AdamW>"
    assert repr(Workload(my_step)).endswith("my_step, state: not declared>")
    assert repr(Workload(my_step, state=())).endswith("my_step, state: none>")


def test_training_knows_its_parts() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    extra = torch.zeros(1)
    workload = training(model, optimizer, cross_entropy, make_batch, scaler=scaler, state=[extra])
    assert list(map(id, workload.state)) == list(map(id, (model, optimizer, scaler, extra)))
    assert workload.model is model
    assert workload.optimizer is optimizer
    assert (workload.kind, workload.declared) == ("training", True)


# Training: equal to a loop written by hand


def by_hand(settings: dict[str, Any], steps: int, size: int) -> tuple[nn.Module, Any, Any]:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scaler = settings.get("scaler")
    torch.manual_seed(1)
    model.train()
    for _ in range(steps):
        x, y = make_batch(size)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16) if settings.get("autocast") else nullcontext():
            loss = nn.functional.cross_entropy(model(x).float(), y)
        if scaler is None:
            loss.backward()
        else:
            scaler.scale(loss).backward()
        if settings.get("clip_norm"):
            if scaler is not None:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), settings["clip_norm"])
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    return model, optimizer, scaler


def by_workload(settings: dict[str, Any], steps: int, size: int) -> tuple[nn.Module, Any, Any]:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    settings = dict(settings)
    workload = training(model, optimizer, cross_entropy, make_batch, **settings)
    torch.manual_seed(1)
    for _ in range(steps):
        workload.step(size)
    return model, optimizer, settings.get("scaler")


def autocast_factory() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"autocast": torch.bfloat16},
        {"autocast": autocast_factory},
        {"autocast": torch.autocast("cpu", dtype=torch.bfloat16)},
        {"scaler": 2.0**8},
        {"scaler": float("inf")},  # every step is skipped, and the scale moves
        {"clip_norm": 0.1},
        {"scaler": 2.0**8, "clip_norm": 0.1},
        {"autocast": torch.bfloat16, "scaler": 2.0**8, "clip_norm": 0.1},
    ],
    ids=lambda given: str(given).partition(" at 0x")[0],
)
def test_training_equals_the_hand_written_loop(settings: dict[str, Any]) -> None:
    def fresh() -> dict[str, Any]:
        if "scaler" not in settings:
            return settings
        scaler = torch.amp.GradScaler("cpu", init_scale=settings["scaler"], growth_interval=2)
        return {**settings, "scaler": scaler}

    model, optimizer, scaler = by_workload(fresh(), steps=4, size=8)
    rng = torch.get_rng_state()
    expected_model, expected_optimizer, expected_scaler = by_hand(fresh(), steps=4, size=8)
    assert torch.equal(rng, torch.get_rng_state())
    for (name, tensor), expected in zip(
        model.state_dict().items(), expected_model.state_dict().values(), strict=True
    ):
        assert torch.equal(tensor, expected), name
    for parameter, expected in zip(model.parameters(), expected_model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=0, atol=0, equal_nan=True)
        state, expected_state = optimizer.state[parameter], expected_optimizer.state[expected]
        assert state.keys() == expected_state.keys()
        assert all(torch.equal(state[key], expected_state[key]) for key in state)
    assert optimizer.param_groups[0]["lr"] == expected_optimizer.param_groups[0]["lr"]
    if scaler is not None:
        assert scaler.state_dict() == expected_scaler.state_dict()


def test_without_an_optimizer_there_are_gradients_only() -> None:
    model = make_model()
    before = copy.deepcopy(model)
    workload = training(model, None, cross_entropy, make_batch, clip_norm=0.01)
    torch.manual_seed(1)
    workload.step(8)
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(norm, torch.tensor(0.01), rtol=1e-4, atol=0)
    for parameter, expected in zip(model.parameters(), before.parameters(), strict=True):
        assert torch.equal(parameter, expected)
    first = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    torch.manual_seed(1)
    workload.step(8)  # zeroed in between, so equal (BatchNorm's statistics play no part in training mode)
    second = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert workload.optimizer is None


@pytest.mark.parametrize("source", ["dataset", "example"])
def test_training_from_other_sources(source: str) -> None:
    x, y = torch.randn(6, FEATURES), torch.randint(0, CLASSES, (6,))
    sizes: list[int] = []

    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        sizes.append(len(batch[0]))
        return cross_entropy(model, batch)

    data: Any = torch.utils.data.TensorDataset(x, y) if source == "dataset" else (x, y)
    workload = make_training(loss_fn, data)
    for size in (2, 9):
        workload.step(size)
    assert sizes == [2, 9]


def test_collate_fn_reaches_the_dataset() -> None:
    samples = [(torch.randn(FEATURES), 1)] * 3

    def collate(samples: list[Any]) -> dict[str, torch.Tensor]:
        return {"x": torch.stack([s[0] for s in samples]), "y": torch.tensor([s[1] for s in samples])}

    seen: list[int] = []

    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        seen.append(len(batch["x"]))
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"])

    make_training(loss_fn, samples, collate_fn=collate).step(5)
    assert seen == [5]
    model = make_model()
    workload = inference(model, samples, collate_fn=collate, forward=lambda model, batch: model(batch["x"]))
    workload.step(2)


def test_batch_goes_to_the_models_device() -> None:
    model = nn.Linear(FEATURES, 1, device="meta")
    devices: list[str] = []

    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        devices.append(batch["x"].device.type)
        return model(batch["x"]).mean()

    training(model, None, loss_fn, {"x": torch.zeros(2, FEATURES)}).step(3)
    assert devices == ["meta"]


# Memory


@pytest.mark.parametrize("keep_outputs", [False, True])
def test_what_lives_when(keep_outputs: bool) -> None:
    """Lean: logits die in `loss_fn`, all else with the step. Else a loop's variables keep what they hold."""
    seen: dict[str, weakref.ref[Any]] = {}
    alive: dict[str, dict[str, bool]] = {}

    def note(when: str) -> None:
        alive[when] = {name: ref() is not None for name, ref in seen.items()}

    def source(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        note("batch")
        x, y = make_batch(size)
        seen["x"] = weakref.ref(x)
        return x, y

    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        logits = model(batch[0])
        loss = nn.functional.cross_entropy(logits, batch[1])
        loss.register_hook(lambda grad: note("backward"))
        seen["logits"], seen["loss"] = weakref.ref(logits), weakref.ref(loss)
        return loss

    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *args: note("optimizer"))
    workload = training(model, optimizer, loss_fn, source, keep_outputs=keep_outputs)
    for _ in range(2):  # by itself, a step keeps nothing
        workload.step(4)
        note("after")
        assert not any(alive["batch"].values())
        assert not any(alive["after"].values())
    with loop.running():
        for number in range(2):
            workload.step(4)
            note("after")
            assert (
                alive["backward"] == alive["optimizer"] == {"x": True, "logits": keep_outputs, "loss": True}
            )
            assert set(alive["after"].values()) == {keep_outputs}
            if number:
                assert set(alive["batch"].values()) == {keep_outputs}
    note("after")
    assert not any(alive["after"].values())


def test_a_variable_holds_its_old_value_until_the_new_one_is_there() -> None:
    """The batch until the next is made, outputs until the next forward pass has returned, and so the loss."""
    seen: dict[str, list[weakref.ref[Any]]] = {"x": [], "out": [], "loss": []}
    alive: list[tuple[str, dict[str, list[bool]]]] = []

    def note(when: str) -> None:
        alive.append((when, {name: [ref() is not None for ref in refs] for name, refs in seen.items()}))

    class Model(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            note("forward begins")
            out = super().forward(x)
            note("forward ends")
            return out

    def source(size: int) -> torch.Tensor:
        x = torch.randn(size, 4)
        note("batch is made")
        seen["x"].append(weakref.ref(x))
        return x

    def loss_fn(model: Any, x: torch.Tensor) -> torch.Tensor:
        out = model(x)
        note("model returned")
        seen["out"].append(weakref.ref(out))
        loss = out.square().mean()
        note("loss is there")
        seen["loss"].append(weakref.ref(loss))
        return loss

    workload = training(Model(4, 2), None, loss_fn, source)
    with loop.running():
        workload.step(3)
        alive.clear()
        workload.step(3)
    one, both = [True], [False, True]
    assert alive == [
        ("batch is made", {"x": one, "out": one, "loss": one}),
        ("forward begins", {"x": both, "out": one, "loss": one}),
        ("forward ends", {"x": both, "out": one, "loss": one}),
        ("model returned", {"x": both, "out": [False], "loss": one}),
        ("loss is there", {"x": both, "out": both, "loss": one}),
    ]


def test_accumulated_gradients_are_those_of_the_whole_batch() -> None:
    whole = nn.Linear(FEATURES, CLASSES).double()
    model = copy.deepcopy(whole)
    some = [(torch.randn(3, FEATURES).double(), torch.randint(0, CLASSES, (3,))) for _ in range(4)]
    handed = iter(some)
    training(model, None, cross_entropy, lambda n: next(handed), accumulate=4).step(3)
    joined = tuple(torch.cat(parts) for parts in zip(*some, strict=True))
    cross_entropy(whole, joined).backward()
    for one, two in zip(model.parameters(), whole.parameters(), strict=True):
        assert one.grad is not None
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"accumulate": 0}, "accumulate must be a positive integer, not 0"),
        ({"accumulate": True}, "accumulate must be a positive integer, not True"),
        ({"accumulate": 2.0}, "accumulate must be a positive integer, not 2.0"),
        ({"keep_outputs": None}, "keep_outputs must be True or False, not None"),
        ({"keep_outputs": 1}, "keep_outputs must be True or False, not 1"),
    ],
)
def test_what_a_loop_is_must_be_said_right(asked: dict[str, Any], why: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(why)):
        training(make_model(), None, cross_entropy, make_batch, **asked)


def test_scaled_loss_does_not_outlive_backward() -> None:
    scaled: list[weakref.ref[Any]] = []

    class Scaler(torch.amp.GradScaler):
        def scale(self, outputs: Any) -> Any:
            out = super().scale(outputs)
            scaled.append(weakref.ref(out))
            return out

    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    alive: list[bool] = []
    optimizer.register_step_pre_hook(lambda *args: alive.append(scaled[0]() is not None))
    training(model, optimizer, cross_entropy, make_batch, scaler=Scaler("cpu")).step(4)
    assert alive == [False]


def test_inference_output_is_dropped() -> None:
    outputs: list[weakref.ref[Any]] = []

    def forward(model: Any, batch: Any) -> torch.Tensor:
        out: torch.Tensor = model(batch)
        outputs.append(weakref.ref(out))
        return out

    def source(size: int) -> torch.Tensor:
        assert all(ref() is None for ref in outputs)
        return torch.randn(size, FEATURES)

    workload = inference(make_model(), source, forward=forward, keep_outputs=False)
    with loop.running():
        for _ in range(2):
            workload.step(3)
    assert len(outputs) == 2
    assert all(ref() is None for ref in outputs)


# Phases


class SpyOptimizer(torch.optim.SGD):
    fails = False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.seen.append(loop.current_phase())  # type: ignore[attr-defined]
        if self.fails:
            raise RuntimeError("optimizer")
        super().step(closure)


def spied(failing: str | None) -> tuple[Workload, list[str | None]]:
    """A workload that notes the phase at each point, and fails in the one named."""
    seen: list[str | None] = []

    def at(name: str) -> None:
        seen.append(loop.current_phase())
        if name == failing:
            raise RuntimeError(name)

    def source(size: int) -> Any:
        at("batch")
        return make_batch(size)

    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        at("forward")
        loss = cross_entropy(model, batch)
        loss.register_hook(lambda grad: at("backward"))
        return loss

    model = make_model()
    optimizer = SpyOptimizer(model.parameters(), lr=0.1)
    optimizer.seen = seen  # type: ignore[attr-defined]
    optimizer.fails = failing == "optimizer"
    return training(model, optimizer, loss_fn, source), seen


def test_phases_are_seen_in_order() -> None:
    workload, seen = spied(None)
    workload.step(4)
    assert tuple(seen) == loop.PHASES == ("batch", "forward", "backward", "optimizer")
    assert loop.current_phase() is None


@pytest.mark.parametrize("failing", loop.PHASES)
def test_a_failure_leaves_its_phase(failing: str) -> None:
    workload, seen = spied(failing)
    with pytest.raises(RuntimeError, match=failing):
        workload.step(4)
    assert loop.current_phase() == failing
    assert seen[-1] == failing


def test_phases_of_inference() -> None:
    seen: list[str | None] = []

    def source(size: int) -> torch.Tensor:
        seen.append(loop.current_phase())
        return torch.randn(size, FEATURES)

    def forward(model: Any, batch: Any) -> object:
        seen.append(loop.current_phase())
        return model(batch)

    inference(make_model(), source, forward=forward).step(2)
    assert seen == ["batch", "forward"]
    assert loop.current_phase() is None


def test_phase_belongs_to_its_thread() -> None:
    loop.enter_phase("backward")
    found: list[str | None] = []

    def other() -> None:
        found.append(loop.current_phase())
        loop.enter_phase("batch")

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert found == [None]
    assert loop.current_phase() == "backward"
    with pytest.raises(
        ValueError, match=r"^name must be one of batch, forward, backward, optimizer, not 'loss'$"
    ):
        loop.enter_phase("loss")


# Mode


@pytest.mark.parametrize("fails", [False, True])
def test_mode_is_put_back(fails: bool) -> None:
    modes: list[bool] = []

    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        modes.append(all(module.training for module in model.modules()))
        if fails:
            raise RuntimeError("forward")
        return cross_entropy(model, batch)

    workload = make_training(loss_fn)
    model = workload.model.eval()
    model[3].train()
    before = [module.training for module in model.modules()]
    if fails:
        with pytest.raises(RuntimeError, match="forward"):
            workload.step(4)
    else:
        workload.step(4)
    assert modes == [True]
    assert [module.training for module in model.modules()] == before


def test_parts_frozen_in_eval_mode_stay_so() -> None:
    modes: list[bool] = []

    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        modes.append(model[1].training)
        return cross_entropy(model, batch)

    workload = make_training(loss_fn)
    workload.model[1].eval()
    workload.step(4)
    assert modes == [False]
    assert not workload.model[1].training
    assert workload.model.training


# Inference


class Called(nn.Module):
    """Remembers how it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.calls: list[tuple[Any, Any]] = []

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        assert torch.is_inference_mode_enabled()
        assert not self.training
        self.calls.append((args, kwargs))
        return self.weight * 2


X = torch.arange(4.0)


@pytest.mark.parametrize(
    ("batch", "args", "kwargs"),
    [
        (X, 1, ()),
        ((X, X), 2, ()),
        ({"x": X, "y": X}, 0, ("x", "y")),
        ([X, X, X], 1, ()),
    ],
)
def test_inference_calls_the_model(batch: Any, args: int, kwargs: Any) -> None:
    model = Called()
    workload = inference(model, batch)
    workload.step(4)
    assert (len(model.calls[0][0]), tuple(model.calls[0][1])) == (args, kwargs)
    assert model.training
    assert (workload.kind, workload.model, workload.optimizer) == ("inference", model, None)
    assert workload.state == (model,)


def test_inference_under_autocast() -> None:
    dtypes: list[torch.dtype] = []

    def forward(model: Any, batch: Any) -> None:
        dtypes.append(model(batch).dtype)

    inference(make_model(), torch.randn(4, FEATURES), forward=forward, autocast=torch.bfloat16).step(4)
    inference(make_model(), torch.randn(4, FEATURES), forward=forward).step(4)
    assert dtypes == [torch.bfloat16, torch.float32]


# Generation


@pytest.fixture
def gpt2() -> Any:
    """A tiny GPT-2 whose first greedy token is its end-of-sequence token: left alone, it stops at once."""
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=16, vocab_size=50, n_positions=64, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    prompt = torch.ones(1, 3, dtype=torch.long)
    with torch.no_grad():
        first = int(model(prompt).logits[0, -1].argmax())
    model.generation_config.eos_token_id = first
    model.generation_config.pad_token_id = 0
    mask = torch.ones_like(prompt)
    assert model.generate(prompt, attention_mask=mask, max_new_tokens=12).shape[1] == 4
    return model.train()


@pytest.mark.parametrize("kwargs", [{}, {"num_beams": 2}, {"min_new_tokens": 12}, {"do_sample": True}])
def test_generation_is_forced_to_the_full_length(
    gpt2: Any, kwargs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: list[Any] = []
    generate = gpt2.generate

    def spy(**options: Any) -> Any:
        assert torch.is_inference_mode_enabled()
        assert not gpt2.training
        assert loop.current_phase() == "forward"
        out = generate(**options)
        shapes.append(tuple(out.shape))
        return out

    monkeypatch.setattr(gpt2, "generate", spy)
    prompt = torch.ones(2, 3, dtype=torch.long)
    batch = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
    workload = generation(gpt2, batch, max_new_tokens=12, **kwargs)
    for size in (1, 5):
        workload.step(size)
    assert shapes == [(1, 15), (5, 15)]
    assert gpt2.training
    assert (workload.kind, workload.model, workload.state) == ("generation", gpt2, (gpt2,))
    assert loop.current_phase() is None


def test_generation_that_still_stops_early_is_an_error(gpt2: Any) -> None:
    gpt2.generation_config.max_time = 1e-9
    prompt = torch.ones(1, 3, dtype=torch.long)
    workload = generation(gpt2, {"input_ids": prompt, "attention_mask": prompt}, max_new_tokens=12)
    with pytest.raises(
        ValueError,
        match=r"^model\.generate stopped after 1 of 12 new tokens: take max_time, stop_strings and",
    ):
        workload.step(2)


class Speaker:
    """Not a module, just something that generates."""

    device = torch.device("meta")

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any]] = []

    def generate(self, *args: Any, **kwargs: Any) -> str:
        self.calls.append((args, kwargs))
        return "out"


def test_generation_takes_any_object_that_generates() -> None:
    speaker = Speaker()
    workload = generation(speaker, torch.ones(2, 3), max_new_tokens=5, top_k=3)
    workload.step(4)
    (args, kwargs) = speaker.calls[0]
    assert (args[0].shape, args[0].device.type) == ((4, 3), "meta")
    assert kwargs == {"max_new_tokens": 5, "min_new_tokens": 5, "top_k": 3}
    assert (workload.state, workload.declared) == ((), True)
    generation(speaker, {"ids": torch.ones(2, 3)}, max_new_tokens=5).step(1)
    assert speaker.calls[1][0] == ()
    assert speaker.calls[1][1].keys() == {"ids", "max_new_tokens", "min_new_tokens"}


@pytest.mark.parametrize(
    ("kwargs", "error", "text"),
    [
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens must be a positive integer, not 0"),
        ({"max_new_tokens": True}, TypeError, "max_new_tokens must be a positive integer, not True"),
        ({"max_new_tokens": 2.0}, TypeError, "max_new_tokens must be a positive integer, not 2.0"),
        (
            {"max_new_tokens": 8, "min_new_tokens": 4},
            ValueError,
            "min_new_tokens must be max_new_tokens (8) or left out, not 4: "
            "generation is forced to the full length",
        ),
        (
            {"max_new_tokens": 8, "max_length": 20},
            ValueError,
            "max_length must be left out, not 20: generation is forced to max_new_tokens",
        ),
        (
            {"max_new_tokens": 8, "stop_strings": ["."]},
            ValueError,
            "stop_strings must be left out, not ['.']: generation is forced to max_new_tokens",
        ),
        ({"max_new_tokens": 8, "collate_fn": 3}, TypeError, "collate_fn must be a callable or None, not 3"),
    ],
)
def test_generation_errors(kwargs: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        generation(Speaker(), torch.ones(2, 3), **kwargs)
    assert str(caught.value) == text


def test_generation_needs_generate() -> None:
    for model, name in ((make_model(), "Sequential"), (Speaker, "type"), (None, "NoneType")):
        with pytest.raises(TypeError, match=rf"^model must be an object with a generate method, not {name}$"):
            generation(model, torch.ones(1, 1), max_new_tokens=1)


# Wrong arguments and wrong losses


@contextmanager
def single_use() -> Any:
    yield


def sgd(*models: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([one for model in models for one in model.parameters()], lr=0.1)


@pytest.mark.parametrize("make", [make_model, lambda: nn.Sequential(nn.LazyLinear(3))])
def test_an_optimizer_of_a_copy_is_refused(make: Callable[[], nn.Module]) -> None:
    """It would move nothing of the model, and its state would never be there."""
    model = make()
    with pytest.raises(ValueError, match=r"^optimizer must hold the model's parameters, not those of a copy"):
        training(model, sgd(copy.deepcopy(model)), cross_entropy, make_batch)


class Masters(torch.optim.SGD):
    """Moves copies in higher precision, which it keeps."""


def test_an_optimizer_that_may_move_what_only_the_loss_knows_is_warned_of() -> None:
    model, head = make_model(), nn.Linear(CLASSES, 2)
    copies = [one.detach().double().requires_grad_() for one in model.parameters()]
    hooked = sgd(copy.deepcopy(model))
    hooked.register_step_pre_hook(lambda *_: None)
    for one in (sgd(head), Masters(copies, lr=0.1), torch.optim.SGD(copies, lr=0.1), hooked):
        with pytest.warns(UserWarning, match=rf"^the optimizer \({type(one).__name__}\) holds none of the"):
            training(model, one, cross_entropy, make_batch)


def test_an_optimizer_that_has_to_do_with_the_model_is_taken_without_a_word() -> None:
    model, head = make_model(), nn.Linear(CLASSES, 2)
    frozen = make_model().requires_grad_(False)
    for of, one, state in (
        (model, sgd(model), ()),
        (model, torch.optim.SGD([next(model.parameters())], lr=0.1), ()),
        (model, sgd(model, head), ()),
        (model, sgd(head), [head]),  # declared
        (frozen, sgd(head), ()),
        (torch.compile(model, backend="eager"), sgd(model), ()),
        (nn.DataParallel(model), sgd(model), ()),
        (nn.Sequential(model, head), sgd(head), ()),
        (model, None, ()),
    ):
        assert training(of, one, cross_entropy, make_batch, state=state).optimizer is one


MODEL = make_model()
SGD = torch.optim.SGD(MODEL.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"model": cross_entropy}, TypeError, "model must be a torch.nn.Module, not <function cross_entropy"),
        ({"model": [MODEL, MODEL]}, TypeError, "model must be a torch.nn.Module, not [Sequential("),
        ({"optimizer": [SGD]}, TypeError, "optimizer must be one optimizer or None, not [SGD ("),
        (
            {"optimizer": cross_entropy},
            TypeError,
            "optimizer must be one optimizer or None, not <function cross",
        ),
        ({"loss_fn": SGD}, TypeError, "loss_fn must be a callable loss_fn(model, batch), not SGD ("),
        (
            {"loss_fn": lambda batch: 0},
            TypeError,
            "loss_fn must be a callable loss_fn(model, batch), not <func",
        ),
        (
            {"loss_fn": nn.CrossEntropyLoss()},
            TypeError,
            "loss_fn must be a callable loss_fn(model, batch), not CrossEntropyLoss(), which knows no model: "
            "lambda model, batch: criterion(model(batch[0]), batch[1])",
        ),
        (
            {"make_batch": 3},
            TypeError,
            "make_batch must be a callable make_batch(n), a dataset, a DataLoader or",
        ),
        ({"clip_norm": 0}, ValueError, "clip_norm must be a positive number or None, not 0"),
        ({"clip_norm": float("nan")}, ValueError, "clip_norm must be a positive number or None, not nan"),
        ({"clip_norm": True}, ValueError, "clip_norm must be a positive number or None, not True"),
        ({"clip_norm": "1"}, ValueError, "clip_norm must be a positive number or None, not '1'"),
        (
            {"autocast": torch.float32},
            ValueError,
            "autocast must be torch.bfloat16 or torch.float16 as a dtype, not torch.float32",
        ),
        (
            {"autocast": "bf16"},
            TypeError,
            "autocast must be None, a dtype or a function without arguments that makes a context, not 'bf16'",
        ),
        (
            {"autocast": single_use()},
            TypeError,
            "autocast must be None, a dtype or a function without arguments",
        ),
        ({"autocast": torch.autocast}, TypeError, "autocast must be None, a dtype or a function without arg"),
        ({"scaler": 3}, TypeError, "scaler must be a torch.amp.GradScaler or None, not 3"),
        (
            {"optimizer": None, "scaler": torch.amp.GradScaler("cpu")},
            ValueError,
            "scaler must be None where optimizer is None, not <torch.amp",
        ),
        (
            {"state": 3},
            TypeError,
            "state must hold modules, optimizers, schedulers, scalers or tensors, not 3",
        ),
    ],
)
def test_training_errors(change: dict[str, Any], error: type[Exception], text: str) -> None:
    arguments: dict[str, Any] = {
        "model": MODEL,
        "optimizer": SGD,
        "loss_fn": cross_entropy,
        "make_batch": make_batch,
        **change,
    }
    with pytest.raises(error) as caught:
        training(**arguments)
    assert str(caught.value).startswith(text)


def test_inference_errors() -> None:
    with pytest.raises(
        TypeError, match=r"^forward must be a callable forward\(model, batch\) or None, not 3$"
    ):
        inference(MODEL, make_batch, forward=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^forward must be a callable"):
        inference(MODEL, make_batch, forward=lambda batch: 0)  # type: ignore[arg-type, misc]
    with pytest.raises(
        TypeError, match=r"^model must be a torch\.nn\.Module, not 3; several go into a Workload$"
    ):
        inference(3, make_batch)  # type: ignore[arg-type]


class Output(dict[str, Any]):
    loss = torch.zeros(())


@pytest.mark.parametrize(
    ("loss_fn", "error", "text"),
    [
        (lambda m, b: 0.5, TypeError, "loss_fn must return the loss as a tensor, not float"),
        (lambda m, b: None, TypeError, "loss_fn must return the loss as a tensor, not NoneType"),
        (
            lambda m, b: Output(),
            TypeError,
            "loss_fn must return the loss as a tensor, not Output (return its .loss)",
        ),
        (lambda m, b: m(b[0]), ValueError, "loss_fn must return a scalar loss, not a tensor of shape (4, 5)"),
        (
            lambda m, b: m(b[0]).mean().detach(),
            ValueError,
            "loss_fn must return a loss that requires grad, not one without: is the model frozen, or the "
            "loss detached or made under torch.no_grad?",
        ),
    ],
)
def test_wrong_losses(loss_fn: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        make_training(loss_fn).step(4)
    assert str(caught.value) == text
    assert loop.current_phase() == "forward"


def test_loss_with_one_element_is_accepted() -> None:
    make_training(lambda m, b: cross_entropy(m, b).reshape(1)).step(4)


def test_batch_of_the_wrong_size_stops_the_step() -> None:
    with pytest.raises(ValueError, match=r"^make_batch\(4\) returned a batch of 3\."):
        make_training(source=lambda size: make_batch(3)).step(4)
    assert loop.current_phase() == "batch"


# Memory: what virtual memory counts for a step is what it counts for the loop


def wide_model() -> nn.Module:
    """Large logits, so that keeping them too long would show."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 2048))


def wide_batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, 16), torch.randint(0, 2048, (size,))


def wide_loss(model: Any, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def peak_by_hand(size: int, *, autocast: Any, scaler: Any, clip_norm: float | None, keeps: bool) -> int:
    model = wide_model()
    optimizer = torch.optim.AdamW(model.parameters())
    gc.collect()  # what earlier tests left in cycles would be counted as alive
    with batchfit.virtual_memory("1GiB") as memory:
        for _ in range(3):
            x, y = wide_batch(size)
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cpu", dtype=autocast) if autocast else nullcontext():
                if keeps:
                    out = model(x)
                    loss = nn.functional.cross_entropy(out, y)
                else:
                    loss = nn.functional.cross_entropy(model(x), y)
            if scaler is None:
                loss.backward()
            else:
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
        return memory.peak_bytes


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("size", [1, 512])
@pytest.mark.parametrize(
    ("autocast", "scaled", "clip_norm"),
    [(None, False, None), (torch.bfloat16, False, None), (None, True, 1.0), (None, False, 0.5)],
)
def test_peak_is_the_hand_written_loops(
    size: int, autocast: Any, scaled: bool, clip_norm: float | None, keeps: bool
) -> None:
    """At 1 the optimizer holds the peak, at 512 the activations do."""
    settings: dict[str, Any] = {"autocast": autocast, "clip_norm": clip_norm}

    def scaler() -> torch.amp.GradScaler | None:
        return torch.amp.GradScaler("cpu", init_scale=4.0) if scaled else None

    expected = peak_by_hand(size, **settings, scaler=scaler(), keeps=keeps)
    model = wide_model()
    optimizer = torch.optim.AdamW(model.parameters())
    workload = training(
        model, optimizer, wide_loss, wide_batch, **settings, scaler=scaler(), keep_outputs=keeps
    )
    gc.collect()
    with batchfit.virtual_memory("1GiB") as memory, loop.running():
        for _ in range(3):
            workload.step(size)
        assert memory.peak_bytes == expected


# The examples


EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("gpt", "workload"),
        ("convnet", "workload"),
        ("huggingface", "workload"),
        ("huggingface", "generating"),
    ],
)
def test_examples_make_workloads_that_run(name: str, function: str) -> None:
    if name == "huggingface":
        pytest.importorskip("transformers", reason="needs transformers")
    source = (EXAMPLES / f"{name}.py").read_text()
    assert len(source.splitlines()) <= 150
    workload = runpy.run_path(str(EXAMPLES / f"{name}.py"))[function]()
    assert isinstance(workload, Workload)
    before = [parameter.detach().clone() for parameter in workload.model.parameters()]
    workload.step(2)
    moved = any(not torch.equal(a, b) for a, b in zip(before, workload.model.parameters(), strict=True))
    assert moved is (workload.kind == "training")


def test_batches_are_those_of_a_trial() -> None:
    """For steps of one's own: the longest samples first, and around again, collated."""
    samples = [torch.zeros(2), torch.ones(5), torch.zeros(3)]
    make = batches(samples, collate_fn=lambda some: [len(one) for one in some])
    assert make(4) == [5, 3, 2, 5]
    with pytest.raises(TypeError, match="collate_fn must be a callable"):
        batches(samples, collate_fn=3)  # type: ignore[arg-type]
