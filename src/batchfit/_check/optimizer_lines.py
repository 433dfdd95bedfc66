"""The source line that makes each optimizer: optimizer state counts as that line's.

Rules:
- Where the program is loaded by us (`batchfit check`, the probe of a command), the line that made this very
  object is noted when it is made. Nothing of that stays behind.
- An optimizer that was there before: the one call of its class in the program's own modules; of several, the
  one in the modules that hold the object, or whose functions the step is made of. Where that leaves several,
  there is no line.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from types import FrameType
from typing import Any, final
from weakref import WeakKeyDictionary

from torch.optim import Optimizer

from batchfit._check.parameter_lines import FUNCTIONS, defined, parsed, text_of
from batchfit._engine.allocator.footprint import CodeLine
from batchfit._engine.torch_private.replaced import replaced
from batchfit._engine.workload.user_errors import is_users


@final
class OptimizerLines:
    """The lines that made optimizers while this was noting, and the search for those of others."""

    def __init__(self) -> None:
        self._made: WeakKeyDictionary[Optimizer, CodeLine] = WeakKeyDictionary()

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Inside, the line that makes an optimizer is noted."""
        make: Any = Optimizer.__init__

        def init(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            make(optimizer, *args, **kwargs)
            line = _calling(sys._getframe(1))
            if line is not None:
                self._made[optimizer] = line

        with replaced(Optimizer, "__init__", init):
            yield

    def of(self, optimizer: Optimizer, functions: Sequence[Any] = ()) -> CodeLine | None:
        """The line that made an optimizer; `functions` are those that the step is made of."""
        noted = self._made.get(optimizer)
        if noted is not None:
            return noted
        name = type(optimizer).__name__
        found = [line for file in sorted(_own_files()) for line in _calls(file, name)]
        if len(found) < 2:
            return found[0] if found else None
        codes = [code for one in functions if (code := getattr(one, "__code__", None)) is not None]
        near = _holding(optimizer) | {code.co_filename for code in codes}
        found = [line for line in found if line.file in near]
        inside = {code.co_qualname.partition(".<locals>")[0] for code in codes}
        same = [line for line in found if line.function in inside]
        chosen = same if len(found) > 1 else found
        return chosen[0] if len(chosen) == 1 else None


def _calling(frame: FrameType | None) -> CodeLine | None:
    """The innermost line of the program's own."""
    while frame is not None:
        code = frame.f_code
        if is_users(code.co_filename, home=None):
            function = code.co_qualname.rpartition("<locals>.")[2]
            return CodeLine(code.co_filename, frame.f_lineno, function)
        frame = frame.f_back
    return None


def _own_files() -> set[str]:
    modules = list(sys.modules.values())
    files = {getattr(one, "__dict__", {}).get("__file__") for one in modules}  # a lazy one would be loaded
    return {file for file in files if file and file.endswith(".py") and is_users(file, home=None)}


def _holding(optimizer: Optimizer) -> set[str]:
    """The files of the modules that have it among their names."""
    found = set()
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        file = names.get("__file__")
        if isinstance(file, str) and any(value is optimizer for value in list(names.values())):
            found.add(file)
    return found


def _calls(file: str, name: str) -> tuple[CodeLine, ...]:
    text = text_of(file)
    return _calls_in(file, text, name) if f"{name}(" in text else ()


@lru_cache(maxsize=2**10)  # every check of a process asks for all files of the program again
def _calls_in(file: str, text: str, name: str) -> tuple[CodeLine, ...]:
    """The calls of that name in a file that says `text`."""
    tree = parsed(file)
    functions = [(function, node) for function, node in defined(tree) if isinstance(node, FUNCTIONS)]
    found = []
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and name in (
            getattr(call.func, "id", ""),
            getattr(call.func, "attr", ""),
        ):
            around = (one for one, node in functions if node.lineno <= call.lineno <= (node.end_lineno or 0))
            *_, inner = "<module>", *around  # the inner ones come later
            found.append(CodeLine(file, call.lineno, inner))
    return tuple(found)
