"""Compiled functions as they were written, for a while.

dynamo gives up for good on a function that it first meets under a dispatch mode (ours count memory, FLOPs or
a trace): every later call, outside too, would run eagerly, and nobody would be told.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def eagerly() -> Iterator[None]:
    """Inside, compiled functions run as they were written; afterwards they compile as if never called."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and loading it takes a second
        yield
        return
    with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
        warnings.filterwarnings(  # their complaint is about our hooks
            "ignore", message=r"Using `torch\.compile\(module\)` when there are global hooks"
        )
        yield
