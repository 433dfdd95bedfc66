"""What libraries do differently when they see that they are being traced, or that there is no GPU.

transformers looks for fake tensors and then leaves out decisions that depend on values (whether positions
are one sequence, so that no mask is needed): right for an exported graph, wrong for a picture of the program
as it runs. While a trace lasts it is told that a tensor is fake only where its values are not known: a check
of the data for padding is left out, the decision about a mask is taken.

Rules: nothing is imported that the program did not import; what was there before is put back.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch


@contextlib.contextmanager
def not_called_a_trace(known: Callable[[Any], bool]) -> Iterator[None]:
    """Inside, transformers takes its decisions as in an eager run, about values that are `known`."""
    module: Any = sys.modules.get("transformers.utils.import_utils")
    before = getattr(module, "is_fake_tensor", None)
    if before is None:
        yield
        return
    module.is_fake_tensor = lambda value: before(value) and not known(value)
    try:
        yield
    finally:
        module.is_fake_tensor = before


@contextlib.contextmanager
def saved_on_the_host() -> Iterator[None]:
    """Inside, `save_on_cpu(pin_memory=True)` copies as without: pinned or not, it is no memory of the GPU.

    It fills a tensor that it makes without naming a device; without a GPU that would stand for the device.
    """
    kind: Any = torch.autograd.graph.save_on_cpu
    made = kind.__init__

    def make(self: Any, pin_memory: bool = False, *args: Any, **kwargs: Any) -> None:
        made(self, False, *args, **kwargs)

    kind.__init__ = make
    try:
        yield
    finally:
        kind.__init__ = made


@contextlib.contextmanager
def flex_refused() -> Iterator[None]:
    """Inside, FlexAttention refuses to run, with a reason that `trace` names.

    Without its compiler it makes all scores; with it, which a trace leaves out, it makes none.
    """
    module: Any = sys.modules.get("torch.nn.attention.flex_attention")
    before = getattr(module, "_validate_device", None)
    if before is None:
        yield
        return

    def refuse(*_: Any) -> None:
        raise NotImplementedError("FlexAttention is a compiled kernel")

    module._validate_device = refuse
    try:
        yield
    finally:
        module._validate_device = before
