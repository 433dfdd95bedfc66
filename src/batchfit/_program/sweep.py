"""A sweep over commands: each configuration's size is found by trials of its command, and measured by a run.

Rules: as in `_sweep`. A measurement is a real run, to its end, with nothing switched off; what it prints is
read for its measures and kept for its errors. Nothing of it is left.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch

from batchfit._engine.device.interrupts import Interrupts
from batchfit._find.find import find_with
from batchfit._find.pure.options import FindOptions
from batchfit._program.config_copy import write_copies
from batchfit._program.disk_room import room_for
from batchfit._program.find import program_trials
from batchfit._program.pure.swept_command import SweptCommand, measures_in
from batchfit._program.pure.tail import Tail
from batchfit._program.pure.template import CommandTemplate
from batchfit._program.running.place import RunPlace
from batchfit._program.trials import ProgramTarget
from batchfit._sweep.own_configuration import OwnConfiguration
from batchfit._sweep.run_state import ConfigurationRun, SweepSettings
from batchfit.errors import ProgramError
from batchfit.results import FitResult


@final
@dataclass(frozen=True, slots=True)
class CommandFactory:
    """The factory of a sweep over commands; other processes can load it."""

    command: SweptCommand

    def __call__(self, **knobs: Any) -> CommandConfiguration:
        """The configuration with these knobs."""
        return CommandConfiguration(self.command, knobs)


@final
class CommandConfiguration(OwnConfiguration):
    """One configuration: its command, searched and measured."""

    def __init__(self, command: SweptCommand, knobs: Mapping[str, Any]) -> None:
        self._command, self._knobs = command, dict(knobs)
        self._why = ""  # the last measurement was out of memory

    def find(self, settings: SweepSettings, run: ConfigurationRun, start: int | None) -> FitResult:
        """Search the size by runs of the command."""
        options = FindOptions(
            **settings.of_search(start), device=settings.device, isolate=True, on_trial=run.on_trial
        )
        target = ProgramTarget(
            template=self._command.template(self._knobs),
            on_device=lambda name, available_bytes: run.known.update(
                device=name, device_model=name.partition(":")[0], device_bytes=available_bytes
            ),
            on_step=lambda size, number: run.stepping(size),
        )
        return find_with(program_trials(target, options), lambda: options)

    @property
    def measures(self) -> bool:
        """Whether there is a command that measures."""
        return bool(self._command.measure)

    def measure(self, size: int) -> Mapping[str, Any] | None:
        """Run the measurement with the size, to its end; None where it is out of memory."""
        template = self._command.measurement(self._knobs)
        tail, found = Tail(), None
        with RunPlace.made() as place:
            out = place.folder / "out"
            with room_for("the measurement"):
                out.mkdir()
                files = write_copies(template, size, place.folder)
            command = template.command(size, out=str(out), files=files)
            environment = place.environment({**os.environ, **template.variables(size)}, notes_exit=True)
            place.begin()
            code, lines = _output_of(template, command, environment, place, tail)
            found = measures_in(lines)
            ending = place.ending(code)
        self._why = ending.too_large
        if self._why:
            return None
        what = f"the measurement at batch size {size}"
        if code:
            raise ProgramError(
                f"{what} ended with code {ending.exit_code}: {_last(tail)}", lines=tail.lines()
            )
        if found is None:
            raise ProgramError(
                f"{what} must print a JSON object on a line of its own, such as "
                f'{{"accuracy": 0.91}}, and its last line is: {_last(tail)}'
            )
        return found

    def out_of_memory(self, size: int) -> Exception:
        """The error of the last measurement."""
        return torch.OutOfMemoryError(f"the measurement at batch size {size}: {self._why}")


def _output_of(
    template: CommandTemplate,
    command: list[str],
    environment: Mapping[str, str],
    place: RunPlace,
    tail: Tail,
) -> tuple[int, list[str]]:
    """Run to the end: the code, and lines that may be measures."""
    lines: list[str] = []
    with Interrupts() as interrupts:  # in the middle of a start nothing would end the program
        try:
            program = subprocess.Popen(
                command,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        except OSError as error:
            raise template.not_started(error.strerror or error) from None
        assert program.stdout is not None
        place.watch(program.pid)
        try:
            with interrupts.opened(), program.stdout:
                for line in program.stdout:
                    text = line.decode(errors="replace")
                    tail.take(text)
                    if text.lstrip().startswith("{"):
                        lines = [text]
        finally:
            if program.poll() is None:
                place.end_rest(program.pid)
            code = program.wait()
    return code, lines


def _last(tail: Tail) -> str:
    return next(iter(tail.lines(1)), "nothing was printed")
