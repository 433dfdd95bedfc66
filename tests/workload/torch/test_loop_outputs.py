"""What a model returned is caught, whatever module it is; nothing of that stays, however a trial ends."""

from __future__ import annotations

import copy
import gc
import pickle
import queue
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch_private import dynamo, forward_hooks

import batchfit
from batchfit._engine.workload import loop
from batchfit.errors import NothingFitsError

criterion = nn.CrossEntropyLoss()


def make_batch(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, 8), torch.randint(0, 4, (n,))


def loss_fn(model: Any, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = criterion(model(batch[0]), batch[1])
    return loss


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        return out


class OwnState(Net):
    """A copy of it gets everything that it has."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__


class Recursive(Net):
    def forward(self, x: torch.Tensor, again: bool = True) -> torch.Tensor:
        inner: torch.Tensor = self(x, again=False)[:1] if again else super().forward(x)
        return super().forward(x) + inner if again else inner


def caught(model: nn.Module, fn: Callable[[Any, Any], torch.Tensor] = loss_fn) -> Any:
    """What the variables of a loop hold of the model's outputs after three steps."""
    attributes = set(vars(model))
    work = batchfit.training(model, torch.optim.SGD(model.parameters(), lr=0.1), fn, make_batch)
    with loop.running() as running:
        for _ in range(3):
            work.step(6)
        held = running._variables
        (variables,) = held.values()
        outputs = variables.outputs
    assert not held
    assert set(vars(model)) == attributes
    assert not forward_hooks(model)
    return outputs


@pytest.mark.parametrize(
    "make",
    [
        Net,
        Recursive,
        lambda: torch.jit.script(Net()),  # type: ignore[no-untyped-call]
        lambda: torch.jit.trace(Net(), torch.randn(2, 8)),  # type: ignore[no-untyped-call]
    ],
    ids=["module", "calls itself", "scripted", "traced"],
)
@pytest.mark.filterwarnings(
    "ignore:.*torch.jit:DeprecationWarning", "ignore:.*TorchScript:DeprecationWarning"
)
def test_outputs_are_caught(make: Callable[[], nn.Module]) -> None:
    assert caught(make()).shape == (6, 4)


@pytest.mark.filterwarnings(
    "ignore:Using `torch.compile.module.` when there are global hooks:UserWarning"
)  # 2.11
def test_outputs_are_caught_outside_of_what_is_compiled() -> None:
    """No graph more than without us; a loss that is compiled as a whole has no outputs to keep."""
    for compiled in ("wrapper", "in place", "loss"):
        dynamo.reset()
        graphs = []

        def backend(graph: Any, _: Any, graphs: list[Any] = graphs) -> Any:
            graphs.append(graph)
            return graph.forward

        model: Any = Net()
        fn: Any = loss_fn
        if compiled == "wrapper":
            model = torch.compile(model, backend=backend)
        elif compiled == "in place":
            model.compile(backend=backend)
        else:
            fn = torch.compile(loss_fn, backend=backend)
        outputs = caught(model, fn)
        assert len(graphs) == 1
        assert (outputs is None) == (compiled == "loss")


@pytest.mark.parametrize("kind", [Net, OwnState])
def test_a_copy_made_meanwhile_is_a_model_of_its_own(kind: type[Net]) -> None:
    copies: list[Any] = []

    def copying(model: Any, batch: Any) -> torch.Tensor:
        copies.extend((copy.deepcopy(model), pickle.loads(pickle.dumps(model))))
        return loss_fn(model, batch)

    assert caught(kind(), copying).shape == (6, 4)
    for one in copies:
        nn.init.zeros_(one.layer.weight)
        nn.init.zeros_(one.layer.bias)
        assert not one(torch.ones(1, 8)).any()
        assert vars(one).get("_compiled_call_impl") is None


def test_what_is_computed_again_in_backward_is_not_the_output() -> None:
    assert caught(Net(), lambda m, b: criterion(checkpoint(m, b[0], use_reentrant=False), b[1])).shape == (
        6,
        4,
    )


def test_loops_within_loops_have_their_own_variables() -> None:
    work = batchfit.training(Net(), None, loss_fn, make_batch)
    with loop.running(most_passes=1) as outer:
        work.step(2)
        with loop.running() as inner:
            assert not inner.held_bytes("cpu")
            work.step(3)
            assert loop.passes_of(5) == 5
        assert not inner.held_bytes("cpu")
        assert outer.held_bytes("cpu") > 0
        assert loop.passes_of(5) == 1
    assert not outer.held_bytes("cpu")


@pytest.mark.parametrize("ends", ["well", "oom", "error", "interrupt"])
@pytest.mark.parametrize("verb", ["find", "profile", "predict"])
def test_nothing_is_kept_when_it_has_ended(verb: str, ends: str) -> None:
    if (verb, ends) == ("predict", "oom"):
        pytest.skip("nothing runs out of memory in a trace")
    outputs: queue.SimpleQueue[weakref.ref[Any]] = queue.SimpleQueue()  # no prediction restores it
    model = Net()

    def failing(model: Any, batch: Any) -> torch.Tensor:
        out = model(batch[0])
        outputs.put(weakref.ref(out))
        if outputs.qsize() == 3 and ends in ("error", "interrupt"):
            raise KeyboardInterrupt if ends == "interrupt" else ZeroDivisionError("in the loss")
        loss: torch.Tensor = criterion(out, batch[1])
        return loss

    work = batchfit.training(model, torch.optim.SGD(model.parameters(), lr=0.1), failing, make_batch)
    budget = 2000 if ends == "oom" else "1MiB"
    wanted = {"oom": NothingFitsError, "error": Exception, "interrupt": KeyboardInterrupt}.get(ends)
    run: dict[str, Callable[[], Any]] = {
        "find": lambda: batchfit.find_batch_size(work, budget=budget, max_size=64),
        "profile": lambda: batchfit.profile_throughput(work, budget=budget, sizes=[2, 4], diagnose=False),
        "predict": lambda: batchfit.predict_batch_size(work, budget="1GiB", max_size=64),
    }
    if wanted is None:
        run[verb]()
    else:
        with pytest.raises(wanted):
            run[verb]()
    gc.collect()
    assert outputs.qsize() >= 3 or ends == "oom"
    while not outputs.empty():
        assert outputs.get()() is None
    assert "_compiled_call_impl" not in vars(model)
