"""Modules under DDP and FSDP2 in one process: put back, and ready for the next step."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from state_judge import Fault, World, fingerprint, noise, raw, repeat, seeded
from torch import nn
from torch_private import take_away_fsdp2_reset

from batchfit._engine.snapshot.snapshot import Snapshot
from batchfit._engine.torch_private import fsdp2
from batchfit.errors import SnapshotError


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # small tensors: the same bits whatever else the machine does
    yield
    torch.set_num_threads(before)


@pytest.fixture
def one_process() -> Iterator[None]:
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_gloo_available():
        pytest.skip("needs gloo")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def data_parallel_world() -> World:
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), gradient_as_bucket_view=True
    )
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        model(noise(4, 3)).square().sum().backward()
        optimizer.step()

    return World([model, optimizer], step)


def data_parallel_facts(world: World) -> object:
    return fingerprint(world.state[0].module, world.state[1], identities=False)


def sharded_world() -> World:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Linear(3, 3))
    mesh = init_device_mesh("cpu", (1,))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(noise(4, 3)).square().sum().backward()
        optimizer.step()

    return World([model, optimizer], step)


def sharded_facts(world: World) -> object:
    from torch.distributed.tensor import DTensor

    model, optimizer = world.state
    tensors = [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)]
    tensors += [value for state in optimizer.state.values() for value in state.values()]
    assert all(isinstance(p, DTensor) for p in model.parameters())
    return [raw(t.to_local() if isinstance(t, DTensor) else t) for t in tensors]


PARALLEL = {"ddp": (data_parallel_world, data_parallel_facts), "fsdp2": (sharded_world, sharded_facts)}
runs_fsdp2 = pytest.mark.skipif(
    not fsdp2.runs_on_cpu(), reason=f"FSDP2 of torch {torch.__version__} cannot run on a CPU"
)
NAMES = ["ddp", pytest.param("fsdp2", marks=runs_fsdp2)]


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("warm", [0, 2])
@pytest.mark.parametrize("name", NAMES)
def test_parallel_modules_that_finish_their_steps(name: str, warm: int) -> None:
    make, facts = PARALLEL[name]
    plain = seeded(make, warm=warm + 3)
    world = seeded(make, warm=warm)
    before = facts(world)
    snapshot = Snapshot.take(world.state)
    for _ in range(2):
        repeat(world, 2)
        world.state[1].zero_grad()
        snapshot.restore()
        assert facts(world) == before
    repeat(world, 3)
    assert facts(world) == facts(plain)


@pytest.fixture
def _our_reset() -> Iterator[None]:
    give_back = take_away_fsdp2_reset()
    yield
    give_back()


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("warm", [0, 2])
@pytest.mark.parametrize("name", NAMES)
def test_parallel_modules_that_stop_in_the_middle(name: str, warm: int) -> None:
    """Both remember the step they were in: DDP then refuses the next one, FSDP2 gets it wrong."""
    stop_in_the_middle(name, warm)


@runs_fsdp2
@pytest.mark.usefixtures("one_process", "_our_reset")
@pytest.mark.parametrize("warm", [0, 2])
def test_fsdp2_that_stops_in_the_middle_before_torch_could_reset_it(warm: int) -> None:
    stop_in_the_middle("fsdp2", warm)


def stop_in_the_middle(name: str, warm: int) -> None:
    """Fail every third operation of a step, restore, and go on as if nothing had failed."""
    make, facts = PARALLEL[name]
    plain = seeded(make, warm=warm + 2)
    world = seeded(make, warm=warm)
    with Fault(-1, after=False) as counting:
        world.step()
    for at in range(1, counting.ran, 3):
        world = seeded(make, warm=warm)
        before = facts(world)
        snapshot = Snapshot.take(world.state)
        with pytest.raises(torch.OutOfMemoryError), Fault(at, after=at % 2 == 0):
            world.step()
        if name == "fsdp2" and not fsdp2.can_reset():
            pytest.skip("this torch cannot reset FSDP2")
        snapshot.restore()
        assert facts(world) == before, f"stopped at operation {at}"
        repeat(world, 2)
        assert facts(world) == facts(plain), f"stopped at operation {at}"


@runs_fsdp2
@pytest.mark.usefixtures("one_process")
def test_a_torch_that_cannot_reset_fsdp2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsdp2, "can_reset", lambda: False)
    world = seeded(sharded_world, warm=1)
    snapshot = Snapshot.take(world.state)
    before = sharded_facts(world)
    world.step()
    snapshot.restore()
    assert sharded_facts(world) == before
    with pytest.raises(torch.OutOfMemoryError), Fault(60, after=False):
        world.step()
    with pytest.raises(SnapshotError, match=r"state\[0\] .*failed inside FSDP2"):
        snapshot.restore()


@pytest.mark.usefixtures("one_process")
def test_what_ddp_keeps_for_itself_is_left_alone() -> None:
    """Its attributes follow its C++ reducer, which does not go back."""
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    snapshot = Snapshot.take([model])
    model.note = 1
    model.module.note = 1
    model.eval()
    snapshot.restore()
    assert model.note == 1
    assert not hasattr(model.module, "note")
    assert model.training


@pytest.mark.usefixtures("one_process")
def test_a_static_graph_is_refused() -> None:
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2), static_graph=True)
    with pytest.raises(SnapshotError, match=r"state\[0\]\['m'\] is Distributed.*static_graph=False"):
        Snapshot.take([{"m": model}])
    Snapshot.take([model.module])
