"""What CUDA's kernels allocate beside their results: each operation, by how its inputs lie in memory.

    python benchmarks/kernels_gpu.py --out kernels.json.gz        # a minute on a GPU

Forward and backward of each case run with the input and the gradient in order, channels last, cut out of
larger ones, and (the gradient) expanded from one number. Of each operation inside: its arguments, the most
bytes that it held beside its results, and the bytes of its results that stay. These are what the rules of a
trace are held against (`tests/data/h200_kernels.json.gz`, `_engine/cuda_model/workspaces.py`).
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = "cuda"
PICTURES, TEXTS, ROWS = (16, 64, 56, 56), (16, 512, 768), (4096, 1024)
LAYOUTS = (("order", "order"), ("last", "last"), ("cut", "cut"), ("order", "expanded"))
Case = tuple[str, tuple[int, ...], Callable[[Tensor], Tensor]]


def indices(most: int, *shape: int) -> Tensor:
    return torch.randint(0, most, shape, device=DEVICE)


def weight(like: Tensor, *shape: int) -> Tensor:
    return torch.ones(*shape, device=DEVICE, dtype=like.dtype, requires_grad=True)


def of_texts() -> Iterator[Case]:
    def along(name: str, call: Callable[[Tensor, int], Tensor]) -> Iterator[Case]:
        for dim in (-1, 1):
            yield f"{name} {dim}", TEXTS, lambda x, dim=dim: call(x, dim)

    yield from along("softmax", lambda x, dim: x.softmax(dim))
    yield from along("log_softmax", lambda x, dim: x.log_softmax(dim))
    yield from along("logsumexp", lambda x, dim: x.logsumexp(dim))
    yield from along("cumsum", lambda x, dim: x.cumsum(dim))
    yield from along("max", lambda x, dim: x.max(dim).values)
    yield from along("amax", lambda x, dim: x.amax(dim))
    yield from along("var", lambda x, dim: x.var(dim))
    yield from along("std", lambda x, dim: x.std(dim))
    yield from along("norm", lambda x, dim: x.norm(dim=dim))
    yield from along("normalize", lambda x, dim: F.normalize(x, dim=dim))
    yield from along("sort", lambda x, dim: x.sort(dim).values)
    yield from along("topk", lambda x, dim: x.topk(8, dim).values)
    yield from along("glu", F.glu)
    yield from along("flip", lambda x, dim: x.flip(dim))
    yield from along("roll", lambda x, dim: x.roll(3, dim))
    yield from along("index_select", lambda x, dim: x.index_select(dim, indices(512, 300)))
    yield from along("gather", lambda x, dim: x.gather(dim, indices(512, 16, 512, 768)))
    yield from along("mean", lambda x, dim: x.mean(dim))
    yield from along("sum", lambda x, dim: x.sum(dim))
    yield from along("prod", lambda x, dim: x.prod(dim))
    for name in (
        "gelu",
        "silu",
        "relu",
        "softplus",
        "sigmoid",
        "tanh",
        "leaky_relu",
        "hardswish",
        "mish",
        "elu",
    ):
        yield name, TEXTS, getattr(F, name)
    yield "logsigmoid", TEXTS, F.logsigmoid
    yield "gelu tanh", TEXTS, lambda x: F.gelu(x, approximate="tanh")
    yield "dropout", TEXTS, lambda x: F.dropout(x, 0.1)
    yield "layer_norm", TEXTS, lambda x: F.layer_norm(x, (768,), weight(x, 768), weight(x, 768))
    yield "layer_norm plain", TEXTS, lambda x: F.layer_norm(x, (768,))
    yield "rms_norm", TEXTS, lambda x: F.rms_norm(x, (768,), weight(x, 768))
    yield "group_norm text", TEXTS, lambda x: F.group_norm(x, 8, weight(x, 512), weight(x, 512))
    yield "interpolate linear", TEXTS, lambda x: F.interpolate(x, scale_factor=2, mode="linear")
    yield "max_pool1d", TEXTS, lambda x: F.max_pool1d(x, 2)
    yield "avg_pool1d", TEXTS, lambda x: F.avg_pool1d(x, 2)
    yield "index", TEXTS, lambda x: x[:, indices(512, 300)]
    yield "masked_fill", TEXTS, lambda x: x.masked_fill(x > 0, 0.0)
    yield "where", TEXTS, lambda x: torch.where(x > 0, x, 0.0)
    yield "tril", TEXTS, lambda x: x.tril()
    yield "einsum", TEXTS, lambda x: torch.einsum("bij,bkj->bik", x, x)
    yield "clamp", TEXTS, lambda x: x.clamp(-1, 1)
    yield "fft", TEXTS, lambda x: torch.fft.rfft(x.float()).real
    yield "lerp", TEXTS, lambda x: x.lerp(torch.zeros_like(x), 0.5)
    yield "exp", TEXTS, lambda x: x.exp()
    yield "pow", TEXTS, lambda x: x.pow(3)
    yield "linear", TEXTS, lambda x: F.linear(x, weight(x, 1024, 768), weight(x, 1024))
    yield "matmul", TEXTS, lambda x: x @ weight(x, 768, 1024)
    yield "bmm", TEXTS, lambda x: x @ x.transpose(1, 2)
    yield "conv1d", TEXTS, lambda x: F.conv1d(x, weight(x, 256, 512, 3), padding=1)
    yield "cdist", TEXTS, lambda x: torch.cdist(x, x)
    yield "cosine", TEXTS, lambda x: F.cosine_similarity(x, torch.ones_like(x), dim=-1)
    yield "unfold", TEXTS, lambda x: x.unfold(1, 4, 2) * 2
    for name, mask, causal in (("plain", None, False), ("causal", None, True), ("mask", torch.bool, False)):
        yield f"attention {name}", TEXTS, lambda x, m=mask, c=causal: attention(x, m, c)
    yield "attention dropout", TEXTS, lambda x: attention(x, None, False, 0.1)


def attention(x: Tensor, mask: torch.dtype | None, causal: bool, dropout: float = 0.0) -> Tensor:
    heads = x.reshape(16, 512, 12, 64).transpose(1, 2)
    seen = None if mask is None else torch.ones(16, 1, 512, 512, device=DEVICE, dtype=mask)
    return F.scaled_dot_product_attention(
        heads, heads, heads, attn_mask=seen, is_causal=causal, dropout_p=dropout
    )


def of_pictures() -> Iterator[Case]:
    yield "softmax channels", PICTURES, lambda x: x.softmax(1)
    yield "log_softmax channels", PICTURES, lambda x: x.log_softmax(1)
    yield "log_softmax rows", PICTURES, lambda x: x.log_softmax(-1)
    yield "prelu", PICTURES, lambda x: F.prelu(x, weight(x, 64))
    yield "dropout2d", PICTURES, lambda x: F.dropout2d(x, 0.1)
    yield "group_norm", PICTURES, lambda x: F.group_norm(x, 8, weight(x, 64), weight(x, 64))
    yield "instance_norm", PICTURES, lambda x: F.instance_norm(x)
    for mode in ("bilinear", "bicubic", "nearest"):
        yield f"up {mode}", PICTURES, lambda x, m=mode: F.interpolate(x, scale_factor=2, mode=m)
        yield f"down {mode}", PICTURES, lambda x, m=mode: F.interpolate(x, size=28, mode=m)
    yield "down area", PICTURES, lambda x: F.interpolate(x, size=28, mode="area")
    yield "max_pool2d", PICTURES, lambda x: F.max_pool2d(x, 3, 2, 1)
    yield "avg_pool2d", PICTURES, lambda x: F.avg_pool2d(x, 2)
    yield "adaptive_avg_pool2d", PICTURES, lambda x: F.adaptive_avg_pool2d(x, 7)
    yield "adaptive_max_pool2d", PICTURES, lambda x: F.adaptive_max_pool2d(x, 7)
    yield "pad", PICTURES, lambda x: F.pad(x, (1, 1, 1, 1))
    yield "pad reflect", PICTURES, lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect")
    yield "pad replicate", PICTURES, lambda x: F.pad(x, (1, 1, 1, 1), mode="replicate")
    yield "unfold pictures", PICTURES, lambda x: F.unfold(x, 3)
    yield "fold", (16, 576, 2916), lambda x: F.fold(x, 56, 3)
    yield "pixel_shuffle", PICTURES, lambda x: F.pixel_shuffle(x, 2)
    yield "conv2d", PICTURES, lambda x: F.conv2d(x, weight(x, 128, 64, 3, 3), padding=1)
    yield "conv2d pointwise", PICTURES, lambda x: F.conv2d(x, weight(x, 128, 64, 1, 1))


def of_losses() -> Iterator[Case]:
    yield "nll", ROWS, lambda x: F.nll_loss(x, indices(1024, 4096))
    yield "cross_entropy", ROWS, lambda x: F.cross_entropy(x, indices(1024, 4096))
    yield "cross_entropy smooth", ROWS, lambda x: F.cross_entropy(x, indices(1024, 4096), label_smoothing=0.1)
    yield "cross_entropy soft", ROWS, lambda x: F.cross_entropy(x, torch.ones_like(x) / 1024)
    yield "cross_entropy pictures", PICTURES, lambda x: F.cross_entropy(x, indices(64, 16, 56, 56))
    for reduction in ("mean", "none"):
        for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "kl_div"):
            call = getattr(F, name)
            yield (
                f"{name} {reduction}",
                TEXTS,
                lambda x, f=call, r=reduction: f(x, torch.ones_like(x), reduction=r),
            )
        yield (
            f"bce_with_logits {reduction}",
            TEXTS,
            lambda x, r=reduction: F.binary_cross_entropy_with_logits(x, torch.ones_like(x), reduction=r),
        )
        yield (
            f"bce {reduction}",
            TEXTS,
            lambda x, r=reduction: F.binary_cross_entropy(
                x.float().sigmoid(), torch.ones(x.shape, device=DEVICE), reduction=r
            ),
        )
    yield "multi_margin", ROWS, lambda x: F.multi_margin_loss(x, indices(1024, 4096))


def of_rows() -> Iterator[Case]:
    yield "index rows", ROWS, lambda x: x[indices(4096, 3000)]
    yield "index_add", ROWS, lambda x: torch.zeros_like(x).index_add(0, indices(4096, 4096), x)
    yield "scatter_add", ROWS, lambda x: torch.zeros_like(x).scatter_add(1, indices(1024, 4096, 1024), x)
    yield "index_put", ROWS, lambda x: torch.zeros_like(x).index_put((indices(4096, 4096),), x)
    yield "repeat_interleave", ROWS, lambda x: x.repeat_interleave(2, 1)
    yield "addmm", ROWS, lambda x: torch.addmm(weight(x, 512), x, weight(x, 1024, 512))
    yield "embedding", (30000, 256), lambda x: F.embedding(indices(30000, 16, 512), x)
    yield "embedding_bag", (30000, 256), lambda x: F.embedding_bag(indices(30000, 512, 32), x)


def laid(x: Tensor, how: str) -> Tensor:
    """The same tensor, lying otherwise."""
    if how == "expanded":
        return torch.ones((), device=DEVICE, dtype=x.dtype).expand(x.shape)
    if how == "cut":
        return torch.cat([x, x], 1).narrow(1, 0, x.shape[1])
    if how == "order":
        return x.contiguous()
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


class Log(TorchDispatchMode):
    """Each operation that allocates, with the numbers of its allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, int, int, Any, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = allocations()
        out = func(*args, **(kwargs or {}))
        if allocations() > before:
            flat = [one for one in torch.utils._pytree.tree_leaves(out) if isinstance(one, Tensor)]
            results = sum(one.numel() * one.element_size() for one in flat)
            self.found.append((str(func), before, allocations(), written(args), results))
        return out


def allocations() -> int:
    return int(torch.cuda.memory_stats()["allocation.all.allocated"])


def written(value: Any) -> Any:
    if isinstance(value, Tensor):
        return {"dtype": str(value.dtype)[6:], "shape": list(value.shape), "stride": list(value.stride())}
    if isinstance(value, list | tuple):
        return [written(one) for one in value]
    return value if isinstance(value, int | float | bool | None) else str(value)


def measured(call: Callable[[Tensor], Tensor], x: Tensor, how: str) -> Iterator[dict[str, Any]]:
    """What each operation of a forward and a backward pass held and kept."""
    record: Any = torch.cuda.memory._record_memory_history
    for warm in (True, False):
        base = allocations()
        record(enabled=None)
        record(enabled="all", context=None, max_entries=100_000)
        log = Log()
        with log:
            y = call(x)
            y.backward(laid(torch.ones_like(y), how) if y.dim() > 1 else torch.ones_like(y))
        del y
        x.grad = None
        if warm:  # libraries take what they keep, and choose what they do
            continue
        told = torch.cuda.memory._snapshot()["device_traces"][0]
        events = [one for one in told if one["action"] in ("alloc", "free_completed")]
        places = [index for index, one in enumerate(events) if one["action"] == "alloc"]
        for name, first, last, args, results in log.found:
            end = places[last - base] if last - base < len(places) else len(events)
            live: dict[int, int] = {}
            held = most = 0
            for one in events[places[first - base] : end]:
                if one["action"] == "alloc":
                    live[one["addr"]] = one["size"]
                    held += one["size"]
                else:
                    held -= live.pop(one["addr"], 0)
                most = max(most, held)
            kept = max(held, results)  # what the results need, though they were dropped before the next one
            beside = max(0, most - kept)
            yield {"op": name, "args": args, "results": results, "kept": kept, "beside": beside}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    found: dict[str, Any] = {}
    cases = [*of_texts(), *of_pictures(), *of_losses(), *of_rows()]
    for name, shape, call in cases:
        for dtype in (torch.float32, torch.bfloat16):
            for inputs, gradient in LAYOUTS:
                x = laid(torch.rand(*shape, device=DEVICE, dtype=dtype), inputs).detach().requires_grad_()
                for row in measured(call, x, gradient):
                    found[json.dumps([row["op"], row["args"]])] = {"case": name, **row}
    about = f"{torch.cuda.get_device_name()}, torch {torch.__version__}: python benchmarks/kernels_gpu.py"
    text = json.dumps({"about": about, "rows": list(found.values())})
    given.out.write_bytes(gzip.compress(text.encode(), mtime=0))
    print(f"{len(found)} operations of {len(cases)} cases; 0 rows left")


if __name__ == "__main__":
    main()
