"""Starts one program and ends all of it: a script of its own between batchfit and the program.

Rules:
- All that the program starts, in sessions of its own too (as torchrun's ranks are), is a descendant of this
  process and stays one: it is the subreaper of its tree. When it ends, nothing of the tree is left.
- It ends the tree when the parent says so, and when the parent has ended in whatever way: then its end of the
  pipe closes. Ctrl-C and SIGTERM are the parent's to answer.
- The folder of the probe is deleted last.
- Only the standard library: it is started with -I -S, in 20 ms.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import sys
import time
from typing import Any

_SUBREAPER, _PARENT_DEATH = 36, 1  # PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG
_PAUSE_S = 0.02


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(AttributeError, OSError):  # not Linux: the process group has to do
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _spawn(order: dict[str, Any]) -> int:
    """Start the program; -1 and a message where that is not possible."""
    failed, fails = os.pipe()
    os.set_inheritable(fails, False)
    pid = os.fork()
    if pid == 0:
        try:
            os.setpgid(0, 0)
            _prctl(_PARENT_DEATH, signal.SIGKILL)
            os.chdir(order["folder"])
            os.execvpe(order["command"][0], order["command"], order["environment"])
        except OSError as error:
            os.write(fails, json.dumps([error.errno, error.strerror]).encode())
        finally:
            os._exit(127)
    os.close(fails)
    text = os.read(failed, 4096)
    os.close(failed)
    if text:
        os.waitpid(pid, 0)
        _say({"kind": "not_started", "error": json.loads(text)})
        return -1
    _say({"kind": "started", "pid": pid})
    return pid


def _say(message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        os.write(_ANSWERS, json.dumps(message).encode() + b"\n")


def descendants(root: int) -> list[int]:
    """Every process below, those nearest to the root first."""
    parents: dict[int, list[int]] = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as stream:
                    fields = stream.read().rpartition(b")")[2].split()
            except OSError:
                continue
            parents.setdefault(int(fields[1]), []).append(int(name))
    found: list[int] = []
    level = [root]
    while level:
        level = [child for one in level for child in parents.get(one, ())]
        found += level
    return found


def _reap(pid: int) -> int | None:
    """Reap all that has ended; how the program itself did, if it was among them."""
    code = None
    while True:
        try:
            ended, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if ended == 0:
            return code
        if ended == pid:
            code = os.waitstatus_to_exitcode(status)


def _end(pid: int) -> None:
    """Kill the tree until nothing of it is left."""
    deadline = time.monotonic() + 60  # a process may hang in a device driver
    while time.monotonic() < deadline:
        below = descendants(os.getpid())
        # Stopped first: a shell would otherwise go on with its next command when the first one dies.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for one in below:
                with contextlib.suppress(OSError):
                    os.kill(one, number)
        with contextlib.suppress(OSError):
            os.killpg(pid, signal.SIGKILL)
        _reap(pid)
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        time.sleep(_PAUSE_S)


def main() -> None:
    """Serve one program: the order is the first line of a pipe, and the end of the pipe is its end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        # A handler, and not SIG_IGN, which the program would inherit.
        signal.signal(number, lambda *_: None)
    _prctl(_SUBREAPER, 1)
    for end in (_ORDERS, _ANSWERS):
        os.set_inheritable(end, False)  # the program has no business with them
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    text = b""
    while not text.endswith(b"\n"):
        part = os.read(_ORDERS, 65536)
        if not part:
            return
        text += part
    order = json.loads(text)
    try:
        pid = _spawn(order)
        ended = pid < 0
        while True:
            ready, _, _ = select.select([_ORDERS, woken], [], [], 1.0)
            if woken in ready:
                os.read(woken, 4096)
            code = None if ended else _reap(pid)
            if code is not None:
                ended = True
                _say({"kind": "ended", "code": code})
            if _ORDERS in ready and not os.read(_ORDERS, 65536):
                break
        if pid > 0:
            _end(pid)
    finally:
        shutil.rmtree(order["probe_folder"], ignore_errors=True)
        _say({"kind": "gone"})


if __name__ == "__main__":
    _ORDERS, _ANSWERS = int(sys.argv[1]), int(sys.argv[2])
    main()
