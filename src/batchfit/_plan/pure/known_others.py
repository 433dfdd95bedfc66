"""The table of other models that `plan` knows by name: text encoders, vision, speech, diffusion.

Of a diffusion model it is the network that a fine-tuning script trains, without VAE and text encoders.
"""

from __future__ import annotations

from typing import Any

from batchfit._plan.pure.model_shape import ModelShape


def _bert(name: str, kind: str, sizes: tuple[int, int, int, int], parameters: int, **more: Any) -> ModelShape:
    hidden, inner, layers, heads = sizes
    config = {
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        **more,
    }
    return ModelShape(name, "masked", config, parameters, length=512)


def _vit(name: str, sizes: tuple[int, int, int, int], parameters: int, patch: int = 16) -> ModelShape:
    hidden, inner, layers, heads = sizes
    config = {
        "model_type": "vit",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "patch_size": patch,
        "num_labels": 1000,
    }
    return ModelShape(f"google/{name}", "image", config, parameters, length=224)


def _resnet(name: str, depths: tuple[int, ...], parameters: int) -> ModelShape:
    config = {"model_type": "resnet", "depths": list(depths), "num_labels": 1000}
    return ModelShape(f"microsoft/{name}", "image", config, parameters, length=224)


def _t5(name: str, sizes: tuple[int, int, int, int], parameters: int) -> ModelShape:
    width, inner, layers, heads = sizes
    config = {
        "model_type": "t5",
        "d_model": width,
        "d_ff": inner,
        "num_layers": layers,
        "num_heads": heads,
        "decoder_start_token_id": 0,
    }
    return ModelShape(name, "seq2seq", config, parameters, length=512)


def _whisper(name: str, width: int, layers: int, parameters: int, mels: int = 80) -> ModelShape:
    config = {
        "model_type": "whisper",
        "d_model": width,
        "encoder_layers": layers,
        "decoder_layers": layers,
        "encoder_attention_heads": width // 64,
        "decoder_attention_heads": width // 64,
        "encoder_ffn_dim": 4 * width,
        "decoder_ffn_dim": 4 * width,
        "num_mel_bins": mels,
        "vocab_size": 51866 if mels == 128 else 51865,
    }
    return ModelShape(f"openai/{name}", "speech", config, parameters, length=448)


def _diffusion(name: str, kind: str, length: int, parameters: int, *also: str, **config: Any) -> ModelShape:
    """The network that a fine-tuning script trains: latents and embedded prompts come from a cache."""
    return ModelShape(name, "diffusion", {"_class_name": kind, **config}, parameters, length, also=also)


OTHERS: tuple[ModelShape, ...] = (
    _bert("google-bert/bert-base-uncased", "bert", (768, 3072, 12, 12), 109_514_298),
    _bert("google-bert/bert-large-uncased", "bert", (1024, 4096, 24, 16), 335_174_458),
    _bert(
        "FacebookAI/roberta-base",
        "roberta",
        (768, 3072, 12, 12),
        124_697_433,
        vocab_size=50265,
        max_position_embeddings=514,
        type_vocab_size=1,
    ),
    _bert(
        "FacebookAI/roberta-large",
        "roberta",
        (1024, 4096, 24, 16),
        355_412_057,
        vocab_size=50265,
        max_position_embeddings=514,
        type_vocab_size=1,
    ),
    _t5("google-t5/t5-small", (512, 2048, 6, 8), 60_506_624),
    _t5("google-t5/t5-base", (768, 3072, 12, 12), 222_903_552),
    _t5("google-t5/t5-large", (1024, 4096, 24, 16), 737_668_096),
    _whisper("whisper-tiny", 384, 4, 37_760_640),
    _whisper("whisper-small", 768, 12, 241_734_912),
    _whisper("whisper-medium", 1024, 24, 763_857_920),
    _whisper("whisper-large-v3", 1280, 32, 1_543_490_560, mels=128),
    _vit("vit-base-patch16-224", (768, 3072, 12, 12), 86_567_656),
    _vit("vit-large-patch16-224", (1024, 4096, 24, 16), 304_326_632),
    _vit("vit-huge-patch14-224", (1280, 5120, 32, 16), 632_045_800, patch=14),
    _resnet("resnet-50", (3, 4, 6, 3), 25_557_032),
    _resnet("resnet-101", (3, 4, 23, 3), 44_549_160),
    _resnet("resnet-152", (3, 8, 36, 3), 60_192_808),
    _diffusion(
        "stabilityai/stable-diffusion-xl-base-1.0",
        "UNet2DConditionModel",
        1024,
        2_567_463_684,
        "sdxl",
        "stable-diffusion-xl",
        addition_embed_type="text_time",
        addition_time_embed_dim=256,
        attention_head_dim=[5, 10, 20],
        block_out_channels=[320, 640, 1280],
        cross_attention_dim=2048,
        down_block_types=["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
        projection_class_embeddings_input_dim=2816,
        sample_size=128,
        transformer_layers_per_block=[1, 2, 10],
        up_block_types=["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
        use_linear_projection=True,
    ),
    _diffusion(
        "stable-diffusion-v1-5/stable-diffusion-v1-5",
        "UNet2DConditionModel",
        512,
        859_520_964,
        "sd1.5",
        "stable-diffusion-1.5",
        cross_attention_dim=768,
        sample_size=64,
    ),
    _diffusion(
        "black-forest-labs/FLUX.1-dev",
        "FluxTransformer2DModel",
        1024,
        11_901_408_320,
        "flux",
        "flux.1",
        guidance_embeds=True,
        in_channels=64,
        num_layers=19,
        num_single_layers=38,
        attention_head_dim=128,
        num_attention_heads=24,
        joint_attention_dim=4096,
        pooled_projection_dim=768,
    ),
)
