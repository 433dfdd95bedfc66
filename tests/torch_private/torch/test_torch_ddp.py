"""DistributedDataParallel as it is read and reset, and what is said where a name of it is missing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from batchfit import Microbatcher
from batchfit._engine.torch_private import ddp, process_groups
from batchfit.errors import BatchfitError, SnapshotError


@pytest.fixture
def model() -> Iterator[DistributedDataParallel]:
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_gloo_available():
        pytest.skip("needs gloo")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield DistributedDataParallel(nn.Linear(3, 2))
    distributed.destroy_process_group()


class Without:
    """What stands in the place of an object, without one of its names."""

    def __init__(self, whole: Any, name: str) -> None:
        self._whole, self._name = whole, name

    def __getattr__(self, name: str) -> Any:
        if name == self._name:
            raise AttributeError(name)
        return getattr(self._whole, name)


def test_a_model_is_read(model: DistributedDataParallel) -> None:
    assert ddp.missing() == []
    ddp.check(model)
    assert [ask(model) for ask in (ddp.delays, ddp.has_hook, ddp.is_joining)] == [False] * 3
    assert ddp.reduced_parameters(model) == 2
    assert ddp.bucket_elements(model) == 8
    assert not ddp.has_rebuilt_buckets(model)
    with model.join():
        assert ddp.is_joining(model)
    model.register_comm_hook(None, lambda state, bucket: bucket)
    assert ddp.has_hook(model)


def test_a_reset_lets_the_next_step_run(model: DistributedDataParallel) -> None:
    assert ddp.can_reset()
    model(torch.ones(1, 3))  # a step that never gets to its backward
    ddp.reset(model)
    model(torch.ones(1, 3)).sum().backward()
    assert model.module.bias.grad.tolist() == [1, 1]


def test_buckets_are_rebuilt_once(model: DistributedDataParallel) -> None:
    model(torch.ones(1, 3)).sum().backward()
    ddp.rebuild_buckets(model)
    assert ddp.has_rebuilt_buckets(model)


@pytest.mark.parametrize("name", ["_reset_state", "_get_zeros_like_grad_buckets"])
def test_a_reducer_that_cannot_be_reset_is_refused(model: DistributedDataParallel, name: str) -> None:
    model.reducer = Without(model.reducer, name)
    with pytest.raises(SnapshotError, match=r"a retry after .*DistributedDataParallel needs what"):
        ddp.reset(model)


@pytest.mark.parametrize("name", ["_comm_hooks", "_join_config", "_has_rebuilt_buckets", "_rebuild_buckets"])
def test_a_model_that_cannot_be_read_is_refused(model: DistributedDataParallel, name: str) -> None:
    if name == "_rebuild_buckets":
        model.reducer = Without(model.reducer, name)
    else:
        vars(model).pop(name)
    with pytest.raises(BatchfitError, match=rf"DistributedDataParallel needs .* {torch.__version__[:4]}"):
        Microbatcher(model).backward(lambda x: x.sum(), torch.ones(2, 3))


def test_without_its_log_a_model_is_reduced_by_hand(
    model: DistributedDataParallel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(DistributedDataParallel, "_get_ddp_logging_data")
    assert ddp.reduced_parameters(model) is None
    mb = Microbatcher(model, sync="overlap")
    mb.backward(lambda x: model(x).sum(), torch.ones(2, 3))
    assert model.module.bias.grad.tolist() == [2, 2]


def test_names_that_are_gone_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ddp, "_STATE", ("_comm_hooks", "_no_such_name"))
    assert ddp.missing() == ["_no_such_name"]


def test_groups_are_counted_and_share_a_store(
    model: DistributedDataParallel, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert process_groups.can_count()
    assert process_groups.can_reach_store()
    ((name, before),) = process_groups.counts().items()
    assert process_groups.names() == {name}
    torch.distributed.all_reduce(torch.ones(1))
    assert process_groups.counts() == {name: before + 1}
    process_groups.default_store().set("key", "value")
    assert process_groups.default_store().get("key") == b"value"
    c10d = torch.distributed.distributed_c10d
    with monkeypatch.context() as patch:
        patch.delattr(c10d, "_get_default_store")
        patch.setattr(c10d, "_world", Without(c10d._world, "pg_map"))
        assert not process_groups.can_reach_store()
        assert not process_groups.can_count()
        with pytest.raises(BatchfitError, match=r"several ranks needs what torch .*cannot be reached"):
            process_groups.default_store()
        for ask in (process_groups.counts, process_groups.names):
            with pytest.raises(BatchfitError, match="a step with collectives on several ranks needs what"):
                ask()
