"""Trainers whose model is sharded: FSDP2 works, what owns gradients or the step itself is refused.

Rules
- Under FSDP2 every forward and backward has collectives, so nothing may run the model on one rank alone: what
  a rank does alone under DDP (a probe of the loss) goes through a Microbatcher, whose ranks agree.
- Under FSDP1 and DeepSpeed a batch cannot be repeated, and the refusal says why and what to do.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from batchfit.errors import BatchfitError
from batchfit.integrations.trl.trainers import name_of

_DEEPSPEED = (
    "DeepSpeed's engine owns backward and the optimizer's step, and partitions gradients in them, so a batch "
    "that is out of memory cannot be undone and repeated there. Find the size by whole steps, each in "
    "processes of its own: `batchfit find -- deepspeed train.py --per_device_train_batch_size {}`. Or use "
    'FSDP2, where adapt() works: fsdp=True, fsdp_config={"fsdp_version": 2}'
)
_FSDP1 = (
    "FSDP1 reduces gradients in hooks that cannot be reset after a step that failed, so a batch that is out "
    "of memory cannot be repeated there. Use FSDP2, where it can: "
    'fsdp_config={"fsdp_version": 2}, or fsdp_version: 2 in the config of accelerate'
)
_OFFLOAD = (
    "cpu_offload=True keeps parameters in RAM, so the search before training would measure RAM and not the "
    "GPU. Set cpu_offload to False in fsdp_config, or write a loop of your own with "
    'Microbatcher(model, device="cuda")'
)


def check_sharding(trainer: Any) -> None:
    """Refuse what a batch cannot be repeated under: DeepSpeed, FSDP1, and FSDP2 with parameters in RAM."""
    if trainer.is_deepspeed_enabled:
        raise BatchfitError(_DEEPSPEED)
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if trainer.is_fsdp_enabled and getattr(plugin, "fsdp_version", 1) != 2:
        raise BatchfitError(_FSDP1)
    if trainer.is_fsdp_enabled and name_of(trainer) == "KTOTrainer":
        raise BatchfitError(
            "under FSDP2 each forward has collectives, and the samples decide how many forwards a microbatch "
            "of KTOTrainer has: ranks would wait for each other. Use DDP, or train without adapt"
        )
    if type(getattr(plugin, "cpu_offload", None)).__name__ == "CPUOffloadPolicy":
        raise BatchfitError(_OFFLOAD)


def is_sharded(model: nn.Module) -> bool:
    """Whether `fully_shard` was called on the model or on parts of it."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return kind is not None and any(isinstance(module, kind) for module in model.modules())
