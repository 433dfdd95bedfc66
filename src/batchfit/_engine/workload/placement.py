"""Which device a workload runs on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from batchfit._engine.device.device import Device
from batchfit._engine.device.resolve import DeviceSpec, resolve_device
from batchfit._engine.device.tensors import own_bytes, tensors_in

if TYPE_CHECKING:
    from batchfit.workload import Workload


def device_to_run(work: Workload, spec: DeviceSpec | Device | None = None) -> Device:
    """The device on which a workload runs: the one named, else where its state is; it must be a real one."""
    parts = (*work.state, work.model)
    kinds = {tensor.device.type for tensor in tensors_in(parts)}
    if kinds == {"meta"}:
        raise ValueError(
            "the model must be on a device that runs it, not on the meta device: predict and explain "
            "answer for such a model, everything else has to run it"
        )
    return resolve_device(spec, near=parts)


def ram_held_bytes(work: Workload) -> int:
    """Bytes that the workload holds in RAM already."""
    return own_bytes((*work.state, work.model), on=torch.device("cpu"))
