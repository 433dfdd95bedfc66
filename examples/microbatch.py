"""A bare training loop whose batch does not fit, run in microbatches that do.

    python examples/microbatch.py

Plain PyTorch: clipping, a learning-rate schedule, evaluation and a checkpoint are where they always are. On a
GPU all of its memory is there to use; on a CPU 24 MiB of virtual memory, which run out as a GPU's would.
"""

import contextlib
from typing import Any

import torch
from torch import nn

import batchfit

FEATURES, CLASSES, BATCH = 64, 10, 4096


def make_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU())
    return model.append(nn.Linear(512, CLASSES))


def make_batch() -> dict[str, torch.Tensor]:
    """Samples whose class is the largest of their first ten features."""
    x = torch.randn(BATCH, FEATURES)
    return {"x": x, "y": x[:, :CLASSES].argmax(dim=1)}


def train(steps: int, limit_bytes: int = 24 << 20) -> dict[str, Any]:
    """Train and evaluate: the reports of all steps, the accuracy, and a checkpoint."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = make_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)

    def loss_fn(micro: dict[str, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(model(micro["x"]), micro["y"])

    reports = []
    mb = batchfit.Microbatcher(model)
    with contextlib.nullcontext() if device == "cuda" else batchfit.virtual_memory(limit_bytes):
        for _ in range(steps):
            batch = make_batch()  # left on the host: microbatches go to the device one by one
            optimizer.zero_grad()
            report = mb.backward(loss_fn, batch)
            mb.step(optimizer, clip_norm=1.0)
            schedule.step()
            reports.append(report)
        model.eval()
        right = mb.map(lambda micro: model(micro["x"]).argmax(dim=1) == micro["y"], make_batch())
    checkpoint = {"model": model.state_dict(), "microbatches": mb.state_dict()}
    return {"reports": reports, "accuracy": right.float().mean().item(), "checkpoint": checkpoint}


if __name__ == "__main__":
    result = train(steps=30)
    for step, report in enumerate(result["reports"]):
        if step < 3 or step == 29:
            sizes = " + ".join(map(str, report.microbatch_sizes))
            print(f"step {step}: loss {report.loss:.3f}, {sizes}, out of memory {report.retries} times")
    print(f"accuracy {result['accuracy']:.2f}")
