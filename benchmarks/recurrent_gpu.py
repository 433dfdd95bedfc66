"""What cuDNN's recurrent layers keep for backward and what they work with, by kind, depth, directions, type.

    python benchmarks/recurrent_gpu.py --out recurrent.json.gz        # a quarter of a minute on a GPU

One layer's forward at a time, its allocations read off torch's memory history: the last two are cuDNN's
workspace and its reserve. The rules of a trace are held against these (`tests/data/h200_recurrent.json.gz`).
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

KINDS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn_tanh": nn.RNN}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
SHAPES = ((24, 500, 128, 256), (60, 96, 512, 320))  # steps, samples, inputs, hidden width


def cases() -> Iterator[dict[str, Any]]:
    choices = itertools.product(
        KINDS, (1, 2, 3), (1, 2), DTYPES, (False, True), SHAPES, (True, False), (0.0, 0.2)
    )
    for kind, layers, ways, dtype, packed, shape, train, dropout in choices:
        if (dropout and (layers == 1 or kind != "lstm" or packed)) or (not train and (packed or dropout)):
            continue
        steps, samples, given, hidden = shape
        yield {
            "kind": kind,
            "layers": layers,
            "ways": ways,
            "dtype": dtype,
            "packed": packed,
            "steps": steps,
            "samples": samples,
            "inputs": given,
            "hidden": hidden,
            "train": train,
            "dropout": dropout,
        }


def measured(case: dict[str, Any]) -> dict[str, Any]:
    """The case with its tokens, its parameters and cuDNN's two blocks."""
    dtype = DTYPES[case["dtype"]]
    layer = KINDS[case["kind"]](
        case["inputs"],
        case["hidden"],
        case["layers"],
        bidirectional=case["ways"] == 2,
        dropout=case["dropout"],
    )
    layer = layer.cuda().to(dtype)
    x = torch.randn(
        case["steps"], case["samples"], case["inputs"], device="cuda", dtype=dtype, requires_grad=True
    )
    lengths = torch.linspace(case["steps"], case["steps"] // 2, case["samples"]).long()
    given: Any = pack_padded_sequence(x, lengths) if case["packed"] else x
    with torch.set_grad_enabled(case["train"]):
        layer(given)  # what is done once: plans, the state of dropout
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.memory._record_memory_history(context=None)
        out = layer(given)
        torch.cuda.synchronize()
        history = torch.cuda.memory._snapshot()["device_traces"][0]
        torch.cuda.memory._record_memory_history(enabled=None)
    del out
    workspace, reserve = [one["size"] for one in history if one["action"] == "alloc"][-2:]
    tokens = int(lengths.sum()) if case["packed"] else case["steps"] * case["samples"]
    counts = {"tokens": tokens, "parameters": sum(one.numel() for one in layer.parameters())}
    return {**case, **counts, "workspace": workspace, "reserve": reserve}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", required=True, type=Path, metavar="FILE.json.gz")
    out = parser.parse_args().out
    about = f"{torch.cuda.get_device_name()}, torch {torch.__version__}: python benchmarks/recurrent_gpu.py"
    rows = [measured(case) for case in cases()]
    out.write_bytes(gzip.compress(json.dumps({"about": about, "rows": rows}).encode(), mtime=0))
    print(f"{len(rows)} layers")


if __name__ == "__main__":
    main()
