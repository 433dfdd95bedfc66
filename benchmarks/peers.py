"""The finders side by side: each called as its documentation says, all on the same step.

    program = Program(zoo.make("gpt2", "bf16"), cap_bytes=24 * 2**30)
    search = FINDERS["accelerate"].prepare(program)     # imports and set-up, not timed
    answer = search()                                   # timed; program.sizes and program.ooms say the rest

Rules: a trial is three steps wherever the peer leaves that to its user. What a peer frees, collects and puts
back is its own business, and its defaults stay unless `called` says otherwise; where we depart from them, it
is to the peer's advantage. Nothing of one peer is imported for another.
"""

from __future__ import annotations

import gc
import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn

import batchfit
from batchfit._engine.device.oom import is_oom

STEPS = 3
Search = Callable[[], int | None]


@dataclass
class Program:
    """What is to be sized, and the record of what a finder did with it."""

    workload: batchfit.Workload
    cap_bytes: int
    sizes: list[int] = field(default_factory=list)
    ooms: int = 0
    trials: list[dict[str, Any]] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        device: torch.device = next(self.workload.model.parameters()).device
        return device

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    @contextmanager
    def counted(self, size: int) -> Iterator[None]:
        """A block at that size; the same size again is the same trial."""
        if self.sizes[-1:] != [size]:
            self.sizes.append(size)
        try:
            yield
        except Exception as error:
            self.ooms += is_oom(error)
            raise

    def trial(self, size: int) -> None:
        with self.counted(size):
            for _ in range(STEPS):
                self.workload.step(size)
            self.synchronize()


@dataclass(frozen=True)
class Finder:
    prepare: Callable[[Program], Search]
    called: str
    package: str = "batchfit"  # the distribution whose version is reported

    @property
    def is_ours(self) -> bool:
        return self.package == "batchfit" and self.prepare is not bisection


def ours(program: Program, *, predict: bool) -> Search:
    find = batchfit.find_batch_size

    def search() -> int:
        begun, ends = time.perf_counter(), list[float]()
        fit = find(
            program.workload,
            predict=predict,
            on_trial=lambda trial, budget_bytes: ends.append(time.perf_counter() - begun),
        )
        program.sizes = [trial.size for trial in fit.trials]
        program.ooms = sum(not trial.fits for trial in fit.trials)
        program.trials = [
            {**trial.model_dump(mode="json"), "ended_s": ended_s}
            for trial, ended_s in zip(fit.trials, ends, strict=True)
        ]
        return fit.batch_size

    return search


def bisection(program: Program) -> Search:
    def fits(size: int) -> bool:
        fitted = True
        try:
            program.trial(size)
        except torch.OutOfMemoryError:
            fitted = False
        gc.collect()
        torch.cuda.empty_cache()
        return fitted

    def search() -> int:
        low, high = 0, 1
        while fits(high):
            low, high = high, high * 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    return search


def accelerate(program: Program, *, start: int) -> Search:
    from accelerate.utils import find_executable_batch_size

    @find_executable_batch_size(starting_batch_size=start)
    def attempt(batch_size: int) -> int:
        program.trial(batch_size)
        return batch_size

    search: Search = attempt
    return search


def toma(program: Program) -> Search:
    from toma import toma as decorators

    @decorators.batch(initial_batchsize=512)
    def attempt(batchsize: int) -> int:
        program.trial(batchsize)
        return batchsize

    search: Search = attempt
    return search


def torch_max_mem(program: Program) -> Search:
    from torch_max_mem import maximize_memory_utilization

    @maximize_memory_utilization()
    def attempt(batch_size: int) -> int:
        program.trial(batch_size)
        return batch_size

    return lambda: int(attempt(batch_size=4096))


def batch_finder(program: Program) -> Search:
    from batch_finder import find_max_minibatch

    class Steps(nn.Module):
        """A batch of n numbers in, three steps at n: the peer wants a module, and runs its backward."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            program.trial(len(x))
            return x.sum()

    steps, device = Steps(), program.device
    # Its guide reads the card's size, which under a cap is not what there is.
    known = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    told = {name: getattr(known, name) for name in dir(known) if not name.startswith("_")}
    card = SimpleNamespace(**{**told, "total_memory": program.cap_bytes})

    def search() -> int | None:
        with mock.patch.object(torch.cuda, "get_device_properties", return_value=card):
            found = find_max_minibatch(
                lambda: steps, input_shapes=(-1, 1), device=device, delay=0.0, use_subprocess=False
            )
        return None if found is None else int(found[0])

    return search


def lightning(program: Program, *, mode: str) -> Search:
    import lightning.pytorch as pl
    from lightning.pytorch.tuner import Tuner
    from torch.utils.data import DataLoader

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    work, parts = program.workload, program.workload._parts
    lowered = parts["autocast"]

    class Module(pl.LightningModule):
        """The workload's step in Lightning's words: manual optimization keeps its order."""

        def __init__(self) -> None:
            super().__init__()
            self.batch_size, self.model = 2, work.model
            self.automatic_optimization = False

        def train_dataloader(self) -> Any:
            # Numbers only: the batch is made on the device, as for every finder. Three full batches of 8192.
            return DataLoader(range(STEPS * 8192), batch_size=self.batch_size)  # type: ignore[arg-type]

        def configure_optimizers(self) -> Any:
            return work.optimizer

        def training_step(self, numbers: torch.Tensor, _index: int) -> None:
            with program.counted(len(numbers)):
                optimizer = self.optimizers()
                batch = parts["source"](len(numbers))
                optimizer.zero_grad(set_to_none=True)
                with nullcontext() if lowered is None else torch.autocast(self.device.type, dtype=lowered):
                    loss = parts["loss_fn"](self.model, batch)
                self.manual_backward(loss)
                optimizer.step()

    folder = tempfile.TemporaryDirectory()
    trainer = pl.Trainer(
        accelerator="gpu" if program.device.type == "cuda" else "cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder.name,
    )
    module = Module()

    def search() -> int | None:
        with folder:  # holds the checkpoint that it puts back at the end
            found = Tuner(trainer).scale_batch_size(module, mode=mode, steps_per_trial=STEPS)
            program.synchronize()
        return None if found is None else int(found)

    return search


FINDERS = {
    "batchfit_predict": Finder(
        partial(ours, predict=True), "`find_batch_size(workload)`: its defaults, with its soak"
    ),
    "batchfit": Finder(
        partial(ours, predict=False),
        "`find_batch_size(workload, predict=False)`: measured only, with its soak",
    ),
    "bisection": Finder(
        bisection, "from 1, x2 until it fails, then bisect to 1; collects and empties the cache"
    ),
    "accelerate": Finder(
        partial(accelerate, start=128),
        "`find_executable_batch_size()`: its default start of 128",
        "accelerate",
    ),
    "accelerate_4096": Finder(
        partial(accelerate, start=4096), "the same with `starting_batch_size=4096`", "accelerate"
    ),
    "lightning_power": Finder(
        partial(lightning, mode="power"),
        "`Tuner.scale_batch_size(mode='power', steps_per_trial=3)`, which is `BatchSizeFinder`: default "
        "start of 2 and largest size of 8192; manual optimization in the order of the common step (its "
        "automatic one keeps gradients through forward); batches made on the device, so that no loading is "
        "timed, while the checkpoint that it writes and puts back is",
        "lightning",
    ),
    "lightning_binsearch": Finder(
        partial(lightning, mode="binsearch"),
        "the same with `mode='binsearch'`, default margin of 5 %",
        "lightning",
    ),
    "toma": Finder(toma, "`@toma.batch(initial_batchsize=512)`: its README's start", "toma"),
    "torch_max_mem": Finder(
        torch_max_mem,
        "`@maximize_memory_utilization()`: default q of 32; it asks for the largest sensible size, 4096 here",
        "torch-max-mem",
    ),
    "batch_finder": Finder(
        batch_finder,
        "`find_max_minibatch(...)`: default start of 512. It knows no optimizer, so its module runs three "
        "whole steps in forward; `delay=0` (by default it sleeps 3 s after each attempt), in-process, the "
        "model kept and not rebuilt for each attempt, and told that the card is as large as the cap",
        "batch-finder",
    ),
}
