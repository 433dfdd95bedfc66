"""The docs say what is true: blocks run, outputs are compared, links lead somewhere, pages stay short.

How a page writes its blocks: tests/support/doc_pages.py. To see what a page prints now, or to put it in:
`PYTHONPATH=src python tests/support/doc_pages.py [--write] docs/how-to/x.md`.
"""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import unicodedata
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from doc_pages import difference, fences, is_slow, steps, written
from doc_runner import Pages, wrong_with
from generated import filled
from words import words_that_are_out

ROOT = Path(__file__).parent.parent
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
}
MOST_WORDS = 1200
# Their tables have a row for each version that was tested, or a table for each model.
GENERATED = ("docs/reference/compatibility.md", "docs/reference/plan-table.md")


@pytest.fixture(scope="module")
def runner() -> Generator[Pages, None, None]:
    with Pages() as pages:
        yield pages


def _with_code() -> list[Any]:
    """Pages that have steps, the heavy ones for `make test-all`."""
    return [
        pytest.param(name, marks=pytest.mark.slow if is_slow(text) else ())
        for name, text in PAGES.items()
        if steps(text)[0]
    ]


@pytest.mark.parametrize("name", _with_code())
def test_a_page_runs_and_prints_what_it_shows(name: str, runner: Pages, tmp_path: Path) -> None:
    for step in steps(PAGES[name])[0]:
        wrong = wrong_with(step, runner.run_step(step, tmp_path))
        assert not wrong, f"{name}, line {step.line}: {wrong}"


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("size 12, 3.1 MiB in 0.4 s", "size 12, 3.1 MiB in 17.2 s", True),
        ("size 12, 3.1 MiB", "size 13, 3.1 MiB", False),
        ("size 12\n", "size 12\nwarning: x\n", False),
        ("size 12\n...\nend", "size 12\nwarning: x\nend", True),
        ("size  s/step\n   1  0.2251\n", "size  s/step\n   1    1.9\n", True),
        ("size  s/step\n   1  0.2251\n", "size  s/step\n   2    1.9\n", False),
        ("a ██ 12 %\nb", "a █ 12 %\nb", True),
        ("a\nb", "a", False),
    ],
)
def test_an_output_differs_where_it_is_not_what_is_printed(shown: str, printed: str, same: bool) -> None:
    assert (difference(shown, printed) == "") == same


def test_outputs_that_are_put_in_leave_other_blocks_alone() -> None:
    page = "```console\npip install x\n```\n\n```python\nprint(1)\n```\n\n```text\n0\n```\n"
    assert written(page, {(5, 0): "1\n"}) == page.replace("\n0\n", "\n1\n")


@pytest.mark.parametrize("name", sorted(PAGES))
def test_every_block_of_a_page_is_run_or_says_why_not(name: str) -> None:
    wrong = steps(PAGES[name])[1]
    assert not wrong, f"{name}: {wrong}"


@pytest.mark.parametrize("name", sorted(name for name in PAGES if name.startswith("docs/")))
def test_a_page_is_short(name: str) -> None:
    if name in GENERATED:
        return
    words = len(PAGES[name].split())
    assert words <= MOST_WORDS, f"{name} has {words} words: make two of it, or say less"


def _prose(text: str) -> str:
    """A page without code in its lines, without addresses of links, and without blocks of Python."""
    for block in fences(text):
        if block.language in ("python", "py", "diff"):
            text = text.replace(block.text, "\n" * block.text.count("\n"))
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return re.sub(r"`[^`\n]+`", "``", text)


def _words_that_are_out(name: str) -> list[str]:
    lines = enumerate(_prose(PAGES[name]).splitlines(), 1)
    found = [f"{name}:{number}: {wrong}" for number, line in lines for wrong in words_that_are_out(line)]
    if re.search(r"\bsoak", _prose(PAGES[name])) and "stability check" not in PAGES[name]:
        found.append(f"{name}: 'soak': say that it is the stability check")
    return found


@pytest.mark.parametrize("name", sorted(PAGES))
def test_a_page_uses_the_words_of_pytorch(name: str) -> None:
    assert not _words_that_are_out(name)


# A target with a scheme leads out of the repository.
LINK = re.compile(r"\]\(([^()\s#]*)(?:#([^()\s]*))?(?: \"[^\"]*\")?\)")
HEADING = re.compile(r"^#{1,6} +(.+?)(?: *\{#([\w-]+)\})? *#*$", re.MULTILINE)


def _anchors(text: str) -> set[str]:
    """What MkDocs and GitHub name the headings; most are the same."""
    for block in fences(text):
        text = text.replace(block.text, "")
    found = set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", text))
    for title, own in HEADING.findall(text):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", lambda match: match[1] or "", title)
        ascii_only = unicodedata.normalize("NFKD", plain).encode("ascii", "ignore").decode()
        site = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", ascii_only).strip().lower())
        github = re.sub(r"[^\w\s-]", "", plain.lower()).replace(" ", "-")
        found |= {own} if own else {site, github}
    return found


@pytest.mark.parametrize("name", [*PAGES, "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    text = page.read_text(encoding="utf-8")
    for block in fences(text):
        text = text.replace(block.text, "")
    for target, anchor in LINK.findall(re.sub(r"`[^`\n]+`", "``", text)):
        if "://" in target or target.startswith("mailto:"):
            continue
        there = (page.parent / target) if target else page
        assert there.exists(), f"{name} links to {target}"
        if anchor and there.suffix == ".md":
            other = filled(there.read_text(encoding="utf-8"))
            objects = re.findall(r"^::: (\S+)", other, re.MULTILINE)  # mkdocstrings: names of the API
            known = anchor in _anchors(other) or anchor.startswith(tuple(objects) or ("\0",))
            assert known, f"{name} links to #{anchor} of {target or name}"


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for name in PAGES:
        assert re.search(rf"[:-] {name.removeprefix('docs/')}\n", site) or name == "README.md", name


@pytest.mark.parametrize("name", ["microbatch", "huggingface_microbatch", "gan", "contrastive"])
def test_examples_of_microbatches_train_on_a_batch_that_does_not_fit(name: str, living_bytes: int) -> None:
    if name == "huggingface_microbatch":
        pytest.importorskip("transformers", reason="needs transformers")
    path = ROOT / "examples" / f"{name}.py"
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 150
    example = runpy.run_path(str(path))
    torch = pytest.importorskip("torch")
    state = torch.get_rng_state()
    try:
        (default,) = example["train"].__defaults__
        done = example["train"](steps=4, limit_bytes=default + living_bytes)
        if name == "contrastive":
            assert example["error_of_the_gradients"](100) < 1e-10
    finally:
        torch.set_rng_state(state)
    reports = done["reports"] if isinstance(done, dict) else done
    reports = [report for entry in reports for report in (entry if isinstance(entry, tuple) else (entry,))]
    assert len(reports) == (8 if name == "gan" else 4)
    assert all(torch.isfinite(report.loss) for report in reports)
    if not torch.cuda.is_available():  # the examples have a small memory on a CPU only
        assert reports[0].retries > 0
        assert all(len(report.microbatch_sizes) > 1 for report in reports)


NAMED_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


@pytest.mark.slow
def test_the_recipe_for_ray_trains_on_two_workers(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs ray")
    page = (ROOT / "docs" / "how-to" / "ray.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "train.py").write_text(block, encoding="utf-8")
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "PYTHONPATH": paths, "RAY_DEDUP_LOGS": "0"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = done.stdout + done.stderr
    assert len(re.findall(r"Reporting training result 3: .*'microbatch': 512", told)) == 2


def _test_named(file: str, name: str) -> str | None:
    """The marks above a test, or None where there is no such test."""
    path = ROOT / file
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    found = re.search(rf"((?:^@.*\n)*)^def {name}\(", text, re.MULTILINE)
    return None if found is None else found[1]


@pytest.mark.parametrize("name", sorted(name for name, text in PAGES.items() if NAMED_TEST.search(text)))
def test_a_page_names_tests_that_exist(name: str) -> None:
    for file, test in NAMED_TEST.findall(PAGES[name]):
        assert _test_named(file, test) is not None, f"{name}: {file} has no {test}"


def test_each_of_the_25_demands_is_answered_and_has_its_test() -> None:
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", PAGES["docs/reference/supported.md"], re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 26))
    for number, row in rows:
        _, answer, where, tests = row.split(" | ") if row.count(" | ") == 3 else (*row.split(" | "), "")
        kind = re.match(r"(yes|partly|no)\b", answer)
        assert kind, f"row {number}: {answer}"
        assert LINK.search(where), f"row {number} leads nowhere"
        assert kind[1] == "no" or NAMED_TEST.search(tests), f"row {number} names no test"


def test_issues_name_tests_of_make_test_on_the_versions_that_are_pinned() -> None:
    page = PAGES["docs/how-to/framework-issues.md"]
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", page, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, len(rows) + 1))
    reported = 0
    for number, row in rows:
        _, where, version, tests = row.split(" | ")
        reported += "#" in where
        assert version.replace(" ", "==") in pinned, f"row {number}: {version}"
        assert NAMED_TEST.search(tests), f"row {number} names no test"
    assert reported >= 10
    for file, name in NAMED_TEST.findall(page):
        marks = _test_named(file, name)
        # Some of its rows may be slow.
        assert "@pytest.mark.slow\n" not in (marks or ""), f"{name} must belong to make test"
