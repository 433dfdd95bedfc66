"""Ends what is left of a run: as a script of its own, where the process that would do it was killed.

Rules: every process of a run has the run's token in its environment, wherever in the tree and in whatever
session it is. They are asked to end first, and killed when they do not. Where processes cannot be listed the
program's process group is ended. Only the standard library: it is started with -I -S.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable

TOKEN = "BATCHFIT_RUN"
GRACE_S = 30.0  # between being asked and being killed, as SLURM has it
_PAUSE_S = 0.05


def processes_with(variable: str, value: str) -> list[int]:
    """Every other process that has this in its environment, as far as it may be read."""
    wanted = f"{variable}={value}".encode()
    found = []
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        if name.isdigit() and int(name) != os.getpid():
            try:
                with open(f"/proc/{name}/environ", "rb") as stream:
                    if wanted in stream.read().split(b"\0"):
                        found.append(int(name))
            except OSError:
                continue
    return found


def end_all(
    token: str, group: int, *, grace_s: float = GRACE_S, hurry: Callable[[], bool] = lambda: False
) -> None:
    """End what is left of a run: asked first, killed after `grace_s` or once `hurry` says so."""
    asked = False
    deadline = time.monotonic() + grace_s
    while True:
        left = processes_with(TOKEN, token)
        late = time.monotonic() >= deadline or hurry()
        number = signal.SIGKILL if late else signal.SIGTERM
        if not asked or late:
            for one in left:
                with contextlib.suppress(OSError):
                    os.kill(one, number)
                    os.kill(one, signal.SIGCONT)  # one that is stopped would not see it
            if group and not os.path.isdir("/proc/self"):
                with contextlib.suppress(OSError):
                    os.killpg(group, number)
        asked = True
        if not left or time.monotonic() > deadline + grace_s:  # stuck in a device driver
            return
        time.sleep(_PAUSE_S)


def main() -> None:
    """Wait until the parent's end of the pipe closes; unless it said that all is done, end the run."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP):
        signal.signal(number, signal.SIG_IGN)
    orders, token, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    text, open_ = b"", True
    while open_:
        select.select([orders], [], [])
        part = os.read(orders, 4096)
        text, open_ = text + part, bool(part)
    groups = [json.loads(line) for line in text.splitlines() if line]
    if groups and groups[-1] == 0:
        return
    end_all(token, groups[-1] if groups else 0)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
