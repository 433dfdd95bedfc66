"""What makes the workload in a child process: a target, and callbacks about the children.

Rule: what cannot be named cannot be made again in a child, and is a `TypeError`; nothing runs here instead.
"""

from __future__ import annotations

import inspect
import operator
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

from batchfit._engine.trial.child_process import OnOutput
from batchfit._engine.workload.target import Target, parse_target, required_arguments
from batchfit.workload import Workload


@final
@dataclass(frozen=True, slots=True)
class Factory:
    """A target that each child loads, and who is called about the children.

    `on_loaded(device, available_bytes)` and `on_step(size, number)` are called with what children do, and
    `on_output(text, is_error)` with what they print: without it that goes where this process' output goes.
    """

    target: Target
    on_loaded: Callable[[str, int], object] | None = None
    on_step: Callable[[int, int], object] | None = None
    on_output: OnOutput | None = None

    @classmethod
    def of(cls, workload: object) -> Factory:
        """The factory that the caller of `find_batch_size(isolate=True)` has given."""
        if isinstance(workload, Factory):
            return workload
        if isinstance(workload, str):
            return cls(parse_target(workload))
        why = _why_not_importable(workload)
        if why:
            raise TypeError(
                "workload must be, with isolate=True, a module-level step(batch_size), a module-level "
                "function without required arguments that returns the workload, or 'file.py:name' or "
                "'package.module:name': each trial makes the workload again, in a child process. "
                f"Not {why}"
            )
        return cls(_target_of(workload))


def _target_of(function: Any) -> Target:
    """The target that names a function of this program."""
    module, name = function.__module__, function.__qualname__
    if module == "__main__":
        main: Any = sys.modules["__main__"]
        if main.__spec__ is None:
            return parse_target(f"{main.__file__}:{name}")
        module = main.__spec__.name  # python -m package.module
    return Target(text=f"{module}:{name}", source=module, function=name, is_imported=True)


def _why_not_importable(given: Any) -> str:
    """Why no other process can import what was given; "" where it can."""
    if isinstance(given, Workload):
        return f"{given!r}, which lives in this process"
    if not inspect.isfunction(given):
        return f"{given!r}"
    name, module = given.__qualname__, sys.modules.get(given.__module__)
    if "<" in name:
        return f"{name!r}, which no other process can import: move it to the top of its module"
    try:
        found = operator.attrgetter(name)(module)
    except AttributeError:
        found = None
    if found is not given:
        if module is None or found is None:  # made by exec, or by a tool that runs cells
            return f"{name!r}, which is in no module that a child could import: put it into a file"
        return f"{given!r}: {given.__module__}:{name} is something else"
    if given.__module__ == "__main__" and not _main_can_be_loaded(module):
        return f"{name!r} of an interactive session: put it into a file"
    needed = required_arguments(given)
    if len(needed) > 1:
        return f"{name!r}, which needs arguments ({', '.join(needed)})"
    return ""


def _main_can_be_loaded(main: Any) -> bool:
    return main.__spec__ is not None or os.path.isfile(getattr(main, "__file__", None) or "")
