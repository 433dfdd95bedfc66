"""`batchfit.plan`: what it answers is what `predict_batch_size` answers, and nothing is traced twice."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_runner import runner

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="needs transformers")

import batchfit  # noqa: E402
from batchfit._cli.app import app  # noqa: E402
from batchfit._engine.trace.trace import WorkloadTraces  # noqa: E402
from batchfit._engine.workload.reachable import reach_of  # noqa: E402
from batchfit._plan import plan as planned  # noqa: E402
from batchfit._plan.cache import CellCache  # noqa: E402
from batchfit._plan.cells import ChangedTraces, bucket_bytes, cells_of  # noqa: E402
from batchfit._plan.flops import flops_per_sample  # noqa: E402
from batchfit._plan.models import build, shape_of  # noqa: E402
from batchfit._plan.pure.options import PlanOptions  # noqa: E402
from batchfit._plan.pure.settings import Setting, settings_for  # noqa: E402
from batchfit._plan.pure.shapes import SHAPES  # noqa: E402
from batchfit._plan.pure.speed import Cell, StepCost  # noqa: E402
from batchfit._plan.repeated import RepeatedTraces  # noqa: E402
from batchfit._plan.workloads import workload_of  # noqa: E402
from batchfit.errors import TargetError  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # what PEFT and bitsandbytes say about each other
TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 8192,
}
QUICK = ("gpt2", "SmolLM2-135M", "bert-base-uncased", "vit-base-patch16-224", "resnet-50", "whisper-tiny")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHFIT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    return str(path)


def cells_as_traced(work: Any, columns: Any) -> dict[int, Cell]:
    """The cells of a workload as it is."""
    reach = reach_of(work)
    return cells_of(
        lambda rules: ChangedTraces(WorkloadTraces(reach, rules)),
        columns,
        margin=0.02,
        flops_per_sample=1.0,
        bucket_bytes=bucket_bytes(reach),
    )[0]


@pytest.fixture
def one_setting(monkeypatch: pytest.MonkeyPatch) -> Setting:
    """A plan of one row."""
    only = Setting(method="lora", checkpointing="all")
    monkeypatch.setattr(planned, "settings_for", lambda *args, **more: [only])
    return only


@pytest.mark.parametrize(
    "setting",
    [
        Setting(),
        pytest.param(
            Setting(checkpointing="all", optimizer="adamw8bit", loss="chunked"), marks=pytest.mark.slow
        ),
    ],
    ids=lambda s: s.name,
)
def test_a_cell_is_what_predict_answers(config: str, setting: Setting) -> None:
    work = workload_of(shape_of(config), setting, 64)
    asked = [("rtx4090", "256MiB"), ("a100-80gb", "192MiB"), ("h100", "256MiB")]
    columns = PlanOptions(gpus=["=".join(one) for one in asked]).columns
    cells = cells_as_traced(work, columns)
    for at, (gpu, budget) in enumerate(asked):
        answer = batchfit.predict_batch_size(work, gpu=gpu, budget=budget)
        assert cells[at].batch_size == pytest.approx(answer.batch_size, rel=0.01)
        assert cells[at].peak_bytes == pytest.approx(answer.peak_bytes, rel=0.01)


def test_a_plan_that_is_asked_for_again_traces_nothing(config: str, one_setting: Setting) -> None:
    first = batchfit.plan(config, gpus="rtx4090=256MiB", seq_len=64)
    again = batchfit.plan(config, gpus="rtx4090=256MiB", seq_len=64, global_batch=64)
    assert (first.traced, again.traced) == (1, 0)
    assert again.rows[0].setting == one_setting.name
    assert again.rows[0].cells[0].batch_size == first.rows[0].cells[0].batch_size > 0
    other = batchfit.plan(config, gpus=["rtx4090=256MiB", "rtx4090=128MiB"], seq_len=64)
    assert other.traced == 1
    assert other.columns[0].recommended == 0


@pytest.mark.parametrize("text", ["{", "[]", '{"a": 3}', "\x00"])
def test_a_damaged_cache_is_no_error(text: str, tmp_path: Path) -> None:
    cell = Cell(3, 10, StepCost(1.0, 2.0, 3.0, 4.0))
    cache = CellCache("a model", used=True)
    cache.put("a", cell)
    cache.put("b", Cell(0, 5))
    cache.save()
    (file,) = (tmp_path / "cache" / "plans").iterdir()
    kept = CellCache("a model", used=True)
    assert (kept.get("a"), kept.get("b"), kept.get("c")) == (cell, Cell(0, 5), None)
    assert CellCache("a model", used=False).get("a") is None
    file.write_text(text)
    damaged = CellCache("a model", used=True)
    assert damaged.get("a") is None
    damaged.put("a", cell)
    damaged.save()
    assert CellCache("a model", used=True).get("a") == cell


def test_ddp_holds_a_copy_of_every_gradient(config: str) -> None:
    work = workload_of(shape_of(config), Setting(), 64)
    gradients = 2 * sum(one.numel() for one in work.model.parameters())
    columns = PlanOptions(gpus=["h100=256MiB", "h100x2=256MiB"]).columns
    cells = cells_as_traced(work, columns)
    fewer = cells[1].batch_size
    assert fewer < cells[0].batch_size
    alone = batchfit.predict_batch_size(work, gpu="h100", budget="256MiB", max_size=fewer)
    assert alone.batch_size == fewer
    block = 2**20  # what is left of a cached block is not split off below that
    assert cells[1].peak_bytes - alone.peak_bytes == pytest.approx(gradients, abs=block)


def test_heads_that_share_keys_compute_as_much_as_others(config: str) -> None:
    shared = shape_of(config)
    heads = {"num_key_value_heads": shared.config["num_attention_heads"]}
    plain = replace(shared, config={**shared.config, **heads})
    counted = [flops_per_sample(workload_of(one, Setting(), 64)) for one in (shared, plain)]
    width = shared.config["hidden_size"] - shared.config["hidden_size"] // 2
    projections = 2 * 3 * 64 * 2 * width * shared.config["hidden_size"] * shared.config["num_hidden_layers"]
    assert counted[1] - counted[0] == projections


@pytest.mark.parametrize(
    "setting", [one for one in settings_for("causal") if one.method != "full"], ids=lambda s: s.name
)
def test_lora_trains_its_matrices_only(config: str, setting: Setting) -> None:
    work = workload_of(shape_of(config), setting, 64)
    learned = [name for name, one in work.model.named_parameters() if one.requires_grad]
    assert learned
    assert all("lora_" in name for name in learned)
    assert all(one.device.type == "meta" for one in work.model.parameters())
    kinds = {type(one).__name__ for one in work.model.modules()}
    assert ("Linear4bit" in kinds) == (setting.method == "qlora")


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(one, marks=() if one.short_name in QUICK else pytest.mark.slow, id=one.short_name)
        for one in SHAPES
    ],
)
def test_a_known_model_has_the_published_number_of_parameters(shape: Any) -> None:
    model = build(shape, dtype=torch.bfloat16)
    assert sum(one.numel() for one in model.parameters()) == shape.parameters


def test_a_layer_that_is_no_linear_cannot_be_in_4_bits(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    small = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 2,
    }
    path.write_text(json.dumps(small))
    plan = batchfit.plan(str(path), gpus="t4", seq_len=32, methods="qlora", cache=False)
    assert {row.note for row in plan.rows} == {"no nn.Linear for bitsandbytes to hold in 4 bits"}


def test_a_workload_is_planned_as_it_is_and_with_each_change() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 64))
    work = batchfit.training(
        model,
        torch.optim.AdamW(model.parameters()),
        lambda model, batch: model(batch).square().mean(),
        lambda n: torch.randn(n, 256),
    )
    plan = batchfit.plan(work, gpus="small=256MiB")
    sizes = {row.setting: row.cells[0].batch_size for row in plan.rows}
    predicted = batchfit.predict_batch_size(work, budget="256MiB").batch_size
    assert sizes["as it is"] == pytest.approx(predicted, rel=0.01)
    assert sizes["bf16 autocast"] > sizes["as it is"]
    with pytest.raises(ValueError, match="seq_len and methods must be left out for a workload"):
        batchfit.plan(work, gpus="t4", seq_len=12)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is not JSON"),
        ("[]", r"must be a configuration of transformers \(config.json\)"),
        ('{"model_type": "nosuchkind"}', "cannot build"),
    ],
)
def test_a_wrong_configuration_is_named(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(TargetError, match=says):
        batchfit.plan(str(path), gpus="t4", seq_len=8)


def test_the_command(config: str, tmp_path: Path, one_setting: Setting) -> None:
    asked = ["plan", config, "--gpu", "rtx4090=256MiB,h100x8=1GiB", "--seq-len", "64"]
    done = runner().invoke(
        app, [*asked, "--price", "rtx4090=0.4", "--paste", "trl", "--output", str(tmp_path / "p.json")]
    )
    assert done.exit_code == 0, done.output
    assert one_setting.name in done.stdout
    assert "several GPUs: DDP" in done.stdout
    assert "SFTConfig(" in done.stdout
    saved = batchfit.Plan.from_json((tmp_path / "p.json").read_text())
    assert [one.title for one in saved.columns] == ["rtx4090", "h100 x8"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["plan", "qwen3-9b", "--gpu", "t4"], "Close names: Qwen/Qwen3-8B"),
        (["plan", "gpt2", "--gpu", "nosuch"], "nosuch=24GiB"),
        (["plan", "gpt2"], "--gpu"),
        (["plan", "gpt2", "--gpu", "t4", "--method", "half"], "full, lora or qlora"),
        (["plan", "gpt2", "--gpu", "t4", "--paste", "nemo"], "transformers, trl, lightning"),
    ],
)
def test_bad_input_is_one_error_before_any_work(words: list[str], says: str) -> None:
    done = runner().invoke(app, words)
    assert done.exit_code == 2, done.output
    assert says in done.stderr


def test_the_known_models_are_listed() -> None:
    done = runner().invoke(app, ["plan", "--list-models"])
    assert done.exit_code == 0
    assert "Qwen/Qwen3-8B" in done.stdout


@pytest.mark.slow
def test_where_nothing_fits_the_cheapest_change_is_one_that_fits(
    config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of(*args: Any, methods: Any, **more: Any) -> list[Setting]:
        return [
            one for one in (Setting(), Setting(method="lora", checkpointing="all")) if one.method in methods
        ]

    monkeypatch.setattr(planned, "settings_for", of)
    gpu, length = "t4=120MiB", 1024
    only_full = batchfit.plan(config, gpus=gpu, seq_len=length, methods="full")
    assert only_full.rows[0].cells[0].batch_size == 0
    remedy = only_full.columns[0].remedy
    assert "for one sample" in remedy
    assert "smallest GPU with that memory" in remedy
    found = re.search(r"--seq-len (\d+) \((\d+) per GPU\)|--method lora", remedy)
    assert found is not None, remedy
    if found[1]:
        shorter = batchfit.plan(config, gpus=gpu, seq_len=int(found[1]), methods="full", cache=False)
        assert shorter.rows[0].cells[0].batch_size == int(found[2])
    else:
        lora = batchfit.plan(config, gpus=gpu, seq_len=length, methods="lora", cache=False)
        assert f", {lora.rows[0].cells[0].batch_size} per GPU" in remedy


SMALL_UNET = {
    "_class_name": "UNet2DConditionModel",
    "block_out_channels": [32, 64],
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
    "cross_attention_dim": 32,
    "attention_head_dim": 8,
    "norm_num_groups": 8,
    "sample_size": 16,
}
SMALL_FLUX = {
    "_class_name": "FluxTransformer2DModel",
    "num_layers": 1,
    "num_single_layers": 1,
    "in_channels": 16,
    "attention_head_dim": 32,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "pooled_projection_dim": 16,
    "axes_dims_rope": [8, 12, 12],
}


@pytest.mark.parametrize(
    ("fields", "setting"),
    [
        pytest.param(SMALL_UNET, Setting(method="lora"), id="unet"),
        pytest.param(SMALL_FLUX, Setting(method="lora"), id="flux", marks=pytest.mark.slow),
        pytest.param(SMALL_FLUX, Setting(checkpointing="all"), id="flux-all", marks=pytest.mark.slow),
    ],
)
def test_a_diffusion_model_is_planned(
    fields: dict[str, Any], setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("diffusers", reason="needs diffusers")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields))
    monkeypatch.setattr(planned, "settings_for", lambda *args, **more: [setting])
    plan = batchfit.plan(str(path), gpus="rtx4090=512MiB", seq_len=128, cache=False)
    assert not plan.rows[0].note
    assert plan.rows[0].cells[0].batch_size > 0
    assert any("VAE" in note for note in plan.unseen)


def test_what_a_trace_could_not_see_is_said_again(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned, "settings_for", lambda *args, **more: [Setting()])
    monkeypatch.setattr(RepeatedTraces, "caveats", lambda self: ("what no trace shows",))
    first = batchfit.plan(config, gpus="rtx4090=256MiB", seq_len=32)
    again = batchfit.plan(config, gpus="rtx4090=256MiB", seq_len=32)
    assert (first.traced, again.traced) == (1, 0)
    assert first.unseen == again.unseen
    assert "what no trace shows" in again.unseen
