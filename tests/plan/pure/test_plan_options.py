"""What `plan` is asked for: GPUs by name, several of them, with their memory; methods and prices."""

from __future__ import annotations

from typing import Any

import pytest

from batchfit._plan.pure.options import PlanOptions


def columns(*gpus: str) -> list[tuple[str, int, float]]:
    found = PlanOptions(gpus=list(gpus)).columns
    return [(one.gpu.name, one.count, one.gpu.usable_bytes / 2**30) for one in found]


@pytest.mark.parametrize(
    ("text", "name", "count"),
    [
        ("rtx4090", "rtx4090", 1),
        ("RTX 4090", "rtx4090", 1),
        ("h100x8", "h100", 8),
        ("h100 x 8", "h100", 8),
        ("l4", "l4", 1),
    ],
)
def test_a_gpu_is_a_name_or_several_of_one_name(text: str, name: str, count: int) -> None:
    assert [one[:2] for one in columns(text)] == [(name, count)]


def test_names_are_taken_from_one_text_and_from_several_and_once_each() -> None:
    assert [one[0] for one in columns("t4,l4", "T4")] == ["t4", "l4"]


def test_memory_may_be_given_for_a_known_and_for_an_unknown_gpu() -> None:
    known, unknown = columns("a100-80gb=40GiB", "mygpu=24GiB")
    assert known == ("a100-80gb", 1, 40.0)
    assert unknown == ("mygpu", 1, 24.0)
    note = PlanOptions(gpus="mygpu=24GiB").columns[0].gpu.note
    assert "kernels of an h200 are assumed" in note


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"gpus": []}, "gpus must name at least one GPU"),
        ({"gpus": "nosuch"}, r"gpus must be one of .*not 'nosuch'.*nosuch=24GiB"),
        ({"gpus": "rtx4090=lots"}, "gpus"),
        ({"gpus": 3}, "gpus must be a text or a list of texts"),
        ({"gpus": "t4", "seq_len": 0}, "seq_len must be a positive integer"),
        ({"gpus": "t4", "global_batch": -1}, "global_batch must be a positive integer"),
        ({"gpus": "t4", "methods": "half"}, "methods must be full, lora or qlora, not 'half'"),
        ({"gpus": "t4", "prices": "t4"}, "prices must be GPU=AMOUNT"),
        ({"gpus": "t4", "prices": "t4=-1"}, "prices must be GPU=AMOUNT"),
        ({"gpus": "t4", "margin": 1}, "margin must be at least 0 and below 1"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], says: str) -> None:
    with pytest.raises((ValueError, TypeError), match=says):
        PlanOptions(**options)


def test_prices_go_by_the_name_of_the_gpu() -> None:
    assert PlanOptions(gpus="t4", prices=["RTX 4090=0.4", "h100=2"]).hourly == {"rtx4090": 0.4, "h100": 2.0}
