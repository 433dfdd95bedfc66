"""What a post-mortem answers: who held the memory when a process was out of it, why, and what to do.

Rules: bytes of live memory are those that were asked for, as PyTorch's snapshots record them; what the file
does not say is None, and named in the caveats (`unseen`).
"""

from __future__ import annotations

import html
from typing import Literal

from pydantic import Field

from batchfit._charts.oom_page import oom_headline, oom_lines
from batchfit._charts.text_charts import as_text
from batchfit.results._base import SCHEMA_VERSION, Result
from batchfit.results._memory import Holder, Moment


class OomCause(Result):
    """One reason for the OOM, with its figures and what to do.

    Attributes:
        name: "other process", "leak", "long batch", "fragmentation", "optimizer state", "optimizer step" or
            "too large".
        evidence: what speaks for it, with figures.
        advice: what to do about it.
    """

    name: str
    evidence: str
    advice: str


class MemoryGrowth(Result):
    """What earlier steps have left behind from one source line.

    Attributes:
        name: the line that allocated it.
        bytes_per_step: bytes that each of those steps left behind.
        steps: how many earlier steps left something behind.
        of_steps: how many were looked at.
        total_bytes: bytes left behind in all.
    """

    name: str
    bytes_per_step: int
    steps: int
    of_steps: int
    total_bytes: int


class LastStep(Result):
    """The step of the OOM, beside the steps before it.

    Attributes:
        number: its number in the recorded history, from 1.
        grew_bytes: what it needed beyond what was live when it began, with the request that failed.
        typical_bytes: the middle of the steps before it.
        longest_bytes: the most that any step before it needed.
        name: the first line that asked for more than in any step before; empty where none did.
        size: what that line asked for.
        typical_size: the most that it had asked for before.
    """

    number: int
    grew_bytes: int
    typical_bytes: int
    longest_bytes: int
    name: str = ""
    size: int = 0
    typical_size: int = 0


class SettingReplay(Result):
    """The allocator replayed under another setting.

    Attributes:
        setting: a value of PYTORCH_CUDA_ALLOC_CONF.
        fits: whether the request that failed is granted with it.
        reserved_bytes: what the allocator would have reserved.
    """

    setting: str
    fits: bool
    reserved_bytes: int


class RankMemory(Result):
    """One process of several, or one device of several, in one line.

    Attributes:
        name: the file, and the device where a file has several.
        rank: the rank, where `record_oom` wrote the file; else None.
        device: number of the device.
        has_oom: whether an OOM is in its history.
        requested_bytes: the request that failed; None without an OOM.
        live_bytes: bytes that were live at the end.
        peak_bytes: the most that was live.
        reserved_bytes: bytes that were reserved at the end.
        most: the line that held the most at the end.
        most_bytes: what it held.
    """

    name: str
    rank: int | None = None
    device: int = 0
    has_oom: bool
    requested_bytes: int | None = None
    live_bytes: int
    peak_bytes: int
    reserved_bytes: int
    most: str = ""
    most_bytes: int = 0


class OomExplanation(Result):
    """What `explain_oom` answers: the post-mortem of an OOM, from PyTorch's memory snapshots.

    Attributes:
        kind: "oom": the kind of result, where a file is read.
        schema_version: version of the JSON schema.
        name: the file that is explained: of several ranks the one that was out of memory first.
        rank: its rank, where `record_oom` wrote it; else None.
        device: number of the device.
        is_virtual: whether it is of `virtual_memory` on a CPU, and not of a GPU.
        entries: entries of its history.
        requested_bytes: the request that failed; None where the history has no OOM.
        requested_at: the user's line that asked for it.
        phase: the phase of that request; empty where its stack does not show it.
        stack: the stack of that request, the outermost function first.
        live_bytes: bytes that were live when it failed, or at the end.
        reserved_bytes: bytes that the allocator had reserved.
        cached_bytes: of these, segments (or whole pages) without a live block, which can be released.
        fragmented_bytes: of these, inactive split blocks: free, but in segments that are in use.
        largest_free_bytes: the largest free block.
        awaiting_bytes: bytes that were freed while another stream might still use them.
        free_bytes: what the GPU reported as free; None without an OOM.
        outside_bytes: what was held outside this process's allocator; None where it is not known.
        total_bytes: the memory that the process could use; None where it is not known.
        short_bytes: bytes that were missing for the request; None where it is not known.
        short_is_most: whether `short_bytes` is an upper limit: a process that is capped does not say where.
        fewer_samples: by how many samples a smaller batch would have had room for the request; None where no
            batch size is known.
        batch_size: the batch size of that step, where it was given or recorded.
        step: the step, where `record_oom` wrote it; else None.
        batch: shapes of the batch, where `record_oom` wrote them.
        peak_bytes: the most that was live in the whole history.
        causes: why, the cause that explains most first.
        kinds: what was live at the end, by kind.
        modules: the same by module, as far as stacks show it.
        lines: the same by source line.
        peak_kinds: what was live at the peak, by kind; empty where the peak is the end.
        peak_modules: the same by module.
        peak_lines: the same by source line.
        growth: what earlier steps have left behind, the most first: leaks.
        steps: steps that were found in the history.
        last_step: the step of the OOM beside those before it; None where there is nothing to compare.
        settings: other settings of the allocator, replayed.
        timeline: live bytes by kind over the history, for a chart.
        reserved_timeline: reserved bytes at the same moments.
        ranks: every file and device, where there are several.
        unseen: caveats, each as a sentence.
        elapsed_s: seconds that it took.
        batchfit_version: version of batchfit that read the file.
        torch_version: version of torch that wrote it, where `record_oom` did.
    """

    kind: Literal["oom"] = "oom"
    schema_version: int = SCHEMA_VERSION
    name: str
    rank: int | None = None
    device: int = 0
    is_virtual: bool = False
    entries: int = 0
    requested_bytes: int | None = None
    requested_at: str = ""
    phase: str = ""
    stack: tuple[str, ...] = ()
    live_bytes: int
    reserved_bytes: int
    cached_bytes: int
    fragmented_bytes: int
    largest_free_bytes: int = 0
    awaiting_bytes: int = 0
    free_bytes: int | None = None
    outside_bytes: int | None = None
    total_bytes: int | None = None
    short_bytes: int | None = None
    short_is_most: bool = False
    fewer_samples: int | None = None
    batch_size: int | None = None
    step: int | None = None
    batch: dict[str, str] = Field(default_factory=dict)
    peak_bytes: int
    causes: tuple[OomCause, ...] = ()
    kinds: tuple[Holder, ...] = ()
    modules: tuple[Holder, ...] = ()
    lines: tuple[Holder, ...] = ()
    peak_kinds: tuple[Holder, ...] = ()
    peak_modules: tuple[Holder, ...] = ()
    peak_lines: tuple[Holder, ...] = ()
    growth: tuple[MemoryGrowth, ...] = ()
    steps: int = 0
    last_step: LastStep | None = None
    settings: tuple[SettingReplay, ...] = ()
    timeline: tuple[Moment, ...] = ()
    reserved_timeline: tuple[int, ...] = ()
    ranks: tuple[RankMemory, ...] = ()
    unseen: tuple[str, ...] = ()
    elapsed_s: float = 0.0
    batchfit_version: str = ""
    torch_version: str = ""

    @property
    def summary(self) -> str:
        """The answer in one sentence."""
        return oom_headline(self)

    def __str__(self) -> str:
        return as_text(oom_lines(self))

    def _repr_html_(self) -> str:
        from batchfit._charts.figures import as_cell
        from batchfit._charts.oom_chart import oom_chart

        text = as_text(oom_lines(self, width=100))
        return f"<pre style='line-height:1.2'>{html.escape(text)}</pre>{as_cell(oom_chart(self))}"
