"""A command of a sweep: `{name}` places that knobs fill, and the measures that it prints.

Rules: every knob has its place in the command, and is written as JSON would have it, text without quotes. A
measurement prints a JSON object on a line of its own; the last one counts.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

from batchfit._program.pure.template import CommandTemplate, FileSetting
from batchfit._sweep.pure.grid import GridError, did_you_mean

ITSELF: Final = "command"  # as a measure: the command itself, to its end
_OURS: Final = ("batch_size", "out")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SweptCommand:
    """The command of every configuration; `measure` is the words of another, run to its end at the size."""

    words: tuple[str, ...]
    env: tuple[str, ...] = ()
    sets: tuple[FileSetting, ...] = ()
    measure: tuple[str, ...] = ()

    @classmethod
    def of(cls, command: Any, *, env: Any = None, sets: Any = None, measure: Any = None) -> SweptCommand:
        """What a file says, checked."""
        words = _words("command", command)
        asked = words if measure == ITSELF else () if measure is None else _words("measure", measure)
        settings = tuple(FileSetting.parse(one) for one in _texts("set", sets))
        return cls(words=words, env=tuple(_texts("env", env)), sets=settings, measure=asked)

    def check(self, knobs: Sequence[str], configuration: Mapping[str, Any]) -> None:
        """Refuse knobs without a place; `configuration` is any, for the rest of the command."""
        for name in knobs:
            if name in _OURS:
                raise GridError(
                    f"a knob of a command must not be called {name!r}, which is ours", "knobs", name
                )
            if not any(f"{{{name}}}" in word for word in self.words):
                places = [part.split("}")[0] for word in self.words for part in word.split("{")[1:]]
                raise GridError(
                    f"the knob {name!r} must have a place {{{name}}} in the command"
                    f"{did_you_mean(name, places)}",
                    *("knobs", name),
                )
        self.template(configuration)
        if self.measure:
            self.measurement(configuration)

    def template(self, configuration: Mapping[str, Any]) -> CommandTemplate:
        """The command of one configuration."""
        return CommandTemplate(words=filled(self.words, configuration), env=self.env, sets=self.sets)

    def measurement(self, configuration: Mapping[str, Any]) -> CommandTemplate:
        """The measurement of one configuration."""
        words = filled(self.measure, configuration)
        sets = tuple(one for one in self.sets if any(one.file in word for word in words))
        return CommandTemplate(words=words, env=self.env, sets=sets)

    def said(self) -> dict[str, Any]:
        """What a result file keeps, and compares."""
        return {
            "command": shlex.join(self.words),
            "env": list(self.env),
            "set": [one.text for one in self.sets],
            "measure": shlex.join(self.measure) if self.measure else None,
        }


def filled(words: Sequence[str], configuration: Mapping[str, Any]) -> tuple[str, ...]:
    """The words with the values of knobs in their places."""
    texts = {f"{{{name}}}": _text(value) for name, value in configuration.items()}
    done = []
    for word in words:
        for place, text in texts.items():
            word = word.replace(place, text)
        done.append(word)
    return tuple(done)


def measures_in(lines: Iterable[str]) -> dict[str, Any] | None:
    """The last line that is a JSON object; None where there is none."""
    found = None
    for line in lines:
        text = line.strip()
        if text.startswith("{") and text.endswith("}"):
            try:
                value = json.loads(text)
            except ValueError:
                continue
            if isinstance(value, dict):
                found = value
    return found


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _words(name: str, value: Any) -> tuple[str, ...]:
    try:
        words = shlex.split(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(
            f"{name} must be a command as a shell reads it, not {value!r:.80}: {error}"
        ) from None
    if not isinstance(words, list | tuple) or not words or not all(isinstance(one, str) for one in words):
        raise ValueError(f"{name} must be a command, as text or as a list of words, not {value!r:.80}")
    return tuple(words)


def _texts(name: str, value: Any) -> list[str]:
    listed = [value] if isinstance(value, str) else value if value is not None else []
    if not isinstance(listed, list | tuple) or not all(isinstance(one, str) for one in listed):
        raise ValueError(f"{name} must be text, or a list of texts, not {value!r:.80}")
    return list(listed)
