"""batchfit finds the right batch size for a PyTorch program and keeps it from running out of memory.

    import batchfit
    fit = batchfit.find_batch_size(batchfit.training(model, optimizer, loss_fn, make_batch))
    print(fit.batch_size)

Names are loaded when they are first used: `import batchfit` imports neither torch nor pydantic.
"""

from __future__ import annotations

__version__ = "0.1.0"

# name -> the module that defines it; `__all__`, `dir()` and the architecture test all read this.
_EXPORTS = {
    "BatchSizeScheduler": "batchfit._schedule.scheduler",
    "CosineBatchSizeConfig": "batchfit.schedules",
    "CustomBatchSizeConfig": "batchfit.schedules",
    "ExponentialBatchSizeConfig": "batchfit.schedules",
    "FirstSamples": "batchfit._engine.batch.first_samples",
    "FitResult": "batchfit.results",
    "GradientNoise": "batchfit._noise.gradient_noise",
    "LargestRun": "batchfit._rerun.run_largest",
    "IncreaseBatchSizeConfig": "batchfit.schedules",
    "LinearBatchSizeConfig": "batchfit.schedules",
    "MemoryCheck": "batchfit.results",
    "MemoryExplanation": "batchfit.results",
    "MicrobatchEvent": "batchfit._engine.sizing.pure.sizes",
    "Microbatcher": "batchfit._microbatch.microbatcher",
    "MilestoneBatchSizeConfig": "batchfit.schedules",
    "NoiseBatchSizeConfig": "batchfit.schedules",
    "Plan": "batchfit.results",
    "Prediction": "batchfit.results",
    "OomExplanation": "batchfit.results",
    "OomRecorder": "batchfit._why.record",
    "ScheduleEvent": "batchfit._schedule.pure.phases",
    "StepBatchSizeConfig": "batchfit.schedules",
    "ResizableLoader": "batchfit._loader.loader",
    "StepReport": "batchfit.results",
    "SweepEvent": "batchfit._sweep.pure.events",
    "SweepRecord": "batchfit.results",
    "SweepResult": "batchfit.results",
    "ThroughputProfile": "batchfit.results",
    "TokenBatchSampler": "batchfit._loader.token_sampler",
    "Trial": "batchfit.results",
    "Workload": "batchfit.workload",
    "check_memory": "batchfit._check.check",
    "errors": "batchfit.errors",
    "explain_memory": "batchfit._explain.explain",
    "explain_oom": "batchfit._why.why",
    "fake_ranks": "batchfit._engine.sharding.fake_ranks",
    "find_batch_size": "batchfit._find.find",
    "generation": "batchfit.workload",
    "inference": "batchfit.workload",
    "load_schedule": "batchfit.schedules",
    "plan": "batchfit._plan.plan",
    "predict_batch_size": "batchfit._predict.predict",
    "profile_throughput": "batchfit._profile.profile",
    "record_oom": "batchfit._why.record",
    "report": "batchfit._report.report",
    "run_largest": "batchfit._rerun.run_largest",
    "sweep": "batchfit._sweep.sweep",
    "testing": "batchfit.testing",
    "training": "batchfit.workload",
    "virtual_memory": "batchfit._engine.virtual_memory.memory",
}

__all__ = [
    "BatchSizeScheduler",
    "CosineBatchSizeConfig",
    "CustomBatchSizeConfig",
    "ExponentialBatchSizeConfig",
    "FirstSamples",
    "FitResult",
    "GradientNoise",
    "IncreaseBatchSizeConfig",
    "LargestRun",
    "LinearBatchSizeConfig",
    "MemoryCheck",
    "MemoryExplanation",
    "MicrobatchEvent",
    "Microbatcher",
    "MilestoneBatchSizeConfig",
    "NoiseBatchSizeConfig",
    "OomExplanation",
    "OomRecorder",
    "Plan",
    "Prediction",
    "ResizableLoader",
    "ScheduleEvent",
    "StepBatchSizeConfig",
    "StepReport",
    "SweepEvent",
    "SweepRecord",
    "SweepResult",
    "ThroughputProfile",
    "TokenBatchSampler",
    "Trial",
    "Workload",
    "check_memory",
    "errors",
    "explain_memory",
    "explain_oom",
    "fake_ranks",
    "find_batch_size",
    "generation",
    "inference",
    "load_schedule",
    "plan",
    "predict_batch_size",
    "profile_throughput",
    "record_oom",
    "report",
    "run_largest",
    "sweep",
    "testing",
    "training",
    "virtual_memory",
]

# Type checkers know the name; importing `typing` for it would take most of the time of `import batchfit`.
TYPE_CHECKING = False
if TYPE_CHECKING:
    import batchfit.errors as errors
    import batchfit.testing as testing
    from batchfit._check.check import check_memory
    from batchfit._engine.batch.first_samples import FirstSamples
    from batchfit._engine.sharding.fake_ranks import fake_ranks
    from batchfit._engine.sizing.pure.sizes import MicrobatchEvent
    from batchfit._engine.virtual_memory.memory import virtual_memory
    from batchfit._explain.explain import explain_memory
    from batchfit._find.find import find_batch_size
    from batchfit._loader.loader import ResizableLoader
    from batchfit._loader.token_sampler import TokenBatchSampler
    from batchfit._microbatch.microbatcher import Microbatcher
    from batchfit._noise.gradient_noise import GradientNoise
    from batchfit._plan.plan import plan
    from batchfit._predict.predict import predict_batch_size
    from batchfit._profile.profile import profile_throughput
    from batchfit._report.report import report
    from batchfit._rerun.run_largest import LargestRun, run_largest
    from batchfit._schedule.pure.phases import ScheduleEvent
    from batchfit._schedule.scheduler import BatchSizeScheduler
    from batchfit._sweep.pure.events import SweepEvent
    from batchfit._sweep.sweep import sweep
    from batchfit._why.record import OomRecorder, record_oom
    from batchfit._why.why import explain_oom
    from batchfit.results import (
        FitResult,
        MemoryCheck,
        MemoryExplanation,
        OomExplanation,
        Plan,
        Prediction,
        StepReport,
        SweepRecord,
        SweepResult,
        ThroughputProfile,
        Trial,
    )
    from batchfit.schedules import (
        CosineBatchSizeConfig,
        CustomBatchSizeConfig,
        ExponentialBatchSizeConfig,
        IncreaseBatchSizeConfig,
        LinearBatchSizeConfig,
        MilestoneBatchSizeConfig,
        NoiseBatchSizeConfig,
        StepBatchSizeConfig,
        load_schedule,
    )
    from batchfit.workload import Workload, generation, inference, training


def __getattr__(name: str) -> object:
    home = _EXPORTS.get(name)
    if home is None:
        raise AttributeError(f"module 'batchfit' has no attribute {name!r}")
    import importlib

    module = importlib.import_module(home)
    value = module if home == f"batchfit.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
