"""Fine-tuning as people do it with PEFT, bitsandbytes, torchao and diffusers: small, random weights, a CPU.

Libraries are imported in functions: who collects tests does not wait for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import batchfit

LENGTH, VOCABULARY = 64, 1024
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
BF16 = torch.bfloat16
Optimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


# -- language models


def llama(dtype: torch.dtype = torch.float32) -> Any:
    """A small Llama with grouped heads."""
    import transformers as hf

    torch.manual_seed(0)
    config = hf.LlamaConfig(
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        use_cache=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    return hf.LlamaForCausalLM(config).to(dtype).train()


def tokens(n: int) -> dict[str, Tensor]:
    ids = torch.randint(0, VOCABULARY, (n, LENGTH))
    return {"input_ids": ids, "labels": ids}


def own_loss(model: Any, batch: Any) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def adamw(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """As torch would choose on a GPU: all parameters at once."""
    return torch.optim.AdamW(parameters, lr=1e-3, foreach=True)


def fine_tuned(model: Any, optimizer: Optimizer = adamw, **options: Any) -> batchfit.Workload:
    made = optimizer([one for one in model.parameters() if one.requires_grad])
    return batchfit.training(model, made, own_loss, tokens, **{"keep_outputs": False, **options})


def with_lora(model: Any = None, **options: Any) -> Any:
    import peft

    asked = {"r": 8, "lora_dropout": 0.1, "target_modules": LINEAR, "task_type": "CAUSAL_LM", **options}
    return peft.get_peft_model(llama() if model is None else model, peft.LoraConfig(**asked))


def in_4bit(model: Any, kind: str = "nf4", *, double: bool = False, compute: Any = torch.float32) -> Any:
    """Its linear layers as `load_in_4bit=True` leaves them."""
    import bitsandbytes as bnb

    def quantised(layer: nn.Linear) -> nn.Module:
        sizes = layer.in_features, layer.out_features
        new = bnb.nn.Linear4bit(
            *sizes, bias=False, compute_dtype=compute, compress_statistics=double, quant_type=kind
        )
        new.weight = bnb.nn.Params4bit(
            layer.weight.data, requires_grad=False, quant_type=kind, compress_statistics=double, module=new
        )
        return new

    return _replaced(model, quantised)


def in_8bit(model: Any) -> Any:
    """Its linear layers as `load_in_8bit=True` leaves them."""
    import bitsandbytes as bnb

    def quantised(layer: nn.Linear) -> nn.Module:
        sizes = layer.in_features, layer.out_features
        new = bnb.nn.Linear8bitLt(*sizes, bias=False, has_fp16_weights=False, threshold=6.0)
        new.weight = bnb.nn.Int8Params(layer.weight.data, requires_grad=False, has_fp16_weights=False)
        return new

    return _replaced(model, quantised)


def _replaced(model: Any, quantised: Callable[[nn.Linear], nn.Module]) -> Any:
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if name in LINEAR:
                setattr(parent, name, quantised(layer))
    return model.to("cpu")  # where bitsandbytes quantises


def for_kbit_training(model: Any) -> Any:
    import peft

    model.is_loaded_in_4bit = True
    options = {"use_reentrant": False}
    return peft.prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs=options)


def int8_weight_only() -> Any:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = llama(BF16).requires_grad_(False)
    quantize_(model, Int8WeightOnlyConfig())
    return model


def of_bitsandbytes(name: str) -> Optimizer:
    import bitsandbytes as bnb

    return lambda parameters: getattr(bnb.optim, name)(parameters, lr=1e-3)


def of_torchao(name: str) -> Optimizer:
    import torchao.optim

    return lambda parameters: getattr(torchao.optim, name)(parameters, lr=1e-3)


LANGUAGE: dict[str, Callable[[], batchfit.Workload]] = {
    "full": lambda: fine_tuned(llama()),
    "LoRA": lambda: fine_tuned(with_lora()),
    "LoRA, bf16 autocast": lambda: fine_tuned(with_lora(), autocast=BF16),
    "rsLoRA": lambda: fine_tuned(with_lora(use_rslora=True)),
    "DoRA": lambda: fine_tuned(with_lora(use_dora=True)),
    "LoRA, modules_to_save": lambda: fine_tuned(with_lora(modules_to_save=["lm_head", "embed_tokens"])),
    "QLoRA nf4": lambda: fine_tuned(with_lora(in_4bit(llama()))),
    "QLoRA fp4": lambda: fine_tuned(with_lora(in_4bit(llama(), "fp4"))),
    "QLoRA nf4, double quantisation": lambda: fine_tuned(with_lora(in_4bit(llama(), double=True))),
    "QLoRA nf4, prepare_model_for_kbit_training": lambda: fine_tuned(
        with_lora(for_kbit_training(in_4bit(llama(BF16), double=True, compute=BF16)))
    ),
    "Linear8bitLt, LoRA": lambda: fine_tuned(with_lora(in_8bit(llama()))),
    "bitsandbytes AdamW8bit": lambda: fine_tuned(llama(), of_bitsandbytes("AdamW8bit")),
    "bitsandbytes PagedAdamW8bit": lambda: fine_tuned(llama(), of_bitsandbytes("PagedAdamW8bit")),
    "torchao AdamW8bit": lambda: fine_tuned(llama(), of_torchao("AdamW8bit")),
    "torchao AdamW4bit": lambda: fine_tuned(llama(), of_torchao("AdamW4bit")),
    "torchao AdamWFp8": lambda: fine_tuned(llama(), of_torchao("AdamWFp8")),
    "torchao int8 weight-only, LoRA": lambda: fine_tuned(with_lora(int8_weight_only())),
}


# -- pictures

ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")


def unet() -> Any:
    """In the shape of Stable Diffusion's, small."""
    import diffusers

    torch.manual_seed(0)
    return diffusers.UNet2DConditionModel(
        sample_size=32,
        layers_per_block=1,
        norm_num_groups=8,
        block_out_channels=(32, 64),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=8,
    )


def sdxl() -> Any:
    """In the shape of SDXL's: two text encoders, the size of the picture as a condition."""
    import diffusers

    torch.manual_seed(0)
    return diffusers.UNet2DConditionModel(
        sample_size=32,
        layers_per_block=1,
        norm_num_groups=8,
        block_out_channels=(32, 64, 64),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 1, 2),
        attention_head_dim=(2, 4, 4),
        cross_attention_dim=32,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=80,
        use_linear_projection=True,
    )


def flux() -> Any:
    import diffusers

    torch.manual_seed(0)
    return diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        guidance_embeds=True,
        axes_dims_rope=(4, 4, 8),
    )


def with_adapter(model: Any) -> Any:
    """With LoRA as diffusers' own scripts have it."""
    import peft

    model.requires_grad_(False)
    model.add_adapter(peft.LoraConfig(r=4, target_modules=list(ATTENTION)))
    return model


def denoised(model: Any, side: int, **options: Any) -> batchfit.Workload:
    """A UNet that is trained on latents of `side` x `side`."""
    import diffusers

    schedule = diffusers.DDPMScheduler(num_train_timesteps=1000)
    is_sdxl = model.config.addition_embed_type is not None

    def batch(n: int) -> dict[str, Tensor]:
        made = {"latents": torch.randn(n, 4, side, side), "text": torch.randn(n, 7, 32)}
        if is_sdxl:
            made |= {"pooled": torch.randn(n, 32), "sizes": torch.randint(0, 512, (n, 6))}
        return made

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        latents = batch["latents"]
        noise = torch.randn_like(latents)
        steps = torch.randint(0, 1000, (len(latents),), device=latents.device)
        noisy = schedule.add_noise(latents, noise, steps)
        more = {}
        if is_sdxl:
            more["added_cond_kwargs"] = {"text_embeds": batch["pooled"], "time_ids": batch["sizes"]}
        return F.mse_loss(model(noisy, steps, batch["text"], **more).sample.float(), noise)

    return _pictures(model, loss, batch, **options)


def flow_matched(model: Any, side: int, **options: Any) -> batchfit.Workload:
    """A Flux transformer that is trained on packed latents of a picture of `side` x `side`."""
    length = side * side // 4
    places, words = torch.zeros(length, 3), torch.zeros(8, 3)

    def batch(n: int) -> dict[str, Tensor]:
        return {
            "latents": torch.randn(n, length, 16),
            "text": torch.randn(n, 8, 32),
            "pooled": torch.randn(n, 32),
        }

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        latents = batch["latents"]
        noise, time = torch.randn_like(latents), torch.rand(len(latents), device=latents.device)
        share = time[:, None, None]
        predicted = model(
            hidden_states=(1 - share) * latents + share * noise,
            timestep=time,
            guidance=torch.full_like(time, 3.5),
            pooled_projections=batch["pooled"],
            encoder_hidden_states=batch["text"],
            img_ids=places.to(latents.device),
            txt_ids=words.to(latents.device),
            return_dict=False,
        )[0]
        return F.mse_loss(predicted, noise - latents)

    return _pictures(model, loss, batch, **options)


def _pictures(model: Any, loss: Any, batch: Any, **options: Any) -> batchfit.Workload:
    made = adamw([one for one in model.parameters() if one.requires_grad])
    return batchfit.training(model, made, loss, batch, **{"keep_outputs": False, **options})


def _checkpointed(model: Any) -> Any:
    model.enable_gradient_checkpointing()
    return model


PICTURES: dict[str, Callable[[], batchfit.Workload]] = {
    "UNet, 16 x 16": lambda: denoised(unet(), 16),
    "UNet, 32 x 32": lambda: denoised(unet(), 32),
    "UNet with LoRA, 16 x 16": lambda: denoised(with_adapter(unet()), 16),
    "UNet with LoRA, bf16 autocast": lambda: denoised(with_adapter(unet()), 16, autocast=BF16),
    "SDXL, 16 x 16": lambda: denoised(sdxl(), 16),
    "SDXL with LoRA, 32 x 32": lambda: denoised(with_adapter(sdxl()), 32),
    "Flux, 16 x 16": lambda: flow_matched(flux(), 16),
    "Flux with LoRA, 16 x 16": lambda: flow_matched(with_adapter(flux()), 16),
    "Flux with LoRA, 32 x 32": lambda: flow_matched(with_adapter(flux()), 32),
    "Flux with LoRA, gradient checkpointing": lambda: flow_matched(_checkpointed(with_adapter(flux())), 16),
}
