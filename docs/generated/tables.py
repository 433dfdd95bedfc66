"""Tables of what batchfit knows: GPUs, and why a search ends."""

from __future__ import annotations

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


def reasons_part() -> str:
    """What `stopped_because` can be."""
    rows = "\n".join(f"| `{key}` | {text} |" for key, text in REASONS.items())
    return f"| `stopped_because` | why the search ended |\n|---|---|\n{rows}"
