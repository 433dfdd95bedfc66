"""What it costs to read a memory snapshot of gigabytes, and to record one on a CPU.

    python benchmarks/snapshot_reading.py --gib 1 0.02 --folder snapshots --out FILE.json
    python benchmarks/snapshot_reading.py --page FILE.json

A file is made as PyTorch writes it (protocol 4, frames shared, 30 frames per entry), read by `explain_oom` in
a process of its own, and for comparison by `pickle.load`, which runs what is in a file. Seconds are those of
the processor, memory is the peak of the process. Recording: steps of a small model under `virtual_memory`,
with and without `record_oom`, in turns.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

FRAMES = 30
ENTRIES = 1000  # in a batch of the pickler
CHUNKS = 10


def entries(number: int) -> list[dict[str, Any]]:
    """A thousand entries: 500 blocks, allocated and freed in turns."""
    found = []
    for n in range(ENTRIES // 2):
        address = 0x7F00_0000_0000 + (number * ENTRIES + n) * 2**21
        stack = [FRAME[(n * 7 + k) % len(FRAME)] for k in range(FRAMES)]
        for action in ("alloc", "free_requested") if n % 2 else ("alloc", "free_completed"):
            found.append(
                {
                    "action": action,
                    "addr": address,
                    "size": 1000 + 512 * n,
                    "stream": 0,
                    "time_us": 1_795_000_000_000_000 + n,
                    "compile_context": "".join(["N/", "A"]),
                    "user_metadata": "",
                    "pool_id": (0, 0),
                    "frames": list(stack),
                }
            )
    return found


FRAME = [{"name": f"function_{n}", "filename": f"/home/me/file_{n % 40}.py", "line": n} for n in range(400)]


class Plain(pickle._Pickler):
    """Without frames of the protocol: a part of its output can then be repeated."""

    def save_frames(self, value: Any, file: io.BytesIO) -> bytes:
        begin = file.tell()
        self.save(value)
        return file.getvalue()[begin:]


def make(path: Path, size: int) -> int:
    """A snapshot of about `size` bytes: batches of a thousand entries, of which ten differ; entries in it."""
    file = io.BytesIO()
    pickler = Plain(file, 4)
    head = b"\x80\x04}\x94(" + pickler.save_frames("segments", file) + b"]\x94"
    head += pickler.save_frames("device_traces", file) + b"]\x94]\x94"
    # Memo entries so far, some of which were written by hand: dict, "segments", [], "device_traces", [], [].
    pickler.memo = {id("segments"): (1, "segments"), id("device_traces"): (3, "device_traces")}
    pickler.memo |= {-n: (0, None) for n in range(1, 5)}
    keep: list[Any] = []

    def batch(number: int) -> bytes:
        values = entries(number)
        keep.append(values)  # an id is not used again
        return b"(" + b"".join(pickler.save_frames(one, file) for one in values) + b"e"

    first = batch(0)
    chunks = [batch(number) for number in range(1, CHUNKS + 1)]
    written = count = 0
    with path.open("wb") as out:
        written += out.write(head + first)
        count += ENTRIES
        while written < size:
            written += out.write(chunks[count // ENTRIES % CHUNKS])
            count += ENTRIES
        out.write(b"a" + b"u.")
    return count


def read(path: Path, how: str) -> dict[str, float]:
    """One reading, in this process."""
    begun = time.process_time()
    found = 0
    if how == "pickle.load":
        with path.open("rb") as file:
            found = len(pickle.load(file)["device_traces"][0])
    elif how == "read":
        from batchfit._why.pure.snapshot import read_snapshot

        with path.open("rb") as file:
            found = len(read_snapshot(file).histories[0])
    else:
        import batchfit

        found = batchfit.explain_oom(path).entries
    spent = time.process_time() - begun
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    return {"entries": found, "cpu_s": round(spent, 1), "peak_mib": round(peak)}


def record(steps: int = 30) -> dict[str, float]:
    """Milliseconds of the processor per training step, and what recording adds, in turns."""
    import torch
    from torch import nn

    import batchfit

    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.TransformerEncoderLayer(128, 4, 256, batch_first=True) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(16, 64, 128)

    def step(recorder: Any) -> None:
        if recorder is not None:
            recorder.note(batch=batch)
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    def timed(recorder: Any) -> float:
        begun = time.process_time()
        for _ in range(steps):
            step(recorder)
        return (time.process_time() - begun) / steps * 1e3

    plain, recorded = [], []
    with batchfit.virtual_memory("2GiB"):
        timed(None)
        for _ in range(5):
            plain.append(timed(None))
            with batchfit.record_oom("/dev/null") as recorder:
                recorded.append(timed(recorder))
    ratios = [two / one for one, two in zip(plain, recorded, strict=True)]
    return {
        "step_ms": round(statistics.median(plain), 2),
        "recorded_ms": round(statistics.median(recorded), 2),
        "ratio": round(statistics.median(ratios), 3),
    }


def read_all(path: Path, gib: float) -> dict[str, Any]:
    """A file of that size, read in each way, by a process of its own."""
    count = make(path, int(gib * 2**30))
    found: dict[str, Any] = {"gib": round(path.stat().st_size / 2**30, 2), "entries": count}
    for how in WAYS:
        command = [sys.executable, __file__, "--read", how, str(path)]
        ran = subprocess.run(command, capture_output=True, text=True, check=True)
        print(f"{found['gib']} GiB  {how:<12} {ran.stdout.strip()}", flush=True)
        one = json.loads(ran.stdout)
        found[how] = {name: one[name] for name in ("cpu_s", "peak_mib")}
    path.unlink()
    return found


WAYS = {
    "read": "the file read into columns (`read_snapshot`)",
    "why": "all of `explain_oom`: steps, holders, timeline, replays",
    "pickle.load": "`pickle.load`, which runs what is in a file, and answers nothing",
}


def page(found: dict[str, Any]) -> str:
    """The page of what was measured."""
    lines = [
        "# Reading a memory snapshot of a GiB",
        "",
        f"`{found['command']}`, {found['date']}, {found['machine']}. Seconds are those of the processor, "
        "not of a clock. No GPU took part: the file is made as PyTorch writes one.",
    ]
    for file in found["files"]:
        head = f"{file['gib']:.2f} GiB, {file['entries']:,} entries of 30 frames"
        lines += ["", f"| {head} | processor | peak memory of the process |", "|---|---|---|"]
        for way, text in WAYS.items():
            one = file[way]
            lines.append(f"| {text} | {one['cpu_s']:.1f} s | {one['peak_mib']:,} MiB |")
    record = found["record"]
    lines += [
        "",
        "An entry is a row of 45 bytes; equal stacks are one. Entries in which each frame is a dict of its "
        "own (no PyTorch writes them so; `tests/data/snapshots` has them) take some four times as long.",
        "",
        "## Recording",
        "",
        "A training step of a small transformer under `virtual_memory` on a CPU, with and without "
        f"`record_oom`, in turns: {record['step_ms']:.1f} ms and {record['recorded_ms']:.1f} ms of the "
        f"processor, {record['ratio']:.2f} times (the median of five ratios). An OOM that is caught costs "
        "nothing more: "
        "nothing is written. What recording costs on CUDA is PyTorch's, and was not measured.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, nargs="+", default=[1.0, 0.02])
    parser.add_argument("--folder", type=Path, default=Path("snapshots"))
    parser.add_argument("--read", nargs=2, metavar=("HOW", "FILE"))
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--machine", default=f"{os.cpu_count()} CPU cores")
    parser.add_argument("--out", type=Path, help="the JSON")
    parser.add_argument("--page", type=Path, metavar="JSON", help="print the page of it")
    given = parser.parse_args()
    if given.read:
        print(json.dumps(read(Path(given.read[1]), given.read[0])))
        return
    if given.record:
        print(json.dumps(record()))
        return
    if given.page:
        print(page(json.loads(given.page.read_text())), end="")
        return
    given.folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {
        "command": f"python benchmarks/snapshot_reading.py --gib {' '.join(map('{:g}'.format, given.gib))}",
        "date": time.strftime("%Y-%m-%d"),
        "machine": given.machine,
        "files": [read_all(given.folder / "large.pickle", gib) for gib in given.gib],
    }
    ran = subprocess.run([sys.executable, __file__, "--record"], capture_output=True, text=True, check=True)
    print(f"record_oom   {ran.stdout.strip()}")
    found["record"] = json.loads(ran.stdout)
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
