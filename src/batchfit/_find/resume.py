"""A search kept in a file, so that a later run goes on where this one was.

Rules:
- The file is written whole after every trial, before it is reported: what it holds has been run, and a
  process that is killed loses the trial it was in, no other.
- A search goes on only with the settings it was begun with; what differs is named. Limits (`max_trials`,
  `time_limit_s`, `timeout_s`) and `isolate` may differ: they change how far a search gets, not what it finds.
- A file that holds something else is refused, and never written over.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, final

from batchfit._config_files import parse_json
from batchfit._files import write_atomically
from batchfit._find.pure.search import Search
from batchfit._units import format_bytes
from batchfit.errors import ResultFileError, SettingsDifferError
from batchfit.results import Trial

SCHEMA_VERSION = 1
KIND = "find"

# Fields of a search that are no settings of the user's, or only say when to stop.
_FREE = {"observations", "predicted", "budget_bytes", "max_trials"}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What such a file holds."""

    search: Search
    trials: tuple[Trial, ...]
    settings: Mapping[str, Any]
    elapsed_s: float

    def to_json(self) -> str:
        """This as JSON text."""
        data = {
            "kind": KIND,
            "schema_version": SCHEMA_VERSION,
            "settings": dict(self.settings),
            "elapsed_s": self.elapsed_s,
            "search": json.loads(self.search.to_json()),
            "trials": [trial.model_dump() for trial in self.trials],
        }
        return json.dumps(data, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Kept:
        """What `to_json` wrote."""
        try:
            data = parse_json(text)
        except ValueError as error:
            raise ResultFileError(f"not JSON: {error}") from None
        if not isinstance(data, dict) or data.get("kind") != KIND:
            raise ResultFileError("it holds no search that can be resumed: 'kind' must be 'find'")
        version = data.get("schema_version")
        if not isinstance(version, int) or version > SCHEMA_VERSION:
            raise ResultFileError(
                f"schema_version is {version!r}, and this batchfit reads up to {SCHEMA_VERSION}. "
                "Upgrade batchfit to read this file."
            )
        search = Search.from_json(json.dumps(data.get("search")))
        settings, elapsed_s, trials = (data.get(name) for name in ("settings", "elapsed_s", "trials"))
        whole = (
            isinstance(settings, dict)
            and isinstance(trials, list)
            and len(trials) == len(search.observations)
        )
        if not whole or not isinstance(elapsed_s, int | float):
            raise ResultFileError("it is damaged: settings, elapsed_s or trials are not what they should be")
        return cls(
            search=search,
            trials=tuple(Trial.from_json(json.dumps(trial)) for trial in data["trials"]),
            settings=data["settings"],
            elapsed_s=float(elapsed_s),
        )

    def check(self, path: str, search: Search, settings: Mapping[str, Any]) -> None:
        """Refuse settings other than the ones this search was begun with."""
        names = [field.name for field in fields(Search) if field.name not in _FREE]
        # Sharded models need other memory on another number of ranks; older files are of one.
        then = {"world_size": 1, **{name: getattr(self.search, name) for name in names}, **self.settings}
        now = {**{name: getattr(search, name) for name in names}, **settings}
        differing = [name for name, value in now.items() if then.get(name) != value]
        if differing:
            differences = [
                f"{name}: {_shown(name, then.get(name))} then, {_shown(name, now[name])} now"
                for name in differing
            ]
            raise SettingsDifferError(path, differences)


def _shown(name: str, value: object) -> str:
    if name == "budget" and isinstance(value, int):
        return format_bytes(value)
    return "not given" if value is None else str(value)


@final
class ResumeFile:
    """The file of one search while it runs."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._settings: Mapping[str, Any] = {}
        self.earlier_s = 0.0  # seconds spent by earlier runs

    def read(self, search: Search, settings: Mapping[str, Any]) -> str:
        """The text of the file, empty where there is none yet; settings known so far are compared now."""
        kept = self.kept()
        if kept is None:
            return ""
        kept.check(str(self.path), search, settings)
        return kept.to_json()

    def kept(self) -> Kept | None:
        """What the file holds; None where it is not there, or empty."""
        if not self.path.resolve().parent.is_dir():
            raise ValueError(f"resume must be a file in a folder that exists, not {str(self.path)!r}")
        try:
            text = self.path.read_text(encoding="utf-8")
            return Kept.from_json(text) if text.strip() else None
        except FileNotFoundError:
            return None
        except (UnicodeDecodeError, IsADirectoryError, ResultFileError) as error:
            raise ResultFileError(f"{self.path} cannot be resumed from: {error}") from None

    def begin(self, text: str, search: Search, settings: Mapping[str, Any]) -> tuple[Search, list[Trial]]:
        """The search to go on with, and its trials so far: those of `text`, which one rank has read."""
        self._settings = settings
        if not text:
            return search, []
        kept = Kept.from_json(text)
        kept.check(str(self.path), search, settings)
        self.earlier_s = kept.elapsed_s
        return replace(kept.search, max_trials=search.max_trials), list(kept.trials)

    def save(self, search: Search, trials: list[Trial], elapsed_s: float) -> None:
        """Keep the search as it is now."""
        kept = Kept(
            search=search,
            trials=tuple(trials),
            settings=self._settings,
            elapsed_s=self.earlier_s + elapsed_s,
        )
        write_atomically(self.path, kept.to_json())
