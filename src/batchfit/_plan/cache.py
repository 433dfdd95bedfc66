"""Cells that were traced before, on disk: a plan that is asked for again takes no time.

Rules: a file per model and length, under batchfit's cache folder; a key has all that a cell depends on
(setting, GPU, margin, versions). What is wrong with the file is a warning in the
log, never an error.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, final

from batchfit._engine.store.sqlite import cache_folder
from batchfit._files import write_atomically
from batchfit._plan.pure.speed import Cell, StepCost

log = logging.getLogger("batchfit")
_FOLDER: Final = "plans"


@final
class CellCache:
    """The cells of one model; none are kept where `used` is False."""

    def __init__(self, about: Any, *, used: bool) -> None:
        self._path = _path_of(about) if used else None
        self._cells: dict[str, Any] = {}
        if self._path is not None and self._path.exists():
            try:
                found = json.loads(self._path.read_text(encoding="utf-8"))
                self._cells = found if isinstance(found, dict) else {}
            except (OSError, ValueError) as error:
                log.warning("%s cannot be read, so the plan is traced: %s", self._path, error)

    def get(self, key: Any) -> Cell | None:
        """The cell of that key; None where it was never traced."""
        found: Any = self._cells.get(_digest(key))
        try:
            size, peak, cost = found
            return Cell(int(size), int(peak), None if cost is None else StepCost(*map(float, cost)))
        except (TypeError, ValueError):
            return None

    def notes_of(self, key: Any) -> tuple[str, ...]:
        """What the traces of that cell could not see."""
        found = self._cells.get(_digest(["notes", key]))
        return tuple(map(str, found)) if isinstance(found, list) else ()

    def put(self, key: Any, cell: Cell, notes: Sequence[str] = ()) -> None:
        """Keep a cell and what its traces could not see, in memory; `save` writes them."""
        cost = cell.cost
        parts = (
            None
            if cost is None
            else [
                cost.flops_per_sample,
                cost.bytes_per_sample,
                cost.bytes_per_microbatch,
                cost.bytes_per_step,
            ]
        )
        if notes:
            self._cells[_digest(["notes", key])] = list(notes)
        self._cells[_digest(key)] = [cell.batch_size, cell.peak_bytes, parts]

    def save(self) -> None:
        """Write what is kept."""
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, json.dumps(self._cells, sort_keys=True))
        except OSError as error:
            log.warning("%s cannot be written, so the plan is not kept: %s", self._path, error)


def _path_of(about: Any) -> Path:
    return cache_folder() / _FOLDER / f"{_digest(about)}.json"


def _digest(parts: Any) -> str:
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
