"""Charts: well-formed whatever they hold, escaped, inside their frame, and readable without colour."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from batchfit._charts.svg import LETTER, SHAPES, Axis, Chart, Mark, Rule, Series, chart_css, draw, key

ANY = st.floats(0, 1e18, allow_nan=False)
MARKS = st.builds(
    Mark,
    x=ANY,
    y=ANY,
    tip=st.text(max_size=12),
    shape=st.sampled_from(sorted(SHAPES)),
    label=st.text(max_size=8),
    low=st.none() | ANY,
    high=st.none() | ANY,
)
SERIES = st.builds(
    Series,
    name=st.text(max_size=12),
    marks=st.lists(MARKS, max_size=5).map(tuple),
    role=st.just("c0"),
    line=st.sampled_from(["", "solid", "dashed", "dotted", "stairs", "area"]),
    named=st.booleans(),
)
AXES = st.builds(Axis, name=st.text(max_size=8), log=st.booleans(), whole=st.booleans())
CHARTS = st.builds(
    Chart,
    title=st.text(max_size=20),
    about=st.text(max_size=20),
    x=AXES,
    y=AXES,
    series=st.lists(SERIES, max_size=3).map(tuple),
    rules=st.lists(
        st.builds(Rule, at=ANY, label=st.text(max_size=9), axis=st.sampled_from("xy")), max_size=3
    ).map(tuple),
)


def parsed(markup: str) -> ElementTree.Element:
    return ElementTree.fromstring(markup)


def simple(**changes: object) -> Chart:
    marks = (Mark(1, 2, "one"), Mark(8, 4, "eight", label="answer 8"))
    values: dict[str, object] = {
        "title": "T",
        "about": "A",
        "x": Axis("size", switched=True),
        "y": Axis("memory, GiB"),
        "series": (Series("fits", marks, "fits", line="solid"),),
        "rules": (Rule(5, "budget 5 GiB"),),
    }
    return Chart(**{**values, **changes})  # type: ignore[arg-type]


@given(chart=CHARTS, width=st.sampled_from([340, 820]))
@examples(120)
def test_any_chart_is_well_formed_and_inside_its_frame(chart: Chart, width: int) -> None:
    picture = draw(chart, width=width, height=280, name="a")
    root = parsed(picture)
    assert root.attrib["viewBox"] == f"0 0 {width} 280"
    for x, y in re.findall(r'transform="translate\((\S+) (\S+)\)"', picture):
        assert 0 <= float(x) <= width
        assert 0 <= float(y) <= 280
    for text in root.iter("text"):
        assert 0 <= float(text.attrib["x"]) <= width
        assert 0 <= float(text.attrib["y"]) <= 280
    # All drawings of a chart have the same points in the same order: the script copies texts by number.
    other = draw(chart, width=1160 - width, height=280, log=not chart.begins_log, tips=False)
    assert picture.count('class="pt') == other.count('class="pt')
    assert "<title>" not in other.replace("<title>", "", 1)


def test_texts_are_escaped_and_nothing_else_gets_in() -> None:
    bad = "<script>alert('x')</script>\"&\x00\ud800"
    chart = simple(
        title=bad, about=bad, x=Axis(bad), y=Axis(bad), rules=(Rule(1, bad),),
        series=(Series(bad, (Mark(1, 1, bad, label=bad),), "c0", line="solid", named=True),),
    )  # fmt: skip
    for picture in (draw(chart, width=820, height=300, name="a"), key(chart.series[0])):
        assert "script>" not in picture.replace("&lt;script&gt;", "").replace("&lt;/script&gt;", "")
        parsed(picture)
    title = parsed(draw(chart, width=820, height=300)).find("title")
    assert title is not None
    assert title.text == "<script>alert('x')</script>\"&"


def test_the_axis_that_is_switched_is_drawn_both_ways() -> None:
    linear, log = (draw(simple(), width=820, height=300, log=log) for log in (False, True))
    assert 'class="bf-chart wide linear"' in linear
    assert 'class="bf-chart wide log"' in log
    places = [re.findall(r"translate\((\S+) ", picture) for picture in (linear, log)]
    assert places[0] != places[1]
    assert not simple(x=Axis("size")).is_switched


def test_a_point_says_what_it_is_and_can_be_reached() -> None:
    picture = draw(simple(), width=820, height=300)
    assert picture.count('tabindex="0"') == 2
    assert "<title>eight</title>" in picture
    assert ">answer 8</text>" in picture
    assert ">budget 5 GiB</text>" in picture


def test_words_never_overlap() -> None:
    marks = tuple(Mark(n, 1.0, f"{n}", label=f"label {n}") for n in range(12))
    chart = simple(
        series=(Series("s", marks, "c0"),), rules=tuple(Rule(1 + n / 50, f"rule {n}") for n in range(6))
    )
    root = parsed(draw(chart, width=340, height=270))
    boxes = [
        (float(t.attrib["x"]), float(t.attrib["y"]), float(t.attrib["x"]) + len(t.text or "") * LETTER)
        for t in root.iter("text")
        if "told" in t.attrib.get("class", "")
    ]
    assert len(boxes) >= 3
    for n, one in enumerate(boxes):
        for two in boxes[n + 1 :]:
            assert abs(one[1] - two[1]) >= 13.9 or one[2] <= two[0] + 0.2 or two[2] <= one[0] + 0.2


@pytest.mark.parametrize("line", ["solid", "dashed", "dotted", "stairs", "area"])
def test_a_line_and_its_key_are_drawn_alike(line: str) -> None:
    one = Series("s", (Mark(1, 1), Mark(2, 3, low=1), Mark(3, 2)), "c1", line=line)  # type: ignore[arg-type]
    wanted = 'class="area"' if line == "area" else f'class="line {line}"'
    assert wanted in draw(simple(series=(one,)), width=820, height=300)
    assert wanted in key(one)


def test_a_step_is_held_until_the_next_one() -> None:
    stairs = Series("s", (Mark(0, 1), Mark(5, 2), Mark(10, 2)), "c1", line="stairs")
    chart = Chart("T", "A", Axis("x"), Axis("y"), (stairs,))
    path = re.search(r'class="line stairs" d="([^"]+)"', draw(chart, width=820, height=300))
    assert path is not None
    assert re.fullmatch(r"M\d+ \d+H\d+V\d+H\d+", path.group(1))


def test_the_style_sheet_touches_nothing_but_charts() -> None:
    """It goes into notebooks too."""
    rules = re.sub(r"@media[^{]*\{(.*?)\}\}", r"\1}", chart_css(), flags=re.DOTALL)
    for selectors in re.findall(r"([^{}]+)\{", rules):
        for selector in re.split(r",(?![^(]*\))", selectors.strip()):
            assert selector.startswith((".bf-chart", ".bf-key", ":is(.bf-chart,.bf-key)")), selector
    assert "url(" not in chart_css()
    assert "@import" not in chart_css()
