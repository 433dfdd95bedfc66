"""A baseline as text: the records of a project's targets in one JSON file that goes into git.

Rules:
- Sorted, without dates, line numbers or absolute paths: what has not changed reads the same, and a change of
  one line of the program is a change of one line here.
- A file that cannot be read says which field and why.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from batchfit._check.pure.record import HeldRow, OptimizerRecord, PeakRecord, PhaseMoment
from batchfit._config_files import parse_json
from batchfit._engine.allocator.footprint import KINDS
from batchfit.errors import ResultFileError

KIND = "memory_baseline"
SCHEMA_VERSION = 1
_IN = "in"
_CONFLICT = "<<<<<<< "
_AGAIN = "write it with batchfit check --update (update=True)"


def baseline_text(records: Mapping[str, PeakRecord]) -> str:
    """The file that holds these records."""
    targets = {name: _written(records[name]) for name in sorted(records)}
    whole = {"kind": KIND, "schema_version": SCHEMA_VERSION, "targets": targets}
    return _indented(whole) + "\n"


def read_baseline(text: str) -> dict[str, PeakRecord]:
    """The records in a file."""
    try:
        data = parse_json(text)
    except ValueError as error:
        if any(line.startswith(_CONFLICT) for line in text.splitlines()):
            raise ResultFileError(
                f"a merge left a conflict in it: take one side of it, then {_AGAIN}"
            ) from None
        raise ResultFileError(f"not JSON: {error}. Restore it from git, or delete it and {_AGAIN}") from None
    if not isinstance(data, dict) or data.get("kind") != KIND:
        raise ResultFileError(f"no baseline of batchfit check: field 'kind' must be {KIND!r}")
    version = data.get("schema_version")
    if version != SCHEMA_VERSION:
        raise ResultFileError(
            f"schema_version is {version!r}, and this batchfit reads {SCHEMA_VERSION}. Upgrade batchfit, or "
            f"delete the file and {_AGAIN}"
        )
    targets = _get(data, "targets", dict, "the baseline")
    return {name: _read(one, name) for name, one in targets.items()}


def _written(record: PeakRecord) -> dict[str, Any]:
    lines: dict[str, Any] = {}
    modules: dict[str, Any] = {}
    zeros = [0] * len(record.moments)
    for number, moment in enumerate(record.moments):
        for row in moment.modules:
            modules.setdefault(".".join(row.chain), {}).setdefault(row.kind, [*zeros])[number] = row.size
        for row in moment.lines:
            node: dict[str, Any] = {}
            children = lines
            for text in row.chain:
                node = children.setdefault(text, {_IN: {}})
                children = node[_IN]
            node.setdefault(row.kind, [*zeros, row.of])[number] = row.size
    _sort(lines)
    found: dict[str, Any] = {
        "batch_size": record.batch_size,
        "gpu": record.card,
        "versions": dict(sorted(record.versions.items())),
        "batch": list(record.batch),
        "peaks": {str(number): _head(one) for number, one in enumerate(record.moments, 1)},
        "modules": {name: _by_kind(modules[name]) for name in sorted(modules)},
        "lines": lines,
    }
    if record.budget_bytes is not None:
        found |= {"budget_bytes": record.budget_bytes, "largest": record.largest}
    if record.optimizer.name:
        found["optimizer"] = {
            "name": record.optimizer.name,
            "place": record.optimizer.place,
            "state_per_weight": record.optimizer.state_per_weight,
        }
    return found


def _head(moment: PhaseMoment) -> dict[str, Any]:
    return {
        "bytes": moment.size,
        "phase": moment.phase,
        "operation": moment.operation,
        "line": moment.line,
    }


def _sort(children: dict[str, Any]) -> None:
    """Sort lines by their text, and drop what has none inside."""
    for text in sorted(children):
        node = children.pop(text)
        inside = node.pop(_IN)
        children[text] = _by_kind(node)
        if inside:
            _sort(inside)
            children[text][_IN] = inside


def _by_kind(held: dict[str, Any]) -> dict[str, Any]:
    return {kind: held[kind] for kind in KINDS if kind in held}


def _indented(value: Any, depth: int = 0) -> str:
    """JSON with one entry per line; what holds no further objects stands on one line."""
    if not isinstance(value, dict) or not any(isinstance(one, dict) for one in value.values()):
        return json.dumps(value, ensure_ascii=False)
    room = "  " * (depth + 1)
    entries = [
        f"{room}{json.dumps(key, ensure_ascii=False)}: {_indented(one, depth + 1)}"
        for key, one in value.items()
    ]
    return "{\n" + ",\n".join(entries) + "\n" + "  " * depth + "}"


def _read(data: Any, name: str) -> PeakRecord:
    if not isinstance(data, dict):
        raise ResultFileError(f"target {name!r} must be an object, not {data!r:.80}")
    made = _get(data, "optimizer", dict, name) if "optimizer" in data else None
    has_budget = data.get("budget_bytes") is not None
    size = _get(data, "batch_size", int, name)
    if size < 1:
        raise ResultFileError(f"field 'batch_size' of {name!r}: must be positive, not {size}")
    versions = _get(data, "versions", dict, name)
    return PeakRecord(
        batch_size=size,
        card=_get(data, "gpu", str, name),
        versions={key: _get(versions, key, str, name) for key in sorted(versions)},
        moments=tuple(_moments(data, name)),
        batch=tuple(str(one) for one in _get(data, "batch", list, name)),
        optimizer=OptimizerRecord() if made is None else _optimizer(made, name),
        budget_bytes=_get(data, "budget_bytes", int, name) if has_budget else None,
        largest=_get(data, "largest", int, name) if has_budget else None,
    )


def _moments(data: dict[str, Any], name: str) -> Iterator[PhaseMoment]:
    peaks = _get(data, "peaks", dict, name)
    if not peaks:
        raise ResultFileError(f"field 'peaks' of {name!r}: must have at least one")
    heads = [_get(peaks, number, dict, name) for number in peaks]
    lines = list(_rows(_get(data, "lines", dict, name), (), name, len(peaks)))
    modules = list(_module_rows(_get(data, "modules", dict, name), name, len(peaks)))
    for number, head in enumerate(heads):
        yield PhaseMoment(
            _get(head, "phase", str, name),
            _get(head, "operation", str, name),
            _get(head, "line", str, name),
            _get(head, "bytes", int, name),
            tuple(HeldRow(chain, kind, held[number], held[-1]) for chain, kind, held in lines),
            tuple(HeldRow(chain, kind, held[number]) for chain, kind, held in modules),
        )


def _optimizer(made: dict[str, Any], name: str) -> OptimizerRecord:
    return OptimizerRecord(
        _get(made, "name", str, name),
        _get(made, "place", str, name),
        float(_get(made, "state_per_weight", (int, float), name)),
    )


_Held = tuple[tuple[str, ...], str, list[Any]]


def _rows(children: dict[str, Any], chain: tuple[str, ...], name: str, moments: int) -> Iterator[_Held]:
    for text in children:
        node = _get(children, text, dict, name)
        here = (*chain, text)
        for kind in node:
            if kind == _IN:
                yield from _rows(_get(node, _IN, dict, name), here, name, moments)
            else:
                yield here, kind, _checked(node[_known(kind, name)], kind, name, moments, text=True)


def _module_rows(modules: dict[str, Any], name: str, moments: int) -> Iterator[_Held]:
    for path in modules:
        held = _get(modules, path, dict, name)
        for kind in held:
            yield tuple(path.split(".")), kind, _checked(held[_known(kind, name)], kind, name, moments)


def _checked(held: Any, field: str, name: str, moments: int, *, text: bool = False) -> list[Any]:
    """Bytes at each moment, and a text after them."""
    kinds = [int] * moments + [str] * text
    if not isinstance(held, list) or [type(one) for one in held] != kinds:
        what = f"a list of {moments} whole numbers" + (" and a text" if text else "")
        raise ResultFileError(f"field {field!r} of {name!r}: must be {what}, not {held!r:.80}")
    return held


def _known(kind: str, name: str) -> str:
    if kind not in KINDS:
        raise ResultFileError(f"field {kind!r} of {name!r}: must be one of {', '.join(KINDS)}")
    return kind


def _get(data: Mapping[str, Any], key: str, wanted: Any, name: str) -> Any:
    value = data.get(key)
    if not isinstance(value, wanted) or isinstance(value, bool):
        kinds = wanted if isinstance(wanted, tuple) else (wanted,)
        what = {int: "a whole number", str: "text", dict: "an object", list: "a list", float: "a number"}
        raise ResultFileError(f"field {key!r} of {name!r}: must be {what[kinds[-1]]}, not {value!r:.80}")
    return value
