"""Devices by name, and what shows a process one of them alone."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchfit._sweep.pure.visible_devices import VISIBLE, places_of


def places(devices: object, *, visible: str | None = None, gpus: int = 4) -> list[tuple[str, Any, Any]]:
    found = places_of(devices, visible=visible, count=lambda: gpus)
    return [(one.name, one.environment.get(VISIBLE), one.device) for one in found]


def test_a_process_sees_its_gpu_alone() -> None:
    assert places("cuda:0, cuda:3") == [("cuda:0", "0", None), ("cuda:3", "3", None)]
    assert places(["cuda:1", 2, "0"]) == [("cuda:1", "1", None), ("cuda:2", "2", None), ("cuda:0", "0", None)]
    assert places(["GPU-8932f937", "cuda"]) == [("GPU-8932f937",) * 2 + (None,), ("cuda:0", "0", None)]


def test_numbers_count_what_this_process_sees() -> None:
    assert places("cuda:1", visible="5,GPU-77 ", gpus=2) == [("cuda:1", "GPU-77", None)]


def test_cpus_see_no_gpu_and_may_come_twice() -> None:
    assert places("cpu,cpu:1") == [("cpu", "", None), ("cpu", "", None)]
    assert places(["mps"]) == [("mps", None, "mps")]


@pytest.mark.parametrize(
    ("devices", "more", "text"),
    [
        ([], {}, "devices must be a list of devices such as ['cuda:0', 'cuda:1'], not []"),
        (3, {}, "devices must be a list of devices such as ['cuda:0', 'cuda:1'], not 3"),
        ([True], {}, "devices must be names such as 'cuda:0', not True"),
        (["cuda:x"], {}, "devices must be names such as 'cuda:0', 'GPU-8932f937' or 'cpu', not 'cuda:x'"),
        ("cuda:0,", {}, "devices must be names such as 'cuda:0', 'GPU-8932f937' or 'cpu', not ''"),
        (["cuda:4"], {}, "devices must be among cuda:0 to cuda:3, not 'cuda:4'"),
        (["cuda:1"], {"visible": "7"}, "devices must be among cuda:0, not 'cuda:1'"),
        (["cuda:0"], {"gpus": 0}, "devices must be among cpu (there is no GPU), not 'cuda:0'"),
        (["cuda:0", "0"], {}, "devices must name each GPU once, not 'cuda:0' twice"),
        (["cuda:0", "2"], {"visible": "a,b,a"}, "devices must name each GPU once, not 'cuda:2' twice"),
    ],
)
def test_wrong_devices_are_refused(devices: object, more: dict[str, Any], text: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        places(devices, **more)
    assert str(caught.value) == text


@given(st.lists(st.integers(0, 7), min_size=1, unique=True), st.permutations([str(n) for n in range(8)]))
def test_each_gpu_goes_to_one_process(numbers: list[int], order: list[str]) -> None:
    found = places([f"cuda:{n}" for n in numbers], visible=",".join(order), gpus=8)
    assert [shown for _, shown, _ in found] == [order[n] for n in numbers]
