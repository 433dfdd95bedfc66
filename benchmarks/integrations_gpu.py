"""Trainers with and without batchfit on one GPU: the size they train with, the time to find it, throughput.

    python benchmarks/integrations_gpu.py run --out run.json --deadline-s 300   # again: goes on where it was
    python benchmarks/integrations_gpu.py page run.json --to page.md            # every figure is in the JSON
    python benchmarks/integrations_gpu.py run --smoke --out smoke.json          # a tiny model, no GPU

GPT-2 small from its configuration (random weights, 512 tokens, bf16 autocast, AdamW) under a cap of 24 GiB
(`set_per_process_memory_fraction`). Each row of `CASES` is a fresh process: a real Trainer finds its batch
size, or is given one, and then trains 30 batches. `find_s` is the time from the start of `fit` to the first
batch of training, `samples_per_s` is over the last 20 batches, and a row whose training ran out says so.
Hugging Face's rows (`integrations_hf.py`) are asked for a batch of 64 sequences an optimizer step.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pages import add_page, write_page
from rows import Results, in_child, run_rows

GIB = 2**30
CAP_GIB, SMOKE_BYTES = 24, 3 * 2**20
BATCHES, WARMUP = 30, 10
FITS, TOO_LARGE = 16, 512  # given sizes: one that fits, and one that does not by far


@dataclass(frozen=True)
class Case:
    """One row: which framework, what is done, and a function that does it."""

    framework: str
    what: str
    run: Callable[[bool], Results]


def capped(smoke: bool) -> AbstractContextManager[Any]:
    """The cap, for whoever runs in this process."""
    if smoke:
        import batchfit

        return batchfit.virtual_memory(SMOKE_BYTES)
    import torch

    total_bytes = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(CAP_GIB * GIB / total_bytes)
    return nullcontext()


def model_and_dataset(smoke: bool) -> tuple[Any, Any]:
    """GPT-2 small and 65,536 samples of its tokens; a tiny one and 4,096 for a CPU."""
    import torch
    import transformers

    torch.manual_seed(0)
    options: dict[str, Any] = {}
    if smoke:
        options = {"n_layer": 1, "n_head": 1, "n_embd": 8, "vocab_size": 64, "n_positions": 8}
    config = transformers.GPT2Config(use_cache=False, **options)
    length, samples = (8, 4096) if smoke else (512, 65536)

    class Tokens(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return samples

        def __getitem__(self, index: int) -> Any:
            ids = (torch.arange(length) * 31 + index) % config.vocab_size
            return {"input_ids": ids, "labels": ids}

    return transformers.GPT2LMHeadModel(config), Tokens()


# --- Lightning


def lightning(make_callbacks: Callable[[], list[Any]], size: int) -> Callable[[bool], Results]:
    """A `fit` with these callbacks, from that size on."""

    def run(smoke: bool) -> Results:
        import lightning.pytorch as pl
        import torch

        model, dataset = model_and_dataset(smoke)
        start = min(size, 256) if smoke else size

        class Module(pl.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.model, self.batch_size = model, start
                self.ends_s: list[float] = []
                self.seen: list[int] = []
                self.first_s = 0.0

            def train_dataloader(self) -> Any:
                return torch.utils.data.DataLoader(dataset, batch_size=self.batch_size)

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                return self.model(**batch).loss

            def configure_optimizers(self) -> Any:
                return torch.optim.AdamW(self.parameters(), lr=1e-4)

        class Clock(pl.Callback):
            """Sees training, and no trial: callbacks are put aside in those."""

            def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
                module.first_s = module.first_s or time.perf_counter()

            def on_train_batch_end(self, trainer: Any, module: Any, *rest: Any) -> None:
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                module.ends_s.append(time.perf_counter())
                module.seen.append(len(rest[1]["input_ids"]))

        module, callbacks = Module(), make_callbacks()
        count = 6 if smoke else BATCHES
        trainer = pl.Trainer(
            callbacks=[*callbacks, Clock()],
            max_epochs=1,
            limit_train_batches=count,
            precision="32-true" if smoke else "bf16-mixed",
            accelerator="cpu" if smoke else "gpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        begun_s, died = time.perf_counter(), ""
        with capped(smoke):
            try:
                trainer.fit(module)
            except (torch.OutOfMemoryError, RuntimeError) as error:
                died = str(error).splitlines()[0][:120]
        warm = 2 if smoke else WARMUP
        timed = module.seen[warm:]
        found: Results = {
            "batch_size": trainer.train_dataloader.batch_size
            if trainer.train_dataloader
            else module.batch_size,
            "find_s": round(module.first_s - begun_s, 2) if module.first_s else None,
            "batches": len(module.seen),
            "samples_per_s": round(sum(timed) / (module.ends_s[-1] - module.ends_s[warm - 1]), 1)
            if timed
            else None,
            "peak_gib": round(torch.cuda.max_memory_allocated() / GIB, 2)
            if torch.cuda.is_available()
            else None,
            "died": died,
        }
        for callback in callbacks:
            if hasattr(callback, "retries"):
                found["retries"] = callback.retries
            if getattr(callback, "result", None) is not None:
                found["trials"] = len(callback.result.trials)
                found |= tried(callback.result)
        return found

    return run


def tried(fit: Any) -> Results:
    """What our finder tried: size, outcome, whether it was a soak, and what it read; and why it ended."""
    read = ("reserved_bytes", "split_bytes", "largest_bytes", "held_bytes", "alloc_retries")
    return {
        "sizes_tried": [
            [
                one.size,
                one.outcome,
                one.peak_bytes,
                {"soak": one.soak, **{name: getattr(one, name) for name in read}},
            ]
            for one in fit.trials
        ],
        "stopped_because": fit.stopped_because,
    }


def _ours(name: str) -> Callable[[], list[Any]]:
    def make() -> list[Any]:
        from batchfit.integrations import lightning as ours

        return [getattr(ours, name)()]

    return make


def _theirs(mode: str) -> Callable[[], list[Any]]:
    def make() -> list[Any]:
        from lightning.pytorch.callbacks import BatchSizeFinder

        return [BatchSizeFinder(mode=mode)]

    return make


# --- Hugging Face


def hugging_face(variant: str) -> Callable[[bool], Results]:
    """A `train()` of that variant."""

    def run(smoke: bool) -> Results:
        from integrations_hf import VARIANTS, run_case

        found = run_case(variant, smoke=smoke)
        asked = VARIANTS[variant]["per_device_train_batch_size"]
        if found["outcome"] != "trained":
            nothing: Results = {"find_s": None, "samples_per_s": None, "peak_gib": None, "batches": 0}
            return {**nothing, "batch_size": asked, "died": found["message"][:120], "whole": found}
        peak = found["peak_bytes"]
        return {
            "batch_size": found["batch_size"],
            "microbatch_size": found["microbatch_size"],
            "find_s": round(found["until_first_step_s"], 2),
            "samples_per_s": round(found["batch_size"] / found["step_s"], 1),
            "peak_gib": round(peak / GIB, 2) if peak else None,
            "batches": "all",
            "attempts": found["attempts"],
            "died": "",
            "whole": found,
        }

    return run


CASES: dict[str, Case] = {
    "lightning/theirs/power": Case("Lightning", "its BatchSizeFinder, power", lightning(_theirs("power"), 2)),
    "lightning/theirs/binsearch": Case(
        "Lightning", "its BatchSizeFinder, binsearch", lightning(_theirs("binsearch"), 2)
    ),
    "lightning/ours/find": Case(
        "Lightning", "batchfit's BatchSizeFinder", lightning(_ours("BatchSizeFinder"), 2)
    ),
    "lightning/plain/fits": Case("Lightning", f"nothing, a batch of {FITS}", lightning(list, FITS)),
    "lightning/ours/fits": Case(
        "Lightning", f"OomProofTraining, a batch of {FITS}", lightning(_ours("OomProofTraining"), FITS)
    ),
    "lightning/plain/too_large": Case(
        "Lightning", f"nothing, a batch of {TOO_LARGE}", lightning(list, TOO_LARGE)
    ),
    "lightning/ours/too_large": Case(
        "Lightning",
        f"OomProofTraining, a batch of {TOO_LARGE}",
        lightning(_ours("OomProofTraining"), TOO_LARGE),
    ),
    "hf/trainer": Case("HF Trainer", "nothing, 8 x 8 accumulated", hugging_face("trainer")),
    "hf/whole": Case("HF Trainer", "nothing, 64 at once", hugging_face("trainer_whole")),
    "hf/auto": Case("HF Trainer", "auto_find_batch_size from 64", hugging_face("auto_find_batch_size")),
    "hf/ours": Case("HF Trainer", "batchfit's adapt(trainer), 8 x 8", hugging_face("batchfit")),
}


# --- all rows


def about(given: argparse.Namespace) -> Results:
    import torch

    on_gpu = torch.cuda.is_available() and not given.smoke
    return {
        "device": torch.cuda.get_device_name(0) if on_gpu else "CPU (a tiny model)",
        "cap": f"{CAP_GIB} GiB" if on_gpu else f"{SMOKE_BYTES / 2**20:g} MiB",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "frameworks": {name: _version(name) for name in ("lightning", "transformers", "accelerate")},
        "command": "python benchmarks/integrations_gpu.py run" + (" --smoke" if given.smoke else ""),
    }


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def run_all(given: argparse.Namespace) -> None:
    run_rows(
        given.out,
        about(given),
        given.rows or list(CASES),
        deadline_s=given.deadline_s,
        run=lambda row, _: in_child(__file__, row, smoke=given.smoke),
    )


def page(results: Results) -> str:
    """The dated page: every figure comes from the JSON."""
    told = results["about"]
    versions = ", ".join(f"{name} {version}" for name, version in told["frameworks"].items())
    lines = [
        f"# Trainers with and without batchfit on a {told['device']}",
        "",
        f"Made by `{told['command']}`; torch {told['torch']}, python {told['python']}, {versions}.",
        "",
        f"GPT-2 small (512 tokens, bf16 autocast, AdamW) under a cap of {told['cap']}, each row in a fresh",
        "process. `to find` is the time from the start of `fit` to the first batch of training.",
        "",
        "| Trainer | with | batch size | to find | samples/s | peak | batches trained |",
        "|---|---|---|---|---|---|---|",
    ]
    for row, case in CASES.items():
        found = results.get(row)
        if found is None or "error" in found:
            continue
        retried = f", {found['retries']} retries" if found.get("retries") else ""
        trials = f" ({found['trials']} trials)" if found.get("trials") else ""
        ended = f"{found['batches']}{retried}" + (f", then: {found['died']}" if found["died"] else "")
        micro = f" in microbatches of {found['microbatch_size']}" if "microbatch_size" in found else ""
        lines.append(
            f"| {case.framework} | {case.what} | {found['batch_size']}{micro} "
            f"| {_shown(found['find_s'], ' s')}{trials} "
            f"| {_shown(found['samples_per_s'])} | {_shown(found['peak_gib'], ' GiB')} | {ended} |"
        )
    lines += [
        f"\n{row}: {results[row]['error'].splitlines()[-1]}"
        for row in CASES
        if "error" in results.get(row, {})
    ]
    return "\n".join(lines) + "\n"


def _shown(value: float | None, unit: str = "") -> str:
    return "-" if value is None else f"{value:.1f}{unit}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("--out", type=Path, required=True)
    running.add_argument("--rows", nargs="*")
    running.add_argument("--deadline-s", type=float, default=float("inf"))
    single = commands.add_parser("one")
    single.add_argument("row", choices=list(CASES))
    for command in (running, single):
        command.add_argument("--smoke", action="store_true")
    add_page(commands)
    given = parser.parse_args()
    if given.command == "run":
        run_all(given)
    elif given.command == "one":
        print(json.dumps(CASES[given.row].run(given.smoke)))
    else:
        write_page(given, page)


if __name__ == "__main__":
    main()
