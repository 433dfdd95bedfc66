"""Batches in one row, sequence after sequence (`packing`, `padding_free`): cut at the borders of sequences.

Rules
- A sample is a unit: whole sequences that together are no longer than the longest sequence that was seen. So
  units are about as long as each other, and a microbatch of one unit is as small as any could be.
- A microbatch is a row as the collator would make it of these sequences: their tokens and labels, positions,
  and where each one begins.
- The search runs on copies of the longest sequence that it finds in the dataset.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, final

import torch

from batchfit.errors import BatchfitError
from batchfit.integrations.trl.trainers import flattens

_IGNORED = -100
# What is made again for the sequences of a microbatch, beside position_ids.
_BORDERS = ("cu_seq_lens_q", "cu_seq_lens_k")
_LONGEST = ("max_length_q", "max_length_k")
_MOST_SCANNED = 1024
# What a microbatch counts in a mean: a column of the batch as it is cut.
LABEL_COUNT = "label_count"


def is_packed(trainer: Any, inputs: Mapping[str, Any]) -> bool:
    """Whether this batch is one row of many sequences."""
    ids = inputs.get("input_ids")
    return flattens(trainer) and isinstance(ids, torch.Tensor) and ids.dim() == 2 and len(ids) == 1


def borders_of(inputs: Mapping[str, Any]) -> list[int]:
    """Where each sequence of the row begins, and where the last one ends."""
    tokens = int(inputs["input_ids"].shape[1])
    if isinstance(inputs.get("cu_seq_lens_q"), torch.Tensor):
        found = [int(one) for one in inputs["cu_seq_lens_q"].tolist()]
    elif isinstance(inputs.get("position_ids"), torch.Tensor) and inputs["position_ids"].dim() == 2:
        found = [*inputs["position_ids"][0].eq(0).nonzero().flatten().tolist(), tokens]
    else:
        raise BatchfitError(
            "a batch in one row must say where its sequences begin, by position_ids or cu_seq_lens_q, or it "
            "cannot be cut. Let the collator return them (return_position_ids=True), or train without adapt"
        )
    if found[0] != 0 or found[-1] != tokens:
        raise BatchfitError(
            f"the sequences of a batch in one row must cover its {tokens} tokens, not {found[0]} to "
            f"{found[-1]}"
        )
    return found


def units_of(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Sequences by number, joined to units of at most `capacity` tokens: the longest first, best fit."""
    units: list[list[int]] = []
    space: list[tuple[int, int]] = []  # tokens left, and the unit; in order
    for number in sorted(range(len(lengths)), key=lambda one: -lengths[one]):
        at = bisect.bisect_left(space, (lengths[number], -1))
        if at == len(space):
            units.append([number])
            left, unit = capacity - lengths[number], len(units) - 1
        else:
            left, unit = space.pop(at)
            units[unit].append(number)
            left -= lengths[number]
        if left > 0:
            bisect.insort(space, (left, unit))
    return units


def joined_sequences(
    inputs: Mapping[str, Any], borders: Sequence[int], numbers: Sequence[int]
) -> dict[str, Any]:
    """The row of these sequences, with all that its collator says of them."""
    spans = [(borders[one], borders[one + 1]) for one in sorted(numbers)]
    lengths = [end - begin for begin, end in spans]
    tokens = borders[-1]
    found: dict[str, Any] = {}
    for name, value in inputs.items():
        if name in _BORDERS:
            ends = torch.tensor([0, *lengths], dtype=value.dtype).cumsum(0, dtype=value.dtype)
            found[name] = ends.to(value.device)
        elif name in _LONGEST:
            found[name] = (
                type(value)(max(lengths)) if isinstance(value, int) else value.new_tensor(max(lengths))
            )
        elif name == "seq_idx":
            counts = torch.arange(len(lengths), dtype=value.dtype)
            found[name] = counts.repeat_interleave(torch.tensor(lengths))[None].to(value.device)
        elif isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[:2] == (1, tokens):
            found[name] = torch.cat([value[:, begin:end] for begin, end in _merged(spans)], 1)
        elif isinstance(value, torch.Tensor) and value.dim() > 0:
            raise BatchfitError(
                f"{name} of a batch in one row must have a value per token, not {tuple(value.shape)} for "
                f"{tokens} tokens, or the batch cannot be cut. Take it out, or train without adapt"
            )
        else:
            found[name] = value
    return found


def _merged(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Neighbours as one span."""
    found = [spans[0]]
    for begin, end in spans[1:]:
        if begin == found[-1][1]:
            found[-1] = found[-1][0], end
        else:
            found.append((begin, end))
    return found


@final
class PackedBatch:
    """One batch in one row, as units of whole sequences."""

    def __init__(self, trainer: Any, inputs: Mapping[str, Any]) -> None:
        self._inputs = inputs
        self._borders = borders_of(inputs)
        lengths = [end - begin for begin, end in pairwise(self._borders)]
        run = trainer._batchfit
        run.longest_sequence = max(run.longest_sequence, *lengths)
        self._units = units_of(lengths, run.longest_sequence)
        self.cut = {
            "unit": torch.arange(len(self._units)),
            LABEL_COUNT: torch.tensor(self._label_counts()),
            "sequences": list(self._units),
        }

    def _label_counts(self) -> list[int]:
        """The labels of each unit that count; the first of a sequence is none of them."""
        labels = self._inputs.get("labels")
        if not isinstance(labels, torch.Tensor):
            return [sum(self._borders[one + 1] - self._borders[one] for one in unit) for unit in self._units]
        counted = labels[0].ne(_IGNORED).cpu()
        counted[self._borders[:-1]] = False
        until = [0, *counted.cumsum(0).tolist()]
        return [
            sum(until[self._borders[one + 1]] - until[self._borders[one]] for one in unit)
            for unit in self._units
        ]

    def is_whole(self, micro: Any) -> bool:
        return bool(micro["sequences"] == self._units)  # not any as many: some may come twice in a check

    def restored(self, micro: Any) -> dict[str, Any]:
        if self.is_whole(micro):
            return dict(self._inputs)
        numbers = [one for unit in micro["sequences"] for one in unit]
        return joined_sequences(self._inputs, self._borders, numbers)

    def few(self, samples: int) -> dict[str, Any]:
        numbers = [one for unit in self._units[:samples] for one in unit]
        return joined_sequences(self._inputs, self._borders, numbers)


@final
class LongestSequences:
    """For the search: rows of `n` copies of the longest sequence, as the trainer's collator makes them."""

    def __init__(self, trainer: Any, dataset: Any, collate: Any) -> None:
        count = min(len(dataset), _MOST_SCANNED)
        self._sample: dict[str, Any] = {}
        self._length = longest_sample = 0
        for number in range(count):
            batch = collate([dataset[number * len(dataset) // count]])
            if not is_packed(trainer, batch):
                raise BatchfitError(
                    f"the collator must join samples in one row, not make a batch of {type(batch).__name__}"
                )
            borders = borders_of(batch)
            longest_sample = max(longest_sample, borders[-1])
            lengths = [end - begin for begin, end in pairwise(borders)]
            if max(lengths) > self._length:
                self._length = max(lengths)
                self._sample = joined_sequences(batch, borders, [lengths.index(self._length)])
        run = trainer._batchfit
        run.longest_sequence = max(run.longest_sequence, self._length)
        self.per_sample = longest_sample / self._length  # units

    def make(self, size: int) -> dict[str, Any]:
        """`size` copies, one per row."""
        return {
            name: value.expand(size, *value.shape[1:]).clone()
            for name, value in self._sample.items()
            if self._is_rows(value)
        }

    def restored(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Those copies in one row, with all that the collator says of them."""
        rows = len(batch["input_ids"])
        device = batch["input_ids"].device
        found: dict[str, Any] = {}
        for name, value in self._sample.items():
            if name in _BORDERS:
                ends = torch.arange(rows + 1, dtype=value.dtype, device=device)
                found[name] = ends * self._length
            elif name == "seq_idx":
                numbers = torch.arange(rows, dtype=value.dtype, device=device)
                found[name] = numbers.repeat_interleave(self._length)[None]
            elif self._is_rows(value):
                found[name] = batch[name].reshape(1, -1, *value.shape[2:])
            else:
                found[name] = value
        return found

    def _is_rows(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[:2] == (1, self._length)
