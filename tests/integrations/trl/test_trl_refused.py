"""What `adapt` refuses of TRL, and what it says to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from batchfit.errors import BatchfitError  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _library() -> None:
    pytest.importorskip("trl", reason="needs trl")


def adapted(kind: str, folder: Path, options: dict[str, Any], **given: Any) -> Any:
    from trl_cases import trainer_of

    from batchfit.integrations.transformers import adapt

    return adapt(trainer_of(kind, folder, **given), **options)


@pytest.mark.parametrize("loss", ["aot", "aot_unpaired"])
def test_a_loss_that_sorts_a_batch_is_refused_only_where_it_is_cut(loss: str, tmp_path: Path) -> None:
    trainer = adapted("DPO", tmp_path, {"find": False}, loss_type=[loss], batch=4)
    trainer.train()
    trainer = adapted("DPO", tmp_path, {"find": False}, loss_type=[loss], batch=4)
    trainer._batchfit.microbatch_size = 2
    with pytest.raises(BatchfitError, match=r"sorts the log-probabilities.*precompute_ref_log_probs=True"):
        trainer.train()


def test_weights_of_single_pairs_and_a_mean_over_tokens(tmp_path: Path) -> None:
    given = {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 1.0], "use_weighting": True}
    with pytest.raises(BatchfitError, match="Leave one of them out"):
        adapted("DPO", tmp_path, {}, **given)


@pytest.mark.parametrize(
    ("kind", "given", "what"),
    [("DPO", {}, "pairs"), ("SFT", {"padding_free": True}, "sequences joined in one row")],
)
def test_options_for_plain_rows(kind: str, given: dict[str, Any], what: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"weight must be None where batches are of {what}"):
        adapted(kind, tmp_path, {"weight": len}, **given)
    with pytest.raises(ValueError, match=f"lengths must be None where batches are of {what}"):
        adapted(kind, tmp_path, {"lengths": "attention_mask"}, **given)


def test_a_trainer_that_is_not_known(tmp_path: Path) -> None:
    from trl_cases import trainer_of

    from batchfit.integrations.transformers import adapt

    trainer = trainer_of("SFT", tmp_path)
    trainer.__class__ = type("NewTrainer", (type(trainer),), {"__module__": "trl.experimental.new"})
    with pytest.raises(BatchfitError, match=r"batches of NewTrainer.*gradient_checkpointing=True"):
        adapt(trainer)
    trainer.__class__ = type("Mine", (type(trainer).__mro__[1],), {})
    assert adapt(trainer) is trainer


def test_a_row_that_does_not_say_where_its_sequences_begin(tmp_path: Path) -> None:
    import transformers
    from hf_models import Tokens, arguments, gpt2

    from batchfit.integrations.transformers import adapt

    collate = transformers.DataCollatorWithFlattening(return_position_ids=False)
    dataset = Tokens(padded=False)
    samples = [{name: one.tolist() for name, one in dataset[index].items()} for index in range(8)]
    trainer = transformers.Trainer(
        gpt2(), arguments(tmp_path, max_steps=1), train_dataset=samples, data_collator=collate
    )
    with pytest.raises(BatchfitError, match="return_position_ids=True"):
        adapt(trainer).train()
