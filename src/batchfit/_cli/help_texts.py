"""What `batchfit COMMAND --help` says above the flags: what it is for, and examples.

Rule: typer keeps these lines as they are, so none is wider than a terminal of 80 columns shows.
"""

from __future__ import annotations

from batchfit._cli.exits import MEANINGS, codes_of


# In the help text and not in the epilog: versions of typer differ in what they do to an epilog's lines.
def exit_codes(command: str = "") -> str:
    """The exit codes of a command, as its help lists them; without a command: all."""
    return "Exit codes:\n" + "\n".join(f"  {int(code):>3}  {MEANINGS[code]}" for code in codes_of(command))


MAIN_HELP = f"""\
Find the right batch size for a PyTorch program, and keep it from running out
of memory.

Examples:
  batchfit demo
  batchfit run -- python train.py --batch-size {{}}
  batchfit find train.py:make_workload --budget 24GiB
  batchfit predict train.py:make_workload --gpu h100
  batchfit explain train.py:make_workload --batch-size 32 --gpu h100
  batchfit plan Qwen/Qwen3-8B --gpu rtx4090,h100
  batchfit check train.py:make_workload --max-increase 2%
  batchfit why snapshot.pickle
  batchfit profile train.py:make_workload
  batchfit sweep sweep.yaml
  batchfit schedule show "0:256 20:512" --samples 50000 --epochs 60
  batchfit report fit.json -o report.html
  batchfit init train.py
  batchfit doctor

{exit_codes()}
"""

FIND_HELP = f"""\
Find the largest batch size that TARGET can run without running out of memory.

Any program will do, with no line changed: its command stands after --, with
{{}} in the place of the batch size. It is run a few steps at each size, in
processes of its own, and ended before it saves or uploads anything.

Sizes are really run, a few steps each, and the answer survives a stability
check (soak) of more steps. Model, optimizer and random state are restored
after every trial.

Examples:
  batchfit find -- python train.py --batch-size {{}}
  batchfit find --budget 24GiB -- torchrun --nproc-per-node 2 train.py --bs {{}}
  batchfit find --env BATCH_SIZE -- ./train.sh
  batchfit find --set train.yaml:data.batch_size -- python train.py train.yaml
  batchfit find train.py:make_workload
  batchfit find train.py:make_workload --budget 24GiB --multiple-of 8
  batchfit find mypackage.train:make --strategy grow --start 19 --attempts 8
  batchfit find train.py:make_workload --isolate --resume search.json
  batchfit find train.py:make_workload --json | jq .batch_size

where train.py has:
  def make_workload():
      ...
      return batchfit.training(model, optimizer, loss_fn, make_batch)

{exit_codes("find")}
"""

RUN_HELP = f"""\
Run any program with the largest batch size that fits.

The size is found first, as by `batchfit find --`, or remembered from an
earlier search for the same command, which one trial confirms. Then the
program runs for real: output, input, signals and exit code are its own. What
batchfit itself says goes to stderr.

With --restarts a program that is out of memory later on is started again with
a smaller size. Whether it goes on from a checkpoint is its own affair.

Examples:
  batchfit run -- python train.py --batch-size {{}}
  batchfit run --restarts 2 --margin 0.1 -- python train.py --batch-size {{}}
  batchfit run --budget 24GiB -- torchrun --nproc-per-node 2 train.py --bs {{}}
  batchfit run --size 48 --restarts 3 -- python train.py --batch-size {{}}
  batchfit run --out runs/7 -- python train.py --batch-size {{}} --output {{out}}
  batchfit run --dry-run -- python train.py --batch-size {{}}
  batchfit run --budget 2GiB -- python train.py

The last one has no place for a size: it is run as it is, and may use so much
memory (on a CPU: virtual memory, so that it is out of memory as a GPU is).

After the program has started, the exit code is the program's own, or 128 and
the number of the signal that ended it. Before:

{exit_codes("run")}
"""

PREDICT_HELP = f"""\
Predict the largest batch size of TARGET, for any GPU and without one.

The step is traced with fake tensors, which take no memory, and replayed
through a model of the CUDA allocator. On a GPU, and without --gpu, two small
sizes are run to correct it.

Any program will do, with no line changed: its command stands after --. It is
run on the CPU, a few small steps for real, and then traced as it runs.

Examples:
  batchfit predict train.py:make --gpu h100
  batchfit predict --gpu h100 -- python train.py --batch-size {{}}
  batchfit predict train.py:make --gpu h100 --gpu a100-40gb --gpu rtx4090
  batchfit predict train.py:make --budget 24GiB --budget 80GiB
  batchfit predict train.py:make --gpu h100 --json | jq .batch_size
  batchfit predict --list-gpus

{exit_codes("predict")}
"""

EXPLAIN_HELP = f"""\
Show the memory breakdown of a step of TARGET, and what would change it.

The peak with its phase and operation; weights, gradients, optimizer and
activations; the modules and source lines that hold the most; and the largest
batch with each change that may help. Traced: no GPU is needed.

Any program will do, with no line changed: its command stands after --. Only
changes of the allocator are tried then.

Examples:
  batchfit explain train.py:make --batch-size 32 --gpu h100
  batchfit explain --batch-size 32 --gpu h100 -- python train.py --bs {{}}
  batchfit explain train.py:make --batch-size 32 --budget 24GiB --plot s.svg

{exit_codes("explain")}
"""

CHECK_HELP = f"""\
Check that TARGET needs no more memory than its baseline, by source line.

The step is traced, as by `batchfit explain`: on any machine, without a GPU,
in seconds. The peak is compared with a baseline file that lies in git, and
the lines that changed it are named, the largest change first. It exits with 8
where the peak has grown by more than --max-increase, or is above --max-peak.

Without TARGET all targets of pyproject.toml are checked:
  [tool.batchfit.check]
  max-increase = "2%"
  targets = ["train.py:make", "evaluate.py:make"]

Examples:
  batchfit check train.py:make --batch-size 8 --update
  batchfit check train.py:make --max-increase 2%
  batchfit check train.py:make --batch-size 8 --max-peak 20GiB
  batchfit check --markdown comment.md
  batchfit check --update -- python train.py --batch-size 8

{exit_codes("check")}
"""

WHY_HELP = f"""\
Say why a process was out of memory, from the snapshot that PyTorch wrote.

SNAPSHOT is a file of torch.cuda.memory._dump_snapshot or batchfit.record_oom,
of one rank or of several. Shown are the request that failed, what was live,
cached, fragmented and held by others, who held it, what grew from step to
step, and what other settings of the allocator would have done.

Nothing in the file is run: it may be a stranger's. No GPU is needed.

Examples:
  batchfit why snapshot.pickle
  batchfit why snapshot.pickle --gpu h100 --batch-size 32
  batchfit why oom_rank*.pickle --report why.html
  batchfit why snapshot.pickle.gz --json | jq .causes

{exit_codes("why")}
"""

PLAN_HELP = f"""\
Show which settings of a model fit on which GPU, before anybody rents one.

Rows are settings (full, LoRA, QLoRA; checkpointing; optimizers), columns are
GPUs, cells the largest microbatch per GPU with its peak, and how fast it
would be beside the best row. Nothing is downloaded or run: the model is built
from its configuration, without memory, and traced.

Examples:
  batchfit plan Qwen/Qwen3-8B --gpu rtx4090,a100-80gb,h100
  batchfit plan llama-3.1-8b --gpu h100 --seq-len 4096 --global-batch 128
  batchfit plan gpt2 --gpu t4,l4 --price t4=0.35,l4=0.8
  batchfit plan my-model/config.json --gpu rtx3090 --method lora --paste trl
  batchfit plan train.py:make_workload --gpu mygpu=20GiB
  batchfit plan --list-models

{exit_codes("plan")}
"""

PROFILE_HELP = f"""\
Measure the throughput of TARGET by batch size, and recommend one.

Any program will do, with no line changed: its command stands after --, with
{{}} in the place of the batch size. Each size is a run of it that ends early.

Steps are warmed up and timed until the time is known, at few sizes. The
recommended size is the smallest within --within of the best throughput: past
it a larger batch only takes more memory. What holds throughput back is named,
with its figures and what to change.

Examples:
  batchfit profile -- python train.py --batch-size {{}}
  batchfit profile train.py:make
  batchfit profile train.py:make --budget 24GiB --plot throughput.png
  batchfit profile train.py:make --sizes 16 --sizes 32 --sizes 64
  batchfit profile train.py:make --target-batch-size 4096 --json > found.json

{exit_codes("profile")}
"""

SWEEP_HELP = f"""\
Find the largest batch size for every configuration, and measure there.

FILE names a factory, the knobs and their values, and how to search. Each
configuration stands for itself; one that fails is recorded, and the sweep
goes on. The result is saved after each; --resume goes on with a sweep that
was stopped.

Examples:
  batchfit sweep sweep.yaml --dry-run
  batchfit sweep sweep.yaml --output results.json --csv results.csv
  batchfit sweep sweep.yaml --resume
  batchfit sweep sweep.yaml --set start_from.max_crops=12
  batchfit sweep sweep.yaml --set batch_size=32 --set auto=false
  batchfit sweep sweep.yaml --devices cuda:0,cuda:1
  batchfit sweep sweep.yaml --engine ray --set num_gpus=1
  torchrun --nproc-per-node 2 -m batchfit sweep sweep.yaml
  batchfit report sweep-results.json

where sweep.yaml has:
  factory: model.py:make      # make(max_crops=...) returns a workload
  measure: model.py:accuracy  # accuracy(workload, size) returns a mapping
  batch_size: 64
  knobs:
    max_crops: [2, 4, 8, 12, 13]
  estimate:
    max_crops: crops

or, for any program, a command in the place of the factory:
  command: python exp.py --batch_size {{}} --max_crops {{max_crops}}
  measure: command  # run to its end at the size; it prints a JSON object
  knobs:
    max_crops: [2, 4, 8, 12, 13]

{exit_codes("sweep")}
"""

REPORT_HELP = f"""\
Make one HTML page of result files: charts, tables, verdict.

Results are what --json and --output of find, predict, explain, profile, sweep
and schedule show write, one or several side by side. It needs no network.

Examples:
  batchfit report fit.json
  batchfit report prediction.json fit.json -o gpt.html --title "GPT-2 small"
  batchfit report sweep-results.json -o sweep.html
  batchfit report fit.json --plot memory.png

{exit_codes("report")}
"""

INIT_HELP = f"""\
Show the few lines that let FILE use batchfit, as a diff. FILE is never run.

Known are training loops in plain PyTorch (batches then run in microbatches
that fit), Lightning, Hugging Face's Trainer, Accelerate's
find_executable_batch_size, and torchtune's configs.

Examples:
  batchfit init train.py
  batchfit init train.py | git apply
  batchfit init train.py --write
  batchfit init llama3_lora.yaml

{exit_codes("init")}
"""

DOCTOR_HELP = f"""\
Show what batchfit finds on this machine, and test that it works here.

Versions, devices, allocator settings, optional packages, and a small find
under virtual memory. Of each feature it says whether it works with the torch
that is installed, works with a caveat, or is not here, and why. Exits with 1
if something is broken.

Examples:
  batchfit doctor
  batchfit doctor --json > doctor.json

{exit_codes("doctor")}
"""

DEMO_HELP = f"""\
Find the largest batch of a small GPT, and predict it for other GPUs.

Without a GPU it runs on the CPU, under virtual memory with OOMs like a
GPU's. Under a minute. It times the sizes up to there too, and ends with a
report of it all as an HTML page.

Examples:
  batchfit demo
  batchfit demo --output fit.json --report demo.html

{exit_codes("demo")}
"""
