"""Comparing two records: changes add up, edited and moved lines are the same lines, causes are named."""

from __future__ import annotations

from collections import Counter

from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from batchfit._check.pure.compare import changed_causes, edited_lines, line_changes, row_changes
from batchfit._check.pure.record import (
    HeldRow,
    OptimizerRecord,
    PeakRecord,
    PhaseMoment,
    SourcePlace,
    TensorMade,
    other_versions,
)

LOSS, MODEL, BLOCK = (
    "t.py:loss: y = model(x)",
    "t.py:Model.forward: x = block(x)",
    "t.py:Block.forward: h = up(x)",
)


def record(
    *rows: HeldRow, more: tuple[PhaseMoment, ...] = (), line: str = "", **fields: object
) -> PeakRecord:
    size = sum(row.size for row in rows)
    moment = PhaseMoment("backward", "aten.mm.default", line, size, rows, ())
    whole = {"batch_size": 8, "card": "h200", "versions": {"torch": "2.13.0"}, **fields}
    return PeakRecord(moments=(moment, *more), **whole)  # type: ignore[arg-type]


def row(*chain: str, size: int = 1024, kind: str = "activations", of: str = "mm float32[8]") -> HeldRow:
    return HeldRow(chain, kind, size, of)


def test_a_new_line_is_the_change() -> None:
    new = "t.py:loss: y = y.clone()"
    (found,) = line_changes(record(row(LOSS)), record(row(LOSS), row(new, size=2048)))
    assert (found.chain, found.change, dict(found.before)) == ((new,), 2048, {})


def test_a_line_that_is_gone_is_a_change_below_zero() -> None:
    (found,) = line_changes(record(row(LOSS), row(BLOCK)), record(row(LOSS)))
    assert (found.chain, found.change) == ((BLOCK,), -1024)


def test_what_is_new_below_a_call_is_one_change_of_the_call() -> None:
    teacher = "t.py:loss: wanted = teacher(x)"
    before = record(row(LOSS, MODEL, BLOCK), row(teacher, size=512))
    now = record(
        row(LOSS, MODEL, BLOCK),
        row(teacher, size=512),
        row(teacher, MODEL, size=8192),
        row(teacher, MODEL, BLOCK, size=8192),
    )
    (found,) = line_changes(before, now)
    assert (found.chain, found.change, found.whole) == ((teacher,), 16384, True)


def test_an_edited_call_is_named_where_nothing_below_it_was_edited() -> None:
    edited = "t.py:Model.forward: x = checkpoint(block, x)"
    before = record(row(LOSS, MODEL, BLOCK, size=8192), row(LOSS, MODEL, size=1024))
    now = record(row(LOSS, edited, BLOCK, size=4096), row(LOSS, edited, size=1024))
    (found,) = line_changes(before, now)
    assert (found.chain, found.before_text, found.change) == ((LOSS, edited), MODEL, -4096)


def test_an_edited_line_below_an_edited_call_is_named_itself() -> None:
    call, inner = "t.py:loss: z = model(x)", "t.py:Block.forward: h = up(x).clone()"
    before = record(row(LOSS, MODEL, BLOCK), row(LOSS, MODEL))
    now = record(row(call, MODEL, inner, size=4096), row(call, MODEL))
    (found,) = line_changes(before, now)
    assert found.chain == (call, MODEL, inner)
    assert (found.before_text, found.change) == (BLOCK, 3072)


def test_a_line_that_is_reached_another_way_has_not_changed() -> None:
    before = record(row(LOSS, BLOCK), row(LOSS, MODEL))
    now = record(row(LOSS, "t.py:loss: y = helper(x)", BLOCK), row(LOSS, MODEL))
    assert line_changes(before, now) == []


def test_what_a_new_way_takes_more_is_its_change() -> None:
    helper = "t.py:loss: y = helper(x)"
    (found,) = line_changes(record(row(LOSS, BLOCK)), record(row(LOSS, helper, BLOCK, size=3072)))
    assert (found.chain, found.change) == ((LOSS, helper), 2048), "the new call is named, not what it calls"


def test_a_line_that_was_split_into_two_has_not_changed() -> None:
    one, out, loss = "t.py:f: return m(x).loss", "t.py:f: out = m(x)", "t.py:f: return out.loss"
    before = record(row(one, size=80))
    assert line_changes(before, record(row(out, size=80), row(loss, size=0))) == []
    more = line_changes(before, record(row(out, size=96), row(loss, size=0)))
    assert [(one.chain, one.change) for one in more] == [((out,), 16)]
    # Another tensor, or one of another function, is another one.
    other = line_changes(before, record(row(out, size=80, of="exp float32[8]"), row(loss, size=0)))
    assert len(other) == 2
    assert len(line_changes(before, record(row("t.py:g: y = 1", size=80)))) == 2


def test_like_phases_are_compared() -> None:
    forward = PhaseMoment("forward", "aten.mm.default", LOSS, 9000, (row(LOSS, size=9000),), ())
    before = record(row(BLOCK, size=1024), more=(forward,))
    now = record(row(BLOCK, size=20480))
    (found,) = line_changes(before, now)
    assert (found.chain, found.change) == ((BLOCK,), 19456)


def test_the_moment_of_the_same_line_is_compared() -> None:
    loss = PhaseMoment("backward", "aten.mm.default", LOSS, 900, (row(LOSS, size=900),), ())
    before = record(row(BLOCK, size=1024), line=BLOCK, more=(loss,))
    edited = LOSS.replace("y =", "z =")
    now = record(row(edited, size=2048), line=edited)
    (found,) = line_changes(before, now)
    assert (found.chain, found.change) == ((edited,), 1148)
    elsewhere = record(row(MODEL, size=2048), line=MODEL)
    assert sum(one.change for one in line_changes(before, elsewhere)) == 1024, "the highest of the phase"


def test_another_optimizer_is_one_change_at_its_line() -> None:
    place = "t.py:make: o = AdamW(p)"
    state = [row(f"t.py:Block.__init__: self.{name} = Linear()", kind="optimizer") for name in "abc"]
    twice = [one._replace(size=2048) for one in state]
    before = record(*state, optimizer=OptimizerRecord("SGD", "t.py:make: o = SGD(p)", 1.0))
    (found,) = line_changes(before, record(*twice, optimizer=OptimizerRecord("AdamW", place, 2.0)))
    assert (found.chain, found.change) == ((place,), 3072)
    same = record(*twice, optimizer=OptimizerRecord("SGD", place, 1.01))
    assert len(line_changes(before, same)) == 3, "the parameters are larger, not their state"


def test_edited_lines_are_paired_once_and_by_function() -> None:
    old = {"t.py:f: y = model(x)", "t.py:g: y = model(x, 1)", "other"}
    new = {"t.py:f: y = model(x).float()", "t.py:h: y = model(x, 1)", "another"}
    assert edited_lines(old, new) == {
        "t.py:f: y = model(x)": "t.py:f: y = model(x).float()",
        "t.py:g: y = model(x, 1)": "t.py:h: y = model(x, 1)",
    }
    assert edited_lines({"t.py:f: loss.backward()"}, {"t.py:f: y = x.clone()"}) == {}


def test_a_line_that_makes_another_dtype_and_is_gone_at_the_peak_is_a_cause() -> None:
    cast = row("t.py:loss: y = y.double()", size=0, of="to_copy float64[8]")
    known = row(MODEL, size=0, of="mm float32[4]")
    before = record(row(LOSS), known)
    now = record(row(LOSS, size=2048), cast, known._replace(of="mm float32[8]"))
    assert changed_causes(before, now) == [cast]
    assert changed_causes(now, now) == []


def test_a_library_that_one_record_alone_uses_has_no_other_version() -> None:
    one = record(row(LOSS), versions={"torch": "2.12.0", "peft": "0.1"})
    two = record(row(LOSS), versions={"torch": "2.13.0"})
    assert other_versions(one, two) == ["torch"]


def test_places_and_tensors_are_read_back() -> None:
    place = SourcePlace("src/a b.py", "Block.forward", "y = {'a: b': f(x)}")
    assert SourcePlace.parsed(place.text) == place
    assert SourcePlace.parsed("cuBLAS workspaces").file == ""
    assert TensorMade.parsed("to_copy float32[8, 512]") == ("to_copy", "float32", "[8, 512]")
    assert TensorMade.parsed("float32[]") == ("", "float32", "[]")
    assert TensorMade.parsed("mse_loss") == ("mse_loss", "", "")


TEXTS = st.sampled_from([LOSS, MODEL, BLOCK, "t.py:f: y = model(x)", "t.py:g: z = 1", "cuBLAS workspaces"])
ROWS = st.lists(
    st.builds(
        HeldRow,
        st.lists(TEXTS, min_size=1, max_size=3).map(tuple),
        st.sampled_from(["activations", "temporaries", "optimizer"]),
        st.integers(0, 5000),
        st.just("mm float32[8]"),
    ),
    max_size=8,
    unique_by=lambda one: one[:2],
)


@given(ROWS, ROWS)
@examples(200)
def test_changes_add_up_to_the_change(before: list[HeldRow], now: list[HeldRow]) -> None:
    total = sum(one.size for one in now) - sum(one.size for one in before)
    for found in (line_changes(record(*before), record(*now)), row_changes(before, now)):
        assert sum(one.change for one in found) == total
        kinds: Counter[str] = Counter()
        for one in found:
            assert one.change or one.whole
            kinds.update(one.now)
            kinds.subtract(one.before)
        assert sum(kinds.values()) == total


@given(ROWS)
@examples(50)
def test_a_record_has_not_changed_against_itself(rows: list[HeldRow]) -> None:
    assert line_changes(record(*rows), record(*rows)) == []
