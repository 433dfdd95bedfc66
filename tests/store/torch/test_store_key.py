"""The store's key: names, shapes and settings; the same in any process. Code is left to the trial."""

from __future__ import annotations

import functools
import itertools
import json
import os
import random
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from child_path import CHILD_PATH
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

import batchfit
from batchfit._engine.device.device import CpuDevice
from batchfit._engine.device.gpu import CudaDevice, MpsDevice
from batchfit._engine.store.key import (
    NoKeyError,
    described,
    digest_of,
    environment,
    state_digest,
    workload_digest,
)
from batchfit.testing import FakeDevice

WIDTH = 8


def digest(work: batchfit.Workload) -> str:
    return workload_digest(work, sample_size=1)


def mean_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def example(n: int) -> torch.Tensor:
    return torch.randn(n, WIDTH)


def work(
    model: nn.Module | None = None,
    *,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    loss_fn: Any = mean_loss,
    make_batch: Any = example,
    options: dict[str, Any] | None = None,
    **rest: Any,
) -> batchfit.Workload:
    model = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 4)) if model is None else model
    return batchfit.training(
        model, optimizer(model.parameters(), **(options or {})), loss_fn, make_batch, **rest
    )


# --- what must change the key, and what must not -------------------------------------------------


def layers(*parts: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 4), *parts)


def changed(change: Callable[[nn.Module], object]) -> nn.Module:
    model = layers(nn.Dropout(0.1))
    change(model)
    return model


class Plain(nn.Module):
    def __init__(self, *, checkpointing: bool = False) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 4)
        self.checkpointing = checkpointing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Heavier(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.inner(x * 2)


def renamed(cls: type) -> nn.Module:
    """The same class name with another `forward`, as after an edit of the file."""
    twin = type("Plain", (nn.Module,), {name: vars(cls)[name] for name in ("forward",) if name in vars(cls)})
    model: nn.Module = twin()
    model.inner = nn.Linear(WIDTH, 4)
    return model


def closed_over(value: Any) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).mean() if value else model(batch).sum()

    return loss


def with_default(chunks: int) -> Callable[..., torch.Tensor]:
    def loss(model: nn.Module, batch: torch.Tensor, chunks: int = chunks) -> torch.Tensor:
        return model(batch).mean()

    return loss


def with_global(value: object) -> Any:
    """`lambda model, batch: helper(model, batch)` in a module where `helper` or LENGTH is `value`."""
    module = types.ModuleType("mine")
    exec(
        "LENGTH = None\ndef loss(model, batch):\n    return (model(batch) * bool(LENGTH)).mean()\n",
        vars(module),
    )
    vars(module)["LENGTH"] = value
    return vars(module)["loss"]


class Criterion:
    def __init__(self, chunks: int) -> None:
        self.chunks = chunks

    def __call__(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).mean()

    def method(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).mean()


def twice(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) + model(batch)).mean()


def stacked(rows: Any) -> torch.Tensor:
    return torch.stack([row[0] for row in rows])


class Packed(torch.optim.SGD):
    """Keeps an option outside its groups."""

    def __init__(self, parameters: Any, *, bits: int) -> None:
        super().__init__(parameters)
        self.args = types.SimpleNamespace(bits=bits)


def hooked() -> nn.Module:
    model = layers(nn.Dropout(0.1))
    model.register_forward_hook(lambda module, inputs, output: output * 2)
    return model


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    model[1].weight = model[0].weight
    return model


SQUARE = functools.partial(nn.Sequential, nn.Linear(WIDTH, WIDTH))
LONG = TensorDataset(torch.zeros(6, WIDTH))

# Every pair of these differs in memory, or could.
DIFFERENT: dict[str, Callable[[], batchfit.Workload]] = {
    "as it is": work,
    "a wider layer": lambda: work(nn.Sequential(nn.Linear(WIDTH, 17), nn.ReLU(), nn.Linear(17, 4))),
    "a layer more": lambda: work(layers(nn.ReLU(), nn.ReLU())),
    "in place": lambda: work(layers(nn.ReLU(inplace=True), nn.ReLU())),
    "gelu": lambda: work(layers(nn.GELU(), nn.ReLU())),
    "dropout": lambda: work(layers(nn.Dropout(0.1))),
    "no dropout": lambda: work(layers(nn.Dropout(0.0))),
    "eval": lambda: work(changed(lambda model: model.eval())),
    "a part in eval": lambda: work(changed(lambda model: model[1].eval())),
    "frozen": lambda: work(changed(lambda model: model[0].bias.requires_grad_(False))),
    "double": lambda: work(changed(lambda model: model.double()), make_batch=lambda n: example(n).double()),
    "a buffer": lambda: work(changed(lambda model: model.register_buffer("more", torch.zeros(3)))),
    "a class": lambda: work(Plain()),
    "tied": lambda: work(tied()),
    "not tied": lambda: work(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))),
    "channels last": lambda: work(
        nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), make_batch=lambda n: torch.zeros(n, 3, 8, 8)
    ),
    "channels first": lambda: work(nn.Conv2d(3, 4, 3), make_batch=lambda n: torch.zeros(n, 3, 8, 8)),
    "sgd": lambda: work(optimizer=torch.optim.SGD),
    "momentum": lambda: work(optimizer=torch.optim.SGD, options={"momentum": 0.9}),
    "amsgrad": lambda: work(options={"amsgrad": True}),
    "foreach": lambda: work(options={"foreach": True}),
    "no foreach": lambda: work(options={"foreach": False}),
    "fused": lambda: work(options={"fused": True}),
    "another class of optimizer": lambda: work(optimizer=Packed, options={"bits": 8}),
    "clip": lambda: work(clip_norm=1.0),
    "bf16": lambda: work(autocast=torch.bfloat16),
    "a context": lambda: work(autocast=torch.autocast("cpu", dtype=torch.bfloat16)),
    "a context off": lambda: work(autocast=torch.autocast("cpu", dtype=torch.bfloat16, enabled=False)),
    "scaler": lambda: work(scaler=torch.amp.GradScaler("cpu")),
    "scaler off": lambda: work(scaler=torch.amp.GradScaler("cpu", enabled=False)),
    "more state": lambda: work(state=[torch.zeros(5)]),
    "twice": lambda: work(loss_fn=twice),
    "an object": lambda: work(loss_fn=Criterion(1)),
    "a method": lambda: work(loss_fn=Criterion(1).method),
    "a closure": lambda: work(loss_fn=closed_over(1)),
    "partial 1": lambda: work(loss_fn=functools.partial(mean_loss)),
    "partial 2": lambda: work(loss_fn=functools.partial(twice)),
    "longer samples": lambda: work(make_batch=lambda n: torch.randn(n, 2, WIDTH)),
    "an example": lambda: work(make_batch=torch.zeros(2, WIDTH)),
    "a longer example": lambda: work(make_batch=torch.zeros(2, 3, WIDTH)),
    "a dataset": lambda: work(make_batch=LONG, collate_fn=lambda rows: torch.stack([r[0] for r in rows])),
    "another collate": lambda: work(make_batch=LONG, collate_fn=stacked),
    "a larger dataset": lambda: work(
        make_batch=TensorDataset(torch.zeros(7, WIDTH)),
        collate_fn=lambda rows: torch.stack([r[0] for r in rows]),
    ),
    "inference": lambda: batchfit.inference(layers(nn.Dropout(0.1)), example),
    "inference, forward": lambda: batchfit.inference(layers(nn.Dropout(0.1)), example, forward=twice),
    "inference, bf16": lambda: batchfit.inference(layers(nn.Dropout(0.1)), example, autocast=torch.bfloat16),
}

# Equal names and shapes: what differs is inside functions and objects, and only the trial can notice it.
ALIKE: dict[str, tuple[Callable[[], batchfit.Workload], Callable[[], batchfit.Workload]]] = {
    "an edited forward": (lambda: work(renamed(Plain)), lambda: work(renamed(Heavier))),
    "an attribute of a module": (lambda: work(Plain()), lambda: work(Plain(checkpointing=True))),
    "a hook": (lambda: work(layers(nn.Dropout(0.1))), lambda: work(hooked())),
    "a closure": (lambda: work(loss_fn=closed_over(1)), lambda: work(loss_fn=closed_over([2]))),
    "a default": (lambda: work(loss_fn=with_default(1)), lambda: work(loss_fn=with_default(2))),
    "a global": (lambda: work(loss_fn=with_global(512)), lambda: work(loss_fn=with_global(twice))),
    "an attribute of an object": (lambda: work(loss_fn=Criterion(1)), lambda: work(loss_fn=Criterion(2))),
    "an optimizer's own attribute": (
        lambda: work(optimizer=Packed, options={"bits": 8}),
        lambda: work(optimizer=Packed, options={"bits": 32}),
    ),
}


def test_different_workloads_have_different_keys() -> None:
    found: dict[str, str] = {}
    for name, make in DIFFERENT.items():
        key = digest(make())
        assert key not in found, f"{name!r} and {found[key]!r} share a key"
        found[key] = name


def test_what_is_inside_code_is_left_to_the_trial() -> None:
    for name, (first, second) in ALIKE.items():
        assert digest(first()) == digest(second()), name


def test_the_same_workload_made_again_has_the_same_key() -> None:
    for name, make in DIFFERENT.items():
        assert digest(make()) == digest(make()), name


def test_values_rates_and_names_of_files_do_not_count() -> None:
    torch.manual_seed(0)
    first = digest(work())
    torch.manual_seed(1)
    assert digest(work()) == first  # other weights
    assert digest(work(options={"lr": 0.5})) == first
    assert digest(work(options={"betas": (0.8, 0.9), "weight_decay": 0.3})) == first
    assert digest(work(options={"weight_decay": 0.0})) != first  # one temporary less
    trained = work()
    trained.step(4)
    assert digest(trained) == first  # optimizer state is there, and would be anyway


def test_where_code_stands_does_not_count() -> None:
    text = "def loss(model, batch):\n    total = model(batch)\n    return total.mean()\n"

    def compiled(file: str, before: str = "") -> Any:
        space: dict[str, Any] = {"__name__": "mine"}
        exec(compile(before + text, file, "exec"), space)
        return space["loss"]

    first = digest(work(loss_fn=compiled("losses.py")))
    assert digest(work(loss_fn=compiled("losses.py", "# a comment\n\n\nimport torch\n"))) == first
    assert digest(work(loss_fn=compiled("/another/folder/losses.py"))) == first
    assert digest(work(loss_fn=compiled("other.py"))) != first


def test_the_version_of_a_models_package_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("zoo")
    module.Net = type("Net", (nn.Linear,), {"__module__": "zoo.models"})  # type: ignore[attr-defined]
    module.__version__ = "1.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "zoo", module)
    first = digest(work(module.Net(WIDTH, 4)))
    assert digest(work(module.Net(WIDTH, 4))) == first
    module.__version__ = "1.1"  # type: ignore[attr-defined]
    assert digest(work(module.Net(WIDTH, 4))) != first


def test_a_step_put_in_place_of_another_counts_and_one_that_only_watches_does_not() -> None:
    base = work()
    assert digest(base.with_step(lambda size: base.step(2 * size))) != digest(base)
    assert digest(base._watched(lambda size: base.step(size))) == digest(base)


Spec = tuple[tuple[int, ...], float, bool, bool, str, bool, int]
SPECS = st.tuples(
    st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple),
    st.sampled_from([0.0, 0.1, 0.5]),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["adamw", "sgd", "none"]),
    st.booleans(),
    st.integers(1, 4),
)


def built(spec: Spec) -> batchfit.Workload:
    widths, drop, frozen, training_mode, kind, lower, length = spec
    sizes = [3, *widths]
    linears = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    model = nn.Sequential(*linears, nn.Dropout(drop))
    model.train(training_mode)
    if frozen:
        linears[0].requires_grad_(False)
    optimizer: Any = {
        "adamw": lambda: torch.optim.AdamW(model.parameters()),
        "sgd": lambda: torch.optim.SGD(model.parameters()),
        "none": lambda: None,
    }[kind]()
    return batchfit.training(
        *(model, optimizer, mean_loss, lambda n: torch.zeros(n, length, 3)),
        autocast=torch.bfloat16 if lower else None,
    )


@examples(150)
@given(SPECS, SPECS)
def test_keys_are_equal_exactly_where_programs_are(first: Spec, second: Spec) -> None:
    assert (digest(built(first)) == digest(built(second))) == (first == second)
    assert digest(built(first)) == digest(built(first))


# --- in another process --------------------------------------------------------------------------

PROGRAM = """
import enum, functools, sys
import torch, transformers
from torch import nn
import batchfit
from batchfit._engine.store.key import workload_digest

LENGTH, NAMES = 16, {"alpha", "beta", "gamma", "delta"}

class Mode(enum.Enum):
    FAST = object()

class Block(nn.Module):
    kinds = frozenset({"a", "b", "c"})
    def __init__(self):
        super().__init__()
        self.act, self.mode, self.made = functools.partial(torch.clamp, min=0), Mode.FAST, object()
        self.linear = nn.Linear(LENGTH, LENGTH)
    @property
    def width(self):
        return LENGTH
    def extra_repr(self):
        return f"{self.made}"
    def forward(self, x):
        return self.act(self.linear(x)) if x.shape[-1] in {16, 17, 18} else helper(x)

def helper(x):
    return [value for value in (x, x) if "alpha" in NAMES][0]

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 20
    def __getitem__(self, index):
        return torch.zeros(LENGTH)

def make():
    model = nn.Sequential(Block(), Block())
    model.register_forward_hook(lambda *_: None)
    model = torch.compile(model)
    loss = lambda m, x, keep=NAMES: m(x).mean() + len(keep)
    return batchfit.training(model, torch.optim.AdamW(model.parameters()), loss, Samples())

def hugging_face():
    config = transformers.GPT2Config(
        n_layer=1, n_embd=8, n_head=1, vocab_size=32, n_positions=8, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config)
    ids = torch.zeros(1, 8, dtype=torch.long)
    return batchfit.training(model, None, lambda m, x: m(**x, labels=x["input_ids"]).loss, {"input_ids": ids})

if __name__ == "__main__":
    print(workload_digest(make(), sample_size=1), workload_digest(hugging_face(), sample_size=1))
"""


@pytest.mark.slow
def test_two_processes_agree(tmp_path: Path) -> None:
    """Other hash seeds and addresses, run as a script and imported (from bytecode that was stored)."""
    (tmp_path / "program.py").write_text(PROGRAM)
    imported = (
        "import program as p\nfrom batchfit._engine.store.key import workload_digest as d\n"
        "print(d(p.make(), sample_size=1), d(p.hugging_face(), sample_size=1))"
    )
    runs = [("1", ["program.py"]), ("2", ["-c", imported]), ("3", ["-c", imported])]
    environments = {**os.environ, "PYTHONPATH": f"{CHILD_PATH}{os.pathsep}{tmp_path}"}
    said = []
    for seed, arguments in runs:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env={**environments, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        said.append(done.stdout.split())
    assert said[0] == said[1] == said[2]
    assert len(said[0]) == 2


# --- making a sample -----------------------------------------------------------------------------


def test_making_a_sample_leaves_generators_as_they_were() -> None:
    generator, own = torch.Generator().manual_seed(7), random.Random(3)
    asked: list[int] = []

    def make_batch(n: int) -> torch.Tensor:
        asked.append(n)
        numpy.random.rand()
        random.random()
        own.random()
        return torch.rand(n, WIDTH, generator=generator) + torch.rand(n, WIDTH)

    workload = work(make_batch=make_batch, state=[generator, own])
    before = (torch.get_rng_state(), generator.get_state(), random.getstate(), own.getstate())
    legacy = numpy.random.get_state()[1].tolist()
    workload_digest(workload, sample_size=8)
    assert asked == [8]
    after = (torch.get_rng_state(), generator.get_state(), random.getstate(), own.getstate())
    assert all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(before, after, strict=True)
    )
    assert numpy.random.get_state()[1].tolist() == legacy


def test_scanning_a_dataset_leaves_generators_as_they_were() -> None:
    class Augmented(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 5

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.rand(WIDTH)

    workload = work(make_batch=Augmented())
    before = torch.get_rng_state()
    first = digest(workload)
    assert torch.equal(torch.get_rng_state(), before)
    assert digest(work(make_batch=Augmented())) == first


def test_a_source_that_raises_has_no_key() -> None:
    def make_batch(n: int) -> torch.Tensor:
        raise LookupError("no data")

    with pytest.raises(NoKeyError, match="LookupError while making a batch of 1"):
        digest(work(make_batch=make_batch))


def test_a_step_without_a_model_has_no_key() -> None:
    with pytest.raises(NoKeyError, match="without a model"):
        digest(batchfit.Workload(lambda n: None, state=[nn.Linear(2, 2)]))


def test_a_description_is_json() -> None:
    for make in DIFFERENT.values():
        json.dumps(described(make(), sample_size=1))


def test_a_named_workload_counts_by_its_state() -> None:
    def step(n: int) -> None: ...

    def named(width: int) -> str:
        return state_digest(batchfit.Workload(step, state=[nn.Linear(width, 2), {"a": [torch.zeros(2)]}]))

    assert named(2) == named(2)
    assert named(2) != named(3)


# --- the surroundings ----------------------------------------------------------------------------


def test_settings_around_the_program_count(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = [digest_of(environment(CpuDevice()))]

    def differs() -> None:
        now = digest_of(environment(CpuDevice()))
        assert now not in seen
        seen.append(now)

    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    differs()
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    differs()
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    differs()
    monkeypatch.setattr(torch, "__version__", "99.0")
    differs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        differs()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        differs()
    fake = environment(FakeDevice("1GiB"))
    assert digest_of(fake) not in seen


def test_a_gpu_counts_by_its_name_capability_and_memory_not_by_its_place() -> None:
    class Backend:
        def __init__(
            self, name: str = "A card", total: int = 2**34, capability: tuple[int, int] = (9, 0)
        ) -> None:
            self.name, self.total, self.capability = name, total, capability

        def get_device_name(self, index: int) -> str:
            return self.name

        def get_device_capability(self, index: int) -> tuple[int, int]:
            return self.capability

        def get_device_properties(self, index: int) -> Any:
            return types.SimpleNamespace(total_memory=self.total)

    def card(index: int = 0, **changes: Any) -> str:
        return digest_of(environment(CudaDevice(index, Backend(**changes))))

    assert card(1) == card(0)
    others = [card(), card(name="Another"), card(total=2**35), card(capability=(8, 0))]
    assert len(set(others)) == 4
    assert digest_of(environment(MpsDevice())) not in others
