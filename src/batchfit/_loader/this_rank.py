"""This process's rank and the number of ranks: given, or from the process group."""

from __future__ import annotations

import torch

from batchfit._units import whole


def place_among_ranks(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Which rank this is, of how many: as given, or by `torch.distributed`, or one process."""
    if (rank is None) != (world_size is None):
        raise ValueError(f"rank and world_size must be given together, not {rank!r} and {world_size!r}")
    if rank is None or world_size is None:
        group = torch.distributed
        if not (group.is_available() and group.is_initialized()):
            return 0, 1
        return group.get_rank(), group.get_world_size()
    whole(world_size, name="world_size", at_least=1)
    if not 0 <= whole(rank, name="rank") < world_size:
        raise ValueError(f"rank must be from 0 to {world_size - 1}, not {rank!r}")
    return rank, world_size
