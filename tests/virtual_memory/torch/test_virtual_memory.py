"""Virtual memory: exact counts, the error before the operation, nothing left behind."""

from __future__ import annotations

import contextlib
import copy
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils.checkpoint import checkpoint
from torch_private import foreach_mul, private_aten, storage_address, wrapper_subclass

from batchfit._engine.virtual_memory import op_sizes
from batchfit._engine.virtual_memory.memory import VirtualMemory, active, virtual_memory
from batchfit._engine.virtual_memory.op_sizes import block_bytes

MIB = 2**20
HUGE = "64GiB"


@contextlib.contextmanager
def measured(limit: int | str = HUGE) -> Iterator[tuple[VirtualMemory, Callable[[], int]]]:
    """Virtual memory, and a reading of what was allocated since entry."""
    with virtual_memory(limit) as memory:
        base = memory.allocated_bytes
        yield memory, lambda: memory.allocated_bytes - base


def ledger_of(memory: VirtualMemory) -> Any:
    return memory._ledger


class Seen(TorchDispatchMode):
    """Entered before virtual memory, it sees the operations that were let through."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """No test may leave a mode, a ledger or a patch behind."""
    torch.manual_seed(0)
    yield
    assert active() is None
    assert _get_current_dispatch_mode() is None
    assert "resize_" not in vars(torch.UntypedStorage)


# --- what is counted ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("requested", "block"),
    [
        (0, 0),
        (1, 512),
        (512, 512),
        (513, 1024),
        (MIB, MIB),
        (9 * MIB + 1, 9 * MIB + 512),  # cut from a 20 MiB segment
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10 * MIB + 512),  # segment of 12 MiB, the rest of nearly 2 MiB is split off
        (11 * MIB, 12 * MIB),  # a rest of 1 MiB is not
        (12 * MIB - 1, 12 * MIB),
        (11 * MIB - 512, 11 * MIB - 512),
    ],
)
def test_blocks_are_those_of_the_cuda_allocator(requested: int, block: int) -> None:
    assert block_bytes(requested) == block
    if requested:
        with measured() as (memory, used):
            tensor = torch.empty(requested, dtype=torch.uint8)
            assert used() == block
            memory.reset_peak()
            del tensor
            assert used() == 0
            assert memory.peak_bytes - memory.allocated_bytes == block


def test_a_graph_counted_by_hand() -> None:
    with measured() as (memory, used):
        weight = nn.Parameter(torch.empty(64, 32))  # 8192
        nn.init.ones_(weight)
        x = torch.ones(16, 32)  # 2048
        assert used() == 8192 + 2048
        y = x @ weight.t()  # 16 x 64: 4096
        z = y.exp()  # 4096, saved for backward
        loss = z.sum()  # 512
        assert used() == 8192 + 2048 + 4096 + 4096 + 512
        del y  # exp does not need its input
        assert used() == 8192 + 2048 + 4096 + 512
        del z  # held by the graph
        assert used() == 8192 + 2048 + 4096 + 512
        memory.reset_peak()
        base = memory.allocated_bytes - used()
        loss.backward()
        # d loss (512), d z (a view of it), d y (4096, then z is gone), d weight (8192)
        assert used() == 8192 + 2048 + 512 + 8192
        assert memory.peak_bytes - base == (8192 + 2048 + 512) + 512 + 4096 + 8192
        optimizer = torch.optim.AdamW([weight], foreach=True)
        optimizer.step()
        assert used() == 8192 + 2048 + 512 + 8192 + 2 * 8192 + 512  # two moments and a step count
        optimizer.zero_grad()
        del loss
        assert used() == 8192 + 2048 + 2 * 8192 + 512


def test_views_and_in_place_results_are_not_new() -> None:
    with measured() as (_, used):
        x = torch.zeros(1000)
        assert used() == 4096
        kept = [x.view(10, 100), x[5:], x.expand(3, 1000), x.detach(), x.add_(1), x.relu_(), *x.split(300)]
        kept += [
            private_aten("_unsafe_view.default")(x, [100, 10]),
            x.view(torch.int32),
            x.unsqueeze(0).transpose(0, 1),
        ]
        assert used() == 4096
        del x
        assert used() == 4096
        kept.clear()
        assert used() == 0


def test_what_was_alive_at_entry_counts_once() -> None:
    with virtual_memory(HUGE) as memory:
        before = memory.allocated_bytes
    x = torch.zeros(1000, requires_grad=True)
    views = [x.detach(), x[1:]]
    x.sum().backward()  # x.grad has no Python object yet
    with virtual_memory(HUGE) as memory:
        assert memory.allocated_bytes == before + 2 * 4096
        assert memory.peak_bytes == memory.allocated_bytes
        views.clear()
        x.grad = None
        assert memory.allocated_bytes == before + 4096
        del x
        assert memory.allocated_bytes == before


def test_more_alive_than_the_limit_is_allowed_until_something_is_allocated() -> None:
    x = torch.zeros(4 * MIB)
    with virtual_memory("1MiB") as memory:
        assert memory.allocated_bytes > memory.limit_bytes
        x.add_(1)
        assert x[3:].shape == (4 * MIB - 3,)
        assert torch.empty(0).numel() == 0
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(1)
        del x
        torch.empty(1)


@pytest.mark.parametrize("make", [torch.tensor, lambda values: torch.from_numpy(_numpy(values))])
def test_tensors_made_elsewhere_count_when_first_used(make: Callable[[list[float]], Tensor]) -> None:
    with measured() as (_, used):
        x = make([1.0] * 1000)
        total = x.sum()
        assert used() == block_bytes(x.untyped_storage().nbytes()) + 512
        del x, total
        assert used() == 0


def _numpy(values: list[float]) -> Any:
    import numpy

    return numpy.array(values)


def test_a_host_batch_that_does_not_fit_is_refused_where_it_is_first_used() -> None:
    import numpy

    batch = numpy.zeros(MIB, dtype=numpy.float32)
    with measured() as (memory, used), memory.lowered(memory.allocated_bytes + MIB):
        x = torch.from_numpy(batch[: MIB // 16])
        x.add_(1)
        assert used() == MIB // 4
        peak = memory.peak_bytes
        with pytest.raises(torch.OutOfMemoryError):
            torch.from_numpy(batch).add_(1)
        with pytest.raises(torch.OutOfMemoryError):
            torch.tensor(batch)
        with pytest.raises(torch.OutOfMemoryError):
            torch.tensor([0.0] * (MIB // 4))
        assert batch[-1] == 0
        assert (used(), memory.peak_bytes) == (MIB // 4, peak)


def test_out_and_resize_keep_the_count() -> None:
    with measured() as (memory, used):
        x = torch.ones(1000)
        out = torch.empty(0)
        torch.add(x, x, out=out)
        assert used() == 2 * 4096
        out.resize_(2000)
        assert used() == 4096 + 8192
        out.resize_(10)  # keeps its storage, as everywhere in torch
        assert used() == 4096 + 8192
        out.set_(x.untyped_storage(), 0, (10,))
        assert used() == 4096
        out.set_(torch.UntypedStorage(2000))
        assert used() == 4096 + 2048
        with memory.lowered(memory.allocated_bytes + 4096):
            with pytest.raises(torch.OutOfMemoryError):
                out.resize_(3000)
            with pytest.raises(torch.OutOfMemoryError):
                torch.cat([x, x], out=torch.empty(0))
            assert out.numel() == 500
        assert used() == 4096 + 2048


def test_storages_emptied_and_refilled_as_fsdp_does() -> None:
    with measured() as (memory, used):
        x = torch.ones(1000)
        storage = x.untyped_storage()
        storage.resize_(0)
        assert used() == 0
        with memory.lowered(memory.allocated_bytes + 4095):
            with pytest.raises(torch.OutOfMemoryError):
                storage.resize_(4000)
            assert storage.nbytes() == 0
        with memory.lowered(memory.allocated_bytes + 4096):
            storage.resize_(4000)
        assert used() == 4096
        x.fill_(2.0)
        memory.reset_peak()
        storage.resize_(8000)  # old and new live side by side
        assert memory.peak_bytes - memory.allocated_bytes == 4096
        del x, storage
        assert used() == 0


def test_a_freed_tensor_lowers_the_count_at_once() -> None:
    with measured() as (_, used):
        x = torch.zeros(1000)
        gone = weakref.ref(x)
        del x
        assert gone() is None
        assert used() == 0


def test_the_default_dtype_and_the_type_of_a_number_decide_the_size() -> None:
    whole = torch.ones(1000, dtype=torch.int32)
    single, double = torch.ones(1000), torch.ones(1000, dtype=torch.float64)
    cases: list[tuple[torch.dtype, Callable[[], Tensor], int]] = [
        (torch.float32, lambda: torch.zeros(1000), 4096),
        (torch.float64, lambda: torch.zeros(1000), 8192),
        (torch.float32, lambda: whole * 2.0, 4096),
        (torch.float64, lambda: whole * 2.0, 8192),
        (torch.float64, lambda: whole * 2, 4096),
        (torch.float32, lambda: single + single, 4096),
        (torch.float32, lambda: double + double, 8192),
        (torch.float32, lambda: torch.arange(0, 1000), 8192),
        (torch.float32, lambda: torch.arange(0.0, 1000.0), 4096),
        (torch.float64, lambda: torch.arange(0.0, 1000.0), 8192),
    ]
    with Seen() as seen, virtual_memory(HUGE) as memory:
        for dtype, make, size in cases * 2:
            torch.set_default_dtype(dtype)
            try:
                with memory.lowered(memory.allocated_bytes + size):
                    make()
                seen.names.clear()
                with memory.lowered(memory.allocated_bytes + size - 1), pytest.raises(torch.OutOfMemoryError):
                    make()
                assert seen.names == []
            finally:
                torch.set_default_dtype(torch.float32)


def test_an_address_that_is_used_again_is_a_new_storage() -> None:
    with measured() as (_, used):
        for _ in range(20):
            for use in (lambda x: x * 2, lambda x: x.mul_(2)):
                gone = torch.ones(1000)
                del gone
                with no_dispatch():  # as another thread would make it; most likely where `gone` was
                    x = torch.ones(1000)
                y = use(x)
                assert used() == (4096 if y is x else 2 * 4096)
                del x, y


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.LayerNorm(8).bfloat16(), (1000, 8)),
        (nn.BatchNorm1d(1000).eval(), (4, 1000)),
        (nn.BatchNorm1d(1000), (4, 1000)),
        (nn.EmbeddingBag(10, 8), None),
    ],
)
def test_the_statistics_of_norms_are_not_overestimated(
    layer: nn.Module, shape: tuple[int, ...] | None
) -> None:
    dtype = next(layer.parameters()).dtype
    x = torch.ones(shape, dtype=dtype) if shape else torch.zeros((300, 2), dtype=torch.int64)
    with torch.no_grad(), virtual_memory(HUGE) as memory:
        held = memory.allocated_bytes
        layer(x)
        needed = memory.peak_bytes - held
        op_sizes.SIZES.clear()
        with memory.lowered(held + needed):
            layer(x)
        op_sizes.SIZES.clear()
        with memory.lowered(held + needed - 1), pytest.raises(torch.OutOfMemoryError):
            layer(x)


# --- the error ---------------------------------------------------------------------------------------------


def test_the_error_is_a_gpus_and_says_what_it_is() -> None:
    with virtual_memory("64MiB") as memory:
        with pytest.raises(RuntimeError) as caught:
            torch.randn(600_000_000)
        assert memory.peak_bytes < MIB
    assert type(caught.value) is torch.OutOfMemoryError
    text = str(caught.value)
    for part in (
        "CUDA out of memory. Tried to allocate 2.24 GiB",
        "virtual memory",
        "64.0 MiB",
        "free",
        "hold",
    ):
        assert part in text


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_refused_operation_takes_no_memory() -> None:
    script = """
import torch
from batchfit._engine.virtual_memory.memory import virtual_memory
def resident_bytes():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
def grown_bytes(refused):
    before = resident_bytes()
    with virtual_memory("64MiB"):
        try:
            refused()
        except torch.OutOfMemoryError:
            print(resident_bytes() - before)
grown_bytes(lambda: torch.randn(600_000_000))
torch.empty(1, device="meta") + 1  # the first such call imports a part of torch that is 70 MB of Python
one = torch.ones(1)
grown_bytes(lambda: one.expand(600_000_000) + 1)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    grown = [int(line) for line in done.stdout.split()]
    assert len(grown) == 2
    assert max(grown) < 64 * MIB


@pytest.mark.parametrize(
    ("make", "asked"),
    [
        (lambda _: torch.zeros(1000), 4096),
        (lambda _: torch.rand(1000, dtype=torch.float64), 8192),
        (lambda _: torch.full((1000,), 1), 8192),
        (lambda _: torch.arange(0.0, 1000.0), 4096),
        (lambda one: one.expand(1000) + 1, 4096),
        (lambda one: one.expand(1000).to(torch.bfloat16), 2048),
        (lambda one: one.expand(30, 40).contiguous(), 5120),
        (lambda one: one.expand(40, 40) @ one.expand(40, 40), 6656),
        (lambda one: foreach_mul([one.expand(1000)] * 3, 2.0), 3 * 4096),
    ],
)
@pytest.mark.parametrize("warm", [True, False], ids=["sizes known", "sizes computed"])
def test_what_does_not_fit_never_runs(make: Callable[[Tensor], Any], asked: int, warm: bool) -> None:
    one = torch.ones(1)
    with Seen() as seen, measured() as (memory, used):
        result = make(one)
        name = seen.names[-1]
        assert used() == asked
        del result
        for room, runs in [(asked - 1, 0), (asked, 1)]:
            if not warm:
                op_sizes.SIZES.clear()
            seen.names.clear()
            with memory.lowered(memory.allocated_bytes + room):
                try:
                    make(one)
                except torch.OutOfMemoryError:
                    assert not runs
                else:
                    assert runs
            assert seen.names.count(name) == runs


def test_the_error_holds_no_tensor_that_the_program_does_not() -> None:
    def fails() -> None:
        (torch.ones(MIB) * 2).repeat(64)

    with measured() as (memory, used), memory.lowered(memory.allocated_bytes + 32 * MIB):
        try:
            fails()
        except torch.OutOfMemoryError as error:
            kept: Exception = error
        assert kept.__traceback__ is not None
        assert used() == 0


@pytest.mark.parametrize(
    ("operation", "size", "name"),
    [
        (lambda x: x[x > 0], 4_000_000, "index"),
        (lambda x: x.view(1000, 1000)[x.view(1000, 1000)[:, 0] > 0], 4_000_000, "index"),
        (lambda x: x.view(10, 100, 1000)[2:, x.view(10, 100, 1000)[0] > 0], 3_200_000, "index"),
        (lambda x: torch.nonzero(x.view(1000, 1000)[:500]), 8_000_000, "nonzero"),
        (lambda x: torch.masked_select(x, x[:1] > 0), 4_000_000, "masked_select"),
        (
            lambda x: torch.ops.aten.repeat_interleave.Tensor(x[:1000].long() * 500),
            4_000_000,
            "repeat_interleave",
        ),
        (lambda x: torch.bincount(x[:10].long() * 500_000), 4_000_008, "bincount"),
        (lambda x: torch.unique(x), 0, None),  # can only be counted after it ran
    ],
)
def test_operations_that_depend_on_the_data(
    operation: Callable[[Tensor], Tensor], size: int, name: str | None
) -> None:
    x = torch.ones(1_000_000)
    with Seen() as seen, measured() as (memory, used):
        result = operation(x)
        assert used() == block_bytes(result.untyped_storage().nbytes()) >= block_bytes(size)
        del result
        assert used() == 0
        memory.reset_peak()
        operation(x)
        needed = memory.peak_bytes - memory.allocated_bytes
        seen.names.clear()
        with memory.lowered(memory.allocated_bytes + needed):
            operation(x)
        with memory.lowered(memory.allocated_bytes + needed - 1), pytest.raises(torch.OutOfMemoryError):
            operation(x)
        assert used() == 0
        if name is not None:
            assert sum(f"aten.{name}." in op for op in seen.names) == 1, seen.names


def test_an_operation_without_a_meta_kernel_is_counted_after_it_ran() -> None:
    with measured() as (memory, used):
        x = torch.zeros(1000, dtype=torch.float64)
        result = torch.histogram(x, 500)
        assert used() == 8192 + 4096 + 4096
        del result
        with memory.lowered(memory.allocated_bytes + 8191), pytest.raises(torch.OutOfMemoryError):
            torch.histogram(x, 500)
        assert used() == 8192


# --- training ----------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in parts)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, *, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return result


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, 5)
    )


def conv_net() -> nn.Module:
    return nn.Sequential(
        *(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Dropout(0.2), nn.Flatten(), nn.Linear(72, 5)),
    )


def gpt() -> nn.Module:
    blocks = [Attention(32), Checkpointed(Attention(32, 0.1), reentrant=False)]
    return nn.Sequential(
        *(nn.Unflatten(1, (8, 8)), nn.Linear(8, 32), *blocks, nn.LayerNorm(32)),
        nn.Flatten(),
        nn.Linear(256, 5),
    )


def reentrant() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), Checkpointed(mlp(), reentrant=True))


def bf16_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 5)).bfloat16()


class Training:
    """A model, its optimizer and a batch; `step()` is one training step."""

    def __init__(self, make: Callable[[], nn.Module], **options: Any) -> None:
        torch.manual_seed(0)
        self.model = make()
        params = list(self.model.parameters())
        self.dtype = params[0].dtype
        self.autocast = options.pop("autocast", False)
        self.scaler = torch.amp.GradScaler("cpu") if options.pop("scaler", False) else None
        self.clip = options.pop("clip", False)
        self.optimizer = options.pop("optimizer", lambda p: torch.optim.AdamW(p, foreach=True))(params)
        self.x = torch.randn(16, 64, dtype=self.dtype)
        self.target = torch.randint(5, (16,))

    def step(self) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            loss = functional.cross_entropy(self.model(self.x).float(), self.target)
        (self.scaler.scale(loss) if self.scaler else loss).backward()
        if self.clip:
            if self.scaler:
                self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> list[Tensor]:
        return [tensor.detach().clone() for tensor in self.model.state_dict().values()]


RECIPES: dict[str, dict[str, Any]] = {
    "mlp": {"make": mlp},
    "conv net": {"make": conv_net},
    "gpt": {"make": gpt},
    "reentrant checkpoint": {"make": reentrant},
    "bf16 weights": {"make": bf16_norm},
    "autocast, scaler, clipping": {"make": gpt, "autocast": True, "scaler": True, "clip": True},
    "conv net, autocast": {"make": conv_net, "autocast": True},
    "AdamW one by one": {"make": conv_net, "optimizer": lambda p: torch.optim.AdamW(p, foreach=False)},
    "AdamW fused": {"make": mlp, "optimizer": lambda p: torch.optim.AdamW(p, fused=True)},
    "SGD": {"make": conv_net, "optimizer": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True)},
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_training_is_bit_for_bit_the_same(recipe: str) -> None:
    plain, counted = Training(**RECIPES[recipe]), Training(**RECIPES[recipe])
    torch.manual_seed(1)
    for _ in range(3):
        plain.step()
    torch.manual_seed(1)
    with virtual_memory(HUGE):
        for _ in range(3):
            counted.step()
    for a, b in zip(plain.state(), counted.state(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("warm", [True, False], ids=["sizes known", "sizes computed"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_runs_at_its_peak_and_fails_one_byte_below(recipe: str, warm: bool) -> None:
    training = Training(**RECIPES[recipe])
    with virtual_memory(HUGE) as memory:
        training.step()
        training.step()
        held = memory.allocated_bytes
        memory.reset_peak()
        training.step()
        peak = memory.peak_bytes
        assert peak > held == memory.allocated_bytes
    for _ in range(2):
        if not warm:
            op_sizes.SIZES.clear()
        with virtual_memory(peak - 1), pytest.raises(torch.OutOfMemoryError):
            training.step()
        training.optimizer.zero_grad()
        if training.scaler:
            training.scaler.update(1024.0)
        if not warm:
            op_sizes.SIZES.clear()
        with virtual_memory(peak) as memory:
            training.step()
            assert memory.peak_bytes == peak
            assert memory.allocated_bytes == held


class FailAt(TorchDispatchMode):
    """Lets the operation at `index` find no memory left, and looks at what it did nevertheless."""

    def __init__(self, index: int, memory: VirtualMemory, model: nn.Module) -> None:
        super().__init__()
        self.index, self.memory, self.model = index, memory, model
        self.refused: str | None = None
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.calls += 1
        if self.calls - 1 != self.index:
            return func(*args, **kwargs)
        with no_dispatch():
            tensors = [*op_sizes.tensors_in([*args, *kwargs.values()]), *self.model.state_dict().values()]
            before = [tensor.clone() for tensor in tensors]
            random = torch.get_rng_state()
        try:
            with self.memory.lowered(self.memory.allocated_bytes):
                return func(*args, **kwargs)
        except torch.OutOfMemoryError:
            self.refused = str(func)
            with no_dispatch():
                for tensor, copied in zip(tensors, before, strict=True):
                    assert tensor.shape == copied.shape
                    assert torch.equal(tensor, copied), func
                assert torch.equal(torch.get_rng_state(), random), func
            raise


def test_an_operation_that_is_refused_has_done_nothing() -> None:
    refused: list[str] = []
    training = Training(conv_net)
    with virtual_memory(HUGE) as memory:
        training.step()
        held = memory.allocated_bytes
        index = 0
        while True:
            fail = FailAt(index, memory, training.model)
            try:
                with fail:
                    training.step()
            except torch.OutOfMemoryError:
                assert fail.refused is not None
                refused.append(fail.refused)
            else:
                assert fail.refused is None
            training.optimizer.zero_grad()
            assert memory.allocated_bytes == held
            if index >= fail.calls:
                break
            index += 1
    assert len(refused) > 20
    assert {"aten.convolution.default", "aten.native_batch_norm.default"} <= set(refused)
    assert any("foreach" in name for name in refused), refused
    assert any("backward" in name for name in refused), refused


@pytest.mark.parametrize("recipe", ["conv net", "AdamW one by one"])
def test_no_leak_over_many_steps(recipe: str) -> None:
    training = Training(**RECIPES[recipe])
    with virtual_memory(HUGE) as memory:
        for _ in range(3):
            training.step()
        before = (memory.allocated_bytes, memory.peak_bytes, len(ledger_of(memory).held), len(op_sizes.SIZES))
        for _ in range(200):
            training.step()
        assert (
            memory.allocated_bytes,
            memory.peak_bytes,
            len(ledger_of(memory).held),
            len(op_sizes.SIZES),
        ) == before


def test_generation_and_training_of_transformers_models() -> None:
    from conftest import need

    try:
        import transformers
    except ImportError:
        need("transformers", present=False)
    transformers.logging.set_verbosity_error()
    config = transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config)
    tokens = torch.randint(1, 64, (2, 8))

    def use() -> list[Tensor]:
        torch.manual_seed(2)
        model.zero_grad()
        model.train()
        model(input_ids=tokens, labels=tokens).loss.backward()
        made = model.eval().generate(
            tokens, max_new_tokens=6, min_new_tokens=6, do_sample=True, pad_token_id=0
        )
        return [made, *(p.grad for p in model.parameters() if p.grad is not None)]

    plain = [tensor.clone() for tensor in use()]
    with virtual_memory(HUGE) as memory:
        assert all(map(torch.equal, plain, use()))
        model.zero_grad()
        held = memory.allocated_bytes
        memory.reset_peak()
        use()
        model.zero_grad()
        assert memory.allocated_bytes == held
        with memory.lowered(memory.peak_bytes):
            use()
        model.zero_grad()
        with memory.lowered(memory.peak_bytes - 1), pytest.raises(torch.OutOfMemoryError):
            use()

    resnet = transformers.ResNetForImageClassification(
        transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=4)
    )
    images = torch.randn(2, 3, 32, 32)
    twin = copy.deepcopy(resnet)
    resnet(images).logits.sum().backward()
    with virtual_memory(HUGE):
        twin(images).logits.sum().backward()
    for a, b in zip(resnet.parameters(), twin.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert torch.equal(a.grad, b.grad)


# --- nesting, leaving, threads -----------------------------------------------------------------------------


def test_an_inner_limit_is_lower_and_shares_the_count() -> None:
    with virtual_memory("2GiB") as outer:
        assert active() is outer
        with virtual_memory("1MiB") as inner:
            assert inner is outer
            assert outer.limit_bytes == MIB
            with outer.lowered(4096):
                assert outer.limit_bytes == 4096
            with pytest.raises(torch.OutOfMemoryError):
                torch.empty(2 * MIB)
            with pytest.raises(ValueError, match=r"1048576 bytes\), not '2MiB'"), outer.lowered("2MiB"):
                pass
            with pytest.raises(ValueError, match="1048576"), virtual_memory("1GiB"):
                pass
            assert outer.limit_bytes == MIB
        assert outer.limit_bytes == 2 * 2**30
        torch.empty(2 * MIB)
        with pytest.raises(KeyError), outer.lowered(4096):
            raise KeyError
        assert outer.limit_bytes == 2 * 2**30
        with virtual_memory("2GiB"):
            pass


@pytest.mark.parametrize("limit", [0, -1, "0GiB", "24 gigs", ""])
def test_a_limit_that_makes_no_sense_is_refused(limit: Any) -> None:
    with pytest.raises(ValueError, match="limit must be"), virtual_memory(limit):
        pass


@pytest.mark.parametrize("limit", [None, 1.5, True])
def test_a_limit_of_another_type_is_refused(limit: Any) -> None:
    with pytest.raises(TypeError, match="limit must be"), virtual_memory(limit):
        pass


@pytest.mark.parametrize("fails", [False, True])
def test_leaving_undoes_everything(fails: bool) -> None:
    kept = []
    outside = torch.ones(1000)
    with contextlib.suppress(KeyboardInterrupt), virtual_memory(HUGE) as memory:
        kept += [torch.ones(1000), outside]
        dropped = torch.ones(500)
        assert weakref.getweakrefcount(kept[0].untyped_storage()) == 1
        del dropped
        if fails:
            raise KeyboardInterrupt
    assert active() is None
    for tensor in kept:
        assert weakref.getweakrefcount(tensor.untyped_storage()) == 0
    figures = (memory.allocated_bytes, memory.peak_bytes)
    kept.clear()
    del outside
    gc.collect()
    torch.ones(10_000_000)
    assert (memory.allocated_bytes, memory.peak_bytes) == figures


def test_an_entry_that_is_drained_twice_is_counted_once() -> None:
    # What Ctrl-C between two bytecodes of the drain would leave behind.
    with measured() as (memory, used):
        x = torch.ones(1000)
        held = ledger_of(memory).held[storage_address(x)]
        del x
        assert used() == 0
        ledger_of(memory).freed.append(held)
        assert used() == 0


def test_a_finalizer_that_drains_while_we_drain_is_no_trouble() -> None:
    with measured() as (memory, used):

        class Reads(dict[int, Any]):
            """Stands for a garbage collection in the middle of the drain."""

            inside = False

            def get(self, key: int, default: Any = None) -> Any:
                found = super().get(key, default)
                if not self.inside:
                    self.inside = True
                    ledger_of(memory).drain()
                    self.inside = False
                return found

        tensors = [torch.ones(1000) for _ in range(3)]
        ledger_of(memory).held = Reads(ledger_of(memory).held)
        tensors.clear()
        assert used() == 0
        assert not ledger_of(memory).freed


def test_other_threads_are_not_counted_but_may_free() -> None:
    with measured() as (_, used):
        here = [torch.ones(1000) for _ in range(50)]
        seen: list[object] = []

        def other() -> None:
            seen.append(active())
            seen.append(torch.ones(1000))
            here.clear()

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert seen[0] is None
        assert used() == 0
        there = seen.pop()
        assert isinstance(there, Tensor)
        there.add_(1)  # seen for the first time
        assert used() == 4096


def test_the_count_holds_while_threads_free() -> None:
    with measured() as (memory, used):
        queue: list[Tensor] = []
        done = threading.Event()

        def free() -> None:
            while not done.is_set() or queue:
                with contextlib.suppress(IndexError):
                    queue.pop()

        threads = [threading.Thread(target=free) for _ in range(2)]
        for thread in threads:
            thread.start()
        for number in range(2000):
            queue.append(torch.empty(100 + number % 300))
            assert memory.peak_bytes >= memory.allocated_bytes
        done.set()
        for thread in threads:
            thread.join()
        assert used() == 0


def test_a_forked_worker_is_host_memory() -> None:
    script = """
import torch
from torch.utils.data import DataLoader, Dataset
from batchfit._engine.virtual_memory.memory import virtual_memory
class Wide(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return torch.ones(4_000_000).sum().reshape(1)
with virtual_memory("1MiB") as memory:
    batches = [batch.sum().item() for batch in DataLoader(Wide(), batch_size=2, num_workers=1)]
    try:
        Wide()[0]
    except torch.OutOfMemoryError:
        print(batches)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout == "[8000000.0, 8000000.0]\n", done.stderr


# --- other tensors and modes -------------------------------------------------------------------------------


def test_meta_and_fake_tensors_are_not_counted() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    op_sizes.SIZES.clear()
    with Seen() as seen, measured("1GiB") as (memory, used):
        big = torch.empty(10**12, device="meta") + 1
        assert torch.cat([big, big]).shape == (2 * 10**12,)
        with FakeTensorMode() as mode:
            fake = torch.empty(10**12)
            assert (fake * fake).shape == fake.shape
            small = torch.empty(1000)
            inside = mode.from_tensor(torch.nn.Parameter(torch.empty(4)))
            (inside * 2).sum().backward()
        assert (fake + 1).shape == fake.shape
        del small
        assert used() == 0
        seen.names.clear()
        with memory.lowered(memory.allocated_bytes + 1024), pytest.raises(torch.OutOfMemoryError):
            torch.empty(1000)  # the fake one of that size is not what it will take
        assert seen.names == []


def test_a_virtual_memory_inside_a_fake_mode_counts_nothing() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), measured("1GiB") as (_, used):
        fake = torch.empty(10**12) + 1
        assert fake.shape == (10**12,)
        assert used() == 0


class Wrapper(Tensor):
    """A tensor that holds another one, as DTensor does."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        made: Wrapper = wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def unwrap(value: Any) -> Any:
            return value.inner if isinstance(value, Wrapper) else value

        return Wrapper(func(*map(unwrap, args), **(kwargs or {})))


class Named(Tensor):
    """A subclass without a dispatch of its own: an ordinary tensor."""


def test_subclasses() -> None:
    with measured() as (memory, used):
        wrapped = Wrapper(torch.ones(1000))
        doubled = wrapped * 2
        assert isinstance(doubled, Wrapper)
        assert used() == 2 * 4096
        named = torch.ones(1000).as_subclass(Named)
        assert type(named + 1) is Named
        assert used() == 3 * 4096
        with memory.lowered(memory.allocated_bytes):
            with pytest.raises(torch.OutOfMemoryError):
                wrapped * 2
            with pytest.raises(torch.OutOfMemoryError):
                named * 2
    with virtual_memory(HUGE) as again:
        assert again.allocated_bytes == memory.allocated_bytes


def test_lazy_modules_and_sparse_tensors() -> None:
    lazy = nn.LazyLinear(3)
    sparse = torch.eye(4).to_sparse()
    embedding = nn.Embedding(100, 16, sparse=True)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
    with measured() as (_, used):
        assert lazy(torch.ones(2, 5)).shape == (2, 3)
        assert torch.equal(torch.sparse.mm(sparse, torch.ones(4, 2)), torch.ones(4, 2))
        optimizer.step()
        optimizer.zero_grad()
        before = used()
        embedding(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert used() == before


@pytest.mark.parametrize("function", [torch.nn.functional.silu, torch.nn.functional.mish])
def test_a_gradient_that_is_one_kernel_is_not_taken_apart(function: Any) -> None:
    """Both also have a way in several operations, for devices without a kernel of their own."""
    x = torch.randn(4096, requires_grad=True)
    function(x).sum().backward()
    plain, x.grad = x.grad, None
    assert plain is not None
    with virtual_memory("1GiB") as memory:
        total = function(x).sum()
        memory.reset_peak()
        before = memory.allocated_bytes
        total.backward()
        # The gradient of the sum is a number, that of the function a vector: no copies of it in between.
        assert memory.peak_bytes - before < 2 * plain.nbytes
        assert torch.equal(x.grad, plain)


def test_the_intermediates_of_composite_operations_are_seen_in_inference_mode() -> None:
    # There torch hands `pairwise_distance`, `linear` and `to` to a dispatch mode whole.
    a, b = torch.ones(64, 256), torch.zeros(64, 256)
    layer = nn.Linear(256, 256)
    whole = 64 * 256 * 4
    for mode in (torch.no_grad, torch.inference_mode):
        with measured() as (memory, _), mode():
            memory.reset_peak()
            functional.pairwise_distance(a, b)  # a difference, and the difference plus epsilon
            assert 2 * whole < memory.peak_bytes - memory.allocated_bytes < 2.1 * whole
            memory.reset_peak()
            layer(a).to(torch.float64)
            assert memory.peak_bytes - memory.allocated_bytes == 3 * whole


def test_functorch_and_compile_run() -> None:
    x = torch.arange(12.0).reshape(3, 4)

    def f(row: Tensor) -> Tensor:
        return (row.sin() * 2).sum()

    module = nn.Linear(4, 4)
    compiled = torch.compile(module, backend="eager")
    with measured() as (_, used):
        assert torch.equal(torch.vmap(f)(x), torch.stack([f(row) for row in x]))
        assert torch.func.grad(f)(x[0]).shape == (4,)
        with torch.no_grad():
            assert torch.equal(compiled(x), module(x))
        assert used() == 0


@pytest.mark.parametrize("before", [False, True], ids=["first called inside", "called before"])
def test_what_is_compiled_runs_eagerly_inside_and_compiles_afterwards(before: bool) -> None:
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        def run(*given: Any) -> Any:
            graphs.append(1)
            return graph.forward(*given)

        return run

    compiled = torch.compile(nn.Linear(4, 4), backend=backend)
    x = torch.ones(3, 4)
    if before:
        compiled(x)
    graphs.clear()
    with virtual_memory("1MiB"):
        expected = compiled(x)
    assert graphs == []
    assert torch.equal(compiled(x), expected)
    assert graphs == [1]


# --- any program -------------------------------------------------------------------------------------------

SIZE = st.integers(min_value=0, max_value=3000)
PICK = st.integers(min_value=0, max_value=10**6)
OPERATION = st.one_of(
    st.tuples(
        st.just("new"), SIZE, st.sampled_from([torch.float32, torch.int64, torch.bool, torch.bfloat16])
    ),
    st.tuples(st.sampled_from(["view", "copy", "in place", "scaled", "free", "mask", "grow"]), PICK, SIZE),
    st.tuples(st.just("join"), PICK, PICK),
)


class Reference:
    """What must be counted: handles on storages, each with its bytes."""

    def __init__(self) -> None:
        self.storage_of: list[int] = []
        self.bytes_of: dict[int, int] = {}
        self.peak = 0

    def live(self) -> int:
        return sum(block_bytes(self.bytes_of[s]) for s in set(self.storage_of))

    def add(self, size: int) -> None:
        number = len(self.bytes_of)
        self.bytes_of[number] = size
        self.storage_of.append(number)


def apply(tensors: list[Tensor], reference: Reference, operation: Any) -> tuple[int, Callable[[], None]]:
    """What the operation asks for, and a function that does it to both."""
    kind, first, second = operation
    if kind == "new":
        size = first * second.itemsize
        return size, lambda: (tensors.append(torch.zeros(first, dtype=second)), reference.add(size))[1]
    if not tensors:
        return 0, lambda: None
    pick = first % len(tensors)
    x = tensors[pick]
    plain = x.numel() * x.element_size()

    def keep(make: Callable[[], Tensor], size: int) -> tuple[int, Callable[[], None]]:
        return size, lambda: (tensors.append(make()), reference.add(size))[1]

    def free() -> None:
        del tensors[pick], reference.storage_of[pick]

    def view() -> None:
        tensors.append(x[second % (x.numel() + 1) :])
        reference.storage_of.append(reference.storage_of[pick])

    def grow() -> None:
        x.resize_(x.numel() + second)
        storage = reference.storage_of[pick]
        reference.bytes_of[storage] = max(grown, reference.bytes_of[storage])

    grown = (x.storage_offset() + x.numel() + second) * x.element_size()
    if kind == "free":
        return 0, free
    if kind == "view":
        return 0, view
    if kind == "in place":
        return 0, lambda: (x.zero_(), None)[1]
    if kind == "grow":
        return (grown if grown > reference.bytes_of[reference.storage_of[pick]] else 0), grow
    if kind == "copy":
        return keep(x.clone, plain)
    if kind == "scaled":
        return keep(lambda: x * 2, plain if x.dtype is not torch.bool else x.numel() * 8)
    if kind == "mask":
        return keep(lambda: x[_mask(x, second)], (x.numel() if second % 2 else 0) * x.element_size())
    other = tensors[second % len(tensors)]
    dtype = torch.result_type(x, other)
    return keep(lambda: torch.cat([x, other]), (x.numel() + other.numel()) * dtype.itemsize)


def _mask(x: Tensor, second: int) -> Tensor:
    with no_dispatch():
        return torch.full(x.shape, bool(second % 2))


def test_any_program_is_counted_like_the_reference() -> None:
    with virtual_memory(HUGE) as memory:

        @examples(200)
        @given(program=st.lists(OPERATION, max_size=25), limit=st.integers(min_value=512, max_value=60_000))
        def check(program: list[Any], limit: int) -> None:
            memory.reset_peak()
            with memory.lowered(memory.allocated_bytes + limit):
                run_beside_the_reference(program, limit, memory)

        check()


def run_beside_the_reference(program: list[Any], limit: int, memory: VirtualMemory) -> None:
    tensors: list[Tensor] = []
    reference = Reference()
    base = memory.allocated_bytes
    for operation in program:
        asked, run = apply(tensors, reference, operation)
        # A mask from outside is seen by the index that it is given to, and counts there.
        beside = (
            block_bytes(tensors[operation[1] % len(tensors)].numel()) if _masks(operation, tensors) else 0
        )
        top = reference.live() + block_bytes(asked) + beside
        if (asked or beside) and top > limit:
            count = len(tensors)
            with pytest.raises(torch.OutOfMemoryError):
                run()
            assert len(tensors) == count
        else:
            run()
            reference.peak = max(reference.peak, top)
        del run
        assert memory.allocated_bytes - base == reference.live()
        assert memory.peak_bytes - base == reference.peak
    tensors.clear()
    assert memory.allocated_bytes == base


def _masks(operation: Any, tensors: list[Tensor]) -> bool:
    return operation[0] == "mask" and bool(tensors)
