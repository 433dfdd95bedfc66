"""Generation in a trace is what it is in a run: the same passes, whoever wraps it; else it is refused."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import batchfit
from batchfit._engine.trace.trace import trace
from batchfit._engine.trace.workload import rules_for
from batchfit.errors import UntraceableError

transformers = pytest.importorskip("transformers", reason="needs transformers")
OLD_MASKS = transformers.__version__.startswith("4.")  # it asks a mask for its values, also in a trace


def llama() -> Any:
    heads = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=32, intermediate_size=32, pad_token_id=0, eos_token_id=1, **heads
    )
    return transformers.LlamaForCausalLM(config).eval()


def gpt2() -> Any:
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=512, n_positions=64)
    return transformers.GPT2LMHeadModel(config).eval()


def bart() -> Any:
    shape = {f"{one}_layers": 1 for one in ("encoder", "decoder")}
    shape |= {f"{one}_attention_heads": 2 for one in ("encoder", "decoder")}
    shape |= {f"{one}_ffn_dim": 32 for one in ("encoder", "decoder")}
    return transformers.BartForConditionalGeneration(
        transformers.BartConfig(**shape, d_model=32, vocab_size=512, decoder_start_token_id=2)
    ).eval()


def random_ids(n: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(3, 500, (n, 9))}


def with_mask(n: int) -> dict[str, torch.Tensor]:
    return {**random_ids(n), "attention_mask": torch.ones(n, 9, dtype=torch.long)}


def padded(n: int) -> dict[str, torch.Tensor]:
    batch = with_mask(n)
    batch["attention_mask"][:, :2] = 0
    return batch


def traced(work: batchfit.Workload, size: int = 3) -> Any:
    return trace(work, size, rules=rules_for(work), steps=1)


@pytest.mark.parametrize("batch", [random_ids, with_mask, padded, lambda n: torch.randint(3, 500, (n, 9))])
@pytest.mark.parametrize("make", [llama, gpt2, bart])
def test_the_model_is_called_as_in_a_run(make: Any, batch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    seen: list[Any] = []
    forward = type(model).forward

    @functools.wraps(forward)
    def watched(self: Any, *args: Any, **options: Any) -> Any:
        out = forward(self, *args, **options)
        shapes = {k: tuple(v.shape) for k, v in options.items() if isinstance(v, torch.Tensor)}
        seen.append((sorted(options), shapes, tuple(out.logits.shape)))
        return out

    monkeypatch.setattr(type(model), "forward", watched)
    work = batchfit.generation(model, batch, max_new_tokens=6, do_sample=False)
    if OLD_MASKS and (batch is padded or (make is bart and batch is not with_mask)):
        with pytest.raises(UntraceableError, match="reads a value that depends on the data"):
            traced(work)
        return
    work.step(3)
    real = seen.copy()
    seen.clear()
    traced(work)
    assert seen == real


class Wrapped(nn.Module):
    """As adapters do."""

    def __init__(self) -> None:
        super().__init__()
        self.base_model = llama()

    @property
    def device(self) -> torch.device:
        device: torch.device = self.base_model.device
        return device

    def forward(self, *args: Any, **options: Any) -> Any:
        return self.base_model(*args, **options)

    def generate(self, *args: Any, **options: Any) -> Any:
        return self.base_model.generate(*args, **options)


def test_a_wrapper_is_what_it_wraps() -> None:
    peaks = [
        traced(batchfit.generation(model, random_ids, max_new_tokens=30, do_sample=False)).peak_bytes
        for model in (llama(), Wrapped())
    ]
    assert peaks[0] == peaks[1]


def test_generation_in_a_step_of_ones_own_is_refused_and_ends() -> None:
    model = llama()

    def step(n: int) -> None:
        ids = random_ids(n)["input_ids"].to(model.device)
        with torch.no_grad():
            model.generate(ids, max_new_tokens=8, min_new_tokens=8)

    work = batchfit.Workload(step, state=[model])
    with pytest.raises(UntraceableError, match="depends on the data"):
        trace(work, 3, rules=rules_for(work), steps=1, limit_s=20)  # else it would go on for ever


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"prefill_chunk_size": 4}, "prefill_chunk_size is not traced"),
        ({"guidance_scale": 1.5}, "guidance_scale is not traced"),
        ({"generation_config": {"cache_implementation": "static"}}, "cache_implementation is not traced"),
        ({"generation_config": {"max_time": 60.0}}, "max_time is not traced"),
        ({"generation_config": {"stop_strings": ["."]}}, "stop_strings is not traced"),
        ({"prompt_lookup_num_tokens": 2}, "prompt_lookup_num_tokens is not traced"),
    ],
)
def test_what_goes_another_way_is_refused(options: dict[str, Any], why: str) -> None:
    if "generation_config" in options:
        options = {"generation_config": transformers.GenerationConfig(**options["generation_config"])}
    work = batchfit.generation(llama(), random_ids, max_new_tokens=30, do_sample=False, **options)
    with pytest.raises(UntraceableError, match=why):
        traced(work)
    assert not {"generate", "forward"} & set(vars(work.model))


def test_passes_of_more_than_a_token_are_refused() -> None:
    if not hasattr(type(llama()), "_prefill"):
        pytest.skip("this transformers has no _prefill, in which a prompt can be taken in two")

    class Chunked(type(llama())):  # type: ignore[misc]
        """Takes its prompt in two."""

        def _prefill(self, *args: Any, **options: Any) -> Any:
            ids = args[0]
            cache = self(ids[:, :4], use_cache=True).past_key_values
            return self(ids[:, 4:], past_key_values=cache, use_cache=True)

    model = Chunked(llama().config).eval()
    work = batchfit.generation(model, random_ids, max_new_tokens=30, do_sample=False)
    with pytest.raises(UntraceableError, match="one token each"):
        traced(work)


def test_a_counter_that_the_host_writes_is_read_as_it_is() -> None:
    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        rounds, positions = torch.zeros(1, dtype=torch.long), torch.arange(4, device=x.device)
        while bool((positions + rounds).max() < 10):
            rounds += 1
            x = x.tanh()
        return model(x).sum()

    work = batchfit.training(nn.Linear(4, 4), None, loss, lambda n: torch.ones(n, 4))
    with pytest.raises(UntraceableError, match="depends on the data"):
        traced(work)


def test_labels_of_few_samples_decide_nothing() -> None:
    def loss(model: Any, batch: Any) -> torch.Tensor:
        out = model(batch[0])
        return out[(batch[1] == 1).nonzero()[:, 0]].sum()

    work = batchfit.training(
        nn.Linear(4, 4), None, loss, lambda n: (torch.ones(n, 4), torch.tensor([0, 1, 1, 0])[:n])
    )
    with pytest.raises(UntraceableError, match="depends on the data"):
        traced(work)
