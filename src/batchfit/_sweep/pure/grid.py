"""Which configurations a sweep has, and which of them are to be run.

Rules:
- A configuration is a value for each knob, in values that JSON can say: a file knows it by its key.
- The order is the user's: a grid turns its last knob fastest, a zip and a list keep their rows.
- No configuration comes twice, and nothing is left out without a reason that can be read.
- What is wrong names its place among the knobs (`GridError.place`), so that a file's reader can add a line.
"""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from batchfit._knobs import Configuration, key_of, label, value_text

MODES = ("grid", "zip")

Knobs = Mapping[str, Sequence[Any]] | Sequence[Configuration]


class GridError(ValueError):
    """Knobs or a start that make no sweep; `place` is the way there, such as ("knobs", "max_crops", 2)."""

    def __init__(self, text: str, *place: str | int) -> None:
        super().__init__(text)
        self.place = place


@final
@dataclass(frozen=True, slots=True)
class Entry:
    """One configuration of a sweep: to be run where `why_not` is empty, else skipped for that reason."""

    configuration: Configuration
    key: str
    why_not: str = ""

    @property
    def label(self) -> str:
        """`max_crops=12, top_k=2`."""
        return label(self.configuration)


def configurations(knobs: Knobs, *, mode: str = "grid") -> tuple[dict[str, Any], ...]:
    """All configurations, in order.

    >>> configurations({"max_crops": [2, 4], "top_k": [1]})
    ({'max_crops': 2, 'top_k': 1}, {'max_crops': 4, 'top_k': 1})
    >>> configurations({"layers": [2, 4], "width": [64, 32]}, mode="zip")
    ({'layers': 2, 'width': 64}, {'layers': 4, 'width': 32})
    """
    if mode not in MODES:
        raise GridError(f"mode must be one of {', '.join(MODES)}, not {mode!r}", "mode")
    if isinstance(knobs, Mapping):
        found = _of_mapping(knobs, mode)
    elif _is_list(knobs):
        if mode != "grid":
            raise GridError(
                f"mode must be left out where knobs is a list of configurations, not {mode!r}", "mode"
            )
        found = _of_rows(knobs)
    else:
        raise GridError(
            "knobs must map each knob to the list of its values, or be a list of configurations, "
            f"not {knobs!r:.80}",
            "knobs",
        )
    _no_duplicates(found, isinstance(knobs, Mapping), mode)
    return tuple(found)


def _of_mapping(knobs: Mapping[str, Sequence[Any]], mode: str) -> list[dict[str, Any]]:
    if not knobs:
        raise GridError("knobs must name at least one knob, not none", "knobs")
    for name, values in knobs.items():
        _check_name(name)
        if not _is_list(values):
            raise GridError(
                f"the knob {name!r} must have a list of values, not {values!r:.80}", "knobs", name
            )
        if not values:
            raise GridError(f"the knob {name!r} must have at least one value, not none", "knobs", name)
        for index, value in enumerate(values):
            _check_value(name, value, "knobs", name, index)
            same = [i for i in range(index) if value_text(values[i]) == value_text(value)]
            if same and mode == "grid":
                raise GridError(
                    f"the knob {name!r} must have each value once, not {value!r} twice", "knobs", name, index
                )
    if mode == "grid":
        rows = itertools.product(*knobs.values())
        return [dict(zip(knobs, row, strict=True)) for row in rows]
    lengths = {name: len(values) for name, values in knobs.items()}
    if len(set(lengths.values())) > 1:
        given = ", ".join(f"{name}: {count}" for name, count in lengths.items())
        odd = next(name for name, count in lengths.items() if count != next(iter(lengths.values())))
        raise GridError(f"knobs must have lists of one length with mode 'zip', not {given}", "knobs", odd)
    return [dict(zip(knobs, row, strict=True)) for row in zip(*knobs.values(), strict=True)]


def _of_rows(rows: Sequence[Configuration]) -> list[dict[str, Any]]:
    if not rows:
        raise GridError("knobs must hold at least one configuration, not none", "knobs")
    found = []
    for index, row in enumerate(rows):
        given: object = row
        if not isinstance(given, Mapping) or not given:
            raise GridError(f"each configuration must map knobs to values, not {row!r:.80}", "knobs", index)
        for name, value in row.items():
            _check_name(name, index)
            _check_value(name, value, "knobs", index, name)
        if set(row) != set(rows[0]):
            differs = sorted(set(row) ^ set(rows[0]))
            raise GridError(
                f"each configuration must have the knobs of the first ({', '.join(rows[0])}), "
                f"not {', '.join(row)}: {', '.join(differs)} differs",
                *("knobs", index),
            )
        found.append({name: row[name] for name in rows[0]})
    return found


def _no_duplicates(found: Sequence[Configuration], is_mapping: bool, mode: str) -> None:
    seen: dict[str, int] = {}
    for index, one in enumerate(found):
        first = seen.setdefault(key_of(one), index)
        if first != index:
            place = ("knobs", next(iter(one)), index) if is_mapping and mode == "zip" else ("knobs", index)
            raise GridError(
                f"each configuration must come once: number {index + 1} is number {first + 1} again "
                f"({label(one)})",
                *place,
            )


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _check_name(name: object, *place: int) -> None:
    if not isinstance(name, str) or not name.isidentifier():
        raise GridError(
            f"a knob must have the name of a keyword of the factory, not {name!r}", "knobs", *place, str(name)
        )


def _check_value(name: str, value: object, *place: str | int) -> None:
    if not _is_json(value):
        raise GridError(
            f"the knob {name!r} must have values that JSON can hold (numbers, text, true, false, null, lists "
            f"and mappings of these), not {value!r:.80}",
            *place,
        )


def _is_json(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if value is None or isinstance(value, bool | int | str):
        return True
    if isinstance(value, list | tuple):
        return all(_is_json(one) for one in value)
    return isinstance(value, dict) and all(isinstance(k, str) and _is_json(v) for k, v in value.items())


def plan(knobs: Knobs, *, mode: str = "grid", start_from: object = None) -> tuple[Entry, ...]:
    """Every configuration, with the reason why it is not run where it is not.

    `start_from` names a value of one or several knobs, `{"max_crops": 12}`, or is the value itself where
    there is one knob. In a grid the values that stand before it in its list are skipped, whatever the other
    knobs are; in a zip or a list, the configurations that stand before the first which has it.
    """
    rows = configurations(knobs, mode=mode)
    skipped = _before_start(knobs, rows, mode, start_from)
    return tuple(Entry(row, key_of(row), skipped.get(index, "")) for index, row in enumerate(rows))


def without_done(entries: Iterable[Entry], done: Iterable[str]) -> tuple[Entry, ...]:
    """The same entries; those whose key is in `done` are not to be run again."""
    finished = frozenset(done)
    return tuple(
        replace(entry, why_not=DONE) if entry.key in finished and not entry.why_not else entry
        for entry in entries
    )


DONE = "it has been run"


def _before_start(
    knobs: Knobs, rows: Sequence[Configuration], mode: str, start_from: object
) -> dict[int, str]:
    if start_from is None:
        return {}
    start = _start(rows[0], start_from)
    why = f"it stands before {label(start)}"
    for name, value in start.items():
        if not any(value_text(row[name]) == value_text(value) for row in rows):
            known = list(dict.fromkeys(str(row[name]) for row in rows))
            raise GridError(
                f"start_from must be among the values of {name!r} ({', '.join(known)}), not {value!r}",
                *("start_from", name),
            )
    if isinstance(knobs, Mapping) and mode == "grid":
        places = {
            name: next(i for i, one in enumerate(knobs[name]) if value_text(one) == value_text(value))
            for name, value in start.items()
        }
        early = {name: {value_text(one) for one in knobs[name][:place]} for name, place in places.items()}
        return {
            index: why
            for index, row in enumerate(rows)
            if any(value_text(row[name]) in early[name] for name in start)
        }
    wanted = {name: value_text(value) for name, value in start.items()}
    first = next(
        (i for i, row in enumerate(rows) if all(value_text(row[n]) == v for n, v in wanted.items())), None
    )
    if first is None:
        raise GridError(f"start_from must be among the configurations, not {label(start)}", "start_from")
    return dict.fromkeys(range(first), why)


def _start(first: Configuration, start_from: object) -> dict[str, Any]:
    if not isinstance(start_from, Mapping):
        if len(first) > 1:
            raise GridError(
                f"start_from must say which of the knobs ({', '.join(first)}) it is for, such as "
                f"{{{next(iter(first))!r}: {start_from!r}}}, not {start_from!r}",
                "start_from",
            )
        return {next(iter(first)): start_from}
    if not start_from:
        raise GridError("start_from must name a knob or be left out, not {}", "start_from")
    for name in start_from:
        if name not in first:
            raise GridError(
                f"start_from must name knobs ({', '.join(first)}), not {name!r}"
                f"{did_you_mean(str(name), first)}",
                *("start_from", str(name)),
            )
    return dict(start_from)


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """`; did you mean top_k?`, or nothing."""
    close = difflib.get_close_matches(wrong, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""
