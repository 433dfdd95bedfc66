"""Microbatches on two ranks: what safety costs beside DDP's own accumulation. One GPU (or none), gloo.

    python benchmarks/ranks_gpu.py run --out ranks.json --deadline-s 240     # again: goes on where it was
    python benchmarks/ranks_gpu.py page ranks.json --to page.md              # every figure is in the JSON
    python benchmarks/ranks_gpu.py run --smoke --out smoke.json              # a tiny model on the CPU

Whole training steps (zero_grad, forward and backward, AdamW) of GPT-2 small in bf16, 512 tokens, on two ranks
that share the card, in turns within one pair of processes:
- `ddp`: by hand, as torch's documentation has it: `no_sync()` for all microbatches but the last, whose
  backward overlaps with the reduction. With one microbatch it is plain DDP with overlap.
- `late`: by hand, all microbatches under `no_sync()`, then one all-reduce a bucket: what `safe` does, without
  any vote.
- `safe`, `overlap`: `Microbatcher(sync=...)` with `mb.step`.
Parts: `many` (8 microbatches of 4), `one` (a single one of 32 samples), each with the time of a vote alone.
"""

from __future__ import annotations

import argparse
import json
import platform
import socket
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from pages import add_page, write_page
from rows import keep
from turns import interval

PARTS = {"many": 8, "one": 1}
SAMPLES, LENGTH, WARM, ROUNDS, LEAST = 32, 512, 9, 40, 10
CONTENDERS = ("ddp", "late", "safe", "overlap")
Results = dict[str, Any]


# ---- one rank


def rank_of(part: str, rank: int, port: int, smoke: bool, deadline_s: float) -> Results:
    import torch
    import torch.distributed as dist

    from batchfit._engine.distributed.ranks import Ranks

    if smoke:
        torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    works = contenders(PARTS[part], rank, smoke)
    wait = (lambda: None) if smoke else torch.cuda.synchronize
    votes: list[float] = []
    gather = Ranks.gather

    def timed(self: Ranks, value: object, *, doing: str) -> list[Any]:
        begun = time.perf_counter()
        found = gather(self, value, doing=doing)
        votes.append(time.perf_counter() - begun)
        return found

    Ranks.gather = timed  # type: ignore[method-assign]
    ranks, begun = Ranks.current(), time.perf_counter()
    for _ in range(2 if smoke else WARM):  # the atomic step records its first eight
        for work in works.values():
            work()
    seconds: dict[str, list[float]] = {name: [] for name in works}
    waited: dict[str, list[float]] = {name: [] for name in works}
    for number in range(3 if smoke else ROUNDS):
        if ranks.any(time.perf_counter() - begun > deadline_s, doing="the time"):
            break
        order = list(works)
        order = order[number % len(order) :] + order[: number % len(order)]
        for name in order if number % 2 else reversed(order):
            wait()
            dist.barrier()
            votes.clear()
            at = time.perf_counter()
            works[name]()
            wait()
            seconds[name].append(time.perf_counter() - at)
            waited[name].append(sum(votes))
    alone = []
    for _ in range(5 if smoke else 200):
        at = time.perf_counter()
        ranks.any(False, doing="a vote alone")
        alone.append(time.perf_counter() - at)
    answer = {"seconds": seconds, "in_votes_s": waited, "vote_s": alone}
    ranks.settle()
    dist.destroy_process_group()
    return answer


def contenders(count: int, rank: int, smoke: bool) -> dict[str, Any]:
    """Each does one whole step on this rank's batch, in `count` microbatches."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import batchfit
    from batchfit._engine.data_parallel.all_reduce import Reduction

    inner, loss, batch, device = gpt2(rank, smoke)
    model = DistributedDataParallel(inner, device_ids=None if smoke else [0])
    optimizer = torch.optim.AdamW(inner.parameters(), lr=1e-5)
    size = len(batch["input_ids"]) // count

    def fn(micro: dict[str, Any]) -> Any:
        return loss(model, micro)

    def accumulate(quiet: int) -> None:
        for at in range(count):
            rows = slice(at * size, (at + 1) * size)
            micro = {name: part[rows].to(device, non_blocking=True) for name, part in batch.items()}
            with model.no_sync() if at < quiet else nullcontext():
                (fn(micro) / count).backward()

    def ddp() -> None:
        optimizer.zero_grad()
        accumulate(count - 1)
        optimizer.step()

    parameters = list(inner.parameters())

    def late() -> None:
        optimizer.zero_grad()
        accumulate(count)
        gradients = [p.grad for p in parameters]
        Reduction(parameters, [], group=dist.group.WORLD).run(parameters, gradients)  # type: ignore[arg-type]
        torch._foreach_mul_(gradients, 0.5)
        optimizer.step()

    made = {
        sync: batchfit.Microbatcher(model, microbatch_size=size, sync=sync)  # type: ignore[arg-type]
        for sync in ("safe", "overlap")
    }

    def ours(sync: str) -> None:
        optimizer.zero_grad()
        made[sync].backward(fn, batch)
        made[sync].step(optimizer)

    return {"ddp": ddp, "late": late, "safe": lambda: ours("safe"), "overlap": lambda: ours("overlap")}


def gpt2(rank: int, smoke: bool) -> tuple[Any, Any, dict[str, Any], Any]:
    import torch
    import transformers as hf

    device = torch.device("cpu" if smoke else "cuda:0")
    tiny = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 97, "bos_token_id": 0, "eos_token_id": 0}
    config = hf.GPT2Config(attn_implementation="sdpa", use_cache=False, **(tiny if smoke else {}))
    torch.manual_seed(0)
    model = hf.GPT2LMHeadModel(config).to(device).train()
    torch.manual_seed(rank)
    ids = torch.randint(config.vocab_size, (SAMPLES, 16 if smoke else LENGTH))

    def loss(model: Any, micro: dict[str, Any]) -> Any:
        with torch.autocast(device.type, torch.bfloat16):
            return model(**micro).loss

    return model, loss, {"input_ids": ids, "labels": ids}, device


# ---- all of it


def run(given: argparse.Namespace) -> None:
    results: Results = json.loads(given.out.read_text()) if given.out.exists() else {}
    begun = time.perf_counter()
    results["about"] = about(given.smoke)
    for part in PARTS:
        left_s = given.deadline_s - (time.perf_counter() - begun)
        if part in results or left_s <= 0:
            print(f"{part}: {'is there' if part in results else 'left for another call'}", flush=True)
            continue
        found = both_ranks(part, given.smoke, left_s / (len(PARTS) - list(PARTS).index(part)))
        least = 1 if given.smoke else LEAST
        if len(found["seconds"]["ddp"]) < least:  # kept, it would never be measured again
            print(f"{part}: no time for {least} rounds, left for another call", flush=True)
            continue
        results[part] = found
        keep(given.out, results)
        print(f"{part}: {summary(results[part])}", flush=True)
    print(f"{sum(part not in results for part in PARTS)} parts left")


def both_ranks(part: str, smoke: bool, deadline_s: float) -> Results:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = ["--smoke"] if smoke else []
    command = [sys.executable, __file__, "rank", part, "--port", str(port), *flags]
    command += ["--deadline-s", str(max(1.0, deadline_s - 30))]  # starting takes a while too
    ranks = [
        subprocess.Popen([*command, "--rank", str(rank)], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        told = [process.communicate(timeout=deadline_s + 240)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()  # nothing where it has ended
    if any(process.returncode for process in ranks):
        raise RuntimeError(f"{part}: ranks ended with {[process.returncode for process in ranks]}")
    found: Results = json.loads(told[0].splitlines()[-1])
    return found


def about(smoke: bool) -> Results:
    import torch

    device = "CPU" if smoke else torch.cuda.get_device_name(0)
    return {
        "device": device,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "smoke": smoke,
    }


def summary(part: Results) -> Results:
    """Medians, the ratio to `ddp` round by round with a 95 % interval of its median, and the votes."""
    seconds = part["seconds"]
    base = seconds["ddp"]
    told: Results = {"vote_ms": 1e3 * statistics.median(part["vote_s"]), "rounds": len(base)}
    for name in CONTENDERS:
        ratios = [one / other for one, other in zip(seconds[name], base, strict=True)]
        low, high = interval(ratios)
        step_s = statistics.median(seconds[name])
        told[name] = {
            "step_ms": 1e3 * step_s,
            "ratio": statistics.median(ratios),
            "ratio_low": low,
            "ratio_high": high,
            "in_votes": statistics.median(part["in_votes_s"][name]) / step_s,
        }
    return told


def page(results: Results) -> str:
    """The dated page: every figure comes from the JSON."""
    told = results["about"]
    lines = [
        f"# Two ranks on one {told['device']}",
        "",
        f"{told['date']}, torch {told['torch']}, Python {told['python']}, gloo, GPT-2 small in bf16, "
        f"{SAMPLES} samples of {LENGTH} tokens a rank and step, AdamW. Steps in turns; ratio to `ddp` of the "
        "same round, median with a 95 % interval.",
        "",
        "| part | contender | step | ratio to `ddp` | part of the step in votes |",
        "|---|---|---|---|---|",
    ]
    for part in PARTS:
        if part not in results:
            continue
        found = summary(results[part])
        for name in CONTENDERS:
            one = found[name]
            lines.append(
                f"| {part} | `{name}` | {one['step_ms']:.1f} ms | {one['ratio']:.3f} "
                f"({one['ratio_low']:.3f} to {one['ratio_high']:.3f}) | {100 * one['in_votes']:.1f} % |"
            )
        lines.append(f"| {part} | a vote alone | {found['vote_ms']:.2f} ms | | |")
    return "\n".join([*lines, "", "`python benchmarks/ranks_gpu.py run --out ranks.json`", ""])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("--out", type=Path, default=Path("ranks_gpu.json"))
    running.add_argument("--smoke", action="store_true", help="a tiny model, no GPU")
    running.add_argument("--deadline-s", type=float, default=600.0, help="rounds end about then")
    add_page(commands)
    single = commands.add_parser("rank")
    single.add_argument("part", choices=PARTS)
    single.add_argument("--rank", type=int, required=True)
    single.add_argument("--port", type=int, required=True)
    single.add_argument("--smoke", action="store_true")
    single.add_argument("--deadline-s", type=float, default=600.0)
    given = parser.parse_args()
    if given.command == "run":
        run(given)
    elif given.command == "rank":
        print(json.dumps(rank_of(given.part, given.rank, given.port, given.smoke, given.deadline_s)))
    else:
        write_page(given, page)


if __name__ == "__main__":
    main()
