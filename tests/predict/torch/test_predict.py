"""`predict_batch_size` without a GPU: right answers for steps that can be worked out, and clear refusals."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import batchfit
from batchfit._engine.allocator import replay
from batchfit._engine.allocator.footprint import Footprint
from batchfit._engine.allocator.gpus import DEFAULT, GPUS, Gpu
from batchfit._engine.allocator.replay import Simulation, simulate
from batchfit._engine.cuda_model.dispatch import CudaRules
from batchfit._engine.trace import generation, workload
from batchfit._engine.trace import oracle as _oracle
from batchfit._engine.trace.oracle import MARGINS, Oracle, allocator_rules
from batchfit._engine.trace.trace import trace, trace_caveats
from batchfit._engine.trace.workload import rules_for, trace_workload
from batchfit._find import predict_first
from batchfit._find.predict_first import Foresight
from batchfit._predict import predict as _predict
from batchfit._predict.predict import calibration
from batchfit.errors import NothingFitsError, UntraceableError
from batchfit.results import Prediction

GIB = 2**30
MIB = 2**20
predict = batchfit.predict_batch_size


def wide(width: int = 4096, optimizer: Any = torch.optim.AdamW) -> batchfit.Workload:
    """A layer in the middle that is all that grows with the batch."""
    model = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 4))
    return batchfit.training(
        model, optimizer(model.parameters()), lambda m, b: m(b).sum(), lambda n: torch.zeros(n, 16)
    )


@pytest.fixture(scope="module")
def several() -> Prediction:
    return predict(wide(), budget=["1GiB", 512 * MIB, "4GiB"])


def test_the_answer_for_a_step_that_can_be_worked_out() -> None:
    """Width 4096: products keep 16 KiB a sample forward, and as much again backward."""
    found = predict(wide(), budget="1GiB", margin=0.0)
    fixed = 66 * MIB  # cuBLAS
    assert found.batch_size == pytest.approx((GIB - fixed) / (3 * 4096 * 4 + 200), rel=0.35)
    assert found.peak_bytes <= GIB
    assert found.peak_bytes > 0.97 * GIB
    assert (found.based_on, found.card, found.card_measured, found.margin) == ("no GPU", "h200", True, 0.0)
    assert found.peak_phase in ("forward", "backward")
    assert found.check < 0.001
    assert found.unseen == tuple(trace_caveats(()))  # what is said of this torch, whatever the step is
    assert str(found.batch_size) in found.summary


def test_the_traced_peak_is_near_what_the_step_really_needs_here() -> None:
    """Live bytes of the real step, counted on the CPU: the trace less what only CUDA takes."""
    work = wide(512, torch.optim.SGD)
    size = 4000
    found = trace(work, size, rules=rules_for(work))
    extras = sum(s for s, o in zip(found.sizes, found.origins, strict=True) if o.operation == "cuBLAS")
    with batchfit.virtual_memory("1GiB") as device:
        work.step(2)
        work.step(size)
        peak = device.peak_bytes
    assert found.peak_bytes - extras == pytest.approx(peak, rel=0.1)


def test_several_budgets_come_from_one_trace(several: Prediction) -> None:
    assert [one.budget_bytes for one in several.answers] == [GIB, 512 * MIB, 4 * GIB]
    sizes = [one.batch_size for one in several.answers]
    assert several.batch_size == sizes[0]
    assert sizes[1] < sizes[0] < sizes[2]
    assert all(one.peak_bytes <= one.budget_bytes * (1 - MARGINS["no GPU"]) for one in several.answers)
    one = predict(wide(), budget="512MiB")
    assert one.batch_size == pytest.approx(sizes[1], rel=0.01)
    assert str(sizes[2]) in str(several)


def reducing() -> batchfit.Workload:
    """Its bias gradient is summed in a buffer of 132 MiB, but for small batches, which need none."""
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))
    return batchfit.training(
        model,
        torch.optim.AdamW(model.parameters()),
        lambda m, b: m(b).sum(),
        lambda n: torch.zeros(n, 256),
        keep_outputs=False,
    )


def test_a_budget_among_larger_ones_is_answered_as_if_it_were_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    replays, simulate = [], replay.simulate

    def counted(*args: Any, **kwargs: Any) -> Any:
        replays.append(kwargs)
        return simulate(*args, **kwargs)

    monkeypatch.setattr(replay, "simulate", counted)
    budgets = ["80GiB", "200MiB"]
    together = predict(reducing(), budget=budgets)
    alone = [predict(reducing(), budget=one) for one in budgets]
    assert [one.batch_size for one in together.answers] == [one.batch_size for one in alone]
    assert [one.peak_bytes for one in together.answers] == [one.peak_bytes for one in alone]
    for answer in together.answers:
        assert together.peak_bytes_at(answer.batch_size) == pytest.approx(answer.peak_bytes, rel=0.002)
    # Only a retry makes the largest of twelve million samples fit, and one sample less needs it too.
    assert len(replays) < 3000


def large_samples() -> batchfit.Workload:
    """Each takes 384 MiB, of which no more than the trace is here."""
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    make_batch = lambda n: torch.zeros(()).expand(n, 1 << 18, 64)  # noqa: E731
    return batchfit.training(model, optimizer, lambda m, b: m(b).square().mean(), make_batch)


@pytest.mark.parametrize(
    ("make", "asked", "says"),
    [
        (reducing, {"budget": "300MiB"}, r"a batch of {next} would reserve 3\d\d.0 MiB for a peak of 2.*MiB"),
        (large_samples, {"budget": "700MiB"}, r"a batch of {next} would have a peak of 8\d\d.\d MiB"),
        (reducing, {"budget": "1GiB", "max_size": 9}, "max_size is reached"),
        (reducing, {"budget": "2GiB"}, ""),
    ],
)
def test_what_is_left_of_a_budget_is_explained(make: Any, asked: dict[str, Any], says: str) -> None:
    found = predict(make(), **asked)
    reason = found.answers[0].reason
    assert re.fullmatch(says.format(next=found.batch_size + 1) + r"( \(fragmentation\))?", reason)
    assert bool(reason) == (found.peak_bytes < 0.93 * found.budget_bytes)
    assert found.summary.endswith(f"; {reason}" if reason else " s")


def test_the_curve_is_right_far_below_the_answer() -> None:
    found = predict(reducing(), budget="1GiB")
    assert found.batch_size > 50_000
    for size in (1, 3, 64, 2000):
        truth = batchfit.explain_memory(reducing(), batch_size=size, what_if=False).peak_bytes
        assert found.peak_bytes_at(size) == pytest.approx(truth, rel=0.03)
    peaks = [point.peak_bytes for point in found.curve]
    assert peaks == sorted(peaks)


@pytest.mark.parametrize("most", [1, 5, 64])
def test_a_largest_size_that_is_wanted_is_where_it_is_traced(most: int) -> None:
    found = predict(reducing(), budget="80GiB", max_size=most)
    truth = batchfit.explain_memory(reducing(), batch_size=most, what_if=False).peak_bytes
    assert found.batch_size == most
    assert found.peak_bytes == pytest.approx(truth, rel=0.001)
    assert max(found.trace_sizes) <= max(most, 3)


def test_it_survives_json(several: Prediction) -> None:
    again = Prediction.from_json(several.to_json())
    assert again == several
    assert again.peak_bytes_at(100) == several.peak_bytes_at(100)


def test_the_curve_is_the_peak_at_any_size(several: Prediction) -> None:
    sizes = [point.size for point in several.curve]
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] > max(one.batch_size for one in several.answers)
    for answer in several.answers:
        assert several.peak_bytes_at(answer.batch_size) == pytest.approx(answer.peak_bytes, rel=0.02)
    assert all(point.reserved_bytes >= point.peak_bytes for point in several.curve)
    grows = [several.peak_bytes_at(size) for size in range(1, 20_000, 500)]
    assert grows == sorted(grows)


@pytest.mark.parametrize("size", [0, -5, float("nan"), float("inf"), "3", None, True])
def test_a_size_that_is_none_has_no_peak(several: Prediction, size: Any) -> None:
    with pytest.raises(ValueError, match="size must be a positive number, not"):
        several.peak_bytes_at(size)


def test_a_gpu_is_its_memory_and_its_kernels() -> None:
    found = predict(wide(), gpu="RTX 4090", max_size=10_000)
    assert (found.card, found.card_measured) == ("rtx4090", False)
    assert found.budget_bytes == GPUS["rtx4090"].usable_bytes
    assert found.answers[0].name == "rtx4090"
    assert any("rtx4090" in note for note in found.unseen)
    assert found.batch_size == 10_000
    smaller = predict(wide(), gpu="rtx4090", budget="1GiB")
    assert (smaller.budget_bytes, smaller.answers[0].name) == (GIB, "")


def test_a_margin_is_left_free() -> None:
    sizes = [predict(wide(), budget="1GiB", margin=margin).batch_size for margin in (0.0, 0.1, 0.5)]
    assert sizes[0] > sizes[1] > sizes[2]
    assert sizes[1] / sizes[0] == pytest.approx(0.9, abs=0.03)


def test_nothing_fits() -> None:
    with pytest.raises(NothingFitsError, match="a batch of 1 does not fit") as refused:
        predict(wide(), budget="16MiB")
    assert refused.value.budget_bytes == 16 * MIB
    assert refused.value.peak_bytes is not None
    assert refused.value.peak_bytes > 16 * MIB
    assert refused.value.state_bytes is not None
    assert refused.value.state_bytes < 16 * MIB
    assert "By prediction it does not fit with an 8-bit AdamW" in str(refused.value)  # cuBLAS takes 65 MiB
    assert refused.value.holders[0] == ("cuBLAS workspaces", 65 * MIB)
    with pytest.raises(NothingFitsError, match="optimizer state, take at least") as too_little:
        predict(wide(), budget=refused.value.state_bytes // 2)
    assert "checkpointing" not in str(too_little.value)
    found = predict(wide(), budget=["16MiB", "1GiB"])
    assert [one.batch_size > 0 for one in found.answers] == [False, True]
    assert (found.batch_size, found.peak_bytes) == (0, 0)
    assert "not even a batch of 1" in found.summary


def never(n: int) -> None:
    raise AssertionError("the step was run")


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({}, ValueError, "budget must be given"),
        ({"budget": []}, ValueError, "budget must name at least one"),
        ({"budget": "lots"}, ValueError, "lots"),
        ({"budget": "1GiB", "expandable_segments": "yes"}, TypeError, "expandable_segments must be True"),
        ({"gpu": 5}, TypeError, "gpu must be the name of a GPU, not 5"),
        ({"budget": 1e9}, TypeError, "budget must be bytes or text such as '24GiB', not 1000000000.0"),
        ({"budget": 0}, ValueError, "0"),
        ({"budget": "1GiB", "gpu": "h1"}, ValueError, "gpu must be one of"),
        ({"budget": "1GiB", "max_size": 0}, ValueError, "max_size must be a positive integer"),
        ({"budget": "1GiB", "max_size": 2.0}, ValueError, "max_size must be a positive integer"),
        ({"budget": "1GiB", "margin": 1.0}, ValueError, "margin must be"),
        ({"budget": "1GiB", "margin": True}, ValueError, "margin must be"),
        ({"budget": "1GiB", "calibrate": 1}, TypeError, "calibrate must be"),
        ({"budget": "1GiB", "calibrate": True}, ValueError, "calibrate must be False or None"),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_is_traced(
    options: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        predict(batchfit.Workload(never, state=[]), **options)


def test_a_model_is_no_workload() -> None:
    with pytest.raises(TypeError, match="workload must be a Workload or a callable"):
        predict(nn.Linear(2, 2), budget="1GiB")  # type: ignore[arg-type]


def test_what_cannot_be_traced_says_why() -> None:
    model = nn.Linear(4, 4)

    def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
        out = model(batch)
        return out[out > 0].sum()

    with pytest.raises(UntraceableError, match=r"aten\.nonzero\.default at test_predict\.py:\d+"):
        predict(batchfit.training(model, None, loss, lambda n: torch.zeros(n, 4)), budget="1GiB")


def test_a_loop_over_samples_is_traced_size_by_size() -> None:
    model = nn.Linear(MIB, 1)

    def loss(model: Any, batch: Any) -> torch.Tensor:
        return torch.stack([model(one * 2).sum() for one in batch]).sum()

    work = batchfit.training(model, None, loss, lambda n: torch.empty(n, MIB), keep_outputs=False)
    found = predict(work, budget="200MiB", margin=0.0)
    # Each sample has 4 MiB in the batch and 4 MiB doubled, kept for the gradient of the weight.
    assert found.batch_size == pytest.approx((200 - 66 - 8) / 8, abs=3)
    assert any("another order at each size" in note for note in found.unseen)
    assert found.knees == ()
    assert found.peak_bytes_at(1) < found.peak_bytes_at(found.batch_size) == found.peak_bytes


def test_a_loop_over_many_samples_is_given_up_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace takes as long as the batch is large: nobody waits for a hundred thousand samples."""
    monkeypatch.setattr(workload, "_EACH_SIZE_S", 0.5)
    model = nn.Linear(8, 1)

    def loss(model: Any, batch: Any) -> torch.Tensor:
        return torch.stack([model(one * 2).sum() for one in batch]).sum()

    work = batchfit.training(model, None, loss, lambda n: torch.empty(n, 8))
    with pytest.raises(UntraceableError, match=r"another order at each size.*samples are more than"):
        predict(work, budget="200MiB")
    told = batchfit.explain_memory(work, batch_size=2, budget="200MiB")
    assert told.largest is None
    assert told.peak_bytes > 0
    assert any("samples are more than" in note for note in told.unseen)


def test_a_step_that_grows_as_a_square_is_traced_size_by_size() -> None:
    """Scores of all samples against all, as in contrastive losses: lines would promise far too much."""
    model = nn.Linear(8, 8)

    def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
        out = model(batch)
        return torch.exp(out @ out.T).sum()

    work = batchfit.training(model, None, loss, lambda n: torch.zeros(n, 8))
    found = predict(work, budget="512MiB", margin=0.0)
    # The scores, their exponentials, and one gradient of that size: 12 bytes for each pair.
    assert found.batch_size == pytest.approx(((512 - 66) * MIB / 12) ** 0.5, rel=0.15)
    assert any("no straight line" in note for note in found.unseen)
    assert found.peak_bytes_at(found.batch_size) == found.peak_bytes


def test_the_allocators_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert allocator_rules().expandable_segments
    assert not allocator_rules(False).expandable_segments
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    assert not allocator_rules().expandable_segments
    assert allocator_rules(True).expandable_segments
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:3")
    with pytest.raises(ValueError, match="allocator settings must be"):
        predict(batchfit.Workload(never, state=[]), budget="1GiB")


class _Skip(nn.Module):
    """A small U-Net: blocks of many sizes, which leave gaps in segments of fixed size."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        twice = 2 * width
        self.down = nn.Sequential(*self._conv(3, width), *self._conv(width, width))
        self.deep = nn.Sequential(nn.MaxPool2d(2), *self._conv(width, twice), *self._conv(twice, twice))
        self.up = nn.ConvTranspose2d(twice, width, 2, stride=2)
        self.out = nn.Sequential(*self._conv(twice, width), nn.Conv2d(width, 3, 1))

    def _conv(self, inner: int, outer: int) -> tuple[nn.Module, nn.Module]:
        return nn.Conv2d(inner, outer, 3, padding=1), nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        near = self.down(x)
        out: torch.Tensor = self.out(torch.cat([near, self.up(self.deep(near))], 1))
        return out


def test_expandable_segments_need_only_the_missing_pages_unless_there_is_a_cap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They were held to a cap that no GPU has, and answered less than fixed segments."""
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    model = _Skip()
    work = batchfit.training(
        model,
        torch.optim.AdamW(model.parameters()),
        lambda m, x: (m(x) - x).square().mean(),
        lambda n: torch.zeros(n, 3, 64, 64),
        keep_outputs=False,
    )
    fixed, grown = (predict(work, gpu="h200", budget=GIB, expandable_segments=on) for on in (False, True))
    assert grown.batch_size > fixed.batch_size
    assert not [note for note in fixed.unseen if "expandable" in note]
    (caveat,) = [note for note in grown.unseen if note.startswith("expandable segments: replayed")]
    assert "for the GPU's own memory" in caveat
    set_to = "expandable_segments:True,per_process_memory_fraction:0.5,throw_on_cudamalloc_oom:True"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", set_to)
    capped = predict(work, gpu="h200", budget=GIB)
    assert capped.batch_size < grown.batch_size, "torch asks the cap about the whole request"
    assert "throw_on_cudamalloc_oom not replayed" in capped.unseen[-2]
    assert "under a memory fraction" in capped.unseen[-1]


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workload looks as if it were on a GPU; its trace for a search is made without one all the same."""

    def rules(work: batchfit.Workload, card: Gpu | None = None, reach: Any = None) -> CudaRules:
        return CudaRules(DEFAULT, torch.device("cuda", 0)) if card is None else rules_for(work, card, reach)

    for module in (_predict, predict_first):
        monkeypatch.setattr(module, "rules_for", rules)


@pytest.mark.usefixtures("on_a_gpu")
def test_a_search_gets_what_predict_would_answer() -> None:
    sight = Foresight.of(wide(), budget_bytes=GIB)
    assert sight is not None
    end = sight.largest()
    assert end is not None
    assert end == pytest.approx(predict_off_gpu(wide(), margin=MARGINS["calibrated"]), rel=0.01)
    look = sight.size_to_confirm()
    assert look is not None
    assert 1 <= look <= end // 3
    assert sight.largest(most=100) == 100


def predict_off_gpu(work: batchfit.Workload, *, margin: float) -> int:
    return predict(work, gpu="h200", budget=GIB, margin=margin).batch_size


@pytest.mark.usefixtures("on_a_gpu")
def test_without_calibration_what_is_held_beside_the_workload_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it was not asked for or could not be done."""

    def traced(work: batchfit.Workload, *, rules: CudaRules, **asked: Any) -> Any:
        assert rules.device.type == "cuda"
        return trace_workload(work, rules=rules_for(work), **asked)

    alone = predict_off_gpu(wide(), margin=0.0)
    monkeypatch.setattr(_predict, "trace_workload", traced)
    monkeypatch.setattr(_predict, "held_beside", lambda *_: (GIB // 2, 0))
    monkeypatch.setattr(_predict, "calibration", lambda *_, **__: ((0.0, 0.0), ()))
    found = [predict(wide(), budget=GIB, margin=0.0, calibrate=asked) for asked in (False, None)]
    assert found[0].batch_size == found[1].batch_size < 0.6 * alone
    assert found[1].based_on == "GPU, not run"


@pytest.mark.usefixtures("on_a_gpu")
def test_a_search_goes_on_without_a_prediction_whatever_went_wrong_with_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:3")  # a torch of later may take it
    assert Foresight.of(wide(), budget_bytes=GIB) is None

    def broken(*_: object, **__: object) -> None:
        raise KeyError("a bug of ours")

    monkeypatch.setattr(predict_first, "glance", broken)
    assert Foresight.of(wide(), budget_bytes=GIB) is None
    said = [record.getMessage() for record in caplog.records]
    assert [text.partition(":")[0] for text in said] == ["no prediction, measuring"] * 2
    assert said[1].endswith("KeyError: 'a bug of ours'")


def test_a_calibration_runs_within_what_is_there_whatever_is_asked_about() -> None:
    work = wide()
    traced = trace_workload(work, rules=rules_for(work), budget_bytes=1000 * GIB)
    with batchfit.virtual_memory("256MiB"):
        _, trials = calibration(work, traced, allocator_rules(), budget_bytes=1000 * GIB)
    assert [trial.outcome for trial in trials] == ["fits", "fits"]


@pytest.mark.usefixtures("on_a_gpu")
def test_a_trial_that_needs_more_than_traced_lowers_what_a_search_gets() -> None:
    sight = Foresight.of(wide(), budget_bytes=4 * GIB)
    assert sight is not None
    end, look = sight.largest(), sight.size_to_confirm()
    assert end is not None
    assert look is not None
    traced = sight.oracle.peak(look)

    def after(peak_bytes: int) -> int:
        assert sight is not None
        seen = sight.corrected(look, peak_bytes)
        assert seen is not None
        return seen.largest() or 0

    assert after(traced) == end
    # What is too much for a workspace is taken for as much a sample: at the end it is many times that.
    assert after(traced + 70 * MIB) < after(traced + 32 * MIB) < end
    again = sight.corrected(look, traced + 32 * MIB)
    assert again is not None
    assert again.corrected(look, traced + 32 * MIB) == again
    # A part of the step tells the same of the whole.
    assert sight.as_corrected(again).largest() == again.largest() < end
    # Too far from a real run in either direction, and it is believed no more.
    assert sight.corrected(look, round(traced * 1.4)) is None
    assert sight.corrected(look, round(traced * 0.9)) is None


@pytest.mark.usefixtures("on_a_gpu")
def test_what_may_be_held_beside_the_step_is_no_part_of_each_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frozen weights in a fresh process: what was taken off for cuBLAS is not cuBLAS' yet."""
    monkeypatch.setattr(predict_first, "held_beside", lambda *_: (2 * GIB, 65 * MIB))
    sight = Foresight.of(wide(), budget_bytes=4 * GIB)
    assert sight is not None
    look = sight.size_to_confirm()
    assert look is not None
    seen = sight.corrected(look, sight.oracle.peak(look) + 65 * MIB)
    assert seen is not None
    assert seen.oracle.residual == (2 * GIB + 65 * MIB, 0.0)
    sizes = [sight.largest(), seen.largest()]
    assert 0.95 * (sizes[0] or 0) < (sizes[1] or 0) < (sizes[0] or 0)


@pytest.mark.usefixtures("on_a_gpu")
def test_a_square_is_seen_when_a_real_run_is_compared() -> None:
    """Lines through two samples and the end pass far above all between."""
    model = nn.Linear(16, 64)

    def scores(model: Any, batch: torch.Tensor) -> torch.Tensor:
        out = model(batch)
        return (out @ out.T).square().mean()

    work = batchfit.training(model, None, scores, lambda n: torch.zeros(n, 16))
    sight = Foresight.of(work, budget_bytes=GIB)
    assert sight is not None
    look = sight.size_to_confirm()
    assert look is not None
    real = trace(work, look, rules=rules_for(work, DEFAULT)).peak_bytes
    assert sight.corrected(look, real) is None


@pytest.mark.usefixtures("on_a_gpu")
def test_a_search_measures_only_where_nothing_can_be_traced() -> None:
    model = nn.Linear(16, 64)

    def reads(model: Any, batch: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = model(batch)
        return out[out > 0].sum()

    work = batchfit.training(model, None, reads, lambda n: torch.zeros(n, 16))
    assert Foresight.of(work, budget_bytes=GIB) is None


def generating_gpt2(layers: int = 4, width: int = 64) -> Any:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    shape = {"n_layer": layers, "n_head": 4, "n_embd": width, "vocab_size": 128, "n_positions": 256}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**shape, bos_token_id=None, eos_token_id=None)
    )


def generating_llama() -> Any:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    heads = {"num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=128, hidden_size=256, intermediate_size=512, **heads)
    return transformers.LlamaForCausalLM(config)


def generating_t5() -> Any:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    shape = {"num_layers": 2, "d_model": 32, "d_kv": 8, "num_heads": 4, "d_ff": 64, "vocab_size": 128}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**shape, decoder_start_token_id=0))


def generates(model: Any, prompt: int, new: int, **options: Any) -> batchfit.Workload:
    def prompts(n: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.zeros(n, prompt, dtype=torch.long)}

    return batchfit.generation(model, prompts, max_new_tokens=new, **options)


def lines_of(work: batchfit.Workload) -> Footprint:
    return Footprint.between(*(trace(work, size, rules=rules_for(work), steps=1) for size in (64, 128)))


@pytest.mark.parametrize(
    ("make", "prompt", "new", "options"),
    [
        (generating_gpt2, 32, 40, {}),
        pytest.param(generating_llama, 7, 30, {}, marks=pytest.mark.slow),
        pytest.param(generating_gpt2, 5, 30, {"do_sample": True, "top_k": 20}, marks=pytest.mark.slow),
        pytest.param(generating_llama, 16, 24, {"num_beams": 2}, marks=pytest.mark.slow),
        pytest.param(generating_t5, 16, 30, {}, marks=pytest.mark.slow),
    ],
)
def test_the_passes_that_are_not_traced_are_those_of_every_token(
    make: Any, prompt: int, new: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    work = generates(make(), prompt, new, **options)
    few = lines_of(work)
    monkeypatch.setattr(generation, "_EIGHT", 1000)  # so far apart that all are traced
    every = lines_of(work)
    assert few.peak_bytes(500) == pytest.approx(every.peak_bytes(500), rel=1e-6)
    if isinstance(work.model, type(generating_llama())):
        assert few.events == every.events
        assert few.fixed == pytest.approx(every.fixed, abs=1)
        assert few.per_sample == pytest.approx(every.per_sample, abs=1e-6)
    else:  # one pass in eight does without a longer copy of its mask
        assert len(every.events) <= len(few.events) < 1.01 * len(every.events)


@pytest.mark.slow
def test_what_is_predicted_for_generation_has_room_for_every_token() -> None:
    work = generates(generating_llama(), 8, 20)
    answer = predict(work, budget="1GiB")
    predicted = answer.batch_size
    assert answer.margin == 0.02
    lines = lines_of(work)
    assert simulate(lines, predicted, capacity_bytes=GIB, may_retry=True).fits
    assert not simulate(lines, round(predicted * 1.15), capacity_bytes=GIB, may_retry=True).fits
    # Where the two highest moments were all that counts, far more would.
    assert lines.upper_bound(GIB) > 1.1 * predicted


def test_generation_without_lines_has_a_larger_margin() -> None:
    work = generates(generating_gpt2(layers=1), 4, 2)
    no_lines = replace(trace_workload(work, rules=rules_for(work), budget_bytes=GIB), footprint=None)
    assert _oracle.margin_of(no_lines, "no GPU") == 0.08


def test_a_cache_that_is_not_known_is_refused_whatever_the_length() -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.MistralConfig(
        vocab_size=128, hidden_size=32, intermediate_size=32, sliding_window=4, **heads
    )
    model = transformers.MistralForCausalLM(config)
    for new in (1, 8, 9):
        work = generates(model, 8, new)
        with pytest.raises(UntraceableError, match="is not known"):
            trace(work, 2, rules=rules_for(work))


def test_generation_is_its_prompt_and_its_last_token() -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=64, vocab_size=128, n_positions=256)
    model = transformers.GPT2LMHeadModel(config)

    def peak(new: int, **options: Any) -> int:
        work = batchfit.generation(
            model,
            lambda n: {"input_ids": torch.zeros(n, 16, dtype=torch.long)},
            max_new_tokens=new,
            **options,
        )
        found = trace(work, 1024, rules=rules_for(work))
        assert not {"generate", "forward"} & set(vars(model))
        return found.peak_bytes

    # Keys and values of two layers, 64 floats each, for each token of 1024 samples; one layer's twice.
    token = 2 * 64 * 4 * 1024
    short, long = peak(100), peak(200)
    assert long - short == pytest.approx(100 * 2 * token, rel=0.3)
    assert peak(100, num_beams=2) > 1.8 * short
    with pytest.raises(UntraceableError, match="cache_implementation is not traced"):
        peak(100, cache_implementation="static")
    with pytest.raises(UntraceableError, match="leaves behind more than its last pass"):
        peak(100, output_scores=True, return_dict_in_generate=True)


@pytest.mark.parametrize("keeps", ["graph", "loss", "last"])
def test_a_step_that_leaves_more_and_more_is_reported(keeps: str) -> None:
    """`losses.append(out)` keeps it all; the loss of a mean squared error holds its all by itself."""
    model = nn.Linear(64, 256)
    optimizer = torch.optim.Adam(model.parameters())
    losses: list[torch.Tensor] = []

    def step(n: int) -> None:
        optimizer.zero_grad()
        made = model(torch.randn(16 * n, 64)).tanh()
        loss = nn.functional.mse_loss(made, torch.zeros_like(made))
        loss.backward()
        optimizer.step()
        if keeps == "last":
            losses.clear()
        losses.append(made if keeps == "graph" else loss.detach())

    work = batchfit.Workload(step, state=[model, optimizer])
    prediction = batchfit.predict_batch_size(work, budget="1GiB", gpu="h200")
    told = [one for one in prediction.unseen if "more than the one before" in one]
    assert len(told) == (keeps != "last")
    assert losses == []
    for one in told:
        assert "test_predict.py:" in one


def test_no_size_is_answered_that_would_not_last_in_all_of_the_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With more room memory falls into other pieces."""
    work = batchfit.training(nn.Linear(8, 8), None, lambda m, b: m(b).sum(), lambda n: torch.zeros(n, 8))
    rules = rules_for(work, GPUS["h200"])
    traced = trace_workload(work, rules=rules, budget_bytes=2**27)
    oracle = Oracle(traced, allocator_rules(), (0.0, 0.0))
    ends = {980: 293, 1000: 288}

    def largest(self: Oracle, capacity_bytes: int, most: int | None) -> Simulation:
        size = min(ends[capacity_bytes], most or 10**6)
        return Simulation(size, True, True, 0, 0, 0)

    monkeypatch.setattr(Oracle, "largest", largest)
    found = oracle.largest_of(1000, 0.02, None)
    assert found is not None
    assert found.size == 288
    ends[1000] = 300
    found = oracle.largest_of(1000, 0.02, None)
    assert found is not None
    assert found.size == 293
