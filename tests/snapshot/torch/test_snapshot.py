"""A snapshot puts everything back, bit for bit, wherever a trial stops, and keeps nothing on the device."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from state_judge import Bag, Fault, World, fingerprint, noise, repeat, rich_model, seeded
from torch import nn
from torch.optim import lr_scheduler
from torch.utils._python_dispatch import TorchDispatchMode
from torch_private import wrapper_subclass

from batchfit._engine.snapshot.snapshot import Snapshot
from batchfit._engine.virtual_memory.memory import virtual_memory
from batchfit.errors import SnapshotError


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # small tensors: the same bits whatever else the machine does
    yield
    torch.set_num_threads(before)


# ------------------------------------------------------------------------------------- the worlds


class Counting(nn.Module):
    """A module with state in every place that Python offers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 4)
        self.calls = 0
        self.history: list[float] = []
        self.table = {"seen": {1, 2}, "shapes": [(1, 2)]}
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.register_buffer("late", None)
        self.loose = torch.zeros(2)
        self.seen = np.zeros(4)
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.history.append(float(x.detach().mean()))
        self.table["seen"].add(self.calls + 5)
        self.table["shapes"].append(tuple(x.shape))
        self.scratch += 1
        self.late = x.detach().mean(0) if self.late is None else self.late * 2
        self.loose = self.loose + 1
        self.seen[self.calls % 4] += 1
        self.cached = x.detach().clone()  # not there at first
        return self.inner(x) + torch.randn(4, generator=self.generator)


def mlp(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.ReLU(), Counting()).to(dtype)


def conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(32, 2)
    )


class MasterSGD(torch.optim.Optimizer):
    """Keeps fp32 moments for bf16 weights, in objects of its own, and counts."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.steps = 0

    def step(self, closure: Any = None) -> None:
        self.steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                kept = self.state[p].setdefault("kept", Bag(moment=torch.zeros(p.shape), count=0, log=[]))
                kept.moment.mul_(0.9).add_(p.grad.float())
                kept.count += 1
                kept.log.append((kept.count, torch.ones(1) * kept.count))
                p.add_(kept.moment.to(p.dtype), alpha=-group["lr"])

    step = torch.no_grad()(step)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True, amsgrad=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adamw-lr-tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2)),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.5, centered=True),
    "master": MasterSGD,
}


def optimizer_world(name: str, dtype: torch.dtype = torch.float32) -> World:
    model = mlp(dtype)
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[3].parameters()), "tag": ["x"]}]
    optimizer = OPTIMIZERS[name](groups)

    def step() -> None:
        optimizer.zero_grad()
        model(noise(5, 6).to(dtype)).square().mean().backward()
        optimizer.step()
        optimizer.param_groups[0]["steps"] = optimizer.param_groups[0].get("steps", 0) + 1

    return World([model, optimizer], step)


def lbfgs_world() -> World:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.LBFGS(
        model.parameters(), max_iter=3, history_size=2, line_search_fn="strong_wolfe"
    )

    def step() -> None:
        x = noise(8, 3)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(x) - 1).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)

    return World([model, optimizer], step)


def conv_world() -> World:
    """Accumulates: gradients are there between the steps."""
    model = conv()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    ema = torch.optim.swa_utils.AveragedModel(model)
    count = [0]

    def step() -> None:
        model(noise(4, 1, 6, 6)).square().mean().backward()
        count[0] += 1
        if count[0] % 2 == 0:
            optimizer.step()
            ema.update_parameters(model)
            optimizer.zero_grad(set_to_none=count[0] % 4 == 0)

    return World([model, {"optimizer": optimizer, "more": (ema,)}, count], step)


def scaler_world(optimizer_name: str = "adamw") -> World:
    model = mlp()
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120, growth_interval=2)  # overflows at first

    def step() -> None:
        optimizer.zero_grad()
        scaler.scale(model(noise(5, 6)).square().mean()).backward()
        if optimizer_name != "adamw-fused":
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    return World([model, optimizer, scaler], step)


class Decay:
    """A callable with state, as LambdaLR allows."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, epoch: int) -> float:
        self.asked += 1
        return 0.9**epoch


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "step": lambda o: lr_scheduler.StepLR(o, 2),
    "one-cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=100),
    "warm-restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[2]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, Decay()),
}


def scheduler_world(name: str) -> World:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = SCHEDULERS[name](optimizer)

    def step() -> None:
        optimizer.zero_grad()
        loss = model(noise(4, 3)).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step(*([loss.detach()] if name == "plateau" else []))

    extra = [vars(f) for f in getattr(scheduler, "lr_lambdas", [])]
    return World([model, optimizer, scheduler], step, extra)


WORLDS: dict[str, Callable[[], World]] = {
    **{name: lambda name=name: optimizer_world(name) for name in OPTIMIZERS},
    **{
        f"{name}-bf16": lambda name=name: optimizer_world(name, torch.bfloat16)
        for name in ("adamw", "adamw-foreach", "master")
    },
    "lbfgs": lbfgs_world,
    "conv": conv_world,
    "scaler": scaler_world,
    "scaler-fused": lambda: scaler_world("adamw-fused"),
    **{f"lr-{name}": lambda name=name: scheduler_world(name) for name in SCHEDULERS},
}


# ------------------------------------------------------------------------------------- the contract


@pytest.mark.parametrize("warm", [0, 1, 4])
@pytest.mark.parametrize("name", WORLDS)
def test_everything_is_restored_any_number_of_times(name: str, warm: int) -> None:
    world = seeded(WORLDS[name], warm=warm)
    before = world.fingerprint()
    snapshot = Snapshot.take(world.state)
    assert world.fingerprint() == before
    for steps in (0, 3, 1):
        for _ in range(steps):
            world.step()
        if steps:
            assert world.fingerprint() != before
        snapshot.restore()
        assert world.fingerprint() == before


@pytest.mark.parametrize("warm", [pytest.param(0, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("name", [name for name in WORLDS if name != "lbfgs"])
def test_a_trial_may_stop_after_any_operation(name: str, warm: int) -> None:
    world = seeded(WORLDS[name], warm=warm)
    before = world.fingerprint()
    snapshot = Snapshot.take(world.state)
    with Fault(-1, after=False) as counting:
        world.step()
    snapshot.restore()
    assert counting.ran > 20
    for at in range(counting.ran):
        after = at % 2 == 0
        with pytest.raises(torch.OutOfMemoryError), Fault(at, after=after):
            world.step()
        snapshot.restore()
        assert world.fingerprint() == before, f"stopped at operation {at}, after={after}"


@pytest.mark.parametrize("at", range(0, 400, 37))
def test_a_trial_of_lbfgs_may_stop_anywhere(at: int) -> None:
    world = seeded(lbfgs_world, warm=1)
    before = world.fingerprint()
    snapshot = Snapshot.take(world.state)
    with pytest.raises(torch.OutOfMemoryError), Fault(at, after=True):
        repeat(world, 50)
    snapshot.restore()
    assert world.fingerprint() == before


@pytest.mark.parametrize("outcome", ["fits", "oom", "error"])
@pytest.mark.parametrize("warm", [0, 3])
@pytest.mark.parametrize("name", WORLDS)
def test_training_goes_on_as_if_there_had_been_no_trial(name: str, warm: int, outcome: str) -> None:
    plain = seeded(WORLDS[name], warm=warm)
    for _ in range(5):
        plain.step()
    wanted = plain.fingerprint(identities=False)

    world = seeded(WORLDS[name], warm=warm)
    snapshot = Snapshot.take(world.state)
    for at in (5, 31):
        if outcome == "fits":
            world.step()
            world.step()
        elif outcome == "oom":
            with pytest.raises(torch.OutOfMemoryError), Fault(at, after=True):
                repeat(world, 3)
        else:
            world.step()
            torch.nn.functional.dropout(torch.ones(9))
        snapshot.restore()
    for _ in range(5):
        world.step()
    assert world.fingerprint(identities=False) == wanted


STAGES = ["fresh", "scaled", "unscaled", "stepped", "updated"]


@pytest.mark.parametrize("before_stage", STAGES)
@pytest.mark.parametrize("trial_stage", STAGES)
@pytest.mark.parametrize("warm", [0, 2])
def test_a_scaler_in_every_state(before_stage: str, trial_stage: str, warm: int) -> None:
    world = seeded(scaler_world, warm=warm)
    model, optimizer, scaler = world.state

    def run_until(stage: str) -> None:
        depth = STAGES.index(stage)
        if depth >= 1:
            scaler.scale(model(noise(5, 6)).square().mean()).backward()
        if depth >= 2:
            scaler.unscale_(optimizer)
        if depth >= 3:
            scaler.step(optimizer)
        if depth >= 4:
            scaler.update()

    run_until(before_stage)
    before = world.fingerprint()
    snapshot = Snapshot.take(world.state)
    for _ in range(2):
        if before_stage in ("unscaled", "stepped"):
            scaler.update()
        run_until(trial_stage)
        snapshot.restore()
        assert world.fingerprint() == before


def test_a_scaler_that_is_switched_off() -> None:
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    before = fingerprint(scaler)
    snapshot = Snapshot.take([scaler])
    scaler.update()
    snapshot.restore()
    assert fingerprint(scaler) == before


# ------------------------------------------------------------------------------------- memory


def tensors_alive() -> int:
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def test_nothing_is_kept_alive() -> None:
    model = rich_model()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    before = tensors_alive()
    snapshot = Snapshot.take([model, optimizer])
    assert tensors_alive() == before
    doomed = {
        "gradient": model[0].weight.grad,
        "moment": optimizer.state[model[0].weight]["exp_avg"],
        "buffer": model[1].running_mean,
        "in a list": model.nested["tensor"],
        "in a deque": model.queue[1],
        "in a tuple": model.pair[1],
    }
    watched = {name: weakref.ref(tensor) for name, tensor in doomed.items()}
    storages = {name: weakref.ref(tensor.untyped_storage()) for name, tensor in doomed.items()}
    before = fingerprint(model, optimizer, identities=False)
    doomed.clear()
    optimizer.zero_grad()
    optimizer.state.clear()
    model[1].running_mean = torch.zeros(4)
    model.nested, model.queue, model.pair = {}, None, ()
    gc.collect()
    assert {name for name, ref in watched.items() if ref() is not None} == set()
    assert {name for name, ref in storages.items() if ref() is not None} == set()
    snapshot.restore()
    assert fingerprint(model, optimizer, identities=False) == before
    assert model[0].weight.grad is not None


def test_what_the_trial_made_is_gone() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    snapshot = Snapshot.take([model, optimizer])
    before = tensors_alive()
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    model.cache = {"big": [torch.ones(1000)]}
    model.bias.data = torch.zeros(4)
    snapshot.restore()
    assert tensors_alive() == before


def test_it_needs_no_memory_on_a_full_device() -> None:
    """The limit leaves no byte above what was there when the snapshot was taken."""
    gc.collect()
    with virtual_memory("64MiB") as memory:
        model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
        optimizer = torch.optim.AdamW(model.parameters())

        def step() -> None:
            optimizer.zero_grad()
            model(torch.randn(64, 256)).sum().backward()
            optimizer.step()

        step()
        at_take = memory.allocated_bytes
        before = fingerprint(model, optimizer, identities=False)
        snapshot = Snapshot.take([model, optimizer])
        assert memory.allocated_bytes == at_take
        assert snapshot.host_bytes > 4 * 2 * 256 * 256 * 4
        step()
        optimizer.zero_grad()
        with torch.no_grad():
            for p in model.parameters():
                p.data = p.data + torch.ones(2, *p.shape)[0]  # swapped
        model(torch.randn(64, 256)).sum().backward()  # other gradients than those of the snapshot
        model.spare = torch.ones(1000, 100)
        optimizer.state[model[0].weight]["exp_avg"] = torch.ones(2, 256, 256)
        assert memory.allocated_bytes > at_take
        with memory.lowered(at_take):  # whatever is new must fit below that
            snapshot.restore()
        assert memory.allocated_bytes == at_take
        assert fingerprint(model, optimizer, identities=False) == before


class Watching(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_allocations_and_nothing_else() -> None:
    world = seeded(lambda: optimizer_world("adamw"), warm=2)
    model, optimizer = world.state
    before = world.fingerprint(identities=False)
    with Watching() as watching:
        snapshot = Snapshot.take(world.state)
        assert watching.seen == []
        world.step()
        watching.seen.clear()
        snapshot.restore()
        new = watching.seen.count("aten.empty.memory_format")
        assert set(watching.seen) <= {"aten.empty.memory_format"}
        assert new >= len(list(model.parameters()))  # the gradients, which zero_grad had freed
        optimizer.zero_grad(set_to_none=False)
        watching.seen.clear()
        snapshot.restore()
        assert watching.seen == []
    assert world.fingerprint(identities=False) == before


@pytest.mark.parametrize("where", ["take", "restore", "both"])
def test_inside_inference_mode(where: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with torch.inference_mode():
        model.cache = torch.ones(3)  # an inference tensor: torch forbids writing it outside
    model(torch.randn(3, 2)).sum().backward()
    with torch.inference_mode(mode=where != "restore"):
        snapshot = Snapshot.take([model])
    before = fingerprint(model, identities=False)
    with torch.inference_mode():
        model.cache.zero_()
        model(torch.randn(3, 2))
    model.zero_grad()
    with torch.inference_mode(mode=where != "take"):
        snapshot.restore()
    assert fingerprint(model, identities=False) == before
    model(torch.randn(3, 2)).sum().backward()  # a new inference tensor in `.grad` would fail here
    assert not model[0].weight.grad.is_inference()


def test_cast_copies_of_weights_are_forgotten() -> None:
    """Inside one autocast block torch casts a weight once; the copy must not outlive the restore."""
    model = nn.Linear(2, 2, bias=False)
    snapshot = Snapshot.take([model])
    with torch.autocast("cpu", torch.bfloat16):
        wanted = model(torch.ones(2)).tolist()
        torch.clear_autocast_cache()
        with torch.no_grad():
            model.weight.add_(1)
        assert model(torch.ones(2)).tolist() != wanted
        snapshot.restore()
        assert model(torch.ones(2)).tolist() == wanted


def test_under_another_default_device(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch 2.6 fails in `get_default_device` for ever after `set_default_device(None)`.
    monkeypatch.setattr(torch, "_GLOBAL_DEVICE_CONTEXT", threading.local())
    model = nn.Linear(2, 2)
    model(torch.ones(2)).sum().backward()
    before = fingerprint(model)
    torch.set_default_device("meta")
    try:
        snapshot = Snapshot.take([model])
        model.weight.data = torch.ones(3, device="cpu")
        snapshot.restore()
    finally:
        torch.set_default_device(None)
    assert fingerprint(model) == before


def test_memory_that_is_mapped_read_only_is_not_written_when_nothing_changed() -> None:
    array = np.arange(4.0)
    array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        tensor = torch.from_numpy(array)
    snapshot = Snapshot.take([tensor])
    writes: list[object] = []
    original = torch.UntypedStorage.copy_
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.UntypedStorage, "copy_", lambda *a, **k: writes.append(a) or original(*a, **k))
        snapshot.restore()
        assert writes == []
        tensor.zero_()
        snapshot.restore()
    assert len(writes) == 1
    assert tensor.tolist() == [0, 1, 2, 3]


# ------------------------------------------------------------------------------------- failures


def test_a_part_that_fails_does_not_stop_the_others() -> None:
    gc.collect()  # nothing else may be freed meanwhile
    with virtual_memory("64MiB") as memory:
        model = nn.ModuleDict({"big": nn.Linear(1024, 1024), "small": nn.Linear(4, 4)})
        for layer in model.values():
            layer(torch.ones(layer.in_features)).sum().backward()
        generator = torch.Generator().manual_seed(0)
        progress = {"epoch": 1}
        model.kept = [torch.ones(1024, 1024), 5]
        before = fingerprint(model, generator, progress, identities=False)
        snapshot = Snapshot.take([model, progress, generator])
        model.zero_grad()
        model.kept.clear()
        with torch.no_grad():
            model["small"].weight.fill_(1)
        model.eval()
        torch.rand(1, generator=generator)
        torch.rand(1)
        progress["epoch"] = 2
        with memory.lowered(memory.allocated_bytes + 2**20), pytest.raises(SnapshotError) as caught:
            snapshot.restore()
        text = str(caught.value)
        assert "state[0].big.weight.grad (" in text
        assert "state[0].kept[0] (" in text
        assert "Do not train on" in text
        assert "small" not in text
        assert caught.value.__context__ is None  # no traceback that would hold tensors
        assert model["big"].weight.grad is None
        assert model.kept == [None, 5]
        assert model["big"].training
        assert progress == {"epoch": 1}
        snapshot.restore()  # there is room now
        assert fingerprint(model, generator, progress, identities=False) == before


def test_many_failures_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [torch.ones(1) for _ in range(8)]
    snapshot = Snapshot.take(parts)
    for part in parts:
        part.zero_()

    def refuse(*args: object, **kwargs: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore lines")

    with monkeypatch.context() as patch:
        patch.setattr(torch.UntypedStorage, "copy_", refuse)
        with pytest.raises(
            SnapshotError, match=r"8 parts .*state\[0\] \(RuntimeError: CUDA.*encountered\); .* and 3 more"
        ):
            snapshot.restore()
    snapshot.restore()
    assert all(part.item() == 1 for part in parts)


def test_a_copy_that_fails_names_the_part(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(torch.UntypedStorage, "copy_", refuse)
    with pytest.raises(
        SnapshotError, match=r"state\[0\]\.weight \(Parameter\) could not be copied"
    ) as caught:
        Snapshot.take([nn.Linear(1, 1)])
    assert isinstance(caught.value.__cause__, RuntimeError)


class Hollow(torch.Tensor):
    """A tensor subclass that has no memory and does not say what it is made of."""

    @staticmethod
    def __new__(cls) -> Hollow:
        return wrapper_subclass(cls, (3,), dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


def test_a_tensor_without_memory_is_refused() -> None:
    with pytest.raises(SnapshotError, match=r"state\[0\]\.x \(Hollow\) could not be copied"):
        Snapshot.take([Bag(x=Hollow())])


# ------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512), nn.Dropout(0.5), nn.BatchNorm1d(512)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = model(torch.randn(64, 512, device="cuda")).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    def bits() -> list[Any]:
        tensors = [*model.parameters(), *model.buffers()]
        tensors += [p.grad for p in model.parameters() if p.grad is not None]
        tensors += [value for state in optimizer.state.values() for value in state.values()]
        copies = [tensor.detach().cpu().reshape(-1).view(torch.uint8).tolist() for tensor in tensors]
        return [*copies, torch.cuda.get_rng_state().tolist(), scaler.state_dict()]

    step()
    before = bits()
    at_take = torch.cuda.memory_allocated()
    snapshot = Snapshot.take([model, optimizer, scaler])
    assert torch.cuda.memory_allocated() == at_take
    for _ in range(3):
        step()
        optimizer.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        snapshot.restore()
        assert torch.cuda.max_memory_allocated() <= max(held, at_take)
        assert torch.cuda.memory_allocated() == at_take
        assert bits() == before
