"""Prediction on a real CUDA device: near the truth, and the program untouched."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch_private import memory_snapshot, record_memory_history

import batchfit
from batchfit import errors
from batchfit._engine.allocator.gpus import gpu_named
from batchfit._engine.trace.trace import trace
from batchfit._engine.trace.workload import rules_for

pytestmark = pytest.mark.gpu

BUDGET = 6 * 2**30


def classifier(*, recurrent: bool = False) -> batchfit.Workload:
    torch.manual_seed(0)
    inner: nn.Module
    if recurrent:
        inner = Recurrent()
    else:
        inner = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.1, batch_first=True), 4
        )
    model = nn.Sequential(nn.Embedding(8192, 256), inner, nn.Linear(256, 8192)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())

    def loss_fn(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())

    return batchfit.training(
        model, optimizer, loss_fn, lambda n: torch.randint(0, 8192, (n, 128)), autocast=torch.bfloat16
    )


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(256, 256, num_layers=2, batch_first=True, dropout=0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.lstm(x)[0]
        return out


def peak_of(workload: batchfit.Workload, size: int) -> int:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        workload.step(size)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def test_the_predicted_peak_is_the_measured_one() -> None:
    workload = classifier()
    prediction = batchfit.predict_batch_size(workload, budget=BUDGET, calibrate=False)
    assert prediction.based_on == "GPU, not run"
    for size in (prediction.batch_size // 2, prediction.batch_size):
        measured = peak_of(workload, size)
        assert abs(prediction.peak_bytes_at(size) / measured - 1) < 0.02


class Pictures(nn.Module):
    """Residual, with what torch does otherwise in a trace: see the test."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.ModuleList(nn.Linear(128, 128) for _ in range(3))
        self.norm, self.none, self.some = nn.LayerNorm(128), nn.Dropout(0.0), nn.Dropout(0.1)
        self.to_classes = nn.Linear(128, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.inside:
            x = x + self.some(self.none(layer(self.norm(x))).relu())
        x = self.to_classes(x.transpose(0, 1)).transpose(0, 1)  # not in one piece: the bias is added in place
        low = x.transpose(1, 2).unflatten(2, (16, 16))
        return nn.functional.interpolate(low, scale_factor=2, mode="bilinear")  # channels last


@pytest.mark.parametrize("lossy", ["cross_entropy", "mse_loss"])
@pytest.mark.parametrize("on", ["gpu", "cpu"])
def test_a_trace_allocates_what_a_step_does(lossy: str, on: str) -> None:
    """Gradients and biases added in place, copies for softmax and upsampling, a loss that keeps its all."""
    torch.manual_seed(0)
    model = Pictures().cuda()

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        made = model(x)
        if lossy == "mse_loss":
            return nn.functional.mse_loss(made, torch.zeros_like(made))
        return nn.functional.cross_entropy(made, torch.zeros(len(x), 32, 32, dtype=torch.long, device="cuda"))

    workload = batchfit.training(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-3),
        loss_fn,
        lambda n: torch.randn(n, 256, 128, device="cuda"),
    )
    told, done = allocates(workload, on)
    assert told == done


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("on", ["gpu", "cpu"])
def test_a_mask_is_left_out_or_kept_as_in_a_step(padded: bool, on: str) -> None:
    """A mask that hides nothing, which BART makes for itself, and one that hides the end of each row."""
    hf = pytest.importorskip("transformers", reason="needs transformers")
    torch.manual_seed(0)
    sides = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in SMALL_BART.items()}
    config = hf.BartConfig(vocab_size=512, d_model=128, dropout=0.0, use_cache=False, **sides)
    model = hf.BartForConditionalGeneration(config).cuda()

    def batch(n: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(3, 512, (n, 256), device="cuda")
        if not padded:
            return {"input_ids": ids, "labels": ids}
        mask = (torch.arange(256, device="cuda") < 200).expand(n, -1).contiguous()
        return {"input_ids": ids, "labels": ids, "attention_mask": mask, "decoder_attention_mask": mask}

    workload = batchfit.training(
        model, torch.optim.SGD(model.parameters(), lr=1e-3), lambda model, given: model(**given).loss, batch
    )
    told, done = allocates(workload, on)
    assert told == done


SMALL_BART = {"layers": 2, "ffn_dim": 256, "attention_heads": 2}


def allocates(workload: batchfit.Workload, on: str) -> tuple[Counter[int], Counter[int]]:
    """What a second step of 16 samples allocates: as traced on a device, and as it happens."""
    card = None if on == "gpu" else gpu_named("h200")
    found = trace(workload, 16, rules=rules_for(workload, card), steps=2)
    last = found.events[found.step_ends[0] : found.step_ends[1]]
    told = Counter(found.sizes[event] for event in last if event >= 0 and found.sizes[event] > 100_000)
    workload.step(16)
    record: Any = record_memory_history
    record(enabled="all", context=None)
    try:
        workload.step(16)
        events = memory_snapshot()["device_traces"][0]
    finally:
        record(enabled=None)
    done = Counter(e["size"] for e in events if e["action"] == "alloc" and e["size"] > 100_000)
    return told, done


def test_two_small_runs_calibrate_and_change_nothing() -> None:
    workload = classifier()
    before = [parameter.detach().clone() for parameter in workload.model.parameters()]
    state = torch.cuda.get_rng_state()
    prediction = batchfit.predict_batch_size(workload, budget=BUDGET)
    assert prediction.based_on == "calibrated"
    assert len(prediction.trials) == 2
    assert max(trial.size for trial in prediction.trials) < prediction.batch_size
    assert torch.equal(state, torch.cuda.get_rng_state())
    assert all(torch.equal(one, two) for one, two in zip(before, workload.model.parameters(), strict=True))


def test_find_begins_with_the_prediction() -> None:
    fit = batchfit.find_batch_size(classifier(), budget=BUDGET)
    alone = batchfit.find_batch_size(classifier(), budget=BUDGET, predict=False)
    assert fit.sustained
    assert all(trial.fits for trial in fit.trials)
    assert len({trial.size for trial in fit.trials}) <= 3
    assert fit.batch_size >= 0.97 * alone.batch_size


def test_a_plain_step_is_predicted_for_its_gpu_and_not_run() -> None:
    known = classifier()
    model, optimizer = known.model, known.optimizer

    def step(n: int) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            ids = torch.randint(0, 8192, (n, 128)).cuda()
            loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    prediction = batchfit.predict_batch_size(step, budget=BUDGET)
    assert (prediction.based_on, dict(optimizer.state)) == ("GPU, not run", {})
    declared = batchfit.predict_batch_size(known, budget=BUDGET, calibrate=False)
    assert abs(prediction.batch_size - declared.batch_size) <= 1
    with pytest.warns(UserWarning, match="state is not declared"):
        fit = batchfit.find_batch_size(step, budget="2GiB")
    assert all(trial.fits for trial in fit.trials)
    assert len({trial.size for trial in fit.trials}) <= 4


def test_a_recurrent_layer_runs_before_and_after_its_trace() -> None:
    workload = classifier(recurrent=True)
    prediction = batchfit.predict_batch_size(workload, budget=BUDGET, calibrate=False)
    measured = peak_of(workload, prediction.batch_size)  # a fake dropout state left behind would raise
    assert abs(prediction.peak_bytes / measured - 1) < 0.05


def test_what_cannot_be_traced_is_measured() -> None:
    workload = classifier()

    def loss_fn(model: Any, ids: torch.Tensor) -> torch.Tensor:
        kept = ids[ids >= 0].view_as(ids)  # the shape depends on the data
        return nn.functional.cross_entropy(model(kept).flatten(0, 1), kept.flatten())

    other = batchfit.training(
        workload.model, workload.optimizer, loss_fn, lambda n: torch.randint(0, 8192, (n, 128))
    )
    with pytest.raises(errors.UntraceableError, match=r"test_predict_gpu\.py"):
        batchfit.predict_batch_size(other, budget=BUDGET)
    assert batchfit.find_batch_size(other, budget="2GiB").sustained


def test_a_model_that_learns_and_that_nobody_finds_is_refused() -> None:
    """Its gradient would be a fake, and the real parameter's."""
    known, hidden = nn.Linear(64, 64).cuda(), nn.Linear(64, 64).cuda()
    models = iter([hidden] * 9)

    def step(n: int) -> None:
        next(models)(known(torch.randn(n, 64, device="cuda"))).sum().backward()

    workload = batchfit.Workload(step)
    rules = rules_for(workload)
    assert rules.device.type == "cuda"  # of a model that was found, not declared
    with pytest.raises(errors.UntraceableError, match=r"state=\[model, optimizer\]"):
        trace(workload, 2, rules=rules)
    assert all(one.grad is None for one in [*known.parameters(), *hidden.parameters()])


def test_another_gpu_is_traced_without_this_one() -> None:
    prediction = batchfit.predict_batch_size(classifier(), gpu="rtx3090")
    assert prediction.based_on == "no GPU"
    assert prediction.card == "rtx3090"
    assert any("rtx3090" in note for note in prediction.unseen)


@pytest.mark.parametrize("calibrate", [False, True])
@pytest.mark.parametrize("kind", ["gpt2", "t5"])
def test_the_predicted_peak_of_generation_is_the_measured_one(kind: str, calibrate: bool) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    torch.manual_seed(0)
    model: Any
    if kind == "gpt2":
        shape = {"n_layer": 4, "n_head": 4, "n_embd": 256, "vocab_size": 8192, "n_positions": 128}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, pad_token_id=0, eos_token_id=1))
    else:
        shape = {"num_layers": 4, "d_model": 256, "d_kv": 64, "num_heads": 4, "d_ff": 512, "vocab_size": 8192}
        model = transformers.T5ForConditionalGeneration(
            transformers.T5Config(**shape, decoder_start_token_id=0)
        )
    workload = batchfit.generation(
        model.cuda().eval(),
        lambda n: {"input_ids": torch.randint(2, 8192, (n, 48))},
        max_new_tokens=48,
        do_sample=False,
    )
    prediction = batchfit.predict_batch_size(workload, budget="2GiB", calibrate=calibrate)
    assert prediction.batch_size is not None
    workload.step(2)  # what cuBLAS keeps is there
    assert peak_of(workload, prediction.batch_size) == pytest.approx(prediction.peak_bytes, rel=0.02)
