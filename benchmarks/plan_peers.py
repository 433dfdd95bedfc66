"""Memory estimators side by side: the same questions to each, and what an H200 said. No GPU is needed.

    python benchmarks/plan_peers.py run --out benchmarks/results/plan_peers_202611.json     # resumes
    python benchmarks/plan_peers.py page benchmarks/results/plan_peers_202611.json --to ...

Questions: the largest batch size in a given memory, and the peak of training at a given batch size. Truths
are read from the JSON of `find_gpu.py`, `prediction_gpu.py` and `plan_gpu.py`; nothing is typed in. Each peer
is called as its documentation says, on the same model. One that is asked in several ways (kitsune by the
model with its head, and by its configuration as from the hub; DeepSpeed by ZeRO-2 and ZeRO-3) counts with the
answer that is nearest to the truth. One that answers for less than a training step (weights, gradients,
optimizer) is compared with those bytes, not with the peak.

It needs torch-kitsune, hf-mem, deepspeed (DS_BUILD_OPS=0), hjson and einops beside the packages of `.venv`;
install them with `pip install --no-deps` into an environment of their own.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import io
import json
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from pages import RESULTS, add_page, write_page
from rows import keep

GIB = 2**30
PACKAGES = ("torch", "transformers", "peft", "torch-kitsune", "accelerate", "deepspeed", "hf-mem")
# The GPU of each size in torch-kitsune's own table.
KITSUNE_GPUS = {16: "t4", 24: "rtx4090", 40: "a100-40gb", 80: "a100-80gb"}
KITSUNE_MOST = 4096  # where its own search ends
LORA_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
Found = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A model and a precision in so much memory, and where its truth stands."""

    model: str
    how: str  # "fp32", "bf16" (autocast), or a row of `plan`
    cap: int
    file: str
    key: str

    @property
    def name(self) -> str:
        return f"{self.model}/{self.how}/{self.cap}"

    @property
    def is_row(self) -> bool:
        return self.file.startswith("plan_")

    @property
    def is_full(self) -> bool:
        return not self.how.startswith(("LoRA", "QLoRA"))


def _found(model: str, cap: int = 24) -> Case:
    return Case(model, "bf16", cap, "find_h200_202611.json", f"{model}/{cap}")


def _predicted(model: str, how: str, cap: int) -> Case:
    return Case(model, how, cap, "prediction_h200_202611.json", f"{model}/{how}/{cap}")


def _planned(row: str) -> Case:
    return Case("Llama-3.2-1B", row, 24, "plan_h200_202611.json", f"Llama-3.2-1B/{row}")


CASES = (
    _found("gpt2"),
    _predicted("gpt2", "fp32", 16),
    _found("resnet50"),
    _predicted("resnet50", "fp32", 40),
    _found("vit"),
    _predicted("vit", "fp32", 16),
    _predicted("bert", "bf16", 40),
    _found("convnext"),
    _predicted("convnext", "fp32", 16),
    _found("llama110m"),
    _predicted("llama1b", "bf16", 80),
    _predicted("llama1b", "fp32", 80),
    _planned("full, bf16, AdamW"),
    _planned("LoRA r16, bf16, AdamW"),
    _planned("QLoRA r16, nf4, AdamW"),
)


# -- the truth


def truth_of(case: Case, results: Path = RESULTS) -> Found:
    """The largest size that trained, and the measured peak at the largest size that has one."""
    kept = json.loads((results / case.file).read_text(encoding="utf-8"))
    if case.file.startswith("find_"):
        import find_gpu

        one = kept["cases"][case.key]
        largest = find_gpu.sustained(one)
        trials = [t for name in find_gpu.OURS for t in one["find"][name]["trials"] if t["outcome"] == "fits"]
    elif case.is_row:
        trials = [t for t in kept["rows"][case.key]["trials"] if t["fits"]]
        largest = max(t["size"] for t in trials)
    else:
        one = kept["truth"][case.key]
        largest = one["sustained"]
        trials = [t for t in one["trials"] if t["outcome"] == "fits"]
    peak = max((t for t in trials if t["size"] <= largest), key=lambda t: t["size"])
    return {
        "file": case.file,
        "key": case.key,
        "batch_size": largest,
        "measured_at": peak["size"],
        "peak_bytes": peak["peak_bytes"],
    }


# -- the model


@dataclass(frozen=True)
class Subject:
    """What is asked about: the workload on the meta device, and the model without adapters."""

    case: Case
    workload: Any
    plain: Callable[[Any], Any]  # by the dtype of its weights

    @property
    def inputs(self) -> tuple[int, ...]:
        """The shape of a sample: tokens, or channels and pixels."""
        batch = self.workload._parts["source"](1)
        return tuple(next(batch[name] for name in ("input_ids", "pixel_values") if name in batch).shape[1:])

    @property
    def weights(self) -> str:
        return "bfloat16" if self.case.is_row else "float32"

    @property
    def computes(self) -> str:
        return "float32" if self.case.how == "fp32" else "bfloat16"


def subject_of(case: Case) -> Subject:
    import torch

    if case.is_row:
        from batchfit._plan.models import build, shape_of
        from batchfit._plan.pure.settings import settings_for
        from batchfit._plan.workloads import workload_of

        shape = shape_of(case.model)
        setting = next(one for one in settings_for(shape.task) if one.name == case.how)
        kept = json.loads((RESULTS / case.file).read_text(encoding="utf-8"))
        work = workload_of(shape, setting, kept["plans"][case.model]["seq_len"])
        return Subject(case, work, lambda dtype: build(shape, dtype=getattr(torch, dtype)))
    import zoo

    def made(dtype: str) -> Any:
        model = zoo.make(case.model, case.how, build_on="meta").model
        return model.to(getattr(torch, dtype))

    return Subject(case, zoo.make(case.model, case.how, build_on="meta"), made)


def state_bytes(subject: Subject) -> int:
    """Weights, their gradients and AdamW's two moments, in the dtype that each has in this step."""
    parameters = list(subject.workload.model.parameters())
    whole = sum(one.numel() * one.element_size() for one in parameters)
    learning = sum(one.numel() * one.element_size() for one in parameters if one.requires_grad)
    return whole + 3 * learning


# -- those that are asked; each answers for the whole peak (`peak_bytes`) or for less (`state_bytes`)


def ask_batchfit(subject: Subject, size: int) -> Iterator[Found]:
    import batchfit

    made = batchfit.predict_batch_size(
        subject.workload, budget=f"{subject.case.cap}GiB", gpu="h200", margin=0.0
    )
    yield {"way": "predict_batch_size", "batch_size": made.batch_size, "peak_bytes": made.peak_bytes_at(size)}


def ask_kitsune(subject: Subject, size: int) -> Iterator[Found]:
    from kitsune.predict import predict_memory

    if not subject.case.is_full:
        yield _kitsune_lora(subject, size)
        return
    gpu = KITSUNE_GPUS[subject.case.cap]
    model = subject.plain(subject.weights)
    options: Found = {"dtype": subject.computes, "optimizer": "adamw", "training": True, "gpu": gpu}

    def read(way: str, ask: Callable[..., Any]) -> Found:
        at = ask(batch_size=size, **options)
        most = ask(batch_size=1, find_max_batch_size=True, **options)
        return {
            "way": way,
            "batch_size": most.max_batch_size,
            "peak_bytes": at.total_bytes,
            "activation_bytes": at.activation_bytes,
        }

    yield read("predict_memory", partial(predict_memory, model, subject.inputs))
    with tempfile.TemporaryDirectory() as folder:
        from kitsune.predict import predict_hf_memory

        model.config.save_pretrained(folder)
        tokens = subject.inputs[0] if len(subject.inputs) == 1 else None
        yield read("predict_hf_memory", partial(predict_hf_memory, folder, seq_len=tokens))


def _kitsune_lora(subject: Subject, size: int) -> Found:
    """It searches no batch size here: it is asked size by size, as its own search would."""
    from kitsune.predict import estimate_lora_memory
    from kitsune.predict.gpu_database import get_gpu_spec
    from kitsune.predict.lora_estimator import LoRAConfig

    quantised = subject.case.how.startswith("QLoRA")
    config = LoRAConfig(rank=16, target_modules=LORA_LAYERS, use_qlora=quantised, optimizer="adamw")
    # For QLoRA it takes an eighth of the weights that it is given: those of fp32.
    model = subject.plain("float32" if quantised else "bfloat16")
    room = get_gpu_spec(KITSUNE_GPUS[subject.case.cap]).usable_vram_gb * GIB

    def at(batch: int) -> Any:
        return estimate_lora_memory(model, subject.inputs, batch, dtype="bfloat16", config=config)

    low, high = 0, KITSUNE_MOST + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if at(middle).total_bytes <= room else (low, middle)
    made = at(size)
    return {
        "way": "estimate_lora_memory",
        "batch_size": low,
        "peak_bytes": made.total_bytes,
        "activation_bytes": made.activation_bytes,
    }


def ask_accelerate(subject: Subject, size: int) -> Iterator[Found]:
    """`accelerate estimate-memory` without the hub: what it does with the model, in full precision."""
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    if not subject.case.is_full:
        return
    whole, _ = calculate_maximum_sizes(subject.plain("float32"))
    precision = "float32" if subject.case.how == "fp32" else "float16"
    used = estimate_training_usage(whole, precision)
    yield {"way": f"estimate-memory, {precision}, training with Adam", "state_bytes": max(used.values())}


def ask_deepspeed(subject: Subject, size: int) -> Iterator[Found]:
    if not subject.case.is_full:
        return
    with contextlib.redirect_stdout(io.StringIO()):
        from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs as zero3
        from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs as zero2

    # Not `..._all_live`: it tells parameters apart by their addresses, and these have none.
    model = subject.plain("float32")
    count = sum(one.numel() for one in model.parameters())
    largest = max(sum(p.numel() for p in one.parameters(recurse=False)) for one in model.modules())
    yield {"way": "ZeRO-2, one GPU", "state_bytes": zero2(count, cpu_offload=False)[1]}
    on_gpu = zero3(count, largest, cpu_offload=False, cpu_offload_params=False)[1]
    yield {"way": "ZeRO-3, one GPU", "state_bytes": on_gpu}


def ask_hf_mem(subject: Subject, size: int) -> Iterator[Found]:
    """It reads the header of the file of weights from the hub; here, the one that such a file would have."""
    from hf_mem.safetensors.metadata import parse_safetensors_metadata

    if not subject.case.is_full:
        return
    dtypes = {"torch.float32": "F32", "torch.bfloat16": "BF16", "torch.int64": "I64"}
    model, header, seen = subject.plain(subject.weights), {}, set()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if id(tensor) not in seen:
            header[name] = {"dtype": dtypes[str(tensor.dtype)], "shape": list(tensor.shape)}
        seen.add(id(tensor))
    read = parse_safetensors_metadata(raw_metadata={"Transformer": header})
    yield {"way": "weights, for inference", "weight_bytes": read.bytes_count}


ASKED: dict[str, Callable[[Subject, int], Iterator[Found]]] = {
    "batchfit": ask_batchfit,
    "torch-kitsune": ask_kitsune,
    "accelerate": ask_accelerate,
    "deepspeed": ask_deepspeed,
    "hf-mem": ask_hf_mem,
}


def run(out: Path, only: list[str] | None) -> None:
    found: Found = json.loads(out.read_text()) if out.exists() else {"cases": {}}
    found["about"] = {
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in PACKAGES},
    }
    for case in CASES:
        if only and case.name not in only:
            continue
        kept = found["cases"].setdefault(case.name, {"answers": {}})
        kept |= {"truth": truth_of(case), "model": case.model, "how": case.how, "cap_gib": case.cap}
        subject = subject_of(case)
        kept["state_bytes"] = state_bytes(subject)
        for name, ask in ASKED.items():
            if name in kept["answers"]:
                continue
            begun = time.perf_counter()
            answers = list(ask(subject, kept["truth"]["measured_at"]))
            kept["answers"][name] = {"said": answers, "seconds": time.perf_counter() - begun}
            print(case.name, name, json.dumps(answers), flush=True)
            keep(out, found)


# -- the page


def nearest(said: list[Found], key: str, true: float) -> Found | None:
    """Of what a tool says, what is nearest to the truth."""
    told = [one for one in said if one.get(key) is not None]
    return min(told, key=lambda one: abs(one[key] / true - 1), default=None)


def errors(found: Found, name: str, key: str) -> list[float]:
    """Of one tool over all cases: how far its answer is from the truth, as a share of it."""
    shares = []
    for one in found["cases"].values():
        true = one["truth"][key]
        best = nearest(one["answers"][name]["said"], key, true)
        if best is not None:
            shares.append(best[key] / true - 1)
    return shares


def _said(best: Found | None, key: str, true: float) -> str:
    if best is None:
        return "-"
    value = f"{best[key] / GIB:.2f}" if key.endswith("_bytes") else f"{best[key]}"
    share = best[key] / true
    return f"{value} ({share - 1:+.1%})" if share < 3 else f"{value} ({share:.0f} times)"


def _called(one: Found) -> str:
    hows = {"fp32": "fp32, AdamW", "bf16": "bf16 autocast, AdamW"}
    return f"{one['model']}, {hows.get(one['how'], one['how'])}"


def summarised(found: Found, name: str, key: str) -> str:
    """`0.0%, 2.3%`: the median and the worst of its errors."""
    shares = [abs(one) for one in errors(found, name, key)]
    return f"{_off(median(shares))}, {_off(max(shares))}" if shares else "-"


def _off(share: float) -> str:
    return f"{share:.1%}" if share < 2 else f"{share + 1:.0f} times"


def page(found: Found) -> str:
    """The dated page; every figure comes from the JSON."""
    versions = ", ".join(f"{name} {one}" for name, one in found["about"]["packages"].items())
    files = ", ".join(
        f"`{name}`" for name in sorted({one["truth"]["file"] for one in found["cases"].values()})
    )
    lines = [
        "# Memory estimators beside an H200",
        "",
        f"Made by `python benchmarks/plan_peers.py run`, without a GPU; python {found['about']['python']}, "
        f"{versions}. Truths: an H200 under a cap, torch 2.11, from {files}.",
        "",
        "Each tool was called as its documentation says, on the same model on the meta device. Of several "
        "ways to ask, the answer nearest to the truth counts. Other releases may answer otherwise. batchfit "
        "answers without its margin here; by default it leaves 2 % free.",
        "",
        "| tool | answers for | batch size: median error, worst | peak: median error, worst |",
        "|---|---|---|---|",
    ]
    scope = {
        "batchfit": "one training step, by a trace",
        "torch-kitsune": "one training step, by a formula",
        "accelerate": "states only: weights, gradients, Adam; no batch size",
        "deepspeed": "states only: weights, gradients, Adam; no batch size",
        "hf-mem": "weights only (inference); no batch size",
    }
    for name, what in scope.items():
        sizes, peaks = (summarised(found, name, key) for key in ("batch_size", "peak_bytes"))
        lines.append(f"| {name} | {what} | {sizes} | {peaks} |")
    lines += _largest(found) + _peaks(found) + _states(found) + _CALLS
    return "\n".join(lines) + "\n"


def _largest(found: Found) -> list[str]:
    lines = [
        "",
        "## The largest batch size",
        "",
        "| model | GiB | trained | batchfit | torch-kitsune |",
        "|---|---|---|---|---|",
    ]
    for one in found["cases"].values():
        true = one["truth"]["batch_size"]
        told = [
            _said(nearest(one["answers"][name]["said"], "batch_size", true), "batch_size", true)
            for name in ("batchfit", "torch-kitsune")
        ]
        lines.append(f"| {_called(one)} | {one['cap_gib']} | {true} | {' | '.join(told)} |")
    return lines


def _peaks(found: Found) -> list[str]:
    lines = [
        "",
        "## The peak of training at a batch size, GiB",
        "",
        "| model | batch size | measured | batchfit | torch-kitsune | activations by torch-kitsune |",
        "|---|---|---|---|---|---|",
    ]
    for one in found["cases"].values():
        true = one["truth"]["peak_bytes"]
        mine, theirs = (
            nearest(one["answers"][name]["said"], "peak_bytes", true)
            for name in ("batchfit", "torch-kitsune")
        )
        held = "-" if theirs is None else f"{theirs['activation_bytes'] / GIB:.3f}"
        lines.append(
            f"| {_called(one)} | {one['truth']['measured_at']} | {true / GIB:.2f} "
            f"| {_said(mine, 'peak_bytes', true)} | {_said(theirs, 'peak_bytes', true)} | {held} |"
        )
    return lines


def _states(found: Found) -> list[str]:
    lines = [
        "",
        "## States only, GiB",
        "",
        "Weights, gradients and AdamW's moments as this step holds them, counted from its parameters, beside "
        "tools that answer for those. The last column is what they leave out: the share of the measured peak "
        "that is not states. hf-mem answers for weights alone.",
        "",
        "| model | states | accelerate | DeepSpeed | hf-mem (weights) | of the peak, not states |",
        "|---|---|---|---|---|---|",
    ]
    for one in found["cases"].values():
        true = one["state_bytes"]
        told = [
            _said(nearest(one["answers"][name]["said"], "state_bytes", true), "state_bytes", true)
            for name in ("accelerate", "deepspeed")
        ]
        weights = one["answers"]["hf-mem"]["said"]
        held = f"{weights[0]['weight_bytes'] / GIB:.2f}" if weights else "-"
        rest = 1 - true / one["truth"]["peak_bytes"]
        lines.append(f"| {_called(one)} | {true / GIB:.2f} | {' | '.join(told)} | {held} | {rest:.0%} |")
    return lines


_CALLS = [
    "",
    "## How each was called",
    "",
    "- batchfit: `predict_batch_size(workload, budget=..., gpu='h200', margin=0)` and `peak_bytes_at(size)`.",
    "- torch-kitsune: `predict_memory(model, shape, batch_size, dtype, optimizer='adamw', gpu=...)` with the "
    "model and its head, and `predict_hf_memory` with its configuration, as for a model of the hub; with "
    "`find_max_batch_size=True`. GPUs are those of that size in its table (T4, RTX 4090, A100), of which it "
    "leaves 0.5 GB free. It knows no autocast: weights in fp32, `dtype='bfloat16'`. LoRA: "
    "`estimate_lora_memory`, which searches no batch size, so it was asked size by size up to 4096, where "
    "its own search ends. For token models its forward pass on the meta device gets floats in place of token "
    "ids and fails, so it falls back to a formula in which the length of a sequence hardly counts.",
    "- accelerate: the functions behind `accelerate estimate-memory` (`calculate_maximum_sizes`, "
    "`estimate_training_usage`) on the model in fp32, since the command itself asks the hub. It has a row "
    "float16 for mixed precision, which counts with bf16, and no LoRA.",
    "- DeepSpeed: `estimate_zero2_model_states_mem_needs` and `estimate_zero3_model_states_mem_needs`, one "
    "GPU, no offload. They assume fp16 beside fp32 copies, and no frozen weights.",
    "- hf-mem: its parser of safetensors headers on the header that the model's file would have; the command "
    "reads it from the hub. It estimates inference.",
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("--out", type=Path, default=RESULTS / "plan_peers_202611.json")
    running.add_argument("--only", nargs="+")
    add_page(commands)
    given = parser.parse_args()
    if given.command == "run":
        run(given.out, given.only)
    else:
        write_page(given, page)


if __name__ == "__main__":
    main()
