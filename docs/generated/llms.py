"""llms.txt and llms-full.txt: what a coding assistant needs, in the form that they read (llmstxt.org).

Rules: commands, functions and their sentences come from the code; names that are written here are checked
against it by tests/test_reference.py. llms.txt stays under 7 KB.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from batchfit._cli.exits import MEANINGS
from generated import api, cli

DOCS = Path(__file__).parent.parent
# What to read of the JSON of each command, by result.
READ = {
    "find": ("FitResult", "batch_size", "peak_bytes", "budget_bytes", "stopped_because", "trials"),
    "predict": ("Prediction", "batch_size", "peak_bytes", "peak_phase", "based_on", "unseen"),
    "explain": ("MemoryExplanation", "peak_bytes", "largest", "kinds", "modules", "what_ifs"),
    "check": ("MemoryCheck", "passed", "peak_bytes", "baseline_bytes", "lines"),
    "why": ("OomExplanation", "causes", "requested_at", "lines", "growth", "settings"),
    "profile": ("ThroughputProfile", "recommended", "points", "diagnosis", "reason"),
    "sweep": ("SweepResult", "summary", "records", "planned"),
}
EXACT = {  # one invocation per command, that answers and ends
    "find": "batchfit find train.py:make_workload --budget 24GiB --json",
    "run": "batchfit run -- python train.py --batch-size {}",
    "predict": "batchfit predict train.py:make_workload --gpu h100 --json",
    "explain": "batchfit explain train.py:make_workload --batch-size 32 --gpu h100 --json",
    "check": "batchfit check train.py:make_workload --max-increase 2%",
    "why": "batchfit why snapshot.pickle --json",
    "profile": "batchfit profile train.py:make_workload --json",
    "sweep": "batchfit sweep sweep.yaml --output results.json --json",
    "report": "batchfit report fit.json -o report.html",
    "init": "batchfit init train.py",
    "doctor": "batchfit doctor --json",
    "demo": "batchfit demo",
    "schedule show": 'batchfit schedule show "0:256 20:512" --samples 50000 --epochs 60 --json',
}
FUNCTIONS = (
    "training",
    "inference",
    "generation",
    "find_batch_size",
    "predict_batch_size",
    "explain_memory",
    "check_memory",
    "profile_throughput",
    "sweep",
    "run_largest",
    "load_schedule",
    "virtual_memory",
)
CLASSES = {
    "Microbatcher": ("backward", "map", "step"),
    "ResizableLoader": ("resize",),
    "BatchSizeScheduler": ("step",),
    "GradientNoise": ("reading",),
}
LINKS = {
    "CUDA out of memory: start here": "how-to/out-of-memory.md",
    "Quickstart": "start/quickstart.md",
    "Concepts and glossary": "start/concepts.md",
    "Command line, every flag": "reference/cli.md",
    "Result fields and JSON schemas": "reference/results.md",
    "Errors and exit codes": "reference/errors.md",
    "Hugging Face Trainer": "reference/integrations/transformers.md",
    "Lightning": "reference/integrations/lightning.md",
}
_HEAD = """\
# batchfit

> Finds the largest batch size that a PyTorch program can run, predicts it for GPUs that are not here,
> explains a "CUDA out of memory", and runs batches that do not fit in microbatches with the same gradients.

`pip install batchfit`. Python 3.11, torch 2.6 or later. Most of it works without a GPU.

- TARGET is `file.py:name` or `package.module:name`: a function without required arguments that returns a
  workload (`batchfit.training(model, optimizer, loss_fn, make_batch)`). `find` and `run` take any program,
  unchanged: `batchfit find -- python train.py --batch-size {}`.
- `batch_size` in an answer is per process (per GPU). Times the number of ranks it is the global batch size.
- With `--json` the result is alone on stdout; progress and notes go to stderr. Sizes are samples, memory is
  bytes, times are seconds. Memory may be given as text such as `24GiB`.
- Do not lower a batch size by hand after an OOM: `batchfit init train.py` prints a diff that survives it.
"""


def llms_txt() -> str:
    """The short file."""
    known = {one.name: one for one in cli.commands()}
    lines = [_HEAD, "## Commands", ""]
    for name, command in known.items():
        kind, *keys = READ.get(name, ("",))
        reads = f" JSON ({kind}): {', '.join(f'`.{key}`' for key in keys)}." if kind else ""
        shown = EXACT.get(name) or next(iter(command.examples), f"batchfit {name} --help")
        lines.append(f"- `{shown}`: {command.purpose}{reads}")
    codes = ", ".join(f"{int(code)} {_briefly(meaning)}" for code, meaning in MEANINGS.items())
    lines += ["", f"Exit codes: {codes}.", "", "## Python", ""]
    for name in FUNCTIONS:
        lines.append(f"- `batchfit.{_short(name)}`: {api.summary(f'batchfit.{name}')}")
    for name, methods in CLASSES.items():
        shown = "".join(f", `.{one}`" for one in methods)
        lines.append(f"- `batchfit.{name}`{shown}: {api.summary(f'batchfit.{name}')}")
    lines += ["", "## Docs", ""]
    lines += [f"- [{title}]({page.removesuffix('.md')}.html)" for title, page in LINKS.items()]
    lines.append("- [All pages, all flags and the whole API in one file](llms-full.txt)")
    return "\n".join(lines) + "\n"


def _briefly(meaning: str) -> str:
    return re.split("[;:]", re.sub(r" \([^)]*\)", "", meaning))[0]


def _short(name: str) -> str:
    """The arguments that must be given, and what is returned."""
    node = api.definition(f"batchfit.{name}")
    assert isinstance(node, ast.FunctionDef)
    given = node.args
    least = [one.arg for one in given.args[: len(given.args) - len(given.defaults)]]
    pairs = zip(given.kwonlyargs, given.kw_defaults, strict=True)
    least += [f"{one.arg}=..." for one, default in pairs if default is None]
    returned = "" if node.returns is None else ast.unparse(node.returns)
    shown = f" -> {returned}" if re.fullmatch(r"[A-Z]\w+(\[T\])?", returned) else ""
    return f"{name}({', '.join([*least, '...'])}){shown}"


def llms_full_txt() -> str:
    """All pages, with commands and API written out."""
    from generated import filled

    parts = [llms_txt()]
    for folder in ("start", "tutorials", "how-to", "explanation", "reference"):
        for path in sorted((DOCS / folder).rglob("*.md")):
            text = filled(path.read_text(encoding="utf-8"))
            text = re.sub(r"^<!-- .* -->\n", "", text, flags=re.MULTILINE)
            parts.append(re.sub(r"^::: (\S+)\n(?:    .*\n?)*", _written_out, text + "\n", flags=re.MULTILINE))
    return "\n\n---\n\n".join(part.strip() for part in parts) + "\n"


def _written_out(block: re.Match[str]) -> str:
    return f"```text\n{api.as_text(block[1]).strip()}\n```\n"


def shown_part() -> str:
    """llms.txt, as a block of a page."""
    return f"```text\n{llms_txt().rstrip()}\n```"
