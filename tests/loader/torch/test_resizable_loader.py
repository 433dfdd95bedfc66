"""ResizableLoader: the epoch's samples, once, in order, through changes, ranks, workers and checkpoints."""

from __future__ import annotations

import copy
import gc
import itertools
import multiprocessing
import os
import pickle
import random
import runpy
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Subset,
    WeightedRandomSampler,
    get_worker_info,
)
from warm import run_python

import batchfit
from batchfit import ResizableLoader
from batchfit._loader.pure.progress import Progress

# DataLoader warns on machines with fewer cores than workers.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


class Numbers(Dataset[int]):
    """The index itself."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Ragged(Numbers):
    """Samples whose length depends on the index; the first entry is the index."""

    def __getitem__(self, index: int) -> torch.Tensor:  # type: ignore[override]
        return torch.full((1 + index * 7 % 5,), index)


class Fetched(Numbers):
    def __getitems__(self, indices: list[int]) -> list[int]:
        assert type(indices) is list
        return indices


class Faulty(Numbers):
    """Sample 20 cannot be read."""

    error: type[Exception] = ValueError

    def __getitem__(self, index: int) -> int:
        if index == 20:
            raise self.error("sample 20 is broken")
        return index


class FaultyStop(Faulty):
    error = StopIteration


class Stream(IterableDataset[int]):
    """Numbers, each worker its own part."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        assert info is None or info.dataset is self
        yield from range(first, self.length, step)


class StatefulStream(IterableDataset[int]):
    """Numbers that cannot be had twice: only the state says where it is."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.read = 0

    def state_dict(self) -> dict[str, int]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.read = state["read"]

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        while (number := first + self.read * step) < self.length:
            self.read += 1
            yield number
        self.read = 0


def pad(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=-1)


def numbers(batch: torch.Tensor) -> list[int]:
    """Which samples are in a batch, collated by default or padded."""
    flat: list[int] = (batch if batch.dim() == 1 else batch[:, 0]).tolist()
    if batch.dim() == 2:
        lengths = [1 + number * 7 % 5 for number in flat]
        assert batch.shape[1] == max(lengths)  # collated for this batch, and not cut from another
        assert [int((row >= 0).sum()) for row in batch] == lengths
    return flat


class Sizes:
    """A schedule from a function of progress; notes what it was asked."""

    def __init__(self, size_at: Callable[[Progress], int]) -> None:
        self.function = size_at
        self.asked: list[Progress] = []

    def size_at(self, progress: Progress) -> int:
        self.asked.append(progress)
        return self.function(progress)


def by_samples(progress: Progress) -> int:
    return 4 + progress.samples // 16 % 9


def epoch_of(loader: ResizableLoader) -> list[list[int]]:
    return [numbers(batch) for batch in loader]


def flat(batches: list[list[int]]) -> list[int]:
    return [number for batch in batches for number in batch]


def order(length: int, shuffle: bool, seed: int = 0, epoch: int = 0) -> list[int]:
    """What a fixed-size run sees: DistributedSampler's order on one rank."""
    sampler = DistributedSampler(Numbers(length), 1, 0, shuffle=shuffle, seed=seed)
    sampler.set_epoch(epoch)
    return list(sampler)


# Every sample once, in order


@examples(150)
@given(st.data())
def test_ranks_see_the_epoch_once_in_order_through_any_changes(data: st.DataObject) -> None:
    """Planned and unplanned, at any point, on any number of ranks, with a checkpoint in between."""
    world_size = data.draw(st.integers(1, 4), "world_size")
    length = data.draw(st.integers(world_size, 120), "length")
    shuffle = data.draw(st.booleans(), "shuffle")
    drop_last = data.draw(st.booleans(), "drop_last")
    planned = data.draw(st.booleans(), "planned")
    ragged = data.draw(st.booleans(), "ragged")
    size = st.integers(world_size, 20)

    def make(rank: int, world_size: int) -> ResizableLoader:
        return ResizableLoader(
            Ragged(length) if ragged else Numbers(length),
            8,
            schedule=Sizes(by_samples) if planned else None,
            shuffle=shuffle,
            collate_fn=pad if ragged else None,
            drop_last=drop_last,
            rank=rank,
            world_size=world_size,
            seed=3,
        )

    loaders = [make(rank, world_size) for rank in range(world_size)]
    loops = [iter(loader) for loader in loaders]
    seen: list[int] = []
    while True:
        batches = [next(loop, None) for loop in loops]
        if batches[0] is None:
            assert batches == [None] * world_size  # all ranks at once, or DDP would hang
            break
        parts = [numbers(batch) for batch in batches]
        assert all(parts)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
        current = loaders[0].current
        assert current is not None
        assert current.size == sum(map(len, parts))
        weights = [loader.weight * len(part) for loader, part in zip(loaders, parts, strict=True)]
        assert [w * current.size for w in weights] == pytest.approx([len(p) ** 2 * world_size for p in parts])
        seen += flat(parts)
        assert {loader.progress for loader in loaders} == {loaders[0].progress}
        assert loaders[0].progress.samples == len(seen)
        action = data.draw(st.sampled_from(["go on"] * 4 + ["resize", "defer", "plan", "resume"]))
        if action in {"resize", "defer"}:
            new = data.draw(size)
            for loader in loaders:
                loader.resize(new, defer=action == "defer")
                assert loader.batch_size == new
                assert loader.schedule is None
        elif action == "plan":
            for loader in loaders:
                loader.schedule = Sizes(by_samples)
        elif action == "resume":
            state = pickle.loads(pickle.dumps(loaders[-1].state_dict()))
            loaders = [make(rank, world_size) for rank in range(world_size)]
            for loader in loaders:
                loader.load_state_dict(state)
            loops = [iter(loader) for loader in loaders]
    expected = order(length, shuffle, seed=3)
    assert seen == expected[: len(seen)]
    if drop_last:
        assert length - len(seen) < 20
    else:
        assert len(seen) == length


def check_with_workers(choose: random.Random, workers: int) -> None:
    length = choose.randint(60, 160)
    shuffle, persistent = choose.random() < 0.5, choose.random() < 0.5
    rank, world_size = choose.choice([(0, 1), (1, 3)])
    planned = choose.random() < 0.5

    def make(workers: int) -> ResizableLoader:
        return ResizableLoader(
            Ragged(length),
            6,
            schedule=Sizes(by_samples) if planned else None,
            collate_fn=pad,
            shuffle=shuffle,
            num_workers=workers,
            persistent_workers=persistent and workers > 0,
            rank=rank,
            world_size=world_size,
        )

    # The same calls on a loader without workers: that it is right is shown above.
    loader, model = make(workers), make(0)
    assert len(loader) == len(model)
    for _ in range(2):
        loop, expected_loop = iter(loader), iter(model)
        while (expected := next(expected_loop, None)) is not None:
            assert numbers(next(loop)) == numbers(expected)
            assert loader.progress == model.progress
            assert loader.current is not None
            assert model.current is not None
            assert (loader.current.start, loader.current.stop) == (model.current.start, model.current.stop)
            if choose.random() < 0.3:
                new = choose.randint(world_size, 24)
                loader.batch_size = model.batch_size = new
            if choose.random() < 0.1:
                loader.schedule, model.schedule = Sizes(by_samples), Sizes(by_samples)
        assert next(loop, None) is None
        assert loader.progress == model.progress


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_changes_count_from_the_next_batch_whatever_workers_have_prefetched(workers: int) -> None:
    check_with_workers(random.Random(workers), workers)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30))
def test_changes_with_workers_at_random(seed: int) -> None:
    choose = random.Random(1000 + seed)
    check_with_workers(choose, choose.randint(1, 3))


def test_a_planned_change_voids_nothing_and_is_asked_for_ahead() -> None:
    plan = Sizes(lambda progress: 4 if progress.samples < 32 else 8)
    loader = ResizableLoader(Numbers(80), schedule=plan, num_workers=2)
    batches = epoch_of(loader)
    assert [len(batch) for batch in batches] == [4] * 8 + [8] * 6
    prefetched = [
        (p.step, p.samples) for p in plan.asked[1:]
    ]  # the first one is asked when the loader is made
    positions = [(step, sum(map(len, batches[:step]))) for step in range(15)]
    assert [at for at in prefetched if at in positions] == prefetched  # each batch once
    assert len(set(prefetched)) == 15


def test_an_unplanned_change_keeps_prefetched_batches_if_asked_to() -> None:
    sizes = {}
    for defer in (False, True):
        loader = ResizableLoader(Numbers(120), 4, num_workers=2, prefetch_factor=2, defer=defer)
        loop = iter(loader)
        batches = [numbers(next(loop)) for _ in range(2)]
        loader.batch_size = 10
        batches += [numbers(batch) for batch in loop]
        assert flat(batches) == list(range(120))
        sizes[defer] = [len(batch) for batch in batches][:9]
    assert sizes[False] == [4, 4, *[10] * 7]
    assert sizes[True] == [4] * 6 + [10] * 3


def test_a_change_near_the_end_batches_again_what_was_all_prefetched() -> None:
    loader = ResizableLoader(Numbers(40), 8, num_workers=2)
    loop = iter(loader)
    seen = [numbers(next(loop)) for _ in range(4)]  # the fifth and last is prefetched
    loader.batch_size = 3
    seen += [numbers(batch) for batch in loop]
    assert [len(batch) for batch in seen] == [8] * 4 + [3, 3, 2]
    assert flat(seen) == list(range(40))


def test_the_same_size_again_voids_nothing() -> None:
    loader = ResizableLoader(Numbers(40), 8, num_workers=1)
    next(iter_ := iter(loader))
    serial = loader._dealer.ledger.serial
    loader.batch_size = 8
    loader.schedule = Sizes(lambda progress: 8)
    assert not loader._dealer.ledger.discarded_below
    assert flat([numbers(batch) for batch in iter_]) == list(range(8, 40))
    assert serial == 3


def test_void_work_is_not_done(tmp_path: Path) -> None:
    """Workers do not fetch what they see is discarded: here, only what they had begun with."""

    class Slow(Numbers):
        def __getitem__(self, index: int) -> int:
            with (tmp_path / "fetched").open("a") as file:
                file.write(f"{index}\n")
            if index == 4:  # until the change has been made
                while not (tmp_path / "changed").exists():
                    pass
            return index

    loader = ResizableLoader(Slow(64), 4, num_workers=1, prefetch_factor=4)
    loop = iter(loader)
    assert numbers(next(loop)) == [0, 1, 2, 3]
    loader.batch_size = 2
    (tmp_path / "changed").touch()
    seen = [numbers(next(loop)) for _ in range(4)]
    assert seen == [[4, 5], [6, 7], [8, 9], [10, 11]]
    fetched = [int(line) for line in (tmp_path / "fetched").read_text().split()]
    assert fetched[:5] == [0, 1, 2, 3, 4]
    # 4 (and what was fetched with it before the worker looked), then from 4 on again.
    again = fetched.index(4, 5)
    assert again <= 8
    assert fetched[again:] == list(range(4, 4 + len(fetched) - again))


def test_batches_are_fetched_with_getitems_where_the_dataset_has_it() -> None:
    assert epoch_of(ResizableLoader(Fetched(10), 4)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert flat(epoch_of(ResizableLoader(Subset(Numbers(10), [7, 8, 9]), 2))) == [7, 8, 9]


# Schedules


@pytest.mark.parametrize(
    ("start", "cap", "steps", "published"),
    [
        pytest.param(128, 128, 78_200, 78_125, marks=pytest.mark.slow),
        (128, 10**6, 29_000, 28_875),
        (640, 5120, 6_500, 6_406),
        (3200, 5120, 2_360, 2_305),
    ],
)
def test_update_counts_of_smith_et_al(start: int, cap: int, steps: int, published: int) -> None:
    """CIFAR-10 for 200 epochs, five times the batch after 60, 120 and 160.

    The paper's figures are samples over batch size; a loader that keeps the last batch of an epoch rounds
    up in every one of 200 epochs (200 * ceil(50000 / 128) = 78,200, not 200 * 50000 / 128 = 78,125).
    """

    def size(progress: Progress) -> int:
        return min(cap, start * 5 ** sum(progress.epoch >= epoch for epoch in (60, 120, 160)))

    loader = ResizableLoader(Fetched(50_000), schedule=Sizes(size), collate_fn=len)
    counted = samples = planned = 0
    exact = 0.0
    for epoch in range(200):
        planned += len(loader)
        exact += 50_000 / size(Progress(epoch))
        for got in loader:
            counted += 1
            samples += got
    assert samples == 200 * 50_000
    assert counted == planned == loader.progress.step == steps
    assert round(exact) == published
    assert 0 <= counted - exact < 200


def test_tokens_and_epochs_reach_the_schedule() -> None:
    plan = Sizes(lambda progress: 8)
    loader = ResizableLoader(Numbers(16), schedule=plan, tokens_per_sample=128)
    list(loader)
    list(loader)
    assert plan.asked[-2] == Progress(epoch=1, step=3, samples=24, tokens=24 * 128)
    assert loader.progress == Progress(epoch=2, step=4, samples=32, tokens=32 * 128)


def test_a_config_starts_from_the_loaders_own_size() -> None:
    step = batchfit.StepBatchSizeConfig(step_size=1, gamma=2, max_batch_size=32)
    loader = ResizableLoader(Numbers(64), 8, schedule=step)
    epochs = [[len(batch) for batch in loader] for _ in range(4)]
    assert epochs == [[8] * 8, [16] * 4, [32] * 2, [32] * 2]
    milestones = batchfit.MilestoneBatchSizeConfig(milestones="0:4 32:8", unit="samples")
    assert [len(batch) for batch in ResizableLoader(Numbers(64), schedule=milestones)] == [4] * 8 + [8] * 4
    with pytest.raises(ValueError, match="rank"):
        ResizableLoader(Numbers(64), 2, schedule=step, rank=0, world_size=4)
    with pytest.raises(TypeError, match=r"size_at\(progress\)"):
        ResizableLoader(Numbers(64), schedule=batchfit.NoiseBatchSizeConfig(max_batch_size=64))  # type: ignore[arg-type]


def test_what_is_wrong_with_a_schedule_is_said_when_its_batch_is_due() -> None:
    def size(progress: Progress) -> int:
        return 4 if progress.samples < 12 else 0

    for workers in (0, 1):
        loader = ResizableLoader(Numbers(40), schedule=Sizes(size), num_workers=workers)
        loop = iter(loader)
        assert flat([numbers(next(loop)) for _ in range(3)]) == list(range(12))
        with pytest.raises(ValueError, match=r"schedule at Progress\(.*samples=12.*must be an integer of at"):
            next(loop)
        assert loader.progress.samples == 12
    with pytest.raises(ValueError, match=r"must be an integer of at least 1, not 2\.5"):
        ResizableLoader(Numbers(40), schedule=Sizes(lambda progress: 2.5))  # type: ignore[arg-type, return-value]


def test_a_schedule_set_mid_way_may_be_wrong_about_prefetched_batches() -> None:
    """The error comes when its batch is due, not from the line that sets the schedule."""
    loader = ResizableLoader(Numbers(60), 4, num_workers=1, prefetch_factor=4)
    loop = iter(loader)
    next(loop)
    loader.schedule = Sizes(lambda progress: 4 if progress.samples < 12 else -1)
    assert flat([numbers(next(loop)) for _ in range(2)]) == list(range(4, 12))
    state = loader.state_dict()  # where the schedule has no answer
    assert (state["position"], state["batch_size"]) == (12, 4)
    with pytest.raises(ValueError, match="must be an integer of at least 1, not -1"):
        next(loop)


def test_a_schedule_that_leaves_a_rank_without_a_sample_is_said_before_training() -> None:
    plan = Sizes(lambda progress: 8 if progress.epoch < 50 else 2)
    with pytest.warns(
        UserWarning, match=r"a batch of 2 at Progress\(epoch=50, .*there are 4 ranks"
    ) as reported:
        ResizableLoader(Numbers(100), schedule=plan, rank=0, world_size=4)
    assert reported[0].filename == __file__
    with pytest.raises(ValueError, match="must be at least 4, a sample for each of 4 ranks, not 2"):
        ResizableLoader(Numbers(100), schedule=Sizes(lambda progress: 2), rank=0, world_size=4)


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_schedule_that_outgrows_the_epoch_is_said_once(
    drop_last: bool, caplog: pytest.LogCaptureFixture
) -> None:
    schedule = batchfit.MilestoneBatchSizeConfig(milestones="0:8 1:64")
    loader = ResizableLoader(Numbers(20), schedule=schedule, drop_last=drop_last)
    sizes = [[len(batch) for batch in loader] for _ in range(3)]
    assert sizes == ([[8, 8], [], []] if drop_last else [[8, 8, 4], [20], [20]])
    (said,) = [record.message for record in caplog.records]
    words = (
        "epoch 1 has no batch: its 20 samples are fewer than the 64" if drop_last else "max_batch_size to 20"
    )
    assert words in said


def test_a_fixed_size_that_is_larger_than_the_data_is_dataloaders(caplog: pytest.LogCaptureFixture) -> None:
    assert [len(batch) for batch in ResizableLoader(Numbers(20), 64)] == [20]
    assert not caplog.records


def test_a_size_that_is_set_ends_the_schedule_and_the_last_size_stays_without_one() -> None:
    loader = ResizableLoader(Numbers(100), schedule=Sizes(lambda progress: 10))
    loop = iter(loader)
    assert len(next(loop)) == 10
    loader.schedule = None
    assert loader.batch_size == len(next(loop)) == 10
    loader.schedule = Sizes(lambda progress: 20)
    assert len(next(loop)) == 20
    loader.batch_size = 5
    assert loader.schedule is None
    assert len(next(loop)) == 5
    assert len(loader) == 4 + 11


@examples(60)
@given(st.integers(4, 90), st.integers(4, 40), st.integers(1, 4), st.booleans(), st.booleans())
def test_the_length_is_the_number_of_batches(
    length: int, size: int, world_size: int, drop_last: bool, planned: bool
) -> None:
    loader = ResizableLoader(
        Numbers(length),
        size,
        schedule=Sizes(by_samples) if planned else None,
        drop_last=drop_last,
        rank=world_size - 1,
        world_size=world_size,
    )
    reported = len(loader)
    for _ in loader:
        assert len(loader) == reported
    assert loader.progress.step == reported
    if world_size == 1 and not planned:
        assert reported == len(DataLoader(Numbers(length), size, drop_last=drop_last))


# Checkpoints


@pytest.mark.parametrize("shuffle", [False, True])
def test_resume_with_other_workers_and_ranks(shuffle: bool) -> None:
    def make(workers: int, rank: int = 0, world_size: int = 1) -> ResizableLoader:
        return ResizableLoader(
            Numbers(101), 8, shuffle=shuffle, num_workers=workers, rank=rank, world_size=world_size, seed=5
        )

    loader = make(2)
    list(loader)
    loop = iter(loader)
    seen = flat([numbers(next(loop)) for _ in range(3)])
    loader.batch_size = 11
    seen += flat([numbers(next(loop)) for _ in range(2)])
    state = loader.state_dict()
    del loop
    assert state == loader.state_dict()  # prefetched batches are not in it
    assert (state["epoch"], state["position"], state["samples"], state["step"]) == (1, 46, 147, 18)
    expected = order(101, shuffle, seed=5, epoch=1)
    assert seen == expected[:46]
    for workers in (0, 1, 3):
        other = make(workers)
        other.load_state_dict(copy.deepcopy(state))
        assert other.state_dict() == state
        other.set_epoch(1)  # as loops over epochs do; it is the epoch that goes on
        assert len(other) == 5 + 5
        rest = epoch_of(other)
        assert flat(rest) == expected[46:]
        assert [len(batch) for batch in rest] == [11] * 5
        assert other.progress == Progress(epoch=2, step=23, samples=202)
        assert flat(epoch_of(other)) == order(101, shuffle, seed=5, epoch=2)
    ranks = [make(0, rank, 3) for rank in range(3)]
    for one in ranks:
        one.load_state_dict(state)
    together = [flat(list(parts)) for parts in zip(*map(epoch_of, ranks), strict=True)]
    assert flat(together) == expected[46:]


def test_another_epoch_than_the_loaded_one_begins_at_its_beginning() -> None:
    loader = ResizableLoader(Numbers(20), 4, shuffle=True)
    next(iter(loader))
    state = loader.state_dict()
    loader.load_state_dict(state)
    loader.set_epoch(7)
    assert flat(epoch_of(loader)) == order(20, True, epoch=7)
    assert loader.progress == Progress(epoch=8, step=6, samples=24)


def test_a_state_at_the_end_of_an_epoch_leaves_nothing_of_it() -> None:
    loader = ResizableLoader(Numbers(20), 8)
    for _ in loader:
        state = loader.state_dict()
    other = ResizableLoader(Numbers(20), 8)
    other.load_state_dict(state)
    assert epoch_of(other) == []
    assert other.progress == loader.progress == Progress(epoch=1, step=3, samples=20)


@pytest.mark.parametrize("kind", ["shuffled", "own generator", "sampler", "workers"])
def test_going_on_in_an_epoch_draws_no_random_number_twice(kind: str) -> None:
    """Dropout in a run that was resumed sees the numbers of one that was not."""

    def make() -> ResizableLoader:
        torch.manual_seed(3)
        data = Numbers(20)
        if kind == "sampler":
            return ResizableLoader(data, 8, sampler=torch.utils.data.RandomSampler(data))
        own = torch.Generator().manual_seed(9) if kind == "own generator" else None
        return ResizableLoader(data, 8, shuffle=True, generator=own, num_workers=int(kind == "workers"))

    def run(loader: ResizableLoader, drawn: list[Any], most: int) -> tuple[Any, ...]:
        while len(drawn) < most:
            for batch in loader:
                drawn.append((numbers(batch), float(torch.rand(()))))
                if len(drawn) == most:
                    break
        return loader.state_dict(), torch.get_rng_state()

    straight: list[Any] = []
    run(make(), straight, 8)
    for stop in (1, 2, 3, 4, 6):  # 3 and 6 are the last batches of their epochs
        resumed: list[Any] = []
        state, rng = run(make(), resumed, stop)
        loader = make()
        loader.load_state_dict(state)
        torch.set_rng_state(rng)
        run(loader, resumed, 8)
        assert resumed == straight


def test_few_samples_that_are_left_for_more_ranks_are_left_out_with_a_word(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loader = ResizableLoader(Numbers(10), 8)
    next(iter(loader))
    others = [ResizableLoader(Numbers(10), 8, rank=rank, world_size=4) for rank in range(4)]
    for other in others:
        other.load_state_dict(loader.state_dict())
        assert epoch_of(other) == []
    assert "the last 2 samples of the epoch are fewer than the ranks" in caplog.text


@pytest.mark.parametrize("set_by_hand", [False, True])
def test_a_schedule_that_a_set_size_has_ended_stays_ended(set_by_hand: bool) -> None:
    def make() -> ResizableLoader:
        plan = batchfit.MilestoneBatchSizeConfig(milestones="0:8 32:16", unit="samples")
        return ResizableLoader(torch.utils.data.TensorDataset(torch.arange(100)), schedule=plan)

    def sizes(loader: ResizableLoader, most: int | None = None) -> list[int]:
        return [len(samples) for (samples,) in itertools.islice(loader, most)]

    straight, stopped = make(), make()
    for loader in (straight, stopped):
        assert sizes(loader, 2) == [8, 8]
    if set_by_hand:
        stopped.batch_size = 5
    resumed = make()
    resumed.load_state_dict(stopped.state_dict())
    expected = [5] * 16 + [4] if set_by_hand else [8, 8, 16, 16, 16, 16, 4]
    assert sizes(resumed) == expected
    again = make()  # the state of the resumed one says the same
    again.load_state_dict(resumed.state_dict())
    assert (again.schedule is None) is set_by_hand


def test_a_state_that_does_not_fit_is_refused() -> None:
    state = ResizableLoader(Numbers(10), 8).state_dict()
    with pytest.raises(ValueError, match="state must be of 11 samples, not 10"):
        ResizableLoader(Numbers(11), 8).load_state_dict(state)
    with pytest.raises(ValueError, match="state must be of a loader that is shuffled, not 'sequential'"):
        ResizableLoader(Numbers(10), 8, shuffle=True).load_state_dict(state)
    with pytest.raises(ValueError, match=r"state must be what state_dict\(\) returned, not None"):
        ResizableLoader(Numbers(10), 8).load_state_dict(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="epoch must be 0 or more, not -1"):
        ResizableLoader(Numbers(10), 8).set_epoch(-1)
    with pytest.raises(ValueError, match="state must be of version 1, not 2"):
        ResizableLoader(Numbers(10), 8).load_state_dict({**state, "version": 2})


# Samplers


class Stateful:
    """A sampler that goes through random numbers and can say where it is."""

    def __init__(self) -> None:
        self.left = list(range(50))
        random.Random(1).shuffle(self.left)
        self.left += [0, 0]  # samplers may repeat

    def __iter__(self) -> Iterator[int]:
        while self.left:
            yield self.left.pop(0)

    def state_dict(self) -> dict[str, Any]:
        return {"left": list(self.left)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.left = list(state["left"])


SAMPLERS: dict[str, Callable[[], Any]] = {
    "list": lambda: [5, 4, 3, 2, 1, 0, 5, 5, *range(40)],
    "random": lambda: RandomSampler(Numbers(50)),
    "replacement": lambda: RandomSampler(Numbers(50), replacement=True, num_samples=90),
    "generator": lambda: RandomSampler(
        Numbers(50), generator=torch.Generator().manual_seed(random.randrange(99))
    ),
    "weighted": lambda: WeightedRandomSampler(torch.arange(50.0), 70),
    "stateful": Stateful,
    "distributed": lambda: DistributedSampler(Numbers(50), 1, 0, seed=9),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", SAMPLERS)
def test_samplers_keep_their_order_and_resume(kind: str, workers: int) -> None:
    torch.manual_seed(workers)
    whole = flat(epoch_of(ResizableLoader(Numbers(50), 7, sampler=SAMPLERS[kind](), seed=0)))
    loader = ResizableLoader(Numbers(50), 7, sampler=SAMPLERS[kind](), num_workers=workers)
    loop = iter(loader)
    seen = [numbers(next(loop)) for _ in range(2)]
    loader.batch_size = 4
    seen.append(numbers(next(loop)))
    assert [len(batch) for batch in seen] == [7, 7, 4]
    state = pickle.loads(pickle.dumps(loader.state_dict()))
    rest = flat([numbers(batch) for batch in loop])
    if kind in {"list", "stateful", "distributed"}:
        assert flat(seen) + rest == whole
    assert len(flat(seen) + rest) == len(whole)
    torch.manual_seed(1234)
    other = ResizableLoader(Numbers(50), 7, sampler=SAMPLERS[kind](), num_workers=2 - workers)
    other.load_state_dict(state)
    assert other.state_dict()["position"] == 18
    assert flat(epoch_of(other)) == rest


def test_a_sampler_gets_the_epoch_and_a_sharded_one_is_refused() -> None:
    sampler = DistributedSampler(Numbers(20), 1, 0, seed=2)
    loader = ResizableLoader(Numbers(20), 4, sampler=sampler)
    for epoch in range(2):
        assert flat(epoch_of(loader)) == order(20, True, seed=2, epoch=epoch)
    with pytest.raises(ValueError, match="sampler must give the order of all ranks"):
        ResizableLoader(Numbers(20), 4, sampler=DistributedSampler(Numbers(20), 2, 0), rank=0, world_size=2)


def test_ranks_share_the_order_of_a_sampler_without_a_length() -> None:
    def sampler() -> Any:
        return map(int, "3141592653589793")

    ranks = [ResizableLoader(Numbers(10), 5, sampler=sampler(), rank=rank, world_size=3) for rank in range(3)]
    together = [flat(list(parts)) for parts in zip(*map(epoch_of, ranks), strict=True)]
    assert [len(batch) for batch in together] == [5, 5, 3, 3]
    assert flat(together) == list(map(int, "3141592653589793"))
    with pytest.raises(TypeError):
        len(ranks[0])


def test_a_sampler_that_raises_does_so_when_its_batch_is_due() -> None:
    def sampler() -> Iterator[int]:
        yield from range(10)
        raise OSError("no more")

    loader = ResizableLoader(Numbers(10), 4, sampler=sampler(), num_workers=1)
    loop = iter(loader)
    assert flat([numbers(next(loop)) for _ in range(2)]) == list(range(8))
    with pytest.raises(OSError, match="no more"):
        next(loop)


# Iterable datasets


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("kind", [Stream, StatefulStream])
def test_streams_give_every_sample_once_through_changes(kind: type[Any], workers: int) -> None:
    choose = random.Random(workers)
    loader = ResizableLoader(kind(150), 6, num_workers=workers, persistent_workers=workers == 3)
    for _ in range(2):
        seen: list[int] = []
        for batch in loader:
            expected = loader.current
            assert expected is not None
            assert len(batch) <= expected.size
            seen += numbers(batch)
            if choose.random() < 0.4:
                loader.resize(choose.randint(1, 15), defer=choose.random() < 0.3)
        assert sorted(seen) == list(range(150))
        if workers <= 1:
            assert seen == list(range(150))
    assert loader.progress.samples == 300


def test_a_stream_follows_a_schedule_and_its_length() -> None:
    loader = ResizableLoader(Stream(100), schedule=Sizes(by_samples), num_workers=1)
    sizes = [len(batch) for batch in loader]
    done = 0
    for size in sizes[:-1]:
        assert size == by_samples(Progress(samples=done))
        done += size
    assert sum(sizes) == 100
    with pytest.raises(TypeError):
        len(loader)


def test_a_stream_drops_the_last_batch_of_each_worker() -> None:
    loader = ResizableLoader(Stream(50), 8, num_workers=2, drop_last=True)
    assert [len(batch) for batch in loader] == [8] * 6


@pytest.mark.parametrize("workers", [0, 2])
def test_streams_resume_by_their_own_state_or_by_reading(workers: int) -> None:
    for kind in (Stream, StatefulStream):
        loader = ResizableLoader(kind(90), 8, num_workers=workers)
        loop = iter(loader)
        seen = flat([numbers(next(loop)) for _ in range(3)])
        loader.batch_size = 5
        seen += flat([numbers(next(loop)) for _ in range(3)])
        state = pickle.loads(pickle.dumps(loader.state_dict()))
        del loop
        other = ResizableLoader(kind(90), 8, num_workers=workers)
        if kind is Stream:
            with pytest.warns(UserWarning, match="the dataset has no state_dict: what was consumed is read"):
                other.load_state_dict(state)
        else:
            other.load_state_dict(state)
        assert other.state_dict() == state
        assert other.progress.samples == len(seen)
        rest = flat(epoch_of(other))
        assert sorted(seen + rest) == list(range(90))
        assert sorted(flat(epoch_of(other))) == list(range(90))  # and the epoch after is whole
    with pytest.raises(ValueError, match=f"num_workers must be {max(1, workers)} to go on in an iterable"):
        ResizableLoader(Stream(90), 8, num_workers=3).load_state_dict(state)


def test_ranks_take_their_part_of_the_size_of_a_stream() -> None:
    loader = ResizableLoader(Stream(20), 7, rank=1, world_size=2)
    assert [len(batch) for batch in loader] == [3] * 6 + [2]


def test_ranks_are_those_of_torch_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    loader = ResizableLoader(Numbers(17), 8)
    assert (loader.rank, loader.world_size) == (2, 3)
    assert epoch_of(loader) == [[6, 7], [12, 13], [16]]


# Loops


@pytest.mark.parametrize("workers", [0, 2])
def test_leaving_a_loop_and_starting_again(workers: int) -> None:
    loader = ResizableLoader(
        Numbers(40), 4, shuffle=True, num_workers=workers, persistent_workers=workers > 0
    )
    for _ in loader:
        break
    assert loader.progress == Progress(epoch=0, step=1, samples=4)
    assert flat(epoch_of(loader)) == order(40, True, epoch=1)
    loader.set_epoch(0)
    first = iter(loader)
    assert numbers(next(first)) == order(40, True)[:4]
    loader.set_epoch(9)
    second = iter(loader)
    assert numbers(next(second)) == order(40, True, epoch=9)[:4]
    with pytest.raises(RuntimeError, match="its loader was iterated again"):
        next(first)
    assert flat([numbers(batch) for batch in second]) == order(40, True, epoch=9)[4:]
    assert next(second, None) is None
    assert loader.progress.epoch == 10


@pytest.mark.parametrize("workers", [0, 2])
def test_errors_of_a_dataset_come_out_as_from_dataloader(workers: int) -> None:
    def errors_of(loader: Any) -> tuple[list[list[int]], str]:
        loop, seen, text = iter(loader), [], ""
        while True:
            try:
                seen.append(numbers(next(loop)))
            except StopIteration:
                return seen, text
            except ValueError as error:
                text = str(error)

    theirs, their_text = errors_of(DataLoader(Faulty(40), 8, num_workers=workers))
    loader = ResizableLoader(Faulty(40), 8, num_workers=workers)
    ours, text = errors_of(loader)
    assert ours == theirs
    assert text.splitlines()[0] == their_text.splitlines()[0]
    assert text.splitlines()[-1] == their_text.splitlines()[-1]
    assert "sample 20 is broken" in text
    other = ResizableLoader(Faulty(40), 8, num_workers=workers)
    loop = iter(other)
    next(loop), next(loop)
    with pytest.raises(ValueError, match="sample 20 is broken"):
        next(loop)
    assert other.state_dict()["position"] == 16  # what failed was not handed out
    list(loop)  # DataLoader takes 5 s a worker to let go of a loop after an error, unless it is at its end
    loop = iter(ResizableLoader(FaultyStop(24), 8, num_workers=workers))
    next(loop), next(loop)
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        next(loop)
    list(loop)


def test_a_worker_that_dies_is_said() -> None:
    """In a process of its own, for torch raises it from a signal handler, wherever the process is."""
    code = (
        "import os, batchfit\n"
        "class Killed:\n"
        "    def __len__(self): return 40\n"
        "    def __getitem__(self, index): return index if index != 3 else os._exit(9)\n"
        "try:\n"
        "    for batch in batchfit.ResizableLoader(Killed(), 8, num_workers=1): pass\n"
        "except RuntimeError as error:\n"
        "    print(error)\n"
    )
    done = run_python("-c", code)
    assert "exited unexpectedly" in done.stdout, done.stderr


def mark_worker(worker_id: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert isinstance(info.dataset, Numbers)
    info.dataset.length = 1000 + worker_id


class TellsLength(Numbers):
    def __getitem__(self, index: int) -> int:
        return self.length


def test_worker_init_fn_sees_the_users_dataset_and_seeds_are_dataloaders() -> None:
    loader = ResizableLoader(TellsLength(4), 1, num_workers=2, worker_init_fn=mark_worker)
    assert epoch_of(loader) == [[1000], [1001], [1000], [1001]]

    class Draws(Numbers):
        def __getitem__(self, index: int) -> float:  # type: ignore[override]
            return float(torch.rand(()))

    torch.manual_seed(3)
    theirs = [batch.tolist() for batch in DataLoader(Draws(12), 3, num_workers=2)]
    torch.manual_seed(3)
    assert [batch.tolist() for batch in ResizableLoader(Draws(12), 3, num_workers=2)] == theirs


def test_spawned_workers() -> None:
    loader = ResizableLoader(Numbers(30), 4, num_workers=1, multiprocessing_context="spawn")
    loop = iter(loader)
    seen = numbers(next(loop))
    loader.batch_size = 9
    batches = [numbers(batch) for batch in loop]
    assert [len(batch) for batch in batches] == [9, 9, 8]
    assert seen + flat(batches) == list(range(30))


# Nothing leaks


def _held() -> tuple[int, int, int]:
    gc.collect()
    shared = len(list(Path("/dev/shm").iterdir())) if Path("/dev/shm").is_dir() else 0
    return len(multiprocessing.active_children()), len(os.listdir("/proc/self/fd")), shared


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
@pytest.mark.parametrize("persistent", [False, True])
def test_nothing_is_left_when_it_is_dropped_mid_epoch(persistent: bool) -> None:
    def use(drop: str) -> None:
        loader = ResizableLoader(
            Ragged(200), 8, collate_fn=pad, num_workers=2, persistent_workers=persistent, shuffle=True
        )
        loop = iter(loader)
        next(loop), next(loop)
        loader.batch_size = 3
        next(loop)
        if drop == "loop":
            assert len(multiprocessing.active_children()) == 2
            del loop
            assert len(multiprocessing.active_children()) == (2 if persistent else 0)
        elif drop == "void":
            loader.batch_size = 5
        elif drop == "end":
            list(loop)

    was = gc.isenabled()
    gc.disable()  # reference counts alone must do
    try:
        use("loop")  # what multiprocessing keeps for itself, it keeps from here on
        before = _held()
        for drop in ("loop", "void", "end", "leave"):
            use(drop)
            assert not multiprocessing.active_children()
        # Other tests at the same time use /dev/shm too, for a moment; what leaks stays.
        deadline = time.monotonic() + 20
        while (after := _held()) and any(now > then for now, then in zip(after, before, strict=True)):
            assert time.monotonic() < deadline, f"{after} are left, {before} were there"
            time.sleep(0.2)
    finally:
        if was:
            gc.enable()


# The example


def test_the_example_grows_and_goes_on_from_its_checkpoint() -> None:
    path = Path(__file__).parents[3] / "examples" / "resize.py"
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 150
    example = runpy.run_path(str(path))
    state = torch.get_rng_state()
    try:
        result = example["train"](samples=1024, epochs=2, workers=0)
    finally:
        torch.set_rng_state(state)
    sizes = result["sizes"]
    assert sizes[:24] == [32] * 16 + [64] * 8
    assert sum(sizes) == 2048 == result["progress"].samples
    again = example["make_loader"](1024, 0)
    again.load_state_dict(result["checkpoint"]["loader"])
    done = again.progress.samples
    assert done >= 1024 + 512
    assert sum(len(x) for x, _ in again) == 2048 - done


# Wrong arguments


@pytest.mark.parametrize(
    ("keywords", "error", "text"),
    [
        ({"batch_size": 0}, ValueError, "batch_size must be an integer of at least 1, not 0"),
        ({"batch_size": 2.0}, ValueError, "batch_size must be an integer of at least 1, not 2.0"),
        ({"batch_size": True}, ValueError, "batch_size must be an integer of at least 1, not True"),
        (
            {"batch_size": 3, "rank": 0, "world_size": 4},
            ValueError,
            "batch_size must be at least 4, a sample",
        ),
        ({"rank": 0}, ValueError, "rank and world_size must be given together, not 0 and None"),
        ({"rank": 4, "world_size": 4}, ValueError, "rank must be from 0 to 3, not 4"),
        ({"rank": 0, "world_size": 0}, ValueError, "world_size must be a positive integer, not 0"),
        (
            {"rank": 0, "world_size": 11, "batch_size": 20},
            ValueError,
            "dataset must have at least 11 samples",
        ),
        ({"schedule": 256}, TypeError, r"schedule must be one .* with size_at\(progress\), not 256"),
        ({"schedule": "0:8 1:16"}, TypeError, r"not '0:8 1:16': batchfit.load_schedule\(...\) makes"),
        (
            {"schedule": batchfit.IncreaseBatchSizeConfig(function=max)},
            TypeError,
            r"not IncreaseBatchSizeConfig: use BatchSizeScheduler\(config, batch_size, loader=loader\)",
        ),
        ({"schedule": batchfit.BatchSizeScheduler("0:8")}, TypeError, "use its plan, or give the loader to"),
        ({"seed": 1.5}, ValueError, "seed must be an integer, not 1.5"),
        ({"rank": 0.0, "world_size": 2}, ValueError, "rank must be an integer, not 0.0"),
        ({"shuffle": True, "sampler": [1]}, ValueError, "shuffle must be False where a sampler is given"),
        ({"tokens_per_sample": 0}, ValueError, "tokens_per_sample must be a positive integer, not 0"),
        ({"tokens_per_sample": 1.5}, ValueError, "tokens_per_sample must be a positive integer, not 1.5"),
        ({"dataset": Stream(4), "shuffle": True}, ValueError, "shuffle and sampler must not be given"),
        ({"dataset": iter(())}, TypeError, "dataset must have __getitem__ or be an IterableDataset"),
        ({"num_workers": -1}, ValueError, "num_workers"),
    ],
)
def test_wrong_arguments(keywords: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        ResizableLoader(**{"dataset": Numbers(10), "batch_size": 8, **keywords})


def test_a_wrong_size_changes_nothing() -> None:
    loader = ResizableLoader(Numbers(40), 8, rank=0, world_size=4)
    with pytest.raises(
        ValueError, match="batch_size must be at least 4, a sample for each of 4 ranks, not 3"
    ):
        loader.batch_size = 3
    with pytest.raises(ValueError, match="must be an integer of at least 1, not 'x'"):
        loader.schedule = Sizes(lambda progress: "x")  # type: ignore[arg-type, return-value]
    assert loader.schedule is None
    assert loader.batch_size == 8
    assert batchfit.ResizableLoader is ResizableLoader
