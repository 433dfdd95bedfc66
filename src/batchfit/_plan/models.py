"""A model by its shape, on the meta device: parameters have shapes and no memory; nothing is downloaded.

Rules: transformers or diffusers builds the model from its configuration, as a training script would. Weights
are in bf16 or fp32, as the settings say. A batch is what one step of that task reads, of `length` tokens or
pixels. Of a diffusion model that is latents and embedded prompts, as scripts that cache both have them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from batchfit._plan.pure.model_shape import ModelShape, Task
from batchfit._plan.pure.shapes import shape_named
from batchfit.errors import TargetError

NEEDS_TRANSFORMERS: Final = (
    'a plan for a model by its name builds it with transformers: pip install "batchfit[transformers]"'
)
NEEDS_DIFFUSERS: Final = "a plan for a diffusion model builds it with diffusers: pip install diffusers"
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
# Of diffusers: how many pixels of a side are one latent, and tokens of a prompt.
_DIFFUSERS: Final = {"UNet2DConditionModel": (8, 77), "FluxTransformer2DModel": (16, 512)}
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
    name = str(
        (config.get("_name_or_path") if isinstance(config, dict) else "") or path.parent.name or path.stem
    )
    if isinstance(config, dict) and config.get("_class_name") in _DIFFUSERS:
        side = config.get("sample_size")
        return ModelShape(name, "diffusion", config, length=8 * side if isinstance(side, int) else 1024)
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise TargetError(f"{path} must be a configuration of transformers (config.json), with model_type")
    heads = [str(one) for one in config.get("architectures") or ()]
    task: Task = next((task for end, task in _HEADS for one in heads if one.endswith(end)), "causal")
    if config.get("quantization_config"):
        config = {name: value for name, value in config.items() if name != "quantization_config"}
    length = 224 if task == "image" else 448 if task == "speech" else 2048
    longest = [config[one] for one in _LONGEST_FIELDS if isinstance(config.get(one), int)]
    return ModelShape(name, task, config, length=min([length, *longest]))


def build(shape: ModelShape, *, dtype: torch.dtype) -> nn.Module:
    """The model on the meta device, in training mode."""
    if shape.task == "diffusion":
        return _diffusion_model(shape).to(dtype).train()
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
        # What its import brings, such as torchao, makes tables of tensors, which must not be on "meta".
        _ = transformers.PreTrainedModel
        with torch.device("meta"):
            model: nn.Module = getattr(transformers, _CLASSES[shape.task]).from_config(config)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise TargetError(
            f"transformers {transformers.__version__} cannot build {shape.name} ({kind}): {error}"
        ) from error
    return model.to(dtype).train()


def _diffusion_model(shape: ModelShape) -> nn.Module:
    try:
        import diffusers
    except ImportError:
        raise TargetError(NEEDS_DIFFUSERS) from None
    fields = {name: value for name, value in shape.config.items() if not name.startswith("_")}
    try:
        with torch.device("meta"):
            model: nn.Module = getattr(diffusers, shape.kind).from_config(fields)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise TargetError(
            f"diffusers {diffusers.__version__} cannot build {shape.name} ({shape.kind}): {error}"
        ) from error
    return model


def caveats_of(shape: ModelShape) -> Iterator[str]:
    """What a plan of such a model leaves out."""
    if shape.task == "diffusion":
        yield (
            "a diffusion model: latents and embedded prompts come from a cache, as in scripts that make them "
            "first; the VAE and the text encoders are not on the GPU"
        )
    if any("experts" in name for name in shape.config):
        yield (
            "a mixture of experts: those of a layer are one tensor, no nn.Linear, so rows of QLoRA have them "
            "in bf16, as bitsandbytes does"
        )


def _diffusion_batches(shape: ModelShape, config: Any, length: int) -> Callable[[int], dict[str, Any]]:
    """Noisy latents, when, what to paint, and the target."""
    step, prompt = _DIFFUSERS[shape.kind]
    side = length // step

    def empty(*lengths: int) -> Tensor:
        return torch.empty(*lengths, device="meta")

    def flux(n: int) -> dict[str, Any]:
        batch = {
            "hidden_states": empty(n, side * side, config.in_channels),
            "encoder_hidden_states": empty(n, prompt, config.joint_attention_dim),
            "pooled_projections": empty(n, config.pooled_projection_dim),
            "timestep": empty(n),
            "img_ids": empty(side * side, 3),
            "txt_ids": empty(prompt, 3),
            "target": empty(n, side * side, config.in_channels),
        }
        return batch | ({"guidance": empty(n)} if config.guidance_embeds else {})

    def unet(n: int) -> dict[str, Any]:
        batch: dict[str, Any] = {
            "sample": empty(n, config.in_channels, side, side),
            "timestep": torch.zeros(n, dtype=torch.long, device="meta"),
            "encoder_hidden_states": empty(n, prompt, config.cross_attention_dim),
            "target": empty(n, config.out_channels, side, side),
        }
        if config.addition_embed_type == "text_time":
            ids = config.addition_time_embed_dim
            texts = config.projection_class_embeddings_input_dim - 6 * ids
            batch["added_cond_kwargs"] = {"text_embeds": empty(n, texts), "time_ids": empty(n, 6)}
        return batch

    return flux if shape.kind.startswith("Flux") else unet


def batches(shape: ModelShape, config: Any, length: int) -> Callable[[int], dict[str, Tensor]]:
    """What makes a batch of n samples for that task, on the meta device."""
    if shape.task == "diffusion":
        return _diffusion_batches(shape, config, length)

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
