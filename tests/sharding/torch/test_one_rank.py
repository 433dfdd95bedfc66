"""Predictions and explanations of one of several ranks, in this process; nothing of the user's is changed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import batchfit
from batchfit._engine.cuda_model import collectives
from batchfit._engine.cuda_model.dispatch import STAND_INS
from batchfit._engine.sharding.pure.layout import ShardLayout
from batchfit._engine.sharding.sharding import changes_for
from batchfit._engine.torch_private import fsdp2
from batchfit._engine.trace.fake_cache import tensors_among
from batchfit._engine.trace.host_tensors import HostTensors
from batchfit._engine.trace.trace import trace
from batchfit._engine.trace.workload import rules_for
from batchfit._engine.workload.reachable import reach_of
from batchfit.errors import BatchfitError

pytestmark = [
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
    pytest.mark.skipif(not fsdp2.runs_on_cpu(), reason="needs torch 2.8: FSDP2 on a CPU"),
]
LAYOUTS = ["fsdp2", "zero2:bf16", "fsdp2:reshard=2", "hsdp:2x2", "ddp", "zero1"]
MORE_LAYOUTS = ["fsdp2", "zero2:bf16", "hsdp:2x2", "ddp"]
BLOCKS, WIDE = 3, 256


@pytest.fixture(autouse=True)
def no_group_stays_behind() -> Iterator[None]:
    yield
    assert not dist.is_initialized()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        two = 2 * WIDE
        blocks = (nn.Sequential(nn.Linear(WIDE, two), nn.ReLU(), nn.Linear(two, WIDE)) for _ in range(BLOCKS))
        self.layers = nn.ModuleList(blocks)
        self.register_buffer("seen", torch.zeros(7))

    def forward(self, value: Tensor) -> Tensor:
        for layer in self.layers:
            value = value + layer(value)
        return value


def loss(model: Any, value: Tensor) -> Tensor:
    return model(value).square().mean()  # type: ignore[no-any-return]


def work(wrap: Any = lambda model: model) -> batchfit.Workload:
    model = wrap(Model())
    optimizer = torch.optim.AdamW(model.parameters())
    return batchfit.training(model, optimizer, loss, lambda n: torch.randn(n, WIDE))


def sharded(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for one in model.layers:  # type: ignore[union-attr]
        fully_shard(one)
    return fully_shard(model)


def state_of(workload: batchfit.Workload) -> list[Any]:
    """What must be the same objects and values after a prediction."""
    model: Any = workload.model
    parts: list[Any] = []
    for module in model.modules():
        parts += [type(module), *(id(one) for one in module.parameters(recurse=False))]
        parts += [list(module._forward_hooks), list(module._forward_pre_hooks), sorted(vars(module))]
    optimizer: Any = workload.optimizer
    parts += [[id(one) for one in group["params"]] for group in optimizer.param_groups]
    parts += [group["foreach"] for group in optimizer.param_groups]
    parts += [len(optimizer.state), [one.detach().clone() for one in model.parameters()]]
    return parts


def same(one: list[Any], two: list[Any]) -> bool:
    *first, values = one
    *second, others = two
    return first == second and all(map(torch.equal, values, others))


@pytest.mark.parametrize(
    "layout",
    ["fsdp2:reshard=2", "zero1", *(pytest.param(one, marks=pytest.mark.slow) for one in MORE_LAYOUTS)],
)
def test_a_plain_model_is_spread_for_the_trace_only(layout: str) -> None:
    workload = work()
    workload.step(2)  # an optimizer with state
    before = state_of(workload)
    first = batchfit.predict_batch_size(workload, budget="256MiB", ranks=4, shard=layout)
    assert same(state_of(workload), before)
    again = batchfit.predict_batch_size(workload, budget="256MiB", ranks=4, shard=layout)
    assert (again.batch_size, again.per_rank) == (first.batch_size, first.per_rank)
    workload.step(2)
    assert not same(state_of(workload), before), "it still trains"


@pytest.mark.slow
def test_each_kind_of_memory_is_a_ranks_own() -> None:
    weights = sum(one.numel() for one in Model().parameters()) * 4
    found = {
        layout: batchfit.predict_batch_size(work(), budget="256MiB", ranks=4, shard=layout)
        for layout in LAYOUTS
    }
    parts = {layout: one.per_rank for layout, one in found.items()}
    for layout, one in found.items():
        memory = parts[layout]
        assert memory is not None
        assert (one.ranks, one.shard) == (4, layout)
        assert sum(size for _, size in memory) == pytest.approx(one.peak_bytes, rel=0.02)
        assert f"x 4 ranks = global batch {4 * one.batch_size}" in one.summary
        assert any("not confirmed on GPUs" in note for note in one.unseen)
        assert batchfit.Prediction.from_json(one.to_json()) == one
    whole = weights + 7 * 4
    assert parts["ddp"].weights_bytes == parts["zero1"].weights_bytes == whole
    assert parts["ddp"].optimizer_bytes == pytest.approx(2 * weights, rel=0.01)
    assert parts["zero1"].optimizer_bytes < weights
    assert parts["ddp"].communication_bytes >= weights, "buckets"
    assert parts["fsdp2"].weights_bytes == pytest.approx(weights / 4, rel=0.01)
    assert parts["hsdp:2x2"].weights_bytes == pytest.approx(weights / 2, rel=0.01)
    assert parts["fsdp2"].optimizer_bytes == pytest.approx(weights / 2, rel=0.01)
    at_one = [found[layout].peak_bytes_at(1) for layout in ("fsdp2", "hsdp:2x2", "zero1", "ddp")]
    assert at_one == sorted(at_one)
    assert len(set(at_one)) == 4


def test_offloaded_shards_are_no_memory_of_the_gpu() -> None:
    found = batchfit.predict_batch_size(work(), budget="256MiB", ranks=4, shard="fsdp2", offload=True)
    assert found.per_rank is not None
    assert found.per_rank.weights_bytes == 7 * 4, "the buffer"
    assert (found.per_rank.optimizer_bytes, found.offload) == (0, True)
    assert found.per_rank.communication_bytes > 0


@pytest.mark.parametrize("wrap", [sharded, nn.parallel.DistributedDataParallel])
def test_a_model_that_the_program_wraps_is_traced_as_it_is(wrap: Any) -> None:
    name = "fsdp2" if wrap is sharded else "ddp"
    expected = batchfit.predict_batch_size(work(), budget="256MiB", ranks=4, shard=name)
    with batchfit.fake_ranks(4):
        workload = work(wrap)
        before = state_of(workload)
        found = batchfit.predict_batch_size(workload, budget="256MiB")
        assert same(
            [one.full_tensor() if hasattr(one, "full_tensor") else one for one in state_of(workload)],
            [one.full_tensor() if hasattr(one, "full_tensor") else one for one in before],
        )
        assert (found.ranks, found.shard) == (4, "")
        with pytest.raises(ValueError, match="shard must be left out, not 'ddp'"):
            batchfit.predict_batch_size(workload, budget="256MiB", ranks=4, shard="ddp")
    assert found.batch_size == expected.batch_size
    assert found.per_rank == expected.per_rank


def test_an_explanation_names_communication() -> None:
    why = batchfit.explain_memory(work(), batch_size=8, ranks=4, shard="fsdp2", what_if=False)
    kinds = {one.name: one.peak_bytes for one in why.kinds}
    assert kinds["communication"] > kinds["weights"]
    assert sum(kinds.values()) == why.peak_bytes
    assert any("not confirmed on GPUs" in note for note in why.unseen)
    assert "communication" in str(why)


@pytest.mark.slow
def test_what_checkpointing_brings_is_traced_for_a_rank() -> None:
    why = batchfit.explain_memory(work(), batch_size=4000, budget="256MiB", ranks=4, shard="fsdp2")
    assert any("checkpointing" in one.change for one in why.what_ifs)
    assert not any("bf16" in one.change for one in why.what_ifs), "weights are those of a rank"


def test_blocks_of_other_streams_are_marked() -> None:
    workload = work()
    reach = reach_of(workload)
    with batchfit.fake_ranks(4):
        changes = changes_for(reach, ShardLayout.parse("fsdp2", ranks=4))
        found = trace(workload, 4, rules=rules_for(workload), changes=changes, reach=reach)
    side = {one.operation for one in found.origins if one.stream}
    assert side == {"aten.empty.memory_format"}, "buffers of collectives"
    kinds = {one.kind for one in found.origins if one.stream}
    assert kinds <= {"communication", "gradients"}
    assert torch.cpu.stream.__module__ == "torch.cpu"


def test_wrong_ranks_are_refused_before_anything_is_traced() -> None:
    with pytest.raises(ValueError, match="shard must be given with ranks"):
        batchfit.predict_batch_size(work(), budget="256MiB", ranks=4)
    with pytest.raises(ValueError, match="calibrate must be False or None with ranks"):
        batchfit.predict_batch_size(work(), budget="256MiB", ranks=4, shard="ddp", calibrate=True)
    with pytest.raises(ValueError, match="budget must be given"):
        batchfit.predict_batch_size(work(), ranks=4, shard="ddp")
    with (
        pytest.raises(ValueError, match="ranks must be an integer of at least 2, not 1"),
        batchfit.fake_ranks(1),
    ):
        pass
    with (
        batchfit.fake_ranks(2),
        pytest.raises(BatchfitError, match="a process group of 2 ranks is here"),
        batchfit.fake_ranks(4),
    ):
        pass


def test_offload_with_pinned_memory_can_be_built_without_a_gpu() -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    with batchfit.fake_ranks(4):
        workload = work(lambda model: fully_shard(model, offload_policy=CPUOffloadPolicy()))
        found = batchfit.predict_batch_size(workload, budget="256MiB")
    assert found.per_rank is not None
    assert found.per_rank.optimizer_bytes == 0


def test_no_operation_of_a_whole_weight_is_really_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch learns the shape of a spread result from an operation on whole weights: 20 GiB of Llama 8B."""
    most = 0
    plain = HostTensors.run

    def run(host: Any, func: Any, args: Any, kwargs: Any) -> Any:
        nonlocal most
        out = plain(host, func, args, kwargs)
        most = max([most, *(one.numel() for one in (*tensors_among(args), *tensors_among((out,))))])
        return out

    monkeypatch.setattr(HostTensors, "run", run)
    model = nn.Linear(328, 336, device="meta")  # of no other test's shapes: torch keeps what it has learned
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    workload = batchfit.training(model, optimizer, loss, lambda n: torch.randn(n, 328))
    batchfit.predict_batch_size(workload, gpu="h200", ranks=2, shard="fsdp2", max_size=4)
    assert 0 < most < 328 * 336


@pytest.mark.parametrize("shard", ["fsdp2", "hsdp:2x2"])
def test_a_torch_without_fake_kernels_of_collectives_answers_the_same(
    shard: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch 2.8 has none."""
    options: dict[str, Any] = {"budget": "256MiB", "ranks": 4, "shard": shard, "max_size": 64}
    expected = batchfit.predict_batch_size(work(), **options)
    monkeypatch.setattr(collectives, "has_fake_kernel", lambda _: False)
    asked: list[str] = []

    def noted(op: Any, kernel: Any, *args: Any) -> Any:
        asked.append(op.name())
        return kernel(*args)

    for op, kernel in collectives.stand_ins().items():
        monkeypatch.setitem(STAND_INS, op, partial(noted, op, kernel))
    found = batchfit.predict_batch_size(work(), **options)
    assert found.per_rank == expected.per_rank
    assert {"c10d::_allgather_base_", "c10d::_reduce_scatter_base_"} <= set(asked)
