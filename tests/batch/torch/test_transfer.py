"""The order of copies and use on a CUDA device, without one: fake tensors and streams that keep a log."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from batchfit._engine.batch import transfer as feeding
from batchfit._engine.batch.transfer import feed

CUDA = torch.device("cuda", 0)


class Stream:
    """Says what it was asked for; an event is the number of copies begun before it."""

    def __init__(self, log: list[Any], name: str) -> None:
        self.log, self.name = log, name

    def wait_stream(self, other: Stream) -> None:
        self.log.append((self.name, "waits for", other.name))

    def record_event(self) -> int:
        return sum(entry == "copy" for entry in self.log)

    def wait_event(self, event: int) -> None:
        self.log.append((self.name, "waits for copy", event))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    entries: list[Any] = []
    main, side = Stream(entries, "main"), Stream(entries, "side")

    def copied(target: Any, source: Any, non_blocking: bool = False) -> Any:
        assert non_blocking
        entries.append("copy")
        return target

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(feeding, "_side_stream", lambda device: side)
    monkeypatch.setattr(feeding, "_pinned", lambda tensor: tensor)
    monkeypatch.setattr(torch.Tensor, "copy_", copied)
    monkeypatch.setattr(
        torch.Tensor, "to", lambda tensor, device, non_blocking: torch.empty_like(tensor, device=device)
    )
    with FakeTensorMode():
        yield entries


def micros(count: int) -> list[Any]:
    return [{"image": torch.empty(64, 1024), "label": torch.empty(64), "scale": 0.5} for _ in range(count)]


def test_the_next_copy_is_under_way_while_one_is_in_use(log: list[Any]) -> None:
    for micro in feed(micros(3), CUDA):
        assert (micro["image"].device, micro["label"].device, micro["scale"]) == (CUDA, CUDA, 0.5)
        log.append("use")
    begin = [("side", "waits for", "main"), "copy"]
    assert log == [
        *begin,
        ("main", "waits for copy", 1),
        *begin,
        "use",
        ("main", "waits for copy", 2),
        *begin,
        "use",
        ("main", "waits for copy", 3),
        "use",
    ]


def test_a_copy_that_nobody_will_use_is_waited_for(log: list[Any]) -> None:
    feeding_now = feed(micros(3), CUDA)
    next(feeding_now)
    feeding_now.close()  # type: ignore[attr-defined]
    assert log[-1] == ("main", "waits for copy", 2)


def test_a_copy_that_fails_half_way_is_waited_for(log: list[Any]) -> None:
    class Stubborn:
        def to(self, device: Any) -> Any:
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        list(feed([{"image": torch.empty(64, 1024), "rest": Stubborn()}], CUDA))
    assert log == [("side", "waits for", "main"), "copy", ("main", "waits for", "side")]


def test_small_parts_take_no_stream(log: list[Any]) -> None:
    assert len(list(feed([{"ids": torch.empty(8)}] * 2, CUDA))) == 2
    assert log == []
