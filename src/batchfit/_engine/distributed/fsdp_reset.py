"""Resets FSDP2 (`fully_shard`) after a step that failed, and tests whether that works with this torch.

Rules:
- A step may be tried again only if all ranks failed in it, before their next collective: a rank that fails
  alone leaves the others waiting, and only agreed sizes keep that from happening.
- After a failed backward FSDP2 goes on silently and is wrong: parameters without gradients, others
  half unsharded. `wrappers.settle` resets it. Whether that is enough is not read from a version number: a
  self-test on the same mesh fails a tiny model in forward and in backward, tries again, and compares
  parameters bit for bit with an undisturbed run. All ranks get the same verdict, once per process and mesh.
- Where the self-test fails, an OOM in a step is an error on all ranks, never a retry.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn

from batchfit._engine.distributed.ranks import Ranks
from batchfit._engine.snapshot import wrappers
from batchfit._engine.torch_private import fsdp2, needs

_WIDTH = 4


@final
@dataclass(frozen=True, slots=True)
class SelfTest:
    """Whether a failed step may be tried again; `why` says what differed where not."""

    forward: bool
    backward: bool
    why: str = ""

    @property
    def passed(self) -> bool:
        """Whether a step that failed anywhere may be tried again."""
        return self.forward and self.backward


def sharded_modules(modules: Iterable[nn.Module]) -> list[Any]:
    """Those that `fully_shard` was called on."""
    return [one for one in modules if fsdp2.is_sharded(one)]


def reset(module: nn.Module) -> None:
    """Reset FSDP2 after a step that failed; gradients that it has not sharded yet are dropped."""
    for one in module.modules():
        wrappers.settle(one)


verdicts: dict[tuple[Any, ...], SelfTest] = {}


def self_test(mesh: Any, *, ranks: Ranks | None = None) -> SelfTest:
    """Whether failed steps may be tried again on this mesh, with this torch; all ranks call it together.

        if self_test(mesh).passed: ...

    Kept for the process. No random numbers are drawn.
    """
    key = (torch.__version__, mesh.device_type, tuple(mesh.shape))
    if key not in verdicts and mesh.device_type == "cpu" and not fsdp2.runs_on_cpu():
        verdicts[key] = SelfTest(forward=False, backward=False, why=needs.FSDP2_ON_CPU.why())
    if key not in verdicts:
        ranks = ranks or Ranks.current()
        mine = {}
        for phase in ("forward", "backward"):
            # The first OOM may be one of an evaluation.
            with torch.inference_mode(mode=False), torch.enable_grad():
                mine[phase] = _differs(mesh, phase)
        found = ranks.gather(mine, doing="the self-test of FSDP2")
        whys = {phase: next((one[phase] for one in found if one[phase]), "") for phase in mine}
        why = "; ".join(f"after a failure in {phase}: {text}" for phase, text in whys.items() if text)
        verdicts[key] = SelfTest(not whys["forward"], not whys["backward"], why)
    return verdicts[key]


class _Stop(Exception):
    """What the self-test raises."""


class _Fault(nn.Module):
    """Raises once, in the phase that is set."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.phase == "forward":
            self._raise()
        if x.requires_grad:
            x.register_hook(self._in_backward)  # type: ignore[no-untyped-call]
        return x

    def _in_backward(self, gradient: torch.Tensor) -> None:
        if self.phase == "backward":
            self._raise()

    def _raise(self) -> None:
        self.phase = ""
        raise _Stop


def _model(mesh: Any) -> tuple[nn.Module, _Fault, torch.optim.Optimizer]:
    from torch.distributed.fsdp import fully_shard

    fault = _Fault()
    # Weights without random numbers: seeding would reach the generators of all devices.
    layers = [nn.Linear(_WIDTH, _WIDTH, device="meta").to_empty(device="cpu") for _ in range(2)]
    with torch.no_grad():
        for number, parameter in enumerate(one for layer in layers for one in layer.parameters()):
            values = torch.arange(parameter.numel(), dtype=parameter.dtype) + number
            parameter.copy_(values.sin().view_as(parameter) / _WIDTH**0.5)
    model = nn.Sequential(layers[0], fault, layers[1]).to(mesh.device_type)
    for part in (*layers, model):
        fully_shard(part, mesh=mesh)
    return model, fault, torch.optim.SGD(model.parameters(), lr=0.1)


def _steps(mesh: Any, phase: str) -> list[torch.Tensor]:
    """This rank's parameters after three steps, of which the second fails once in `phase`."""
    model, fault, optimizer = _model(mesh)
    x = torch.linspace(-1, 1, 2 * _WIDTH, device=mesh.device_type).view(2, _WIDTH)
    for number in range(3):
        fault.phase = phase if number == 1 else ""
        for _ in range(2):
            try:
                optimizer.zero_grad()
                model(x).square().sum().backward()
            except _Stop:
                failed = True
            else:
                failed = False
            if not failed:
                break
            reset(model)
        optimizer.step()
    whole: Any = list(model.parameters())
    return [parameter.to_local().detach().clone() for parameter in whole]


def _differs(mesh: Any, phase: str) -> str:
    """How parameters differ from an undisturbed run; "" where they are equal, bit for bit."""
    right = _steps(mesh, "")
    try:
        tried = _steps(mesh, phase)
    except Exception as error:  # noqa: BLE001  whatever it is, trying again does not work here
        return f"{type(error).__name__}: {error}"
    unequal = sum(not torch.equal(a, b) for a, b in zip(right, tried, strict=True))
    return f"{unequal} of {len(right)} parameters differ" if unequal else ""
