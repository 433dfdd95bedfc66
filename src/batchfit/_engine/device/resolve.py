"""Finds a device by its name, index or UUID, or by where the tensors are.

Rules:
- A wrong device is a `ValueError` that lists those which are there, before anything is allocated on one.
- A device that torch cannot reach is never guessed at: MIG slices and hidden GPUs are chosen with
  `CUDA_VISIBLE_DEVICES`, before the program starts, and the error says so.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from batchfit._engine.device.device import CpuDevice, Device, read_ram
from batchfit._engine.device.gpu import CudaDevice, MpsDevice, XpuDevice
from batchfit._engine.device.tensors import tensors_in

# How a device can be named: "cuda:1", 1 or "1", "GPU-8932f937", torch.device("cuda", 1).
DeviceSpec = str | int | torch.device


@dataclass(frozen=True, slots=True)
class KnownDevice:
    """One line of `batchfit doctor`; None where the system does not say."""

    name: str
    description: str
    total_bytes: int | None
    free_bytes: int | None
    tested: bool
    note: str = ""
    uuid: str = ""


def known_devices() -> list[KnownDevice]:
    """Every device that this torch can reach, the CPU last."""
    found = []
    for device, tested in _accelerators():
        try:
            total, free = device.total_bytes(), device.budget_bytes()
        except RuntimeError as error:  # one broken device must not hide the others
            text = str(error).partition("\n")[0]
            found.append(KnownDevice(device.name, "cannot be reached", None, None, tested, text))
            continue
        note = "" if tested else "untested on real hardware"
        found.append(KnownDevice(device.name, _description(device), total, free, tested, note, _uuid(device)))
    ram = read_ram()
    cores = f"{os.cpu_count()} cores, {platform.machine()}"
    return [*found, KnownDevice("cpu", cores, ram.total_bytes, ram.available_bytes, True)]


def _accelerators() -> Iterator[tuple[Device, bool]]:
    if torch.cuda.is_available():
        yield from ((CudaDevice(index), True) for index in range(torch.cuda.device_count()))
    if torch.xpu.is_available():
        yield from ((XpuDevice(index), False) for index in range(torch.xpu.device_count()))
    if torch.backends.mps.is_available():
        yield MpsDevice(), False


def _description(device: Device) -> str:
    if isinstance(device, CudaDevice | XpuDevice):
        return str(device.backend.get_device_name(device.index))
    return "Apple GPU"


def _uuid(device: Device) -> str:
    """`GPU-8932f937-d72c-...`, as nvidia-smi and CUDA_VISIBLE_DEVICES call it; empty where there is none."""
    if not isinstance(device, CudaDevice):
        return ""
    properties: Any = device.backend.get_device_properties(device.index)
    plain = str(getattr(properties, "uuid", ""))  # without the prefix; an older torch has none at all
    return f"GPU-{plain}" if plain else ""


def resolve_device(spec: DeviceSpec | Device | None, *, near: Iterable[object] = ()) -> Device:
    """The device to measure: the one named, else where the tensors of `near` are, else the accelerator.

        resolve_device("cuda:1")
        resolve_device("GPU-8932f937")  # the beginning of a UUID, as long as only one device has it
        resolve_device(None, near=[model, optimizer])

    `near` may hold modules, optimizers, tensors and lists or dicts of them; anything else is passed over. A
    tensor on an accelerator decides before one on the CPU, wherever it stands: an average of the weights that
    is kept in RAM says nothing about where the model runs.
    """
    if isinstance(spec, Device):
        return spec
    if isinstance(spec, str) and spec.upper().startswith(("GPU-", "MIG-")):
        return _counting(_by_uuid(spec))
    wanted = _device_near(near) if spec is None else _parse(spec)
    if wanted is None:
        return _counting(next((device for device, _ in _accelerators()), CpuDevice()))
    if wanted.type == "cpu":
        return CpuDevice()
    index: int | None = wanted.index  # torch's stubs say int, and "cuda" has None
    if index is None:
        index = torch.cuda.current_device() if wanted.type == "cuda" and torch.cuda.is_available() else 0
    for device, _ in _accelerators():
        if device.name in (f"{wanted.type}:{index}", wanted.type):
            return _counting(device)
    asked = spec if isinstance(spec, int) else str(wanted)
    raise ValueError(f"device must be {_available()}, not {asked!r}{_remedy(wanted.type)}")


def device_to_run(held: Iterable[object], spec: DeviceSpec | Device | None = None) -> Device:
    """The device of a step over what is held: the one named, else where that is; it must be a real one."""
    parts = tuple(held)
    if {tensor.device.type for tensor in tensors_in(parts)} == {"meta"}:
        raise ValueError(
            "the model must be on a device that runs it, not on the meta device: predict and explain "
            "answer for such a model, everything else has to run it"
        )
    return resolve_device(spec, near=parts)


def _parse(spec: object) -> torch.device:
    if isinstance(spec, bool) or not isinstance(spec, str | int | torch.device):
        raise TypeError(
            f"device must be text such as 'cuda:0', an index, a UUID or a torch.device, not {spec!r}"
        )
    try:
        if isinstance(spec, torch.device):
            return spec
        if isinstance(spec, int) or (spec.isascii() and spec.isdecimal()):  # a command line gives text
            kind = next((device.name.partition(":")[0] for device, _ in _accelerators()), "cuda")
            return torch.device(f"{kind}:{spec}")
        return torch.device(spec)
    except RuntimeError:
        raise ValueError(f"device must be {_available()}, not {spec!r}") from None


def _by_uuid(spec: str) -> Device:
    """The CUDA device whose UUID begins like that."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    cudas = [device for device, _ in _accelerators() if isinstance(device, CudaDevice)]
    if spec in visible.split(","):  # CUDA numbers the devices in this order; a MIG slice has no other name
        index = visible.split(",").index(spec)
        if index < len(cudas):
            return cudas[index]
    found = [device for device in cudas if _uuid(device).lower().startswith(spec.lower())]
    if len(found) == 1:
        return found[0]
    why = ""
    if spec.upper().startswith("MIG-"):
        why = f". A MIG slice is chosen before a program starts: CUDA_VISIBLE_DEVICES={spec}"
    elif found:
        why = f", which is the beginning of {len(found)} UUIDs"
    elif visible:
        why = f". CUDA_VISIBLE_DEVICES={visible} hides all others"
    elif not cudas:
        why = _remedy("cuda")
    raise ValueError(f"device must be {_available(with_uuids=True)}, not {spec!r}{why}")


def _counting(device: Device) -> Device:
    """The device, unless a setting has switched off the counters that everything here reads."""
    if isinstance(device, CudaDevice) and "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ:
        raise ValueError(
            f"device must be one whose memory torch counts, not {device.name!r} while "
            "PYTORCH_NO_CUDA_MEMORY_CACHING is set. Unset it"
        )
    return device


def _available(*, with_uuids: bool = False) -> str:
    there = [device for device, _ in _accelerators()]
    uuids = [_uuid(device) if with_uuids else "" for device in there]
    names = [repr(one.name) + (f" ({uuid})" if uuid else "") for one, uuid in zip(there, uuids, strict=True)]
    return f"one of {', '.join([*names, repr('cpu')])}" if names else "'cpu'"


def _remedy(kind: str) -> str:
    if kind != "cuda" or torch.cuda.is_available():
        return ""
    if torch.version.cuda is None and torch.version.hip is None:
        return f". torch {torch.__version__} was built without CUDA: install a build with it"
    return ". torch finds no GPU: check nvidia-smi and CUDA_VISIBLE_DEVICES"


def _device_near(near: Iterable[object]) -> torch.device | None:
    first: torch.device | None = None
    for tensor in tensors_in(near):
        if tensor.device.type not in ("cpu", "meta"):
            return tensor.device
        if tensor.device.type == "cpu" and first is None:
            first = tensor.device
    return first
