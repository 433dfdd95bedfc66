"""Norms of gradients on the device, and their values on the host without a CUDA synchronization.

Rules
- Nothing here makes the host wait while training runs: a norm is a tensor; its value travels to pinned host
  memory behind the work that makes it, and is looked at when an event says that it has arrived.
- Sums are in fp32 at least: two nearly equal squared norms are subtracted later, and bf16 has three digits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, final

import torch

from batchfit._engine.torch_private import foreach, optimizers

_MOST_WAITING: Final = 64  # far more than a host is ever ahead of its device


def gradients_of(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients that are there, as plain dense tensors."""
    found = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if type(gradient).__name__ == "DTensor":
            raise TypeError(
                "gradients must be plain tensors, not DTensor: under FSDP2 each rank holds a part of each "
                "gradient, and no rank the norm of its own batch's"
            )
        found.append(gradient.coalesce().values() if gradient.is_sparse else gradient.detach())
    return found


@torch.no_grad()
def squared_norm(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The sum of the squares of all of them, as one fp32 (fp64 for fp64) number on `device`."""
    if not tensors:
        return torch.zeros((), device=device)
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    wide = torch.float64 if any(dtype is torch.float64 for _, dtype in groups) else torch.float32
    sums = []
    for (_, dtype), some in groups.items():
        # Without a dtype for fp32: older torch has no such argument, and has the fast path for this one.
        norms = foreach.norm(some, 2) if dtype in (torch.float32, torch.float64) else _wide_norms(some)
        sums.append(torch.stack(list(norms)).to(wide).square().sum().to(device, non_blocking=True))
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum()


def together(norms: Sequence[torch.Tensor], whole: torch.Tensor) -> torch.Tensor:
    """All of them in one tensor, `whole` last."""
    parts = (*norms, whole)
    wide = torch.float64 if any(part.dtype is torch.float64 for part in parts) else torch.float32
    return torch.cat([part.detach().reshape(-1).to(wide) for part in parts])


def _wide_norms(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    try:
        return list(foreach.norm(tensors, 2, dtype=torch.float32))
    except TypeError:  # a torch without that argument
        return [torch.linalg.vector_norm(tensor, dtype=torch.float32) for tensor in tensors]


@final
class Later:
    """Numbers on their way from a device; each batch of them is handed over once, in order.

    later = Later()
    later.send(torch.stack(norms), use)     # use(list of floats), in this call or a later one
    later.collect()                         # those that have arrived
    later.wait()                            # all of them
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[torch.Tensor, Any, Callable[[list[float]], None]]] = deque()
        self._spare: list[torch.Tensor] = []

    def send(self, values: torch.Tensor, use: Callable[[list[float]], None]) -> None:
        """Send a one-dimensional tensor to the host. Takes nothing on the device."""
        self.collect()
        if values.device.type != "cuda":  # no events to ask: kept as they are, and read a step later
            self._waiting.append((values, None, use))
            return
        host = self._pinned(values)
        host.copy_(values, non_blocking=True)
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(values.device))
        self._waiting.append((host, event, use))

    def collect(self) -> None:
        """Hand over what has arrived."""
        while self._waiting:
            _, event, _ = self._waiting[0]
            if event is not None and not event.query() and len(self._waiting) < _MOST_WAITING:
                return
            self._hand_over()

    def wait(self) -> None:
        """Hand over all of it; forces a synchronization."""
        while self._waiting:
            self._hand_over()

    def forget(self) -> None:
        """What is on its way will not be used."""
        for values, event, _ in self._waiting:
            if event is not None:
                event.synchronize()  # the copy still writes there
                self._spare.append(values)
        self._waiting.clear()

    def _hand_over(self) -> None:
        values, event, use = self._waiting.popleft()
        if event is not None:
            event.synchronize()
        numbers = values.tolist()
        if event is not None:
            self._spare.append(values)
        use(numbers)

    def _pinned(self, like: torch.Tensor) -> torch.Tensor:
        for at, spare in enumerate(self._spare):
            if spare.shape == like.shape and spare.dtype == like.dtype:
                return self._spare.pop(at)
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)


def _unscaled(squared: torch.Tensor, scaler: Any) -> torch.Tensor:
    """Without what a GradScaler has multiplied the loss with, as it is now: `update` writes it in place."""
    if scaler is None or not scaler.is_enabled():
        return squared
    scale = optimizers.scale_of(scaler)  # on its device: `get_scale` would wait for that
    if scale is not None:
        return squared / scale.to(squared.device, non_blocking=True).square()
    return squared / float(scaler.get_scale()) ** 2


@final
class Parts:
    """The squared norm of what each microbatch added to the gradients; of the first one only without copies.

    Copies: one of all gradients, on their device, kept from step to step. In place it becomes the difference
    to the next state of the gradients, and then that state.
    """

    def __init__(self, *, copies: bool) -> None:
        self._copies: dict[torch.Tensor, torch.Tensor] | None = {} if copies else None
        self._leaves: Sequence[torch.Tensor] = ()
        self._live: set[torch.Tensor] = set()  # whose copy is of this step
        self._norms: list[torch.Tensor] = []

    def begin(self, leaves: Sequence[torch.Tensor]) -> None:
        """A step begins, with no gradients so far."""
        self._leaves = leaves
        self._live.clear()
        self._norms = []

    def measure(self, scaler: Any) -> None:
        """A microbatch has added its part."""
        if self._copies is None and self._norms:
            return
        leaves = self._leaves
        added = gradients_of(leaves) if self._copies is None else self._differences(leaves, self._copies)
        self._norms.append(_unscaled(squared_norm(added, self._device()), scaler))
        if self._copies is not None:
            self._copy(leaves, self._copies)

    def whole(self, scaler: Any, norm: torch.Tensor | float | None = None) -> torch.Tensor:
        """The squared norm of all that is there; `norm` where it has been made already."""
        if norm is None:
            return _unscaled(squared_norm(gradients_of(self._leaves), self._device()), scaler)
        made = torch.as_tensor(norm).detach().to(self._device(), non_blocking=True)
        return _unscaled(made.float().square() if made.dtype is not torch.float64 else made.square(), scaler)

    def _device(self) -> torch.device:
        return self._leaves[0].device if self._leaves else torch.device("cpu")

    def take(self) -> list[torch.Tensor]:
        norms, self._norms = self._norms, []
        self._live.clear()
        return norms

    @torch.no_grad()
    def _differences(
        self, leaves: Sequence[torch.Tensor], copies: dict[torch.Tensor, torch.Tensor]
    ) -> list[torch.Tensor]:
        fresh = [leaf for leaf in leaves if leaf not in self._live]
        moved = [leaf for leaf in leaves if leaf in self._live and leaf.grad is not None]
        if any(leaf.grad is not None and leaf.grad.is_sparse for leaf in leaves):
            raise TypeError("gradients must be dense with mode='exact', not sparse: use mode='cheap'")
        if moved:
            foreach.sub_([copies[leaf] for leaf in moved], [leaf.grad for leaf in moved])
        return gradients_of(fresh) + [copies[leaf] for leaf in moved]

    @torch.no_grad()
    def _copy(self, leaves: Sequence[torch.Tensor], copies: dict[torch.Tensor, torch.Tensor]) -> None:
        for leaf in leaves:
            if leaf.grad is None:
                continue
            if leaf not in copies:
                copies[leaf] = leaf.grad.detach().clone()
            self._live.add(leaf)
        live = [leaf for leaf in leaves if leaf in self._live]
        if live:
            foreach.copy_([copies[leaf] for leaf in live], [leaf.grad for leaf in live])


@final
class RankNorms:
    """The squared norm of this rank's own gradient, taken where DDP reduces its buckets."""

    def __init__(self, model: torch.nn.parallel.DistributedDataParallel) -> None:
        import torch.distributed as dist
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        self._group = model.process_group
        self.world_size = dist.get_world_size(self._group)
        self._rank = dist.get_rank(self._group)
        self._norms: list[torch.Tensor] = []
        self._raw: list[torch.Tensor] = []  # which a GradScaler's scale may still be in

        def hook(group: Any, bucket: Any) -> Any:
            self._raw.append(squared_norm([bucket.buffer()], bucket.buffer().device))
            return allreduce_hook(group, bucket)

        hook.__annotations__ = {}  # DDP compares them with its types, and here they are text
        model.register_comm_hook(self._group, hook)

    def measure(self, scaler: Any) -> None:
        """A backward is done; the loss was scaled by `scaler`, if there is one."""
        raw, self._raw = self._raw, []
        self._norms += [_unscaled(norm, scaler) for norm in raw]

    def take(self) -> list[torch.Tensor]:
        norms, self._norms, self._raw = self._norms, [], []
        return norms

    def gathered(self, samples: float, factor: float, device: torch.device) -> torch.Tensor:
        """The samples of each rank, the factors of their losses, their squared norms: one all-reduce."""
        import torch.distributed as dist

        table = torch.zeros(3, self.world_size, dtype=torch.float64, device=device)
        table[0, self._rank], table[1, self._rank] = samples, factor
        norms = self.take()
        if norms:
            table[2, self._rank] = torch.stack([norm.double() for norm in norms]).sum()
        else:  # nothing was reduced: not a number, so that the step is skipped
            table[2, self._rank] = float("nan")
        dist.all_reduce(table, group=self._group)
        return table.flatten()
