"""The peak of each rank in real training on gloo processes, against a prediction from one process.

As in `cpu_truth.py`, kernels are this CPU's; gloo's copy of what it reduces is the CPU's too. What CUDA does
otherwise (streams, NCCL) is not seen here.
"""

from __future__ import annotations

import pytest
import torch.distributed as dist
from launch import run_ranks, values
from shard_cases import LAYOUTS, MODELS, WAYS, predicted_here, truth

from batchfit._engine.torch_private import fsdp2

gloo = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available() and fsdp2.runs_on_cpu()),
    reason="needs gloo, and torch 2.8: FSDP2 on a CPU",
)
# What FSDP2 says of a layer that returns a view, in real runs as in traces.
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
WITHIN = 0.01
GRIDS = ("fsdp2-int", "hsdp", "hsdp-bf16")  # for four ranks
# BatchNorm refuses bf16 on a CPU.
LEFT_OUT = {("resnet", "fsdp2-bf16"), ("resnet", "hsdp-bf16")}


def ways(model: str, ranks: int) -> list[str]:
    fitting = [way for way in WAYS if ranks == 4 or way not in GRIDS]
    return [way for way in fitting if (model, way) not in LEFT_OUT]


def fits(way: str, ranks: int) -> bool:
    """Whether the name for `shard=` says a grid of as many ranks."""
    return ranks == 4 or way not in GRIDS


def check(model: str, chosen: list[str], ranks: int, *, layouts: bool = True) -> None:
    """One launch for all ways; each is predicted as the program wraps it, and by its name for `shard=`."""
    measured = values(
        run_ranks(truth, world_size=ranks, args=([(model, way) for way in chosen],), timeout_s=500)
    )
    wrong = []
    for at, way in enumerate(chosen):
        peak = max(of_rank[at][0] for of_rank in measured)
        held = max(of_rank[at][1] for of_rank in measured)
        for layout in (None, LAYOUTS[way]) if layouts and way in LAYOUTS and fits(way, ranks) else (None,):
            found = predicted_here(model, way, ranks, layout)
            if abs(found.peak - peak) > WITHIN * peak or abs(found.held - held) > WITHIN * held:
                wrong.append((way, layout, found, (peak, held)))
    assert not wrong, f"{model} on {ranks} ranks: {wrong}"


@gloo
def test_an_mlp_on_two_ranks() -> None:
    check("mlp", ["fsdp2", "fsdp2-keep", "fsdp2-bf16", "ddp-views", "zero1"], 2)


@gloo
@pytest.mark.slow
def test_a_gpt2_on_two_ranks() -> None:
    pytest.importorskip("transformers")
    check("gpt2", ["fsdp2", "ddp"], 2, layouts=False)


@gloo
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("model", MODELS)
def test_every_way_of_every_model(model: str, ranks: int) -> None:
    if model != "mlp":
        pytest.importorskip("transformers")
    check(model, ways(model, ranks), ranks)
