"""Code of torch and transformers that reads values in a trace is found where it is today.

Each test fails when torch or transformers moves the function that a trace wraps or knows.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import batchfit
from batchfit._engine.allocator.footprint import Trace
from batchfit._engine.trace import values
from batchfit._engine.trace.trace import trace
from batchfit._engine.trace.workload import rules_for
from batchfit.errors import UntraceableError

OPTIMIZERS = (
    *("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop"),
    *("Rprop", "SGD"),
    *(("Muon",) if hasattr(torch.optim, "Muon") else ()),  # since torch 2.9
)
NEVER_TRACED = {"LBFGS", "SparseAdam"}  # a line search branches on the loss; sparse gradients


def traced(work: batchfit.Workload) -> Trace:
    return trace(work, 3, rules=rules_for(work))


def resumed(name: str, *, foreach: bool) -> batchfit.Workload:
    """A step whose optimizer has state already, with counters of its own."""
    model = nn.Linear(8, 8, bias=False)
    options = {} if name == "Muon" else {"foreach": foreach}
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01, **options)

    def step(n: int) -> None:
        optimizer.zero_grad()
        model(torch.randn(n, 8)).square().mean().backward()
        optimizer.step()

    step(2)
    return batchfit.Workload(step, state=[model, optimizer])


def test_every_optimizer_of_torch_is_named_here() -> None:
    found = {name for name, kind in vars(torch.optim).items() if isinstance(kind, type)}
    assert found - {"Optimizer"} == {*OPTIMIZERS, *NEVER_TRACED}


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_optimizer_reads_its_counters(name: str, foreach: bool) -> None:
    assert traced(resumed(name, foreach=foreach)).peak_bytes > 0


def test_the_updates_of_optimizers_are_wrapped_for_a_trace_only() -> None:
    updates = values.optimizer_updates()
    assert {name for _, name in updates} >= {"_single_tensor_adam", "_multi_tensor_adam", "_multi_tensor_sgd"}
    before = [getattr(module, name) for module, name in updates]
    with values.LibraryReads().wrapped():
        assert all(getattr(*one) is not old for one, old in zip(updates, before, strict=True))
    assert [getattr(module, name) for module, name in updates] == before


def test_an_optimizer_that_is_not_wrapped_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "optimizer_updates", lambda: ())
    with pytest.raises(UntraceableError, match="depends on the data"):
        traced(resumed("Adafactor", foreach=False))


def refusing(read: Any) -> None:
    model = nn.Linear(8, 1)

    def step(n: int) -> None:
        read(model(torch.randn(n, 8)).mean())

    with pytest.raises(UntraceableError, match="depends on the data"):
        traced(batchfit.Workload(step, state=[model]))


def test_an_optimizer_of_the_programs_own_is_not_answered() -> None:
    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            if float(self.param_groups[0]["params"][0].grad.norm()) < 1:
                super().step(closure)

    def read(loss: torch.Tensor) -> None:
        weight = nn.Parameter(loss.detach().clone())
        optimizer = Own([weight], lr=0.1)
        weight.square().backward()
        optimizer.step()

    refusing(read)


def test_a_list_of_values_is_not_logged() -> None:
    refusing(lambda loss: loss.reshape(1).tolist())


def test_a_scheduler_of_the_programs_own_is_not_answered() -> None:
    class Own(torch.optim.lr_scheduler.ReduceLROnPlateau):
        def step(self, metrics: Any, epoch: Any = None) -> None:
            super().step(min(float(metrics), 1.0), epoch)

    schedule = Own(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1))
    refusing(lambda loss: schedule.step(loss.item()))


@pytest.mark.parametrize(
    "asks",
    [
        lambda value: torch.distributions.Normal(value, value.exp(), validate_args=True),
        lambda value: torch.distributions.Exponential(1.0, validate_args=True).log_prob(value.exp()),
    ],
    ids=["arguments", "sample"],
)
def test_a_distribution_checks_what_it_is_given(asks: Any) -> None:
    model = nn.Linear(8, 1)
    work = batchfit.Workload(lambda n: asks(model(torch.randn(n, 8))), state=[model])
    assert traced(work).peak_bytes > 0


def test_a_gradient_scaler_unscales_with_the_operation_that_is_known() -> None:
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")

    def step(n: int) -> None:
        scaler.scale(model(torch.randn(n, 8)).mean()).backward()
        scaler.unscale_(optimizer)
        found_inf = scaler._found_inf_per_device(optimizer)
        assert [one.item() for one in found_inf.values()] == [0.0]
        scaler.step(optimizer)
        scaler.update()

    assert traced(batchfit.Workload(step, state=[model, optimizer, scaler])).peak_bytes > 0


def test_a_logits_processor_of_the_programs_own_is_not_answered() -> None:
    """`generate` is answered that no sample has ended; code that it calls is not."""
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    shape = {"n_layer": 1, "n_head": 2, "n_embd": 32, "vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape)).eval()

    def process(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores * 2 if (ids[:, -1] == 7).all() else scores

    def ids(n: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.randint(3, 60, (n, 9))}

    plain = batchfit.generation(model, ids, max_new_tokens=4, do_sample=False)
    assert trace(plain, 3, rules=rules_for(plain), steps=1).peak_bytes > 0
    own = batchfit.generation(model, ids, max_new_tokens=4, do_sample=False, logits_processor=[process])
    with pytest.raises(UntraceableError, match="depends on the data"):
        trace(own, 3, rules=rules_for(own), steps=1)
