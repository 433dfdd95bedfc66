"""The program run for real with a size, and again with a smaller one after an OOM, where that is allowed.

Rules:
- Nothing is between the program and its terminal: what it prints, reads and returns is its own.
- Without restarts there is nothing of ours in its Python. With them one function runs at its exit: it notes
  an error that ended it, and costs a step nothing.
- What it leaves running after it has ended by itself is its own affair. What is left after a signal, and
  before another start, is ended; so is all of it where this process is killed.
- Copies of config files stay as long as it runs, and no longer.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from batchfit._program.config_copy import write_copies
from batchfit._program.pure.after_exit import Ending, first_line, next_size
from batchfit._program.pure.variables import exit_variables
from batchfit._program.running.foreground import ForegroundProgram
from batchfit._program.running.kernel_kills import kernel_kills
from batchfit._program.running.run_watch import GRACE_S, TOKEN, end_all
from batchfit.errors import ProgramError

if TYPE_CHECKING:
    from batchfit._find.pure.bracket import Sizes
    from batchfit._program.pure.template import CommandTemplate

_HERE = Path(__file__).parent


Started = tuple[int, Ending]  # the size of a start, and how it ended


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RealRun:
    """What to run: `sizes` are those that a restart may take, `ran` those of them that have run."""

    template: CommandTemplate
    sizes: Sizes
    ran: Sequence[int] = ()
    restarts: int = 0
    out: str = ""
    say: Callable[[str], object] = print

    def to_the_end(self, size: int) -> list[Started]:
        """Run the program with the size, and again as long as an OOM and the restarts allow it."""
        starts: list[Started] = []
        with _Place.made() as place:
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

    def _once(self, size: int, place: _Place) -> Ending:
        files = write_copies(self.template, size, place.folder)
        command = self.template.command(size, out=self.out, files=files)
        environment = {**os.environ, **self.template.variables(size), TOKEN: place.token}
        if self.restarts:
            environment = exit_variables(
                environment,
                inject=str(_HERE.parent / "probe" / "inject"),
                source=str(_HERE.parent.parent.parent),
                file=str(place.endings),
            )
        with contextlib.suppress(OSError):
            place.endings.unlink()
        kills, begun_s = kernel_kills(), time.monotonic()
        try:
            program = ForegroundProgram(command, environment)
        except OSError as error:
            raise ProgramError(
                f"the command could not be started: {command[0]}: {error.strerror or error}"
            ) from None
        place.watch(program.pid)
        code = program.wait()
        ending = Ending(
            code=code,
            elapsed_s=time.monotonic() - begun_s,
            oom=place.oom(),
            kernel_kills=kernel_kills() - kills,
            stopped=program.stopped_by != 0,
        )
        if code < 0 or ending.stopped or (self.restarts and ending.too_large):
            place.end_rest(program.pid)
        return ending


@final
class _Place:
    """What the starts share: a folder, a token, and a watch that ends them where this process is killed."""

    def __init__(self, folder: Path, watch: subprocess.Popen[bytes], orders: int, token: str) -> None:
        self.folder, self.token = folder, token
        self.endings = folder / "endings"
        self._watch, self._orders = watch, orders

    @classmethod
    @contextmanager
    def made(cls) -> Iterator[_Place]:
        """One, and nothing of it afterwards."""
        folder = Path(tempfile.mkdtemp(prefix="batchfit-run-"))
        token = secrets.token_hex(16)
        reads, writes = os.pipe()
        try:
            script = str(_HERE / "run_watch.py")
            watch = subprocess.Popen(
                [sys.executable, "-I", "-S", script, str(reads), token, str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(reads,),
                start_new_session=True,
            )
            os.close(reads)
            try:
                yield cls(folder, watch, writes, token)
            finally:
                with contextlib.suppress(OSError):
                    os.write(writes, b"0\n")
                os.close(writes)
                watch.wait()
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def watch(self, group: int) -> None:
        """End the run in this process group where this process is killed."""
        with contextlib.suppress(OSError):
            os.write(self._orders, b"%d\n" % group)

    def oom(self) -> str:
        """The text of an OOM that ended a process of the program; empty where none did."""
        with contextlib.suppress(OSError):
            for line in self.endings.read_text(encoding="utf-8", errors="replace").splitlines():
                found: dict[str, Any] = {}
                with contextlib.suppress(ValueError):
                    found = json.loads(line)
                if found.get("verdict") in ("oom", "too_large", "ambiguous"):
                    return str(found.get("text", "")) or "out of memory"
        return ""

    def end_rest(self, group: int) -> None:
        """End what the program has left running."""
        end_all(self.token, group, grace_s=GRACE_S)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
