"""A target: `file.py:name` or `package.module:name`, on the command line and for a child process.

Rules: the name is a `Workload`, a `step(batch_size)`, or a function without required arguments that returns
one of these; whatever is wrong with a target is a `TargetError` that names file and line where there is one;
an error of the user's own code comes out unchanged. A file is loaded as a real module, under its own name,
with its folder on `sys.path` (so pickling, dataclasses and `inspect` work), and its `if __name__ ==
"__main__"` part does not run. While it is loaded and called, `sys.argv` is that of the script with the
arguments that the user gave after `--`.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import inspect
import operator
import os
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, final

from batchfit._engine.workload.user_errors import last_users_line, shown_path
from batchfit.errors import TargetError

if TYPE_CHECKING:
    from batchfit.workload import Workload

FORM = "file.py:name or package.module:name"
CONTRACT = (
    "a target is a Workload, a step(batch_size), or a function without required arguments that returns one "
    "of these"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A target as the user typed it, parsed but not loaded; `arguments` are those of its script.

    `source` is a file or the name of a module. `is_imported`: a function that this program has imported, so
    that a child process with the same `sys.path` imports its module by name.
    """

    text: str
    source: str
    function: str
    arguments: tuple[str, ...] = ()
    is_imported: bool = False

    @property
    def path(self) -> Path | None:
        """The file, or None where the target names a module."""
        is_file = self.source.endswith(".py") or os.sep in self.source or "/" in self.source
        return Path(self.source) if is_file else None


@dataclass(frozen=True, slots=True)
class LoadedTarget:
    """What makes the workload of a target, and the line that an error names."""

    make: Callable[[], object]
    line: str


def parse_target(text: str, arguments: Sequence[str] = ()) -> Target:
    """Parse a target; whatever can be seen wrong without running the user's code is refused here."""
    source, colon, function = text.rpartition(":")
    if not colon or not source or not function or "\\" in function or "/" in function:
        raise TargetError(f"target must be {FORM}, not {text!r}{_functions_hint(text)}")
    target = Target(text=text, source=source, function=function, arguments=tuple(arguments))
    path = target.path
    if path is None:
        if not all(part.isidentifier() for part in source.split(".")):
            raise TargetError(f"target must be {FORM}, not {text!r}: {source!r} is no module name")
    elif not path.is_file():
        what = "is a folder, not a file" if path.is_dir() else "does not exist"
        siblings = [file.name for file in path.parent.glob("*.py")] if path.parent.is_dir() else []
        hint = _did_you_mean(path.name, siblings, prefix=_folder_prefix(path), suffix=f":{function}")
        raise TargetError(f"the file {source} of the target {text} {what}{hint}")
    return target


def load_target(target: Target) -> LoadedTarget:
    """What makes the target's workload. Runs the user's module, and lets its errors through unchanged."""
    if target.is_imported:
        module = importlib.import_module(target.source)
        found = operator.attrgetter(target.function)(module)
    else:
        with _as_a_script(target):
            found, module = _load(target)
    return _loaded_target(found, name=target.text, file=shown_path(module.__file__))


def _loaded_target(found: object, *, name: str, file: str) -> LoadedTarget:
    """What makes a workload of what a target names; `file` is said where it has no line of its own."""
    if _is_workload(found):
        return LoadedTarget(lambda: found, file)
    if inspect.isclass(found) or not callable(found):
        kind = "class" if inspect.isclass(found) else type(found).__name__
        raise TargetError(f"{name} is a {kind} ({file}): {CONTRACT}")
    needed = required_arguments(found)
    if len(needed) > 1:
        raise TargetError(f"{name} at {source_line(found)} needs arguments ({', '.join(needed)}): {CONTRACT}")
    return LoadedTarget((lambda: found) if needed else found, source_line(found))


def _is_workload(found: object) -> bool:
    module = sys.modules.get("batchfit.workload")  # there is no Workload where nobody has imported it
    return module is not None and isinstance(found, module.Workload)


def load_function(target: Target) -> Callable[..., object]:
    """The function that a target names, whatever arguments it takes."""
    with _as_a_script(target):
        function, module = _load(target)
    if inspect.isclass(function) or not callable(function):
        kind = "class" if inspect.isclass(function) else type(function).__name__
        raise TargetError(f"{target.text} is a {kind}, not a function ({shown_path(module.__file__)})")
    return function


def _load(target: Target) -> tuple[object, ModuleType]:
    """What a target names, and its module."""
    importlib.invalidate_caches()
    module = _module_from_file(target.path) if target.path else _module_by_name(target)
    try:
        return operator.attrgetter(target.function)(module), module
    except AttributeError:
        raise TargetError(_no_such_name(target, module)) from None


def make_workload(target: Target, loaded: LoadedTarget) -> Workload:
    """Make the target's workload and check it; the user's errors come out unchanged."""
    with _as_a_script(target):
        made = loaded.make()
    from batchfit.workload import as_workload  # imports torch, as the user's code has done by now

    where = loaded.line
    if inspect.iscoroutine(made):
        made.close()  # it will never be awaited; without this Python warns about it
    if made is None:
        raise TargetError(f"{target.text} at {where} returned None: is its return missing? {CONTRACT}")
    try:
        return as_workload(made)
    except TypeError as error:
        at = f" (the step is at {source_line(made)})" if inspect.isfunction(made) else ""
        raise TargetError(f"{target.text} at {where} returned no workload: {error}{at}. {CONTRACT}") from None


def source_line(function: object) -> str:
    """`train.py:12`, the line on which a function begins, or its repr where it has none."""
    inner = inspect.unwrap(function) if callable(function) else function
    inner = getattr(inner, "func", inner)  # functools.partial
    inner = getattr(inner, "__func__", inner)
    code = getattr(inner, "__code__", None) or getattr(type(inner).__call__, "__code__", None)
    return f"{shown_path(code.co_filename)}:{code.co_firstlineno}" if code else f"{function!r:.60}"


def home_of(target: Target) -> str | None:
    """The folder of the target's own code, for telling the user's frames from a library's."""
    if target.path is not None:
        return str(target.path.resolve().parent)
    module = sys.modules.get(target.source.partition(".")[0])
    file = getattr(module, "__file__", None)
    return str(Path(file).resolve().parent) if file and Path(file).name == "__init__.py" else None


def _module_from_file(path: Path) -> ModuleType:
    resolved = path.resolve()
    name, roots = _module_name(resolved)
    for root in roots:
        _put_first(str(root))
    loaded = sys.modules.get(name)
    if loaded is not None:
        if Path(getattr(loaded, "__file__", None) or "").resolve() == resolved:
            return loaded
        # A file such as random.py must not take the place of a module that others already use.
        name = f"batchfit_target_{name}"
    elif "." in name:
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, resolved)
    if spec is None or spec.loader is None:
        raise TargetError(f"{shown_path(str(resolved))} cannot be loaded: a target's file must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def _module_name(path: Path) -> tuple[str, list[Path]]:
    """The name to load a file under, and the folders that `sys.path` needs (the last one goes first)."""
    stem = path.stem.replace(".", "_")
    if not _has_relative_import(path):
        return stem, [path.parent]
    parts, folder = [stem], path.parent
    while (folder / "__init__.py").is_file() and folder.parent != folder:
        parts.insert(0, folder.name)
        folder = folder.parent
    return ".".join(parts), [path.parent, folder]


def _has_relative_import(path: Path) -> bool:
    tree = _parsed(path)
    return tree is not None and any(isinstance(n, ast.ImportFrom) and n.level > 0 for n in ast.walk(tree))


def _parsed(path: Path) -> ast.Module | None:
    try:
        return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None  # loading it will say what is wrong, with file and line


def _module_by_name(target: Target) -> ModuleType:
    _put_first(str(Path.cwd()))
    name = target.source
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # Only a module of the target's own name is a wrong target; any other is missing to the user's code.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        missing = error.name
    parent, _, leaf = missing.rpartition(".")
    folders = list(getattr(sys.modules.get(parent), "__path__", [])) if parent else [str(Path.cwd())]
    if parent and not folders:
        raise TargetError(f"there is no module {missing!r} (target {target.text}): {parent!r} is no package")
    names = (module.name for module in pkgutil.iter_modules(folders))
    rest = name[len(missing) :] + f":{target.function}"
    hint = _did_you_mean(leaf, names, prefix=f"{parent}." if parent else "", suffix=rest)
    raise TargetError(
        f"there is no module {missing!r} (target {target.text}); modules are looked for in the current "
        f"folder and on sys.path{hint}"
    )


def _no_such_name(target: Target, module: ModuleType) -> str:
    names = [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (_is_workload(value) or (inspect.isfunction(value) and value.__module__ == module.__name__))
    ]
    hint = _did_you_mean(target.function, names, prefix=f"{target.source}:")
    if not hint:
        hint = f"; it defines {', '.join(names[:8])}" if names else "; it defines no function and no Workload"
    return f"there is no {target.function!r} in {shown_path(module.__file__)} (target {target.text}){hint}"


def _functions_hint(text: str) -> str:
    """`; did you mean train.py:make?` for a target that names a file and forgot the function."""
    path = Path(text)
    tree = _parsed(path) if text.endswith(".py") and path.is_file() else None
    if tree is None:
        return ""
    names = [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and len(node.args.posonlyargs) + len(node.args.args) == len(node.args.defaults)
        and None not in node.args.kw_defaults
        and not node.name.startswith("_")
    ]
    return "; did you mean " + " or ".join(f"{text}:{name}" for name in names[:3]) + "?" if names else ""


def _did_you_mean(wrong: str, known: Iterable[str], *, prefix: str = "", suffix: str = "") -> str:
    close = difflib.get_close_matches(wrong, list(known), n=3, cutoff=0.6)
    return "; did you mean " + " or ".join(f"{prefix}{name}{suffix}" for name in close) + "?" if close else ""


def _folder_prefix(path: Path) -> str:
    return "" if path.parent == Path() else f"{path.parent}{os.sep}"


def required_arguments(function: Callable[..., object]) -> list[str]:
    """The parameters without which a function cannot be called."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []  # a builtin without a signature: calling it will show
    skipped = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in skipped]


def _put_first(folder: str) -> None:
    if sys.path[:1] != [folder]:
        sys.path.insert(0, folder)


@contextmanager
def _as_a_script(target: Target) -> Iterator[None]:
    """The user's code sees the command line of its script, and may not end the process."""
    before = sys.argv
    sys.argv = [str(target.path or target.source), *target.arguments]
    try:
        yield
    except SystemExit as error:
        where = last_users_line(error) or target.source
        raise TargetError(
            f"{target.text} ended the program while it was loaded (SystemExit {error.code!r} at {where}). "
            'Move what a script does under if __name__ == "__main__"; arguments of the script go after the '
            f"target: {target.text} -- --lr 0.1"
        ) from None
    finally:
        sys.argv = before


@final
@dataclass(frozen=True, slots=True)
class NamedFunction:
    """A function by its target, called like the function itself."""

    text: str

    def load(self) -> Any:
        """The function."""
        return load_function(parse_target(self.text))

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self.load()(*arguments, **keywords)


def loaded(function: Any) -> Any:
    """The function that a target or a `NamedFunction` names; anything else as it is."""
    if isinstance(function, str):
        function = NamedFunction(function)
    return function.load() if isinstance(function, NamedFunction) else function


def in_full(function: Any) -> Any:
    """The same function wherever the current folder is; what is no name of a file, as it is."""
    if isinstance(function, NamedFunction):
        return NamedFunction(in_full(function.text))
    if not isinstance(function, str):
        return function
    source, colon, name = function.rpartition(":")
    is_file = source.endswith(".py") or "/" in source
    return f"{Path(source).resolve()}{colon}{name}" if is_file else function
