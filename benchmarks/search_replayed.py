"""The measured search on replayed models: no GPU, but memory that falls into pieces as on one.

    python benchmarks/search_replayed.py                      # table, JSON and a dated page
    python benchmarks/search_replayed.py --models gpt2 t5_small --caps 24

Each model of the zoo is traced once with fake tensors; a trial of a size is then a replay of its steps in the
model of the caching allocator, with the readings that a real trial has (peaks, rests of split blocks, the
largest block, retries). `search_simulated.py` has smooth curves; here feasibility is as rough as on the card,
where the same searches ran out in the same places (T5-small under 24 GiB ran out three times there and four
here, until the largest block was read).
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from pathlib import Path
from typing import Any

GIB = 2**30
MODELS = ("gpt2", "llama110m", "bert", "distilbert", "t5_small", "mixtral_tiny", "whisper_tiny", "vit")
MODELS += ("swin", "convnext", "resnet50", "mobilenetv2", "unet", "opt125m")
CAPS = (16, 24, 40)
STEPS, SOAK = 3, 25


def footprint_of(model: str, precision: str) -> Any:
    import zoo
    from batchfit._engine.allocator.gpus import card_named
    from batchfit._engine.trace.workload import rules_for, trace_workload

    workload = zoo.make(model, precision, device="cpu")
    return trace_workload(
        workload, rules=rules_for(workload, card_named("h200")), budget_bytes=24 * GIB
    ).footprint


def trial(footprint: Any, size: int, capacity: int, *, soak: bool) -> Any:
    """What a trial of `size` would have reported."""
    from batchfit._engine.allocator.caching import CachingAllocator
    from batchfit._engine.allocator.replay import play
    from batchfit._find.pure.bracket import Observation

    device, sizes, blocks = CachingAllocator(capacity), footprint.sizes_at(size), {}
    ends, pairs = footprint.step_ends, footprint.carried
    retries: list[int] = []
    failed = False
    for step in range(SOAK if soak else STEPS):
        begin, end = (0, ends[0]) if step == 0 else (ends[-2], ends[-1])
        if step > 1:
            for old, new in pairs or ():
                blocks[old] = blocks.pop(new)
        if play(footprint.events, begin, end, sizes, device, blocks, footprint.optional) is not None:
            failed = True
            break
        retries.append(device.retries)
    late = not failed and soak and retries[-1] != retries[len(retries) // 2 - 1]
    held = sum(sizes[n] for n in blocks if footprint.origins[n].kind in ("weights", "optimizer"))
    return Observation(
        size=size,
        fits=not failed and not late,
        soak=soak,
        allocated_bytes=device.peak_allocated_bytes,
        reserved_bytes=device.peak_reserved_bytes,
        split_bytes=device.peak_split_bytes,
        largest_bytes=max(sizes),
        held_bytes=None if failed else held,
        retries=0 if failed else device.retries,
    )


def searched(footprint: Any, capacity: int) -> dict[str, Any]:
    """One search, and the largest size above its answer up to which all sizes are sustained."""
    from batchfit._find.pure.search import Search

    search = Search(budget_bytes=capacity)
    while (request := search.ask()) is not None:
        search = search.tell(trial(footprint, request.size, capacity, soak=request.soak))
    end = answer = search.best or 0
    stride = max(1, answer // 100)
    while trial(footprint, end + stride, capacity, soak=True).fits:
        end += stride
    return {
        "answer": answer,
        "end": end,
        "sizes": [one.size for one in search.observations],
        "failed": [one.size for one in search.observations if not one.fits],
    }


def meets_goals(one: dict[str, Any]) -> bool:
    close = one["answer"] >= min(0.98 * one["end"], one["end"] - 1)
    return bool(close and not one["failed"] and len(set(one["sizes"])) <= 4)


def page(found: dict[str, Any]) -> str:
    rows = list(found["cases"].values())
    shares = [one["answer"] / one["end"] for one in rows if one["end"]]
    lines = [
        "# The measured search on replayed models",
        "",
        f"`python benchmarks/search_replayed.py`, {found['about']}. No prediction, {len(rows)} cases.",
        f"Mean: {statistics.mean(len(one['sizes']) for one in rows):.1f} trials, "
        f"{statistics.mean(len(one['failed']) for one in rows):.2f} failures, "
        f"{statistics.mean(shares):.1%} of the end (lowest {min(shares):.1%}); no failure in "
        f"{sum(not one['failed'] for one in rows)} cases. The end is the largest size up to which all are",
        "sustained, in steps of 1 %, from the answer on. At least 98 % of it or one sample less, no failure",
        f"and at most 4 sizes: {sum(map(meets_goals, rows))} cases.",
        "",
        "| model, precision, cap GiB | answer | end | sizes tried (failed) |",
        "|---|---|---|---|",
    ]
    for key, one in found["cases"].items():
        sizes = ", ".join(f"({size})" if size in one["failed"] else str(size) for size in one["sizes"])
        lines.append(f"| {key} | {one['answer']} | {one['end']} | {sizes} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--caps", nargs="+", type=int, default=list(CAPS))
    parser.add_argument("--to", type=Path, help="where to write the JSON (the page goes beside it)")
    given = parser.parse_args()
    import torch

    cases: dict[str, Any] = {}
    for model in given.models:
        for precision in ("bf16", "fp32"):
            footprint = footprint_of(model, precision)
            if footprint is None:
                continue
            for cap in given.caps:
                key = f"{model}/{precision}/{cap}"
                cases[key] = searched(footprint, cap * GIB)
                print(key, json.dumps(cases[key]), flush=True)
    found = {"about": f"torch {torch.__version__}, {platform.machine()}", "cases": cases}
    whole = not (set(MODELS) - set(given.models))
    to = given.to or (
        Path(__file__).parent / "results" / "search_replayed_cpu_202611.json" if whole else None
    )
    if to is not None:
        to.write_text(json.dumps(found, indent=0) + "\n")
        to.with_suffix(".md").write_text(page(found))


if __name__ == "__main__":
    main()
