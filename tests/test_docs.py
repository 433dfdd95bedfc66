"""Every python block in the README and the docs runs as it stands, in a process of its own."""

from __future__ import annotations

import itertools
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import batchfit
from batchfit._cli.exits import Code

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
GUIDES = (
    "predict.md",
    "explain.md",
    "microbatch.md",
    "noise.md",
    "schedules.md",
    "loader.md",
    "sweep.md",
)  # pages that show what their first example prints
# What each takes is mostly an import of a framework or of torch, or a trace; `make test-all` runs them.
SLOW = (
    *("accelerate.md", "lightning.md", "recipes.md", "torchtune.md", "transformers.md"),
    *("coming-from.md", "explain.md", "loader.md", "noise.md", "plain.md", "predict.md", "report.md"),
    *("find.md", "microbatch.md", "profile.md", "schedules.md", "sweep.md", "testing.md", "tutorial.md"),
    "ranks_microbatch.md",
)
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")


def pages_with_code() -> list[Path]:
    """But for the README, all of whose blocks are run where their output is read."""
    return [page for page in PAGES[1:] if BLOCK.search(page.read_text(encoding="utf-8"))]


def slow_ones_marked(names: Sequence[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in names]


@pytest.mark.parametrize("name", slow_ones_marked([page.name for page in pages_with_code()]))
def test_python_blocks_run(name: str, tmp_path: Path) -> None:
    page = next(page for page in PAGES if page.name == name)
    blocks = BLOCK.findall(page.read_text(encoding="utf-8"))
    if page.name in GUIDES:
        blocks = blocks[1:]  # the first one is run below, where its output is read
    # One import of torch a page (it is the cost), one forked process a block.
    runner = tmp_path / "blocks.py"
    for number, block in enumerate(blocks):
        (tmp_path / f"block{number}.py").write_text(block, encoding="utf-8")
    runner.write_text(
        "import os, runpy, sys, warnings\nimport batchfit, torch\nwarnings.simplefilter('error')\n"
        f"for number in range({len(blocks)}):\n"
        "    print('block', number, flush=True)\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        runpy.run_path(f'block{number}.py', run_name='__main__')\n"
        "        sys.stdout.flush()\n"
        "        os._exit(0)\n"
        "    if os.waitpid(child, 0)[1] != 0:\n"
        "        sys.exit(f'block {number} failed')\n",
        encoding="utf-8",
    )
    done = subprocess.run([sys.executable, runner], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"{page.name}: {done.stdout[-500:]}\n{done.stderr[-3000:]}"


@pytest.mark.parametrize("number", [0, 1])
def test_the_readme_examples_are_short_and_print_what_they_say(number: int, tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = list(BLOCK.finditer(readme))
    assert len(blocks) == 2, "each is run here"
    block = blocks[number]
    code = block.group(1)
    assert len([line for line in code.splitlines() if line.strip()]) <= 12
    shown = re.search(r"```text\n(.*?)```", readme[block.end() :], re.DOTALL)
    assert shown is not None, "the README shows the example's output"
    script = tmp_path / "example.py"
    strict = "import warnings\nimport batchfit, torch\nwarnings.simplefilter('error')\n"
    script.write_text(strict + code, encoding="utf-8")
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr

    def timeless(text: str) -> list[str]:
        """Sizes, outcomes and bytes must match; seconds differ from machine to machine."""
        return [
            re.sub(r"\s+", " ", re.sub(r"\S+$|in [0-9.]+ s", "", line)).strip() for line in text.splitlines()
        ]

    assert timeless(shown.group(1)) == timeless(done.stdout)


def test_the_readmes_command_runs_on_the_readmes_file(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    command = re.search(r"`batchfit (find train.py:\w+ [^`]*)`", readme)
    block = BLOCK.search(readme)
    shown = re.search(r"```text\n(.*?)```", readme, re.DOTALL)
    assert command is not None
    assert block is not None
    assert shown is not None
    (tmp_path / "train.py").write_text(block.group(1), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "batchfit", *command.group(1).split(), "--no-store", "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    answer = batchfit.results.FitResult.from_json(done.stdout)
    assert f"batch size {answer.batch_size} on cpu" in shown.group(1)
    assert done.stderr.count("loading") <= 2, "importing the file searched by itself"


@pytest.mark.parametrize("name", slow_ones_marked(GUIDES))
def test_a_guide_shows_what_its_example_prints(name: str, tmp_path: Path) -> None:
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    block = BLOCK.search(page)
    assert block is not None
    shown = re.search(r"```text\n(.*?)```", page[block.end() :], re.DOTALL)
    assert shown is not None
    (tmp_path / "train.py").write_text(block.group(1), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
    )
    assert done.returncode == 0, done.stderr
    number = re.compile(r"\d+(?:\.\d+)?")
    for told, real in itertools.zip_longest(_steady(shown.group(1)), _steady(done.stdout), fillvalue=""):
        assert number.sub("N", told) == number.sub("N", real)
        # Versions of torch differ a little in what they allocate.
        assert [float(n) for n in number.findall(told)] == [
            pytest.approx(float(n), rel=0.05, abs=0.2) for n in number.findall(real)
        ], f"{name} says {told!r}, and it is {real!r}"


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


def _steady(text: str) -> list[str]:
    """Lines without seconds, and without bars and columns, whose lengths are the numbers beside them."""
    lines = (re.sub(r"[0-9.]+ s(?=;|$)|[█▏▎▍▌▋▊▉]+", "", line) for line in text.splitlines())
    return [" ".join(line.split()) for line in lines]


def test_every_public_name_and_exit_code_is_in_the_list() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    for name in batchfit.__all__:
        assert f"`{name}`" in page
    for code in Code:
        assert re.search(rf"^\| (\d+, )?{int(code)}\b", page, re.MULTILINE), code


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name
)
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


NAMED_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def test_blocks_of_python_that_no_test_runs_are_few() -> None:
    """The tests above run every fence that says exactly `python`; others of the kind are counted."""
    fences = [
        (page.name, fence)
        for page in PAGES
        for fence in re.findall(
            r"^[ \t]*(?:```|~~~)[ \t]*(\S.*)$", page.read_text(encoding="utf-8"), re.MULTILINE
        )
    ]
    unrun = [one for one in fences if re.match(r"\{?\.?py", one[1], re.IGNORECASE) and one[1] != "python"]
    assert len(unrun) <= 5, unrun


@pytest.mark.slow
def test_the_recipe_for_ray_trains_on_two_workers(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs ray")
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```py\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
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


def test_complaints_name_tests_that_exist_on_the_versions_that_are_pinned() -> None:
    page = (ROOT / "docs" / "complaints.md").read_text(encoding="utf-8")
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
        test = re.search(
            rf"((?:^@.*\n)*)^def {name}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE
        )
        assert test is not None, f"{file} has no {name}"
        # Some of its rows may be slow.
        assert "@pytest.mark.slow\n" not in test.group(1), f"{name} must belong to make test"


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert f": {page.name}\n" in site, page.name
