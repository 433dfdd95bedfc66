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
        ("mygpux8=24GiB", "mygpu", 8),
        ("gtx9999=8GiB", "gtx9999", 1),
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
    gpu = PlanOptions(gpus="mygpu=24GiB").columns[0].gpu
    assert "kernels of an h200 are assumed" in gpu.note
    assert gpu.caveats[-1].endswith("its memory is what was given")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"gpus": []}, "gpus must name at least one GPU"),
        ({"gpus": "nosuch"}, r"gpus must be one of .*not 'nosuch'.*nosuch=24GiB"),
        ({"gpus": "rtx409"}, r"not 'rtx409' \(like it: rtx4090, .*Its memory can be given: rtx409=24GiB"),
        ({"gpus": "rtx"}, r"not 'rtx' \(like it: ([\w-]+, ){7}[\w-]+ and \d\d more\)"),
        ({"gpus": "rtx4090=lots"}, "gpus"),
        ({"gpus": 3}, "gpus must be a text or a list of texts"),
        ({"gpus": "t4", "seq_len": 0}, "seq_len must be a positive integer"),
        ({"gpus": "t4", "global_batch": -1}, "global_batch must be a positive integer"),
        ({"gpus": "t4", "methods": "half"}, "methods must be full, lora or qlora, not 'half'"),
        ({"gpus": "t4", "prices": "t4"}, "prices must be GPU=AMOUNT"),
        ({"gpus": "t4", "prices": "t4=-1"}, "prices must be GPU=AMOUNT"),
        ({"gpus": "t4,l4", "prices": "h100=2"}, r"of a GPU that is planned for \(t4, l4\), not 'h100=2'"),
        ({"gpus": "t4", "prices": "nosuch=2"}, r"planned for \(t4\), not 'nosuch=2'"),
        ({"gpus": "t4", "margin": 1}, "margin must be at least 0 and below 1"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], says: str) -> None:
    with pytest.raises((ValueError, TypeError), match=says):
        PlanOptions(**options)


def test_prices_go_by_the_name_of_the_gpu() -> None:
    wanted = ["t4", "rtx4090", "h100x8", "mygpux2=24GiB"]
    found = PlanOptions(gpus=wanted, prices=["RTX 4090=0.4", "h100x8=16", "mygpu=0.3"]).hourly
    assert found == {"rtx4090": 0.4, "h100": 2.0, "mygpu": 0.3}, "of one GPU each"
