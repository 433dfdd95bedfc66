"""What `torch.compile` has compiled in this process."""

from __future__ import annotations

import sys
from typing import Any


def is_compiled(thing: Any) -> bool:
    """Whether torch.compile makes new code for each new size that it is given."""
    return (
        hasattr(thing, "_orig_mod")
        or hasattr(thing, "_torchdynamo_orig_callable")
        or getattr(thing, "_compiled_call_impl", None) is not None
    )


def compilations() -> int:
    """How many frames torch.compile has compiled in this process; 0 where it was never loaded."""
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["frames"]["ok"]) if dynamo is not None else 0


def recompile_limit() -> int | None:
    """How many versions torch.compile makes of one function; None where it was never used."""
    config: Any = getattr(sys.modules.get("torch._dynamo"), "config", None)
    limit = getattr(config, "recompile_limit", getattr(config, "cache_size_limit", None))
    return limit if isinstance(limit, int) else None
