"""The repeated blocks of a model (its layers), which are sharded or checkpointed one by one."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import final

from torch import nn


@final
@dataclass(frozen=True, slots=True)
class RepeatedBlocks:
    """Blocks of one class, side by side in a ModuleList or Sequential."""

    kind: str
    blocks: tuple[nn.Module, ...]


def repeated_blocks(root: nn.Module) -> list[RepeatedBlocks]:
    """The outermost containers of two or more blocks of one class; a block has modules inside."""
    if isinstance(root, nn.ModuleList | nn.Sequential):
        classes = Counter(type(one) for one in root.children() if any(True for _ in one.children()))
        kind, count = classes.most_common(1)[0] if classes else (nn.Module, 0)
        if count > 1:
            return [RepeatedBlocks(kind.__name__, tuple(one for one in root.children() if type(one) is kind))]
    return [found for child in root.children() for found in repeated_blocks(child)]
