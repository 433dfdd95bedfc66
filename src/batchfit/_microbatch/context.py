"""Inspects the batch, the models and the device at the start of each call of a Microbatcher.

Rules
- What stays from call to call is here once: where microbatches go, how batches are cut, what was learned.
- Everything that can be wrong with a batch or the models is an error before anything runs.
- Where splitting would change the result, that is a warning (BatchNorm) or refused (captured graphs).
- Models are walked once per batch, since layers may be frozen, added or put into another mode in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple, final

import torch
from torch import nn

from batchfit._engine.batch.padding import Lengths
from batchfit._engine.batch.pure.microbatch import Microbatch
from batchfit._engine.batch.sample_count import AmbiguousBatchError
from batchfit._engine.batch.split import Batch
from batchfit._engine.batch.trim import attention_without_plans
from batchfit._engine.batch.user_split import Cutter
from batchfit._engine.data_parallel.interface import DataParallel
from batchfit._engine.device.device import Device
from batchfit._engine.device.gpu import CudaDevice
from batchfit._engine.device.oom import run_twice
from batchfit._engine.device.tensors import closure_of, leaves_of
from batchfit._engine.sizing.interface import SizedBatch
from batchfit._engine.sizing.ragged import RaggedSizer
from batchfit._engine.sizing.uniform import UniformSizer
from batchfit._engine.snapshot.batch_undo import BatchUndo, Buffers
from batchfit._engine.snapshot.coverage import Coverage
from batchfit._engine.snapshot.rng import generators_held
from batchfit._engine.torch_private.autograd import has_late_hooks
from batchfit._engine.torch_private.dynamo import is_compiled
from batchfit._engine.torch_private.modules import BatchNorm
from batchfit._microbatch.batch_norm import uses_batch_statistics, warning
from batchfit._microbatch.checks import generators_of
from batchfit.errors import BatchfitError

Tables = list[dict[str, Any]]
GraphCheck = Callable[[Iterable[torch.Tensor]], None]
OnBatchNorm = Literal["warn", "error", "exact", "ignore"]


class PreparedBatch(NamedTuple):
    """A batch and the models, as a call finds them."""

    sized: SizedBatch | None  # None: this rank has no samples
    leaves: list[torch.Tensor]
    shared: int  # how many of the leaves are the models': the others are the batch's own
    tables: Tables
    modules: list[nn.Module]
    generators: list[object]  # that the user's functions draw from


@final
class MicrobatchContext:
    """What the calls of one Microbatcher have in common."""

    def __init__(
        self,
        models: Sequence[nn.Module | torch.Tensor],
        *,
        device: Device,
        target: torch.device | None,
        cutter: Cutter,
        lengths: str | Callable[[Any], Any] | None,
        batch_norm: OnBatchNorm,
        uniform: UniformSizer,
        ragged: RaggedSizer,
        ranks: DataParallel,
        generators: Sequence[object],
    ) -> None:
        self.device = device
        self.target = target  # where microbatches go
        self.memory = uniform.memory
        self.events = uniform.events
        self.ranks = ranks
        self.coverage = Coverage()
        self.buffers = Buffers()
        self.marks = Buffers()  # copied before each microbatch of `map`
        self.compiled = any(is_compiled(module) for module in leaves_of(models)[2])
        self._models = models
        self._cutter = cutter
        self._lengths = lengths
        self._batch_norm = batch_norm
        self._uniform = uniform
        self._ragged = ragged
        self._generators = [*generators_of(models), *generators]
        # For frameworks: called when a call begins; what it returns is called where a pass is undone.
        self.also_restores: list[Callable[[], Callable[[], None]]] = []
        self._leaf_count = -1
        self._modules: list[nn.Module] = []
        self._norms: list[BatchNorm] = []

    def open(self, batch: Any, kind: str, fns: Sequence[Any], lengths: Lengths | None) -> PreparedBatch:
        """Inspect the batch, the models and the device, as every call begins."""
        if isinstance(self.device, CudaDevice) and torch.cuda.is_current_stream_capturing():
            raise BatchfitError(
                "a CUDA graph is being captured: it would always replay one split. Capture inside fn"
            )
        trains = kind != "map"
        lengths = self._lengths if lengths is None else lengths
        takes_empty = self.ranks.takes_empty(trains=trains)
        whole = None
        if batch is not None or not takes_empty:
            whole = self._whole(batch, kind, lengths)
            if whole.length == 0 and not takes_empty:
                raise ValueError("batch must hold at least one sample, not 0")
        leaves, tables, modules = leaves_of(self._models)
        shared = len(leaves)
        if trains:
            # Checked again where other leaves get gradients: it takes as long as all else here.
            if shared != self._leaf_count:
                self._check_leaves(leaves)
            self._leaf_count = shared
            leaves += [] if whole is None else whole.gradient_leaves()
        if whole is None or whole.length == 0:
            return PreparedBatch(None, leaves, shared, tables, modules, [])
        sized = self._sized(whole, kind, lengths, modules, compiled=self.compiled or is_compiled(fns[0]))
        generators = [*self._generators, *generators_held(fns)]
        return PreparedBatch(sized, leaves, shared, tables, modules, generators)

    def _sized(
        self, whole: Batch, kind: str, lengths: Lengths | None, modules: list[nn.Module], *, compiled: bool
    ) -> SizedBatch:
        trains = kind != "map"
        if lengths is None:
            needs_two = compiled and trains and bool(self.norms(modules))
            return self._uniform.begin(whole, compiled=compiled, needs_two=needs_two)
        if self._cutter.split is not None:
            raise ValueError(f"lengths must be None where split is given, not {lengths!r:.80}")
        joins = kind != "backward"
        return self._ragged.begin(whole, lengths, compiled=compiled, trains=trains, joins=joins)

    def _whole(self, batch: Any, kind: str, lengths: Lengths | None) -> Batch:
        read_batch = partial(Batch.of, batch, cutter=self._cutter, mode=self.mode(kind))
        if self._cutter.split is None:
            try:
                return read_batch()
            except AmbiguousBatchError:
                if lengths is None or isinstance(lengths, str):
                    raise
                # As many samples as there are lengths.
                return read_batch(known_count=len(lengths(batch) if callable(lengths) else lengths))
        # A trial cut may need memory.
        note = "batchfit: raised while the samples of a batch were counted by what split returns"
        return run_twice(read_batch, device=self.device, note=note)

    def graph_check(self, fns: Sequence[Any], leaves: Sequence[torch.Tensor], kind: str) -> GraphCheck | None:
        """What to call with the losses before the first backward; None: these functions are known."""
        key = (kind, len(leaves), *map(function_key, fns))
        if key in self.coverage.known:
            return None
        return partial(self.coverage.check, key=key, leaves=leaves, fns=fns)

    def _check_leaves(self, leaves: list[torch.Tensor]) -> None:
        """Refuse or warn of tensors that get gradients, where others did before."""
        self.ranks.check_leaves(leaves)
        if any(map(has_late_hooks, leaves)):
            self.events.once(
                "hooks",
                "a parameter has a post-accumulate-grad hook, which runs after each microbatch: an "
                "optimizer that steps there steps on a part of the batch's gradient",
            )

    @contextmanager
    def limits(self, sized: SizedBatch) -> Iterator[None]:
        """What is set while passes run: the budget, and for ragged batches the attention back-end."""
        if sized.whole.trimmer is None:
            with sized.limited():
                yield
        else:  # many shapes: no back-end that plans for each of them
            with sized.limited(), attention_without_plans(self.target):
                yield

    def norms(self, modules: list[nn.Module]) -> list[BatchNorm]:
        """The BatchNorm layers that normalise with statistics of their batch, as they stand now."""
        if modules != self._modules:
            self._modules = modules
            self._norms = [module for module in modules if isinstance(module, BatchNorm)]
        return [layer for layer in self._norms if uses_batch_statistics(layer)]

    def layers(self, whole: Batch, modules: list[nn.Module], plan: Sequence[Microbatch]) -> list[BatchNorm]:
        """BatchNorm where a batch is cut: warn, refuse, or return the layers with exact statistics."""
        if len(plan) == 1 or self._batch_norm == "ignore":
            return []
        layers = self.norms(modules)
        if not layers or self._batch_norm == "exact":
            return layers
        text = warning([microbatch.size for microbatch in plan], whole.length, len(layers))
        if self._batch_norm == "error":
            raise BatchfitError(text)
        self.events.once("batch_norm", text)
        return []

    def mode(self, kind: str) -> str:
        training = any(isinstance(model, nn.Module) and model.training for model in self._models)
        mode = f"{kind},{'train' if training else 'eval'}"
        device_type = "cpu" if self.target is None else self.target.type
        if torch.is_autocast_enabled(device_type):
            mode += f",{torch.get_autocast_dtype(device_type)}"
        return mode

    def free_buffers(self, buffers: Buffers) -> Buffers:
        """These, or new ones where another call still needs them (`map` inside a `backward`)."""
        return Buffers() if self.buffers.busy else buffers

    def undoing(
        self, opened: PreparedBatch, leaves: list[torch.Tensor], scaler: Any, buffers: Buffers | None = None
    ) -> BatchUndo:
        """What undoes the passes of a call; without `leaves`, not for gradients."""
        kept = self.free_buffers(self.buffers) if buffers is None else buffers
        note = "batchfit: raised while the models' buffers were copied"
        run_twice(lambda: kept.take(opened.tables), device=self.device, note=note)
        more = [] if not self.also_restores else run_twice(self._also_taken, device=self.device, note=note)
        return BatchUndo(leaves, buffers=kept, scaler=scaler, generators=opened.generators, more=more)

    def _also_taken(self) -> list[Callable[[], None]]:
        return [take() for take in self.also_restores]


def function_key(fn: Any) -> object:
    """The same for a lambda that is created in each pass of a loop, as long as its modules are the same."""
    plain = getattr(fn, "__func__", fn)
    code = getattr(plain, "__code__", None)
    if code is None:
        return type(fn), id(fn)
    inside = closure_of(plain)
    owners = (getattr(fn, "__self__", None), *(one for one in inside if isinstance(one, nn.Module)))
    return code, *map(id, owners)


def loss_key(fn: Any) -> object:
    """The same for a function that is created in each pass of a loop, as long as it calls the same ones."""
    if isinstance(fn, partial):
        return "partial", loss_key(fn.func)
    plain = getattr(fn, "__func__", fn)
    code = getattr(plain, "__code__", None)
    if code is None:
        return id(fn) if isinstance(fn, nn.Module) else type(fn)
    inside = closure_of(plain)
    called = (getattr(one, "__code__", None) or type(one) for one in inside if callable(one))
    return function_key(fn), *called
