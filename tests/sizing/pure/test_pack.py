"""Packing and the memory model of ragged batches: what they promise for any lengths and any true curve."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import pytest
from examples import examples
from hypothesis import assume, given
from hypothesis import strategies as st

from batchfit._engine.batch.pure.microbatch import Microbatch
from batchfit._engine.sizing.pure.memory_by_shape import Headroom, MemoryModel
from batchfit._engine.sizing.pure.pack import Costs, SeenShapes, ladder, pack

MIB = 2**20
BUDGET = 20_000 * MIB
LENGTHS = st.lists(st.integers(0, 700), max_size=60)


def lognormal(seed: int, count: int = 128) -> list[int]:
    draw = random.Random(seed)
    return [min(1024, max(32, int(draw.lognormvariate(5.3, 0.8)))) for _ in range(count)]


# --- pack -----------------------------------------------------------------------------------------------


@examples(200)
@given(
    LENGTHS,
    st.integers(1, 200),
    st.integers(1, 20_000),
    st.integers(0, 300),
    st.data(),
)
def test_every_sample_once_within_all_limits(
    lengths: list[int], multiple: int, capacity: int, extra: int, data: st.DataObject
) -> None:
    def most(length: int) -> int:
        return capacity // length

    padded = max(lengths, default=1) + extra
    ran = data.draw(st.lists(st.tuples(st.integers(1, 70), st.integers(1, 800)), max_size=8))
    shapes = SeenShapes(tuple(dict.fromkeys(ran)), batches=len(ran))
    limits = {"multiple": multiple, "padded_length": max(padded, 1)}
    packs = pack(lengths, most_samples=most, shapes=shapes, **limits)  # type: ignore[arg-type]
    assert sorted(index for one in packs for index in one.samples) == list(range(len(lengths)))
    for one in packs:
        assert one.samples
        assert max(lengths[index] for index in one.samples) <= one.length <= max(padded, 1)
        assert one.length % multiple == 0 or one.length == max(padded, 1) or one.padded_shape in shapes.seen
        assert one.size <= max(1, most(one.length))
    again = pack(tuple(lengths), most_samples=most, shapes=shapes, **limits)  # type: ignore[arg-type]
    assert packs == again


@examples(60)
@given(st.lists(st.integers(1, 700), min_size=1, max_size=40), st.integers(1, 40))
def test_no_plan_of_equal_microbatches_is_cheaper(lengths: list[int], size: int) -> None:
    """Against the usual thing to do, sorted and cut at one size, by the very costs that are minimised."""
    assume(size in ladder(40))
    costs = Costs(launch=500, each=100, new_shape=0)

    def price(shapes: list[tuple[int, int]]) -> float:
        return sum(max(500, 100 + count * length) for count, length in shapes)

    ours = [one.padded_shape for one in pack(lengths, most_samples=None, multiple=1, costs=costs)]
    ordered = sorted(lengths, reverse=True)
    cut = [ordered[start : start + size] for start in range(0, len(ordered), size)]
    assume(len(cut[-1]) in ladder(40))
    assert price(ours) <= price([(len(microbatch), microbatch[0]) for microbatch in cut])


def test_shapes_recur_from_batch_to_batch() -> None:
    """Ten batches of lognormal lengths: fewer shapes than by hand (26), and less padding (72 % useful)."""
    shapes, microbatches, padded, useful = SeenShapes(), 0, 0, 0
    for seed in range(10):
        lengths = lognormal(seed)
        packs = pack(lengths, most_samples=lambda length: 13_000 // length, padded_length=1024, shapes=shapes)
        shapes = shapes.ran(packs)
        microbatches += len(packs)
        padded += sum(one.size * one.length for one in packs)
        useful += sum(lengths)
    assert len(shapes.seen) <= 20
    assert microbatches <= 80
    assert useful / padded >= 0.73
    assert shapes.batches == 10


def test_a_shape_that_ran_is_preferred_to_a_new_one() -> None:
    lengths, costs = [100] * 30, Costs(launch=1000, each=100, new_shape=3000)
    (fresh, *rest) = pack(lengths, most_samples=None, padded_length=1024, costs=costs)
    assert fresh.length == 128
    assert len(rest) <= 1
    ran = SeenShapes(((30, 192),), batches=3)
    (only,) = pack(lengths, most_samples=None, padded_length=1024, shapes=ran, costs=costs)
    assert only.padded_shape == (30, 192)
    far = SeenShapes(((30, 1024),), batches=3)  # so long that a new shape is cheaper
    packs = pack(lengths, most_samples=None, padded_length=1024, shapes=far, costs=costs)
    assert {one.length for one in packs} == {128}


def test_a_known_shape_that_does_not_fit_any_more_is_left_alone() -> None:
    shapes = SeenShapes(((30, 128), (5, 128)), batches=3)
    packs = pack([100] * 30, most_samples=10, padded_length=1024, shapes=shapes)
    assert max(one.size for one in packs) <= 10
    longer = SeenShapes(((30, 256),), batches=3)  # than this batch is padded to
    costs = Costs(launch=1000, each=100, new_shape=1e6)
    (only,) = pack([100] * 30, most_samples=None, padded_length=128, shapes=longer, costs=costs)[:1]
    assert only.length == 128


def test_without_memory_limits_the_batch_is_still_cut_by_length() -> None:
    packs = pack(lognormal(1), most_samples=None, padded_length=1024)
    assert 2 <= len(packs) <= 12
    assert sum(lognormal(1)) / sum(one.size * one.padded_shape[1] for one in packs) > 0.6
    assert [one.length for one in packs] == sorted((one.length for one in packs), reverse=True)


def test_where_nothing_is_known_no_more_is_tried_than_two_launches_are_worth() -> None:
    packs = pack(lognormal(1), most_samples=lambda length: None, padded_length=1024)
    assert all(one.size == 1 or one.size * one.length <= 8192 for one in packs)
    assert len(packs) <= 10


def test_lengths_that_are_not_tokens_do_not_fall_apart_into_single_samples() -> None:
    lengths = [16_000 * (1 + seed % 10) for seed in range(64)]
    packs = pack(lengths, most_samples=lambda length: 2_000_000 // length, multiple=1600)
    assert len(packs) <= 24
    short = [160, 320, 480, 640, 800, 960, 1120, 1280] * 2
    assert len(pack([100 * length for length in short], most_samples=None, multiple=100)) <= 6


def test_nothing_and_one_sample() -> None:
    assert pack([], most_samples=4) == ()
    assert pack([0], most_samples=4, padded_length=10) == (Microbatch((0,), 1, 10),)
    assert pack([7], most_samples=0) == (Microbatch((0,), 1, 7),)


def test_wrong_arguments_are_named() -> None:
    for wrong, message in (
        ({"multiple": 0}, "multiple must be positive, not 0"),
        ({"padded_length": 4}, "padded_length must be at least the longest sample's 5, not 4"),
    ):
        with pytest.raises(ValueError, match=message):
            pack([5], most_samples=1, **wrong)
    with pytest.raises(ValueError, match="lengths must not be negative, not -1"):
        pack([5, -1], most_samples=1)
    with pytest.raises(ValueError, match="launch must be a finite number"):
        Costs(float("nan"), 0, 0)


def test_shapes_go_through_json_and_stay_few() -> None:
    shapes = (
        SeenShapes()
        .ran([Microbatch((0, 1), 2, 64), Microbatch((2,), 1, 64)])
        .ran([Microbatch((0, 1), 2, 64)])
    )
    assert shapes == SeenShapes(((2, 64), (1, 64)), 2)
    assert SeenShapes.from_dict(json.loads(json.dumps(shapes.to_dict()))) == shapes
    many = SeenShapes().ran(Microbatch((0,), 1, length) for length in range(1, 3000))
    assert len(many.seen) == 1024
    assert many.seen[-1] == (1, 2999)


def test_the_ladder_has_all_small_counts_and_few_large_ones() -> None:
    assert ladder(1) == (1,)
    assert ladder(12) == (1, 2, 3, 4, 5, 6, 7, 8, 10, 12)
    assert len(ladder(4096)) <= 45


# --- the memory model -------------------------------------------------------------------------------------


@st.composite
def true_curves(draw: st.DrawFn) -> tuple[float, Callable[[int, int], float], Callable[[int], int]]:
    """What is held, the true peak of a shape, and the most samples that fit: linear to quadratic."""
    held = draw(st.integers(0, 8000)) * MIB
    at_512 = draw(st.floats(50, 700)) * MIB
    share = draw(st.floats(0, 1))  # of the quadratic part at 512
    linear, quadratic = at_512 * (1 - share) / 512, at_512 * share / 512**2

    def peak(samples: int, length: int) -> float:
        return held + samples * (linear * length + quadratic * length**2)

    def best(length: int) -> int:
        return int((BUDGET - held) // (peak(1, length) - held))

    return held, peak, best


def wobbling(data: st.DataObject, value: float, held: float) -> float:
    return held + (value - held) * (1 + data.draw(st.floats(-0.03, 0.03)))


@examples(200)
@given(true_curves(), st.data())
def test_three_lengths_are_enough_to_be_right(
    curve: tuple[float, Callable[[int, int], float], Callable[[int], int]], data: st.DataObject
) -> None:
    """Noise of 3 %, lengths that span the range: never over the budget, 90 % of what fits (or one less)."""
    held, peak, best = curve
    model = MemoryModel(held_bytes=held)
    for length in (64, 256, 1024):
        most = best(length)
        assume(most >= 1)
        samples = max(1, int(most * data.draw(st.floats(0.5, 1))))
        model = model.seen(samples, length, wobbling(data, peak(samples, length), held))
    for length in (64, 100, 128, 200, 256, 400, 512, 768, 1000, 1024):
        found = model.most_samples(length, BUDGET)
        assert found is not None
        assert found == 0 or peak(found, length) <= BUDGET
        assert found + 1 >= 0.9 * best(length)


@examples(200)
@given(true_curves(), st.integers(1, 1024), st.data())
def test_growing_from_one_small_reading_arrives_without_an_oom(
    curve: tuple[float, Callable[[int, int], float], Callable[[int], int]], first: int, data: st.DataObject
) -> None:
    held, peak, best = curve
    assume(best(1024) >= 1)
    model = MemoryModel(held_bytes=held).seen(1, first, wobbling(data, peak(1, first), held))
    proposed: dict[int, int] = {}
    dearest = peak(1, first) - held
    for _ in range(14):  # one sample of one element to the whole budget takes many doublings
        for length in (64, 256, 1024):
            found = model.most_samples(length, BUDGET)
            assert found is not None
            if found == 0:
                continue
            used = peak(found, length)
            assert used <= BUDGET
            assert found == 1 or used - held <= 2.2 * dearest
            dearest = max(dearest, used - held)
            proposed[length] = found
            model = model.seen(found, length, wobbling(data, used, held))
    for length in (64, 256):
        assert proposed[length] + 1 >= 0.85 * best(length)


READINGS = st.lists(
    st.tuples(st.integers(1, 64), st.integers(1, 2048), st.floats(0, 3e10), st.booleans()), max_size=60
)


@examples(200)
@given(READINGS, st.floats(0, 2e10), st.floats(0, 4e10))
def test_whatever_is_read_answers_fall_with_the_length_and_rise_with_the_budget(
    readings: list[tuple[int, int, float, bool]], held: float, budget: float
) -> None:
    model = MemoryModel(held_bytes=held)
    for samples, length, peak, fits in readings:
        model = model.seen(samples, length, peak) if fits else model.after_oom(samples, length)
    assert len(model.readings) <= 24
    assert len(model.failures) <= 8
    lengths = sorted({1, 7, 64, 65, 300, 512, 1024, 2048, 5000} | {one[1] for one in readings})
    found = [model.most_samples(length, budget) for length in lengths]
    if not model.readings:
        assert all(one is None or one >= 0 for one in found)
    else:
        answers = [one for one in found if one is not None]
        assert len(answers) == len(found)
        assert answers == sorted(answers, reverse=True)
        assert answers[0] <= (model.most_samples(lengths[0], budget * 2) or 0)
    assert MemoryModel.from_dict(json.loads(json.dumps(model.to_dict()))) == model


def test_what_had_an_oom_is_not_proposed_again_soon_nor_anything_that_holds_it() -> None:
    model = MemoryModel().seen(8, 512, 8 * 512).seen(4, 1024, 4 * 1024)
    assert model.most_samples(512, 10_000) == 15
    failed = model.after_oom(12, 512)
    for length in (512, 600, 1024):
        assert (failed.most_samples(length, 10_000) or 0) * length < 12 * 512
    for _ in range(127):
        failed = failed.seen(4, 512, 4 * 512)
    assert failed.failures == ((12, 512),)
    failed = failed.seen(4, 512, 4 * 512)  # long enough: it may have been fragmentation
    assert failed.failures == ()
    assert failed.setbacks == 0
    assert failed.after_oom(12, 512).patience == 256  # twice as long the next time
    assert model.after_oom(12, 512).seen(12, 512, 9_000).failures == ()


def test_a_failure_alone_is_a_limit_too() -> None:
    model = MemoryModel().after_oom(16, 512)
    assert model.most_samples(512, 1e9) == 15
    assert model.most_samples(1024, 1e9) == 7
    assert model.most_samples(64, 1e9) is None


def test_a_high_outlier_fades() -> None:
    model = MemoryModel()
    for length in (128, 512, 1024):
        model = model.seen(8192 // length, length, 8192)
    before = model.most_samples(512, 16_384)
    model = model.seen(16, 512, 80_000)
    assert model.most_samples(512, 16_384) in range(before or 0)
    for _ in range(20):
        samples = max(1, model.most_samples(512, 16_384) or 0)
        model = model.seen(samples, 512, samples * 512)
    after = model.most_samples(512, 16_384)
    assert after is not None
    assert before is not None
    assert after >= 0.9 * before


def test_a_low_outlier_costs_one_failure() -> None:
    """A reading ten times too low, at a length not seen before: dropped when what it promised runs out."""
    model, failures = MemoryModel(), 0
    for length in (128, 512):
        model = model.seen(8192 // length, length, 8192)
    model = model.seen(8, 1024, 819)
    for _ in range(30):
        for length in (128, 512, 1024):
            found = max(1, model.most_samples(length, 16_384) or 0)
            if found * length > 16_384:
                failures += 1
                model = model.after_oom(found, length)
            else:
                model = model.seen(found, length, found * length)
    assert failures <= 2
    assert (model.most_samples(512, 16_384) or 0) >= 24


def test_fewer_samples_that_took_more_lift_the_reading() -> None:
    model = MemoryModel().seen(8, 512, 1000).seen(4, 512, 3000)
    assert model.readings == ((8, 512, 3000.0),)


def test_what_took_more_than_the_budget_is_cut_however_cheap_others_seem() -> None:
    model = MemoryModel().seen(8, 64, 5000).seen(16, 512, 4000)
    assert model.most_samples(64, 4500) == 7
    assert (model.most_samples(512, 4500) or 0) <= 7
    assert (model.seen(1, 32, 10).most_samples(512, 4500) or 0) <= 7
    seven = 7 * 4000 / 16 * 1.031
    assert model.most_samples(512, seven + 1) == 7
    assert model.most_samples(512, seven - 1) == 6


def test_the_lengths_that_are_kept_are_those_that_say_something() -> None:
    """Sixty lengths; bytes per element rise up to 512. What is forgotten is told by the rest."""
    model = MemoryModel()

    def need(length: int) -> float:
        return length * (100 + min(length, 512) / 4)

    for length in range(16, 976, 16):
        model = model.seen(4, length, 4 * need(length))
    for length in range(32, 960, 16):
        assert (model.most_samples(length, 4 * need(length) * 1.04) or 0) >= 4
        assert (model.most_samples(length, 4 * need(length) - 1) or 0) < 4


def test_what_is_held_may_change_between_readings() -> None:
    """The optimizer's state comes after the first step: readings are of what comes on top."""
    model = MemoryModel().seen(4, 512, 3000, held_bytes=1000).seen(4, 512, 5000, held_bytes=3000)
    assert model.held_bytes == 3000
    assert model.readings == ((4, 512, 2000.0),)
    assert model.most_samples(512, 5000 * 1.02) == 4
    assert model.most_samples(512, 4999) == 3


def test_wrong_readings_are_named() -> None:
    with pytest.raises(ValueError, match="samples must be a positive integer, not 0"):
        MemoryModel().seen(0, 5, 1)
    with pytest.raises(ValueError, match="length must be a positive integer, not 0"):
        MemoryModel().after_oom(1, 0)
    with pytest.raises(ValueError, match="peak_bytes must be a finite number that is not negative, not nan"):
        MemoryModel().seen(1, 1, float("nan"))
    with pytest.raises(ValueError, match="held_bytes must be a finite number that is not negative, not -1"):
        MemoryModel().seen(1, 1, 1, held_bytes=-1)


@examples(60)
@given(st.lists(st.integers(1, 900), min_size=1, max_size=60), st.integers(1, 9), st.integers(1, 40))
def test_no_more_samples_than_asked_for_however_many_fit(lengths: list[int], at_most: int, fits: int) -> None:
    for most in (None, fits, lambda length: None):
        packs = pack(lengths, most_samples=most, at_most=at_most, shapes=SeenShapes(((12, 64), (3, 256))))
        assert max(one.size for one in packs) <= at_most
        assert sorted(index for one in packs for index in one.samples) == list(range(len(lengths)))
    with pytest.raises(ValueError, match="at_most must be positive, not 0"):
        pack(lengths, most_samples=None, at_most=0)


def test_retries_in_a_row_leave_more_room_and_calm_batches_bring_it_back() -> None:
    room = Headroom()
    assert room.after(3).after(0).after(2).share == room.share  # not in a row
    for _ in range(100):
        room = room.after(1)
    assert 0.55 < room.share < 0.65
    for _ in range(63):
        room = room.after(0)
    lowest = room.share
    assert room.after(0).share > lowest
    for _ in range(5000):
        room = room.after(0)
    assert room.share == Headroom().share
