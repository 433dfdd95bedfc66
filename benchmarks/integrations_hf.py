"""Hugging Face's Trainer on GPT-2 small with and without batchfit: size, seconds to find it, tokens/s.

`integrations_gpu.py` runs each variant in a process of its own, since what one leaves in the allocator is the
next one's loss.

Rules:
- All variants are asked for the same batch of an optimizer step. What they really train with is counted in
  the model's forward, not believed.
- `until_first_step_s`: from `train()` to the first step of the attempt that trained, with all searches and
  failed attempts. Tokens/s: from the fourth step of that attempt on, the device waited for at the end of each
  step, the median.
"""

from __future__ import annotations

import importlib.metadata
import statistics
import tempfile
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

GIB = 2**30
CAP_BYTES = 24 * GIB
WARM_STEPS = 3
# per_device_train_batch_size and gradient_accumulation_steps that a user would write, and what else.
VARIANTS: dict[str, dict[str, Any]] = {
    "trainer": {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 8},
    "trainer_whole": {"per_device_train_batch_size": 64, "gradient_accumulation_steps": 1},
    "auto_find_batch_size": {
        "per_device_train_batch_size": 64,
        "gradient_accumulation_steps": 1,
        "auto_find_batch_size": True,
    },
    "batchfit": {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 8},
}
SMOKE = {64: 16, 8: 4}  # sizes of the smoke run


def run_case(
    name: str, *, smoke: bool = False, steps: int = 12, cap_bytes: int = CAP_BYTES
) -> dict[str, Any]:
    """Train with one variant: what it used, how long it took to get there, how fast it then was."""
    import torch
    import transformers

    import batchfit

    if name not in VARIANTS:
        raise ValueError(f"name must be one of {', '.join(VARIANTS)}, not {name!r}")
    transformers.logging.set_verbosity_error()
    given = {
        key: SMOKE.get(value, value) if smoke and key.startswith(("per_device", "gradient")) else value
        for key, value in VARIANTS[name].items()
    }
    tokens = 32 if smoke else 512
    is_gpu = torch.cuda.is_available() and not smoke
    model = _model(tokens, smoke=smoke)
    data = _Sequences(tokens, model.config.vocab_size, count=32 * (steps + 2) if smoke else 64 * (steps + 2))
    limit: AbstractContextManager[Any] = nullcontext()
    if is_gpu:
        torch.cuda.set_per_process_memory_fraction(min(1.0, cap_bytes / torch.cuda.mem_get_info()[1]))
    elif smoke:
        cap_bytes = 3 * 2**20
        limit = batchfit.virtual_memory(cap_bytes)
    watch = _watch(transformers.TrainerCallback)(model, torch.cuda.synchronize if is_gpu else lambda: None)
    with tempfile.TemporaryDirectory() as folder, limit:
        args = transformers.TrainingArguments(
            folder,
            max_steps=steps,
            learning_rate=1e-4,
            bf16=is_gpu,
            use_cpu=not is_gpu,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=is_gpu,
            **given,
        )
        trainer: Any = transformers.Trainer(model, args, train_dataset=data, callbacks=[watch])
        if name == "batchfit":
            from batchfit.integrations.transformers import adapt

            adapt(trainer)
        return {
            **_trained(trainer, watch, tokens),
            "variant": name,
            "cap_bytes": cap_bytes,
            **_setting(is_gpu),
        }


def _trained(trainer: Any, watch: Any, tokens: int) -> dict[str, Any]:
    watch.begun_s = time.perf_counter()
    try:
        trainer.train()
    except RuntimeError as error:
        if "out of memory" not in str(error):
            raise
        return {"outcome": "out of memory", "message": str(error).splitlines()[0][:200]}
    seconds = statistics.median(watch.step_s[WARM_STEPS:])
    batch_size = round(statistics.median(watch.batch_sizes[WARM_STEPS:]))
    fit = getattr(trainer, "found", None)
    return {
        "outcome": "trained",
        "microbatch_size": watch.largest,
        "batch_size": batch_size,
        "attempts": watch.attempts,
        "until_first_step_s": watch.first_s,
        "find_s": None if fit is None else fit.elapsed_s,
        "sizes_tried": None if fit is None else [[trial.size, trial.outcome] for trial in fit.trials],
        "step_s": seconds,
        "tokens_per_s": batch_size * tokens / seconds,
        "peak_bytes": watch.peak_bytes(),
        "out_of_memory": sum(entry.get("out_of_memory", 0) for entry in trainer.state.log_history),
    }


def _watch(base: Any) -> Any:
    """A callback that counts and times the steps of the attempt that trains."""

    class Watch(base):  # type: ignore[misc]
        def __init__(self, model: Any, wait: Any) -> None:
            self.begun_s = 0.0
            self.attempts = 0
            self._wait = wait
            self._forget()
            model.register_forward_pre_hook(self._count, with_kwargs=True)

        def _forget(self) -> None:
            self.first_s = 0.0
            self.largest = self._samples = 0
            self.step_s: list[float] = []
            self.batch_sizes: list[int] = []

        def _count(self, model: Any, args: Any, kwargs: Any) -> None:
            import torch

            if torch.is_grad_enabled():
                size = len(kwargs["input_ids"])
                self._samples += size
                self._largest = max(self._largest, size)

        def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            self.attempts += 1
            self._forget()
            self._samples = self._largest = 0

        def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            self._wait()
            self._at_s = time.perf_counter()
            if state.global_step == 0:
                self.first_s = self._at_s - self.begun_s
            self._samples = self._largest = 0

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            self._wait()
            self.step_s.append(time.perf_counter() - self._at_s)
            self.batch_sizes.append(self._samples)
            self.largest = self._largest

        def peak_bytes(self) -> int | None:
            import torch

            return torch.cuda.max_memory_reserved() if torch.cuda.is_available() else None

        _largest = 0

    return Watch


class _Sequences:
    """As many sequences as are asked for, all of one length."""

    def __init__(self, tokens: int, vocabulary: int, *, count: int) -> None:
        import torch

        generator = torch.Generator().manual_seed(0)
        self._ids = torch.randint(0, vocabulary, (count, tokens), generator=generator)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self._ids[index], "labels": self._ids[index]}


def _model(tokens: int, *, smoke: bool) -> Any:
    import torch
    import transformers

    torch.manual_seed(0)
    tiny = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 128, "bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(n_positions=max(tokens, 64), **(tiny if smoke else {}))
    return transformers.GPT2LMHeadModel(config)


def _setting(is_gpu: bool) -> dict[str, Any]:
    import torch

    names = ("torch", "transformers", "accelerate")
    return {
        "device": torch.cuda.get_device_name() if is_gpu else "cpu",
        **{name: importlib.metadata.version(name) for name in names},
    }
