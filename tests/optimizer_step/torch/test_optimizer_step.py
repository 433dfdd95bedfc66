"""`step` ends as a step by hand would, bit for bit, or says that it did not, wherever memory runs out."""

from __future__ import annotations

import gc
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from examples import some_slow
from state_judge import fingerprint
from torch.utils._python_dispatch import TorchDispatchMode
from torch_private import dispatch_mode, foreach_sqrt

from batchfit._engine.device import oom
from batchfit._engine.optimizer_step import memory as step_memory
from batchfit._engine.optimizer_step import step as stepping
from batchfit._engine.optimizer_step.step import step, warm
from batchfit._engine.virtual_memory.op_sizes import plan_of
from batchfit.errors import SnapshotError, StepInterruptedError
from batchfit.testing import count_operations, fail_at, faulty, virtual_memory

LEAVES_BYTES = 2**14  # a compiled step keeps its constants

optim = torch.optim


class Homemade(optim.Optimizer):
    """An optimizer that batchfit knows nothing of: makes its state in the middle of its step."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, {"lr": 0.1, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.9)
                state = self.state[parameter]
                if "sum" not in state:
                    state["sum"] = torch.zeros_like(parameter)
                    state["noise"] = torch.rand_like(parameter)
                state["sum"].add_(parameter.grad * parameter.grad)
                parameter.sub_(group["lr"] * parameter.grad / (state["sum"].sqrt() + 1))


@dataclass
class World:
    """Parameters, optimizers and the options of a step."""

    optimizers: list[Any]
    scaler: Any = None
    clip_norm: float | None = None
    keep: list[Any] = field(default_factory=list)

    def backward(self) -> None:
        for one in self.optimizers:
            one.zero_grad()
        parameters = [p for one in self.optimizers for g in one.param_groups for p in g["params"]]
        loss = sum(((p * torch.randn_like(p)).sin().sum() for p in parameters), torch.zeros(()))
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def by_hand(self) -> torch.Tensor | None:
        """What `step` promises to do."""
        norm = None
        if self.clip_norm is not None:
            for one in self.optimizers:
                if self.scaler is not None:
                    self.scaler.unscale_(one)
            parameters = [p for one in self.optimizers for g in one.param_groups for p in g["params"]]
            norm = torch.nn.utils.clip_grad_norm_(parameters, self.clip_norm)
        for one in self.optimizers:
            if self.scaler is None:
                one.step()
            else:
                self.scaler.step(one)
        if self.scaler is not None:
            self.scaler.update()
        return norm

    def ours(self, *, rollback: bool = False) -> torch.Tensor | None:
        many = len(self.optimizers) > 1
        optimizer = self.optimizers if many else self.optimizers[0]
        return step(optimizer, scaler=self.scaler, clip_norm=self.clip_norm, rollback=rollback)

    def fingerprint(self, *, identities: bool = False) -> object:
        return fingerprint(*self.optimizers, self.scaler, identities=identities)


def tensors(*shapes: tuple[int, ...]) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]


SHAPES = [(4, 6), (5, 3), (7, 2)]


def world(cls: Any, *, scaled: bool = False, clip_norm: float | None = None, **options: Any) -> World:
    torch.manual_seed(0)
    groups = [{"params": tensors(*SHAPES[:2])}, {"params": tensors(*SHAPES[2:]), "lr": 0.03}]
    made = [cls(groups, **options)]
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0) if scaled else None
    return World(made, scaler, clip_norm)


def gan(**options: Any) -> World:
    torch.manual_seed(0)
    first = optim.AdamW(tensors((4, 6), (5,)), foreach=True)
    return World([first, optim.SGD(tensors((3, 3), (6,)), lr=0.1, momentum=0.9)], **options)


def trained(make: Callable[[], World], steps: int, *, ours: bool = False) -> World:
    """The world after that many steps, with the gradients of the next one."""
    made = make()
    for _ in range(steps):
        made.backward()
        if ours:
            made.ours()
        else:
            made.by_hand()
    made.backward()
    return made


EVERY: dict[str, Callable[[], World]] = {}


def case(name: str, cls: Any, **options: Any) -> None:
    EVERY[f"{name}-{'-'.join(f'{k}={v}' for k, v in options.items())}"] = lambda: world(cls, **options)


for mode in ({}, {"foreach": True}, {"foreach": False}):
    for more in ({}, {"maximize": True, "weight_decay": 0.1}):
        plain: dict[str, Any] = {**mode, **more}
        case("AdamW", optim.AdamW, **plain)
        case("Adam", optim.Adam, amsgrad=True, **plain)
        case("SGD", optim.SGD, lr=0.1, **plain)
        case("SGD", optim.SGD, lr=0.1, momentum=0.9, dampening=0.5, **plain)
        case("SGD", optim.SGD, lr=0.1, momentum=0.9, nesterov=True, **plain)
        case("RMSprop", optim.RMSprop, momentum=0.9, centered=True, **plain)
        case("Adagrad", optim.Adagrad, **plain)
        case("Adadelta", optim.Adadelta, **plain)
        case("Adamax", optim.Adamax, **plain)
        case("NAdam", optim.NAdam, **plain)
        case("RAdam", optim.RAdam, **plain)
        case("ASGD", optim.ASGD, **plain)
        case("Adafactor", optim.Adafactor, **plain)
        if not more:
            case("Rprop", optim.Rprop, **plain)
for fused_options in ({}, {"maximize": True, "weight_decay": 0.1}):
    case("Adam", optim.Adam, fused=True, amsgrad=True, **fused_options)
    case("AdamW", optim.AdamW, fused=True, **fused_options)
    case("SGD", optim.SGD, fused=True, lr=0.1, momentum=0.9, **fused_options)
    case("Adagrad", optim.Adagrad, fused=True, **fused_options)
if hasattr(optim, "Muon"):
    case("Muon", optim.Muon)
case("Homemade", Homemade)

# Where a fault is put at every operation.
FAULTED: dict[str, Callable[[], World]] = {
    "foreach": lambda: world(optim.AdamW, foreach=True),
    "single": lambda: world(optim.AdamW, foreach=False),
    "fused": lambda: world(optim.AdamW, fused=True),
    "momentum": lambda: world(optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1, foreach=True),
    "scaled": lambda: world(optim.AdamW, foreach=True, scaled=True),
    "scaled fused": lambda: world(optim.AdamW, fused=True, scaled=True),
    "clipped": lambda: world(optim.SGD, lr=0.1, momentum=0.9, clip_norm=0.5),
    "scaled and clipped": lambda: world(optim.AdamW, foreach=True, scaled=True, clip_norm=0.5),
    "gan": lambda: gan(clip_norm=0.5, scaler=torch.amp.GradScaler("cpu", init_scale=256.0)),
    "homemade": lambda: world(Homemade),
}


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, logger="batchfit")


@pytest.fixture
def recorded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second step on nothing is recorded, as after eight."""
    monkeypatch.setattr(stepping, "RECORDED_STEPS", 1)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("rollback", [False, True])
def test_equals_a_step_by_hand(name: str, rollback: bool) -> None:
    theirs, ours = EVERY[name](), EVERY[name]()
    for number in range(3):
        for one in (theirs, ours):
            torch.manual_seed(number)
            one.backward()
        torch.manual_seed(9)
        theirs.by_hand()
        expected = theirs.fingerprint()
        torch.manual_seed(9)
        assert ours.ours(rollback=rollback) is None
        assert ours.fingerprint() == expected


@pytest.mark.parametrize("name", [*FAULTED])
def test_equals_a_step_by_hand_with_a_scaler_and_clipping(name: str) -> None:
    for clip_norm in (None, 0.5):
        theirs, ours = FAULTED[name](), FAULTED[name]()
        for one in (theirs, ours):
            one.clip_norm = clip_norm
            one.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
        for number in range(4):
            norms = []
            for one in (theirs, ours):
                torch.manual_seed(number)
                one.backward()
                norms.append(one.ours() if one is ours else one.by_hand())
            assert ours.fingerprint() == theirs.fingerprint()
            assert norms[0] is norms[1] is None or torch.equal(*norms)  # type: ignore[arg-type]


def test_sparse_gradients() -> None:
    def made() -> World:
        torch.manual_seed(0)
        table = torch.nn.Embedding(10, 3, sparse=True)
        return World([optim.SparseAdam(table.parameters())], keep=[table])

    ends = []
    for ours in (False, True):
        one = made()
        for _ in range(2):
            one.optimizers[0].zero_grad()
            one.keep[0](torch.tensor([1, 2, 2])).sum().backward()
            if ours:
                one.ours(rollback=False)
            else:
                one.by_hand()
        ends.append(one.fingerprint())
    assert ends[0] == ends[1]


def outcome(made: World, rollback: bool, expected: object) -> str:
    """Take the step and check what the contract says about the way in which it ended."""
    before = made.fingerprint(identities=True)
    error: BaseException | None = None
    try:
        made.ours(rollback=rollback)
    except (StepInterruptedError, torch.OutOfMemoryError) as caught:
        error = caught.with_traceback(None)
    if error is None:
        assert made.fingerprint() == expected
        return "stepped"
    assert oom.classify(error) == "oom"  # a trial counts it as one
    if isinstance(error, StepInterruptedError):
        assert not rollback
        assert {"weights", "gradients"} <= {name for name, size in error.holders if size > 0}
        assert f"Most of what was held: {error.holders[0][0]} " in str(error)
        assert "batchfit why oom.pickle" in str(error)
        return error.phase
    assert "nothing has moved" in str(error)
    assert made.fingerprint(identities=True) == before
    return "unchanged"


# The others are parts of these ("gan" is foreach, with momentum, a scaler and clipping).
COVERING = ("foreach", "single", "fused", "homemade", "gan")
faulted = pytest.mark.parametrize("name", some_slow(FAULTED, is_slow=lambda name: name not in COVERING))


@pytest.mark.parametrize("steps", [0, 1], ids=["first", "warm"])
@faulted
@pytest.mark.usefixtures("recorded_once")
def test_a_fault_at_every_operation(name: str, steps: int) -> None:
    judged = trained(FAULTED[name], steps)
    judged.by_hand()
    expected = judged.fingerprint()
    with virtual_memory("1GiB"):
        for rollback in (False, True):
            made = trained(FAULTED[name], steps, ours=True)
            with count_operations() as counted:
                made.ours(rollback=rollback)
            count = counted.operations
            seen: Counter[str] = Counter()
            for at in range(count):
                made = trained(FAULTED[name], steps, ours=True)
                with fail_at(at) as fault:
                    seen[outcome(made, rollback, expected)] += 1
                assert fault.fired
            assert seen.total() == count > 2
            if rollback or (name == "homemade" and steps == 0):
                assert seen == {"stepped": count}
            else:
                assert seen["stepped"] > 0 or (name == "fused" and steps)  # a fault in the preparation
                assert seen["parameters"] > 0
                assert not seen["unchanged"]


class Full(TorchDispatchMode):
    """From the n-th operation that allocates on, none of them can."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.left = at

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if plan_of(func) > 2:  # neither a view nor in place
            self.left -= 1
            if self.left < 0:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", some_slow(FAULTED, is_slow=lambda name: name not in COVERING[:3]))
def test_memory_that_stays_full(name: str) -> None:
    for steps in (0, 1):
        judged = trained(FAULTED[name], steps)
        judged.by_hand()
        expected = judged.fingerprint()
        for rollback in (False, True):
            seen: Counter[str] = Counter()
            with virtual_memory("1GiB"):
                for at in range(200):
                    made = trained(FAULTED[name], steps, ours=True)
                    with Full(at):
                        seen[outcome(made, rollback, expected)] += 1
                    if seen["stepped"]:
                        break
            assert seen["stepped"] == 1
            assert seen["unchanged"] or steps or name == "fused"


@faulted
def test_caps(name: str, living_bytes: int) -> None:
    """Real pressure: no cap leaves a half step, since memory is reserved or the step is protected."""
    for steps in (0, 1):
        judged = trained(FAULTED[name], steps)
        judged.by_hand()
        expected = judged.fingerprint()
        del judged
        seen: Counter[str] = Counter()
        with virtual_memory("1GiB") as memory:
            for spare in range(20):
                made = trained(FAULTED[name], steps, ours=True)
                gc.collect()
                held = memory.allocated_bytes
                with memory.lowered(held + spare * 1024):
                    ended = outcome(made, False, expected)
                gc.collect()
                if ended == "unchanged":
                    assert memory.allocated_bytes == held, "the failed step has left memory behind"
                seen[ended] += 1
                del made
        assert set(seen) <= {"stepped", "unchanged"}
        assert seen["stepped"]
        assert seen["unchanged"] or steps or name == "fused"


def test_caps_are_found_out_before_the_copy() -> None:
    """With room for the temporaries no host copy is made, with less one is, and the step is the same."""
    made = trained(lambda: world(optim.AdamW, foreach=True), 1, ours=True)
    taken: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        copied = stepping.copy_state
        patch.setattr(stepping, "copy_state", lambda work: taken.append(1) or copied(work))
        with virtual_memory("1GiB") as memory:
            gc.collect()
            with memory.lowered(memory.allocated_bytes + 512 * 3):
                made.ours()
            assert taken == []
            made.backward()
            gc.collect()
            with (
                memory.lowered(memory.allocated_bytes + 512),
                pytest.raises(torch.OutOfMemoryError, match="nothing"),
            ):
                made.ours()
            assert taken == [1]


@pytest.mark.parametrize("name", FAULTED)
def test_no_memory_stays_behind(name: str) -> None:
    kept: list[object] = []
    for rollback in (False, True):
        made = trained(FAULTED[name], 2, ours=True)
        with virtual_memory("1GiB") as memory:
            before = memory.allocated_bytes
            for at in (1, 2, 4):
                with fail_at(at):
                    try:
                        made.ours(rollback=rollback)
                    except StepInterruptedError as error:
                        kept.append(error)  # as a user might
                        made.optimizers[0].zero_grad()
                        made.backward()
                assert memory.allocated_bytes <= before
        kept.clear()


def test_what_an_interrupted_step_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(made: World, at: int) -> StepInterruptedError:
        with fail_at(at), pytest.raises(StepInterruptedError) as caught:
            made.ours()
        return caught.value

    # Without a dispatch mode, under which torch counts no versions: these say what has certainly moved.
    for parameters, names in (
        (
            [{"params": tensors((4, 6), (5, 3))}, {"params": tensors((7, 2))}],
            ("group 0 parameter 0", "group 0"),
        ),
        (torch.nn.Linear(2, 2).named_parameters(), ("weight", "bias")),
    ):
        made = trained(lambda given=parameters: World([optim.AdamW(given, foreach=True)]), 9, ours=True)  # type: ignore[misc]
        with monkeypatch.context() as patch:
            patch.setattr(torch, "_foreach_sqrt", faulty(foreach_sqrt, {0: "oom"}))
            with pytest.raises(StepInterruptedError) as caught:
                made.ours()
        error = caught.value
        assert error.phase == "parameters"
        assert len(error.moved) == 2
        assert error.moved[0] == names[0]
        assert error.moved[1].startswith(names[1])
        text = str(error)
        assert f"any of its {error.parameters} parameters may have moved, and 2 certainly have" in text
        assert "load a checkpoint" in text
        assert "rollback=True" in text
        assert "Tried to allocate" in text

    several = trained(gan, 9, ours=True)
    with count_operations() as seen:
        several.optimizers[0].step()
    error = interrupted(trained(gan, 9, ours=True), seen.operations + 1)
    assert (error.phase, error.interrupted) == ("parameters", 1)
    assert "SGD (optimizer 2 of 2)" in str(error)
    assert "AdamW had stepped already" in str(error)

    clipped = trained(FAULTED["scaled and clipped"], 9, ours=True)
    error = interrupted(clipped, 1)
    assert error.phase == "gradients"
    assert "zero_grad" in str(error)


@pytest.mark.parametrize("name", ["scaled", "scaled fused", "scaled and clipped"])
@pytest.mark.usefixtures("recorded_once")
def test_training_goes_on_after_an_interrupted_step(name: str) -> None:
    """The user loads a checkpoint and does the batch again: the scaler has forgotten the failed step."""
    judged = trained(FAULTED[name], 1)
    judged.by_hand()
    expected = judged.fingerprint()
    with count_operations() as counted:
        trained(FAULTED[name], 1, ours=True)
        before = counted.operations
        trained(FAULTED[name], 1, ours=True).ours()
    phases: Counter[str] = Counter()
    for at in range(counted.operations - 2 * before):
        made = trained(FAULTED[name], 0)
        made.ours()
        checkpoint, rng = [value.detach().clone() for value in values(made)], torch.get_rng_state()
        made.backward()
        with fail_at(at), pytest.raises(StepInterruptedError) as caught:
            made.ours()
        phases[caught.value.phase] += 1
        if caught.value.phase == "scaler":
            made.scaler.update()
        else:
            for now, old in zip(values(made), checkpoint, strict=True):
                now.data.copy_(old)
            torch.set_rng_state(rng)
            made.backward()
            made.ours()
        assert made.fingerprint() == expected
    assert phases["parameters"]
    assert phases["scaler"]
    assert phases["gradients"] or name == "scaled fused"


def values(made: World) -> list[torch.Tensor]:
    """Parameters and optimizer state, as a checkpoint holds them."""
    found = [p for one in made.optimizers for group in one.param_groups for p in group["params"]]
    return found + [
        value for one in made.optimizers for held in one.state.values() for value in held.values()
    ]


def test_inf_gradients_skip_the_step_and_are_not_learned_from() -> None:
    for name in ("scaled", "scaled fused", "scaled and clipped"):
        theirs, ours = FAULTED[name](), FAULTED[name]()
        for number in range(3):
            for one in (theirs, ours):
                torch.manual_seed(number)
                one.backward()
                if number != 1:
                    one.optimizers[0].param_groups[0]["params"][0].grad[0, 0] = torch.inf
                if one is ours:
                    one.ours()
                else:
                    one.by_hand()
            assert ours.scaler.get_scale() == theirs.scaler.get_scale()
            plan = next(iter(stepping.plans_by_optimizer[ours.optimizers[0]].by_kind.values()))
            assert plan.steps == (number >= 1)
        assert ours.fingerprint() == theirs.fingerprint()


def test_gradients_that_the_user_has_unscaled() -> None:
    theirs, ours = FAULTED["scaled and clipped"](), FAULTED["scaled and clipped"]()
    for one in (theirs, ours):
        torch.manual_seed(1)
        one.backward()
    theirs.by_hand()
    ours.scaler.unscale_(ours.optimizers[0])
    ours.ours()
    assert ours.fingerprint() == theirs.fingerprint()


def test_parameters_that_join_later_get_their_state_before_the_step() -> None:
    made = world(optim.AdamW, foreach=True)
    late = made.optimizers[0].param_groups[1]["params"][0]
    made.backward()
    late.grad = None
    made.ours()
    assert late not in made.optimizers[0].state
    made.backward()
    with virtual_memory("1GiB"):
        before = made.fingerprint(identities=True)
        with Full(0), pytest.raises(torch.OutOfMemoryError, match="nothing has moved"):
            made.ours()
        assert made.fingerprint(identities=True) == before
        made.ours()
    assert late in made.optimizers[0].state


def test_warm_makes_all_state_and_moves_nothing() -> None:
    made = trained(lambda: world(optim.AdamW), 0)
    parameters = [p.detach().clone() for g in made.optimizers[0].param_groups for p in g["params"]]
    warm(made.optimizers)
    assert len(made.optimizers[0].state) == 3
    now = [p for g in made.optimizers[0].param_groups for p in g["params"]]
    assert all(map(torch.equal, parameters, now))


def test_hooks_run_once_and_schedulers_do_not_warn() -> None:
    made = world(optim.AdamW)
    optimizer = made.optimizers[0]
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    for number in range(3):
        made.backward()
        made.ours(rollback=number == 2)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            scheduler.step()
    assert calls == ["pre", "post"] * 3


def test_a_hook_that_comes_between_makes_the_first_step_protected() -> None:
    def made() -> World:
        one = world(optim.Rprop, lr=0.01)
        optimizer = one.optimizers[0]
        optimizer.register_step_pre_hook(lambda *_: optimizer.param_groups[0].update(lr=0.5))
        return one

    theirs, ours = trained(made, 0), trained(made, 0)
    theirs.by_hand()
    ours.ours()
    assert ours.fingerprint() == theirs.fingerprint()


@pytest.mark.parametrize("kind", ["error", "interrupt"])
def test_other_errors_come_out_unchanged(kind: str) -> None:
    for rollback in (False, True):
        made = trained(FAULTED["scaled and clipped"], 1, ours=True)
        before = made.fingerprint(identities=True)
        wanted = KeyboardInterrupt if kind == "interrupt" else RuntimeError
        with fail_at(20, error=kind) as fault, pytest.raises(wanted) as caught:
            made.ours(rollback=rollback)
        assert fault.fired
        assert type(caught.value) is wanted
        assert (made.fingerprint(identities=True) == before) == rollback


def test_no_room_for_the_copy_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    from batchfit._engine.device.device import Ram

    monkeypatch.setattr(stepping, "read_ram", lambda: Ram(10, 10))
    made = trained(FAULTED["foreach"], 0)
    before = made.fingerprint(identities=True)
    with pytest.raises(SnapshotError, match="host memory is available"):
        made.ours(rollback=True)
    assert made.fingerprint(identities=True) == before
    with virtual_memory("1GiB") as memory:
        gc.collect()
        # room for the state (two moments, a step count each), none for temporaries
        cap = memory.allocated_bytes + 512 * 9
        with memory.lowered(cap), pytest.raises(torch.OutOfMemoryError, match="nor the state copied"):
            made.ours()
    assert made.fingerprint(identities=True) == before


def test_a_compiled_step_is_called_and_not_recorded() -> None:
    made = trained(FAULTED["foreach"], 0)
    optimizer = made.optimizers[0]
    inner, calls = optimizer.step, []

    def compiled() -> None:
        calls.append(dispatch_mode())
        inner()

    compiled._torchdynamo_orig_callable = inner  # type: ignore[attr-defined]
    optimizer.step = compiled
    for _ in range(2):
        made.ours()
        made.backward()
    assert calls == [None, None]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it loads its compiler
def test_a_really_compiled_step() -> None:
    theirs, ours = (trained(lambda: world(optim.AdamW, foreach=True), 0) for _ in range(2))
    for one in (theirs, ours):
        one.optimizers[0].step = torch.compile(one.optimizers[0].step, backend="eager")
    theirs.by_hand()
    ours.ours()
    assert all(
        torch.equal(a, b)
        for one, other in zip(theirs.optimizers[0].param_groups, ours.optimizers[0].param_groups, strict=True)
        for a, b in zip(one["params"], other["params"], strict=True)
    )


def test_wrong_arguments() -> None:
    made = trained(FAULTED["foreach"], 0)
    optimizer = made.optimizers[0]
    with pytest.raises(TypeError, match=r"optimizer must be a torch\.optim\.Optimizer, not None"):
        step(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="optimizer must be an optimizer or a list"):
        step([])
    with pytest.raises(ValueError, match="not name one twice"):
        step([optimizer, optimizer])
    with pytest.raises(ValueError, match="without a closure, not LBFGS"):
        step(optim.LBFGS(tensors((2, 2))))
    with pytest.raises(TypeError, match=r"scaler must be a torch\.amp\.GradScaler"):
        step(optimizer, scaler=1)  # type: ignore[arg-type]
    for bad in (0, -1.0, float("nan"), True, "1"):
        with pytest.raises(ValueError, match="clip_norm must be a number above 0"):
            step(optimizer, clip_norm=bad)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="rollback must be True or False"):
        step(optimizer, rollback=1)  # type: ignore[arg-type]


@contextmanager
def recorded() -> Iterator[list[int]]:
    found: list[int] = []
    recorder = step_memory.StorageRecorder()
    with recorder:
        yield found
    found.append(recorder.need([]).total_bytes)


def test_what_is_recorded_is_the_peak_of_all_but_the_state() -> None:
    optimizer = optim.AdamW(tensors((2, 2)))
    with recorded() as found:
        a = torch.empty(5120, dtype=torch.uint8)
        b = torch.empty(2048, dtype=torch.uint8)
        del a
        c = torch.empty(700, dtype=torch.uint8)
        c.view(7, 100).add_(1)
        del b, c
    assert found == [5120 + 2048]

    recorder = step_memory.StorageRecorder()
    with recorder:
        norm = torch.empty(7, dtype=torch.uint8)
        optimizer.state[optimizer.param_groups[0]["params"][0]] = {"sum": torch.empty(1000)}
        assert torch.empty(3, dtype=torch.uint8).is_contiguous()
    assert recorder.need([optimizer]).total_bytes == 2 * 512
    del norm


@pytest.mark.parametrize("name", [name for name in EVERY if not name.startswith("Homemade")])
def test_the_guess_is_never_low(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.SHAPES", [(64, 96), (64, 64), (32, 16)])  # whole blocks
    monkeypatch.setattr(step_memory, "_SCALAR", 0)
    for steps in (0, 6):
        made = trained(EVERY[name], steps)
        optimizer = made.optimizers[0]
        late = sum(
            p.numel() * p.element_size()
            for group in optimizer.param_groups
            for p in group["params"]
            if step_memory.makes_buffer_late(optimizer, group, p)
        )
        guessed = step_memory.guess(made.optimizers, small=False).total_bytes
        warm(optimizer)
        recorder = step_memory.StorageRecorder()
        with recorder:
            optimizer.step()
        scalars = 512 * 40  # left out of this guess: step counts, norms
        assert recorder.need([optimizer]).total_bytes <= guessed - late // 2 + scalars


def test_state_is_there_when_the_first_step_begins() -> None:
    made = trained(lambda: world(optim.Adam, foreach=False), 0)
    optimizer = made.optimizers[0]
    inner, seen = optimizer.step, []

    def spy() -> None:
        seen.append([sorted(state) for state in optimizer.state.values()])
        inner()

    optimizer.step = spy
    made.ours()
    assert seen == [[["exp_avg", "exp_avg_sq", "step"]] * 3]


def test_cuda_is_asked_for_blocks_of_its_segments_unless_its_cache_is_ample(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mib = 2**20
    sizes = (100, *[mib // 2] * 3, *[3 * mib] * 8, 147 * mib)
    blocks = step_memory.DeviceBlocks(torch.device("cuda:0"), sizes)
    small, large = [mib] * 2, [20 * mib] * 2 + [148 * mib]

    def asked(small_free: int, large_free: int) -> list[int]:
        free = {"small_pool": small_free, "large_pool": large_free}
        stats = {
            "reserved_bytes": {pool: {"current": 7 * mib + room} for pool, room in free.items()},
            "active_bytes": {pool: {"current": 7 * mib} for pool in free},
        }
        monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: stats)
        return list(step_memory.blocks_not_cached(blocks))

    assert asked(0, 0) == small + large
    assert asked(4 * mib, 0) == large
    assert asked(0, 2 * (24 + 148) * mib) == small
    assert asked(0, 2 * (24 + 148) * mib - 1) == small + large
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: {})  # cudaMallocAsync
    assert list(step_memory.blocks_not_cached(blocks)) == small + large
