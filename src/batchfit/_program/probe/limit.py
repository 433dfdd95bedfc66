"""The memory limit of a real run whose command has no place for a size: `batchfit run --budget 2GiB --`.

Rules: each process is limited at its first forward pass, when it has chosen its device: a GPU by its
allocator, a CPU by virtual memory. What lives by then counts. Nothing is read, counted or reported.
"""

from __future__ import annotations

from typing import Any, final

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from batchfit._engine.virtual_memory.memory import virtual_memory
from batchfit._program.probe.memory import gpus_of, limit_gpu
from batchfit._program.probe.passes import has_weights, in_loader_worker

_LIMITS: list[MemoryLimit] = []  # of this process, to its end


@final
class MemoryLimit:
    """Limits this process, once a module with weights of its own runs for the first time."""

    def __init__(self, budget_bytes: int) -> None:
        _LIMITS.append(self)  # the hook is gone after the first pass, and virtual memory ends with its holder
        self._budget_bytes = budget_bytes
        self._handle = register_module_forward_pre_hook(self._before)

    def _before(self, module: nn.Module, args: Any) -> None:
        if not has_weights(module) or in_loader_worker():
            return
        self._handle.remove()
        gpus = gpus_of(module, args)
        for index in gpus:
            limit_gpu(index, self._budget_bytes)
        if not gpus:
            self._kept = virtual_memory(self._budget_bytes)  # never left: the program ends with it
            self._kept.__enter__()
