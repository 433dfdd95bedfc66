"""Values that depend on shapes alone are known in a trace, those of data never, whatever touched them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from state_judge import Notes
from torch import nn
from torch_private import foreach_add_, foreach_mul_, private_aten

import batchfit
from batchfit._engine.trace.trace import trace
from batchfit._engine.trace.values import written_by
from batchfit._engine.trace.workload import rules_for
from batchfit.errors import UntraceableError

aten = torch.ops.aten
Read = Callable[[torch.device, torch.Tensor], Any]


def told(read: Read) -> Any:
    """What a step learns when it reads a value on the device; `data` is a tensor of ones that it must not."""
    found = Notes()

    def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
        out = model(batch)
        found.append(read(out.device, out))
        return out.sum()

    work = batchfit.training(nn.Linear(3, 3), None, loss, lambda n: torch.ones(n, 3))
    trace(work, 2, rules=rules_for(work), steps=1)
    return found[0]


def refused(read: Read) -> bool:
    with pytest.raises(UntraceableError, match="depends on the data"):
        told(lambda device, data: bool(read(device, data)))  # showing a value is no reading of it
    return True


@pytest.mark.parametrize(
    ("read", "value"),
    [
        (lambda d, x: torch.arange(5, device=d).max().item(), 4),
        (lambda d, x: torch.arange(1, 5, device=d).sum().item(), 10),
        (lambda d, x: torch.zeros(3, device=d, dtype=int).add_(2)[1].item(), 2),
        (lambda d, x: torch.ones(2, 2, device=d, dtype=int).tril().tolist(), [[1, 0], [1, 1]]),
        (lambda d, x: bool(torch.ones_like(x, dtype=torch.bool).all()), True),
        (lambda d, x: bool(torch.ones(2, 4, device=d).all()), True),
        (lambda d, x: torch.ones(1, 3, device=d).cumsum(1).long().tolist(), [[1, 2, 3]]),
        (lambda d, x: x.new_full((2,), 7, dtype=torch.long).sum().item(), 14),
        (lambda d, x: (torch.arange(6, device=d).view(2, 3) > 2).nonzero().shape, (3, 2)),
        (lambda d, x: torch.full((), 3, device=d).item(), 3),
        # No such tensor is made on the host.
        (lambda d, x: torch.empty(2**50, device=d).new_ones(()).item(), 1),
        (lambda d, x: bool((torch.arange(4, device=d).diff() == 1).all()), True),
    ],
)
def test_what_shapes_alone_say_is_known(read: Read, value: Any) -> None:
    assert told(read) == value


@pytest.mark.parametrize(
    "read",
    [
        lambda d, x: x.sum().item(),
        lambda d, x: (torch.ones_like(x) * x).sum().item(),
        lambda d, x: torch.rand(2, device=d).sum().item(),
        lambda d, x: torch.zeros(2, device=d).normal_().sum().item(),
        lambda d, x: torch.rand_like(torch.zeros(2, device=d)).sum().item(),
        lambda d, x: torch.nn.functional.dropout(torch.ones(4, device=d)).sum().item(),
        lambda d, x: torch.zeros_like(x).copy_(x.detach()).sum().item(),
    ],
)
def test_what_came_from_data_or_chance_is_not(read: Read) -> None:
    assert refused(read)


def test_a_value_written_with_something_unknown_is_unknown() -> None:
    def by_its_view(device: torch.device, data: torch.Tensor) -> Any:
        known = torch.zeros(4, device=device, dtype=torch.long)
        known[1:3].copy_(data.detach()[0, :2])
        return known[0].item()

    def by_out(device: torch.device, data: torch.Tensor) -> Any:
        known = torch.zeros(2, 3, device=device, dtype=torch.long)
        torch.add(data.detach().long(), 1, out=known)
        return known.sum().item()

    def by_a_list(device: torch.device, data: torch.Tensor) -> Any:
        known = torch.zeros(2, 3, device=device, dtype=torch.long)
        foreach_add_([known], [data.detach().long()])
        return known.sum().item()

    assert all(refused(read) for read in (by_its_view, by_out, by_a_list))


def test_known_values_are_followed_through_writes() -> None:
    def view(device: torch.device, data: torch.Tensor) -> Any:
        known = torch.zeros(4, device=device, dtype=torch.long)
        known[1:3].fill_(5)
        return known.tolist()

    def foreach(device: torch.device, data: torch.Tensor) -> Any:
        known = torch.zeros(4, device=device, dtype=torch.long)
        foreach_add_([known], 1)  # not followed: then it must not be told as it was
        return known.sum().item()

    assert told(view) == [0, 5, 5, 0]
    assert refused(foreach)


def test_a_value_that_is_replaced_or_written_in_silence_is_unknown() -> None:
    def by_data(device: torch.device, data: torch.Tensor) -> Any:
        known = torch.ones(2, 3, device=device)
        known.data = data.detach() * 0
        return known.all()

    def by_a_norm(device: torch.device, data: torch.Tensor) -> Any:
        variance = torch.ones(1, 3, device=device).view(-1)
        nn.functional.batch_norm(data.detach(), torch.zeros(3, device=device), variance, training=True)
        return (variance == 1).all()

    assert all(refused(read) for read in (by_data, by_a_norm))


def test_ones_lie_in_memory_as_what_they_are_like() -> None:
    def turned(device: torch.device, data: torch.Tensor) -> Any:
        like = torch.ones_like(data.t())
        like[0] = 0
        flat = (torch.ones_like(data.t()).t().view(-1) * data.view(-1)).shape
        return like.as_strided((6,), (1,)).tolist(), tuple(flat)

    assert told(turned) == ([0, 1, 1, 0, 1, 1], (6,))


def test_operations_of_others_are_not_run_to_know_their_result() -> None:
    lib = torch.library.Library("batchfit_test_known", "DEF")
    try:
        lib.define("blocks(Tensor mask) -> Tensor")
        torch.library.register_fake("batchfit_test_known::blocks")(lambda mask: torch.empty_like(mask))

        def blocks(device: torch.device, data: torch.Tensor) -> Any:
            return torch.ops.batchfit_test_known.blocks(torch.ones(2, 3, device=device))

        # There is no kernel of the host.
        assert told(lambda device, data: tuple(blocks(device, data).shape)) == (2, 3)
        assert refused(lambda device, data: blocks(device, data).all())
    finally:
        lib._destroy()


@pytest.mark.parametrize("way", ["item", "copy", "running", "foreach"])
def test_a_tensor_of_the_host_that_holds_what_the_device_made_is_not_read(way: str) -> None:
    history, one, running = torch.zeros(10), torch.zeros(()), torch.zeros(3)

    def read(device: torch.device, data: torch.Tensor) -> Any:
        made = data.detach()
        if way == "item":
            history[0] = made.mean()
            return history[0] > 0
        if way == "copy":
            one.copy_(made.mean())
            return one > 0
        if way == "running":
            running.mul_(0.9).add_(made.mean(0))
        else:
            foreach_mul_([running], [made.mean(0)])
        return running.sum() > 0

    assert refused(read)
    assert not any(tensor.any() for tensor in (history, one, running))


def test_it_may_be_shown() -> None:
    history = torch.zeros(10)

    def read(device: torch.device, data: torch.Tensor) -> Any:
        history[0] = data.detach().mean()
        return f"{history[0].item():.3f}"

    assert told(read) == "?"


def test_a_refusal_that_the_program_catches_is_one_all_the_same() -> None:
    def read(device: torch.device, data: torch.Tensor) -> Any:
        try:
            return bool((data.detach() > 0).all())
        except Exception:  # noqa: BLE001
            return False

    def shaped(device: torch.device, data: torch.Tensor) -> Any:
        try:
            return len(data.detach().nonzero())
        except Exception:  # noqa: BLE001
            return 0

    def compared(device: torch.device, data: torch.Tensor) -> Any:
        try:
            return data.detach().sum().item() > 0
        except Exception:  # noqa: BLE001
            return False

    assert all(refused(one) for one in (read, shaped, compared))


def test_a_tensor_times_a_number_that_nobody_knows_is_a_tensor() -> None:
    shape = told(lambda d, x: tuple((x.detach() * (1 / (x.detach().norm().item() + 1))).shape))
    assert shape == (2, 3)


def test_memory_of_the_device_is_not_handed_out() -> None:
    with pytest.raises(UntraceableError, match="another library"):
        told(lambda d, x: torch.from_dlpack(x.detach()).clone())


def test_a_branch_on_a_mask_is_taken_as_it_would_be() -> None:
    """As libraries do: a mask that is all true is left out."""
    sizes = {}
    for length in (4, 5):

        def loss(model: Any, batch: torch.Tensor, length: int = length) -> torch.Tensor:
            mask = torch.ones(length, device=batch.device, dtype=torch.bool)
            mask[4:] = False
            out = model(batch)
            return out.sum() if bool(mask.all()) else out.masked_fill(~mask[:1], 0).sum()

        work = batchfit.training(nn.Linear(64, 64), None, loss, lambda n: torch.ones(n, 64))
        sizes[length] = {o.operation for o in trace(work, 2, rules=rules_for(work), steps=1).origins}
    assert not any("masked_fill" in one for one in sizes[4])
    assert any("masked_fill" in one for one in sizes[5])


@pytest.mark.parametrize(
    ("mask", "hides"),
    [
        (lambda n: torch.ones(n, 4, dtype=torch.long), False),
        (lambda n: torch.ones(n, 4, dtype=torch.bool), False),
        (lambda n: torch.zeros(n, 4, dtype=torch.bool), True),
    ],
)
def test_the_mask_of_a_batch_that_is_the_same_everywhere_is_known(mask: Any, hides: bool) -> None:
    def loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        out = model(batch["x"])
        return out.masked_fill(~batch["mask"].bool(), 0).sum() if not batch["mask"].all() else out.sum()

    def batch(n: int) -> dict[str, torch.Tensor]:
        return {"x": torch.ones(n, 4), "mask": mask(n)}

    work = batchfit.training(nn.Linear(4, 4), None, loss, batch)
    operations = {one.operation for one in trace(work, 2, rules=rules_for(work), steps=1).origins}
    assert any("masked_fill" in one for one in operations) == hides


@pytest.mark.parametrize(
    "values",
    [
        lambda n: torch.ones(n, 4),
        lambda n: torch.arange(8 * n).view(n, 8),
        lambda n: torch.tensor([[1, 0] * 4] * n),
    ],
)
def test_other_values_of_a_batch_are_not(values: Any) -> None:
    def loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return model(batch["x"]).sum() if batch["values"].to(batch["x"].device).all() else torch.zeros(1)

    def batch(n: int) -> dict[str, torch.Tensor]:
        return {"x": torch.ones(n, 4), "values": values(n)}

    work = batchfit.training(nn.Linear(4, 4), None, loss, batch)
    with pytest.raises(UntraceableError, match="depends on the data"):
        trace(work, 2, rules=rules_for(work), steps=1)


def test_a_counter_in_a_buffer_counts() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)
            self.register_buffer("calls", torch.tensor(7))

        def forward(self, x: torch.Tensor) -> Any:
            self.calls += 1
            seen.append(int(self.calls))
            return self.layer(x)

    seen = Notes()
    model = Counting()
    work = batchfit.training(model, None, lambda m, b: m(b).sum(), lambda n: torch.ones(n, 3))
    trace(work, 2, rules=rules_for(work))
    assert seen == [8, 9]
    assert int(model.calls) == 7


def test_a_buffer_that_is_written_with_data_is_no_constant_any_more() -> None:
    class Averaging(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)
            self.register_buffer("scale", torch.tensor(1.0))

        def forward(self, x: torch.Tensor) -> Any:
            out = self.layer(x)
            self.scale.mul_(0.9).add_(out.detach().mean())
            return out * (2 if self.scale.item() > 1 else 1)

    work = batchfit.training(Averaging(), None, lambda m, b: m(b).sum(), lambda n: torch.ones(n, 3))
    with pytest.raises(UntraceableError, match=r"\.item\(\)"):
        trace(work, 2, rules=rules_for(work))


def test_what_an_operation_writes_into() -> None:
    one, two = torch.zeros(2), torch.zeros(2)
    assert written_by(aten.add.Tensor, (one, two), {}) == []
    assert written_by(aten.add_.Tensor, (one, two), {})[0] is one
    assert written_by(aten.add.out, (one, two), {"out": two})[0] is two
    assert [id(x) for x in written_by(private_aten("_foreach_add_.Scalar"), ([one, two], 1), {})] == [
        id(one),
        id(two),
    ]
