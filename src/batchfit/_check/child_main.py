"""The child process of `old_program.py`: traces a target in a copy of the repository.

Rule: a module that was imported from the repository itself is newer than the baseline: that is an error.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from batchfit._check.optimizer_lines import OptimizerLines
from batchfit._check.pure.baseline import baseline_text
from batchfit._check.record import record_of
from batchfit._engine.allocator.gpus import gpu_named
from batchfit._engine.trace.workload import rules_for
from batchfit._engine.workload.reachable import reach_of
from batchfit._engine.workload.target import load_target, make_workload, parse_target
from batchfit._engine.workload.user_errors import is_users


def main(order: dict[str, Any]) -> None:
    """Trace the target of an order, and write its record."""
    target = parse_target(order["target"], order["arguments"])
    made = OptimizerLines()
    with made.noting():
        workload = make_workload(target, load_target(target))
    reach = reach_of(workload)
    rules = rules_for(workload, gpu_named(order["gpu"]), reach)
    found = record_of(reach, rules, order["size"], Path(order["root"]), made=made)
    newer = Path(order["newer"])
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and Path(file).resolve().is_relative_to(newer) and is_users(file, home=None):
            raise SystemExit(f"its module {name} was imported from the repository, not from the copy")
    Path(order["result"]).write_text(baseline_text({order["name"]: found.record}), encoding="utf-8")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
