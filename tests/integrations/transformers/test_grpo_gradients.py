"""The loss phase of TRL's trainers that generate: a batch in microbatches has the gradients of the whole."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("trl", reason="needs trl")

import trl_models as tiny  # noqa: E402
from examples import some_slow  # noqa: E402

from batchfit.errors import BatchfitError  # noqa: E402
from batchfit.integrations.transformers import adapt  # noqa: E402

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
ROWS = 7  # an odd number: microbatches of at most 2 are 2 + 2 + 2 + 1

# What changes the loss beside its type, one at a time.
VARIANTS: dict[str, dict[str, Any]] = {
    "with a reference model": {"beta": 0.1},
    "with corrected KL": {"beta": 0.1, "use_bias_correction_kl": True},
    "by sequences": {"importance_sampling_level": "sequence"},
    "clipped on two sides": {"delta": 1.5},
    "with off-policy sequences masked": {"off_policy_mask_threshold": 0.05},
    "with an entropy bonus": {"entropy_coef": 0.05},
    "with an adaptive entropy bonus": {"use_adaptive_entropy": True, "entropy_coef": 0.05},
    "at tokens of high entropy": {"top_entropy_quantile": 0.4},
    "both of them": {"entropy_coef": 0.05, "top_entropy_quantile": 0.4, "beta": 0.1},
}


def batch_of(trainer: Any, *, rows: int = ROWS, dtype: Any = None, tools: bool = False) -> dict[str, Any]:
    """A batch as generation leaves it: ragged, with old and reference log-probabilities."""
    draw = torch.Generator().manual_seed(3)
    dtype = dtype or torch.float64
    width, length = 6, 9
    lengths = torch.tensor([length, *torch.randint(1, length, (rows - 1,), generator=draw).tolist()])
    starts = torch.randint(0, width - 1, (rows,), generator=draw)

    def ids(columns: int) -> Any:
        return torch.randint(2, tiny.VOCABULARY, (rows, columns), generator=draw)

    mask = (torch.arange(length) < lengths[:, None]).long()
    batch = {
        "prompt_ids": ids(width),
        "prompt_mask": (torch.arange(width) >= starts[:, None]).long(),
        "completion_ids": ids(length) * mask,
        "completion_mask": mask,
        "advantages": torch.randn(rows, generator=draw),
        "num_items_in_batch": 2 * mask.sum() + 5,  # of the whole generation
    }
    if tools:
        batch["tool_mask"] = (torch.rand(rows, length, generator=draw) < 0.7).long()
    now = current(trainer, batch).to(dtype)
    near = now + 0.3 * torch.randn(now.shape, generator=draw).to(dtype)
    batch["old_per_token_logps"], batch["old_logps"] = near, (near * mask).sum(1)
    batch["ref_per_token_logps"] = now + 0.3 * torch.randn(now.shape, generator=draw).to(dtype)
    return batch


def current(trainer: Any, batch: dict[str, Any]) -> Any:
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    with torch.no_grad():
        length = batch["completion_ids"].size(1)
        return trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, length)[0]


@contextmanager
def at_most(trainer: Any, rows: int) -> Iterator[list[int]]:
    """A forward with gradients of more rows is out of memory; which sizes were run."""
    seen: list[int] = []

    def refuse(module: Any, args: Any, kwargs: Any) -> None:
        count = len(kwargs["input_ids"])
        if torch.is_grad_enabled():
            seen.append(count)
            if count > rows:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    hook = trainer.model.register_forward_pre_hook(refuse, with_kwargs=True)
    try:
        yield seen
    finally:
        hook.remove()


def step(trainer: Any, batch: dict[str, Any], *, seed: int = 5) -> tuple[Any, Any, dict[str, Any]]:
    """One training step of this batch: its loss, its gradients, and what it counted."""
    trainer.model.zero_grad()
    trainer._metrics["train"].clear()
    # The second batch of a generation, which is not generated again.
    trainer._step, trainer._buffered_inputs = 1, [None, copy.deepcopy(batch)]
    torch.manual_seed(seed)
    loss = trainer.training_step(trainer.model, [{}], None)
    gradients = torch.cat([one.grad.flatten() for one in trainer.model.parameters()])
    counted = {name: list(values) for name, values in trainer._metrics["train"].items()}
    del counted["step_time"]
    return loss, gradients, counted


def compared(trainer: Any, batch: dict[str, Any], *, tolerance: float) -> None:
    """Steps of the plain trainer and of the adapted one, whose batch does not fit, are the same."""
    trainer.current_gradient_accumulation_steps = 2
    before = trainer.entropy_coef if hasattr(trainer, "entropy_coef") else None
    loss, gradients, counted = step(trainer, batch)
    assert gradients.norm() > 1e-3
    if before is not None:
        trainer.entropy_coef = before
        trainer._last_world_entropy, trainer._entropy_window_stats = float("inf"), None
    adapt(trainer, find=False)
    with at_most(trainer, 3) as seen:
        loss_cut, gradients_cut, counted_cut = step(trainer, batch)
    assert ROWS in seen
    assert seen[-4:] == [2, 2, 2, 1]
    assert (gradients_cut - gradients).norm() <= tolerance * gradients.norm()
    torch.testing.assert_close(loss_cut, loss, rtol=100 * tolerance, atol=tolerance, check_dtype=False)
    assert counted_cut.keys() == counted.keys()
    for name, values in counted.items():
        assert counted_cut[name] == pytest.approx(values, rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("kind", LOSS_TYPES)
def test_a_cut_batch_has_the_gradients_of_the_whole(kind: str, tmp_path: Path) -> None:
    trainer = tiny.trainer(tmp_path, per_device_train_batch_size=8, loss_type=kind, beta=0.02, precise=True)
    compared(trainer, batch_of(trainer, tools=True), tolerance=1e-10)


@pytest.mark.parametrize("kind", ["grpo", "bnpo", "dapo"])
def test_in_single_precision_too(kind: str, tmp_path: Path) -> None:
    trainer = tiny.trainer(
        tmp_path, per_device_train_batch_size=8, loss_type=kind, model=tiny.llama(dtype=torch.float32)
    )
    compared(trainer, batch_of(trainer, dtype=torch.float32), tolerance=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", some_slow(["bnpo", "dapo"], is_slow=lambda kind: kind == "bnpo"))
def test_so_has_one_whose_loss_has_more_terms(kind: str, variant: str, tmp_path: Path) -> None:
    trainer = tiny.trainer(
        tmp_path, per_device_train_batch_size=8, loss_type=kind, precise=True, **VARIANTS[variant]
    )
    compared(trainer, batch_of(trainer), tolerance=1e-10)


@pytest.mark.parametrize(
    ("kind", "correction"), [("dapo", "tokens"), ("grpo", "sequences"), ("vespo", "tokens")]
)
def test_completions_of_vllm_keep_their_importance_ratios(kind: str, correction: str, tmp_path: Path) -> None:
    trainer = tiny.trainer(tmp_path, per_device_train_batch_size=8, loss_type=kind, precise=True)
    batch = batch_of(trainer)
    trainer.use_vllm, trainer.vllm_mode = True, "server"
    trainer.vllm_importance_sampling_correction = True
    shape = batch["completion_ids"].shape if correction == "tokens" else (ROWS, 1)
    batch["importance_sampling_ratio"] = torch.rand(shape, generator=torch.Generator().manual_seed(4)) + 0.5
    compared(trainer, batch, tolerance=1e-10)


@pytest.mark.parametrize("given", [{}, {"entropy_coef": 0.05}], ids=["a loss each", "one loss"])
def test_with_dropout_a_retried_batch_is_one_that_began_at_that_size(
    given: dict[str, Any], tmp_path: Path
) -> None:
    trainer = adapt(
        tiny.trainer(tmp_path, per_device_train_batch_size=8, model=tiny.llama(dropout=0.3), **given),
        find=False,
    )
    trainer.current_gradient_accumulation_steps = 2
    batch = batch_of(trainer, dtype=torch.float32)
    with at_most(trainer, 3) as seen:
        loss, gradients, counted = step(trainer, batch)
        assert ROWS in seen
        seen.clear()
        loss_again, gradients_again, counted_again = step(trainer, batch)
    assert max(seen) == 2
    assert torch.equal(gradients, gradients_again)
    assert loss == loss_again
    assert counted == counted_again
    with at_most(trainer, ROWS):
        # Dropout is there: another seed has other gradients.
        assert not torch.equal(step(trainer, batch, seed=6)[1], gradients)


def test_a_loss_of_the_users_own_is_checked_before_a_batch_is_cut(tmp_path: Path) -> None:
    import trl

    class Compared(trl.GRPOTrainer):  # type: ignore[misc, name-defined]
        def compute_loss(self, model: Any, inputs: Any, **named: Any) -> Any:
            return super().compute_loss(model, inputs, **named) + inputs["advantages"].std() ** 2

    class Mean(trl.GRPOTrainer):  # type: ignore[misc, name-defined]
        def compute_loss(self, model: Any, inputs: Any, **named: Any) -> Any:
            return super().compute_loss(model, inputs, **named) + 0.01 * inputs["advantages"].mean()

    for kind, message in ((Mean, ""), (Compared, "neither a mean nor a sum")):
        trainer = tiny.trainer(tmp_path, per_device_train_batch_size=8, made=kind, loss_type="grpo")
        trainer.current_gradient_accumulation_steps = 2
        batch = batch_of(trainer, dtype=torch.float32)
        _, expected, _ = step(trainer, batch)
        adapt(trainer, find=False)
        with at_most(trainer, 3):
            if message:
                with pytest.raises(BatchfitError, match=message):
                    step(trainer, batch)
            else:
                gradients = step(trainer, batch)[1]
                assert (gradients - expected).norm() <= 1e-5 * expected.norm()


def test_rloo(tmp_path: Path) -> None:
    trainer = tiny.trainer(tmp_path, "RLOO", per_device_train_batch_size=8, precise=True)
    compared(trainer, batch_of(trainer), tolerance=1e-10)
