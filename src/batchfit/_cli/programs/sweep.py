"""`batchfit sweep` with a command in the place of a factory: what the file says, checked.

Rules: as in `sweep`. The command runs in the current folder, as a shell would run it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchfit._cli.sweep.sweep_file import COMMAND_OPTIONAL, SweepFile

if TYPE_CHECKING:
    from batchfit._cli.exits import CommandFailed
    from batchfit._sweep.job import Engine
    from batchfit._sweep.request import Asked


def asked_of_command(file: SweepFile) -> tuple[Asked, Engine]:
    """The sweep over the file's command, and where it runs; wrong values are refused with their lines."""
    from batchfit._program.pure.swept_command import SweptCommand
    from batchfit._program.sweep import CommandFactory
    from batchfit._sweep.engines import engine_of, launched
    from batchfit._sweep.pure.options import SweepOptions
    from batchfit._sweep.request import Asked

    own = (*COMMAND_OPTIONAL, "command", "measure")
    given: dict[str, Any] = {name: value for name, value in file.options.items() if name not in own}
    if isinstance(given.get("estimate"), str):
        given["estimate"] = None if given["estimate"] == "predict" else file.target("estimate")
    data = file.data
    try:
        if launched():
            raise ValueError(
                "command must be left out under torchrun: the command itself may be one, and the sweep "
                "is started without one"
            )
        command = SweptCommand.of(
            data["command"], env=data.get("env"), sets=data.get("set"), measure=data.get("measure")
        )
        entries = file.entries()
        command.check(tuple(entries[0].configuration), entries[0].configuration)
        options = SweepOptions(**given)
        asked = Asked.of(CommandFactory(command), data["knobs"], options, named=command.said())
        return asked, engine_of(options)
    except (ValueError, TypeError) as error:
        raise _wrong(file, error) from None


def _wrong(file: SweepFile, error: Exception) -> CommandFailed:
    """An argument that was refused, by its key; what a command lacks is said of the command."""
    text = str(error)
    return file.wrong(text, ("command",)) if text.startswith("the command ") else file.failure_of(error)
