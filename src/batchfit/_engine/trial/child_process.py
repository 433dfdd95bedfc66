"""One child process: a fresh interpreter, its process group, and two pipes with lines of JSON.

Rules:
- The pipe of the requests stays open until the process has ended: the child ends with it.
- The child ends with this process, and so does all that it has started: a shell beside it waits for our end
  and kills the group. The child cannot do that itself, since the kernel ends it at the same moment.
- A process is not reaped before its whole group has been killed: until then its number is nobody else's.
- Neither a process that the child has left behind nor a pipe that it has closed can hold the reader up.
- What the child prints goes where this process' output goes; with `on_output` it is handed over instead, all
  of it until the end, so that whoever draws on the terminal can make way for it.
- After `end` there is no process, no zombie and no open file.
- What a child serves (a trial, the configurations of a sweep) is a module's business, which the boot names.

multiprocessing is not used: its spawn runs the user's main module in every child, and leaves a tracker
process behind.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import IO, Any, final

from batchfit._engine.device.interrupts import Interrupts
from batchfit.errors import BatchfitError

Message = dict[str, Any]
OnOutput = Callable[[str, bool], object]  # what a child has printed, and whether to stderr

# Ctrl-C is ours to answer: from its first line on the child does not hear it, and it is ended by us.
_BOOT = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT]); "
    "import json, sys; requests = open({requests}, 'rb', buffering=0); "
    "first = json.loads(requests.readline()); sys.path[:] = first['path']; "
    "from {module} import serve; serve(requests, {answers}, **first['more'])"
)
# Reads until the pipe's other end, which only we hold, is closed; $0 is the group.
_GUARD = 'while read -r line; do :; done; kill -s KILL -- "-$0"'
_REAP_S = 60.0  # a driver may take long to tear a context down
_PAUSE_S = 0.1  # between two checks of a process whose pipe is empty
_PIPE_BYTES = 2**16  # read at once: as much as a pipe holds


class ChildSilent(Exception):
    """The child has sent nothing for too long."""


def _decoder() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")("replace")


@dataclass(slots=True)
class _Output:
    """One of the streams that a child prints to."""

    file: IO[bytes]
    is_error: bool
    decoder: codecs.IncrementalDecoder = field(default_factory=_decoder)
    in_a_line: bool = False

    def text(self, part: bytes) -> str:
        """What has been printed; at the end of the stream (nothing more) its last line is ended."""
        text = self.decoder.decode(part, final=not part)
        if not part and (text or self.in_a_line):
            text += "\n"
        self.in_a_line = not text.endswith("\n") if text else self.in_a_line
        return text


@final
class Child:
    """One process, its group and its two pipes."""

    def __init__(
        self,
        *,
        spare: bool = False,
        on_output: OnOutput | None = None,
        module: str = "batchfit._engine.trial.child_main",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`module` has the `serve` that runs there; `environment` is set besides this process' own."""
        self._on_output = on_output
        self._outputs: dict[int, _Output] = {}
        self._buffer = b""
        self._closed = False
        self._guard: subprocess.Popen[bytes] | None = None
        self._requests = self._answers = -1
        try:
            with Interrupts():  # in the middle of a start nothing would end the child
                self._start(module, environment or {}, spare)
        except BaseException:
            if hasattr(self, "_process"):
                self.end()
            raise

    def _start(self, module: str, environment: Mapping[str, str], spare: bool) -> None:
        requests, self._requests = os.pipe()
        self._answers, answers = os.pipe()
        # The child inherits what is blocked, until its first line ignores it.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            # A session of its own: Ctrl-C goes to us, and one signal reaches all that the child starts.
            self._process: subprocess.Popen[bytes] = subprocess.Popen(
                [sys.executable, "-c", _BOOT.format(requests=requests, answers=answers, module=module)],
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=None if self._on_output is None else subprocess.PIPE,
                stderr=None if self._on_output is None else subprocess.PIPE,
                bufsize=0,
                pass_fds=(requests, answers),
                start_new_session=True,
            )
        except BaseException:
            os.close(self._requests)
            os.close(self._answers)
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            os.close(requests)
            os.close(answers)
        self._guard = _guard_of(self._process.pid)
        for file, is_error in ((self._process.stdout, False), (self._process.stderr, True)):
            if file is not None:
                self._outputs[file.fileno()] = _Output(file, is_error)
        self.send(path=[str(entry) for entry in sys.path], more={"parent_pid": os.getpid(), "spare": spare})

    def send(self, **request: object) -> None:
        """Send a request; `receive` notices a child that has ended."""
        whole = json.dumps(request).encode() + b"\n"
        with contextlib.suppress(BrokenPipeError):
            while whole:
                whole = whole[os.write(self._requests, whole) :]

    def receive(self, timeout_s: float | None, *, check: Callable[[], None] | None = None) -> Message | None:
        """The child's next message; None where it has ended instead, `ChildSilent` where neither happens.

        `check` is called ten times per second while there is none: what it raises ends the wait.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            ended = self.has_ended()  # read first: what the child wrote before its end is in the pipe by then
            pause_s = _PAUSE_S
            if deadline is not None:
                pause_s = min(pause_s, max(0.0, deadline - time.monotonic()))
            if self._read(0.0 if ended else pause_s):
                continue
            if ended:
                return None
            if check is not None:
                check()
            if deadline is not None and time.monotonic() >= deadline:
                raise ChildSilent
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: Message = json.loads(line)
        return message

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The file descriptors to read from, for a caller that waits for several children."""
        return (*self._outputs, *(() if self._closed or self._answers < 0 else (self._answers,)))

    def _read(self, pause_s: float) -> bool:
        """Whether an answer was read. A pipe that the user's code has closed stays empty."""
        poll = select.poll()
        for fd in self.descriptors:
            poll.register(fd, select.POLLIN)
        answered = False
        for fd, _ in poll.poll(pause_s * 1000):
            part = os.read(fd, _PIPE_BYTES)
            if fd == self._answers:
                self._buffer += part
                self._closed = not part
                answered = bool(part)
            else:
                self._hand_over(fd, part)
        return answered

    def _hand_over(self, fd: int, part: bytes) -> None:
        """What the child has printed; a stream that has ended is closed."""
        output = self._outputs[fd]
        if not part:
            self._outputs.pop(fd).file.close()
        text = output.text(part)
        if text and self._on_output is not None:
            self._on_output(text, output.is_error)

    def _hand_over_the_rest(self) -> None:
        for fd in list(self._outputs):
            try:
                # What a process that the child left behind goes on printing is not awaited.
                if select.select([fd], [], [], 0)[0] and (part := os.read(fd, _PIPE_BYTES)):
                    self._hand_over(fd, part)
            finally:
                if fd in self._outputs:
                    self._hand_over(fd, b"")

    def has_ended(self) -> bool:
        """Whether the process is over. It is not reaped: its group keeps its number until `end`."""
        if not hasattr(os, "waitid") or self._process.returncode is not None:
            return self._process.poll() is not None
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        try:
            return os.waitid(os.P_PID, self._process.pid, flags) is not None
        except ChildProcessError:
            return True  # the program ignores SIGCHLD: the system has reaped it, and how it ended is lost

    def exit_code(self) -> int:
        """How it ended: a code, or the negative number of a signal. Ends what it has left."""
        self.end()
        assert self._process.returncode is not None
        return self._process.returncode

    def end(self, *, after_s: float = 0.0) -> None:
        """Kill the whole group, wait for the process' end and close the pipes; more than once is fine."""
        if self._requests < 0:
            return
        deadline = time.monotonic() + after_s
        while time.monotonic() < deadline and not self.has_ended():
            self._read(0.005)
        if self._guard is not None:
            _end_guard(self._guard)  # before the group's number can be another's
            self._guard = None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        try:
            self._process.wait(_REAP_S)
            self._hand_over_the_rest()
        except subprocess.TimeoutExpired:
            raise BatchfitError(
                f"the child process {self._process.pid} was killed and has not ended within {_REAP_S:g} s. "
                "It is most likely stuck in a device driver."
            ) from None
        finally:
            os.close(self._requests)
            os.close(self._answers)
            self._requests = self._answers = -1
            for output in self._outputs.values():
                output.file.close()
            self._outputs = {}


def _guard_of(group: int) -> subprocess.Popen[bytes] | None:
    """What kills the group once this process has ended, in whatever way; None where there is no shell."""
    with contextlib.suppress(OSError):
        return subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, str(group)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )
    return None


def _end_guard(guard: subprocess.Popen[bytes]) -> None:
    """End the guard before it kills the group: it is killed before its pipe is closed."""
    guard.kill()
    guard.wait()
    assert guard.stdin is not None
    guard.stdin.close()


def wait_for_any(children: Iterable[Child]) -> None:
    """Wait until one of them has sent something, or a moment has passed; `receive(0)` shows which."""
    poll = select.poll()
    for child in children:
        for fd in child.descriptors:
            poll.register(fd, select.POLLIN)
    poll.poll(_PAUSE_S * 1000)
