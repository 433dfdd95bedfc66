"""Tables of what batchfit knows: GPUs, and why a search ends."""

from __future__ import annotations

import inspect

from batchfit import errors
from batchfit._engine.allocator.gpus import GPUS
from batchfit._units import format_bytes
from batchfit.results import REASONS

SOURCES = {
    "measured": "measured by us",
    "reported": "reported: what torch prints there",
    "nominal": "derived from the vendor's figure",
}


def gpus_part() -> str:
    """Every GPU that a prediction can be made for."""
    rows = "\n".join(
        f"| `{gpu.name}` | {gpu.box_gb} GB | {format_bytes(gpu.usable_bytes)} "
        f"| {gpu.capability[0]}.{gpu.capability[1]} | {SOURCES[gpu.source]} |"
        for gpu in GPUS.values()
    )
    head = "| name | memory | usable | compute capability | source |\n|---|---:|---:|---:|---|"
    return f"{len(GPUS)} GPUs:\n\n{head}\n{rows}"


def errors_part() -> str:
    """A block per error, in the order of the module."""
    kinds = [
        name for name, value in vars(errors).items() if inspect.isclass(value) and name.endswith("Error")
    ]
    return "\n\n".join(f"::: batchfit.errors.{name}\n    options:\n      heading_level: 3" for name in kinds)


def reasons_part() -> str:
    """What `stopped_because` can be."""
    rows = "\n".join(f"| `{key}` | {text} |" for key, text in REASONS.items())
    return f"| `stopped_because` | why the search ended |\n|---|---|\n{rows}"
