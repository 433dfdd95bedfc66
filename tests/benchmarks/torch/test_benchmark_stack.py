"""The benchmark of LoRA on a GPU, as far as a CPU can run it: its cases, the truth's way, its page."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from benchmark_scripts import imported

import batchfit

LEAVES_BYTES = 2**18  # tables of bitsandbytes, which PEFT imports


@pytest.fixture
def stack_gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("transformers")
    return imported("stack_gpu", monkeypatch)


CASE = "gpt2@lora/bf16/24"


def answers(arguments: list[str]) -> dict[str, Any]:
    """What the children of a real run answer, made up."""
    if arguments[1] == "predict":
        whole = {"margin": 0.02, "trace_s": 1.0, "elapsed_s": 1.5, "peak_phase": "backward", "unseen": []}
        curve = [{"size": size, "peak_bytes": size * 2**20} for size in (1, 20, 60)]
        return {"raw": 42, "default": 39, "prediction": {**whole, "torch_version": "2", "curve": curve}}
    trial = {"size": 38, "outcome": "fits", "steps_run": 25, "peak_bytes": 40 * 2**20, "reserved_bytes": 1}
    trial |= {"alloc_retries": 0, "soak": True, "step_s": [0.1]}
    find = {"answer": 38, "seconds": 1.0, "sizes": [39, 38], "ooms": 1}
    return {"sustained": 40, "fails": 41, "find": find, "trials": [trial]}


def test_what_failed_runs_again_and_what_is_there_does_not(
    stack_gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("peft")
    import prediction_gpu

    asked: list[list[str]] = []
    fails = [True]

    def child(arguments: list[str], environment: dict[str, str]) -> dict[str, Any]:
        asked.append(arguments)
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if arguments[1] == "predict" else {}
        assert environment == hidden, "a prediction without a GPU sees none"
        return {"error": "no"} if arguments[1] == "truth" and fails[0] else answers(arguments)

    monkeypatch.setattr(prediction_gpu, "child", child)
    monkeypatch.setattr(stack_gpu, "CASES", (("gpt2@lora", "bf16", 24),))
    out = tmp_path / "stack.json"
    assert stack_gpu.run(out, 125.0, 60.0) == 1
    fails.clear()
    fails.append(False)
    assert stack_gpu.run(out, 125.0, 60.0) == 0
    truth = ["child", "truth", "gpt2@lora", "bf16", "24", "kept", "60"]
    predict = ["child", "predict", "gpt2@lora", "bf16", "24", "kept", "none"]
    assert sorted(asked) == sorted([truth, truth, predict])
    assert stack_gpu.run(out, 125.0, 60.0) == 0
    assert len(asked) == 3
    text = stack_gpu.page(json.loads(out.read_text()))
    assert (
        f"| {CASE} | 40, 41 | 42 +5.0% (39) | 38, 95.0% of it | 39, 38 | 1 | -5.00% to -5.00%, 1 trials |"
        in text
    )


def test_the_truth_is_searched_with_steps_of_a_loop_that_keeps(
    stack_gpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers as hf

    import prediction_gpu
    import zoo

    def tiny(_: str) -> Any:
        config = hf.GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=256, use_cache=False)
        return hf.GPT2LMHeadModel(config), zoo._tokens(256, 32, "cpu"), zoo._hf_loss

    pytest.importorskip("peft")
    monkeypatch.setitem(zoo._BUILD, "gpt2", tiny)
    made = zoo.make
    monkeypatch.setattr(zoo, "make", lambda *names, **options: made(*names, device="cpu", **options))
    with batchfit.virtual_memory("2MiB"):
        found = prediction_gpu.run_truth("gpt2@lora", "fp32", "1", "kept", "3")
    assert 1 <= found["find"]["answer"] <= found["sustained"] + 1 == found["fails"]
    soaks = [one for one in found["trials"] if one["soak"] and one["outcome"] == "fits"]
    assert {one["steps_run"] for one in soaks} >= {3}
    torch.manual_seed(0)
    work = made("gpt2@lora", "fp32", device="cpu")
    learning = [name for name, one in work.model.named_parameters() if one.requires_grad]
    assert learning
    assert all("lora_" in name for name in learning)
