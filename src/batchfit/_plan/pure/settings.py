"""Which rows a plan has: the settings (method, dtype, optimizer, checkpointing, loss) of each kind of model.

Rules: a setting is data; `workloads.py` makes the step of it, as a training script would. The rows of a task
go from what trains most to what needs least. A setting that needs a library that is not installed is left
out, and said.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

from batchfit._plan.pure.model_shape import Task

Method = Literal["full", "lora", "qlora"]
Weights = Literal["fp32", "bf16"]
Optimizer = Literal["adamw", "adamw8bit", "sgd"]
Checkpointing = Literal["none", "half", "all"]
Loss = Literal["whole", "chunked"]
Shards = Literal["", "fsdp2"]  # how several GPUs share the model; "" is DDP

METHODS: tuple[Method, ...] = ("full", "lora", "qlora")
TRAINERS = ("transformers", "trl", "lightning", "torchtune")  # whose arguments can be pasted
_METHOD_NAMES = {"full": "full", "lora": "LoRA", "qlora": "QLoRA"}
_OPTIMIZER_NAMES = {"adamw": "AdamW", "adamw8bit": "8-bit AdamW", "sgd": "SGD"}
_CHECKPOINT_NAMES = {"none": "", "half": "checkpoint 1 of 2", "all": "checkpoint"}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How a model is trained.

    `weights`: dtype of the parameters; fp32 ones are trained under bf16 autocast. `rank`: of LoRA's matrices.
    """

    method: Method = "full"
    weights: Weights = "bf16"
    optimizer: Optimizer = "adamw"
    checkpointing: Checkpointing = "none"
    loss: Loss = "whole"
    rank: int = 16
    shards: Shards = ""

    @property
    def name(self) -> str:
        """`LoRA r16, bf16, AdamW, checkpoint, chunked loss`."""
        method = _METHOD_NAMES[self.method] + (f" r{self.rank}" if self.method != "full" else "")
        weights = {"full": {"fp32": "autocast", "bf16": "bf16"}[self.weights], "qlora": "nf4"}
        parts = [method, weights.get(self.method, "bf16"), _OPTIMIZER_NAMES[self.optimizer]]
        parts += [_CHECKPOINT_NAMES[self.checkpointing]] if self.checkpointing != "none" else []
        parts += ["chunked loss"] if self.loss == "chunked" else []
        parts += ["FSDP2"] if self.shards else []
        return ", ".join(parts)

    @property
    def needs(self) -> tuple[str, ...]:
        """The packages, beside transformers, that such a run needs."""
        found = ["peft"] if self.method != "full" else []
        if self.method == "qlora" or self.optimizer == "adamw8bit":
            found.append("bitsandbytes")
        return tuple(found)

    @property
    def computes_as(self) -> tuple[object, ...]:
        """Settings that are equal here do the same floating-point operations."""
        return (self.method != "full", self.checkpointing, self.loss, self.rank)


_CAUSAL = (
    Setting(weights="fp32"),
    Setting(),
    Setting(checkpointing="all"),
    Setting(checkpointing="all", optimizer="adamw8bit"),
    Setting(checkpointing="all", optimizer="adamw8bit", loss="chunked"),
    Setting(method="lora"),
    Setting(method="lora", checkpointing="half"),
    Setting(method="lora", checkpointing="all"),
    Setting(method="lora", checkpointing="all", loss="chunked"),
    Setting(method="qlora"),
    Setting(method="qlora", checkpointing="all"),
    Setting(method="qlora", checkpointing="all", loss="chunked"),
)
_OTHERS = (
    Setting(weights="fp32"),
    Setting(weights="fp32", checkpointing="all"),
    Setting(),
    Setting(checkpointing="half"),
    Setting(checkpointing="all"),
    Setting(checkpointing="all", optimizer="adamw8bit"),
    Setting(optimizer="sgd"),
    Setting(method="lora"),
    Setting(method="lora", checkpointing="all"),
)
_DIFFUSION = (
    Setting(weights="fp32"),
    Setting(weights="fp32", checkpointing="all"),
    Setting(),
    Setting(checkpointing="all"),
    Setting(checkpointing="all", optimizer="adamw8bit"),
    Setting(method="lora"),
    Setting(method="lora", checkpointing="all"),
    Setting(method="qlora", checkpointing="all"),
)
# For several GPUs, beside the rows above: those are DDP.
_SHARDED = (
    Setting(weights="fp32", shards="fsdp2"),
    Setting(shards="fsdp2"),
    Setting(checkpointing="all", shards="fsdp2"),
)
_CONVOLUTIONS = (Setting(weights="fp32"), Setting(weights="fp32", optimizer="sgd"), Setting())


def is_confirmed(setting: Setting, task: Task) -> bool:
    """Whether peaks of such rows were compared with real training on a GPU (an H200).

    In `benchmarks/results`: `plan_h200_202611.md` has those of language models, `prediction_h200_202611.md`
    autocast with AdamW of others. Diffusion models were not compared.
    """
    if task == "causal":
        return setting in _CAUSAL
    return task != "diffusion" and setting == Setting(weights="fp32")


def settings_for(
    task: Task, *, model_type: str = "", methods: tuple[Method, ...] = METHODS, several: bool = False
) -> list[Setting]:
    """The rows of a model: every setting of these methods that it can be trained with, on one GPU or more."""
    rows: tuple[Setting, ...] = {"causal": _CAUSAL, "diffusion": _DIFFUSION}.get(task, _OTHERS)
    if model_type == "resnet":
        rows = _CONVOLUTIONS
    if several:
        rows += _SHARDED if model_type != "resnet" else _SHARDED[:1]
    return [one for one in rows if one.method in methods]
