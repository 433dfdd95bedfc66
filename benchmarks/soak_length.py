"""After how many steps a soak has shown all: models replayed near the end of their memory. No GPU.

    python benchmarks/soak_length.py               # JSON and a dated page in benchmarks/results, two minutes

Each model is traced as for an H200 (bf16 autocast, AdamW) and replayed through the simulated caching
allocator at the largest size that is sustained under each cap and up to 8 % below it, 25 steps each. A soak
ends when `allocator_repeats` (`_engine.trial.pure.soak`) says so; then the replay goes on to 200 steps, to
see that nothing else happens.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections import Counter
from pathlib import Path
from typing import Any

MODELS = ("gpt2", "resnet50", "vit", "t5_small", "convnext", "llama110m", "bert", "unet")
CAPS = (16, 24, 40, 80)
MOST, LASTING = 25, 200
GIB = 2**30
RESULT = Path(__file__).parent / "results" / "soak_length_cpu_202611.json"


class Replay:
    """A training program on a simulated card, step by step."""

    def __init__(self, footprint: Any, size: int, capacity_bytes: int, rules: Any) -> None:
        from batchfit._engine.allocator.caching import CachingAllocator

        self.footprint, self.sizes = footprint, footprint.sizes_at(size)
        self.device, self.capacity_bytes = CachingAllocator(capacity_bytes, rules), capacity_bytes
        self.blocks: dict[int, Any] = {}
        self.steps = 0

    def step(self) -> bool:
        """Whether there was room."""
        from batchfit._engine.allocator.replay import play

        ends = self.footprint.step_ends
        if self.steps < len(ends):
            begin, end = ([0, *ends])[self.steps], ends[self.steps]
        else:
            begin, end = ends[-2], ends[-1]
            for old, new in self.footprint.carried:
                self.blocks[old] = self.blocks.pop(new)
        self.steps += 1
        optional = self.footprint.optional
        return play(self.footprint.events, begin, end, self.sizes, self.device, self.blocks, optional) is None

    def mark(self) -> Any:
        """As `CudaDevice.mark` reads a real one."""
        from batchfit._engine.device.pure.allocator_state import AllocatorState, layout_of

        device = self.device
        every = [*self.blocks.values(), *device.small.blocks.values(), *device.large.blocks.values()]
        small = [one for one in every if one.pool is device.small]
        layout = layout_of(
            ((one.address, one.size, one.live) for one in every if one.pool is device.large),
            ((one.address, one.size, one.live) for one in small),
            small_bytes=sum(one.size for one in small),
            held_bytes=device.allocated_bytes,
            room_bytes=self.capacity_bytes - device.reserved_bytes,
        )
        return AllocatorState(layout, device.retries, self.steps, self.steps)  # each step asks for the same


def ended(replay: Replay) -> tuple[int | None, str]:
    """After how many steps the soak ends, and how the size fares until step 200."""
    from batchfit._engine.trial.pure.soak import allocator_repeats

    marks: list[Any] = []
    for _ in range(MOST):
        if not replay.step():
            return None, f"ran out in step {replay.steps}"
        marks.append(replay.mark())
        if allocator_repeats(marks):
            break
    else:
        return None, "runs on"
    retries = replay.device.retries
    while replay.steps < LASTING:
        if not replay.step():
            return len(marks), f"ran out in step {replay.steps}"
    return len(marks), "lasts" if replay.device.retries == retries else "retries again"


def measure(model: str) -> dict[str, Any]:
    import zoo
    from batchfit._engine.allocator.gpus import gpu_named
    from batchfit._engine.trace.oracle import Oracle, allocator_rules
    from batchfit._engine.trace.trace import uncollected
    from batchfit._engine.trace.workload import rules_for, trace_workload

    workload = zoo.make(model, "bf16", device="cpu")
    rules = rules_for(workload, gpu_named("h200"))
    traced = trace_workload(workload, rules=rules, budget_bytes=24 * GIB)
    oracle = Oracle(traced, allocator_rules(), (0.0, 0.0))
    steps: Counter[str] = Counter()
    fates: Counter[str] = Counter()
    for cap in CAPS:
        largest = oracle.largest(cap * GIB, None)
        if largest is None:
            continue
        with uncollected():
            for size in sorted({max(1, round(largest.size * (1 - share / 100))) for share in range(9)}):
                count, fate = ended(Replay(traced.footprint, size, cap * GIB, oracle.rules))
                steps[str(count)] += 1
                fates[fate] += 1
    return {"steps": dict(steps), "fates": dict(fates)}


def page(results: dict[str, Any]) -> str:
    about, rows = results["about"], {name: results[name] for name in MODELS if name in results}
    lines = [
        "# After how many steps a soak has shown all",
        "",
        f"Made by `python benchmarks/soak_length.py`; a replay, no GPU; torch {about['torch']}, python "
        f"{about['python']}.",
        "",
        "Caps of 16, 24, 40 and 80 GiB; the largest size that is sustained and those up to 8 % below it.",
        "A soak has 25 steps unless the allocator repeats itself before. `until step 200`: how the same",
        "replay goes on.",
        "",
        "| model | sizes | steps of the soak: sizes | until step 200 |",
        "|---|---|---|---|",
    ]
    for name, row in rows.items():
        ends = sorted(row["steps"].items(), key=lambda one: (one[0] == "None", one[0]))
        told = ", ".join(f"{'all 25' if steps == 'None' else steps}: {count}" for steps, count in ends)
        fates = ", ".join(f"{fate}: {count}" for fate, count in row["fates"].items())
        lines.append(f"| {name} | {sum(row['steps'].values())} | {told} | {fates} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    given = parser.parse_args()
    import torch

    results: dict[str, Any] = {"about": {"torch": torch.__version__, "python": platform.python_version()}}
    for model in given.models:
        results[model] = measure(model)
        print(model, results[model], flush=True)
    RESULT.write_text(json.dumps(results, indent=1) + "\n")
    RESULT.with_suffix(".md").write_text(page(results))


if __name__ == "__main__":
    main()
