"""TRL's trainers on a real CUDA device, where its fused head uses Triton: cut batches, and a search."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("trl", reason="needs trl")

from trl_cases import gradients_of, trainer_of

from batchfit.integrations.transformers import adapt

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "SFT packed": ("SFT", {"packing": True, "max_length": 24}),
    "DPO": ("DPO", {}),
    "KTO": ("KTO", {}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_cut_batch_has_the_gradients_of_the_whole(name: str, tmp_path: Path) -> None:
    kind, given = CASES[name]
    found = []
    for size in (None, 3):
        trainer = trainer_of(kind, tmp_path, use_cpu=False, **given)
        if size is not None:
            adapt(trainer, find=False)._batchfit.microbatch_size = size
        found.append(gradients_of(trainer))
    assert float((found[1] - found[0]).norm() / found[0].norm()) < 1e-4


@pytest.mark.parametrize("name", CASES)
def test_a_search_ends_with_a_size(name: str, tmp_path: Path) -> None:
    kind, given = CASES[name]
    trainer = adapt(trainer_of(kind, tmp_path, use_cpu=False, **given))
    trainer.train()
    assert trainer.found.batch_size >= 1
