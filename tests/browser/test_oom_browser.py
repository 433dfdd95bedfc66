"""The timeline of a post-mortem in a real browser: hovered, zoomed, whole again, narrow, dark, on paper."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import COMMAND, Chromium, Page

import batchfit
from conftest import need

need("chromium", present=COMMAND is not None)

SNAPSHOT = Path(__file__).parent.parent / "data" / "snapshots" / "leak.pickle.gz"
SVG = "Array.from(document.querySelectorAll('#oom-0 .plot svg')).find(one => one.getClientRects().length)"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with Chromium(tmp_path_factory.mktemp("chromium")) as found:
        yield found


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    (folder / "why.json").write_text(batchfit.explain_oom(SNAPSHOT).to_json())
    return batchfit.report([folder / "why.json"], folder / "report.html", title="Why")


@pytest.fixture
def desktop(browser: Chromium, written: Path) -> Iterator[Page]:
    page = browser.open(written, width=1000)
    yield page
    assert page.complaints() == []
    page.close()


def place(page: Page) -> Any:
    """Where the axis of the timeline begins and ends on the screen, and half its height."""
    return page.value(
        f"(svg => {{ svg.scrollIntoView({{block: 'center'}}); const r = svg.getBoundingClientRect();"
        " const [begin, end] = svg.dataset.x.split(' ').map(Number);"
        " const per = r.width / svg.viewBox.baseVal.width;"
        f" return [r.x + begin * per, r.x + end * per, r.y + r.height / 2]; }})({SVG})"
    )


def drag(page: Page, first: float, last: float) -> None:
    """Draw over a stretch of the axis, from one share of it to another."""
    begin, end, y = place(page)
    steps = (("mousePressed", first), ("mouseMoved", (first + last) / 2), ("mouseReleased", last))
    for kind, share in steps:
        x = begin + share * (end - begin)
        page.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)


def tip(page: Page) -> str | None:
    found = page.value("(t => t.hidden ? null : t.textContent)(document.getElementById('tip'))")
    return None if found is None else str(found)


def ticks(page: Page) -> list[str]:
    return list(
        page.value(f"Array.from({SVG}.querySelectorAll('.dim.mid text')).map(one => one.textContent)")
    )


def mark(page: Page) -> Any:
    """Left, right and width of the cross of the OOM."""
    return page.value(
        f"(r => [r.left, r.right, r.width])({SVG}.querySelector('g.pt.oom .mark').getBoundingClientRect())"
    )


def entry(text: str | None) -> int:
    assert text is not None
    return int(text.split(",", 2)[0].removeprefix("entry ") + text.split(",", 2)[1][:3])


def test_each_moment_says_what_it_holds_at_any_height(desktop: Page) -> None:
    begin, end, y = place(desktop)
    for lift in (-60, 0, 40):
        desktop.pointer((begin + end) / 2, y + lift)
        assert 6000 < entry(tip(desktop)) < 9000
        assert "live of" in str(tip(desktop))
    desktop.pointer(1, 1)
    assert tip(desktop) is None


def test_a_stretch_is_drawn_as_wide_as_the_whole_and_back(desktop: Page) -> None:
    before = ticks(desktop)
    drag(desktop, 0.4, 0.6)
    zoomed = [int(one.replace(",", "")) for one in ticks(desktop)]
    assert 5000 < zoomed[0] < zoomed[-1] < 9500
    begin, end, y = place(desktop)
    frame = desktop.value(f"{SVG}.querySelector('clipPath rect').getAttribute('width')")
    low, high = desktop.value(f"{SVG}.dataset.x.split(' ').slice(0, 2).map(Number)")
    assert float(frame) == pytest.approx(high - low)  # nothing is drawn beyond the axis
    desktop.pointer(begin + 0.5 * (end - begin), y)
    assert 6900 < entry(tip(desktop)) < 7800
    drag(desktop, 0.5, 0.75)  # closer
    closer = [int(one.replace(",", "")) for one in ticks(desktop)]
    assert closer[-1] - closer[0] < (zoomed[-1] - zoomed[0]) / 2
    desktop.click('#oom-0 button[data-zoom="all"]')
    assert ticks(desktop) == before
    assert desktop.value("document.querySelector('#oom-0 button[data-zoom=all]').disabled")


def test_the_end_shows_the_oom_in_its_shape(desktop: Page) -> None:
    _, _, before = mark(desktop)
    desktop.click('#oom-0 button[data-zoom="in"]')
    begin, end, _ = place(desktop)
    left, right, width = mark(desktop)
    assert begin < left < right < end
    assert width == pytest.approx(before, abs=1)
    box = desktop.value(
        "(r => [r.x + r.width / 2, r.y + r.height / 2])"
        f"({SVG}.querySelector('g.pt.oom').getBoundingClientRect())"
    )
    desktop.pointer(*box)
    assert str(tip(desktop)).startswith("OOM: 8.00 MiB asked for")


@pytest.mark.parametrize(("width", "dark"), [(390, False), (1000, True)], ids=["narrow", "dark"])
def test_its_words_lie_inside_wherever_it_is_read(
    browser: Chromium, written: Path, width: int, dark: bool
) -> None:
    page = browser.open(written, width=width, dark=dark)
    place(page)
    edges = page.value(
        f"Array.from({SVG}.querySelectorAll('text')).map(one => one.getBoundingClientRect())"
        ".map(one => [one.left, one.right])"
        f".concat([(r => [r.left, r.right])({SVG}.getBoundingClientRect())])"
    )
    left, right = edges.pop()
    assert all(left - 1 <= begin and end <= right + 1 for begin, end in edges)
    assert page.value("document.documentElement.scrollWidth") <= width
    assert page.complaints() == []
    page.close()


def test_it_prints_whole(browser: Chromium, written: Path) -> None:
    page = browser.open(written, width=1000)
    page.call("Emulation.setEmulatedMedia", media="print")
    assert page.value("document.querySelector('#oom-0 .tools').getClientRects().length") == 0
    assert page.value(f"{SVG}.querySelectorAll('.area').length") > 2
    page.close()
