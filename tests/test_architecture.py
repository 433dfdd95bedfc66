"""The rules of ARCHITECTURE.md, kept by reading the source. A new module needs no edit here."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

import batchfit
from batchfit import _EXPORTS

SOURCE = Path(batchfit.__file__).parent
STDLIB = sys.stdlib_module_names

# Packages by level, lowest first. A package imports from lower levels only.
LEVELS = (
    {
        "_arguments",
        "_ask_tell",
        "_config_files",
        "_knobs",
        "_options",
        "_units",
        "messages",
        "_init",
        "_engine.allocator",
    },
    {"errors", "_charts"},
    {"_engine.torch_private"},
    {"_engine.virtual_memory"},
    {"_files", "_engine.device"},
    {"results", "testing", "_noise", "_engine.batch", "_engine.cuda_model", "_engine.snapshot"},
    {"_loader", "_report", "_why", "_engine.distributed", "_engine.sizing", "_engine.workload"},
    {"_schedule", "_engine.data_parallel", "_engine.store", "_engine.trace", "_engine.trial"},
    {"_engine.sharding"},
    {"_explain", "_rerun", "_engine.optimizer_step", "integrations"},
    {"_predict", "_microbatch"},
    {"_find"},
    {"_check", "_profile", "_sweep"},
    {"_plan", "_program"},
    {"_cli"},
    {"__main__"},
)
LEVEL = {package: level for level, row in enumerate(LEVELS) for package in row}
# Public modules that are the face of a package.
FACES = {"workload": "_engine.workload", "schedules": "_schedule"}
# Packages that are pure as a whole; elsewhere what is pure lies in a folder `pure/`.
PURE = ("_charts", "_init", "results", "_engine.allocator")
# Which package may import what is not torch or the standard library.
THIRD_PARTY = {
    "pydantic": {"results", "_schedule"},
    "pandas": {"results"},
    "yaml": {"_config_files"},
    "numpy": {"_engine.snapshot"},
    "pytest": {"_check"},
    "typer": {"_cli"},
    "click": {"_cli"},
    "rich": {"_cli"},
    "matplotlib": {"_cli"},
    "transformers": {"_plan", "integrations"},
    "diffusers": {"_plan"},
    "accelerate": {"integrations"},
    "torchtune": {"integrations"},
    "omegaconf": {"integrations"},
    "ray": {"integrations"},
    "sentence_transformers": {"integrations"},
    "trl": {"integrations"},
}
HAS_CODE_IN_INIT = {
    "",
    "_cli",
    "results",
    "integrations.accelerate",
    "integrations.lightning",
    "integrations.transformers",
}


def modules() -> dict[str, Path]:
    """Every module by its name without `batchfit.`; the package itself is the empty name."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def package_of(module: str) -> str:
    """The package a module belongs to, as `LEVELS` names it."""
    parts = module.split(".")
    name = ".".join(parts[:2]) if parts[0] == "_engine" else parts[0]
    return FACES.get(name, name)


def is_pure(module: str) -> bool:
    return "pure" in module.split(".") or package_of(module) in PURE


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports(path: Path) -> list[tuple[str, str]]:
    """(module, when) of every import statement in a file; `when` is "now", "late" or "typing"."""
    tree = tree_of(path)
    when: dict[ast.AST, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            when |= dict.fromkeys(ast.walk(node), "late")
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            when |= dict.fromkeys(ast.walk(node), "typing")
    found = []
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative imports hide the level"
            base = node.module or ""
            children = [f"{base}.{alias.name}" for alias in node.names]
            names = [child if child.removeprefix("batchfit.") in MODULES else base for child in children]
        found += [(name, when.get(node, "now")) for name in names]
    return found


def ours(name: str) -> str | None:
    """A module of ours by its short name; None for the package itself and for others' modules."""
    return name.removeprefix("batchfit.") if name.startswith("batchfit.") else None


def every_module(rule: Callable[[str], None]) -> Callable[[], None]:
    """A test of all modules that names every one which breaks the rule."""

    def test() -> None:
        broken = []
        for module in filter(None, MODULES):
            try:
                rule(module)
            except AssertionError as error:
                broken.append(str(error))
        assert not broken, "\n".join(broken)

    test.__doc__ = rule.__doc__
    return test


@every_module
def test_imports_go_down(module: str) -> None:
    """Names that only a type checker reads do not count."""
    here = package_of(module)
    if here == "_engine":  # its `__init__`
        return
    assert here in LEVEL, f"{here} is a new package: give it a level in LEVELS"
    for name, when in imports(MODULES[module]):
        target = ours(name)
        if target is None or when == "typing" or package_of(target) == here:
            continue
        there = package_of(target)
        assert LEVEL[there] < LEVEL[here], f"{module} (level {LEVEL[here]}) imports {name} ({LEVEL[there]})"


@every_module
def test_the_engine_uses_no_feature(module: str) -> None:
    shared = {
        "errors",
        "results",
        "messages",
        "testing",
        "_arguments",
        "_config_files",
        "_files",
        "_units",
        "_knobs",
    }
    if not module.startswith("_engine"):
        return
    for name, when in imports(MODULES[module]):
        target = ours(name)
        if target is not None and when != "typing":
            there = package_of(target)
            assert there.startswith("_engine") or there in shared, f"{module} imports {name}"


@every_module
def test_pure_modules_import_no_torch(module: str) -> None:
    if not is_pure(module):
        return
    light = {package for row in LEVELS for package in row if not package.startswith("_engine")}
    for name, when in imports(MODULES[module]):
        assert name.split(".")[0] != "torch", f"{module} is pure and imports torch"
        target = ours(name)
        if target is not None and when != "typing":
            plain = package_of(target) in light and "." not in target  # a shared module without torch
            assert is_pure(target) or plain, f"{module} is pure and imports {name}, which is not"


@every_module
def test_third_party_packages_stay_in_their_place(module: str) -> None:
    for name, _ in imports(MODULES[module]):
        top = name.split(".")[0]
        if top in STDLIB or top in ("batchfit", "torch"):
            continue
        homes = THIRD_PARTY.get(top)
        assert homes is not None, f"{module} imports {top}, which no package may"
        assert package_of(module) in homes, f"{module} imports {top}"


@pytest.mark.parametrize("module", [name for name in MODULES if name.startswith("integrations")])
def test_integrations_use_public_names_only(module: str) -> None:
    for name, _ in imports(MODULES[module]):
        if name.startswith("batchfit"):
            assert not any(part.startswith("_") for part in name.split(".")), f"{module} imports {name}"


def test_the_command_line_imports_nothing_heavy_at_import_time() -> None:
    names = [f"batchfit.{name}" for name in MODULES if name.startswith("_cli")]
    heavy = ("torch", "pydantic", "matplotlib", "numpy")
    check = (
        f"import importlib, sys\nfor name in {names}: importlib.import_module(name)\n"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def folders() -> list[Path]:
    return sorted({path.parent for path in MODULES.values()})


@pytest.mark.parametrize("folder", folders(), ids=lambda folder: str(folder.relative_to(SOURCE)))
def test_a_package_is_a_docstring_and_at_most_16_modules(folder: Path) -> None:
    tree = ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), f"{folder} does not say what it is"
    if ".".join(folder.relative_to(SOURCE).parts) not in HAS_CODE_IN_INIT:
        assert len(tree.body) == 1, f"{folder}/__init__.py holds code: the front door is a module"
    assert len(list(folder.glob("*.py"))) - 1 <= 16, f"{folder} has too many modules"


def _lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Without its docstring: that of a public function has a line per keyword, however many there are."""
    first = function.body[0]
    documented = (first.end_lineno or 0) - first.lineno + 1 if ast.get_docstring(function) else 0
    return (function.end_lineno or 0) - function.lineno + 1 - documented


def test_no_module_has_over_450_lines_and_no_function_over_80() -> None:
    long = {name: len(path.read_text().splitlines()) for name, path in MODULES.items()}
    assert not {name: lines for name, lines in long.items() if lines > 450}
    functions = {
        f"{name}:{node.name}": _lines_of(node)
        for name, path in MODULES.items()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert not {name: lines for name, lines in functions.items() if lines > 80}


def test_every_module_says_what_it_is() -> None:
    silent = [name for name, path in MODULES.items() if not ast.get_docstring(tree_of(path))]
    assert not silent


def test_the_check_sees_a_wrong_import(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        "from typing import TYPE_CHECKING\nfrom batchfit._engine.device import oom\n"
        "if TYPE_CHECKING:\n    import torch\ndef f():\n    import rich\n"
    )
    assert imports(wrong)[1:] == [
        ("batchfit._engine.device.oom", "now"),
        ("torch", "typing"),
        ("rich", "late"),
    ]
    assert LEVEL[package_of("_engine.device.oom")] < LEVEL[package_of("_find.find")]
    assert package_of("workload") == package_of("_engine.workload.target")
    assert is_pure("_find.pure.search")
    assert not is_pure("_find.find")


def test_one_class_name_means_one_thing() -> None:
    homes = defaultdict(list)
    for module, path in MODULES.items():
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(module)
    assert not {name: where for name, where in homes.items() if len(where) > 1}


# What is private in torch and no name under `torch`: attributes of FSDP2's, DDP's and a scaler's objects, of
# fake tensors, and of optimizers.
PRIVATE_ATTRIBUTES = frozenset(
    [
        "_get_fsdp_state",
        "_fsdp_param_group",
        "_fsdp_param_groups",
        "_reset_iter_state",
        "_is_root",
        "_state_ctx",
        "_comm_ctx",
        "_training_state",
        "all_states",
        "post_forward_order",
        "_post_forward_indices",
        "fsdp_params",
        "sharded_param",
        "_unsharded_param",
        "unsharded_accumulated_grad",
        "gradient_divide_factor",
        "reduce_scatter_reduce_op",
        "reduce_grads",
        "all_reduce_grads",
        "_reset_state",
        "_get_zeros_like_grad_buckets",
        "_rebuild_buckets",
        "_has_rebuilt_buckets",
        "_comm_hooks",
        "_join_config",
        "_delay_all_reduce_params",
        "_get_ddp_logging_data",
        "_per_optimizer_states",
        "_scale",
        "_growth_tracker",
        "_refresh_per_optimizer_state",
        "_step_supports_amp_scaling",
        "_init_group",
        "_optimizer_step_pre_hooks",
        "_default_to_fused_or_foreach",
        "fake_device",
        "_allow_unsafe_data_ptr_access",
        "_use_count",
        "_post_accumulate_grad_hooks",
        "_backward_hooks",
        "_get_sequence_number_for_group",
    ]
)


def _dotted(node: ast.expr, known: dict[str, str]) -> str | None:
    """The full name of `torch.a.b`, where `known` says what a file calls torch and its parts."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in known:
        return None
    return ".".join([known[node.id], *reversed(parts)])


def _is_private(full: str) -> bool:
    parts = full.split(".")
    if parts[:3] == ["torch", "ops", "aten"]:  # an operation by its own name
        return False
    return any(part.startswith("_") and not part.startswith("__") for part in parts[1:])


def private_in_torch(path: Path) -> list[str]:
    """Every use of a private name of torch in a file: by import, by dotted name, by attribute, as text."""
    tree = tree_of(path)
    known: dict[str, str] = {}
    found: list[str] = []

    def note(node: ast.AST, name: str) -> None:
        found.append(f"{path.name}:{getattr(node, 'lineno', 0)}: {name}")

    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    known[alias.asname or "torch"] = alias.name if alias.asname else "torch"
                    if _is_private(alias.name):
                        note(node, alias.name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                full = known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                if _is_private(full):
                    note(node, full)
    for node in ast.walk(tree):  # `aten = torch.ops.aten`
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            full = _dotted(node.value, known)
            known |= {one.id: full for one in targets if full and isinstance(one, ast.Name)}
    # What a class of ours calls so is its own.
    ours = {
        one.attr
        for one in ast.walk(tree)
        if isinstance(one, ast.Attribute)
        and isinstance(one.value, ast.Name)
        and one.value.id in ("self", "cls")
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            name = _dotted(node, known)
            if name is not None and _is_private(name) and not _is_private(name.rpartition(".")[0]):
                note(node, name)
            elif node.attr in PRIVATE_ATTRIBUTES - ours:
                note(node, f".{node.attr}")
        elif isinstance(node, ast.Constant) and node.value in PRIVATE_ATTRIBUTES - ours:
            note(node, f'"{node.value}"')
        elif isinstance(node, ast.Call) and len(node.args) > 1 and _dotted(node.func, known) is None:
            # `getattr(torch._C, "name")` is seen above; `getattr(torch, "_C")` here.
            of, name_given = _dotted(node.args[0], known), node.args[1]
            if of is not None and isinstance(name_given, ast.Constant) and isinstance(name_given.value, str):
                full = f"{of}.{name_given.value}"
                if ast.unparse(node.func) in ("getattr", "hasattr", "setattr") and _is_private(full):
                    note(node, full)
    return found


@every_module
def test_what_is_private_in_torch_is_reached_in_one_package(module: str) -> None:
    """A version may lack, move or rename it: `_engine/torch_private` asks whether it is there."""
    if package_of(module) != "_engine.torch_private":
        assert private_in_torch(MODULES[module]) == []


def test_the_check_sees_a_private_name(tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    file.write_text(
        "import torch\nimport torch.nn as nn\nfrom torch._C import _cuda\nfrom torch import Tensor\n"
        "import torch._dynamo as dynamo\naten = torch.ops.aten\n"
        "def f(model, own):\n    torch._C._get()\n    nn.modules.batchnorm._BatchNorm\n"
        "    aten._softmax.default\n    torch.ops._c10d_functional.wait_tensor\n"
        "    getattr(torch, '_foreach_add_', None)\n    Tensor._make_subclass\n"
        "    model._get_fsdp_state()\n    getattr(own, '_comm_hooks', None)\n    torch.__version__\n"
    )
    assert [line.partition(": ")[2] for line in sorted(private_in_torch(file), key=_line_of)] == [
        "torch._C._cuda",
        "torch._dynamo",
        "torch._C",
        "torch.nn.modules.batchnorm._BatchNorm",
        "torch.ops._c10d_functional",
        "torch._foreach_add_",
        "torch.Tensor._make_subclass",
        "._get_fsdp_state",
        '"_comm_hooks"',
    ]


def _line_of(found: str) -> int:
    return int(found.split(":")[1])


def test_exports_are_exact() -> None:
    assert batchfit.__all__ == sorted(_EXPORTS)
    for name in batchfit.__all__:
        value = getattr(batchfit, name)
        home = importlib.import_module(_EXPORTS[name])
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
    for module, path in MODULES.items():
        stem = module.rsplit(".", 1)[-1]
        assert not any(word in stem for word in ("utils", "helper", "manager", "handler")), module
        for node in ast.walk(tree_of(path)):
            name = getattr(node, "id", None) or getattr(node, "arg", None) or getattr(node, "name", None)
            assert name not in {"bs", "mbs", "bsz"}, f"{module}: {name}"
