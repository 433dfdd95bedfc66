"""Microbatcher: what a newcomer gets wrong is said, with what to do about it."""

from __future__ import annotations

import functools
import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import batchfit
from batchfit import Microbatcher
from batchfit._torch.coverage import Coverage
from batchfit.errors import BatchfitError, NothingFitsError
from batchfit.testing import FakeDevice


def untouched(*models: nn.Module) -> bool:
    return all(parameter.grad is None for model in models for parameter in model.parameters())


# --- parameters that nobody named


class Pair:
    """A training loop's own object."""

    def __init__(self) -> None:
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 1)

    def loss(self, micro: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(micro)).square().mean()


def test_a_module_that_was_not_passed_is_named_before_anything_ran() -> None:
    body, head, pair = nn.Linear(3, 4), nn.Linear(4, 1), Pair()
    mb = Microbatcher(body, microbatch_size=2)
    with pytest.raises(ValueError, match=r"head\.weight of shape \(1, 4\).*Microbatcher\(\.\.\., head\)"):
        mb.backward(lambda micro: head(body(micro)).mean(), torch.randn(5, 3))
    assert untouched(body, head)
    with pytest.raises(ValueError, match=r"self\.head\.weight of shape \(1, 4\)"):
        Microbatcher(pair.body).backward(pair.loss, torch.randn(5, 3))
    with pytest.raises(ValueError, match=r"linear\.bias of shape \(1,\)"):
        Microbatcher(body).backward(
            functools.partial(lambda net, x: net(body(x)).mean(), head), torch.ones(2, 3)
        )
    hidden = {"deep": {"deeper": head}}
    with pytest.raises(ValueError, match=r"a parameter of shape \(1, 4\).*Pass their modules too"):
        Microbatcher(body).backward(lambda x: hidden["deep"]["deeper"](body(x)).mean(), torch.ones(2, 3))
    assert untouched(body, head, pair.body, pair.head)
    head.requires_grad_(False)
    mb.backward(lambda micro: head(body(micro)).mean(), torch.randn(5, 3))


@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize("left_out", ["encoder", "scale"])
def test_what_the_cached_loss_leaves_out_is_named_too(left_out: str, size: int) -> None:
    encoder, other = nn.Linear(3, 4), nn.Linear(3, 4)
    scale = nn.Parameter(torch.ones(()))
    models = [other, scale] if left_out == "encoder" else [other, encoder]

    def encode(micro: torch.Tensor) -> torch.Tensor:
        return encoder(micro) + other(micro)

    def compare(reps: torch.Tensor) -> torch.Tensor:
        return (reps @ reps.T * scale).logsumexp(0).mean()

    with pytest.raises(ValueError, match=f"not leave out {left_out}"):
        Microbatcher(*models, microbatch_size=size).backward_cached(encode, compare, torch.randn(5, 3))
    assert untouched(encoder, other)
    assert scale.grad is None


def test_tensors_that_are_no_parameters() -> None:
    model = nn.Linear(3, 1)
    noise = torch.zeros(3, requires_grad=True)
    batch = torch.randn(6, 3, requires_grad=True)

    def penalty(micro: torch.Tensor) -> torch.Tensor:
        inside = micro.detach().clone().requires_grad_()  # made anew in each call: its gradient is dropped
        (slope,) = torch.autograd.grad(model(inside).sum(), inside, create_graph=True)
        return model(inside).mean() + slope.square().mean()

    Microbatcher(model, microbatch_size=2).backward(penalty, batch)
    Microbatcher(model, microbatch_size=2).backward(lambda micro: model(micro).mean(), batch)
    assert batch.grad is not None
    with pytest.raises(ValueError, match=r"noise of shape \(3,\)"):
        Microbatcher(model, microbatch_size=2).backward(lambda micro: model(micro + noise).mean(), batch)
    Microbatcher(model, noise).backward(lambda micro: model(micro + noise).mean(), batch)
    assert noise.grad is not None


def test_the_graph_is_walked_once_for_a_function_that_is_made_anew() -> None:
    model = nn.Linear(3, 1)
    coverage = Coverage()
    looks = []
    for _ in range(3):
        fn = lambda micro: model(micro).mean()  # noqa: E731
        looks.append(coverage.look([fn], model.parameters(), "backward"))
        if looks[-1] is not None:
            looks[-1]([fn(torch.ones(1, 3))])
    assert looks[0] is not None
    assert looks[1:] == [None, None]
    other = coverage.look([lambda micro: model(micro).sum()], model.parameters(), "backward")
    assert other is not None
    model.bias.requires_grad_(False)
    assert coverage.look([fn], [model.weight], "backward") is not None


def test_the_same_code_with_another_module_is_looked_at_again() -> None:
    def loss_of(net: nn.Module) -> Any:
        return lambda micro: net(micro).mean()

    one, two = nn.Linear(3, 1), nn.Linear(3, 1)
    mb = Microbatcher(one)
    mb.backward(loss_of(one), torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"net\.weight"):
        mb.backward(loss_of(two), torch.ones(2, 3))
    first, second = Pair(), Pair()
    mb = Microbatcher(first.body, first.head)
    mb.backward(first.loss, torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"self\.body"):
        mb.backward(second.loss, torch.ones(2, 3))
