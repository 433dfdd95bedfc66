"""The layers of ARCHITECTURE.md, kept by reading the source."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import batchfit

SOURCE = Path(batchfit.__file__).parent
STDLIB = sys.stdlib_module_names

# The layer of each module; the longest matching prefix counts.
LAYERS = {
    "batchfit": 0,
    "batchfit.errors": 0,
    "batchfit.messages": 0,
    "batchfit.results": 0,
    "batchfit.results._base": 0,
    "batchfit._charts.tables": 0,
    "batchfit.results._fit": 0,
    "batchfit.results._memory": 0,
    "batchfit.results._throughput": 0,
    "batchfit.schedules": 0,
    "batchfit._schedule.pure.config": 0,
    "batchfit._arguments": 0,
    "batchfit._documents": 0,
    "batchfit._decide": 0,
    "batchfit._charts.text": 0,
    "batchfit._files": 0,
    "batchfit._init.advice": 0,
    "batchfit._init.edits": 0,
    "batchfit._init.effects": 0,
    "batchfit._init.liveness": 0,
    "batchfit._init.loop": 0,
    "batchfit._charts.memory_page": 0,
    "batchfit._charts.scale": 0,
    "batchfit._charts.svg": 0,
    "batchfit._charts.figures": 0,
    "batchfit._charts.throughput_page": 0,
    "batchfit._sweep.pure.events": 0,
    "batchfit._sweep.pure.result": 0,
    "batchfit._torch": 1,
    "batchfit.workload": 1,
    "batchfit.testing": 1,
    "batchfit._engine.workload.user_errors": 1,
    "batchfit._engine.workload.target": 1,
    "batchfit._predict.oracle": 2,
    "batchfit._predict.predict": 2,
    "batchfit._explain.explain": 2,
    "batchfit._find.resume": 2,
    "batchfit._engine.store.sqlite": 2,
    "batchfit._find.recall": 2,
    "batchfit._find.find": 2,
    "batchfit._rerun.run_largest": 2,
    "batchfit._profile.profile": 2,
    "batchfit._profile.reasons": 2,
    "batchfit._profile.diagnosis": 2,
    "batchfit._microbatch.microbatcher": 2,
    "batchfit._noise.gradient_noise": 2,
    "batchfit._schedule.scheduler": 2,
    "batchfit._schedule.following_loader": 2,
    "batchfit._schedule.pure.run_plan": 0,
    "batchfit._loader.loader": 2,
    "batchfit._sweep.sweep": 2,
    "batchfit._sweep.request": 2,
    "batchfit._engine.workload.named_function": 2,
    "batchfit._sweep.run_state": 2,
    "batchfit._sweep.measure": 2,
    "batchfit._sweep.configuration": 2,
    "batchfit._sweep.job": 2,
    "batchfit._sweep.child_main": 2,
    "batchfit._sweep.worker": 2,
    "batchfit._sweep.devices": 2,
    "batchfit._sweep.ranks": 2,
    "batchfit._sweep.engines": 2,
    "batchfit._report.report": 3,
    "batchfit.integrations": 3,
    "batchfit._cli": 3,
    "batchfit.__main__": 3,
}
# Which third-party package may be imported where (and nowhere else).
THIRD_PARTY = {
    "torch": (
        "batchfit._torch",
        "batchfit.workload",
        "batchfit.testing",
        "batchfit._predict.oracle",
        "batchfit._predict.predict",
        "batchfit._explain.explain",
        "batchfit._find.find",
        "batchfit._profile.profile",
        "batchfit._profile.reasons",
        "batchfit._microbatch.microbatcher",
        "batchfit._noise.gradient_noise",
        "batchfit._schedule.scheduler",
        "batchfit._schedule.following_loader",
        "batchfit._loader.loader",
        "batchfit._rerun.run_largest",
        "batchfit._sweep.sweep",
        "batchfit._sweep.engines",
        "batchfit._sweep.configuration",
        "batchfit._cli",
        "batchfit.integrations",
    ),
    "transformers": ("batchfit.integrations.transformers",),
    "numpy": ("batchfit._engine.snapshot.snapshot", "batchfit._engine.snapshot.rng"),
    "pydantic": (
        "batchfit.results._base",
        "batchfit.results._fit",
        "batchfit.results._memory",
        "batchfit.results._throughput",
        "batchfit.schedules",
        "batchfit._schedule.pure.config",
        "batchfit._sweep.pure.result",
    ),
    "pandas": ("batchfit._sweep.pure.result",),
    "yaml": ("batchfit._documents",),
    "typer": ("batchfit._cli",),
    "click": ("batchfit._cli",),
    "rich": ("batchfit._cli",),
    "matplotlib": ("batchfit._cli.png",),
    "accelerate": ("batchfit.integrations.accelerate",),
    "torchtune": ("batchfit.integrations.torchtune",),
    "ray": ("batchfit.integrations.ray",),
    "omegaconf": ("batchfit.integrations.torchtune",),
}


def modules() -> list[tuple[str, Path]]:
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        found.append((".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    return found


def imports(path: Path, module: str) -> list[tuple[str, bool]]:
    """(module imported, whether at import time) for every import statement in a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    late: set[ast.AST] = set()
    for node in ast.walk(tree):
        typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or typing_only:
            late.update(ast.walk(node))
    found = []
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: relative imports hide the layer"
            base = node.module or ""
            children = [f"{base}.{alias.name}" for alias in node.names]
            names = [child if _is_module(child) else base for child in children]
        found += [(name, node not in late) for name in names]
    return found


def _is_module(name: str) -> bool:
    path = SOURCE.parent.joinpath(*name.split("."))
    return name.startswith("batchfit") and (path.is_dir() or path.with_suffix(".py").is_file())


def layer(module: str) -> int:
    matches = [known for known in LAYERS if module == known or module.startswith(known + ".")]
    assert matches, f"{module} has no layer: add it to LAYERS and to ARCHITECTURE.md"
    best = max(matches, key=len)
    assert best != "batchfit" or module == "batchfit", f"{module} has no layer of its own"
    return LAYERS[best]


@pytest.mark.parametrize(
    ("module", "path"), modules(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_imports_point_down(module: str, path: Path) -> None:
    if module == "batchfit":  # names are loaded lazily; TYPE_CHECKING lists them for readers
        return
    for name, _ in imports(path, module):
        if name.split(".")[0] == "batchfit":
            assert layer(name) <= layer(module), f"{module} (layer {layer(module)}) imports {name}"


@pytest.mark.parametrize(
    ("module", "path"), modules(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_third_party_packages_stay_in_their_place(module: str, path: Path) -> None:
    for name, _ in imports(path, module):
        top = name.split(".")[0]
        if top in STDLIB or top == "batchfit":
            continue
        homes = THIRD_PARTY.get(top)
        assert homes is not None, f"{module} imports {top}, which no layer allows"
        assert any(module == home or module.startswith(home + ".") for home in homes), (
            f"{module} imports {top}"
        )


@pytest.mark.parametrize(
    "module", [name for name, _ in modules() if name.startswith("batchfit.integrations")]
)
def test_integrations_use_public_names_only(module: str) -> None:
    for name, _ in imports(dict(modules())[module], module):
        if name.split(".")[0] == "batchfit":
            assert not any(part.startswith("_") for part in name.split(".")), f"{module} imports {name}"


@pytest.mark.parametrize("module", [name for name, _ in modules() if name.startswith("batchfit._cli")])
def test_the_command_line_imports_nothing_heavy_at_import_time(module: str) -> None:
    path = dict(modules())[module]
    heavy = {
        "torch",
        "pydantic",
        "batchfit.results",
        "batchfit.results._base",
        "batchfit.results._fit",
        "batchfit.results._memory",
        "batchfit.results._throughput",
        "batchfit.schedules",
        "batchfit._schedule.pure.config",
        "batchfit._schedule.scheduler",
        "batchfit._schedule.following_loader",
        "batchfit._schedule.pure.run_plan",
        "batchfit._predict.predict",
        "batchfit._explain.explain",
        "batchfit._find.find",
        "batchfit._profile.profile",
        "batchfit._profile.reasons",
        "batchfit._sweep.sweep",
        "batchfit._sweep.request",
        "batchfit._sweep.run_state",
        "batchfit._sweep.job",
        "batchfit._sweep.measure",
        "batchfit._sweep.configuration",
        "batchfit._sweep.engines",
        "batchfit._sweep.pure.result",
        "batchfit.workload",
        "batchfit.testing",
        "matplotlib",
    }
    now = {name for name, at_import in imports(path, module) if at_import}
    assert not {name for name in now if name in heavy or name.startswith("batchfit._torch")}, module


def test_the_layer_check_sees_a_wrong_import(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text("from batchfit._torch import oom\n\ndef f():\n    import rich\n")
    assert imports(wrong, "batchfit._decide.wrong") == [
        ("batchfit._engine.device.oom", True),
        ("rich", False),
    ]
    assert layer("batchfit._engine.device.oom") > layer("batchfit._decide.wrong")


def test_exports_are_exact() -> None:
    assert batchfit.__all__ == sorted(batchfit._EXPORTS)
    for name in batchfit.__all__:
        value = getattr(batchfit, name)
        home = importlib.import_module(batchfit._EXPORTS[name])
        assert value is (home if home.__name__ == f"batchfit.{name}" else getattr(home, name))
    with pytest.raises(AttributeError, match="no attribute 'bs'"):
        _ = batchfit.bs


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse((SOURCE / "__init__.py").read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    statements = [node for node in ast.walk(block) if isinstance(node, ast.Import | ast.ImportFrom)]
    seen = [alias.asname or alias.name for node in statements for alias in node.names]
    assert sorted(seen) == batchfit.__all__


@pytest.mark.parametrize(
    "code", ["import batchfit", "import batchfit; batchfit.errors.BatchfitError; dir(batchfit)"]
)
def test_import_pulls_in_neither_torch_nor_pydantic(code: str) -> None:
    heavy = ("torch", "pydantic", "typer", "rich", "numpy")
    check = f"{code}; import sys; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_no_forbidden_words_in_names() -> None:
    """One word for one thing: never bs, mbs, bsz; no module called utils, helpers, manager, handler."""
    for module, path in modules():
        stem = module.rsplit(".", 1)[-1]
        assert not any(word in stem for word in ("utils", "helper", "manager", "handler")), module
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = getattr(node, "id", None) or getattr(node, "arg", None) or getattr(node, "name", None)
            assert name not in {"bs", "mbs", "bsz"}, f"{module}: {name}"
