"""find_batch_size on real torch, under virtual memory: right, and nothing is left changed."""

from __future__ import annotations

import gc
import hashlib
import random
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch_private import unscaled_optimizers

import batchfit
from batchfit._engine.device.device import Ram
from batchfit.errors import NothingFitsError, SearchStoppedError
from batchfit.testing import count_operations, fail_at
from conftest import count_frozen

STRATEGIES = ("guided", "bisect", "halve", "grow", "powers")


# --- a training run whose every bit is compared -------------------------------------------------


class Net(nn.Module):
    """Dropout, BatchNorm (running statistics, a counter) and a non-persistent buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(8, 5)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.seen += len(images)
        hidden = self.drop(torch.relu(self.norm(self.conv(images))))
        return self.head(hidden.mean((2, 3)))


def make_batch(n: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, 3, 8, 8, dtype=dtype), torch.randint(0, 5, (n,))


def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    images, labels = batch
    return nn.functional.cross_entropy(model(images).float(), labels)


class Run:
    """A small training program: model, AdamW, GradScaler, LR scheduler, all seeded."""

    before = 0

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)
        self.dtype = dtype
        self.model = Net().to(dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=0.05, total_steps=1000)

    def make_batch(self, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        return make_batch(n, self.dtype)

    def step(self, n: int) -> None:
        """One training step, written by hand, with everything that carries state."""
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        loss = loss_fn(self.model, self.make_batch(n))
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        random.random()
        numpy.random.rand()

    def workload(self, step: Callable[[int], None] | None = None) -> batchfit.Workload:
        state = [self.model, self.optimizer, self.scaler, self.scheduler]
        return batchfit.Workload(step or self.step, state=state)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step(6)

    def fingerprint(self) -> dict[str, str]:
        """Every bit that training depends on, found without batchfit's own snapshot."""
        state: dict[str, Any] = {f"param {k}": v for k, v in self.model.named_parameters()}
        state |= {f"buffer {k}": v for k, v in self.model.named_buffers()}
        state |= {f"grad {k}": v.grad for k, v in self.model.named_parameters()}
        state |= {f"mode {k}": v.training for k, v in self.model.named_modules()}
        for number, group in enumerate(self.optimizer.param_groups):
            state |= {f"group {number} {k}": v for k, v in group.items() if k != "params"}
            for index, parameter in enumerate(group["params"]):
                moments = self.optimizer.state.get(parameter, {})
                state |= {f"moment {number} {index} {k}": v for k, v in moments.items()}
        state["scale"] = self.scaler.get_scale()
        state["scaler"] = sorted(self.scaler.state_dict().items())
        state["unscaled"] = [
            len(entry.get("found_inf_per_device", {})) for entry in unscaled_optimizers(self.scaler).values()
        ]
        state["scheduler"] = sorted(
            (k, repr(v)) for k, v in self.scheduler.state_dict().items() if not callable(v)
        )
        state["torch rng"] = torch.get_rng_state()
        state["python rng"] = random.getstate()
        state["numpy rng"] = [str(part) for part in numpy.random.get_state()]
        return {k: bits(v) for k, v in state.items()}


def bits(value: object) -> str:
    if isinstance(value, torch.Tensor):
        raw = (
            value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
        )
        return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(raw).hexdigest()}"
    return repr(value)


def fits(run: Run) -> None:
    fit = batchfit.find_batch_size(run.workload(), budget="4MiB", max_size=40)
    assert fit.batch_size == 40
    assert all(trial.fits for trial in fit.trials)


def runs_out(run: Run) -> None:
    fit = batchfit.find_batch_size(run.workload(), budget="4MiB", strategy="bisect")
    assert any(trial.outcome == "oom" for trial in fit.trials)


def stopped_by(run: Run, error: BaseException, *, operation: int) -> None:
    """The fifth step of the search is stopped in the middle, at one of its operations."""
    calls = 0

    def step(n: int) -> None:
        nonlocal calls
        calls += 1
        if calls < 5:
            return run.step(n)
        with fail_at(operation, error=error):
            run.step(n)

    with pytest.raises(type(error)) as caught:
        batchfit.find_batch_size(run.workload(step), budget="4MiB")
    assert caught.value is error


def raises(run: Run) -> None:
    error = ValueError("the user's own mistake")
    stopped_by(run, error, operation=3)
    assert any("batch size" in note for note in error.__notes__)


def raises_in_backward(run: Run) -> None:
    stopped_by(run, ValueError("the user's own mistake"), operation=45)


def is_interrupted(run: Run) -> None:
    stopped_by(run, KeyboardInterrupt(), operation=45)


def is_interrupted_in_the_optimizer(run: Run) -> None:
    with count_operations() as seen:
        run.step(6)
    run.__init__(run.dtype)  # type: ignore[misc]
    run.train(run.before)
    stopped_by(run, KeyboardInterrupt(), operation=seen.operations - 20)


@pytest.mark.parametrize(
    ("before", "dtype"),
    [
        (0, torch.float32),
        (4, torch.bfloat16),
        pytest.param(0, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(1, torch.float32, marks=pytest.mark.slow),
        pytest.param(1, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(4, torch.float32, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "outcome",
    [fits, runs_out, raises, raises_in_backward, is_interrupted, is_interrupted_in_the_optimizer],
    ids=lambda f: f.__name__,
)
def test_training_with_a_find_in_the_middle_is_bit_identical(
    outcome: Callable[[Run], None], before: int, dtype: torch.dtype
) -> None:
    plain = Run(dtype)
    plain.train(before)
    middle = plain.fingerprint()
    plain.train(5)
    expected = plain.fingerprint()

    run = Run(dtype)
    run.before = before
    run.train(before)
    outcome(run)
    assert run.fingerprint() == middle
    run.train(5)
    assert run.fingerprint() == expected


def test_the_fingerprint_sees_a_change() -> None:
    """The comparison above can fail: one more random number, one changed bit, one counter."""
    run = Run()
    run.train(2)
    before = run.fingerprint()
    torch.rand(1)
    assert run.fingerprint() != before
    run = Run()
    run.train(2)
    assert run.fingerprint() == before
    run.model.seen += 1
    assert run.fingerprint() != before


# --- the answer ----------------------------------------------------------------------------------


class Squares:
    """A step that needs exactly `each` bytes a sample on top of `fixed`, and counts its calls."""

    def __init__(self, *, each: int = 1 << 16, fixed: int = 1 << 20) -> None:
        self.each, self.fixed = each, fixed
        self.sizes: list[int] = []

    def __call__(self, n: int) -> None:
        self.sizes.append(n)
        weights = torch.empty(self.fixed, dtype=torch.uint8)
        work = torch.empty(n * self.each, dtype=torch.uint8)
        del weights, work


def find(step: Callable[[int], object], **settings: Any) -> batchfit.FitResult:
    return batchfit.find_batch_size(batchfit.Workload(step, state=[]), device="cpu", **settings)


@pytest.mark.parametrize("true_max", [1, 2, 7, 100, 163])
def test_the_exact_maximum_is_found(true_max: int) -> None:
    step = Squares()
    with batchfit.virtual_memory(1 << 34) as memory:
        already = memory.allocated_bytes
    budget = already + step.fixed + true_max * step.each
    fit = find(step, budget=budget, tolerance=0)
    assert fit.batch_size == true_max
    assert fit.sustained
    assert fit.survived_steps == 25
    assert fit.stopped_because == "bracketed"
    assert fit.batch_size in step.sizes
    assert {trial.size for trial in fit.trials} == set(step.sizes)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_returns_a_size_that_ran(strategy: str) -> None:
    step = Squares()
    fit = find(
        step, budget="40MiB", strategy=strategy, max_size=512, start=19 if strategy == "grow" else None
    )
    assert fit.batch_size in step.sizes
    assert fit.sustained
    assert any(t.size == fit.batch_size and t.steps_run == 25 for t in fit.trials)
    assert fit.strategy == strategy
    assert batchfit.FitResult.from_json(fit.to_json()) == fit


def test_guided_needs_few_trials_and_no_oom() -> None:
    fit = find(Squares(), budget="600MiB")
    assert len(fit.trials) <= 5
    assert all(trial.fits for trial in fit.trials)
    assert fit.peak_bytes is not None
    assert fit.peak_bytes >= 0.97 * fit.budget_bytes


@pytest.mark.filterwarnings("ignore:the step's state is not declared")
@pytest.mark.parametrize("share", [0.5, 0.8, 0.95])
def test_a_plain_step_that_fills_the_budget_by_itself_needs_few_trials(share: float) -> None:
    """What a step loads each time is no held memory, and with it most of the budget is taken."""
    budget = 64 * 2**20

    def step(batch_size: int) -> None:
        weights = torch.empty(int(share * budget), dtype=torch.uint8)
        activations = torch.empty(batch_size, 40_000, dtype=torch.uint8)
        del weights, activations

    fit = batchfit.find_batch_size(step, budget=budget)
    assert len({trial.size for trial in fit.trials}) <= 6
    assert sum(not trial.fits for trial in fit.trials) <= 1
    assert sum(trial.soak for trial in fit.trials) <= 2
    assert fit.batch_size >= 0.9 * (1 - share) * budget / 40_000


def test_constraints_are_kept() -> None:
    step = Squares()
    fit = find(step, budget="40MiB", multiple_of=24, min_size=24)
    assert all(size % 24 == 0 for size in step.sizes)
    assert fit.batch_size % 24 == 0
    step = Squares()
    fit = find(step, budget="40MiB", power_of_two=True)
    assert all(size & (size - 1) == 0 for size in step.sizes)
    assert fit.batch_size == 512


def test_max_size_is_never_exceeded_and_reported() -> None:
    step = Squares()
    fit = find(step, budget="1GiB", max_size=37)
    assert fit.batch_size == 37
    assert max(step.sizes) == 37
    assert fit.stopped_because == "max_size"


def test_a_soak_that_fails_counts_as_an_oom_and_the_search_goes_on_below() -> None:
    """A leak-like growth: sizes above 50 die after ten steps, though three steps pass."""
    calls: dict[int, int] = {}

    def step(n: int) -> None:
        calls[n] = calls.get(n, 0) + 1
        if n > 50 and calls[n] > 10:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")
        torch.empty(n << 16, dtype=torch.uint8)

    fit = find(step, budget="5MiB", tolerance=0)
    assert fit.batch_size == 50
    assert fit.sustained
    failed = [trial for trial in fit.trials if trial.soak and not trial.fits]
    assert any(trial.steps_run == 10 for trial in failed)


def test_without_a_soak_no_trial_is_long() -> None:
    fit = find(Squares(), budget="40MiB", soak_steps=0)
    assert not fit.sustained
    assert {trial.steps_run for trial in fit.trials if trial.fits} == {3}


def test_nothing_fits() -> None:
    step = Squares(fixed=1 << 24)
    with pytest.raises(
        NothingFitsError, match=r"a batch of 1 does not fit on cpu .*activation checkpointing"
    ) as caught:
        find(step, budget="8MiB")
    assert caught.value.size == 1
    assert caught.value.budget_bytes == 8 << 20
    assert caught.value.peak_bytes is not None


@pytest.mark.parametrize(
    ("budget", "says"),
    [
        (
            "4MiB",
            "optimizer state, take at least 8.01 MiB. By prediction it does not fit with an 8-",
        ),
        ("14MiB", "when what the samples need was free again. By prediction it fits with"),
    ],
)
def test_no_shorter_samples_are_advised_where_the_state_is_too_large(budget: str, says: str) -> None:
    """Weights of 4 MiB: as much in gradients, and twice that in Adam's state."""
    model = nn.Linear(1024, 1024)
    optimizer = torch.optim.AdamW(model.parameters())
    work = batchfit.training(model, optimizer, lambda m, x: m(x).square().mean(), torch.randn(1, 1024))
    with pytest.raises(NothingFitsError, match="a batch of 1 does not fit on cpu") as caught:
        batchfit.find_batch_size(work, budget=budget)
    assert says in str(caught.value)
    assert "checkpointing" not in str(caught.value)
    long = batchfit.training(model, optimizer, lambda m, x: m(x).square().mean(), torch.randn(1, 4096, 1024))
    with pytest.raises(NothingFitsError, match=r"does not fit with .* either .*the sequence length"):
        batchfit.find_batch_size(long, budget="24MiB")


def test_limits_end_the_search_with_what_it_has() -> None:
    fit = find(Squares(), budget="40MiB", strategy="bisect", max_trials=3)
    assert len(fit.trials) == 3
    assert fit.stopped_because == "max_trials"
    assert fit.batch_size in {trial.size for trial in fit.trials if trial.fits}
    with pytest.raises(SearchStoppedError, match="time_limit"):
        find(Squares(), budget="40MiB", time_limit_s=1e-12)


def test_on_trial_sees_each_trial_as_it_ends() -> None:
    seen: list[tuple[int, int]] = []
    fit = find(Squares(), budget="40MiB", on_trial=lambda trial, budget: seen.append((trial.size, budget)))
    assert seen == [(trial.size, 40 << 20) for trial in fit.trials]


@pytest.mark.parametrize(("free", "part"), [(8 * 2**30, 2 * 2**30 - 1), (200 * 2**30, 4 * 2**30)])
def test_without_a_budget_a_modest_part_of_the_ram_is_used_and_it_is_said_first(
    free: int, part: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("batchfit._engine.device.device.read_ram", lambda: Ram(free, free * 10 // 9))
    model = nn.Linear(256, 256)
    held = 4 * (256 * 256 + 256)
    workload = batchfit.inference(model, lambda n: torch.randn(n, 256))
    said_before: list[int] = []

    def seen(trial: Any, budget_bytes: int) -> None:
        said_before.append(len(caplog.records))

    with caplog.at_level("WARNING", logger="batchfit"):
        fit = batchfit.find_batch_size(workload, max_size=4, on_trial=seen)
        profile = batchfit.profile_throughput(workload, sizes=[1, 2], diagnose=False)
    assert abs(fit.budget_bytes - held - part) <= 1
    assert profile.budget_bytes == fit.budget_bytes
    assert said_before[0] == 1
    text = caplog.records[0].getMessage()
    assert "free RAM" in text
    assert "--budget" in text
    assert "batchfit predict" in text
    caplog.clear()
    assert batchfit.find_batch_size(workload, max_size=4, budget="1GiB").budget_bytes == 2**30
    assert not caplog.records


def test_inside_virtual_memory_its_limit_is_the_budget() -> None:
    with batchfit.virtual_memory("20MiB") as memory:
        fit = find(Squares())
        assert fit.budget_bytes == 20 << 20
        assert memory.limit_bytes == 20 << 20
    assert fit.peak_bytes is not None
    assert fit.peak_bytes <= 20 << 20


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"min_size": 0}, "min_size"),
        ({"min_size": 2.5}, "min_size"),
        ({"max_size": -1}, "max_size"),
        ({"min_size": 8, "max_size": 4}, "max_size"),
        ({"strategy": "best"}, "strategy"),
        ({"budget": "24 gigs"}, "budget"),
        ({"budget": 0}, "budget"),
        ({"budget": "900TiB"}, "budget"),
        ({"multiple_of": 0}, "multiple_of"),
        ({"tolerance": -0.1}, "tolerance"),
        ({"tolerance": 1.5}, "tolerance"),
        ({"steps": 1}, "steps"),
        ({"soak_steps": 1}, "soak_steps"),
        ({"time_limit_s": 0}, "time_limit_s"),
        ({"time_limit_s": "5"}, "time_limit_s"),
        ({"max_trials": 0}, "max_trials"),
        ({"attempts": 0}, "attempts"),
        ({"start": 0}, "start"),
        ({"device": "abacus"}, "device"),
        ({"device": "cuda:99"}, "device"),
    ],
    ids=str,
)
def test_bad_input_is_refused_before_any_step(settings: dict[str, Any], name: str) -> None:
    step = Squares()
    with pytest.raises(ValueError, match=name) as caught:
        batchfit.find_batch_size(batchfit.Workload(step, state=[]), **settings)
    value = next(iter(settings.values())) if len(settings) == 1 else settings[name]
    assert repr(value) in str(caught.value)
    assert step.sizes == []


def test_the_users_error_comes_out_unchanged_with_the_size_as_a_note() -> None:
    original = RuntimeError("mat1 and mat2 shapes cannot be multiplied (8x4 and 8x4)")

    def step(n: int) -> None:
        raise original

    with pytest.raises(RuntimeError) as caught:
        find(step, budget="40MiB", start=8)
    assert caught.value is original
    assert any("batch size" in note for note in original.__notes__)


def test_find_inside_an_except_block_still_reports_errors_apart() -> None:
    """Python hangs the error that is being handled behind every new one: it explains none of them."""

    def step(n: int) -> None:
        if n > 10:
            raise ValueError("the user's own mistake")

    try:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
    except torch.OutOfMemoryError:
        with pytest.raises(ValueError, match="own mistake"):
            find(step, budget="4MiB", max_size=64)


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_state_is_put_back_even_where_the_error_holds_all_the_memory(
    kind: type[BaseException], living_bytes: int
) -> None:
    """The error on its way out holds the step's tensors while gradients need memory to come back."""
    model = nn.Linear(512, 512, bias=False)
    model(torch.ones(1, 512)).sum().backward()
    gradient = model.weight.grad.clone()  # type: ignore[union-attr]

    def step(n: int) -> None:
        model.zero_grad(set_to_none=True)
        hog = torch.empty(3_900_000, dtype=torch.uint8)
        if n > 1:
            raise kind("mine")
        del hog

    with pytest.raises(kind, match="mine"):
        batchfit.find_batch_size(batchfit.Workload(step, state=[model]), budget=living_bytes + (6 << 20))
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad, gradient)


def test_a_step_that_takes_no_memory_says_so(caplog: pytest.LogCaptureFixture) -> None:
    fit = find(lambda n: None, budget="64MiB", soak_steps=0)
    assert fit.stopped_because == "largest"
    assert "does not grow" in caplog.text


@pytest.mark.usefixtures("thawed")
def test_what_was_alive_before_and_let_go_in_a_trial_is_collected(living_bytes: int) -> None:
    class Holder:
        pass

    old = Holder()
    old.me = old  # type: ignore[attr-defined]
    old.tensor = torch.empty(2 << 20, dtype=torch.uint8)  # type: ignore[attr-defined]
    kept = [old]
    del old

    def step(n: int) -> None:
        kept.clear()
        torch.empty(n << 16, dtype=torch.uint8)

    gc.disable()
    try:
        fit = find(step, budget=living_bytes + (6 << 20), tolerance=0.2, soak_steps=0)
    finally:
        gc.enable()
    assert fit.batch_size > 70
    assert count_frozen() == 0


def test_an_ambiguous_error_is_too_big_only_if_a_smaller_size_runs() -> None:
    text = "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear with a non-contiguous input."

    def above_20(n: int) -> None:
        if n > 20:
            raise RuntimeError(text)
        torch.empty(n << 16, dtype=torch.uint8)

    fit = find(above_20, budget="1GiB", tolerance=0)
    assert fit.batch_size == 20
    assert any(trial.ambiguous for trial in fit.trials)

    def always(n: int) -> None:
        raise RuntimeError(text)

    with pytest.raises(RuntimeError, match="CUDNN_STATUS_NOT_SUPPORTED") as caught:
        find(always, budget="1GiB", start=64)
    assert any("batch size 1 " in note for note in caught.value.__notes__)


def test_an_undeclared_step_is_warned_about_with_the_keyword() -> None:
    with pytest.warns(UserWarning, match=r"state=\[model, optimizer\]") as caught:
        batchfit.find_batch_size(Squares(), budget="4MiB", device="cpu")
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        find(Squares(), budget="4MiB")


def test_a_step_that_runs_nothing_is_an_error() -> None:
    def generator(n: int) -> Any:
        yield n

    async def coroutine(n: int) -> None: ...

    for step, kind in ((generator, "generator"), (coroutine, "coroutine")):
        with pytest.raises(batchfit.errors.NothingRanError, match=kind):
            find(step, budget="4MiB")


# --- nothing of a failed attempt is alive at the next ----------------------------------------------


@pytest.mark.usefixtures("thawed")
@pytest.mark.parametrize(
    "cycle",
    [pytest.param(False, marks=pytest.mark.slow), True],
    ids=["plain frame", "frame-exception cycle"],
)
def test_a_failed_attempts_tensors_are_gone_before_the_next(cycle: bool) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []
    at_start: list[int] = []

    def step(n: int) -> None:
        at_start.append(sum(ref() is not None for ref in alive))
        big = torch.empty(n << 10)
        alive.append(weakref.ref(big))
        if n > 10:
            try:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
            except torch.OutOfMemoryError as error:
                if cycle:
                    kept = error  # error -> traceback -> this frame -> kept -> error
                    big.owner = kept  # type: ignore[attr-defined]
                raise

    gc.disable()
    try:
        fit = find(step, budget="64MiB", strategy="bisect", max_size=64)
    finally:
        gc.enable()
    assert fit.batch_size == 10
    assert sum(not trial.fits for trial in fit.trials) >= 2
    assert set(at_start) == {0}


def test_how_many_samples_there_are_is_reported_where_the_answer_is_more() -> None:
    model = nn.Linear(4, 2)
    data = torch.utils.data.TensorDataset(torch.randn(10, 4))

    def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        return model(batch[0]).sum()

    work = batchfit.training(model, None, loss, data)
    fit = batchfit.find_batch_size(work, budget="64KiB", soak_steps=0)
    assert fit.batch_size > 10
    assert fit.samples == 10
    assert fit.summary.endswith("the dataset has 10 samples, so that no batch of it is larger")
    assert "samples, so" not in batchfit.find_batch_size(work, budget="64KiB", max_size=10).summary
    assert "has 10 samples" in batchfit.predict_batch_size(work, budget="8GiB", gpu="h100").summary


class Normalized(nn.Sequential):
    """No step of one sample runs in training mode."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))


def normalized() -> batchfit.Workload:
    model = Normalized()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return batchfit.training(
        model, optimizer, lambda m, x: m(x).square().mean(), lambda n: torch.randn(n, 32)
    )


@pytest.mark.parametrize(
    "asked", [{}, {"power_of_two": True}, {"strategy": "bisect"}, {"resume": "search.json"}]
)
def test_batch_norm_begins_at_two_by_itself(
    asked: dict[str, Any], caplog: pytest.LogCaptureFixture, tmp_path: Any
) -> None:
    if "resume" in asked:
        asked = {"resume": tmp_path / "search.json"}
    with caplog.at_level("INFO", logger="batchfit"):
        fit = batchfit.find_batch_size(normalized(), budget="1MiB", **asked)
    assert fit.batch_size >= 128
    assert min(trial.size for trial in fit.trials) >= 2
    if any(trial.size == 2 for trial in fit.trials):
        assert caplog.text.count("sizes from 2 up are tried") == 1
    if "resume" in asked:
        again = batchfit.find_batch_size(normalized(), budget="1MiB", **asked)
        assert again.batch_size == fit.batch_size


def test_batch_norm_with_one_sample_and_no_more_is_the_users_error() -> None:
    with pytest.raises(ValueError, match="more than 1 value per channel") as raised:
        batchfit.find_batch_size(normalized(), budget="1MiB", max_size=1)
    assert "min_size" not in str(raised.value.__notes__)


def test_a_profile_of_batch_norm_begins_at_two() -> None:
    profile = batchfit.profile_throughput(normalized(), budget="1MiB", largest=16, diagnose=False)
    assert min(point.size for point in profile.points) == 2
