"""A sweep over prompt lengths on one GPU, generation in every trial, beside peers and a bracketed truth.

    python benchmarks/sweep_gpu.py run --out run.json --deadline-s 500   # again: goes on where it was
    python benchmarks/sweep_gpu.py page run.json --to page.md            # every figure is in the JSON
    python benchmarks/sweep_gpu.py run --smoke --out smoke.json          # a tiny model, no GPU

A Llama-shaped model of about 1 B parameters in bf16 with random weights; 256 new tokens for every sample;
prompts of 128 to 2048 tokens, under a cap of 24 GiB. Rows, each in a process of its own: `guided/PROMPT` and
`grow/PROMPT` are `batchfit.sweep` with its defaults (grow with the estimate 512 / prompt), which measures at
the size found; `accelerate/PROMPT` is Accelerate's `find_executable_batch_size`, which calls `generate` twice
at each size. `truth/PROMPT` then tries sizes between the largest that ran and the smallest that did not until
they are within 2 %. Seconds are those of the searches: models are made before the clock starts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from pages import add_page, write_page
from rows import Ahead, Results, my_turn, run_rows


class Setup(NamedTuple):
    """What is run: on a GPU, or small enough for a CPU."""

    prompts: tuple[int, ...]
    new_tokens: int
    budget: str
    batch_size: int  # the upper limit, and where Accelerate begins
    shape: dict[str, int]


GPU = Setup(
    (128, 512, 2048),
    256,
    "24GiB",
    2048,
    {
        "vocab_size": 32000,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
)
SMOKE = Setup(
    (8, 32),
    4,
    "1MiB",
    64,
    {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
)
WAYS = ("guided", "grow", "accelerate")
STEPS = 2  # of a trial that is not ours; each generates every token, and takes the same memory


def setup(smoke: bool) -> Setup:
    return SMOKE if smoke else GPU


def rows(smoke: bool) -> list[str]:
    return [f"{kind}/{prompt}" for kind in (*WAYS, "truth") for prompt in setup(smoke).prompts]


def made(model: Any, prompt: int, given: Setup) -> Any:
    """The workload at one prompt length."""
    import torch

    import batchfit

    def make_batch(size: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(2, given.shape["vocab_size"], (size, prompt), device=model.device)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    return batchfit.generation(model, make_batch, max_new_tokens=given.new_tokens, do_sample=False)


def model_of(given: Setup, smoke: bool) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = LlamaConfig(
        **given.shape, max_position_embeddings=4096, pad_token_id=0, eos_token_id=1, tie_word_embeddings=True
    )
    with torch.device("cpu" if smoke else "cuda"):
        model = LlamaForCausalLM(config)
    return model.eval() if smoke else model.eval().to(torch.bfloat16)


def swept(way: str, prompt: int, given: Setup, smoke: bool) -> Results:
    """`batchfit.sweep` of one configuration: each is searched for by itself, however many there are."""
    import torch

    import batchfit

    model = model_of(given, smoke)

    def measure(workload: Any, size: int) -> Results:
        begun = time.perf_counter()
        workload.step(size)
        if not smoke:
            torch.cuda.synchronize()
        return {"tokens_per_s": size * given.new_tokens / (time.perf_counter() - begun)}

    result = batchfit.sweep(
        lambda prompt: made(model, prompt, given),
        {"prompt": [prompt]},
        batch_size=given.batch_size,
        strategy=way,
        estimate={"prompt": f"min(1, {given.prompts[len(given.prompts) // 2]} / prompt)"}
        if way == "grow"
        else None,
        measure=measure,
        budget=given.budget,
    )
    (record,) = result.records
    return {
        "size": record.batch_size_used,
        "sizes": [[trial.size, trial.fits] for trial in record.trials],
        "trials_s": [trial.elapsed_s for trial in record.trials],
        "ooms": record.ooms,
        "measure_retries": record.measure_retries,
        "tokens_per_s": record.measures.get("tokens_per_s"),
        "find_s": record.find_s,
        **({"error": record.error} if record.error else {}),
    }


def with_accelerate(prompt: int, given: Setup, smoke: bool) -> Results:
    """Accelerate's decorator around the same steps, as its documentation has it."""
    from accelerate.utils import find_executable_batch_size

    model = model_of(given, smoke)
    work = made(model, prompt, given)
    sizes: list[list[Any]] = []
    begins: list[float] = []

    def run(batch_size: int) -> int:
        sizes.append([batch_size, False])
        begins.append(time.perf_counter())
        for _ in range(STEPS):
            work.step(batch_size)
        sizes[-1][1] = True
        return batch_size

    begun = time.perf_counter()
    with limited(model, given):
        size = find_executable_batch_size(run, starting_batch_size=given.batch_size)()
    ended = time.perf_counter()
    return {
        "size": size,
        "sizes": sizes,
        "trials_s": [two - one for one, two in pairwise((*begins, ended))],
        "ooms": sum(not fits for _, fits in sizes),
        "find_s": ended - begun,
    }


def limited(model: Any, given: Setup) -> contextlib.AbstractContextManager[None]:
    from batchfit._engine.device.resolve import resolve_device
    from batchfit._units import parse_bytes

    device = resolve_device(None, near=[model])
    return device.limit(min(parse_bytes(given.budget), device.total_bytes()))


def truth(prompt: int, given: Setup, smoke: bool, good: int, bad: int | None) -> Results:
    """The largest size that runs, between sizes of which one ran and the next did not."""
    import batchfit

    work = made(model_of(given, smoke), prompt, given)

    def fits(size: int) -> bool:
        with contextlib.suppress(batchfit.errors.NothingFitsError):
            batchfit.find_batch_size(
                work, min_size=size, max_size=size, steps=STEPS, soak_steps=0, budget=given.budget
            )
            return True
        return False

    tried = 0
    while bad is None or bad - good > max(1, good // 50):
        if bad is None and good >= given.batch_size:
            break
        size = min(given.batch_size, good + max(1, good // 50)) if bad is None else (good + bad) // 2
        tried += 1
        if fits(size):
            good = size
        else:
            bad = size
    return {"fits": good, "does_not": bad, "tried": tried}


def bracket(results: Results, prompt: str) -> tuple[int, int | None]:
    """What the sweeps have shown already: the largest that always ran, and the least above that did not."""
    sizes = [one for way in WAYS for one in results[f"{way}/{prompt}"]["sizes"]]
    ran_out = {size for size, fits in sizes if not fits}
    good = max((size for size, fits in sizes if fits and size not in ran_out), default=1)
    return good, min((size for size in ran_out if size > good), default=None)


def one(row: str, given: argparse.Namespace) -> Results:
    my_turn("batchfit._sweep.sweep", "accelerate", "transformers.models.llama.modeling_llama")
    kind, _, prompt = row.partition("/")
    wanted = setup(given.smoke)
    if kind == "truth":
        results = json.loads(given.out.read_text())
        return truth(int(prompt), wanted, given.smoke, *bracket(results, prompt))
    if kind == "accelerate":
        return with_accelerate(int(prompt), wanted, given.smoke)
    return swept(kind, int(prompt), wanted, given.smoke)


def about(given: argparse.Namespace) -> Results:
    import torch
    import transformers

    on_gpu = torch.cuda.is_available() and not given.smoke
    wanted = setup(given.smoke)
    return {
        "device": torch.cuda.get_device_name(0) if on_gpu else "CPU (a tiny model)",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "command": "python benchmarks/sweep_gpu.py run" + (" --smoke" if given.smoke else ""),
        "prompts": list(wanted.prompts),
        "new_tokens": wanted.new_tokens,
        "budget": wanted.budget,
        "batch_size": wanted.batch_size,
    }


def not_yet(row: str, results: Results) -> str:
    """A truth begins where the searches ended."""
    kind, _, prompt = row.partition("/")
    missing = [way for way in WAYS if "sizes" not in results.get(f"{way}/{prompt}", {})]
    return f"after {', '.join(missing)}" if kind == "truth" and missing else ""


def run_all(given: argparse.Namespace) -> None:
    ahead = Ahead(__file__, "--out", str(given.out), smoke=given.smoke)
    run_rows(
        given.out,
        about(given),
        given.rows or rows(given.smoke),
        deadline_s=given.deadline_s,
        run=lambda row, _: ahead.run(row),
        not_yet=not_yet,
        prepare=ahead.prepare,
    )
    ahead.close()


def page(results: Results) -> str:
    """The dated page: every figure comes from the JSON."""
    told_of = results["about"]
    lines = [
        f"# A sweep over prompt lengths on a {told_of['device']}",
        "",
        f"Made by `{told_of['command']}`; torch {told_of['torch']}, transformers {told_of['transformers']}, "
        f"python {told_of['python']}.",
        "",
        f"Generation of {told_of['new_tokens']} tokens for every sample, under {told_of['budget']}, at most "
        f"{told_of['batch_size']} samples. `fits` is the largest size that ran {STEPS} times, with the",
        "smallest that did not; a share is of it. Then sizes tried, those that ran out, and seconds.",
        "",
        "| prompt | fits | " + " | ".join(f"{way}: size, share, sizes, OOMs, s" for way in WAYS) + " |",
        "|---|---|" + "---|" * len(WAYS),
    ]
    totals = {way: [0, 0, 0.0] for way in WAYS}
    missing: set[str] = set()
    for prompt in map(str, told_of["prompts"]):
        true = results.get(f"truth/{prompt}", {})
        most = true.get("fits")
        cells = []
        for way in WAYS:
            run = results.get(f"{way}/{prompt}", {})
            if run.get("size") is None:
                cells.append((run.get("error") or "not run").splitlines()[-1])
                missing.add(way)
                continue
            share = f"{run['size'] / most:.1%}" if most else "-"
            tried = len({size for size, _ in run["sizes"]})
            for index, amount in enumerate((tried, run["ooms"], run["find_s"])):
                totals[way][index] += amount
            cells.append(f"{run['size']}, {share}, {tried}, {run['ooms']}, {run['find_s']:.1f}")
        shown = "-" if most is None else f"{most} (not {true['does_not'] or 'more than allowed'})"
        lines.append(f"| {prompt} | {shown} | " + " | ".join(cells) + " |")
    ends = [
        "-" if way in missing else f"{tried} sizes, {ooms} OOMs, {seconds:.0f} s"
        for way, (tried, ooms, seconds) in totals.items()
    ]
    lines.append("| all | | " + " | ".join(ends) + " |")
    ours = {str(prompt): results.get(f"guided/{prompt}", {}) for prompt in told_of["prompts"]}
    measured = [
        f"{prompt}: {one['tokens_per_s']:.0f}" for prompt, one in ours.items() if one.get("tokens_per_s")
    ]
    retries = sum(one.get("measure_retries", 0) for one in ours.values())
    if measured:
        lines += [
            "",
            f"New tokens/s at the sizes of `guided`, by prompt: {', '.join(measured)}; {retries} OOMs.",
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("--rows", nargs="*")
    running.add_argument("--deadline-s", type=float, default=float("inf"))
    single = commands.add_parser("one")
    single.add_argument("row")
    for command in (running, single):
        command.add_argument("--out", type=Path, required=True)
        command.add_argument("--smoke", action="store_true")
    add_page(commands)
    given = parser.parse_args()
    if given.command == "run":
        run_all(given)
    elif given.command == "one":
        print(json.dumps(one(given.row, given)))
    else:
        write_page(given, page)


if __name__ == "__main__":
    main()
