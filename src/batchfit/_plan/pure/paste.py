"""A row of a plan as arguments of a trainer, to paste into a program.

Rules: only what the setting says; names of arguments are those of the newest versions (transformers 5, TRL 1,
Lightning 2.5, torchtune 0.6). A setting that a trainer cannot be given by arguments is said in a comment.
"""

from __future__ import annotations

from batchfit._plan.pure.settings import TRAINERS
from batchfit.results import PlanCell, PlanRow

_OPTIMIZERS = {"adamw": "adamw_torch_fused", "adamw8bit": "adamw_bnb_8bit", "sgd": "sgd"}


def pasted(row: PlanRow, cell: PlanCell, trainer: str, *, seq_len: int | None) -> str:
    """The lines for that trainer."""
    if trainer not in TRAINERS:
        raise ValueError(f"paste must be one of {', '.join(TRAINERS)}, not {trainer!r}")
    if "how" in row.options or not row.options:
        how = str(row.options.get("how", "as it is"))
        return f"{how}\n# batch size {cell.batch_size} per GPU, gradient accumulation {cell.accumulation}"
    make = {"transformers": _transformers, "trl": _trl, "lightning": _lightning, "torchtune": _torchtune}
    return "\n".join(make[trainer](row, cell, seq_len))


def _arguments(row: PlanRow, cell: PlanCell) -> list[str]:
    options = row.options
    found = [
        f"per_device_train_batch_size={cell.batch_size},",
        f"gradient_accumulation_steps={cell.accumulation},",
        f'optim="{_OPTIMIZERS[str(options["optimizer"])]}",',
    ]
    if options["weights"] == "fp32" and row.method == "full":
        found.append("bf16=True,  # autocast")
    if options["checkpointing"] == "all":
        found += ["gradient_checkpointing=True,", 'gradient_checkpointing_kwargs={"use_reentrant": False},']
    if options.get("shards"):
        found += ['fsdp="full_shard auto_wrap",', 'fsdp_config={"fsdp_version": 2},']
    return [f"    {line}" for line in found]


def _beside(row: PlanRow) -> list[str]:
    """The model and its adapters, as Hugging Face's libraries take them."""
    options, found = row.options, []
    if row.method == "qlora":
        found += [
            "quantization_config = BitsAndBytesConfig(",
            '    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,',
            "    bnb_4bit_compute_dtype=torch.bfloat16,",
            ")",
        ]
    weights = "float32" if options["weights"] == "fp32" and row.method == "full" else "bfloat16"
    quantised = ", quantization_config=quantization_config" if row.method == "qlora" else ""
    found.append(f"model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.{weights}{quantised})")
    if row.method != "full":
        rank = int(options["rank"])
        found.append(
            f'peft_config = LoraConfig(r={rank}, lora_alpha={2 * rank}, target_modules="all-linear", '
            'task_type="CAUSAL_LM")'
        )
    if options["checkpointing"] == "half":
        found.append("# checkpoint every second block: wrap block.forward in torch.utils.checkpoint yourself")
    return found


def _transformers(row: PlanRow, cell: PlanCell, _: int | None) -> list[str]:
    found = _beside(row)
    if row.method != "full":
        found.append("model = get_peft_model(model, peft_config)")
    if row.options["loss"] == "chunked":
        found.append("# chunked loss: TRL's SFTTrainer makes it, or use_liger_kernel=True")
    return [*found, "args = TrainingArguments(", *_arguments(row, cell), ")"]


def _trl(row: PlanRow, cell: PlanCell, seq_len: int | None) -> list[str]:
    length = [] if seq_len is None else [f"    max_length={seq_len},"]
    peft = ", peft_config=peft_config" if row.method != "full" else ""
    return [
        *_beside(row),
        "args = SFTConfig(  # its loss is chunked",
        *_arguments(row, cell),
        *length,
        ")",
        f"trainer = adapt(SFTTrainer(model, args, train_dataset=dataset{peft}))",
    ]


def _lightning(row: PlanRow, cell: PlanCell, _: int | None) -> list[str]:
    options = row.options
    precision = "bf16-mixed" if options["weights"] == "fp32" and row.method == "full" else "bf16-true"
    found = [
        f"loader = DataLoader(dataset, batch_size={cell.batch_size})",
        f'trainer = Trainer(precision="{precision}", accumulate_grad_batches={cell.accumulation})',
    ]
    if options.get("shards"):
        found.append("# FSDP2: strategy=ModelParallelStrategy(), and fully_shard in configure_model")
    if options["checkpointing"] != "none":
        found.append("model.gradient_checkpointing_enable()  # in your LightningModule")
    if row.method != "full":
        found.append(f"# {row.setting}: PEFT's model in your LightningModule")
    return found


def _torchtune(row: PlanRow, cell: PlanCell, seq_len: int | None) -> list[str]:
    options = row.options
    found = [
        f"batch_size: {cell.batch_size}",
        f"gradient_accumulation_steps: {cell.accumulation}",
        f"dtype: {'fp32' if options['weights'] == 'fp32' and row.method == 'full' else 'bf16'}",
        f"enable_activation_checkpointing: {'True' if options['checkpointing'] != 'none' else 'False'}",
    ]
    if options.get("shards"):
        found.append("# FSDP2: tune run --nproc_per_node GPUS full_finetune_distributed")
    if seq_len is not None:
        found.append(f"tokenizer.max_seq_len: {seq_len}")
    if row.method != "full":
        found.append(f"model.lora_rank: {options['rank']}")
    if options["optimizer"] == "adamw8bit":
        found.append("optimizer._component_: bitsandbytes.optim.AdamW8bit")
    return found
