"""What makes two workloads the same for the store: a digest of all that memory depends on.

Rules:
- The same program gives the same digest in another process (`describe` sees to that).
- Where in doubt, more goes in: a needless miss costs one search, a shared digest a wrong answer.
- What takes no memory stays out: values of parameters, learning rates, the place of a device.
- Data counts by its shape: a batch is made once, at the smallest size, and every generator is put back.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn

from batchfit._engine.batch.sources import Longest, Made, Repeated
from batchfit._engine.batch.structure import children, is_array
from batchfit._engine.device.interrupts import Interrupts
from batchfit._engine.device.resolve import Device
from batchfit._engine.snapshot.snapshot import Snapshot
from batchfit._engine.store.describe import (
    ATOMS,
    UndescribableError,
    ValueReader,
    atom,
    digest_of,
    tensor_shape,
)
from batchfit.workload import Workload

ALLOCATOR_VARIABLES: Final = (
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"),
    *("PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_MPS_HIGH_WATERMARK_RATIO"),
    *("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE"),
)
_ADDRESS: Final = re.compile(r"\b0x[0-9a-fA-F]+\b")


class NoSampleError(UndescribableError):
    """No batch could be made: the trial will say so itself."""


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

    A workload without a model has none: what its step does cannot be read.
    """
    if work.model is None:
        raise UndescribableError("a step without a model says nothing about itself")
    reader = ValueReader()
    source = work._parts.get("source")
    # First, and with every generator put back: a dataset is also scanned here for its longest samples.
    sample = None if source is None else _sample(work, source, sample_size)
    return [
        work.kind,
        reader.read(work.model),
        _model_text(work.model),
        _optimizer(reader, work.optimizer, work.model),
        [[name, reader.read(part)] for name, part in sorted(work._parts.items()) if name != "source"],
        [_state(part) for part in work.state],
        _source(reader, source),
        sample,
    ]


def state_digest(work: Workload) -> str:
    """The shapes of the declared state: what can be told of a workload that the user has named."""
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


def _model_text(model: object) -> str:
    """`repr(model)` shows what modules say about themselves; an address in it says nothing."""
    return _ADDRESS.sub("0x", repr(model)) if isinstance(model, nn.Module) else ""


def _sample(work: Workload, source: Any, size: int) -> Any:
    """The shapes of a batch of `size` samples; what making it has moved is put back."""
    # Parameters are not copied: a batch is made without touching them, and copies of a large model are slow.
    small = [
        part for part in work.state if not (isinstance(part, nn.Module) or hasattr(part, "param_groups"))
    ]
    why = ""
    try:
        snapshot = Snapshot.take(small)
    except TypeError:  # a state that cannot be put back: the search will refuse it
        raise NoSampleError("its state cannot be put back") from None
    with Interrupts() as interrupts:
        try:
            with interrupts.opened():
                return _shapes(source(size))
        except Exception as error:  # noqa: BLE001  the trial will raise it, where the user sees it in its place
            why = f"{type(error).__name__} while making a batch of {size}"
        finally:
            snapshot.restore()
    raise NoSampleError(why)


def _shapes(node: Any) -> Any:
    """The shape of a batch: tensors and arrays by shape, text by length, all else by type."""
    if isinstance(node, torch.Tensor):
        return tensor_shape(node)
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


def _optimizer(reader: ValueReader, optimizer: Any, model: object) -> Any:
    """Class and options of each group. Of a number only whether it is zero counts: momentum takes
    memory, 0.9 or 0.95 does not; of the learning rate only whether it is a tensor."""
    if optimizer is None:
        return None
    names: dict[int, str] = {}
    if isinstance(model, nn.Module):
        names = {id(one): name for name, one in model.named_parameters()}
    groups = [
        [
            [names.get(id(one)) or tensor_shape(one) for one in group["params"]],
            [[name, _option(name, group[name])] for name in sorted(group) if name != "params"],
        ]
        for group in getattr(optimizer, "param_groups", ())
    ]
    own = vars(optimizer) if hasattr(optimizer, "__dict__") else {}
    hooks = [
        [name, reader.read(list(own[name].values()))]
        for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
        if own.get(name)
    ]
    # Some keep what they were told beside the groups (bitsandbytes: in `args`).
    more = [
        [name, _option(name, one) if type(one) in ATOMS else reader.read(one)]
        for name, one in sorted(own.items())
        if not name.startswith("_") and name != "optimizer" and not isinstance(one, Mapping | list)
    ]
    wrapped = own.get("optimizer")  # of a wrapper such as Accelerate's
    inner = _optimizer(reader, wrapped, model) if hasattr(wrapped, "param_groups") else None
    return [reader.read(type(optimizer)), groups, hooks, more, inner]


def _state(part: Any) -> Any:
    """A part of the declared state: its class, and the tensors in it."""
    if isinstance(part, nn.Module):
        tensors = {**dict(part.named_parameters()), **dict(part.named_buffers())}
        return [type(part).__qualname__, [[name, tensor_shape(one)] for name, one in tensors.items()]]
    if isinstance(part, torch.Tensor):
        return tensor_shape(part)
    if isinstance(groups := getattr(part, "param_groups", None), list):
        sizes = [[tensor_shape(one) for one in group["params"]] for group in groups]
        return [type(part).__qualname__, sizes]
    if isinstance(part, Mapping):
        return [[str(name), _state(one)] for name, one in part.items()]
    if isinstance(part, list | tuple):
        return [_state(one) for one in part]
    return type(part).__qualname__


def _source(reader: ValueReader, source: Any) -> Any:
    """Where batches come from. Of data only the shape counts, which `_sample` and the lengths show."""
    if isinstance(source, Made):
        return ["made", reader.read(source.make)]
    if isinstance(source, Longest):
        return ["longest", reader.read(type(source.dataset)), reader.read(source.collate), source.lengths()]
    if isinstance(source, Repeated):
        return ["repeated", _shapes(source.example)]
    return reader.read(source)


def _option(name: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return "tensor"
    if "lr" in name.split("_"):
        return "number"
    if isinstance(value, float):
        return value != 0
    if isinstance(value, tuple | list):
        return [_option("", one) for one in value]
    return atom(value) if type(value) in ATOMS else type(value).__qualname__
