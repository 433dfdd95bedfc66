"""Batches for the search before training, of trainers whose rows are not their samples."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

from batchfit.integrations.trl.kto import all_desirable
from batchfit.integrations.trl.packed import LongestSequences
from batchfit.integrations.trl.pairs import paired, unpaired
from batchfit.integrations.trl.trainers import flattens, name_of, trains_on_pairs
from batchfit.workload import batches


@final
@dataclass(frozen=True, slots=True)
class SearchBatches:
    """Batches of any size for trials, one row per sample, and the most samples that are needed."""

    source: Callable[[int], Any]
    restored: Callable[[Any], Any]  # as the trainer's own step takes them
    largest: int
    is_packed: bool = False


def search_batches(trainer: Any, samples: Any, collate: Any, largest: int) -> SearchBatches:
    """Batches of the longest samples, for a search up to `largest` samples of one rank."""
    if flattens(trainer):
        longest = LongestSequences(trainer, samples, collate)
        units = math.ceil(largest * longest.per_sample)
        return SearchBatches(longest.make, longest.restored, units, is_packed=True)
    if trains_on_pairs(trainer):
        source = batches(samples, collate_fn=lambda rows: paired(dict(collate(rows))))
        return SearchBatches(source, unpaired, largest)
    if name_of(trainer) == "KTOTrainer":
        source = batches(samples, collate_fn=lambda rows: all_desirable(dict(collate(rows))))
        return SearchBatches(source, lambda batch: batch, largest)
    return SearchBatches(batches(samples, collate_fn=collate), lambda batch: batch, largest)
