"""`profile_throughput` on a CPU: real steps, planted times, faults at every point, planted bottlenecks."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.utils import flop_counter
from torch.utils.data import DataLoader, Dataset
from torch_private import dispatch_mode, dynamo, forward_hooks

import batchfit
from batchfit._engine.snapshot.snapshot import Snapshot
from batchfit._profile import bench, diagnosis, measuring, readings, timing
from batchfit._profile import profile as _profile
from batchfit._profile.measuring import Measuring
from batchfit._profile.model_inputs import watched_inputs
from batchfit._profile.pure.knee import Knee, Timed
from batchfit._profile.pure.steady import BRIEF, FINE, Timing
from batchfit._profile.readings import flops_of, loader_pace, union
from batchfit._profile.timing import run_timed
from batchfit.errors import NothingFitsError, SearchStoppedError
from batchfit.results import ThroughputPoint, ThroughputProfile
from batchfit.testing import FakeDevice, faulty, simulated_oom

MIB = 2**20


@pytest.fixture
def fake_time(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands still unless a step moves it: what is measured is then exact."""
    now = [0.0]
    for module in (timing, _profile, measuring, bench, diagnosis, readings):
        monkeypatch.setattr(module, "time", _Clock(now))
    return now


class _Clock:
    def __init__(self, now: list[float]) -> None:
        self._now = now

    def perf_counter(self) -> float:
        return self._now[0]

    monotonic = perf_counter


class Planted:
    """A step that takes the time and the memory that it is given, on a device without hardware."""

    def __init__(self, now: list[float], *, capacity: str = "1GiB", first_s: float = 0.0) -> None:
        self.now, self.first_s = now, first_s
        self.device = FakeDevice(capacity, peak=lambda size: 10 * MIB + size * MIB)
        self.sizes: list[int] = []

    def seconds(self, size: int) -> float:
        return 0.010 + 0.001 * size

    def __call__(self, size: int) -> None:
        new = size not in self.sizes
        self.sizes.append(size)
        self.device.step(size)
        self.now[0] += self.seconds(size) + (self.first_s if new else 0.0)

    def profile(self, **keywords: Any) -> ThroughputProfile:
        work = batchfit.Workload(self, state=())
        return batchfit.profile_throughput(work, device=self.device, **keywords)


def net() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    return model, torch.optim.AdamW(model.parameters())


def training(model: nn.Module, optimizer: torch.optim.Optimizer) -> batchfit.Workload:
    def make_batch(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(n, 16), torch.randint(0, 4, (n,))

    return batchfit.training(
        model, optimizer, lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]), make_batch
    )


# ---- the knee, with planted times


def test_the_recommended_size_was_timed_and_is_within_reach(fake_time: list[float]) -> None:
    planted = Planted(fake_time)
    reported: list[ThroughputPoint] = []
    profile = planted.profile(on_point=reported.append)
    best = max(size / planted.seconds(size) for size in range(1, 1000))
    chosen = profile.at(profile.recommended)
    assert chosen.samples_per_s == pytest.approx(chosen.size / planted.seconds(chosen.size))
    assert chosen.samples_per_s >= 0.95 * best * 0.99
    assert chosen.steps_timed >= FINE.least
    assert [point.size for point in profile.points] == sorted({point.size for point in reported})
    assert profile.largest <= (profile.limit or 0) <= 1014
    assert profile.stopped_because == "measured"
    assert profile.notes == ()
    assert [one.kind for one in profile.diagnosis] == ["compute-bound"]
    assert ThroughputProfile.from_json(profile.to_json()) == profile


def test_gains_are_those_of_a_doubling(fake_time: list[float]) -> None:
    planted = Planted(fake_time)
    profile = planted.profile(sizes=[8, 16, 32])
    assert profile.at(16).gain == pytest.approx(2 * planted.seconds(8) / planted.seconds(16))
    assert profile.at(8).gain is None


def test_first_steps_are_not_timed(fake_time: list[float]) -> None:
    planted = Planted(fake_time, first_s=30.0)
    point = planted.profile(sizes=[8]).at(8)
    assert point.step_s == pytest.approx(planted.seconds(8))
    assert point.first_step_s == pytest.approx(30 + planted.seconds(8))
    assert point.steps_warmed == 3


def test_memory_readings_keep_it_from_running_out(fake_time: list[float]) -> None:
    planted = Planted(fake_time, capacity="100MiB")
    planted.seconds = lambda size: 1.0  # type: ignore[method-assign]  # more is always better
    profile = planted.profile()
    assert profile.too_large == ()
    assert 80 <= profile.recommended <= 90
    assert [one.kind for one in profile.diagnosis] == ["memory-bound"]
    assert "memory ended" in profile.diagnosis[0].evidence


def test_what_is_held_between_steps_is_not_taken_to_grow(fake_time: list[float]) -> None:
    """A model that fills half of the memory: the second size need not be 2."""
    planted = Planted(fake_time)
    planted.device = FakeDevice("1GiB", peak=lambda size: (500 + 4 * size) * MIB)
    planted.device.hold(490 * MIB)
    reported: list[ThroughputPoint] = []
    profile = planted.profile(on_point=reported.append)
    assert reported[1].size >= 8
    assert profile.too_large == ()
    assert 100 <= (profile.limit or 0) <= 131


def test_a_size_that_is_out_of_memory_is_out(fake_time: list[float]) -> None:
    planted = Planted(fake_time, capacity="100MiB")
    profile = planted.profile(sizes=[64, 128, 32])
    assert profile.too_large == (128,)
    assert [point.size for point in profile.points] == [32, 64]
    assert "128" in str(profile)
    with pytest.raises(NothingFitsError, match="a batch of 128"):
        planted.profile(sizes=[128, 256])


def test_a_largest_size_is_kept_to(fake_time: list[float]) -> None:
    planted = Planted(fake_time)
    profile = planted.profile(largest=20)
    assert max(planted.sizes) <= 20
    assert profile.recommended == 20
    assert profile.bottlenecks == ()  # it was not memory that ended it


def test_a_smallest_size_is_begun_with(fake_time: list[float]) -> None:
    planted = Planted(fake_time)
    profile = planted.profile(smallest=6, largest=200)
    assert min(planted.sizes) >= 5  # diagnosis may use the size below the answer
    assert profile.points[0].size == 6


def test_several_fine_timings_of_a_size_count_together(fake_time: list[float]) -> None:
    planted = Planted(fake_time)
    steps = 0

    def wobbling(size: int) -> float:
        nonlocal steps
        steps += 1
        return (0.010 + 0.001 * size) * (1.2 if steps % 2 else 0.8)

    planted.seconds = wobbling  # type: ignore[method-assign]
    profile = planted.profile(largest=64)
    assert max(point.steps_timed for point in profile.points) > FINE.most
    assert not profile.at(profile.recommended).steady
    assert any("not steady" in note for note in profile.notes)


def test_long_steps_that_vary_do_not_take_over_the_time(fake_time: list[float]) -> None:
    """A fine timing in a search is bounded by what the search has taken; sizes that are named are not."""

    class Wobbling(Planted):
        def seconds(self, size: int) -> float:
            return (0.05 + 0.002 * size) * (1.03 if len(self.sizes) % 2 else 0.97)

    planted = Wobbling(fake_time)
    profile = planted.profile(largest=200, diagnose=False)
    assert max(point.steps_timed for point in profile.points) <= BRIEF.most + FINE.least
    assert planted.profile(sizes=[128], diagnose=False).at(128).steps_timed > 2 * FINE.least


def test_short_steps_are_timed_finely_at_once(fake_time: list[float]) -> None:
    """No size of a quiet program whose steps are short is timed twice."""
    planted = Planted(fake_time)
    planted.seconds = lambda size: 0.001 + 0.0001 * size  # type: ignore[method-assign]
    reported: list[ThroughputPoint] = []
    profile = planted.profile(on_point=reported.append)
    assert len(reported) == len(profile.points)
    assert profile.at(profile.recommended).steps_timed >= FINE.least


def test_the_time_limit_ends_it(fake_time: list[float]) -> None:
    planted = Planted(fake_time)
    profile = planted.profile(time_limit_s=0.2)
    assert profile.stopped_because == "time_limit"
    assert any("time_limit_s" in note for note in profile.notes)
    assert profile.recommended in {point.size for point in profile.points}
    slow = Planted(fake_time)
    slow.now[0] += 1
    with pytest.raises(SearchStoppedError, match="no size was timed"):
        Measuring.to_the_end(_late_measuring(slow))


def test_a_time_limit_within_the_last_size_is_reported(fake_time: list[float]) -> None:
    class Wobbling(Planted):
        def seconds(self, size: int) -> float:
            return 0.05 if len(self.sizes) % 2 else 0.1

    profile = Wobbling(fake_time).profile(sizes=[4], time_limit_s=0.6)
    assert profile.stopped_because == "time_limit"
    assert profile.at(4).steps_timed < FINE.most
    assert Wobbling(fake_time).profile(sizes=[4]).stopped_because == "measured"


def test_long_steps_are_not_made_sixteen_times_as_long_at_once(fake_time: list[float]) -> None:
    """A limit is looked at between steps, so what one step takes is what it may be exceeded by."""
    planted = Planted(fake_time)
    planted.seconds = lambda size: 1.0 * size  # type: ignore[method-assign]
    begun = fake_time[0]
    reported: list[ThroughputPoint] = []
    profile = planted.profile(time_limit_s=10.0, diagnose=False, on_point=reported.append)
    assert [point.size for point in reported][:2] == [1, 4]
    assert profile.stopped_because == "time_limit"
    assert fake_time[0] - begun <= 25.0


def test_no_step_is_run_for_a_diagnosis_past_the_time_limit(fake_time: list[float]) -> None:
    class Ragged:
        def __iter__(self) -> Iterator[torch.Tensor]:
            for length in range(1, 30):
                fake_time[0] += 0.1
                yield torch.zeros(4, length)

    planted = Planted(fake_time)
    begun = fake_time[0]
    profile = planted.profile(sizes=[4], time_limit_s=0.5, loader=Ragged())
    assert len(planted.sizes) == profile.at(4).steps_timed + profile.at(4).steps_warmed + 1  # FLOPs counted
    assert any("no time to look at data" in note for note in profile.notes)
    assert fake_time[0] - begun < 1.0
    profile = planted.profile(sizes=[4], loader=Ragged())
    assert [one.kind for one in profile.bottlenecks] == ["data-bound"]
    assert profile.notes == ()


def _late_measuring(planted: Planted) -> Any:
    from batchfit._engine.distributed.ranks import Ranks
    from batchfit._profile.bench import Bench
    from batchfit._profile.pure.options import ProfileOptions

    work = batchfit.Workload(planted, state=())
    bench = Bench(work, planted.device, Ranks.current(), budget_bytes=MIB, deadline_s=0.0)
    return Measuring(bench, ProfileOptions())


def test_tokens_and_accumulation(fake_time: list[float]) -> None:
    planted = Planted(fake_time, capacity="100MiB")
    profile = planted.profile(tokens_per_sample=512, target_batch_size=1000)
    point = profile.at(profile.recommended)
    assert point.tokens_per_s == pytest.approx(512 * point.samples_per_s)
    made = profile.accumulation
    assert made is not None
    assert made.microbatch_size <= profile.recommended
    assert made.microbatch_size * made.microbatches >= 1000 > made.microbatch_size * (made.microbatches - 1)
    assert "adds no throughput" in made.advice
    assert planted.profile(target_batch_size=50).accumulation is None


def test_a_batch_is_said_not_to_fit_only_where_that_is_known(fake_time: list[float]) -> None:
    """Sizes that the caller did not want timed say nothing about what fits."""
    planted = Planted(fake_time)  # 1 GiB holds 1014 samples
    assert planted.profile(largest=16, target_batch_size=64).accumulation is None
    assert planted.profile(sizes=[1, 16], target_batch_size=64).accumulation is None
    few = planted.profile(largest=16)
    assert few.limit == planted.profile(sizes=[one.size for one in few.points]).limit  # of memory, both
    assert 16 < (planted.profile(largest=16).limit or 0) <= 1014
    made = planted.profile(sizes=[1, 16], target_batch_size=5000).accumulation
    assert made is not None
    assert "5000 is more than is known to fit at once" in made.advice
    made = planted.profile(sizes=[16, 2000], target_batch_size=5000).accumulation
    assert made is not None
    assert "5000 does not fit at once" in made.advice


def test_a_step_that_ignores_its_size_is_reported(fake_time: list[float]) -> None:
    class Constant(Planted):
        def seconds(self, size: int) -> float:
            return 0.01

    constant = Constant(fake_time)
    constant.device = FakeDevice("1GiB", peak=lambda size: 10 * MIB)
    profile = constant.profile()
    assert any("does the step use its batch size?" in note for note in profile.notes)
    assert profile.largest <= 2**30
    flat = Constant(fake_time)  # as a small model on a large device, whose memory grows
    assert not any("does the step use" in note for note in flat.profile().notes)


def test_the_reason_says_nothing_that_the_table_denies(fake_time: list[float]) -> None:
    """64 is within 5 % of what was timed, and 96 was taken for what larger sizes promise."""
    planted = Planted(fake_time)
    points = planted.profile(sizes=[64, 96, 128], diagnose=False).points
    rates = {64: 314.0, 96: 324.0, 128: 327.0}
    points = tuple(one.model_copy(update={"samples_per_s": rates[one.size]}) for one in points)
    reported = measuring.reason(points, 96, within=0.05)
    assert "smallest" not in reported
    assert "64 was timed at 96.0% of what 128 gives" in reported
    assert "64 is the smallest size within 5%" in measuring.reason(points, 64, within=0.05)
    assert "96 is the smallest size within 5%" in measuring.reason(points[1:], 96, within=0.05)


def noisy_profile(sizes: list[int], step_s: list[float], spreads: list[float]) -> ThroughputProfile:
    """The answer to these timings, as a profile puts it together."""
    knee = Knee(sizes=tuple(sizes))
    points = []
    for size, took, spread in zip(sizes, step_s, spreads, strict=True):
        knee = knee.tell(Timed(size, took, spread, fine=True))
        low, high = took * (1 - spread), took * (1 + spread)
        rate = size / took
        points.append(
            ThroughputPoint(size=size, step_s=took, step_s_low=low, step_s_high=high, samples_per_s=rate)
        )
    chosen = knee.recommended
    assert chosen is not None
    return ThroughputProfile(
        points=tuple(points),
        recommended=chosen,
        largest=sizes[-1],
        within=knee.within,
        reason=measuring.reason(points, chosen, within=knee.within),
        budget_bytes=2**30,
        device="cpu",
    )


@examples(400)
@given(st.data(), st.integers(2, 8))
def test_however_noisy_every_sentence_agrees_with_its_numbers(data: st.DataObject, count: int) -> None:
    sizes = [4**number for number in range(count)]
    factors = data.draw(st.lists(st.floats(0.5, 2.0), min_size=count, max_size=count))
    spreads = data.draw(st.lists(st.floats(0.0, 0.8), min_size=count, max_size=count))
    fixed_s = data.draw(st.floats(0.001, 0.5))
    step_s = [(fixed_s + 0.001 * size) * factor for size, factor in zip(sizes, factors, strict=True)]
    profile = noisy_profile(sizes, step_s, spreads)
    rates = {point.size: point.samples_per_s for point in profile.points}
    best, chosen = max(rates.values()), profile.recommended
    within = {size for size, rate in rates.items() if rate >= 0.95 * best}
    said = profile.reason
    for size in re.findall(r"(\d+) is (?:the smallest size )?within 5% of the best", said):
        assert int(size) in within
    for size in re.findall(r"(\d+) is the smallest size within 5%", said):
        assert int(size) == min(within)
    for size in re.findall(r"(\d+) has the best throughput", said):
        assert rates[int(size)] == best
    if "it is the smallest within 5%" in said:
        assert chosen == min(within)
    for size, share, of in re.findall(r"(\d+) was timed at ([\d.]+)% of what (\d+) gives", said):
        assert float(share) == pytest.approx(100 * rates[int(size)] / rates[int(of)], abs=0.051)
        assert rates[int(of)] == best
        assert (float(share) >= 95) == (int(size) in within)
    # What is not within reach is recommended only where the times leave it open, and the headline says so.
    headline = str(profile).splitlines()[0]
    top = profile.best
    if chosen not in within or max(profile.at(chosen).spread, top.spread) > 0.05:
        assert "low confidence" in headline
        assert "low confidence" in profile.summary
    if chosen not in within:
        reach = rates[chosen] * (1 + profile.at(chosen).spread)
        assert reach >= 0.95 * best * (1 - top.spread) * (1 - 1e-9)


def test_a_size_that_was_timed_precisely_as_far_too_slow_is_not_recommended() -> None:
    """A line through all times may be wrong about one that is known well."""
    profile = noisy_profile([1, 4, 16, 64, 256], [0.010, 0.010, 0.016, 0.010, 0.025], [0.01] * 5)
    assert profile.at(profile.recommended).samples_per_s >= 0.95 * profile.best.samples_per_s
    assert "low confidence" not in str(profile)


# ---- state, faults, refusals


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    parts = [*model.state_dict().values(), torch.get_rng_state()]
    for state in optimizer.state_dict()["state"].values():
        parts += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return [part.clone() for part in parts]


@pytest.mark.parametrize("virtual", [False, True])
def test_state_is_restored_bit_for_bit(virtual: bool) -> None:
    model, optimizer = net()
    work = training(model, optimizer)
    for _ in range(2):
        work.step(4)
    before = everything(model, optimizer)
    if virtual:
        with batchfit.virtual_memory("8MiB"):
            profile = batchfit.profile_throughput(work, sizes=[2, 4, 8])
        assert any("virtual_memory" in note for note in profile.notes)
    else:
        profile = batchfit.profile_throughput(work, sizes=[2, 4, 8], budget="64MiB")
        assert not any("virtual_memory" in note for note in profile.notes)
    after = everything(model, optimizer)
    assert len(before) == len(after)
    assert all(torch.equal(one, two) for one, two in zip(before, after, strict=True))
    assert not forward_hooks(model)
    point = profile.at(8)
    assert point.peak_bytes is not None
    assert point.flops_per_s is not None
    assert point.flops_per_s * point.step_s == pytest.approx(8 * 2 * (16 * 32 * 2 + 32 * 4 * 3), rel=0.01)
    assert point.flops_share is None


@pytest.mark.parametrize("kind", ["error", "interrupt"])
@pytest.mark.parametrize("at", [0, 1, 3, 9, 14])
def test_state_is_restored_when_a_step_fails(kind: str, at: int) -> None:
    model, optimizer = net()
    work = training(model, optimizer)
    before = everything(model, optimizer)
    wrong: Any = KeyboardInterrupt if kind == "interrupt" else RuntimeError
    step = faulty(work.step, {at: kind})
    with pytest.raises(wrong):
        batchfit.profile_throughput(work.with_step(step), sizes=[4, 8], budget="64MiB")
    after = everything(model, optimizer)
    assert all(torch.equal(one, two) for one, two in zip(before, after, strict=True))
    assert not forward_hooks(model)


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Each putting back of a state, with whether a step had been cut off."""
    calls: list[bool] = []
    restore = Snapshot.restore

    def counted(self: Snapshot, *, cut_off: bool = True) -> None:
        calls.append(cut_off)
        restore(self, cut_off=cut_off)

    monkeypatch.setattr(Snapshot, "restore", counted)
    return calls


def test_flops_and_readings_share_a_putting_back(restored: list[bool]) -> None:
    model, optimizer = net()
    work = training(model, optimizer)
    profile = batchfit.profile_throughput(work, sizes=[4, 8], device=FakeDevice("1GiB"), diagnose=False)
    assert restored == [False, False]
    assert all(point.flops_per_s for point in profile.points)
    batchfit.profile_throughput(work, sizes=[4, 8], device=FakeDevice("1GiB"))
    assert restored == [False] * 5  # two sizes, and once for all readings


@pytest.mark.parametrize("kind", ["oom", "error", "interrupt"])
def test_state_is_restored_where_the_step_that_counts_flops_fails(kind: str, restored: list[bool]) -> None:
    """The first step after those of the first size is the one that counts."""
    model, optimizer = net()
    work = training(model, optimizer)
    timed = batchfit.profile_throughput(work, sizes=[4], device=FakeDevice("1GiB"), diagnose=False).at(4)
    before, calls = everything(model, optimizer), 0
    restored.clear()
    wrong: Any = {"oom": simulated_oom(), "error": RuntimeError("mine"), "interrupt": KeyboardInterrupt()}

    def step(size: int) -> None:
        nonlocal calls
        calls += 1
        work.step(size)
        if dispatch_mode() is not None:
            raise wrong[kind]

    counting = work.with_step(step)
    if kind == "oom":
        profile = batchfit.profile_throughput(
            counting, sizes=[4, 8], device=FakeDevice("1GiB"), diagnose=False
        )
        assert [point.size for point in profile.points] == [4, 8]
        assert profile.too_large == ()
        assert profile.at(4).flops_per_s is None
        assert restored == [True, False]
    else:
        with pytest.raises(type(wrong[kind])):
            batchfit.profile_throughput(counting, sizes=[4, 8], device=FakeDevice("1GiB"), diagnose=False)
        assert restored == [True]
        assert calls > timed.steps_warmed
    after = everything(model, optimizer)
    assert all(torch.equal(one, two) for one, two in zip(before, after, strict=True))
    assert not forward_hooks(model)


def test_a_step_that_torch_cannot_count_is_timed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its formulas assert what they know of: older ones no grouped-query attention."""
    rules = vars(flop_counter.FlopCounterMode(display=False))["flop_registry"]
    here = compile("def refuse(*_, **__):\n    raise AssertionError('heads')", flop_counter.__file__, "exec")
    made: dict[str, Any] = {}
    exec(here, made)
    monkeypatch.setattr(flop_counter, "flop_registry", {**rules, torch.ops.aten.addmm: made["refuse"]})
    model, optimizer = net()
    work = training(model, optimizer)
    before = everything(model, optimizer)
    profile = batchfit.profile_throughput(work, sizes=[4, 8], device=FakeDevice("1GiB"), diagnose=False)
    assert [point.flops_per_s for point in profile.points] == [None, None]
    assert all(torch.equal(one, two) for one, two in zip(before, everything(model, optimizer), strict=True))


def test_making_batches_is_reported_where_the_look_at_kernels_is_out_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The two share a putting back, not their fate."""

    def runs_out(*_: Any, **__: Any) -> None:
        raise simulated_oom()

    monkeypatch.setattr(diagnosis, "busy_time", runs_out)
    monkeypatch.setattr(diagnosis, "batch_time", lambda *_, **__: 1000.0)
    work = training(*net())
    profile = batchfit.profile_throughput(work, sizes=[4], device=FakeDevice("1GiB"))
    assert "data-bound" in [one.kind for one in profile.bottlenecks]


def test_the_step_that_counts_flops_is_in_no_figure(fake_time: list[float]) -> None:
    """It may take longer and hold more than the others: times and peaks are read before it."""
    planted = Planted(fake_time)
    step = planted.__call__

    def counted(size: int) -> None:
        step(size)
        if dispatch_mode() is not None:
            fake_time[0] += 100.0
            planted.device.step(900)

    work = batchfit.Workload(counted, state=())
    profile = batchfit.profile_throughput(work, device=planted.device, sizes=[8, 16], diagnose=False)
    assert profile.at(8).step_s == pytest.approx(planted.seconds(8))
    assert profile.at(8).peak_bytes == 18 * MIB
    assert profile.at(16).peak_bytes == 26 * MIB


def test_what_was_timed_until_an_interrupt_goes_along_with_it() -> None:
    work, calls = training(*net()), 0

    def step(size: int) -> None:
        nonlocal calls
        calls += size == 8
        if calls > 2:
            raise KeyboardInterrupt
        work.step(size)

    with pytest.raises(KeyboardInterrupt) as stopped:
        batchfit.profile_throughput(work.with_step(step), sizes=[4, 8], budget="64MiB")
    timed: Any = vars(stopped.value)["profile"]
    assert [point.size for point in timed.points] == [4]
    assert (timed.recommended, timed.stopped_because, timed.diagnosis) == (4, "interrupted", ())
    assert any("interrupted" in note for note in timed.notes)
    assert batchfit.ThroughputProfile.from_json(timed.to_json()) == timed
    with pytest.raises(KeyboardInterrupt) as stopped:
        batchfit.profile_throughput(work.with_step(faulty(work.step, {0: "interrupt"})), sizes=[4])
    assert "profile" not in vars(stopped.value)


@pytest.mark.parametrize("at", [0, 1, 3, 6])
def test_a_step_that_is_out_of_memory_anywhere_is_a_value(at: int) -> None:
    model, optimizer = net()
    snapshot = Snapshot.take((model, optimizer))
    before = everything(model, optimizer)
    step = faulty(training(model, optimizer).step, {at: simulated_oom()})
    device = FakeDevice("1GiB")
    run = run_timed(step, 4, device=device, snapshot=snapshot, timing=Timing(0.0, 4, 8))
    assert run.outcome == "oom"
    assert "out of memory" in run.message
    after = everything(model, optimizer)
    assert all(torch.equal(one, two) for one, two in zip(before, after, strict=True))


def test_other_ranks_stop_with_one_that_fails() -> None:
    """What `agree` is asked, by a rank that fails and by one whose peer does."""
    asked: list[tuple[bool, bool]] = []

    def agree(wants_more: bool, failed: bool) -> bool | None:
        asked.append((wants_more, failed))
        return None if failed or len(asked) == 3 else wants_more

    device, snapshot = FakeDevice("1GiB"), Snapshot.take(())
    step = faulty(lambda size: None, {2: "oom"})
    run = run_timed(step, 4, device=device, snapshot=snapshot, timing=BRIEF, agree=agree)
    assert run.outcome == "oom"
    assert asked[-1] == (False, True)
    assert sum(failed for _, failed in asked) == 1
    asked.clear()
    peer = run_timed(
        lambda size: None, 4, device=device, snapshot=snapshot, timing=Timing(0, 9, 9), agree=agree
    )
    assert (peer.outcome, peer.message) == ("oom", "another rank ran out of memory")
    assert not any(failed for _, failed in asked)  # once is enough


def test_a_step_that_runs_nothing_is_an_error() -> None:
    def step(size: int) -> Iterator[int]:
        yield size

    with pytest.raises(batchfit.errors.NothingRanError, match="a generator"):
        batchfit.profile_throughput(batchfit.Workload(step, state=()), device=FakeDevice("1GiB"))


def test_undeclared_state_is_warned_about() -> None:
    with pytest.warns(UserWarning, match="not declared"):
        batchfit.profile_throughput(lambda size: None, device=FakeDevice("1GiB"), sizes=[1], diagnose=False)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"largest": 0}, "largest must be a positive integer or None, not 0"),
        ({"smallest": 0}, "smallest must be a positive integer, not 0"),
        ({"smallest": 8, "largest": 4}, r"largest must be at least smallest \(8\), not 4"),
        ({"sizes": []}, r"sizes must name at least one batch size, not \[\]"),
        ({"sizes": [4, -1]}, r"sizes must hold positive integers, not \(4, -1\)"),
        ({"sizes": [4], "largest": 8}, "largest must be None where sizes are given, not 8"),
        ({"sizes": [4], "smallest": 2}, "smallest must be left out where sizes are given, not 2"),
        ({"sizes": [[4]]}, r"sizes must hold positive integers, not \(\[4\],\)"),
        ({"sizes": [1, True]}, r"sizes must hold positive integers, not \(1, True\)"),
        ({"loader": [1], "diagnose": False}, "diagnose must be True where a loader is given"),
        ({"within": 1.5}, "within must be above 0 and below 1, not 1.5"),
        ({"budget": "lots"}, "budget must be bytes"),
        ({"time_limit_s": 0}, "time_limit_s must be a positive number of seconds, not 0"),
        ({"tokens_per_sample": 1.5}, "tokens_per_sample must be a positive integer or None, not 1.5"),
        ({"target_batch_size": 0}, "target_batch_size must be a positive integer or None, not 0"),
        ({"loader": 4}, "loader must be something that can be iterated repeatedly, not 4"),
        ({"loader": iter([1])}, "loader must be something that can be iterated repeatedly"),
        ({"diagnose": 1}, "diagnose must be True or False, not 1"),
        ({"on_point": 3}, r"on_point must be a callable on_point\(point\) or None, not 3"),
        ({"sizes": "12"}, "sizes must be a list of batch sizes, not '12'"),
        ({"device": "tpu"}, "device must be"),
    ],
)
def test_wrong_arguments_are_refused_before_any_step(keywords: dict[str, Any], message: str) -> None:
    ran: list[int] = []
    with pytest.raises((ValueError, TypeError), match=message):
        batchfit.profile_throughput(batchfit.Workload(ran.append, state=()), **keywords)
    assert ran == []


# ---- planted bottlenecks


class Slow(Dataset[torch.Tensor]):
    def __init__(self, pause_s: float) -> None:
        self._pause_s = pause_s

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self._pause_s)
        return torch.zeros(16)


def sleepy(pause_s: float) -> batchfit.Workload:
    return batchfit.Workload(lambda size: time.sleep(pause_s), state=())


def test_a_loader_with_a_sleep_is_named_and_a_quick_one_is_not() -> None:
    slow: DataLoader[torch.Tensor] = DataLoader(Slow(0.004), batch_size=4)
    profile = batchfit.profile_throughput(sleepy(0.01), sizes=[4], budget="1GiB", loader=slow)
    assert [one.kind for one in profile.bottlenecks] == ["data-bound"]
    quick: DataLoader[torch.Tensor] = DataLoader(Slow(0.0), batch_size=4)
    profile = batchfit.profile_throughput(sleepy(0.02), sizes=[4], budget="1GiB", loader=quick)
    assert profile.bottlenecks == ()


def test_a_batch_that_takes_long_to_make_is_named() -> None:
    def make_batch(n: int) -> torch.Tensor:
        time.sleep(0.01)
        return torch.randn(n, 16)

    work = batchfit.inference(nn.Linear(16, 4), make_batch)
    profile = batchfit.profile_throughput(work, sizes=[4], budget="64MiB")
    assert [one.kind for one in profile.bottlenecks] == ["data-bound"]
    assert "making a batch" in profile.diagnosis[0].evidence


def test_a_loader_whose_batches_do_not_fit_is_reported(fake_time: list[float]) -> None:
    planted = Planted(fake_time, capacity="100MiB")
    profile = planted.profile(loader=[torch.zeros(512, 4)] * 8)
    assert any("its batches of 512 do not fit" in note for note in profile.notes)
    assert 512 not in planted.sizes


def test_stalls_of_the_step_are_not_the_loaders(fake_time: list[float]) -> None:
    class Stalling(Planted):
        def seconds(self, size: int) -> float:
            return 0.14 if len(self.sizes) % 5 == 0 else 0.1

    class Quick:
        def __iter__(self) -> Iterator[torch.Tensor]:
            for _ in range(30):
                fake_time[0] += 0.009  # 8 % of the time that loading and stepping take
                yield torch.zeros(4, 4)

    assert Stalling(fake_time).profile(sizes=[4], loader=Quick()).bottlenecks == ()


def test_copying_an_example_batch_is_not_the_programs_loss() -> None:
    """The copies are ours: the program makes its batches otherwise. A dataset's loader may be quicker."""
    model = nn.Flatten()  # next to nothing beside the copy
    example = torch.randn(2, 4096)
    # Where the last batch is kept, each has fresh memory of the host, which is slow at first.
    lean = batchfit.inference(model, example, keep_outputs=False)
    profile = batchfit.profile_throughput(lean, sizes=[256], budget="1GiB")
    assert profile.bottlenecks == ()
    assert any("copying the example batch takes" in note for note in profile.notes)
    dataset = [(one,) for one in example]

    def collated(some: list[tuple[torch.Tensor]]) -> torch.Tensor:
        time.sleep(0.02)  # decodes, say
        return torch.stack([one[0] for one in some])

    work = batchfit.inference(model, dataset, collate_fn=collated)
    profile = batchfit.profile_throughput(work, sizes=[256], budget="1GiB")
    assert [one.kind for one in profile.bottlenecks] == ["data-bound"]
    assert "pass loader=" in profile.bottlenecks[0].advice


PLANS: set[tuple[int, ...]] = set()  # as in a library, where no snapshot reaches


class Planning(nn.Module):
    """Like an attention that builds a plan for every shape that it has not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        if tuple(batch.shape) not in PLANS:
            time.sleep(0.02)
            PLANS.add(tuple(batch.shape))
        time.sleep(0.004)
        return batch * self.weight


@pytest.mark.parametrize("ragged", [True, False])
def test_ragged_shapes_are_named(ragged: bool) -> None:
    def make_batch(n: int) -> torch.Tensor:
        length = int(torch.randint(8, 500, ())) if ragged else 64
        return torch.zeros(n, length)

    PLANS.clear()
    work = batchfit.inference(Planning(), make_batch)
    profile = batchfit.profile_throughput(work, sizes=[4], budget="64MiB")
    assert [one.kind for one in profile.bottlenecks] == (["shape-bound"] if ragged else [])
    if ragged:
        assert "8 shapes in 8 steps" in profile.diagnosis[0].evidence


def test_a_ragged_loader_is_named_by_what_a_first_step_costs() -> None:
    PLANS.clear()
    work = batchfit.inference(Planning(), lambda n: torch.zeros(n, 64))
    batches = [torch.zeros(4, length) for length in range(10, 40)]
    profile = batchfit.profile_throughput(work, sizes=[4], budget="64MiB", loader=batches)
    # The clock is real here, and a busy machine may add a finding of its own.
    assert "shape-bound" in [one.kind for one in profile.bottlenecks]
    same = [torch.zeros(4, 10)] * 30
    profile = batchfit.profile_throughput(work, sizes=[4], budget="64MiB", loader=same)
    assert "shape-bound" not in [one.kind for one in profile.bottlenecks]


def test_an_allocator_that_retries_is_named(fake_time: list[float]) -> None:
    planted = Planted(fake_time)
    planted.device = FakeDevice("100MiB", peak=lambda size: size * MIB, cached=0.2, settles_after=None)
    profile = planted.profile(sizes=[90])
    assert [one.kind for one in profile.diagnosis] == ["memory-bound"]
    assert "9" in profile.diagnosis[0].evidence
    assert planted.profile(sizes=[40]).bottlenecks == ()


# ---- readings


def test_a_loader_is_looked_at_without_moving_its_generator() -> None:
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(torch.arange(40.0).reshape(20, 2), batch_size=4, shuffle=True, generator=generator)  # type: ignore[arg-type]
    before = generator.get_state()
    pace = loader_pace(loader)
    assert (pace.size, pace.shapes, pace.batches) == (4, 1, 5)
    assert torch.equal(before, generator.get_state())
    with pytest.raises(ValueError, match="loader must give at least 3 batches, not 1"):
        loader_pace([torch.zeros(2)])


def test_tokens_are_read_off_the_calls() -> None:
    embedding = nn.Embedding(10, 4)
    with watched_inputs(embedding) as seen:
        embedding(torch.zeros(3, 7, dtype=torch.long))
        embedding(torch.zeros(3, 9, dtype=torch.long))
    assert seen.tokens == 27
    assert seen.distinct == 2
    assert seen.precision == "fp32"
    work = batchfit.inference(embedding, lambda n: torch.zeros(n, 7, dtype=torch.long))
    point = batchfit.profile_throughput(work, sizes=[4], budget="64MiB", diagnose=False).at(4)
    assert point.tokens_per_s == pytest.approx(7 * point.samples_per_s)


def test_precision_is_what_autocast_says() -> None:
    linear = nn.Linear(4, 4)
    with watched_inputs(linear) as seen, torch.autocast("cpu", dtype=torch.bfloat16):
        linear(torch.zeros(2, 4))
    assert seen.precision == "bf16"


def test_flops_are_counted() -> None:
    linear = nn.Linear(8, 4, bias=False)
    assert flops_of(lambda size: linear(torch.zeros(size, 8)), 5) == 2 * 5 * 8 * 4
    assert flops_of(lambda size: torch.zeros(size) + 1, 5) is None


def test_kernel_times_are_joined() -> None:
    assert union([(0, 2), (1, 3), (5, 6), (5.5, 5.7)]) == 4
    assert union([]) == 0


def test_compiled_steps_are_warmed_and_counted() -> None:
    dynamo.reset()
    model = nn.Linear(8, 8)
    compiled: Any = torch.compile(model, backend="eager", dynamic=False)
    work = batchfit.Workload(lambda size: compiled(torch.zeros(size, 8)), state=[model])
    profile = batchfit.profile_throughput(work, sizes=[2, 4], budget="64MiB", diagnose=False)
    first, second = (point.recompilations for point in profile.points)
    assert (first >= 1, second) == (True, 1)
    assert any("compiled during warm-up" in note for note in profile.notes)
    dynamo.reset()
