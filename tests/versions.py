"""Every torch: `python tests/versions.py run` makes an environment per torch and runs all the tests in it.

    python tests/versions.py run                  # versions without a result, one after another
    python tests/versions.py run --torch 2.15     # one of them, whether it has a result or not
    python tests/versions.py run --torch 2.15 --failed          # only the tests that failed there
    python tests/versions.py run --torch 2.15 --changed         # only tests that changed since its run
    python tests/versions.py run --torch 2.15 --changed tests/why # only some of these: the page says so
    python tests/versions.py run --torch 2.15 --environment DIR # in an environment that is there already
    python tests/versions.py ended --torch 2.15                 # of a run that was cut off: parts that ended
    python tests/versions.py add REPORT.xml --doctor doctor.json --commit C --machine "one H200"
    python tests/versions.py page                 # the page again, of the stored results

Rules: ordinary wheels of torch, used on the CPU. Environments lie in build/versions, one at a time, and are
removed; so is the copy of the source that the tests run on, so that work may go on meanwhile. Each part of
the tests is stored as soon as it ended: a run that was cut off goes on with the next part, if the commit is
the same. A version that has a result is not run again unless it is named. A test that is skipped is listed
with its reason. Nothing but the standard library.

`add` reads reports from another machine: of `pytest --junitxml=REPORT.xml`, and of `batchfit doctor --json`,
which says the versions.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import environments
import versions_page
from versions_page import LIBRARIES

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "versions.json"
PAGE = ROOT / "docs" / "reference" / "compatibility.md"
FOLDER = ROOT / "build" / "versions"
TOOLS = (*environments.TOOLS, "hatchling", "ruff", "mypy")
REQUIRED = ("transformers", "accelerate", "lightning", "ray", "gloo", "matplotlib", "hatchling")
TORCHTUNE = {"torchtune": "0.6.1", "torchao": "0.10.0"}
# What models are fine-tuned with; PEFT refuses LoRA beside the torchao of torchtune.
STACK = ("peft", "trl", "sentence-transformers", "diffusers", "bitsandbytes", "torchao")
_MOST_SECONDS = 3 * 3600
_CHANGED = "changed: "  # before the names of parts of a run of changed tests
Results = dict[str, Any]
NOTHING: Results = {"passed": 0, "failed": [], "skipped": {}, "seconds": 0}


@dataclass(frozen=True)
class Row:
    """One environment: a torch, and versions of libraries; one that is not named is the newest."""

    torch: str
    libraries: dict[str, str] = field(default_factory=dict)
    without: tuple[str, ...] = ()  # libraries that are not installed there

    @property
    def name(self) -> str:
        """How it is asked for: 2.15."""
        return name_of(self.torch)

    def packages(self) -> list[str]:
        """What pip is asked for, but torch."""
        wanted = {name: "" for name in LIBRARIES if name not in ("torchtune", *self.without)} | self.libraries
        return [*TOOLS, *(f"{name}=={version}" if version else name for name, version in wanted.items())]

    def required(self) -> str:
        """What no test may be skipped for."""
        names = [name for name in REQUIRED if name not in self.without]
        names += [name.replace("-", "_") for name in STACK if name not in self.without]
        return ",".join([*names, *(["torchtune"] if "torchtune" in self.libraries else [])])


def name_of(torch: str) -> str:
    """2.15 of 2.15.0+cu132."""
    return ".".join(torch.split(".")[:2])


# The oldest of each library beside the oldest torch, the newest beside the newest. torchtune's pin of torchao
# is of the time of torch 2.6, and keeps other libraries from being there: it is in that environment only.
# 2.11 is the version of the H200 figures. It is here in the place of 2.10, whose wheel pip refused twice in
# November 2026 (another hash than the registry names).
OLDEST = {
    "transformers": "4.57.1",
    "accelerate": "1.10.0",
    "lightning": "2.5.0",
    "ray": "2.40.0",
    "pydantic": "2.10.0",
    "typer": "0.15.4",
    "rich": "13.7.0",
    "matplotlib": "3.8.0",
    "numpy": "1.26.0",
    "pandas": "2.2.0",
}
# Of the same time as these; pip takes newer ones, which do not run beside them.
BESIDE_OLDEST = {"pytorch-lightning": "2.5.0", "pyarrow": "21.0.0", "pyparsing": "3.1.0"}
ROWS = (
    Row("2.6.0", OLDEST | BESIDE_OLDEST | TORCHTUNE, without=STACK),
    Row("2.8.0", {"torchao": "0.17.0"}),  # 0.18 cannot be imported beside it, nor then what imports it
    Row("2.11.0"),
    Row("2.12.1"),
    Row("2.15.0"),
)


# -- the parts of the tests


def parts(source: Path) -> dict[str, list[str]]:
    """What pytest is asked for in each part; together what `make test` runs. Pure code comes last."""
    tests = source / "tests"
    ours = [path for path in tests.iterdir() if path.name.startswith("test_") or path.is_dir()]
    names = sorted(
        path.name for path in ours if path.name not in ("integrations", "support", "typing", "data")
    )
    early = [name for name in names if name.removeprefix("test_") < "m"]
    late = [name for name in names if name not in early]
    rest = ["--ignore-glob=*/pure", "--ignore-glob=*/ranks"]
    return {
        "ranks": sorted(str(path.relative_to(source)) for path in tests.glob("*/ranks")),
        "integrations": ["tests/integrations"],
        "torch, a to l": [*rest, *(f"tests/{name}" for name in early)],
        "torch, m to z": [*rest, *(f"tests/{name}" for name in late)],
        "pure": sorted(str(path.relative_to(source)) for path in tests.glob("*/pure")),
    }


def run_tests(
    tests: Sequence[str], *, pure: bool, venv: Path, source: Path, required: str, processes: int
) -> Results:
    """Those tests there: counts, what failed, and why what was skipped."""
    report, log = source.parent / "report.xml", source.parent / "pytest.log"
    report.unlink(missing_ok=True)
    command = [environments.python_of(venv), "-m", "pytest", "-q", "-n", str(processes), "-m", "not slow"]
    command += ["--dist", "loadfile", "--no-loadscope-reorder", "-p", "no:cacheprovider", "--tb=short"]
    command += [f"--junitxml={report}", "--hypothesis-profile=same", *tests]
    variables = {**environments.environment(), "BATCHFIT_REQUIRE": required}
    # The tests start `batchfit` and `python` by name, too.
    variables["PATH"] = os.pathsep.join([str(environments.python_of(venv).parent), os.environ["PATH"]])
    if pure:
        variables["BATCHFIT_BLOCK_TORCH"] = "1"
    began = time.monotonic()
    with log.open("a", encoding="utf-8") as to:
        subprocess.run(command, cwd=source, env=variables, stdout=to, stderr=to, timeout=_MOST_SECONDS)
    if not report.exists():
        raise SystemExit(f"pytest ended without a report: {log}")
    return {**read(report), "seconds": round(time.monotonic() - began)}


def read(report: Path) -> Results:
    """A report of pytest (JUnit's XML): counts, the tests that failed, and reasons of skips."""
    passed, failed, skipped = 0, [], Counter[str]()
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname', '')}::{case.get('name', '')}".strip(":")
        wrong = [*case.iter("failure"), *case.iter("error")]
        left_out = case.find("skipped")
        if wrong:
            failed.append({"test": name, "why": first_line(wrong[0].get("message") or "")})
        elif left_out is not None:
            said = left_out.get("message") or ""
            # Of a whole file pytest says why in the text: (path, line, "Skipped: why").
            skipped[reason((left_out.text or said) if said == "collection skipped" else said)] += 1
        else:
            passed += 1
    failed.sort(key=lambda one: one["test"])
    return {"passed": passed, "failed": failed, "skipped": dict(sorted(skipped.items()))}


def first_line(message: str) -> str:
    """What a failure says first, without what differs from run to run."""
    line = next((line.strip() for line in message.splitlines() if line.strip()), "")
    return re.sub(r"0x[0-9a-f]+", "0x...", line.replace(str(FOLDER), "..."))[:200]


def reason(message: str) -> str:
    """Why a test was skipped; what pytest says around it is left out."""
    found = re.search(r"could not import '([\w.]+)'", message)
    inside = re.search(r"""['"]Skipped: (.+)['"]\)$""", message, re.DOTALL)
    message = inside[1] if inside else message
    return f"needs {found[1]}" if found else first_line(message.removeprefix("Skipped: "))


def address(test: str, source: Path) -> str:
    """What pytest is asked for to run a test of a report again: tests.a.test_b::test_c[x]."""
    dotted, _, name = test.partition("::")
    path = Path(*dotted.split("."))
    inner = [name] if name else []
    while not (path.name and (source / path.with_suffix(".py")).exists()):
        if not path.name:
            raise SystemExit(f"{test} is not among the tests of this commit: run all of them")
        path, inner = path.parent, [path.name, *inner]
    return "::".join([str(path.with_suffix(".py")), *inner])


def gone(tests: Sequence[str], *, pure: bool, venv: Path, source: Path) -> list[str]:
    """Those that this commit no longer has. A file asked for whole, or that cannot be imported, is there."""
    files = dict.fromkeys(test.partition("::")[0] for test in tests)
    command = [environments.python_of(venv), "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider"]
    variables = environments.environment() | ({"BATCHFIT_BLOCK_TORCH": "1"} if pure else {})
    said = subprocess.run([*command, *files], cwd=source, env=variables, capture_output=True, text=True)
    found = set(said.stdout.splitlines())
    collected = {line.partition("::")[0] for line in found if "::" in line}
    single = [test for test in tests if "::" in test and test not in found]
    return [test for test in single if test.partition("::")[0] in collected]


def merged(before: Results, again: Results) -> Results:
    """A part whose failed tests were run again: what they gave now, beside the others."""
    skipped = Counter(before["skipped"]) + Counter(again["skipped"])
    return {
        "passed": before["passed"] + again["passed"],
        "failed": again["failed"],
        "skipped": dict(sorted(skipped.items())),
        "seconds": before["seconds"] + again["seconds"],
    }


# -- environments


def make(row: Row, folder: Path) -> tuple[Path, float]:
    """A new environment with that torch, and its MiB on the disk."""
    venv = folder / "venv"
    torch = f"torch=={row.torch}"
    try:
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        for packages in ([torch], [torch, *row.packages()]):
            install(venv, *packages)
    except BaseException:
        shutil.rmtree(venv, ignore_errors=True)  # half of one would be taken for a whole one
        raise
    taken_bytes = sum(path.lstat().st_size for path in venv.rglob("*") if path.is_file())
    return venv, taken_bytes / 2**20


def install(venv: Path, *packages: str) -> None:
    """pip, without a cache: these wheels are gigabytes, and are used once."""
    pip = [environments.python_of(venv), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, "--no-cache-dir", *packages], check=True)


def doctor(venv: Path, folder: Path) -> Results:
    """What batchfit says of that environment: versions, and which features work."""
    command = [environments.python_of(venv), "-m", "batchfit", "doctor", "--json"]
    variables = environments.environment()
    said = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=300)
    found: Results = json.loads(said.stdout)
    return found


def installed(venv: Path) -> dict[str, str]:
    """The version of each package there, by its name in small letters."""
    pip = [environments.python_of(venv), "-m", "pip", "--disable-pip-version-check", "list", "--format=json"]
    said = subprocess.run(pip, capture_output=True, text=True, check=True)
    return {one["name"].lower().replace("_", "-"): one["version"] for one in json.loads(said.stdout)}


def described(said: Results, beside: Mapping[str, str] | None = None) -> Results:
    """Of the doctor's answer, what is stored: versions, and features that do not simply work."""
    known = {**(beside or {}), **said["versions"], **said["extras"]}
    # Whether torch is built for a GPU is no matter of its version.
    limits = [one for one in said["features"] if one["state"] != "works" and "GPU" not in one["name"]]
    return {
        "torch": known["torch"],
        "python": known["python"],
        "libraries": {name: known[name] for name in LIBRARIES if known.get(name)},
        "limits": limits,
    }


def run_row(
    row: Row,
    *,
    processes: int,
    keep: bool,
    environment: Path | None,
    only: str | None,
    folders: Sequence[str] = (),
) -> Results:
    """All tests beside that torch, or only some: those that failed in its stored run, or changed since."""
    commit, folder = revision(), FOLDER / row.name
    before = stored()[row.name] if only else NOTHING
    every = changed_since(before["source"]) if only == "changed" else {}
    asked = within(every, folders)
    for other in FOLDER.iterdir() if FOLDER.exists() and environment is None else ():
        if other != folder:
            shutil.rmtree(other)
    try:
        source = copied(folder)
        venv, taken_mib = environment or folder / "venv", None
        if not environments.python_of(venv).exists():
            print(f"torch {row.torch}: installing", flush=True)
            venv, taken_mib = make(row, folder)
        install(venv, "--no-deps", "--no-build-isolation", "--force-reinstall", str(source))
        said, beside = doctor(venv, folder), installed(venv)
        if name_of(said["versions"]["torch"]) != row.name:
            raise SystemExit(f"{venv} has torch {said['versions']['torch']}, not {row.torch}")
        run = partial(run_tests, venv=venv, source=source, required=row.required(), processes=processes)
        left_out: list[str] = []
        if only == "failed":
            done, left_out = run_failed(run, parts_of(before), venv=venv, source=source)
        elif only == "changed":
            done = run_parts(run, asked, commit=commit, begun=folder / "changed.json")
        else:
            done = run_parts(run, parts(source), commit=commit, begun=folder / "parts.json")
    except BaseException:
        keep = True  # parts that ended are not run again
        raise
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    about = about_this_machine(commit)
    about |= described(said, beside) | ({} if taken_mib is None else {"install_mib": round(taken_mib)})
    if only == "failed":
        return run_again(before, about, done, left_out)
    if only == "changed":
        return run_changed(before, about, done, asked=asked, every=every)
    return {**about, "parts": done}


def about_this_machine(commit: str) -> Results:
    return {"date": today(), "source": commit, "machine": f"{os.cpu_count()} cores, no GPU"}


def ended(row: Row) -> Results:
    """Of a run of that row that was cut off, or goes on: the parts that ended. The page names the others."""
    folder = FOLDER / row.name
    begun = folder / "parts.json"
    if not begun.exists():
        raise SystemExit(f"no part of the tests has ended with torch {row.name}: {begun} is not there")
    kept, venv = json.loads(begun.read_text(encoding="utf-8")), folder / "venv"
    known = described(doctor(venv, folder), installed(venv))
    return {**about_this_machine(kept["source"]), **known, "parts": kept["parts"]}


def copied(folder: Path) -> Path:
    """The source as it would be published, in that folder."""
    for name in ("dist", "unpacked", "source"):
        shutil.rmtree(folder / name, ignore_errors=True)
    _, archive = environments.build(folder / "dist")
    return environments.unpack(archive, folder / "unpacked").rename(folder / "source")


def run_parts(
    run: Callable[..., Results], asked: Mapping[str, Sequence[str]], *, commit: str, begun: Path
) -> dict[str, Results]:
    """Each part that has not ended on that commit; `begun` keeps those that have."""
    kept: Results = json.loads(begun.read_text(encoding="utf-8")) if begun.exists() else {}
    done: dict[str, Results] = kept["parts"] if kept.get("source") == commit else {}
    for name, tests in asked.items():
        if name in done:
            continue
        found = done[name] = run(tests, pure=name == "pure")
        begun.write_text(json.dumps({"source": commit, "parts": done}), encoding="utf-8")
        counts = f"{found['passed']:,} passed, {len(found['failed'])} failed, {found['seconds']} s"
        print(f"{name}: {counts}", flush=True)
    return done


def parts_of(result: Results) -> dict[str, Results]:
    """The parts of a stored result, and those of its run of changed tests."""
    later = result.get("changed", {}).get("parts", {})
    return result["parts"] | {f"{_CHANGED}{name}": part for name, part in later.items()}


def changed_since(commit: str) -> dict[str, list[str]]:
    """The files of tests that are new or changed since that commit, by part."""
    git = ["git", "-C", str(ROOT), "diff", "--name-only", "--diff-filter=d", commit, "--", "tests"]
    said = subprocess.run(git, capture_output=True, text=True)
    if said.returncode != 0:
        raise SystemExit(f"--changed needs a stored result of a commit that is here: {said.stderr.strip()}")
    files = [Path(line) for line in said.stdout.splitlines()]
    tests = [file for file in files if file.name.startswith("test_") and file.suffix == ".py"]
    found = {
        "pure": [str(file) for file in tests if "pure" in file.parts],
        "torch": [str(file) for file in tests if "pure" not in file.parts],
    }
    return {name: ours for name, ours in found.items() if ours}


def within(asked: Mapping[str, Sequence[str]], folders: Sequence[str]) -> dict[str, list[str]]:
    """The files in those folders; all of them where none is named."""
    roots = [Path(folder) for folder in folders] or [Path("tests")]
    found = {
        part: [file for file in files if any(Path(file).is_relative_to(root) for root in roots)]
        for part, files in asked.items()
    }
    return {part: files for part, files in found.items() if files}


def run_failed(
    run: Callable[..., Results], before: Mapping[str, Results], *, venv: Path, source: Path
) -> tuple[dict[str, Results], list[str]]:
    """The failed tests of each part again, and those that this commit no longer has."""
    failed = {name: part["failed"] for name, part in before.items() if part["failed"]}
    done, left_out = {}, []
    for name, ours in failed.items():
        pure = name.removeprefix(_CHANGED) == "pure"
        tests = [address(one["test"], source) for one in ours]
        lost = gone(tests, pure=pure, venv=venv, source=source)
        tests = [one for one in tests if one not in lost]
        done[name] = run(tests, pure=pure) if tests else NOTHING
        if counted(done[name]) < len(tests):
            raise SystemExit(f"pytest ran {counted(done[name])} of {len(tests)} tests of {name}")
        left_out += lost
    return done, left_out


def counted(part: Results) -> int:
    """How many tests a part has."""
    return int(part["passed"]) + len(part["failed"]) + sum(part["skipped"].values())


def run_again(
    before: Results, about: Results, again: dict[str, Results], left_out: Sequence[str] = ()
) -> Results:
    """A stored result in which failed tests were run again, on another commit: both are named.

    `left_out` are those that the later commit no longer has.
    """
    known = parts_of(before)
    tests = sum(len(known[part]["failed"]) for part in again)
    new = {part: merged(found, again[part]) if part in again else found for part, found in known.items()}
    later = {part.removeprefix(_CHANGED): new.pop(part) for part in known if part.startswith(_CHANGED)}
    run = {"source": about["source"], "date": about["date"], "tests": tests}
    if left_out:
        run["gone"] = sorted(left_out)
    return {
        **before,
        **{name: about[name] for name in ("limits", "libraries")},
        "parts": new,
        "again": [*before.get("again", []), run],
        **({"changed": {**before["changed"], "parts": later}} if later else {}),
    }


def run_changed(
    before: Results,
    about: Results,
    done: dict[str, Results],
    *,
    asked: Mapping[str, Sequence[str]],
    every: Mapping[str, Sequence[str]],
) -> Results:
    """A stored result with the tests that changed since, on a later commit: counts of their own."""
    files = {"files": sum(map(len, asked.values())), "of": sum(map(len, every.values()))}
    later = {"source": about["source"], "date": about["date"], **files, "parts": done}
    return {**before, **{name: about[name] for name in ("limits", "libraries")}, "changed": later}


def today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def revision() -> str:
    """The commit that is tested, with a plus where the tree is not that commit."""
    git = ["git", "-C", str(ROOT)]
    said = subprocess.run([*git, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True)
    if said.returncode != 0:
        return "unknown"
    ours = ["src", "tests", "examples", "benchmarks/*.py", "pyproject.toml"]
    left = subprocess.run(
        [*git, "status", "--porcelain", "--", *ours], check=True, capture_output=True, text=True
    )
    return said.stdout.strip() + ("+" if left.stdout.strip() else "")


# -- what is stored


def stored(path: Path = RESULTS) -> dict[str, Results]:
    """Results by torch version, the oldest first."""
    found: dict[str, Results] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return dict(sorted(found.items(), key=lambda pair: [int(part) for part in pair[0].split(".")]))


def store(name: str, result: Results, path: Path = RESULTS) -> dict[str, Results]:
    """Add a result; all of them."""
    found = stored(path) | {name: result}
    path.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return stored(path)


def page() -> None:
    """Write docs/reference/compatibility.md."""
    PAGE.write_text(versions_page.page(stored()), encoding="utf-8")


def from_elsewhere(
    reports: Sequence[Path], said: Results, *, commit: str, machine: str, date: str
) -> Results:
    """The result of reports that pytest wrote on another machine."""
    found = {report.stem: {**read(report), "seconds": seconds_of(report)} for report in reports}
    return {"date": date, "source": commit, "machine": machine, **described(said), "parts": found}


def seconds_of(report: Path) -> int:
    """How long the tests of a report took."""
    suites = ElementTree.parse(report).iter("testsuite")
    return round(sum(float(suite.get("time") or 0) for suite in suites))


# -- the command


def chosen(named: Sequence[str], found: dict[str, Results], *, again: bool = False) -> list[Row]:
    """The rows to run: those that are named, or those without a result."""
    unknown = set(named) - {row.name for row in ROWS}
    if unknown:
        raise SystemExit(f"--torch must be one of {', '.join(row.name for row in ROWS)}, not {unknown.pop()}")
    whole = {name for name, result in found.items() if not versions_page.not_run(result)}
    return [row for row in ROWS if (row.name in named if named else again or row.name not in whole)]


def run(given: argparse.Namespace) -> int:
    """0 where no test failed, in the versions that were run."""
    rows = chosen(given.torch, stored(), again=given.again)
    if given.environment is not None and len(rows) != 1:
        raise SystemExit("--environment needs --torch with one version")
    missing = [row.name for row in rows if row.name not in stored()]
    only = "failed" if given.failed else None if given.changed is None else "changed"
    if only and missing:
        raise SystemExit(f"--{only} needs a stored result, and torch {missing[0]} has none")
    wrong = 0
    for row in rows:
        result = run_row(
            row,
            processes=given.processes,
            keep=given.keep,
            environment=given.environment,
            only=only,
            folders=given.changed or (),
        )
        store(row.name, result)
        page()
        for name, one in versions_page.runs({row.name: result}).items():
            passed, failed, skipped = versions_page.totals(one)
            wrong += len(failed)
            found = f"{passed:,} passed, {len(failed)} failed, {skipped.total()} skipped"
            print(f"torch {name}: {found}", flush=True)
    return 1 if wrong else 0


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    commands = found.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="make environments, run the tests, store what they gave")
    running.add_argument("--torch", nargs="*", default=[], help="these, whether they have a result or not")
    running.add_argument("--again", action="store_true", help="all of them again")
    some = running.add_mutually_exclusive_group()
    some.add_argument("--failed", action="store_true", help="only tests that failed; the others are kept")
    some.add_argument(
        "--changed",
        nargs="*",
        metavar="FOLDER",
        help="only files of tests that are new or changed since its run (in those folders)",
    )
    running.add_argument(
        "--environment",
        type=lambda text: Path(text).absolute(),
        help="one that is there already, with its torch",
    )
    running.add_argument("--keep", action="store_true", help="leave the last environment and its logs")
    running.add_argument("-n", "--processes", type=int, default=2)
    ending = commands.add_parser("ended", help="store the parts that ended of a run that was cut off")
    ending.add_argument("--torch", required=True, choices=[row.name for row in ROWS])
    adding = commands.add_parser("add", help="store reports that pytest wrote on another machine")
    adding.add_argument("reports", nargs="+", type=Path, metavar="REPORT.xml")
    adding.add_argument(
        "--doctor", required=True, type=Path, help="what `batchfit doctor --json` printed there"
    )
    adding.add_argument("--commit", required=True)
    adding.add_argument("--machine", required=True, help="what it has: one H200, 16 cores")
    adding.add_argument("--date", default=today())
    commands.add_parser("page", help="write docs/reference/compatibility.md from the stored results")
    return found


def main() -> int:
    given = parser().parse_args()
    if given.command == "run":
        return run(given)
    if given.command == "ended":
        store(given.torch, ended(next(row for row in ROWS if row.name == given.torch)))
    if given.command == "add":
        said = json.loads(given.doctor.read_text(encoding="utf-8"))
        result = from_elsewhere(
            given.reports, said, commit=given.commit, machine=given.machine, date=given.date
        )
        store(name_of(result["torch"]), result)
    page()
    return 0


if __name__ == "__main__":
    sys.exit(main())
