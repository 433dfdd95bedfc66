"""The report in a real browser: drawn, quiet, alive, on a phone, in the dark, on paper, without scripts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from chromium import COMMAND, Chromium, Page

import batchfit
from conftest import need

need("chromium", present=COMMAND is not None)

DATA = Path(__file__).parent.parent / "data" / "report"
FILES = [DATA / f"{name}.json" for name in ("fit", "cards", "why", "profile", "schedule", "sweep")]
FIGURES = [f"sweep-0-{n}" for n in range(4)]
FIGURES += ["throughput", "memory-0", "memory-1", "search-0", "timeline-0", "schedule-0", "rate-0"]
LOOKS = {"desktop": (1000, False), "phone": (390, False), "phone, dark": (390, True), "dark": (1000, True)}

# For every figure: what of it is seen, and whether all that is drawn lies inside it.
DRAWN = """
Array.from(document.querySelectorAll('figure')).map(figure => {
  const seen = Array.from(figure.querySelectorAll('.plot svg')).filter(svg => svg.getClientRects().length);
  const svg = seen[0], frame = svg.getBoundingClientRect();
  const parts = Array.from(svg.querySelectorAll('.line, .mark, .area'));
  const boxes = parts.map(part => part.getBoundingClientRect());
  const texts = Array.from(svg.querySelectorAll('text')).map(text => text.getBoundingClientRect());
  return {
    id: figure.id, seen: seen.length, parts: parts.length,
    empty: boxes.filter(box => box.width + box.height === 0).length,
    outside: boxes.filter(b => b.left < frame.left - 7 || b.right > frame.right + 7 || b.top < frame.top - 7
                               || b.bottom > frame.bottom + 7).length,
    cut: texts.filter(b => b.left < 0 || b.right > innerWidth).length,
    letter: 12 * frame.width / svg.viewBox.baseVal.width,
    hidden: parts.map(part => getComputedStyle(part))
      .filter(style => style.stroke === 'none' && style.fill === 'none').length,
  };
})
"""
CONTRAST = """
(selector => {
  const parse = text => text.match(/[0-9.]+/g).map(Number);
  const linear = v => v <= 10 ? v / 255 / 12.92 : ((v / 255 + .055) / 1.055) ** 2.4;
  const light = rgb => rgb.slice(0, 3).map(linear)
    .reduce((sum, v, n) => sum + v * [.2126, .7152, .0722][n], 0);
  const of = (node, what) => getComputedStyle(node)[what];
  let ground = document.querySelector(selector);
  const ink = light(parse(of(ground, ground.ownerSVGElement ? 'fill' : 'color')));
  while (of(ground, 'backgroundColor') === 'rgba(0, 0, 0, 0)') ground = ground.parentElement;
  const paper = light(parse(of(ground, 'backgroundColor')));
  return (Math.max(ink, paper) + .05) / (Math.min(ink, paper) + .05);
})
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with Chromium(tmp_path_factory.mktemp("chromium")) as found:
        yield found


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return batchfit.report(FILES, tmp_path_factory.mktemp("report") / "report.html", title="All kinds")


@pytest.fixture
def desktop(browser: Chromium, written: Path) -> Iterator[Page]:
    page = browser.open(written, width=1000)
    yield page
    assert page.complaints() == []
    assert page.requests() == [written.as_uri()]
    page.close()


def tip(page: Page) -> str | None:
    return page.value("(t => t.hidden ? null : t.textContent)(document.getElementById('tip'))")  # type: ignore[no-any-return]


def middle(page: Page, what: str) -> tuple[float, float]:
    """Where an element is that an expression names, once it is in view."""
    x, y = page.value(
        f"(e => {{ e.scrollIntoView({{block: 'center'}}); const r = e.getBoundingClientRect();"
        f" return [r.x + r.width / 2, r.y + r.height / 2]; }})({what})"
    )
    return x, y


def seen(figure: str) -> str:
    """The drawing of a figure that is seen, as an expression."""
    drawings = f"Array.from(document.querySelectorAll('#{figure} .plot svg'))"
    return f"{drawings}.find(svg => svg.getClientRects().length)"


def point(figure: str, number: int = 0) -> str:
    return f"{seen(figure)}.querySelectorAll('g.pt')[{number}]"


@pytest.mark.parametrize("look", sorted(LOOKS))
def test_every_plot_is_drawn_and_nothing_is_asked_for(browser: Chromium, written: Path, look: str) -> None:
    width, dark = LOOKS[look]
    page = browser.open(written, width=width, dark=dark)
    found = page.value(DRAWN)
    assert [one["id"] for one in found] == FIGURES
    for one in found:
        assert one["seen"] == 1, one
        assert one["parts"] > 0, one
        assert (one["empty"], one["outside"], one["cut"], one["hidden"]) == (0, 0, 0, 0), one
        assert one["letter"] >= 11, one
    assert page.value("document.documentElement.scrollWidth") <= width
    paper = page.value("getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).map(Number)")
    assert (max(paper) < 64) if dark else (min(paper) > 240)
    for text in (
        ".verdict",
        "figcaption p",
        ".facts dt",
        "td",
        ".legend button",
        "#memory-0 .told",
        ".heat .shade-4",
        "footer",
    ):
        assert page.value(f"{CONTRAST}({text!r})") >= 4.5, text
    assert page.complaints() == []
    assert page.requests() == [written.as_uri()]
    page.close()


@pytest.mark.parametrize("width", [390, 1000])
def test_a_point_shows_its_figures_to_the_pointer(browser: Chromium, written: Path, width: int) -> None:
    page = browser.open(written, width=width)
    for figure in FIGURES:
        x, y = middle(page, point(figure))
        page.pointer(x + 2, y + 2)
        said = tip(page)
        assert said, figure
        left, right, top = page.value(
            "(r => [r.left, r.right, r.top])(document.getElementById('tip').getBoundingClientRect())"
        )
        assert left >= 0
        assert right <= width
        assert top >= 0
        page.pointer(1, 1)
        assert tip(page) is None
    assert page.complaints() == []
    page.close()


def test_the_read_out_says_what_the_result_says(desktop: Page) -> None:
    x, y = middle(desktop, point("search-0", 0))
    desktop.pointer(x, y)
    assert tip(desktop) == ("trial 9, size 20: sustained, peak 123.6 MiB of 128.0 MiB, 565 ms a step")


def test_points_are_reached_by_keyboard(desktop: Page) -> None:
    desktop.value("document.querySelector('#search-0 button[data-to-view=table]').focus()")
    desktop.press("Tab")
    assert str(tip(desktop)).startswith("trial 9, size 20: sustained")
    desktop.press("Tab")
    assert "fits" in str(tip(desktop))
    desktop.press("Escape")
    assert tip(desktop) is None


def test_every_drawing_of_a_chart_has_the_texts(desktop: Page) -> None:
    told = ".pt[aria-label]:not([aria-label=''])"
    counts = desktop.value(
        "Array.from(document.querySelectorAll('.plot svg')).map(svg => "
        f'[svg.querySelectorAll(".pt").length, svg.querySelectorAll("{told}").length])'
    )
    assert all(points == named > 0 for points, named in counts)


def shown(page: Page, figure: str) -> str:
    return str(page.value(f"{seen(figure)}.getAttribute('class')"))


def test_the_axis_is_switched(desktop: Page) -> None:
    assert shown(desktop, "throughput") == "bf-chart wide log"
    desktop.click("#throughput button[data-to-axis=linear]")
    assert shown(desktop, "throughput") == "bf-chart wide linear"
    assert shown(desktop, "search-0") == "bf-chart wide log"  # the others stay
    pressed = (
        "Array.from(document.querySelectorAll('#throughput button[data-to-axis]')).map(b => b.ariaPressed)"
    )
    assert desktop.value(pressed) == ["true", "false"]
    desktop.click("#throughput button[data-to-axis=log]")
    assert shown(desktop, "throughput") == "bf-chart wide log"


def test_a_series_is_hidden_and_shown(desktop: Page) -> None:
    marks = f"Array.from({seen('memory-0')}.querySelectorAll('g.pt.oom'))"
    count = f"{marks}.filter(mark => mark.getClientRects().length).length"
    buttons = "Array.from(document.querySelectorAll('#memory-0 .legend button'))"
    button = f"{buttons}.find(button => button.textContent.includes('out of memory'))"
    desktop.value(f"{button}.id = 'ran-out'")
    before = desktop.value(count)
    assert before > 0
    desktop.click("#ran-out")
    assert desktop.value(count) == 0
    assert desktop.value("document.getElementById('ran-out').ariaPressed") == "false"
    desktop.click("#ran-out")
    assert desktop.value(count) == before


def test_the_table_takes_the_place_of_the_plot(desktop: Page) -> None:
    sizes = "['.plot', 'table'].map(s => document.querySelector('#search-0 ' + s).getClientRects().length)"
    assert desktop.value(sizes)[0] == 1
    desktop.click("#search-0 button[data-to-view=table]")
    assert desktop.value(sizes) == [0, 1]
    assert desktop.value("document.querySelectorAll('#search-0 tbody tr').length") == 9
    desktop.click("#search-0 button[data-to-view=plot]")
    assert desktop.value(sizes)[0] == 1


def test_it_stands_without_scripts(browser: Chromium, written: Path) -> None:
    page = browser.open(written, width=1000, script=False)
    root = page.call("DOM.getDocument", depth=-1)["root"]["nodeId"]
    svg = page.call(
        "DOM.querySelector", nodeId=root, selector="#memory-0 svg.wide.log, #memory-0 svg.wide.linear"
    )["nodeId"]
    assert page.call("DOM.getBoxModel", nodeId=svg)["model"]["width"] > 500
    (html,) = page.call("DOM.querySelectorAll", nodeId=root, selector="html")["nodeIds"]
    assert "js" not in page.call("DOM.getAttributes", nodeId=html)["attributes"]
    page.close()


def test_it_prints(browser: Chromium, written: Path) -> None:
    page = browser.open(written, width=1000, dark=True)
    page.call(
        "Emulation.setEmulatedMedia",
        media="print",
        features=[{"name": "prefers-color-scheme", "value": "dark"}],
    )
    assert [one["seen"] for one in page.value(DRAWN)] == [1] * len(FIGURES)
    assert page.value("document.querySelector('.tools').getClientRects().length") == 0
    assert page.value("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    page.close()


@pytest.fixture
def outside() -> Iterator[tuple[str, list[str]]]:
    """A server, and what it was asked for."""
    asked: list[str] = []

    class Ear(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.send_header("Access-Control-Allow-Origin", "*")
            self.end_headers()

        def log_message(self, *about: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Ear) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()
        thread.join()


def test_the_policy_holds_even_where_a_text_was_not_escaped(
    browser: Chromium, written: Path, tmp_path: Path, outside: tuple[str, list[str]]
) -> None:
    address, asked = outside
    bad = f"<script>window.ran = 1</script><img src='{address}/x.png' onerror='window.ran = 2'>"
    spoiled = tmp_path / "spoiled.html"
    text = written.read_text(encoding="utf-8").replace("<footer>", f"<footer>{bad}")
    for name, body in (("with", text), ("without", text.replace("Content-Security-Policy", "X-Nothing"))):
        spoiled.write_text(body, encoding="utf-8")
        page = browser.open(spoiled, width=1000)
        ran = page.value("window.ran")
        sent = page.value(f"fetch('{address}/y').then(() => 'let out', error => 'refused')")
        if name == "with":
            assert (ran, sent, asked) == (None, "refused", [])
            assert any("Content Security Policy" in one for one in page.complaints())
        else:  # so that this test would see it
            assert (ran is not None, sent, sorted(asked)) == (True, "let out", ["/x.png", "/y"])
        page.close()
