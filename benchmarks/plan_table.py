"""The public page of plans: models by settings by GPUs, each row with the command that makes it.

    python benchmarks/plan_table.py run --out FILE.json [--limit-s 240] [--model NAME]
    python benchmarks/plan_table.py page FILE.json --to docs/reference/plan-table.md

`make plan-page` does both. Rules: a model is stored as soon as it is planned, and a second call goes on with
the others; one that was planned with other versions is planned again. Cells are those of `batchfit plan` with
the command beside them. The page has some of that command's rows, two of a method at most, and says so:
the one that is fastest where it fits, and the one that needs the least memory.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import platform
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pages import write_page
from rows import keep

Results = dict[str, Any]
PAGE = Path(__file__).parents[1] / "docs" / "reference" / "plan-table.md"
RESULTS = Path(__file__).parent / "results" / "plan_table_cpu_202611.json"
GPUS = ("rtx3060", "rtx4060-ti-16gb", "rtx4090", "l40s", "a100-80gb")
PACKAGES = ("batchfit", "torch", "transformers", "peft", "bitsandbytes", "diffusers")
LONGEST = 2048
MODELS = (  # the ones that people ask for first come first
    "Qwen3-8B",
    "Llama-3.1-8B",
    "Llama-3.2-1B",
    "Llama-3.2-3B",
    "Qwen3-0.6B",
    "Qwen3-1.7B",
    "Qwen3-4B",
    "Qwen3-14B",
    "Qwen3-32B",
    "Mistral-7B-v0.3",
    "gemma-2-2b",
    "gemma-2-9b",
    "gemma-3-1b",
    "phi-4",
    "Phi-3-mini",
    "Qwen2.5-0.5B",
    "Qwen2.5-1.5B",
    "Qwen2.5-3B",
    "Qwen2.5-7B",
    "Qwen2.5-14B",
    "Qwen2.5-32B",
    "gpt2",
    "bert-base-uncased",
    "vit-base-patch16-224",
    "resnet-50",
    "whisper-large-v3",
    "t5-base",
    "stable-diffusion-xl-base-1.0",
    "FLUX.1-dev",
    "stable-diffusion-v1-5",
    "Llama-3.1-70B",
    "Qwen2.5-72B",
    "Llama-2-7b",
    "Llama-2-13b",
    "Mistral-Nemo-12B",
    "Mistral-Small-24B",
    "gemma-2-27b",
    "TinyLlama-1.1B",
    "SmolLM2-360M",
    "SmolLM2-1.7B",
    "gpt2-xl",
    "bert-large-uncased",
    "roberta-base",
    "vit-large-patch16-224",
    "whisper-small",
)
# By task: two rows of a method at most.
CAUSAL = (
    "full, bf16, 8-bit AdamW, checkpoint, chunked loss",
    "LoRA r16, bf16, AdamW",
    "LoRA r16, bf16, AdamW, checkpoint, chunked loss",
    "QLoRA r16, nf4, AdamW, checkpoint, chunked loss",
)
OTHERS = (
    "full, autocast, AdamW",
    "full, bf16, 8-bit AdamW, checkpoint",
    "LoRA r16, bf16, AdamW",
    "LoRA r16, bf16, AdamW, checkpoint",
    "QLoRA r16, nf4, AdamW, checkpoint",
)
NEVER_MEASURED = "\N{NO-BREAK SPACE}?"
METHODS = {"full": "Full", "lora": "LoRA", "qlora": "QLoRA"}
KINDS = {
    "causal": "Language models",
    "masked": "Encoders",
    "seq2seq": "Encoder-decoders",
    "image": "Vision",
    "speech": "Speech",
    "diffusion": "Diffusion models",
}


# -- the run


def versions() -> dict[str, str]:
    """What the cells depend on."""
    return {one: importlib.metadata.version(one) for one in PACKAGES}


def length_of(shape: Any) -> int:
    """Tokens per sample (for images: the side in pixels) on the page."""
    return min(int(shape.length), LONGEST)


def planned(name: str) -> Results:
    """One model: its rows and cells."""
    from batchfit._plan.plan import plan_with
    from batchfit._plan.pure.options import PlanOptions
    from batchfit._plan.pure.shapes import shape_named

    shape = shape_named(name)
    options = PlanOptions(gpus=GPUS, seq_len=length_of(shape))
    begun = time.process_time()
    made = plan_with(name, options, rows=CAUSAL if shape.task == "causal" else OTHERS)
    return {
        "name": shape.name,
        "task": shape.task,
        "parameters": made.parameters,
        "seq_len": made.seq_len,
        "gpus": [one.title for one in made.columns],
        "usable": [one.usable_bytes for one in made.columns],
        "rows": [
            {
                "setting": row.setting,
                "method": row.method,
                "note": row.note,
                "cells": [
                    [one.batch_size, one.peak_bytes, one.speed and round(one.speed, 4), one.confirmed]
                    for one in row.cells
                ],
            }
            for row in made.rows
        ],
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cpu_s": round(time.process_time() - begun, 1),
    }


def run(out: Path, models: Sequence[str], limit_s: float | None) -> bool:
    """Plan the models that are not there yet; whether all are."""
    found: Results = json.loads(out.read_text()) if out.exists() else {}
    if found.get("versions") != versions() or found.get("gpus") != list(GPUS):
        found = {}
    found["command"] = "make plan-page"
    found["python"] = platform.python_version()
    found["versions"], found["gpus"] = versions(), list(GPUS)
    kept = found.setdefault("models", {})
    begun = time.monotonic()
    for name in models:
        if name in kept:
            continue
        if limit_s is not None and time.monotonic() - begun > limit_s:
            return False
        kept[name] = planned(name)
        keep(out, found)
        print(f"{name}: {kept[name]['cpu_s']} s of CPU ({len(kept)} of {len(MODELS)})", flush=True)
    return True


# -- the page


def command_of(model: Results, gpus: Sequence[str], method: str) -> str:
    """What makes the cells of a model's method."""
    name = model["name"].rpartition("/")[2]
    return f"batchfit plan {name} --method {method} --seq-len {model['seq_len']} --gpu {','.join(gpus)}"


def best_rows(model: Results, at: int) -> dict[str, int]:
    """By method: the row with the most predicted samples per second on a GPU, of those that fit."""
    found: dict[str, int] = {}
    speeds: dict[str, float] = {}
    for number, row in enumerate(model["rows"]):
        if not row["cells"] or not row["cells"][at][0]:
            continue
        speed = row["cells"][at][2] or 0.0
        if row["method"] not in found or speed > speeds[row["method"]] / 0.99:
            found[row["method"]], speeds[row["method"]] = number, speed
    return found


def smallest(model: Results, method: str) -> str:
    """The first GPU on which a method trains at least one sample."""
    fitting = (at for at in range(len(model["gpus"])) if method in best_rows(model, at))
    if not any(row["method"] == method and row["cells"] for row in model["rows"]):
        return ""
    at = next(fitting, None)
    return "none of these" if at is None else f"{model['gpus'][at]}"


def cell_text(cell: Sequence[Any], *, is_best: bool) -> str:
    """`**19** 40.7 GiB ?`."""
    size, peak, _, confirmed = cell
    if not size:
        return f"- ({peak / 2**30:.0f})"
    text = f"**{size}**" if is_best else str(size)
    return f"{text} · {peak / 2**30:.1f}{'' if confirmed else NEVER_MEASURED}"


def _parameters(count: int) -> str:
    return f"{count / 1e9:.1f}B" if count >= 999_500_000 else f"{count / 1e6:.0f}M"


def _anchor(name: str) -> str:
    return "".join(one if one.isalnum() else "-" for one in name.lower()).strip("-")


def _unit(task: str) -> str:
    return {"image": "pixels", "diffusion": "pixels"}.get(task, "tokens")


def model_lines(model: Results, gpus: Sequence[str]) -> Iterator[str]:
    """The part of the page about one model."""
    name = model["name"]
    short = name.rpartition("/")[2]
    size = f"{_parameters(model['parameters'])} parameters, {model['seq_len']} {_unit(model['task'])}"
    yield from (f"### {short} {{#{_anchor(short)}}}", "", f"`{name}`, {size} per sample.", "")
    heads = (f"{one}<br>{usable / 2**30:.0f} GiB" for one, usable in zip(gpus, model["usable"], strict=True))
    yield f"| setting | {' | '.join(heads)} |"
    yield "|---|" + "---:|" * len(gpus)
    best = [best_rows(model, at) for at in range(len(gpus))]
    for number, row in enumerate(model["rows"]):
        if not row["cells"]:
            yield f"| {row['setting']} | {row['note']} |" + " |" * (len(gpus) - 1)
            continue
        cells = (
            cell_text(cell, is_best=best[at].get(row["method"]) == number)
            for at, cell in enumerate(row["cells"])
        )
        yield f"| {row['setting']} | {' | '.join(cells)} |"
    yield ""
    yield "<!-- not run: these are the commands of the table -->"
    yield "```console"
    methods = dict.fromkeys(row["method"] for row in model["rows"])
    yield from (command_of(model, gpus, one) for one in methods)
    yield "```"
    yield ""


def _marks(models: Sequence[Results]) -> Iterator[str]:
    """What `?` means, and how several GPUs are planned."""
    cells = [cell for one in models for row in one["rows"] for cell in row["cells"]]
    text = "**? means never measured**: the peak was not compared with training of that kind on such a GPU. "
    compared = sum(confirmed for *_, confirmed in cells)
    text += (
        f"{compared} cells were; only those of an `h200` can be. "
        if compared
        else "That holds for every cell of this page. Other peaks were "
        "[compared on an H200](../../benchmarks/results/plan_h200_202611.md). "
    )
    yield text + "2 % of each GPU's memory is left free."
    if any(" x" in gpu for one in models for gpu in one["gpus"]):
        yield ""
        yield (
            "On several GPUs a setting is DDP unless it says FSDP2; neither was compared with GPUs, and the "
            "time to exchange gradients and weights is not in the speeds."
        )


def page(found: Results) -> str:
    """The page, from what is stored."""
    gpus = found["gpus"]
    models = [found["models"][one] for one in MODELS if one in found["models"]]
    dates = sorted({one["date"] for one in models})
    packages = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    counted = sum(len(row["cells"]) for one in models for row in one["rows"])
    minutes = sum(one["cpu_s"] for one in models) / 60
    lines = [
        "# Which GPU for which model?",
        "",
        f"{len(models)} models by settings by {len(gpus)} kinds of GPU: {counted:,} predicted cells. Search "
        "this page (Ctrl+F) for a model, such as Qwen3-8B. Each table stands above the commands that make "
        "it. How to plan for another model, GPU or length: "
        "[which GPU, which settings?](../how-to/plan.md)",
        "",
        "## The smallest GPU that trains it {#smallest}",
        "",
        "With at least one sample per GPU, from left to right: "
        + ", ".join(f"`{one}`" for one in gpus)
        + ". Full training counts with 8-bit AdamW and activation checkpointing, if its table has them. A "
        "model's name leads to its table.",
        "",
        "| model | length | full | LoRA | QLoRA |",
        "|---|---:|---|---|---|",
    ]
    for one in models:
        short = one["name"].rpartition("/")[2]
        link = f"[{short}](#{_anchor(short)})"
        cells = " | ".join(smallest(one, method) for method in METHODS)
        lines.append(f"| {link} | {one['seq_len']} | {cells} |")
    lines += [
        "",
        "## How to read the tables {#read}",
        "",
        "A cell is the largest microbatch per GPU · its predicted peak in GiB. Bold is the fastest row of "
        "its method there, by the time model of [plan](plan.md). `- (32)`: not even one sample fits; it "
        "needs 32 GiB.",
        "",
        *_marks(models),
        "",
        "The page has two rows of a method at most: a fast one, and the one that needs the least memory. "
        "The commands print the others too, speeds, and caveats. An H100 with 80 GB has the memory of an "
        "`a100-80gb`. Of another GPU, such as a T4 or eight H100, add the name: `--gpu t4,h100x8`.",
        "",
        "Without padding; the settings and limits are those of "
        "[which GPU, which settings?](../how-to/plan.md#limits)",
        "",
    ]
    for task, title in KINDS.items():
        of_kind = [one for one in models if one["task"] == task]
        if of_kind:
            lines += [f"## {title}", ""]
        for one in of_kind:
            lines += model_lines(one, gpus)
    lines += [
        "## Made by",
        "",
        f"`{found['command']}` on {when}, with Python {found['python']}, {packages}, on a CPU: no GPU was "
        f"used and nothing was downloaded ({minutes:.0f} minutes of CPU time). The figures: "
        f"`benchmarks/results/{RESULTS.name}`.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("--out", type=Path, default=RESULTS)
    running.add_argument("--model", action="append", choices=MODELS)
    running.add_argument("--limit-s", type=float, help="begin no further model after so many seconds")
    paging = commands.add_parser("page")
    paging.add_argument("results", type=Path, nargs="?", default=RESULTS)
    paging.add_argument("--to", type=Path, default=PAGE)
    given = parser.parse_args()
    if given.command == "page":
        write_page(given, page)
        return
    raise SystemExit(0 if run(given.out, given.model or MODELS, given.limit_s) else 3)


if __name__ == "__main__":
    main()
