"""Microbatcher on a real CUDA device: real out-of-memory errors, copies that overlap, no waiting."""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest
import torch
from gpu_cap import MIB, capped
from torch import nn
from torch.nn import functional

from batchfit import Microbatcher
from batchfit._engine.sizing.pure.sizes import MicrobatchEvent
from batchfit.errors import NothingFitsError

pytestmark = pytest.mark.gpu

WORDS = 4096


class Small(nn.Module):
    """Four layers without dropout: what a capped run computes can be compared with an uncapped one."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
        self.embed = nn.Embedding(WORDS, 256)
        self.body = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(256, WORDS)
        self.to("cuda", dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(ids)))

    def loss(self, micro: dict[str, torch.Tensor]) -> torch.Tensor:
        assert micro["ids"].is_cuda
        return functional.cross_entropy(self(micro["ids"]).flatten(0, 1), micro["ids"].flatten())


def tokens(n: int, length: int, seed: int = 0) -> dict[str, torch.Tensor]:
    return {"ids": torch.randint(0, WORDS, (n, length), generator=torch.Generator().manual_seed(seed))}


def gradient(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def by_hand(model: Small, batch: dict[str, torch.Tensor], sizes: tuple[int, ...]) -> torch.Tensor:
    model.zero_grad()
    for part in batch["ids"].cuda().split(sizes):
        (model.loss({"ids": part}) * (len(part) / len(batch["ids"]))).backward()
    found = gradient(model).clone()
    model.zero_grad()
    return found


@pytest.mark.parametrize("cap", range(20))
def test_twenty_caps(cap: int) -> None:
    model = Small()
    batch = tokens(64, 128)
    expected = by_hand(model, batch, (8,) * 8)
    held = torch.cuda.memory_allocated()
    mb = Microbatcher(model)
    retries = 0
    with capped((140 + 70 * cap) * MIB):
        for _ in range(3):
            model.zero_grad()
            report = mb.backward(model.loss, batch)
            retries += report.retries
            assert sum(report.microbatch_sizes) == 64
            assert (gradient(model) - expected).norm() <= 1e-5 * expected.norm()
        model.zero_grad()
        del report
    assert retries > 0 or cap > 8, f"nothing ran out under {140 + 70 * cap} MiB"
    assert torch.cuda.memory_allocated() <= held + MIB


def test_one_sample_that_does_not_fit() -> None:
    model = Small()
    held = torch.cuda.memory_allocated()
    # Logits of 64 MiB: blocks that other tests left behind are smaller, and hold a shorter sample.
    with capped(20 * MIB), pytest.raises(NothingFitsError, match="a batch of 1 does not fit on cuda:0"):
        Microbatcher(model).backward(model.loss, tokens(8, 4096))
    gc.collect()
    assert torch.cuda.memory_allocated() <= held + MIB
    assert all(p.grad is None for p in model.parameters())


def test_a_hundred_random_shapes_under_a_cap_follow_the_uncapped_run() -> None:
    def run(cap_bytes: int | None) -> tuple[list[float], int, int]:
        model = Small()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        events: list[MicrobatchEvent] = []
        mb = Microbatcher(model, on_event=events.append)
        draw = random.Random(0)
        losses, retried, samples = [], 0, 0
        with capped(cap_bytes if cap_bytes is not None else 60 * 1024 * MIB):
            for step in range(100):
                n, length = draw.randint(8, 64), draw.choice([32, 64, 96, 128, 192, 256])
                optimizer.zero_grad()
                report = mb.backward(model.loss, tokens(n, length, seed=step))
                optimizer.step()
                losses.append(float(report.loss))
                retried += report.retries > 0
                samples += sum(report.microbatch_sizes)
        return losses, retried, samples

    free, none, samples = run(None)
    tight, retried, same = run(900 * MIB)
    assert none == 0
    assert samples == same
    assert 0 < retried < 25  # of 100 batches: the others were cut before they ran out
    for one, two in zip(free, tight, strict=True):
        assert abs(one - two) < 2e-3 * abs(one)


@pytest.mark.parametrize("pinned", [True, False])
def test_large_inputs_arrive_whole_while_others_are_in_use(pinned: bool) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 62 * 62, 2)).double().cuda()
    images = torch.randn(37, 3, 64, 64, dtype=torch.double)
    images = images.pin_memory() if pinned else images
    model(images.cuda()).square().mean().backward()
    expected = gradient(model).clone()
    mb = Microbatcher(model, microbatch_size=5)
    for _ in range(5):
        model.zero_grad()
        mb.backward(lambda micro: model(micro["x"]).square().mean(), {"x": images, "scale": 1.0})
        assert (gradient(model) - expected).norm() <= 1e-10 * expected.norm()


def test_an_error_between_copies_leaves_memory_that_can_be_used() -> None:
    model = nn.Linear(1024, 1024).cuda()
    batch = torch.randn(4096, 1024)
    calls: list[int] = []

    def fn(micro: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) % 2 == 0:
            raise ValueError("mine")
        return model(micro).mean()

    mb = Microbatcher(model, microbatch_size=512)
    for _ in range(10):
        with pytest.raises(ValueError, match="mine"):
            mb.backward(fn, batch)
        filled = torch.full((512, 1024), 7.0, device="cuda")  # takes the block of the copy on its way
        assert float(filled.mean()) == 7.0


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_nothing_waits_for_the_device_once_settled() -> None:
    model = Small()
    mb = Microbatcher(model, microbatch_size=8, weight=lambda micro: micro["ids"].ne(0).sum())
    batch = tokens(32, 128)
    for _ in range(3):
        model.zero_grad()
        mb.backward(model.loss, batch)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            mb.backward(model.loss, batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_budget_is_kept() -> None:
    model = Small()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    budget = torch.cuda.memory_reserved() + 500 * MIB
    mb = Microbatcher(model, budget=budget)
    for _ in range(4):
        model.zero_grad()
        report = mb.backward(model.loss, tokens(64, 128))
    assert len(report.microbatch_sizes) > 1
    assert torch.cuda.max_memory_reserved() <= 1.05 * budget  # fragments of trusted sizes are not held back


def test_dropout_of_a_retried_batch_is_that_of_a_first_try() -> None:
    def run(size: int | None, cap_bytes: int) -> tuple[Any, torch.Tensor, torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(512, 4096), nn.Dropout(0.5), nn.GELU(), nn.Linear(4096, 16)).cuda()
        batch = torch.randn(4096, 512)
        with capped(cap_bytes):
            torch.manual_seed(1)
            report = Microbatcher(model, microbatch_size=size).backward(
                lambda x: model(x).square().mean(), batch
            )
            return report, gradient(model), torch.rand(1, device="cuda")

    # The whole batch needs 208 MiB at least: three tensors of 64 and a mask of 16, beside its own 8.
    report, ours, after = run(None, 170 * MIB)
    assert report.retries > 0, f"nothing ran out: {report}"
    other, first, then = run(max(report.microbatch_sizes), 20 * 1024 * MIB)
    assert (other.microbatch_sizes, other.retries) == (report.microbatch_sizes, 0), "another split"
    assert torch.equal(after, then), f"random numbers differ after the call: {after} and {then}"
    # Other masks would differ by as much as there is; kernels that were given less workspace, by rounding.
    error = float((ours - first).norm() / first.norm())
    assert error <= 1e-5, f"gradients differ by {error:.1e} after {report}"


def test_evaluation_in_microbatches_and_cached_representations() -> None:
    model = Small().eval()
    batch = tokens(64, 128)
    with torch.no_grad():
        whole = model(batch["ids"].cuda()).argmax(-1).cpu()
    with capped(300 * MIB):
        found = Microbatcher(model).map(lambda micro: model(micro["ids"]).argmax(-1).cpu(), batch)
    assert (found == whole).double().mean() > 0.999
    encoder = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 32)).cuda().double()
    points = torch.randn(50, 64, dtype=torch.double)

    def loss_fn(reps: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(reps @ reps.roll(1, 0).T, torch.arange(len(reps), device=reps.device))

    loss_fn(encoder(points.cuda())).backward()
    expected = gradient(encoder).clone()
    encoder.zero_grad()
    Microbatcher(encoder, microbatch_size=7).backward_cached(encoder, loss_fn, points)
    assert (gradient(encoder) - expected).norm() <= 1e-10 * expected.norm()


def test_autocast_and_a_scaler() -> None:
    model = Small()
    scaler = torch.amp.GradScaler("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    mb = Microbatcher(model, microbatch_size=8)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            report = mb.backward(model.loss, tokens(32, 64), scaler=scaler)
        scaler.step(optimizer)
        scaler.update()
        losses.append(report.loss)
    assert losses[-1].dtype is torch.float32
    assert float(losses[-1]) < float(losses[0])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*TensorFloat32:UserWarning")
def test_a_compiled_model() -> None:
    model = Small()
    batch = tokens(40, 64)
    expected = by_hand(model, batch, (16, 16, 8))
    compiled: Any = torch.compile(model)
    mb = Microbatcher(compiled, microbatch_size=16)

    def fn(micro: dict[str, torch.Tensor]) -> torch.Tensor:
        return functional.cross_entropy(compiled(micro["ids"]).flatten(0, 1), micro["ids"].flatten())

    report = mb.backward(fn, batch)
    assert report.microbatch_sizes == (16, 16, 8)
    assert (gradient(model) - expected).norm() <= 1e-3 * expected.norm()


# --- ragged batches


class Ragged(Small):
    """Looks at no padding."""

    def loss(self, micro: dict[str, torch.Tensor]) -> torch.Tensor:
        assert micro["ids"].is_cuda
        hidden = self.body(self.embed(micro["ids"]), src_key_padding_mask=micro["attention_mask"] == 0)
        logits = self.head(hidden)
        return functional.cross_entropy(logits.flatten(0, 1), micro["labels"].flatten(), ignore_index=-100)


def ragged(step: int, count: int = 48, longest: int = 256) -> dict[str, torch.Tensor]:
    draw = random.Random(step)
    lengths = [int(min(longest, max(8, draw.lognormvariate(4.0, 0.8)))) for _ in range(count)]
    mask = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)
    made = torch.Generator().manual_seed(step)
    ids = torch.randint(1, WORDS, mask.shape, generator=made) * mask
    return {"ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}


def valid(micro: dict[str, torch.Tensor]) -> torch.Tensor:
    return (micro["labels"] != -100).sum()


@pytest.mark.parametrize("cap", range(10))
def test_ragged_batches_are_exact_under_ten_caps(cap: int) -> None:
    model = Ragged(torch.float64)
    batches = [ragged(step, count=24, longest=128) for step in range(3)]
    expected = []
    for batch in batches:
        model.zero_grad()
        model.loss({name: part.cuda() for name, part in batch.items()}).backward()
        expected.append(gradient(model).cpu())
    model.zero_grad()
    mb = Microbatcher(model, lengths="attention_mask", weight=valid)
    with capped((200 + 60 * cap) * MIB):
        for batch, full in zip(batches, expected, strict=True):
            model.zero_grad()
            report = mb.backward(model.loss, batch)
            assert sum(report.microbatch_sizes) == 24
            assert (gradient(model).cpu() - full).norm() <= 1e-10 * full.norm()
        model.zero_grad()


def test_ragged_batches_under_a_cap_follow_the_uncapped_run_and_keep_what_they_learned() -> None:
    def run(cap_bytes: int, state: Any = None) -> tuple[list[float], int, Any, int]:
        model = Ragged()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        mb = Microbatcher(model, lengths="attention_mask", weight=valid)
        if state is not None:
            mb.load_state_dict(state)
        losses, retried = [], 0
        with capped(cap_bytes):
            for step in range(60):
                optimizer.zero_grad()
                report = mb.backward(model.loss, ragged(step))
                mb.step(optimizer)
                losses.append(float(report.loss))
                retried += report.retries > 0
        (known,) = mb.state_dict()["ragged"].values()
        return losses, retried, mb.state_dict(), len(known["shapes"]["seen"])

    free, none, _, _ = run(60 * 1024 * MIB)
    tight, retried, state, shapes = run(500 * MIB)
    assert none == 0
    assert retried <= 6  # of 60
    assert shapes <= 40
    for one, two in zip(free, tight, strict=True):
        assert abs(one - two) < 2e-3 * abs(one)
    _, again, _, _ = run(500 * MIB, state)
    assert again <= retried


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_ragged_batches_on_the_host_wait_for_nothing_once_settled() -> None:
    model = Ragged()
    mb = Microbatcher(model, lengths="attention_mask", weight=valid)
    for _ in range(3):
        model.zero_grad()
        mb.backward(model.loss, ragged(0))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            mb.backward(model.loss, ragged(0))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_ragged_evaluation_is_restored_in_order_and_width() -> None:
    model = Ragged().eval()
    batch = ragged(3)
    mask = batch["attention_mask"].bool()

    def fn(micro: dict[str, torch.Tensor]) -> torch.Tensor:
        hidden = model.body(model.embed(micro["ids"]), src_key_padding_mask=micro["attention_mask"] == 0)
        return model.head(hidden).argmax(-1).cpu()

    with torch.no_grad():
        whole = fn({name: part.cuda() for name, part in batch.items()})
    with capped(200 * MIB):
        found = Microbatcher(model, lengths="attention_mask").map(fn, batch)
    assert found.shape == whole.shape
    assert (found[mask] == whole[mask]).double().mean() > 0.999


@pytest.mark.parametrize("cap", range(12))
def test_whole_training_steps_under_caps_are_made_or_not_begun(cap: int) -> None:
    def steps(limit_bytes: int | None) -> tuple[list[torch.Tensor], str]:
        model = Small()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        mb = Microbatcher(model)
        ended = "made"
        with capped(60 * 1024 * MIB if limit_bytes is None else limit_bytes):
            for step in range(4):
                optimizer.zero_grad()
                before = [p.detach().cpu() for p in model.parameters()]
                try:
                    mb.backward(model.loss, tokens(32, 64, seed=step))
                    mb.step(optimizer, clip_norm=1.0)
                except (torch.OutOfMemoryError, NothingFitsError) as error:
                    ended = "not begun" if isinstance(error, NothingFitsError) else str(error)
                if ended != "made":
                    assert "nothing has moved" in ended or ended == "not begun"
                    after = [p.detach().cpu() for p in model.parameters()]
                    assert all(map(torch.equal, before, after))
                    break
            found = [p.detach().cpu() for p in model.parameters()]
            optimizer.zero_grad()
        return found, ended

    free, _ = steps(None)
    tight, ended = steps((60 + 25 * cap) * MIB)
    if ended == "made":
        # Of all together: Adam makes much of gradients that are zero but for rounding.
        one, two = (torch.cat([part.flatten() for part in some]) for some in (free, tight))
        assert (one - two).norm() <= 1e-3 * one.norm()
    assert ended == "made" or cap < 8
