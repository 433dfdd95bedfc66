"""What a trainer counts while it steps, restored after a trial, a probe of the loss or an OOM retry.

Rules
- Attributes of the trainer and of its `state` and `control`: numbers, texts, small tensors and arrays, and
  lists, dicts and sets of such, however nested (TRL's `_metrics`, sentence-transformers' components), and
  objects that hold nothing else (an average meter). New ones are removed.
- In place: references to a list stay valid. What has not changed is not touched.
- Never models, datasets or anything large: only what a step can count is copied, once per batch.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, final

import torch

Undo = Callable[[], None]

_NUMBERS = (int, float, complex, bool, str, bytes, type(None))
_DICTS = (dict, defaultdict, OrderedDict, Counter)
_OTHERS = (list, deque, set)
_NEVER = frozenset(
    {
        "_batchfit",
        "accelerator",
        "args",
        "callback_handler",
        "data_collator",
        "eval_dataset",
        "log_history",
        "lr_scheduler",
        "model",
        "model_wrapped",
        "optimizer",
        "processing_class",
        "train_dataset",
    }
)
_LIBRARIES = frozenset(
    {
        "accelerate",
        "datasets",
        "pandas",
        "peft",
        "pyarrow",
        "tokenizers",
        "torch",
        "transformers",
        "wandb",
    }
)
_MOST_ENTRIES = 10_000  # of one attribute: beyond that it is data, and no count
_MOST_ELEMENTS = 4_096


def save_counts(trainer: Any) -> Undo:
    """Save what a trainer counts; the function returned restores it, as often as it is called."""
    undos: list[Undo] = []
    for holder in (trainer, getattr(trainer, "state", None), getattr(trainer, "control", None)):
        if holder is not None:
            _save_attributes(vars(holder), undos)

    def restore() -> None:
        for undo in undos:
            undo()

    return restore


def _save_attributes(table: dict[str, Any], undos: list[Undo]) -> None:
    """Save all attributes of one object that are counts."""
    before: dict[str, Any] = {}
    for name, value in table.items():
        if name in _NEVER:
            continue
        saved = _SavedCounts()
        if saved.take(value):
            before[name] = value
            undos += saved.undos
    others = set(table) - set(before)

    def restore() -> None:
        for name, value in list(table.items()):
            is_new = name not in before and name not in others and name not in _NEVER
            if is_new and _SavedCounts().take(value):
                del table[name]
        for name, value in before.items():
            if name not in table or table[name] is not value:
                table[name] = value

    undos.append(restore)


@final
class _SavedCounts:
    """How to restore one value, where it is a count."""

    def __init__(self) -> None:
        self.undos: list[Undo] = []
        self._seen: set[int] = set()

    def take(self, value: Any) -> bool:
        """Save a value; False where it is, or holds, something else."""
        if type(value) in _NUMBERS:
            return True
        if id(value) in self._seen:
            return True
        self._seen.add(id(value))
        if len(self._seen) > _MOST_ENTRIES or (hasattr(value, "__len__") and _length(value) > _MOST_ENTRIES):
            return False
        if isinstance(value, torch.Tensor):
            return self._take_tensor(value)
        if type(value) in _DICTS:
            return self._take_dict(value)
        if type(value) in _OTHERS:
            return self._take_items(value)
        if type(value) is tuple:
            taken = [self.take(one) for one in value]
            return all(taken)
        if type(value).__module__ == "numpy" and hasattr(value, "flat"):
            return self._take_array(value)
        return self._take_object(value)

    def _take_tensor(self, value: torch.Tensor) -> bool:
        if value.requires_grad or value.numel() > _MOST_ELEMENTS or value.layout is not torch.strided:
            return False
        copy, version = value.detach().clone(), _version(value)

        def restore() -> None:
            if version is None or _version(value) != version:
                with torch.no_grad():
                    value.copy_(copy)

        self.undos.append(restore)
        return True

    def _take_array(self, value: Any) -> bool:
        if value.size > _MOST_ELEMENTS or value.dtype.hasobject or not value.flags.writeable:
            return bool(value.ndim == 0)
        copy = value.copy()

        def restore() -> None:
            value[...] = copy

        self.undos.append(restore)
        return True

    def _take_dict(self, value: Any) -> bool:
        copy = dict(value)

        def restore() -> None:
            if list(value) != list(copy) or any(value[key] is not copy[key] for key in copy):
                value.clear()
                value.update(copy)

        self.undos.append(restore)
        # All entries, even where one is no count: the numbers beside a model are counts.
        taken = [self.take(one) for one in copy.values()]
        return any(taken) or not copy

    def _take_items(self, value: Any) -> bool:
        copy = list(value)

        def restore() -> None:
            if len(value) != len(copy) or any(a is not b for a, b in zip(value, copy, strict=True)):
                value.clear()
                (value.update if isinstance(value, set) else value.extend)(copy)

        self.undos.append(restore)
        taken = [self.take(one) for one in copy]
        return any(taken) or not copy

    def _take_object(self, value: Any) -> bool:
        """Save an object whose attributes all are counts."""
        table = getattr(value, "__dict__", None)
        if isinstance(value, (type, torch.nn.Module)) or callable(value) or type(table) is not dict:
            return False
        if type(value).__module__.partition(".")[0] in _LIBRARIES:
            return False
        if not table or not all(self.take(one) for one in table.values()):
            return False
        before = dict(table)

        def restore() -> None:
            if table.keys() != before.keys() or any(table[name] is not before[name] for name in before):
                table.clear()
                table.update(before)

        self.undos.append(restore)
        return True


def _length(value: Any) -> int:
    try:
        return len(value)
    except Exception:  # noqa: BLE001 - a 0-dim tensor, a loader without a length: no container of counts
        return 0


def _version(value: torch.Tensor) -> int | None:
    return None if value.is_inference() else value._version
