"""`batchfit demo`: the main jobs on a small GPT, in well under a minute.

Rules: it is a real search, with real steps and the defaults of `find`, then a real profile and a real
prediction; it says what it is about to do before it does it, and claims nothing that it did not run; without
a GPU the CPU is out of memory like one, and the prediction is for GPUs that are not there. Nothing is
downloaded, and no file is left in the current folder that `--output` and `--report` do not name.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from batchfit._charts.throughput_page import throughput_lines
from batchfit._cli.commands.find import SearchJob, run_job
from batchfit._cli.commands.predict import predict_here, predicted, prediction_lines
from batchfit._cli.commands.profile import point_line
from batchfit._cli.commands.report import check_output
from batchfit._cli.delivery import show
from batchfit._cli.exits import Code, CommandFailed, load_torch
from batchfit._cli.output import check_writable
from batchfit._cli.progress import progress_here, speaks
from batchfit._files import write_atomically
from batchfit._find.pure.options import FindOptions
from batchfit._predict.pure.options import PredictOptions
from batchfit._units import parse_bytes

if TYPE_CHECKING:
    from batchfit.results import Prediction, ThroughputProfile
    from batchfit.workload import Workload

WIDTH, LAYERS, HEADS, TOKENS, VOCABULARY = 128, 4, 4, 128, 1024
CPU_BUDGET = "128MiB"  # a step at the answer takes a fifth of a second on two cores
GPU_BUDGET, SMALL_GPU_BUDGET = "4GiB", "1GiB"
PROFILE_S = 8
OTHER_GPUS = ["rtx4090", "h100"]  # to predict for where there is no GPU
NEXT = "batchfit predict your_file.py:your_function --gpu h100"


def run_demo(*, output: Path, report: Path | None = None) -> Code:
    """Find the largest batch of the small GPT and save the result; then profile, predict and report."""
    check_writable(output, make_folder=True)
    if report is not None:
        check_output(report)
    # Read when torch is loaded. On a busy machine threads that spin while they wait double the time.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    load_torch()
    import torch

    if torch.cuda.is_available():
        device, budget = "cuda", GPU_BUDGET
        if torch.cuda.mem_get_info()[0] < 2 * parse_bytes(GPU_BUDGET):
            budget = SMALL_GPU_BUDGET
        where = f"on the {torch.cuda.get_device_name()}, in {budget} of its memory"
    else:
        device, budget = "cpu", CPU_BUDGET
        where = f"on the CPU, in virtual memory of {budget}, with OOMs like a GPU's"
    job = SearchJob(
        what="the small GPT",
        make=lambda: small_gpt_training(device),
        explain=_bug,
        options=FindOptions(budget=budget, device=device),
        intro=(
            f"Finding the largest batch with which a small GPT (0.9 million parameters, {TOKENS} tokens) "
            f"trains {where}."
        ),
    )
    code = run_job(job, as_json=False, output=output)
    if code == Code.FOUND and speaks():
        profile = _profile_too(device, budget, output)
        predictions = _predict_too(device, budget)
        _report_too([output, profile, *predictions], report)
    return code


def _profile_too(device: str, budget: str, output: Path) -> ThroughputProfile:
    """How fast the sizes up to the answer are: the largest is seldom the best."""
    from batchfit._profile.profile import profile_throughput
    from batchfit.results import FitResult

    largest = FitResult.from_json(output.read_text(encoding="utf-8")).batch_size
    with progress_here() as progress:
        progress.note(f"\nTiming sizes up to {largest}, for about {PROFILE_S} seconds.")
        profile = profile_throughput(
            small_gpt_training(device),
            budget=budget,
            largest=largest,
            time_limit_s=PROFILE_S,
            on_point=lambda point: progress.note(point_line(point)),
        )
    sys.stdout.write("\n")
    show(lambda width, plain: throughput_lines(profile, width=width, plain=plain, picture=True), sys.stdout)
    return profile


def _report_too(results: Sequence[Path | Prediction | ThroughputProfile], report: Path | None) -> None:
    """All answers on one page; nobody asked for a file here, so without a path it is a temporary one."""
    from batchfit._report.files import sources_of
    from batchfit._report.page import page

    where = report or Path(tempfile.mkdtemp(prefix="batchfit-")) / "batchfit-demo.html"
    try:
        write_atomically(where, page(sources_of(results), title="batchfit demo: a small GPT"))
    except OSError as error:
        raise CommandFailed(
            Code.BROKEN, f"the report could not be saved to {where}: {error.strerror or error}"
        ) from None
    sys.stdout.write(f"  {'report':<11}{where}\n")


def _predict_too(device: str, budget: str) -> Sequence[Prediction]:
    """The same question without running it: for this GPU's budget, or for GPUs that are not here."""
    if device == "cuda":
        wanted = [PredictOptions(budget=[budget])]
        where = "with the same memory, from two small runs and a trace"
    else:
        wanted = [PredictOptions(gpu=gpu) for gpu in OTHER_GPUS]
        where = f"for GPUs that are not here ({', '.join(OTHER_GPUS)}), from a trace"
    with progress_here() as progress:
        progress.note(f"\nPredicting it {where}: no step of those sizes is run.")
        predict = partial(predict_here, small_gpt_training(device))
        found = predicted(predict, wanted, progress, "the small GPT")
    sys.stdout.write("\n")
    show(
        lambda width, plain: prediction_lines(found, next_command=NEXT, width=width, plain=plain), sys.stdout
    )
    return found.predictions


def small_gpt_training(device: str) -> Workload:
    """A GPT of 0.9 million parameters, AdamW, random tokens."""
    import torch
    from torch import Tensor, nn
    from torch.nn import functional

    import batchfit

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.to_qkv, self.to_out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.widen, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            qkv = self.to_qkv(self.norm_1(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS))
            query, key, value = qkv.permute(2, 0, 3, 1, 4)
            mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            x = x + self.to_out(mixed.transpose(1, 2).flatten(2))
            out: Tensor = x + self.narrow(functional.gelu(self.widen(self.norm_2(x))))
            return out

    class SmallGPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
            self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
            self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
            self.head.weight = self.tokens.weight

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.tokens(tokens) + self.places.weight
            logits: Tensor = self.head(self.norm(self.blocks(x)))
            return logits

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        logits = model(batch[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    model = SmallGPT().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    return batchfit.training(
        model, optimizer, loss_fn, lambda size: torch.randint(VOCABULARY, (size, TOKENS + 1))
    )


def _bug(error: BaseException) -> CommandFailed:
    """The demo's own code does not fail by itself: whatever comes is shown whole."""
    raise error
