"""A sweep as a file describes it: keys checked, each with its line, and targets looked for beside the file.

Rules: whatever is wrong is said with file, line and key, before torch is loaded where that is possible; a key
that is set on the command line (`--set`) is named as it was typed. Paths in the file are relative to it, so
that it can be run from anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from batchfit._cli.exits import Code, CommandFailed
from batchfit._config_files import Document, parse_document, read_lined
from batchfit._sweep.pure.estimates import estimate_of
from batchfit._sweep.pure.grid import Entry, GridError, did_you_mean, plan
from batchfit._sweep.pure.options import file_keys

NEEDED = ("factory", "knobs")
OPTIONAL = file_keys()
# Of a sweep over a command: variables and places in files that get the size, as `find --env` and `--set`.
COMMAND_NEEDED = ("command", "knobs")
COMMAND_OPTIONAL = ("env", "set")


@final
@dataclass(frozen=True, slots=True)
class SweepFile:
    """What a file and the command line ask for together."""

    document: Document
    data: dict[str, Any]
    typed: Mapping[str, str] = field(default_factory=dict)  # key -> how it was typed on the command line

    @classmethod
    def read(cls, path: Path, sets: Sequence[str] = (), flags: Mapping[str, str] | None = None) -> SweepFile:
        """The file, with what `--set key=value` and flags for keys change in it."""
        try:
            document = read_lined(path)
        except ValueError as error:
            raise CommandFailed(Code.USAGE, str(error)) from None
        data: dict[str, Any] = dict(document.data)
        typed = {}
        for flag, value in (flags or {}).items():
            data[flag] = value
            typed[flag] = f"--{flag.replace('_', '-')} {value}"
        for one in sets:
            keys, value = _setting(one)
            _put(data, keys, value, one)
            typed[keys[0]] = f"--set {one}"
        file = cls(document, data, typed)
        file._check_keys()
        return file

    @property
    def is_command(self) -> bool:
        """Whether the sweep is over a command, and not over a factory's workloads."""
        return "command" in self.data

    def _check_keys(self) -> None:
        needed = COMMAND_NEEDED if self.is_command else NEEDED
        optional = (*OPTIONAL, *COMMAND_OPTIONAL) if self.is_command else OPTIONAL
        if self.is_command and self.data.get("factory") is not None:
            raise self.wrong("factory must be left out where there is a command", ("factory",))
        if self.is_command and self.data.get("engine") is not None:
            raise self.wrong("engine must be left out where there is a command", ("engine",))
        for key in self.data:
            if key not in needed and key not in optional and not (self.is_command and key == "factory"):
                known = (*needed, *optional)
                raise self.wrong(
                    f"{key!r} must be one of {', '.join(known)}{did_you_mean(str(key), known)}", (str(key),)
                )
        for key in needed:
            if self.data.get(key) is None:
                name = "factory or command" if key == "factory" else key
                raise self.wrong(f"{name} must be given to a sweep, and is not", ())
        for key in () if self.is_command else ("factory", "measure"):
            value = self.data.get(key)
            if value is not None and not isinstance(value, str):
                raise self.wrong(f"{key} must be file.py:function, not {value!r:.80}", (key,))
        if self.data.get("engine") is not None and not isinstance(self.data["engine"], str):
            raise self.wrong(f"engine must be ray, not {self.data['engine']!r:.80}", ("engine",))
        output = self.data.get("output")
        if output is not None and not isinstance(output, str):
            raise self.wrong(f"output must be the name of a file, not {output!r:.80}", ("output",))

    def wrong(self, text: str, place: Sequence[str | int]) -> CommandFailed:
        """What is wrong, and where it stands."""
        where = self.typed.get(str(place[0])) if place else None
        return CommandFailed(Code.USAGE, f"{where or self.document.where(tuple(place))}: {text}")

    def failure_of(self, error: Exception) -> CommandFailed:
        """An argument that was refused, by the key that it came from."""
        if isinstance(error, GridError):
            return self.wrong(str(error), error.place)
        name = str(error).partition(" ")[0]
        return self.wrong(str(error), (name,) if name in self.data else ())

    def entries(self) -> tuple[Entry, ...]:
        """The configurations; knobs, start and tables are checked on the way, without torch."""
        try:
            entries = plan(
                self.data["knobs"],
                mode=self.data.get("mode", "grid"),
                start_from=self.data.get("start_from"),
            )
            estimate = self.data.get("estimate")
            if isinstance(estimate, Mapping):
                wanted = [entry.configuration for entry in entries if not entry.why_not]
                estimate_of(estimate, tuple(entries[0].configuration), wanted)
        except ValueError as error:
            raise self.failure_of(error) from None
        return entries

    @property
    def options(self) -> dict[str, Any]:
        """Keywords for the sweep; a key that says null is left out."""
        return {
            name: value
            for name, value in self.data.items()
            if name in OPTIONAL and name != "output" and value is not None
        } | ({"batch_size": None} if "batch_size" in self.data and self.data["batch_size"] is None else {})

    @property
    def output(self) -> Path:
        """Where the result goes: as the file says, or into the current folder under the file's name."""
        said = self.data.get("output")
        if said is not None:
            beside: Path = self.folder / str(said)
            return beside
        return Path(f"{Path(self.document.name).stem}-results.json")

    @property
    def folder(self) -> Path:
        """The folder of the file."""
        return Path(self.document.name).parent

    def target(self, key: str) -> str:
        """A target of the file as it can be loaded from the current folder."""
        text = str(self.data[key])
        place, colon, function = text.rpartition(":")
        is_file = place.endswith(".py") or "/" in place
        if not colon or not is_file or Path(place).is_absolute() or self.folder == Path():
            return text
        return f"{self.folder / place}:{function}"


def _setting(text: str) -> tuple[list[str], Any]:
    """`knobs.max_crops=[12, 13]` taken apart."""
    name, equals, value = text.partition("=")
    keys = name.strip().split(".")
    if not equals or not all(keys):
        raise CommandFailed(Code.USAGE, f"--set must be KEY=VALUE, such as batch_size=32, not {text!r}")
    try:
        parsed = parse_document(f"value: {value}", name=f"--set {text}", is_yaml=True)["value"]
    except ValueError as error:
        raise CommandFailed(Code.USAGE, str(error)) from None
    return keys, parsed


def _put(data: dict[str, Any], keys: Sequence[str], value: Any, text: str) -> None:
    for key in keys[:-1]:
        inner = data.get(key)
        if inner is None:
            inner = {}
        if not isinstance(inner, Mapping):
            raise CommandFailed(
                Code.USAGE, f"--set {text}: {key} must be a mapping to be set a key of, and is not"
            )
        data[key] = dict(inner)
        data = data[key]
    data[keys[-1]] = value
