"""The probe of one process: counts steps, reads memory, reports, and stops where the parent has seen enough.

Rules:
- A step is one of the optimizer that stepped first; where others exist the trial goes on until they have
  stepped twice. Without any optimizer a step is a forward pass (a whole generation, where tokens are made).
- At the number of steps that the parent has named the process waits in its hook, before whatever the program
  does next, until the parent ends it or names a larger one: all ranks stop at the same step.
- An OOM is reported where it is raised, so that it counts whether or not the program catches it.
- Nothing here raises into the program.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any, final

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from batchfit._engine.device.tensors import top_holders
from batchfit._program.probe.channel import ProbeChannel
from batchfit._program.probe.endings import Endings
from batchfit._program.probe.memory import CpuMemory, GpuMemory, ProbeMemory, gpus_of
from batchfit._program.probe.passes import PassCounter
from batchfit._program.probe.state import optimizers, program_state
from batchfit._program.probe.step_clock import StepClock
from batchfit.errors import UntraceableError

if TYPE_CHECKING:
    from batchfit._program.probe.trace import ProgramRecord

_MOST_WAITS = 10  # times the steps that were asked for, while another optimizer has not stepped as often


def start_probe() -> None:
    """Start it in this process; called once, after torch was imported."""
    Probe(json.loads(os.environ["BATCHFIT_PROBE_SETTINGS"]))


@final
class Probe:
    """What is known of this process so far."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._channel = ProbeChannel(settings["socket"], settings["token"])
        self._target: int = settings["steps"]
        self._stops: bool = settings.get("stops", True)  # off where its cost is measured
        self._cpu_bytes: int = settings["budget_bytes"] or settings["ram_bytes"]
        self._counts: dict[int, int] = {}  # steps by optimizer, the first to step first
        self._steps = 0
        self._host_s = 0.0
        self._clock = StepClock()
        self._phase: str | None = None
        self._passes_before = 0  # the last step ended
        self._passes_in_step = 0
        self._evaluation_steps = 0
        self._next_look = 2
        self._evaluates = False
        self._most_steps = _MOST_WAITS * self._target
        self._placed = False  # the device is known
        self._looked = False  # for what holds the most
        # Not torch.cuda.is_available(), which may initialize the driver: a program can still choose its GPUs.
        has_gpu = settings["device"] != "cpu" and torch.cuda.device_count() > 0
        self._memory: ProbeMemory | None = None
        self._record: ProgramRecord | None = None
        if settings.get("record") is not None:
            from batchfit._program.probe.trace import record_of  # the tracer: a trial has no use for it

            self._record = record_of(settings["record"])
        elif has_gpu:
            self._memory = GpuMemory(settings["budget_bytes"], self._oom)
        elif self._stops:
            self._memory = CpuMemory(self._cpu_bytes, self._oom)
        self._channel.open(**who(), device="cuda" if has_gpu else "cpu", python=sys.executable)
        self._passes = PassCounter(self._before_pass, self._pass)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        self._endings = Endings(self._channel, self._state, self._ends, self._untraceable)

    # --- passes and steps

    def _before_pass(self, module: Any, args: Any) -> None:
        first = self._passes.count == 0
        if first:
            self._clock.begin()
        if not self._placed:
            if isinstance(self._memory, GpuMemory):
                gpus = gpus_of(module, args)
                if gpus:
                    self._memory.use(gpus)
                    self._clock.on_gpu = True
                    self._clock.begin()
                self._placed = bool(gpus)
            else:
                if first and self._memory is not None:
                    self._memory.begin()
                self._placed = True
            if first or self._placed:
                self._say_device()

    def _say_device(self) -> None:
        name = None if self._memory is None else self._memory.name
        budget = None if self._memory is None else self._memory.budget_bytes()
        self._channel.send("first_pass", device=name, budget_bytes=budget, **who())

    def _pass(self, begins: bool) -> None:
        self._phase = "forward"
        if self._counts or not begins or self._passes.count <= 1:
            return
        # The pass before was the last of its step. Programs that train may evaluate first.
        self._evaluation_steps += 1
        if not self._evaluates and self._evaluation_steps >= self._next_look:
            self._next_look *= 4
            self._evaluates = not optimizers()
        if self._evaluates:
            self._step_ended(self._evaluation_steps)

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        self._phase = "optimizer"

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        self._phase = None
        number = self._counts[id(optimizer)] = self._counts.get(id(optimizer), 0) + 1
        if len(self._counts) > 1 and next(iter(self._counts)) != id(optimizer):
            return
        if number == 1:
            self._passes.evaluation.take_step()
        if number <= 2:
            self._passes_in_step = self._passes.count - self._passes_before
            self._passes_before = self._passes.count
        if number == 2:
            self._passes.stop()
        self._step_ended(number, optimizer)
        if number == 1:
            self._passes.forget()

    def _step_ended(self, number: int, optimizer: Any = None) -> None:
        self._host_s = self._clock.end()
        self._steps = number
        if self._record is not None:
            self._record.end_step()
        self._report(optimizer)
        if not self._placed:
            self._settle_device()
        elif self._memory is not None:
            self._memory.step_ended(number)
        if self._stops and number >= self._target and not self._waits_for_others(number):
            self._wait()
            self._clock.begin()

    def _settle_device(self) -> None:
        """A step without a pass on a GPU: the device is the current one, or the CPU."""
        self._placed = True
        if isinstance(self._memory, GpuMemory):
            self._memory.begin()
            self._clock.on_gpu = bool(self._memory.name)
            if not self._clock.on_gpu:
                self._memory = CpuMemory(self._cpu_bytes, self._oom) if self._stops else None
        if isinstance(self._memory, CpuMemory):
            self._memory.begin()
        self._say_device()

    def _waits_for_others(self, number: int) -> bool:
        """Whether another optimizer has still to step as often: its step may take more memory."""
        if number >= self._most_steps:
            return False
        if not self._counts:
            self._evaluates = not optimizers()  # it has evaluated first, and will train
            return not self._evaluates
        return min(self._counts.values()) < min(self._target, 2) or self._one_has_not_stepped()

    def _one_has_not_stepped(self) -> bool:
        """Whether there is an optimizer whose parameters none has updated so far.

        Wrappers of optimizers are optimizers too, and never step themselves.
        """
        existing = optimizers()
        stepped = {key for one in existing if id(one) in self._counts for key in _parameters(one)}
        return any(_parameters(one) - stepped for one in existing if id(one) not in self._counts)

    def _report(self, optimizer: Any) -> None:
        read = {} if self._memory is None else self._memory.read()
        if optimizer is not None and self._steps <= 3 and "held_bytes" in read:
            read["held_bytes"] = max(0, read["held_bytes"] - _gradient_bytes(optimizer))
        elif self._steps > 3 or optimizer is None:
            read.pop("held_bytes", None)
        self._channel.send(
            "step",
            number=self._steps,
            step_s=self._host_s,
            samples=self._passes.samples,
            elements=self._passes.elements,
            passes=self._passes_in_step,
            **read,
        )

    def _wait(self) -> None:
        """Wait for the parent: it ends this process, or names the number of steps to go on to."""
        if self._record is not None:
            try:
                self._record.save()
            except UntraceableError as error:
                self._untraceable(error)
        more = {} if self._memory is None else self._memory.read_at_end()
        self._channel.send(
            "reached",
            number=self._steps,
            kind_of_step="step" if self._counts else "pass",
            steps_s=self._clock.seconds(),
            counts_memory=self._memory is not None and self._memory.slows_steps,
            evaluated=self._passes.evaluation.seen,
            **more,
            **who(),
        )
        answer = self._channel.receive()
        self._target = answer["until"]
        if answer.get("only_time") and self._memory is not None and self._memory.leave():
            self._clock.forget()  # what counting has slowed down

    # --- the end

    def _state(self) -> dict[str, Any]:
        """Where the process is, for a report of its end."""
        return {"phase": self._phase, "number": self._steps, **who()}

    def _oom(self, text: str) -> None:
        if self._channel.is_open:
            self._channel.send("oom", text=text, holders=self._holders(), **self._state())

    def _holders(self) -> list[tuple[str, int]]:
        """What holds the most, where not even the first steps ran: it is looked for once."""
        if self._looked or self._steps > 1 or self._memory is None:
            return []
        self._looked = True
        kind = self._memory.name.partition(":")[0]
        live = self._memory.read().get("held_bytes")
        return top_holders(program_state().parts, on=torch.device(kind), live_bytes=live) if kind else []

    def _untraceable(self, error: BaseException) -> None:
        """Say what stood in the way of a recording, if this did."""
        found = None if self._record is None else self._record.explained(error)
        if found is not None:
            self._channel.send(
                "untraceable",
                operation=found.operation,
                where=found.where,
                why=found.why,
                raised=found.raised,
            )

    def _ends(self) -> dict[str, Any]:
        """What there is to add where the process exits by itself."""
        if not self._counts and self._passes.count and not self._steps and not _has_gradients():
            # Too few passes to look for an optimizer: what it did is what it does.
            self._host_s = self._clock.end()
            self._steps = self._evaluation_steps + 1
            self._report(None)
        return {"passes": self._passes.count, "samples": self._passes.samples}


def who() -> dict[str, Any]:
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


def _has_gradients() -> bool:
    """Whether an optimizer is there with gradients, which a step would take."""
    groups = [group for one in optimizers() for group in getattr(one, "param_groups", ())]
    return any(one.grad is not None for group in groups for one in group.get("params", ()))


def _parameters(optimizer: Any) -> set[int]:
    groups = getattr(optimizer, "param_groups", ())
    return {id(one) for group in groups for one in group.get("params", ()) if one.requires_grad}
