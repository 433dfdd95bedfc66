"""What a plan answers: which settings fit on which GPU, and which of them would be the fastest there.

Rules: a size of 0 says that not even one sample fits; speeds are relative to the best row of the same column,
and None where the GPU's peaks are not known; nothing was run, and what was never measured on a GPU is said.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from batchfit._charts.plan_page import as_markup, plan_lines
from batchfit._charts.text_charts import as_text
from batchfit.results._base import SCHEMA_VERSION, Result


class PlanColumn(Result):
    """One kind of GPU of a plan.

    Attributes:
        gpu: its name.
        count: how many of them.
        usable_bytes: what a program's tensors can have on one of them.
        measured: whether batchfit's figures for that GPU were measured on one, not taken from data sheets.
        price: what an hour of one of them costs, as it was given; None where it was not.
        recommended: the index of the row with the most predicted samples per second; None where nothing fits
            or no speed is known.
        remedy: where nothing fits: the change that needs the least; else empty.
    """

    gpu: str
    count: int = 1
    usable_bytes: int
    measured: bool = False
    price: float | None = None
    recommended: int | None = None
    remedy: str = ""

    @property
    def title(self) -> str:
        """`h100 x8`."""
        return self.gpu if self.count == 1 else f"{self.gpu} x{self.count}"


class PlanCell(Result):
    """One setting on one kind of GPU.

    Attributes:
        batch_size: the largest microbatch per GPU; 0 where not even one sample fits.
        peak_bytes: predicted peak of live bytes there; of one sample where nothing fits.
        accumulation: microbatches per GPU and optimizer step, for the global batch size that was asked for.
        speed: predicted samples per second, as a share of the best row of this GPU; None where not known.
        cost: predicted cost per sample, as a multiple of the cheapest cell of the plan; None without prices.
        confirmed: whether peaks of such a setting were compared with real training on that very GPU; speeds
            never were.
    """

    batch_size: int
    peak_bytes: int
    accumulation: int = 1
    speed: float | None = None
    cost: float | None = None
    confirmed: bool = False


class PlanRow(Result):
    """One setting, with a cell per GPU.

    Attributes:
        setting: its name ("LoRA r16, bf16, AdamW, checkpoint").
        method: "full", "lora", "qlora", or "as it is" where a workload was planned.
        options: the setting's fields, for what is to be pasted into a program.
        cells: one per column of the plan.
        note: why the row is empty, where it could not be traced; else empty.
    """

    setting: str
    method: str
    options: dict[str, str | int] = Field(default_factory=dict)
    cells: tuple[PlanCell, ...] = ()
    note: str = ""


class PlanRun(Result):
    """What the planned step really took on this machine (`batchfit plan --apply`).

    Attributes:
        setting: the row that was run: the step as it is.
        gpu: the GPU that was planned.
        device: the device that it ran on.
        planned_batch_size: the largest microbatch by the plan.
        planned_peak_bytes: its peak by the plan.
        batch_size: the largest that `find_batch_size` found.
        peak_bytes: the measured peak at that size; None where the device does not say it.
        fastest: the size that `profile_throughput` recommends.
        samples_per_s: the measured throughput there.
    """

    setting: str
    gpu: str
    device: str
    planned_batch_size: int
    planned_peak_bytes: int
    batch_size: int
    peak_bytes: int | None = None
    fastest: int
    samples_per_s: float


class Plan(Result):
    """What `plan` answers: settings by GPUs. Nothing was downloaded, allocated or run.

    Attributes:
        kind: "plan": the kind of result, where a file is read.
        schema_version: version of the JSON schema.
        target: the model or workload that was planned.
        parameters: its number of parameters; 0 where it is not known.
        seq_len: tokens per sample (for images: the side in pixels); None of a workload.
        global_batch: samples per optimizer step over all GPUs; None: one microbatch per GPU.
        margin: the share of each GPU's memory that was left free.
        columns: the GPUs.
        rows: the settings.
        unseen: caveats, each as a sentence.
        run: what the step really took here; None unless it was asked for (`batchfit plan --apply`).
        traced: how many settings were traced, not read from the cache.
        elapsed_s: seconds that it took.
        batchfit_version: version of batchfit that planned.
        torch_version: version of torch that was traced.
    """

    kind: Literal["plan"] = "plan"
    schema_version: int = SCHEMA_VERSION
    target: str
    parameters: int = 0
    seq_len: int | None = None
    global_batch: int | None = None
    margin: float = 0.0
    columns: tuple[PlanColumn, ...]
    rows: tuple[PlanRow, ...]
    unseen: tuple[str, ...] = ()
    run: PlanRun | None = None
    traced: int = 0
    elapsed_s: float = 0.0
    batchfit_version: str = ""
    torch_version: str = ""

    def best(self, gpu: str) -> PlanRow | None:
        """The recommended setting of a GPU.

        Args:
            gpu: the title of a column ("rtx4090", "h100 x8").

        Returns:
            The row; None where nothing fits there.

        Raises:
            ValueError: the plan has no such GPU.
        """
        column = next((one for one in self.columns if gpu in (one.title, one.gpu)), None)
        if column is None:
            raise ValueError(
                f"gpu must be one of {', '.join(one.title for one in self.columns)}, not {gpu!r}"
            )
        return None if column.recommended is None else self.rows[column.recommended]

    def __str__(self) -> str:
        return as_text(plan_lines(self))

    def _repr_html_(self) -> str:
        return as_markup(self)
