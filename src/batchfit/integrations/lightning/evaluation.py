"""Validation within `fit` in microbatches that fit: what a `validation_step` leaves behind is its batch's.

Rules
- A batch runs whole where it fits. After an OOM it runs in microbatches; what has run is not run again.
- What microbatches leave behind (logged values, what they return, what they append to lists of the module)
  becomes what the batch would have left: rows are joined, means weighed by samples. Metrics of torchmetrics
  and sums that the module keeps itself count every sample once.
- The first batch of a loader that is cut is looked at: a value that is no mean over samples (a perplexity,
  an F1 score) cannot be had from microbatches, and is refused by its name.
- A batch that cannot be cut runs as without this callback.
- Under FSDP2 all ranks run the same microbatches, look at values together, and refuse together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, final

import torch

import batchfit
from batchfit.errors import BatchfitError
from batchfit.integrations.lightning.framework import generators_now, part
from batchfit.integrations.lightning.merging import (
    Record,
    detached,
    joined,
    log_merged,
    merged,
    metrics_in,
    recording,
    restore_metrics,
    saved_metrics,
)
from batchfit.integrations.lightning.strategies import is_sharded

_SMALL = 64  # lists of more items than this are not looked into for other lists


_Lists = dict[str, tuple[list[Any], int]]


class _Done:
    """The microbatches of a batch that have run, and what each left behind."""

    def __init__(self, step: Callable[[Any], Any], *, inference: bool) -> None:
        self.step = step
        self.inference, self.gradients = inference, torch.is_grad_enabled()
        self.called = False
        self.micros: list[Any] = []
        self.sizes: list[int] = [1]  # of one microbatch, which is the batch, the size does not matter
        self.grown: list[dict[str, list[Any]]] = []  # what each appended, by the list's name
        self.records: list[Record] = []

    def now(self) -> Record:
        """The record of the microbatch that runs."""
        return self.records[-1]

    def keep(self, count: int) -> None:
        """Forget all but the first microbatches."""
        del self.records[count:], self.micros[count:], self.grown[count:]

    def appended(self) -> dict[str, list[Any]]:
        """What the batch would have appended; of lists with one item per sample, or unlike ones, nothing."""
        if len(self.grown) < 2:
            return {}
        answer: dict[str, list[Any]] = {}
        for name in set(self.grown[0]).intersection(*self.grown[1:]):
            columns = [grown[name] for grown in self.grown]
            counts = [len(column) for column in columns]
            if len(set(counts)) > 1 or counts == self.sizes:
                continue
            rows = [self._merged(list(values)) for values in zip(*columns, strict=True)]
            if not any(row is None for row in rows):
                answer[name] = rows
        return answer

    def _merged(self, values: list[Any]) -> Any:
        if all(type(value) is float for value in values):
            weighed = sum(value * size for value, size in zip(values, self.sizes, strict=True))
            return weighed / sum(self.sizes)
        made = joined([{"item": value} for value in values], self.sizes, self.sizes)["item"]
        return None if isinstance(made, list) else made

    def numbers(self) -> dict[str, torch.Tensor]:
        """The numbers that the batch is left with, by a name to show."""
        records, sizes = self.records, self.sizes
        logs = merged([record.logs for record in records], sizes)
        found = {f"the logged value {one.place[1]!r}": one.value for one in logs}
        found["what it returns"] = joined([record.extra for record in records], sizes, sizes).get("output")
        rows = self.grown[0] if len(self.grown) == 1 else self.appended()
        for name, items in rows.items():
            for place, one in enumerate(items):
                found[f"item {place} that it appends to {name}"] = (
                    torch.tensor(one) if type(one) is float else one
                )
        return {
            name: value
            for name, value in found.items()
            if isinstance(value, torch.Tensor) and value.numel() == 1 and value.is_floating_point()
        }


class _Uncut(Exception):
    """A batch cannot be cut; says why."""


@final
class Evaluation:
    """The `validation_step` of one Trainer, until `end`."""

    def __init__(self, trainer: Any, options: Mapping[str, Any], learned: Mapping[str, Any] | None) -> None:
        self._trainer, self._module = trainer, trainer.lightning_module
        self._metrics = metrics_in(self._module)
        self._sharded = is_sharded(trainer)
        self._now: _Done | None = None  # the batch that runs
        self._microbatcher = batchfit.Microbatcher(trainer.strategy.model, batch_norm="ignore", **options)
        self._microbatcher._also_restores(self._begun)
        if learned is not None:
            self._microbatcher.load_state_dict(learned)
        self._split, self._sync = options["split"], options["sync"]
        self._uncut: dict[int, str] = {}  # loaders whose batches cannot be cut, and why
        self._seen: set[int] = set()  # loaders whose values were looked at
        self._plain: Callable[..., Any] = trainer.strategy.validation_step
        trainer.strategy.validation_step = self._step

    def state_dict(self) -> dict[str, Any]:
        """What was learned about sizes."""
        return self._microbatcher.state_dict()

    def end(self) -> None:
        """Lightning's own way again."""
        vars(self._trainer.strategy).pop("validation_step", None)

    def _step(self, batch: Any, *rest: Any) -> Any:
        if isinstance(batch, Iterator):  # `dataloader_iter`: the step takes its batches itself
            return self._plain(batch, *rest)
        loader = self._trainer._active_loop._results.dataloader_idx or 0
        if loader not in self._uncut:
            try:
                return self._cut(loader, batch, rest)
            except _Uncut as uncut:
                self._uncut[loader] = str(uncut)
            finally:
                self._now = None  # it holds the batch
        return self._as_it_is(batch, rest, self._uncut[loader])

    def _cut(self, loader: int, batch: Any, rest: tuple[Any, ...]) -> Any:
        done = self._now = self._new(lambda micro: self._plain(micro, *rest))
        with recording(self._trainer._active_loop, done.now) as results:
            try:
                self._microbatcher.map(partial(self._micro, done), batch)
            except Exception as error:
                if done.called:
                    raise
                raise _Uncut(str(error)) from None  # refused before anything ran
        if len(done.micros) > 1:
            done.sizes = [self._samples(micro) for micro in done.micros]
        if loader not in self._seen and self._on_any_rank(len(done.micros) > 1):
            self._look(done, self._samples(batch))
            self._seen.add(loader)
        return self._left(results, done)

    def _new(self, step: Callable[[Any], Any]) -> _Done:
        # Parameters that FSDP2 gathers in inference mode could not be trained afterwards.
        return _Done(step, inference=torch.is_inference_mode_enabled() and not self._sharded)

    def _on_any_rank(self, holds: bool) -> bool:
        """Whether it holds here, or under FSDP2 on any rank: what follows has collectives there."""
        if not self._sharded:
            return holds
        flag = torch.tensor(float(holds), device=self._trainer.strategy.root_device)
        return bool(self._trainer.strategy.reduce(flag, reduce_op="max"))

    def _as_it_is(self, batch: Any, rest: tuple[Any, ...], why: str) -> Any:
        try:
            return self._plain(batch, *rest)
        except Exception as error:
            error.add_note(f"batchfit: this batch was not run in microbatches: {why}")
            raise

    def _micro(self, done: _Done, micro: Any) -> None:
        """One microbatch, in the mode that Lightning has called the step in."""
        with torch.inference_mode(done.inference), torch.set_grad_enabled(done.gradients):
            self._run(done, micro)

    def _run(self, done: _Done, micro: Any) -> None:
        lists = _lists(self._module)
        done.called = True
        done.records.append(Record(None))
        output = done.step(micro)
        done.records[-1].extra = {"output": detached(output)}
        done.micros.append(micro)
        grown = {name: detached(kept[length:]) for name, (kept, length) in lists.items()}
        done.grown.append({name: items for name, items in grown.items() if items})

    def _begun(self) -> Callable[[], None]:
        """A microbatch begins; what undoes it, and all after it: nothing of one that fails stays."""
        done = self._now
        assert done is not None
        # `map` runs in a mode of its own, and the step could not write into copies made in it.
        mode = partial(torch.inference_mode, done.inference)
        with mode():
            saved = saved_metrics(self._metrics), _lists(self._module), _plain(self._module)
        count = len(done.micros)

        def restore() -> None:
            done.keep(count)
            with mode():
                self._back(*saved)

        return restore

    def _back(self, saved: Any, lists: _Lists, attributes: dict[str, Any]) -> None:
        restore_metrics(saved)
        vars(self._module).update(attributes)
        for kept, length in lists.values():
            del kept[length:]

    def _samples(self, batch: Any) -> int:
        return int(part(self._trainer, "utilities.data").extract_batch_size(batch))

    def _left(self, results: Any, done: _Done) -> Any:
        """Leave behind what the whole batch would have."""
        records, sizes = done.records, done.sizes
        log_merged(results, records, sizes)
        lists = _lists(self._module)
        for name, items in done.appended().items():
            kept, length = lists[name]
            kept[length - len(items) * len(records) :] = items
        return joined([record.extra for record in records], sizes, sizes).get("output")

    # --- is it a mean?

    def _look(self, done: _Done, samples: int) -> None:
        """Refuse values that two halves of a microbatch give otherwise than the microbatch."""
        sizes = done.sizes if len(done.micros) > 1 else [samples]
        refusal = ""
        if sum(sizes) != samples:
            refusal = (
                f"validation_step is out of memory, and the microbatches of its batch of {samples} samples "
                f"have {sum(sizes)}: give split=, or the validation loader a smaller batch_size"
            )
        self._refuse(refusal)
        largest = max(range(len(sizes)), key=sizes.__getitem__)
        if sizes[largest] < 2 and not self._sharded:
            return
        with self._leaving_nothing():
            once, again = (self._tried(done, done.micros[largest], sizes[largest]) for _ in range(2))
            halves = self._tried(done, done.micros[largest], -(-sizes[largest] // 2))
        for name, value in once.items():
            steady = name in again and _near(value, again[name])  # otherwise the step draws random numbers
            if steady and name in halves and not _near(value, halves[name]):
                refusal = (
                    f"validation_step is out of memory with {samples} samples, and {name} is no mean over "
                    f"samples, so it cannot be had from microbatches of {max(sizes)}: use a metric of "
                    f"torchmetrics for it, or give the validation loader a batch_size of at most {max(sizes)}"
                )
        self._refuse(refusal)

    def _refuse(self, refusal: str) -> None:
        """Raise where there is a reason to; under FSDP2 on all ranks."""
        on_any = self._on_any_rank(bool(refusal))
        if refusal or on_any:
            raise BatchfitError(refusal or "another rank cannot cut its batch of validation: see its error")

    def _tried(self, done: _Done, micro: Any, size: int) -> dict[str, torch.Tensor]:
        """The numbers that a batch leaves, in microbatches of so many samples."""
        own = batchfit.Microbatcher(
            self._trainer.strategy.model,
            batch_norm="ignore",
            microbatch_size=size,
            split=self._split,
            sync=self._sync,
        )
        own._also_restores(self._begun)
        tried = self._now = self._new(done.step)
        with recording(self._trainer._active_loop, tried.now):
            own.map(partial(self._micro, tried), micro)
        tried.sizes = [self._samples(some) for some in tried.micros]
        return tried.numbers()

    @contextmanager
    def _leaving_nothing(self) -> Iterator[None]:
        """What runs inside leaves nothing behind."""
        restore, saved = generators_now(), saved_metrics(self._metrics)
        lists, attributes = _lists(self._module), _plain(self._module)
        tensors = [
            (tensor, tensor.detach().clone())
            for tensor in (*self._module.buffers(), *attributes.values())
            if isinstance(tensor, torch.Tensor)
        ]
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, value in tensors:
                    tensor.copy_(value)
            self._back(saved, lists, attributes)
            restore()


def _near(one: torch.Tensor, other: torch.Tensor) -> bool:
    loose = min(one.element_size(), other.element_size()) < 4
    first, second = one.double().reshape(()), other.double().reshape(())
    return torch.allclose(first, second, rtol=2e-2 if loose else 1e-3, atol=1e-6, equal_nan=True)


def _plain(module: Any) -> dict[str, Any]:
    """The module's own attributes that are no submodules or parameters."""
    return {name: value for name, value in vars(module).items() if not name.startswith("_")}


def _lists(module: Any) -> _Lists:
    """The lists that hang off the module, also in its dicts and small lists, and their lengths."""
    found: _Lists = {}
    met: set[int] = set()
    left = list(_plain(module).items())
    while left:
        name, value = left.pop()
        if id(value) in met:
            continue
        inside: Iterable[tuple[Any, Any]] = ()
        if isinstance(value, list):
            found[name] = (value, len(value))
            inside = enumerate(value) if len(value) <= _SMALL else ()
        else:
            inside = value.items() if isinstance(value, dict) else ()
        if isinstance(value, (list, dict)):
            met.add(id(value))
        left += [(f"{name}[{key!r}]", one) for key, one in inside]
    return found
