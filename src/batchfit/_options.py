"""How a keyword of a function becomes a flag of the command line: written once, beside its default.

Rules:
- The options of a function are one frozen dataclass: a field per keyword, checked in its constructor.
- A field made by `flag` is a flag of the command, too; `_cli.flags` makes the parameters from it.
- Fields stand in the order in which `--help` shows them. Nothing heavy is imported: `--help` reads them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Final, final

_KEY: Final = "flag"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """What the command line says of one keyword.

    `kind`: the type of a typed value. `shown_default`: text in place of the default, or False to hide it.
    `repeats`: the flag may be given several times. `spelling`: the flag, where the field's name is not it.
    """

    kind: type
    help: str
    metavar: str | None = None
    panel: str | None = None
    shown_default: str | bool = True
    repeats: bool = False
    spelling: str = ""


def flag(default: Any = MISSING, kind: type | None = None, **described: Any) -> Any:
    """A field of an options value that is a flag; `kind` may be left out where the default has that type."""
    described["kind"] = type(default) if kind is None else kind
    return field(default=default, metadata={_KEY: Flag(**described)})


def flags_in(options: type[Any]) -> Iterator[tuple[str, Any, Flag]]:
    """Name, default (`MISSING` where there is none) and description of each flag of an options value."""
    for one in fields(options):
        if _KEY in one.metadata:
            yield one.name, one.default, one.metadata[_KEY]
