"""Virtual memory beside a real GPU: peaks of the same training steps, phase by phase.

    python benchmarks/virtual_vs_gpu.py --out gpu.json        # where there is a GPU
    python benchmarks/virtual_vs_gpu.py --out cpu.json        # where there is none
    python benchmarks/virtual_vs_gpu.py --compare gpu.json cpu.json --out comparison.md

Each row is a model trained for 3 steps in fp32 with AdamW(foreach=True). Recorded: the peak of each phase
(forward with its loss, backward, optimizer), the peak of all, what is held between steps, and the bytes that
were requested before rounding to blocks. On a GPU also what the count on a CPU cannot see, so that a
difference is explained and not guessed at: the workspaces that cuBLAS keeps, and, from one more step under a
probe, the live bytes after each operation (no temporaries of kernels) and the largest temporary.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

STEPS = 3
PHASES = ("forward", "backward", "optimizer")
MIB = 2**20


def make_mlp(*, bias: bool = True) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(6):
        layers += [nn.Linear(768, 768, bias=bias), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(768, 10, bias=bias))


def make_mlp_without_bias() -> nn.Module:
    """Without the one kernel of an MLP that takes memory of its own: the sum that makes a bias' gradient."""
    return make_mlp(bias=False)


def make_conv_net() -> nn.Module:
    layers: list[nn.Module] = []
    before = 3
    for channels, stride in [(32, 1), (32, 1), (64, 2), (64, 1), (128, 2), (128, 1)]:
        layers += [
            nn.Conv2d(before, channels, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
        ]
        before = channels
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 10))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, time_steps, width = x.shape
        parts = self.qkv(self.norm1(x)).split(width, dim=-1)
        q, k, v = (p.view(batch, time_steps, self.heads, -1).transpose(1, 2) for p in parts)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, time_steps, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A small decoder; dropout 0, as a CPU keeps other dropout masks than a GPU."""

    def __init__(
        self, *, vocabulary: int = 8192, width: int = 256, layers: int = 6, context: int = 256
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, width // 64) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def classes_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def next_token_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def vectors(size: int, device: str) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 768, device=device), torch.randint(10, (size,), device=device)


def images(size: int, device: str) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 3, 64, 64, device=device), torch.randint(10, (size,), device=device)


def texts(size: int, device: str) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(8192, (size, 257), device=device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


# name, model, batch, batch size, loss, attention. The odd batches show the rounding to blocks at work.
Case = tuple[str, Callable[[], nn.Module], Callable[[int, str], Any], int, Callable[..., Tensor], str]
CASES: list[Case] = [
    ("mlp", make_mlp, vectors, 8192, classes_loss, "none"),
    ("mlp, no bias", make_mlp_without_bias, vectors, 8192, classes_loss, "none"),
    ("mlp, odd batch", make_mlp, vectors, 8000, classes_loss, "none"),
    ("conv net", make_conv_net, images, 64, classes_loss, "none"),
    ("conv net, odd batch", make_conv_net, images, 61, classes_loss, "none"),
    ("gpt", GPT, texts, 8, next_token_loss, "default"),
    ("gpt, math attention", GPT, texts, 8, next_token_loss, "math"),
]


class CudaMeter:
    """Peaks as the CUDA caching allocator reports them."""

    device = "cuda"

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated()

    def requested_peak(self) -> int | None:
        return torch.cuda.memory_stats().get("requested_bytes.all.peak")

    def held(self) -> int:
        return torch.cuda.memory_allocated()


class VirtualMeter:
    """Peaks as virtual memory counts them."""

    device = "cpu"

    def __init__(self, memory: Any) -> None:
        self.memory = memory

    def reset(self) -> None:
        self.memory.reset_peak()

    def peak(self) -> int:
        return int(self.memory.peak_bytes)

    def requested_peak(self) -> int | None:
        return None

    def held(self) -> int:
        return int(self.memory.allocated_bytes)


class Probe(TorchDispatchMode):
    """After each operation: the live bytes; during it: how much more was taken and given back."""

    def __init__(self) -> None:
        super().__init__()
        self.live_peak = 0
        self.temporary = 0
        self.temporary_op = ""
        self.attention: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        result = func(*args, **(kwargs or {}))
        if "attention" in str(func):
            self.attention.add(str(func))
        if torch.cuda.is_available():
            live = torch.cuda.memory_allocated()
            self.live_peak = max(self.live_peak, live)
            more = torch.cuda.max_memory_allocated() - live
            if more > self.temporary:
                self.temporary, self.temporary_op = more, str(func)
        return result


def run_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss_fn: Callable[..., Tensor], batch: Any, meter: Any
) -> dict[str, int | None]:
    """One step; the peak of each phase, and the peak of what was requested."""
    peaks: dict[str, int | None] = {}
    requested = []
    loss: Tensor | None = None
    for phase in PHASES:
        meter.reset()
        if phase == "forward":
            loss = loss_fn(model, batch)
        elif phase == "backward":
            assert loss is not None
            loss.backward()
            loss = None
        else:
            optimizer.step()
        peaks[phase] = meter.peak()
        requested.append(meter.requested_peak())
    optimizer.zero_grad(set_to_none=True)
    peaks["held"] = meter.held()
    peaks["requested"] = None if None in requested else max(r for r in requested if r is not None)
    return peaks


def measure(case: Case, meter: Any, *, step_count: int = STEPS, probed: bool = True) -> dict[str, Any]:
    """One row: the steps, and one more under the probe."""
    name, make_model, make_batch, size, loss_fn, attention = case
    torch.manual_seed(0)
    started = time.perf_counter()
    at_start = meter.held()
    backend = sdpa_kernel(SDPBackend.MATH) if attention == "math" else contextlib.nullcontext()
    with backend:
        model = make_model().to(meter.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
        batch = make_batch(size, meter.device)
        steps = [run_step(model, optimizer, loss_fn, batch, meter) for _ in range(step_count)]
        row: dict[str, Any] = {
            "model": name,
            "batch_size": size,
            "parameters": sum(p.numel() for p in model.parameters()),
            "at_start_bytes": at_start,
            "steps": steps,
            "peak_bytes": max(step[phase] or 0 for step in steps for phase in PHASES),
            "held_bytes": steps[-1]["held"],
            "requested_peak_bytes": max((step["requested"] or 0 for step in steps), default=0) or None,
        }
        probe = Probe()
        if probed:
            with probe:
                loss = loss_fn(model, batch)
                loss.backward()
                del loss
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
    row["attention_ops"] = sorted(probe.attention)
    if meter.device == "cuda":
        row["live_peak_bytes"] = probe.live_peak
        row["largest_temporary"] = {"op": probe.temporary_op, "bytes": probe.temporary}
        before = torch.cuda.memory_allocated()
        torch._C._cuda_clearCublasWorkspaces()
        row["workspaces_bytes"] = before - torch.cuda.memory_allocated()
    row["elapsed_s"] = round(time.perf_counter() - started, 2)
    return row


@contextlib.contextmanager
def counting_requests() -> Iterator[None]:
    """Inside, virtual memory counts bytes as they are requested, without rounding them to blocks."""
    from batchfit._engine.virtual_memory import ledger, op_sizes
    from batchfit._engine.virtual_memory import memory as virtual

    kept = op_sizes.block_bytes
    op_sizes.SIZES.clear()
    op_sizes.block_bytes = virtual.block_bytes = ledger.block_bytes = lambda requested: requested
    try:
        yield
    finally:
        op_sizes.block_bytes = virtual.block_bytes = ledger.block_bytes = kept
        op_sizes.SIZES.clear()


def measure_on_cpu(case: Case) -> dict[str, Any]:
    import batchfit

    with batchfit.virtual_memory("64GiB") as memory:
        row = measure(case, VirtualMeter(memory), probed=case[-1] != "none")
    gc.collect()
    with counting_requests(), batchfit.virtual_memory("64GiB") as memory:
        # AdamW's state is there from the second step on: two steps have the peak of three.
        twin = measure(case, VirtualMeter(memory), step_count=2, probed=False)
        row["requested_peak_bytes"] = twin["peak_bytes"]
    gc.collect()
    return row


def measure_on_gpu(case: Case) -> dict[str, Any]:
    gc.collect()
    torch.cuda.empty_cache()
    row = measure(case, CudaMeter())
    gc.collect()
    torch.cuda.empty_cache()
    return row


def measure_all() -> dict[str, Any]:
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.zeros(1, device="cuda")
    rows = [measure_on_gpu(case) if on_gpu else measure_on_cpu(case) for case in CASES]
    return {
        "device": torch.cuda.get_device_name() if on_gpu else f"virtual memory on {platform.machine()}",
        "kind": "cuda" if on_gpu else "virtual",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "rows": rows,
    }


def percent(virtual: int | None, truth: int | None) -> str:
    return f"{(virtual / truth - 1) * 100:+.2f} %" if virtual and truth else "-"


def mib(count: int | None) -> str:
    return f"{count / MIB:.1f}" if count is not None else "-"


def compare(first: dict[str, Any], second: dict[str, Any]) -> str:
    """Two Markdown tables: the peaks phase by phase, and what explains the differences."""
    gpu, cpu = (first, second) if first["kind"] == "cuda" else (second, first)
    if (gpu["kind"], cpu["kind"]) != ("cuda", "virtual"):
        raise SystemExit(
            f"--compare must have one file of a GPU and one of a CPU, not {gpu['kind']}, {cpu['kind']}"
        )
    lines = [
        f"# Virtual memory beside {gpu['device']}",
        "",
        f"GPU: torch {gpu['torch']}; virtual memory: torch {cpu['torch']}. MiB, the last of {STEPS} steps.",
        "Difference = virtual / GPU - 1. 'GPU' is `torch.cuda.max_memory_allocated()`.",
        "",
        "| model | phase | GPU | virtual | difference | GPU less cuBLAS workspaces | difference |",
        "|---|---|---|---|---|---|---|",
    ]
    why = [
        "",
        "| model | requested: GPU | virtual | difference | live after operations: GPU, less workspaces "
        "| virtual | difference | cuBLAS workspaces | largest temporary inside an operation |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    rows = {row["model"]: row for row in cpu["rows"]}
    for truth in gpu["rows"]:
        row = rows[truth["model"]]
        kept = truth["workspaces_bytes"]
        pairs = [(phase, truth["steps"][-1][phase], row["steps"][-1][phase]) for phase in (*PHASES, "held")]
        for phase, real, ours in [*pairs, ("**peak**", truth["peak_bytes"], row["peak_bytes"])]:
            lines.append(
                f"| {truth['model']} | {phase} | {mib(real)} | {mib(ours)} | {percent(ours, real)} "
                f"| {mib(real - kept)} | {percent(ours, real - kept)} |"
            )
        temporary = truth["largest_temporary"]
        live = truth["live_peak_bytes"] - kept
        why.append(
            f"| {truth['model']} | {mib(truth['requested_peak_bytes'])} | {mib(row['requested_peak_bytes'])} "
            f"| {percent(row['requested_peak_bytes'], truth['requested_peak_bytes'])} | {mib(live)} "
            f"| {mib(row['peak_bytes'])} | {percent(row['peak_bytes'], live)} | {mib(kept)} "
            f"| {mib(temporary['bytes'])} in {temporary['op']} |"
        )
    attention = [
        f"- {truth['model']}: GPU {', '.join(truth['attention_ops']) or 'plain operations'}; "
        f"virtual {', '.join(rows[truth['model']]['attention_ops']) or 'plain operations'}"
        for truth in gpu["rows"]
        if truth["model"].startswith("gpt")
    ]
    return "\n".join([*lines, *why, "", "Attention:", "", *attention, ""])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="where the JSON (or, with --compare, the table) goes")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("A.json", "B.json"))
    options = parser.parse_args()
    if options.compare:
        text = compare(*(json.loads(path.read_text()) for path in options.compare))
    else:
        text = json.dumps(measure_all(), indent=2) + "\n"
    print(text)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text)


if __name__ == "__main__":
    main()
