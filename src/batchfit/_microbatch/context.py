"""What every call of a Microbatcher begins with: the models, the device, and a batch looked at.

Rules
- What stays from call to call is here once: where microbatches go, how batches are cut, what was learned.
- Everything that can be wrong with a batch or the models is told before anything runs.
- Where splitting would change the result, that is said (BatchNorm) or refused (captured graphs).
- Models are walked once a batch, since layers may be frozen, added or put into another mode in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal, NamedTuple, final

import torch
from torch import nn

from batchfit._engine.batch.padding import Lengths
from batchfit._engine.batch.pure.pieces import Piece
from batchfit._engine.batch.sample_count import AmbiguousBatchError
from batchfit._engine.batch.split import Batch
from batchfit._engine.batch.trim import attention_without_plans
from batchfit._engine.batch.user_split import Cutter
from batchfit._engine.data_parallel.ddp import DdpRanks, SingleProcess
from batchfit._engine.data_parallel.fsdp import FsdpRanks
from batchfit._engine.device.compile import is_compiled
from batchfit._engine.device.oom_guard import run_twice
from batchfit._engine.device.resolve import CudaDevice, Device
from batchfit._engine.device.tensors import leaves_of
from batchfit._engine.sizing.ragged import RaggedCall, RaggedSizer
from batchfit._engine.sizing.uniform import BatchCall, UniformSizer
from batchfit._engine.snapshot.coverage import Coverage, generators_held
from batchfit._engine.snapshot.rewind import Buffers, Rewind
from batchfit._microbatch.batch_norm import BatchNorm, batch_norms, norms_in, told
from batchfit._microbatch.checks import generators_of
from batchfit.errors import BatchfitError

Tables = list[dict[str, Any]]
AnyCall = BatchCall | RaggedCall
OnBatchNorm = Literal["warn", "error", "exact", "ignore"]

CHANGED = (
    "fn changed the batch in place and then ran out of memory: a second try would see the changed batch. "
    "Clone what fn writes into"
)


class PreparedBatch(NamedTuple):
    """A batch and the models, as a call finds them."""

    call: AnyCall | None  # None: this rank has no samples
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
        sizing: UniformSizer,
        packing: RaggedSizer,
        sync: DdpRanks | FsdpRanks | SingleProcess,
        generators: Sequence[object],
    ) -> None:
        self.device = device
        self.target = target  # where microbatches go
        self.sizing = sizing
        self.sync = sync
        self.coverage = Coverage()
        self.buffers = Buffers()
        self.marks = Buffers()  # those of one microbatch of `map`
        self.compiled = any(is_compiled(module) for module in leaves_of(models)[2])
        self._models = models
        self._cutter = cutter
        self._lengths = lengths
        self._batch_norm = batch_norm
        self._packing = packing
        self._generators = [*generators_of(models), *generators]
        self.also: list[Callable[[], Callable[[], None]]] = []  # more to note, each answering its way back
        self._leaf_count = -1
        self._modules: list[nn.Module] = []
        self._norms: list[BatchNorm] = []

    def open(self, batch: Any, kind: str, fns: Sequence[Any], lengths: Lengths | None) -> PreparedBatch:
        """What every call begins with: look at the batch, the models and the device."""
        if isinstance(self.device, CudaDevice) and torch.cuda.is_current_stream_capturing():
            raise BatchfitError(
                "a CUDA graph is being captured: it would replay one split for ever. Capture inside fn"
            )
        whole = None
        joins = self.sync.joins_empty and (kind != "map" or self.sync.in_step)
        if batch is not None or not joins:
            whole = self._whole(batch, kind, self._lengths if lengths is None else lengths)
            if whole.length == 0 and not joins:
                raise ValueError("batch must hold at least one sample, not 0")
        leaves, tables, modules = leaves_of(self._models)
        shared = len(leaves)
        if kind != "map":
            # Looked at again where others get gradients than before: it takes as long as all else here.
            if shared != self._leaf_count:
                self._look_at(leaves)
            self._leaf_count = shared
            leaves += [] if whole is None else whole.gradient_leaves()
        if whole is None or whole.length == 0:
            return PreparedBatch(None, leaves, shared, tables, modules, [])
        compiled = self.compiled or is_compiled(fns[0])
        lengths = self._lengths if lengths is None else lengths
        call: AnyCall
        if lengths is None:
            call = self.sizing.begin(whole, compiled=compiled)
            call.needs_two = compiled and kind != "map" and bool(self.training_norms(modules))
        elif self._cutter.split is not None:
            raise ValueError(f"lengths must be None where split is given, not {lengths!r:.80}")
        else:
            trains, joins = kind != "map", kind != "backward"
            call = self._packing.begin(whole, lengths, compiled=compiled, trains=trains, joins=joins)
        return PreparedBatch(
            call, leaves, shared, tables, modules, [*self._generators, *generators_held(fns)]
        )

    def _whole(self, batch: Any, kind: str, lengths: Lengths | None) -> Batch:
        look = partial(Batch.of, batch, cutter=self._cutter, mode=self.mode(kind))
        if self._cutter.split is None:
            try:
                return look()
            except AmbiguousBatchError:
                if lengths is None or isinstance(lengths, str):
                    raise
                # As many samples as there are lengths.
                return look(known_count=len(lengths(batch) if callable(lengths) else lengths))
        # A trial cut may need memory.
        note = "batchfit: raised while the samples of a batch were counted by what split returns"
        return run_twice(look, device=self.device, note=note)

    def _look_at(self, leaves: list[torch.Tensor]) -> None:
        """What gets gradients is not what it was: may it?"""
        self.sync.check(leaves)
        if any(getattr(leaf, "_post_accumulate_grad_hooks", None) for leaf in leaves):
            self.sizing.warn_once(
                "hooks",
                "a parameter has a post-accumulate-grad hook, which runs after each microbatch: an "
                "optimizer that steps there steps on a part of the batch's gradient",
            )

    def sizer(self, call: AnyCall | None) -> Any:
        """Who decides on the microbatches of this call."""
        return self._packing if isinstance(call, RaggedCall) else self.sizing

    @contextmanager
    def inside(self, call: AnyCall) -> Iterator[None]:
        """What is set while a call's tries run."""
        with self.sizer(call).limited(call), self.attention(call.whole):
            yield

    def attention(self, whole: Batch) -> AbstractContextManager[None]:
        """Ragged batches come in many shapes: no back-end that plans for each of them."""
        return nullcontext() if whole.trimmer is None else attention_without_plans(self.target)

    def training_norms(self, modules: list[nn.Module]) -> list[BatchNorm]:
        if modules != self._modules:
            self._modules, self._norms = modules, norms_in(modules)
        return batch_norms(self._norms)

    def layers(self, call: AnyCall, modules: list[nn.Module], plan: Sequence[Piece]) -> list[BatchNorm]:
        """BatchNorm where a batch is split: told, refused, or the layers whose statistics are to be exact."""
        if len(plan) == 1 or self._batch_norm == "ignore":
            return []
        layers = self.training_norms(modules)
        if not layers or self._batch_norm == "exact":
            return layers
        text = told([piece.size for piece in plan], call.whole.length, len(layers))
        if self._batch_norm == "error":
            raise BatchfitError(text)
        self.sizing.warn_once("batch_norm", text)
        return []

    def mode(self, kind: str) -> str:
        training = any(isinstance(model, nn.Module) and model.training for model in self._models)
        mode = f"{kind},{'train' if training else 'eval'}"
        place = "cpu" if self.target is None else self.target.type
        if torch.is_autocast_enabled(place):
            mode += f",{torch.get_autocast_dtype(place)}"
        return mode

    def rewinding(
        self, opened: PreparedBatch, leaves: list[torch.Tensor], scaler: Any, buffers: Buffers | None = None
    ) -> Rewind:
        """A way back; without `leaves`, not for gradients."""
        if buffers is None:
            buffers = Buffers() if self.buffers.busy else self.buffers  # busy: `map` inside a `backward`, say
        note = "batchfit: raised while the models' buffers were copied"
        run_twice(lambda: buffers.take(opened.tables), device=self.device, note=note)
        more = run_twice(lambda: [take() for take in self.also], device=self.device, note=note)
        return Rewind(leaves, buffers=buffers, scaler=scaler, generators=opened.generators, more=more)
