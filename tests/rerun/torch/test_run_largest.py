"""`run_largest`: what holds without any framework. See also tests/integrations/accelerate."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch_private import global_hooks

import batchfit
from batchfit.errors import NothingFitsError
from batchfit.testing import count_operations, fail_at, simulated_oom


class Program:
    """Trains its own model for some steps, in as many microsteps; fails above `largest`."""

    def __init__(self, largest: int, error: Any = None) -> None:
        self.largest = largest
        self.error = error
        self.runs: list[tuple[int, int]] = []

    def __call__(self, batch_size: int) -> int:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        steps = 0
        try:
            for _ in range(7):
                if batch_size > self.largest:
                    raise simulated_oom() if self.error is None else self.error
                model(torch.ones(batch_size, 2)).sum().backward()
                optimizer.step()
                steps += 1
        finally:
            self.runs.append((batch_size, steps))
        return batch_size * 10


def test_the_value_the_size_and_all_runs() -> None:
    reported: list[batchfit.Trial] = []
    ran = batchfit.run_largest(Program(10), start=16, on_run=reported.append)
    assert (ran.value, ran.batch_size) == (100, 10)
    assert [(trial.size, trial.outcome, trial.steps_run) for trial in ran.trials] == [
        (16, "oom", 0),
        (8, "fits", 3),
        (12, "oom", 0),
        (10, "fits", 3),
        (11, "oom", 0),
        (10, "fits", 7),
    ]
    assert tuple(reported) == ran.trials
    assert "CUDA out of memory" in ran.trials[0].message
    assert global_hooks() == (0, 0, 0)


def test_one_optimizer_for_each_parameter_is_one_step() -> None:
    program_steps: list[int] = []

    def train(batch_size: int) -> None:
        parameters = [nn.Parameter(torch.ones(1)) for _ in range(5)]
        several = [torch.optim.SGD([parameter], lr=0.1) for parameter in parameters]
        if batch_size > 3:
            raise simulated_oom()
        for step in range(9):
            program_steps.append(step)
            for parameter, optimizer in zip(parameters, several, strict=True):
                parameter.grad = torch.ones(1)
                optimizer.step()

    batchfit.run_largest(train, start=4)
    assert program_steps == [0, 1, 2, 0, 1, 2, *range(9)]


def test_without_probes_the_size_is_halved() -> None:
    program = Program(30)
    assert batchfit.run_largest(program, start=100, probe_steps=0).batch_size == 25
    assert program.runs == [(100, 0), (50, 0), (25, 7)]


def test_a_program_that_uses_it_itself_can_be_probed() -> None:
    """The outer probe stops the inner program too, and the inner one does not take that for its own."""
    whole: list[tuple[int, int]] = []

    def outer(size: int) -> int:
        if size > 5:
            raise simulated_oom()
        inner = batchfit.run_largest(Program(3), start=4).batch_size
        batchfit.run_largest(Program(100), start=size)
        whole.append((size, inner))
        return size

    assert batchfit.run_largest(outer, start=8, probe_steps=5).value == 5
    assert whole == [(5, 3)]


@pytest.mark.parametrize("how", ["except", "finally", "exit", "stumbles", "wraps"])
def test_a_probe_that_the_program_catches_is_no_training(how: str) -> None:
    """However the program goes on after it was stopped: only what it does by itself is its end."""
    held: list[weakref.ref[Any]] = []

    def train(batch_size: int) -> int:
        program = Program(10)
        done, results = torch.ones(50), []
        held.append(weakref.ref(done))
        try:
            program(batch_size)
            results.append("trained")
        except Exception:
            raise
        except BaseException as stopped:
            if how == "exit":
                raise SystemExit(1) from None
            if how == "wraps":
                kept.append(RuntimeError("stopped"))
                raise kept[-1] from stopped
        finally:
            if how == "finally" and program.runs[-1][1]:
                return program.runs[-1][1]  # noqa: B012 - a program may
        if how == "stumbles":
            results[0]
        return program.runs[-1][1]

    kept: list[BaseException] = []
    for _ in range(2):
        ran = batchfit.run_largest(train, start=16, key="catches")
        assert (ran.value, ran.batch_size) == (7, 10)
        assert [trial.size for trial in ran.trials if trial.soak] == [10]
    assert global_hooks() == (0, 0, 0)
    assert not [one for one in held if one() is not None]


def test_running_out_after_a_caught_probe_is_still_running_out() -> None:
    def train(batch_size: int) -> int:
        try:
            Program(12)(batch_size)
        except BaseException as stopped:
            if isinstance(stopped, RuntimeError):
                raise
        if batch_size > 9:
            raise simulated_oom()
        return batch_size

    assert batchfit.run_largest(train, start=16).value == 9


def test_nothing_fits_says_where_and_why() -> None:
    with pytest.raises(NothingFitsError, match="a batch of 1 does not fit on cpu") as reported:
        batchfit.run_largest(Program(0), start=8)
    assert "Tried to allocate" in str(reported.value)
    assert reported.value.__context__ is None  # no traceback, no tensors


def test_nothing_fits_names_who_held_the_memory() -> None:
    """The program made its model itself: nobody has declared it."""

    def train(batch_size: int) -> None:
        model = nn.Linear(512, 512)
        optimizer = torch.optim.SGD(model.parameters())
        model(torch.ones(batch_size * 4096, 512)).relu().sum().backward()
        optimizer.step()

    with batchfit.virtual_memory("16MiB"), pytest.raises(NothingFitsError) as reported:
        batchfit.run_largest(train, start=2)
    held = dict(reported.value.holders)
    assert next(iter(held)) == "activations and other tensors"
    assert held["Linear"] == (512 * 512 + 512) * 4
    assert "batchfit why oom.pickle" in str(reported.value)


def test_an_ambiguous_error_at_one_comes_out() -> None:
    text = "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED."
    assert batchfit.run_largest(Program(3, RuntimeError(text)), start=8).batch_size == 3
    with pytest.raises(RuntimeError, match="CUDNN_STATUS_NOT_SUPPORTED") as reported:
        batchfit.run_largest(Program(0, RuntimeError(text)), start=8)
    assert reported.value.__notes__ == ["batchfit: raised at batch size 1"]
    assert global_hooks() == (0, 0, 0)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("mine"), SystemExit(3)])
def test_what_is_not_memory_comes_out_and_leaves_no_hook(error: BaseException) -> None:
    with pytest.raises(type(error)):
        batchfit.run_largest(Program(3, error), start=8)
    assert global_hooks() == (0, 0, 0)
    error.__traceback__ = None


def test_a_fault_at_every_operation_ends_in_the_same_training() -> None:
    """Wherever the first run fails, what the program returns is what it returns without a fault."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    before = [tensor.clone() for tensor in model.state_dict().values()]

    def train(batch_size: int) -> list[float]:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(4, 3)).square().mean().backward()
            optimizer.step()
        return [float(value) for tensor in model.state_dict().values() for value in tensor.flatten()]

    def once() -> list[float]:
        with torch.no_grad():
            for tensor, kept in zip(model.state_dict().values(), before, strict=True):
                tensor.copy_(kept)
        optimizer.state.clear()
        torch.manual_seed(3)
        return batchfit.run_largest(train, start=8, state=[model, optimizer], fresh=True).value

    state = torch.get_rng_state()
    clean = once()
    with count_operations() as seen:
        once()
    for number in range(20, seen.operations, 7):
        with fail_at(number) as fault:
            try:
                assert once() == clean
            except torch.OutOfMemoryError:  # in our own copying, before the program has begun
                assert number < 60
        assert fault.fired
    torch.set_rng_state(state)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"start": 0}, ValueError, "start must be a positive integer, not 0"),
        ({"start": True}, ValueError, "start must be"),
        ({"probe_steps": -1}, ValueError, "probe_steps must be"),
        ({"tolerance": 1.0}, ValueError, "tolerance must be"),
        ({"reduce": 3}, TypeError, "reduce must be a callable or None, not 3"),
        ({"before_retry": 3}, TypeError, "before_retry must be"),
        ({"on_run": 3}, TypeError, "on_run must be"),
        ({"key": " "}, ValueError, "key must be a name"),
        ({"fresh": 1}, TypeError, "fresh must be"),
        ({"state": 3}, TypeError, "state must hold"),
    ],
)
def test_wrong_arguments_are_reported_before_anything_is_run(
    options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        batchfit.run_largest(lambda size: pytest.fail("was run"), **{"start": 8, **options})
    with pytest.raises(TypeError, match="function must be a callable"):
        batchfit.run_largest(3, start=8)  # type: ignore[arg-type]


class TestWhatWasFoundBefore:
    """toma's users expect it: the second call has no OOM again."""

    def program(self, sizes: list[int], most: int = 100) -> Callable[[int], int]:
        def train(batch_size: int) -> int:
            sizes.append(batch_size)
            if batch_size > most:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
            return batch_size

        return train

    def test_the_same_function_begins_where_it_ended(self) -> None:
        sizes: list[int] = []
        train = self.program(sizes)
        first = batchfit.run_largest(train, start=512)
        assert sizes[0] == 512
        sizes.clear()
        again = batchfit.run_largest(train, start=512)
        assert sizes == [first.batch_size]
        assert again.batch_size == first.batch_size
        sizes.clear()
        batchfit.run_largest(train, start=512, fresh=True)
        assert sizes[0] == 512
        sizes.clear()
        batchfit.run_largest(train, start=256)  # another question
        assert sizes[0] == 256

    def test_another_function_of_the_same_code_is_another_program(self) -> None:
        batchfit.run_largest(self.program([]), start=512)
        sizes: list[int] = []
        assert batchfit.run_largest(self.program(sizes, most=1000), start=512).batch_size == 512

    def test_methods_are_distinguished_by_object_and_name(self) -> None:
        class Job:
            def __init__(self) -> None:
                self.sizes: list[int] = []

            def train(self, batch_size: int) -> int:
                self.sizes.append(batch_size)
                if batch_size > 100:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
                return batch_size

            def test(self, batch_size: int) -> int:
                return batch_size

        one, two = Job(), Job()
        found = batchfit.run_largest(one.train, start=512).batch_size
        one.sizes.clear()
        assert batchfit.run_largest(one.train, start=512).batch_size == found
        assert one.sizes == [found]
        assert batchfit.run_largest(one.test, start=512).batch_size == 512
        batchfit.run_largest(two.train, start=512)
        assert two.sizes[0] == 512

    def test_a_function_is_not_kept_alive(self) -> None:
        train = self.program([])
        batchfit.run_largest(train, start=512)
        gone = weakref.ref(train)
        del train
        gc.collect()
        assert gone() is None

    def test_one_that_does_not_fit_any_more_goes_lower(self) -> None:
        most = [100]

        def train(batch_size: int) -> int:
            if batch_size > most[0]:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
            return batch_size

        batchfit.run_largest(train, start=512)
        most[0] = 10
        assert batchfit.run_largest(train, start=512).batch_size <= 10
