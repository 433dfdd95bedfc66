"""What a real run adds in place is in place in a trace: against torch's own profiler, on the CPU."""

from __future__ import annotations

import functools
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint
from torch_private import has_kernel

import batchfit
from batchfit._engine.allocator.footprint import Trace
from batchfit._engine.torch_private import storage
from batchfit._engine.trace import blocks
from batchfit._engine.trace.blocks import Blocks
from batchfit._engine.trace.trace import trace, trace_caveats
from batchfit._engine.trace.workload import rules_for

WIDTH = 4
Step = Callable[[Tensor, nn.Module], Tensor]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))


def really(step: Step) -> list[bool]:
    """Of each sum of gradients in a backward pass of a real run: whether it was in place."""
    made, x = model(), torch.randn(6, WIDTH)
    loss = step(x, made)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        loss.backward()  # type: ignore[no-untyped-call]
    events: Any = found.events()
    return [one.name == "aten::add_" for one in events if one.name in ("aten::add", "aten::add_")]


class Counted(Blocks):
    """Blocks that count what is taken over."""

    def __init__(self) -> None:
        super().__init__()
        self.taken = 0

    def take_over(self, tensor: Tensor, from_: Tensor) -> None:
        self.taken += 1
        super().take_over(tensor, from_)


def in_a_trace(step: Step, monkeypatch: pytest.MonkeyPatch) -> tuple[int, Trace]:
    made = model()
    work = batchfit.training(
        made,
        torch.optim.SGD(made.parameters(), lr=0.1),
        lambda m, x: step(x, m),
        lambda n: torch.randn(n, WIDTH),
    )
    kept = []

    def counted(**_: bool) -> Blocks:
        kept.append(Counted())
        return kept[-1]

    monkeypatch.setattr("batchfit._engine.trace.recorder.Blocks", counted)
    found = trace(work, 6, rules=rules_for(work), steps=1)
    return kept[0].taken, found


def check(step: Step) -> int:
    with pytest.MonkeyPatch.context() as patch:
        taken, found = in_a_trace(step, patch)
    assert taken == sum(really(step))
    live: set[int] = set()
    for event in found.events:  # every block is freed once, and none before it is there
        assert (~event in live) if event < 0 else (event not in live)
        live ^= {event if event >= 0 else ~event}
    return taken


def residual(x: Tensor, m: Any) -> Tensor:
    for layer in m:
        x = x + layer(x).relu()
    return x.pow(2).sum()


def branches(x: Tensor, m: Any) -> Tensor:
    h = m[0](x)
    return (m[1](h) * m[2](h) + h.tanh()).sum()


def expanded(x: Tensor, m: Any) -> Tensor:
    h = m[0](x)
    return (h + m[1](h)).sum()  # the first gradient to come is one number for all


def same_twice(x: Tensor, m: Any) -> Tensor:
    h = m[0](x)
    return (h + h).pow(2).sum()


def tied(x: Tensor, m: Any) -> Tensor:
    h = x @ m[0].weight
    return (h @ m[0].weight.t()).sum() + m[0](h).sum()


def viewed(x: Tensor, m: Any) -> Tensor:
    h = m[0](x)
    return h.view(-1).exp().sum() + m[1](h).pow(2).sum()


def cut(x: Tensor, m: Any) -> Tensor:
    h = m[0](x)
    return (h[:, :2].exp().sum() + h[:, 2:].tanh().sum()) + m[1](h).pow(2).sum()


def joined(x: Tensor, m: Any) -> Tensor:
    h = m[0](x)
    return torch.cat([h, m[1](h), h.tanh()], 1).pow(2).sum()


def again(x: Tensor, m: Any) -> Tensor:
    h = m[0](x)
    return (h + checkpoint(lambda y: m[1](y).relu() + y, h, use_reentrant=False)).pow(2).sum()


def squared(x: Tensor, m: Any) -> Tensor:
    h = m[0](x)
    return (h * h).exp().sum()  # both gradients of one node go to one place


def spread(x: Tensor, m: Any) -> Tensor:
    """The gradient that waits is one number for each row."""
    h = m[0](x)
    other = m[1](h).pow(2).sum()
    return other + h.sum(1).pow(2).sum()


def viewed_first(x: Tensor, m: Any) -> Tensor:
    """The gradient that waits is a view of one that is gone."""
    h = m[0](x)
    other = m[1](h).pow(2).sum()
    return other + h.view(3, 2, WIDTH).exp().sum() + h.t().tanh().sum()


def spread_first(x: Tensor, m: Any) -> Tensor:
    h = m[0](x)
    other = m[1](h).pow(2).sum()
    return other + h.view(3, 2, WIDTH).sum(2).pow(2).sum()


def kept(x: Tensor, m: Any) -> Tensor:
    """Somebody else holds the gradient that waits."""
    held: list[Tensor] = []
    h = m[0](x)
    late = h.tanh()
    late.register_hook(lambda gradient: held.append(gradient))
    made = m[1](late) * late + late.exp()
    made.register_hook(lambda gradient: held.append(gradient))
    return (made + late).pow(2).sum()


def hook_that_adds(x: Tensor, m: Any) -> Tensor:
    h = m[0](x)
    h.register_hook(functools.partial(torch.add, torch.ones(6, WIDTH)))
    return h.pow(2).sum()


def twice_differentiated(x: Tensor, m: Any) -> Tensor:
    h = m[0](x)
    (slope,) = torch.autograd.grad((h.sin() + h.cos() * h).sum(), m[0].weight, create_graph=True)
    return slope.pow(2).sum() + h.pow(2).sum()


def own_arithmetic(x: Tensor, m: Any) -> Tensor:
    return m[0](x).logcumsumexp(1).pow(2).sum()  # its gradient is a sum of temporaries


def decomposed(x: Tensor, m: Any) -> Tensor:
    square = m[0].weight @ m[0].weight.t() + 4 * torch.eye(WIDTH)
    return torch.linalg.cholesky(square).pow(2).sum() + m[1](x).sum()


def again_reentrant(x: Tensor, m: Any) -> Tensor:
    h = m[0](x)
    return (h + checkpoint(lambda y: m[1](y).relu() + y, h, use_reentrant=True)).pow(2).sum()


STEPS = [residual, branches, expanded, same_twice, tied, viewed, cut, joined, again, squared, spread]
STEPS += [viewed_first, spread_first, kept, hook_that_adds, own_arithmetic, decomposed, again_reentrant]


@pytest.mark.filterwarnings(
    "ignore:Warning. Profiler clears events:UserWarning"
)  # torch 2.11, once a process
@pytest.mark.parametrize("step", STEPS, ids=lambda one: one.__name__)
def test_gradients_are_added_where_a_real_run_adds_them(step: Step) -> None:
    check(step)


def test_gradients_of_gradients_are_new_tensors() -> None:
    """A sum that is differentiated itself is no sum in place."""
    made, x = model(), torch.randn(6, WIDTH)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        twice_differentiated(x, made).backward()  # type: ignore[no-untyped-call]
    events: Any = found.events()
    with pytest.MonkeyPatch.context() as patch:
        taken, _ = in_a_trace(twice_differentiated, patch)
    assert taken == sum(one.name == "aten::add_" for one in events)


def test_some_are_and_some_are_not() -> None:
    """Both happen in the cases above: a rule that says one thing would fail."""
    seen = {one for step in (residual, branches, expanded, joined) for one in really(step)}
    assert seen == {True, False}


@examples(40)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 7), st.integers(0, 7)), min_size=1, max_size=8))
def test_any_graph(plan: list[tuple[int, int, int]]) -> None:
    """Values made of earlier ones, each used as often as it comes."""

    def step(x: Tensor, m: Any) -> Tensor:
        values = [m[0](x)]
        for kind, left, right in plan:
            a, b = values[left % len(values)], values[right % len(values)]
            made = (
                lambda a, b: a + b,
                lambda a, b: a * b.tanh(),
                lambda a, b: m[1](a),
                lambda a, b: a.t().reshape(6, WIDTH),
                lambda a, b: torch.cat([a[:, :2], b[:, 2:]], 1),
                lambda a, b: a.relu() - b,
            )[kind](a, b)
            values.append(made)
        return sum((one.pow(2).sum() for one in values[-2:]), torch.zeros(()))

    check(step)


class Turned(nn.Linear):
    """Its input does not lie in one piece."""

    def __init__(self, bias: bool) -> None:
        super().__init__(WIDTH, WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(0, -2))


@pytest.mark.parametrize("shape", [(6, WIDTH), (2, 6, WIDTH), (2, 3, 6, WIDTH)])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("bias", [True, False])
def test_a_bias_is_added_where_a_real_run_adds_it(shape: tuple[int, ...], turned: bool, bias: bool) -> None:
    made = Turned(bias) if turned else nn.Linear(WIDTH, WIDTH, bias=bias)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        made(torch.randn(shape))
    events: Any = found.events()
    really_taken = sum(one.name == "aten::add_" for one in events)
    work = batchfit.inference(made, lambda n: torch.randn(n, *shape[1:]))
    kept: list[Counted] = []

    def counted(**_: bool) -> Blocks:
        kept.append(Counted())
        return kept[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("batchfit._engine.trace.recorder.Blocks", counted)
        trace(work, shape[0], rules=rules_for(work), steps=1)
    assert kept[0].taken == really_taken


NOT_DECLARED = torch.zeros(WIDTH)


def test_a_bias_that_the_state_does_not_hold() -> None:
    def step(x: Tensor, m: Any) -> Tensor:
        turned = x.view(2, 3, WIDTH).transpose(0, 1)
        return nn.functional.linear(turned, m[0].weight, NOT_DECLARED).pow(2).sum()

    with profile(activities=[ProfilerActivity.CPU]) as found:
        step(torch.randn(6, WIDTH), model())
    events: Any = found.events()
    with pytest.MonkeyPatch.context() as patch:
        taken, _ = in_a_trace(step, patch)
    assert taken == sum(one.name == "aten::add_" for one in events) == 1


def test_another_thread_that_trains_changes_no_trace() -> None:
    stop = threading.Event()

    def trains() -> None:
        layer, x = nn.Linear(64, 64), torch.randn(3, 64, 64)
        while not stop.is_set():
            layer(x.transpose(0, 1)).sum().backward()

    alone = check(residual)
    other = threading.Thread(target=trains)
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    other.start()
    try:
        with pytest.MonkeyPatch.context() as patch:
            assert [in_a_trace(residual, patch)[0] for _ in range(10)] == [alone] * 10
    finally:
        stop.set()
        other.join()
        sys.setswitchinterval(switch)


@pytest.mark.parametrize(
    "around",
    [torch.inference_mode, torch.no_grad, torch.autograd.detect_anomaly],
    ids=lambda one: one.__name__,
)
def test_a_first_trace_may_be_anywhere(around: Any) -> None:
    blocks.counts_of_one_holder.cache_clear()
    made = nn.Linear(8, 8)
    work = batchfit.Workload(lambda n: made(torch.randn(n, 8)), state=[made])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of anomaly detection
        with around():
            assert trace(work, 2, rules=rules_for(work), steps=1).events
    assert blocks.counts_of_one_holder() is not None


def test_a_torch_that_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums are then copies, and a trace is a trace."""
    assert check(residual) > 0
    blocks.counts_of_one_holder.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(storage, "_storage_use_count", None)
        taken, found = in_a_trace(residual, patch)
        assert any("in place" in note for note in trace_caveats([]))
    blocks.counts_of_one_holder.cache_clear()
    assert taken == 0
    assert found.events


class OwnSum(torch.autograd.Function):
    """A backward of one's own that adds out of place: its memory is its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        first = gradients[0] * 2
        return first + gradients[0] * 3


class AddsToItsGradient(OwnSum):
    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return torch.add(*gradients, gradients[0].tanh())


@pytest.mark.parametrize("own", [OwnSum, AddsToItsGradient])
def test_a_sum_of_the_programs_own_stays_one(own: Any) -> None:
    check(lambda x, m: own.apply(m[0](x)).pow(2).sum())


def test_linear_is_torchs_again_after_a_trace() -> None:
    with pytest.MonkeyPatch.context() as patch:
        in_a_trace(residual, patch)
    assert not has_kernel("aten::linear", "AutogradCPU")
