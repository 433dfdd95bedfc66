"""Whether autocast's operation lists (in `dispatch.py`) equal those of the installed torch.

Rules: no GPU is needed, and no build for one. Each operation is sent into CUDA's autocast with fake tensors,
and the dtype that it casts to is compared with what its list says; no kernel runs. Of operations whose
arguments cannot be made up, only the names are compared.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from batchfit._engine.cuda_model.dispatch import (
    FP32,
    FP32_RESULT,
    LOWER,
    REFUSED,
    WIDEST,
    operation_of,
)
from batchfit._engine.torch_private.autocast import cuda_cast
from batchfit._engine.torch_private.dispatch import registered, schema_of
from batchfit._engine.torch_private.fake import FakeTensorMode
from batchfit._engine.torch_private.lookup import is_tested

_LOW, _WIDE = torch.bfloat16, torch.float32
# Kernels that are registered and in no list: cuDNN's recurrent layers, which `sequences.py` stands for, and
# dimensions with names.
_APART = frozenset({"_cudnn_rnn", "norm.names_ScalarOpt_dim"})


class AutocastAnswer(NamedTuple):
    """What this torch says of the lists."""

    asked: int  # operations whose dtype was asked
    differing: tuple[str, ...]  # each as a clause

    @property
    def caveat(self) -> str:
        """What a prediction should say of it; nothing where torch and the lists agree."""
        if not self.differing:
            return ""
        some = "; ".join(self.differing[:3]) + ("; ..." if len(self.differing) > 3 else "")
        return (
            f"autocast: torch {torch.__version__} differs from the lists that a trace follows ({some}): "
            "activations of these operations may be counted in another dtype"
        )


def check_autocast() -> AutocastAnswer:
    """Compare the lists with this torch. Takes a second, most of it to make the first fake tensor."""
    differing = [f"{name} is in no list" for name in _unlisted()]
    asked = 0
    present = set(registered("AutocastCUDA"))
    cases = ((LOWER, _WIDE, _LOW), (FP32, _LOW, _WIDE), (FP32_RESULT, _LOW, _WIDE), (WIDEST, _LOW, _WIDE))
    with FakeTensorMode():
        wide = torch.empty(4, 4, device="cuda:0", dtype=_WIDE)
        for names, given, expected in cases:
            first = torch.empty(4, 4, device="cuda:0", dtype=given)
            for name in sorted(present.intersection(names)):
                operation = operation_of(name)
                args = _arguments(operation, first, wide if names is WIDEST else first)
                if args is None:
                    continue
                asked += 1
                found = cuda_cast(operation, args, first)
                if found is not expected:
                    differing.append(f"{name} runs in {_text(found or given)}, not {_text(expected)}")
    return AutocastAnswer(asked, tuple(differing))


@functools.cache
def autocast_caveat() -> str:
    """What a prediction should say of autocast; asked only of a version that the tests have not run on."""
    return "" if is_tested() else check_autocast().caveat


def _unlisted() -> Iterator[str]:
    listed = {*LOWER, *FP32, *FP32_RESULT, *WIDEST, *REFUSED, *_APART}
    for name in registered("AutocastCUDA"):
        if name not in listed and "dimname" not in name.lower():
            yield name


_VALUES: dict[str, Any] = {"int": 1, "SymInt": 1, "number": 1.0, "float": 1.0, "bool": False, "str": ""}
_LISTS = {"List[int]": 1, "List[SymInt]": 1, "List[bool]": False}


def _arguments(operation: Any, first: Tensor, others: Tensor) -> list[Any] | None:
    """Something for each argument that must be given: casts come before any is looked at. None: unknown."""
    found: list[Any] = []
    for one in schema_of(operation).arguments:
        kind = str(one.type)
        if kind == "Tensor":
            found.append(others if found else first)
        elif kind == "List[Tensor]":
            found.append([first, others])
        elif one.kwarg_only or one.has_default_value():
            continue
        elif kind.startswith("Optional["):
            found.append(None)
        elif kind in _LISTS:
            found.append([_LISTS[kind]] * 2)
        elif kind in _VALUES:
            found.append(_VALUES[kind])
        else:
            return None
    return found


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
