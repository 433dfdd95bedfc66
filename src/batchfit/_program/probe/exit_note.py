"""What ended a process of a real run, noted at its exit: an error's verdict, or OOMs that it had caught.

Rules: called once, at the exit of a Python that has loaded torch; lines are appended. An OOM that was
caught counts where a GPU's allocator has counted it: some programs print the error and exit by themselves.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch

from batchfit._engine.device.oom import classify, describe


def note_exit(path: str) -> None:
    """Append what ended this process, if anything did."""
    error = getattr(sys, "last_value", None)  # set where an error comes out of the program, whoever prints it
    if isinstance(error, BaseException):
        _append(path, {"verdict": classify(error), "text": describe(error)})
    if _ooms():
        _append(path, {"verdict": "oom", "text": "CUDA out of memory, which the program caught"})


def _ooms() -> int:
    """How often the GPUs' allocator of this process was out of memory."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return 0
    counts = [torch.cuda.memory_stats(one).get("num_ooms", 0) for one in range(torch.cuda.device_count())]
    return sum(int(one) for one in counts)


def _append(path: str, entry: dict[str, Any]) -> None:
    number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(number, json.dumps(entry).encode() + b"\n")
    os.close(number)
