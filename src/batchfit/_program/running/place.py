"""One real run's folder of our files, its token, and the watch that ends all its processes.

Rules: every process of the run has its token, so that all of them are found wherever they went. Where this
process is killed, a watch ends them and deletes the folder.
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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

from batchfit._engine.device.interrupts import Interrupts
from batchfit._program.disk_room import room_for
from batchfit._program.pure.after_exit import Ending
from batchfit._program.pure.variables import exit_variables, limit_variables
from batchfit._program.running.kernel_kills import kernel_kills
from batchfit._program.running.run_watch import GRACE_S, TOKEN, end_all


@final
class RunPlace:
    """What starts of a program share: a folder, a token, and a watch that ends them if we are killed."""

    def __init__(self, folder: Path, watch: subprocess.Popen[bytes], orders: int, token: str) -> None:
        self.folder, self.token = folder, token
        self.endings = folder / "endings"
        self._watch, self._orders = watch, orders
        self._kills, self._begun_s = 0, 0.0

    @classmethod
    @contextmanager
    def made(cls) -> Iterator[RunPlace]:
        """One, and nothing of it afterwards."""
        place: RunPlace | None = None
        try:
            with Interrupts():  # half made, nothing would delete it
                place = cls._begun()
            yield place
        finally:
            with Interrupts():
                if place is not None:
                    place._end()

    @classmethod
    def _begun(cls) -> RunPlace:
        with room_for("the run"):
            folder = Path(tempfile.mkdtemp(prefix="batchfit-run-"))
        token = secrets.token_hex(16)
        try:
            reads, writes = os.pipe()
            script = str(Path(__file__).with_name("run_watch.py"))
            watch = subprocess.Popen(
                [sys.executable, "-I", "-S", script, str(reads), token, str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(reads,),
                start_new_session=True,
            )
            os.close(reads)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return cls(folder, watch, writes, token)

    def _end(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._orders, b"0\n")
        os.close(self._orders)
        self._watch.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def environment(
        self, variables: Mapping[str, str], *, notes_exit: bool, limit_bytes: int | None = None
    ) -> dict[str, str]:
        """The program's variables.

        `notes_exit`: its processes are to note what ended them; `limit_bytes`: what each of them may use.
        """
        known = {**variables, TOKEN: self.token}
        if limit_bytes is not None:
            return limit_variables(known, budget_bytes=limit_bytes)
        if not notes_exit:
            return known
        return exit_variables(known, file=str(self.endings))

    def begin(self) -> None:
        """The program is about to be started."""
        with contextlib.suppress(OSError):
            self.endings.unlink()
        self._kills, self._begun_s = kernel_kills(), time.monotonic()

    def ending(self, code: int, *, stopped: bool = False) -> Ending:
        """How the program has ended."""
        return Ending(
            code=code,
            elapsed_s=time.monotonic() - self._begun_s,
            oom=self._oom(),
            kernel_kills=kernel_kills() - self._kills,
            stopped=stopped,
        )

    def watch(self, group: int) -> None:
        """End the run in this process group where this process is killed."""
        with contextlib.suppress(OSError):
            os.write(self._orders, b"%d\n" % group)

    def _oom(self) -> str:
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
