"""Is this ready to be released? `python tests/release_check.py` (`make release-check`): nothing is published.

Rules: sdist and wheel are built, and each is installed in a new environment from the registries. The README's
files and commands run there, outside of the repository, and print what the README shows. twine checks the
metadata in an environment of its own. All that says the version says the same one. What a person still has
to decide is listed at the end, and is no failure.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

import environments

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(Path(__file__).parent / "support"))

from doc_pages import Step, command_words, steps  # noqa: E402 - support is no folder of a script's path
from doc_runner import wrong_with  # noqa: E402

README = ROOT / "README.md"
# What the README's program imports, and what else a new user types first.
EXTRAS = ("transformers",)
FIRST = ("batchfit --version", "batchfit --help", "batchfit doctor", "batchfit init train.py")
CARRIED = (
    "CHANGELOG.md",
    "CITATION.cff",
    "LICENSE",
    "README.md",
    "SECURITY.md",
    "docs/index.md",
    "tests/conftest.py",
)
SECONDS = 900


def versions(root: Path = ROOT) -> dict[str, str]:
    """Where a version stands, and which."""
    places = {
        "src/batchfit/__init__.py": r"^__version__ = \"([^\"]+)\"",
        "CHANGELOG.md": r"^## (\d[^\s]*)",
        "CITATION.cff": r"^version: (\S+)",
        "README.md": r"^Version (\d[\w.]*\w)",
        "docs/start/installation.md": r"^batchfit (\d\S*)",
    }
    found = {}
    for name, pattern in places.items():
        match = re.search(pattern, (root / name).read_text(encoding="utf-8"), re.MULTILINE)
        found[name] = match[1] if match else "none"
    return found


def open_questions(root: Path = ROOT) -> list[str]:
    """What only a person can fill in before the first release."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = []
    if not project.get("urls"):
        found.append("pyproject.toml has no [project.urls]: the project has no public address yet")
        relative = re.findall(r"\]\((?!https?:|#)([^)]+)\)", (root / "README.md").read_text(encoding="utf-8"))
        found.append(
            f"{len(relative)} links of README.md are relative: they lead nowhere on a registry's page"
        )
    heading = re.search(r"^## .*$", (root / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    if heading and "unreleased" in heading[0]:
        found.append("CHANGELOG.md says that the version is unreleased: put the date there")
    return found


def carried(archive: Path) -> list[str]:
    """Files that the source archive lacks."""
    with tarfile.open(archive) as packed:
        inside = {name.partition("/")[2] for name in packed.getnames()}
    return [name for name in CARRIED if name not in inside]


def run_step(step: Step, venv: Path, folder: Path) -> dict[str, Any]:
    """One step of the README with the installed package: its exit status and outputs."""
    if step.kind == "file":
        (folder / step.name).write_text(step.text, encoding="utf-8")
        return {"code": 0, "stdout": "", "stderr": ""}
    own = environments.python_of(venv)
    set_here, words, into = (
        command_words(step.text) if step.kind == "command" else ({}, ["python", "-c", step.text], "")
    )
    program = own if words[0] == "python" else own.with_name(words[0])
    done = subprocess.run(
        [program, *words[1:]],
        cwd=folder,
        env={**environments.environment(), "COLUMNS": "100", "NO_COLOR": "1", **set_here},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    if into:
        (folder / into).write_text(done.stdout, encoding="utf-8")
    return {"code": done.returncode, "stdout": done.stdout, "stderr": done.stderr}


def try_out(venv: Path, folder: Path) -> list[str]:
    """What is wrong with the README where only the package is."""
    todo, wrong = steps(README.read_text(encoding="utf-8"))
    # A new user's first commands, once the README's file is there.
    after = next(number for number, step in enumerate(todo) if step.kind == "file") + 1
    todo[after:after] = [Step(0, "command", line) for line in FIRST]
    for step in todo:
        began = time.monotonic()
        found = wrong_with(step, run_step(step, venv, folder))
        shown = step.name if step.kind == "file" else step.text.splitlines()[0]
        print(f"  {shown}: {'wrong' if found else 'right'}, {time.monotonic() - began:.0f} s", flush=True)
        if found:
            wrong.append(f"README.md, line {step.line}: {found}")
    return wrong


def main() -> int:
    wrong: list[str] = []
    if len(set(versions().values())) > 1:
        wrong.append(f"not one version: {versions()}")
    with tempfile.TemporaryDirectory(prefix="batchfit-release-") as place:
        folder = Path(place)
        wheel, archive = environments.build(folder / "dist")
        wrong += [f"the source archive lacks {name}" for name in carried(archive)]
        twine = environments.fill(folder / "venv-twine", ("twine", "readme-renderer[md]"))
        command = [environments.python_of(twine), "-m", "twine", "check", "--strict", wheel, archive]
        if subprocess.run(command).returncode:
            wrong.append("twine finds the metadata wrong")
        for kind, package in (("wheel", wheel), ("sdist", archive)):
            print(f"the {kind}, {package.stat().st_size / 1e6:.1f} MB, in a new environment", flush=True)
            venv = environments.make(kind, package, folder, extras=EXTRAS, tools=())
            empty = folder / f"elsewhere-{kind}"
            empty.mkdir()
            wrong += [f"{kind}: {one}" for one in try_out(venv, empty)]
    print("\n".join(wrong) if wrong else "ready, but for what a person decides:")
    print("\n".join(f"- {one}" for one in open_questions()))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
