"""Who holds a peak: partitions that add up, alike modules together, a timeline that keeps its maximum."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from batchfit._engine.allocator.footprint import KINDS, Origin, Trace
from batchfit._explain.pure.holders import (
    Peak,
    by_kind,
    by_line,
    by_module,
    grained,
    short_operation,
    timeline,
)

CLASSES = {
    "": "Net",
    "stem": "Stem",
    "stages": "ModuleList",
    "stages.0": "Stage",
    "stages.0.0": "Block",
    "stages.0.1": "Block",
    "stages.1": "Stage",
    "stages.1.0": "Block",
    "stages.1.1": "Block",
}
MODULES = ("", "Net", "stem", "stages.0", "stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1")


def trace_of(*blocks: tuple[int, Origin], frees: tuple[int, ...] = ()) -> Trace:
    """All blocks are made in one step, then some are freed."""
    events = (*range(len(blocks)), *(~one for one in frees))
    sizes, origins = zip(*blocks, strict=True)
    return Trace(1, sizes, origins, events, 0, (len(events),))


def weights(module: str, size: int) -> tuple[int, Origin]:
    return size, Origin("weights", "held", f"{module}.weight")


def kept(module: str, size: int, *, source: str = "net.py:3 forward") -> tuple[int, Origin]:
    return size, Origin("activations", "forward", module, source, "aten._softmax.default")


origins = st.builds(
    Origin,
    st.sampled_from(KINDS),
    st.sampled_from(("batch", "forward", "backward", "optimizer")),
    st.sampled_from(MODULES),
    st.sampled_from(("", "net.py:3 forward", "loss.py:7 loss")),
    st.sampled_from(("aten.mm.default", "cuBLAS", "plan of aten.convolution.default", "")),
)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Any stream: blocks are made and freed in any order, in two steps."""
    sizes: list[int] = []
    made: list[Origin] = []
    events: list[int] = []
    live: list[int] = []
    for _ in range(draw(st.integers(2, 30))):
        frees = draw(st.booleans())
        if live and frees:
            events.append(~live.pop(draw(st.integers(0, len(live) - 1))))
        else:
            live.append(len(sizes))
            events.append(len(sizes))
            sizes.append(draw(st.integers(0, 5000)))
            made.append(draw(origins))
    cut = draw(st.integers(0, len(events) - 1))
    return Trace(4, tuple(sizes), tuple(made), tuple(events), 0, (cut, len(events)))


@given(traces())
def test_each_way_of_telling_adds_up_to_the_peak(trace: Trace) -> None:
    peak = Peak.of(trace)
    live, highest = 0, 0
    for position, event in enumerate(trace.events):
        live += grained(trace.sizes[event]) if event >= 0 else -grained(trace.sizes[~event])
        highest = max(highest, live if position >= trace.step_ends[0] else 0)
    assert peak.size == highest
    for told in (by_kind(peak), by_line(peak), by_module(peak, CLASSES)):
        assert sum(one.size for one in told) == peak.size
        assert sum(one.blocks for one in told) == len(peak.live)
        for one in told:
            assert sum(one.kinds.values()) == one.size
            assert not one.parts or sum(part.size for part in one.parts) == one.size
    sizes = [one.size for one in by_module(peak, CLASSES)]
    assert sizes == sorted(sizes, reverse=True)


@given(traces(), st.integers(1, 12))
def test_a_timeline_is_short_and_keeps_the_highest_moment(trace: Trace, points: int) -> None:
    found = timeline(trace, points)
    assert len(found) <= points + 1
    assert max(sum(kinds.values()) for _, _, kinds in found) == Peak.of(trace).size
    assert [at for at, _, _ in found] == sorted({at for at, _, _ in found})
    assert found[-1][0] < len(trace.events) - trace.step_ends[0]


def test_alike_blocks_are_one_row_and_unlike_ones_several() -> None:
    """Two stages of one class whose weights differ much are two things; the blocks of each are one."""
    blocks = [weights(f"stages.{i}.{j}", 1024 * (1 + 9 * i)) for i in (0, 1) for j in (0, 1)]
    blocks += [kept(f"stages.{i}.{j}", 512 * (8 - 7 * i)) for i in (0, 1) for j in (0, 1)]
    told = by_module(Peak.of(trace_of(*blocks)), CLASSES)
    assert [(one.name, one.size, one.repeats) for one in told] == [
        ("stages.1.* (2 x Block)", 2 * 10240 + 2 * 512, 2),
        ("stages.0.* (2 x Block)", 2 * 1024 + 2 * 4096, 2),
    ]


def test_one_that_is_much_smaller_stays_alone() -> None:
    classes = {"": "Net", **{str(number): "Linear" for number in range(4)}}
    blocks = [weights(str(number), 512 if number == 3 else 51200) for number in range(4)]
    told = by_module(Peak.of(trace_of(*blocks)), classes)
    assert [(one.name, one.size) for one in told] == [("* (3 x Linear)", 3 * 51200), ("3", 512)]


def test_blocks_within_blocks_are_counted_for_one_of_them() -> None:
    classes = {"": "Net", "a": "ModuleList"}
    for outer in range(3):
        classes |= {f"a.{outer}": "Block", f"a.{outer}.0": "Linear", f"a.{outer}.1": "Linear"}
    blocks = [weights(f"a.{outer}.{inner}", 512) for outer in range(3) for inner in range(2)]
    (told,) = by_module(Peak.of(trace_of(*blocks)), classes)
    assert (told.name, told.repeats) == ("a.* (3 x Block)", 3)
    assert [(part.name, part.size, part.repeats) for part in told.parts] == [("* (2 x Linear)", 3072, 6)]


def test_what_a_module_does_itself_goes_by_its_function() -> None:
    blocks = [weights("stem", 512), kept("Net", 51200, source="loss.py:7 cross_entropy"), kept("stem", 51200)]
    told = by_module(Peak.of(trace_of(*blocks)), CLASSES)
    assert {one.name: one.size for one in told} == {"stem": 51712, "Net: cross_entropy": 51200}
    told = by_module(Peak.of(trace_of(weights("stem", 512), kept("Net", 51200))), CLASSES)
    assert [one.name for one in told] == ["Net itself", "stem"]


def test_what_belongs_to_no_module_says_what_it_is() -> None:
    blocks = [
        (512, Origin("batch", "batch")),
        (512, Origin("temporaries", "optimizer", operation="aten._foreach_sqrt.default")),
        (512, Origin("workspaces", "forward", operation="cuBLAS")),
        (1024, Origin("activations", "forward", "", "train.py:9 loss_of", "aten.mul.Tensor")),
    ]
    peak = Peak.of(trace_of(*blocks))
    names = {one.name for one in by_module(peak, CLASSES, outside="loss")}
    assert names == {"loss (train.py:9)", "batch", "optimizer step", "cuBLAS workspaces"}
    lines = {one.name for one in by_line(peak)}
    assert lines == {"train.py:9 loss_of", "batch", "optimizer step", "cuBLAS workspaces"}


def test_what_is_freed_before_the_peak_is_not_reported() -> None:
    trace = Trace(1, (9000, 512), (kept("stem", 1)[1],) * 2, (0, ~0, 1), 0, (2, 3))
    assert Peak.of(trace).size == 512  # the first step does not count, the second does


def test_operations_are_named_as_people_write_them() -> None:
    assert short_operation("aten._log_softmax.default") == "log_softmax"
    assert short_operation("aten._to_copy.default") == "to"
    assert short_operation("plan of aten.convolution.default") == "convolution plan"
    assert short_operation("cuBLAS") == "cuBLAS"
