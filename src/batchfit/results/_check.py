"""What a check answers: whether a step needs more memory than its baseline, and which lines make the change.

Rules: the changes of each list add up to the change of the peak; where a change may come from other
versions, that is said.
"""

from __future__ import annotations

import html
from typing import Literal

from pydantic import Field

from batchfit._charts.check_page import check_headline, check_lines, check_markdown
from batchfit._charts.tables import html_table
from batchfit._charts.text_charts import as_text
from batchfit._units import format_change
from batchfit.results._base import SCHEMA_VERSION, Result
from batchfit.results._memory import Holder


class MemoryChange(Result):
    """What one source line, module or kind of memory holds at the peak, before and now.

    Attributes:
        name: "losses.py:42 cross_entropy", the module's path, or the kind. A line that is gone has no number.
        before_bytes: bytes that it held at the peak of the baseline.
        after_bytes: bytes that it holds now.
        kinds: the change in bytes by kind of memory.
        what: the largest tensor of it ("logits in fp32", "log_softmax in fp32, was bf16").
        code: the text of the line.
        code_before: its text in the baseline, where it was edited; else empty.
        called_from: the lines of the program that lead there, the outermost first.
    """

    name: str
    before_bytes: int
    after_bytes: int
    kinds: dict[str, int] = Field(default_factory=dict)
    what: str = ""
    code: str = ""
    code_before: str = ""
    called_from: tuple[str, ...] = ()

    @property
    def change_bytes(self) -> int:
        """Bytes that it holds more than before; below zero where it holds less."""
        return self.after_bytes - self.before_bytes


class MemoryCheck(Result):
    """What `check_memory` answers: the peak of a step against its baseline, and the lines that changed it.

    Attributes:
        kind: "check": the kind of result, where a file is read.
        schema_version: version of the JSON schema.
        name: the name of what was checked in the baseline: a target, or a test.
        passed: whether all limits are kept.
        failures: why it did not pass, each as a sentence.
        batch_size: the size per process that was checked.
        card: the GPU whose kernels were assumed.
        peak_bytes: peak of live bytes.
        peak_phase: the phase of the peak.
        peak_operation: the operation at the peak.
        baseline_bytes: the peak of the baseline, traced with the versions that are here where
            `versions_bytes` is known; None where it was not compared with one.
        allowed_bytes: the most that the baseline allows; None without one.
        max_peak_bytes: the highest peak that is allowed; None without such a limit.
        budget_bytes: the budget of `largest`; None without one.
        largest: the largest size per process within the budget; None without one.
        baseline_largest: the same in the baseline; None without one.
        reasons: what explains many changes at once ("the batch is another: int64[8, 64], was int64[8, 32]").
        kinds: changes by kind of memory, the largest first.
        modules: changes by module, the largest first.
        lines: changes by source line, the largest first.
        holders: the source lines that hold most of the peak now.
        versions: versions that the memory depends on.
        baseline_versions: the same of the baseline.
        versions_bytes: how much of the peak's change comes from other versions, where the baseline's program
            was traced again with these; None where that is not known. It is no part of the other changes.
        updated: whether this became the baseline.
        unseen: caveats, each as a sentence.
        elapsed_s: seconds that it took.
        batchfit_version: version of batchfit that traced.
        torch_version: version of torch that was traced.
    """

    kind: Literal["check"] = "check"
    schema_version: int = SCHEMA_VERSION
    name: str
    passed: bool
    failures: tuple[str, ...] = ()
    batch_size: int
    card: str
    peak_bytes: int
    peak_phase: str
    peak_operation: str
    baseline_bytes: int | None = None
    allowed_bytes: int | None = None
    max_peak_bytes: int | None = None
    budget_bytes: int | None = None
    largest: int | None = None
    baseline_largest: int | None = None
    reasons: tuple[str, ...] = ()
    kinds: tuple[MemoryChange, ...] = ()
    modules: tuple[MemoryChange, ...] = ()
    lines: tuple[MemoryChange, ...] = ()
    holders: tuple[Holder, ...] = ()
    versions: dict[str, str] = Field(default_factory=dict)
    baseline_versions: dict[str, str] = Field(default_factory=dict)
    versions_bytes: int | None = None
    updated: bool = False
    unseen: tuple[str, ...] = ()
    elapsed_s: float = 0.0
    batchfit_version: str = ""
    torch_version: str = ""

    @property
    def change_bytes(self) -> int | None:
        """How much more the peak is than the baseline's; None without one."""
        return None if self.baseline_bytes is None else self.peak_bytes - self.baseline_bytes

    @property
    def summary(self) -> str:
        """The answer in one sentence."""
        return check_headline(self)

    def to_markdown(self) -> str:
        """This result as Markdown, for a comment on a pull request."""
        return check_markdown(self)

    def __str__(self) -> str:
        return as_text(check_lines(self))

    def _repr_html_(self) -> str:
        rows = [
            (format_change(one.change_bytes, self.baseline_bytes or 0), one.name, one.what, one.code)
            for one in self.lines
        ]
        if not rows:
            return f"<p>{html.escape(self.summary)}</p>"
        return html_table(("change", "line", "what", "code"), rows, caption=self.summary)
