"""Where batches come from: a callable, a map-style dataset (or a loader of one), or one example batch.

Rules: a source asked for n samples gives n, or raises: a trial with the wrong size would lie. A dataset
gives its worst case: the n longest samples, around again where there are fewer; an iterable one those of its
first samples (`_engine/batch/first_samples.py`). An example batch is
copied to size, never handed out, so a step that writes into its batch leaves the example alone.
What can be checked of the arguments is checked when the source is made, before any device work.
Samples that are slow to read are read once (`_engine/batch/sample_cache.py`).
In a trace, too, a dataset's samples are real. Once a trace has seen that a batch of them is made on the host,
without models, the next ones are made beside it: to watch each operation on 50,000 samples takes minutes.
A dataset that a framework puts around its user's may say what that user can do about samples that were not
measured, in `advice_on_longer`.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from batchfit._engine.batch.first_samples import READ_OF_A_STREAM, FirstSamples
from batchfit._engine.batch.list_readings import CandidateReading
from batchfit._engine.batch.sample_cache import Samples
from batchfit._engine.batch.sample_count import BatchReader, BatchReading
from batchfit._engine.batch.structure import (
    Part,
    children,
    element_count,
    has_rows,
    is_samples,
    leaves,
    parts,
    rebuilt,
    sized,
    wrong_size,
)
from batchfit._engine.batch.token_source import SaysExtremes, TokenBatches
from batchfit._engine.torch_private.dispatch import is_fake, modes_disabled, tracing

log = logging.getLogger("batchfit")

BatchSource = Callable[[int], Any]
CollateFn = Callable[[list[Any]], Any]

_ADVICE_ON_LONGER = "pass a callable make_batch(n) to choose them yourself"
SCAN_LIMIT = 4096  # samples looked at to find the longest ones

_KINDS = "a callable make_batch(n), a dataset, a DataLoader or one example batch"


def takes_arguments(function: Callable[..., object], count: int) -> bool:
    """`function` can be called with `count` positional arguments, as far as its signature says."""
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # built in C: it says nothing
        return True
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True


def batch_source(make_batch: Any, *, collate_fn: CollateFn | None = None) -> BatchSource:
    """The source that `make_batch` stands for.

    A list is one of two things. With `collate_fn`, or with no tensor directly in it, it is a list of
    samples, treated as a dataset: samples that are tuples, `(x, y)`, are collated as DataLoader does, of
    others the batch is the list itself. A list of tensors alone is a collated batch, `[inputs, labels]`, as
    `default_collate` makes it: say `collate_fn=list` where each of its tensors is a sample. A source that
    was made before is that source.
    """
    if collate_fn is not None and not callable(collate_fn):
        raise TypeError(f"collate_fn must be a callable or None, not {collate_fn!r}")
    if _is_loader(make_batch):
        if collate_fn is not None:
            raise TypeError(f"collate_fn must be None with a loader, which has its own, not {collate_fn!r}")
        by_tokens = getattr(make_batch, "batch_sampler", None)
        make_batch, collate_fn = _taken_apart(make_batch)
        if isinstance(by_tokens, SaysExtremes):
            return TokenBatches(make_batch, collate_fn, by_tokens)
    if _is_stream(make_batch):
        make_batch = FirstSamples(make_batch, READ_OF_A_STREAM)
    if isinstance(make_batch, Longest | Made | Repeated | TokenBatches) and collate_fn is None:
        return make_batch
    if isinstance(make_batch, list) and (collate_fn is not None or _is_dataset(make_batch)):
        pairs = bool(make_batch) and all(isinstance(one, tuple) for one in make_batch)
        return Longest(make_batch, collate_fn or (default_collate if pairs else list))
    if isinstance(make_batch, Dataset) or (_is_map_style(make_batch) and not callable(make_batch)):
        return Longest(make_batch, collate_fn or default_collate)
    if collate_fn is not None:
        raise TypeError(
            "collate_fn must be None unless make_batch is a dataset or a list of samples, "
            f"and make_batch is {_described(make_batch)}"
        )
    if has_rows(make_batch) or children(make_batch) is not None:
        return Repeated(make_batch)
    if callable(make_batch):
        if not takes_arguments(make_batch, 1):
            raise TypeError(f"make_batch must take one argument, the number of samples, not {make_batch!r}")
        return Made(make_batch)
    raise TypeError(f"make_batch must be {_KINDS}, not {make_batch!r}")


def _is_dataset(given: list[Any]) -> bool:
    """A list of samples, and no batch that `default_collate` made of nested ones (`[[a, b], [y, z]]`)."""
    if not given or not is_samples(given):
        return not given
    reading = _reading_of(given)
    return reading is None or "batch" in reading.samples


def _reading_of(batch: Any) -> BatchReading | None:
    """The batch as it is read to be cut; None where that is not certain."""
    try:
        return BatchReader().read(batch)
    except (ValueError, TypeError):
        return None


def _wrong_size(batch: Any, size: int) -> int | None:
    """The samples that a batch plainly has, where they are not `size` and it cannot be read as `size`."""
    found = wrong_size(batch, size)
    return None if found is None or CandidateReading(batch, size).is_consistent else found


def _is_loader(source: Any) -> bool:
    """torch's DataLoader, or one that is made like it (ours, Accelerate's)."""
    if isinstance(source, DataLoader):
        return True
    if isinstance(source, Dataset) or not isinstance(source, Iterable):
        return False
    return hasattr(source, "dataset") and hasattr(source, "collate_fn")


def _taken_apart(loader: Any) -> tuple[Any, CollateFn]:
    """The dataset and the `collate_fn` of a loader: its own batch size and order say nothing here."""
    if isinstance(loader, DataLoader) and loader.batch_sampler is None:
        raise TypeError(
            f"make_batch must be {_KINDS}, not a DataLoader with batch_size=None, whose dataset gives whole "
            "batches: pass one of them as the example, make_batch=next(iter(loader)), or a callable "
            "make_batch(n)"
        )
    return loader.dataset, loader.collate_fn


def _is_stream(make_batch: Any) -> bool:
    """What can only be read in order."""
    if isinstance(make_batch, IterableDataset):
        return True
    is_iterable = isinstance(make_batch, Iterable) and not hasattr(make_batch, "__getitem__")
    return is_iterable and not callable(make_batch)


def _is_map_style(source: Any) -> bool:
    """Has a length and items, and is none of the things that example batches are made of."""
    if isinstance(source, torch.Tensor | Mapping | list | tuple | str | bytes | bytearray | type):
        return False
    return not has_rows(source) and hasattr(source, "__getitem__") and hasattr(source, "__len__")


def _described(make_batch: Any) -> str:
    if callable(make_batch) and not has_rows(make_batch):
        return "a callable: collate inside it"
    return f"a {type(make_batch).__name__}"


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Made:
    """Batches from the user's `make_batch(n)`."""

    make: BatchSource

    def __call__(self, size: int) -> Any:
        batch = self.make(size)
        if batch is None:
            raise TypeError(f"make_batch must return a batch, and make_batch({size}) returned None")
        found = _wrong_size(batch, size)
        if found is not None:
            raise ValueError(
                f"make_batch({size}) returned a batch of {found}. Return as many samples as it is asked "
                "for; where samples are not rows (packed sequences), write the step as a Workload."
            )
        return batch


@final
class Longest:
    """Batches of the longest samples of a map-style dataset, which is scanned once, at the first batch."""

    def __init__(self, dataset: Any, collate_fn: CollateFn) -> None:
        try:
            self._length = len(dataset)
        except TypeError:
            raise TypeError(
                f"make_batch must be a dataset with a length, not {type(dataset).__name__} without __len__: "
                "give it one, or pass a callable make_batch(n)"
            ) from None
        if self._length == 0:
            raise ValueError(
                f"make_batch must hold at least one sample, not an empty {type(dataset).__name__}"
            )
        self.dataset = dataset
        self.collate = collate_fn
        self._order: tuple[int, ...] | None = None
        self._lengths: tuple[int, ...] = ()
        self._has_plain_rows: bool | None = None
        self._host_only = False  # known once a trace has watched it
        self._read_before = Samples()

    def __len__(self) -> int:
        return self._length

    @property
    def samples(self) -> int | None:
        """How many samples there are; None where only the first ones were read."""
        return None if getattr(self.dataset, "has_more", False) else self._length

    def made_of(self, size: int) -> str:
        """Which samples batches are made of, where it is not the longest of all; empty where it is."""
        if read_of := getattr(self.dataset, "read_of", ""):
            return f"the longest of {read_of}"
        if self._length <= SCAN_LIMIT:
            return ""
        return f"the longest of {SCAN_LIMIT:,} of the dataset's {self._length:,} samples, evenly spaced"

    def lengths(self) -> tuple[int, ...]:
        """Element counts of the samples looked at, longest first: all that their memory depends on."""
        if self._order is None:
            self._order = self._scan()
        return self._lengths

    def __call__(self, size: int) -> Any:
        if self._order is None:
            self._order = self._scan()
        most = max(len(self._order), 2)
        if size > most and self._repeats(most):
            return Repeated(self._read(most))(size)
        return self._read(size)

    def _repeats(self, count: int) -> bool:
        """Whether a batch in which samples come again is one of `count` samples, its rows again and again.

        So it is where a batch is nothing but rows whose shape does not depend on how many there are. To read
        and collate each sample as often as it comes would take minutes for a million of them.
        """
        if self._has_plain_rows is None:
            fewer, rows = (_rows(self._read(one), one) for one in (count - 1, count))
            self._has_plain_rows = rows is not None and rows == fewer
        return self._has_plain_rows

    def _read(self, size: int) -> Any:
        assert self._order is not None
        indices = [self._order[i % len(self._order)] for i in range(size)]
        batch = self._collated(indices)
        found = _wrong_size(batch, size)
        if found is not None:
            raise ValueError(
                f"collate_fn made a batch of {found} out of {size} samples. Where samples are not rows "
                "(packed sequences), write the step as a Workload."
            )
        return batch

    def _collated(self, indices: list[int]) -> Any:
        """The samples as one batch; in a trace the first time under its eyes, then beside it."""
        if not tracing():
            return self._fetched(indices)
        if self._host_only:
            with modes_disabled():
                return self._repeated(indices)
        batch = self._fetched(indices)
        self._host_only = all(map(is_on_host, leaves(batch)))
        return batch

    def _fetched(self, indices: list[int]) -> Any:
        return self.collate(self._samples(indices))

    def _repeated(self, indices: list[int]) -> Any:
        """The same with no sample read twice: a trace looks at shapes, at many times the dataset's length."""
        seen = self._samples(indices[: len(self._lengths)])
        # Copies, for a collate_fn may pop from its samples.
        return self.collate([_shallow(seen[i % len(seen)]) for i in range(len(indices))])

    def _samples(self, indices: list[int]) -> Any:
        return self._read_before.read(indices, self._asked_for)

    def _asked_for(self, indices: list[int]) -> Any:
        # As DataLoader does it: datasets that fetch many samples at once are asked for many at once.
        fetch = getattr(self.dataset, "__getitems__", None)
        return fetch(indices) if callable(fetch) else [self.dataset[index] for index in indices]

    def _scanned(self, index: int) -> Any:
        return self._read_before.read([index], lambda one: [self.dataset[one[0]]])[0]

    def _scan(self) -> tuple[int, ...]:
        """Indices from the longest sample to the shortest; equals keep the dataset's order."""
        count = min(self._length, SCAN_LIMIT)
        indices = [i * self._length // count for i in range(count)]
        # As tensors, samples held here would count as memory in use on a CPU.
        counts = {index: element_count(self._scanned(index)) for index in indices}
        longest = sorted(indices, key=lambda index: -counts[index])
        self._lengths = tuple(counts[index] for index in longest)
        more = count < self._length or getattr(self.dataset, "has_more", False)
        if more and _is_first_rank():
            log.warning(
                "batches are made of %s; a longer one may exist: %s",
                self.made_of(0),
                getattr(self.dataset, "advice_on_longer", _ADVICE_ON_LONGER),
            )
        return tuple(longest)


def _rows(batch: Any, size: int) -> list[object] | None:
    """What a sample has in each tensor of a batch; None where there is more than rows and settings.

    What was made on a device or has gradients took more memory than its rows, in proportion to them.
    """
    found: list[object] = []
    for leaf in leaves(batch):
        if isinstance(leaf, torch.Tensor):
            is_rows = leaf.dim() > 0 and leaf.layout is torch.strided and not leaf.is_nested
            if not is_rows or leaf.shape[0] != size or leaf.requires_grad or not is_on_host(leaf):
                return None
            found.append((leaf.dtype, leaf.shape[1:]))
        elif leaf is None or type(leaf) in (bool, int, float, str):
            found.append(leaf)
        else:
            return None
    return found


def _shallow(sample: Any) -> Any:
    return copy.copy(sample) if isinstance(sample, Mapping | list) else sample


def is_on_host(leaf: Any) -> bool:
    """A real tensor on the CPU, or none. Of an object with a `to` of its own nobody knows."""
    if isinstance(leaf, torch.Tensor):
        return leaf.device.type == "cpu" and not is_fake(leaf)
    return not callable(getattr(leaf, "to", None))


@final
class Repeated:
    """Batches that repeat one example batch, or cut it, along the first dimension."""

    def __init__(self, example: Any) -> None:
        reading = _reading_of(example)
        found = (
            sized(list(parts(example))) if reading is None else [Part("batch", reading.length, None, False)]
        )
        self._samples = None if reading is None else reading.samples
        if not found:
            raise TypeError(
                f"make_batch must be {_KINDS}, and this {type(example).__name__} holds no tensor with a "
                "first dimension"
            )
        lengths = {part.length for part in found}
        if len(lengths) > 1:
            # One part for each length is enough to see the contradiction.
            seen = {part.length: part for part in reversed(found)}
            named = ", ".join(f"{part.path} has {part.length}" for part in found if seen[part.length] is part)
            raise ValueError(f"make_batch must be an example batch whose parts have one length: {named}")
        self.example = example
        self._length = lengths.pop()
        if self._length == 0:
            raise ValueError("make_batch must hold at least one sample, not an example batch of length 0")

    def __call__(self, size: int) -> Any:
        return self._resized(self.example, size, "batch")

    def _resized(self, node: Any, size: int, path: str) -> Any:
        if isinstance(node, torch.Tensor):
            return repeat_rows(node, size) if node.dim() > 0 else node
        if has_rows(node):
            return node[[i % self._length for i in range(size)]]
        if self._samples is None and is_samples(node) and len(node) != self._length:
            return node  # no list of samples ("image_size": [224, 224])
        if is_samples(node) if self._samples is None else path in self._samples:
            return rebuilt(node, [node[i % self._length] for i in range(size)])
        items = children(node)
        if items is None:
            return node
        return rebuilt(node, [self._resized(value, size, path + label) for label, value in items])


def repeat_rows(rows: torch.Tensor, size: int) -> torch.Tensor:
    """A new tensor with `size` rows: those of `rows`, around again; nothing else is allocated."""
    length = rows.shape[0]
    with torch.no_grad():
        if rows.layout is not torch.strided or rows.is_nested:
            out = rows.index_select(0, torch.arange(size, device=rows.device) % length)
        else:
            out = rows.new_empty_strided((size, *rows.shape[1:]), _row_strides(rows))
            whole, rest = divmod(size, length)
            if whole:
                out[: whole * length].view(whole, length, *rows.shape[1:]).copy_(rows)
            if rest:
                out[whole * length :].copy_(rows[:rest])
    return out.requires_grad_(rows.requires_grad)


def _row_strides(rows: torch.Tensor) -> Sequence[int]:
    """Strides of a dense tensor of such rows: channels-last stays so, for it chooses other kernels."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(rows.dim())
    keeps = last is not None and not rows.is_contiguous() and rows.is_contiguous(memory_format=last)
    order = [0, *range(2, rows.dim()), 1] if keeps else list(range(rows.dim()))
    strides = [1] * rows.dim()
    width = 1
    for dim in reversed(order):
        strides[dim] = width
        width *= max(rows.shape[dim], 1)
    return strides


def _is_first_rank() -> bool:
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized() and distributed.get_rank() > 0)
