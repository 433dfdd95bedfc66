"""The seed's examples of a search for each configuration, by the strategies `grow` and `guided`.

    python benchmarks/sweep_seed.py

Each step holds a model and so much for each sample that `most` samples fit, under virtual memory: any CPU
gives the same table. The table in docs/how-to/sweep-details.md is this one, and a test compares them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

import batchfit

SAMPLE_BYTES, MODEL_BYTES = 4096, 65536


class Example(NamedTuple):
    """A trace of the seed, and the largest size that it leaves possible."""

    max_crops: int
    most: int
    seed_tried: str
    seed_used: int


EXAMPLES = {
    "A: the estimate is too small": Example(12, 80, "19, 28, 42, 63", 63),
    "B: it is too large": Example(12, 18, "19 ✗, 9, 14, 16", 16),
    "C: it is about right": Example(12, 27, "19, 28 ✗, 23", 23),
    "max_crops=13": Example(13, 35, "16, 24, 36 ✗", 24),
}


def workload_of(most: int) -> batchfit.Workload:
    """A workload that `most` samples fit in."""
    model = torch.nn.Parameter(torch.zeros(MODEL_BYTES // 4), requires_grad=False)

    def step(size: int) -> None:
        torch.zeros(size, SAMPLE_BYTES // 4)

    return batchfit.Workload(step, state=[model])


def record_of(example: Example, strategy: str) -> Any:
    """The record of one example."""
    with batchfit.virtual_memory("1GiB") as memory:
        beside = memory.allocated_bytes  # what other tensors of the process hold
    result = batchfit.sweep(
        lambda max_crops: workload_of(example.most),
        {"max_crops": [example.max_crops]},
        batch_size=64,
        strategy=strategy,
        estimate={"max_crops": "crops"} if strategy == "grow" else None,
        budget=beside + MODEL_BYTES + example.most * SAMPLE_BYTES,
        steps=2,
        soak_steps=2,
    )
    return result.records[0]


def tried(record: Any) -> str:
    """`19 ✗, 9, 14`: the sizes in order; the soak of a size that had run is no new one."""
    sizes: list[str] = []
    for trial in record.trials:
        text = f"{trial.size}{'' if trial.fits else ' ✗'}"
        if text not in sizes:
            sizes.append(text)
    return ", ".join(sizes)


def table() -> list[str]:
    """The lines of the table, as Markdown."""
    lines = [
        "| example | fits at most | the seed | `grow` | `guided` |",
        "|---|---|---|---|---|",
    ]
    for name, example in EXAMPLES.items():
        cells = [f"{example.seed_tried}: **{example.seed_used}**"]
        for strategy in ("grow", "guided"):
            record = record_of(example, strategy)
            cells.append(f"{tried(record)}: **{record.batch_size_used}**")
        most = f"{example.most}, limited to 64" if example.most > 64 else str(example.most)
        lines.append(f"| {name} | {most} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    print("\n".join(table()))
