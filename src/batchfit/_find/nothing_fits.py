"""The text of the error where nothing fits: the memory breakdown, and what would make it fit.

Rules: nothing of this is paid before the search has failed; what goes wrong here never hides that it has.
A workload is traced where it is: in this process, or in a child. A program is not: its probe has said what
it held, and to trace a command is to run it again on the CPU (`batchfit explain -- COMMAND`).
"""

from __future__ import annotations

import logging
from typing import Any

from batchfit._engine.trial.in_children import InChildren
from batchfit._engine.trial.in_process import InProcess
from batchfit._engine.trial.trial import TrialRunner
from batchfit._explain.shortage import LIMIT_S, for_error
from batchfit._units import in_use_bytes
from batchfit.results import Trial

log = logging.getLogger("batchfit")

_IN_CHILD = "batchfit._explain.shortage:for_error"
_PATIENCE_S = 2 * LIMIT_S  # for a child, which imports what it needs first


def why_nothing_fits(runs: TrialRunner, last: Trial, budget_bytes: int) -> dict[str, Any]:
    """Keywords of `NothingFitsError` for a search whose smallest size was out of memory."""
    kind = runs.device.name.partition(":")[0]
    known = {"holders": runs.holders(in_use_bytes(last.message) or last.peak_bytes), "further": runs.further}
    if last.outcome not in ("oom", "killed") or kind not in ("cpu", "cuda"):
        return known
    asked = {"size": last.size, "budget_bytes": budget_bytes, "on_cpu": kind == "cpu"}
    found = None
    if isinstance(runs, InProcess):
        found = for_error(runs.work, **asked)
    elif isinstance(runs, InChildren):
        try:
            found = runs.call(_IN_CHILD, asked, timeout_s=_PATIENCE_S)
        except Exception as error:  # noqa: BLE001  that nothing fits is what the user shall see
            log.info("no memory breakdown of the size that failed: %s", str(error))
    return found or known
