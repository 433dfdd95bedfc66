"""TRL's trainers that generate on a real CUDA device: sampled parts, and both phases under a cap."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gpu_cap import MIB, capped

pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("trl", reason="needs trl")

import trl_models as tiny

from batchfit.integrations.transformers import adapt
from batchfit.integrations.transformers.rl.sampling import SharedDraws

pytestmark = pytest.mark.gpu


def test_the_draws_of_parts_are_those_of_the_whole() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    weights = torch.rand(3, 64, 32_000, device=device)
    torch.manual_seed(2)
    whole = torch.stack([torch.multinomial(one, num_samples=1) for one in weights])
    after = torch.rand(3, device=device)
    torch.manual_seed(2)
    draws = SharedDraws(device)
    for begin, end in ((0, 24), (24, 64)):
        with draws.of_rows(begin, end, 64):
            drawn = [torch.multinomial(one[begin:end], num_samples=1) for one in weights]
        assert torch.equal(torch.stack(drawn), whole[:, begin:end])
    draws.close()
    assert torch.equal(torch.rand(3, device=device), after)


@pytest.mark.parametrize("find", [True, False])
def test_a_capped_run_ends_with_both_phases_cut(find: bool, tmp_path: Path) -> None:
    model = tiny.llama(width=512, layers=4, dtype=torch.float32)
    given = {
        "per_device_train_batch_size": 64,
        "gradient_accumulation_steps": 1,
        "max_completion_length": 256,
    }
    made = tiny.trainer(tmp_path, model=model, data=tiny.prompts(64), use_cpu=False, max_steps=3, **given)
    ours = adapt(made, find=find)
    with capped(600 * MIB):
        ours.train()
    assert ours.state.global_step == 3
    names = {name for one in ours.state.log_history for name in one}
    assert ("microbatch_size" if find else "out_of_memory") in names
    if find:
        assert 1 <= ours.found.batch_size < 64
        assert 1 <= ours.found_generation.batch_size <= 64
