"""Schedules as values: every table of the document they come from, formulas, texts, files, bad input."""

from __future__ import annotations

import json
import math
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

import batchfit
from batchfit import (
    CosineBatchSizeConfig,
    CustomBatchSizeConfig,
    ExponentialBatchSizeConfig,
    IncreaseBatchSizeConfig,
    LinearBatchSizeConfig,
    MilestoneBatchSizeConfig,
    NoiseBatchSizeConfig,
    StepBatchSizeConfig,
    load_schedule,
)
from batchfit._loader.pure.progress import Progress
from batchfit._schedule.pure.bound_plan import BoundPlan
from batchfit._units import parse_count, round_size
from batchfit.schedules import BatchSizeSchedule

quick = examples(150)


def at(**counts: int) -> Progress:
    return Progress(**counts)


def grow_a_little(progress: Progress) -> int:
    """A schedule's function that can be imported."""
    return 32 + progress.epoch


def add_in_epoch_two(epoch: int, current_batch_size: int) -> int:
    return 8 if epoch == 2 else 0


class TestStep:
    @pytest.mark.parametrize(
        ("config", "initial", "table"),
        [
            (
                (20, 2, 2048),
                256,
                {
                    0: 256,
                    19: 256,
                    20: 512,
                    39: 512,
                    40: 1024,
                    59: 1024,
                    60: 2048,
                    79: 2048,
                    80: 2048,
                    999: 2048,
                },
            ),
            ((10, 2, 1024), 128, {0: 128, 9: 128, 10: 256, 19: 256, 20: 512, 29: 512, 30: 1024, 49: 1024}),
            ((15, 4, 4096), 64, {0: 64, 14: 64, 15: 256, 29: 256, 30: 1024, 44: 1024, 45: 4096, 59: 4096}),
            ((25, 2, None), 128, {0: 128, 24: 128, 25: 256, 50: 512, 75: 1024, 99: 1024}),
            ((3, 2, None), 256, {0: 256, 2: 256, 3: 512, 6: 1024, 9: 2048}),
        ],
    )
    def test_the_tables(
        self, config: tuple[int, int, int | None], initial: int, table: dict[int, int]
    ) -> None:
        step_size, gamma, most = config
        schedule = StepBatchSizeConfig(step_size=step_size, gamma=gamma, max_batch_size=most)
        plan = schedule.bind(initial)
        for epoch, size in table.items():
            assert schedule.size_at(at(epoch=epoch), initial) == size == plan.size_at(at(epoch=epoch))

    @quick
    @given(
        st.integers(1, 50),
        st.integers(2, 8),
        st.none() | st.integers(1, 10**6),
        st.integers(1, 4096),
        st.integers(0, 200),
    )
    def test_the_formula(
        self, step_size: int, gamma: int, most: int | None, initial: int, epoch: int
    ) -> None:
        config = StepBatchSizeConfig(step_size=step_size, gamma=gamma, max_batch_size=most)
        exact = initial * gamma ** (epoch // step_size)
        if most is None and exact > 2**48:
            with pytest.raises(ValueError, match="max_batch_size must be set"):
                config.size_at(at(epoch=epoch), initial)
        else:
            assert config.size_at(at(epoch=epoch), initial) == min(exact, most or exact)

    def test_a_very_long_run_costs_no_huge_numbers(self) -> None:
        config = StepBatchSizeConfig(step_size=1, gamma=7, max_batch_size=4096, unit="tokens")
        assert config.size_at(at(tokens=10**15), 3) == 4096

    def test_it_is_the_documents_type(self) -> None:
        config = StepBatchSizeConfig(step_size=20, gamma=2, max_batch_size=2048)
        assert (config.type, config.step_size, config.gamma, config.max_batch_size) == ("step", 20, 2, 2048)
        assert StepBatchSizeConfig(step_size=20, gamma=2).max_batch_size is None
        with pytest.raises(ValidationError, match="frozen"):
            config.gamma = 3  # type: ignore[misc]

    def test_in_a_model_of_ones_own(self) -> None:
        class TrainingHyperParams(BaseModel):
            batch_size: int
            batch_size_scheduler: BatchSizeSchedule | None = None

        reported = {"batch_size": 256, "batch_size_scheduler": {"type": "step", "step_size": 20, "gamma": 2}}
        params = TrainingHyperParams.model_validate(reported)
        assert params.batch_size_scheduler == StepBatchSizeConfig(step_size=20, gamma=2)
        assert TrainingHyperParams.model_validate_json(params.model_dump_json()) == params
        reported["batch_size_scheduler"] = {"type": "step", "step_size": 20, "gamma": 1}
        with pytest.raises(ValidationError, match="gamma must be at least 2, not 1"):
            TrainingHyperParams.model_validate(reported)


SMOOTH = {
    LinearBatchSizeConfig: lambda a, b, t: a + (b - a) * t,
    ExponentialBatchSizeConfig: lambda a, b, t: a * (b / a) ** t,
    CosineBatchSizeConfig: lambda a, b, t: a + (b - a) * (1 - math.cos(math.pi * t)) / 2,
}


class TestSmooth:
    @pytest.mark.parametrize(
        ("kind", "sizes"),
        [
            (LinearBatchSizeConfig, {0: 100, 1: 150, 5: 350, 9: 550, 10: 600, 50: 600}),
            (ExponentialBatchSizeConfig, {0: 100, 5: 244, 10: 600, 11: 600}),
            (CosineBatchSizeConfig, {0: 100, 2: 147, 5: 350, 8: 552, 10: 600}),
        ],
    )
    def test_values(self, kind: Any, sizes: dict[int, int]) -> None:
        config = kind(final_batch_size=600, over=10)
        assert {epoch: config.size_at(at(epoch=epoch), 100) for epoch in sizes} == sizes

    @quick
    @given(
        st.sampled_from(list(SMOOTH)),
        st.integers(1, 5000),
        st.integers(1, 5000),
        st.integers(1, 300),
        st.integers(0, 50),
        st.none() | st.integers(1, 60),
        st.integers(0, 400),
    )
    def test_the_formulas(
        self, kind: Any, initial: int, final: int, over: int, start: int, every: int | None, now: int
    ) -> None:
        config = kind(final_batch_size=final, over=over, start=start, every=every, unit="step")
        size = config.size_at(at(step=now), initial)
        done = min(max(now - start, 0), over)
        if every is not None and done < over:
            done = done // every * every
        exact = SMOOTH[kind](initial, final, done / over)
        assert exact - 1 - 1e-6 < size <= exact + 1e-6 * exact
        assert min(initial, final) <= size <= max(initial, final)
        if now >= start + over:
            assert size == final

    def test_stairs_change_only_where_they_should(self) -> None:
        config = LinearBatchSizeConfig(final_batch_size=512, over=100, every=25, unit="step")
        sizes = [config.size_at(at(step=step), 256) for step in range(120)]
        assert sizes == [256] * 25 + [320] * 25 + [384] * 25 + [448] * 25 + [512] * 20

    def test_it_may_fall(self) -> None:
        config = ExponentialBatchSizeConfig(final_batch_size=64, over=4)
        assert [config.size_at(at(epoch=e), 1024) for e in range(6)] == [1024, 512, 256, 128, 64, 64]


class TestMilestones:
    @pytest.mark.parametrize(
        "given",
        [
            "0:256 20:512",
            " 0:256, 20:512 ",
            {0: 256, 20: 512},
            [(0, 256), (20, 512)],
            [["0", 256], ["20", "512"]],
        ],
    )
    def test_ways_to_write_them(self, given: Any) -> None:
        config = MilestoneBatchSizeConfig(milestones=given)
        assert config.milestones == ((0, 256), (20, 512))
        assert [config.size_at(at(epoch=e), 256) for e in (0, 19, 20, 99)] == [256, 256, 512, 512]
        assert config.bind().initial_batch_size == 256

    def test_tokens(self) -> None:
        config = MilestoneBatchSizeConfig(milestones="0:768 250B:1536 500B:3072", unit="tokens")
        assert config == load_schedule("0:768 250B:1536 500B:3072 tokens")
        sizes = [config.size_at(at(tokens=n), 768) for n in (0, 250 * 10**9 - 1, 250 * 10**9, 5 * 10**11)]
        assert sizes == [768, 768, 1536, 3072]
        with pytest.raises(ValueError, match="tokens must be counted"):
            config.size_at(at(samples=5), 768)
        assert config.bind(tokens_per_sample=10**9).size_at(at(samples=250)) == 1536

    def test_before_the_first_it_is_the_initial_size(self) -> None:
        config = MilestoneBatchSizeConfig(milestones="10:512")
        assert [config.bind(64).size_at(at(epoch=e)) for e in (0, 9, 10)] == [64, 64, 512]
        with pytest.raises(ValueError, match="initial_batch_size must be a positive integer, not None"):
            config.bind()

    def test_two_sizes_for_the_beginning_are_an_error(self) -> None:
        with pytest.raises(
            ValueError, match="initial_batch_size must be 256, which milestones says at 0, not 128"
        ):
            MilestoneBatchSizeConfig(milestones="0:256 20:512").bind(128)

    @quick
    @given(st.dictionaries(st.integers(0, 500), st.integers(1, 9999), min_size=1), st.integers(0, 600))
    def test_it_is_the_last_that_was_passed(self, sizes: dict[int, int], now: int) -> None:
        config = MilestoneBatchSizeConfig(milestones=sorted(sizes.items()), unit="samples")
        passed = [size for count, size in sorted(sizes.items()) if count <= now]
        assert config.size_at(at(samples=now), 7) == (passed[-1] if passed else 7)
        text = " ".join(f"{count}:{size}" for count, size in sorted(sizes.items()))
        assert load_schedule(text + " samples") == config


class TestSeesaw:
    def test_the_papers_share_of_updates(self) -> None:
        """1 - 2/pi = 36.3 % fewer steps, in the limit of many small stairs (arXiv 2510.14717)."""
        saved = [_saved(ratio, "quarter-cosine") for ratio in (2.0, 1.2, 1.02, 1.002)]
        assert saved == sorted(saved)
        assert saved[-1] == pytest.approx(1 - 2 / math.pi, abs=2e-3)
        assert saved[0] == pytest.approx(0.220, abs=2e-3)  # what doubling gives: fewer, larger stairs
        assert _saved(1.002, "cosine") == pytest.approx(0.5, abs=2e-3)

    def test_doubling_where_the_cosine_has_halved(self) -> None:
        config = MilestoneBatchSizeConfig.seesaw(256, decay="quarter-cosine", total=900, max_batch_size=1024)
        assert config.milestones == ((0, 256), (600, 512), (756, 1024))  # acos(1/2), acos(1/4)
        half = MilestoneBatchSizeConfig.seesaw(256, decay="cosine", total=900, max_batch_size=1024)
        assert half.milestones == ((0, 256), (450, 512), (600, 1024))

    def test_instead_of_steps_down(self) -> None:
        config = MilestoneBatchSizeConfig.seesaw(128, decay={60: 0.2, 120: 0.2, 160: 0.2})
        assert config.milestones == ((0, 128), (60, 640), (120, 3200), (160, 16000))
        capped = MilestoneBatchSizeConfig.seesaw(640, decay={60: 0.2, 120: 0.2}, max_batch_size=5120)
        assert capped.milestones == ((0, 640), (60, 3200), (120, 5120))

    @pytest.mark.parametrize(
        ("keywords", "words"),
        [
            ({"decay": "linear", "total": 9}, "decay must be 'cosine', 'quarter-cosine' or cuts"),
            ({"decay": "cosine"}, "total must be given"),
            ({"decay": "cosine", "total": 9, "ratio": 1.0}, "ratio must be more than 1, not 1.0"),
            ({"decay": "cosine", "total": 9, "ratio": "2"}, "ratio must be more than 1, not '2'"),
            ({"decay": 0.5, "total": 9}, "decay must be 'cosine', .* such as {60: 0.2}, not 0.5"),
            ({"decay": {60: 0.5}, "multiple_of": 0}, "multiple_of must be a positive integer, not 0"),
            ({"decay": {60: 0.5}, "max_batch_size": 99}, "max_batch_size must be at least .* 256, not 99"),
            ({"decay": {60: 2.0}}, "decay must cut by factors between 0 and 1, not 2.0 at 60"),
            ({"decay": {0: 0.5}}, "the count of a cut must be a positive integer, not 0"),
            ({"decay": {60: 0.5, 20: 0.5}}, "milestones must be in increasing order, not 20 after 60"),
        ],
    )
    def test_bad_input(self, keywords: dict[str, Any], words: str) -> None:
        with pytest.raises(ValueError, match=words):
            MilestoneBatchSizeConfig.seesaw(256, **keywords)


def _saved(ratio: float, decay: Any) -> float:
    total, initial = 10**7, 10**5
    config = MilestoneBatchSizeConfig.seesaw(
        initial, decay=decay, total=total, ratio=ratio, unit="samples", max_batch_size=10**9
    )
    ends = [count for count, _ in config.milestones[1:]] + [total]
    steps = sum((end - count) / size for (count, size), end in zip(config.milestones, ends, strict=True))
    return 1 - steps * initial / total


class TestFunctions:
    def test_custom_by_callable_and_by_path(self) -> None:
        def doubled(progress: Progress) -> int:
            return 8 * (1 + progress.step // 10)

        assert CustomBatchSizeConfig(function=doubled).size_at(at(step=25), 1) == 24
        config = CustomBatchSizeConfig(function=f"{__name__}:grow_a_little")
        assert config.size_at(at(epoch=3), 1) == 35
        assert load_schedule(json.loads(config.to_json())) == config
        named = CustomBatchSizeConfig(function=grow_a_little)
        assert json.loads(named.to_json())["function"] == f"{__name__}:grow_a_little"

    def test_custom_is_capped_and_rounded(self) -> None:
        config = CustomBatchSizeConfig(
            function=lambda p: 100 * (1 + p.epoch), max_batch_size=250, multiple_of=32
        )
        assert [config.size_at(at(epoch=e), 1) for e in range(4)] == [96, 192, 224, 224]

    @pytest.mark.parametrize("wrong", [2.5, 0, -3, True, None, "64", float("nan")])
    def test_what_custom_returns_is_checked(self, wrong: object) -> None:
        config = CustomBatchSizeConfig(function=lambda progress: wrong)
        with pytest.raises(ValueError, match=r"function returns at epoch 7 must be a positive integer, not "):
            config.size_at(at(epoch=7), 1)

    def test_what_it_raises_comes_out_with_a_note(self) -> None:
        config = CustomBatchSizeConfig(function=lambda progress: 1 // 0)
        with pytest.raises(ZeroDivisionError) as caught:
            config.size_at(at(epoch=7), 1)
        assert caught.value.__notes__ == ["batchfit: raised by the schedule's function at epoch 7"]

    def test_increase_is_seed_000s(self) -> None:
        config = IncreaseBatchSizeConfig(function=add_in_epoch_two)
        assert [config.increase(epoch, 64) for epoch in range(4)] == [0, 0, 8, 0]

    @pytest.mark.parametrize(
        ("wrong", "words"),
        [
            (0.5, "the increase that function returns at epoch 3, batch size 8 must be an integer, not 0.5"),
            (-8, r"must leave a positive batch size, not -8 \(a total of 0\)"),
            (-9, r"must leave a positive batch size, not -9 \(a total of -1\)"),
            (None, "must be an integer, not None"),
        ],
    )
    def test_what_increase_returns_is_checked(self, wrong: object, words: str) -> None:
        with pytest.raises(ValueError, match=words):
            IncreaseBatchSizeConfig(function=lambda epoch, size: wrong).increase(3, 8)

    @pytest.mark.parametrize(
        ("path", "words"),
        [
            ("no_such_module_of_ours:f", "there is no module 'no_such_module_of_ours'"),
            ("math:nothing", "'math' has no 'nothing'"),
            ("math:pi", "which is a float"),
        ],
    )
    def test_a_path_that_leads_nowhere(self, path: str, words: str) -> None:
        with pytest.raises(ValueError, match=words):
            CustomBatchSizeConfig(function=path).size_at(at(), 1)

    def test_a_lambda_cannot_be_written_to_a_file(self) -> None:
        with pytest.raises(ValueError, match="function must be importable to be written to a file"):
            IncreaseBatchSizeConfig(function=lambda epoch, size: 0).to_json()


class TestNoise:
    def test_candidates(self) -> None:
        assert NoiseBatchSizeConfig(max_batch_size=1024).candidates(96, None) == (
            3,
            6,
            12,
            24,
            48,
            96,
            192,
            384,
            768,
        )
        limited = NoiseBatchSizeConfig(min_batch_size=48, ratio=4)
        assert limited.candidates(192, 5000) == (48, 192, 768, 3072)
        assert NoiseBatchSizeConfig(can_shrink=False).candidates(64, 200) == (64, 128)


STEP = {"type": "step", "step_size": 2, "gamma": 2}


class TestBadInput:
    @pytest.mark.parametrize(
        ("data", "words"),
        [
            ({"type": "step", "step_size": 20, "gamma": 1}, "gamma must be at least 2, not 1"),
            ({"type": "step", "step_size": 20, "gamma": 2.5}, "gamma must be an integer, not 2.5"),
            ({"type": "step", "step_size": 20, "gamma": True}, "gamma must be an integer, not True"),
            ({"type": "step", "step_size": 0, "gamma": 2}, "step_size must be a positive integer, not 0"),
            ({"type": "step", "step_size": -3, "gamma": 2}, "step_size must be a positive integer, not -3"),
            ({"type": "step", "step_size": "often", "gamma": 2}, "step_size must be a whole number or text"),
            ({"type": "step", "gamma": 2}, "step_size must be given to a StepBatchSizeConfig"),
            ({**STEP, "max_batch_size": 0}, "max_batch_size must be a positive integer, not 0"),
            ({**STEP, "unit": "epochs"}, "unit must be 'epoch', 'step', 'samples' or 'tokens', not 'epochs'"),
            ({**STEP, "rounding": "off"}, "rounding must be 'down', 'up' or 'nearest', not 'off'"),
            ({**STEP, "multiple_of": 0}, "multiple_of must be a positive integer, not 0"),
            ({**STEP, "step": 3}, "step must be a field of StepBatchSizeConfig"),
            ({"type": "linear", "final_batch_size": 9, "over": 0}, "over must be a positive integer, not 0"),
            (
                {"type": "linear", "final_batch_size": 9, "over": 3, "max_batch_size": 8},
                "final_batch_size must be at most max_batch_size 8, not 9",
            ),
            (
                {"type": "cosine", "final_batch_size": 9, "over": 3, "every": 0},
                "every must be a positive integer, not 0",
            ),
            (
                {"type": "exponential", "final_batch_size": 9, "over": 3, "start": -1},
                "start must be 0 or more, not -1",
            ),
            (
                {"type": "milestone", "milestones": "20:64 10:128"},
                "milestones must be in increasing order, not 10 after 20",
            ),
            (
                {"type": "milestone", "milestones": "20:64 20:128"},
                "milestones must be in increasing order, not 20 after 20",
            ),
            (
                {"type": "milestone", "milestones": {0: 0}},
                "the size of a milestone must be a positive integer, not 0",
            ),
            (
                {"type": "milestone", "milestones": "0:64 x:128"},
                "the count of a milestone must be a whole number or text",
            ),
            ({"type": "milestone", "milestones": "0:64:2"}, "milestones must be text or a mapping"),
            ({"type": "milestone", "milestones": 64}, "milestones must be text or a mapping"),
            ({"type": "milestone", "milestones": {}}, "milestones must hold at least one"),
            (
                {"type": "milestone", "milestones": "0:64 10:2048", "max_batch_size": 512},
                "milestones must be at most max_batch_size 512, not 2048 at 10",
            ),
            ({"type": "milestone", "milestones": "0:64 250B:128"}, "unit must be given"),
            (
                {"type": "milestone", "milestones": "0:64 250B:128 token"},
                "unit must be one of 'epoch', 'step', 'samples', 'tokens', not 'token'",
            ),
            (
                {"type": "milestone", "milestones": "0:64 tokens", "unit": "samples"},
                "unit must be 'tokens', which milestones ends with, not 'samples'",
            ),
            ({"type": "custom", "function": 3}, "function must be a callable or an import path"),
            ({"type": "custom", "function": "no colon"}, "function must be a callable or an import path"),
            (
                {"type": "increase", "function": "a:b", "clamp": "perhaps"},
                "clamp must be true or false, not 'perhaps'",
            ),
            ({"type": "noise", "ratio": 1}, "ratio must be at least 2, not 1"),
            ({"type": "noise", "hysteresis": -1}, "hysteresis must be more than 0, not -1"),
            (
                {"type": "noise", "min_batch_size": 9, "max_batch_size": 8},
                "min_batch_size must be at most max_batch_size 8, not 9",
            ),
            ({"type": "stairs"}, "type must be one of 'step', .*, not 'stairs'"),
            ({"step_size": 2, "gamma": 2}, "type must be given"),
        ],
    )
    def test_names_field_and_value(self, data: dict[str, Any], words: str) -> None:
        with pytest.raises(ValueError, match=words) as caught:
            load_schedule(data)
        assert isinstance(caught.value, ValidationError)  # as seed 003 has it
        assert "\n" not in str(caught.value)
        assert repr(caught.value) == f"WrongScheduleError({str(caught.value)!r})"

    def test_the_constructor_says_the_same(self) -> None:
        with pytest.raises(ValueError, match=r"^gamma must be at least 2, not 1$") as caught:
            StepBatchSizeConfig(step_size=20, gamma=1)
        error = caught.value
        assert isinstance(error, ValidationError)
        assert [one["loc"] for one in error.errors()] == [("gamma",)]
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again)) == (type(error), str(error))

    def test_every_wrong_field_is_among_the_errors_and_a_model_around_it_says_so_too(self) -> None:
        with pytest.raises(ValidationError) as caught:
            StepBatchSizeConfig(step_size=0, gamma=1)
        assert str(caught.value) == "step_size must be a positive integer, not 0"
        texts = [str(one["ctx"]["error"]) for one in caught.value.errors()]
        assert texts == ["step_size must be a positive integer, not 0", "gamma must be at least 2, not 1"]

        class Training(BaseModel):
            schedule: BatchSizeSchedule

        with pytest.raises(ValidationError, match="gamma must be at least 2, not 1"):
            Training.model_validate({"schedule": {"type": "step", "step_size": 2, "gamma": 1}})

    @pytest.mark.parametrize(
        ("keywords", "words"),
        [
            ({"initial_batch_size": 0}, "initial_batch_size must be a positive integer, not 0"),
            ({"initial_batch_size": 2.0}, "initial_batch_size must be a positive integer, not 2.0"),
            (
                {"initial_batch_size": 4096},
                "max_batch_size must be at least the initial batch size 4096, not 2048",
            ),
            (
                {"initial_batch_size": 256, "largest": 128},
                "largest must be at least the initial batch size 256, not 128",
            ),
            (
                {"initial_batch_size": 4, "world_size": 8},
                "initial_batch_size must be at least 8, so that no rank of 8",
            ),
            (
                {"initial_batch_size": 8, "multiple_of": 4096},
                "max_batch_size must be at least 4096, what sizes are a multiple of, not 2048",
            ),
        ],
    )
    def test_what_a_run_cannot_have(self, keywords: dict[str, Any], words: str) -> None:
        with pytest.raises(ValueError, match=words):
            StepBatchSizeConfig(step_size=20, gamma=2, max_batch_size=2048).bind(**keywords)

    def test_a_rank_without_a_sample_is_reported_before_training(self) -> None:
        falls = LinearBatchSizeConfig(final_batch_size=4, over=10)
        with pytest.raises(
            ValueError, match=r"final_batch_size must be at least 8, so that no rank of 8 .*, not 4"
        ):
            falls.bind(64, world_size=8)
        with pytest.raises(ValueError, match="milestones must be at least 8"):
            MilestoneBatchSizeConfig(milestones="0:64 10:4").bind(world_size=8)
        plan = CustomBatchSizeConfig(function=lambda p: 4).bind(64, world_size=8)  # nobody can know
        with pytest.raises(
            ValueError, match="leave no rank without a sample: it wants a batch of 4 for 8 ranks"
        ):
            plan.size_at(at())


class TestRounding:
    @quick
    @given(st.integers(1, 10**12), st.integers(1, 4096))
    def test_whole_numbers(self, value: int, multiple: int) -> None:
        down = round_size(value, multiple_of=multiple)
        up = round_size(value, multiple_of=multiple, rounding="up")
        near = round_size(value, multiple_of=multiple, rounding="nearest")
        assert down % multiple == up % multiple == near % multiple == 0
        assert down >= multiple
        assert up - multiple < value <= up
        assert down <= value or down == multiple
        assert near in (down, up)
        assert abs(near - value) <= multiple / 2 or near == multiple

    def test_a_formula_in_floats_is_not_one_short(self) -> None:
        assert round_size(511.9999999999) == 512
        assert round_size(512.0000000001, rounding="up") == 512
        assert round_size(511.9) == 511

    @quick
    @given(
        st.integers(1, 5000),
        st.integers(0, 300),
        st.integers(1, 64),
        st.sampled_from(["down", "up", "nearest"]),
        st.integers(1, 4),
        st.none() | st.integers(5000, 9000),
    )
    def test_caps_come_first(
        self, initial: int, epoch: int, multiple: int, rounding: Any, ranks: int, largest: int | None
    ) -> None:
        config = LinearBatchSizeConfig(
            final_batch_size=9001, over=200, multiple_of=multiple, rounding=rounding
        )
        initial = max(initial, ranks)
        plan = config.bind(initial, largest=largest, world_size=ranks, multiple_of=ranks)
        size = plan.size_at(at(epoch=epoch))
        assert size % math.lcm(multiple, ranks) == 0
        assert size >= ranks
        assert largest is None or size <= largest

    def test_what_a_limit_did_is_said(self) -> None:
        plan = StepBatchSizeConfig(step_size=10, gamma=2).bind(256, largest=600)
        assert plan.limited_at(at(epoch=0)) == ""
        assert plan.limited_at(at(epoch=20)) == "the schedule wants 1024, and the largest that fits is 600"
        rounded = StepBatchSizeConfig(step_size=10, gamma=2).bind(250, multiple_of=64)
        assert rounded.size_at(at()) == 192
        assert rounded.limited_at(at()) == "250 is rounded down to a multiple of 64"


class TestCounts:
    @pytest.mark.parametrize(
        ("text", "count"),
        [
            ("250B", 250 * 10**9),
            ("1.5M", 1_500_000),
            ("10k", 10_000),
            ("2T", 2 * 10**12),
            ("1e9", 10**9),
            ("1_000", 1000),
            (" 7 ", 7),
            (7, 7),
        ],
    )
    def test_texts(self, text: Any, count: int) -> None:
        assert parse_count(text, name="over") == count

    @pytest.mark.parametrize(
        "text", ["", "k", "1.5", "-3", "3 4", "1.0001k", "10 kB", "inf", 1.5, None, True, [1]]
    )
    def test_what_is_no_count(self, text: Any) -> None:
        with pytest.raises(ValueError, match="over must be "):
            parse_count(text, name="over")

    @quick
    @given(st.integers(0, 10**6), st.sampled_from([("k", 3), ("M", 6), ("B", 9), ("T", 12), ("", 0)]))
    def test_suffixes_are_exact(self, count: int, suffix: tuple[str, int]) -> None:
        name, zeros = suffix
        assert parse_count(f"{count}{name}", name="x") == count * 10**zeros
        if zeros:
            assert parse_count(f"{count / 10:.1f}{name}", name="x") == count * 10**zeros // 10


EVERY_KIND = [
    StepBatchSizeConfig(step_size=20, gamma=2, max_batch_size=2048),
    LinearBatchSizeConfig(final_batch_size=64, over="10k", unit="samples", every=100),
    ExponentialBatchSizeConfig(final_batch_size=64, over=10, start=5),
    CosineBatchSizeConfig(final_batch_size=64, over=10, multiple_of=8, rounding="nearest"),
    MilestoneBatchSizeConfig(milestones="0:256 20:512"),
    CustomBatchSizeConfig(function=grow_a_little, unit="step"),
    IncreaseBatchSizeConfig(function=add_in_epoch_two, clamp=True),
    NoiseBatchSizeConfig(max_batch_size=512),
]


class TestFiles:
    @pytest.mark.parametrize("config", EVERY_KIND, ids=lambda config: config.type)
    def test_both_ways(self, config: Any, tmp_path: Path) -> None:
        file = tmp_path / "s.json"
        file.write_text(config.to_json())
        again = load_schedule(file)
        assert type(again) is type(config)
        assert again.to_json() == config.to_json()  # type: ignore[union-attr]
        assert (
            type(config).from_file(file)
            == again
            == load_schedule(str(file))
            == load_schedule(config.to_json())
        )

    def test_yaml(self, tmp_path: Path) -> None:
        pytest.importorskip("yaml")
        file = tmp_path / "s.yaml"
        file.write_text("type: milestone\nunit: tokens\nmilestones:\n  0: 768\n  250B: 1536\n")
        assert load_schedule(file) == load_schedule("0:768 250B:1536 tokens")
        file.write_text("type: milestone\nmilestones: 0:256 20:512\n")
        assert load_schedule(str(file)) == load_schedule("0:256 20:512")
        file.write_text("type: [")
        with pytest.raises(ValueError, match=r"s.yaml' must be YAML, and is not"):
            load_schedule(file)

    def test_yaml_without_the_package(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "yaml", None)
        file = tmp_path / "s.yml"
        file.write_text("type: step")
        with pytest.raises(ValueError, match=r"batchfit\[yaml\].* to read .*s.yml', or write it as JSON"):
            load_schedule(file)

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("{", "must be JSON, and is not: "),
            ("[1]", "must hold a mapping of fields, not "),
            ('{"type": "step", "gamma": 1, "step_size": 1}', "gamma must be at least 2, not 1"),
        ],
    )
    def test_wrong_files(self, text: str, words: str, tmp_path: Path) -> None:
        file = tmp_path / "s.json"
        file.write_text(text)
        with pytest.raises(ValueError, match=words):
            load_schedule(file)

    def test_what_is_no_schedule(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"the file 'none.json' cannot be read: No such file"):
            load_schedule("none.json")
        with pytest.raises(ValueError, match=r"source must be a file .* not 'faster'"):
            load_schedule("faster")
        with pytest.raises(TypeError, match="source must be a file, text, a mapping or a schedule, not 3"):
            load_schedule(3)  # type: ignore[arg-type]
        file = tmp_path / "s.json"
        file.write_text(EVERY_KIND[0].to_json())
        with pytest.raises(ValueError, match="must hold a LinearBatchSizeConfig, not a StepBatchSizeConfig"):
            LinearBatchSizeConfig.from_file(file)

    def test_no_schedule_is_none(self) -> None:
        assert load_schedule(None) is None


def plans() -> Iterator[BoundPlan]:
    for config in EVERY_KIND[:6]:
        yield config.bind(256, tokens_per_sample=3)  # type: ignore[union-attr]


@pytest.mark.parametrize("plan", list(plans()), ids=lambda plan: plan.schedule.type)
def test_a_size_stays_as_long_as_it_says(plan: BoundPlan) -> None:
    """`steady_until` never promises too much: what it steps over has one size."""
    unit = plan.unit
    now = 0
    while now < 400:
        here = at(**{unit: now})
        until = plan.steady_until(here)
        assert until is None or until >= now
        stop = 400 if until is None else min(max(until, now + 1), 400)
        assert {plan.size_at(at(**{unit: count})) for count in range(now, stop)} == {plan.size_at(here)}
        now = stop


def test_the_public_names_are_these() -> None:
    assert {"BatchSizeScheduler", "ScheduleEvent", "load_schedule"} <= set(batchfit.__all__)
