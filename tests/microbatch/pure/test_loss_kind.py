"""What kind of loss it is, from losses of sets of samples: any mean passes, any comparison does not."""

from __future__ import annotations

import math

from hypothesis import assume, given
from hypothesis import strategies as st

from batchfit._microbatch.pure.loss_kind import Join, LossReading, after, finite, is_noisy, kind_of

losses = st.floats(-100, 100)
weights = st.floats(0.01, 100)


def one(value: float) -> LossReading:
    return LossReading((value,))


def joins(loss_of: object, a: list[int], b: list[int]) -> list[Join]:
    of = loss_of
    assert callable(of)
    first = Join((one(of(a)), one(of(b))), one(of(a + b)))
    twice = Join((first.joined, first.joined), one(of(a + b + a + b)))
    return [first, twice, Join((first.sets[0], first.joined), one(of(a + a + b)), after(first))]


@given(st.lists(st.tuples(losses, weights), min_size=4, max_size=4))
def test_a_mean_over_anything_is_a_mean(samples: list[tuple[float, float]]) -> None:
    def mean(chosen: list[int]) -> float:
        return sum(samples[i][0] * samples[i][1] for i in chosen) / sum(samples[i][1] for i in chosen)

    assert kind_of(joins(mean, [0, 1], [2, 3])) in ("mean", "unclear")


@given(st.lists(losses, min_size=4, max_size=4))
def test_a_sum_is_a_sum(samples: list[float]) -> None:
    found = kind_of(joins(lambda chosen: sum(samples[i] for i in chosen), [0, 1], [2, 3]))
    assert found in ("sum", "unclear")
    if min(samples) > max(0.01, 0.1 * max(samples)):
        assert found == "sum"


@given(st.lists(st.floats(-3, 3), min_size=16, max_size=16), st.floats(0, 5))
def test_in_batch_negatives_are_compared(scores: list[float], temperature: float) -> None:
    def contrastive(chosen: list[int]) -> float:
        rows = [[math.exp(temperature * scores[4 * i + j]) for j in chosen] for i in chosen]
        return sum(math.log(sum(row) / row[at]) for at, row in enumerate(rows)) / len(rows)

    assume(contrastive([0, 1, 2, 3]) < 20)  # log 2 more for samples that come twice is clear up to there
    assert kind_of(joins(contrastive, [0, 1], [2, 3])) == "compared"


@given(st.lists(st.floats(0.5, 1.5), min_size=8, max_size=8), st.floats(0.01, 0.5))
def test_noise_alone_is_never_a_comparison(values: list[float], spread: float) -> None:
    noisy = [LossReading(tuple(1 + spread * (value - 1) for value in values)) for _ in range(3)]
    assert kind_of([Join((noisy[0], noisy[1]), noisy[2])]) in ("mean", "unclear")


def test_what_says_nothing_is_unclear() -> None:
    zero = Join((one(0.0), one(0.0)), one(0.0))
    assert kind_of([zero]) == "unclear"
    assert kind_of([]) == "unclear"
    assert kind_of([Join((one(1e-8), one(-2e-8)), one(3e-8))]) == "unclear"
    assert finite([Join((one(math.nan), one(1.0)), one(1.0)), zero]) == [zero]
    assert after(Join((one(1.0), one(2.0)), one(3.0))) is None


def test_more_readings_are_asked_for_where_noise_may_be_the_reason() -> None:
    quiet, wide = LossReading((1.0, 1.0)), LossReading((0.5, 2.5))
    assert is_noisy([Join((quiet, quiet), wide)])
    assert not is_noisy([Join((quiet, quiet), one(2.0))])
