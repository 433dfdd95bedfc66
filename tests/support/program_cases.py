"""Programs that nobody adapted (tests/program/programs): their commands, and the searches for their sizes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import batchfit

PROGRAMS = Path(__file__).parent.parent / "program" / "programs"
WORKLOADS = Path(__file__).with_name("program_workloads.py")


@dataclass(frozen=True)
class ProgramCase:
    """One program: how it is started, and under which virtual memory."""

    name: str
    command: tuple[str, ...]
    budget: str
    source: str = ""  # a file or folder of PROGRAMS; default: the file of the case's name
    prepare: Callable[[Path], None] | None = None
    needs: tuple[str, ...] = ()  # what must be installed beside torch
    writes: tuple[str, ...] = ()  # patterns of what the program itself writes into its folder in its steps

    def make(self, folder: Path) -> None:
        """Put the program and its data into a folder."""
        source = PROGRAMS / (self.source or f"{self.name}.py")
        if source.is_dir():
            shutil.copytree(source, folder, dirs_exist_ok=True)
        else:
            shutil.copy(source, folder)
        if self.prepare is not None:
            self.prepare(folder)

    def by_command(self, folder: Path, *flags: str) -> batchfit.FitResult:
        """Its answer, found by its command."""
        return _found(folder, [*flags, "--budget", self.budget, "--", *self.command])

    def as_workload(self, folder: Path, *flags: str) -> batchfit.FitResult:
        """The answer of the same step as a workload, under the same virtual memory."""
        return _found(folder, [f"{WORKLOADS}:{self.name}", *flags, "--budget", self.budget, "--no-store"])

    def both_exact(self, command: Path, workload: Path) -> tuple[int, int]:
        """Both answers, of searches in these folders that end at the last size that runs."""
        exact = ("--tolerance", "0")
        by_command = self.by_command(command, "--no-store", *exact)
        return by_command.batch_size, self.as_workload(workload, *exact).batch_size


def _found(folder: Path, words: list[str]) -> batchfit.FitResult:
    command = [sys.executable, "-m", "batchfit", "find", "--json", *words]
    bin_first = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": bin_first}
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
    if ran.returncode:
        raise AssertionError(f"{' '.join(command)} ended with {ran.returncode}:\n{ran.stderr}")
    return batchfit.FitResult.from_json(ran.stdout)


def _characters(folder: Path) -> None:
    (folder / "data" / "chars").mkdir(parents=True)
    for split in ("train", "val"):
        tokens = bytes(one for number in range(20_000) for one in (number * 7 % 256, 0))
        (folder / "data" / "chars" / f"{split}.bin").write_bytes(tokens)


def _text(folder: Path) -> None:
    (folder / "train.txt").write_text("To be, or not to be, that is the question. " * 6000)


def _lit(folder: Path) -> None:
    shutil.copy(PROGRAMS / "lit.py", folder)


def _chat(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(250)}
    special = {"[UNK]": 250, "<s>": 251, "</s>": 252, "[PAD]": 253}
    tokenizer = Tokenizer(models.WordLevel({**words, **special}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", bos_token="<s>", eos_token="</s>", pad_token="[PAD]"
    )
    fast.save_pretrained(folder / "model")
    config = LlamaConfig(
        vocab_size=254,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        bos_token_id=251,
        eos_token_id=252,
        pad_token_id=253,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    with (folder / "data.json").open("w") as stream:
        for row in range(3000):
            text = " ".join(f"w{(row * 13 + place) % 250}" for place in range(80))
            stream.write(json.dumps({"text": text}) + "\n")


_SFT = ("--model_name_or_path", "model", "--dataset_name", "data.json", "--output_dir", "{out}")
# Its epochs of large batches are shorter than a stability check, and it saves at the end of each.
_LIGHTNING = ("lightning_logs", "version_*", "checkpoints", "epoch=*.ckpt", "metrics.csv", "hparams.yaml")
CASES = (
    ProgramCase(
        "nanogpt",
        ("python", "train.py", "config/tiny.py", "--batch_size={}"),
        "32MiB",
        source="nanogpt",
        prepare=_characters,
        writes=("out-tiny",),
    ),
    ProgramCase("dotted", ("python", "train.py", "train.batch_size={}"), "48MiB", source="dotted"),
    ProgramCase(
        "run_clm",
        (
            *("python", "run_clm.py", "--do_train", "--per_device_train_batch_size", "{}"),
            *("--output_dir", "{out}", "--max_steps", "5000", "--use_cpu"),
        ),
        "32MiB",
        prepare=_text,
        needs=("transformers", "accelerate"),
    ),
    ProgramCase(
        "lit",
        ("python", "lit.py", "--data.batch_size", "{}"),
        "14MiB",
        needs=("lightning",),
        writes=_LIGHTNING,
    ),
    ProgramCase(
        "accelerated",
        (
            *("accelerate", "launch", "--cpu", "--num_processes", "1", "accelerated.py"),
            *("--batch_size", "{}", "--cpu"),
        ),
        "24MiB",
        needs=("accelerate",),
    ),
    ProgramCase(
        "sft",
        (
            *("python", "sft.py", *_SFT, "--per_device_train_batch_size", "{}", "--max_length", "64"),
            *("--use_cpu", "--bf16", "false", "--gradient_checkpointing", "false", "--dtype", "float32"),
            *("--max_steps", "2000", "--report_to", "none"),
        ),
        "192MiB",  # its loss takes 9 MiB a sample on a CPU
        prepare=_chat,
        needs=("trl", "transformers", "datasets"),
    ),
    ProgramCase(
        "ddp",
        ("torchrun", "--standalone", "--nproc-per-node", "2", "ddp.py", "--batch-size", "{}"),
        "10MiB",
    ),
    ProgramCase("gan", ("python", "gan.py", "--batchSize", "{}"), "6MiB"),
    ProgramCase("evaluate", ("python", "evaluate.py", "--eval-batch-size", "{}"), "24MiB"),
    ProgramCase("generate", ("python", "generate.py", "--batch_size", "{}"), "8MiB", needs=("transformers",)),
    ProgramCase("catches_oom", ("python", "catches_oom.py", "--max-sentences", "{}"), "16MiB"),
    ProgramCase("loader_workers", ("python", "loader_workers.py", "-b", "{}", "-j", "2"), "24MiB"),
)
# With packages that the tests do not install.
MORE = (
    ProgramCase(
        "hydrated", ("python", "train.py", "train.batch_size={}"), "8MiB", source="hydrated", needs=("hydra",)
    ),
    ProgramCase(
        "lit_cli",
        ("python", "lit_cli.py", "fit", "--data.batch_size", "{}"),
        "14MiB",
        prepare=_lit,
        needs=("lightning", "jsonargparse"),
        writes=(*_LIGHTNING, "config.yaml"),
    ),
)
