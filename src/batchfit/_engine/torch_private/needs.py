"""The table of private names by feature: since which torch, what is lost without them, what to do.

Rules: whether a name is there is asked of torch, never of its version number; `since` is only shown. A
refusal names the version that is running. What is only poorer without its name says so as a caveat.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeVar, final

import torch

from batchfit._engine.torch_private.lookup import TESTED, optional
from batchfit.errors import BatchfitError

_E = TypeVar("_E", bound=BatchfitError)


@final
@dataclass(frozen=True, slots=True)
class Ground:
    """One feature, and what becomes of it where this torch lacks its ground."""

    feature: str
    lost: str
    remedy: str
    since: str = ""  # the oldest torch that was seen to have it; "" where all of the tested ones do
    refused: bool = True  # or answered in a poorer way

    def reason(self) -> str:
        """What this torch lacks, what is lost by that, and what to do; begins with a verb."""
        if self.since:
            needs = f"needs torch {self.since} or later, and this is {torch.__version__}"
        else:
            needs = f"needs what torch {TESTED} has, and {torch.__version__} has not"
        return f"{needs}: {self.lost}. {self.remedy}"

    def why(self) -> str:
        """The same, of the feature."""
        return f"{self.feature} {self.reason()}"

    def refusal(self, kind: type[_E] = BatchfitError) -> _E:  # type: ignore[assignment]
        """The error for who asked for it."""
        return kind(self.why())


_OTHER_TORCH: Final = "Use one of those versions"
FSDP2_STATE: Final = Ground(
    feature="a model under FSDP2",
    lost="what a model shards, and whether it is at rest, cannot be read",
    remedy=f"{_OTHER_TORCH}, or DistributedDataParallel",
)
FSDP2_RESET: Final = Ground(
    feature="a retry after a step that failed inside FSDP2",
    since="2.8",
    lost="FSDP2 stays in the middle of that step, and cannot be reset",
    remedy="Install a newer torch, or begin with a size that fits",
)
FSDP2_FACTOR: Final = Ground(
    feature="a model whose gradients FSDP2 divides by a factor of your own",
    since="2.8",
    lost="the factor of set_gradient_divide_factor() or set_reduce_scatter_divide_factor() cannot be read, "
    "and losses would be scaled wrongly",
    remedy="Install a newer torch, or leave the factor out",
)
FAKE_GROUP: Final = Ground(
    feature="a prediction for several ranks",
    lost="there is no process group that only pretends to have other ranks",
    remedy=_OTHER_TORCH,
)
SHARED_STATE: Final = Ground(
    feature="a prediction with a ZeroRedundancyOptimizer",
    lost="which rank has which parameters cannot be found out for a trace",
    remedy=_OTHER_TORCH,
)
FSDP2_ON_CPU: Final = Ground(
    feature="FSDP2 on a CPU",
    since="2.8",
    lost="torch.cpu.Stream has no record_event, which FSDP2 calls in forward",
    remedy="Install a newer torch, or shard on GPUs",
)
DDP_RESET: Final = Ground(
    feature="a retry after a step that failed inside DistributedDataParallel",
    lost="its reducer stays in the middle of that step, and cannot be reset",
    remedy=_OTHER_TORCH,
)
DDP_STATE: Final = Ground(
    feature="a model in DistributedDataParallel",
    lost="hooks, delayed parameters and rebuilt buckets cannot be read, and ranks could send what others do "
    "not wait for",
    remedy=_OTHER_TORCH,
)
SCALER_STATE: Final = Ground(
    feature="an optimizer step with a GradScaler",
    lost="what the scaler has noted of each optimizer cannot be read: gradients could be unscaled twice",
    remedy=f"{_OTHER_TORCH}, or train in bfloat16 without a scaler",
)
SCALE_TENSOR: Final = Ground(
    feature="gradient noise beside a GradScaler",
    lost="the scale is read by get_scale(), for which the host waits in each step",
    remedy=_OTHER_TORCH,
    refused=False,
)
OPTIMIZER_STATE: Final = Ground(
    feature="optimizer state made before the first step",
    lost="it is made inside the first step, which is then an error where it has an OOM",
    remedy=_OTHER_TORCH,
    refused=False,
)
GROUP_COUNTERS: Final = Ground(
    feature="a step with collectives on several ranks",
    lost="how many collectives a process group has begun cannot be read, and a rank that fails would leave "
    "the others waiting",
    remedy=_OTHER_TORCH,
)
GROUP_STORE: Final = Ground(
    feature="a search or a batch on several ranks",
    lost="the key-value store of the process group, by which ranks agree, cannot be reached",
    remedy=_OTHER_TORCH,
)
HISTORY: Final = Ground(
    feature="the check whether stacks of allocations are being recorded",
    lost="a snapshot of the allocator is taken as if they were not: slower while you record",
    remedy=_OTHER_TORCH,
    refused=False,
)
CUBLAS_WORKSPACES: Final = Ground(
    feature="workspaces of cuBLAS released before a trial",
    lost="they stay where the first trial allocated them, and a size that is found may be a few samples off "
    "what a new process can run",
    remedy="Search with isolate=True, or use one of those versions",
    refused=False,
)
ALLOCATOR_SETTINGS: Final = Ground(
    feature="allocator settings in PYTORCH_ALLOC_CONF",
    since="2.9",
    lost="this torch reads PYTORCH_CUDA_ALLOC_CONF alone",
    remedy="Set that variable",
    refused=False,
)

# Names without which a feature is refused (`lookup.lost`), by feature.
NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "trials and snapshots": (
        "torch._C._DisableTorchDispatch",
        "torch.UntypedStorage._cdata",
        "torch.UntypedStorage._new_with_weak_ptr",
    ),
    "virtual memory: budgets on a CPU": (
        "torch._C.DisableTorchFunctionSubclass",
        "torch._C._TorchDispatchModeKey",
        "torch._C._dispatch_has_kernel_for_dispatch_key",
        "torch._C._get_dispatch_mode",
    ),
    "microbatches with the gradients of the whole batch": (
        "torch._C._current_graph_task_id",
        "torch._foreach_add_",
        "torch._foreach_copy_",
        "torch._foreach_mul_",
        "torch._foreach_norm",
        "torch._foreach_sub_",
    ),
    "a trace with fake tensors (predict, explain)": (
        "torch._C.DispatchKeySet",
        "torch._C._ExcludeDispatchKeyGuard",
        "torch._C._current_autograd_node",
        "torch._C._current_graph_task_id",
        "torch._C._dispatch_get_registrations_for_dispatch_key",
        "torch._subclasses.fake_tensor.unset_fake_temporarily",
        "torch.autograd._get_sequence_nr",
        "torch.library.Library._destroy",
    ),
}


def missing(feature: str) -> list[str]:
    """Of the names that a feature needs, those that this torch has not."""
    return [name for name in NAMES[feature] if optional(name) is None]
