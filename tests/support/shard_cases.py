"""Models and ways to spread them over ranks: what real gloo ranks run, and what one process predicts.

A way is a name of `WAYS`: the model is wrapped by the program itself, as a user would write it. `LAYOUTS` are
those that `shard=` can name for a model that nobody wrapped.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from cpu_truth import STEPS, Peaks, predicted
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint

import batchfit
from batchfit._engine.sharding.pure.layout import ShardLayout
from batchfit._engine.sharding.sharding import changes_for
from batchfit._engine.virtual_memory.op_sizes import block_bytes
from batchfit._engine.workload.reachable import reach_of

SIZE = 4


class Mlp(nn.Module):
    """Blocks of two layers, of lengths that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(301, 1001), nn.GELU(), nn.Linear(1001, 301)) for _ in range(4))
        self.layers = nn.ModuleList(blocks)
        self.head = nn.Linear(301, 103)

    def forward(self, value: Tensor) -> Tensor:
        for layer in self.layers:
            value = value + layer(value)
        return self.head(value)


def mlp() -> tuple[nn.Module, Any, Any]:
    return Mlp(), lambda model, x: model(x).square().mean(), lambda n: torch.randn(n, 16, 301)


def _tokens(vocabulary: int, length: int) -> Callable[[int], dict[str, Tensor]]:
    def make(n: int) -> dict[str, Tensor]:
        ids = torch.zeros(n, length, dtype=torch.int64)
        return {"input_ids": ids, "labels": ids}

    return make


def _own_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def gpt2() -> tuple[nn.Module, Any, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=4, n_head=4, n_embd=192, vocab_size=2003, n_positions=128, use_cache=False,
        attn_implementation="eager",
    )  # fmt: skip
    return GPT2LMHeadModel(config), _own_loss, _tokens(2003, 64)


def llama() -> tuple[nn.Module, Any, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=3, hidden_size=192, intermediate_size=512, num_attention_heads=6, vocab_size=1999,
        num_key_value_heads=3, max_position_embeddings=128, use_cache=False, attn_implementation="eager",
    )  # fmt: skip
    return LlamaForCausalLM(config), _own_loss, _tokens(1999, 64)


def vit() -> tuple[nn.Module, Any, Any]:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        num_hidden_layers=4, hidden_size=192, intermediate_size=700, num_attention_heads=4, image_size=64,
        patch_size=8, num_labels=101, attn_implementation="eager",
    )  # fmt: skip
    labels = {"labels": torch.zeros(1, dtype=torch.int64)}

    def make(n: int) -> dict[str, Tensor]:
        return {"pixel_values": torch.randn(n, 3, 64, 64), "labels": labels["labels"].repeat(n)}

    return ViTForImageClassification(config), _own_loss, make


def resnet() -> tuple[nn.Module, Any, Any]:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=32, hidden_sizes=[64, 128, 256, 384], depths=[2, 2, 2, 2], num_labels=103,
        layer_type="basic",
    )  # fmt: skip

    def make(n: int) -> dict[str, Tensor]:
        return {"pixel_values": torch.randn(n, 3, 64, 64), "labels": torch.zeros(n, dtype=torch.int64)}

    return ResNetForImageClassification(config), _own_loss, make


MODELS: dict[str, Callable[[], tuple[nn.Module, Any, Any]]] = {
    "mlp": mlp, "gpt2": gpt2, "llama": llama, "vit": vit, "resnet": resnet,
}  # fmt: skip


def _blocks(model: nn.Module) -> list[nn.Module]:
    return [one for part in model.modules() if isinstance(part, nn.ModuleList) for one in part]


def _fully(model: nn.Module, *, blocks: bool = True, **how: Any) -> nn.Module:
    for one in _blocks(model) if blocks else ():
        fully_shard(one, **how)
    return fully_shard(model, **how)


def _bf16(model: nn.Module) -> nn.Module:
    return _fully(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))


def _hsdp(model: nn.Module, **how: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    return _fully(model, mesh=mesh, **how)


def _prefetched(model: nn.Module) -> nn.Module:
    _fully(model)
    blocks: list[Any] = _blocks(model)
    for at, one in enumerate(blocks):
        one.set_modules_to_forward_prefetch(blocks[at + 1 : at + 3])
        one.set_modules_to_backward_prefetch(blocks[max(0, at - 2) : at][::-1])
    return model


def _pairs(model: nn.Module) -> nn.Module:
    """Two blocks a group, the last one left to the root."""
    blocks: list[Any] = _blocks(model)
    for at in range(0, len(blocks) - 1, 2):
        fully_shard(blocks[at : at + 2])
    return fully_shard(model)


def _checkpointed(model: nn.Module) -> nn.Module:
    for one in _blocks(model):
        vars(one)["forward"] = partial(checkpoint, one.forward, use_reentrant=False)
    return model


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "fsdp2": _fully,
    "fsdp2-pairs": _pairs,
    "fsdp2-checkpoint": lambda model: _fully(_checkpointed(model)),
    "fsdp2-accumulate": _fully,
    "fsdp2-root": lambda model: _fully(model, blocks=False),
    "fsdp2-keep": lambda model: _fully(model, reshard_after_forward=False),
    "fsdp2-int": lambda model: _fully(model, reshard_after_forward=2),
    "fsdp2-bf16": _bf16,
    "fsdp2-prefetch": _prefetched,
    "fsdp2-offload": lambda model: _fully(model, offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "hsdp": _hsdp,
    "hsdp-bf16": lambda model: _hsdp(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)),
    "ddp": DistributedDataParallel,
    "zero1": DistributedDataParallel,
    "ddp-views": lambda model: DistributedDataParallel(model, gradient_as_bucket_view=True),
    "ddp-small": lambda model: DistributedDataParallel(model, bucket_cap_mb=1),
    "ddp-static": lambda model: DistributedDataParallel(model, static_graph=True),
    "ddp-checkpoint": lambda model: DistributedDataParallel(_checkpointed(model)),
    "ddp-accumulate": DistributedDataParallel,
}
ACCUMULATES = ("fsdp2-accumulate", "ddp-accumulate")  # two microbatches a step, the first without collectives
# What `shard=` names, by the way that a program would write it.
LAYOUTS = {
    "fsdp2": "fsdp2", "fsdp2-keep": "zero2", "fsdp2-int": "fsdp2:reshard=2", "fsdp2-bf16": "fsdp2:bf16",
    "hsdp": "hsdp:2x2", "ddp": "ddp", "zero1": "zero1",
}  # fmt: skip


def _sharing(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, when it is imported
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, foreach=False)


def workload(model: str, way: str | None) -> batchfit.Workload:
    """The model, wrapped by the program where a way is given; on a CPU torch takes no foreach form."""
    torch.manual_seed(0)
    plain, loss, batch = MODELS[model]()
    wrapped = plain if way is None else WAYS[way](plain)
    parameters = list(wrapped.parameters())
    optimizer: torch.optim.Optimizer
    optimizer = _sharing(parameters) if way == "zero1" else torch.optim.AdamW(parameters, foreach=False)
    if way in ACCUMULATES:
        return batchfit.Workload(_accumulating(wrapped, optimizer, loss, batch), state=[wrapped, optimizer])
    return batchfit.training(wrapped, optimizer, loss, batch, keep_outputs=False)


def _accumulating(model: Any, optimizer: Any, loss: Any, batch: Any) -> Callable[[int], None]:
    """A step of two microbatches, as FSDP2 and DDP tell people to write it."""

    def backward(size: int) -> None:
        loss(model, batch(size)).backward()

    def step(size: int) -> None:
        optimizer.zero_grad()
        if isinstance(model, DistributedDataParallel):
            with model.no_sync():
                backward(size)
        else:
            model.set_requires_gradient_sync(False)
            backward(size)
            model.set_requires_gradient_sync(True)
        backward(size)
        optimizer.step()

    return step


def predicted_here(model: str, way: str, ranks: int, layout: str | None = None) -> Peaks:
    """What one process predicts; with a `layout` of a model that nobody wrapped."""
    with batchfit.fake_ranks(ranks):
        if layout is None:
            work = workload(model, way)
            changes = changes_for(reach_of(work), None)
        else:
            work = workload(model, None)
            changes = changes_for(reach_of(work), ShardLayout.parse(layout, ranks=ranks))
        return predicted(work, SIZE, changes=changes)


def truth(rank: int, cases: list[tuple[str, str]]) -> Any:
    """The real peak of this rank, and what it holds between steps, of each case."""
    found = []
    for model, way in cases:
        found.append(_measured(model, way))
        dist.barrier()
    return found


@contextlib.contextmanager
def _as_from_a_gpu() -> Iterator[None]:
    """Inside, FSDP2's copies between device and host are made, where the CPU is both.

    A copy to the host is not counted, until the optimizer reads it.
    """
    plain = torch.Tensor.to

    def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        asks = sys._getframe(1).f_code.co_name
        if asks == "all_gather_inputs":
            return tensor.clone()
        if asks == "foreach_reduce" and args[:1] == (torch.device("cpu"),):
            with _disable_current_modes():
                return tensor.clone()
        return plain(tensor, *args, **kwargs)

    torch.Tensor.to = to  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.Tensor.to = plain  # type: ignore[method-assign]


def _measured_offloaded(model: str) -> list[int]:
    """What of forward and backward is on the device: all but the shards and the optimizer's state.

    Those are the host's and the same throughout. What is held between steps is not compared: it is theirs.
    """
    gc.collect()
    with batchfit.virtual_memory("64GiB") as memory:
        beside = memory.allocated_bytes
    work: Any = workload(model, "fsdp2-offload")
    peaks: list[int] = []

    def at_its_end(*_: Any) -> None:
        peaks.append(memory.peak_bytes - beside)

    with _as_from_a_gpu():
        work.step(SIZE)  # the optimizer's state is there
        host = _bytes_of([*work.model.parameters(), *_tensors_of(work.optimizer)])
        work.optimizer.register_step_pre_hook(at_its_end)
        gc.collect()
        with batchfit.virtual_memory("64GiB") as memory:
            for _ in range(STEPS + 3):
                work.optimizer.zero_grad()
                memory.reset_peak()
                work.step(SIZE)
    peak = min(peaks[STEPS:]) - host
    return [peak, _bytes_of(work.model.buffers())]


def _tensors_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [one for state in optimizer.state.values() for one in state.values() if isinstance(one, Tensor)]


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    """Of their memory on this rank, as virtual memory counts blocks."""
    local = [one.to_local() if isinstance(one, DTensor) else one for one in tensors]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in local}
    return sum(map(block_bytes, storages.values()))


def _measured(model: str, way: str) -> list[int]:
    """The lowest peak of some steps: a thread of gloo's may hold a buffer of a collective a moment longer."""
    if way == "fsdp2-offload":
        return _measured_offloaded(model)
    gc.collect()
    with batchfit.virtual_memory("64GiB") as memory:
        beside = memory.allocated_bytes
    work = workload(model, way)
    gc.collect()
    peaks = []
    with batchfit.virtual_memory("64GiB") as memory:
        for _ in range(STEPS + 3):
            memory.reset_peak()
            work.step(SIZE)
            peaks.append(memory.peak_bytes - beside)
        return [min(peaks[STEPS:]), memory.allocated_bytes - beside]
