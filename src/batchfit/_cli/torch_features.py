"""Which features of batchfit work with the installed torch: the list that `doctor` prints.

Rules: a feature works, works with a caveat, or is not here; in the last two cases the reason is given. What
is asked is torch itself, without a GPU and without a step; a check that fails is an answer, too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from batchfit._engine.torch_private.needs import Ground

State = Literal["works", "caveat", "not here"]
_DISTRIBUTED = ("several ranks", "a model in DistributedDataParallel", "a model under FSDP2")


@dataclass(frozen=True, slots=True)
class Feature:
    """One line of the answer; `detail` is the reason where it does not simply work."""

    name: str
    state: State
    detail: str = ""


def known_features() -> list[Feature]:
    """All of them, asked of the installed torch."""
    return [*_in_one_process(), *_of_predictions(), *_of_the_allocator(), *_on_ranks()]


def _in_one_process() -> Iterator[Feature]:
    from batchfit._engine.torch_private import fake, needs, optimizers

    for name in needs.NAMES:
        yield _listed(name, "not here", "this torch has no", partial(needs.missing, name))
    yield _listed("fake tensors in a trace", "not here", "this torch has no", fake.missing)
    yield _grounded(needs.SCALER_STATE, optimizers.can_read_states)
    yield _grounded(needs.SCALE_TENSOR, optimizers.reads_scale)
    yield _grounded(needs.OPTIMIZER_STATE, optimizers.can_make_state)


def _of_predictions() -> Iterator[Feature]:
    from batchfit._engine.cuda_model import kernel_arguments
    from batchfit._engine.cuda_model.autocast_check import check_autocast

    takes_others = "predictions do not know what this torch gives to"
    yield _listed(
        "autocast in predictions",
        "caveat",
        "activations of these operations may be counted in another dtype:",
        lambda: check_autocast().differing,
    )
    for name, operations in (
        ("recurrent layers in predictions", kernel_arguments.RECURRENT),
        ("attention in predictions", kernel_arguments.ATTENTION),
    ):
        yield _listed(name, "caveat", takes_others, partial(kernel_arguments.changed, operations))
    yield _listed(
        "workspaces of cuBLAS in predictions",
        "caveat",
        "this torch takes one per product, and predictions count two as kept:",
        _workspaces_apart,
    )


def _workspaces_apart() -> list[str]:
    """What this torch does with the workspaces of cuBLAS, where predictions count them otherwise."""
    from batchfit._engine.torch_private import allocator

    return [] if allocator.keeps_cublas_workspaces() else ["up to 65 MiB too many"]


def _of_the_allocator() -> Iterator[Feature]:
    import torch

    from batchfit._engine.torch_private import allocator, needs

    yield _grounded(needs.ALLOCATOR_SETTINGS, _is_setting_read)
    if torch.version.cuda is None and torch.version.hip is None:
        name = "trials on an NVIDIA or AMD GPU"
        yield Feature(name, "not here", "this torch is built without CUDA. Install one that is built with it")
        return
    yield _grounded(needs.HISTORY, allocator.history_is_known)
    yield _grounded(needs.CUBLAS_WORKSPACES, allocator.can_clear_workspaces)


def _on_ranks() -> Iterator[Feature]:
    import torch.distributed as dist

    if not dist.is_available():
        for name in _DISTRIBUTED:
            yield Feature(name, "not here", "this torch is built without torch.distributed. Install another")
        return
    from batchfit._engine.torch_private import ddp, fsdp2, needs, process_groups

    yield _grounded(needs.GROUP_STORE, process_groups.can_reach_store)
    yield _grounded(needs.GROUP_COUNTERS, process_groups.can_count)
    yield _grounded(needs.DDP_STATE, lambda: not ddp.missing())
    yield _grounded(needs.DDP_RESET, ddp.can_reset)
    yield _grounded(needs.FSDP2_STATE, lambda: not fsdp2.missing())
    yield _grounded(needs.FSDP2_RESET, fsdp2.can_reset)
    yield _grounded(needs.FSDP2_FACTOR, fsdp2.reads_factor)
    yield _grounded(needs.FSDP2_ON_CPU, fsdp2.runs_on_cpu)
    yield _grounded(needs.FAKE_GROUP, process_groups.can_fake)


def _is_setting_read() -> bool:
    """Nothing is lost where the variable is not set."""
    from batchfit._engine.torch_private import allocator

    return allocator.reads_any_name() or "PYTORCH_ALLOC_CONF" not in os.environ


def _grounded(ground: Ground, is_here: Callable[[], bool]) -> Feature:
    """A feature of the table of needs."""
    try:
        here = is_here()
    except Exception as error:  # noqa: BLE001  a torch that is not known may fail in any way
        return Feature(ground.feature, "caveat", _failed(error))
    if here:
        return Feature(ground.feature, "works")
    return Feature(ground.feature, "not here" if ground.refused else "caveat", ground.reason())


def _listed(name: str, state: State, reason: str, differing: Callable[[], Sequence[str]]) -> Feature:
    """A feature for which a check names what differs; in `state` where it names anything."""
    try:
        found = differing()
    except Exception as error:  # noqa: BLE001  as above
        return Feature(name, "caveat", _failed(error))
    return Feature(name, state, f"{reason} {', '.join(found)}") if found else Feature(name, "works")


def _failed(error: Exception) -> str:
    return f"the check itself failed: {type(error).__name__}: {error}"
