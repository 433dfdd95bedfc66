"""Microbatches on one GPU: what they cost, whether they are exact under a cap, and peers on the same task.

    python benchmarks/microbatch_gpu.py run --out run.json --deadline-s 300   # again: goes on where it was
    python benchmarks/microbatch_gpu.py page run.json --to page.md            # every figure is in the JSON
    python benchmarks/microbatch_gpu.py run --smoke --out smoke.json          # tiny models, no GPU

Parts, each in a fresh process:
- `overhead/...`: GPT-2 small, bf16, AdamW, 8 microbatches of 8 x 512 tokens, where the host has most to do,
  and of 32 x 512, where the GPU has. A whole training step by hand (split, `.to`, loss * share, backward,
  step) and with `Microbatcher`, in alternating pairs; the ratio of each pair.
- `curve/...`: a small transformer in fp32 without dropout, 1,000 batches of random shapes. `free`: full
  batches by hand without a cap; `control`: the same, each batch in two halves, which is what rounding alone
  does; `ours`: under a cap that one batch in ten exceeds (the free run's peaks say where that is).
- `peer/...`: the first batches of the same curve under the same cap, with `Microbatcher`, with toma's `range`
  around the accumulation and with torch-max-mem around the whole of it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pages import add_page, write_page
from rows import Results, in_child, run_rows
from turns import interval

GIB = 2**30
PARTS = (
    "overhead/eager, 32",
    "overhead/compiled, 32",
    "overhead/eager",
    "overhead/compiled",
    "curve/free",
    "curve/control",
    "curve/ours",
    "peer/ours",
    "peer/toma",
    "peer/torch_max_mem",
)
PACKAGES = {"peer/toma": "toma", "peer/torch_max_mem": "torch-max-mem"}
SIZE, COUNT, LENGTH, PAIRS = 8, 8, 512, 80  # the size where a part names none
STEPS, PEER_STEPS = 1000, 200
PEER_S = 60.0  # a peer that needs longer for its batches is stopped, and the page says how far it came
# Of the free run's peaks, and what the allocator's rests take on top of live tensors.
QUANTILE, RESTS = 0.9, 1.05


# ---- what it costs


def overhead(compiled: bool, size: int, smoke: bool) -> Results:
    import torch

    import batchfit

    model, optimizer, loss, batch, device = gpt2(size * COUNT, smoke)
    run: Any = torch.compile(model, backend="eager" if smoke else "inductor") if compiled else model
    microbatcher = batchfit.Microbatcher(run, microbatch_size=size)
    wait = (lambda: None) if smoke else torch.cuda.synchronize

    def fn(micro: dict[str, Any]) -> Any:
        return loss(run, micro)

    def accumulate() -> None:
        for start in range(0, size * COUNT, size):
            rows = slice(start, start + size)
            micro = {name: part[rows].to(device, non_blocking=True) for name, part in batch.items()}
            (fn(micro) * (1 / COUNT)).backward()

    def by_hand() -> None:
        optimizer.zero_grad()
        accumulate()
        optimizer.step()

    def backward() -> None:
        microbatcher.backward(fn, batch)

    def ours() -> None:
        optimizer.zero_grad()
        backward()
        microbatcher.step(optimizer)

    def seconds(work: Callable[[], None]) -> float:
        wait()
        begun = time.perf_counter()
        work()
        wait()
        return time.perf_counter() - begun

    for _ in range(1 if smoke else 9):  # the atomic step records its first eight
        by_hand()
        ours()
    pairs = []
    for number in range(3 if smoke else PAIRS):
        first, second = (by_hand, ours) if number % 2 else (ours, by_hand)
        times = {first: seconds(first), second: seconds(second)}
        pairs.append((times[by_hand], times[ours]))
    again = [(seconds(by_hand), seconds(by_hand)) for _ in range(2 if smoke else PAIRS // 2)]
    return {
        "size": size,
        "pairs_s": pairs,
        "by_hand_twice_s": again,
        "host_us": host_us({"by_hand": accumulate, "ours": backward}, optimizer.zero_grad, wait, smoke),
    }


def host_us(works: dict[str, Callable[[], None]], clear: Any, wait: Any, smoke: bool) -> dict[str, float]:
    """What the host spends until all of a batch is queued."""
    found: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(2 if smoke else 7):
        for name, work in works.items():
            clear()
            wait()
            begun = time.perf_counter()
            work()
            found[name].append(1e6 * (time.perf_counter() - begun))
    return {name: statistics.median(some) for name, some in found.items()}


def gpt2(samples: int, smoke: bool) -> tuple[Any, Any, Any, dict[str, Any], Any]:
    import torch
    import transformers as hf

    device = torch.device("cpu" if smoke else "cuda")
    tiny = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 97, "bos_token_id": 0, "eos_token_id": 0}
    sizes = tiny if smoke else {}
    config = hf.GPT2Config(attn_implementation="sdpa", use_cache=False, **sizes)
    torch.manual_seed(0)
    model = hf.GPT2LMHeadModel(config).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(config.vocab_size, (samples, 16 if smoke else LENGTH))

    def loss(model: Any, micro: dict[str, Any]) -> Any:
        with torch.autocast(device.type, torch.bfloat16):
            return model(**micro).loss

    return model, optimizer, loss, {"input_ids": ids, "labels": ids}, device


# ---- the curve


class Curve:
    """A small transformer without dropout, and batches of random shapes."""

    def __init__(self, smoke: bool) -> None:
        import torch
        from torch import nn

        torch.manual_seed(0)
        self.device = torch.device("cpu" if smoke else "cuda")
        width, self.words = (16, 61) if smoke else (256, 4096)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        body = nn.TransformerEncoder(layer, 1 if smoke else 4, enable_nested_tensor=False)
        self.model = nn.Sequential(nn.Embedding(self.words, width), body, nn.Linear(width, self.words))
        self.model.to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.smoke, self.ooms, self.samples = smoke, 0, 0
        self.step: Callable[[], Any] = self.optimizer.step
        self._draw = random.Random(0)

    def batch(self, step: int) -> Any:
        import torch

        n = self._draw.randint(8, 64)
        length = self._draw.choice([8, 12, 16] if self.smoke else [32, 64, 96, 128, 160, 192, 224, 256])
        made = torch.Generator().manual_seed(step)
        # A skewed draw, so that there is something to learn.
        ids = torch.rand((n, length), generator=made).square().mul(self.words).long()
        self.samples += n
        return ids

    def loss(self, ids: Any) -> Any:
        import torch

        try:
            return torch.nn.functional.cross_entropy(self.model(ids).flatten(0, 1), ids.flatten())
        except torch.OutOfMemoryError:
            self.ooms += 1
            raise

    def backward(self, loss: Any) -> None:
        import torch

        try:
            loss.backward()
        except torch.OutOfMemoryError:
            self.ooms += 1
            raise

    def accumulate(self, ids: Any, start: int, end: int, losses: list[float]) -> None:
        """One microbatch by hand."""
        part = ids[start:end].to(self.device)
        loss = self.loss(part) * (len(part) / len(ids))
        self.backward(loss)
        losses.append(float(loss.detach()))


@contextmanager
def capped(cap_bytes: int | None, smoke: bool) -> Iterator[Any]:
    """A cap on this process; yields what reads and resets the peak."""
    import torch

    import batchfit

    if smoke:
        with batchfit.virtual_memory(cap_bytes or 8 * GIB) as memory:
            yield lambda: (memory.peak_bytes, memory.reset_peak())[0]
        return
    if cap_bytes is not None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(cap_bytes / total)
    yield lambda: (torch.cuda.max_memory_allocated(), torch.cuda.reset_peak_memory_stats())[0]


def stepper(way: str, curve: Curve) -> Callable[[Any], tuple[float, int]]:
    """One way to run a batch: its loss, and how many microbatches it took (0: not known)."""
    import torch

    def whole(ids: Any) -> tuple[float, int]:
        losses: list[float] = []
        curve.accumulate(ids, 0, len(ids), losses)
        return losses[0], 1

    def halves(ids: Any) -> tuple[float, int]:
        losses: list[float] = []
        middle = len(ids) // 2
        curve.accumulate(ids, 0, middle, losses)
        curve.accumulate(ids, middle, len(ids), losses)
        return sum(losses), 2

    def ours() -> Any:
        import batchfit

        microbatcher = batchfit.Microbatcher(curve.model)
        curve.step = lambda: microbatcher.step(curve.optimizer)

        def run(ids: Any) -> tuple[float, int]:
            before = curve.ooms
            report = microbatcher.backward(curve.loss, ids)
            curve.ooms = before + report.retries  # those in backward too
            if sum(report.microbatch_sizes) != len(ids):
                raise ValueError(f"{report.microbatch_sizes} are not the {len(ids)} samples of the batch")
            return float(report.loss), len(report.microbatch_sizes)

        return run

    def toma() -> Any:
        from toma import toma as decorators

        def run(ids: Any) -> tuple[float, int]:
            losses: list[float] = []

            def chunk(start: int, end: int) -> None:
                curve.accumulate(ids, start, end, losses)

            # One context for all batches: what it learned is kept, as with its decorator at module level.
            decorators.range(chunk, initial_step=64, context=curve)(0, len(ids))
            return sum(losses), len(losses)

        return run

    def torch_max_mem() -> Any:
        from torch_max_mem import maximize_memory_utilization

        @maximize_memory_utilization(safe_devices={"cpu", "cuda"})
        def attempt(ids: torch.Tensor, batch_size: int) -> list[float]:
            curve.optimizer.zero_grad()  # the user's to do: a try that failed has left gradients
            losses: list[float] = []
            for start in range(0, len(ids), batch_size):
                curve.accumulate(ids, start, min(start + batch_size, len(ids)), losses)
            return losses

        def run(ids: Any) -> tuple[float, int]:
            losses = attempt(ids=ids, batch_size=64)
            return sum(losses), len(losses)

        return run

    made = {"ours": ours, "toma": toma, "torch_max_mem": torch_max_mem}
    return {"free": whole, "control": halves}.get(way) or made[way]()


def curve(way: str, steps: int, cap_bytes: int | None, smoke: bool, limit_s: float = math.inf) -> Results:
    import torch

    losses, peaks, splits, retried, failed = [], [], 0, 0, ""
    with capped(cap_bytes, smoke) as peak:
        run = Curve(smoke)
        step = stepper(way, run)
        torch.set_float32_matmul_precision("highest")
        begun = time.perf_counter()
        for number in range(steps):
            if time.perf_counter() - begun > limit_s:
                failed = f"stopped after {limit_s:.0f} s"
                break
            ids, before = run.batch(number), run.ooms
            run.optimizer.zero_grad()
            try:
                loss, count = step(ids)
            except (RuntimeError, MemoryError) as error:
                failed = f"step {number}: {type(error).__name__}: {str(error)[:200]}"
                break
            run.step()
            losses.append(loss)
            splits += count > 1
            retried += run.ooms > before
            if way == "free":
                peaks.append(peak())
        seconds = time.perf_counter() - begun
        del run, step
    answer = {
        "losses": losses,
        "seconds": seconds,
        "steps_made": len(losses),
        "of": steps,
        "split": splits,
        "retried": retried,
        "cap_bytes": cap_bytes,
        "failed": failed,
    }
    return {**answer, "peaks": peaks} if peaks else answer


def cap_of(results: Results) -> int:
    """What one batch in ten exceeds, by the peaks of the free run."""
    peaks = sorted(results["curve/free"]["peaks"])
    return round(peaks[int(QUANTILE * (len(peaks) - 1))] * RESTS)


def largest_difference(losses: list[float], free: list[float]) -> float | None:
    """Of two curves, relative, as far as both go; None where there is nothing to compare."""
    pairs = list(zip(losses, free, strict=False))
    return max((abs(one - two) / abs(two) for one, two in pairs), default=None)


# ---- processes and the page


def one(part: str, given: argparse.Namespace) -> Results:
    kind, _, name = part.partition("/")
    if kind == "overhead":
        how, _, size = name.partition(", ")
        return overhead(how == "compiled", int(size or SIZE), given.smoke)
    steps = (40 if kind == "curve" else 20) if given.smoke else (STEPS if kind == "curve" else PEER_STEPS)
    limit_s = PEER_S if kind == "peer" else math.inf
    return curve(name, steps, given.cap_bytes, given.smoke, limit_s)


def about(given: argparse.Namespace) -> Results:
    import torch

    on_gpu = torch.cuda.is_available() and not given.smoke
    found = {
        "device": torch.cuda.get_device_name(0) if on_gpu else "CPU (tiny models, virtual memory)",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "command": "python benchmarks/microbatch_gpu.py run" + (" --smoke" if given.smoke else ""),
    }
    for package in ("transformers", *PACKAGES.values()):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def is_capped(part: str) -> bool:
    return part not in ("curve/free", "curve/control") and not is_overhead(part)


def run_all(given: argparse.Namespace) -> None:
    def run(part: str, results: Results) -> Results:
        cap = ("--cap-bytes", str(cap_of(results))) if is_capped(part) else ()
        return in_child(__file__, part, *cap, smoke=given.smoke)

    def not_yet(part: str, results: Results) -> str:
        return "needs curve/free" if is_capped(part) and "peaks" not in results.get("curve/free", {}) else ""

    run_rows(
        given.out,
        about(given),
        given.parts,
        deadline_s=given.deadline_s,
        run=run,
        not_yet=not_yet,
        shown=lambda found: {name: one for name, one in found.items() if name not in ("losses", "peaks")},
        called="parts",
    )


def page(results: Results) -> str:
    """The dated page: every figure comes from the JSON."""
    told = results["about"]
    versions = ", ".join(f"{name} {told[name]}" for name in ("torch", "python", "transformers", "toma"))
    lines = [
        f"# Microbatches on a {told['device']}",
        "",
        f"Made by `{told['command']}`; {versions}, torch-max-mem {told['torch-max-mem']}.",
        "",
        "## A training step, by hand and with `Microbatcher`",
        "",
        f"GPT-2 small, bf16 autocast, AdamW, {COUNT} microbatches of {LENGTH} tokens a sample; alternating",
        "pairs in one process. `by hand twice` is the same step against itself; the last column is what",
        "the host spends beyond the loop by hand until a batch is queued.",
        "",
        "| | size | by hand | ours | ours / by hand, median (95 % interval) | by hand twice | host, more |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [_overhead_row(part, results[part]) for part in PARTS if is_overhead(part) and part in results]
    lines += ["", "## Under a cap", "", *_curve_lines(results)]
    return "\n".join(lines) + "\n"


def is_overhead(part: str) -> bool:
    return part.startswith("overhead/")


def _overhead_row(part: str, one: Results) -> str:
    name = part.removeprefix("overhead/").partition(",")[0]
    if "error" in one:
        return f"| {name} | failed: {one['error'].splitlines()[-1]} ||||||"
    hand = statistics.median(first for first, _ in one["pairs_s"])
    ours = statistics.median(second for _, second in one["pairs_s"])
    host = one["host_us"]["ours"] - one["host_us"]["by_hand"]
    ratios = sorted(second / first for first, second in one["pairs_s"])
    same = sorted(second / first for first, second in one["by_hand_twice_s"])
    return (
        f"| {name} | {one.get('size', SIZE)} | {1e3 * hand:.1f} ms | {1e3 * ours:.1f} ms | {_spread(ratios)} "
        f"| {_spread(same)} | {host:.0f} us |"
    )


def _spread(ratios: list[float]) -> str:
    """The median and its 95 % interval."""
    low, high = interval(ratios)
    return f"{statistics.median(ratios):.4f} ({low:.4f} to {high:.4f})"


def _curve_lines(results: Results) -> list[str]:
    free = results.get("curve/free", {})
    if "peaks" not in free:
        return ["The run without a cap is missing."]
    cap = cap_of(results)
    over = sum(peak > cap for peak in free["peaks"])
    lines = [
        "A transformer in fp32 without dropout, AdamW, batches of 8 to 64 samples of 32 to 256 tokens. Under",
        f"the cap of {cap / 2**20:.0f} MiB {over} of {len(free['peaks'])} full batches have no room. `free`",
        "runs full batches without a cap, `control` the same in halves: its difference is that of rounding.",
        "",
        "| run | steps made | split | ran out | seconds | largest difference from the free loss curve |",
        "|---|---|---|---|---|---|",
    ]
    for part in (part for part in PARTS if not is_overhead(part) and part in results):
        one = results[part]
        if "error" in one:
            lines.append(f"| {part} | failed: {one['error'].splitlines()[-1]} |||||")
            continue
        gap = largest_difference(one["losses"], free["losses"])
        lines.append(
            f"| {part} | {one['steps_made']} of {one['of']} | {one['split']} | {one['retried']} "
            f"| {one['seconds']:.1f} | {'-' if gap is None else f'{gap:.1e}'} |"
        )
    stops = [f"{part}: {results[part]['failed']}" for part in PARTS if results.get(part, {}).get("failed")]
    return [*lines, *(["", *stops] if stops else [])]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("--out", type=Path, default=Path("microbatch_gpu.json"))
    running.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    running.add_argument("--smoke", action="store_true", help="tiny models on the CPU, few steps")
    running.add_argument("--deadline-s", type=float, default=1e9, help="no part starts later than this")
    add_page(commands)
    single = commands.add_parser("one")
    single.add_argument("part", choices=PARTS)
    single.add_argument("--smoke", action="store_true")
    single.add_argument("--cap-bytes", type=int)
    given = parser.parse_args()
    if given.command == "run":
        run_all(given)
    elif given.command == "one":
        print(json.dumps(one(given.part, given)))
    else:
        write_page(given, page)


if __name__ == "__main__":
    main()
