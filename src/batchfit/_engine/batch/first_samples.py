"""The first samples of an iterable dataset, read once, so that a search can make batches of them.

Rules
- The dataset is iterated again for training, so nothing is lost to it; random numbers are where they were.
  One that goes on where it was goes back by its `load_state_dict`. One that can be read once only is refused,
  before anything is read where that shows.
- Samples are kept as bytes, which no count of tensors sees, and each is handed out as a new object.
- What the stream raises comes out unchanged, with the number of the sample.
"""

from __future__ import annotations

import copy
import logging
import pickle
import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import islice
from typing import Any, final

import torch
from torch.utils.data import Dataset

from batchfit._arguments import check_whole
from batchfit._engine.batch.structure import leaves
from batchfit._engine.torch_private.dispatch import modes_disabled, tracing
from batchfit.errors import ReadOnceError

log = logging.getLogger("batchfit")

READ_OF_A_STREAM = 1024


@final
class FirstSamples(Dataset[Any]):
    """The first samples of an iterable dataset as a map-style one, read once.

        samples = batchfit.FirstSamples(stream, 4096)
        workload = batchfit.training(model, optimizer, loss_fn, samples, collate_fn=collate)

    A search runs the longest of them. `stream` is iterated again for training, from where it is now, so no
    sample is lost. An iterable dataset that is given as it is stands for its first 1,024 samples.

    Args:
        stream: the iterable dataset; also a streaming one of Hugging Face's `datasets`.
        count: how many samples to read, at most.

    Attributes:
        name: class of the stream.
        has_more: the stream did not end with these samples, so that a longer one may come.

    Raises:
        ReadOnceError: the stream goes on where it was when it is iterated again.
        ValueError: it has no sample.
    """

    advice_on_longer = "batchfit.FirstSamples(dataset, count) reads more of them"

    def __init__(self, stream: Iterable[Any], count: int = READ_OF_A_STREAM) -> None:
        if not isinstance(stream, Iterable):
            raise TypeError(f"stream must be an iterable dataset, not {stream!r:.80}")
        check_whole("count", count, at_least=1)
        self.name = type(stream).__name__
        self.has_more = False
        self._kept: list[Any] = []
        self._as_bytes: list[bool] = []
        state = _state_of(stream)
        if state is None:
            _refuse_iterators(stream)
        try:
            with _same_random_numbers():
                self._read(stream, count)
        except BaseException:
            if state is not None:
                stream.load_state_dict(state[0])  # type: ignore[attr-defined]
            raise
        if not self._kept:
            raise ValueError(f"make_batch must give at least one sample, and this {self.name} gave none")
        again = self._begins_again(stream)
        # Only where it must: a position may be less than all of it (Hugging Face's lacks a shuffle's buffer).
        if again is not True and state is not None:
            stream.load_state_dict(state[0])  # type: ignore[attr-defined]
            again = self._begins_again(stream)
            stream.load_state_dict(state[0])  # type: ignore[attr-defined]
        if again is None or (not again and _holds_iterator(stream)):
            raise ReadOnceError(self.name, samples_read=len(self))
        if not again:
            log.warning(
                "%s, iterated again, began with another sample: if it goes on where it was and does not "
                "shuffle, the %d samples that were read are not trained on",
                *(self.name, len(self)),
            )

    @property
    def read_of(self) -> str:
        """What was read, for results and logs."""
        count = f"{len(self):,}"
        which = "the first" if self.has_more else "all"
        return f"{which} {count} samples of {self.name}"

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: int) -> Any:
        kept = self._kept[index]
        if not self._as_bytes[index]:
            return kept
        # Beside a trace, which would take each tensor for one of the step's own.
        with modes_disabled() if tracing() else nullcontext():
            return pickle.loads(kept)

    def _read(self, stream: Iterable[Any], count: int) -> None:
        iterator = iter(stream)
        try:
            for sample in islice(iterator, count):
                whole = _as_bytes(sample)
                self._kept.append(sample if whole is None else whole)
                self._as_bytes.append(whole is not None)
        except Exception as error:
            error.add_note(f"batchfit: raised by sample {len(self)} of {self.name}, read ahead for trials")
            raise
        finally:
            _close(iterator)
        self.has_more = len(self._kept) == count

    def _begins_again(self, stream: Iterable[Any]) -> bool | None:
        """Whether it begins with the same sample when it is iterated again; None where it has no more."""
        nothing = object()
        with _same_random_numbers():
            iterator = iter(stream)
            try:
                first = next(iterator, nothing)
            finally:
                _close(iterator)
        if first is nothing:
            return None
        return not self._as_bytes[0] or _is_same(first, self[0])


def _refuse_iterators(stream: Iterable[Any]) -> None:
    with _same_random_numbers():
        is_iterator = isinstance(stream, Iterator) or iter(stream) is iter(stream)
    if is_iterator:
        raise ReadOnceError(type(stream).__name__)


def _holds_iterator(stream: object) -> bool:
    return any(isinstance(one, Iterator) for one in getattr(stream, "__dict__", {}).values())


def _state_of(stream: Any) -> tuple[Any] | None:
    """The position of a stream that can go back to it."""
    if not all(callable(getattr(stream, name, None)) for name in ("state_dict", "load_state_dict")):
        return None
    return (copy.deepcopy(stream.state_dict()),)


def _as_bytes(sample: Any) -> bytes | None:
    try:
        return pickle.dumps(sample, pickle.HIGHEST_PROTOCOL)
    except Exception:  # noqa: BLE001  whatever a sample says when it is pickled: it is kept as it is
        return None


def _is_same(one: Any, other: Any) -> bool:
    ours, theirs = list(leaves(one)), list(leaves(other))
    return len(ours) == len(theirs) and all(map(_is_same_leaf, ours, theirs))


def _is_same_leaf(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    # What torch pickles has addresses in it; numpy's arrays have not, and do not compare as a whole.
    return type(one) is type(other) and _as_bytes(one) == _as_bytes(other)


def _close(iterator: Iterator[Any]) -> None:
    """Let a generator end here, with its files, and not at the next collection."""
    if callable(close := getattr(iterator, "close", None)):
        close()


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Restore the random states that a stream may shuffle by."""
    numpy: Any = sys.modules.get("numpy")
    before = random.getstate(), None if numpy is None else numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(before[0])
        if numpy is not None:
            numpy.random.set_state(before[1])
