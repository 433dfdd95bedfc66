"""The trainers' own test suites, plain and with `adapt` applied to each trainer that their tests make.

    python benchmarks/trainer_suites_hub.py HUB --trl TRL            # tiny models and data, made locally
    python benchmarks/trainer_suites.py run --suite transformers --version v5.15.1 --checkout CHECKOUT \\
        --tests tests/trainer/test_trainer.py ... --hub HUB --work FOLDER [-k EXPRESSION]
    python benchmarks/trainer_suites.py gather --work FOLDER --out results/trainer_suites_cpu_202611.json
    python benchmarks/trainer_suites.py page results/trainer_suites_cpu_202611.json

Rules
- A checkout is a copy of the other repository's tests at a tag; nothing of it is committed here. The library
  is the one that is installed.
- Each file of tests runs plain first. Tests that passed run again with `adapt` at the end of each trainer's
  construction ("adapted"), and once more with a search and Microbatchers of at most one sample ("cut"), so
  that nearly every batch is cut. What failed with it runs a third time without batchfit's own entries in
  `log_history` ("unlogged"): was that the only difference?
- A test that fails plain says nothing about batchfit; it is counted by reason. A `BatchfitError` with `adapt`
  is a refusal. Each other difference has its reason in `EXPLAINED`, or the page says that it has none.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pages import add_page, write_page

Results = dict[str, Any]
WAYS = ("adapted", "cut")
HERE = Path(__file__).parent
_PACKAGES = ("torch", "transformers", "trl", "sentence-transformers", "accelerate", "peft", "datasets")
_GONE = {  # what the tests import and the installed libraries no longer have
    "transformers": "transformers:GlueDataset,transformers:GlueDataTrainingArguments",
    "trl": "trl.trainer.sft_trainer:_chunked_cross_entropy_loss,"
    "trl.trainer.sft_trainer:_patch_chunked_ce_lm_head,trl.trainer.sft_trainer:dft_loss,trl.import_utils:is_joblib_available",
}
_OWN = {"transformers": "src", "trl": "trl", "sentence-transformers": "sentence_transformers"}
# Why tests fail plain, here: a pattern of the failure, and the reason in words. The first counts.
PLAIN_REASONS = (
    (r"Offline|couldn't connect|Couldn't reach|LocalEntryNotFound|offline mode|local_files_only|find the "
     r"requested files|not a valid model identifier|Can't load|outgoing traffic|"
     r"ConnectionError|not a local folder",
     "a model, a processor or data that only the hub has"),
    (r"No module named|requires the .* library|to be installed|not installed|not found in your environment|"
     r"pytest --fixtures",
     "a package that is not installed"),
    (r"the installed .* has no|cannot import name|has no attribute|unexpected keyword|"
     r"Extra items in the left set",
     "the tests are of an older version than the library"),
    (r"Timeout", "no end after 300 s"),
)  # fmt: skip
OTHER = "another (an expected number of real weights, tokens of a real tokenizer, a flaw of the stand-ins)"
# Of tests that pass when batchfit's own entries do not reach `log_history`.
LOGGED = (
    "By design",
    "`log_history` has one entry more, with the microbatch size that the search found; without that entry "
    "these tests pass",
)
# Differences that are understood: a pattern of the test's name, of its failure, the kind, and why.
EXPLAINED: tuple[tuple[str, str, str, str], ...] = (
    (
        "resume_training_with_different_batch_size|checkpoint_args_logging",
        "ranks must be [0-9]+, as in the checkpoint",
        "By design",
        "a checkpoint of another batch size is refused with a `ValueError`: Trainer counts batches, so "
        "it loses or repeats samples there",
    ),
)


def read(path: Path) -> Results:
    found: Results = json.loads(path.read_text(encoding="utf-8"))
    return found


def run_files(given: argparse.Namespace) -> None:
    """Each file of tests in each way, but what the work folder has."""
    own = given.checkout / _OWN.get(given.suite, given.suite)
    if own.is_dir():  # pytest puts the checkout first on sys.path
        raise SystemExit(f"remove {own}: its tests would import it, not the installed library")
    given.work.mkdir(parents=True, exist_ok=True)
    for file in given.tests:
        name = f"{given.suite}-{Path(file).stem}"
        about = {"suite": given.suite, "version": given.version, "file": file, "select": given.k}
        about |= {"note": given.note} if given.note else {}
        (given.work / f"{name}.about.json").write_text(json.dumps(about))
        _run(given, file, name, "plain")
        for way in given.ways:
            _run(given, file, name, way, only=_kept(given, name, "plain", "passed"))
            failed = _kept(given, name, way, "failed")
            if failed:
                _run(given, file, name, f"{way}-unlogged", only=failed)


def _kept(given: argparse.Namespace, name: str, way: str, outcome: str) -> list[str]:
    found = read(given.work / f"{name}.{way}.json")
    return [test for test, one in found.items() if one["outcome"] == outcome and not is_refused(one)]


def _run(given: argparse.Namespace, file: str, name: str, way: str, only: list[str] | None = None) -> None:
    out = given.work.resolve() / f"{name}.{way}.json"
    if out.exists():
        return
    mode, _, unlogged = way.partition("-")
    part = out.with_suffix(".part")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(
            [str(HERE), str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")]
        ),
        "TRAINER_SUITES_MODE": mode,
        "TRAINER_SUITES_OUT": str(part),
        "TRAINER_SUITES_UNLOGGED": "1" if unlogged else "0",
        "TRAINER_SUITES_GONE": _GONE.get(given.suite, ""),
        "BATCHFIT_CACHE": str(given.work.resolve() / "cache"),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
    }
    if given.hub is not None:
        environment |= {"TRAINER_SUITES_HUB": str(given.hub.resolve()), "HF_HOME": str(given.hub.resolve())}
    if only is not None:
        chosen = out.with_suffix(".only")
        chosen.write_text(json.dumps({test: {"outcome": "passed"} for test in only}))
        environment["TRAINER_SUITES_ONLY"] = str(chosen)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "trainer_suites_plugin"]
    command += ["--timeout", "300", "-o", "log_cli=false", "--tb=short", file]
    if given.k:
        command += ["-k", given.k]
    with out.with_suffix(".log").open("w") as log:
        done = subprocess.run(
            command, cwd=given.checkout, env=environment, stdout=log, stderr=log, check=False
        )
    if done.returncode not in (0, 1, 2, 5) or not part.exists():
        raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}, see {out.with_suffix('.log')}")
    part.rename(out)


# --- comparing


def plain_reason(text: str) -> str:
    """Why a test failed without batchfit."""
    return next((reason for pattern, reason in PLAIN_REASONS if re.search(pattern, text)), OTHER)


def explained(test: str, reason: str) -> tuple[str, str]:
    """The kind and the reason of a difference; empty texts where it is not understood."""
    for name, pattern, kind, why in EXPLAINED:
        if re.search(name, test) and re.search(pattern, reason):
            return kind, why
    return "", ""


def is_refused(one: Results) -> bool:
    """Whether a failure is batchfit's own refusal, with its reason."""
    return one["outcome"] == "failed" and "batchfit.errors." in one.get("reason", "")


def compare(plain: Results, way: Results, unlogged: Results) -> Results:
    """What differs between a plain run of tests and one with `adapt`."""
    passed = [test for test, one in plain.items() if one["outcome"] == "passed"]
    ran = {test: way[test] for test in passed if test in way}
    refused: Counter[str] = Counter()
    differences = []
    for test, one in ran.items():
        for text in sorted(set(one["refused"])):
            refused[text] += 1
        if one["outcome"] == "passed":
            continue
        if is_refused(one):
            refused[one["reason"].partition("batchfit.errors.")[2]] += 1
            continue
        without = unlogged.get(test, {"outcome": "not run", "reason": ""})
        difference = {"test": test, "outcome": one["outcome"], "reason": one.get("reason", "")}
        differences.append(difference | {"unlogged": without["outcome"], "then": without.get("reason", "")})
    trained = [one for one in ran.values() if one["trainings"]]
    return {
        "run": len(ran),
        "passed": sum(one["outcome"] == "passed" for one in ran.values()),
        "trainers": sum(one["adapted"] for one in ran.values()),
        "tests_that_train": len(trained),
        "trainings": sum(one["trainings"] for one in trained),
        "batches": sum(one["batches"] for one in trained),
        "batches_cut": sum(one["cut"] for one in trained),
        "seconds": round(sum(one.get("seconds", 0.0) for one in ran.values()), 1),
        "refused": dict(refused),
        "differences": differences,
    }


def of_file(work: Path, name: str) -> Results:
    """All that is known of one file of tests."""
    plain = read(work / f"{name}.plain.json")
    outcomes = Counter(one["outcome"] for one in plain.values())
    reasons = Counter(
        plain_reason(one.get("reason", "")) for one in plain.values() if one["outcome"] == "failed"
    )
    found: Results = {
        **read(work / f"{name}.about.json"),
        "plain": dict(outcomes) | {"reasons": dict(reasons)},
        "plain_seconds": round(
            sum(one.get("seconds", 0.0) for one in plain.values() if one["outcome"] == "passed"), 1
        ),
    }
    for way in WAYS:
        if (work / f"{name}.{way}.json").exists():
            again = work / f"{name}.{way}-unlogged.json"
            unlogged = read(again) if again.exists() else {}
            found[way] = compare(plain, read(work / f"{name}.{way}.json"), unlogged)
    return found


def gather(given: argparse.Namespace) -> None:
    names = sorted(one.name.removesuffix(".plain.json") for one in given.work.glob("*.plain.json"))
    made = read(given.hub / "made.json") if given.hub is not None else {}
    found = {
        "about": {
            "date": "2026-11-20",
            "command": "python benchmarks/trainer_suites.py run, then gather",
            "python": platform.python_version(),
            "packages": {name: version(name) for name in _PACKAGES},
            "machine": f"{os.cpu_count()} cores of {platform.machine()}, shared with other work",
            "without_model": made,
        },
        "files": {name: of_file(given.work, name) for name in names},
    }
    given.out.write_text(json.dumps(found, indent=1) + "\n")


# --- the page


def page(found: Results) -> str:
    """The page of the results."""
    return "\n".join([*_head(found), *_table(found), *_differences(found), *_refused(found), *_plain(found)])


def _of_suites(found: Results) -> dict[str, list[Results]]:
    suites: dict[str, list[Results]] = {}
    for one in found["files"].values():
        suites.setdefault(one["suite"], []).append(one)
    return suites


def _head(found: Results) -> list[str]:
    about = found["about"]
    packages = ", ".join(f"{name} {number}" for name, number in about["packages"].items())
    tags = ", ".join(f"{suite} {files[0]['version']}" for suite, files in _of_suites(found).items())
    return [
        "# The trainers' own test suites with `adapt`",
        "",
        f"{about['date']}. Made by `{about['command']}`: Python {about['python']}, {packages}; "
        f"{about['machine']}. Tests of {tags}, run with the installed libraries.",
        "",
        "Each test file runs plain. Tests that passed run again with each Trainer given to `adapt` when it "
        'is constructed: as a user would ("adapted"), and with microbatches of one sample ("cut"). Models, '
        "tokenizers and data are tiny stand-ins made locally, from TRL's own scripts.",
        "",
    ]


def _table(found: Results) -> list[str]:
    lines = [
        "| tests | plain: pass | fail | skip | with | run | pass | refused | differ | trainings | batches | "
        "cut |",
        "|---" * 12 + "|",
    ]
    for name, one in found["files"].items():
        plain = one["plain"]
        for way in WAYS:
            if way not in one:
                continue
            its = one[way]
            refused = its["run"] - its["passed"] - len(its["differences"])
            lines.append(
                f"| {name.replace('-test_', ': ')} | {plain.get('passed', 0)} | {plain.get('failed', 0)} | "
                f"{plain.get('skipped', 0)} | {way} | {its['run']} | {its['passed']} | {refused} | "
                f"{len(its['differences'])} | {its['trainings']} | {its['batches']} | {its['batches_cut']} |"
            )
    return [
        *lines,
        "",
        "Trainings and batches are those that ran under batchfit; cut: batches of more than one microbatch. "
        "`refused` counts tests that a `BatchfitError` ended. Where fewer tests ran with `adapt` than passed "
        "plain, the run was stopped for want of time.",
        "",
    ]


def differences(found: Results) -> Iterator[tuple[str, str, Results]]:
    """The differences of all files: suite, way, difference."""
    for one in found["files"].values():
        for way in WAYS:
            for difference in one.get(way, {"differences": []})["differences"]:
                yield one["suite"], way, difference


def _differences(found: Results) -> list[str]:
    groups: dict[tuple[str, str], dict[str, set[str]]] = {}
    unknown = []
    for suite, way, one in differences(found):
        file, _, name = one["test"].partition("::")
        test = f"{suite}, {Path(file).name}: {name.rpartition('::')[2]}"
        kind, why = explained(one["test"], f"{one['reason']} {one['then']}")
        if one["unlogged"] == "passed":
            kind, why = LOGGED
        if not why:
            unknown.append(f"- {test} ({way}): {one['reason'][:200]}")
            continue
        groups.setdefault((kind, why), {}).setdefault(test, set()).add(way)
    lines = ["## Passes plain, fails with `adapt`", ""]
    for (kind, why), tests in sorted(groups.items()):
        lines += [f"**{kind}: {why}**", ""]
        lines += [f"- {test} ({', '.join(sorted(ways))})" for test, ways in sorted(tests.items())]
        lines.append("")
    if unknown:
        lines += ["**Not understood**", "", *unknown, ""]
    return lines


def _refused(found: Results) -> list[str]:
    counts: Counter[tuple[str, str]] = Counter()
    for one in found["files"].values():
        for way in WAYS:
            for text, count in one.get(way, {"refused": {}})["refused"].items():
                first = re.split(r"(?<=[a-z)])[.:;] ", text.partition(": ")[2] or text)[0]
                counts[way, first.split("batchfit:")[0].strip()[:220]] += count
    lines = ["## Refused", "", "| with | tests | the refusal begins |", "|---|---|---|"]
    lines += [f"| {way} | {count} | {text} |" for (way, text), count in sorted(counts.items())]
    return [*lines, ""]


def _plain(found: Results) -> list[str]:
    lines = ["## Fails plain", "", "| suite | tests | why |", "|---|---|---|"]
    for suite, files in _of_suites(found).items():
        counts: Counter[str] = Counter()
        for one in files:
            counts.update(one["plain"]["reasons"])
        lines += [f"| {suite} | {count} | {reason} |" for reason, count in counts.most_common()]
    selected = {
        f'`{one["file"]}`: `-k "{one["select"]}"`' for one in found["files"].values() if one["select"]
    }
    if selected:
        lines += ["", "Not all tests were selected: " + "; ".join(sorted(selected)) + "."]
    lines += [f"\n{one['file']}: {one['note']}." for one in found["files"].values() if one.get("note")]
    without = found["about"]["without_model"]
    if without:
        lines += ["", f"Models of TRL's scripts that could not be made: {', '.join(sorted(without))}."]
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("--suite", required=True)
    running.add_argument("--version", required=True)
    running.add_argument("--checkout", type=Path, required=True)
    running.add_argument("--tests", nargs="+", required=True)
    running.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    running.add_argument("-k", default="")
    running.add_argument("--note", default="", help="what a reader of the page should know of these tests")
    gathering = commands.add_parser("gather")
    gathering.add_argument("--out", type=Path, required=True)
    for one in (running, gathering):
        one.add_argument("--work", type=Path, required=True)
        one.add_argument("--hub", type=Path)
    add_page(commands)
    given = parser.parse_args()
    if given.command == "page":
        write_page(given, page)
    else:
        {"run": run_files, "gather": gather}[given.command](given)


if __name__ == "__main__":
    main()
