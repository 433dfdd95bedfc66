"""Ragged batches on one GPU: GPT-2 small, lognormal lengths of 32 to 1024 tokens, 128 sequences a step.

    python benchmarks/ragged_gpu.py run --out ragged.json          # each way in a fresh process; resumes
    python benchmarks/ragged_gpu.py page ragged.json --to page.md  # the page of these results
    python benchmarks/ragged_gpu.py simulate                       # plans under a model of the GPU
    python benchmarks/ragged_gpu.py run --smoke                    # each way with a tiny model, on a CPU

Ways: `fixed_8`, `fixed_12` (rows in the loader's order, trimmed to the longest of each microbatch), `by_hand`
(sorted, 12,000 padded tokens, multiples of 64), `halving` (as Composer does it: halves for ever after an
out-of-memory, nothing is trimmed), `one_shape` (24 x 512, nothing to pad), `ours` (the Microbatcher) and
`parts` (its plan and memory model in a plain loop; not run unless named). bf16 autocast, AdamW, random
weights. `cold`: the first ten steps of a process, after one step of 2 x 48 tokens that loads libraries;
`warm`: five more of other sequences. While one way runs, the process of the next imports, and does no more.
Tokens a second count useful tokens of steps that were made, over all seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pages import add_page, write_page
from rows import keep

GIB = 2**30
WAYS = ("ours", "by_hand", "fixed_8", "fixed_12", "one_shape", "halving", "parts")
FLAGS = ("default", "no_cudnn_attention")
STEPS, WARM_STEPS, SEQUENCES, MULTIPLE = 10, 5, 128, 64
Shape = tuple[int, int]

# The model of an H200 that `simulate` uses, fitted to three measured rows (48.1k, 97.8k and 94.6k tokens a
# second without cuDNN's attention): 165 tokens a millisecond, 4.8 ms a microbatch and no microbatch under
# 22 ms, 11 ms for a shape never seen, 10 ms for the optimizer. It gives 46.9k, 96.1k and 91.1k.
TOKENS_PER_MS, EACH_MS, LAUNCH_MS, NEW_SHAPE_MS, STEP_MS = 165.0, 4.8, 22.0, 11.0, 10.0


def draw_lengths(step: int, longest: int = 1024, count: int = SEQUENCES) -> list[int]:
    """Lognormal with a median of 200 and sigma 0.8, clipped: mean 273, and a fixed 8 keeps 42 % useful."""
    draw, scale = random.Random(1000 + step), longest / 1024
    drawn = [scale * draw.lognormvariate(5.3, 0.8) for _ in range(count)]
    return [int(min(longest, max(32 * scale, length))) for length in drawn]


def up(length: int) -> int:
    return -(-length // MULTIPLE) * MULTIPLE


# --- the peers' plans: (indices, padded length) -----------------------------------------------------------


def fixed(lengths: Sequence[int], size: int) -> Iterator[tuple[list[int], int]]:
    for start in range(0, len(lengths), size):
        rows = list(range(start, min(start + size, len(lengths))))
        yield rows, max(lengths[row] for row in rows)


def by_hand(lengths: Sequence[int], tokens: int = 12_000) -> Iterator[tuple[list[int], int]]:
    rows: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: lengths[index]):
        if rows and (len(rows) + 1) * up(lengths[index]) > tokens:
            yield rows, up(lengths[rows[-1]])
            rows = []
        rows.append(index)
    yield rows, up(lengths[rows[-1]])


# --- a training run, one way ------------------------------------------------------------------------------


class Run:
    """A model, its optimizer, and what is counted."""

    def __init__(self, tiny: bool, cap_gib: float) -> None:
        import torch
        import transformers as hf

        self.device = torch.device("cpu" if tiny else "cuda")
        self.budget_bytes = 0.9 * cap_gib * GIB  # live tensors: the allocator's rests need some of the cap
        self.longest = 128 if tiny else 1024
        self.count = 12 if tiny else SEQUENCES
        sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 97} if tiny else {}
        config = hf.GPT2Config(attn_implementation="sdpa", use_cache=False, **sizes)
        self.vocabulary = config.vocab_size
        torch.manual_seed(0)
        self.model = hf.GPT2LMHeadModel(config).to(self.device).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.shapes: set[Shape] = set()
        self.padded = self.useful = self.ooms = self.lost = self.microbatches = 0

    def batch(self, lengths: Sequence[int]) -> dict[str, Any]:
        """As a collator that pads on the right to a multiple of 64 gives it, on the host."""
        import torch

        width = up(max(lengths))
        mask = torch.arange(width) < torch.tensor(lengths).unsqueeze(1)
        ids = torch.randint(self.vocabulary, (len(lengths), width)).masked_fill(~mask, 0)
        return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}

    def loss(self, micro: dict[str, Any]) -> Any:
        """Right-padded and causal: tokens never look at padding, so that no mask is needed."""
        import torch

        ids = micro["input_ids"]
        self.shapes.add((ids.shape[0], ids.shape[1]))
        self.padded += ids.numel()
        self.microbatches += 1
        with torch.autocast(self.device.type, torch.bfloat16):
            return self.model(input_ids=ids, labels=micro["labels"]).loss

    def cut(self, batch: dict[str, Any], rows: list[int], length: int) -> dict[str, Any]:
        return {name: part[rows, :length] for name, part in batch.items()}

    def accumulate(self, micro: dict[str, Any], tokens: int) -> None:
        share = count_tokens(micro) / tokens
        moved = {name: part.to(self.device, non_blocking=True) for name, part in micro.items()}
        (self.loss(moved) * share).backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def count_tokens(micro: dict[str, Any]) -> int:
    return int((micro["labels"][:, 1:] != -100).sum())


def ran_out(work: Callable[[], None]) -> bool:
    import torch

    try:
        work()
    except torch.OutOfMemoryError:
        return True
    return False


def stepper(run: Run, way: str) -> Callable[[dict[str, Any], list[int]], bool]:
    """One training step, some way; False where the step was lost."""

    def planned(plan: Callable[[list[int]], Any]) -> Callable[[dict[str, Any], list[int]], bool]:
        def step(batch: dict[str, Any], lengths: list[int]) -> bool:
            tokens = count_tokens(batch)

            def work() -> None:
                for rows, length in plan(lengths):
                    run.accumulate(run.cut(batch, rows, length), tokens)

            if ran_out(work):
                run.ooms += 1
                run.optimizer.zero_grad(set_to_none=True)
                return False
            run.step()
            return True

        return step

    if way.startswith("fixed_"):
        return planned(lambda lengths: fixed(lengths, int(way.removeprefix("fixed_"))))
    if way == "by_hand":
        return planned(by_hand)
    if way == "one_shape":
        return planned(lambda lengths: fixed(lengths, 24))
    return {"halving": halving, "parts": parts, "ours": ours}[way](run)


def halving(run: Run) -> Callable[[dict[str, Any], list[int]], bool]:
    import torch

    size = run.count

    def step(batch: dict[str, Any], lengths: list[int]) -> bool:
        nonlocal size
        tokens, width = count_tokens(batch), batch["input_ids"].shape[1]
        while True:

            def work(size: int = size) -> None:
                for rows, _ in fixed(lengths, size):
                    run.accumulate(run.cut(batch, rows, width), tokens)

            if not ran_out(work):
                run.step()
                return True
            run.ooms += 1
            run.optimizer.zero_grad(set_to_none=True)
            gc.collect()
            torch.cuda.empty_cache()
            if size == 1:
                return False
            size = size // 2

    return step


def parts(run: Run) -> Callable[[dict[str, Any], list[int]], bool]:
    """What `ours` does, without its retries: plan, trim, read the peaks."""
    import torch

    from batchfit._engine.batch.trim import Trimmer, attention_without_plans
    from batchfit._engine.sizing.pure.memory_by_shape import MemoryModel
    from batchfit._engine.sizing.pure.pack import SeenShapes, pack

    memory, shapes, layout = MemoryModel(), SeenShapes(), None
    on_gpu = run.device.type == "cuda"

    def step(batch: dict[str, Any], lengths: list[int]) -> bool:
        nonlocal memory, shapes, layout
        trimmer = Trimmer.of(batch, "attention_mask", layout=layout)
        layout = trimmer.layout
        packs = pack(
            trimmer.lengths,
            most_samples=lambda length: memory.most_samples(length, run.budget_bytes),
            padded_length=trimmer.padded_length,
            shapes=shapes,
        )
        tokens, current = count_tokens(batch), packs[0]

        def work() -> None:
            nonlocal memory, current
            for one in packs:
                current = one
                held = torch.cuda.memory_allocated() if on_gpu else 0
                if on_gpu:
                    torch.cuda.reset_peak_memory_stats()
                run.accumulate(trimmer.take(one.samples, one.length), tokens)
                if on_gpu:
                    peak = torch.cuda.max_memory_allocated()
                    memory = memory.seen(*one.padded_shape, peak, held_bytes=held)

        with attention_without_plans(run.device):
            failed = ran_out(work)
        if failed:
            run.ooms += 1
            memory = memory.after_oom(*current.padded_shape)
            run.optimizer.zero_grad(set_to_none=True)
            return False
        shapes = shapes.ran(packs)
        run.step()
        return True

    return step


def ours(run: Run) -> Callable[[dict[str, Any], list[int]], bool]:
    import batchfit

    microbatcher = batchfit.Microbatcher(run.model, lengths="attention_mask", weight=count_tokens)

    def step(batch: dict[str, Any], lengths: list[int]) -> bool:
        report = microbatcher.backward(run.loss, batch)
        run.ooms += report.retries
        microbatcher.step(run.optimizer)
        run.optimizer.zero_grad(set_to_none=True)
        return True

    return step


def run_one(way: str, flags: str, *, tiny: bool, cap_gib: float) -> dict[str, Any]:
    import torch

    if flags == "no_cudnn_attention":
        torch.backends.cuda.enable_cudnn_sdp(False)
    run = Run(tiny, cap_gib)
    wait = (lambda: None) if tiny else torch.cuda.synchronize

    def lengths_at(step: int) -> list[int]:
        drawn = draw_lengths(step, run.longest, run.count)
        if way != "one_shape":
            return drawn
        length = run.longest // 2
        return [length] * (24 * max(1, round(sum(drawn) / length / 24)))

    first = run.batch([40, 48])
    run.accumulate(run.cut(first, [0, 1], 48), count_tokens(first))
    run.step()
    wait()
    step, answer, done = stepper(run, way), {}, 0
    for phase, steps in (("cold", 2), ("warm", 2)) if tiny else (("cold", STEPS), ("warm", WARM_STEPS)):
        before = set(run.shapes) if phase == "warm" else set()
        run.shapes.clear()
        run.padded = run.ooms = run.lost = run.microbatches = 0
        useful = made = 0
        batches = [(run.batch(lengths), lengths) for lengths in map(lengths_at, range(done, done + steps))]
        wait()
        begun = time.perf_counter()
        for batch, lengths in batches:
            if step(batch, lengths):
                made += sum(lengths)
                useful += sum(lengths)
            else:
                run.lost += 1
        wait()
        seconds = time.perf_counter() - begun
        answer[phase] = {
            "tokens_per_s": made / seconds,
            "useful_share": useful / run.padded if run.padded else 0.0,
            "shapes": len(run.shapes),
            "new_shapes": len(run.shapes - before),
            "microbatches": run.microbatches,
            "ooms": run.ooms,
            "lost_steps": run.lost,
            "seconds": seconds,
        }
        done += steps
    if not tiny:
        stats = torch.cuda.memory_stats()
        answer["reserved_gib"] = stats["reserved_bytes.all.current"] / GIB  # peaks are reset by some ways
        answer["alloc_retries"] = stats["num_alloc_retries"]
    return answer


# --- a simulated GPU --------------------------------------------------------------------------------------


def simulate() -> None:
    """The plans of 20 steps, four draws, under the model of the GPU; tokens a second, cold and warm."""
    from batchfit._engine.sizing.pure.memory_by_shape import MemoryModel
    from batchfit._engine.sizing.pure.pack import SeenShapes, pack

    def learned() -> Callable[[list[int]], list[Shape]]:
        state = {"memory": MemoryModel(), "shapes": SeenShapes()}

        def plan(lengths: list[int]) -> list[Shape]:
            packs = pack(
                lengths,
                most_samples=lambda length: state["memory"].most_samples(length, 13_000),
                padded_length=1024,
                shapes=state["shapes"],
            )
            state["shapes"] = state["shapes"].ran(packs)
            for one in packs:
                state["memory"] = state["memory"].seen(*one.padded_shape, math.prod(one.padded_shape))
            return [one.padded_shape for one in packs]

        return plan

    def plain(plan: Callable[[list[int]], Any]) -> Callable[[list[int]], list[Shape]]:
        return lambda lengths: [(len(rows), length) for rows, length in plan(lengths)]

    ways: dict[str, Callable[[], Callable[[list[int]], list[Shape]]]] = {
        "fixed_8": lambda: plain(lambda lengths: fixed(lengths, 8)),
        "by_hand": lambda: plain(by_hand),
        "ours": learned,
    }
    print("| way | new shape | cold tokens/s | useful | shapes | warm tokens/s | useful | new shapes |")
    print("|---|---|---|---|---|---|---|---|")
    for new_shape in (NEW_SHAPE_MS, 30.0):
        for name, make in ways.items():
            rows = [_simulated(make(), draw, new_shape) for draw in range(4)]
            mean = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
            cold, cold_share, shapes, warm, warm_share, fresh = mean
            print(
                f"| {name} | {new_shape:.0f} ms | {cold:.1f}k | {cold_share:.0%} | {shapes:.0f} "
                f"| {warm:.1f}k | {warm_share:.0%} | {fresh:.0f} |"
            )


def _simulated(plan: Callable[[list[int]], list[Shape]], draw: int, new_shape: float) -> list[float]:
    seen: set[Shape] = set()
    figures: list[float] = []
    for phase in range(2):
        spent, useful, padded, known = 0.0, 0, 0, len(seen)
        for step in range(STEPS):
            lengths = draw_lengths(10_000 * draw + phase * STEPS + step)
            for shape in plan(lengths):
                tokens = shape[0] * shape[1]
                spent += max(LAUNCH_MS, EACH_MS + tokens / TOKENS_PER_MS) + new_shape * (shape not in seen)
                seen.add(shape)
                padded += tokens
            spent += STEP_MS
            useful += sum(lengths)
        figures += [useful / spent, useful / padded, float(len(seen) - known)]
    return figures


# --- results ----------------------------------------------------------------------------------------------


def page(results: dict[str, Any]) -> str:
    """The dated page: every figure comes from the JSON."""
    about = results["about"]
    lines = [
        f"# Ragged batches on a {about['gpu']}, capped at {about['cap_gib']} GiB",
        "",
        f"Made by `{about['command']}`; torch {about['torch']}, transformers {about['transformers']}, python",
        f"{about['python']}. GPT-2 small, bf16 autocast, AdamW, {SEQUENCES} sequences a step with lognormal",
        "lengths (32 to 1024, median 200), each row in a fresh process. Cold: the first ten steps; warm:",
        "five more, of other sequences. Useful tokens of steps that were made, over all seconds.",
        "",
        "| way | flags | cold tokens/s | warm tokens/s | useful tokens | shapes (new when warm) | OOMs "
        "| lost steps | reserved | retries |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in (name for name in results if name != "about"):
        one, (way, flags) = results[name], name.split("/")
        if "error" in one:
            lines.append(f"| {way} | {flags} | failed: {one['error'].splitlines()[-1]} ||||||||")
            continue
        cold, warm = one["cold"], one["warm"]
        lines.append(
            f"| {way} | {flags} | {cold['tokens_per_s'] / 1e3:.1f}k | {warm['tokens_per_s'] / 1e3:.1f}k "
            f"| {cold['useful_share']:.0%} | {cold['shapes']} ({warm['new_shapes']}) "
            f"| {cold['ooms'] + warm['ooms']} | {cold['lost_steps'] + warm['lost_steps']} "
            f"| {one.get('reserved_gib', 0):.1f} GiB | {one.get('alloc_retries', 0)} |"
        )
    return "\n".join(lines) + "\n"


def begun(way: str, flags: str, given: argparse.Namespace) -> subprocess.Popen[str]:
    """One row in a fresh process, which imports and then waits for its turn."""
    command = [sys.executable, __file__, "one", way, flags, "--cap-gib", str(given.cap_gib)]
    command += ["--smoke"] if given.smoke else []
    quiet = {**os.environ, "PYTHONWARNINGS": "ignore"}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=quiet)


def answer_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Let it run."""
    out, err = process.communicate("go\n")
    return dict(json.loads(out.splitlines()[-1])) if process.returncode == 0 else {"error": err[-1500:]}


def about(given: argparse.Namespace) -> dict[str, Any]:
    import torch
    import transformers

    on_gpu = torch.cuda.is_available() and not given.smoke
    return {
        "command": f"python benchmarks/ragged_gpu.py run --cap-gib {given.cap_gib}",
        "gpu": torch.cuda.get_device_name(0) if on_gpu else "CPU (a tiny model)",
        "cap_gib": given.cap_gib,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def run_all(results: dict[str, Any], given: argparse.Namespace) -> None:
    """Every row that is missing."""
    rows = [(way, flags) for way in given.ways for flags in given.flags]
    left = [row for row in rows if "cold" not in results.get("/".join(row), {})]
    start, following = time.perf_counter(), None
    for at, row in enumerate(left):
        if time.perf_counter() - start > given.deadline_s:
            break
        current = following or begun(*row, given)
        following = begun(*left[at + 1], given) if at + 1 < len(left) else None
        results["/".join(row)] = answer_of(current)
        keep(given.out, results)
        print("/".join(row), json.dumps(results["/".join(row)]), flush=True)
    if following is not None:
        following.kill()
        following.communicate()
    print(f"{sum('cold' not in results.get('/'.join(row), {}) for row in rows)} rows left")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("--out", type=Path, default=Path("ragged_gpu.json"))
    running.add_argument("--ways", nargs="+", default=[way for way in WAYS if way != "parts"], choices=WAYS)
    running.add_argument("--deadline-s", type=float, default=1e9, help="no row starts later than this")
    running.add_argument("--flags", nargs="+", default=list(FLAGS), choices=FLAGS)
    commands.add_parser("simulate", help="plans under a model of the GPU, on the CPU")
    add_page(commands)
    single = commands.add_parser("one")
    single.add_argument("way", choices=WAYS)
    single.add_argument("flags", choices=FLAGS)
    for command in (running, single):
        command.add_argument("--cap-gib", type=float, default=23.8)
        command.add_argument(
            "--smoke", action="store_true", help="a tiny model on the CPU, two steps a phase"
        )
    given = parser.parse_args()

    if given.command == "page":
        write_page(given, page)
    elif given.command == "simulate":
        simulate()
    elif given.command == "one":
        import torch
        import transformers  # noqa: F401

        import batchfit._microbatch.microbatcher  # noqa: F401

        sys.stdin.readline()  # its turn: nothing has touched the GPU so far
        if not given.smoke:
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(given.cap_gib * GIB / total)
        print(json.dumps(run_one(given.way, given.flags, tiny=given.smoke, cap_gib=given.cap_gib)))
    else:
        results: dict[str, Any] = json.loads(given.out.read_text()) if given.out.exists() else {}
        results["about"] = about(given)
        run_all(results, given)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
