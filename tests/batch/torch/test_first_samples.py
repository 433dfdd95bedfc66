"""Iterable datasets in a search: the longest of the first samples, and nothing of the stream is lost."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import batchfit
from batchfit import FirstSamples
from batchfit.errors import BatchfitError, ReadOnceError
from batchfit.workload import batches


class Stream(IterableDataset[torch.Tensor]):
    """Rows of zeros of the lengths that are given, again and again where it is infinite."""

    def __init__(self, lengths: list[int], *, is_infinite: bool = False) -> None:
        self.lengths = lengths
        self.is_infinite = is_infinite
        self.opened = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.opened += 1
        lengths = itertools.cycle(self.lengths) if self.is_infinite else iter(self.lengths)
        return (torch.zeros(length) for length in lengths)


class Shuffled(Stream):
    """In an order that is drawn from all the generators of the process."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        drawn = random.random() + float(torch.rand(())) + float(np.random.rand())
        lengths = [*self.lengths]
        random.Random(drawn).shuffle(lengths)
        return (torch.zeros(length) for length in lengths)


def padded(samples: list[torch.Tensor]) -> torch.Tensor:
    return nn.utils.rnn.pad_sequence(samples, batch_first=True)


@examples(100)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(1, 50), st.booleans())
def test_they_are_the_first_ones_and_the_stream_begins_again(
    lengths: list[int], count: int, is_infinite: bool
) -> None:
    stream = Stream(lengths, is_infinite=is_infinite)
    samples = FirstSamples(stream, count)
    read = list(itertools.islice(itertools.cycle(lengths) if is_infinite else lengths, count))
    assert [len(samples[index]) for index in range(len(samples))] == read
    assert samples.has_more is (len(read) == count)
    assert [len(sample) for sample in itertools.islice(stream, len(read))] == read
    make = batches(stream, collate_fn=padded)
    assert make(2).shape == (2, max(map(len, itertools.islice(stream, 1024))))


def test_a_sample_is_a_new_object_each_time() -> None:
    samples = FirstSamples(Stream([3, 4]))
    samples[0].fill_(9)
    assert samples[0].tolist() == [0, 0, 0]
    unpicklable = FirstSamples([(index, lambda: None) for index in range(3)])
    assert [unpicklable[index][0] for index in range(3)] == [0, 1, 2]


def test_random_numbers_are_where_they_were(caplog: pytest.LogCaptureFixture) -> None:
    stream = Shuffled(list(range(1, 30)))
    random.seed(3)
    torch.manual_seed(3)
    np.random.seed(3)
    FirstSamples(stream, 10)
    after = random.random(), float(torch.rand(())), float(np.random.rand())
    random.seed(3)
    torch.manual_seed(3)
    np.random.seed(3)
    assert after == (random.random(), float(torch.rand(())), float(np.random.rand()))
    assert not caplog.records  # with the same numbers it begins with the same sample


class Once(IterableDataset[int]):
    """Goes on where it was, in one of several ways."""

    def __init__(self, how: str, last: int = 10) -> None:
        self.how = how
        self.numbers = iter(range(last))
        self.hidden = [self.numbers]
        if how == "hidden":
            del self.numbers

    def __iter__(self) -> Iterator[int]:
        return self.hidden[0] if self.how == "itself" else self._generate()

    def _generate(self) -> Iterator[int]:
        yield from self.hidden[0]


@pytest.mark.parametrize(
    ("stream", "count", "lost", "left"),
    [
        (iter(range(10)), 4, 0, 10),
        (Once("itself"), 4, 0, 10),
        (Once("generator"), 4, 4, None),  # it held an iterator
        (Once("hidden"), 99, 10, None),  # nothing was left
    ],
)
def test_what_can_be_read_once_is_refused(stream: Any, count: int, lost: int, left: int | None) -> None:
    with pytest.raises(ReadOnceError, match="goes on where it was") as caught:
        FirstSamples(stream, count)
    assert caught.value.samples_read == lost
    assert isinstance(caught.value, BatchfitError)
    assert isinstance(caught.value, TypeError)
    if left is not None:
        assert len(list(stream)) == left


def test_where_it_cannot_be_known_there_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    FirstSamples(Once("hidden"), 4)
    assert [record.getMessage() for record in caplog.records] == [
        "Once, iterated again, began with another sample: if it goes on where it was and does not shuffle, "
        "the 4 samples that were read are not trained on"
    ]
    caplog.clear()
    FirstSamples(Stream([3, 4]))
    assert not caplog.records


class Placed(IterableDataset[int]):
    """Goes on where it was, and can go back."""

    def __init__(self) -> None:
        self.place = 0
        self.loaded = 0

    def __iter__(self) -> Iterator[int]:
        while self.place < 20:
            self.place += 1
            yield self.place

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]
        self.loaded += 1


def test_a_stream_with_a_position_goes_back_to_it(caplog: pytest.LogCaptureFixture) -> None:
    stream = Placed()
    next(iter(stream))
    samples = FirstSamples(stream, 5)
    assert [samples[index] for index in range(5)] == [2, 3, 4, 5, 6]
    assert list(stream) == list(range(2, 21))
    assert not caplog.records


def test_a_position_is_loaded_only_where_it_must_be() -> None:
    """Hugging Face's `datasets` lose a shuffle's buffer by it."""

    class Restarts(Placed):
        def __iter__(self) -> Iterator[int]:
            return iter(range(20))

    stream = Restarts()
    FirstSamples(stream, 5)
    assert stream.loaded == 0


def test_streams_of_hugging_face_go_on_as_if_nothing_was_read() -> None:
    datasets = pytest.importorskip("datasets")

    def numbers() -> Iterator[dict[str, Any]]:
        yield from ({"x": [number] * (number % 7 + 1)} for number in range(50))

    def stream() -> Any:
        return datasets.IterableDataset.from_generator(numbers).shuffle(seed=3, buffer_size=10)

    whole, read = stream(), stream()
    samples = FirstSamples(read, 20)
    assert samples[0] == next(iter(whole))
    assert list(read) == list(whole)
    running = iter(whole)
    for _ in range(7):
        next(running)
    goes_on, read = stream(), stream()
    goes_on.load_state_dict(whole.state_dict())
    read.load_state_dict(whole.state_dict())
    FirstSamples(read, 20)
    assert list(read) == list(goes_on)


def test_an_empty_stream_and_wrong_arguments() -> None:
    with pytest.raises(ValueError, match=r"^make_batch must give at least one .* this Stream gave none$"):
        FirstSamples(Stream([]))
    with pytest.raises(ValueError, match="count must be a positive integer, not 0"):
        FirstSamples(Stream([1]), 0)
    with pytest.raises(TypeError, match="stream must be an iterable dataset, not 3"):
        FirstSamples(3)  # type: ignore[arg-type]


def test_what_a_stream_raises_comes_out_with_its_sample() -> None:
    class Broken(Placed):
        def __iter__(self) -> Iterator[int]:
            for number in super().__iter__():
                if number == 3:
                    raise OSError("connection reset")
                yield number

    stream = Broken()
    with pytest.raises(OSError, match="connection reset") as caught:
        batches(DataLoader(stream))
    assert caught.value.__notes__ == ["batchfit: raised by sample 2 of Broken, read ahead for trials"]
    assert stream.place == 0


# --- in a search


def workload(stream: Any) -> batchfit.Workload:
    model = nn.Linear(1, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return batchfit.training(
        model, optimizer, lambda model, batch: model(batch[..., None]).square().mean(), stream
    )


def test_a_search_runs_the_longest_of_the_first_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    lengths = [1 + number % 50 for number in range(3000)]
    lengths[700], lengths[2000] = 300, 4000
    stream = Stream(lengths)
    work = workload(DataLoader(stream, batch_size=2, collate_fn=padded))
    fit = batchfit.find_batch_size(work, budget="8MiB", max_size=64, soak_steps=0)
    of_300 = workload(lambda size: torch.zeros(size, 300))
    assert fit.batch_size == batchfit.find_batch_size(of_300, budget="8MiB", max_size=64).batch_size < 64
    assert fit.made_of == "the longest of the first 1,024 samples of Stream"
    assert fit.summary.endswith("; batches of the longest of the first 1,024 samples of Stream")
    assert fit.samples is None
    assert batchfit.FitResult.from_json(fit.to_json()) == fit
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warned == [
        "batches are made of the longest of the first 1,024 samples of Stream; a longer one may exist: "
        "batchfit.FirstSamples(dataset, count) reads more of them"
    ]
    more = FirstSamples(stream, 3000)
    make = batches(more, collate_fn=padded)
    assert make(1).shape == (1, 4000)
    assert [len(sample) for sample in stream] == lengths


def test_a_stream_that_ended_is_a_dataset_of_its_samples(caplog: pytest.LogCaptureFixture) -> None:
    fit = batchfit.find_batch_size(
        workload(DataLoader(Stream([5, 9, 2]), collate_fn=padded)), budget="8MiB", max_size=4, soak_steps=0
    )
    assert fit.samples == 3
    assert fit.made_of == "the longest of all 3 samples of Stream"
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_prediction_names_it_as_a_caveat() -> None:
    work = workload(DataLoader(Stream([5, 9, 2], is_infinite=True), collate_fn=padded))
    prediction = batchfit.predict_batch_size(work, budget="64MiB", gpu="a100", max_size=64)
    assert (
        "batches are made of the longest of the first 1,024 samples of Stream: a longer sample needs more"
        in prediction.unseen
    )
