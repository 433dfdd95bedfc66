"""`record_oom`: writes a memory snapshot when an OOM ends the program.

Rules:
- Off unless it is called. Nothing is written while the program runs: an OOM that is caught and retried costs
  nothing, one that ends the block (or, without a block, the program) is written once.
- The history holds the moment of the OOM, so that it does not matter what has been freed when it is written.
- What fails here never hides the OOM: it becomes a note on it.
- Beside the snapshot stands what the allocator does not know: step, shapes of the batch, rank, memory.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

import torch

from batchfit._arguments import check_whole
from batchfit._engine.device.gpu import CudaDevice
from batchfit._engine.device.oom import classify
from batchfit._engine.torch_private import allocator
from batchfit._engine.virtual_memory.history import recording
from batchfit._engine.virtual_memory.memory import active, record_in
from batchfit._files import atomic_stream, why_not_writable
from batchfit._units import format_bytes
from batchfit._why.pure.snapshot import NOTES_KEY
from batchfit.errors import BatchfitError, NothingFitsError, ResultFileError, StepInterruptedError

_MOST_LEAVES = 32
_DEEPEST = 4
_TOP = 3  # holders that the note names


@final
class OomRecorder:
    """Records the allocator's history, and writes it where an OOM ends the block or the program.

    Made by `record_oom`. As a context manager it is closed at the end of the block.

    Args:
        path: the file.
        max_entries: entries of the history that are kept.
    """

    def __init__(self, path: Path, max_entries: int) -> None:
        self._path = path
        self._step: int | None = None
        self._batch: dict[str, str] = {}
        self._batch_size: int | None = None
        self._undo = ExitStack()
        self._written: Path | None = None
        self._history = self._undo.enter_context(recording(max_entries))
        memory = active()
        if memory is not None:
            record_in(memory, self._history)
            self._undo.callback(record_in, memory, None)
        if torch.cuda.is_available() and allocator.record_history(max_entries):
            self._undo.callback(allocator.stop_history)
        self._hook: Callable[..., Any] | None = sys.excepthook
        self._own_hook = self._on_uncaught  # one object: a bound method is another each time
        sys.excepthook = self._own_hook

    @property
    def written(self) -> Path | None:
        """The file that was written; None so far."""
        return self._written

    def note(self, *, step: int | None = None, batch: object = None) -> None:
        """Say which step runs, and on what: it is written beside the snapshot. Nothing of it is kept alive.

        Args:
            step: number of the step; default: one more than before.
            batch: its tensors' shapes are noted, whatever holds them.
        """
        self._step = (0 if self._step is None else self._step + 1) if step is None else step
        if batch is not None:
            self._batch, self._batch_size = {}, None
            self._describe("batch", batch, 0)

    def save(self, error: BaseException | None = None) -> Path | None:
        """Write the snapshot now, and note on `error` where it is and who held the most.

        Args:
            error: the error that ended the run.

        Returns:
            The file, or None where it could not be written: the reason is a note on `error`.
        """
        path = self._path_here()
        try:
            with atomic_stream(path) as stream:
                pickle.dump({**self._snapshot(), NOTES_KEY: self._notes(error)}, stream, protocol=4)
        except (OSError, MemoryError, RuntimeError) as failed:
            if error is not None:
                error.add_note(f"batchfit: the memory snapshot could not be written to {path}: {failed}")
            return None
        self._written = path
        if error is not None:
            error.add_note(_note(path))
        return path

    def close(self) -> None:
        """Record no more."""
        self._release_hook()
        self._undo.close()

    def __enter__(self) -> Self:
        self._release_hook()  # the end of the block sees the error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is not None:
                self.failed(error)
        finally:
            self.close()

    def _on_uncaught(self, kind: type[BaseException], error: BaseException, trace: Any) -> None:
        hook = self._hook or sys.__excepthook__
        self.failed(error)
        hook(kind, error, trace)

    def _release_hook(self) -> None:
        """Restore the hook, unless another has been put over ours, which then calls ours in vain."""
        if self._hook is not None and sys.excepthook is self._own_hook:
            sys.excepthook = self._hook
            self._hook = None

    def failed(self, error: BaseException) -> None:
        """Write the snapshot if an error that ends the run is an OOM, and nothing was written yet.

        Args:
            error: the error.
        """
        ours = isinstance(error, NothingFitsError | StepInterruptedError)
        if self._written is None and (ours or classify(error) == "oom"):
            self.save(error)

    def _snapshot(self) -> dict[str, Any]:
        return allocator.memory_snapshot() if _is_on_cuda() else self._history.snapshot()

    def _notes(self, error: BaseException | None) -> dict[str, Any]:
        rank, _ = _rank()
        return {
            "rank": rank,
            "step": self._step,
            "batch": dict(self._batch),
            "batch_size": self._batch_size,
            "limit_bytes": _limit_bytes(),
            "is_virtual": not _is_on_cuda(),
            "torch": str(torch.__version__),
            "message": "" if error is None else str(error)[:2000],
        }

    def _path_here(self) -> Path:
        """The file of this rank."""
        rank, ranks = _rank()
        if "{rank}" in self._path.name:
            return self._path.with_name(self._path.name.replace("{rank}", str(rank)))
        if ranks < 2:
            return self._path
        return self._path.with_name(f"{self._path.stem}_rank{rank}{self._path.suffix}")

    def _describe(self, name: str, value: object, depth: int) -> None:
        """Shapes of the tensors in a batch, by where they are."""
        if len(self._batch) >= _MOST_LEAVES or depth > _DEEPEST:
            return
        if isinstance(value, torch.Tensor):
            shape = tuple(value.shape)
            self._batch[name] = f"{str(value.dtype).removeprefix('torch.')} {shape}"
            if self._batch_size is None and shape:
                self._batch_size = int(shape[0])
        elif isinstance(value, Mapping):
            for key in list(value)[:_MOST_LEAVES]:
                self._describe(str(key), value[key], depth + 1)
        elif isinstance(value, list | tuple):
            for number, one in enumerate(value[:_MOST_LEAVES]):
                self._describe(f"{name}[{number}]", one, depth + 1)
        elif is_dataclass(value) and not isinstance(value, type):
            for one in fields(value):
                self._describe(one.name, getattr(value, one.name, None), depth + 1)


def record_oom(path: str | Path, *, max_entries: int = 100_000) -> OomRecorder:
    """Write a memory snapshot at an OOM that the program does not survive, for `batchfit why`.

    ```python
    with batchfit.record_oom("oom.pickle") as record:
        for step, batch in enumerate(loader):
            record.note(step=step, batch=batch)
            train(batch)
    ```

    Without a `with`, it records until the program ends, and an OOM that comes out of it is written.
    An OOM that is caught inside (a `Microbatcher` retries it) costs nothing. On CUDA it is PyTorch's own
    history, with stacks of Python; if that is on already, it is left as it is. On a CPU the blocks of
    `virtual_memory` are recorded: live tensors, without segments or fragmentation.

    Args:
        path: the file. Of several ranks each writes its own: `oom_rank3.pickle`, or where `{rank}` stands.
        max_entries: entries of the history that are kept, in host memory: the last ones.

    Returns:
        The recorder: `note(step=, batch=)` says what runs, `close()` ends it.

    Raises:
        ValueError: `path` cannot be written, or `max_entries` is no positive number.
    """
    check_whole("max_entries", max_entries)
    file = Path(path)
    why = why_not_writable(file)
    if why:
        raise ValueError(f"path must be a file that can be written, not {str(path)!r}: {why}")
    return OomRecorder(file, max_entries)


def _rank() -> tuple[int | None, int]:
    """This process's rank and how many there are; (None, 1) alone."""
    dist = torch.distributed
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    ranks = os.environ.get("WORLD_SIZE", "1")
    rank = os.environ.get("RANK", "")
    if rank.isdecimal() and ranks.isdecimal() and int(ranks) > 1:
        return int(rank), int(ranks)
    return None, 1


def _limit_bytes() -> int | None:
    """Memory that this process can use; None where it is not known."""
    memory = active()
    if memory is not None:
        return memory.limit_bytes
    return CudaDevice(torch.cuda.current_device()).cap_bytes() if _is_on_cuda() else None


def _is_on_cuda() -> bool:
    """Whether the history is CUDA's, and not that of a virtual memory."""
    return active() is None and torch.cuda.is_available() and allocator.history_is_recorded()


def _note(path: Path) -> str:
    """Where the snapshot is, and who held the most."""
    from batchfit._why.why import explain_oom

    written = f"batchfit: memory snapshot in {path}. Look further with: batchfit why {path}"
    try:
        found = explain_oom(path, what_if=False)
    except (BatchfitError, ResultFileError) as failed:
        return f"{written} ({failed})"
    most = ", ".join(f"{one.name} {format_bytes(one.peak_bytes)}" for one in found.lines[:_TOP])
    causes = ", ".join(one.name for one in found.causes)
    return f"{written}\nbatchfit: {causes}; most of it: {most}" if most else written
