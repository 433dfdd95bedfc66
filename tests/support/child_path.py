"""The PYTHONPATH of processes that a test starts: `start/` lets them begin sooner."""

from __future__ import annotations

import os
from pathlib import Path

import batchfit

CHILD_PATH = os.pathsep.join(
    [str(Path(__file__).with_name("start")), str(Path(batchfit.__file__).parents[1])]
)
