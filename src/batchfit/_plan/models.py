"""A model by its shape, on the meta device: parameters have shapes and no memory; nothing is downloaded.

Rules: transformers builds the model from its configuration, as a training script would. Weights are in bf16
or fp32, as the settings say. A batch is what one step of that task reads, of `length` tokens or pixels.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from batchfit._plan.pure.shapes import ModelShape, Task, shape_named
from batchfit.errors import TargetError

NEEDS_TRANSFORMERS: Final = (
    'a plan for a model by its name builds it with transformers: pip install "batchfit[transformers]"'
)
# The class that transformers builds, by what the model is trained to do.
_CLASSES: Final[dict[Task, str]] = {
    "causal": "AutoModelForCausalLM",
    "masked": "AutoModelForMaskedLM",
    "image": "AutoModelForImageClassification",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "speech": "AutoModelForSpeechSeq2Seq",
}
_HEADS: Final[tuple[tuple[str, Task], ...]] = (  # of `architectures` in a config.json
    ("ForCausalLM", "causal"),
    ("LMHeadModel", "causal"),
    ("ForMaskedLM", "masked"),
    ("ForImageClassification", "image"),
    ("WhisperForConditionalGeneration", "speech"),
    ("ForConditionalGeneration", "seq2seq"),
)
_FRAMES = 3000  # of half a minute of sound, as Whisper takes it
_LONGEST_FIELDS = ("max_position_embeddings", "n_positions")


def shape_of(target: str) -> ModelShape:
    """The shape that a name or the path of a `config.json` (or its folder) stands for."""
    path = Path(target).expanduser()
    if path.is_dir() and (path / "config.json").is_file():
        path = path / "config.json"
    if path.suffix == ".json":
        return _from_file(path)
    return shape_named(target)


def _from_file(path: Path) -> ModelShape:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TargetError(f"{path}: {error.strerror or error}") from None
    except ValueError as error:
        raise TargetError(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise TargetError(f"{path} must be a configuration of transformers (config.json), with model_type")
    heads = [str(one) for one in config.get("architectures") or ()]
    task: Task = next((task for end, task in _HEADS for one in heads if one.endswith(end)), "causal")
    if config.get("quantization_config"):
        config = {name: value for name, value in config.items() if name != "quantization_config"}
    name = str(config.get("_name_or_path") or path.parent.name or path.stem)
    length = 224 if task == "image" else 448 if task == "speech" else 2048
    longest = [config[one] for one in _LONGEST_FIELDS if isinstance(config.get(one), int)]
    return ModelShape(name, task, config, length=min([length, *longest]))


def build(shape: ModelShape, *, dtype: torch.dtype) -> nn.Module:
    """The model on the meta device, in training mode."""
    try:
        import transformers
    except ImportError:
        raise TargetError(NEEDS_TRANSFORMERS) from None
    fields = {**shape.config, "use_cache": False}
    kind = fields.pop("model_type")
    for name in ("architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path"):
        fields.pop(name, None)
    automatic: Any = transformers.AutoConfig
    try:
        config = automatic.for_model(kind, **fields)
        with torch.device("meta"):
            model: nn.Module = getattr(transformers, _CLASSES[shape.task]).from_config(config)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise TargetError(
            f"transformers {transformers.__version__} cannot build {shape.name} ({kind}): {error}"
        ) from error
    return model.to(dtype).train()


def batches(shape: ModelShape, config: Any, length: int) -> Callable[[int], dict[str, Tensor]]:
    """What makes a batch of n samples for that task, on the meta device."""

    def tokens(n: int, width: int = length) -> Tensor:
        return torch.zeros(n, width, dtype=torch.long, device="meta")

    def make(n: int) -> dict[str, Tensor]:
        if shape.task == "image":
            pixels = torch.empty(n, 3, length, length, device="meta")
            return {"pixel_values": pixels, "labels": torch.zeros(n, dtype=torch.long, device="meta")}
        if shape.task == "speech":
            sound = torch.empty(n, config.num_mel_bins, _FRAMES, device="meta")
            return {"input_features": sound, "labels": tokens(n)}
        return {"input_ids": tokens(n), "labels": tokens(n)}  # no padding, so no mask

    return make
