"""A throughput profile as a value: JSON both ways, a screen of 80 columns, nothing left unescaped."""

from __future__ import annotations

from typing import Any

import pytest
from notebook import notebook_html

from batchfit._charts.text_charts import as_text
from batchfit._charts.throughput_page import format_rate, format_seconds, throughput_lines
from batchfit.errors import ResultFileError
from batchfit.results import Accumulation, Bottleneck, ThroughputPoint, ThroughputProfile


def point(size: int, **more: Any) -> ThroughputPoint:
    step_s = 0.003 + 0.001 * size
    known = {"step_s": step_s, "step_s_low": step_s * 0.99, "step_s_high": step_s * 1.01}
    return ThroughputPoint(size=size, samples_per_s=size / step_s, **{**known, **more})


def profile(**more: Any) -> ThroughputProfile:
    full = {"tokens_per_s": 1.5e6, "flops_per_s": 4.1e14, "flops_share": 0.41, "peak_bytes": 100 * 2**30}
    known: dict[str, Any] = {
        "points": (point(1), point(64, gain=1.5, **full), point(128, gain=1.2, steady=False, **full)),
        "recommended": 64,
        "largest": 128,
        "within": 0.05,
        "reason": "64 is the smallest size within 5% of the best throughput",
        "diagnosis": (
            Bottleneck(kind="host-bound", share=0.4, evidence="<idle> for 40%", advice="compile it"),
            Bottleneck(kind="compute-bound", evidence="x1.9", advice="nothing"),
        ),
        "accumulation": Accumulation(
            target_batch_size=512, microbatch_size=64, microbatches=8, samples_per_s=955.0, advice="8 of 64"
        ),
        "too_large": (256,),
        "budget_bytes": 2**37,
        "device": "cuda:0",
        "device_model": "NVIDIA H200",
        "world_size": 2,
        "notes": ("a note that is rather long, " * 6,),
    }
    return ThroughputProfile(**{**known, **more})


def test_json_goes_both_ways_and_a_wrong_file_says_why() -> None:
    reported = profile()
    assert ThroughputProfile.from_json(reported.to_json()) == reported
    with pytest.raises(ResultFileError, match=r"'points.1.step_s'"):
        ThroughputProfile.from_json(reported.to_json().replace('"step_s": 0.067', '"step_s": -1'))
    with pytest.raises(ResultFileError, match="schema_version is 99"):
        ThroughputProfile.from_json(reported.to_json().replace('"schema_version": 1', '"schema_version": 99'))


def test_points_are_found_by_size() -> None:
    reported = profile()
    assert reported.at(64).gain == 1.5
    assert reported.best.size == 128
    assert reported.at(64).spread == pytest.approx(0.01)
    with pytest.raises(ValueError, match=r"size must be one that was measured \(1, 64, 128\), not 7"):
        reported.at(7)
    assert [one.kind for one in reported.bottlenecks] == ["host-bound"]
    assert "host-bound, compute-bound" in reported.summary


@pytest.mark.parametrize(("width", "left_out"), [(60, ["of peak", "FLOP/s"]), (70, ["of peak"]), (74, [])])
def test_a_narrow_screen_does_without_the_last_columns(width: int, left_out: list[str]) -> None:
    text = as_text(throughput_lines(profile(), width=width, picture=True))
    assert all(len(line) <= width for line in text.splitlines()), text
    assert [name for name in ("of peak", "FLOP/s", "tokens/s") if name not in text] == left_out
    assert ("41%" in text) is not bool(left_out)
    assert "1.5M" in text


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("width", [80, 100])
def test_the_screen_is_as_wide_as_it_may_be(width: int, plain: bool) -> None:
    text = as_text(throughput_lines(profile(), width=width, plain=plain, picture=True))
    assert all(len(line) <= width for line in text.splitlines()), text
    if plain:
        assert text.isascii()
    for part in (
        "> ",
        "64",
        "1.5M",
        "410T",
        "41%",
        "x1.50",
        "1.0%?",
        "ran out of memory",
        "NVIDIA H200",
        "2 ranks",
    ):
        assert part in text, part


def test_columns_without_figures_are_left_out() -> None:
    text = str(profile(points=(point(1), point(64), point(128))))
    assert "tokens/s" not in text
    assert "FLOP/s" not in text


def test_a_notebook_gets_the_same_escaped() -> None:
    shown = notebook_html(profile())
    assert "&lt;idle&gt;" in shown
    assert "<idle>" not in shown


@pytest.mark.parametrize(
    ("value", "text"),
    [(812.4, "812"), (14_200.0, "14.2k"), (3.1e6, "3.1M"), (999.7, "1k"), (4.12e14, "412T"), (0.5, "0.5")],
)
def test_rates_have_three_digits(value: float, text: str) -> None:
    assert format_rate(value) == text


@pytest.mark.parametrize(("value", "text"), [(1.239, "1.24 s"), (0.0352, "35.2 ms"), (8.01e-5, "80.1 us")])
def test_seconds_have_three_digits(value: float, text: str) -> None:
    assert format_seconds(value) == text


def test_times_that_vary_are_no_confident_headline() -> None:
    assert "confidence" not in str(profile())
    wide = point(128, step_s_low=0.05, step_s_high=0.20)
    shaky = profile(points=(point(1), point(64), wide))
    assert str(shaky).splitlines()[0] == "batch size 64 is recommended (low confidence)"
    assert shaky.doubt == "the times at 128 vary by 57%"
    assert "low confidence: the times at 128 vary by 57%" in shaky.summary
