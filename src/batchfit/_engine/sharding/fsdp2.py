"""A plain model under FSDP2, for the time of a trace: torch's own `fully_shard`, on fakes.

Rules: each repeated block is sharded by itself, then the model; the optimizer has the sharded parameters and
no state. All is undone by the trace, which restores what it has faked; what torch keeps elsewhere is undone
here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from batchfit._engine.sharding.model_blocks import repeated_blocks
from batchfit._engine.sharding.pure.layout import ShardLayout
from batchfit._engine.torch_private.fsdp2 import forget_sharding, sharding_on
from batchfit._engine.trace.fake_state import Faked
from batchfit.workload import Workload


@final
@dataclass(frozen=True, slots=True)
class FullyShard:
    """The models of a step and its optimizers, sharded as `layout` says."""

    layout: ShardLayout
    models: tuple[nn.Module, ...]
    optimizers: tuple[torch.optim.Optimizer, ...]

    @contextlib.contextmanager
    def __call__(self, workload: Workload, faked: Faked) -> Iterator[None]:
        layout = self.layout
        shards = layout.ranks // layout.replicas
        if layout.replicas > 1:
            mesh = init_device_mesh("cpu", (layout.replicas, shards), mesh_dim_names=("replicate", "shard"))
        else:
            mesh = init_device_mesh("cpu", (shards,))
        dtype = getattr(torch, layout.dtype) if layout.dtype else None
        policies: dict[str, Any] = {
            "mesh": mesh,
            "reshard_after_forward": layout.reshard_after_forward,
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=dtype, reduce_dtype=torch.float32 if dtype is not None else None
            ),
            "offload_policy": CPUOffloadPolicy(pin_memory=False) if layout.offload else OffloadPolicy(),
        }
        sharded: list[tuple[nn.Module, type]] = []
        try:
            for model in self.models:
                before = dict(model.named_parameters())
                with faked.mode, sharding_on(faked.device):
                    for module in [*(b for one in repeated_blocks(model) for b in one.blocks), model]:
                        sharded.append((module, type(module)))
                        fully_shard(module, **policies)
                after = dict(model.named_parameters())
                for name, parameter in before.items():
                    faked.holding.exchange(name, parameter, after[name])
                give_parameters(self.optimizers, {id(before[name]): after[name] for name in before})
            yield
        finally:
            for module, kind in sharded:
                module.__class__ = kind
                forget_sharding(module)


def give_parameters(optimizers: Sequence[torch.optim.Optimizer], instead: dict[int, Tensor]) -> None:
    """Optimizers with other parameters in place of theirs, and no state of those."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [instead.get(id(one), one) for one in group["params"]]
            if optimizer.defaults.get("foreach", False) is None:
                group["foreach"] = None  # torch chooses, and takes no foreach form for a DTensor
        for parameter in [one for one in optimizer.state if id(one) in instead]:
            del optimizer.state[parameter]
