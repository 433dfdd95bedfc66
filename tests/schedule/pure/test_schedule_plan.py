"""What a schedule will do over a run: phases, updates, increases by a function, and learning-rate rules."""

from __future__ import annotations

import json
import math
import pickle
from typing import Any

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from batchfit import (
    CosineBatchSizeConfig,
    CustomBatchSizeConfig,
    ExponentialBatchSizeConfig,
    LinearBatchSizeConfig,
    MilestoneBatchSizeConfig,
    StepBatchSizeConfig,
    load_schedule,
)
from batchfit._loader.pure.deal import cut
from batchfit._loader.pure.progress import Progress
from batchfit._schedule.pure.bound_plan import BoundPlan
from batchfit._schedule.pure.increase import Increases
from batchfit._schedule.pure.lr_rules import LRRule
from batchfit._schedule.pure.phases import Constant, ScheduleEvent, phases, updates_of

quick = examples(120)

# CIFAR-10 in Smith et al. 2017: the batch grows by 5 where the learning rate would fall by 5.
SMITH = [
    ("0:128", 78_125, 78_200),
    ("0:128 60:640 120:3200 160:16000", 28_875, 29_000),
    ("0:640 60:3200 120:5120", 6_406, 6_500),
    ("0:3200 60:5120", 2_305, 2_360),
]


@pytest.mark.parametrize(("text", "by_formula", "by_loader"), SMITH)
def test_the_updates_of_smith_et_al(text: str, by_formula: int, by_loader: int) -> None:
    plan = load_schedule(text).bind()  # type: ignore[union-attr]
    sizes = [plan.size_at(Progress(epoch=epoch)) for epoch in range(200)]
    assert round(sum(50_000 / size for size in sizes)) == by_formula
    # An epoch ends with a short batch, so that there are a few more: one for each epoch that does not divide.
    assert updates_of(phases(plan, samples=50_000, epochs=200)) == by_loader
    assert by_loader == sum(math.ceil(50_000 / size) for size in sizes)
    whole = updates_of(phases(plan, samples=50_000, epochs=200, drop_last=True))
    assert whole == sum(50_000 // size for size in sizes)


def one_by_one(
    plan: Any, samples: int, epochs: int, drop_last: bool, ranks: int
) -> list[tuple[int, int, int]]:
    """(epoch, size wanted, samples taken) of every batch, by asking before each."""
    found = []
    step = total = 0
    for epoch in range(epochs):
        left = samples
        while True:
            now = Progress(epoch, step, total, total * (plan.tokens_per_sample or 1))
            size = plan.size_at(now)
            taken = cut(size, left, world_size=ranks, drop_last=drop_last)
            if taken == 0:
                if left == samples:
                    found.append((epoch, size, 0))
                break
            found.append((epoch, size, taken))
            left, step, total = left - taken, step + 1, total + taken
    return found


counts = st.integers(1, 400)
configs = st.one_of(
    st.builds(
        StepBatchSizeConfig,
        step_size=counts,
        gamma=st.integers(2, 4),
        max_batch_size=st.integers(64, 300),
        unit=st.sampled_from(["epoch", "step", "samples", "tokens"]),
    ),
    st.builds(
        lambda kind, **fields: kind(**fields),
        kind=st.sampled_from([LinearBatchSizeConfig, ExponentialBatchSizeConfig, CosineBatchSizeConfig]),
        final_batch_size=st.integers(8, 90),
        over=counts,
        start=st.integers(0, 50),
        every=st.none() | st.integers(1, 50),
        unit=st.sampled_from(["epoch", "step", "samples", "tokens"]),
    ),
    st.builds(
        MilestoneBatchSizeConfig,
        milestones=st.dictionaries(st.integers(1, 900), st.integers(8, 200), min_size=1, max_size=5).map(
            lambda sizes: sorted(sizes.items())
        ),
        unit=st.sampled_from(["epoch", "step", "samples", "tokens"]),
    ),
    st.just(CustomBatchSizeConfig(function=lambda now: 8 + (now.samples // 37) % 50)),
)


@quick
@given(configs, st.integers(8, 64), st.integers(1, 300), st.integers(1, 8), st.booleans(), st.integers(1, 8))
def test_phases_are_what_asking_before_every_batch_gives(
    config: Any, initial: int, samples: int, epochs: int, drop_last: bool, ranks: int
) -> None:
    plan = config.bind(initial, tokens_per_sample=5)
    found = phases(plan, samples=samples, epochs=epochs, drop_last=drop_last, world_size=ranks)
    batches = one_by_one(plan, samples, epochs, drop_last, ranks)
    assert updates_of(found) == sum(taken > 0 for _, _, taken in batches)
    reported = [
        (phase.size, phase.updates, phase.samples, phase.from_epoch, phase.to_epoch) for phase in found
    ]
    expected: list[list[int]] = []
    for epoch, size, taken in batches:
        if not expected or expected[-1][0] != size:
            expected.append([size, 0, 0, epoch, epoch])
        expected[-1][1:3] = [expected[-1][1] + (taken > 0), expected[-1][2] + taken]
        expected[-1][4] = epoch
    assert reported == [tuple(row) for row in expected]
    if not drop_last and samples >= ranks:
        assert sum(phase.samples for phase in found) == samples * epochs


@quick
@given(st.integers(1, 60), st.integers(0, 200), st.integers(1, 12), st.booleans())
def test_the_last_batches_have_a_sample_for_every_rank(
    wanted: int, left: int, ranks: int, drop_last: bool
) -> None:
    wanted = max(wanted, ranks)
    sizes = []
    rest = left
    while size := cut(wanted, rest, world_size=ranks, drop_last=drop_last):
        sizes.append(size)
        rest -= size
    assert all(size >= ranks for size in sizes)
    assert rest == (left % wanted if drop_last else left if left < ranks else 0)


def test_a_size_changes_in_the_middle_of_an_epoch_at_a_batch() -> None:
    plan = MilestoneBatchSizeConfig(milestones="0:30 100:50", unit="samples").bind()
    found = phases(plan, samples=200, epochs=1)
    # 30, 30, 30, 30 (begun at 90, before 100), then 50 and the 30 that are left
    assert [(phase.size, phase.updates, phase.samples) for phase in found] == [(30, 4, 120), (50, 2, 80)]
    assert found[1].begins == Progress(epoch=0, step=4, samples=120)
    assert [phase.short_batches for phase in found] == [0, 1]


def test_a_trillion_samples_are_followed_at_once() -> None:
    plan = load_schedule("0:768 250B:1536 500B:3072 tokens").bind(tokens_per_sample=2048)  # type: ignore[union-attr]
    found = phases(plan, samples=10**9, epochs=1)
    assert [phase.size for phase in found] == [768, 1536, 3072]
    assert sum(phase.samples for phase in found) == 10**9


def test_a_constant_size() -> None:
    (phase,) = phases(BoundPlan(Constant(), 64), samples=100, epochs=3)
    assert (phase.size, phase.updates, phase.samples, phase.short_batches) == (64, 6, 300, 3)


@pytest.mark.parametrize("wrong", [{"samples": 0}, {"epochs": 0}, {"samples": 2.5}])
def test_a_run_without_anything(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be a positive integer, not"):
        phases(BoundPlan(Constant(), 64), **{"samples": 10, "epochs": 1, **wrong})


class TestIncreases:
    def increases(self, function: Any, **keywords: Any) -> Increases:
        return Increases(function, 100, **{"cap": 200, "clamp": False, **keywords})

    def test_each_epoch_is_asked_once_in_order(self) -> None:
        asked = []

        def double(epoch: int, size: int) -> int:
            asked.append((epoch, size))
            return size if epoch == 1 else 0

        plan = self.increases(double)
        assert [plan.size_at(Progress(epoch=e)) for e in (3, 0, 1, 3, 2)] == [200, 100, 200, 200, 200]
        assert asked == [(0, 100), (1, 100), (2, 200), (3, 200)]

    def test_an_increase_past_what_fits_is_left_out(self) -> None:
        """`if increase_value and increase_value + batch_size <= max_batch_size`"""
        plan = self.increases(lambda epoch, size: 60)
        assert [plan.size_at(Progress(epoch=e)) for e in range(4)] == [160, 160, 160, 160]
        assert plan.at_epoch(0).why == ""
        assert plan.at_epoch(1).why == "an increase by 60 to 220 is more than the limit of 200"

    def test_or_goes_to_the_limit(self) -> None:
        plan = self.increases(lambda epoch, size: 60, clamp=True)
        assert [plan.size_at(Progress(epoch=e)) for e in range(4)] == [160, 200, 200, 200]
        assert self.increases(lambda e, s: 140, clamp=True, multiple_of=64).size_at(Progress()) == 192

    def test_it_may_fall_but_not_below_the_ranks(self) -> None:
        plan = self.increases(lambda epoch, size: -40, world_size=8)
        assert [plan.size_at(Progress(epoch=e)) for e in range(2)] == [60, 20]
        with pytest.raises(
            ValueError, match=r"no rank without a sample: it wants a batch of -20 for 8 ranks"
        ):
            plan.size_at(Progress(epoch=2))

    def test_what_is_kept_grows_with_the_changes_and_not_with_the_epochs(self) -> None:
        asked = []

        def grow(epoch: int, size: int) -> int:
            asked.append(epoch)
            return 50 if epoch in (10, 20_000) else epoch * 1000 if epoch > 20_000 else 0

        plan = self.increases(grow)
        assert plan.size_at(Progress(epoch=49_999)) == 200
        assert plan.runs(before_epoch=50_000) == [[10, 100], [19_990, 150], [30_000, 200]]
        assert plan.runs(before_epoch=15) == [[10, 100], [5, 150]]
        assert "is more than the limit" in plan.at_epoch(49_999).why
        assert len(pickle.dumps(plan._reasons)) < 10_000
        again = self.increases(grow)
        again.restore(plan.runs(before_epoch=50_000))
        asked.clear()
        assert [again.size_at(Progress(epoch=e)) for e in (9, 10, 19_999, 20_000, 49_999)] == [
            *(100, 150, 150, 200, 200)
        ]
        assert not asked
        assert again.size_at(Progress(epoch=50_000)) == 200
        assert asked == [50_000]

    def test_a_size_that_changes_every_epoch_keeps_a_bounded_state(self) -> None:
        def grow(epoch: int, size: int) -> int:
            return 1

        plan = self.increases(grow, cap=None)
        last = 100_000
        assert plan.size_at(Progress(epoch=last)) == 100 + last + 1
        state = plan.runs(before_epoch=last + 1)
        assert len(json.dumps(state)) < 20_000
        assert sum(count for count, _ in state) == last + 1
        again = self.increases(grow, cap=None)
        again.restore(state)
        for one in (plan, again):
            assert [one.size_at(Progress(epoch=e)) for e in (last - 1000, last, last + 5)] == [
                *(last - 899, last + 101, last + 106)
            ]
            with pytest.raises(
                ValueError, match=r"epoch must be at least 98,?\d+, not 3: only the last 1,024"
            ):
                one.size_at(Progress(epoch=3))

    def test_a_checkpoint_of_before_has_a_size_for_each_epoch(self) -> None:
        plan = self.increases(lambda epoch, size: 10)
        plan.restore([110, 110, 130])
        assert [plan.size_at(Progress(epoch=e)) for e in range(4)] == [110, 110, 130, 140]
        assert plan.runs(before_epoch=3) == [[2, 110], [1, 130]]

    def test_a_checkpoint_goes_on(self) -> None:
        plan = self.increases(lambda epoch, size: 10)
        plan.size_at(Progress(epoch=5))
        again = self.increases(lambda epoch, size: 10)
        again.restore(plan.runs(before_epoch=4))
        assert [again.size_at(Progress(epoch=e)) for e in range(7)] == [110, 120, 130, 140, 150, 160, 170]

    @quick
    @given(st.lists(st.integers(-50, 120), min_size=1, max_size=20), st.booleans(), st.integers(1, 9))
    def test_the_limit_holds_whatever_is_asked(self, wanted: list[int], clamp: bool, multiple: int) -> None:
        plan = self.increases(
            lambda epoch, size: max(wanted[epoch], 1 - size), clamp=clamp, multiple_of=multiple
        )
        for epoch in range(len(wanted)):
            size = plan.size_at(Progress(epoch=epoch))
            assert 1 <= size <= 200
            assert size % multiple == 0


class TestRules:
    @pytest.mark.parametrize(
        ("rule", "factor"),
        [
            ("none", 1.0),
            ("linear", 4.0),
            ("sqrt", 2.0),
            ("seesaw", 0.5),
            ("power(0.25)", 2**0.5),
            ("Power( 1 )", 4.0),
        ],
    )
    def test_factors_at_four_times_the_batch(self, rule: str, factor: float) -> None:
        assert LRRule.parse(rule).factor(4.0) == pytest.approx(factor, rel=1e-15)

    @pytest.mark.parametrize("wrong", ["cubic", "power", "power()", "power(x)", 0.5, None, True, ["sqrt"]])
    def test_what_is_no_rule(self, wrong: object) -> None:
        with pytest.raises(ValueError, match="lr must be 'none', 'linear', 'sqrt', 'seesaw' or 'power"):
            LRRule.parse(wrong)


def test_events_print_the_line_of_the_document() -> None:
    event = ScheduleEvent("changed", 256, 512, Progress(epoch=20), "as planned")
    assert str(event) == "Epoch 20: Updating batch size from 256 to 512"
    event = ScheduleEvent("changed", 256, 512, Progress(samples=4096), "as planned", unit="samples")
    assert str(event) == "Sample 4096: Updating batch size from 256 to 512"
    event = ScheduleEvent("skipped", 256, 256, Progress(epoch=3), "too much")
    assert str(event) == "Epoch 3: batch size stays 256: too much"
