"""Fine-tuning on one GPU: the size that was predicted without it, what find answers, and what lasts.

    python benchmarks/stack_gpu.py run --out stack.json     # minutes on an H200; resumes
    python benchmarks/stack_gpu.py page stack.json --to results/stack_h200_202611.md

GPT-2 small (512 tokens) with PEFT's LoRA of rank 16 and with bitsandbytes' 8-bit AdamW; Llama 1B (1,024
tokens) with LoRA, and as QLoRA: 4-bit layers, adapters, checkpointing. Random weights, bf16 autocast, under a
cap (`set_per_process_memory_fraction`). The prediction runs in a process that sees no GPU, beside the
truth's. The truth is that of a loop that keeps its outputs: the first size trains 60 steps without an OOM and
without an allocation retry once settled, the next (0.5 %, at least one sample) does not.

Cases, children and their JSON are those of `prediction_gpu.py`. It needs peft and bitsandbytes.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import time
from pathlib import Path
from typing import Any

from pages import add_page, write_page
from prediction_gpu import Pool, about, peak_errors
from rows import keep

STEPS = 60
# model, precision, cap in GiB
CASES = (
    ("llama1b@qlora", "bf16", 24),
    ("llama1b@lora", "bf16", 40),
    ("gpt2@lora", "bf16", 24),
    ("gpt2@adam8", "bf16", 24),
)
LIBRARIES = ("transformers", "peft", "bitsandbytes")
KEPT = ("size", "outcome", "steps_run", "peak_bytes", "reserved_bytes", "alloc_retries", "soak")


def jobs_of(found: dict[str, Any]) -> list[tuple[Any, float, list[str]]]:
    """What has not run, or failed: (key, GiB of the GPU, arguments of `prediction_gpu.py`)."""
    jobs: list[tuple[Any, float, list[str]]] = []
    for model, precision, cap in CASES:
        case = f"{model}/{precision}/{cap}"
        rest = [model, precision, str(cap), "kept"]
        parts = {"truth": (float(cap), str(STEPS)), "predict": (0.0, "none")}
        for part, (room, last) in parts.items():
            done = found.get(case, {}).get(part)
            if done is None or "error" in done:
                jobs.append(((case, part), room, ["child", part, *rest, last]))
    return jobs


def slimmed(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer without what no page needs."""
    if "trials" in answer:
        return answer | {"trials": [{name: one[name] for name in KEPT} for one in answer["trials"]]}
    if "prediction" in answer:
        whole = answer["prediction"]
        names = ("margin", "trace_s", "elapsed_s", "curve", "peak_phase", "unseen", "torch_version")
        return {k: v for k, v in answer.items() if k != "prediction"} | {name: whole[name] for name in names}
    return answer


def run(out: Path, room_gib: float, deadline_s: float) -> int:
    """Run what is missing, and keep each answer as soon as it is there; how many are missing then."""
    found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    found["about"] = about() | {name: importlib.metadata.version(name) for name in LIBRARIES}

    def note(key: Any, answer: dict[str, Any], seconds: float) -> None:
        case, part = key
        found.setdefault(case, {})[part] = slimmed(answer) | {"seconds": seconds}
        keep(out, found)
        shown = {k: v for k, v in answer.items() if k not in ("trials", "prediction")}
        print(case, part, f"{seconds:.1f} s", json.dumps(shown)[-400:], flush=True)

    Pool(room_gib, 8, deadline_s).run(jobs_of(found), note)
    left = len(jobs_of(found))
    print(f"{left} parts left")
    return left


def page(found: dict[str, Any]) -> str:
    """The dated page; every figure comes from the JSON."""
    libraries = ", ".join(f"{name} {found['about'][name]}" for name in LIBRARIES)
    lines = [
        "# LoRA, QLoRA and 8-bit Adam on an H200: predicted without a GPU, found, and true",
        "",
        f"{found['about']['hardware']}, {libraries}. "
        "Made by `python benchmarks/stack_gpu.py run`, then `page`.",
        f"Truth: in a loop that keeps its outputs the first size trains {STEPS} steps, the second does not.",
        "Predicted: without a margin; in brackets with the default margin of 2 %.",
        "",
        "| model, precision, cap GiB | truth | predicted without a GPU | find | sizes tried | OOMs "
        "| error of the predicted peak |",
        "|---" * 7 + "|",
    ]
    for case, parts in found.items():
        truth, told = parts.get("truth", {}), parts.get("predict", {})
        if case == "about" or "sustained" not in truth:
            continue
        find = truth["find"]
        predicted, off = "not traced", "-"
        if "raw" in told:
            error = told["raw"] / truth["sustained"] - 1
            predicted = f"{told['raw']} {error:+.1%} ({told['default']})"
            errors = peak_errors(told, truth)
            off = f"{min(errors):+.2%} to {max(errors):+.2%}, {len(errors)} trials" if errors else "-"
        share = find["answer"] / truth["sustained"]
        lines.append(
            f"| {case} | {truth['sustained']}, {truth['fails']} | {predicted} | {find['answer']}, "
            f"{share:.1%} of it | {', '.join(map(str, find['sizes']))} | {find['ooms']} | {off} |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("--out", type=Path, default=Path("stack_gpu.json"))
    running.add_argument("--room", type=float, default=125, help="GiB of the GPU for all children together")
    running.add_argument("--deadline-s", type=float, default=200, help="no child begins after that")
    add_page(commands)
    given = parser.parse_args()
    if given.command == "page":
        write_page(given, page)
        return
    begun = time.perf_counter()
    left = run(given.out, given.room, given.deadline_s)
    print(f"{time.perf_counter() - begun:.0f} s")
    if left:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
