"""Tensor values that a program read in a real run: the answers where its trace, without values, reads them.

Rules: an answer belongs to a line of the program, and the answers of a line are given in the order in which
it read them. A line that reads more often than it did then gets none: an error of the trace, and no guess.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch

from batchfit._engine.torch_private.dispatch import TorchDispatchMode
from batchfit._engine.trace.program_lines import calling_line

_ITEM = torch.ops.aten._local_scalar_dense.default
Value = bool | int | float


@final
class RecordedReads:
    """The values that each line read, the first one first."""

    def __init__(self, by_line: Mapping[str, Sequence[Value]]) -> None:
        self._by_line = {line: deque(values) for line, values in by_line.items()}

    def next_of(self, line: str, *, is_bool: bool) -> Value | None:
        """What the line read next; None where it read nothing more, or no such thing.

        Code of torch that is called from the line may have read numbers there that a trace never asks for.
        """
        left = self._by_line.get(line)
        while left:
            value = left.popleft()
            if isinstance(value, bool) == is_bool:
                return value
        return None


@final
class ReadsRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # its __init_subclass__
    """Notes what a program reads, with the line that does, while it really runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.by_line: dict[str, list[Value]] = defaultdict(list)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is _ITEM and isinstance(found, bool | int | float):
            self.by_line[calling_line()].append(found)
        return found
