"""What makes two workloads the same for the store: names, shapes and settings. No code is read.

Rules:
- A hit is confirmed by one trial, so a shared key costs a trial and never a wrong answer: an edited function
  keeps its key, and the search continues where the trial needs more memory, or clearly less.
- Functions count by qualified name and file name, modules by `repr` and the shapes of their tensors.
- The same program gives the same key in another process: no id, address, hash order or folder goes in.
- What takes no memory stays out: values of parameters, learning rates, the index of a device.
- Data counts by its shape: a batch is made once, at the smallest size, and every generator is restored.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, Final

import torch
from torch import nn

from batchfit._engine.batch.sources import Longest, Made, Repeated
from batchfit._engine.batch.structure import children, is_array
from batchfit._engine.batch.token_source import TokenBatches
from batchfit._engine.device.device import Device
from batchfit._engine.device.interrupts import Interrupts
from batchfit._engine.snapshot.snapshot import Snapshot
from batchfit._engine.torch_private.autocast import region_of
from batchfit.workload import Workload

ALLOCATOR_VARIABLES: Final = (
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"),
    *("PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_MPS_HIGH_WATERMARK_RATIO"),
    *("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE"),
)
_ADDRESS: Final = re.compile(r"\b0x[0-9a-fA-F]+\b")


class NoKeyError(Exception):
    """A workload that has no key; the text says why."""


class NoSampleError(NoKeyError):
    """No batch could be made: the trial will raise the error itself."""


def digest_of(parts: object) -> str:
    """A name for nested lists, text and numbers: equal for equal ones, whatever the process."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def rank_digest(
    work: Workload, device: Device, *, name: str | None, sample_size: int, asked_bytes: int | None
) -> str:
    """One rank's part of the key: the workload (or its name and shapes), the device, the budget asked for.

    To be made where the workload is, which may be a child process.
    """
    if name is None:
        what = ["described", workload_digest(work, sample_size=sample_size)]
    else:
        what = ["named", name, state_digest(work)]
    # What is free differs from run to run; how much there is does not.
    budget = ["all of", device.total_bytes()] if asked_bytes is None else ["asked", asked_bytes]
    return digest_of([what, environment(device), budget])


def workload_digest(work: Workload, *, sample_size: int) -> str:
    """The digest of a workload that knows its model. `sample_size` is the size of the one batch made."""
    return digest_of(described(work, sample_size=sample_size))


def described(work: Workload, *, sample_size: int) -> list[Any]:
    """All that the digest is made of, as nested lists: two of them show where workloads differ.

    A workload without a model has none: a name and shapes would say too little about its step.
    """
    if work.model is None:
        raise NoKeyError("a step without a model says nothing about itself")
    source = work._parts.get("source")
    # First, and with every generator restored: a dataset is also scanned here for its longest samples.
    sample = None if source is None else _sample(work, source, sample_size)
    return [
        work.kind,
        _model(work.model),
        _optimizer(work.optimizer, work.model),
        [[name, _part(part)] for name, part in sorted(work._parts.items()) if name != "source"],
        [_state(part) for part in work.state],
        _source(source),
        sample,
    ]


def state_digest(work: Workload) -> str:
    """The shapes of the declared state: all that is known of a workload that the user has named."""
    return digest_of([work.kind, [_state(part) for part in work.state]])


def environment(device: Device) -> list[Any]:
    """The device and every setting around the program that changes how much memory a step takes."""
    kind = device.name.partition(":")[0]
    properties: list[object] = []
    if kind in ("cuda", "xpu"):
        backend: Any = getattr(device, "backend", getattr(torch, kind))
        index: Any = getattr(device, "index", 0)
        properties = [str(backend.get_device_name(index)), device.total_bytes()]
        if hasattr(backend, "get_device_capability"):
            properties.append(str(backend.get_device_capability(index)))
    cudnn: Any = torch.backends.cudnn
    cuda: Any = torch.backends.cuda
    flags = {
        "allow_tf32": [cudnn.allow_tf32, torch.get_float32_matmul_precision()],
        "autocast": [torch.is_autocast_enabled(kind), str(torch.get_autocast_dtype(kind))]
        if kind in ("cpu", "cuda", "xpu", "mps")
        else None,
        "cudnn": [cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.version()],
        "default_dtype": str(torch.get_default_dtype()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "grad": torch.is_grad_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
        "attention": [
            *(cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled()),
            *(cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled()),
        ],
    }
    variables = {name: os.environ[name] for name in ALLOCATOR_VARIABLES if name in os.environ}
    built = [torch.__version__, torch.version.cuda, torch.version.hip]
    return [kind, properties, flags, variables, built]


def _model(model: object) -> list[Any]:
    """What a model prints, which of its modules are in training mode, and the versions of their packages."""
    if not isinstance(model, nn.Module):
        return [type(model).__qualname__, [], _versions([type(model)])]
    modules = list(model.modules())
    text = _ADDRESS.sub("0x", repr(model))  # an address says nothing
    return [text, [one.training for one in modules], _versions([type(one) for one in modules])]


def _versions(classes: list[type]) -> dict[str, str]:
    packages = {cls.__module__.partition(".")[0] for cls in classes}
    versions = {name: getattr(sys.modules.get(name), "__version__", None) for name in packages}
    return {name: version for name, version in versions.items() if isinstance(version, str)}


def _sample(work: Workload, source: Any, size: int) -> Any:
    """The shapes of a batch of `size` samples; what making it has changed is restored."""
    # Parameters are not copied: a batch is made without touching them, and copies of a large model are slow.
    small = [
        part for part in work.state if not (isinstance(part, nn.Module) or hasattr(part, "param_groups"))
    ]
    why = ""
    try:
        snapshot = Snapshot.take(small)
    except TypeError:  # a state that cannot be restored: the search will refuse it
        raise NoSampleError("its state cannot be restored") from None
    with Interrupts() as interrupts:
        try:
            with interrupts.opened():
                by_tokens = isinstance(source, TokenBatches)
                return _shapes(source.makers(size)[0]() if by_tokens else source(size))
        except Exception as error:  # noqa: BLE001  the trial will raise it, where the user expects it
            why = f"{type(error).__name__} while making a batch of {size}"
        finally:
            snapshot.restore()
    raise NoSampleError(why)


def _shapes(node: Any) -> Any:
    """The shape of a batch: tensors and arrays by shape, text by length, all else by type."""
    if isinstance(node, torch.Tensor):
        return _tensor(node)
    if is_array(node):
        return ["array", list(node.shape), str(node.dtype)]
    if isinstance(node, str | bytes):
        return ["text", len(node)]
    items = children(node)
    if items is not None:
        return [type(node).__qualname__, [[label, _shapes(value)] for label, value in items]]
    if isinstance(node, list | tuple):
        return [type(node).__qualname__, [_shapes(value) for value in node]]
    extent = getattr(node, "size", None)  # a PIL image
    return [type(node).__qualname__, list(extent) if isinstance(extent, tuple) else None]


def _optimizer(optimizer: Any, model: object) -> Any:
    """Class and options of each group. Of a number only whether it is zero counts: momentum takes
    memory, 0.9 or 0.95 does not; of the learning rate only whether it is a tensor."""
    if optimizer is None:
        return None
    names: dict[int, str] = {}
    if isinstance(model, nn.Module):
        names = {id(one): name for name, one in model.named_parameters()}
    groups = [
        [
            [names.get(id(one)) or _tensor(one) for one in group["params"]],
            [[name, _option(name, group[name])] for name in sorted(group) if name != "params"],
        ]
        for group in getattr(optimizer, "param_groups", ())
    ]
    wrapped = getattr(optimizer, "optimizer", None)  # of a wrapper such as Accelerate's
    return [type(optimizer).__qualname__, type(wrapped).__qualname__, groups]


def _option(name: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return "tensor"
    if "lr" in name.split("_"):
        return "number"
    if isinstance(value, float):
        return value != 0
    if isinstance(value, tuple | list):
        return [_option("", one) for one in value]
    return _part(value)


def _part(value: Any) -> Any:
    """What else a step is made of: plain values as they are, functions and objects by their names."""
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device):
        return [type(value).__name__, str(value)]
    if isinstance(value, Mapping):
        return [[str(name), _part(one)] for name, one in value.items()]
    if isinstance(value, list | tuple):
        return [_part(one) for one in value]
    if isinstance(value, functools.partial):
        return [_part(value.func), _part(value.args), _part(value.keywords)]
    if isinstance(value, torch.autocast):
        region = region_of(value)
        return ["autocast", region.device, str(region.dtype), region.enabled, region.caches]
    if isinstance(value, torch.amp.GradScaler):
        return ["scaler", value.is_enabled()]
    code = getattr(value, "__code__", None)  # a method's too
    file = "" if code is None else PurePath(code.co_filename).name
    return [getattr(value, "__qualname__", type(value).__qualname__), file]


def _state(part: Any) -> Any:
    """A part of the declared state: its class, and the tensors in it."""
    if isinstance(part, nn.Module):
        tensors = {**dict(part.named_parameters()), **dict(part.named_buffers())}
        return [type(part).__qualname__, [[name, _tensor(one)] for name, one in tensors.items()]]
    if isinstance(part, torch.Tensor):
        return _tensor(part)
    if isinstance(groups := getattr(part, "param_groups", None), list):
        sizes = [[_tensor(one) for one in group["params"]] for group in groups]
        return [type(part).__qualname__, sizes]
    if isinstance(part, Mapping):
        return [[str(name), _state(one)] for name, one in part.items()]
    if isinstance(part, list | tuple):
        return [_state(one) for one in part]
    return type(part).__qualname__


def _source(source: Any) -> Any:
    """Where batches come from. Of data only the shape counts, which `_sample` and the lengths show."""
    if isinstance(source, Made):
        return ["made", _part(source.make)]
    if isinstance(source, Longest):
        return ["longest", type(source.dataset).__qualname__, _part(source.collate), source.lengths()]
    if isinstance(source, TokenBatches):
        return ["tokens", type(source.dataset).__qualname__, _part(source.collate), source.described()]
    if isinstance(source, Repeated):
        return ["repeated", _shapes(source.example)]
    return _part(source)


def _tensor(tensor: torch.Tensor) -> list[Any]:
    described: list[Any] = [
        *(type(tensor).__qualname__, [str(side) for side in tensor.shape], str(tensor.dtype)),
        *(str(tensor.layout), tensor.device.type, tensor.requires_grad),
    ]
    if tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_contiguous():
        described.append(list(tensor.stride()))  # channels-last chooses other kernels
    placements = getattr(tensor, "placements", None)  # a DTensor: how it is spread over the ranks
    if placements is not None:
        described.append([str(placements), _tensor(tensor.to_local())])  # type: ignore[attr-defined]
    return described
