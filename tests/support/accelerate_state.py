"""What Accelerate keeps for a whole process, for tests that begin without it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType


def reset_accelerate() -> None:
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def prepared_models(accelerator: Any) -> list[Any]:
    return accelerator._models  # type: ignore[no-any-return]


@contextmanager
def sharding_on_cpu() -> Iterator[None]:
    """Let Accelerate shard with FSDP on CPU ranks, as it does on GPUs: it looks at the kind of device."""
    begin = AcceleratorState.__init__

    def begun(state: Any, *given: Any, **named: Any) -> None:
        begin(state, *given, **named)
        plugin = named.get("fsdp_plugin")
        if plugin is not None and state.distributed_type == DistributedType.MULTI_CPU:
            state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    with mock.patch.object(AcceleratorState, "__init__", begun):
        yield


def join_ranks(rank: int, world_size: int) -> None:
    """As torchrun would have told them; the process group is there already."""
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in told.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", ACCELERATE_USE_CPU="true")
