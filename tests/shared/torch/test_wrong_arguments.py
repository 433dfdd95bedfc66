"""Wrong arguments of public functions: a ValueError or TypeError that names the argument, before a step."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import batchfit
from batchfit.errors import BatchfitError

# Callables are left out: what a wrong function does when it is called is its own.
ODD: list[Any] = [
    True, -1, 1.5, float("nan"), float("inf"), 10**30, "", "abc", "\x00", "é" * 300, b"x", [], ["a"],
    {"a": 1}, object(), torch.zeros(2), torch.zeros(()), Path("/no/such/file"), complex(1), range(3), ...,
]  # fmt: skip

ran: list[int] = []


def step(batch_size: int) -> None:
    ran.append(batch_size)


def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    ran.append(len(batch))
    loss: torch.Tensor = model(batch).mean()
    return loss


def factory(k: int) -> batchfit.Workload:
    return batchfit.Workload(step, state=[])


class Generating(nn.Linear):
    def generate(self, *_: object, **__: object) -> torch.Tensor:
        return torch.zeros(1)


def model() -> nn.Module:
    return nn.Linear(4, 2)


def training() -> batchfit.Workload:
    one = model()
    return batchfit.training(one, torch.optim.SGD(one.parameters()), loss_fn, lambda n: torch.zeros(n, 4))


PLAIN = batchfit.Workload(step, state=[])
SCHEDULE = batchfit.StepBatchSizeConfig(step_size=1, gamma=2)
RESULT = Path(__file__).parents[2] / "data" / "report" / "fit.json"
DATA = torch.utils.data.TensorDataset(torch.zeros(20, 4))
# (the function, its arguments in front, keywords that make a quick call)
CALLS: dict[str, tuple[Callable[..., Any], list[Any], dict[str, Any]]] = {
    "find_batch_size": (
        batchfit.find_batch_size, [PLAIN], {"budget": "8MiB", "max_size": 4, "soak_steps": 0, "steps": 2},
    ),
    "predict_batch_size": (batchfit.predict_batch_size, [training()], {"budget": "8MiB", "max_size": 4}),
    "explain_memory": (
        batchfit.explain_memory, [training()], {"batch_size": 2, "budget": "8MiB", "what_if": False},
    ),
    "profile_throughput": (
        batchfit.profile_throughput,
        [PLAIN],
        {"budget": "8MiB", "sizes": [1], "diagnose": False, "time_limit_s": 0.05},
    ),
    "sweep": (batchfit.sweep, [factory, {"k": [1]}], {"budget": "8MiB", "soak_steps": 0, "batch_size": 2}),
    "run_largest": (batchfit.run_largest, [lambda n: None], {"start": 4}),
    "report": (batchfit.report, [RESULT, "report.html"], {}),
    "Microbatcher": (batchfit.Microbatcher, [model()], {}),
    "GradientNoise": (batchfit.GradientNoise, [model()], {}),
    "BatchSizeScheduler": (batchfit.BatchSizeScheduler, [SCHEDULE, 4], {}),
    "updates": (batchfit.BatchSizeScheduler(SCHEDULE, 4).updates, [], {"samples": 100, "epochs": 2}),
    "ResizableLoader": (batchfit.ResizableLoader, [DATA, 4], {}),
    "training": (batchfit.training, [model(), None, loss_fn, lambda n: torch.zeros(n, 4)], {}),
    "inference": (batchfit.inference, [model(), lambda n: torch.zeros(n, 4)], {}),
    "generation": (
        batchfit.generation, [Generating(4, 2), lambda n: torch.zeros(n, 4)], {"max_new_tokens": 4},
    ),
    "StepBatchSizeConfig": (batchfit.StepBatchSizeConfig, [], {"step_size": 1, "gamma": 2}),
    "CosineBatchSizeConfig": (batchfit.CosineBatchSizeConfig, [], {"final_batch_size": 8, "over": 4}),
}  # fmt: skip
# What DataLoader and torch check themselves, in words of their own.
THEIRS = {("ResizableLoader", "pin_memory_device"), ("ResizableLoader", "multiprocessing_context")}


def keywords_of(function: Callable[..., Any]) -> list[str]:
    if inspect.isclass(function) and hasattr(function, "model_fields"):
        return [name for name in function.model_fields if name != "type"]
    parameters = inspect.signature(function).parameters.values()
    return [one.name for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CALLS)
def test_it_is_named_before_anything_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BATCHFIT_CACHE", str(tmp_path / "cache"))
    function, arguments, keywords = CALLS[name]
    wrong = []
    for keyword in keywords_of(function):
        for odd in ODD:
            ran.clear()
            try:
                function(*arguments, **{**keywords, keyword: odd})
            except (ValueError, TypeError) as error:
                # Where two arguments do not go together, either may be named.
                first = str(error).partition(" must ")[0]
                named = first in inspect.signature(function).parameters or keyword in str(error)
                if not named and (name, keyword) not in THEIRS:
                    wrong.append((keyword, odd, f"not named: {error}"))
                elif ran:
                    wrong.append((keyword, odd, f"after {len(ran)} steps: {error}"))
            except BatchfitError:
                pass  # a right argument with which there is no answer
            except Exception as error:  # noqa: BLE001  which is what must not come
                if (name, keyword) not in THEIRS:
                    wrong.append((keyword, odd, repr(error)))
    assert not wrong


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: batchfit.find_batch_size(PLAIN, steps=10**30), "steps must be at most 1000000, not 1000"),
        (lambda: batchfit.find_batch_size(PLAIN, on_trial=lambda: None), r"on_trial\(trial, budget_bytes\)"),
        (lambda: batchfit.profile_throughput(PLAIN, on_point=lambda a, b: None), r"on_point\(point\)"),
        (lambda: batchfit.sweep(factory, {"k": [1]}, on_record=lambda: None), r"on_record\(record\)"),
        (lambda: batchfit.sweep(factory, {"k": [1]}, devices="abc"), "devices must be"),
        (lambda: batchfit.BatchSizeScheduler("abc", 4), "config must be a file"),
    ],
)
def test_what_is_said(call: Callable[[], object], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        call()
