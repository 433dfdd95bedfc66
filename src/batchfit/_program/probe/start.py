"""The probe of one process: counts steps, reads memory, reports, and stops where the parent has seen enough.

Rules:
- A step is one of the optimizer that stepped first; where others step more rarely the trial goes on until
  they have stepped twice. Without any optimizer a step is a forward pass (a whole generation, where tokens
  are made).
- At the number of steps that the parent has named the process waits in its hook, before whatever the program
  does next, until the parent ends it or names a larger one: all ranks stop at the same step.
- An OOM is reported where it is raised, so that it counts whether or not the program catches it.
- Nothing here raises into the program.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import sys
import time
import traceback
from typing import Any, final

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from batchfit._program.probe.channel import ProbeChannel
from batchfit._program.probe.memory import CpuMemory, GpuMemory, ProbeMemory
from batchfit._program.probe.passes import PassCounter

_MOST_WAITS = 10  # times the steps that were asked for, while another optimizer has not stepped as often
_LINES = 30  # of a traceback


def start_probe() -> None:
    """Start it in this process; called once, after torch was imported."""
    Probe(json.loads(os.environ["BATCHFIT_PROBE_SETTINGS"]))


@final
class Probe:
    """What is known of this process so far."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._channel = ProbeChannel(settings["socket"], settings["token"])
        self._target: int = settings["steps"]
        self._stops: bool = settings["stops"]
        self._counts: dict[int, int] = {}  # steps by optimizer, the first to step first
        self._steps = 0
        self._step_s: list[float] = []
        self._last_s = 0.0
        self._phase: str | None = None
        self._passes_before = 0  # the last step ended
        self._passes_in_step = 0
        self._next_look = 2
        self._ooms = 0
        self._owner = os.getpid()
        self._begun_s = time.perf_counter()
        gpu = settings["device"] != "cpu" and torch.cuda.is_available()
        self._memory: ProbeMemory | None = None
        if gpu:
            self._memory = GpuMemory(settings["budget_bytes"])
        elif self._stops:
            self._memory = CpuMemory(settings["budget_bytes"] or settings["ram_bytes"], self._oom)
        self._channel.open(**_who(), device="cuda" if gpu else "cpu", python=sys.executable)
        self._passes = PassCounter(self._first_pass, self._pass)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        self._plain_hook = sys.excepthook
        sys.excepthook = self._raised
        atexit.register(self._exits)

    # --- passes and steps

    def _first_pass(self) -> None:
        if self._memory is not None:
            self._memory.begin()
            self._ooms = self._memory.ooms()
        self._last_s = time.perf_counter()
        name = None if self._memory is None else self._memory.name
        budget = None if self._memory is None else self._memory.budget_bytes()
        self._channel.send("first_pass", device=name, budget_bytes=budget, **_who())

    def _pass(self, begins: bool) -> None:
        self._phase = "forward"
        if self._counts or self._passes.count == 0:
            return
        if begins and self._passes.count > 1:
            # The pass before was the last of its step. Programs that train may evaluate first.
            self._evaluation_steps = getattr(self, "_evaluation_steps", 0) + 1
            if self._evaluation_steps >= self._next_look:
                if _optimizers_exist():
                    self._next_look *= 4
                    return
                self._next_look = 0
                self._step_ended(self._evaluation_steps)

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        self._phase = "optimizer"

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        self._phase = None
        number = self._counts[id(optimizer)] = self._counts.get(id(optimizer), 0) + 1
        if len(self._counts) > 1 and next(iter(self._counts)) != id(optimizer):
            return
        if number <= 2:
            self._passes_in_step = self._passes.count - self._passes_before
            self._passes_before = self._passes.count
        if number == 2:
            self._passes.stop()
        self._step_ended(number, optimizer)

    def _step_ended(self, number: int, optimizer: Any = None) -> None:
        now = time.perf_counter()
        self._step_s.append(now - self._last_s)
        self._steps = number
        self._report(optimizer)
        if self._stops and number >= self._target and not self._waits_for_others(number):
            self._wait()
        self._last_s = time.perf_counter()

    def _waits_for_others(self, number: int) -> bool:
        """Whether another optimizer, one that has stepped, has still to take as many steps."""
        least = min(self._counts.values(), default=number)
        return least < min(self._target, 2) and number < _MOST_WAITS * self._target

    def _report(self, optimizer: Any) -> None:
        read = {} if self._memory is None else self._memory.read()
        if optimizer is not None and self._steps <= 3 and "held_bytes" in read:
            read["held_bytes"] = max(0, read["held_bytes"] - _gradient_bytes(optimizer))
        elif self._steps > 3 or optimizer is None:
            read.pop("held_bytes", None)
        ooms = 0 if self._memory is None else self._memory.ooms()
        if ooms > self._ooms:
            self._ooms = ooms
            self._oom("CUDA out of memory; the program went on after it")
        self._channel.send(
            "step",
            number=self._steps,
            step_s=self._step_s[-1],
            samples=self._passes.samples,
            passes=self._passes_in_step,
            **read,
        )

    def _wait(self) -> None:
        """Wait for the parent: it ends this process, or names the number of steps to go on to."""
        self._channel.send("reached", number=self._steps, kind_of_step=self._kind(), **_who())
        self._target = self._channel.receive()["until"]

    def _kind(self) -> str:
        return "step" if self._counts else "pass"

    # --- the end

    def _oom(self, text: str) -> None:
        if self._channel.is_open:
            self._channel.send("oom", text=text, phase=self._phase, number=self._steps, **_who())

    def _raised(self, kind: Any, error: BaseException, trace: Any) -> None:
        try:
            if os.getpid() == self._owner and not isinstance(error, KeyboardInterrupt):
                from batchfit._engine.device.oom import classify, describe

                lines = traceback.format_exception(kind, error, trace)
                self._channel.send(
                    "raised",
                    verdict=classify(error),
                    text=describe(error),
                    type=kind.__name__,
                    phase=self._phase,
                    number=self._steps,
                    traceback="".join(lines).splitlines()[-_LINES:],
                    **_who(),
                )
        finally:
            self._plain_hook(kind, error, trace)

    def _exits(self) -> None:
        if os.getpid() == self._owner and self._channel.is_open:
            evaluated = getattr(self, "_evaluation_steps", 0)
            if not self._counts and self._passes.count and not self._steps:
                # Too few passes to look for an optimizer: what it did is what it does.
                self._step_s.append(time.perf_counter() - self._last_s)
                self._steps = evaluated + 1
                self._report(None)
            self._channel.send(
                "exits", number=self._steps, passes=self._passes.count, samples=self._passes.samples, **_who()
            )


def _who() -> dict[str, Any]:
    """This rank, as its launcher or its process group has it."""
    rank, world = _number("RANK", 0), _number("WORLD_SIZE", 1)
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        rank, world = distributed.get_rank(), distributed.get_world_size()
    return {"rank": rank, "world_size": world, "local_world_size": _number("LOCAL_WORLD_SIZE", world)}


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "").strip()
    return int(text) if text.isdigit() else default


def _gradient_bytes(optimizer: Any) -> int:
    gradients = [
        one.grad for group in optimizer.param_groups for one in group["params"] if one.grad is not None
    ]
    return sum(one.untyped_storage().nbytes() for one in gradients if one.layout is torch.strided)


def _optimizers_exist() -> bool:
    """Whether the program has made an optimizer: then it will train."""
    return any(issubclass(type(one), torch.optim.Optimizer) for one in gc.get_objects())
