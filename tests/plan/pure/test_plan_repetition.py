"""The trace of a deep model from three shallow ones: the same, or refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchfit._engine.allocator.footprint import Origin, ShapeChangedError, Trace, TraceLog
from batchfit._plan.pure.repetition import NotRepeatedError, Repetition

Layer = Callable[[int, int], int]  # bytes of what layer `at` of `count` saves


def traced(
    count: int, size: int = 1, *, saves: Layer | None = None, steps: int = 2, early: int = -1
) -> Trace:
    """A model of `count` layers: weights, what forward saves, gradients, an optimizer's state.

    The layer `early` lets go in forward of what the others keep for backward.
    """
    log = TraceLog()

    def block(nbytes: int, kind: str, phase: str, layer: int, name: str) -> int:
        return log.allocate(nbytes, Origin(kind, phase, f"model.layers.{layer}.{name}", "", name))

    for at in range(count):
        block(100, "weights", "setup", at, "up")
        block(60, "weights", "setup", at, "down")
    begins = len(log._events)
    ends = []
    gradients: list[int] = []
    for step in range(steps):
        log._events += [~one for one in gradients]
        gradients, saved = [], []
        batch = log.allocate(8 * size, Origin("batch", "batch"))
        for at in range(count):
            nbytes = 16 * size if saves is None else saves(at, count) * size
            saved.append([block(nbytes, "activations", "forward", at, name) for name in ("up", "up", "down")])
            if at == early:
                log._events.append(~saved[-1].pop())
        for at in reversed(range(count)):
            gradients.append(block(100, "gradients", "backward", at, "up"))
            log._events += [~one for one in saved[at]]
            gradients.append(block(60, "gradients", "backward", at, "down"))
        log._events.append(~batch)
        for at in range(count if step == 0 else 0):
            block(200, "optimizer", "optimizer", at, "up")
            block(120, "optimizer", "optimizer", at, "down")
        ends.append(len(log._events))
    return log.written(size, begins, ends).ordered()


@given(count=st.integers(4, 40), size=st.integers(1, 9), steps=st.sampled_from([1, 2]))
def test_a_deep_model_is_traced_by_shallow_ones(count: int, size: int, steps: int) -> None:
    learned = Repetition.learned(*(traced(one) for one in (2, 3, 4)), more=count - 3)
    assert learned.extended(traced(3, size, steps=steps)) == traced(count, size, steps=steps)


def test_layers_in_turns_come_again_by_the_turn() -> None:
    def every_second(at: int, count: int) -> int:
        return 16 if at % 2 else 48

    def turn(count: int) -> Trace:
        return traced(count, saves=every_second)

    learned = Repetition.learned(turn(2), turn(4), turn(6), more=5)
    assert learned.extended(turn(4)) == turn(14)
    with pytest.raises(NotRepeatedError):
        Repetition.learned(turn(2), turn(3), turn(4), more=5)


def test_first_layers_of_their_own_stay_as_they_are() -> None:
    def dense_first(at: int, count: int) -> int:
        return 64 if at < 2 else 16

    depths = [traced(one, saves=dense_first) for one in (3, 4, 5)]
    learned = Repetition.learned(*depths, more=9)
    assert learned.extended(depths[1]) == traced(13, saves=dense_first)


@pytest.mark.parametrize(
    "saves",
    [
        lambda at, count: 16 * count,  # all layers' outputs in one tensor
        lambda at, count: 16 + at,
        lambda at, count: 16 if count < 4 else 17,
        lambda at, count: 48 if at == 1 and count == 2 else 16,
    ],
    ids=["grows with the depth", "grows with the layer", "only in the deepest", "only in the shallowest"],
)
def test_what_does_not_repeat_is_refused(saves: Layer) -> None:
    with pytest.raises(NotRepeatedError):
        Repetition.learned(*(traced(one, saves=saves) for one in (2, 3, 4)), more=9)


def test_what_one_layer_frees_early_is_refused() -> None:
    with pytest.raises(NotRepeatedError):
        Repetition.learned(traced(2), traced(3), traced(4, early=1), more=9)


def test_another_stream_at_another_size_is_not_extended() -> None:
    learned = Repetition.learned(*(traced(one) for one in (2, 3, 4)), more=9)
    with pytest.raises(ShapeChangedError):
        learned.extended(traced(3, 5, early=1))
