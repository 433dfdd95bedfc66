"""The step of a setting: the model on the meta device, changed as a training script would change it.

Rules: LoRA is PEFT's, on all linear layers but the head; 4-bit weights are bitsandbytes' nf4 with double
quantisation, as `BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True)` leaves them; 8-bit
AdamW is bitsandbytes'. Checkpointing is `torch.utils.checkpoint` of whole blocks. A chunked loss makes the
logits of a sixteenth of the tokens at a time, and again in backward. Outputs die inside the function that
computes the loss, as in the training loops of transformers, TRL and Lightning.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from batchfit._engine.allocator.gpus import Gpu
from batchfit._engine.sharding.model_blocks import repeated_blocks
from batchfit._engine.workload.reachable import StepReach
from batchfit._explain.what_if import (
    checkpointing,
    chunked_loss,
    lower_precision,
    smaller_optimizer,
    update_changes,
)
from batchfit._plan.models import batches, build
from batchfit._plan.pure.model_shape import ModelShape
from batchfit._plan.pure.settings import Setting
from batchfit.workload import Workload, training

_BLOCK: Final = 64  # weights that share a scale in bitsandbytes' 4-bit formats
_SCALES: Final = 256  # scales that share one of their own, in double quantisation
_CHUNKS: Final = 16
IGNORED: Final = -100  # a label that counts for nothing


class InapplicableError(Exception):
    """A setting that this model cannot have; the text says why."""


def workload_of(shape: ModelShape, setting: Setting, length: int) -> Workload:
    """One training step of the model under that setting; nothing of it has memory."""
    dtype = torch.float32 if setting.weights == "fp32" and setting.method == "full" else torch.bfloat16
    model: Any = build(shape, dtype=dtype)
    config = model.config
    if setting.method == "qlora" and not _in_4bit(model):
        raise InapplicableError("no nn.Linear for bitsandbytes to hold in 4 bits")
    if setting.method != "full":
        model = _with_lora(model, shape, setting.rank)
    _checkpoint(model, setting)
    # Tokens are numbers; pixels and sound come in fp32, beside weights of any kind.
    plain = dtype is torch.bfloat16 and shape.task not in ("image", "speech", "diffusion")
    return training(
        model,
        _optimizer(setting, [one for one in model.parameters() if one.requires_grad]),
        _LOSSES.get(shape.task, _chunked_loss if setting.loss == "chunked" else _own_loss),
        batches(shape, config, length),
        autocast=None if plain else torch.bfloat16,
        keep_outputs=False,
    )


def _own_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def _noise_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """How far the prediction of the noise (or of the flow) is off."""
    inputs = {name: value for name, value in batch.items() if name != "target"}
    predicted = model(**inputs, return_dict=False)[0]
    return F.mse_loss(predicted.float(), batch["target"].float())


_LOSSES: Final[dict[str, Callable[..., Tensor]]] = {"diffusion": _noise_loss}


def _chunked_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The mean over tokens, from hidden states; each chunk's logits live only as long as that chunk."""
    whole = model.get_base_model() if hasattr(model, "get_base_model") else model
    head = whole.get_output_embeddings()
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    hidden = getattr(whole, whole.base_model_prefix)(**inputs).last_hidden_state
    rows = hidden.reshape(-1, hidden.shape[-1])
    labels = F.pad(batch["labels"], (0, 1), value=IGNORED)[:, 1:].reshape(-1)

    def summed(rows: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(head(rows).float(), labels, reduction="sum", ignore_index=IGNORED)

    parts = zip(rows.tensor_split(_CHUNKS), labels.tensor_split(_CHUNKS), strict=True)
    total: Tensor = sum(checkpoint(summed, *part, use_reentrant=False) for part in parts)
    return total / len(labels)


def _checkpoint(model: Any, setting: Setting) -> None:
    if setting.checkpointing == "none":
        return
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()
    if hasattr(model, "enable_gradient_checkpointing"):  # of diffusers
        model.enable_gradient_checkpointing()
        return
    for one in repeated_blocks(model):
        for block in one.blocks[:: 2 if setting.checkpointing == "half" else 1]:
            vars(block)["forward"] = partial(checkpoint, block.forward, use_reentrant=False)


def _with_lora(model: nn.Module, shape: ModelShape, rank: int) -> Any:
    peft: Any = importlib.import_module("peft")
    task = {"causal": "CAUSAL_LM", "seq2seq": "SEQ_2_SEQ_LM"}.get(shape.task)
    with torch.device("meta"), warnings.catch_warnings():
        # Of experts: PEFT looks for names that older checkpoints have.
        warnings.filterwarnings("ignore", message=r"The following (rank|alpha)_pattern keys")
        layers = "all-linear" if shape.task != "diffusion" else _attention_layers(model)
        options = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=layers, task_type=task)
        return peft.get_peft_model(model, options, low_cpu_mem_usage=True)


def _attention_layers(model: nn.Module) -> list[str]:
    """The products of every attention, as the scripts of diffusers adapt them."""
    ends = ("to_q", "to_k", "to_v", "to_out.0")
    return [name for name, _ in model.named_modules() if name.endswith(ends)]


def _optimizer(setting: Setting, parameters: list[Tensor]) -> torch.optim.Optimizer:
    if setting.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)
    if setting.optimizer == "adamw8bit":
        bitsandbytes: Any = importlib.import_module("bitsandbytes")
        made: torch.optim.Optimizer = bitsandbytes.optim.AdamW8bit(parameters)
        return made
    return torch.optim.AdamW(parameters, lr=1e-5, fused=True)  # as transformers' Trainer does


def _in_4bit(model: Any) -> int:
    """Every linear layer but the head as one of 4 bits, without any weights: how many there are."""
    count = 0
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is nn.Linear and layer is not head:
                setattr(parent, name, _quantised(layer))
                count += 1
    model.is_loaded_in_4bit = True
    return count


def _quantised(layer: nn.Linear) -> nn.Module:
    nn4: Any = importlib.import_module("bitsandbytes.nn")
    state: Any = importlib.import_module("bitsandbytes.functional").QuantState
    empty: Callable[..., Tensor] = partial(torch.empty, device="meta")
    count = layer.weight.numel()
    blocks = -(-count // _BLOCK)
    outer = state(
        absmax=empty(-(-blocks // _SCALES)), code=empty(256), blocksize=_SCALES, dtype=torch.float32
    )
    inner = state(
        absmax=empty(blocks, dtype=torch.uint8),
        shape=layer.weight.shape,
        code=empty(16),
        blocksize=_BLOCK,
        quant_type="nf4",
        dtype=torch.bfloat16,
        offset=empty(()),
        state2=outer,
    )
    bias = layer.bias is not None
    options = {"compute_dtype": torch.bfloat16, "quant_type": "nf4", "device": "meta"}
    made: nn.Module = nn4.Linear4bit(layer.in_features, layer.out_features, bias=bias, **options)
    if bias:
        made.bias = layer.bias
    made.weight = nn4.Params4bit(
        empty(-(-count // 2), 1, dtype=torch.uint8),
        requires_grad=False,
        quant_state=inner,
        blocksize=_BLOCK,
        compress_statistics=True,
        quant_type="nf4",
        bnb_quantized=True,
        module=made,
    )
    vars(made)["quant_state"] = inner
    return made


# -- a workload of the user's


def own_changes(reach: StepReach, gpu: Gpu) -> Iterator[tuple[str, str, tuple[Any, ...]]]:
    """The step as it is, and each change that `explain_memory` would try: name, how to write it, contexts."""
    yield "as it is", "", ()
    found = [
        *checkpointing(reach)[:1],
        *lower_precision(reach, gpu, uses_autocast=False),
        *chunked_loss(reach.workload),
        *update_changes(reach),
        *smaller_optimizer(reach),
    ]
    for one in found:
        yield one.name, one.how, one.contexts
    first = [one for one in found if one.group == "checkpointing"]
    second = [one for one in found if one.group == "loss"]
    for one, two in zip(first, second, strict=False):
        yield f"{one.name} and {two.name}", f"{one.how}; {two.how}", (*one.contexts, *two.contexts)
