"""One unprotected optimizer step (unscale, clip, step, update), and how far it has come.

Rules: `unscale_`, clip, step, `update`, each by the public call; what a failed step may have touched can be
named afterwards; of a scaler, its private notes on each optimizer are read: they are not public.
"""

from __future__ import annotations

from typing import Literal, final

import torch
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from batchfit._engine.device.tensors import bytes_of, tensors_in
from batchfit._engine.torch_private.optimizers import forget, found_inf, is_unscaled, takes_scaler
from batchfit.errors import StepInterruptedError


@final
class StepRun:
    """One call of `step`: what it is made of, and how far it has come."""

    def __init__(
        self,
        optimizers: tuple[Optimizer, ...],
        scaler: torch.amp.GradScaler | None,
        clip_norm: float | None,
    ) -> None:
        self.optimizers = optimizers
        self.scaler = scaler
        self.clip_norm = clip_norm
        self.parameters = [
            [p for group in one.param_groups for p in group["params"] if p.grad is not None]
            for one in optimizers
        ]
        self.norm: torch.Tensor | None = None
        self.skipped = False  # known while recording only: reading it may synchronize
        self._phase: Literal["gradients", "parameters", "scaler"] = "gradients"
        self._at = 0
        self._versions: list[int] = []

    def run(self, *, recording: bool) -> None:
        """The step, as one would write it."""
        self._phase, self._at, self._versions = "gradients", 0, []
        scaler, clip_norm = self.scaler, self.clip_norm
        if scaler is not None:
            for one in self.optimizers:
                # A fused optimizer unscales by itself. Where the user has done it, it must not be done twice.
                late = clip_norm is None and takes_scaler(one)
                if not late and not is_unscaled(scaler, one):
                    scaler.unscale_(one)
        if clip_norm is not None:
            self.norm = clip_grad_norm_([p for some in self.parameters for p in some], clip_norm)
        for at, one in enumerate(self.optimizers):
            self._versions = [_version_of(parameter) for parameter in self.parameters[at]]
            self._phase, self._at = "parameters", at
            if scaler is None:
                one.step()
            else:
                scaler.step(one)
        if scaler is not None:
            self._phase = "scaler"
            if recording:
                self.skipped = found_inf(scaler)
            scaler.update()

    def devices(self) -> set[torch.device]:
        return {parameter.device for some in self.parameters for parameter in some}

    def gradients(self) -> int:
        return sum(map(len, self.parameters))

    def _holders(self) -> list[tuple[str, int]]:
        """Weights, gradients and state of the optimizers, the most first."""
        weights = [one for some in self.parameters for one in some]
        gradients = [one.grad for one in weights if one.grad is not None]
        state = [list(one.state.values()) for one in self.optimizers]
        found = [
            ("weights", sum(map(bytes_of, weights))),
            ("gradients", sum(map(bytes_of, gradients))),
            ("optimizer state", sum(map(bytes_of, tensors_in(state)))),
        ]
        return sorted((one for one in found if one[1]), key=lambda one: -one[1])

    def interrupted(self, detail: str) -> StepInterruptedError:
        """The error for a step that had an OOM and cannot be undone; what the scaler noted is forgotten."""
        optimizer, parameters = self.optimizers[self._at], self.parameters[self._at]
        if self.scaler is not None and self._phase != "scaler":
            forget(self.scaler, self.optimizers)
        moved = []
        if self._phase == "parameters":
            names = _names_of(optimizer)
            pairs = zip(parameters, self._versions, strict=True)
            moved = [names[p] for p, version in pairs if _version_of(p) != version]
        return StepInterruptedError(
            self._phase,
            optimizers=[type(one).__name__ for one in self.optimizers],
            interrupted=self._at,
            moved=moved,
            parameters=len(parameters),
            detail=detail,
            holders=self._holders(),
        )


def _version_of(parameter: torch.Tensor) -> int:
    return -1 if parameter.is_inference() else parameter._version


def _names_of(optimizer: Optimizer) -> dict[torch.Tensor, str]:
    names: dict[torch.Tensor, str] = {}
    for at, group in enumerate(optimizer.param_groups):
        given = group.get("param_names") or [f"group {at} parameter {i}" for i in range(len(group["params"]))]
        names.update(zip(group["params"], given, strict=True))
    return names
