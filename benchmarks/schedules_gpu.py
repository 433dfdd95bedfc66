"""Batch-size schedules at equal tokens: a small language model on text whose entropy is known, on one GPU.

    python benchmarks/schedules_gpu.py run --out schedules_gpu.json --deadline-s 480   # again: goes on
    python benchmarks/schedules_gpu.py page schedules_gpu.json --to page.md
    python benchmarks/schedules_gpu.py run --smoke --out smoke.json                    # tiny, on the CPU

All ways see the same sequences in the same order (per seed) and as many tokens; AdamW, bf16 autocast, the
learning rate warms up and is halved at four milestones in tokens.
- `constant`: one batch size. `constant x4`: four times that, learning rate x2 (sqrt), the plain alternative.
- `smith`: the batch doubles where the rate would be halved, and the rate stays (Smith et al. 2017).
- `seesaw`: the batch doubles, and the rate is cut by sqrt(2) (2510.14717).
- `noise`: the rate as in `constant`, times sqrt(size / first size); the size by `decide` from the noise scale
  (one step in four comes in two halves) and samples/s measured in the first seconds, which count.
- `noise, bound`: the same with `use_bound`: a lower bound of the noise scale is enough to grow.

The source: 16 topics, each a sparse table of which token follows which; the topic changes now and then, and
spans of earlier text are copied. Who knew topics and copies could reach the `floor`, which is no upper bound
of what can be learned but one that cannot be passed.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import math
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pages import add_page, write_page
from rows import keep

WAYS = ("constant", "constant x4", "smith", "seesaw", "noise", "noise, bound")
SEEDS = (0, 1, 2)
MILESTONES = (0.4, 0.6, 0.75, 0.85)  # of all tokens
WARM_UP = 0.03
Results = dict[str, Any]


@dataclass(frozen=True)
class Scale:
    """How large everything is."""

    layers: int = 6
    width: int = 384
    heads: int = 6
    words: int = 512
    length: int = 256
    first: int = 32  # sequences a batch
    largest: int = 512
    sequences: int = 98_304  # 25.2 M tokens
    held_out: int = 2048
    lr: float = 1.5e-3
    decide_every: int = 25

    @property
    def sizes(self) -> list[int]:
        return [self.first * 2**k for k in range(int(math.log2(self.largest // self.first)) + 1)]


FULL = Scale()
TINY = Scale(
    layers=1,
    width=16,
    heads=2,
    words=32,
    length=24,
    first=4,
    largest=32,
    sequences=1280,
    held_out=32,
    decide_every=10,
)


# ---- text


class Source:
    """Sequences from topics, tables and copies."""

    TOPICS, FOLLOWERS = 16, 6
    CHANGE, COPY, SPAN = 1 / 96, 1 / 48, 24

    def __init__(self, scale: Scale, device: Any) -> None:
        import torch

        made = torch.Generator().manual_seed(1234)
        shape = (self.TOPICS, scale.words, self.FOLLOWERS)
        self.scale, self.device = scale, device
        self.followers = torch.randint(scale.words, shape, generator=made).to(device)
        chances = torch.rand(shape, generator=made).pow(3) + 0.02
        self.chances = (chances / chances.sum(-1, keepdim=True)).to(device)

    def draw(self, count: int, seed: int) -> tuple[Any, float]:
        """(`count` sequences of length + 1 tokens, the mean entropy of a token whose topic is known)"""
        import torch

        made = torch.Generator(device=self.device).manual_seed(seed)
        length, rows = self.scale.length + 1, torch.arange(count, device=self.device)

        def chance() -> Any:
            return torch.rand(count, generator=made, device=self.device)

        def pick(top: int) -> Any:
            return torch.randint(top, (count,), generator=made, device=self.device)

        out = torch.zeros(count, length, dtype=torch.long, device=self.device)
        out[:, 0] = pick(self.scale.words)
        topic, left, at = pick(self.TOPICS), torch.zeros_like(rows), torch.zeros_like(rows)
        entropies = -(self.chances * self.chances.log()).sum(-1)
        total = torch.zeros((), device=self.device)
        for place in range(1, length):
            topic = torch.where(chance() < self.CHANGE, pick(self.TOPICS), topic)
            begins = (chance() < self.COPY) & (left == 0) & (place > self.SPAN)
            at = torch.where(begins, (chance() * (place - self.SPAN)).long(), at)
            left = torch.where(begins, torch.full_like(left, self.SPAN), left)
            before = out[:, place - 1]
            table = self.chances[topic, before]
            total += (entropies[topic, before] * (left == 0)).sum()
            kind = (chance()[:, None] > table.cumsum(-1)).sum(-1).clamp(max=self.FOLLOWERS - 1)
            fresh = self.followers[topic, before, kind]
            out[:, place] = torch.where(left > 0, out[rows, at], fresh)
            at, left = at + 1, (left - 1).clamp(min=0)
        return out, float(total) / (count * (length - 1))


# ---- the model


def make_model(scale: Scale, device: Any) -> Any:
    import torch
    from torch import nn
    from torch.nn import functional

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.LayerNorm(scale.width), nn.LayerNorm(scale.width)
            self.mix = nn.Linear(scale.width, 3 * scale.width)
            self.out = nn.Linear(scale.width, scale.width)
            self.up = nn.Linear(scale.width, 4 * scale.width)
            self.down = nn.Linear(4 * scale.width, scale.width)

        def forward(self, x: Any) -> Any:
            n, length, _ = x.shape
            parts = self.mix(self.first(x)).view(n, length, 3, scale.heads, -1).permute(2, 0, 3, 1, 4)
            mixed = functional.scaled_dot_product_attention(*parts, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(n, length, -1))
            return x + self.down(functional.gelu(self.up(self.second(x))))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(scale.words, scale.width)
            self.places = nn.Embedding(scale.length, scale.width)
            self.blocks = nn.Sequential(*(Block() for _ in range(scale.layers)))
            self.last = nn.LayerNorm(scale.width)
            for parameter in self.parameters():
                if parameter.dim() > 1:
                    nn.init.normal_(parameter, std=0.02)

        def forward(self, ids: Any) -> Any:
            x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
            return functional.linear(self.last(self.blocks(x)), self.words.weight)

    return Model().to(device)


def loss_of(model: Any, rows: Any) -> Any:
    import torch

    with torch.autocast(rows.device.type, torch.bfloat16):
        logits = model(rows[:, :-1])
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())


# ---- ways


def cuts(done: float) -> int:
    """How often the rate has been halved when this part of all tokens is done."""
    return sum(done >= milestone for milestone in MILESTONES)


def planned(way: str, scale: Scale, done: float) -> tuple[int, float]:
    """(batch size, learning rate over its first value) of the ways that are functions of tokens."""
    halved = cuts(done)
    if way == "constant":
        return scale.first, 0.5**halved
    if way == "constant x4":
        return 4 * scale.first, 2 * 0.5**halved
    grown = scale.first * 2**halved
    return grown, 1.0 if way == "smith" else 2 ** (-halved / 2)


class Noise:
    """The noise-driven way: what `GradientNoise` says, weighed with samples/s."""

    def __init__(self, model: Any, scale: Scale, samples_per_s: Callable[[int], float], bound: bool) -> None:
        import batchfit
        from batchfit._noise.pure.goodput import DecideSettings

        self.scale, self.size, self.samples_per_s = scale, scale.first, samples_per_s
        self.noise = batchfit.GradientNoise(model, decay_samples=50 * scale.first)
        self.settings = DecideSettings(min_steps=2 * scale.decide_every, use_bound=bound)
        self.since, self.log = 0, []  # type: ignore[var-annotated]

    def next(self, step: int, done: float) -> None:
        from batchfit._noise.pure.goodput import decide

        self.since += 1
        if step % self.scale.decide_every or not step:
            return
        reading = self.noise.reading()
        decision = decide(
            reading,
            self.size,
            self.scale.sizes,
            self.samples_per_s,
            self.settings,
            steps_since_change=self.since,
        )
        self.log.append(
            {
                "step": step,
                "done": round(done, 4),
                "size": decision.size,
                "scale": reading.scale,
                "low": reading.low,
                "high": reading.high,
                "reason": decision.reason,
            }
        )
        if decision.size != self.size:
            self.size, self.since = decision.size, 0


def measured(model: Any, scale: Scale, text: Any, wait: Callable[[], None]) -> dict[int, float]:
    """Samples/s at each size, on a copy."""
    twin = copy.deepcopy(model)
    optimizer = make_optimizer(twin, scale)
    found = {}
    for size in scale.sizes:
        times = []
        for _ in range(6):
            wait()
            begun = time.perf_counter()
            optimizer.zero_grad()
            loss_of(twin, text[:size]).backward()
            optimizer.step()
            wait()
            times.append(time.perf_counter() - begun)
        found[size] = size / statistics.median(times[1:])
    return found


def make_optimizer(model: Any, scale: Scale) -> Any:
    import torch

    fused = next(model.parameters()).is_cuda
    return torch.optim.AdamW(
        model.parameters(), lr=scale.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=fused
    )


def train(way: str, seed: int, scale: Scale, device: Any, source: Source) -> Results:
    import torch

    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    chunks = [
        source.draw(min(8192, scale.sequences), 100_000 * (seed + 1) + k)
        for k in range(-(-scale.sequences // 8192))
    ]
    text = torch.cat([rows for rows, _ in chunks])[: scale.sequences]
    held_out, floor = source.draw(scale.held_out, 99)
    torch.manual_seed(seed)
    model = make_model(scale, device)
    measured(model, scale, text, wait)  # every shape has been seen once, whatever the way
    optimizer = make_optimizer(model, scale)
    wait()
    begun = time.perf_counter()
    told = None
    if way.startswith("noise"):
        speeds = measured(model, scale, text, wait)
        told = Noise(model, scale, speeds.__getitem__, "bound" in way)
    curve, sizes, position, step, losses = [], [], 0, 0, []
    while position < scale.sequences:
        done = position / scale.sequences
        if told is None:
            size, factor = planned(way, scale, done)
        else:
            told.next(step, done)
            size = told.size
            factor = 0.5 ** cuts(done) * math.sqrt(size / scale.first)
        rows = text[position : position + size]
        for group in optimizer.param_groups:
            group["lr"] = scale.lr * factor * min(1.0, (done + 1e-9) / WARM_UP)
        optimizer.zero_grad()
        halves = rows.chunk(2) if told is not None and step % 4 == 0 and len(rows) > 1 else [rows]
        for part in halves:
            loss = loss_of(model, part)
            (loss * (len(part) / len(rows))).backward()
            if len(halves) > 1 and told is not None:
                told.noise.microbatch(len(part))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if len(halves) > 1 and told is not None:
            told.noise.total(norm=norm)
        optimizer.step()
        position, step = position + len(rows), step + 1
        sizes.append(size)
        if step % 50 == 0:
            losses.append((position, loss.detach()))
    wait()
    seconds = time.perf_counter() - begun
    curve = [(at, round(float(value), 4)) for at, value in losses]
    changes = [(k, size) for k, size in enumerate(sizes) if k == 0 or sizes[k - 1] != size]
    return {
        "loss": evaluate(model, held_out),
        "floor": floor,
        "updates": step,
        "seconds": seconds,
        "tokens": scale.sequences * scale.length,
        "changes": changes,
        "curve": curve,
        "decisions": [] if told is None else told.log,
        "samples_per_s": {} if told is None else speeds,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def evaluate(model: Any, rows: Any) -> float:
    import torch

    model.eval()
    with torch.no_grad():
        parts = [float(loss_of(model, part)) * len(part) for part in rows.split(256)]
    return math.fsum(parts) / len(rows)


# ---- processes and the page


def run_all(given: argparse.Namespace) -> None:
    import torch

    on_gpu = torch.cuda.is_available() and not given.smoke
    device, scale = torch.device("cuda" if on_gpu else "cpu"), TINY if given.smoke else FULL
    results: Results = json.loads(given.out.read_text()) if given.out.exists() else {"runs": {}}
    results["about"] = {
        "date": str(datetime.datetime.now(datetime.UTC).date()),
        "device": torch.cuda.get_device_name(0) if on_gpu else "CPU (tiny)",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "command": "python benchmarks/schedules_gpu.py run" + (" --smoke" if given.smoke else ""),
        "first": scale.first,
        "length": scale.length,
    }
    source, begun = Source(scale, device), time.perf_counter()
    names = [(way, seed) for seed in given.seeds for way in given.ways]
    longest = 0.0
    for way, seed in names:
        name = f"{way}/{seed}"
        if name in results["runs"]:
            continue
        if time.perf_counter() - begun + longest > given.deadline_s:
            print(f"{name}: left for another call", flush=True)
            continue
        started = time.perf_counter()
        results["runs"][name] = one = train(way, seed, scale, device, source)
        longest = max(longest, time.perf_counter() - started)
        keep(given.out, results)
        print(f"{name}: loss {one['loss']:.4f}, {one['updates']} updates, {one['seconds']:.1f} s", flush=True)
    print(f"{sum(f'{way}/{seed}' not in results['runs'] for way, seed in names)} runs left")


def page(results: Results) -> str:
    told, runs = results["about"], results["runs"]
    one = next(iter(runs.values()))
    lines = [
        f"# Batch-size schedules at equal tokens on a {told['device']}: {told['date']}",
        "",
        f"Made by `{told['command']}`; torch {told['torch']}, python {told['python']}.",
        "",
        f"A transformer with {one['parameters'] / 1e6:.1f} M parameters, {one['tokens'] / 1e6:.1f} M tokens",
        f"of synthetic text in sequences of {told['length']}, first batch {told['first']} sequences. Text",
        f"whose topics and copies were known would have {one['floor']:.3f} nats a token, which nobody can",
        "pass. Loss is that of held-out text: the mean over seeds, and (smallest to largest). `against",
        "constant`: the mean of the differences of equal seeds. Seconds are of training alone, for `noise`",
        "with the time it takes to measure samples/s. Sizes are plain functions of tokens, not batchfit's",
        "schedule configs.",
        "",
        "| way | seeds | held-out loss | against constant | updates | saved | seconds | saved |",
        "|---|---|---|---|---|---|---|---|",
    ]
    base = {name.split("/")[1]: run for name, run in runs.items() if name.startswith("constant/")}
    for way in WAYS:
        mine = {name.split("/")[1]: run for name, run in runs.items() if name.split("/")[0] == way}
        if not mine:
            continue
        losses = [run["loss"] for run in mine.values()]
        both = [seed for seed in mine if seed in base]
        gap = [mine[seed]["loss"] - base[seed]["loss"] for seed in both]
        saved = {
            what: 1 - statistics.fmean(mine[seed][what] / base[seed][what] for seed in both) if both else 0.0
            for what in ("updates", "seconds")
        }
        lines.append(
            f"| {way} | {len(mine)} "
            f"| {statistics.fmean(losses):.4f} ({min(losses):.4f} to {max(losses):.4f}) "
            f"| {statistics.fmean(gap) if gap else 0.0:+.4f} "
            f"| {statistics.fmean(run['updates'] for run in mine.values()):,.0f} | {saved['updates']:.0%} "
            f"| {statistics.fmean(run['seconds'] for run in mine.values()):.1f} | {saved['seconds']:.0%} |"
        )
    lines += [
        "",
        "Published: seesaw saves about 36 % of wall-clock at equal loss where a batch of any size takes",
        "equally long (2510.14717: 150 M to 600 M parameters, cosine); Smith et al. 2017 report equal curves",
        "with fewer updates for SGD on images.",
        "",
        "## What the noise said",
        "",
        *_decisions(runs),
    ]
    return "\n".join(lines) + "\n"


def _decisions(runs: Results) -> list[str]:
    """The changes of the noise-driven runs, in their own words."""
    lines = []
    for name, run in runs.items():
        if not name.startswith("noise"):
            continue
        size = None
        lines.append(f"`{name}`:")
        for one in run["decisions"]:
            if one["size"] != size and (size is not None or one["size"] != run["changes"][0][1]):
                lines.append(
                    f"- step {one['step']} ({one['done']:.0%}): {one['size']}, since {one['reason']}"
                )
            size = one["size"]
        last = run["decisions"][-1] if run["decisions"] else None
        lines.append("- no decision" if last is None else f"- at the end: {last['size']}; {last['reason']}")
        lines.append("")
    return lines[:-1] if lines else ["No run."]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("--out", type=Path, default=Path("schedules_gpu.json"))
    running.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    running.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    running.add_argument("--smoke", action="store_true", help="tiny, on the CPU")
    running.add_argument("--deadline-s", type=float, default=1e9, help="no run starts that would end later")
    add_page(commands)
    given = parser.parse_args()
    if given.command == "run":
        run_all(given)
        return
    write_page(given, page)


if __name__ == "__main__":
    main()
