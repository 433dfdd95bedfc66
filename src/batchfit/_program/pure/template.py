"""The command that the user typed, with a place for the batch size: `python train.py --batch-size {}`.

Rules:
- `{}` and `{batch_size}` stand for the size, anywhere in a word; where `{batch_size}` is used, `{}` is left
  as it is (a word may be JSON). `{out}` stands for a folder that a probe has for itself.
- `env` names variables that get the size. `sets` name a place in a file (`config.yaml:train.batch_size`):
  the command is given a changed copy of the file, in the place of its name.
- What is wrong with the command is said before anything is run.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from batchfit.errors import ProgramError

SIZE, PLAIN, OUT = "{batch_size}", "{}", "{out}"
_NODES = re.compile(r"^--?(?:nnodes|num_machines|num[-_]nodes)$")
_EXAMPLE = "batchfit find -- python train.py --batch-size {}"

NO_PLACE = (
    "the command has no place for the batch size: write {} where the number stands "
    f"({_EXAMPLE}), or name a variable (--env BATCH_SIZE) or a place in a file "
    "(--set config.yaml:train.batch_size)"
)


@final
@dataclass(frozen=True, slots=True)
class FileSetting:
    """One place in a file that gets the size: `config.yaml:train.batch_size`."""

    file: str
    keys: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> FileSetting:
        """Read `FILE:KEY.KEY`."""
        file, colon, keys = text.rpartition(":")
        if not colon or not file or not keys or not all(keys.split(".")):
            raise ValueError(f"set must be FILE:KEY such as config.yaml:train.batch_size, not {text!r}")
        if not file.endswith((".yaml", ".yml", ".json", ".toml")):
            raise ValueError(f"set must name a .yaml, .json or .toml file, not {text!r}")
        return cls(file, tuple(keys.split(".")))

    @property
    def key(self) -> str:
        """`train.batch_size`."""
        return ".".join(self.keys)

    @property
    def text(self) -> str:
        """As it is typed."""
        return f"{self.file}:{self.key}"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CommandTemplate:
    """A command with places for the size."""

    words: tuple[str, ...]
    env: tuple[str, ...] = ()
    sets: tuple[FileSetting, ...] = ()
    may_be_fixed: bool = False  # a command without a place is run as it is

    def __post_init__(self) -> None:
        if not self.words:
            raise ValueError(f"the command after -- is empty: {_EXAMPLE}")
        for name in self.env:
            if not name or "=" in name or "\0" in name:
                raise ValueError(f"env must be the name of a variable such as BATCH_SIZE, not {name!r}")
        for one in self.sets:
            if not any(one.file in word for word in self.words):
                raise ValueError(
                    f"set must name a file as the command does, not {one.file!r}: the command is given a "
                    "changed copy in its place, and does not name it"
                )
        if self.is_fixed and not self.may_be_fixed:
            raise ValueError(NO_PLACE)
        self._check_nodes()

    @property
    def is_fixed(self) -> bool:
        """Whether the size stands in the command, where no other can be put."""
        return not self.env and not self.sets and not any(self.marker in word for word in self.words)

    @property
    def marker(self) -> str:
        """What stands for the size in this command."""
        return SIZE if any(SIZE in word for word in self.words) else PLAIN

    @property
    def has_out(self) -> bool:
        """Whether a probe has a folder for what the program writes."""
        return any(OUT in word for word in self.words)

    def command(self, size: int, *, out: str = OUT, files: Mapping[str, str] | None = None) -> list[str]:
        """The command at a size; `files` are copies by the name that the command has for them."""
        words = []
        for word in self.words:
            for name, copy in (files or {}).items():
                word = word.replace(name, copy)
            words.append(word.replace(self.marker, str(size)).replace(OUT, out))
        return words

    def variables(self, size: int) -> dict[str, str]:
        """The environment variables that hold the size."""
        return {name: str(size) for name in self.env}

    def shown(self, size: int, *, out: str = OUT) -> str:
        """The command as one would type it, with its settings before it or behind it."""
        before = [f"{name}={size}" for name in self.env]
        text = " ".join([*before, *(_quoted(word) for word in self.command(size, out=out))])
        places = [f"{one.key}: {size} in {one.file}" for one in self.sets]
        return "  ".join([text, *(f"({place})" for place in places)])

    def not_started(self, why: object) -> ProgramError:
        """The error of a command that the system has refused."""
        return ProgramError(f"the command could not be started: {self.words[0]}: {why}")

    def shown_template(self) -> str:
        """The command as it was typed."""
        return " ".join(_quoted(word) for word in self.words)

    def _check_nodes(self) -> None:
        for word, following in zip(self.words, (*self.words[1:], ""), strict=True):
            name, _, value = word.partition("=")
            if not _NODES.match(name):
                continue
            most = (value or following).rpartition(":")[2]
            if most.isdigit() and int(most) > 1:
                raise ValueError(
                    f"the command needs {most} nodes ({name}), and probes run on this one: batch sizes are "
                    "per process, so find with one node, and use the size on all"
                )


def isolating_flag(words: Sequence[str]) -> str:
    """The flag with which the command's Python ignores its environment (-I, -E) or its site (-S), if any."""
    for number, word in enumerate(words):
        if not re.fullmatch(r"python[\d.]*", word.rpartition("/")[2]):
            continue
        for flag in words[number + 1 :]:
            if not flag.startswith("-") or flag.startswith("--") or flag in ("-m", "-c"):
                break
            if re.fullmatch(r"-[a-zA-Z]*[IES][a-zA-Z]*", flag) and not flag.startswith(("-W", "-X")):
                return flag
    return ""


def _quoted(word: str) -> str:
    """As a shell wants it; braces need no quotes."""
    return word if re.fullmatch(r"[\w@%+=:,./{}-]+", word) else shlex.quote(word)
