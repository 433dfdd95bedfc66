"""DTensor derives what a result is shaped like on fakes of its own, as large as on all ranks together.

Rules: of a mesh of CPUs these are tensors of the host to a trace, which would really allocate and compute
them: an optimizer's step on all whole parameters. In a trace they are made outside of every mode. Where a
torch has other names, the trace is the same and takes that memory.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

from batchfit._engine.torch_private.lookup import optional

_MODULE: Final = "torch.distributed.tensor._sharding_prop"
_DERIVES: Final = "_propagate_tensor_meta_non_cached"
# No dispatch mode sees what happens inside, and no fake mode is active.
_without_modes: Callable[[], contextlib.AbstractContextManager[Any]] | None = optional(
    "torch.utils._python_dispatch._disable_current_modes"
)


@contextlib.contextmanager
def shapes_derived_apart() -> Iterator[None]:
    """Inside, no trace sees how DTensor derives the shapes of results; nothing where it is not imported."""
    kind: Any = getattr(sys.modules.get(_MODULE), "ShardingPropagator", None)
    plain: Any = getattr(kind, _DERIVES, None)
    without_modes = _without_modes
    if plain is None or without_modes is None:
        yield
        return

    def apart(*args: Any, **kwargs: Any) -> Any:
        with without_modes():
            return plain(*args, **kwargs)

    setattr(kind, _DERIVES, apart)
    try:
        yield
    finally:
        setattr(kind, _DERIVES, plain)
