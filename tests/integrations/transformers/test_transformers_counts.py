"""A trial, a look at the loss or an OOM retry reaches no metric, log or counter of the trainer."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from pathlib import Path
from typing import Any

import numpy
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("accelerate", reason="needs transformers")

from hf_models import Tokens, arguments, gpt2, padded, parameters_of  # noqa: E402

from batchfit.integrations.transformers import adapt  # noqa: E402
from batchfit.integrations.transformers.counters import save_counts  # noqa: E402

Trainer = transformers.Trainer


class Meter:
    """What people write to average something."""

    def __init__(self) -> None:
        self.sum, self.count, self.last = 0.0, 0, [0.0]


class Counting(Trainer):  # type: ignore[misc]
    """Counts in all the ways that trainers do: as TRL, as sentence-transformers, and by hand."""

    def __init__(self, *given: Any, fails_at: tuple[tuple[str, int], ...] = (), **named: Any) -> None:
        super().__init__(*given, **named)
        self._metrics: Any = {"train": defaultdict(list), "eval": defaultdict(list)}
        self._total_tokens = 0
        self.components: Any = {"train": {}, "eval": {}}
        self.table, self.sizes = torch.zeros(3), numpy.zeros(2)
        self.meter, self.recent = Meter(), deque([0], maxlen=2)
        self.counts: Counter[str] = Counter()
        self.calls, self.fails_at = [0, 0], fails_at

    def compute_loss(self, model: Any, inputs: Any, *given: Any, **named: Any) -> Any:
        mode, tokens = "train" if model.training else "eval", int(inputs["labels"].ne(-100).sum())
        loss = super().compute_loss(model, inputs, *given, **named)
        first = loss[0] if isinstance(loss, tuple) else loss
        self._metrics[mode]["tokens"].append(tokens)
        self._total_tokens += tokens
        components = self.components[mode]
        components["steps"] = components.get("steps", torch.tensor(0)) + 1
        components["tokens"] = components.get("tokens", torch.zeros(())) + tokens
        self.table += torch.tensor([1.0, tokens, float(first.detach())])
        self.sizes += 1, len(inputs["labels"])
        self.meter.sum, self.meter.count, self.meter.last = self.meter.sum + tokens, self.meter.count + 1, [1]
        self.recent.append(tokens)
        self.counts[mode] += tokens
        self.made_late = getattr(self, "made_late", 0) + tokens
        self.state.seen = getattr(self.state, "seen", 0) + tokens
        self.log({"tokens": float(tokens)})
        if torch.is_grad_enabled() or not model.training:
            _calls[mode] += 1
            if (mode, _calls[mode]) in self.fails_at:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")
        return loss

    def counted(self) -> Any:
        return (
            {mode: dict(table) for mode, table in self._metrics.items()},
            self._total_tokens,
            {mode: {k: int(v) for k, v in table.items()} for mode, table in self.components.items()},
            [round(one, 4) for one in self.table.tolist()],
            self.sizes.tolist(),
            vars(self.meter),
            list(self.recent),
            dict(self.counts),
            self.made_late,
            self.state.seen,
            [entry["tokens"] for entry in self.state.log_history if "tokens" in entry],
        )


_calls: Counter[str] = Counter()  # beyond the reach of what restores a trainer


def new(folder: Path, **more: Any) -> Counting:
    _calls.clear()
    given = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "max_steps": 3}
    args = arguments(folder, **{**given, **more.pop("given", {})})
    model = gpt2()
    return Counting(model, args, train_dataset=Tokens(padded=False), data_collator=padded, **more)


def test_the_search_and_looks_at_the_loss_count_nothing(tmp_path: Path) -> None:
    plain = new(tmp_path)
    plain.train()
    searched = adapt(new(tmp_path), search={"max_size": 8})
    searched.train()
    assert searched.found is not None
    assert searched.counted() == plain.counted()


@pytest.mark.parametrize("fails_at", [(1,), (2,), (3, 4)])
def test_a_retry_counts_nothing_twice(fails_at: tuple[int, ...], tmp_path: Path) -> None:
    """Sums over a batch are those of a plain Trainer; how many microbatches made them is not asked."""
    plain = new(tmp_path)
    plain.train()
    tried = adapt(new(tmp_path, fails_at=tuple(("train", at) for at in fails_at)), find=False)
    tried.train()
    assert sum(entry.get("out_of_memory", 0) for entry in tried.state.log_history) == len(fails_at)
    assert tried._total_tokens == plain._total_tokens == tried.state.seen == tried.made_late
    assert sum(tried._metrics["train"]["tokens"]) == plain._total_tokens == tried.meter.sum
    assert int(tried.components["train"]["tokens"]) == plain._total_tokens == tried.counts["train"]
    assert float(tried.table[1]) == plain._total_tokens
    assert float(tried.sizes[1]) == float(plain.sizes[1]) == 24
    assert sum(tried.counted()[-1]) == plain._total_tokens
    assert torch.allclose(parameters_of(tried.model), parameters_of(plain.model), atol=1e-6)


def test_a_retry_in_evaluation_counts_nothing_twice(tmp_path: Path) -> None:
    plain = new(tmp_path)
    plain.evaluate(Tokens())
    tried = adapt(new(tmp_path, fails_at=(("eval", 9),)))
    tried.evaluate(Tokens())
    assert _calls["eval"] > 9
    assert tried._total_tokens == plain._total_tokens > 0
    assert sum(tried._metrics["eval"]["tokens"]) == sum(tried.counted()[-1]) == plain._total_tokens


def test_an_error_of_the_step_leaves_the_counts_as_they_were(tmp_path: Path) -> None:
    class Fails(Counting):
        def compute_loss(self, *given: Any, **named: Any) -> Any:
            super().compute_loss(*given, **named)
            raise ZeroDivisionError

    trainer = new(tmp_path)
    trainer.__class__ = Fails
    metrics = trainer._metrics["train"]
    with pytest.raises(ZeroDivisionError):
        adapt(trainer, find=False).train()
    assert (trainer._total_tokens, dict(metrics), trainer.meter.count) == (0, {}, 0)
    assert trainer._metrics["train"] is metrics
    assert not hasattr(trainer, "made_late")


def test_entries_of_ours_do_not_empty_what_a_log_of_the_users_averages(tmp_path: Path) -> None:
    class Averaging(Counting):
        def log(self, logs: Any, *given: Any, **named: Any) -> None:
            if "loss" in logs or "microbatch_size" in logs or "batch_size" in logs:
                values = self._metrics["train"].pop("tokens", [])
                logs = {**logs, "averaged_over": len(values)}
            super().log(logs, *given, **named)

    given = {"logging_strategy": "steps", "logging_steps": 3}
    trainer = new(tmp_path, given=given, fails_at=(("train", 2),))
    trainer.__class__ = Averaging
    adapt(trainer, find=False).train()
    entries = trainer.state.log_history
    assert any("out_of_memory" in entry for entry in entries)
    assert [entry["averaged_over"] for entry in entries if "averaged_over" in entry] == [1 + 2 + 2]


def test_what_is_large_or_no_count_is_not_touched() -> None:
    class Holder:
        """Stands in for a trainer."""

    holder: Any = Holder()
    holder.state = holder.control = None
    holder.big = list(range(20_000))
    holder.module = torch.nn.Linear(2, 2)
    holder.weights = torch.zeros(100_000)
    holder.parameter = torch.nn.Parameter(torch.zeros(2))
    holder.train_dataset = [{"x": 1}]
    holder.mixed = {"model": holder.module, "count": 0}
    holder.ring = [0]
    holder.ring.append(holder.ring)
    restore = save_counts(holder)
    holder.big.append(1)
    holder.weights += 1
    holder.parameter.data += 1
    holder.train_dataset.append({"x": 2})
    holder.mixed["count"] = 5
    holder.ring.append(7)
    for _ in range(2):
        restore()
        assert len(holder.big) == 20_001
        assert (float(holder.weights[0]), holder.parameter.detach()[0].item()) == (1.0, 1.0)
        assert len(holder.train_dataset) == 2
        assert holder.mixed == {"model": holder.module, "count": 0}
        assert len(holder.ring) == 2
        holder.ring.append(8)


def test_what_trl_counts_is_what_was_trained_on(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="needs trl")
    datasets = pytest.importorskip("datasets", reason="needs trl")
    tokenizers = pytest.importorskip("tokenizers", reason="needs trl")

    words = {"<pad>": 0, "<eos>": 1, **{f"w{n}": n for n in range(2, 64)}}
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<eos>"))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>"
    )
    texts = [" ".join(f"w{int(one)}" for one in sample["input_ids"]) for sample in Tokens(padded=False)]

    def run(wrap: Any) -> list[Any]:
        args = trl.SFTConfig(
            str(tmp_path), per_device_train_batch_size=8, max_steps=3, report_to=[], save_strategy="no",
            logging_steps=1, use_cpu=True, bf16=False, gradient_checkpointing=False, disable_tqdm=True,
            dataloader_pin_memory=False,
        )  # fmt: skip
        data = datasets.Dataset.from_dict({"text": texts})
        trainer = wrap(trl.SFTTrainer(gpt2(), args, train_dataset=data, processing_class=tokenizer))
        trainer.train()
        names = ("loss", "num_tokens", "mean_token_accuracy", "entropy")
        return [[entry[name] for name in names] for entry in trainer.state.log_history if "loss" in entry]

    assert run(adapt) == [pytest.approx(entry) for entry in run(lambda trainer: trainer)]
