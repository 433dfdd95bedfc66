"""How a command ends: the one list of exit codes, the error that carries one, and the code of each error.

Rules: a script can distinguish the outcomes by the code alone; `--help` prints this list and a test
compares the two; an interrupt (Ctrl-C) and a SIGTERM take the same way out, so both save what is known (when
they may come, `_cli/signals.py` says).
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum
from typing import Any, TextIO, TypeVar

from batchfit import errors
from batchfit._cli.signals import SIGNALS, Terminated

Options = TypeVar("Options")


class Code(IntEnum):
    """Exit codes of every command."""

    FOUND = 0
    BROKEN = 1
    USAGE = 2
    NOTHING_FITS = 3
    RAISED = 4
    STOPPED = 5
    UNTRACEABLE = 6
    SOME_FAILED = 7
    MORE_MEMORY = 8
    INTERRUPTED = 130
    TERMINATED = 143


MEANINGS = {
    Code.FOUND: "the question was answered (doctor: all is well)",
    Code.BROKEN: "batchfit itself failed (doctor: something is broken)",
    Code.USAGE: "bad usage: a flag, the target or a result file is wrong",
    Code.NOTHING_FITS: "not even the smallest allowed size fits",
    Code.RAISED: "the target, or a step, raised an error",
    Code.STOPPED: "a limit ended the search before any size ran",
    Code.UNTRACEABLE: "the step cannot be traced; find measures instead",
    Code.SOME_FAILED: "some configurations of a sweep failed; the others are in its result",
    Code.MORE_MEMORY: "check: more memory than the baseline or --max-peak allows",
    Code.INTERRUPTED: "interrupted (Ctrl-C); what was found so far is printed and saved",
    Code.TERMINATED: "terminated (SIGTERM), otherwise as 130",
}

# How a command can end besides: with an answer, wrong flags, a failure of batchfit, an interrupt.
_MORE = {
    "find": (Code.NOTHING_FITS, Code.RAISED, Code.STOPPED),
    "run": (Code.NOTHING_FITS, Code.RAISED, Code.STOPPED),
    "predict": (Code.NOTHING_FITS, Code.RAISED, Code.UNTRACEABLE),
    "explain": (Code.RAISED, Code.UNTRACEABLE),
    "plan": (Code.NOTHING_FITS, Code.RAISED),
    "profile": (Code.NOTHING_FITS, Code.RAISED),
    "sweep": (Code.NOTHING_FITS, Code.RAISED, Code.SOME_FAILED),
    "schedule": (Code.RAISED,),
    "why": (),
    "check": (Code.NOTHING_FITS, Code.RAISED, Code.UNTRACEABLE, Code.MORE_MEMORY),
    "report": (),
    "init": (),
    "doctor": (),
    "demo": (),
}


def codes_of(command: str) -> tuple[Code, ...]:
    """The codes with which this command can end; all, for `batchfit` itself."""
    if command not in _MORE:
        return tuple(Code)
    always = {Code.FOUND, Code.BROKEN, Code.USAGE, Code.INTERRUPTED, Code.TERMINATED}
    return tuple(code for code in Code if code in always or code in _MORE[command])


class CommandFailed(Exception):
    """A command cannot go on: the code to exit with, what to say, and details to show above it.

    `every_rank`: under torchrun each rank says it, because it may be true of that rank alone.
    """

    def __init__(self, code: Code, text: str, *, details: str = "", every_rank: bool = False) -> None:
        super().__init__(text)
        self.code = code
        self.text = text
        self.details = details
        self.every_rank = every_rank


def wrong_flag(error: Exception, command: str) -> CommandFailed:
    """A flag's value is refused."""
    where = (
        "predict --list-gpus lists the GPUs"
        if str(error).startswith("gpu ")
        else f"{command} --help lists the flags"
    )
    return CommandFailed(Code.USAGE, f"{error} (batchfit {where})")


def checked_options(kind: type[Options], flags: Mapping[str, Any], command: str) -> Options:
    """The options that the flags say; wrong ones are refused before torch is loaded."""
    try:
        return kind(**flags)
    except (ValueError, TypeError) as error:
        raise wrong_flag(error, command) from None


def failure_of(error: BaseException) -> CommandFailed | None:
    """How a command ends by one of batchfit's errors; None for any other error."""
    if isinstance(error, errors.TargetError | errors.SettingsDifferError | errors.ResultFileError):
        return CommandFailed(Code.USAGE, str(error))
    if isinstance(error, errors.ProgramError):
        return CommandFailed(Code.RAISED, str(error), details="\n".join(error.lines))
    if isinstance(error, errors.UntraceableError):
        return CommandFailed(Code.UNTRACEABLE, str(error))
    if isinstance(error, errors.NothingFitsError):
        return CommandFailed(Code.NOTHING_FITS, str(error))
    if isinstance(error, errors.SearchStoppedError):
        return CommandFailed(Code.STOPPED, str(error))
    if isinstance(error, errors.BatchfitError):
        return CommandFailed(Code.RAISED, str(error), every_rank=True)
    return None


def interrupt_code(stop: KeyboardInterrupt) -> Code:
    """The code of a command that an interrupt has ended."""
    return Code.TERMINATED if isinstance(stop, Terminated) else Code.INTERRUPTED


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Inside, Ctrl-C and SIGTERM come too late: an answer is being delivered, and it is the whole one."""
    with SIGNALS.closed():
        try:
            yield
        finally:
            SIGNALS.forget()


def load_torch(*modules: str) -> None:
    """Import torch and what is named besides, before anything else is begun."""
    with SIGNALS.loading():
        for name in ("torch", *modules):
            importlib.import_module(name)


class _UnbreakableFile(io.FileIO):
    """A file that nobody may be reading: then what is written to it is dropped, from there on."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data) or 0
        except BrokenPipeError:
            # For all that this process and its children write from now on, and for stdout if it is the same
            # pipe (`2>&1 | head`): what the user's code prints must not fail its work either.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            with contextlib.suppress(OSError):
                if os.path.sameopenfile(1, self.fileno()):
                    os.dup2(nowhere, 1)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return len(memoryview(data).cast("B"))


def unbreakable(stream: TextIO) -> TextIO:
    """The stream, without a BrokenPipeError when its reader goes away; one that is no file stays as it is."""
    try:
        number = stream.fileno()
    except (OSError, AttributeError, ValueError):
        return stream
    stream.flush()
    file = io.BufferedWriter(_UnbreakableFile(number, "wb", closefd=False))
    return io.TextIOWrapper(
        file, encoding=stream.encoding, errors=stream.errors, line_buffering=True, write_through=True
    )


def silence_broken_pipes() -> None:
    """Nobody reads our output any more: keep the interpreter from complaining about it at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(nowhere, stream.fileno())
