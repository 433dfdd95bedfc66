"""LoRA and an 8-bit Adam as what-ifs: the peak of a step that really has them, by a trace."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
for _name in ("transformers", "peft", "bitsandbytes"):
    pytest.importorskip(_name, reason=f"needs {_name}")

import batchfit  # noqa: E402
from batchfit._engine.trace.trace import trace  # noqa: E402
from batchfit._engine.trace.workload import rules_for  # noqa: E402
from batchfit._engine.workload.reachable import reach_of  # noqa: E402
from batchfit._explain.less_state import eight_bit, lora  # noqa: E402
from batchfit._explain.pure.holders import Peak  # noqa: E402
from batchfit._explain.shortage import _as_on_cpu  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # what these libraries say about each other


def model_of(kind: str) -> Any:
    import transformers

    torch.manual_seed(0)
    if kind == "gpt2":  # its linear layers are `Conv1D`
        config = transformers.GPT2Config(n_layer=4, n_embd=256, n_head=4, vocab_size=1024, n_positions=128)
        return transformers.GPT2LMHeadModel(config)
    config = transformers.LlamaConfig(
        num_hidden_layers=4,
        hidden_size=256,
        intermediate_size=512,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=1024,
    )
    return transformers.LlamaForCausalLM(config)


def work_of(model: Any, optimizer: Any) -> batchfit.Workload:
    batch = {name: torch.zeros(1, 128, dtype=torch.long) for name in ("input_ids", "labels")}
    return batchfit.training(model, optimizer, lambda model, batch: model(**batch).loss, batch)


def peak_of(work: batchfit.Workload, changes: Any = None) -> int:
    reach = reach_of(work)
    contexts = () if changes is None else changes(reach)[0].contexts
    for _ in range(2):  # the first trace in a process differs by a few operations
        traced = trace(work, 4, rules=rules_for(work), reach=reach, changes=contexts)
    return Peak.of(_as_on_cpu(traced)).size  # beside a GPU's workspaces a small model's state is nothing


@pytest.mark.parametrize("kind", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_an_8_bit_adam_takes_what_bitsandbytes_takes(kind: str) -> None:
    import bitsandbytes

    model = model_of(kind)
    plain = work_of(model, torch.optim.AdamW(model.parameters()))
    real = work_of(model, bitsandbytes.optim.AdamW8bit(model.parameters()))
    assert peak_of(plain, eight_bit) == pytest.approx(peak_of(real), rel=0.01)
    assert peak_of(plain) > 1.1 * peak_of(real)


@pytest.mark.parametrize("kind", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_lora_takes_what_peft_takes(kind: str) -> None:
    import peft

    model = model_of(kind)
    plain = work_of(model, torch.optim.AdamW(model.parameters()))
    guessed, before = peak_of(plain, lora), peak_of(plain)
    assert all(one.requires_grad for one in model.parameters())
    settings = peft.LoraConfig(r=16, target_modules="all-linear", fan_in_fan_out=kind == "gpt2")
    adapted = peft.get_peft_model(model, settings)
    real = work_of(adapted, torch.optim.AdamW([one for one in adapted.parameters() if one.requires_grad]))
    assert guessed == pytest.approx(peak_of(real), rel=0.03)
    assert before > 1.2 * guessed
