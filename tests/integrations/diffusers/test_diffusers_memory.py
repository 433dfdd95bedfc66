"""diffusers' models in a trace: the peak of a real step here, and that of a GPU's prediction at any size."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")
for _name in ("diffusers", "peft"):
    pytest.importorskip(_name, reason=f"needs {_name}")

from cpu_truth import measured, predicted  # noqa: E402
from examples import some_slow  # noqa: E402
from stack_cases import PICTURES  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor  # noqa: E402

import batchfit  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # what these libraries say about each other
LEAVES_BYTES = 2**21  # tables of bitsandbytes and torchao, which PEFT imports
SIZE = 4
QUICK = {"UNet with LoRA, 16 x 16", "Flux with LoRA, 16 x 16"}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def not_quick(name: str) -> bool:
    return name not in QUICK


@pytest.mark.parametrize("name", some_slow(PICTURES, is_slow=not_quick))
def test_the_peak_of_a_real_step(name: str) -> None:
    workload, truth = measured(PICTURES[name], SIZE)
    told = predicted(workload, SIZE)
    assert told.peak == pytest.approx(truth.peak, rel=0.01)
    # Adam's counters and the schedule's tables are on the host beside a GPU, and count here.
    on_host = 512 * len(workload.optimizer.state) + 2**15
    assert truth.held - on_host < told.held < 1.001 * truth.held
    gc.collect()  # a noise schedule moves its tables to the device: it has its own again
    assert not [one for one in gc.get_objects() if type(one) is FakeTensor]


@pytest.mark.slow
def test_a_larger_picture_fits_less_often() -> None:
    sizes = [
        batchfit.predict_batch_size(PICTURES[f"Flux with LoRA, {side} x {side}"](), budget="1GiB", gpu="h100")
        for side in (16, 32)
    ]
    # A quarter of the samples, but for the words beside each picture.
    assert 3 < sizes[0].batch_size / sizes[1].batch_size < 4.2
