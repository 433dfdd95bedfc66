"""The loops of the gallery, traced without a GPU: as expected, and with nothing of theirs changed."""

from __future__ import annotations

import functools
import gc
import inspect
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from examples import some_slow
from gallery import CASES, Case, differences, frozen, held_by, left_behind, let_go, seeded
from torch._subclasses.fake_tensor import FakeTensor
from torch.profiler import ProfilerActivity, profile

import batchfit
from batchfit._engine.allocator.footprint import Trace
from batchfit._engine.allocator.gpus import gpu_named
from batchfit._engine.trace.trace import trace
from batchfit._engine.trace.workload import rules_for
from batchfit.errors import UntraceableError

SIZE = 2
# Whose peak the CPU's kernels and autocast's lists make another than the card's, or that keep tensors there.
OTHER_KERNELS = {
    "encoder_layers": "attention with a mask and dropout",
    "collated": "softmax over a dimension that is not the last",
    "own_function": "what a convolution takes for itself",
    "gan": "what a convolution takes for itself",
    "wgan_gp": "what a convolution takes for itself",
    "offloaded": "the host is the device",
    "truncated_backpropagation": "what a recurrent layer keeps",
    "scaled_fp16": "autocast's lists",
    "graph_network": "a recurrent cell in one kernel",
    "nesterov": "all parameters at once on a card, one after the other here",
    "zeroed_gradients": "the same",
    "ppo": "the same",
    "several_losses": "the same",
    "vae": "the same",
    "channels_last": "the workspace of a convolution",
    "embeddings": "the workspace of a bf16 convolution, on some CPUs",
}
# Which a random number makes another each time, and whose gradients cuDNN keeps in one piece.
OTHERWISE_HELD = {"stochastic_depth", "teacher_forcing"}

# These take longest, and other loops have each of their ways in part: `make test-all` runs them.
SLOW = {
    *("packed_lstm", "teacher_forcing", "chunked_loss", "diffusion", "checkpoint_hooks", "causal_attention"),
    *("checkpoint_in_segments", "adam_one_by_one", "accumulation", "zeroed_gradients", "adafactor", "lion"),
    *("sampled_by_hand", "nesterov", "collated", "window_mask", "fused_adamw", "byol", "moco", "maml"),
    *("frozen_encoder", "muon", "stacked_ensemble", "attention_weights", "truncated_backpropagation"),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """What the loops compute is small: threads would wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    seeded()
    yield
    torch.set_num_threads(before)


@pytest.mark.filterwarnings("ignore")  # what torch says about loops of other people
@pytest.mark.parametrize(
    "case", some_slow(CASES.values(), is_slow=lambda case: case.name in SLOW), ids=lambda case: case.name
)
def test_a_loop_is_traced_and_then_goes_on(case: Case, request: pytest.FixtureRequest) -> None:
    if case.name == "averaged_model" and torch.__version__.startswith("2.6."):
        pytest.skip("torch 2.6 groups the averaged counters by device, and a detached fake one is the host's")
    nothing = living_bytes()
    workload = case.make("cpu")
    request.addfinalizer(functools.partial(let_go, workload))
    workload.step(SIZE)
    warm = living_bytes() - nothing
    before = frozen(held_by(workload))
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    rules = rules_for(workload, gpu_named("h200"))
    found = None
    if case.expected == "traced":
        found = trace(workload, SIZE, rules=rules)
    else:
        with pytest.raises(UntraceableError) as refused:
            trace(workload, SIZE, rules=rules)
        assert refused.value.operation
        assert case.at in line_named(case, refused.value.where)
        del refused
    after = held_by(workload)
    assert not left_behind(after)
    assert not differences(before, frozen(after))
    assert torch.equal(generators[0], torch.get_rng_state())
    assert generators[1] == random.getstate()
    assert (generators[2] == np.random.get_state()[1]).all()
    del before, after
    on_top, more = allocated(lambda: workload.step(SIZE))
    held = living_bytes() - nothing
    if found is not None and not case.uncounted:
        told_peak, told_held = told(found)
        if case.name not in OTHERWISE_HELD:
            assert told_held == pytest.approx(held, rel=0.01, abs=2**17)
        if case.name not in OTHERWISE_HELD | OTHER_KERNELS.keys():
            # Old gradients went before the peak or after it: that is not told of what was there before.
            assert 0.92 * (held - more + on_top) - 2**17 < told_peak < 1.08 * (warm + on_top) + 2**17
    assert not left_behind(held_by(workload))
    gc.collect()
    assert not [one for one in gc.get_objects() if type(one) is FakeTensor]


def living_bytes() -> int:
    """What tensors hold now."""
    gc.collect()
    with batchfit.virtual_memory("64GiB") as memory:
        return memory.allocated_bytes


def allocated(run: Callable[[], None]) -> tuple[int, int]:
    """The most bytes that came on top, and those that still are, as torch's own profiler tells."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        run()
    profiler: Any = seen.profiler
    events = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    peak = now = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak, now


def told(found: Trace) -> tuple[int, int]:
    """The same of a trace, but for what kernels take for themselves."""
    peak = now = 0
    for event in found.events:
        block = event if event >= 0 else ~event
        if found.origins[block].kind != "workspaces":
            now += found.sizes[block] if event >= 0 else -found.sizes[block]
            peak = max(peak, now)
    return peak, now


def line_named(case: Case, where: str) -> str:
    """The line of the loop's file that an error names."""
    file = Path(inspect.getfile(case.make))
    number = re.search(rf"{re.escape(file.name)}:(\d+)", where)
    return "" if number is None else file.read_text().splitlines()[int(number[1]) - 1]
