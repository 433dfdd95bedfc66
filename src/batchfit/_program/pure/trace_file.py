"""A trace as JSON: what the process of a program writes, and the parent reads.

Rule: origins come by the ten thousand and few of them differ, so each is written once.
"""

from __future__ import annotations

import json

from batchfit._check.pure.baseline import baseline_text, read_baseline
from batchfit._check.pure.record import TracedRecord
from batchfit._engine.allocator.footprint import Origin, Trace
from batchfit._explain.pure.holders import Peak

_NAME = "program"
_WRITTEN = ("kind", "phase", "module", "source", "operation")


def trace_text(trace: Trace, classes: dict[str, str], recorded: TracedRecord | None = None) -> str:
    """The trace and the classes of the program's modules, as JSON; the record of its peak, too, if any."""
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
            "record": "" if recorded is None else baseline_text({_NAME: recorded.record}),
            "numbers": {} if recorded is None else recorded.numbers,
        }
    )


def read_record(text: str, peak: Peak) -> TracedRecord:
    """The record in what `trace_text` wrote, beside the peak of the trace there."""
    found = json.loads(text)
    numbers = {place: tuple(lines) for place, lines in found["numbers"].items()}
    return TracedRecord(read_baseline(found["record"])[_NAME], peak, numbers)


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
