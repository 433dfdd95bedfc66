"""The wheel and the source archive: complete, the same from either source, and what tests pass against.

Built by hatchling, without a network: the environment of the wheel sees the packages of this one, and no
`src/`. Environments from the registries are made by `tests/environments.py` (`make test-wheel`).
"""

from __future__ import annotations

import email
import importlib.machinery
import importlib.util
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

import environments
from conftest import need

need("hatchling", present=importlib.util.find_spec("hatchling") is not None)

ROOT = Path(__file__).parent.parent
# In a source archive without src/ there is nothing to build from: that is how these tests meet the wheel.
need("src", present=(ROOT / "src").is_dir())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return environments.build(tmp_path_factory.mktemp("dist"))


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as packed:
        return set(packed.namelist())


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(built: tuple[Path, Path]) -> None:
    source = ROOT / "src"
    files = {
        path.relative_to(source).as_posix()
        for path in source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {"batchfit/py.typed", "batchfit/_charts/chart.css", "batchfit/_report/page.js"} <= files
    inside = names(built[0])
    assert {name for name in inside if ".dist-info/" not in name} == files
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in inside)


def test_what_the_wheel_says_of_itself(built: tuple[Path, Path]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    with zipfile.ZipFile(built[0]) as packed:
        (name,) = (one for one in packed.namelist() if one.endswith(".dist-info/METADATA"))
        told = email.message_from_bytes(packed.read(name))
        commands = packed.read(name.replace("METADATA", "entry_points.txt")).decode()
    assert set(told.get_all("Provides-Extra", [])) == set(project["optional-dependencies"])
    assert {*environments.ALL, "torchtune"} <= set(project["optional-dependencies"])
    plain = {line for line in told.get_all("Requires-Dist", []) if "extra ==" not in line}
    assert plain == set(project["dependencies"])
    assert told["Requires-Python"] == project["requires-python"]
    assert re.search(r"^batchfit = batchfit\._cli:main$", commands, re.MULTILINE)


@pytest.mark.slow
def test_the_source_archive_makes_the_same_wheel(built: tuple[Path, Path], tmp_path: Path) -> None:
    sources = environments.unpack(built[1], tmp_path / "unpacked")
    assert (sources / "tests" / "conftest.py").exists()
    assert (sources / "docs" / "index.md").exists()
    assert names(environments.build(tmp_path / "dist", sources)[0]) == names(built[0])


@pytest.fixture(scope="module")
def installed(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An environment with the wheel, and a folder with the tests and without `src/`."""
    folder = tmp_path_factory.mktemp("installed")
    venv = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True, timeout=120)
    (packages,) = venv.glob("lib/python*/site-packages")
    with zipfile.ZipFile(built[0]) as wheel:
        wheel.extractall(packages)
    # A line of a .pth adds a folder, and the .pth files in it count for nothing: our own editable one, too.
    others = [sysconfig.get_path("purelib"), *{str(Path(one.origin).parents[1]) for one in _tools()}]
    (packages / "others.pth").write_text("\n".join(others) + "\n", encoding="utf-8")
    return venv, environments.without_source(built[1], folder / "unpacked")


def _tools() -> list[importlib.machinery.ModuleSpec]:
    found = (importlib.util.find_spec(name) for name in ("pytest", "hypothesis", "torch", "xdist"))
    return [one for one in found if one is not None and one.origin is not None]


@pytest.mark.slow
def test_quick_tests_pass_against_the_wheel(installed: tuple[Path, Path]) -> None:
    assert environments.run_tests(*installed, ("tests/report/pure/test_report.py",)) == 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_tests_of_all_layers_pass_against_the_wheel(installed: tuple[Path, Path]) -> None:
    pure = sorted(str(path) for path in installed[1].glob("tests/*/pure"))
    assert environments.run_tests(*installed, (*pure, *environments.QUICK)) == 0


@pytest.mark.slow
def test_a_wheel_without_one_file_fails(installed: tuple[Path, Path], tmp_path: Path) -> None:
    """The tests above look at the wheel: a file that is missing there, and in src/ is not, is noticed."""
    (packages,) = installed[0].glob("lib/python*/site-packages")
    shutil.move(packages / "batchfit" / "_charts" / "chart.css", tmp_path / "kept.css")
    try:
        assert environments.run_tests(*installed, ("tests/report/pure/test_report.py",)) == 1
    finally:
        shutil.move(tmp_path / "kept.css", packages / "batchfit" / "_charts" / "chart.css")
