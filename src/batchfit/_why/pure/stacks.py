"""What a stack says about the memory that it allocated: whose line it is, which kind, which module.

Rules:
- A stack has the innermost frame first. A line is the user's if its file is no library's. A stack without
  one, or whose only one is the call of a trainer, goes by its innermost frame that is not torch's.
- Kinds are read off functions of torch whose part in a step is known (`_init_group` makes optimizer state).
  What none of them shows is "other", never a guess.
- The threads of autograd run no Python: an allocation without a stack, in a history that has stacks, was made
  in backward.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import PurePosixPath
from typing import final

from batchfit._why.pure.snapshot import StackFrame

WEIGHTS, OPTIMIZER, GRADIENTS, BATCH, ACTIVATIONS, TEMPORARIES, OTHER, BEFORE, UNKNOWN = range(9)
KIND_NAMES = (
    "weights",
    "optimizer",
    "gradients",
    "batch",
    "activations",
    "temporaries",
    "other",
    "before recording",
    "no stack",
)
PHASES = {OPTIMIZER: "optimizer", TEMPORARIES: "optimizer", GRADIENTS: "backward", ACTIVATIONS: "forward"}
_LONGEST_NAME = 120
IN_BACKWARD = "backward (no stack)"
NO_STACK = "no stack was recorded"
_LIBRARY = re.compile(
    r"(?:^|/)(?:site|dist)-packages/|(?:^|/)lib/python3(?:\.\d+)?/|(?:^|/)torch/(?:nn|optim|autograd|utils)/"
)
_TORCH = re.compile(
    r"(?:^|/)torch/(?:nn|optim|autograd|utils|cuda|_dynamo|_inductor|amp)/|(?:site|dist)-packages/torch/"
)
_PACKAGES = re.compile(r"(?:site|dist)-packages/")
_LOOPS = frozenset(["train", "fit", "validate", "test", "evaluate", "predict"])  # of a trainer
INSIDE_A_MODULE = ("_call_impl", "_wrapped_call_impl")
_MAKES_WEIGHTS = frozenset(
    ["_apply", "reset_parameters", "load_state_dict", "from_pretrained", "_load_state_dict_into_model"]
)
_MAKES_STATE = re.compile(r"_init_(?:group|state)s?$")
_MAKES_A_BATCH = re.compile(r"collate|^pin_memory|_to_device$|^_?prepare_inputs?$|(?:^|_)batch")


@final
class StackTable:
    """The stacks of a snapshot, by their numbers."""

    def __init__(self, stacks: Sequence[tuple[StackFrame, ...]], *, has_stacks: bool) -> None:
        self.stacks = stacks
        self.has_stacks = has_stacks  # whether the entries of the history have theirs
        self._lines: dict[int, str] = {}
        self._modules: dict[int, str] = {}

    @cached_property
    def kinds(self) -> list[int]:
        """The kind of each stack's allocations."""
        return [_kind(stack) if stack else self._without for stack in self.stacks]

    @property
    def _without(self) -> int:
        return GRADIENTS if self.has_stacks else UNKNOWN

    def line(self, number: int) -> str:
        """`train.py:42 loss_of`: the user's line."""
        found = self._lines.get(number)
        if found is None:
            found = self._lines[number] = _line(self.stacks[number]) or (
                IN_BACKWARD if self.has_stacks else NO_STACK
            )
        return found

    def module(self, number: int) -> str:
        """`train forward > transformer > linear`: the modules that a call went through."""
        found = self._modules.get(number)
        if found is None:
            stack = self.stacks[number]
            line = self.line(number)
            outside = f"outside modules ({line})" if stack else line
            found = self._modules[number] = _modules(stack) or outside
        return found

    def innermost(self, number: int) -> str:
        """The innermost function of Python; empty without a stack."""
        frame = next(iter(_python(self.stacks[number])), None)
        return "" if frame is None else shown(frame)

    def text(self, number: int) -> tuple[str, ...]:
        """The stack as lines, the outermost first, without the frames of `_call_impl` and of C++."""
        frames = [one for one in _python(self.stacks[number]) if one.name not in INSIDE_A_MODULE]
        return tuple(shown(one) for one in reversed(frames))


def shown(frame: StackFrame) -> str:
    """`train.py:42 loss_of`; what a terminal would take for a command is left out."""
    name = frame.filename.replace(chr(92), "/")[-_LONGEST_NAME:]
    return printable(f"{PurePosixPath(name).name}:{frame.line} {frame.name[:_LONGEST_NAME]}")


def printable(text: str) -> str:
    """A stranger's text, safe to show."""
    return "".join(one if one.isprintable() else "?" for one in text)


def _python(stack: Sequence[StackFrame]) -> list[StackFrame]:
    return [one for one in stack if one.filename.endswith(".py") or one.filename.startswith("<")]


def is_users(frame: StackFrame) -> bool:
    """Whether a frame is in a file of the user's own."""
    name = frame.filename.replace(chr(92), "/")
    if name.startswith("<"):
        return name.startswith("<ipython")
    return name.endswith(".py") and not _LIBRARY.search(name)


def is_loop_file(filename: str) -> bool:
    """Whether a training loop may be in a file: one of Python, and not one of torch's own."""
    name = filename.replace(chr(92), "/")
    return (name.endswith(".py") or name.startswith("<ipython")) and not _TORCH.search(name)


def _line(stack: Sequence[StackFrame]) -> str:
    frames = _python(stack)
    inner = next((number for number, one in enumerate(frames) if is_users(one)), len(frames))
    calls_a_loop = 0 < inner < len(frames) and frames[inner - 1].name in _LOOPS
    if inner == len(frames) or calls_a_loop:
        # The line of `trainer.train()` is that of everything: the library's own line says more.
        theirs = next((one for one in frames[:inner] if _is_of_a_trainer(one)), None)
        if theirs is not None:
            return shown(theirs)
    chosen = frames[inner : inner + 1] or frames[:1] or list(stack[:1])
    return shown(chosen[0]) if chosen else ""


def _is_of_a_trainer(frame: StackFrame) -> bool:
    """Whether a frame is in a library that is neither Python's, nor torch, nor this one."""
    name = frame.filename.replace(chr(92), "/")
    return bool(_PACKAGES.search(name)) and not _TORCH.search(name) and "/batchfit/" not in name


def _kind(stack: Sequence[StackFrame]) -> int:
    frames = _python(stack)
    if not frames:
        return GRADIENTS if any("autograd" in one.name or "Backward" in one.name for one in stack) else OTHER
    names = [one.name for one in frames]
    files = [one.filename.replace(chr(92), "/") for one in frames]
    if any("torch/optim/" in name for name in files):
        return OPTIMIZER if any(map(_MAKES_STATE.match, names)) else TEMPORARIES
    if any("torch/utils/checkpoint" in name for name in files):
        return ACTIVATIONS
    if any("torch/autograd/" in name or name.endswith("torch/_tensor.py") for name in files) and any(
        one in ("backward", "_engine_run_backward", "grad", "apply") for one in names
    ):
        return GRADIENTS
    if _MAKES_WEIGHTS.intersection(names):
        return WEIGHTS
    if any(one in INSIDE_A_MODULE for one in names):
        return ACTIVATIONS
    if any("torch/nn/modules/" in name for name in files) and "__init__" in names:
        return WEIGHTS
    if any(name.endswith("torch/nn/functional.py") for name in files):
        return ACTIVATIONS
    if any(_MAKES_A_BATCH.search(one) for one in names) or any("torch/utils/data/" in name for name in files):
        return BATCH
    return OTHER


def _modules(stack: Sequence[StackFrame]) -> str:
    """The forwards of a stack, by their files: a frame does not have the name of its class."""
    found: list[str] = []
    for frame, caller in pairwise(stack):
        if caller.name != "_call_impl" or not frame.filename.endswith(".py"):
            continue
        file, _, _ = shown(frame).partition(":")
        stem = file.removesuffix(".py")
        name = f"{stem} {printable(frame.name[:_LONGEST_NAME])}" if is_users(frame) else stem
        if not found or found[-1] != name:
            found.append(name)
    found.reverse()
    if len(found) > 4:
        found = [*found[:2], "...", found[-1]]
    return " > ".join(found)
