"""Memory snapshots of OOMs with a known cause, as PyTorch writes them on a GPU.

    python benchmarks/snapshots_gpu.py --folder snapshots          # one process per cause, on a GPU

Each program is small, ends in an OOM for one planted reason, and writes the allocator's snapshot from the
observer of OOMs (what was live at that moment is still live). They are the ground truth for a reader of such
files. Names of folders are cut from the stacks. `tests/data/snapshots` keeps what an H200 gave.
"""

from __future__ import annotations

import argparse
import gzip
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

GIB = 2**30
CAP = 1 * GIB


class Net(nn.Module):
    """A small GPT without attention masks: an embedding, blocks, a head over a vocabulary."""

    def __init__(self, width: int = 256, layers: int = 4, vocabulary: int = 4096) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, dropout=0.0)
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(ids)))


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    out = model(ids)
    return nn.functional.cross_entropy(out.flatten(0, 1), ids.flatten())


def batch(rows: int, length: int = 128) -> torch.Tensor:
    return torch.randint(0, 4096, (rows, length), device="cuda")


def too_large() -> None:
    """The batch is too large: the first step is out of memory in forward."""
    model = Net().cuda()
    for _ in range(3):
        loss_of(model, batch(256)).backward()


def leak() -> None:
    """A list keeps every loss with its graph, so that each step leaves its activations behind."""
    model = Net().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    history = []
    for _ in range(200):
        optimizer.zero_grad()
        loss = loss_of(model, batch(4))
        loss.backward(retain_graph=True)
        optimizer.step()
        history.append(loss)


def long_batch() -> None:
    """Batches of 64 tokens, and in the ninth step one of 2,048."""
    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(12):
        optimizer.zero_grad()
        loss_of(model, batch(12, 2048 if step == 8 else 64)).backward()
        optimizer.step()


def optimizer_state() -> None:
    """Forward and backward fit; the optimizer's first step creates two more values per weight."""
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(20))).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 2048, device="cuda")).square().mean().backward()
        optimizer.step()


def fragmentation() -> None:
    """A segment of 900 MiB in blocks of 12, every second of them freed: 420 MiB are free, 200 do not fit."""
    big = torch.empty(900 * 2**20, dtype=torch.uint8, device="cuda")
    del big
    kept = [torch.empty(12 * 2**20, dtype=torch.uint8, device="cuda") for _ in range(70)]
    del kept[::2]
    activations = torch.empty(200 * 2**20, dtype=torch.uint8, device="cuda")
    del activations, kept


def other_process() -> None:
    """Another process has nearly all of the GPU: this one is out of memory with little of its own."""
    taker = (
        "import sys, torch\n"
        "free, _ = torch.cuda.mem_get_info()\n"
        f"held = torch.empty(free - {CAP}, dtype=torch.uint8, device='cuda')\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", taker]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        assert other.stdout.readline().strip() == "held"
        try:
            model = Net().cuda()
            for _ in range(3):
                loss_of(model, batch(64, 256)).backward()
        finally:
            other.stdin.close()


CAUSES = {
    one.__name__: one for one in (too_large, leak, long_batch, optimizer_state, fragmentation, other_process)
}


def shortened(value: Any) -> Any:
    """The same without the names of folders, which say where a program lay and nothing else."""
    if isinstance(value, dict):
        return {
            key: _file(one) if key == "filename" and isinstance(one, str) else shortened(one)
            for key, one in value.items()
        }
    if isinstance(value, list | tuple):
        return type(value)(shortened(one) for one in value)
    return value


def _file(name: str) -> str:
    for mark in ("/site-packages/", "/dist-packages/"):
        if mark in name:
            return "site-packages/" + name.split(mark)[-1]
    return Path(name).name


def record(cause: str, path: Path) -> None:
    """Run one cause to its OOM; its snapshot, with what the error said beside it."""
    total = torch.cuda.get_device_properties(0).total_memory
    if cause != "other_process":
        torch.cuda.set_per_process_memory_fraction(CAP / total)
    torch.cuda.memory._record_memory_history(max_entries=200_000, stacks="python")
    taken: list[Any] = []
    torch._C._cuda_attach_out_of_memory_observer(
        lambda *_: None if taken else taken.append(torch.cuda.memory._snapshot())
    )
    said = ""
    try:
        CAUSES[cause]()
    except torch.OutOfMemoryError as error:
        said = str(error)
    if not taken:
        raise SystemExit(f"{cause} did not end in an OOM")
    about = {"torch": torch.__version__, "device": torch.cuda.get_device_name(), "message": said}
    with gzip.open(path, "wb", compresslevel=9) as file:
        pickle.dump(shortened(taken[0]), file)
    print(cause, path.stat().st_size, {k: len(v) for k, v in taken[0].items() if isinstance(v, list)}, about)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("snapshots"))
    parser.add_argument("--cause", choices=CAUSES)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    if given.cause:
        record(given.cause, given.folder / f"{given.cause}.pickle.gz")
        return
    for cause in CAUSES:
        subprocess.run(
            [sys.executable, __file__, "--cause", cause, "--folder", str(given.folder)], check=False
        )


if __name__ == "__main__":
    main()
