"""`plan`: a table of settings (rows) by GPUs (columns), from traces. Nothing is downloaded, allocated or run.

Rules:
- A model by its name or configuration is built on the meta device and trained as its task is; a workload is
  planned as it is, and with each change that `explain_memory` would try.
- Each cell is what `predict_batch_size` answers. Speeds are relative (`pure/speed.py`).
- A setting that cannot be traced is a row that says why; the others are there all the same.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, final

import torch
from torch import nn

import batchfit
from batchfit._engine.sharding.sharding import changes_for
from batchfit._engine.trace.trace import WorkloadTraces
from batchfit._engine.workload.reachable import StepReach, reach_of
from batchfit._plan.cache import CellCache
from batchfit._plan.cells import ChangedTraces, bucket_bytes, cells_of
from batchfit._plan.flops import flops_per_sample
from batchfit._plan.layers import Layers
from batchfit._plan.models import caveats_of, shape_of
from batchfit._plan.pure.model_shape import ModelShape
from batchfit._plan.pure.options import PlanGpu, PlanOptions
from batchfit._plan.pure.settings import METHODS, Method, Setting, is_confirmed, settings_for
from batchfit._plan.pure.speed import Cell
from batchfit._plan.pure.table import RowCells, table_of
from batchfit._plan.remedy import cheapest_change
from batchfit._plan.repeated import DepthReaches, RepeatedTraces
from batchfit._plan.sharded import by_count, ranks_of
from batchfit._plan.workloads import InapplicableError, own_changes, workload_of
from batchfit.errors import UntraceableError
from batchfit.results import Plan, PlanRow
from batchfit.workload import Workload, as_workload

Report = Callable[[str, int, int], None]
_HAS_BF16 = (8, 0)  # compute capability


def plan(
    target: str | Workload | Callable[[int], object],
    *,
    gpus: str | Sequence[str],
    seq_len: int | None = None,
    global_batch: int | None = None,
    methods: str | Sequence[str] | None = None,
    prices: str | Sequence[str] | None = None,
    margin: float = 0.02,
    cache: bool = True,
) -> Plan:
    """Which settings fit on which GPU, and which would be the fastest there, before anybody rents one.

    ```python
    table = batchfit.plan("Qwen/Qwen3-8B", gpus=["rtx4090", "h100"], seq_len=2048)
    print(table)
    print(table.best("rtx4090").setting)
    ```

    Args:
        target: a model by its name ("Qwen/Qwen3-8B"), the path of its config.json, or a workload.
        gpus: GPUs to plan for: "rtx4090", or with its memory as "name=24GiB".
        seq_len: tokens per sample; for images the side in pixels. Default: 2048, or what the model takes.
        global_batch: samples per optimizer step over all GPUs, by gradient accumulation. Default: one
            microbatch per GPU.
        methods: only "full", "lora" or "qlora". Default: all.
        prices: what an hour of a GPU costs you ("rtx4090=0.4"); then cells are compared by cost, too.
        margin: the share of each GPU's memory to leave free.
        cache: keep what was traced on disk, and use it again.

    Returns:
        A `Plan`: rows are settings, columns GPUs, cells the largest microbatch per GPU with its peak.

    Raises:
        TargetError: the model is not known, or cannot be built here; names the models that are close.
        ValueError: a GPU is not known, or an option is wrong.
    """
    options = PlanOptions(
        gpus=gpus,
        seq_len=seq_len,
        global_batch=global_batch,
        methods=methods,
        prices=prices,
        margin=margin,
        cache=cache,
    )
    return plan_with(target, options)


def plan_with(
    target: str | Workload | Callable[[int], object],
    options: PlanOptions,
    report: Report | None = None,
    *,
    rows: Collection[str] | None = None,
) -> Plan:
    """Plan as the options say; `report` is called with what is traced, how many are done, and of how many.

    `rows`: names of settings; others are left out.
    """
    begun = time.perf_counter()
    subject: _Model | _Given = (
        _Model(shape_of(target), options) if isinstance(target, str) else _Given(as_workload(target), options)
    )
    found: list[PlanRow | RowCells] = []
    notes: dict[str, None] = {}
    wanted = [one for one in subject.rows() if rows is None or one.name in rows]
    for number, row in enumerate(wanted):
        if report is not None:
            report(row.name, number, len(wanted))
        try:
            cells, more = row.cells()
        except (UntraceableError, InapplicableError) as error:
            found.append(PlanRow(setting=row.name, method=row.method, options=row.options, note=str(error)))
            continue
        notes |= dict.fromkeys(more)
        inside = tuple(cells[at] for at in sorted(cells))
        found.append(RowCells(row.name, row.method, row.options, inside, row.is_confirmed))
    columns, done = table_of(found, options.columns, prices=options.hourly, global_batch=options.global_batch)
    columns = tuple(
        one.model_copy(update={"remedy": subject.remedy(at, done) or one.remedy}) if one.remedy else one
        for at, one in enumerate(columns)
    )
    subject.close()
    caveats = (note for column in options.columns for note in column.gpu.caveats)
    return Plan(
        target=subject.name,
        parameters=subject.parameters,
        seq_len=subject.length,
        global_batch=options.global_batch,
        margin=options.margin,
        columns=columns,
        rows=done,
        unseen=(*subject.notes, *_of_columns(options.columns), *notes, *dict.fromkeys(caveats)),
        traced=subject.traced,
        elapsed_s=time.perf_counter() - begun,
        batchfit_version=batchfit.__version__,
        torch_version=torch.__version__,
    )


@final
@dataclass(frozen=True, slots=True)
class _Row:
    """A setting, and how its cells come about."""

    name: str
    method: str
    options: dict[str, str | int]
    cells: Callable[[], tuple[dict[int, Cell], tuple[str, ...]]]
    is_confirmed: bool = False


@final
class _Model:
    """A model by its shape: rows are the settings of its task."""

    def __init__(self, shape: ModelShape, options: PlanOptions) -> None:
        self.shape = shape
        self.options = options
        self.name, self.parameters = shape.name, shape.parameters
        self.length = options.seq_len or shape.length
        self.notes = list(caveats_of(shape))
        self.traced = 0
        self._flops: dict[tuple[object, ...], float] = {}
        self._layers = Layers(shape)
        versions = [batchfit.__version__, torch.__version__, *map(_version, ("transformers", "diffusers"))]
        self._cache = CellCache([dict(shape.config), self.length, versions], used=options.cache)

    def rows(self) -> Iterator[_Row]:
        missing: dict[str, list[str]] = {}
        kind, wanted = self.shape.kind, self.options.wanted_methods

        def confirms(setting: Setting) -> bool:
            return is_confirmed(setting, self.shape.task) and not any(caveats_of(self.shape))

        several = any(column.count > 1 for column in self.options.columns)
        for one in settings_for(self.shape.task, model_type=kind, methods=wanted, several=several):
            lacking = _lacking(one)
            if lacking:
                missing.setdefault(" ".join(lacking), []).append(one.name)
                continue
            cells = partial(self._cells, one)
            yield _Row(one.name, one.method, _fields(one), cells, confirms(one))
        for names, rows in missing.items():
            self.notes.append(f"{len(rows)} settings need {names}: pip install {names}")

    def remedy(self, at: int, rows: Sequence[PlanRow]) -> str:
        """What to change where nothing fits on a GPU."""
        needed = [(row.cells[at].peak_bytes, row.options) for row in rows if row.cells]
        peak, fields = min(needed, key=lambda one: one[0])
        methods = self.options.wanted_methods
        rest = tuple(one for one in METHODS if one not in methods)
        column = self.options.columns[at]

        def cell_of(setting: Setting, length: int) -> Cell:
            setting = setting if column.count > 1 else replace(setting, shards="")
            key = [self._key(setting, column), length]
            kept = self._cache.get(key)
            if kept is None:
                reaches = self._reaches(setting, length)
                beside = 0 if setting.shards else int(reaches.counted(bucket_bytes))
                with ranks_of(setting.shards, column.count) as layout:
                    found, _ = cells_of(
                        partial(RepeatedTraces, reaches, layout=layout),
                        [column],
                        margin=self.options.margin,
                        flops_per_sample=0.0,
                        bucket_bytes=beside,
                    )
                kept = found[0]
                self._cache.put(key, kept)
            return kept

        return cheapest_change(
            (Setting(**fields), peak),  # type: ignore[arg-type]
            self._settings(rest),
            self.length,
            cell_of,
            margin=self.options.margin,
        )

    def _settings(self, methods: tuple[Method, ...]) -> list[Setting]:
        """The settings of these methods whose packages are installed."""
        return [
            one
            for one in settings_for(self.shape.task, model_type=self.shape.kind, methods=methods)
            if not _lacking(one)
        ]

    def _cells(self, setting: Setting) -> tuple[dict[int, Cell], tuple[str, ...]]:
        found: dict[int, Cell] = {}
        notes: dict[str, None] = {}
        for count, places in by_count(self.options.columns, apart=bool(setting.shards)).items():
            # A single GPU has nobody to share the model with.
            made, more = self._cells_of(setting if count > 1 else replace(setting, shards=""), places, count)
            found |= made
            notes |= dict.fromkeys(more)
        return found, tuple(notes)

    def _cells_of(
        self, setting: Setting, places: list[int], ranks: int
    ) -> tuple[dict[int, Cell], tuple[str, ...]]:
        """The cells of some columns, by their index; sharded ones are of that many ranks."""
        columns = [self.options.columns[at] for at in places]
        keys = [self._key(setting, one) for one in columns]
        kept = {at: self._cache.get(key) for at, key in enumerate(keys)}
        left = [at for at, cell in kept.items() if cell is None]
        found = {places[at]: cell for at, cell in kept.items() if cell is not None}
        if not left:
            return found, self._cache.notes_of(keys[0])
        self.traced += 1
        reaches = self._reaches(setting)
        with ranks_of(setting.shards, ranks) as layout:
            made, notes = cells_of(
                partial(RepeatedTraces, reaches, layout=layout),
                [columns[at] for at in left],
                margin=self.options.margin,
                flops_per_sample=self._flops_of(setting, reaches),
                bucket_bytes=0 if setting.shards else int(reaches.counted(bucket_bytes)),
            )
        for place, cell in made.items():
            self._cache.put(keys[left[place]], cell, notes)
            found[places[left[place]]] = cell
        return found, notes

    def _key(self, setting: Setting, column: PlanGpu) -> list[Any]:
        gpu = column.gpu
        kernels = [gpu.capability, gpu.multiprocessors, gpu.usable_bytes]
        packages = [_version(name) for name in setting.needs]
        ranks = column.count if setting.shards else column.count > 1
        return [asdict(setting), kernels, ranks, self.options.margin, packages]

    def _flops_of(self, setting: Setting, reaches: DepthReaches) -> float:
        """Counted once for settings that compute the same; 4-bit weights are unpacked, then as in LoRA."""
        if setting.computes_as not in self._flops:
            if setting.method == "qlora":
                setting = replace(setting, method="lora")
                reaches = self._reaches(setting)
            counted = reaches.counted(lambda reach: flops_per_sample(reach.workload))
            self._flops[setting.computes_as] = counted
        return self._flops[setting.computes_as]

    def _reaches(self, setting: Setting, length: int | None = None) -> DepthReaches:
        """What the steps of that setting reach; every second block is treated otherwise in some."""
        depths = self._layers.depths(2 if setting.checkpointing == "half" else 1)
        tokens = length or self.length
        return DepthReaches(self.shape, depths, lambda shape: workload_of(shape, setting, tokens))

    def close(self) -> None:
        self._cache.save()


@final
class _Given:
    """A workload of the user's: rows are its step as it is, and with each change that may help."""

    def __init__(self, work: Workload, options: PlanOptions) -> None:
        if options.seq_len is not None or options.methods is not None:
            raise ValueError("seq_len and methods must be left out for a workload, which says them itself")
        self.work = work
        self.options = options
        self.name = (
            getattr(work.step, "__name__", "workload") if work.model is None else type(work.model).__name__
        )
        models = [one for one in work.state if isinstance(one, nn.Module)]
        self.parameters = sum(one.numel() for model in models for one in model.parameters())
        self.length: int | None = None
        self.notes = ["a workload's floating-point operations are not counted, so no speed is known"]
        self.traced = 0

    def rows(self) -> Iterator[_Row]:
        reach = reach_of(self.work)
        for name, how, contexts in own_changes(reach, self.options.columns[0].gpu):
            options: dict[str, str | int] = {"how": how} if how else {}
            yield _Row(name, "as it is", options, lambda contexts=contexts: self._cells(reach, contexts))  # type: ignore[misc]
        if any(column.count > 1 for column in self.options.columns):
            how = "for each block: fully_shard(block); then fully_shard(model), and the optimizer after that"
            yield _Row("FSDP2", "as it is", {"how": how}, lambda: self._sharded(reach))

    def _cells(
        self, reach: StepReach, contexts: tuple[Any, ...], columns: Sequence[PlanGpu] | None = None
    ) -> tuple[dict[int, Cell], tuple[str, ...]]:
        self.traced += 1
        return cells_of(
            lambda rules: ChangedTraces(WorkloadTraces(reach, rules), contexts),
            self.options.columns if columns is None else columns,
            margin=self.options.margin,
            flops_per_sample=0.0,
            bucket_bytes=0 if contexts and columns is not None else bucket_bytes(reach),
        )

    def _sharded(self, reach: StepReach) -> tuple[dict[int, Cell], tuple[str, ...]]:
        found: dict[int, Cell] = {}
        notes: dict[str, None] = {}
        for count, places in by_count(self.options.columns, apart=True).items():
            with ranks_of("fsdp2", count) as layout:
                changes = () if layout is None else changes_for(reach, layout)
                made, more = self._cells(reach, changes, [self.options.columns[at] for at in places])
            found |= {places[at]: cell for at, cell in made.items()}
            notes |= dict.fromkeys(more)
        return found, tuple(notes)

    def remedy(self, at: int, rows: Sequence[PlanRow]) -> str:
        """What the table says: every change that may help is a row already."""
        return ""

    def close(self) -> None:
        """Nothing is kept: a workload's code may change."""


def _of_columns(columns: Sequence[PlanGpu]) -> Iterator[str]:
    """What holds for some of the GPUs whatever the setting."""
    if any(one.count > 1 for one in columns):
        yield (
            "several GPUs: DDP with its gradient buckets, or FSDP2 where a row says so, both never confirmed "
            "on GPUs; the time to exchange gradients and weights is not in the speeds"
        )
    old = [one.gpu.name for one in columns if one.gpu.capability < _HAS_BF16]
    if old:
        names = ", ".join(dict.fromkeys(old))
        yield f"{names}: no bf16 kernels before Ampere; train in fp16 with a GradScaler there"


def _lacking(setting: Setting) -> list[str]:
    """The packages of a setting that are not installed."""
    return [name for name in setting.needs if importlib.util.find_spec(name) is None]


def _fields(setting: Setting) -> dict[str, str | int]:
    return asdict(setting)


def _version(name: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return ""
