"""A plan traces few layers of a deep model: what it says is what the whole model says, block for block."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="needs transformers")

import batchfit  # noqa: E402
from batchfit._engine.allocator.gpus import gpu_named  # noqa: E402
from batchfit._engine.cuda_model.dispatch import CudaRules  # noqa: E402
from batchfit._engine.trace.trace import trace  # noqa: E402
from batchfit._engine.workload.reachable import reach_of  # noqa: E402
from batchfit._plan import plan as planned  # noqa: E402
from batchfit._plan.flops import flops_per_sample  # noqa: E402
from batchfit._plan.layers import Layers  # noqa: E402
from batchfit._plan.pure.model_shape import ModelShape, Task  # noqa: E402
from batchfit._plan.pure.settings import Setting, settings_for  # noqa: E402
from batchfit._plan.repeated import DepthReaches, RepeatedTraces  # noqa: E402
from batchfit._plan.workloads import workload_of  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # what PEFT and bitsandbytes say about each other
LLAMA = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 512}
EXPERTS = {"num_key_value_heads": 2, "head_dim": 32, "moe_intermediate_size": 64, "num_experts_per_tok": 2}
MODELS: dict[str, tuple[Task, int, dict[str, Any]]] = {
    "llama": ("causal", 9, {"num_key_value_heads": 2, "num_hidden_layers": 9, **LLAMA}),
    "gpt2": ("causal", 9, {"n_embd": 64, "n_head": 4, "n_layer": 9, "vocab_size": 512}),
    "bert": ("masked", 9, {"num_hidden_layers": 9, **LLAMA}),
    "vit": ("image", 9, {"num_hidden_layers": 9, "patch_size": 16, "image_size": 64, **LLAMA}),
    "t5": (
        "seq2seq",
        9,
        {"d_model": 64, "d_ff": 128, "num_heads": 4, "num_layers": 9, "decoder_start_token_id": 0},
    ),
    "gemma2": ("causal", 16, {**LLAMA, "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 16}),
    "qwen3_moe": ("causal", 9, {**LLAMA, **EXPERTS, "num_experts": 4, "num_hidden_layers": 9}),
}
QUICK = {
    "gpt2": [Setting(optimizer="adamw8bit")],
    "qwen3_moe": [Setting()],
}
CASES = [
    pytest.param(
        name, one, marks=() if one in QUICK.get(name, ()) else pytest.mark.slow, id=f"{name}-{one.name}"
    )
    for name, (task, _, _) in MODELS.items()
    for one in dict.fromkeys([*settings_for(task), *QUICK.get(name, ())])
    if not (one.method == "qlora" and name == "gpt2")  # no nn.Linear there
]


def shape(name: str) -> ModelShape:
    task, _, config = MODELS[name]
    return ModelShape(name, task, {"model_type": name, **config})


def sources(name: str, setting: Setting, gpu: str) -> tuple[RepeatedTraces, Any]:
    model, length = shape(name), 64
    depths = Layers(model).depths(2 if setting.checkpointing == "half" else 1)
    reaches = DepthReaches(model, depths, lambda one: workload_of(one, setting, length))
    rules = CudaRules(gpu_named(gpu), torch.device("cpu", 1))
    whole = workload_of(model, setting, length)
    return RepeatedTraces(reaches, rules), lambda size, steps: trace(
        whole, size, rules=rules, steps=steps, reach=reach_of(whole)
    )


@pytest.mark.parametrize(("name", "setting"), CASES)
def test_a_trace_is_that_of_the_whole_model(name: str, setting: Setting) -> None:
    quick, whole = sources(name, setting, "rtx4090")
    for size, steps in ((2, 1), (3, 1), (7, 2)):
        assert quick.trace(size, steps=steps) == whole(size, steps)


def test_few_layers_are_traced() -> None:
    quick, _ = sources("llama", Setting(), "h100")
    quick.trace(2, steps=1)
    (depths, _), *_ = quick.learned
    counts = [one.config["num_hidden_layers"] for one in (depths.shallow, depths.middle, depths.deep)]
    assert (counts, depths.more) == ([2, 3, 4], 6)
    assert not quick.refused


@pytest.mark.slow
def test_a_plan_is_the_same_as_of_the_whole_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    import json

    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "llama", **MODELS["llama"][2]}))
    rows = [Setting(weights="fp32")]
    monkeypatch.setattr(planned, "settings_for", lambda *args, **more: rows)

    def rows_of() -> Any:
        found = batchfit.plan(str(config), gpus="rtx4090=256MiB,h100x2=512MiB", seq_len=64, cache=False)
        return found.rows, found.columns

    quick = rows_of()
    monkeypatch.setattr(Layers, "depths", lambda self, period: [])
    assert rows_of() == quick
    assert all(cell.batch_size > 10 for row in quick[0] for cell in row.cells)


def test_operations_are_those_of_the_whole_model() -> None:
    model = shape("llama")
    reaches = DepthReaches(model, Layers(model).depths(1), lambda one: workload_of(one, Setting(), 64))
    counted = reaches.counted(lambda reach: flops_per_sample(reach.workload))
    assert counted == flops_per_sample(workload_of(model, Setting(), 64)) > 0


@pytest.mark.parametrize(
    ("change", "counts"),
    [
        ({"num_hidden_layers": 6}, []),  # would save little
        ({"layer_types": ["sliding_attention"] * 8 + ["full_attention"], "sliding_window": 32}, []),
        ({"layer_types": ["sliding_attention", "full_attention", "full_attention"] * 10}, [3, 6, 9]),
    ],
    ids=["few layers", "a last layer of its own", "in turns of three"],
)
def test_depths_are_those_whose_layers_are_alike(change: dict[str, Any], counts: list[int]) -> None:
    config = {
        "model_type": "qwen3",
        "num_key_value_heads": 2,
        "num_hidden_layers": 9,
        "head_dim": 32,
        **LLAMA,
    }
    config |= change
    if "layer_types" in change:
        config["num_hidden_layers"] = len(change["layer_types"])
    found = Layers(ModelShape("x", "causal", config)).depths(1)
    traced = [(one.shallow, one.middle, one.deep) for one in found[:1]]
    assert [one.config["num_hidden_layers"] for three in traced for one in three] == counts


def test_a_model_whose_layers_do_not_repeat_is_traced_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    from batchfit._plan import repeated

    def refuse(*args: Any, **more: Any) -> None:
        raise repeated.NotRepeatedError("no")

    quick, whole = sources("llama", Setting(), "h100")
    monkeypatch.setattr(repeated.Repetition, "learned", refuse)
    assert quick.trace(2, steps=1) == whole(2, 1)
    assert quick.refused == ["no"]


def test_products_of_experts_are_counted() -> None:
    config = {"model_type": "qwen3_moe", **MODELS["qwen3_moe"][2], "num_hidden_layers": 2}

    def counted(chosen: int) -> float:
        model = ModelShape("x", "causal", {**config, "num_experts_per_tok": chosen})
        return flops_per_sample(workload_of(model, Setting(), 32))

    tokens, layers, products = 32, 2, 3 * config["hidden_size"] * config["moe_intermediate_size"]
    assert counted(4) - counted(2) == 6 * tokens * 2 * layers * products
