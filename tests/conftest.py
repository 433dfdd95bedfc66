"""Rules for every test: torch can be blocked, what must not be skipped is named, nothing leaks.

`BATCHFIT_BLOCK_TORCH=1` makes `import torch` fail: the tests in folders named `pure` must pass like that.
`BATCHFIT_REQUIRE=transformers,gloo` turns the skip of a test that needs one of these into a failure.
"""

from __future__ import annotations

import gc
import importlib
import importlib.abc
import itertools
import os
import signal
import sys
from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings

BLOCKED = os.environ.get("BATCHFIT_BLOCK_TORCH") == "1"
REQUIRED = {name for name in os.environ.get("BATCHFIT_REQUIRE", "").split(",") if name}


# `make test` draws the same half of the examples every time, on machines of any speed; `make test-all` draws
# new ones, `make test-<capability>` a tenth of them ("quick"; support/examples.py).
SAME = hypothesis_settings(derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
hypothesis_settings.register_profile("same", SAME)
hypothesis_settings.register_profile("quick", SAME, max_examples=10)

# Tests start hundreds of processes of Python: each would compile all of our source again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# They start sooner with the `sitecustomize` of that folder.
START = str(Path(__file__).parent / "support" / "start")
sys.path.append(START)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [START, os.environ.get("PYTHONPATH")]))

# A background job of a shell starts with Ctrl-C ignored, and so would every process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


class _NoTorch(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        if fullname == "torch" or fullname.startswith("torch."):
            raise ImportError("torch is blocked (BATCHFIT_BLOCK_TORCH=1): this test must not need it")


if BLOCKED:
    if "torch" in sys.modules:
        raise RuntimeError("torch was imported before it could be blocked")
    sys.meta_path.insert(0, _NoTorch())


def need(name: str, *, present: bool) -> None:
    """Skip the calling test or module unless `present`; fail instead where `name` is required."""
    if present:
        return
    if name in REQUIRED:
        pytest.fail(f"{name} is named in BATCHFIT_REQUIRE, and it is not here", pytrace=False)
    pytest.skip(f"needs {name}", allow_module_level=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """A test skipped for a required reason is a failure: its skip message names what it needs."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = str(report.longrepr)
        for name in REQUIRED:
            if f"needs {name}" in reason or f"could not import '{name}'" in reason:
                report.outcome = "failed"
                report.longrepr = f"{name} is named in BATCHFIT_REQUIRE, and this test was skipped: {reason}"
    return report


class _Frozen:
    """Whether objects are frozen, by the last call: `gc.get_freeze_count` walks over a million of them."""

    count = gc.get_freeze_count
    now = count() > 0
    freeze, unfreeze = gc.freeze, gc.unfreeze

    @classmethod
    def note(cls, frozen: bool) -> None:
        (cls.freeze if frozen else cls.unfreeze)()
        cls.now = frozen


gc.freeze, gc.unfreeze = partial(_Frozen.note, True), partial(_Frozen.note, False)
gc.get_freeze_count = lambda: int(_Frozen.now)
count_frozen = _Frozen.count


@pytest.fixture(autouse=True)
def _nothing_is_left_switched() -> Generator[None, None, None]:
    """A test that leaves a global changed fails, not the one after it."""
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    frozen, collecting = _Frozen.now, gc.isenabled()
    yield
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert (_Frozen.now, gc.isenabled()) == (frozen, collecting)
    virtual = sys.modules.get("batchfit._engine.virtual_memory.memory")
    assert virtual is None or virtual.active() is None


def _living_bytes() -> int:
    """What tensors hold now, garbage aside: virtual memory counts every tensor that lives."""
    if BLOCKED or "torch" not in sys.modules:
        return 0
    import batchfit

    gc.collect()
    with batchfit.virtual_memory("64GiB") as memory:
        return memory.allocated_bytes


@pytest.fixture
def living_bytes() -> int:
    """What tensors hold before the test begins: parameters of tests keep some of theirs for the whole run."""
    return _living_bytes()


@pytest.fixture(autouse=True, scope="module")
def _no_module_leaves_tensors(request: pytest.FixtureRequest) -> Generator[list[int], None, None]:
    """A module whose tests leave tensors alive fails, not the one after it that counts what fits beside them.

    What is there before is frozen for good, and not seen by who counts what lives: our code collects garbage
    often, and walking over all of torch and transformers each time took most of the time of the tests.
    `thawed` is for tests of just that. A module may say why others keep more for good (`LEAVES_BYTES`).
    """
    if not BLOCKED and "torch" in sys.modules:
        importlib.import_module("torch._dynamo")  # a first optimizer would, when it is too late to be frozen
    gc.collect()
    gc.freeze()
    before: list[int] = []
    yield before
    if before:
        gc.unfreeze()
    left_bytes = _living_bytes() - sum(before)
    # TorchScript keeps a few small ones for good. An error in `parametrize` keeps a test's frames: copy it.
    most_bytes = getattr(request.module, "LEAVES_BYTES", 4096)
    assert left_bytes <= most_bytes, f"the tests of this module left tensors of {left_bytes} bytes alive"


@pytest.fixture
def thawed(_no_module_leaves_tensors: list[int]) -> Generator[None, None, None]:
    """Garbage collection as a program finds it, with nothing frozen."""
    made_bytes = _living_bytes()
    gc.unfreeze()
    if not _no_module_leaves_tensors:
        _no_module_leaves_tensors.append(_living_bytes() - made_bytes)  # what lived before the module
    yield
    gc.freeze()


_cache_numbers = itertools.count()


@pytest.fixture(autouse=True)
def _no_test_uses_the_users_store(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Found sizes go to a folder of the test's own, made only if something is stored."""
    folder = tmp_path_factory.getbasetemp() / "cache" / str(next(_cache_numbers))
    monkeypatch.setenv("BATCHFIT_CACHE", str(folder))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Collect tests with the garbage collector off: it would walk over all loaded frameworks, many times."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


# The files that take longest, in this order: they run first, so that no worker is left with one at the end.
LONGEST = (
    "test_docs.py",
    "test_trials_in_children.py",
    "test_sweep.py",
    "test_microbatch_ddp.py",
    "test_transformers.py",
    "test_grpo_training.py",
    "test_sweep_devices.py",
    "test_find.py",
    "test_lightning.py",
    "test_predict.py",
    "test_explain.py",
    "test_cli_find.py",
    "test_resizable_loader.py",
    "test_microbatch_fsdp.py",
    "test_optimizer_step.py",
    "test_lightning_swapped.py",
    "test_peft_memory.py",
    "test_profile_ranks.py",
    "test_program_ends_cleanly.py",
    "test_gallery.py",
    "test_lightning_fsdp.py",
    "test_sweep_ranks.py",
    "test_ranks.py",
    "test_find_order.py",
    "test_grpo_ranks.py",
    "test_find_on_shared_devices.py",
    "test_microbatch_loss_check.py",
    "test_golden.py",
    "test_plan.py",
    "test_torchtune.py",
    "test_microbatch_ragged.py",
    "test_transformers_fsdp.py",
    "test_find_children.py",
    "test_find_collectives.py",
    "test_find_torchrun.py",
    "test_transformers_plain.py",
    "test_sentence_transformers.py",
    "test_old_program.py",
    "test_trace_program.py",
    "test_resume.py",
    "test_lightning_ranks.py",
    "test_cli_sweep.py",
    "test_profile_program.py",
    "test_sweep_program.py",
    "test_benchmark_walks.py",
    "test_interrupts.py",
    "test_batch_structure.py",
    "test_found_size_in_loops.py",
    "test_transformers_ranks.py",
    "test_knee.py",
    "test_cli_without_torch.py",
    "test_benchmark_guard.py",
    "test_search.py",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the files; skip GPU tests where there is no GPU (BATCHFIT_REQUIRE may forbid that)."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))
    if BLOCKED or not any(item.get_closest_marker("gpu") for item in items):
        return
    import torch

    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs gpu"))
