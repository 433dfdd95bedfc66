"""A workload's state as fake tensors, for as long as a trace lasts.

Rules: tensors that share memory share it as fakes (tied weights); what was there before is put back object
for object, so that neither a value nor an identity changes; nothing real is copied or allocated.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, Self, final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from batchfit.workload import Workload

Undo = Callable[[], None]


@final
class Faked(contextlib.AbstractContextManager["Faked"]):
    """The state of a workload, replaced by fakes on `device` inside the `with` block."""

    def __init__(self, parts: list[Any], device: torch.device) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.device = device
        self.module_names: dict[int, str] = {}
        self._parts = parts
        self._fakes: dict[int, Tensor] = {}  # by the id of the real tensor, which `_real` keeps alive
        self._real: list[Tensor] = []
        self._bases: dict[int, Tensor] = {}  # by the address of the real storage
        self._held: list[tuple[str, Tensor, str]] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        self._parameters: dict[int, Tensor] = {}
        self._undo: list[Undo] = []

    @classmethod
    def of(cls, workload: Workload, *, device: torch.device) -> Self:
        return cls(list(parts_of(workload)), device)

    def __enter__(self) -> Self:
        try:
            for part in self._parts:
                if isinstance(part, nn.Module):
                    self._fake_module(part)
            for part in self._parts:
                if isinstance(part, torch.optim.Optimizer):
                    self._fake_optimizer(part)
                elif isinstance(part, torch.amp.GradScaler):
                    self._fake_scaler(part)
                elif not isinstance(part, nn.Module) and hasattr(part, "__dict__"):
                    self._keep_attributes(part)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        while self._undo:
            self._undo.pop()()

    def held(self) -> Iterator[tuple[str, Tensor, str]]:
        """What is on the device before the first step: name, tensor, kind."""
        yield from self._held

    def parameters(self) -> list[Tensor]:
        return list(self._parameters.values())

    def optimizer_tensors(self) -> Iterator[Tensor]:
        for optimizer in self._optimizers:
            for state in optimizer.state.values():
                values = state.values() if isinstance(state, dict) else ()
                yield from (value for value in values if isinstance(value, FakeTensor))

    def fake_of(self, real: Tensor, device: torch.device | None = None) -> Tensor:
        """The fake that stands for a real tensor: same shape, strides, dtype and sharing."""
        known = self._fakes.get(id(real))
        if known is not None:
            return known
        fake = self.shaped_like(real, self.device if device is None else device, sharing=True)
        if real.dim() == 0 and not real.requires_grad and real.device.type == "cpu":
            fake.constant = real.detach().clone()  # type: ignore[attr-defined]  # a counter that is read
        if isinstance(real, nn.Parameter):
            fake = nn.Parameter(fake, requires_grad=real.requires_grad)
            for name, value in vars(real).items():
                if not isinstance(value, Tensor):
                    setattr(fake, name, value)
        elif real.requires_grad and real.is_leaf:
            fake.requires_grad_(True)
        self._fakes[id(real)] = fake
        self._real.append(real)
        return fake

    def shaped_like(self, real: Tensor, device: torch.device, *, sharing: bool = False) -> Tensor:
        """A fake of that shape; with `sharing` it has its memory in common with earlier ones, as the real."""
        with self.mode:
            if not sharing or real.device.type == "meta":
                return torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=device)
            storage = real.untyped_storage()
            base = self._bases.get(storage._cdata)
            if base is None:
                whole = real.storage_offset() == 0 and storage.nbytes() == _dense_bytes(real)
                if whole:
                    base = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=device)
                else:
                    count = storage.nbytes() // max(real.element_size(), 1)
                    base = torch.empty(count, dtype=real.dtype, device=device)
                self._bases[storage._cdata] = base
                if whole:
                    return base
            flat = base if base.dtype == real.dtype else base.reshape(-1).view(real.dtype)
            return torch.as_strided(flat, real.shape, real.stride(), real.storage_offset())

    def _fake_module(self, module: nn.Module) -> None:
        for path, one in module.named_modules():
            self.module_names.setdefault(id(one), path or type(one).__name__)
            for table, kind in ((one._parameters, "weights"), (one._buffers, "weights")):
                for name, tensor in list(table.items()):
                    if tensor is None or isinstance(tensor, FakeTensor):
                        continue
                    fake = self.fake_of(tensor)
                    if tensor.grad is not None and tensor.is_leaf:
                        fake.grad = self.fake_of(tensor.grad)
                        self._held.append((f"{path}.{name}".lstrip("."), fake.grad, "gradients"))
                    table[name] = fake  # type: ignore[assignment]
                    self._undo.append(lambda t=table, n=name, v=tensor: t.__setitem__(n, v))
                    if isinstance(fake, nn.Parameter):
                        self._parameters[id(fake)] = fake
                    self._held.append((f"{path}.{name}".lstrip("."), fake, kind))

    def _fake_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizers.append(optimizer)
        groups = optimizer.param_groups
        saved = [(group, dict(group)) for group in groups]
        state = optimizer.state
        inner = dict(vars(optimizer))

        def put_back() -> None:
            vars(optimizer).clear()
            vars(optimizer).update(inner)
            optimizer.state = state
            for group, values in saved:
                group.clear()
                group.update(values)
            optimizer.param_groups[:] = [group for group, _ in saved]

        self._undo.append(put_back)
        for group, values in saved:
            group["params"] = [self.fake_of(one) for one in values["params"]]
            for name, value in values.items():
                if isinstance(value, Tensor):
                    group[name] = self.fake_of(value)
            if values.get("foreach", False) is None and not values.get("fused"):
                # On a GPU torch would choose this itself; it does not see that these are parameters.
                group["foreach"] = not values.get("differentiable", False)
        fresh: Any = defaultdict(dict)
        for parameter, entries in state.items():
            fresh[self.fake_of(parameter)] = self._faked_state(entries)
        optimizer.state = fresh

    def _faked_state(self, entries: Any) -> Any:
        if not isinstance(entries, dict):
            return entries
        faked = {}
        for name, value in entries.items():
            if isinstance(value, Tensor):
                on_host = value.dim() == 0 and value.device.type == "cpu"
                faked[name] = self.fake_of(value, torch.device("cpu") if on_host else None)
                if not on_host:
                    self._held.append((f"optimizer.{name}", faked[name], "optimizer"))
            else:
                faked[name] = value
        return faked

    def _fake_scaler(self, scaler: Any) -> None:
        before = dict(vars(scaler))

        def put_back() -> None:
            vars(scaler).clear()
            vars(scaler).update(before)

        self._undo.append(put_back)
        states = before.get("_per_optimizer_states")
        scaler._scale = scaler._growth_tracker = None
        if states is not None:
            scaler._per_optimizer_states = defaultdict(torch.amp.grad_scaler._refresh_per_optimizer_state)

    def _keep_attributes(self, part: Any) -> None:
        """LR schedulers and the like: numbers, and lists and dicts of numbers."""
        before = {
            name: value.copy() if isinstance(value, list | dict | set) else value
            for name, value in vars(part).items()
        }

        def put_back() -> None:
            for name in set(vars(part)) - set(before):
                del vars(part)[name]
            for name, value in before.items():
                now = vars(part).get(name)
                if isinstance(value, list) and isinstance(now, list):
                    now[:] = value
                elif isinstance(value, dict | set) and isinstance(now, type(value)):
                    now.clear()
                    now.update(value)  # type: ignore[arg-type]
                else:
                    vars(part)[name] = value

        self._undo.append(put_back)


def parts_of(workload: Workload) -> Iterator[Any]:
    """What a step works on: its declared state, and what its functions close over."""
    seen: set[int] = set()
    for part in (*workload.state, workload.model, workload.optimizer):
        if part is not None and id(part) not in seen:
            seen.add(id(part))
            yield part


def _dense_bytes(tensor: Tensor) -> int:
    if tensor.numel() == 0:
        return 0
    reach = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (reach + 1) * tensor.element_size()
