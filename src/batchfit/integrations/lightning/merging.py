"""What microbatches logged and returned, as their batch would have.

Rules
- A mean is weighed as the loss is; a sum, a minimum or a maximum is that of the parts.
- Parts with one row a sample are joined in the batch's order of running; what is neither stays a list.
- Mappings keep their type, and a batch that was not cut gives what its step returned, without graphs.
- Metrics of torchmetrics count every sample once, however often a batch was tried.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

Saved = list[tuple[nn.Module, dict[str, Any]]]
_MARKS = ("_update_count", "_computed", "_forward_cache")


class Logged(NamedTuple):
    """One call of `self.log`."""

    place: tuple[str, str]  # the hook and the name
    value: Any
    options: dict[str, Any]


@dataclass
class Record:
    """What one microbatch left behind."""

    weight: Any
    logs: list[Logged] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)


class LogRecorder:
    """Stands in for Lightning's collection of logged values; anything but `log` is the collection's own."""

    def __init__(self, now: Callable[[], Record], results: Any) -> None:
        self._now, self._results = now, results

    def log(self, fx: str, name: str, value: Any, **options: Any) -> None:
        """Keep it with its microbatch."""
        if isinstance(value, torch.Tensor) and not options.get("enable_graph"):
            value = value.detach()
        self._now().logs.append(Logged((fx, name), value, options))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._results, name)


@contextmanager
def recording(loop: Any, now: Callable[[], Record]) -> Iterator[Any]:
    """Inside, what the module logs goes to the record of `now()`; gives the collection it is meant for."""
    results = loop._results
    loop._results = LogRecorder(now, results)
    try:
        yield results
    finally:
        loop._results = results


def log_merged(results: Any, records: Sequence[Record], weights: Sequence[float]) -> None:
    """Log what the records hold as their batch would have logged it."""
    for logged in merged([record.logs for record in records], weights):
        results.log(*logged.place, logged.value, **logged.options)


def merged(parts: Sequence[Sequence[Logged]], weights: Sequence[float]) -> list[Logged]:
    """One call for each name, in the order in which names were first logged."""
    found: dict[tuple[str, str], list[tuple[Logged, float]]] = {}
    for logs, weight in zip(parts, weights, strict=True):
        for logged in logs:
            found.setdefault(logged.place, []).append((logged, weight))
    return [_one([one for one, _ in calls], [weight for _, weight in calls]) for calls in found.values()]


def _one(calls: list[Logged], weights: list[float]) -> Logged:
    last = calls[-1]
    if len(calls) == 1 or not isinstance(last.value, torch.Tensor):  # a metric holds all parts by itself
        return last
    values = torch.stack([torch.as_tensor(call.value) for call in calls])
    sizes = [call.options["batch_size"] for call in calls if call.options.get("batch_size") is not None]
    options = {**last.options, "batch_size": sum(sizes)} if sizes else last.options
    return Logged(last.place, _reduced(values, options.get("reduce_fx"), weights), options)


def _reduced(values: torch.Tensor, how: Any, weights: Sequence[float]) -> torch.Tensor:
    name = how if isinstance(how, str) else getattr(how, "__name__", "mean")
    if name in ("sum", "min", "max"):
        reduced: torch.Tensor = getattr(values, name)()
        return reduced
    share = torch.tensor(weights, dtype=torch.float64)
    share = (share / share.sum().clamp(min=1e-300)).to(values.device)
    kind = values.dtype if values.is_floating_point() else torch.get_default_dtype()
    return (values.to(torch.float64) * share).sum().to(kind)


def joined(
    parts: Sequence[Mapping[str, Any]], sizes: Sequence[int], weights: Sequence[float]
) -> dict[str, Any]:
    """What `training_step` returned beside the loss."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: _joined([part.get(name) for part in parts], sizes, weights) for name in names}


def _joined(values: list[Any], sizes: Sequence[int], weights: Sequence[float]) -> Any:
    if len(values) == 1:
        return values[0]
    if all(isinstance(value, Mapping) for value in values):
        return _like(values[0], joined(values, sizes, weights))
    if not all(isinstance(value, torch.Tensor) for value in values):
        return values
    if all(value.dim() > 0 and len(value) == size for value, size in zip(values, sizes, strict=True)):
        return torch.cat(values)
    if all(value.numel() == 1 for value in values):
        return _reduced(torch.stack([value.reshape(()) for value in values]), "mean", weights)
    return values


def detached(node: Any) -> Any:
    """Without the graphs of its tensors, which would hold a microbatch until its batch has ended.

    What holds none is the same object.
    """
    if isinstance(node, torch.Tensor):
        return node.detach() if node.requires_grad else node
    if isinstance(node, Mapping):
        items = {name: detached(value) for name, value in node.items()}
        return node if all(items[name] is node[name] for name in items) else _like(node, items)
    if not isinstance(node, list | tuple):
        return node
    parts = [detached(value) for value in node]
    if all(part is value for part, value in zip(parts, node, strict=True)):
        return node
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return type(node)(*parts)
    try:
        return type(node)(parts)
    except TypeError:  # a type with arguments of its own
        return parts if isinstance(node, list) else tuple(parts)


def _like(node: Mapping[str, Any], items: dict[str, Any]) -> Any:
    """These items in a mapping of the node's type, which may have attributes; a dict where that cannot be."""
    if type(node) is dict:
        return items
    before = dict(node)
    made: Any = None
    try:
        made = copy.copy(node)
        for name, value in items.items():
            made[name] = value
    except (TypeError, ValueError, LookupError, AttributeError, RuntimeError):  # the type has its own rules
        made = None
    own: Any = node
    for name, value in before.items():
        if own[name] is not value:  # the copy shares what it holds with the user's own
            own[name], made = value, None
    return items if made is None else made


def metrics_in(module: nn.Module) -> list[nn.Module]:
    """Each torchmetrics.Metric in the module, found without importing torchmetrics."""
    return [
        part for part in module.modules() if hasattr(part, "_defaults") and hasattr(part, "_update_count")
    ]


def saved_metrics(metrics: Iterable[nn.Module]) -> Saved:
    """Their states."""
    found: Saved = []
    for part in metrics:
        names: Iterable[str] = getattr(part, "_defaults", ())
        state = {name: _copied(getattr(part, name)) for name in names}
        found.append(
            (part, {**state, **{name: getattr(part, name) for name in _MARKS if hasattr(part, name)}})
        )
    return found


def restore_metrics(saved: Saved | None) -> None:
    """Restore it; the copies stay good for another time."""
    for metric, state in saved or ():
        for name, value in state.items():
            setattr(metric, name, _copied(value))


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return list(value) if isinstance(value, list) else value
