"""How a command's answer is remembered: by what the command says, or under a name of the user's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StoredName:
    """The name in the store, None for the command itself; `fresh`: what is stored is replaced."""

    key: str | None = None
    fresh: bool = False
