"""What has to be undone, each part by itself.

Rules: undone in reverse order, all of it, whatever raises; then one error that names what could not be.
"""

from __future__ import annotations

from typing import Any, final

from batchfit._engine.snapshot.rng import Undo
from batchfit.errors import SnapshotError


@final
class UndoStack:
    """Functions that undo something, each with the name of what it undoes."""

    def __init__(self) -> None:
        self._undos: list[tuple[str, Undo]] = []

    def push(self, name: str, undo: Undo) -> None:
        """`undo` is called by `run`, before all that were pushed earlier."""
        self._undos.append((name, undo))

    def run(self) -> None:
        """Undo everything; a `SnapshotError` at the end names what raised."""
        failed: list[tuple[str, Exception]] = []
        while self._undos:
            name, undo = self._undos.pop()
            try:
                undo()
            except Exception as error:  # noqa: BLE001  all others must have their turn; raised below
                failed.append((name, error))
        if failed:
            first = failed[0][1]
            raise not_restored([(name, f"{type(one).__name__}: {one}") for name, one in failed]) from first


def not_restored(failed: list[tuple[str, Any]]) -> SnapshotError:
    """The one error for all parts that could not be restored, each with its reason."""
    named = [f"{path} ({why})" for path, why in failed]
    more = f" and {len(named) - 5} more" if len(named) > 5 else ""
    count = "1 part" if len(named) == 1 else f"{len(named)} parts"
    return SnapshotError(
        f"{count} of the state could not be restored: {'; '.join(named[:5])}{more}. "
        "Do not train on: load a checkpoint, or start again."
    )
