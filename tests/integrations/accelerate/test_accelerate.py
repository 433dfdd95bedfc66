"""Accelerate's decorator and ours, side by side, and microbatches in an Accelerate loop.

Complaints of users about `accelerate.utils.find_executable_batch_size` 1.15 that the tests show without us,
and gone with us: sizes between the last two are never tried, or 24 trainings are (PR #3650), memory of the
failed attempt is held until nothing fits ("reached zero", #1934), out-of-memory errors that it does not
recognise, a retry that trains on from half-trained weights, half an accumulation left behind, silence (PR
#4013).
Fixed upstream since: halving (`//2` up to 1.8; times 0.9 from 1.9 on).
"""

from __future__ import annotations

import functools
import gc
import logging
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("accelerate", reason="needs accelerate")

import accelerate
import torch
from accelerate import Accelerator
from accelerate.utils import find_executable_batch_size as theirs
from accelerate_state import prepared_models, reset_accelerate
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch_private import unscaled_optimizers

import batchfit
from batchfit.integrations.accelerate import _warn_of_version as warn_of_version
from batchfit.integrations.accelerate import backward
from batchfit.integrations.accelerate import find_executable_batch_size as ours
from batchfit.testing import simulated_oom, virtual_memory

Decorator = Callable[..., Any]


@pytest.fixture(autouse=True)
def _accelerate_begins_anew() -> Iterator[None]:
    yield
    reset_accelerate()


class Limited:
    """A training of `steps` steps that has an OOM above `largest`, in the forward of step `at`."""

    def __init__(self, largest: int, *, steps: int = 6, at: int = 0, kind: str = "cuda") -> None:
        self.largest = largest
        self.steps = steps
        self.at = at
        self.kind = kind
        self.runs: list[list[int]] = []  # [size, steps made]

    def __call__(self, batch_size: int) -> str:
        self.runs.append([batch_size, 0])
        weight = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for step in range(self.steps):
            if batch_size > self.largest and step >= self.at:
                raise simulated_oom(self.kind)
            weight.grad = torch.ones(2)
            optimizer.step()
            self.runs[-1][1] += 1
        return f"trained with {batch_size}"

    @property
    def whole(self) -> list[int]:
        return [size for size, steps in self.runs if steps == self.steps]


# --- the same towards the caller


@pytest.mark.parametrize("decorate", [theirs, ours], ids=["accelerate", "batchfit"])
class TestAsAccelerate:
    def test_with_and_without_arguments_and_called(self, decorate: Decorator) -> None:
        @decorate
        def bare(batch_size: int, extra: int, *, word: str) -> tuple[int, int, str]:
            return batch_size, extra, word

        @decorate(starting_batch_size=16)
        def with_arguments(batch_size: int) -> int:
            return batch_size

        assert bare(2, word="a") == (128, 2, "a")
        assert with_arguments() == 16
        assert decorate(lambda batch_size: batch_size, 8)() == 8
        assert decorate(function=lambda batch_size: batch_size, starting_batch_size=4)() == 4

    def test_the_batch_size_passed_by_the_caller_is_an_error(self, decorate: Decorator) -> None:
        @decorate(starting_batch_size=16)
        def train(batch_size: int, model: str) -> None:
            raise AssertionError("not run")

        with pytest.raises(
            TypeError, match="Batch size was passed into `train` as the first argument"
        ) as reported:
            train(128, "hello")
        assert "`train(model=hello)`" in str(reported.value)

    def test_reduce_batch_size_fn_says_the_next_size(self, decorate: Decorator) -> None:
        sizes = iter([60, 21, 5])
        program = Limited(21)
        train = decorate(program.__call__, 100, lambda: next(sizes))
        assert train() == "trained with 21"
        assert [size for size, _ in program.runs] == [100, 60, 21]

    def test_reaching_zero(self, decorate: Decorator) -> None:
        train = decorate(Limited(0).__call__, 4)
        for _ in range(2):  # and again, at once
            with pytest.raises(RuntimeError, match="No executable batch size found, reached zero"):
                train()
        with pytest.raises(RuntimeError, match="No executable batch size found, reached zero"):
            decorate(Limited(8).__call__, 0)()
        with pytest.raises(RuntimeError, match="No executable batch size found, reached zero"):
            decorate(Limited(3).__call__, 8, lambda: 0)()

    def test_other_errors_come_out_unchanged(self, decorate: Decorator) -> None:
        mistake = ValueError("bad row")

        @decorate
        def train(batch_size: int) -> None:
            raise mistake

        with pytest.raises(ValueError, match="bad row") as reported:
            train()
        assert reported.value is mistake
        mistake.__traceback__ = None

    def test_a_later_call_begins_where_the_last_one_ended(self, decorate: Decorator) -> None:
        program = Limited(60)
        train = decorate(program.__call__, 64)
        train()
        sizes = len(program.runs)
        first = program.whole[-1]
        train()
        assert program.runs[sizes:] == [[first, 6]]


# --- what is better


def test_sizes_in_between_are_found_and_nothing_trains_twice() -> None:
    program = Limited(100)
    assert ours(program.__call__, 128)() == "trained with 100"
    assert program.whole == [100]
    assert sum(steps for _, steps in program.runs) <= 3 * 5 + 6


@pytest.mark.parametrize("largest", [7, 100])
def test_complaint_many_trainings_for_a_size_far_below(largest: int) -> None:
    """Without us: 24 trainings until 7 is reached from 128, and each may fail late."""
    with_them, with_us = Limited(largest), Limited(largest)
    theirs(with_them.__call__, 128)()
    ours(with_us.__call__, 128)()
    assert with_us.whole[-1] >= 0.95 * largest
    assert with_us.whole[-1] >= with_them.whole[-1] - 0.05 * largest
    ooms = [sum(steps < 3 for _, steps in program.runs) for program in (with_them, with_us)]
    assert ooms[1] <= 8
    if largest == 7:
        assert ooms[0] == 23


@pytest.mark.parametrize("kind", ["cuda", "cuda_api", "cublas", "cudnn", "triton", "python"])
def test_complaint_errors_that_are_not_recognised(kind: str) -> None:
    """Without us: all but the first of these end the program."""
    if kind == "cuda":
        assert theirs(Limited(64, kind=kind).__call__)() == "trained with 58"
    else:
        with pytest.raises((RuntimeError, MemoryError)):
            theirs(Limited(64, kind=kind).__call__)()
    assert ours(Limited(64, kind=kind).__call__)() == "trained with 64"


def test_complaint_the_failed_attempt_is_alive_in_the_next() -> None:
    """Without us: what was prepared stays in the accelerator, and errors that are kept hold tensors."""

    def alive_at_the_end(decorate: Decorator) -> int:
        accelerator = Accelerator(cpu=True)
        seen: list[weakref.ref[Any]] = []
        errors: list[Exception] = []
        alive = 0

        def train(batch_size: int) -> int:
            nonlocal alive
            gc.collect()
            alive = sum(one() is not None for one in seen)
            model = accelerator.prepare(nn.Linear(batch_size, 4))
            activations = torch.ones(batch_size, 4)
            seen.extend([weakref.ref(model), weakref.ref(activations)])
            try:
                if batch_size > 100:
                    raise simulated_oom()
            except RuntimeError as error:
                errors.append(error)  # a logger that keeps what it logs
                raise
            return alive

        found: int = decorate(train, 128)()
        accelerator.free_memory()
        errors.clear()
        return found

    assert alive_at_the_end(theirs) >= 4
    assert alive_at_the_end(ours) == 0


def test_complaint_reached_zero_where_hundreds_fit(living_bytes: int) -> None:
    """Models prepared in the function, under a memory that holds one of them and not two."""

    def size(decorate: Decorator) -> int:
        accelerator = Accelerator(cpu=True)

        def train(batch_size: int) -> int:
            model = nn.Linear(256, 256)
            optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
            model, optimizer = accelerator.prepare(model, optimizer)
            for _ in range(8):
                loss = model(torch.ones(batch_size, 256)).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            return batch_size

        try:
            with virtual_memory(living_bytes + 4 * 2**20):
                return int(decorate(train, 600)())
        finally:
            accelerator.free_memory()

    assert size(ours) > 500
    # accelerate #1934, with these very words: the models of failed attempts fill the memory.
    with pytest.raises(RuntimeError, match="No executable batch size found, reached zero"):
        size(theirs)


def _train(accelerator: Accelerator, model: nn.Module, optimizer: Any, *, fail: bool) -> None:
    torch.manual_seed(5)
    for step in range(10):
        with accelerator.accumulate(model):
            loss = model(torch.randn(4, 3)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if fail and step == 6:
            raise simulated_oom()


def test_complaint_a_retry_trains_on_from_half_trained_weights() -> None:
    """Without us: the second attempt starts from the weights and Adam state that the first one left."""

    def trained(decorate: Decorator | None) -> list[float]:
        reset_accelerate()
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

        def train(batch_size: int, model: nn.Module, optimizer: Any) -> None:
            prepared = accelerator.prepare(model, optimizer)
            _train(accelerator, *prepared, fail=batch_size == 128)

        if decorate is None:
            train(64, model, optimizer)
        else:
            decorate(train, 128)(model, optimizer)
        accelerator.free_memory()
        return [float(value) for value in model[0].weight.detach().flatten()]

    clean = trained(None)
    assert trained(ours) == clean
    assert trained(theirs) != clean


def test_prepared_objects_that_are_passed_in_are_as_before_at_every_attempt() -> None:
    def trained(decorate: Decorator | None) -> list[float]:
        reset_accelerate()
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        data = DataLoader(TensorDataset(torch.randn(12, 3)), batch_size=2, shuffle=True)
        prepared = accelerator.prepare(model, optimizer, scheduler, data)

        def train(batch_size: int, model: nn.Module, optimizer: Any, scheduler: Any, loader: Any) -> float:
            for step, (x,) in enumerate(loader):
                with accelerator.accumulate(model):
                    accelerator.backward(model(x).square().mean())
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                if batch_size == 128 and step == 4:
                    raise simulated_oom()
            return float(scheduler.get_last_lr()[0])

        run = train if decorate is None else decorate(train, 128)
        lr = run(*(() if decorate else (64,)), *prepared)
        accelerator.free_memory()
        return [lr, *(float(value) for value in model.weight.detach().flatten())]

    clean = trained(None)
    assert trained(ours) == clean
    assert trained(theirs) != clean


def test_complaint_half_an_accumulation_is_left_behind() -> None:
    """Without us: an attempt that fails between two optimizer steps shifts those of the next one."""

    def stepped_at(decorate: Decorator) -> list[int]:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
        at: list[int] = []

        def train(batch_size: int) -> None:
            at.clear()
            model = nn.Linear(3, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model, optimizer = accelerator.prepare(model, optimizer)
            for step in range(9):
                with accelerator.accumulate(model):
                    accelerator.backward(model(torch.ones(2, 3)).sum())
                    optimizer.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    at.append(step)
                if batch_size == 128 and step == 1:
                    raise simulated_oom()

        decorate(train, 128)()
        accelerator.free_memory()
        return at

    assert stepped_at(ours) == [3, 7]
    assert stepped_at(theirs) == [1, 5]


def test_complaint_silence(caplog: pytest.LogCaptureFixture) -> None:
    """Without us: nothing says that training has begun again."""
    with caplog.at_level(logging.INFO):
        theirs(Limited(100, at=4).__call__)()
        assert caplog.records == []
        ours(Limited(100, at=4, steps=9).__call__)()
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "batch size 128 ran out of memory after 4 optimizer steps" in warned[0]
    assert "running it from the start with 116" in warned[0]


def test_prepared_before_the_call_stays_prepared() -> None:
    accelerator = Accelerator(cpu=True)
    outside = accelerator.prepare(nn.Linear(2, 2))

    @ours(starting_batch_size=64)
    def train(batch_size: int) -> int:
        accelerator.prepare(nn.Linear(2, 2))
        if batch_size > 10:
            raise simulated_oom()
        return len(prepared_models(accelerator))

    assert train() == 2
    assert prepared_models(accelerator)[0] is outside
    accelerator.free_memory()


def test_the_gradient_scaler_begins_again() -> None:
    """One that was left in the middle of a step would refuse the next one's unscaling, or keep its scale."""
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    seen: list[tuple[float, int]] = []

    @ours(starting_batch_size=4)
    def train(batch_size: int) -> None:
        scaler = accelerator.scaler
        seen.append((scaler.get_scale(), len(unscaled_optimizers(scaler))))
        weight = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        scaler.scale((weight * 2).sum()).backward()
        scaler.unscale_(optimizer)
        scaler.update(3.0)
        if batch_size > 2:
            raise simulated_oom()

    train()
    assert len(seen) >= 2
    assert set(seen) == {(8.0, 0)}
    accelerator.scaler = None


def test_an_engine_of_deepspeed_is_destroyed_with_its_attempt() -> None:
    class Engine:
        destroyed = 0

        @property
        def engine(self) -> Engine:
            return self

        def destroy(self) -> None:
            Engine.destroyed += 1

    accelerator: Any = Accelerator(cpu=True)

    @ours(starting_batch_size=4)
    def train(batch_size: int) -> None:
        assert getattr(accelerator, "deepspeed_engine_wrapped", None) is None
        accelerator.deepspeed_engine_wrapped = Engine()
        if batch_size > 2:
            raise simulated_oom()

    train()
    assert Engine.destroyed >= 1
    del accelerator.deepspeed_engine_wrapped


class Program:
    """A program that keeps its accelerator in an attribute."""

    def __init__(self) -> None:
        self.accelerator = Accelerator(cpu=True)

    def attempt(self, batch_size: int) -> int:
        self.accelerator.prepare(nn.Linear(2, 2))
        if batch_size > 10:
            raise simulated_oom()
        return len(prepared_models(self.accelerator))


@pytest.mark.parametrize("how", ["method", "argument", "named", "through another function"])
def test_the_accelerator_is_found_wherever_the_function_has_it(how: str) -> None:
    program = Program()
    if how == "method":
        left = ours(program.attempt, 64)()
    elif how == "argument":
        left = ours(lambda batch_size, owner: owner.attempt(batch_size), 64)(program)
    elif how == "named":
        hidden = {"it": program}
        left = ours(
            lambda batch_size: hidden["it"].attempt(batch_size), 64, accelerator=program.accelerator
        )()
    else:

        def inner(batch_size: int) -> int:
            return program.attempt(batch_size)

        left = ours(lambda batch_size: inner(batch_size), 64)()
    assert left == 1
    program.accelerator.free_memory()


@dataclass
class Parts:
    accelerator: Accelerator
    model: Any
    optimizer: Any


@pytest.mark.parametrize("how", ["dict", "nested", "dataclass", "partial", "partial keyword"])
def test_what_is_passed_in_containers_is_as_before_at_every_attempt(how: str) -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before = model.weight.detach().clone()
    seen: list[tuple[int, bool]] = []

    def train(batch_size: int, parts: Any) -> int:
        if how == "nested":
            parts = parts[0]["parts"]
        held = parts if isinstance(parts, dict) else vars(parts)
        seen.append((len(prepared_models(held["accelerator"])), torch.equal(held["model"].weight, before)))
        held["accelerator"].prepare(nn.Linear(2, 2))
        for _ in range(5):
            held["model"](torch.ones(1, 2)).sum().backward()
            held["optimizer"].step()
        if batch_size > 5:
            raise simulated_oom()
        return batch_size

    parts: Any = {"accelerator": accelerator, "model": model, "optimizer": optimizer}
    if how == "dataclass":
        parts = Parts(**parts)
    if how == "nested":
        parts = [{"parts": parts}]
    if how == "partial":
        # As upstream, the batch size comes first: what a partial binds by position is before it.
        assert ours(functools.partial(lambda parts, size: train(size, parts), parts), 8)() == 4
    elif how == "partial keyword":
        assert ours(functools.partial(train, parts=parts), 8)() == 4
    else:
        assert ours(train, 8)(parts) == 4
    assert len(seen) > 1
    assert set(seen) == {(0, True)}


def test_a_variable_that_is_not_set_yet_is_no_error() -> None:
    def main(*, tracked: bool) -> int:
        accelerator = Accelerator(cpu=True)
        if tracked:
            tracker: list[int] = []

        def train(batch_size: int) -> int:
            if tracked:
                tracker.append(batch_size)
            if batch_size > 3:
                accelerator.prepare(nn.Linear(2, 2))
                raise simulated_oom()
            return len(prepared_models(accelerator))

        return int(ours(train, 8)())

    assert main(tracked=False) == 0
    assert main(tracked=True) == 0


def test_loaders_that_were_being_read_are_let_go() -> None:
    accelerator = Accelerator(cpu=True)
    loaders: list[Any] = []

    @ours(starting_batch_size=64)
    def train(batch_size: int) -> bool:
        assert accelerator.gradient_state.active_dataloader is None
        loader = accelerator.prepare(DataLoader(TensorDataset(torch.ones(256, 2)), batch_size=batch_size))
        loaders.append(loader)
        for _ in loader:
            if batch_size > 10:
                raise simulated_oom()
        return bool(accelerator.gradient_state.in_dataloader)

    assert train() is False
    accelerator.free_memory()


def test_random_numbers_are_the_same_at_every_attempt() -> None:
    drawn: list[float] = []

    @ours(starting_batch_size=8)
    def train(batch_size: int) -> None:
        drawn.append(float(torch.rand(())))
        if batch_size > 2:
            raise simulated_oom()

    state = torch.get_rng_state()
    train()
    torch.set_rng_state(state)
    assert len(drawn) >= 3
    assert len(set(drawn)) == 1


def test_an_evaluation_is_probed_by_its_forward_passes() -> None:
    runs: list[list[int]] = []
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())

    def evaluate(batch_size: int) -> int:
        runs.append([batch_size, 0])
        with torch.inference_mode():
            for _ in range(50):
                if batch_size > 45:
                    raise simulated_oom()
                model(torch.ones(1, 2))
                runs[-1][1] += 1
        return batch_size

    assert ours(evaluate, 256)() in (44, 45)
    assert [forwards for _, forwards in runs].count(50) == 1
    assert max(forwards for _, forwards in runs[:-1]) == 8  # stopped in the ninth


def test_a_program_that_catches_everything_is_trained_to_its_end() -> None:
    """The probes that it catches are no trainings: what it returns after them is not the answer."""
    whole: list[tuple[int, int]] = []

    def train(batch_size: int) -> int:
        program = Limited(10)
        try:
            program(batch_size)
        except BaseException as error:
            if isinstance(error, RuntimeError):
                raise
        whole.append((batch_size, program.runs[-1][1]))
        return batch_size

    assert ours(train, 16)() == 10
    assert whole[-1] == (10, 6)
    assert [steps for _, steps in whole[:-1]] == [2, 2]


def test_a_program_that_wraps_what_it_catches_is_still_probed() -> None:
    program = Limited(10)

    def train(batch_size: int) -> str:
        try:
            return program(batch_size)
        except BaseException as error:
            raise RuntimeError("training failed") from error

    assert ours(train, 16)() == "trained with 10"


def test_a_workload_gives_the_size_before_anything_is_run(living_bytes: int) -> None:
    model = nn.Linear(256, 256)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    sizes: list[int] = []

    def make(extra: int) -> batchfit.Workload:
        assert extra == 7
        return batchfit.training(
            model, optimizer, lambda model, x: model(x).square().mean(), torch.ones(2, 256)
        )

    @ours(starting_batch_size=5000, workload=make)
    def train(batch_size: int, extra: int) -> int:
        sizes.append(batch_size)
        for _ in range(3):
            model(torch.ones(batch_size, 256)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return extra

    with virtual_memory(living_bytes + 4 * 2**20):
        assert train(7) == 7
    assert len(sizes) == 1
    assert sizes[0] > 500


def test_a_workload_that_does_not_fit_says_why_it_reached_zero(living_bytes: int) -> None:
    model = nn.Linear(256, 256)
    work = batchfit.inference(model, torch.ones(2, 256))
    runs: list[int] = []
    train = ours(runs.append, starting_batch_size=64, workload=work)
    with virtual_memory(living_bytes + 256 * 1024 + 4096):
        for more in (r" \(a batch of 1 does not fit on cpu .*\)$", "$"):  # later calls, as upstream: at once
            with pytest.raises(RuntimeError, match=r"^No executable batch size found, reached zero\." + more):
                train()
    assert runs == []


def test_the_size_is_kept_for_later_programs() -> None:
    first, second, third = Limited(100), Limited(100), Limited(100)
    ours(first.__call__, key="the training")()
    ours(second.__call__, key="the training")()
    assert second.runs == [[100, 6]]
    ours(third.__call__, key="the training", fresh=True)()
    assert third.runs[0][0] == 128
    smaller = Limited(50)
    assert ours(smaller.__call__, key="the training")() == "trained with 50"


@pytest.mark.parametrize("at", [0, 2, 5])
def test_out_of_memory_before_during_and_late(at: int) -> None:
    program = Limited(100, steps=6, at=at)
    found = ours(program.__call__, 128)()
    assert found in ("trained with 100", "trained with 93")
    assert len(program.whole) == 1


# --- microbatches


@pytest.mark.parametrize("precision", ["double", "no", "bf16"])
def test_backward_in_microbatches_is_accelerates(precision: str, living_bytes: int) -> None:
    def trained(in_microbatches: bool) -> tuple[torch.Tensor, list[int]]:
        reset_accelerate()
        mixed, dtype = ("no", torch.float64) if precision == "double" else (precision, torch.float32)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision=mixed)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1)).to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        data = TensorDataset(torch.randn(512, 64).to(dtype))
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=128))
        mb = batchfit.Microbatcher(model, microbatch_size=48)
        cut: list[int] = []
        for (batch,) in loader:
            with accelerator.accumulate(model):
                if in_microbatches:
                    report = backward(accelerator, mb, lambda micro: model(micro).square().mean(), batch)
                    cut.append(len(report.microbatch_sizes))
                    loss = report.loss
                else:
                    loss = model(batch).square().mean()
                    accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        accelerator.free_memory()
        return torch.cat([weights, loss.detach().reshape(1)]), cut

    whole, _ = trained(False)
    parts, cut = trained(True)
    assert cut == [3] * 4
    within = {"double": 1e-12, "no": 1e-6, "bf16": 5e-3}[precision]
    assert torch.allclose(whole, parts, rtol=0, atol=within)


# --- bad input


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"starting_batch_size": "128"}, ValueError, "starting_batch_size must be an integer"),
        ({"starting_batch_size": -1}, ValueError, "starting_batch_size must be an integer"),
        ({"reduce_batch_size_fn": 3}, TypeError, "reduce_batch_size_fn must be a callable or None, not 3"),
        ({"workload": 3}, TypeError, "workload must be a batchfit.Workload or a function"),
        ({"probe_steps": -1}, ValueError, "probe_steps must be an integer of at least 0"),
        ({"tolerance": 1}, ValueError, "tolerance must be"),
        ({"accelerator": "cpu"}, TypeError, "accelerator must be an accelerate.Accelerator"),
        (
            {"reduce_batch_size_fn": lambda: 1, "probe_steps": 3},
            ValueError,
            "reduce_batch_size_fn and probe_steps",
        ),
        ({"reduce_batch_size_fn": lambda: 1, "key": "a"}, ValueError, "reduce_batch_size_fn and key"),
        ({"fresh": True}, ValueError, "fresh must be False without key"),
    ],
)
def test_wrong_settings_are_reported_when_the_function_is_decorated(
    options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        ours(**options)


@pytest.mark.parametrize("size", [128, 200, -1, 2.5])
def test_a_reduction_that_does_not_reduce_is_an_error(size: Any) -> None:
    with pytest.raises(ValueError, match="below the 128 that was out of memory"):
        ours(Limited(10).__call__, 128, lambda: size)()


def test_wrong_arguments_of_backward() -> None:
    accelerator = Accelerator(cpu=True)
    mb = batchfit.Microbatcher(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="accelerator must be"):
        backward("cpu", mb, lambda micro: micro, torch.ones(2))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="microbatcher must be"):
        backward(accelerator, None, lambda micro: micro, torch.ones(2))
    with pytest.raises(TypeError, match="scaler must not be given"):
        backward(accelerator, mb, lambda micro: micro, torch.ones(2), scaler=None)


def test_an_older_version_is_warned_about_and_a_newer_one_that_lacks_something(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for version in (accelerate.__version__, "1.10.0", "1.12.3.dev0", "2.0.0", "unknown"):
        warn_of_version(version)
    with pytest.warns(UserWarning, match=r"tested with accelerate 1\.10 and later, and this is 1\.9\.0$"):
        warn_of_version("1.9.0")
    monkeypatch.delattr(accelerate.state.GradientState, "_remove_dataloader")
    with pytest.warns(UserWarning, match=r"this is 2\.0\.0, which has no _remove_dataloader$"):
        warn_of_version("2.0.0")


def test_without_accelerate_the_pip_line_is_reported() -> None:
    code = "import sys; sys.modules['accelerate'] = None; import batchfit.integrations.accelerate"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert 'pip install "batchfit[accelerate]" to use batchfit.integrations.accelerate' in done.stderr


@pytest.mark.parametrize("decorator", [ours, theirs])
@pytest.mark.parametrize(
    "text", ["CPU out of memory.", "gpu0 out of memory. Tried 3 GiB", "XPU out of memory."]
)
def test_any_devices_out_of_memory_is_one(decorator: Decorator, text: str) -> None:
    sizes: list[int] = []

    @decorator(starting_batch_size=16)
    def train(batch_size: int) -> int:
        sizes.append(batch_size)
        if batch_size > 7:
            raise RuntimeError(text)
        return batch_size

    assert 0 < train() <= 7
    assert sizes[0] == 16


def test_outputs_come_through_an_accumulation() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    model = accelerator.prepare(nn.Linear(3, 1))
    batch = torch.randn(6, 3)
    microbatcher = batchfit.Microbatcher(model, microbatch_size=2)

    def fn(micro: torch.Tensor) -> Any:
        found = model(micro)
        return found.square().mean(), found

    report = backward(accelerator, microbatcher, fn, batch)
    assert torch.allclose(report.outputs, model(batch))
    assert torch.allclose(report.loss, fn(batch)[0])
