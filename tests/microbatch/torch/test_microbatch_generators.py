"""Microbatcher: generators of the user's own go back with the global ones when a batch is tried again."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from batchfit import Microbatcher
from batchfit.testing import faulty

AT_MODULE_LEVEL = torch.Generator()

Draw = Callable[[], float]


def kinds() -> dict[str, tuple[Any, Draw]]:
    generator, numpy, legacy, plain = (
        torch.Generator().manual_seed(3),
        np.random.default_rng(3),
        np.random.RandomState(3),
        random.Random(3),
    )
    return {
        "torch": (generator, lambda: float(torch.rand((), generator=generator))),
        "numpy": (numpy, lambda: float(numpy.random())),
        "legacy": (legacy, lambda: float(legacy.random_sample())),
        "python": (plain, plain.random),
    }


def run(fn: Callable[[nn.Module], Any], *, fails: bool, **options: Any) -> tuple[list[float], list[float]]:
    """The gradient of a batch that settled at two microbatches, after a failure or from the beginning."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    mb = Microbatcher(model, microbatch_size=None if fails else 4, compared="ignore", **options)
    report = mb.backward(
        faulty(fn(model), {0: "oom"} if fails else {}, after=True), torch.ones(8, 3).double()
    )
    assert report.microbatch_sizes == (4, 4)
    assert model.weight.grad is not None
    return model.weight.grad.flatten().tolist(), [float(report.loss)]


@pytest.mark.parametrize("kind", ["torch", "numpy", "legacy", "python"])
@pytest.mark.parametrize("place", ["closure", "default", "partial", "object", "namespace", "list", "nested"])
def test_a_generator_that_fn_holds_is_restored(kind: str, place: str) -> None:
    def make(model: nn.Module) -> Any:
        _, draw = kinds()[kind]

        def loss(x: torch.Tensor, draw: Draw = draw) -> torch.Tensor:
            return (model(x) * draw()).square().mean()

        class Job:
            def __init__(self) -> None:
                self.draw = draw

            def __call__(self, x: torch.Tensor) -> torch.Tensor:
                return loss(x, self.draw)

        held = SimpleNamespace(draw=draw)
        listed = [draw]
        found: dict[str, Any] = {
            "closure": lambda x: (model(x) * draw()).square().mean(),
            "default": loss,
            "partial": functools.partial(loss, draw=draw),
            "object": Job(),
            "namespace": lambda x: loss(x, held.draw),
            "list": lambda x: loss(x, listed[0]),
            "nested": lambda x: (lambda y: loss(y))(x),
        }
        return found[place]

    assert run(make, fails=True) == run(make, fails=False)


def test_a_generator_of_the_module_that_fn_is_written_in_is_restored() -> None:
    def make(model: nn.Module) -> Any:
        AT_MODULE_LEVEL.manual_seed(3)
        return lambda x: (model(x) * torch.rand((), generator=AT_MODULE_LEVEL)).square().mean()

    assert run(make, fails=True) == run(make, fails=False)


def test_a_generator_that_is_declared_is_restored() -> None:
    hidden: list[Any] = []

    def draw() -> float:
        return float(torch.rand((), generator=hidden[-1][0][0][0][0]))

    def make(generator: torch.Generator) -> Any:
        hidden.append([[[[generator]]]])
        return lambda model: lambda x: (model(x) * draw()).square().mean()

    found = []
    for fails in (True, False):
        generator = torch.Generator().manual_seed(3)
        found.append(run(make(generator), fails=fails, generators=[generator]))
    assert found[0] == found[1]
    for wrong in ("seed", 3, [3], [torch.nn.Linear(1, 1)]):
        with pytest.raises(TypeError, match="generators must be"):
            Microbatcher(nn.Linear(1, 1), generators=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["torch", "numpy", "legacy", "python"])
def test_a_generator_that_a_module_keeps_is_restored(kind: str) -> None:
    class Noisy(nn.Module):
        def __init__(self, body: nn.Module) -> None:
            super().__init__()
            self.body = body
            self.generator, self.draw = kinds()[kind]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.body(x) * self.draw()).square().mean()  # type: ignore[no-any-return]

    assert run(Noisy, fails=True) == run(Noisy, fails=False)


def test_both_forwards_of_a_cached_batch_draw_the_same_numbers() -> None:
    """They did not: the second pass through the encoder had other masks than the loss was made of."""
    torch.manual_seed(0)
    model = nn.Linear(3, 4).double()
    batch = torch.randn(6, 3).double()

    def loss_fn(reps: torch.Tensor) -> torch.Tensor:
        return (reps @ reps.T).logsumexp(1).mean()

    gradients = []
    for size in (6, 2):
        generator = torch.Generator().manual_seed(3)

        def encode(micro: torch.Tensor, generator: torch.Generator = generator) -> torch.Tensor:
            masks = [torch.rand(4, generator=generator, dtype=torch.float64) for _ in micro]
            return model(micro) * torch.stack(masks)

        model.zero_grad()
        Microbatcher(model, microbatch_size=size).backward_cached(encode, loss_fn, batch)
        assert model.weight.grad is not None
        gradients.append(model.weight.grad.clone())
    assert torch.allclose(*gradients, atol=1e-12)


def test_an_error_and_an_inspection_of_the_loss_leave_the_generator_where_it_was() -> None:
    model = nn.Linear(3, 1)
    generator = torch.Generator().manual_seed(3)

    def fn(x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and len(x) == 2:
            raise ValueError("mine")
        return (model(x) + torch.rand((), generator=generator)).square().mean()

    before = generator.get_state()
    with pytest.raises(ValueError, match="mine"):
        Microbatcher(model, microbatch_size=2).backward(fn, torch.ones(8, 3))
    assert torch.equal(generator.get_state(), before)


def test_generators_of_map_are_restored_for_what_is_retried() -> None:
    model = nn.Linear(3, 1)
    found = []
    for fails in (True, False):
        generator = torch.Generator().manual_seed(3)

        def fn(x: torch.Tensor, generator: torch.Generator = generator) -> torch.Tensor:
            return torch.rand(len(x), generator=generator) + 0 * model(x)[:, 0]

        mb = Microbatcher(model, microbatch_size=4)
        found.append(mb.map(faulty(fn, {1: "oom"}, after=True) if fails else fn, torch.ones(8, 3))[:4])
    assert torch.equal(*found)


def test_a_proxy_of_a_generator_is_restored() -> None:
    class Proxy:
        """Stands for a generator, its class included, as those of wrapt do."""

        __slots__ = ("_inner",)

        def __init__(self, generator: np.random.RandomState) -> None:
            self._inner = generator

        @property  # type: ignore[misc]
        def __class__(self) -> type:
            return type(self._inner)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

    def make(model: nn.Module) -> Any:
        proxy = Proxy(np.random.RandomState(3))
        return lambda x: (model(x) * proxy.random_sample()).square().mean()

    assert run(make, fails=True) == run(make, fails=False)
