"""The user's config files in JSON and YAML, and pydantic's validation errors as one sentence.

Rules: a document is a mapping; JSON always works, YAML where pyyaml is installed; a file that cannot be read
says which, and why. An error names field and value: `gamma must be at least 2, not 1`. `Document` knows the
lines of its keys, and a key that comes twice is an error: YAML would silently take the last one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

YAML = (".yaml", ".yml")
SUFFIXES = (".json", *YAML)
_NEEDS_PYYAML = 'pip install "batchfit[yaml]" (or pyyaml)'


_DEEPEST_DATA = 100  # levels of lists and mappings; none of our files has more than ten


def parse_json(text: str | bytes) -> Any:
    """What a JSON text holds. Whatever is wrong with it is a `ValueError` of one line."""
    try:
        data = json.loads(text)
    except RecursionError:
        raise ValueError("its lists and mappings are nested too deeply") from None
    check_depth(data)
    return data


def check_depth(data: object) -> None:
    """Refuse data so deep that code which goes through it would end in a RecursionError."""
    level = [data]
    for _ in range(_DEEPEST_DATA):
        level = [
            inner
            for one in level
            if isinstance(one, dict | list)
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            return
    raise ValueError(f"its lists and mappings are nested more than {_DEEPEST_DATA} deep")


def read_document(path: Path) -> dict[str, Any]:
    """The mapping in a file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ValueError(f"the file {str(path)!r} cannot be read: {why}") from None
    return parse_document(text, name=repr(str(path)), is_yaml=path.suffix.lower() in YAML)


Place = tuple[str | int, ...]  # the way to a value: keys as text, and indices of lists


@final
@dataclass(frozen=True, slots=True)
class Document:
    """The mapping in a file, and on which line each of its keys and list entries stands."""

    name: str
    data: dict[str, Any]
    lines: Mapping[Place, int]

    def where(self, place: Place) -> str:
        """`sweep.yaml:7`, for the nearest place on the way there that has a line."""
        for length in range(len(place), 0, -1):
            line = self.lines.get(tuple(place[:length]))
            if line is not None:
                return f"{self.name}:{line}"
        return self.name


def read_lined(path: Path) -> Document:
    """The mapping in a file with its lines; a JSON file has them where pyyaml is installed."""
    data = read_document(path)
    text = path.read_text(encoding="utf-8")
    return Document(str(path), data, _lines(text, str(path), is_yaml=path.suffix.lower() in YAML))


def _lines(text: str, name: str, *, is_yaml: bool) -> dict[Place, int]:
    try:
        import yaml  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        return {}
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        if is_yaml:
            raise
        return {}  # JSON that YAML reads otherwise, such as one with tabs
    found: dict[Place, int] = {}
    for place, line in _placed(root, ()):
        if place in found:
            key = ".".join(map(str, place))
            raise ValueError(f"{name}:{line}: {key} must be given once, not again (line {found[place]})")
        found[place] = line
    return found


_DEEPEST = 12  # an alias may lead back to itself


def _placed(node: Any, place: Place) -> Iterator[tuple[Place, int]]:
    if node is None or isinstance(node.value, str) or len(place) > _DEEPEST:
        return
    for index, part in enumerate(node.value):
        key, value = part if isinstance(part, tuple) else (part, part)
        here: Place = (*place, str(key.value) if isinstance(part, tuple) else index)
        yield here, key.start_mark.line + 1
        yield from _placed(value, here)


def parse_document(text: str, *, name: str, is_yaml: bool = False) -> dict[str, Any]:
    """The mapping in a text."""
    try:
        data = _parse_yaml(text) if is_yaml else parse_json(text)
    except ImportError:
        raise ValueError(f"{_NEEDS_PYYAML} to read {name}, or write it as JSON") from None
    except ValueError as error:
        what = "YAML" if is_yaml else "JSON"
        raise ValueError(f"{name} must be {what}, and is not: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{name} must hold a mapping of fields, not {_short(data)}")
    return data


def with_value(text: str, keys: Sequence[str], value: str, *, name: str) -> str:
    """The text of a YAML or JSON file, with `value` where `keys` lead; all else stays as it is written."""
    try:
        import yaml  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        raise ValueError(f"{_NEEDS_PYYAML} to change a value in {name}") from None
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"{name} must be YAML, and is not: {' '.join(str(error).split())}") from None
    for number, key in enumerate(keys):
        inner: dict[str, Any] = {}
        for index, part in enumerate(node.value if isinstance(node, yaml.CollectionNode) else ()):
            found, node_there = part if isinstance(part, tuple) else (None, part)
            inner[str(index) if found is None else str(found.value)] = node_there
        if key not in inner:
            raise ValueError(f"set must name a place that is in {name}, not {'.'.join(keys[: number + 1])!r}")
        node = inner[key]
    if not isinstance(node, yaml.ScalarNode):
        raise ValueError(f"set must name a single value in {name}, not {'.'.join(keys)!r}")
    return text[: node.start_mark.index] + value + text[node.end_mark.index :]


def _parse_yaml(text: str) -> Any:
    import yaml  # type: ignore[import-untyped, unused-ignore]

    try:
        data = yaml.safe_load(text)
        check_depth(data)
        return data
    except RecursionError:
        raise ValueError("its lists and mappings are nested too deeply, or hold themselves") from None
    except (yaml.YAMLError, TypeError, OverflowError) as error:  # a key that is a list is a TypeError
        raise ValueError(" ".join(str(error).split())) from None


def sentence(found: Sequence[Mapping[str, Any]], *, fields: Sequence[str], name: str) -> str:
    """The first of pydantic's errors as one sentence of ours."""
    first = found[0]
    kind, given, context = first["type"], first.get("input"), first.get("ctx") or {}
    place = [str(part) for part in first["loc"] if str(part) not in ("function-before", "function-after")]
    field = place[-1] if place else name
    if kind == "value_error":  # a sentence of our own
        return str(context.get("error", first["msg"])).removeprefix("Value error, ")
    if kind == "missing":
        return f"{field} must be given to a {name}"
    if kind == "extra_forbidden":
        return f"{field} must be a field of {name} ({', '.join(fields)}), not a new one with {_short(given)}"
    if kind == "literal_error":
        return f"{field} must be {context['expected']}, not {_short(given)}"
    if kind == "union_tag_invalid":
        return f"type must be one of {context['expected_tags']}, not {context['tag']!r}"
    if kind == "union_tag_not_found":
        return f"type must be given, such as 'step', not {_short(given)}"
    if kind.startswith("bool"):
        return f"{field} must be true or false, not {_short(given)}"
    if kind.startswith("model"):
        return f"{name} must be a mapping of fields, not {_short(given)}"
    what = first["msg"].removeprefix("Input should be ")
    return f"{field} must be {what[:1].lower() + what[1:]}, not {_short(given)}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
