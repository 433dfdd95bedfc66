"""FSDP2 as it is read and reset, and what is said where a name of it is missing."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch_private import take_away_fsdp2_reset

from batchfit import Microbatcher
from batchfit._engine.data_parallel.fsdp_models import Shards
from batchfit._engine.distributed.ranks import Ranks
from batchfit._engine.torch_private import fsdp2
from batchfit.errors import BatchfitError
from batchfit.testing import simulated_oom

needs_cpu = pytest.mark.skipif(
    not fsdp2.runs_on_cpu(), reason=f"FSDP2 of torch {torch.__version__} cannot run on a CPU"
)


@pytest.fixture(autouse=True)
def _one_process() -> Iterator[None]:
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_gloo_available():
        pytest.skip("needs gloo")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def sharded_model() -> nn.Sequential:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=init_device_mesh("cpu", (1,)))
    return model


def gradients(model: nn.Module) -> list[Any]:
    return [
        None if p.grad is None else p.grad.to_local().clone()  # type: ignore[attr-defined]
        for p in model.parameters()
    ]


def fail_in_backward(model: nn.Module, x: torch.Tensor) -> None:
    def stop(gradient: torch.Tensor) -> None:
        raise ArithmeticError

    inner = model[1].register_forward_hook(lambda _, __, out: out.register_hook(stop) and None)  # type: ignore[index]
    with pytest.raises(ArithmeticError):
        model(x).sum().backward()
    inner.remove()


def test_this_torch_has_what_is_read() -> None:
    assert fsdp2.missing() == []
    assert not fsdp2.is_sharded(nn.Linear(1, 1))
    assert not fsdp2.is_root(nn.Linear(1, 1))


@needs_cpu
def test_a_model_is_read() -> None:
    model = sharded_model()
    assert [len(fsdp2.parameters(group)) for group in fsdp2.groups(model[0])] == [2]
    assert fsdp2.groups(model) == []
    assert not fsdp2.is_root(model)  # it has never run
    model(torch.ones(2, 3)).sum().backward()
    assert fsdp2.is_root(model)
    assert not fsdp2.is_root(model[0])
    assert fsdp2.at_rest(model)
    (group,) = fsdp2.groups(model[0])
    assert fsdp2.reduces(group)
    assert fsdp2.divide_factor(group) is None
    known = {id(fsdp2.sharded(one)) for one in fsdp2.parameters(group)}
    assert known == {id(one) for one in model[0].parameters()}
    assert not any(fsdp2.is_spread(one) for one in fsdp2.parameters(group))
    model[0].set_requires_gradient_sync(False)  # type: ignore[operator]
    assert not fsdp2.reduces(group)


@pytest.fixture(params=["of torch", "ours"])
def _each_reset(request: pytest.FixtureRequest) -> Iterator[None]:
    """Both ways to reset FSDP2; before torch 2.13 ours is the only one."""
    give_back = take_away_fsdp2_reset() if request.param == "ours" else lambda: None
    lost = not fsdp2.can_reset()
    if not lost:
        yield
    give_back()
    if lost:
        pytest.skip(f"torch {torch.__version__} needs no reset of ours, or has none")


@needs_cpu
@pytest.mark.usefixtures("_each_reset")
def test_a_reset_brings_it_to_rest_and_the_next_gradients_are_right() -> None:
    x = torch.linspace(-1, 1, 6).view(2, 3)
    plain, model = sharded_model(), sharded_model()
    for one in (plain, model):
        one(x).sum().backward()
        one.zero_grad()
    fail_in_backward(model, x)
    assert not fsdp2.at_rest(model)
    fsdp2.reset(model)
    assert fsdp2.at_rest(model)
    model.zero_grad()
    for one in (plain, model):
        one(x).sum().backward()
    for ours, theirs in zip(gradients(model), gradients(plain), strict=True):
        assert torch.equal(ours, theirs)


@needs_cpu
@pytest.mark.usefixtures("_each_reset")
def test_a_first_step_that_failed_while_fsdp2_was_made_ready() -> None:
    """It does that once, when the root first runs, and would not do the rest in the next step."""
    x = torch.linspace(-1, 1, 6).view(2, 3)
    plain, model = sharded_model(), sharded_model()
    (group,) = fsdp2.groups(model[2])
    make_ready = group.lazy_init

    def fails() -> None:
        group.lazy_init = make_ready
        raise ArithmeticError

    group.lazy_init = fails
    with pytest.raises(ArithmeticError):
        model(x)
    fsdp2.reset(model)
    for one in (plain, model):
        one(x).sum().backward()
    for ours, theirs in zip(gradients(model), gradients(plain), strict=True):
        assert torch.equal(ours, theirs)


@needs_cpu
@pytest.mark.skipif(not fsdp2.can_reset(), reason=f"torch {torch.__version__} cannot reset FSDP2")
def test_a_gradient_from_before_the_failed_batch_survives_the_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.15 takes the gradients of sharded parameters away when it resets; so does every one here."""
    reset, resets = fsdp2.reset, 0

    def clearing(root: nn.Module) -> None:
        nonlocal resets
        resets += 1
        reset(root)
        for parameter in root.parameters():
            parameter.grad = None

    monkeypatch.setattr(fsdp2, "reset", clearing)

    def run(*, fails: bool) -> list[Any]:
        model, waiting = sharded_model(), False
        mb = Microbatcher(model, microbatch_size=4)

        def fn(batch: torch.Tensor) -> torch.Tensor:
            nonlocal waiting
            loss = model(batch).square().mean()
            if waiting:
                waiting = False
                raise simulated_oom("cpu")
            return loss

        mb.backward(fn, torch.linspace(-1, 1, 12).view(4, 3))
        first, waiting = gradients(model), fails
        report = mb.backward(fn, torch.linspace(0, 2, 12).view(4, 3))
        assert report.retries == int(fails)
        assert not any(torch.equal(a, b) for a, b in zip(first, gradients(model), strict=True))
        return gradients(model)

    whole = run(fails=False)
    assert resets == 0
    for ours, theirs in zip(run(fails=True), whole, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert resets >= 1


@needs_cpu
def test_a_missing_state_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.fsdp import FSDPModule

    model = sharded_model()
    monkeypatch.delattr(FSDPModule, "_get_fsdp_state")
    with pytest.raises(BatchfitError, match=rf"a model under FSDP2 needs what .*{torch.__version__[:4]}"):
        Shards([model], Ranks.current())


def test_a_factor_is_read_or_refused_and_never_assumed() -> None:
    assert fsdp2.divide_factor(SimpleNamespace(gradient_divide_factor=2)) == 2.0
    assert fsdp2.divide_factor(SimpleNamespace(gradient_divide_factor=None)) is None
    # torch 2.6: none was asked for; one was, which cannot be read; and a torch that keeps it elsewhere.
    assert fsdp2.divide_factor(SimpleNamespace(reduce_scatter_reduce_op=None)) is None
    for group in (SimpleNamespace(reduce_scatter_reduce_op=object()), SimpleNamespace()):
        with pytest.raises(BatchfitError, match=r"factor of your own needs torch 2\.8 or later"):
            fsdp2.divide_factor(group)


def test_a_cpu_that_fsdp2_cannot_run_on_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = sharded_model()
    monkeypatch.delattr(torch.cpu.Stream, "record_event", raising=False)
    assert not fsdp2.runs_on_cpu()
    with pytest.raises(BatchfitError, match=r"FSDP2 on a CPU needs torch 2\.8 or later.*shard on GPUs"):
        Microbatcher(model).backward(lambda x: model(x).sum(), torch.ones(2, 3))


def test_names_that_are_gone_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsdp2, "_NAMES", (*fsdp2._NAMES, ("_fsdp_param", "FSDPParam", "no_such_name")))
    assert fsdp2.missing() == ["FSDPParam.no_such_name"]


def test_a_reset_without_its_names_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither torch's nor ours: a failed step is then refused."""
    more = (*fsdp2._RESET_NAMES, ("_fsdp_state", "FSDPState", "no_such_name"))
    monkeypatch.setattr(fsdp2, "_RESET_NAMES", more)
    monkeypatch.setattr(fsdp2, "lost_to_reset", fsdp2.lost_to_reset.__wrapped__)
    give_back = take_away_fsdp2_reset()
    lost, can = fsdp2.lost_to_reset(), fsdp2.can_reset()
    give_back()
    assert "FSDPState.no_such_name" in lost
    assert not can
