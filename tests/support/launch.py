"""Real ranks for a test: each is a process of its own with a gloo group, and none outlives its test.

    outcomes = run_ranks(scenario, world_size=3)     # scenario(rank, *args) -> JSON, a function of a module
    assert outcomes[2].value == ...

Rules: the launcher never hangs (what is not back in time is killed, and its outcome says so); a rank's answer
or error travels through a file, so that a rank which kills itself loses nobody else's. Processes come from a
fork server that has imported torch once, and the compiler that DDP and FSDP2 import when they are first used:
a rank starts in a few milliseconds instead of seconds. A framework that ranks need besides is imported once
for all of them with `run_ranks(..., preload="module")`.
"""

from __future__ import annotations

import gc
import importlib
import json
import multiprocessing
import os
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from os import _exit
from pathlib import Path
from typing import Any, NoReturn

OURS = (
    "_engine.distributed.ranks",
    "_microbatch.microbatcher",
    "_find.find",
    "_predict.predict",
    "_profile.profile",
)
PRELOAD = ["pytest", "torch", "torch.distributed", "torch._dynamo", *(f"batchfit.{name}" for name in OURS)]


@dataclass(frozen=True)
class Outcome:
    """How one rank ended: the `value` it returned, or the type and the words of the `error` it raised."""

    value: Any = None
    error: str | None = None
    text: str = ""
    trace: str = ""
    exitcode: int | None = None
    killed_by_us: bool = False


def run_ranks(
    scenario: Callable[..., Any],
    *,
    world_size: int,
    args: tuple[Any, ...] = (),
    store: str = "tcp",
    group: bool = True,
    timeout_s: float = 60.0,
    preload: str = "",
) -> list[Outcome]:
    """Run `scenario(rank, *args)` in that many processes and tell how each ended."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    settings = (scenario, world_size, args, store, group, timeout_s)
    if not preload:
        return _launch(context, *settings)
    with tempfile.TemporaryDirectory() as name:
        answer = Path(name) / "outcomes.json"
        parent = context.Process(target=_launch_after, args=(preload, str(answer), settings))
        parent.start()
        parent.join(timeout_s + 60)
        if parent.is_alive():
            parent.kill()
            parent.join()
        assert parent.exitcode == 0, f"the parent of the ranks ended with {parent.exitcode}"
        parent.close()
        return [Outcome(**one) for one in json.loads(answer.read_text())]


def _launch_after(module: str, answer: str, settings: Any) -> None:
    """Import a module, and launch ranks that are forks of this process."""
    importlib.import_module(module)
    outcomes = _launch(multiprocessing.get_context("fork"), *settings)
    Path(answer).write_text(json.dumps([asdict(one) for one in outcomes]))


def _launch(
    context: Any,
    scenario: Callable[..., Any],
    world_size: int,
    args: tuple[Any, ...],
    store: str,
    group: bool,
    timeout_s: float,
) -> list[Outcome]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        where = f"file://{folder / 'store'}" if store == "file" else f"tcp://127.0.0.1:{_free_port()}"
        ranks = [
            context.Process(target=_rank, args=(scenario, rank, world_size, where, group, str(folder), args))
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + timeout_s
        outcomes = []
        for rank, process in enumerate(ranks):
            process.join(max(0.0, deadline - time.monotonic()))
            stuck = process.is_alive()
            if stuck:
                process.kill()
                process.join()
            outcomes.append(_outcome(folder / f"{rank}.json", exitcode=process.exitcode, killed_by_us=stuck))
            process.close()
    return outcomes


def values(outcomes: list[Outcome]) -> list[Any]:
    """What each rank returned; fails the test where one raised, hung or died."""
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is None, f"rank {rank}: {outcome.trace}"
        assert not outcome.killed_by_us, f"rank {rank} hung"
        assert outcome.exitcode == 0, f"rank {rank} ended with {outcome.exitcode}"
    return [outcome.value for outcome in outcomes]


def _outcome(file: Path, *, exitcode: int | None, killed_by_us: bool) -> Outcome:
    told = json.loads(file.read_text()) if file.exists() else {}
    return Outcome(**told, exitcode=exitcode, killed_by_us=killed_by_us)


def _rank(
    scenario: Callable[..., Any],
    rank: int,
    world_size: int,
    where: str,
    group: bool,
    folder: str,
    args: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    gc.freeze()  # what torch has loaded by now is not looked at in each trial
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        if group:
            dist.init_process_group(
                "gloo", init_method=where, rank=rank, world_size=world_size, timeout=timedelta(seconds=30)
            )
        told = {"value": scenario(rank, *args)}
    except BaseException as error:  # noqa: BLE001 - whatever it is, the test wants to know
        text = "\n".join([str(error), *getattr(error, "__notes__", [])])
        told = {"error": type(error).__name__, "text": text, "trace": traceback.format_exc()}
    file = Path(folder) / f"{rank}.json"
    file.with_suffix(".part").write_text(json.dumps(told))
    file.with_suffix(".part").rename(file)
    if group and dist.is_initialized():
        dist.destroy_process_group()


def end_process(code: int) -> NoReturn:
    """End this process at once: nothing is flushed or undone, as in a crash."""
    _exit(code)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
