"""TRL's trainers that generate, adapted: they train as the plain ones do, with less memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("trl", reason="needs trl")

import trl_models as tiny  # noqa: E402
from examples import some_slow  # noqa: E402

import batchfit  # noqa: E402
from batchfit.errors import BatchfitError  # noqa: E402
from batchfit.integrations.transformers import BatchfitMixin, Options, adapt  # noqa: E402

KINDS = ("GRPO", "RLOO")
MOSTLY_GRPO = some_slow(KINDS, is_slow=lambda kind: kind == "RLOO")
OOM = "CUDA out of memory. Tried to allocate 2.00 GiB"


def parameters_of(trainer: Any) -> Any:
    return torch.cat([one.detach().flatten().clone() for one in trainer.model.parameters()])


def logs_of(trainer: Any) -> list[dict[str, Any]]:
    """What was logged per step, without times and what batchfit adds."""
    steps = [one for one in trainer.state.log_history if "entropy" in one]
    return [{name: value for name, value in one.items() if "time" not in name} for one in steps]


def same_logs(trainer: Any, other: Any) -> None:
    assert len(logs_of(trainer)) == len(logs_of(other)) > 0
    for mine, theirs in zip(logs_of(trainer), logs_of(other), strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            assert mine[name] == (value and pytest.approx(value, rel=1e-4, abs=1e-5)), name


def trained(folder: Path, wrap: Callable[[Any], Any] = lambda trainer: trainer, **given: Any) -> Any:
    folder.mkdir(exist_ok=True)
    trainer = wrap(tiny.trainer(folder, **given))
    with recording(trainer) as completions:
        trainer.train()
    trainer.completions = completions
    return trainer


@contextmanager
def recording(trainer: Any) -> Iterator[list[Any]]:
    """The completions that were rewarded: each once."""
    seen: list[Any] = []
    own = trainer.reward_funcs[0]

    def reward(completion_ids: Any, **more: Any) -> Any:
        seen.append(completion_ids)
        return own(completion_ids=completion_ids, **more)

    trainer.reward_funcs[0] = reward
    yield seen
    trainer.reward_funcs[0] = own


def failing(trainer: Any, *, rows: int, gradients: bool, after: int = 0) -> list[int]:
    """Let forwards of more rows be out of memory, from one on; which numbers of rows were run."""
    return refusing(trainer.model, rows=rows, gradients=gradients, after=after)


def refusing(model: Any, *, rows: int, gradients: bool, after: int = 0) -> list[int]:
    seen: list[int] = []
    count = [0]

    def refuse(module: Any, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled() is not gradients:
            return
        found = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        if len(found) > rows:
            count[0] += 1
            if count[0] > after:
                raise torch.OutOfMemoryError(OOM)
        seen.append(len(found))

    model.register_forward_pre_hook(refuse, with_kwargs=True)
    return seen


@pytest.mark.parametrize("kind", MOSTLY_GRPO)
def test_what_fits_trains_as_without_batchfit_bit_for_bit(kind: str, tmp_path: Path) -> None:
    plain = trained(tmp_path / "plain", kind=kind)
    ours = trained(tmp_path / "ours", adapt, kind=kind)
    assert ours.completions == plain.completions
    assert torch.equal(parameters_of(ours), parameters_of(plain))
    same_logs(ours, plain)
    assert (ours.found.batch_size, ours.found_generation.batch_size) == (4, 8)
    assert ours.args.per_device_train_batch_size == 4
    assert ours.args.gradient_accumulation_steps == 2


@pytest.mark.parametrize("after", some_slow([0, 3], is_slow=lambda after: after == 0))
@pytest.mark.parametrize("kind", KINDS)
def test_an_oom_in_generation_is_survived(kind: str, after: int, tmp_path: Path) -> None:
    """Sampled with the same seed: the completions are those of the plain trainer, none twice."""
    plain = trained(tmp_path / "plain", kind=kind)

    def wrap(trainer: Any) -> Any:
        trainer.seen = failing(trainer, rows=3, gradients=False, after=after)
        return adapt(trainer, find=False)

    ours = trained(tmp_path / "ours", wrap, kind=kind)
    assert ours.completions == plain.completions
    torch.testing.assert_close(parameters_of(ours), parameters_of(plain), rtol=1e-6, atol=1e-7)
    same_logs(ours, plain)
    assert max(ours.seen[-8:]) <= 3
    entries = [one for one in ours.state.log_history if "generation_out_of_memory" in one]
    assert entries[0]["generation_batch_size"] == 4


@pytest.mark.parametrize("kind", MOSTLY_GRPO)
def test_an_oom_in_the_loss_phase_is_survived(kind: str, tmp_path: Path) -> None:
    plain = trained(tmp_path / "plain", kind=kind)

    def wrap(trainer: Any) -> Any:
        trainer.seen = failing(trainer, rows=1, gradients=True, after=2)
        return adapt(trainer, find=False)

    ours = trained(tmp_path / "ours", wrap, kind=kind)
    assert ours.completions == plain.completions
    torch.testing.assert_close(parameters_of(ours), parameters_of(plain), rtol=1e-6, atol=1e-7)
    same_logs(ours, plain)
    assert set(ours.seen[-4:]) == {1}
    assert [one["out_of_memory"] for one in ours.state.log_history if "out_of_memory" in one] == [2]


# --- under a budget

LOSS_IS_LARGEST = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1}
GENERATION_IS_LARGEST = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 16,
    "num_generations": 2,
    "max_steps": 1,
}


@pytest.fixture(autouse=True)
def tiny_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's head takes room for 32,768 words per token, of which tiny vocabularies need 64."""
    monkeypatch.setattr("trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE", tiny.VOCABULARY)


def small(folder: Path, **given: Any) -> Any:
    folder.mkdir(exist_ok=True)
    model = tiny.llama(dtype=torch.float32)
    arguments = {"max_steps": 2, "max_completion_length": 12, **given}
    return tiny.trainer(folder, model=model, data=tiny.prompts(32, longest=24), **arguments)


def needed_bytes(folder: Path, living_bytes: int, **given: Any) -> tuple[int, Any]:
    """What plain training takes beside what lives already, and its parameters."""
    trainer = small(folder, **given)
    with batchfit.virtual_memory("1GiB") as memory:
        trainer.train()
    return memory.peak_bytes - living_bytes, trainer


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "phase", "find"),
    [
        ("GRPO", "loss", True),
        pytest.param("GRPO", "generation", True, marks=SLOW),
        ("RLOO", "loss", False),
        pytest.param("GRPO", "loss", False, marks=SLOW),
        pytest.param("GRPO", "generation", False, marks=SLOW),
        pytest.param("RLOO", "loss", True, marks=SLOW),
        pytest.param("RLOO", "generation", True, marks=SLOW),
        pytest.param("RLOO", "generation", False, marks=SLOW),
    ],
)
def test_training_that_does_not_fit_ends_as_with_enough_memory(
    kind: str, phase: str, find: bool, tmp_path: Path, living_bytes: int
) -> None:
    given = {"kind": kind, **(LOSS_IS_LARGEST if phase == "loss" else GENERATION_IS_LARGEST)}
    needed, plain = needed_bytes(tmp_path / "plain", living_bytes, **given)
    expected = parameters_of(plain)
    limit = int(needed * 0.75)
    with pytest.raises(torch.OutOfMemoryError), batchfit.virtual_memory(limit + living_bytes):
        small(tmp_path / "dies", **given).train()
    ours = adapt(small(tmp_path / "ours", **given), find=find)
    with batchfit.virtual_memory(limit + living_bytes) as memory:
        ours.train()
    assert memory.peak_bytes <= limit + living_bytes
    assert (parameters_of(ours) - expected).norm() <= 1e-5 * expected.norm()
    same_logs(ours, plain)
    names = {name for one in ours.state.log_history for name in one}
    if find:
        cut = ours.found if phase == "loss" else ours.found_generation
        whole = ours.found_generation if phase == "loss" else ours.found
        most = given["per_device_train_batch_size"] * given["gradient_accumulation_steps"]
        assert 1 <= cut.batch_size < most
        assert whole.batch_size <= (16 if phase == "loss" else 2)
        assert ours.found.batch_size != ours.found_generation.batch_size  # the peaks differ
        assert {"microbatch_size", "generation_batch_size", "find_s"} <= names
    else:
        assert ours.found is ours.found_generation is None
        assert ("out_of_memory" if phase == "loss" else "generation_out_of_memory") in names


def test_the_peaks_that_are_found_are_those_of_training(tmp_path: Path) -> None:
    """Of prompts of one length, and completions that end with the last token."""
    import transformers
    from datasets import Dataset

    peaks: list[tuple[int, int]] = []

    class Reading(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *given: Any, **more: Any) -> None:
            peaks.append((self.generation, memory.peak_bytes))

    reading = Reading()
    trainer = small(
        tmp_path, gradient_accumulation_steps=2, max_steps=2, generation_kwargs={"min_new_tokens": 12}
    )
    trainer.train_dataset = Dataset.from_dict({"prompt": [f"t{one} t5 t6" * 4 for one in range(2, 34)]})
    trainer.add_callback(reading)
    with batchfit.virtual_memory("1GiB") as memory:
        adapt(trainer)
        own = trainer._generate_single_turn

        def generate(*given: Any, **more: Any) -> Any:
            memory.reset_peak()
            found = own(*given, **more)
            reading.generation = memory.peak_bytes
            memory.reset_peak()
            return found

        trainer._generate_single_turn = generate
        trainer.train()
    generation, loss = peaks[-1]  # in the first step the optimizer has no state yet
    assert trainer.found_generation.peak_bytes == pytest.approx(generation, rel=0.02)
    assert trainer.found.peak_bytes == pytest.approx(loss, rel=0.02)
    assert loss > 1.1 * generation


@pytest.mark.slow
def test_short_batches_are_not_held_to_the_size_of_the_longest(tmp_path: Path, living_bytes: int) -> None:
    """One prompt of the dataset is long: what was found for it is the smallest size, not the largest."""
    from datasets import Dataset

    texts = [*tiny.prompts(31, longest=3)["prompt"], " ".join(["t5"] * 90)]
    trainer = small(tmp_path, **LOSS_IS_LARGEST, shuffle_dataset=False)
    trainer.train_dataset = Dataset.from_dict({"prompt": texts})
    seen = failing(adapt(trainer), rows=16, gradients=True)
    with batchfit.virtual_memory(3_000_000 + living_bytes):
        trainer.train()
    assert 1 <= trainer.found.batch_size < 16
    assert seen[-1] == 16
    assert not any("out_of_memory" in entry for entry in trainer.state.log_history)


# --- what is refused, and what else a trainer does


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "0:8 2:16"}, r"schedule must be None with GRPOTrainer: .*num_generations"),
        ({"lengths": "completion_mask"}, r"lengths must be None with GRPOTrainer: .*Train without lengths="),
        ({"weight": len}, r"weight must be None with GRPOTrainer"),
    ],
)
def test_options_that_need_other_batches_are_refused(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        adapt(tiny.trainer(tmp_path), **options)


def test_settings_that_cannot_be_kept_are_refused(tmp_path: Path) -> None:
    trainer = tiny.trainer(tmp_path)
    trainer.use_vllm, trainer.vllm_mode = True, "colocate"
    with pytest.raises(BatchfitError, match=r"vllm_gpu_memory_utilization .*budget=.*vllm_mode='server'"):
        adapt(trainer)
    adapt(trainer, budget="1GiB")
    trainer.is_fsdp_enabled = True
    trainer.accelerator.state = SimpleNamespace(fsdp_plugin=SimpleNamespace(fsdp_version=2))
    with pytest.raises(BatchfitError, match=r"under FSDP2 each token that GRPOTrainer generates .*Use DDP"):
        adapt(trainer, budget="1GiB")
    trainer = tiny.trainer(tmp_path, entropy_coef=0.1)
    trainer.aux_loss_enabled = True
    with pytest.raises(BatchfitError, match=r"Set router_aux_loss_coef=0\.0"):
        adapt(trainer)
    images = tiny.prompts().add_column("image", [None] * 12)
    with pytest.raises(BatchfitError, match=r"images \(image\) .*gradient_checkpointing=True"):
        adapt(tiny.trainer(tmp_path, data=images))


def test_another_version_of_the_trainer_is_refused(tmp_path: Path) -> None:
    trainer = tiny.trainer(tmp_path)
    other = {"__module__": "trl.trainer", "_generate_single_turn": lambda self, prompts: prompts}
    trainer.__class__ = type("GRPOTrainer", (type(trainer),), other)
    with pytest.raises(BatchfitError, match=r"as TRL 1\.16 has them.*pip install 'trl>=1\.16'"):
        adapt(trainer)


def test_the_mixin_alone_is_refused(tmp_path: Path) -> None:
    import trl

    class Mine(BatchfitMixin, trl.GRPOTrainer):  # type: ignore[misc, name-defined]
        pass

    with pytest.raises(BatchfitError, match=r"call batchfit\.integrations\.transformers\.adapt\(trainer\)"):
        Mine(
            tiny.llama(),
            tiny.many_small_tokens,
            trl.GRPOConfig(str(tmp_path), report_to=[], use_cpu=True, bf16=False),
            tiny.prompts(),
            processing_class=tiny.tokenizer(),
            batchfit=Options(),
        )


def test_a_mixture_of_experts_is_not_cut_with_its_router_loss(tmp_path: Path) -> None:
    trainer = adapt(tiny.trainer(tmp_path, model=tiny.experts(), max_steps=1), find=False)
    assert trainer.aux_loss_enabled
    trainer.train()
    failing(trainer, rows=2, gradients=True)
    with pytest.raises(BatchfitError, match=r"mixture of experts .*router_aux_loss_coef=0\.0"):
        trainer.train()


def test_evaluation_compares_whole_groups_and_survives_an_oom(tmp_path: Path) -> None:
    given = {"eval_dataset": tiny.prompts(4), "per_device_eval_batch_size": 8, "beta": 0.05}
    (tmp_path / "plain").mkdir()
    plain = tiny.trainer(tmp_path / "plain", **given)
    torch.manual_seed(1)
    expected = plain.evaluate()
    (tmp_path / "ours").mkdir()
    ours = adapt(tiny.trainer(tmp_path / "ours", **given))
    seen = failing(ours, rows=3, gradients=False)
    torch.manual_seed(1)
    found = ours.evaluate()
    for name, value in expected.items():
        if "runtime" not in name and "per_second" not in name:
            assert found[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    assert max(seen) <= 3


def test_gradient_checkpointing_is_restored_after_an_oom_in_generation(tmp_path: Path) -> None:
    def wrap(trainer: Any) -> Any:
        failing(trainer, rows=3, gradients=False)
        return adapt(trainer, find=False)

    plain = trained(tmp_path / "plain", gradient_checkpointing=True)
    ours = trained(tmp_path / "ours", wrap, gradient_checkpointing=True)
    assert ours.model.is_gradient_checkpointing
    torch.testing.assert_close(parameters_of(ours), parameters_of(plain), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "given",
    [
        {"steps_per_generation": 4, "num_iterations": 2},
        {"generation_batch_size": 4, "gradient_accumulation_steps": 4},
        {"mask_truncated_completions": True, "loss_type": "bnpo"},
        {"generation_kwargs": {"do_sample": False}},
        {"use_adaptive_entropy": True, "entropy_coef": 0.05, "entropy_target": 3.0},
    ],
    ids=["generations used twice", "generated within a step", "truncated ones masked", "greedy", "entropy"],
)
def test_other_settings_train_the_same_with_an_oom_in_each_phase(
    given: dict[str, Any], tmp_path: Path
) -> None:
    def wrap(trainer: Any) -> Any:
        failing(trainer, rows=3, gradients=False)
        failing(trainer, rows=1, gradients=True)
        return adapt(trainer, find=False)

    plain = trained(tmp_path / "plain", **given)
    ours = trained(tmp_path / "ours", wrap, **given)
    assert ours.completions == plain.completions
    torch.testing.assert_close(parameters_of(ours), parameters_of(plain), rtol=1e-6, atol=1e-7)
    same_logs(ours, plain)


def test_a_reward_model_scores_in_microbatches(tmp_path: Path) -> None:
    def rewarded(folder: Path, *, adapts: bool) -> tuple[Any, list[int]]:
        folder.mkdir()
        scorer = tiny.reward_model()
        given = {"reward_funcs": scorer, "reward_processing_classes": tiny.tokenizer()}
        trainer = tiny.trainer(folder, **given, scale_rewards="none", learning_rate=1.0)
        seen: list[int] = []
        if adapts:
            seen = refusing(scorer.model, rows=3, gradients=False)
            adapt(trainer, find=False)
        trainer.train()
        return trainer, seen

    plain, _ = rewarded(tmp_path / "plain", adapts=False)
    ours, seen = rewarded(tmp_path / "ours", adapts=True)
    assert max(seen) <= 3
    assert len(seen) >= 9  # of three generations of eight
    torch.testing.assert_close(parameters_of(ours), parameters_of(plain), rtol=1e-6, atol=1e-7)
    same_logs(ours, plain)
    assert "forward" not in vars(ours.reward_funcs[0])


@pytest.mark.parametrize("kind", MOSTLY_GRPO)
def test_lora_with_a_reference_model_trains_the_same_with_an_oom_in_each_phase(
    kind: str, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")

    def wrap(trainer: Any) -> Any:
        failing(trainer, rows=3, gradients=False)
        failing(trainer, rows=1, gradients=True)
        return adapt(trainer, find=False)

    def given() -> dict[str, Any]:
        return {"peft_config": peft.LoraConfig(r=2, target_modules=["q_proj"]), "kind": kind, "beta": 0.1}

    plain = trained(tmp_path / "plain", **given(), learning_rate=0.1)
    ours = trained(tmp_path / "ours", wrap, **given(), learning_rate=0.1)
    assert ours.completions == plain.completions
    torch.testing.assert_close(parameters_of(ours), parameters_of(plain), rtol=1e-5, atol=1e-6)
    same_logs(ours, plain)


def test_a_resumed_training_ends_as_one_that_was_not_stopped(tmp_path: Path) -> None:
    given = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    whole = trained(tmp_path / "whole", adapt, **given)
    (tmp_path / "again").mkdir()
    again = adapt(tiny.trainer(tmp_path / "again", **given))
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert again.found is None  # the sizes are in the checkpoint
    torch.testing.assert_close(parameters_of(again), parameters_of(whole), rtol=1e-6, atol=1e-7)
