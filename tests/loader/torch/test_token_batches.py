"""Batches by tokens: every sample once, within the limit, equally many per rank, and resumed at any point."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler

import batchfit
from batchfit import ResizableLoader, TokenBatchSampler

# DataLoader warns on machines with fewer cores than workers.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

lists = st.lists(st.integers(1, 40), min_size=1, max_size=150)


@st.composite
def settings_of_a_sampler(draw: st.DrawFn) -> dict[str, Any]:
    packed = draw(st.booleans())
    return {
        "packed": packed,
        "max_rows": draw(st.none() | st.integers(3, 12)),
        "multiple_of": draw(st.integers(1, 3)),
        "pad_to_multiple_of": 1 if packed else draw(st.sampled_from([1, 8])),
        "shuffle": draw(st.booleans()),
        "seed": draw(st.integers(0, 5)),
        "window": draw(st.integers(2, 6)),
    }


def ranks(lengths: list[int], max_tokens: int, world_size: int, **settings: Any) -> list[TokenBatchSampler]:
    return [
        TokenBatchSampler(lengths, max_tokens, rank=rank, world_size=world_size, **settings)
        for rank in range(world_size)
    ]


def steps_of(samplers: list[TokenBatchSampler]) -> Iterator[list[list[int]]]:
    """The batches of all ranks, step by step; all ranks have equally many."""
    return (list(step) for step in zip(*samplers, strict=True))


def counted(batch: list[int], lengths: list[int], settings: dict[str, Any]) -> int:
    each = settings.get("pad_to_multiple_of", 1)
    own = [lengths[index] for index in batch]
    return sum(own) if settings.get("packed") else -(-max(own) // each) * each * len(own)


def samples_in(steps: list[list[list[int]]]) -> list[int]:
    return [index for step in steps for batch in step for index in batch]


@examples(200)
@given(lists, st.integers(40, 200), st.integers(1, 4), settings_of_a_sampler())
def test_every_sample_comes_once_within_the_limits(
    lengths: list[int], max_tokens: int, world_size: int, settings: dict[str, Any]
) -> None:
    samplers = ranks(lengths, max_tokens, world_size, **settings)
    expected = [len(sampler) for sampler in samplers]
    steps = list(steps_of(samplers))
    assert expected == [len(steps)] * world_size
    seen = samples_in(steps)
    assert set(seen) == set(range(len(lengths)))
    repeated = len(seen) - len(lengths)
    assert repeated < world_size
    if repeated:  # only in the last steps, where there was nothing left to cut in two
        assert world_size > 1
        assert any(all(len(batch) == 1 for batch in step) for step in steps)
    for batch in (batch for step in steps for batch in step):
        assert len(set(batch)) == len(batch) > 0
        assert counted(batch, lengths, settings) <= max_tokens
        assert settings["max_rows"] is None or len(batch) <= settings["max_rows"]


@pytest.mark.parametrize("world_size", [1, 4])
def test_batches_are_nearly_full_of_tokens_that_are_no_padding(world_size: int) -> None:
    spread = torch.randn(8000, generator=torch.Generator().manual_seed(0))
    lengths = torch.exp(spread * 0.8 + 5).long().clamp(8, 1024)
    for packed in (False, True):
        sampler = TokenBatchSampler(lengths, 4096, packed=packed, rank=0, world_size=world_size)
        batches = list(sampler)
        held = [len(batch) * int(lengths[batch].max()) for batch in batches]
        useful = sum(int(lengths[batch].sum()) for batch in batches)
        if not packed:
            assert useful > 0.93 * sum(held)
        assert (useful if packed else sum(held)) > 0.94 * 4096 * len(batches)


@examples(100)
@given(lists, st.integers(40, 200), st.integers(1, 4), settings_of_a_sampler(), st.integers(0, 3))
def test_an_order_is_one_of_seed_and_epoch(
    lengths: list[int], max_tokens: int, world_size: int, settings: dict[str, Any], epoch: int
) -> None:
    once, again = (ranks(lengths, max_tokens, world_size, **settings) for _ in range(2))
    for _ in range(epoch):  # by counting up
        list(steps_of(once))
    for sampler in again:
        sampler.set_epoch(epoch)
    assert [sampler.epoch for sampler in once] == [epoch] * world_size
    assert list(steps_of(once)) == list(steps_of(again))


def test_epochs_and_seeds_differ_and_without_shuffle_they_do_not() -> None:
    lengths = [1 + number * 7 % 40 for number in range(200)]
    sampler = TokenBatchSampler(lengths, 100, window=2)
    first, second = list(sampler), list(sampler)
    assert first != second
    batches = [
        {frozenset(batch) for batch in TokenBatchSampler(lengths, 100, window=2, seed=seed)}
        for seed in (0, 9)
    ]
    assert len(batches[0] & batches[1]) < 0.1 * len(batches[0])
    longest = [max(lengths[index] for index in batch) for batch in TokenBatchSampler(lengths, 100)]
    assert longest != sorted(longest)  # one window, whose batches come in a random order
    assert longest != sorted(longest, reverse=True)
    fixed = TokenBatchSampler(lengths, 100, shuffle=False, window=2)
    assert list(fixed) == list(fixed)
    assert [lengths[index] for index in next(iter(fixed))] == [38, 36]


@examples(60)
@given(lists, st.integers(40, 120), st.integers(1, 3), settings_of_a_sampler(), st.booleans())
def test_it_goes_on_exactly_from_every_point(
    lengths: list[int], max_tokens: int, world_size: int, settings: dict[str, Any], drop_last: bool
) -> None:
    settings["drop_last"] = drop_last
    whole = ranks(lengths, max_tokens, world_size, **settings)
    steps = list(steps_of(whole)) + list(steps_of(whole))  # two epochs
    samplers = ranks(lengths, max_tokens, world_size, **settings)
    epoch = len(samplers[0])
    for done in range(epoch + 1):
        goes_on = ranks(lengths, max_tokens, world_size, **settings)
        states = [json.loads(json.dumps(sampler.state_dict())) for sampler in samplers]
        assert all(state == states[0] for state in states)
        for sampler in goes_on:
            sampler.load_state_dict(states[0])
        if done < epoch:
            assert len(goes_on[0]) == epoch
            assert list(steps_of(goes_on)) == steps[done:epoch]
            if done == 0:
                running = steps_of(samplers)
            next(running)
    assert list(steps_of(goes_on)) == []  # the epoch that was loaded had ended
    assert list(steps_of(goes_on)) == steps[epoch:]


@examples(150)
@given(
    lists,
    st.lists(st.tuples(st.integers(1, 4), st.integers(40, 200), st.integers(0, 6)), min_size=1, max_size=6),
    settings_of_a_sampler(),
)
def test_other_ranks_and_sizes_go_on_with_what_has_not_come(
    lengths: list[int], runs: list[tuple[int, int, int]], settings: dict[str, Any]
) -> None:
    """Each run is of so many ranks and tokens, and ends after some steps; the last one at the epoch's end."""
    state: dict[str, Any] | None = None
    seen: list[int] = []
    for number, (world_size, max_tokens, most) in enumerate(runs):
        samplers = ranks(lengths, max_tokens, world_size, **settings)
        for sampler in samplers:
            if state is not None:
                sampler.load_state_dict(state)
            assert sampler.max_tokens == max_tokens
        is_last = number == len(runs) - 1
        before = set(seen)
        for done, step in enumerate(steps_of(samplers), 1):
            mine = [index for batch in step for index in batch]
            assert not set(mine) & before
            assert all(counted(batch, lengths, settings) <= max_tokens for batch in step)
            seen += mine
            if done == most and not is_last:
                break
        if samplers[0].epoch:
            break  # it ended before
        state = samplers[0].state_dict()
        assert all(sampler.state_dict()["position"] == state["position"] for sampler in samplers)
    assert set(seen) == set(range(len(lengths)))
    assert len(seen) - len(lengths) < max(world_size for world_size, _, _ in runs)


@examples(100)
@given(lists, st.lists(st.integers(40, 300), min_size=1, max_size=30), settings_of_a_sampler())
def test_sizes_that_change_between_any_two_batches_lose_nothing(
    lengths: list[int], sizes: list[int], settings: dict[str, Any]
) -> None:
    sampler = TokenBatchSampler(lengths, 300, rank=0, world_size=1, **settings)
    seen: list[int] = []
    limit = 300
    for number, batch in enumerate(sampler):
        assert counted(batch, lengths, settings) <= limit
        seen += batch
        sampler.max_tokens = limit = sizes[number % len(sizes)]
    assert sorted(seen) == list(range(len(lengths)))


@examples(80)
@given(lists, st.integers(40, 120), st.integers(1, 4), settings_of_a_sampler())
def test_drop_last_leaves_out_less_than_a_step(
    lengths: list[int], max_tokens: int, world_size: int, settings: dict[str, Any]
) -> None:
    steps = list(steps_of(ranks(lengths, max_tokens, world_size, drop_last=True, **settings)))
    seen = samples_in(steps)
    assert len(seen) == len(set(seen))
    left = [length for index, length in enumerate(lengths) if index not in set(seen)]
    if settings["max_rows"] is None and settings["multiple_of"] == 1:
        assert sum(left) <= world_size * max_tokens


def test_samples_that_are_too_long_are_named_or_left_out(caplog: pytest.LogCaptureFixture) -> None:
    lengths = [10, 20, 90, 30, 80]
    with pytest.raises(ValueError, match="must be at least 90, for sample 2 has 90 tokens, not 64"):
        TokenBatchSampler(lengths, 64)
    with pytest.raises(ValueError, match="at least 128, for sample 2 has 90 tokens, padded 128, not 100"):
        TokenBatchSampler(lengths, 100, pad_to_multiple_of=64)
    sampler = TokenBatchSampler(lengths, 90)
    with pytest.raises(ValueError, match="sample 2 has 90"):
        sampler.max_tokens = 89
    assert sampler.max_tokens == 90
    dropping = TokenBatchSampler(lengths, 64, drop_longer=True)
    assert sorted(index for batch in dropping for index in batch) == [0, 1, 3]
    assert [record.getMessage() for record in caplog.records] == [
        "2 samples of a window are longer than max_tokens (64), and drop_longer leaves them out"
    ]
    by_padding = TokenBatchSampler([60, 90, 30], 100, pad_to_multiple_of=64, drop_longer=True)
    assert sorted(index for batch in by_padding for index in batch) == [0, 2]
    with pytest.raises(ValueError, match="at least the length of the shortest sample, not 9"):
        TokenBatchSampler(lengths, 9, drop_longer=True)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"lengths": []}, ValueError, "lengths must hold at least one sample"),
        ({"lengths": [3, 0, 2]}, ValueError, "lengths must be at least 1, and sample 1 has 0"),
        ({"lengths": [1.5]}, TypeError, "lengths must be one integer per sample"),
        ({"lengths": [[1], [2]]}, TypeError, "lengths must be one integer per sample"),
        ({"lengths": "long"}, TypeError, "lengths must be one integer per sample"),
        ({"max_tokens": 0}, ValueError, "max_tokens must be an integer of at least 1, not 0"),
        ({"max_tokens": 9.0}, ValueError, "max_tokens must be an integer of at least 1, not 9.0"),
        ({"max_tokens": True}, ValueError, "max_tokens must be an integer of at least 1, not True"),
        ({"max_rows": 0}, ValueError, "max_rows must be a positive integer, not 0"),
        ({"multiple_of": 0}, ValueError, "multiple_of must be a positive integer, not 0"),
        ({"multiple_of": 8, "max_rows": 4}, ValueError, r"multiple_of must be at most max_rows \(4\), not 8"),
        ({"window": 1}, ValueError, "window must be at least 2, not 1"),
        ({"packed": 1}, TypeError, "packed must be True or False"),
        (
            {"packed": True, "pad_to_multiple_of": 8},
            ValueError,
            "pad_to_multiple_of must be 1 with packed=True",
        ),
        ({"rank": 2, "world_size": 2}, ValueError, "rank must be from 0 to 1"),
        ({"rank": 1}, ValueError, "rank and world_size must be given together"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        TokenBatchSampler(**{"lengths": [3, 4], "max_tokens": 9, **arguments})


def test_a_state_of_something_else_is_refused() -> None:
    sampler = TokenBatchSampler([3, 4], 9)
    for wrong in (3, {}, {"version": 2, "position": {}}):
        with pytest.raises(ValueError, match="state must be what state_dict"):
            sampler.load_state_dict(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="state must be of 2 samples, not 1"):
        sampler.load_state_dict(TokenBatchSampler([3], 9).state_dict())


@pytest.mark.parametrize(
    ("name", "other"),
    [
        *(("window", 2), ("packed", True), ("max_rows", 3), ("multiple_of", 2), ("pad_to_multiple_of", 8)),
        *(("shuffle", False), ("drop_last", True), ("drop_longer", True), ("checksum of lengths", [3] * 40)),
    ],
)
def test_a_position_within_an_epoch_is_one_of_a_sampler_that_was_made_alike(name: str, other: Any) -> None:
    """Another window or limit has other plans: samples would be lost, and others come twice."""
    lengths = [1 + number % 5 for number in range(40)]
    changed = {"lengths": other} if name == "checksum of lengths" else {"lengths": lengths, name: other}
    sampler, loader = (TokenBatchSampler(lengths, 10) for _ in range(2))
    ours = ResizableLoader(range(40), batch_sampler=loader)  # type: ignore[arg-type]
    fresh = sampler.state_dict()
    next(iter(sampler))
    next(iter(ours))
    with pytest.raises(ValueError, match=rf"{name} must be .* to go on within the epoch of the state, not"):
        TokenBatchSampler(max_tokens=10, **changed).load_state_dict(sampler.state_dict())
    into = TokenBatchSampler(max_tokens=10, **changed)
    with pytest.raises(ValueError, match=rf"{name} must be .* to go on within the epoch of the state, not"):
        ResizableLoader(range(40), batch_sampler=into).load_state_dict(ours.state_dict())  # type: ignore[arg-type]
    TokenBatchSampler(max_tokens=10, **changed).load_state_dict(fresh)  # an epoch that has not begun


def test_an_iterator_ends_where_its_sampler_goes_elsewhere() -> None:
    sampler = TokenBatchSampler([3] * 10, 6)
    running = iter(sampler)
    next(running)
    assert len(list(sampler)) == 5  # a new epoch
    with pytest.raises(RuntimeError, match="this iterator has ended"):
        next(running)


def test_max_tokens_of_a_checkpoint_counts_unless_another_one_was_asked_for() -> None:
    lengths = [5] * 40
    sampler = TokenBatchSampler(lengths, 10)
    running = iter(sampler)
    next(running)
    sampler.max_tokens = 20  # by a schedule, say
    state = sampler.state_dict()
    same, other = TokenBatchSampler(lengths, 10), TokenBatchSampler(lengths, 15)
    for one in (same, other):
        one.load_state_dict(state)
    assert (same.max_tokens, other.max_tokens) == (20, 15)


# --- in loaders


class Texts(Dataset[torch.Tensor]):
    """Samples of the lengths that are given; each is its index, again and again."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.lengths[index],), index)


def padded(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=-1)


LENGTHS = [1 + number * 13 % 47 for number in range(120)]


def shape_and_samples(batch: torch.Tensor) -> tuple[tuple[int, ...], list[int]]:
    return tuple(batch.shape), batch[:, 0].tolist()


@pytest.mark.parametrize("workers", [0, 2])
def test_our_loader_and_torchs_give_the_batches_of_the_sampler(workers: int) -> None:
    batches = list(TokenBatchSampler(LENGTHS, 128))
    for make in (DataLoader, ResizableLoader):
        sampler = TokenBatchSampler(LENGTHS, 128)
        loader: Any = make(
            Texts(LENGTHS),
            batch_sampler=sampler,
            collate_fn=padded,
            num_workers=workers,  # type: ignore[operator]
        )
        assert len(loader) == len(batches)
        found = [shape_and_samples(batch) for batch in loader]
        assert [samples for _, samples in found] == batches
        assert all(rows * width <= 128 for (rows, width), _ in found)


@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 0), (2, 2)])
def test_our_loader_goes_on_exactly_with_workers(before: int, after: int) -> None:
    def made(workers: int) -> ResizableLoader:
        sampler = TokenBatchSampler(LENGTHS, 64, seed=4)
        return ResizableLoader(Texts(LENGTHS), batch_sampler=sampler, collate_fn=padded, num_workers=workers)

    whole = [batch[:, 0].tolist() for batch in made(0)]
    loader = made(before)
    for number, batch in enumerate(loader, 1):
        assert batch[:, 0].tolist() == whole[number - 1]
        if number == 7:
            break
    state = json.loads(json.dumps(loader.state_dict()))
    assert (state["batches"], state["position"]) == (7, sum(map(len, whole[:7])))
    goes_on = made(after)
    goes_on.load_state_dict(state)
    assert goes_on.progress == loader.progress
    assert len(goes_on) == len(whole)
    assert [batch[:, 0].tolist() for batch in goes_on] == whole[7:]
    assert goes_on.progress.tokens == sum(LENGTHS)
    assert goes_on.progress.epoch == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_a_size_that_is_set_counts_from_the_next_batch_on(workers: int) -> None:
    sampler = TokenBatchSampler(LENGTHS, 64)
    loader = ResizableLoader(Texts(LENGTHS), batch_sampler=sampler, collate_fn=padded, num_workers=workers)
    assert loader.max_tokens == 64
    seen: list[int] = []
    largest: dict[int, int] = {}
    for number, batch in enumerate(loader):
        limit = 64 if number < 3 else 256 if number < 5 else 48
        assert batch.numel() <= limit
        largest[limit] = max(largest.get(limit, 0), batch.numel())
        seen += batch[:, 0].tolist()
        if number == 2:
            loader.max_tokens = 256
        if number == 4:
            loader.resize(max_tokens=48)
    assert sorted(seen) == list(range(len(LENGTHS)))
    assert all(tokens > 0.7 * limit for limit, tokens in largest.items())
    assert sampler.max_tokens == loader.max_tokens == 48


class Counted(Texts):
    """Counts what its workers read."""

    def __init__(self, lengths: list[int]) -> None:
        super().__init__(lengths)
        self.reads = torch.zeros(1, dtype=torch.int64).share_memory_()

    def __getitem__(self, index: int) -> torch.Tensor:
        self.reads += 1
        return super().__getitem__(index)


def test_the_same_size_again_discards_nothing() -> None:
    data = Counted(LENGTHS)
    loader = ResizableLoader(
        data, batch_sampler=TokenBatchSampler(LENGTHS, 64), collate_fn=padded, num_workers=1
    )
    for _ in loader:
        loader.max_tokens = 64
    assert int(data.reads) == len(LENGTHS)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_schedule_gives_the_tokens(workers: int) -> None:
    config = batchfit.MilestoneBatchSizeConfig(milestones="0:64 3:128 6:256", unit="step")
    sampler = TokenBatchSampler(LENGTHS, 64)
    loader = ResizableLoader(
        Texts(LENGTHS), batch_sampler=sampler, schedule=config, collate_fn=padded, num_workers=workers
    )
    sizes, seen = [], []
    expected = len(loader)
    for batch in loader:
        sizes.append(batch.numel())
        seen += batch[:, 0].tolist()
    assert sorted(seen) == list(range(len(LENGTHS)))
    assert len(sizes) == expected
    assert max(sizes[:3]) <= 64 < max(sizes[3:6]) <= 128 < max(sizes[6:]) <= 256


def test_a_schedule_in_tokens_counts_them_itself() -> None:
    config = batchfit.MilestoneBatchSizeConfig(milestones="0:64 1000:128", unit="tokens")
    sampler = TokenBatchSampler(LENGTHS, 64)
    loader = ResizableLoader(Texts(LENGTHS), batch_sampler=sampler, collate_fn=padded)
    loader.schedule = config
    for batch in loader:
        assert loader.current_progress is not None
        assert batch.numel() <= (64 if loader.current_progress.tokens < 1000 else 128)  # type: ignore[operator]
    assert loader.progress.tokens == sum(LENGTHS)
    next(iter(loader))
    assert loader.progress.tokens > sum(LENGTHS)  # type: ignore[operator]
    assert loader.max_tokens == 128


@pytest.mark.parametrize("is_planned", [True, False])
def test_a_scheduler_moves_the_tokens_and_the_learning_rate(is_planned: bool) -> None:
    sampler = TokenBatchSampler(LENGTHS, 64)
    loader: Any = sampler
    if is_planned:
        loader = ResizableLoader(Texts(LENGTHS), batch_sampler=sampler, collate_fn=padded)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    config = batchfit.StepBatchSizeConfig(step_size=1, gamma=2, max_batch_size=256)
    scheduler = batchfit.BatchSizeScheduler(config, loader=loader, lr="linear", optimizer=optimizer)
    sizes = []
    for epoch in range(4):
        scheduler.step(epoch)
        sizes.append((loader.max_tokens, round(optimizer.param_groups[0]["lr"], 6)))
        for _ in loader:
            pass
    assert sizes == [(64, 0.1), (128, 0.2), (256, 0.4), (256, 0.4)]
    assert sampler.max_tokens in (64, 256)
    assert not hasattr(sampler, "batch_size")


def test_ranks_share_a_step_and_weigh_their_samples() -> None:
    loaders = [
        ResizableLoader(
            Texts(LENGTHS),
            batch_sampler=TokenBatchSampler(LENGTHS, 64, rank=rank, world_size=3),
            collate_fn=padded,
        )
        for rank in range(3)
    ]
    seen: list[int] = []
    for batches in zip(*loaders, strict=True):
        rows = [len(batch) for batch in batches]
        seen += [index for batch in batches for index in batch[:, 0].tolist()]
        assert loaders[0].current is not None
        assert loaders[0].current.size == sum(rows)
        assert [loader.weight for loader in loaders] == [3 * one / sum(rows) for one in rows]
        assert loaders[0].state_dict() == loaders[2].state_dict()
    assert set(seen) == set(range(len(LENGTHS)))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_what_contradicts_a_batch_sampler_is_refused() -> None:
    data, sampler = Texts([3, 4]), TokenBatchSampler([3, 4], 9)
    plain: Any = BatchSampler(SequentialSampler(data), 2, False)
    for name, value in [("batch_size", 8), ("shuffle", True), ("drop_last", True), ("seed", 3)]:
        with pytest.raises(ValueError, match=f"{name} must be left out with a batch_sampler"):
            ResizableLoader(data, batch_sampler=sampler, **{name: value})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rank and world_size must be left out"):
        ResizableLoader(data, batch_sampler=sampler, rank=0, world_size=1)
    with pytest.raises(TypeError, match=r"must be a batchfit\.TokenBatchSampler, not <torch"):
        ResizableLoader(data, batch_sampler=plain)
    with pytest.raises(TypeError, match="dataset must have __getitem__ with a batch_sampler"):
        ResizableLoader(Stream(), batch_sampler=sampler)
    with pytest.raises(ValueError, match="as many samples as batch_sampler has lengths, 2, not 3"):
        ResizableLoader(Texts([3, 4, 5]), batch_sampler=sampler)
    loader = ResizableLoader(data, batch_sampler=sampler)
    with pytest.raises(ValueError, match="batch_size must not be set where batches have a max_tokens, to 4"):
        loader.batch_size = 4
    with pytest.raises(AttributeError, match="see max_tokens"):
        _ = loader.batch_size
    with pytest.raises(ValueError, match="for sample 1 has 4 tokens, not 3"):
        loader.max_tokens = 3
    by_samples = ResizableLoader(data, 2)
    assert by_samples.max_tokens is None
    with pytest.raises(ValueError, match="max_tokens must not be set where batches have a batch_size"):
        by_samples.max_tokens = 9
    with pytest.raises(ValueError, match="state must be of a loader that is by tokens, not 'sequential'"):
        loader.load_state_dict(by_samples.state_dict())


def test_a_schedule_below_the_longest_sample_ends_with_its_index() -> None:
    config = batchfit.MilestoneBatchSizeConfig(milestones="0:64 2:32", unit="step")
    loader = ResizableLoader(
        Texts(LENGTHS), batch_sampler=TokenBatchSampler(LENGTHS, 64), schedule=config, collate_fn=padded
    )
    batches = iter(loader)
    next(batches), next(batches)
    with pytest.raises(ValueError, match=r"size of the schedule at .* for sample \d+ has 47 tokens"):
        next(batches)
