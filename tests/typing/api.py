"""The public API as a user would write it. Read by mypy (`make check`), never run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, assert_type

import torch
from torch import nn
from torch.utils.data import TensorDataset

import batchfit
from batchfit import FitResult, Microbatcher, MicrobatchEvent, StepReport, Trial, Workload, errors
from batchfit.integrations import transformers as hf
from batchfit.integrations.lightning import BatchSizeFinder, BatchSizeSchedule, OomProofTraining, Tuner
from batchfit.integrations.ray import RayEngine

model = nn.Linear(4, 2)
optimizer = torch.optim.AdamW(model.parameters())
scaler = torch.amp.GradScaler("cuda")


def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def make_batch(size: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(size, 4), "y": torch.randint(0, 2, (size,))}


# Workloads: from a callable, a dataset, an example batch; with everything that can be said.
assert_type(batchfit.training(model, optimizer, loss_fn, make_batch), Workload)
assert_type(batchfit.training(model, None, loss_fn, make_batch(8)), Workload)
assert_type(
    batchfit.training(
        model,
        optimizer,
        lambda model, batch: model(batch[0]).mean(),
        TensorDataset(torch.randn(8, 4)),
        collate_fn=torch.utils.data.default_collate,
        autocast=torch.bfloat16,
        scaler=scaler,
        clip_norm=1,
        state=[torch.zeros(3)],
    ),
    Workload,
)
batchfit.training(model, optimizer, loss_fn, make_batch, autocast=torch.autocast("cuda", dtype=torch.float16))
batchfit.training(model, optimizer, loss_fn, make_batch, autocast=lambda: torch.autocast("cuda"))
assert_type(batchfit.inference(model, make_batch, autocast=torch.bfloat16), Workload)
assert_type(batchfit.inference(model, make_batch, forward=lambda model, batch: model(batch["x"])), Workload)
assert_type(batchfit.generation(model, make_batch, max_new_tokens=64, num_beams=4), Workload)


# A step of one's own.
def step(batch_size: int) -> float:
    return loss_fn(model, make_batch(batch_size)).item()


workload = Workload(step, state=[model, optimizer])
Workload(step, state=model)
Workload(step, state=())
Workload(step)
Workload(lambda batch_size: batch_size)
assert_type(workload.state, tuple[object, ...])
assert_type(workload.declared, bool)

# What must not pass: each line is an error, and mypy complains if it is not.
Workload("step")  # type: ignore[arg-type]
Workload(lambda: None)  # type: ignore[arg-type, misc]
Workload(step, [model])  # type: ignore[call-arg]
batchfit.training(model, optimizer, "loss", make_batch)  # type: ignore[arg-type]
batchfit.training(model, optimizer, loss_fn, make_batch, clip_norm="1")  # type: ignore[arg-type]
batchfit.training(model, optimizer, loss_fn, make_batch, autocast="bf16")  # type: ignore[arg-type]
batchfit.inference("model", make_batch)  # type: ignore[arg-type]
batchfit.generation(model, make_batch)  # type: ignore[call-arg]
batchfit.find_batch_size(workload, "24GiB")  # type: ignore[call-arg]
batchfit.find_batch_size(7)  # type: ignore[arg-type]
batchfit.find_batch_size("train.py:make", isolate="yes")  # type: ignore[arg-type]


# Profiling.
profile = batchfit.profile_throughput(workload, budget="24GiB", target_batch_size=4096, time_limit_s=60)
assert_type(profile, batchfit.ThroughputProfile)
assert_type(profile.recommended, int)
assert_type(profile.at(8).samples_per_s, float)
assert_type([one.evidence for one in profile.diagnosis], list[str])
batchfit.profile_throughput(step, sizes=[8, 16], loader=[torch.zeros(3)], on_point=lambda point: point.size)
batchfit.profile_throughput(workload, 8)  # type: ignore[call-arg]
batchfit.profile_throughput(workload, sizes=8)  # type: ignore[arg-type]


# Finding.
def show(trial: Trial, budget_bytes: int) -> None:
    assert_type(trial.size, int)
    assert_type(trial.peak_bytes, int | None)
    assert_type(trial.fits, bool)
    assert_type(trial.step_s, float | None)


fit = batchfit.find_batch_size(workload)
assert_type(fit, FitResult)
assert_type(batchfit.find_batch_size(step, budget="24GiB", max_size=512), FitResult)


def make() -> Workload:
    return workload


assert_type(batchfit.find_batch_size(make, isolate=True, timeout_s=60, resume=Path("s.json")), FitResult)
assert_type(batchfit.find_batch_size("train.py:make", isolate=True, resume="search.json"), FitResult)
assert_type(fit.trials_resumed, int)
assert_type(batchfit.find_batch_size(workload, store=True, fresh=True, key="mine").from_store, bool)
assert_type(
    batchfit.find_batch_size(
        workload,
        budget=2**30,
        max_size=1024,
        min_size=2,
        strategy="bisect",
        multiple_of=8,
        power_of_two=False,
        tolerance=0.0,
        start=64,
        attempts=5,
        steps=3,
        soak_steps=25,
        max_trials=20,
        time_limit_s=60,
        device=torch.device("cuda", 0),
        on_trial=show,
    ),
    FitResult,
)
assert_type(fit.batch_size, int)
assert_type(fit.trials, tuple[Trial, ...])
assert_type(fit.survived_steps, int)
assert_type(fit.stopped_because, str)
assert_type(fit.budget_bytes, int)
assert_type(fit.peak_bytes, int | None)
assert_type(fit.device, str)
assert_type(fit.elapsed_s, float)
assert_type(fit.sustained, bool)
assert_type(fit.to_json(), str)
assert_type(FitResult.from_json(Path("fit.json").read_text()), FitResult)


# Reports.
assert_type(batchfit.report(fit, "report.html"), Path)
assert_type(
    batchfit.report([fit, "prediction.json", Path("why.json")], Path("report.html"), title="mine"), Path
)
batchfit.report(fit, "report.html", "mine")  # type: ignore[call-arg]
batchfit.report(7, "report.html")  # type: ignore[arg-type]


# Microbatches.
def loss_of(micro: dict[str, torch.Tensor]) -> torch.Tensor:
    return loss_fn(model, micro)


temperature = nn.Parameter(torch.ones(()))
mb = Microbatcher(model)
assert_type(mb, Microbatcher)
Microbatcher(model, temperature, weight="attention_mask", budget="20GiB", microbatch_size=8)
Microbatcher(model, weight=lambda micro: (micro["labels"] != -100).sum(), on_zero_weight="skip")
Microbatcher(model, advice={"sum": "return a mean"}, compared="warn", generators=[torch.Generator()])
Microbatcher(
    model,
    split=lambda batch, sizes: batch.split(sizes),
    count=len,
    reduction="sum",
    batch_norm="exact",
    on_event=lambda event: print(event.kind, event.size_before, event.size_after, event.why),
    device=torch.device("cuda", 0),
)
events: list[MicrobatchEvent] = []
Microbatcher(model, on_event=events.append)
assert_type(events[0].kind, Literal["shrunk", "grown", "lowered", "retry", "skipped", "relearned"])
Microbatcher(model, lengths="attention_mask", pad_keys=["input_ids"], pad_dim=1, padding_side="left")
Microbatcher(model, lengths=lambda batch: batch["attention_mask"].sum(1))
mb.backward(loss_of, make_batch(64), lengths=[3, 4])
report = mb.backward(loss_of, make_batch(64), scaler=scaler)
assert_type(report, StepReport)
assert_type(report.outputs, Any)
mb.backward(lambda micro: (loss_of(micro), micro), make_batch(64))
assert_type(report.microbatch_sizes, tuple[int, ...])
assert_type(report.retries, int)
assert_type(report.peak_bytes, int | None)
assert_type(report.skipped, bool)
assert_type(mb.backward_cached(model, lambda rows: rows.square().mean(), torch.randn(8, 4)), StepReport)
assert_type(mb.step(optimizer, scaler=scaler, clip_norm=1.0, rollback=True), torch.Tensor | None)
mb.step([optimizer, optimizer])
logits: torch.Tensor = mb.map(model, torch.randn(8, 4))
assert_type(mb.state_dict(), dict[str, Any])
mb.load_state_dict(mb.state_dict())

Microbatcher(model, microbatch_size="auto")  # type: ignore[arg-type]
Microbatcher(model, reduction="none")  # type: ignore[arg-type]
Microbatcher("model")  # type: ignore[arg-type]
mb.backward(loss_of, make_batch(8), scaler)  # type: ignore[call-arg,arg-type]
mb.backward(make_batch(8), loss_of)  # type: ignore[arg-type]
mb.step(optimizer, scaler)  # type: ignore[call-arg]

# Schedules.
schedule = batchfit.StepBatchSizeConfig(step_size=20, gamma=2, max_batch_size=2048)
assert_type(schedule.gamma, int)
milestones = batchfit.MilestoneBatchSizeConfig(milestones="0:768 250B:1536", unit="tokens")
assert_type(milestones.milestones, tuple[tuple[int, int], ...])
assert_type(
    batchfit.MilestoneBatchSizeConfig.seesaw(256, decay="cosine", total=100),
    batchfit.MilestoneBatchSizeConfig,
)
changes: list[batchfit.ScheduleEvent] = []
scheduler = batchfit.BatchSizeScheduler(
    schedule, 256, lr=["sqrt", "none"], optimizer=optimizer, largest=1024, on_event=changes.append
)
batchfit.BatchSizeScheduler("0:256 20:512")
batchfit.BatchSizeScheduler(batchfit.load_schedule(Path("schedule.json")), initial_batch_size=256)
assert_type(scheduler.step(3), tuple[int, bool])
assert_type(scheduler.step(samples=4096), tuple[int, bool])
assert_type(scheduler.get_batch_size(3), int)
assert_type(scheduler.should_update(3), bool)
assert_type(scheduler.updates(samples=50_000, epochs=3), int)
assert_type(scheduler.state_dict(), dict[str, Any])
batchfit.BatchSizeScheduler(schedule, 256, None)  # type: ignore[call-arg]
batchfit.BatchSizeScheduler(schedule, "256")  # type: ignore[arg-type]

# A CPU that runs out of memory.
with batchfit.virtual_memory("2GiB") as memory:
    step(8)
    assert_type(memory.limit_bytes, int)
    assert_type(memory.allocated_bytes, int)
    assert_type(memory.peak_bytes, int)
    memory.reset_peak()
with batchfit.virtual_memory(2**30):
    pass

# Errors.
try:
    batchfit.find_batch_size(workload)
except errors.NothingFitsError as error:
    assert_type(error.size, int)
    assert_type(error.budget_bytes, int)
    assert_type(error.peak_bytes, int | None)
except errors.StepInterruptedError as error:
    assert_type(error.phase, Literal["gradients", "parameters", "scaler"])
    assert_type(error.moved, tuple[str, ...])
except errors.BatchfitError as error:
    text: str = str(error)

whole: list[Any] = [batchfit.__version__, *batchfit.__all__]

# The noise scale.
noise = batchfit.GradientNoise(model, decay_samples=10_000, mode="exact", min_steps=30)
by_noise = batchfit.NoiseBatchSizeConfig(max_batch_size=4096, use_bound=True)
batchfit.BatchSizeScheduler(by_noise, 256, noise=noise, throughput=profile)
batchfit.BatchSizeScheduler(by_noise, 256, noise=noise, throughput=lambda size: 2.0 * size)
batchfit.BatchSizeScheduler(by_noise, 256, noise=noise, throughput={256: 1.0})  # type: ignore[arg-type]
Microbatcher(model, microbatch_size=8, noise=noise)
noise.microbatch(8, share=0.5, scaler=scaler)
noise.total(norm=torch.tensor(1.0))
assert_type(noise.reading().scale, float | None)
noise.load_state_dict(noise.state_dict())

# A loader that changes its size.
loader = batchfit.ResizableLoader([1, 2, 3], 2, schedule=batchfit.StepBatchSizeConfig(step_size=1, gamma=2))
loader.batch_size = 4
loader.resize(8, defer=True)
assert_type(loader.batch_size, int)
assert_type(loader.progress.samples, int)
loader.load_state_dict(loader.state_dict())


# A whole program, run at the largest size at which it reaches its end.
def train(batch_size: int) -> str:
    return f"trained with {batch_size}"


ran = batchfit.run_largest(
    train,
    start=512,
    probe_steps=3,
    tolerance=0.05,
    reduce=None,
    state=[model, optimizer],
    key="a training",
    fresh=False,
    device="cpu",
    before_retry=lambda: None,
    on_run=lambda trial: trial.size,
)
assert_type(ran, batchfit.LargestRun[str])
assert_type(ran.value, str)
assert_type(ran.batch_size, int)
assert_type(ran.trials, tuple[Trial, ...])

# In Hugging Face's Trainer.
hf_options = hf.Options(budget="20GiB", schedule="0:8 100:16 step", lr="sqrt", search={"soak_steps": 25})
assert_type(hf_options.find, bool)
hf.adapt(object(), find=False)


# Sweeps.
def make_swept(max_crops: int, top_k: int = 2) -> Workload:
    return batchfit.generation(model, make_batch, max_new_tokens=8)


def make_step(width: int) -> Any:
    return step


def accuracy(workload: Workload, size: int) -> dict[str, float]:
    return {"accuracy": 0.5}


def accuracy_of(workload: Workload, size: int, max_crops: int) -> dict[str, float]:
    return {"accuracy": 0.5}


def on_event(event: batchfit.SweepEvent) -> None:
    assert_type(event.size, int | None)


swept = batchfit.sweep(make_swept, {"max_crops": [2, 4], "top_k": [1]}, batch_size=64, measure=accuracy)
assert_type(swept, batchfit.SweepResult)
assert_type(swept.summary, list[dict[str, Any]])
assert_type(swept.records[0], batchfit.SweepRecord)
assert_type(swept.records[0].batch_size_used, int | None)
batchfit.sweep(make_step, [{"width": 1}, {"width": 2}], batch_size=None, on_event=on_event)
batchfit.sweep(
    "model.py:make",
    {"max_crops": [2, 12]},
    mode="zip",
    strategy="grow",
    estimate={"max_crops": "crops"},
    measure=accuracy_of,
    start_from={"max_crops": 12},
    output=Path("out.json"),
    resume=True,
)
batchfit.sweep(make_swept, {"max_crops": [2]}, estimate=lambda configuration, size: size // 2, auto=True)
batchfit.sweep(make_swept, {"max_crops": [2]}, batches=3)  # type: ignore[call-arg]
batchfit.sweep(make_swept, {"max_crops": [2]}, devices=["cuda:0", 1])
batchfit.sweep(make_swept, {"max_crops": [2]}, engine="ray", num_gpus=0.5, num_cpus=2, max_retries=1)
batchfit.sweep(make_swept, {"max_crops": [2]}, engine=RayEngine(address="auto", num_gpus=1))
batchfit.report(swept, "sweep.html")
# Lightning's callbacks.
finder = BatchSizeFinder("power", budget="24GiB", margin=0.05, make_batch=make_batch)
assert_type(finder.result, FitResult | None)
assert_type(finder.optimal_batch_size, int | None)
assert_type(Tuner(object()).scale_batch_size(object(), max_trials=3, budget="1GiB"), int | None)
assert_type(OomProofTraining(weight="labels", rollback=True).retries, int)
assert_type(BatchSizeSchedule("0:256 20:512", lr="sqrt").scheduler, batchfit.BatchSizeScheduler | None)
