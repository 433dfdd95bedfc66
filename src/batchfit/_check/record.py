"""Makes the record of a step's peak from a detailed trace: what holds it, by line and module.

Rules: the trace is made for a GPU by its name, on the CPU, whatever is here; so the same program gives the
same record on every machine. What cannot be traced is an `UntraceableError`.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import linecache
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, final

import torch
from torch import nn

import batchfit
from batchfit._check.optimizer_lines import OptimizerLines
from batchfit._check.parameter_lines import DeclaredLines
from batchfit._check.pure.record import (
    HeldRow,
    OptimizerRecord,
    PeakRecord,
    PhaseMoment,
    SourcePlace,
    TracedRecord,
)
from batchfit._engine.allocator.footprint import STATE, CodeLine, Origin, Trace
from batchfit._engine.cuda_model.dispatch import CudaRules
from batchfit._engine.trace.trace import module_classes, trace
from batchfit._engine.workload.reachable import StepReach
from batchfit._engine.workload.user_errors import is_users
from batchfit._explain.pure.holders import Peak, highest_moments, module_path, phase_of, short_operation

_INSTALLED = ("site-packages", "dist-packages")
_LONGEST_CODE = 100
_LARGE_SHARE = 0.02  # of the peak
_MOST_MOMENTS = 6
_HIGH_MOMENT_SHARE = 0.5  # of the peak
_Key = tuple[tuple[str, ...], str]  # a chain, and a kind
_PROJECT_FILES = ("pyproject.toml", ".git", "setup.py")


def project_root(folder: Path) -> Path:
    """The folder that files are named from: the project that `folder` is in."""
    folder = folder.resolve()
    for one in (folder, *folder.parents):
        if any((one / name).exists() for name in _PROJECT_FILES):
            return one
    return folder


def record_of(
    reach: StepReach,
    rules: CudaRules,
    size: int,
    root: Path,
    *,
    budget: tuple[int, int] | None = None,
    made: OptimizerLines | None = None,
) -> TracedRecord:
    """The record of a step at one size; `budget` is (bytes, largest size within them).

    `made` has noted which lines made the optimizers, where they were made under our eyes.
    """
    # The first trace in a process differs by a few operations that are done once.
    trace(reach.workload, size, rules=rules, steps=1, reach=reach)
    traced = trace(reach.workload, size, rules=rules, reach=reach, detailed=True)
    known = reach.workload._parts
    functions = [getattr(known.get("source"), "make", None), known.get("loss_fn"), reach.workload.step]
    return record_of_trace(
        traced, reach.parts, rules.gpu.name, root, budget=budget, made=made, functions=functions
    )


def record_of_trace(
    traced: Trace,
    parts: Sequence[Any],
    gpu_name: str,
    root: Path,
    *,
    budget: tuple[int, int] | None = None,
    made: OptimizerLines | None = None,
    functions: Sequence[Any] = (),
) -> TracedRecord:
    """The record of a detailed trace of `parts`; of `functions`, the first one makes the batch."""
    made = OptimizerLines() if made is None else made
    return _Reader(parts, gpu_name, root, Peak.of(traced), made, functions).record(budget)


@final
@dataclass(slots=True)
class _Reader:
    """Reads a record from a peak."""

    parts: Sequence[Any]
    gpu_name: str
    root: Path
    peak: Peak
    made: OptimizerLines
    functions: Sequence[Any]
    _live: set[int] = field(default_factory=set)
    _chains: dict[int, tuple[str, ...]] = field(default_factory=dict)
    _paths: dict[int, tuple[str, ...]] = field(default_factory=dict)
    _numbers: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    _texts: dict[CodeLine, str] = field(default_factory=dict)
    _packages: set[str] = field(default_factory=set)
    _optimizer_place: str = ""

    def record(self, budget: tuple[int, int] | None) -> TracedRecord:
        optimizer = self._optimizer()
        self._optimizer_place = optimizer.place or optimizer.name
        highest = highest_moments(
            self.peak, key=self._innermost, most=_MOST_MOMENTS, share=_HIGH_MOMENT_SHARE
        )
        self._live = {block for one in highest for block in one.live}
        self._chains = self._lines_of(self._live | self._large())
        self._paths = self._modules_of(self._live)
        budget_bytes, largest = (None, None) if budget is None else budget
        record = PeakRecord(
            batch_size=self.peak.trace.size,
            card=self.gpu_name,
            versions=_versions(self._packages),
            moments=tuple(self._moment(one) for one in highest),
            batch=self._batch(),
            optimizer=optimizer,
            budget_bytes=budget_bytes,
            largest=largest,
        )
        numbers = {text: tuple(sorted(found)) for text, found in self._numbers.items()}
        return TracedRecord(record, self.peak, numbers)

    def _moment(self, one: Peak) -> PhaseMoment:
        origin = one.origin
        lines, modules = (
            self._rows(one, chains, self._largest(chains)) for chains in (self._chains, self._paths)
        )
        event = one.trace.events[one.moment]
        line = str(self._innermost(event if event >= 0 else ~event))
        return PhaseMoment(phase_of(origin), origin.operation, line, one.size, lines, modules)

    def _innermost(self, block: int) -> str:
        """The text of the line that made a block; empty where it has none."""
        lines = self.peak.trace.origins[block].lines
        return self._text(lines[-1]) if lines else ""

    def _lines_of(self, blocks: Iterable[int]) -> dict[int, tuple[str, ...]]:
        declared = DeclaredLines(self._models())
        chains: dict[int, tuple[str, ...]] = {}
        batch = self._batch_place()
        for block in blocks:
            origin = self.peak.trace.origins[block]
            if origin.kind in STATE:
                line = declared.of(origin.module) if origin.module else None
                chains[block] = (self._text(line) if line is not None else _state_name(origin),)
            elif origin.lines:
                chains[block] = tuple(self._text(line) for line in origin.lines)
            elif origin.phase == "optimizer":
                chains[block] = (self._optimizer_place or "optimizer step",)
            else:
                chains[block] = (batch if origin.kind == "batch" else _without_line(origin),)
        return chains

    def _modules_of(self, blocks: Iterable[int]) -> dict[int, tuple[str, ...]]:
        classes = module_classes(self.parts)
        chains: dict[int, tuple[str, ...]] = {}
        for block in blocks:
            origin = self.peak.trace.origins[block]
            path = module_path(origin, classes)
            if path is None:
                others = {"batch": "batch", "optimizer": "optimizer state"}
                chains[block] = (others.get(origin.kind, f"outside modules, {origin.phase}"),)
            else:
                parts = ["*" if part.isdigit() else part for part in path.split(".")] if path else []
                chains[block] = tuple(parts) or (classes.get("", "model"),)
        return chains

    def _rows(
        self, moment: Peak, chains: dict[int, tuple[str, ...]], known: Mapping[_Key, tuple[bool, int, str]]
    ) -> tuple[HeldRow, ...]:
        """What is live at a moment, and what is known besides with 0 bytes."""
        sizes: Counter[_Key] = Counter(dict.fromkeys(known, 0))
        for block in moment.live:
            sizes[chains[block], moment.trace.origins[block].kind] += moment.size_of(block)
        return tuple(HeldRow(*key, sizes[key], known[key][2]) for key in sorted(sizes))

    def _large(self) -> set[int]:
        """Blocks of the last step that are worth a row though they are gone at its highest moments."""
        trace, least = self.peak.trace, _LARGE_SHARE * self.peak.size
        begin = trace.step_ends[-2] if len(trace.step_ends) > 1 else trace.begins
        made = (event for event in trace.events[begin:] if event >= 0)
        return {block for block in made if trace.sizes[block] >= least and trace.origins[block].lines}

    def _largest(self, chains: dict[int, tuple[str, ...]]) -> dict[_Key, tuple[bool, int, str]]:
        """The largest block of each row, of those that are live at a moment where there are some."""
        found: dict[_Key, tuple[bool, int, str]] = {}
        for block, chain in chains.items():
            origin = self.peak.trace.origins[block]
            key = chain, origin.kind
            one = (block in self._live, self.peak.size_of(block), _made(origin))
            found[key] = max(found.get(key, one), one)
        return found

    def _batch(self) -> tuple[str, ...]:
        origins = (self.peak.trace.origins[block] for block in self.peak.live)
        return tuple(sorted({one.tensor for one in origins if one.kind == "batch" and one.tensor}))

    def _batch_place(self) -> str:
        """The line that makes the batch, of a function of the user's; it may make it on the host."""
        make = self.functions[0] if self.functions else None
        code = getattr(inspect.unwrap(make), "__code__", None) if callable(make) else None
        if code is None or not is_users(code.co_filename, home=None):
            return "batch"
        function = code.co_qualname.rpartition("<locals>.")[2]
        return self._text(CodeLine(code.co_filename, code.co_firstlineno, function))

    def _models(self) -> list[nn.Module]:
        return [part for part in self.parts if isinstance(part, nn.Module)]

    def _optimizer(self) -> OptimizerRecord:
        found = [part for part in self.parts if isinstance(part, torch.optim.Optimizer)]
        if not found:
            return OptimizerRecord()
        names = sorted({type(one).__name__ for one in found})
        known = (self.made.of(one, self.functions) for one in found)
        lines = sorted({line for line in known if line is not None})
        groups = [group["params"] for one in found for group in one.param_groups]
        trained = {id(one): one.numel() * one.element_size() for group in groups for one in group}
        sizes, origins = self.peak.trace.sizes, self.peak.trace.origins
        state = sum(sizes[block] for block in self.peak.live if origins[block].kind == "optimizer")
        share = round(state / max(sum(trained.values()), 1), 3)
        place = self._text(lines[0]) if len(lines) == 1 else ""
        return OptimizerRecord(" + ".join(names), place, share)

    def _text(self, line: CodeLine) -> str:
        """The text of a line's place; its number is noted."""
        if line not in self._texts:
            linecache.checkcache(line.file)
            code = " ".join(linecache.getline(line.file, line.number).split())[:_LONGEST_CODE]
            self._texts[line] = SourcePlace(self._file(line.file), line.function, code).text
        text = self._texts[line]
        self._numbers[text].add(line.number)
        return text

    def _file(self, file: str) -> str:
        """How a file is named wherever the project lies."""
        path = PurePath(os.path.realpath(file))
        at = [number for number, part in enumerate(path.parts) if part in _INSTALLED]
        if at:
            inside = path.parts[at[-1] + 1 :]
            self._packages.add(inside[0].removesuffix(".py"))
            return PurePath(*inside).as_posix()
        return path.relative_to(self.root).as_posix() if path.is_relative_to(self.root) else path.name


def _made(origin: Origin) -> str:
    """`to_copy float32[8, 512]`."""
    made = "" if origin.kind in STATE or origin.kind == "batch" else short_operation(origin.operation)
    return f"{made} {origin.tensor}".strip()


def _state_name(origin: Origin) -> str:
    """What weights and the like go by that no line declares."""
    path = origin.module.rpartition(".")[0]
    shown = ".".join("*" if part.isdigit() else part for part in path.split("."))
    return f"{origin.kind} of {shown}" if shown else origin.kind


def _without_line(origin: Origin) -> str:
    operation = short_operation(origin.operation)
    return f"{operation} workspaces" if origin.kind == "workspaces" else f"{operation} in {origin.phase}"


def _versions(packages: Iterable[str]) -> dict[str, str]:
    """Versions that memory depends on: ours, torch's, and of the libraries whose lines hold something."""
    found = {"batchfit": batchfit.__version__, "torch": str(torch.__version__).partition("+")[0]}
    for package in sorted(packages):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return dict(sorted(found.items()))
