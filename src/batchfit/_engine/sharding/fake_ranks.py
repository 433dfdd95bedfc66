"""`fake_ranks`: a process group of many ranks in one process, to build and predict a program in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist

from batchfit._engine.torch_private.process_groups import fake_group, is_fake
from batchfit._engine.torch_private.replaced import replaced
from batchfit.errors import BatchfitError


@contextlib.contextmanager
def fake_ranks(ranks: int) -> Iterator[None]:
    """Inside, `torch.distributed` has that many ranks, and this process is rank 0; nothing is sent.

    ```python
    with batchfit.fake_ranks(8):
        workload = make_workload()  # calls fully_shard(model), or DistributedDataParallel(model)
        print(batchfit.predict_batch_size(workload, gpu="h100"))
    ```

    Collectives return at once and their results are meaningless: build and predict inside, train nothing.
    Without a GPU nothing is pinned either: `CPUOffloadPolicy()` keeps its shards in plain memory.

    Args:
        ranks: how many processes the program is to run on.

    Yields:
        Nothing.

    Raises:
        ValueError: `ranks` is less than 2.
        BatchfitError: there is a process group already, as under torchrun.
    """
    if type(ranks) is not int or ranks < 2:
        raise ValueError(f"ranks must be an integer of at least 2, not {ranks!r}")
    if dist.is_available() and dist.is_initialized():
        if is_fake() and dist.get_world_size() == ranks:
            yield
            return
        raise BatchfitError(
            f"a process group of {dist.get_world_size()} ranks is here already. Predict for other ranks "
            "without torchrun, in a process of its own"
        )
    with contextlib.ExitStack() as stack:
        if not torch.cuda.is_available():
            stack.enter_context(replaced(torch.Tensor, "pin_memory", lambda tensor, *_: tensor))
        stack.enter_context(fake_group(ranks))
        yield
