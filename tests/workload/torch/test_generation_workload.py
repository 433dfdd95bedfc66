"""Generation trials: the longest cache, beams, padding on the left, encoders, functions of one's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

import batchfit
from batchfit.errors import UntraceableError

transformers = pytest.importorskip("transformers", reason="needs transformers")
VOCABULARY = 64
with batchfit.virtual_memory("64MiB"):  # what this imports is frozen before the first test
    torch.nn.Linear(1, 1)(torch.zeros(1, 1))


def llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, pad_token_id=0,
        eos_token_id=1,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def gpt2() -> Any:
    tokens = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, n_positions=256, **tokens)
    )


def t5() -> Any:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    state = torch.get_rng_state()
    torch.manual_seed(0)
    yield
    torch.set_rng_state(state)


def prompts(length: int, *, left: int = 0) -> dict[str, torch.Tensor]:
    """Two prompts, the second with so many padding tokens on its left."""
    ids = torch.randint(2, VOCABULARY, (2, length))
    mask = torch.ones_like(ids)
    ids[1, :left], mask[1, :left] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def peak(workload: batchfit.Workload, size: int = 8) -> int:
    """Peak bytes of one step, the model aside."""
    with batchfit.virtual_memory("256MiB") as memory:
        before = memory.allocated_bytes
        memory.reset_peak()
        workload.step(size)
        return memory.peak_bytes - before


def lengths_of(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    shapes: list[tuple[int, ...]] = []
    generate = model.generate

    def spy(**options: Any) -> Any:
        out = generate(**options)
        shapes.append(tuple(out.shape))
        return out

    monkeypatch.setattr(model, "generate", spy)
    return shapes


@pytest.mark.parametrize("make", [llama, gpt2, t5])
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}])
def test_every_sample_gets_all_its_tokens(
    make: Callable[[], Any], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make()
    shapes = lengths_of(model, monkeypatch)
    workload = batchfit.generation(model, prompts(6, left=3), max_new_tokens=9, **options)
    workload.step(4)
    assert shapes == [(4, 1 + 9 if make is t5 else 6 + 9)]


@pytest.mark.parametrize("make", [llama, gpt2, t5])
def test_memory_grows_with_prompt_answer_and_beams(make: Callable[[], Any]) -> None:
    model = make()

    def of(prompt: int = 24, new: int = 4, **options: Any) -> int:
        return peak(batchfit.generation(model, prompts(prompt), max_new_tokens=new, **options))

    base = of()
    assert of(prompt=96) > 2 * base
    # 1.8 times for T5 of transformers 4.57: its eager attention keeps scores, and the encoder has no beams.
    assert of(num_beams=4) > 1.5 * base
    assert of(prompt=4, new=100) > 1.5 * of(prompt=4)  # the cache at its longest


def test_an_encoder_that_stops_early_is_an_error() -> None:
    model = t5()
    model.generation_config.max_time = 1e-9
    workload = batchfit.generation(model, prompts(6), max_new_tokens=9)
    with pytest.raises(ValueError, match=r"model\.generate stopped after 1 of 9 new tokens"):
        workload.step(2)


def test_padding_on_the_left_takes_the_memory_of_the_longest() -> None:
    if torch.__version__.startswith("2.6."):
        pytest.skip(
            "torch 2.6 on a CPU has no fused attention for grouped heads, which prompts without pads take"
        )
    model = llama()
    padded, full = (
        peak(batchfit.generation(model, prompts(48, left=left), max_new_tokens=4)) for left in (40, 0)
    )
    assert padded == pytest.approx(full, rel=0.05)


@pytest.mark.slow
def test_generation_fits_fewer_than_a_forward_pass() -> None:
    """Why a trial has to generate: the seed's point, and lm-evaluation-harness' trouble."""
    model = llama().eval()
    batch = prompts(4)
    options: dict[str, Any] = {"budget": "1MiB", "steps": 2, "soak_steps": 0, "tolerance": 0.1}

    def forward(model: Any, batch: Any) -> Any:
        return model(**batch, logits_to_keep=1)

    passes = batchfit.find_batch_size(batchfit.inference(model, batch, forward=forward), **options)
    long = batchfit.find_batch_size(batchfit.generation(model, batch, max_new_tokens=32), **options)
    assert long.batch_size < passes.batch_size
    beams = batchfit.generation(model, batch, max_new_tokens=32, num_beams=4)
    assert batchfit.find_batch_size(beams, **options).batch_size < long.batch_size / 2


# Functions


def test_a_function_generates() -> None:
    model = llama().eval()
    seen: list[Any] = []

    def generate(batch: Any, max_new_tokens: int, temperature: float = 1.0) -> torch.Tensor:
        seen.append(
            (batch["input_ids"].shape, max_new_tokens, temperature, torch.is_inference_mode_enabled())
        )
        tokens = batch["input_ids"]
        cache = None
        for _ in range(max_new_tokens):
            last = tokens if cache is None else tokens[:, -1:]
            out = model(input_ids=last, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            tokens = torch.cat([tokens, out.logits[:, -1:].argmax(-1)], dim=1)
        return tokens

    workload = batchfit.generation(generate, prompts(5), max_new_tokens=7, temperature=0.5)
    workload.step(3)
    assert seen == [((3, 5), 7, 0.5, True)]
    assert (workload.kind, workload.model, workload.state, workload.declared) == (
        "generation",
        None,
        (),
        True,
    )
    fit = batchfit.find_batch_size(workload, budget="4MiB", max_size=8, steps=2, soak_steps=0)
    assert fit.batch_size == 8
    partial_too = batchfit.generation(partial(generate, temperature=0.1), prompts(5), max_new_tokens=2)
    partial_too.step(1)
    assert seen[-1][2] == 0.1


def test_a_function_that_stops_early_is_an_error() -> None:
    workload = batchfit.generation(
        lambda batch, max_new_tokens: batch[:, :3], torch.ones(2, 9), max_new_tokens=4
    )
    with pytest.raises(ValueError, match=r"^model must make all 4 new tokens of a sample, not 3: a shorter"):
        workload.step(2)
    # what is no tensor cannot be judged
    batchfit.generation(lambda batch, max_new_tokens: "text", torch.ones(2, 9), max_new_tokens=4).step(2)


def test_a_function_is_checked_like_a_model() -> None:
    with pytest.raises(TypeError, match="max_new_tokens must be a positive integer, not True"):
        batchfit.generation(lambda batch, max_new_tokens: batch, torch.ones(2, 9), max_new_tokens=True)
    with pytest.raises(ValueError, match="max_length must be left out, not 9"):
        batchfit.generation(lambda batch, **_: batch, torch.ones(2, 9), max_new_tokens=4, max_length=9)


def test_a_function_cannot_be_traced_and_says_so() -> None:
    workload = batchfit.generation(lambda batch, max_new_tokens: batch, torch.ones(2, 9), max_new_tokens=4)
    with pytest.raises(UntraceableError, match="it is a function of yours"):
        batchfit.predict_batch_size(workload, budget="1GiB")


@pytest.mark.parametrize("steps", [2, 3, 11])
def test_a_trial_is_one_call_and_a_soak_a_few(steps: int) -> None:
    work = batchfit.generation(llama(), prompts(4), max_new_tokens=2)
    with batchfit.virtual_memory("1GiB"):
        fit = batchfit.find_batch_size(work, max_size=8, steps=steps)
    assert {(trial.soak, trial.steps_run) for trial in fit.trials} == {(False, 1), (True, steps)}
    with batchfit.virtual_memory("1GiB"):
        fit = batchfit.find_batch_size(work, max_size=2, steps=2, soak_steps=7)
    assert fit.survived_steps == 7
