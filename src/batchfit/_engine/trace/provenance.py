"""Where a traced step is: phase, module and line, so that a block can say what it is for.

Rules: hooks follow the step from outside, and are removed after the trace. Backward runs in C++: the number
of the autograd node says which operation of the forward pass it belongs to. An error never names a line of
torch or batchfit; a library's line is followed by the program's own.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import batchfit
from batchfit._engine.allocator.footprint import Origin
from batchfit._engine.workload import loop
from batchfit.errors import UntraceableError


def _folder(file: str, up: int) -> tuple[str, str]:
    """The folder as it is imported from and as it really is: an environment may be a link."""
    path = Path(file)
    return str(path.absolute().parents[up]), str(path.resolve().parents[up])


HERE = _folder(batchfit.__file__, 0)
TORCH = _folder(torch.__file__, 0)


def named(places: Iterable[tuple[str, int]]) -> str:
    """The innermost line outside torch; where it is a library's, the program's own line beside it."""
    library = ""
    for filename, number in places:
        if filename.startswith((*TORCH, *HERE, "<")):
            continue
        line = f"{Path(filename).name}:{number}"
        if "site-packages" not in filename and "dist-packages" not in filename:
            return f"{library}, called from {line}" if library else line
        library = library or line
    return library


def calling_frame() -> FrameType | None:
    """The innermost frame outside torch and batchfit."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((*TORCH, *HERE)):
        frame = frame.f_back
    return frame


def calling_line() -> str:
    """The line that is running, for an error: a library's is followed by the program's own."""
    return named(
        (frame.f_code.co_filename, number) for frame, number in traceback.walk_stack(sys._getframe(2))
    )


@final
class Whereabouts:
    """Follows a step. `outside` is the code that calls it: what lies beyond is no part of the step."""

    def __init__(self, module_names: Mapping[int, str], outside: CodeType) -> None:
        self._module_names = module_names
        self._outside = outside
        self._modules: list[str] = []
        self._in_optimizer = 0
        self._lines: dict[tuple[str, int, str], str] = {}
        self._ours: dict[str, bool] = {}  # whether a file is torch's, or batchfit's
        self._forward: dict[int, tuple[str, str]] = {}  # module and line by the number of an autograd node

    @contextlib.contextmanager
    def followed(
        self,
        parameters: Iterable[Tensor],
        *,
        on_gradient: Callable[[Tensor], None],
        on_state: Callable[[torch.optim.Optimizer], None],
    ) -> Iterator[None]:
        """Follows modules and optimizers; says when a gradient and when an optimizer's state is there."""
        module = torch.nn.modules.module

        def enter(one: nn.Module, *_: Any) -> None:
            self._modules.append(self._module_names.get(id(one), type(one).__name__))

        def leave(*_: Any) -> None:
            if self._modules:
                self._modules.pop()

        def begin(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            self._in_optimizer += 1
            groups = optimizer.param_groups
            if not all(isinstance(one, FakeTensor) for group in groups for one in group["params"]):
                raise UntraceableError(
                    f"{type(optimizer).__name__}.step",
                    calling_line(),
                    "it has parameters of a model that is not in the workload's state: declare both, "
                    "batchfit.Workload(step, state=[model, optimizer])",
                )

        def end(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            self._in_optimizer -= 1
            on_state(optimizer)

        handles = [
            module.register_module_forward_pre_hook(enter),
            module.register_module_forward_hook(leave, always_call=True),
            register_optimizer_step_pre_hook(begin),
            register_optimizer_step_post_hook(end),
        ]
        handles += [
            parameter.register_post_accumulate_grad_hook(on_gradient)  # type: ignore[no-untyped-call]
            for parameter in parameters
            if parameter.requires_grad
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def end_step(self) -> None:
        """A step that ended early may not have left its modules."""
        self._modules.clear()
        self._in_optimizer = 0

    def origin(self, kind: str, operation: str) -> Origin:
        """What a block is for that this operation makes here and now."""
        phase = self.phase()
        # A module that runs while gradients are computed: activations that a checkpoint computes again.
        recomputed = phase == "backward" and bool(self._modules)
        if phase == "batch":
            kind = "batch"
        elif phase != "forward" and kind == "activations" and not recomputed:
            kind = "temporaries"
        if phase == "backward" and not recomputed:
            module, source = self._of_node()
        else:
            module, source = self._modules[-1] if self._modules else "", self._source()
        return Origin(kind, phase, module, source, operation)

    def note_node(self) -> None:
        """Remember where we are for the backward of this operation.

        Autograd has made the operation's node, and given it the last number, before it gets here.
        """
        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return
        number = torch.autograd._get_sequence_nr() - 1  # type: ignore[attr-defined]
        if number not in self._forward:
            self._forward[number] = (self._modules[-1] if self._modules else "", self._source())

    def _of_node(self) -> tuple[str, str]:
        """The module and the line whose gradient is being computed: backward itself runs in C++."""
        node: Any = torch._C._current_autograd_node()
        return self._forward.get(node._sequence_nr(), ("", "")) if node is not None else ("", "")

    def phase(self) -> str:
        """batch, forward, backward or optimizer."""
        if self._in_optimizer:
            return "optimizer"
        if torch._C._current_graph_task_id() != -1:
            return "backward"
        return "batch" if loop.current_phase() == "batch" else "forward"

    def _source(self) -> str:
        """The innermost line of the step outside torch and batchfit; nothing where it has none."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if code is self._outside:  # what lies beyond called batchfit, and is no part of the step
                break
            name = code.co_filename
            ours = self._ours.get(name)
            if ours is None:
                ours = self._ours[name] = name.startswith((*TORCH, *HERE)) or name[0] == "<"
            if not ours:
                key = (name, frame.f_lineno, code.co_name)
                line = self._lines.get(key)
                if line is None:
                    line = self._lines[key] = f"{Path(name).name}:{frame.f_lineno} {code.co_name}"
                return line
            frame = frame.f_back
        return ""
