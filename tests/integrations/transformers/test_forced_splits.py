"""A forced split in Hugging Face's Trainer: gradients are the whole batch's, in both precisions.

With dropout the whole batch draws other masks than its microbatches, so there the plain Trainer that
accumulates the same microbatches says what they should be.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="needs transformers")

import transformers  # noqa: E402
from hf_models import (  # noqa: E402
    Tokens,
    arguments,
    bert,
    dividing_once,
    gpt2,
    gradients_of,
    padded,
    run_of,
    t5,
)

from batchfit.integrations.transformers import adapt  # noqa: E402

# A loss that Trainer divides by labels, a mean of its own, an encoder and a decoder.
MODELS: dict[str, Callable[[], Any]] = {"gpt2": gpt2, "bert": bert, "t5": t5}
WITHIN = {"float64": 1e-10, "float32": 1e-5}


def gradients(
    folder: Path,
    model: Any,
    *,
    batch: int = 13,
    accumulate: int = 1,
    size: int | None = None,
    data: Any = None,
) -> Any:
    """Those of one step; `size` of microbatches, None: a plain Trainer."""
    given = {
        "max_steps": 1,
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": accumulate,
    }
    with dividing_once():
        trainer = transformers.Trainer(
            model,
            arguments(folder, **given),
            train_dataset=data or Tokens(padded=False, classes=4),
            data_collator=padded,
        )
        if size is not None:
            run_of(adapt(trainer, find=False)).microbatch_size = size
        return gradients_of(trainer)


def off(found: Any, wanted: Any) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("dtype", WITHIN)
@pytest.mark.parametrize("name", MODELS)
def test_ragged_rows_in_an_odd_batch(name: str, dtype: str, tmp_path: Path) -> None:
    kind = getattr(torch, dtype)
    whole = gradients(tmp_path, MODELS[name]().to(kind))
    for size in (4, 1):
        found = gradients(tmp_path, MODELS[name]().to(kind), size=size)
        assert off(found, whole) < WITHIN[dtype]
        assert found.dtype is kind


@pytest.mark.parametrize("dtype", WITHIN)
def test_dropout_draws_what_accumulated_batches_draw(dtype: str, tmp_path: Path) -> None:
    """Of one width: a plain Trainer pads each batch that it accumulates by itself."""
    kind, ends = getattr(torch, dtype), []
    for dropout, size in ((0.3, None), (0.3, 3), (0.0, 3)):
        data = [{**row, "attention_mask": torch.ones(len(row["input_ids"]))} for row in Tokens(15)]
        model = gpt2(dropout=dropout).to(kind)
        torch.manual_seed(4)
        ends.append(gradients(tmp_path, model, batch=3, accumulate=5, size=size, data=data))
    plain, found, without = ends
    assert off(found, plain) < WITHIN[dtype]
    assert off(without, plain) > 0.01
