"""Pictures made of characters, and the screen that explains memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from notebook import notebook_html

from batchfit._charts.memory_page import fact, memory_lines
from batchfit._charts.text_charts import Level, as_text, bar, curves, shortened, ticks
from batchfit.results import Holder, MemoryExplanation, Moment, WhatIf

GIB = 2**30


class TestBar:
    @given(st.floats(-1, 2), st.integers(1, 80), st.booleans())
    def test_is_never_longer_than_it_may_be(self, share: float, width: int, plain: bool) -> None:
        text = bar(share, width, plain=plain)
        assert len(text) <= width
        assert bool(text) is (share > 0)
        assert not plain or text.isascii()

    def test_is_as_long_as_the_share(self) -> None:
        assert bar(0.5, 8) == "████"
        assert bar(0.55, 10) == "█████▌"
        assert bar(0.55, 10, plain=True) == "######"
        assert bar(1e-9, 10) == "▏"  # what is there is seen


class TestTicks:
    @given(st.floats(1e-3, 1e9), st.integers(2, 20))
    def test_are_even_and_end_within(self, top: float, most: int) -> None:
        found = ticks(top, most)
        assert found[0] == 0
        assert 1 <= len(found) <= most
        assert found[-1] <= top * (1 + 1e-6)

    @pytest.mark.parametrize(
        ("top", "most", "expected"),
        [(83, 6, [0, 20, 40, 60, 80]), (29000, 4, [0, 10000, 20000]), (1, 3, [0, 0.5, 1]), (0, 5, [0])],
    )
    def test_are_round(self, top: float, most: int, expected: list[float]) -> None:
        assert ticks(top, most) == expected


@given(st.text(max_size=60), st.integers(3, 40), st.booleans())
def test_a_shortened_text_keeps_its_end(text: str, width: int, plain: bool) -> None:
    short = shortened(text, width, plain=plain)
    assert len(short) <= width
    assert short == text if len(text) <= width else text.endswith(short[3:])


LINE = [(1, 0.5), (10, 5.0), (100, 50.0), (120, 60.0)]


def picture(**changes: object) -> list[str]:
    settings: dict[str, object] = {
        "width": 78,
        "height": 10,
        "x_name": "batch size",
        "y_name": "GiB",
        **changes,
    }
    levels = [Level(52.0, "52.0 GiB: 100", (100, 50.0)), Level(12.0, "12.0 GiB: 20", (20, 10.0))]
    return as_text(curves([LINE], levels, **settings)).splitlines()  # type: ignore[arg-type]


class TestCurves:
    @pytest.mark.parametrize("width", [12, 20, 30, 50, 78, 120])
    @pytest.mark.parametrize("plain", [False, True])
    def test_stays_within_its_width(self, width: int, plain: bool) -> None:
        rows = picture(width=width, plain=plain)
        assert max(map(len, rows)) <= width
        assert not plain or "".join(rows).isascii()

    def test_marks_lie_on_the_curve_and_lines_at_their_height(self) -> None:
        rows = picture(plain=True)
        assert rows[0].strip() == "GiB"
        high = next(row for row in rows if "52.0 GiB: 100" in row)
        low = next(row for row in rows if "12.0 GiB: 20" in row)
        assert rows.index(high) < rows.index(low)
        assert "---" in high
        assert "---" in low
        marked = [row for row in rows if "O" in row]
        assert len(marked) == 2
        assert marked[0].index("O") > marked[1].index("O")  # the larger size is higher and further right
        assert rows[-1].split() == ["0", "50", "100", "batch", "size"]

    def test_rises_without_gaps(self) -> None:
        steep = [(1.0, 0.0), (50.0, 0.0), (51.0, 100.0), (100.0, 100.0)]
        rows = as_text(
            curves([steep], [], width=60, height=12, x_name="x", y_name="y", plain=True)
        ).splitlines()[1:13]
        assert all("*" in row for row in rows)

    def test_two_lines_in_one_row_share_its_label(self) -> None:
        levels = [Level(50.0, "a: 1"), Level(50.1, "b: 2")]
        text = as_text(curves([LINE], levels, width=78, height=8, x_name="x", y_name="y"))
        assert "a: 1, b: 2" in text

    def test_a_flat_and_short_curve_is_drawn(self) -> None:
        text = as_text(curves([[(1, 3.0), (2, 3.0)]], [], width=40, height=5, x_name="x", y_name="y"))
        assert any("⠀" < letter <= "⣿" for letter in text)


def holder(name: str, gib: float, share: float) -> Holder:
    return Holder(name=name, peak_bytes=round(gib * GIB), share=share)


def what_if(change: str, after: int, peak_gib: float, **more: str) -> WhatIf:
    return WhatIf(
        change=change,
        how=more.get("how", f"how to have {change}"),
        cost=more.get("cost", ""),
        largest_before=41,
        largest_after=after,
        peak_bytes_before=61 * GIB,
        peak_bytes_after=round(peak_gib * GIB),
    )


def explanation(**changes: object) -> MemoryExplanation:
    values: dict[str, object] = {
        "batch_size": 32,
        "budget_bytes": round(78.6 * GIB),
        "largest": 41,
        "peak_bytes": 61 * GIB,
        "reserved_bytes": 62 * GIB,
        "peak_phase": "backward",
        "peak_operation": "aten.mm.default",
        "peak_source": "modeling_gpt2.py:1092 forward",
        "card": "h100",
        "based_on": "no GPU",
        "kinds": (holder("activations", 45, 0.738), holder("weights", 16, 0.262)),
        "modules": tuple(holder(f"transformer.h.*.mlp.{'x' * 20}.c_fc{n}", 9, 0.15) for n in range(7)),
        "lines": (
            holder("modeling_gpt2.py:1092 forward_with_a_long_name", 9, 0.15),
            holder("b.py:2 f", 1, 0.02),
        ),
        "what_ifs": (
            what_if("a fused optimizer", 42, 60),
            what_if("activation checkpointing of 12 GPT2Block", 77, 33, cost="one more forward pass"),
            what_if("expandable segments", 41, 61),
        ),
        "timeline": (Moment(at=0, phase="forward", kinds={"weights": 16 * GIB}),),
        "unseen": ("torch.compile of the model: traced as if not compiled",),
        **changes,
    }
    return MemoryExplanation(**values)  # type: ignore[arg-type]


class TestScreen:
    @pytest.mark.parametrize("width", [60, 69, 70, 80, 120])
    @pytest.mark.parametrize("plain", [False, True])
    def test_fits_the_screen(self, width: int, plain: bool) -> None:
        rows = as_text(memory_lines(explanation(), width=width, plain=plain)).splitlines()
        assert max(map(len, rows)) <= width
        assert len(rows) <= (34 if width >= 70 else 50)
        # Side by side where there is room.
        assert any("modules" in row and "source lines" in row for row in rows) is (width >= 70)
        assert sum("source lines" in row for row in rows) == 1
        assert not plain or "".join(rows).isascii()

    def test_the_answer_first(self) -> None:
        rows = str(explanation()).splitlines()
        assert rows[0] == "batch size 32 needs 61.0 GiB of 78.6 GiB; the largest batch is 41"
        assert rows[0] == explanation().summary
        assert " ".join(rows[1].split()) == "peak in backward, aten.mm at modeling_gpt2.py:1092 forward"

    def test_holders_are_named_by_what_distinguishes_them(self) -> None:
        text = str(explanation())
        assert "c_fc0" in text
        assert "modeling_gpt2.py:1092 " in text  # without its function, for which there is no room
        assert "2 more" in text  # the list adds up

    def test_changes_come_best_first_and_useless_ones_in_a_line(self) -> None:
        text = str(explanation())
        best, second = (
            text.index("41 → 77 x1.88  activation checkpointing"),
            text.index("41 → 42 x1.02  a fused"),
        )
        assert best < second
        assert "      costs one more forward pass\n" in text
        assert "little or no gain: expandable segments" in text
        assert "caveat: torch.compile of the model" in text

    def test_two_changes_at_once_are_listed_where_each_is(self) -> None:
        one, two = what_if("checkpointing", 77, 33), what_if("bf16", 60, 40)
        both = what_if("checkpointing and bf16", 150, 20)
        text = str(explanation(what_ifs=(one, two, both)))
        assert "how   both of these, which are below" in text
        assert "how to have checkpointing and bf16" not in text
        alone = str(explanation(what_ifs=(both,)))
        assert "how to have checkpointing and bf16" in alone

    def test_without_a_budget_the_peak_is_what_changes(self) -> None:
        text = str(explanation(budget_bytes=None, largest=None))
        assert text.splitlines()[0] == "batch size 32 needs 61.0 GiB"
        assert "61.0 GiB → 33.0 GiB  activation checkpointing" in text
        assert "41 →" not in text

    def test_where_nothing_helps_it_says_so(self) -> None:
        text = str(explanation(what_ifs=(what_if("expandable segments", 41, 61),)))
        assert "nothing that was tried helps: expandable segments" in text
        assert "what would change" not in str(explanation(what_ifs=()))
        assert "; no batch fits" in str(explanation(largest=0))

    def test_where_nothing_fitted_before_there_is_no_factor(self) -> None:
        first, more = (
            what_if("bf16", after, 33).model_copy(update={"largest_before": 0}) for after in (1, 2)
        )
        text = str(explanation(largest=0, what_ifs=(first, more.model_copy(update={"change": "less"}))))
        assert "0 → 2 fits  less" in text
        assert "0 → 1 fits  bf16" in text, "one sample is a gain where none fitted"
        assert text.index("0 → 2") < text.index("0 → 1")
        assert "x2.00" not in text

    def test_a_notebook_shows_the_same(self) -> None:
        shown = notebook_html(explanation(peak_source="<string>:3 <lambda>"))
        assert "&lt;lambda&gt;" in shown
        assert "activation checkpointing" in shown

    def test_a_fact_is_wrapped_below_itself(self) -> None:
        rows = as_text(fact("peak", "word " * 30, 60)).splitlines()
        assert rows[0].startswith("  peak       word")
        assert rows[1].startswith(" " * 13 + "word")
        assert max(map(len, rows)) <= 60

    def test_travels_as_json(self) -> None:
        reported = explanation()
        assert MemoryExplanation.from_json(reported.to_json()) == reported
