"""Hugging Face's Trainer on a real CUDA device: a real cap, real out-of-memory errors, a real scaler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_cap import MIB, capped
from torch.utils.data import Dataset

transformers = pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("accelerate", reason="needs transformers")

from batchfit.integrations.transformers import adapt  # noqa: E402

pytestmark = pytest.mark.gpu

WORDS, LENGTH, BATCH = 2048, 128, 64


class Rows(Dataset[Any]):
    def __init__(self) -> None:
        self._ids = torch.randint(0, WORDS, (256, LENGTH), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._ids[index], "labels": self._ids[index]}


def model() -> Any:
    torch.manual_seed(0)
    sizes = {"n_layer": 4, "n_embd": 256, "n_head": 4, "vocab_size": WORDS, "n_positions": LENGTH}
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **none))


def trainer(folder: Path, *, accumulated: int, **more: Any) -> Any:
    args = transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=BATCH // accumulated,
        gradient_accumulation_steps=accumulated,
        max_steps=6,
        learning_rate=1e-3,
        optim="sgd",
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        **more,
    )
    return transformers.Trainer(model(), args, train_dataset=Rows(), eval_dataset=Rows())


def weights(of: Any) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten().cpu() for parameter in of.model.parameters()])


@pytest.mark.parametrize("find", [True, False])
def test_a_capped_run_ends_as_an_uncapped_one(find: bool, tmp_path: Path) -> None:
    plain = trainer(tmp_path, accumulated=1)
    begun = weights(plain)
    plain.train()
    expected = weights(plain)
    del plain
    ours = adapt(trainer(tmp_path, accumulated=4), find=find)
    with capped(400 * MIB):
        ours.train()
        loss = ours.evaluate()["eval_loss"]
    moved = (expected - begun).norm()
    assert (weights(ours) - expected).norm() < 1e-3 * moved
    assert 0 < loss < 20
    if find:
        assert 1 <= ours.found.batch_size < BATCH
    else:
        assert any("out_of_memory" in entry for entry in ours.state.log_history)


def test_half_precision_with_a_scaler(tmp_path: Path) -> None:
    ours = adapt(trainer(tmp_path, accumulated=4, fp16=True))
    begun = weights(ours)
    with capped(400 * MIB):
        ours.train()
    assert ours.state.global_step == 6
    assert ours.accelerator.scaler.get_scale() > 1
    assert torch.isfinite(weights(ours)).all()
    assert not torch.equal(weights(ours), begun)
