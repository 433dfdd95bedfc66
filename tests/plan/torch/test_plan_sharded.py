"""Rows of a plan under FSDP2: what `predict` answers for as many ranks, and DDP's beside them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import batchfit
from batchfit._engine.torch_private import fsdp2
from batchfit._plan import plan as planned
from batchfit._plan.models import shape_of
from batchfit._plan.pure.options import PlanOptions
from batchfit._plan.pure.settings import Setting, settings_for
from batchfit._plan.sharded import by_count
from batchfit._plan.workloads import workload_of

needs_fsdp2 = pytest.mark.skipif(not fsdp2.runs_on_cpu(), reason="needs torch 2.8: FSDP2 on a CPU")
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 128,
}


@needs_fsdp2
def test_a_cell_under_fsdp2_is_what_predict_answers_for_as_many_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    config = str(tmp_path / "config.json")
    sharded = Setting(shards="fsdp2")
    monkeypatch.setattr(planned, "settings_for", lambda *args, **more: [Setting(), sharded])
    found = batchfit.plan(config, gpus="h100=256MiB,h100x4=256MiB", seq_len=32, cache=False)
    plain, row = found.rows
    assert row.setting == "full, bf16, AdamW, FSDP2"
    assert row.cells[0].batch_size == plain.cells[0].batch_size, "a single GPU has nobody to share with"
    work = workload_of(shape_of(config), sharded, 32)
    answer = batchfit.predict_batch_size(work, gpu="h100", budget="256MiB", ranks=4, shard="fsdp2")
    assert row.cells[1].batch_size == pytest.approx(answer.batch_size, rel=0.02)
    assert row.cells[1].peak_bytes == pytest.approx(answer.peak_bytes, rel=0.02)
    assert any("never confirmed on GPUs" in note for note in found.unseen)
    assert not dist.is_initialized()


@needs_fsdp2
@pytest.mark.slow
def test_a_workload_has_a_row_under_fsdp2_for_several_gpus() -> None:
    def work() -> batchfit.Workload:
        model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))
        optimizer = torch.optim.AdamW(model.parameters())
        return batchfit.training(
            model, optimizer, lambda model, x: model(x).square().mean(), lambda n: torch.zeros(n, 1024)
        )

    found = batchfit.plan(work(), gpus="h100x8=400MiB")
    first, last = found.rows[0], found.rows[-1]
    assert last.setting == "FSDP2"
    assert "fully_shard" in str(last.options["how"])
    assert last.cells[0].batch_size > first.cells[0].batch_size > 0
    assert [row.setting for row in batchfit.plan(work(), gpus="h100=400MiB").rows][-1] != "FSDP2"


def test_rows_under_fsdp2_are_for_several_gpus_only() -> None:
    assert not [one for one in settings_for("causal") if one.shards]
    assert len([one for one in settings_for("causal", several=True) if one.shards]) == 3
    assert not [one for one in settings_for("causal", several=True, methods=("lora",)) if one.shards]
    columns = PlanOptions(gpus="h100,h100x8,rtx4090x8").columns
    assert by_count(columns, apart=True) == {1: [0], 8: [1, 2]}
    assert by_count(columns, apart=False) == {1: [0, 1, 2]}
