"""What counts as a forward pass of the program: its outermost modules, once, and nothing beside them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from batchfit._program.probe.passes import PassCounter


@pytest.fixture
def begins() -> list[bool]:
    """Whether each pass began a step of an evaluation."""
    return []


@pytest.fixture
def counter(begins: list[bool]) -> Iterator[PassCounter]:
    counter = PassCounter(lambda *_: None, begins.append)
    yield counter
    counter.stop()


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_backward_runs_again_is_no_pass(counter: PassCounter, reentrant: bool) -> None:
    model = Checkpointed(reentrant=reentrant)
    for _ in range(2):
        model(torch.randn(4, 8, requires_grad=True)).sum().backward()
    assert counter.count == 2
    assert counter.samples == 4


def test_the_first_step_counts_and_what_was_before_it_does_not(counter: PassCounter) -> None:
    """Of 4096 samples in batches of 2546 the second step has the rest: the size is 2546 all the same."""
    model = nn.Linear(8, 8)
    for evaluated_or_trained in (9000, 2546):
        model(torch.randn(evaluated_or_trained, 8))
    counter.forget()
    model(torch.randn(1550, 8))
    assert (counter.samples, counter.elements) == (2546, 2546 * 8)


def test_what_is_stopped_leaves_no_global_hook(counter: PassCounter) -> None:
    counter.stop()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of global hooks where a module is compiled
        torch.compile(nn.Linear(2, 2), backend="eager")(torch.ones(1, 2))


def test_a_module_within_itself_and_one_without_weights(counter: PassCounter) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    nn.MSELoss()(model(torch.randn(6, 8)), torch.randn(6, 8))
    nn.ReLU()(torch.randn(100, 8))
    assert (counter.count, counter.samples, counter.elements) == (1, 6, 48)


def test_a_pass_that_raises_has_ended(counter: PassCounter) -> None:
    model = nn.Linear(8, 8)
    with pytest.raises(RuntimeError):
        model(torch.randn(6, 7))
    model(torch.randn(6, 8))
    model(torch.randn(6, 8))
    assert counter.count == 3


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ([(4, 10), (4, 1), (4, 1)], [True, False, False]),  # a token each, with a cache
        ([(4, 10), (4, 11), (4, 12)], [True, False, False]),  # the sequence again, without one
        ([(4, 10), (4, 10)], [True, True]),
        ([(4, 10), (3, 11)], [True, True]),
        ([(4, 10), (4, 1), (4, 10)], [True, False, True]),
    ],
)
def test_a_token_of_a_generation_is_no_step(
    counter: PassCounter, begins: list[bool], shapes: list[tuple[int, int]], expected: list[bool]
) -> None:
    model = nn.Embedding(16, 4)
    for shape in shapes:
        model(torch.zeros(shape, dtype=torch.long))
    assert begins == expected


def test_hooks_are_gone_once_they_are_not_needed(counter: PassCounter) -> None:
    model: Callable[[torch.Tensor], torch.Tensor] = nn.Linear(8, 8)
    counter.stop()
    model(torch.randn(6, 8))
    assert counter.count == 0
