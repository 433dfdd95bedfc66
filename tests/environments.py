"""The wheel in environments of its own: `python tests/environments.py` makes one without extras, one with
all but torchtune's, and one with torchtune's (which pins another torchao than PEFT needs).

Rules: the wheel and the source archive are built, the archive is unpacked and `src/` removed from it; tests
run there, so that only the installed wheel can be what they test. Environments come from the package
registries (set-up), with the versions of constraints.txt; the tests in them use no network.
`tests/test_wheel.py` uses the same functions without a registry.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
# What is installed by name, and the tests that must not be skipped there for want of it.
ALL = ("accelerate", "lightning", "plot", "ray", "transformers", "yaml")
EXTRAS = {"none": (), "all": ALL, "torchtune": ("torchtune",)}
REQUIRED = {"none": "", "all": "accelerate,lightning,transformers,ray,matplotlib", "torchtune": "torchtune"}
TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "numpy", "pyyaml")
# What runs against the wheel: quick ones of every layer, files that the package must carry (CSS, scripts)
# included. The whole of the tests against the wheel is `--tests tests`.
QUICK = (
    "tests/results/pure/test_results.py",
    "tests/cli/pure/test_cli_without_torch.py",
    "tests/report/pure/test_report.py",
    "tests/workload/torch/test_workload.py",
    "tests/testing/torch/test_testing.py",
    "tests/device/torch/test_oom.py",
    "tests/test_extras.py",
)
# The tests of what the extras are for.
_FRAMEWORKS = ("accelerate", "lightning", "ray", "transformers")
OF_EXTRAS = {
    "none": (),
    "all": tuple(f"tests/integrations/{name}" for name in _FRAMEWORKS),
    "torchtune": ("tests/integrations/torchtune",),
}


def build(folder: Path, source: Path = ROOT) -> tuple[Path, Path]:
    """The wheel and the source archive of `source`, made by hatchling alone: no registry, no pip."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--directory", str(folder)],
        cwd=source,
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    (wheel,), (archive,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, archive


def unpack(archive: Path, folder: Path) -> Path:
    """The files of the source archive."""
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    (found,) = folder.iterdir()
    return found


def without_source(archive: Path, folder: Path) -> Path:
    """Where the tests run: all of the source archive but `src/`."""
    found = unpack(archive, folder)
    shutil.rmtree(found / "src")
    return found


def environment() -> dict[str, str]:
    """Variables without those through which another batchfit, or a user's settings, could come in."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "BATCHFIT_"))}
    return {**kept, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def python_of(venv: Path) -> Path:
    return venv / ("Scripts" if os.name == "nt" else "bin") / "python"


def run_tests(venv: Path, folder: Path, tests: tuple[str, ...], *, required: str = "") -> int:
    """Run them in `folder` with that environment; the exit status."""
    python = python_of(venv)
    where = subprocess.run(
        [python, "-c", "import batchfit; print(batchfit.__file__)"],
        cwd=folder, env=environment(), check=True, capture_output=True, text=True, timeout=120,
    ).stdout.strip()  # fmt: skip
    if not Path(where).is_relative_to(venv):
        raise SystemExit(f"batchfit is {where}, not the wheel in {venv}")
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", "-n", "2"]
    command += ["--dist", "loadfile", "--hypothesis-profile=same", *tests]
    return subprocess.run(command, cwd=folder, env={**environment(), "BATCHFIT_REQUIRE": required}).returncode


def make(
    name: str, package: Path, folder: Path, *, extras: tuple[str, ...] = (), tools: tuple[str, ...] = TOOLS
) -> Path:
    """A new environment from the registries: the wheel or source archive with those extras, and tools."""
    wanted = f"{package}[{','.join(extras)}]" if extras else str(package)
    # torch on its own first, as in the Makefile: the resolver then has nothing to choose there.
    return fill(folder / f"venv-{name}", ("torch",), (wanted, *tools))


def fill(venv: Path, *packages: tuple[str, ...]) -> Path:
    """A new environment with those packages, one group after another, in the versions of the constraints."""
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    pip = [python_of(venv), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    pins = [option for file in ("", "-torchtune") for option in ("-c", str(ROOT / f"constraints{file}.txt"))]
    for group in packages:
        subprocess.run([*pip, *pins, *group], check=True)
    return venv


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tests", nargs="*", help="run these instead of a quick choice")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="batchfit-wheel-") as place:
        folder = Path(place)
        wheel, archive = build(folder / "dist")
        sources = without_source(archive, folder / "unpacked")
        for name in EXTRAS:
            began = time.monotonic()
            venv = make(name, wheel, folder, extras=EXTRAS[name])
            made = time.monotonic()
            print(f"environment with {name} of the extras: {made - began:.0f} s", flush=True)
            tests = tuple(given.tests or (*QUICK, *OF_EXTRAS[name]))
            if code := run_tests(venv, sources, tests, required=REQUIRED[name]):
                return code
            print(f"tests of the wheel there: {time.monotonic() - made:.0f} s", flush=True)
            shutil.rmtree(venv)
    return 0


if __name__ == "__main__":
    sys.exit(main())
