"""`explain_memory`: lists add up, what-ifs are what the changed program takes, nothing is touched."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import batchfit
from batchfit._engine.allocator.gpus import gpu_named
from batchfit._engine.trace.trace import trace
from batchfit._engine.trace.workload import rules_for
from batchfit._engine.workload.reachable import reach_of
from batchfit._explain import replayed_changes
from batchfit._explain.step_variables import step_variable
from batchfit._explain.what_if import checkpointing, lower_precision, repeated_blocks
from batchfit.errors import UntraceableError
from batchfit.results import MemoryExplanation, WhatIf

BUDGET = "2GiB"
WIDTH, LENGTH, WORDS, BLOCKS = 64, 64, 500, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.nn.functional.gelu(self.up(self.norm(x)))
        out: Tensor = x + self.down(y)
        return out


class Model(nn.Module):
    """A small language model; `saving` turns checkpointing on, as its author would."""

    def __init__(self, *, saving: bool = False) -> None:
        super().__init__()
        self.saving = saving
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.saving else block(x)
        out: Tensor = self.head(x)
        return out


def make_tokens(length: int = LENGTH) -> Callable[[int], dict[str, Tensor]]:
    def make_batch(n: int) -> dict[str, Tensor]:
        words = torch.randint(0, WORDS, (n, length))
        return {"words": words, "labels": words}

    return make_batch


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["words"])
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def workload(
    *,
    saving: bool = False,
    dtype: torch.dtype = torch.float32,
    autocast: torch.dtype | None = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW,
    length: int = LENGTH,
    keep_outputs: bool = False,
) -> batchfit.Workload:
    torch.manual_seed(0)
    model = Model(saving=saving).to(dtype)
    made = optimizer(model.parameters())
    return batchfit.training(
        model, made, loss_of, make_tokens(length), autocast=autocast, keep_outputs=keep_outputs
    )


@pytest.fixture(scope="module")
def told() -> MemoryExplanation:
    return batchfit.explain_memory(workload(), batch_size=16, budget=BUDGET)


def named(found: MemoryExplanation, text: str) -> WhatIf:
    return next(one for one in found.what_ifs if text in one.change and " and " not in one.change)


# -- what holds the peak


@pytest.mark.slow
def test_each_list_adds_up_to_the_peak(told: MemoryExplanation) -> None:
    for holders in (told.kinds, told.modules, told.lines):
        assert sum(one.peak_bytes for one in holders) == told.peak_bytes
        assert sum(one.share for one in holders) == pytest.approx(1.0)
        for one in holders:
            assert sum(one.kinds.values()) == one.peak_bytes
    for one in told.modules:
        assert not one.parts or sum(part.peak_bytes for part in one.parts) == one.peak_bytes
    assert told.reserved_bytes >= told.peak_bytes


def test_the_kinds_are_those_of_a_training_step(told: MemoryExplanation) -> None:
    held = {one.name: one.peak_bytes for one in told.kinds}
    weights = sum(tensor.numel() * 4 for tensor in Model().parameters())
    assert weights <= held["weights"] < 1.05 * weights
    assert 2 * weights <= held["optimizer"] < 2.1 * weights
    assert held["activations"] > held["weights"]


def test_repeated_blocks_are_one_row_with_what_is_inside(told: MemoryExplanation) -> None:
    blocks = next(one for one in told.modules if one.name.startswith("blocks"))
    assert blocks.name == "blocks.* (4 x Block)"
    assert blocks.repeats == 4
    # gelu runs in the block itself: its result, and nothing else, has the block's width times four there.
    assert {"itself", "up", "down", "norm"} == {part.name for part in blocks.parts}
    itself = next(part for part in blocks.parts if part.name == "itself")
    assert "gelu" in itself.operations
    assert itself.kinds["activations"] >= BLOCKS * 16 * LENGTH * 4 * WIDTH * 4


def test_lines_say_where_and_what(told: MemoryExplanation) -> None:
    gelu = next(one for one in told.lines if "gelu" in one.operations)
    code = Block.forward.__code__
    assert gelu.name.startswith("test_explain.py:")
    assert gelu.name.endswith(" forward")
    assert code.co_firstlineno < int(gelu.name.split(":")[1].split()[0]) < code.co_firstlineno + 4
    assert {"weights", "optimizer state"} <= {one.name for one in told.lines}


def test_the_gradient_of_a_line_is_reported_with_the_line() -> None:
    """Backward runs in C++: its memory belongs to the module and the line that it is the gradient of."""
    work = workload()
    seen = trace(work, 4, rules=rules_for(work))
    temporaries = [one for one in seen.origins if one.kind == "temporaries" and one.phase == "backward"]
    gelu = [one for one in temporaries if "gelu_backward" in one.operation]
    assert len(gelu) == 2 * BLOCKS
    assert {one.module for one in gelu} == {f"blocks.{number}" for number in range(BLOCKS)}
    assert all(one.source.endswith(" forward") for one in gelu)
    loss = [one for one in temporaries if "nll_loss_backward" in one.operation]
    assert {one.source.split()[1] for one in loss} == {"loss_of"}
    names = dict(work.model.named_parameters())
    assert {one.module for one in seen.origins if one.kind in ("gradients", "optimizer")} == set(names)


def test_the_module_that_holds_most_is_named_first() -> None:
    model = nn.Sequential()
    model.add_module("narrow", nn.Linear(8, 8))
    model.add_module("wide", nn.Linear(8, 4096))
    model.add_module("out", nn.Linear(4096, 1))
    work = batchfit.training(
        model, torch.optim.SGD(model.parameters()), lambda m, b: m(b).mean(), lambda n: torch.zeros(n, 8)
    )
    found = batchfit.explain_memory(work, batch_size=16384, what_if=False)
    assert found.modules[0].name == "wide"
    assert found.what_ifs == ()
    assert found.lines[0].name.startswith("test_explain.py:")  # torch's own layers: the line that calls them


def test_what_is_outside_modules_is_the_loss(told: MemoryExplanation) -> None:
    loss = next(one for one in told.modules if one.name.startswith("loss"))
    assert loss.operations[0].startswith("log_softmax")
    assert loss.name.startswith("loss (test_explain.py:")


def test_the_timeline_keeps_the_highest_moment(told: MemoryExplanation) -> None:
    totals = [sum(moment.kinds.values()) for moment in told.timeline]
    assert max(totals) == told.peak_bytes
    assert 50 < len(totals) <= 201
    assert [moment.at for moment in told.timeline] == sorted({moment.at for moment in told.timeline})
    order = [moment.phase for moment in told.timeline if moment.phase != "batch"]
    assert [order[0], order[-1]] == ["forward", "optimizer"]
    assert "backward" in order


def test_it_travels_as_json(told: MemoryExplanation) -> None:
    assert MemoryExplanation.from_json(told.to_json()) == told


# -- what-ifs


@pytest.mark.parametrize(
    ("change", "really"),
    [
        ("activation checkpointing of each of 4 Block", lambda: workload(saving=True)),
        ("bf16 autocast", lambda: workload(autocast=torch.bfloat16)),
        ("bf16 parameters", lambda: workload(dtype=torch.bfloat16)),
        ("sequences of 32 in place of 64", lambda: workload(length=32)),
    ],
)
def test_a_what_if_is_what_the_changed_program_takes(
    told: MemoryExplanation, change: str, really: Callable[[], batchfit.Workload]
) -> None:
    found = named(told, change)
    truth = batchfit.explain_memory(really(), batch_size=16, budget=BUDGET, what_if=False)
    assert found.peak_bytes_after == pytest.approx(truth.peak_bytes, rel=2e-3)
    assert found.largest_after == pytest.approx(truth.largest, rel=5e-3)
    assert found.peak_bytes_before == told.peak_bytes
    assert found.largest_before == told.largest
    assert found.gain > 1.1


def test_the_largest_sizes_are_those_of_predict(told: MemoryExplanation) -> None:
    assert told.largest == batchfit.predict_batch_size(workload(), budget=BUDGET).batch_size
    after = batchfit.predict_batch_size(workload(saving=True), budget=BUDGET).batch_size
    assert named(told, "checkpointing").largest_after == pytest.approx(after, rel=5e-3)


def test_the_largest_size_of_a_recurrent_model_is_that_of_predict_too() -> None:
    """Whose margin is wider."""
    model = nn.LSTM(16, 32, batch_first=True)
    optimizer = torch.optim.AdamW(model.parameters())
    work = batchfit.training(model, optimizer, lambda m, x: m(x)[0].sum(), lambda n: torch.zeros(n, 20, 16))
    told = batchfit.explain_memory(work, batch_size=8, budget=BUDGET, what_if=False)
    assert told.largest == batchfit.predict_batch_size(work, budget=BUDGET).batch_size


def test_what_is_held_beside_the_workload_counts_as_in_predict(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = batchfit.explain_memory(workload(), batch_size=4, budget=BUDGET, what_if=False)
    on_cpu = rules_for(workload())
    monkeypatch.setattr(replayed_changes, "held_beside", lambda *_: (2**27, 0))
    beside = replayed_changes.Study(reach_of(workload()), on_cpu, 4, alone.budget_bytes, "GPU, not run")
    assert alone.largest is not None
    assert beside.base.largest is not None
    assert beside.base.largest < alone.largest


def test_what_ifs_are_sorted_and_the_best_two_combined(told: MemoryExplanation) -> None:
    gains = [one.gain for one in told.what_ifs]
    assert gains == sorted(gains, reverse=True)
    assert min(gains) >= 1.02
    both = told.what_ifs[0]
    assert both.change == "activation checkpointing of each of 4 Block and bf16 autocast"
    truth = batchfit.predict_batch_size(workload(saving=True, autocast=torch.bfloat16), budget=BUDGET)
    assert both.largest_after == pytest.approx(truth.batch_size, rel=5e-3)


def test_the_last_steps_outputs_are_held_in_the_next_forward_pass(told: MemoryExplanation) -> None:
    kept = batchfit.explain_memory(workload(keep_outputs=True), batch_size=16, budget=BUDGET, what_if=False)
    logits = 16 * LENGTH * WORDS * 4
    assert told.peak_bytes + logits <= kept.peak_bytes < told.peak_bytes + 2 * logits


class Heavy(nn.Module):
    """Weights and next to no activations: the optimizer's step is the peak."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.ParameterList(nn.Parameter(torch.zeros(200_000)) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([(x * one[:4]).sum() for one in self.table]).sum()


def heavy(optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW) -> batchfit.Workload:
    model = Heavy()
    return batchfit.training(
        model, optimizer(model.parameters()), lambda m, b: m(b), lambda n: torch.zeros(n, 4)
    )


@pytest.mark.parametrize(
    ("change", "optimizer"),
    [
        ("fused", lambda p: torch.optim.AdamW(p, fused=True)),
        ("parameter by parameter", lambda p: torch.optim.AdamW(p, foreach=False)),
        ("SGD", lambda p: torch.optim.SGD(p, momentum=0.9)),
    ],
)
def test_an_optimizer_what_if_is_what_that_optimizer_takes(
    change: str, optimizer: Callable[[Any], torch.optim.Optimizer]
) -> None:
    found = batchfit.explain_memory(heavy(), batch_size=4)
    assert (found.largest, found.budget_bytes) == (None, None)
    assert found.peak_phase == "optimizer"
    what_if = named(found, change)
    truth = batchfit.explain_memory(heavy(optimizer), batch_size=4, what_if=False)
    assert what_if.peak_bytes_after == truth.peak_bytes < found.peak_bytes
    assert (what_if.largest_before, what_if.largest_after) == (None, None)
    assert what_if.gain == pytest.approx(found.peak_bytes / truth.peak_bytes)


def test_fused_is_not_offered_where_the_peak_is_elsewhere(told: MemoryExplanation) -> None:
    assert not any("fused" in one.change for one in told.what_ifs)


def test_inference_is_offered_dtypes_alone() -> None:
    work = batchfit.inference(Model(), lambda n: make_tokens()(n)["words"])
    found = batchfit.explain_memory(work, batch_size=8, budget=BUDGET)
    assert {one.change.split(" (")[0] for one in found.what_ifs} <= {
        "bf16 autocast",
        "bf16 parameters",
        "expandable segments",
    }
    assert named(found, "bf16 parameters").gain > 1.5
    assert {one.name for one in found.kinds}.isdisjoint({"gradients", "optimizer"})


def test_a_gpu_without_bf16_is_offered_fp16() -> None:
    fp32, bf16 = reach_of(workload()), reach_of(workload(dtype=torch.bfloat16))
    (fp16,) = lower_precision(fp32, gpu_named("t4"), uses_autocast=False)
    assert fp16.name == "fp16 autocast"
    assert "torch.float16" in fp16.how
    assert "GradScaler" in fp16.how
    assert lower_precision(fp32, gpu_named("t4"), uses_autocast=True) == [], "no training in fp16"
    offered = [one.name for one in lower_precision(fp32, gpu_named("a10g"), uses_autocast=True)]
    assert offered == ["bf16 parameters (with them gradients, optimizer state)"]
    assert lower_precision(bf16, gpu_named("h100"), uses_autocast=False) == []


def test_fp16_is_what_the_program_in_fp16_takes() -> None:
    told = batchfit.explain_memory(workload(), batch_size=8, gpu="t4", budget=BUDGET)
    changed = batchfit.explain_memory(
        workload(autocast=torch.float16), batch_size=8, gpu="t4", budget=BUDGET, what_if=False
    )
    fp16 = named(told, "fp16 autocast")
    assert fp16.peak_bytes_after == changed.peak_bytes < told.peak_bytes
    assert not [one for one in told.what_ifs if "bf16" in one.change]


@pytest.mark.parametrize("frozen", [pytest.param(True, marks=pytest.mark.slow), False])
def test_an_ema_copy_is_not_counted_among_the_blocks_to_checkpoint(frozen: bool) -> None:
    """It keeps no activations, whether its parameters say so (requires_grad) or only its use does."""
    model = Model()
    ema = copy.deepcopy(model).requires_grad_(not frozen)
    optimizer = torch.optim.AdamW(model.parameters())

    def loss_with(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            for kept, new in zip(ema.parameters(), model.parameters(), strict=True):
                kept.lerp_(new, 0.01)
            teacher = ema(batch["words"])
        return loss_of(model, batch) + 0.0 * teacher.mean()

    work = batchfit.training(model, optimizer, loss_with, make_tokens(), state=[model, optimizer, ema])
    told = batchfit.explain_memory(work, batch_size=8, gpu="h100", budget=BUDGET)
    (checkpointed,) = [
        one for one in told.what_ifs if one.change.startswith("activation") and " and " not in one.change
    ]
    assert checkpointed.change == f"activation checkpointing of each of {BLOCKS} Block"


def test_where_the_loss_holds_much_a_chunked_one_is_offered() -> None:
    model = nn.Sequential(nn.Embedding(4096, 32), nn.Linear(32, 4096))

    def loss(model: nn.Module, words: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(model(words).flatten(0, 1), words.flatten())

    plain = torch.nn.functional.cross_entropy
    work = batchfit.training(
        model, torch.optim.AdamW(model.parameters()), loss, lambda n: torch.randint(0, 4096, (n, 64))
    )
    told = batchfit.explain_memory(work, batch_size=8, gpu="h100", budget=BUDGET)
    assert torch.nn.functional.cross_entropy is plain
    chunked = named(told, "a cross-entropy in chunks")
    # Logits, log-probabilities and their gradient are three of a kind: one is left, and a sixteenth.
    logits = 8 * 64 * 4096 * 4
    saved = chunked.peak_bytes_before - chunked.peak_bytes_after
    assert saved == pytest.approx((2 - 1 / 16) * logits, rel=0.05)
    assert chunked.gain > 2.2
    assert "LinearCrossEntropyLoss" in chunked.how


def test_a_size_that_fits_reserves_no_more_than_the_budget() -> None:
    """Without an end the allocator gives nothing back; what it takes where it has to is what counts."""
    roomy = batchfit.explain_memory(_churn(), batch_size=64, budget="4GiB", what_if=False)
    largest = batchfit.predict_batch_size(
        _churn(), budget=roomy.reserved_bytes - 2**20, margin=0.0
    ).batch_size
    told = batchfit.explain_memory(
        _churn(), batch_size=largest, budget=roomy.reserved_bytes - 2**20, what_if=False
    )
    assert told.budget_bytes is not None
    assert told.peak_bytes <= told.reserved_bytes <= told.budget_bytes


def _churn() -> batchfit.Workload:
    model = nn.Sequential(
        *(layer for width in (700, 300, 900) for layer in (nn.Conv2d(3, width, 3), nn.Conv2d(width, 3, 3)))
    )
    return batchfit.training(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        lambda model, x: model(x).square().mean(),
        lambda n: torch.zeros(n, 3, 24, 24),
    )


def test_checkpointing_that_is_on_is_not_offered() -> None:
    work = workload(saving=True)
    assert len(checkpointing(reach_of(work))) == 1
    work.model.gradient_checkpointing = True  # as transformers marks it
    assert checkpointing(reach_of(work)) == []


@pytest.mark.parametrize("switch", ["gradient_checkpointing_enable", "activation_checkpointing_enable"])
def test_the_switch_of_transformers_has_the_name_that_the_model_knows(
    switch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before 5.23 the first, since then both, and the first warns that it will be removed."""
    work = workload(saving=True)
    layer = type("GradientCheckpointingLayer", (Block,), {})
    for block in work.model.blocks:
        block.__class__ = layer
    (change,) = checkpointing(reach_of(work))
    assert "checkpoint.checkpoint" in change.how  # no switch
    for name in ("gradient_checkpointing_enable", switch):
        monkeypatch.setattr(type(work.model), name, lambda self, kwargs: None, raising=False)
    (change,) = checkpointing(reach_of(work))
    assert change.how == f'model.{switch}({{"use_reentrant": False}})'


def test_recomputed_activations_belong_to_their_module() -> None:
    work = workload(saving=True)
    seen = trace(work, 4, rules=rules_for(work))
    again = [one for one in seen.origins if one.phase == "backward" and one.kind == "activations"]
    assert {one.module.split(".")[0] for one in again} == {"blocks"}


def test_of_nested_blocks_the_level_that_saves_most_is_taken() -> None:
    stages = nn.ModuleList(nn.Sequential(Block(), Block()) for _ in range(2))
    (outer,) = repeated_blocks(stages)
    assert (outer.kind, len(outer.blocks)) == ("Sequential", 2)
    model = nn.Sequential(*stages)
    work = batchfit.training(
        model,
        torch.optim.SGD(model.parameters()),
        lambda m, b: m(b).mean(),
        lambda n: torch.zeros(n, LENGTH, WIDTH),
    )
    found = batchfit.explain_memory(work, batch_size=64)
    assert any(one.change.startswith("activation checkpointing of each of 4 Block") for one in found.what_ifs)


def test_a_model_without_blocks_is_not_offered_checkpointing() -> None:
    assert repeated_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))) == []


def test_a_what_if_that_cannot_be_traced_is_named_and_the_rest_is_reported() -> None:
    def picky(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if model.head.weight.dtype is torch.bfloat16:  # type: ignore[union-attr]
            raise RuntimeError("not in bf16")
        return loss_of(model, batch)

    model = Model()
    work = batchfit.training(model, torch.optim.AdamW(model.parameters()), picky, make_tokens())
    found = batchfit.explain_memory(work, batch_size=8)
    assert any("bf16 parameters" in note and "not in bf16" in note for note in found.unseen)
    assert any("checkpointing" in one.change for one in found.what_ifs)


# -- the user's state


@pytest.mark.parametrize("stepped", [False, True])
def test_nothing_of_the_users_is_touched(told: MemoryExplanation, stepped: bool) -> None:
    work = workload()
    if stepped:
        work.step(2)
    model, optimizer = work.model, work.optimizer
    objects = [*model.parameters(), *(p.grad for p in model.parameters())]
    attributes = {id(module): dict(vars(module)) for module in model.modules()}
    inner = dict(vars(optimizer))
    values = copy.deepcopy((model.state_dict(), optimizer.state_dict(), [p.grad for p in model.parameters()]))
    cells = {name: step_variable(work, name).cell_contents for name in ("source", "context")}  # type: ignore[union-attr]
    random = torch.get_rng_state()
    enter = torch.autocast.__enter__

    found = batchfit.explain_memory(work, batch_size=16)

    assert len(found.what_ifs) >= 4
    # State and gradients that are there already go along with a change.
    for text in ("bf16 parameters", "bf16 autocast", "checkpointing", "sequences"):
        fresh = named(told, text).peak_bytes_after
        assert named(found, text).peak_bytes_after == pytest.approx(fresh, rel=0.02)
    after = [*model.parameters(), *(p.grad for p in model.parameters())]
    assert all(one is two for one, two in zip(objects, after, strict=True))
    assert {id(module): dict(vars(module)) for module in model.modules()} == attributes
    assert dict(vars(optimizer)) == inner
    same((model.state_dict(), optimizer.state_dict(), [p.grad for p in model.parameters()]), values)
    assert cells == {name: step_variable(work, name).cell_contents for name in cells}  # type: ignore[union-attr]
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.autocast.__enter__ is enter


def same(one: Any, two: Any) -> None:
    if isinstance(one, Tensor):
        assert (type(one), one.dtype) == (type(two), two.dtype)
        assert torch.equal(one, two)
    elif isinstance(one, dict):
        assert list(one) == list(two)
        for key in one:
            same(one[key], two[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(two)
        for left, right in zip(one, two, strict=True):
            same(left, right)
    else:
        assert one == two


# -- errors


@pytest.mark.parametrize("size", [0, -1, 1.5, "8", True, None])
def test_a_wrong_batch_size_is_refused_before_any_work(size: Any) -> None:
    def step(n: int) -> None:
        raise AssertionError("the step ran")

    with pytest.raises(ValueError, match="batch_size must be a positive integer"):
        batchfit.explain_memory(batchfit.Workload(step, state=[]), batch_size=size)


def test_other_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="gpu must be one of"):
        batchfit.explain_memory(workload(), batch_size=1, gpu="voodoo2")
    with pytest.raises((ValueError, TypeError)):
        batchfit.explain_memory(workload(), batch_size=1, budget="much")
    with pytest.raises(TypeError, match="what_if must be True or False, not 'no'"):
        batchfit.explain_memory(workload(), batch_size=1, what_if="no")  # type: ignore[arg-type]


def test_what_cannot_be_traced_is_an_error() -> None:
    def reads(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        loss = loss_of(model, batch)
        return loss * 2 if loss.item() > 1 else loss

    model = Model()
    work = batchfit.training(model, torch.optim.SGD(model.parameters()), reads, make_tokens())
    with pytest.raises(UntraceableError, match="item"):
        batchfit.explain_memory(work, batch_size=2)
