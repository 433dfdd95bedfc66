"""Under which of Lightning's strategies the callbacks work: one device, DDP, and FSDP2.

Rules
- FSDP2 is `ModelParallelStrategy` with one rank per shard: `fully_shard` in `configure_model`.
- The others are refused before anything runs, with the reason and what works in their place.
"""

from __future__ import annotations

from typing import Any, Final

from batchfit.errors import BatchfitError

_FSDP2: Final = (
    "ModelParallelStrategy(data_parallel_size={ranks}, tensor_parallel_size=1), with fully_shard in "
    "configure_model of the module"
)
_REASONS: Final = {
    "FSDPStrategy": "FSDP1 reduces gradients in hooks that cannot be reset after a step that failed. Use "
    "FSDP2: " + _FSDP2,
    "DeepSpeedStrategy": "DeepSpeed's engine owns backward and the optimizer's step, and partitions "
    "gradients in them, so a batch cannot be repeated there. Find the size by whole steps, each in processes "
    "of its own: `batchfit find -- python train.py --batch-size {{}}`. Or use FSDP2: " + _FSDP2,
}
_OTHERS: Final = "use batchfit.find_batch_size and batchfit.Microbatcher by hand there"


def check_strategy(trainer: Any, callback: str) -> None:
    """Refuse a strategy under which the callback of this name does not work."""
    names = {kind.__name__ for kind in type(trainer.strategy).__mro__}
    # Asked first: DeepSpeed's strategy is made from DDP's.
    why = next((text for name, text in _REASONS.items() if name in names), "")
    if is_sharded(trainer):
        _check_mesh(trainer, callback)
    elif why or not names & {"SingleDeviceStrategy", "DDPStrategy"}:
        why = why or _OTHERS
        raise BatchfitError(
            f"{callback} works on one device, under DDP and under FSDP2, not under "
            f"{type(trainer.strategy).__name__}: {why.format(ranks=trainer.world_size)}"
        )


def is_sharded(trainer: Any) -> bool:
    """Whether the module is the user's own to shard: every forward may have collectives."""
    return any(kind.__name__ == "ModelParallelStrategy" for kind in type(trainer.strategy).__mro__)


def _check_mesh(trainer: Any, callback: str) -> None:
    mesh = trainer.strategy.device_mesh
    if mesh["tensor_parallel"].size() > 1:
        raise BatchfitError(
            f"{callback} does not work with tensor_parallel_size={mesh['tensor_parallel'].size()} (default: "
            "all GPUs of a machine). Tensor parallelism has collectives in forward: a rank that "
            "retries would leave the others waiting. Use " + _FSDP2.format(ranks=trainer.world_size)
        )
