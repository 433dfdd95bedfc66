"""A soak: thousands of steps of random small programs through find, microbatches, schedules and loader.

    python benchmarks/soak.py run --out soak.json --steps 10000       # a CPU, some minutes
    python benchmarks/soak.py page soak.json --to page.md

A program is drawn from a seed: a model, an optimizer, a dataset, a budget of virtual memory that its full
batch may exceed, a schedule of batch sizes with its LR rule; sometimes workers, a change of size that nobody
planned, a restart from a checkpoint, a device that says now and then that it has no memory. Each program is
- searched: `find_batch_size` must leave parameters, buffers, optimizer state and RNG bit by bit;
- trained with `ResizableLoader`, `BatchSizeScheduler` and `Microbatcher` under the budget: every sample of
  every epoch once, and at the end the parameters of a plain loop that had all memory and cut nothing (fp64).
Between programs it counts what is left: bytes of tensors, open files, threads, child processes. All must end
as they were after the first programs, which load what Python and torch load once.
"""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
import json
import logging
import multiprocessing
import os
import platform
import random
import statistics
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

import batchfit
from pages import add_page, write_page

FIRST = 6  # programs that load what is loaded once
Results = dict[str, Any]


class Samples(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Made from a seed; the last number of a sample says which one it is."""

    def __init__(self, samples: int, features: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(samples, features, generator=generator, dtype=torch.float64)
        self.y = self.x[:, :3].sum(dim=1, keepdim=True).sin()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:  # type: ignore[override]
        return self.x[index], self.y[index], index


class Attends(nn.Module):
    """A sample's features as tokens that attend to each other."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.lift = nn.Linear(1, 8)
        # Without biases: that of the keys has no gradient but rounding, which Adagrad makes as large as any.
        self.attention = nn.MultiheadAttention(8, 2, bias=False, batch_first=True)
        self.out = nn.Linear(8 * features, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.lift(x[..., None])
        return torch.as_tensor(self.out(self.attention(tokens, tokens, tokens)[0].flatten(1)))


def make_model(kind: str, features: int) -> nn.Module:
    if kind == "attention":
        return Attends(features)
    if kind == "conv":
        convolution = nn.Conv1d(1, 6, 3, padding=1)
        return nn.Sequential(
            nn.Unflatten(1, (1, -1)),
            convolution,
            nn.GroupNorm(2, 6),
            nn.GELU(),
            nn.Flatten(),
            nn.LazyLinear(1),
        )
    return nn.Sequential(nn.Linear(features, 24), nn.Tanh(), nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 1))


OPTIMIZERS = {
    "sgd": lambda some: torch.optim.SGD(some, lr=0.02, momentum=0.9),
    "adamw": lambda some: torch.optim.AdamW(some, lr=3e-3),
    "adam, one at a time": lambda some: torch.optim.Adam(some, lr=3e-3, foreach=False),
    "adagrad": lambda some: torch.optim.Adagrad(some, lr=0.02),
}


@dataclass
class Program:
    """What a seed says."""

    seed: int
    kind: str = ""
    optimizer: str = ""
    features: int = 0
    samples: int = 0
    first: int = 0
    most: int = 0
    epochs: int = 0
    workers: int = 0
    lr: str = "none"
    config: Any = None
    resized_at: int | None = None
    restarted_after: int | None = None
    tight: float = 1.0
    fails_every: int | None = None

    @classmethod
    def of(cls, seed: int) -> Program:
        pick = random.Random(seed)
        self = cls(seed)
        self.kind = pick.choice(["mlp", "conv", "attention"])
        self.optimizer = pick.choice(list(OPTIMIZERS))
        self.features = pick.randint(6, 20)
        self.samples = pick.randint(60, 600)
        self.first = pick.randint(4, 40)
        self.epochs = pick.randint(2, 4)
        self.workers = pick.choice([0, 0, 0, 0, 0, 0, 1, 2])
        self.lr = pick.choice(["none", "linear", "sqrt"])
        most = self.first * pick.choice([2, 4, 8])
        self.config = pick.choice(
            [
                batchfit.StepBatchSizeConfig(step_size=1, gamma=2, max_batch_size=most),
                batchfit.MilestoneBatchSizeConfig(milestones=f"0:{self.first} 1:{most}"),
                batchfit.LinearBatchSizeConfig(final_batch_size=most, over=self.epochs),
                None,
            ]
        )
        self.most = most if self.config else self.first
        self.resized_at = pick.choice([None, None, pick.randint(1, 6)])
        self.restarted_after = pick.choice([None, 0])
        self.tight = pick.choice([0.1, 0.3, 0.6, 2.0])
        self.fails_every = pick.choice([None, 5, 17])
        return self


@dataclass
class Made:
    """A program's objects."""

    program: Program
    model: nn.Module = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    loader: batchfit.ResizableLoader = field(init=False)
    scheduler: batchfit.BatchSizeScheduler = field(init=False)
    events: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        it = self.program
        torch.manual_seed(it.seed)
        self.model = make_model(it.kind, it.features).double()
        with torch.no_grad():
            self.model(torch.zeros(1, it.features, dtype=torch.float64))  # lazy layers
        self.optimizer = OPTIMIZERS[it.optimizer](list(self.model.parameters()))
        data = Samples(it.samples, it.features, it.seed)
        self.loader = batchfit.ResizableLoader(
            data,
            it.first,
            shuffle=True,
            seed=it.seed,
            num_workers=it.workers,
            persistent_workers=it.workers > 0,
        )
        self.scheduler = batchfit.BatchSizeScheduler(
            it.config,
            it.first,
            loader=self.loader,
            lr=it.lr,
            optimizer=self.optimizer,
            on_event=self.events.append,
        )

    def state(self) -> dict[str, Any]:
        parts = (self.model, self.optimizer, self.loader, self.scheduler)
        return copy.deepcopy({str(at): part.state_dict() for at, part in enumerate(parts)})

    def load(self, state: dict[str, Any]) -> None:
        for at, part in enumerate((self.model, self.optimizer, self.loader, self.scheduler)):
            part.load_state_dict(state[str(at)])

    def batches(self, epochs: range, seen: list[list[int]]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Every batch of these epochs, with the change that nobody planned."""
        for epoch in epochs:
            self.scheduler.step(epoch)
            seen.append([])
            for number, (x, y, which) in enumerate(self.loader):
                seen[-1] += which.tolist()
                yield x, y
                if epoch == 0 and number == self.program.resized_at:
                    self.loader.resize(max(1, self.loader.batch_size // 2 + 1))


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def by_hand(program: Program) -> tuple[list[torch.Tensor], int]:
    """The plain loop: all memory, nothing cut, no restart."""
    made, steps = Made(program), 0
    for batch in made.batches(range(program.epochs), []):
        made.optimizer.zero_grad()
        loss_of(made.model, batch).backward()
        made.optimizer.step()
        steps += 1
    return [one.detach().clone() for one in made.model.parameters()], steps


def fingerprint(*parts: Any) -> list[Any]:
    """Every tensor and number of some state dicts, and the RNG."""
    found: list[Any] = [torch.get_rng_state().tolist(), random.getstate()]

    def walk(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found.append((value.dtype, value.tolist()))
        elif isinstance(value, dict):
            for key in value:
                found.append(key)
                walk(value[key])
        elif isinstance(value, (list, tuple)):
            for one in value:
                walk(one)
        else:
            found.append(value)

    for part in parts:
        walk(part.state_dict())
    return found


def limit_for(made: Made, size: int, tight: float) -> int:
    """Bytes: what is there, and room for `tight` of a full batch of `size`."""
    features = made.program.features
    with batchfit.virtual_memory("8GiB") as memory:
        model = copy.deepcopy(made.model)
        batch = (torch.zeros(size, features, dtype=torch.float64), torch.zeros(size, 1, dtype=torch.float64))
        held = memory.allocated_bytes
        memory.reset_peak()
        loss_of(model, batch).backward()
        step_bytes = memory.peak_bytes - held
        parameters = list(model.parameters())
        # gradients, two moments and the temporaries of a step; a block has at least 512 bytes
        fixed = 7 * sum(max(512, p.numel() * p.element_size()) for p in parameters)
        return int(held + fixed + max(tight, 2.5 / size) * step_bytes)


def run_program(program: Program) -> Results:
    """One program, searched and trained."""
    expected, by_hand_steps = by_hand(program)
    made = Made(program)
    largest = min(program.samples, program.most)
    limit = limit_for(made, largest, program.tight)
    seen: list[list[int]] = []

    def make_batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(size, program.features, dtype=torch.float64), torch.zeros(
            size, 1, dtype=torch.float64
        )

    with batchfit.virtual_memory(limit):
        before = fingerprint(made.model, made.optimizer)
        work = batchfit.training(made.model, made.optimizer, loss_of, make_batch)
        fit = batchfit.find_batch_size(work, max_size=4 * largest)
        find_changed = fingerprint(made.model, made.optimizer) != before
        del work
    steps = retries = cut = at = 0
    learned: Any = None
    calls = itertools.count(1)

    def sometimes(micro: list[torch.Tensor]) -> torch.Tensor:
        """The loss; now and then the device says that it has no memory, for a reason of its own."""
        loss = loss_of(made.model, (micro[0], micro[1]))
        if program.fails_every and next(calls) % program.fails_every == 0 and len(micro[0]) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Somebody else has it.")
        return loss

    while at < program.epochs:
        restarts = program.restarted_after is not None and at == 0
        stop = at + 1 if restarts else program.epochs
        with batchfit.virtual_memory(limit):
            microbatcher = batchfit.Microbatcher(made.model)
            if learned is not None:
                microbatcher.load_state_dict(learned)
            for batch in made.batches(range(at, stop), seen):
                made.optimizer.zero_grad()
                report = microbatcher.backward(sometimes, list(batch))
                microbatcher.step(made.optimizer)
                steps, retries = steps + 1, retries + report.retries
                cut += len(report.microbatch_sizes) > 1
        at, learned = stop, microbatcher.state_dict()
        if restarts:  # a new process would begin with new objects
            state = made.state()
            del microbatcher, batch, report, made
            made = Made(program)
            made.load(state)
            del state
    found = [one.detach() for one in made.model.parameters()]
    scale = max(float(one.abs().max()) for one in expected)
    difference = max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)) / scale
    whole = list(range(program.samples))
    return {
        "seed": program.seed,
        "steps": steps + sum(trial.steps_run for trial in fit.trials),
        "training_steps": steps,
        "by_hand_steps": by_hand_steps,
        "retries": retries,
        "cut": cut,
        "found": fit.batch_size,
        "ooms_in_find": sum(not trial.fits for trial in fit.trials),
        "workers": program.workers,
        "find_changed_state": find_changed,
        "difference": difference,
        "wrong_epochs": sum(sorted(epoch) != whole for epoch in seen) + abs(len(seen) - program.epochs),
    }


def left_behind() -> Results:
    """What the process holds now."""
    gc.collect()
    with warnings.catch_warnings():  # isinstance asks some of torch's own lazy objects
        warnings.simplefilter("ignore")
        tensors = [one for one in gc.get_objects() if isinstance(one, torch.Tensor)]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    counted = {
        "tensor_bytes": sum(storages.values()),
        "tensors": len(tensors),
        "files": len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0,
        "threads": threading.active_count(),
        "processes": len(multiprocessing.active_children()),
    }
    return counted


def run(given: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    logging.getLogger("batchfit").addHandler(logging.NullHandler())
    begun, rows, base = time.monotonic(), [], None
    seed = steps = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        while steps < given.steps or seed <= FIRST:
            rows.append(run_program(Program.of(seed)))
            seed, steps = seed + 1, steps + rows[-1]["steps"]
            if seed == FIRST:
                base = left_behind()
            if seed % 25 == 0:
                print(f"{seed} programs, {steps} steps, {time.monotonic() - begun:.0f} s", flush=True)
    end = left_behind()
    assert base is not None
    results = {
        "about": {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "command": f"python benchmarks/soak.py run --steps {given.steps}",
        },
        "seconds": time.monotonic() - begun,
        "base": base,
        "end": end,
        "rows": rows,
    }
    given.out.write_text(json.dumps(results, indent=1) + "\n")
    wrong = faults(results)
    print(page(results))
    if wrong:
        raise SystemExit("\n".join(wrong))


def faults(results: Results) -> list[str]:
    """What must be zero and is not."""
    wrong = [
        f"{name}: {results['base'][name]} after the first programs, {results['end'][name]} at the end"
        for name in results["base"]
        if results["end"][name] > results["base"][name]
    ]
    for row in results["rows"]:
        said = f"seed {row['seed']}"
        wrong += [f"{said}: find changed the state"] if row["find_changed_state"] else []
        wrong += [f"{said}: parameters differ by {row['difference']:.1e}"] if row["difference"] > 1e-9 else []
        wrong += (
            [f"{said}: {row['wrong_epochs']} epochs lost or repeated samples"] if row["wrong_epochs"] else []
        )
        if row["training_steps"] != row["by_hand_steps"]:
            wrong.append(f"{said}: {row['training_steps']} steps, by hand {row['by_hand_steps']}")
    return wrong


def page(results: Results) -> str:
    rows, about = results["rows"], results["about"]
    base, end = results["base"], results["end"]
    total = {name: sum(row[name] for row in rows) for name in ("steps", "training_steps", "retries", "cut")}
    lines = [
        "# Soak: random small programs through find, microbatches, schedules and loader",
        "",
        f"Made by `{about['command']}`; torch {about['torch']}, Python {about['python']}, a CPU in virtual",
        f"memory. {len(rows)} programs, {total['steps']} steps ({total['training_steps']} of training, the "
        f"others in find's trials), {results['seconds']:.0f} s.",
        "",
        "| what must be zero | found |",
        "|---|---|",
        f"| programs whose state find has changed | {sum(row['find_changed_state'] for row in rows)} |",
        f"| programs whose parameters differ from the plain loop's by more than 1e-9 | "
        f"{sum(row['difference'] > 1e-9 for row in rows)} |",
        f"| epochs with a lost or repeated sample | {sum(row['wrong_epochs'] for row in rows)} |",
        f"| steps more or fewer than the plain loop's | "
        f"{sum(abs(row['training_steps'] - row['by_hand_steps']) for row in rows)} |",
        *(
            f"| {name.replace('_', ' ')} more than after the first {FIRST} programs "
            f"| {max(0, end[name] - base[name])} |"
            for name in base
        ),
        "",
        f"Batches cut into microbatches: {total['cut']}; tries that ran out and were made again: "
        f"{total['retries']}. Searches that ran out on their way: "
        f"{sum(row['ooms_in_find'] > 0 for row in rows)}. Programs with workers: "
        f"{sum(row['workers'] > 0 for row in rows)}. Median difference from the plain loop: "
        f"{statistics.median(row['difference'] for row in rows):.1e}.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("--out", type=Path, default=Path("soak.json"))
    running.add_argument("--steps", type=int, default=10_000)
    add_page(commands)
    given = parser.parse_args()
    if given.command == "page":
        write_page(given, page)
    else:
        run(given)


if __name__ == "__main__":
    main()
