"""PEFT, bitsandbytes and torchao in a trace: the peak of a real step here, and nothing of theirs changed."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch")
for _name in ("transformers", "peft", "bitsandbytes", "torchao"):
    pytest.importorskip(_name, reason=f"needs {_name}")

from cpu_truth import kernels_of_a_cpu, measured, predicted  # noqa: E402
from examples import some_slow  # noqa: E402
from stack_cases import (  # noqa: E402
    BF16,
    LANGUAGE,
    fine_tuned,
    in_4bit,
    in_8bit,
    llama,
    with_lora,
)
from torch._subclasses.fake_tensor import FakeTensor  # noqa: E402

import batchfit  # noqa: E402
from batchfit._engine.allocator.footprint import Footprint  # noqa: E402
from batchfit._engine.allocator.gpus import gpu_named  # noqa: E402
from batchfit._engine.allocator.replay import simulate  # noqa: E402
from batchfit._engine.trace import trace as trace_module  # noqa: E402
from batchfit._engine.trace.trace import trace, trace_caveats  # noqa: E402
from batchfit._engine.trace.workload import rules_for  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # what these libraries say about each other
LEAVES_BYTES = 2**21  # tables of bitsandbytes and torchao
SIZE = 8
QUICK = {
    *("LoRA", "QLoRA nf4, double quantisation", "Linear8bitLt, LoRA", "bitsandbytes AdamW8bit"),
    *("torchao AdamW8bit", "torchao int8 weight-only, LoRA"),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def not_quick(name: str) -> bool:
    return name not in QUICK


def state_of(work: batchfit.Workload) -> dict[str, Any]:
    """All tensors that a step of these reads, by their place: what they are, and their bits."""
    found: dict[str, Any] = {}
    for path, module in work.model.named_modules():
        for name, one in (*module._parameters.items(), *module._buffers.items(), *vars(module).items()):
            note(found, f"{path}.{name}", one)
    for index, state in enumerate(work.optimizer.state.values()):
        note(found, f"optimizer {index}", state)
    return found


def note(found: dict[str, Any], path: str, value: Any, depth: int = 3) -> None:
    if isinstance(value, torch.Tensor):
        whole = value.dequantize() if hasattr(value, "__tensor_flatten__") else value
        assert type(whole) is not FakeTensor, path
        found[path] = id(value), type(value), whole.detach().clone()
        note(found, path, vars(value), depth)
    elif (
        isinstance(value, dict)
        and depth
        and not any(isinstance(one, torch.nn.Module) for one in value.values())
    ):
        for name, one in value.items():
            note(found, f"{path}.{name}", one, depth - 1)
    elif (
        depth and type(value).__module__.startswith("bitsandbytes") and not isinstance(value, torch.nn.Module)
    ):
        note(found, path, vars(value), depth)


def same(before: dict[str, Any], after: dict[str, Any], *, identity: bool = True) -> None:
    assert before.keys() == after.keys()
    for path, (number, kind, value) in before.items():
        other = after[path]
        assert other[1] is kind, path
        assert not identity or other[0] == number, path
        assert torch.equal(other[2], value), path


@pytest.mark.parametrize("name", some_slow(LANGUAGE, is_slow=not_quick))
def test_the_peak_of_a_real_step(name: str) -> None:
    workload, truth = measured(LANGUAGE[name], SIZE)
    before = state_of(workload)
    again = predicted(workload, SIZE)
    same(before, state_of(workload))
    del before
    gc.collect()
    assert not [one for one in gc.get_objects() if type(one) is FakeTensor]
    fresh = LANGUAGE[name]()
    paged = 0
    if "Paged" in name:  # no memory of a GPU; a CPU has none that is managed
        paged = sum(2 * one.numel() for one in fresh.model.parameters() if one.numel() >= 1e5)
        assert paged
    for told, left_out in ((again, 0), (predicted(fresh, SIZE), paged)):
        assert told.peak + left_out == pytest.approx(truth.peak, rel=0.005)
        # Adam's counters are on the host: a CPU counts a block for each.
        counters = 512 * len(workload.optimizer.state) + 2**13
        assert told.held + left_out == pytest.approx(truth.held, rel=0.005, abs=counters)


@pytest.mark.parametrize("stepped", [False, True], ids=["fresh", "after a step"])
@pytest.mark.parametrize(
    "name", ["QLoRA nf4, double quantisation", "Linear8bitLt, LoRA", "torchao AdamW8bit"]
)
def test_training_goes_on_as_if_nothing_had_been_traced(name: str, stepped: bool) -> None:
    ends = []
    for traced in (False, True):
        work = LANGUAGE[name]()
        torch.manual_seed(3)
        with batchfit.virtual_memory("64GiB"):  # where torchao's step is not compiled
            if stepped:
                work.step(2)
            if traced:
                operations(work, 2)
            work.step(2)
        ends.append(state_of(work))
    same(*ends, identity=False)


def test_an_update_like_one_before_is_not_traced_again() -> None:
    """torchao's hundred operations per parameter; what is allocated and reserved is that of all of them."""
    rules = rules_for(LANGUAGE["full"](), gpu_named("rtx4090"))

    def traced(name: str) -> Any:
        return trace(LANGUAGE[name](), 8, rules=rules)

    found, plain = traced("torchao AdamW8bit"), traced("full")
    assert len(found.events) < 2.5 * len(plain.events)
    with mock.patch.object(trace_module, "like_updates_repeated", return_value=contextlib.nullcontext()):
        whole = traced("torchao AdamW8bit")
    assert len(whole.events) > 2 * len(found.events)
    assert whole.peak_bytes == found.peak_bytes
    ends = [simulate(Footprint.of(one), 8, capacity_bytes=2**30) for one in (found, whole)]
    assert ends[0] == ends[1]


def operations(work: batchfit.Workload, size: int = 64) -> dict[str, int]:
    """What is allocated in one step on a GPU, by operation."""
    found = trace(work, size, rules=rules_for(work, gpu_named("rtx4090")), steps=1)
    sums: dict[str, int] = {}
    for origin, bytes_ in zip(found.origins, found.sizes, strict=True):
        key = f"{origin.kind} {origin.operation}"
        sums[key] = sums.get(key, 0) + bytes_
    return sums


def test_an_8bit_product_goes_the_way_of_a_gpu() -> None:
    seen = operations(fine_tuned(with_lora(in_8bit(llama()), target_modules=["q_proj"])))
    rows = 64 * 64 * (128 + 64 + 64 + 128 + 352 + 352 + 128) * 3  # int32 sums of each product
    assert seen["workspaces bitsandbytes.int8_mixed_scaled_mm.default"] == 4 * rows
    assert "activations bitsandbytes.int8_vectorwise_quant.default" in seen
    from bitsandbytes.autograd import _functions as ways

    assert ways.MatMul8bitFp is not ways.MatMul8bitLt
    with kernels_of_a_cpu():
        work = fine_tuned(with_lora(in_8bit(llama())))
        assert not [one for one in operations(work) if "int8_mixed" in one]


def test_a_4bit_product_makes_the_whole_weight() -> None:
    seen = operations(fine_tuned(with_lora(in_4bit(llama(BF16), compute=BF16), target_modules=["q_proj"])))
    weights = 3 * (2 * 128 * 128 + 2 * 64 * 128 + 3 * 352 * 128)
    assert seen["workspaces bitsandbytes.gemm_4bit.default"] == 2 * weights


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Linear8bitLt, LoRA", "bitsandbytes' Linear8bitLt: their kernels'"),
        ("torchao AdamW8bit", "torchao's AdamW8bit: its step is compiled"),
        ("torchao int8 weight-only, LoRA", "Int8Tensor: traced through"),
        ("bitsandbytes PagedAdamW8bit", "paged optimizer state: managed"),
    ],
)
def test_what_was_not_measured_is_named(name: str, says: str) -> None:
    notes = list(trace_caveats(LANGUAGE[name]().state))
    assert [note for note in notes if note.startswith(says)]
    measured = (*trace_caveats(LANGUAGE["LoRA"]().state), *trace_caveats(LANGUAGE["QLoRA nf4"]().state))
    assert not [note for note in measured if note.startswith(says[:12])]
