"""The learning rate follows the batch size: equal to the closed form under torch's LR schedulers."""

from __future__ import annotations

import copy
import gc
import io
import logging
import pickle
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import SGD, AdamW, Optimizer, lr_scheduler

from batchfit import BatchSizeScheduler
from batchfit._schedule.learning_rate import BASE, FACTOR, RULE, ScaledLR

RATE = 0.1
STEPS = 40
quick = examples(60)


def optimizer_of(*rates: float, kind: type[Optimizer] = SGD, **keywords: Any) -> Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "lr": rate} for rate in rates or (RATE,)]
    return kind(groups, lr=RATE, **keywords)  # type: ignore[call-arg]


def rates_of(optimizer: Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


class ReducesItself(lr_scheduler.StepLR):
    def __reduce__(self) -> Any:
        return object.__new__, (type(self),), self.__dict__


class CopiesItself(lr_scheduler.StepLR):
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        one = object.__new__(type(self))
        one.__dict__.update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
        return one


class NestsItsState(lr_scheduler.StepLR):
    def state_dict(self) -> dict[str, Any]:
        return {"attributes": {name: value for name, value in vars(self).items() if name != "optimizer"}}


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 7, gamma=0.3),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [5, 11, 30], gamma=0.5),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=STEPS, eta_min=1e-3),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=9, T_mult=2),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.95),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, start_factor=0.1, total_iters=12),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=STEPS, power=2.0),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=1.0, total_steps=STEPS + 1),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, base_lr=0.01, max_lr=0.5, step_size_up=6),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 0.1, total_iters=8), lr_scheduler.CosineAnnealingLR(o, T_max=STEPS)],
        milestones=[8],
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.2, total_iters=5), lr_scheduler.ExponentialLR(o, 0.97)]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=2),
}
RULES = {"linear": 1.0, "sqrt": 0.5, "seesaw": -0.5, "none": 0.0, "power(0.7)": 0.7}
# Up, down, back to where it was, and a size that is no power of two times the first.
RATIOS = [1.0] * 5 + [2.0] * 6 + [6.0] * 7 + [0.5] * 5 + [1.0] * 6 + [3.0] * 11


def advance(optimizer: Optimizer, scheduler: Any) -> None:
    optimizer.step()
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        scheduler.step(1.0)
    else:
        scheduler.step()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_under_torchs_schedulers_it_is_the_closed_form(name: str, rule: str) -> None:
    """The same LR scheduler alone, times ratio ** exponent, at every step."""
    alone = optimizer_of(RATE, 0.03, momentum=0.9)
    reference = SCHEDULERS[name](alone)
    optimizer = optimizer_of(RATE, 0.03, momentum=0.9)
    scheduler = SCHEDULERS[name](optimizer)
    lr = ScaledLR(optimizer, rule, lr_schedulers=[scheduler])
    for ratio in RATIOS:
        factors = lr.set_ratio(ratio)
        assert factors == (ratio ** RULES[rule],) * 2
        expected = [rate * ratio ** RULES[rule] for rate in rates_of(alone)]
        assert rates_of(optimizer) == expected  # bit for bit
        assert [g["momentum"] for g in optimizer.param_groups] == [g["momentum"] for g in alone.param_groups]
        advance(alone, reference)
        advance(optimizer, scheduler)
    assert scheduler.state_dict().keys() == reference.state_dict().keys()


def test_the_trap_that_this_is_for() -> None:
    """Writing base * factor under a recursive scheduler multiplies the factor into every later value."""
    optimizer = optimizer_of(1.0)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.9)
    lr = ScaledLR(optimizer, "linear", lr_schedulers=[scheduler])
    seen = []
    for ratio in (1, 1, 2, 2, 2):
        lr.set_ratio(ratio)
        seen.append(round(rates_of(optimizer)[0], 3))
        advance(optimizer, scheduler)
    assert seen == [1.0, 0.9, 1.62, 1.458, 1.312]


@quick
@given(
    st.lists(
        st.tuples(st.sampled_from(["ratio", "step", "twice", "inside"]), st.floats(0.01, 100)), max_size=25
    ),
    st.sampled_from(sorted(RULES)),
)
def test_any_order_of_calls_is_the_closed_form(calls: list[tuple[str, float]], rule: str) -> None:
    optimizer, alone = optimizer_of(), optimizer_of()
    scheduler, reference = (lr_scheduler.ExponentialLR(o, 0.93) for o in (optimizer, alone))
    lr = ScaledLR(optimizer, rule, lr_schedulers=[scheduler])
    ratio = 1.0
    for what, value in calls:
        if what == "step":
            advance(optimizer, scheduler)
            advance(alone, reference)
        elif what == "inside":
            with lr.untouched(), lr.untouched():
                assert rates_of(optimizer) == rates_of(alone)
        else:
            ratio = value
            lr.set_ratio(ratio)
            if what == "twice":
                lr.set_ratio(ratio)
        assert rates_of(optimizer) == [rate * ratio ** RULES[rule] for rate in rates_of(alone)]
    lr.close()
    assert rates_of(optimizer) == rates_of(alone)
    assert not {FACTOR, BASE} & optimizer.param_groups[0].keys()


class TestGroups:
    def test_one_rule_each(self) -> None:
        optimizer = optimizer_of(1.0, 1.0, 1.0)
        optimizer.param_groups[2][RULE] = "linear"
        lr = ScaledLR(optimizer, ["sqrt", "none", "sqrt"])
        assert lr.set_ratio(4.0) == (2.0, 1.0, 4.0)
        assert rates_of(optimizer) == [2.0, 1.0, 4.0]
        assert FACTOR not in optimizer.param_groups[1]

    def test_a_group_that_comes_later(self) -> None:
        optimizer = optimizer_of(1.0)
        lr = ScaledLR(optimizer, "linear")
        lr.set_ratio(2.0)
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "lr": 5.0})
        lr.set_ratio(2.0)
        assert rates_of(optimizer) == [2.0, 10.0]

    def test_wrong_rules(self) -> None:
        with pytest.raises(ValueError, match="lr must have one rule for each of 2 groups, not 1"):
            ScaledLR(optimizer_of(1.0, 1.0), ["sqrt"])
        optimizer = optimizer_of(1.0, 1.0)
        optimizer.param_groups[1][RULE] = "cubic"
        with pytest.raises(ValueError, match=r"batchfit_lr_rule of group 1 must be 'none'.* not 'cubic'"):
            ScaledLR(optimizer, "sqrt")
        optimizer = optimizer_of(1.0)
        lr = ScaledLR(optimizer, ["sqrt"])
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
        with pytest.raises(ValueError, match="lr must have a rule for group 1, which was added later"):
            lr.set_ratio(2.0)


class TestTensors:
    @pytest.mark.parametrize("name", ["ExponentialLR", "CosineAnnealingLR", "StepLR", "LinearLR"])
    def test_a_tensor_rate_is_changed_in_place(self, name: str) -> None:
        def made() -> Optimizer:
            return AdamW([torch.nn.Parameter(torch.ones(2))], lr=torch.tensor(RATE), capturable=False)

        alone, optimizer = made(), made()
        reference, scheduler = SCHEDULERS[name](alone), SCHEDULERS[name](optimizer)
        lr = ScaledLR(optimizer, "sqrt", lr_schedulers=[scheduler])
        tensor = optimizer.param_groups[0]["lr"]
        for ratio in RATIOS:
            lr.set_ratio(ratio)
            expected = alone.param_groups[0]["lr"] * ratio**0.5
            assert torch.equal(optimizer.param_groups[0]["lr"], expected)
            advance(alone, reference)
            advance(optimizer, scheduler)
        assert optimizer.param_groups[0]["lr"] is tensor


def saved(*things: Any) -> list[Any]:
    """Through a file, as a checkpoint goes."""
    buffer = io.BytesIO()
    torch.save([thing.state_dict() for thing in things], buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)  # type: ignore[no-any-return]


class TestCheckpoints:
    @pytest.mark.parametrize("name", sorted(set(SCHEDULERS) - {"LambdaLR", "MultiplicativeLR"}))
    @pytest.mark.parametrize("order", ["before", "after"])
    def test_a_resume_does_not_compound(self, name: str, order: str) -> None:
        def made() -> tuple[Optimizer, Any, ScaledLR]:
            optimizer = optimizer_of(momentum=0.9)
            scheduler = SCHEDULERS[name](optimizer)
            return optimizer, scheduler, ScaledLR(optimizer, "sqrt", lr_schedulers=[scheduler])

        optimizer, scheduler, lr = made()
        for ratio in RATIOS[:15]:
            lr.set_ratio(ratio)
            advance(optimizer, scheduler)
        state = saved(optimizer, scheduler)
        again, scheduler_again, lr_again = made()
        if order == "before":
            lr_again.set_ratio(RATIOS[14])
        again.load_state_dict(state[0])
        scheduler_again.load_state_dict(state[1])
        assert rates_of(again) == rates_of(optimizer)
        for ratio in RATIOS[14:]:
            lr.set_ratio(ratio)
            lr_again.set_ratio(ratio)
            assert rates_of(again) == rates_of(optimizer)
            advance(optimizer, scheduler)
            advance(again, scheduler_again)

    @pytest.mark.parametrize("is_late", [False, True])
    @pytest.mark.parametrize("is_tensor", [False, True])
    def test_a_checkpoint_of_shards_that_kept_the_rates_and_not_our_marks(
        self, is_late: bool, is_tensor: bool
    ) -> None:
        """As torch.distributed.checkpoint loads: only what a group has already. Factors do not compound."""

        def made(rate: float) -> tuple[Optimizer, BatchSizeScheduler]:
            optimizer = optimizer_of(rate)
            if is_tensor:
                optimizer.param_groups[0]["lr"] = torch.tensor(rate, dtype=torch.float64)
            return optimizer, BatchSizeScheduler("0:8 2:32", 8, lr="sqrt", optimizer=optimizer)

        optimizer, scheduler = made(0.1)
        scheduler.step(3)
        (state,) = saved(scheduler)
        again, resumed = made(rates_of(optimizer)[0])
        if is_late:
            resumed.step(3)  # a loader that stands there has moved the size: the factor is in twice
        resumed.load_state_dict(state)
        for epoch in (3, 1, 4):
            scheduler.step(epoch)
            resumed.step(epoch)
            assert rates_of(again) == rates_of(optimizer)
            assert rates_of(again)[0] == pytest.approx(0.1 if epoch < 2 else 0.2)

    def test_a_checkpoint_from_before_batchfit(self) -> None:
        plain = optimizer_of(0.7)
        optimizer = optimizer_of()
        lr = ScaledLR(optimizer, "linear")
        lr.set_ratio(3.0)
        optimizer.load_state_dict(plain.state_dict())
        lr.set_ratio(2.0)
        assert rates_of(optimizer) == [1.4]


class Slotted(lr_scheduler.ExponentialLR):
    """Has a slot beside its `__dict__`: pickle takes a pair for its state."""

    __slots__ = ("held",)
    held: int

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer, 0.5)


class TestWrappedSchedulers:
    @pytest.mark.parametrize("name", sorted(set(SCHEDULERS) - {"LambdaLR", "MultiplicativeLR"}))
    def test_the_scheduler_is_still_itself(self, name: str) -> None:
        optimizer = optimizer_of(momentum=0.9)
        scheduler = SCHEDULERS[name](optimizer)
        kind, plain, pickled = type(scheduler), dict(vars(scheduler)), pickle.dumps(scheduler)
        saved_before = {key: repr(value) for key, value in scheduler.state_dict().items()}
        lr = ScaledLR(optimizer, "sqrt", lr_schedulers=[scheduler])
        lr.set_ratio(1.0)
        assert type(scheduler) is kind
        assert {key: repr(value) for key, value in scheduler.state_dict().items()} == saved_before
        assert pickle.dumps(scheduler) == pickled
        for copied in (copy.copy(scheduler), copy.deepcopy(scheduler), pickle.loads(pickled)):
            assert type(copied) is kind
            assert vars(copied).keys() == plain.keys()
        lr.close()
        assert vars(scheduler) == plain

    def test_a_scheduler_with_slots_and_a_dict_is_pickled_without_us(self) -> None:
        optimizer = optimizer_of()
        scheduler = Slotted(optimizer)
        scheduler.held = 3
        lr = ScaledLR(optimizer, "linear", lr_schedulers=[scheduler])
        lr.set_ratio(2.0)
        again = pickle.loads(pickle.dumps(scheduler))
        assert again.held == 3
        assert not {"step", "state_dict"} & vars(again).keys()

    def test_a_step_that_another_program_wrapped_is_called_and_restored(self) -> None:
        optimizer = optimizer_of()
        scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
        seen: list[list[float]] = []
        inner = scheduler.step

        def step() -> None:
            seen.append(rates_of(optimizer))
            inner()

        scheduler.step = step  # type: ignore[method-assign,assignment]
        lr = ScaledLR(optimizer, "linear", lr_schedulers=[scheduler])
        lr.set_ratio(2.0)
        advance(optimizer, scheduler)
        assert seen == [[RATE]]  # without the factor
        assert rates_of(optimizer) == [RATE]
        lr.close()
        assert vars(scheduler)["step"] is step

    def test_a_proxy_of_a_scheduler_steps_without_the_factor(self) -> None:
        class Proxy:
            def __init__(self, inner: Any) -> None:
                self.inner = inner

            def __getattr__(self, name: str) -> Any:
                if name == "inner":
                    raise AttributeError(name)
                return getattr(self.inner, name)

        optimizer = optimizer_of()
        scheduler = Proxy(lr_scheduler.ExponentialLR(optimizer, 0.5))
        lr = ScaledLR(optimizer, "linear", lr_schedulers=[scheduler])
        lr.set_ratio(2.0)
        advance(optimizer, scheduler)
        assert rates_of(optimizer) == [RATE]
        assert scheduler.state_dict() == scheduler.inner.state_dict()
        lr.close()
        assert vars(scheduler) == {"inner": scheduler.inner}

    def test_a_wrapped_scheduler_is_freed_without_the_garbage_collector(self) -> None:
        optimizer = optimizer_of()
        scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
        lr = ScaledLR(optimizer, "linear", lr_schedulers=[scheduler])
        lr.set_ratio(2.0)
        gone = weakref.ref(scheduler)
        gc.disable()
        try:
            del scheduler, lr
            assert gone() is None
        finally:
            gc.enable()

    def test_it_steps_on_when_we_are_gone(self) -> None:
        optimizer = optimizer_of()
        scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
        lr = ScaledLR(optimizer, "linear", lr_schedulers=[scheduler])
        lr.set_ratio(1.0)
        del lr
        gc.collect()
        advance(optimizer, scheduler)
        assert rates_of(optimizer) == [RATE / 2]
        ScaledLR(optimizer, "linear", lr_schedulers=[scheduler]).close()  # and can be given to another
        assert type(scheduler) is lr_scheduler.ExponentialLR

    def test_one_keeper_at_a_time(self) -> None:
        optimizer = optimizer_of()
        scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
        keeper = ScaledLR(optimizer, "linear", lr_schedulers=[scheduler])
        with pytest.raises(ValueError, match="lr_scheduler must be given to one BatchSizeScheduler only"):
            ScaledLR(optimizer, "linear", lr_schedulers=[scheduler])
        keeper.close()

    def test_an_error_in_a_step_leaves_the_factor_in(self) -> None:
        optimizer = optimizer_of()
        scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step == 0 else 1 / 0)
        lr = ScaledLR(optimizer, "linear", lr_schedulers=[scheduler])
        lr.set_ratio(2.0)
        optimizer.step()
        with pytest.raises(ZeroDivisionError):
            scheduler.step()
        assert rates_of(optimizer) == [2 * RATE]

    @pytest.mark.filterwarnings("ignore:Seems like:UserWarning")  # a copied optimizer: torch's own words
    @pytest.mark.filterwarnings("ignore:Detected call:UserWarning")
    @pytest.mark.parametrize("kind", ["reduce", "deepcopy", "nested"])
    def test_a_class_that_copies_its_attributes_itself_copies_no_wrapper(self, kind: str) -> None:
        optimizer = optimizer_of()
        scheduler = {"reduce": ReducesItself, "deepcopy": CopiesItself, "nested": NestsItsState}[kind](
            optimizer, 1
        )
        lr = ScaledLR(optimizer, "linear", lr_schedulers=[scheduler])
        lr.set_ratio(2.0)
        copies = [copy.deepcopy(scheduler)]
        if kind == "nested":
            assert "step" not in pickle.loads(pickle.dumps(scheduler.state_dict()))["attributes"]
        else:
            copies.append(pickle.loads(pickle.dumps(scheduler)))
        for one in copies:
            assert "step" not in vars(one)
            one.step()
            assert (one.last_epoch, scheduler.last_epoch) == (1, 0)
        advance(optimizer, scheduler)  # still wrapped
        assert rates_of(optimizer) == [2 * (RATE * 0.1)]

    def test_a_step_that_another_program_wrapped_is_still_given_to_one_only(self) -> None:
        optimizer = optimizer_of()
        scheduler = lr_scheduler.StepLR(optimizer, 3)
        keeper = ScaledLR(optimizer, "linear", lr_schedulers=[scheduler])
        ours = scheduler.step
        scheduler.step = lambda *args: ours(*args)  # type: ignore[method-assign]
        with pytest.raises(ValueError, match="lr_scheduler must be given to one BatchSizeScheduler only"):
            ScaledLR(optimizer, "linear", lr_schedulers=[scheduler])
        keeper.close()

    def test_what_cannot_be_wrapped(self) -> None:
        class Bare:
            __slots__ = ()

            def step(self) -> None: ...

        with pytest.raises(TypeError, match=r"step it inside `with scheduler.lr_untouched\(\):`"):
            ScaledLR(optimizer_of(), "sqrt", lr_schedulers=[Bare()])
        with pytest.raises(TypeError, match="must be a plain Python object, not SimpleNamespace"):
            ScaledLR(optimizer_of(), "sqrt", lr_schedulers=[types.SimpleNamespace(step=print)])
        with pytest.raises(TypeError, match=r"lr_scheduler must have a method step\(\), not 3"):
            ScaledLR(optimizer_of(), "sqrt", lr_schedulers=[3])
        stranger = lr_scheduler.StepLR(optimizer_of(), 3)
        with pytest.raises(ValueError, match="must belong to the optimizer, not StepLR of another"):
            ScaledLR(optimizer_of(), "sqrt", lr_schedulers=[stranger])
        with pytest.raises(TypeError, match="optimizer must be a torch optimizer, not 5"):
            ScaledLR(5, "sqrt")  # type: ignore[arg-type]

    def test_a_scheduler_that_nobody_gave_us_is_noticed_once(self, caplog: pytest.LogCaptureFixture) -> None:
        optimizer = optimizer_of()
        scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
        lr = ScaledLR(optimizer, "linear")
        with caplog.at_level(logging.WARNING, logger="batchfit"):
            for _ in range(3):
                lr.set_ratio(2.0)
                advance(optimizer, scheduler)
        (record,) = caplog.records
        assert "pass it as lr_scheduler= to BatchSizeScheduler" in record.getMessage()
