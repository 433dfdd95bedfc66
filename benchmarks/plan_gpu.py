"""A plan beside the GPU: does each row's batch train, is it the largest, and are the speeds in that ratio?

    python benchmarks/plan_gpu.py plan --out plan.json        # on any machine: the cells, without a GPU
    python benchmarks/plan_gpu.py run --out plan.json         # on an H200: trains each row; resumes
    python benchmarks/plan_gpu.py page plan.json --to results/plan_h200_202611.md

Each row is built for real, as `_plan/workloads.py` builds it without memory (random weights,
tokens at random, no padding), in a process of its own that has the GPU to itself, under a cap of 24 GiB
(`set_per_process_memory_fraction`). It trains ten steps at the predicted size; time is the median of the last
seven, memory their peak. Then up to three larger sizes, by 2 % and at least one sample, until one is out of
memory, or smaller ones until one is not. The margin is 0.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from pathlib import Path
from typing import Any

from pages import add_page, write_page
from rows import Ahead, keep, my_turn

CAP_GIB = 24
LENGTH = 1024
MODELS = ("Llama-3.2-1B", "gpt2")
STEPS, WARM, TRIALS = 10, 3, 4
DEVICE = "cuda"
GIB = 2**30


def planned(out: Path) -> None:
    """The cells of each model, and under which name a row is run."""
    import batchfit

    found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    for model in MODELS:
        made = batchfit.plan(model, gpus=f"h200={CAP_GIB}GiB", seq_len=LENGTH, margin=0.0, cache=False)
        found.setdefault("plans", {})[model] = json.loads(made.to_json())
        keep(out, found)


def built(model_name: str, row: str) -> tuple[Any, Any, Any]:
    """Model, optimizer and loss of a row, on the GPU."""
    import torch
    import transformers

    from batchfit._plan import workloads
    from batchfit._plan.models import shape_of
    from batchfit._plan.pure.settings import settings_for

    shape = shape_of(model_name)
    setting = next(one for one in settings_for(shape.task) if one.name == row)
    fields = {**shape.config, "use_cache": False}
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    plain = setting.weights == "fp32" and setting.method == "full"
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model: Any = transformers.AutoModelForCausalLM.from_config(config)
    model = model.to(torch.float32 if plain else torch.bfloat16).train()
    if setting.method == "qlora":
        model = _in_4bit(model)
    if setting.method != "full":
        import peft

        options = peft.LoraConfig(
            r=setting.rank, lora_alpha=2 * setting.rank, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        model = peft.get_peft_model(model, options)
    workloads._checkpoint(model, setting)
    optimizer = workloads._optimizer(setting, [one for one in model.parameters() if one.requires_grad])
    loss = workloads._chunked_loss if setting.loss == "chunked" else workloads._own_loss
    return model, optimizer, (loss, torch.bfloat16 if plain else None)


def _in_4bit(model: Any) -> Any:
    import bitsandbytes as bnb
    import torch
    from torch import nn

    head = model.get_output_embeddings()
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is not nn.Linear or layer is head:
                continue
            sizes = layer.in_features, layer.out_features
            options = {"compute_dtype": torch.bfloat16, "quant_type": "nf4"}
            made = bnb.nn.Linear4bit(*sizes, bias=layer.bias is not None, device="cpu", **options)
            made.weight = bnb.nn.Params4bit(
                layer.weight.data.cpu(), requires_grad=False, quant_type="nf4", module=made
            )
            if layer.bias is not None:
                made.bias = layer.bias
            setattr(parent, name, made)
    model.is_loaded_in_4bit = True
    return model.to(DEVICE)


def one(case: str, size: int) -> dict[str, Any]:
    """Train a row at its size, then at larger ones."""
    import torch

    model_name, row = case.split("/", 1)
    total = torch.cuda.get_device_properties(0).total_memory
    model, optimizer, (loss_of, dtype) = built(model_name, row)
    vocabulary = model.config.vocab_size
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(CAP_GIB * GIB / total)

    def step(n: int) -> None:
        ids = torch.randint(0, vocabulary, (n, LENGTH), device="cuda")
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            loss = loss_of(model, {"input_ids": ids, "labels": ids})
        loss.backward()
        optimizer.step()

    def trained(n: int) -> dict[str, Any]:
        seconds = []
        try:
            for at in range(STEPS):
                if at == WARM:
                    torch.cuda.reset_peak_memory_stats()
                begun = time.perf_counter()
                step(n)
                torch.cuda.synchronize()
                seconds.append(time.perf_counter() - begun)
        except torch.OutOfMemoryError:
            return {"size": n, "fits": False}
        finally:
            retries = torch.cuda.memory_stats()["num_alloc_retries"]
        return {
            "size": n,
            "fits": True,
            "step_s": statistics.median(seconds[WARM:]),
            "peak_bytes": torch.cuda.max_memory_allocated(),
            "reserved_bytes": torch.cuda.max_memory_reserved(),
            "alloc_retries": retries,
        }

    def fresh(n: int) -> dict[str, Any]:
        optimizer.zero_grad()
        gc.collect()
        torch.cuda.empty_cache()
        return trained(n)

    tried = [trained(size)]
    stride = max(1, size // 50)
    way = 1 if tried[0]["fits"] else -1
    while len(tried) < TRIALS and tried[-1]["fits"] is (way == 1) and tried[-1]["size"] + way * stride > 0:
        tried.append(fresh(tried[-1]["size"] + way * stride))
    return {"trials": tried}


def run(out: Path, deadline_s: float) -> int:
    """Run the rows that are missing, one after another; how many are left."""
    from importlib import metadata

    import torch

    found: dict[str, Any] = json.loads(out.read_text())
    packages = ("torch", "transformers", "peft", "bitsandbytes")
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in packages)
    found["about"] = f"{torch.cuda.get_device_name(0)}, {versions}"
    rows = found.setdefault("rows", {})
    cases = {
        f"{model}/{row['setting']}": row["cells"][0]["batch_size"]
        for model, plan in found["plans"].items()
        for row in plan["rows"]
        if row["cells"] and row["cells"][0]["batch_size"]
    }
    left = [case for case in cases if "trials" not in rows.get(case, {})]
    ends = time.monotonic() + deadline_s
    ahead = {case: Ahead(__file__, str(cases[case]), smoke=False) for case in left}
    while left and time.monotonic() < ends:
        case = left.pop(0)
        if left:
            ahead[left[0]].prepare(left[0])
        rows[case] = ahead[case].run(case)
        keep(out, found)
        print(case, json.dumps(rows[case])[:300], flush=True)
    for one_ahead in ahead.values():
        one_ahead.close()
    print(f"{len(left)} rows left")
    return len(left)


def page(found: dict[str, Any]) -> str:
    """The dated page; every figure comes from the JSON."""
    lines = [
        "# A plan beside an H200 with 24 GiB",
        "",
        f"{found['about']}. Made by `python benchmarks/plan_gpu.py`: {LENGTH:,} tokens a sample, "
        "random weights, no margin. The plan was made without a GPU. Each row then trained ten steps at the "
        "predicted size, "
        "and at larger ones until one was out of memory. Speeds are beside the fastest row.",
    ]
    for model, plan in found["plans"].items():
        lines += [
            "",
            f"## {model}",
            "",
            "| setting | predicted | largest that trained | peak, predicted beside measured "
            "| speed predicted | speed measured |",
            "|---" * 6 + "|",
        ]
        seen = []
        for row in plan["rows"]:
            answer = found["rows"].get(f"{model}/{row['setting']}", {})
            if "trials" not in answer:
                continue
            seen.append((row, answer["trials"]))
        rates = [trials[0]["size"] / trials[0]["step_s"] for _, trials in seen if trials[0]["fits"]]
        for row, trials in seen:
            cell = row["cells"][0]
            most = max((one["size"] for one in trials if one["fits"]), default=0)
            most = most if any(not one["fits"] for one in trials) else f"{most} or more"
            first = trials[0]
            if not first["fits"]:
                lines.append(
                    f"| {row['setting']} | {cell['batch_size']} | {most}: **out of memory** | - | - | - |"
                )
                continue
            off = cell["peak_bytes"] / first["peak_bytes"] - 1
            rate = first["size"] / first["step_s"] / max(rates)
            lines.append(
                f"| {row['setting']} | {cell['batch_size']} | {most} | {off:+.2%} "
                f"| {cell['speed']:.2f} | {rate:.2f} |"
            )
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("plan", "run"):
        command = commands.add_parser(name)
        command.add_argument("--out", type=Path, default=Path("plan_gpu.json"))
        command.add_argument("--deadline-s", type=float, default=500, help="no row begins after that")
    alone = commands.add_parser("one")
    alone.add_argument("case")
    alone.add_argument("size", type=int)
    add_page(commands)
    given = parser.parse_args()
    if given.command == "page":
        write_page(given, page)
    elif given.command == "plan":
        planned(given.out)
    elif given.command == "one":
        my_turn("torch", "transformers", "peft", "batchfit._plan.workloads")
        print(json.dumps(one(given.case, given.size)))
    elif run(given.out, given.deadline_s):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
