"""Which errors say that another rank is gone, and which are the step's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from batchfit._engine.distributed.collectives import is_lost_connection, reads_as_lost


def raised(act: Callable[[], Any]) -> BaseException:
    try:
        act()
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return error
    raise AssertionError("nothing was raised")


def raising(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


class Remote(Dataset[int]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        raise RuntimeError("the connection to the database timed out")


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"),
        RuntimeError("Application timeout caused pair closure"),
        RuntimeError("Gloo connectFullMesh failed with Connection reset"),
        RuntimeError("NCCL communicator was aborted on rank 2. Original reason for failure was: x"),
        RuntimeError(
            "NCCL error: unhandled error, NCCL 2.20.5\nncclRemoteError: A call failed possibly due to a "
            "network error or a remote process exiting prematurely."
        ),
        RuntimeError("[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1)"),
        torch.distributed.DistBackendError("whatever it says"),
    ],
)
def test_what_a_back_end_says_is_a_lost_rank(error: Exception) -> None:
    assert is_lost_connection(raised(raising(error)))
    assert is_lost_connection(error)  # never raised, as one that another process told


@pytest.mark.parametrize(
    "error",
    [
        OSError("connection refused by the feature server"),
        ConnectionResetError(104, "Connection reset by peer"),
        TimeoutError("timed out"),
        RuntimeError("no process group of that name in the data set"),
        ValueError("gloo"),
        RuntimeError("Distributed package doesn't have NCCL built in"),
        RuntimeError("Tensors must be CUDA and dense for the nccl backend"),
        RuntimeError("NCCL Error 1: unhandled cuda error (run with NCCL_DEBUG=INFO for details)"),
        RuntimeError("ProcessGroupGloo::allgather: invalid tensor type at index 1"),
        RuntimeError("ProcessGroup gloo does not support reduce_scatter"),
        torch.distributed.DistBackendError("NCCL error: Failed to CUDA calloc 4194304 bytes"),
        torch.OutOfMemoryError("CUDA out of memory in gloo/transport/"),
    ],
)
def test_a_connection_of_the_steps_own_is_its_own_error(error: Exception) -> None:
    assert not is_lost_connection(raised(raising(error)))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_that_loses_its_connection_is_no_lost_rank(workers: int) -> None:
    error = raised(lambda: list(DataLoader(Remote(), num_workers=workers)))
    assert "timed out" in str(error)
    assert not is_lost_connection(error)


def test_torch_itself_is_believed() -> None:
    """A group that cannot be made: raised inside torch, in words that anyone may use."""
    module = compile("def act(error):\n    raise error", torch.__file__, "exec")
    names: dict[str, Any] = {}
    exec(module, names)
    assert is_lost_connection(raised(lambda: names["act"](RuntimeError("Connection reset by peer"))))


def test_an_oom_that_was_handled_before_does_not_hide_a_lost_rank() -> None:
    def act() -> None:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        except torch.OutOfMemoryError:
            raise torch.distributed.DistBackendError("the peer is gone")  # noqa: B904

    assert is_lost_connection(raised(act))


def test_words_alone_are_enough_for_an_error_of_another_process() -> None:
    assert reads_as_lost("RuntimeError: Connection reset by peer")
    assert reads_as_lost("DistBackendError: whatever it says")
    assert not reads_as_lost("RuntimeError: Distributed package doesn't have NCCL built in")
    assert not reads_as_lost("KeyError: 'labels'")
