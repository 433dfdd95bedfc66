"""Fine-tuning on a CPU: the live peak that a trace predicts beside that of a real step, and what it costs.

    python benchmarks/stack_cpu.py run --out FILE.json [--rows NAME ...]   # minutes; resumes
    python benchmarks/stack_cpu.py page FILE.json --to FILE.md

Rules: models are small and random (tests/support/stack_cases.py, trl_cases.py, trl_memory.py). A peak is that
of the last of three steps under `virtual_memory`; the prediction is of this CPU's kernels
(tests/support/cpu_truth.py), without a margin. Of TRL's trainers the prediction is that of the step which
`adapt` searches with, the truth that of the plain trainer's own step. Activations that are saved on the host
(`save_on_cpu`) are there for the trace; the real step saves them outside torch, which a CPU can tell from its
own. Each row is a fork of a process that has imported the libraries. Costs: CPU time of `predict_batch_size`,
alternating with that of the same model trained in full with torch's AdamW; for TRL's trainers that of a plain
next-token step. It needs the packages of the extra `stack`.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import multiprocessing
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pages import add_page, write_page
from rows import run_rows
from turns import IN_TURN, about, in_turn, made_by, ratio

Results = dict[str, Any]
Make = Callable[[], Any]
SUPPORT = Path(__file__).parents[1] / "tests" / "support"
LIBRARIES = ("transformers", "peft", "bitsandbytes", "torchao", "trl", "diffusers")
ROUNDS, SIZE = 3, 8
MOST_OFF, MOST_RATIO = 0.01, 2.0  # what is to be shown
BUDGETS = {"TRL": "256MiB"}  # else a trace would make batches of thousands of samples
BUDGET = "1GiB"
# Of a trainer: no size reaches it, whose last microbatch would be the batch, with no gradients beside it.
FAR = 1 << 16
PAGED = "bitsandbytes PagedAdamW8bit"
OFFLOADED = "LoRA, activations saved on the host"
LANGUAGE = (
    *("LoRA", "LoRA, bf16 autocast", "rsLoRA", "DoRA", "LoRA, modules_to_save"),
    *("QLoRA nf4", "QLoRA nf4, double quantisation", "QLoRA nf4, prepare_model_for_kbit_training"),
    *("Linear8bitLt, LoRA", "torchao int8 weight-only, LoRA", "bitsandbytes AdamW8bit", PAGED),
    *("torchao AdamW8bit", "torchao AdamW4bit", "torchao AdamWFp8", OFFLOADED),
)
PICTURES = {  # the adapted model: the same model, trained in full
    "UNet, 16 x 16": "UNet, 16 x 16",
    "UNet with LoRA, 16 x 16": "UNet, 16 x 16",
    "SDXL with LoRA, 32 x 32": "SDXL, 32 x 32",
    "Flux with LoRA, 16 x 16": "Flux, 16 x 16",
    "Flux with LoRA, gradient checkpointing": "Flux, 16 x 16",
}
TRL = ("SFT", "SFT packed", "SFT chunked_nll", "DPO", "KTO", "Reward", "ORPO")
GENERATING = ("GRPO loss", "GRPO loss, entropy", "RLOO loss")
ROWS = (*LANGUAGE, *PICTURES, *(f"TRL {name}" for name in (*TRL, *GENERATING)))


# -- workloads


def of_pictures(name: str) -> Make:
    import stack_cases

    if name == "SDXL, 32 x 32":
        return lambda: stack_cases.denoised(stack_cases.sdxl(), 32)
    return stack_cases.PICTURES[name]


def saved_on_the_host(*, really: bool) -> Any:
    """LoRA whose activations wait on the host: by torch's own context, or in memory that is not torch's."""
    import stack_cases
    import torch
    from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

    def away() -> Any:
        if not really:
            return save_on_cpu(pin_memory=True)
        return saved_tensors_hooks(
            lambda kept: kept.detach().numpy().copy(order="K"), lambda copy: torch.from_numpy(copy).clone()
        )

    def loss(model: Any, batch: Any) -> Any:
        with away():
            return stack_cases.own_loss(model, batch)

    model = stack_cases.with_lora()
    optimizer = stack_cases.adamw([one for one in model.parameters() if one.requires_grad])
    import batchfit

    return batchfit.training(model, optimizer, loss, stack_cases.tokens, keep_outputs=False)


def ways(row: str, kept: list[Any]) -> tuple[Make, Make, Make]:
    """What is predicted, what really runs, and the same model with AdamW."""
    import stack_cases

    if row in PICTURES:
        return of_pictures(row), of_pictures(row), of_pictures(PICTURES[row])
    full = stack_cases.LANGUAGE["full"]
    if row == OFFLOADED:
        return (lambda: saved_on_the_host(really=False)), (lambda: saved_on_the_host(really=True)), full
    if row in LANGUAGE:
        return stack_cases.LANGUAGE[row], stack_cases.LANGUAGE[row], full
    import trl_memory

    name, folder = row.removeprefix("TRL "), Path(tempfile.mkdtemp())
    searched, plain = trl_memory.searched, trl_memory.plain
    if name in GENERATING:
        searched, plain = trl_memory.searched_loss, trl_memory.plain_loss
    return (
        lambda: searched(name, folder, kept),
        lambda: plain(name, folder, kept),
        lambda: next_token(name),
    )


def next_token(name: str) -> Any:
    """A plain step of next tokens, as long as the trainer's own batches, with AdamW."""
    import stack_cases
    import torch
    import trl_memory

    import batchfit

    if name in GENERATING:
        import trl_models

        model, length = trl_models.llama(width=64, layers=3, dtype=torch.float32), 20
    else:
        from trl_cases import model_for

        model, length = model_for("SFT", **trl_memory.SHAPE), 29  # of a prompt and an answer, at most
    optimizer = stack_cases.adamw(model.parameters())

    def batch(n: int) -> dict[str, Any]:
        ids = torch.randint(0, 60, (n, length))
        return {"input_ids": ids, "labels": ids}

    return batchfit.training(model, optimizer, stack_cases.own_loss, batch, keep_outputs=False)


# -- one row


def import_all() -> None:
    """What rows need, before they are forked."""
    sys.path.insert(0, str(SUPPORT))
    warnings.simplefilter("ignore")
    for name in (*LIBRARIES, "stack_cases", "trl_memory", "trl_cases", "trl_models", "cpu_truth"):
        importlib.import_module(name)


def forked(row: str, *, smoke: bool) -> Results:
    """What `one` answers in a process of its own."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(one, (row,), {"smoke": smoke})


def one(row: str, *, smoke: bool) -> Results:
    import cpu_truth
    import torch

    import batchfit
    from batchfit.errors import UntraceableError

    torch.set_num_threads(1)
    kept: list[Any] = []
    wanted, real, full = ways(row, kept)
    workload, truth = cpu_truth.measured(real, SIZE)
    found: Results = {"size": SIZE, "real_peak_bytes": truth.peak, "real_held_bytes": truth.held}
    if row == PAGED:  # managed memory on a GPU, which a CPU has not
        model = workload.model
        found["paged_bytes"] = sum(2 * one.numel() for one in model.parameters() if one.numel() >= 1e5)
    work = wanted()
    try:
        told = cpu_truth.predicted(work, SIZE)
    except UntraceableError as error:
        return {**found, "refused": str(error)}
    found |= {"peak_bytes": told.peak, "held_bytes": told.held}
    budget = BUDGETS.get(row.partition(" ")[0], BUDGET)
    beside = full()

    def predict(one: Any) -> Callable[[], object]:
        return lambda: batchfit.predict_batch_size(one, budget=budget, gpu="rtx4090")

    rounds = 1 if smoke else ROUNDS
    if row.removeprefix("TRL ") in TRL:
        import trl_memory

        work = trl_memory.searched(row.removeprefix("TRL "), Path(tempfile.mkdtemp()), kept, batch=FAR)
    times = in_turn({"case": predict(work), "AdamW": predict(beside)}, rounds, warm_up=1)
    found |= {f"{name}_s": statistics.median(some) for name, some in times.items()}
    return {**found, "ratio": ratio(times, "case", "AdamW"), "rounds": len(times["case"])}


def run(given: argparse.Namespace) -> None:
    import_all()
    told = about("python benchmarks/stack_cpu.py run")
    told["libraries"] = {name: importlib.metadata.version(name) for name in LIBRARIES}
    run_rows(
        given.out,
        told,
        given.rows or ROWS,
        deadline_s=given.deadline_s,
        run=lambda row, _: forked(row, smoke=given.smoke),
        shown=lambda found: {name: found[name] for name in ("error", "refused", "ratio") if name in found},
    )


# -- the page


def off(found: Results) -> float:
    """How far the predicted peak is from the real one, as a share."""
    return float((found["peak_bytes"] + found.get("paged_bytes", 0)) / found["real_peak_bytes"] - 1)


def page(results: Results) -> str:
    libraries = ", ".join(f"{name} {version}" for name, version in results["about"]["libraries"].items())
    lines = [
        "# Fine-tuning on a CPU: predicted peaks, real ones, and what a prediction costs",
        "",
        f"{made_by(results['about'])}; {libraries}. Never on a GPU here: what CUDA's kernels add is measured "
        "in [LoRA, QLoRA and 8-bit Adam on an H200](stack_h200_202611.md).",
        "",
        f"Peaks: bytes that are live at the highest moment of the last of three steps of {SIZE} samples, of "
        "small models with random weights, under `virtual_memory`; the prediction is without a margin. "
        f"Times: `predict_batch_size`, {IN_TURN} Beside it: the same model trained in full with torch's "
        "AdamW; of TRL's trainers, a plain next-token step of the same model.",
        "",
        "| | predicted peak, KiB | real peak, KiB | off | prediction, s | AdamW's, s | ratio (rounds) |",
        "|---" * 7 + "|",
    ]
    done = {row: results[row] for row in ROWS if row in results and "error" not in results[row]}
    for row, found in done.items():
        if "refused" in found:
            lines.append(f"| {row} | {found['refused']} | {found['real_peak_bytes'] / 1024:,.0f} | | | | |")
            continue
        lines.append(
            f"| {row} | {found['peak_bytes'] / 1024:,.0f} | {found['real_peak_bytes'] / 1024:,.0f} "
            f"| {off(found):+.2%} | {found['case_s']:.2f} | {found['AdamW_s']:.2f} "
            f"| {found['ratio']:.2f} ({found['rounds']}) |"
        )
    told = [one for one in done.values() if "refused" not in one]
    within = sum(abs(off(one)) <= MOST_OFF for one in told)
    quick = sum(one["ratio"] <= MOST_RATIO for one in told)
    paged = done.get(PAGED, {}).get("paged_bytes", 0) / 1024
    lines += [
        "",
        f"{within} of {len(done)} peaks are within {MOST_OFF:.0%}; {quick} of {len(done)} predictions take "
        f"at most {MOST_RATIO:.0f} times as long as AdamW's.",
        "",
        f"- Paged state ({paged:,.0f} KiB) is managed memory on a GPU, which a CPU has not: the error leaves "
        "it out.",
        "- Of activations that are saved on the host the real step's copies lie in NumPy's memory.",
        "- What takes longer runs more operations than the model alone: adapters on each layer, DoRA's "
        "norms, codes that are unpacked, checkpoints, two models.",
        "- In three cases no line through two sizes holds, and each size is traced by itself: a packed row's "
        "attention grows with its square, ORPO's `logsumexp` runs sample by sample, and DPO's sizes here lie "
        "where CUDA's backward of an embedding changes its kernel.",
        "- `chunked_nll` is the default of TRL's `SFTTrainer`.",
        "- GRPO and RLOO: the loss phase, with completions of their full length. Generation is measured, not "
        "predicted.",
    ]
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("--out", type=Path, required=True)
    running.add_argument("--rows", nargs="+", choices=ROWS)
    running.add_argument("--deadline-s", type=float, default=3600, help="no row begins after that")
    running.add_argument("--smoke", action="store_true", help="one round")
    add_page(commands)
    given = parser.parse_args()
    if given.command == "page":
        write_page(given, page)
    else:
        run(given)


if __name__ == "__main__":
    main()
