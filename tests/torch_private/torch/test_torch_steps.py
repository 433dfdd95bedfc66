"""The scaler and torch's optimizers as they are read, and what is said where a name of them is missing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from batchfit import Microbatcher
from batchfit._engine.optimizer_step.state import can_make_state
from batchfit._engine.torch_private import optimizers
from batchfit._noise.gradient_norms import _unscaled
from batchfit.errors import BatchfitError


class ElsewhereScaler(torch.amp.GradScaler):
    """One that keeps its notes, or its scale, under another name."""

    def __getattribute__(self, name: str) -> Any:
        if name in ("_per_optimizer_states", "_scale") and name in object.__getattribute__(self, "gone"):
            raise AttributeError(name)
        return super().__getattribute__(name)

    gone: tuple[str, ...] = ()


def stepped() -> tuple[nn.Linear, torch.optim.Optimizer]:
    model = nn.Linear(2, 1)
    return model, torch.optim.Adam(model.parameters())


def test_the_notes_of_a_scaler_are_read_and_forgotten() -> None:
    assert optimizers.can_read_states()
    assert optimizers.reads_scale()
    model, optimizer = stepped()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    assert optimizers.scale_of(scaler) is None  # made with the first loss
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    scale = optimizers.scale_of(scaler)
    assert scale is not None
    assert scale.item() == 4.0
    assert not optimizers.is_unscaled(scaler, optimizer)
    scaler.unscale_(optimizer)
    assert optimizers.is_unscaled(scaler, optimizer)
    assert not optimizers.found_inf(scaler)
    optimizers.forget(scaler, [optimizer])
    assert not optimizers.is_unscaled(scaler, optimizer)
    model.bias.grad.fill_(float("inf"))  # type: ignore[union-attr]
    scaler.unscale_(optimizer)
    assert optimizers.found_inf(scaler)


def test_a_scaler_is_restored_and_begun_again() -> None:
    model, optimizer = stepped()
    scaler = torch.amp.GradScaler("cpu")
    before = optimizers.scaler_attributes(scaler)
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    scaler.unscale_(optimizer)
    held = optimizers.scaler_attributes(scaler)
    assert before is not None
    assert held is not None
    assert before["_scale"] is None
    assert held["_scale"] is optimizers.scale_of(scaler)
    optimizers.forget(scaler, [optimizer])
    assert len(held["_per_optimizer_states"]) == 1  # its own copy
    optimizers.forget_steps_of(scaler)
    assert optimizers.scale_of(scaler) is None
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert optimizers.scaler_attributes(None) is None


def test_fused_steps_unscale_by_themselves() -> None:
    _, optimizer = stepped()
    assert not optimizers.takes_scaler(optimizer)
    optimizers.set_takes_scaler(optimizer)
    assert optimizers.takes_scaler(optimizer)


def test_a_scaler_whose_notes_cannot_be_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = stepped()
    scaler = ElsewhereScaler("cpu")
    before = model.weight.detach().clone()
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    monkeypatch.setattr(ElsewhereScaler, "gone", ("_per_optimizer_states",))
    with pytest.raises(BatchfitError, match=r"step with a GradScaler needs what .*unscaled twice"):
        Microbatcher(model).step(optimizer, scaler=scaler)
    assert torch.equal(model.weight, before)


def test_without_the_scale_as_a_tensor_the_public_call_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = stepped()
    scaler = ElsewhereScaler("cpu", init_scale=8.0)
    scaler.scale(model(torch.ones(1, 2)).sum())
    assert _unscaled(torch.tensor(64.0), scaler).item() == 1.0
    monkeypatch.setattr(ElsewhereScaler, "gone", ("_scale",))
    monkeypatch.setattr(ElsewhereScaler, "get_scale", lambda self: 8.0)
    assert optimizers.scale_of(scaler) is None
    assert _unscaled(torch.tensor(64.0), scaler).item() == 1.0


def test_state_is_made_as_the_step_makes_it() -> None:
    assert optimizers.can_make_state()
    model, optimizer = stepped()
    model(torch.ones(1, 2)).sum().backward()
    optimizers.make_state(optimizer)
    assert {"step", "exp_avg", "exp_avg_sq"} <= set(optimizer.state[model.weight])
    assert not optimizers.has_step_hook(optimizer)
    optimizer.register_step_pre_hook(lambda *_: None)
    assert optimizers.has_step_hook(optimizer)


def test_where_state_cannot_be_made_the_step_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    _, optimizer = stepped()
    assert can_make_state(optimizer, scaled=False)
    with monkeypatch.context() as patch:
        patch.delattr(torch.optim.Adam, "_init_group")
        assert not optimizers.can_make_state()
        assert not can_make_state(optimizer, scaled=False)
    vars(optimizer).pop("_optimizer_step_pre_hooks")  # who knows what runs then
    assert not can_make_state(optimizer, scaled=False)


def test_who_chooses_the_foreach_form() -> None:
    model, optimizer = stepped()
    assert optimizers.chooses_foreach(optimizer)

    class Own(torch.optim.Optimizer):
        pass

    assert not optimizers.chooses_foreach(Own(model.parameters(), {}))
