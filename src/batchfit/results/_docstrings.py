"""The sections of a docstring: what it says of each field, parameter and error.

Rules: sections are Google's (`Args:`, `Attributes:`, `Raises:`), an entry `name: text` with its further lines
indented deeper. Read when it is asked for: importing results reads no docstring.
"""

from __future__ import annotations

import inspect
import re

_SECTION = re.compile(r"^(Args|Attributes|Raises|Returns|Yields|Example|Examples):$")
_ENTRY = re.compile(r"^ {4}(\*{0,2}\w[\w.]*)(?: \([^)]*\))?: *(.*)$")


def sections(doc: str) -> dict[str, dict[str, str]]:
    """Section -> name -> text; what has no name (`Returns:`) stands under an empty one."""
    found: dict[str, dict[str, str]] = {}
    current: dict[str, str] | None = None
    name, named = "", True
    for line in inspect.cleandoc(doc).splitlines():
        if heading := _SECTION.match(line):
            current = found.setdefault(heading[1], {})
            name, named = "", heading[1] not in ("Returns", "Yields")
        elif current is None or not line.strip():
            continue
        elif not line.startswith("    "):
            current = None
        elif named and (entry := _ENTRY.match(line)):
            name = entry[1]
            current[name] = entry[2]
        else:
            current[name] = f"{current.get(name, '')} {line.strip()}".strip()
    return found


def introduction(doc: str) -> str:
    """What stands before the first section."""
    lines = inspect.cleandoc(doc).splitlines()
    first = next((at for at, line in enumerate(lines) if _SECTION.match(line)), len(lines))
    return "\n".join(lines[:first]).strip()
