"""TRL's trainers with `adapt`: a batch that is cut has the gradients of the whole batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from examples import some_slow  # noqa: E402

from batchfit.errors import BatchfitError  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # what TRL says of options that it will drop
QUICK = {"SFT", "SFT packed", "DPO", "DPO sigmoid and sft", "KTO accumulated", "Reward", "ORPO"}
PACKED: dict[str, Any] = {"packing": True, "max_length": 24, "batch": 3}
TWO_LOSSES: dict[str, Any] = {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "SFT": ("SFT", {}),
    "SFT accumulated": ("SFT", {"batch": 3, "accumulate": 3}),
    "SFT padding-free": ("SFT", {"padding_free": True}),
    "SFT packed": ("SFT", PACKED),
    "SFT packed, accumulated": ("SFT", {**PACKED, "batch": 1, "accumulate": 3}),
    "SFT packed, split": ("SFT", {**PACKED, "max_length": 8, "batch": 5, "packing_strategy": "bfd_split"}),
    "SFT packed, wrapped": ("SFT", {**PACKED, "batch": 5, "packing_strategy": "wrapped"}),
    "SFT completions": ("SFT", {"data": "completion"}),
    "SFT packed completions": ("SFT", {**PACKED, "data": "completion"}),
    "SFT assistant only": ("SFT", {"data": "chat", "assistant_only_loss": True}),
    "SFT packed, assistant only": (
        "SFT",
        {**PACKED, "max_length": 48, "data": "chat", "assistant_only_loss": True},
    ),
    "SFT chunked_nll": ("SFT", {"loss_type": "chunked_nll"}),
    "SFT dft": ("SFT", {"loss_type": "dft"}),
    "SFT label smoothing": ("SFT", {"label_smoothing_factor": 0.1}),
    "DPO": ("DPO", {}),
    "DPO sigmoid and sft": ("DPO", TWO_LOSSES),
    "DPO precomputed": ("DPO", {"precompute_ref_log_probs": True}),
    "DPO weighted": ("DPO", {"use_weighting": True}),
    "DPO ld_alpha": ("DPO", {"ld_alpha": 0.5}),
    **{
        f"DPO {one}": ("DPO", {"loss_type": [one], "label_smoothing": 0.1})
        for one in (
            *("hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "apo_zero"),
            *("apo_down", "discopop", "sft", "sigmoid_norm"),
        )
    },
    "KTO": ("KTO", {}),
    "KTO accumulated": ("KTO", {"batch": 5, "accumulate": 3}),
    "KTO precomputed": ("KTO", {"precompute_ref_log_probs": True}),
    "KTO apo_zero_unpaired": ("KTO", {"loss_type": "apo_zero_unpaired"}),
    "Reward": ("Reward", {}),
    "Reward centred": ("Reward", {"center_rewards_coefficient": 0.1}),
    "ORPO": ("ORPO", {}),
    "CPO": ("CPO", {}),
    "CPO simpo": ("CPO", {"loss_type": "simpo", "cpo_alpha": 0.5}),
}


@pytest.fixture(autouse=True)
def _library() -> None:
    """Imported here: every process of the tests collects this file, and the import takes seconds."""
    pytest.importorskip("trl", reason="needs trl")
    pytest.importorskip("peft", reason="needs peft")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def gradients(
    case: tuple[str, dict[str, Any]],
    folder: Path,
    *,
    size: int | None,
    dtype: Any = torch.float64,
    lora: bool = False,
    options: dict[str, Any] | None = None,
) -> Any:
    """Those of a training; `size` of microbatches, None: a plain trainer."""
    from trl_cases import gradients_of, heads_in_float64, lora_config, model_for, rows, trainer_of

    from batchfit.integrations.transformers import adapt

    kind, given = case
    given = {**given, "data": rows(given["data"], 21)} if "data" in given else dict(given)
    if lora:
        given["more"] = {"peft_config": lora_config()}
    elif kind in ("DPO", "KTO"):
        given["more"] = {"ref_model": model_for(kind, seed=1).to(dtype)}
    with heads_in_float64() if dtype == torch.float64 else nullcontext():
        trainer = trainer_of(kind, folder, model=model_for(kind).to(dtype), **given)
        if size is not None:
            adapt(trainer, find=False, **(options or {}))._batchfit.microbatch_size = size
        return gradients_of(trainer)


def off(found: Any, wanted: Any) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("name", some_slow(CASES, is_slow=lambda name: name not in QUICK))
def test_a_cut_batch_has_the_gradients_of_the_whole(name: str, tmp_path: Path) -> None:
    whole = gradients(CASES[name], tmp_path, size=None)
    for size in (3, 100) if name in QUICK else (1, 2, 3, 100):
        found = gradients(CASES[name], tmp_path, size=size)
        assert off(found, whole) < 1e-10
        # Accumulated batches are loaded as one, whose sums are in another order.
        assert size < 100 or "accumulate" in CASES[name][1] or torch.equal(found, whole)


SINGLE = ("SFT", "SFT packed", "DPO", "KTO", "Reward", "ORPO", "CPO", "SFT chunked_nll")


@pytest.mark.parametrize("name", some_slow(SINGLE, is_slow=lambda name: name not in ("SFT packed", "DPO")))
def test_a_cut_batch_in_float32_with_the_head_of_trl(name: str, tmp_path: Path) -> None:
    whole = gradients(CASES[name], tmp_path, size=None, dtype=torch.float32)
    assert off(gradients(CASES[name], tmp_path, size=2, dtype=torch.float32), whole) < 1e-5


# Of one width: a plain trainer pads each batch that it accumulates by itself. KTO's estimate is of the batch.
DROPPED = ("SFT", "DPO", "Reward")


@pytest.mark.parametrize("dtype", ["float64", pytest.param("float32", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", some_slow(DROPPED, is_slow=lambda name: name != "DPO"))
def test_dropout_draws_what_accumulated_batches_draw(name: str, dtype: str, tmp_path: Path) -> None:
    from trl_cases import gradients_of, heads_in_float64, model_for, trainer_of

    from batchfit.integrations.transformers import adapt

    kind, ends = getattr(torch, dtype), []
    given = {"pad_to_multiple_of": 32, **({"disable_dropout": False} if name != "SFT" else {})}
    for size in (None, 3):
        model = model_for(name, dropout=0.3).to(kind)
        more = {"more": {"ref_model": model_for(name, seed=1).to(kind)}} if name == "DPO" else {}
        with heads_in_float64() if dtype == "float64" else nullcontext():
            trainer = trainer_of(name, tmp_path, model=model, batch=3, accumulate=5, **given, **more)
            if size is not None:
                adapt(trainer, find=False)._batchfit.microbatch_size = size
            torch.manual_seed(4)
            ends.append(gradients_of(trainer))
    assert off(ends[1], ends[0]) < (1e-10 if dtype == "float64" else 1e-5)


@pytest.mark.parametrize("name", ["DPO", pytest.param("KTO", marks=pytest.mark.slow)])
def test_the_reference_is_the_model_without_its_adapter(name: str, tmp_path: Path) -> None:
    whole = gradients(CASES[name], tmp_path, size=None, lora=True)
    assert off(gradients(CASES[name], tmp_path, size=2, lora=True), whole) < 1e-10


def test_a_load_balancing_loss_is_refused_or_averaged(tmp_path: Path) -> None:
    """Averaged, it is what gradient accumulation makes of it: the mean over batches of two."""
    from trl_cases import gradients_of, mixtral, trainer_of

    from batchfit.integrations.transformers import adapt

    def run(options: dict[str, Any] | None, **given: Any) -> Any:
        trainer = trainer_of("SFT", tmp_path, model=mixtral(), batch=2, accumulate=4, count=24, **given)
        if options is not None:
            adapt(trainer, find=False, **options)._batchfit.microbatch_size = 2
        return gradients_of(trainer)

    with pytest.raises(BatchfitError, match=r"router_aux_loss_coef=0\.0"):
        run({})
    plain = run(None)
    assert off(run({"compared": "warn"}), plain) < 1e-5
    without = run({}, router_aux_loss_coef=0.0)
    assert off(without, plain) > 1e-4


def test_a_packed_row_whose_loss_is_a_mean_counts_its_labels(tmp_path: Path) -> None:
    from trl_cases import gradients_of, heads_in_float64, model_for, rows, trainer_of

    from batchfit.integrations.transformers import adapt

    found = []
    for size in (None, 2):
        data = rows("completion", 21)
        trainer = trainer_of("SFT", tmp_path, model=model_for("SFT").double(), data=data, **PACKED)
        trainer.loss_is_scaled_for_ga = False
        if size is not None:
            adapt(trainer, find=False)._batchfit.microbatch_size = size
        with heads_in_float64():
            found.append(gradients_of(trainer))
    assert off(found[1], found[0]) < 1e-10


@pytest.mark.parametrize("kernel", [True, False], ids=["cu_seq_lens", "position_ids"])
def test_the_flattening_collator_of_a_plain_trainer(kernel: bool, tmp_path: Path) -> None:
    import transformers
    from hf_models import Tokens, arguments
    from trl_cases import gradients_of, llama

    from batchfit.integrations.transformers import adapt

    rows = Tokens(padded=False)
    samples = [{name: one.tolist() for name, one in rows[index].items()} for index in range(9)]
    collate = transformers.DataCollatorWithFlattening(
        return_flash_attn_kwargs=kernel, return_position_ids=True, return_seq_idx=kernel
    )
    given = {"max_steps": 1, "per_device_train_batch_size": 9, "gradient_accumulation_steps": 1}
    found = []
    for size in (None, 2):
        trainer = transformers.Trainer(
            llama().double(), arguments(tmp_path, **given), train_dataset=samples, data_collator=collate
        )
        if size is not None:
            adapt(trainer, find=False)._batchfit.microbatch_size = size
        found.append(gradients_of(trainer))
    assert off(found[1], found[0]) < 1e-10
