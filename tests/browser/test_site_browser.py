"""The docs site of `make docs`: strict, whole, and of use from a disk, on a phone, without a network."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest
from chromium import COMMAND, Chromium

from conftest import need

need("mkdocs", present=all(importlib.util.find_spec(name) for name in ("mkdocs", "material", "mkdocstrings")))

pytestmark = pytest.mark.slow  # the site takes ten seconds to build, and mkdocs comes with `make docs`
ROOT = Path(__file__).parent.parent.parent
LOADED = re.compile(r'<(?:script|img|iframe|source)\b[^>]*?\bsrc="([^"]+)"|<link\b[^>]*?\bhref="([^"]+)"')
LEADS = re.compile(r'<a\b[^>]*?\bhref="([^"#]+)')


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    need("chromium", present=COMMAND is not None)
    with Chromium(tmp_path_factory.mktemp("chromium")) as found:
        yield found


def test_every_page_is_there_and_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = {
        path.relative_to(site).as_posix(): path.read_text(encoding="utf-8") for path in site.rglob("*.html")
    }
    docs = ROOT / "docs"
    wanted = [path.relative_to(docs).with_suffix(".html").as_posix() for path in docs.rglob("*.md")]
    wanted += [f"benchmarks/{path.stem}.html" for path in (ROOT / "benchmarks" / "results").glob("*.md")]
    wanted += [f"examples/{path.stem}_py.html" for path in (ROOT / "examples").glob("*.py")]
    assert {
        *wanted,
        *(f"project/{name}.html" for name in ("architecture", "contributing", "changelog")),
    } <= set(pages)
    for name, text in pages.items():
        for either in LOADED.findall(text):
            address = "".join(either).partition("#")[0]  # "#only-light": what the theme shows
            assert "://" not in address, f"{name} loads {address}"
            if name != "404.html":  # its addresses begin at the root of a server
                assert (site / name).parent.joinpath(address).resolve().exists(), f"{name} needs {address}"


def test_links_of_the_site_lead_to_its_pages(site: Path) -> None:
    for path in site.rglob("*.html"):
        for address in LEADS.findall(path.read_text(encoding="utf-8")):
            if not urlparse(address).scheme and path.name != "404.html":
                assert path.parent.joinpath(unquote(address)).resolve().exists(), f"{path.name}: {address}"


def test_anchors_of_the_site_are_there(site: Path) -> None:
    pages = {path.resolve(): path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    ids = {path: set(re.findall(r'\b(?:id|name)="([^"]+)"', text)) for path, text in pages.items()}
    checked = 0
    for path, text in pages.items():
        for address, anchor in re.findall(r'<a\b[^>]*?\bhref="([^"#:]*)#([^"]+)"', text):
            there = path.parent.joinpath(unquote(address)).resolve() if address else path
            if path.name != "404.html" and there in ids:
                checked += 1
                assert unquote(anchor) in ids[there], f"{path.name}: {address}#{anchor}"
    assert checked > 1000


def test_the_reference_has_every_public_name_from_its_docstring(site: Path) -> None:
    import batchfit

    text = "".join(path.read_text(encoding="utf-8") for path in (site / "reference").rglob("*.html"))
    shown = set(re.findall(r'<h[2-6] id="batchfit\.([^"]+)"', text))
    modules = {"errors", "testing"}  # each object of them has a heading
    assert set(batchfit.__all__) - modules <= shown
    assert {"errors.NothingFitsError", "testing.fail_at", "Microbatcher.backward"} <= shown
    assert "integrations.lightning.BatchSizeFinder" in shown
    assert "Find the largest batch size that runs, and keeps running." in text
    assert ":::" not in re.sub(r"<(pre|code).*?</\1>", "", text, flags=re.DOTALL)


def test_what_is_generated_and_no_page_is_in_the_site(site: Path) -> None:
    assert (site / "llms.txt").read_text(encoding="utf-8").startswith("# batchfit\n")
    assert len((site / "llms-full.txt").read_text(encoding="utf-8")) > 100_000
    schemas = [json.loads(path.read_text()) for path in (site / "reference" / "schemas").glob("*.json")]
    assert {one["properties"]["kind"]["const"] for one in schemas} >= {"fit", "prediction", "memory", "sweep"}


@pytest.mark.parametrize("width", [1200, 390])
def test_a_page_opened_from_a_disk_is_quiet_and_asks_for_files_only(
    site: Path, browser: Chromium, width: int
) -> None:
    names = ("index.html", "how-to/out-of-memory.html", "explanation/costs.html", "reference/results.html")
    for name in names:
        page = browser.open(site / name, width=width)
        assert page.complaints() == []
        assert [address for address in page.requests() if not address.startswith(("file:", "data:"))] == []
        # Wide tables and code scroll by themselves; the page does not.
        assert page.value("document.documentElement.scrollWidth") <= width, name
        page.close()


def test_search_finds_pages_without_a_server(site: Path, browser: Chromium) -> None:
    page = browser.open(site / "index.html", width=1200)
    found = page.value("""
        (async () => {
          const field = document.querySelector('[data-md-component=search-query]');
          field.focus();
          field.value = 'BatchNorm';
          for (let n = 0; n < 300; n++) {
            field.dispatchEvent(new KeyboardEvent('keyup', {bubbles: true}));
            const links = [...document.querySelectorAll('.md-search-result__link')];
            if (links.length) return links.map(link => link.href);
            await new Promise(done => setTimeout(done, 100));
          }
          return [];
        })()
    """)
    assert any("batchnorm.html" in address for address in found)
    page.close()
