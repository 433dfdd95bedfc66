"""Child processes on all ranks at once: how they form a process group, and all end when one fails.

Rules:
- The children of one trial form a process group of their own, at an address that the ranks agree on: for them
  it is as if torchrun had started them. What breaks in it is gone with the children; the ranks' own group is
  never touched.
- Where the program had made its process group before the search, each child makes one like it before it calls
  the factory. Otherwise the factory has to make it.
- A rank whose child has failed sets a flag; the others see it within a tenth of a second and end theirs.
- A child that lost the connection to another one has not failed itself: its rank waits for the flag.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from typing import Any, final

import torch.distributed as dist

from batchfit._engine.distributed.ranks import Ranks, made_by_us

_PATIENCE_S = 10.0  # for the rank whose child has failed to say so


class CutOff(Exception):
    """A child was ended because another rank's has failed."""


@final
class ChildGroup:
    """The children of all ranks; in one process there is one child, and nothing is agreed on."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._number = 0  # of the children so far: all ranks count alike

    @property
    def is_alone(self) -> bool:
        """Whether there is one rank only."""
        return self._ranks.world_size == 1

    def rendezvous(self) -> dict[str, Any]:
        """The address at which the next children form a process group; all ranks call this together."""
        if self.is_alone:
            return {"environment": {}, "backend": None}
        self._number += 1
        mine = [socket.gethostname(), _free_port() if self._ranks.is_main else 0]
        hosts = self._ranks.gather(mine, doing="where the child processes meet")
        near = len({host for host, _ in hosts}) == 1
        environment = {
            "MASTER_ADDR": "127.0.0.1" if near else os.environ.get("MASTER_ADDR", hosts[0][0]),
            "MASTER_PORT": str(hosts[0][1]),
            "RANK": str(self._ranks.rank),
            "WORLD_SIZE": str(self._ranks.world_size),
            # torchrun keeps the store of its own ranks; the children's is kept by the first of them.
            "TORCHELASTIC_USE_AGENT_STORE": "False",
        }
        return {"environment": environment, "backend": _backend_of_the_program()}

    def has_failed(self) -> bool:
        """Whether a rank has reported that its child failed."""
        return not self.is_alone and self._ranks.flagged(self._flag)

    def report_failed(self) -> None:
        """Report to the other ranks that the child of this rank has failed."""
        if not self.is_alone:
            self._ranks.flag(self._flag)

    def fails_soon(self) -> bool:
        """Whether another rank reports, within a few seconds, that its child failed."""
        deadline = time.monotonic() + _PATIENCE_S
        while not self.has_failed():
            if self.is_alone or time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def failure_check(self) -> Callable[[], None] | None:
        """A function that raises `CutOff` once another rank's child has failed; None in one process."""
        if self.is_alone:
            return None

        def raise_if_failed() -> None:
            if self.has_failed():
                raise CutOff

        return raise_if_failed

    def raise_cause(self) -> None:
        """After a child was cut off outside a trial: raise what the rank said that has left."""
        self._ranks.gather("cut off", doing="why the child process of another rank failed")

    @property
    def _flag(self) -> str:
        return f"child {self._number}"


def _backend_of_the_program() -> str | None:
    """The back ends of the process group that the program has made; None where it has made none."""
    return None if made_by_us() else str(dist.get_backend_config())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
