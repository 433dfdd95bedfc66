"""The child's side of a sweep on several processes: it runs the configurations that it is sent.

Rules:
- What runs here is what runs in one process (`_sweep.configuration`); only where differs. Events and records
  go to the parent as they come, and the parent alone logs and writes.
- It ends with its parent, and where the machine is out of memory the kernel ends it first
  (`_engine.trial.child_main`).
- A record with an error is an answer like another one. Only what ends the process is none.
- A job that cannot be loaded here is reported, and is no failure of a configuration.
"""

from __future__ import annotations

import base64
import os
import pickle
from typing import Any, BinaryIO, NoReturn

from batchfit._engine.trial.child_main import be_taken_first, join, leave, stand_by
from batchfit._sweep.pure.events import SweepEvent

MODULE = "batchfit._sweep.child_main"


def packed(value: object) -> str:
    """Anything that can be pickled as text for a pipe."""
    return base64.b64encode(pickle.dumps(value)).decode()


def unpacked(text: str) -> Any:
    """What was packed."""
    return pickle.loads(base64.b64decode(text))


def serve(requests: BinaryIO, answers_fd: int, *, parent_pid: int, spare: bool) -> NoReturn:
    """Run the configurations that the parent asks for, until it asks for an end."""
    asked, say = stand_by(requests, answers_fd, parent_pid)
    be_taken_first()
    say("started", pid=os.getpid())
    job: Any = None
    while True:
        request = asked.get()
        if "end" in request:
            leave()
        if "job" in request:
            join(request)
            try:
                job = unpacked(request["job"])  # imports the user's module
            except Exception as error:  # noqa: BLE001  a module may raise anything when it is imported
                say("unloadable", text=f"{type(error).__name__}: {error}")
                leave()
            continue

        def report(event: SweepEvent) -> None:
            if event.kind != "record":
                say("event", event=packed(event))

        record = job.run(unpacked(request["configuration"]), report)
        say("record", record=packed(record))
