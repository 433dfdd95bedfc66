"""A trace as JSON: what the process of a program writes, and the parent reads.

Rule: origins come by the ten thousand and few of them differ, so each is written once.
"""

from __future__ import annotations

import json

from batchfit._engine.allocator.footprint import Origin, Trace

_WRITTEN = ("kind", "phase", "module", "source", "operation")


def trace_text(trace: Trace, classes: dict[str, str]) -> str:
    """The trace and the classes of the program's modules, as JSON."""
    table = list(dict.fromkeys(trace.origins))
    number = {origin: index for index, origin in enumerate(table)}
    return json.dumps(
        {
            "size": trace.size,
            "sizes": trace.sizes,
            "origins": [number[origin] for origin in trace.origins],
            "table": [[getattr(origin, name) for name in _WRITTEN] for origin in table],
            "events": trace.events,
            "begins": trace.begins,
            "step_ends": trace.step_ends,
            "classes": classes,
        }
    )


def read_trace(text: str) -> tuple[Trace, dict[str, str]]:
    """What `trace_text` wrote."""
    found = json.loads(text)
    table = [Origin(*values) for values in found["table"]]
    trace = Trace(
        found["size"],
        tuple(found["sizes"]),
        tuple(table[number] for number in found["origins"]),
        tuple(found["events"]),
        found["begins"],
        tuple(found["step_ends"]),
    )
    return trace, found["classes"]
