"""The program run for real with a size, and again with a smaller one after an OOM, where that is allowed.

Rules:
- Nothing is between the program and its terminal: what it prints, reads and returns is its own.
- Without restarts there is nothing of ours in its Python. With them one function runs at its exit: it notes
  an error that ended it, and costs a step nothing. A command without a place for a size may have a limit on
  its memory.
- What it leaves running after it has ended by itself is its own affair. What is left after a signal, and
  before another start, is ended; so is all of it where this process is killed.
- Copies of config files stay as long as it runs, and no longer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from batchfit._program.config_copy import write_copies
from batchfit._program.disk_room import room_for
from batchfit._program.pure.after_exit import Ending, first_line, next_size
from batchfit._program.running.foreground import ForegroundProgram
from batchfit._program.running.place import RunPlace

if TYPE_CHECKING:
    from batchfit._find.pure.bracket import Sizes
    from batchfit._program.pure.template import CommandTemplate


Started = tuple[int, Ending]  # the size of a start, and how it ended


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RealRun:
    """What to run: `sizes` are those that a restart may take, `ran` those of them that have run.

    `limit_bytes` is what each process may use, of a command that has no place for a size.
    """

    template: CommandTemplate
    sizes: Sizes
    ran: Sequence[int] = ()
    restarts: int = 0
    limit_bytes: int | None = None
    out: str = ""
    say: Callable[[str], object] = print

    def to_the_end(self, size: int) -> list[Started]:
        """Run the program with the size, and again as long as an OOM and the restarts allow it."""
        starts: list[Started] = []
        with RunPlace.made() as place:
            while True:
                ending = self._once(size, place)
                starts.append((size, ending))
                following = self._following(starts)
                if following is None:
                    return starts
                size = following

    def _following(self, starts: Sequence[Started]) -> int | None:
        """The size of the next start; None where there is none, and why is said."""
        size, ending = starts[-1]
        why = ending.too_large
        if not self.restarts or not why:
            return None
        done = len(starts) - 1
        lasted = _duration(ending.elapsed_s)
        what = f"batch size {size} was out of memory after {lasted} ({first_line(why)})"
        if done >= self.restarts:
            self.say(f"{what}; no restart is left of {self.restarts}")
            return None
        smaller = next_size(size, self.sizes, self.ran)
        if smaller is None:
            self.say(f"{what}; no smaller size is allowed")
            return None
        self.say(f"{what}; starting again with {smaller} (restart {done + 1} of {self.restarts})")
        return smaller

    def _once(self, size: int, place: RunPlace) -> Ending:
        with room_for("copies of config files"):
            files = write_copies(self.template, size, place.folder)
        command = self.template.command(size, out=self.out, files=files)
        variables = {**os.environ, **self.template.variables(size)}
        environment = place.environment(variables, notes_exit=self.restarts > 0, limit_bytes=self.limit_bytes)
        place.begin()
        try:
            program = ForegroundProgram(command, environment)
        except OSError as error:
            raise self.template.not_started(error.strerror or error) from None
        place.watch(program.pid)
        ending = place.ending(program.wait(), stopped=program.stopped_by != 0)
        if ending.code < 0 or ending.stopped or (self.restarts and ending.too_large):
            place.end_rest(program.pid)
        return ending


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
