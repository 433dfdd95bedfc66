"""A program that interrupts batchfit at random instants, and says after each time what it finds changed.

Run as `python interrupted.py SEED VERB:TIMES:SIGNALS ...`: it ends with 0 if nothing was ever changed.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from state_judge import Bag, fingerprint
from torch import nn

import batchfit


class World:
    """What a training loop has: all of it is moved by a step."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 4))
        self.model.extra = Bag(count=0, losses=[0.0], table=np.zeros(3))  # type: ignore[assignment]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        warm = torch.optim.lr_scheduler.LinearLR(self.optimizer, total_iters=3)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 10)
        self.schedule = torch.optim.lr_scheduler.SequentialLR(self.optimizer, [warm, cosine], [3])
        self.step(3)

    def step(self, n: int) -> None:
        extra: Any = self.model.extra
        loss = self.model(torch.randn(n, 4) + random.random()).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=n % 2 == 0)
        self.schedule.step()
        extra.count += 1
        extra.losses.append(loss)
        extra.table += 1

    def workload(self) -> batchfit.Workload:
        return batchfit.Workload(self.step, state=[self.model, self.optimizer, self.schedule])

    def judged(self) -> object:
        return fingerprint(self.model, self.optimizer, self.schedule)


def _find(work: batchfit.Workload) -> object:
    return batchfit.find_batch_size(work, budget="1MiB", max_size=64, soak_steps=3)


VERBS: dict[str, Callable[[batchfit.Workload], object]] = {
    "predict": lambda work: batchfit.predict_batch_size(work, budget="96MiB"),
    "explain": lambda work: batchfit.explain_memory(work, batch_size=4),
    "find": _find,
    # Without a time limit: on a loaded machine it would end a profile before its first size was timed.
    "profile": lambda work: batchfit.profile_throughput(work, budget="1MiB", largest=4),
}


def interrupt(delays_s: list[float], begin: threading.Event, sent: list[float]) -> threading.Thread:
    """A thread that sends these signals, the delays counted from `begin`, and notes each in `sent`."""

    def send() -> None:
        begin.wait()
        for delay_s in delays_s:
            time.sleep(delay_s)
            os.kill(os.getpid(), signal.SIGINT)
            sent.append(delay_s)

    return threading.Thread(target=send)


def run(verb: str, times: int, signals: int, seed: int) -> int:
    """1 if something was changed or the verb was interrupted too seldom, else 0."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    chance = random.Random(seed)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    world = World()
    work = world.workload()
    begun = time.perf_counter()
    VERBS[verb](work)
    VERBS[verb](work)
    whole_s = (time.perf_counter() - begun) / 2
    bad = interrupted = 0
    for number in range(10 * times):  # a verb may end before its signal
        if interrupted == times:
            break
        before = world.judged()
        handler = signal.getsignal(signal.SIGINT)
        raised: list[str] = []
        delays = [chance.uniform(0, whole_s)]
        delays += [chance.choice([0.0, 1e-4, 1e-3, 1e-2]) * chance.random() for _ in range(signals - 1)]
        begin = threading.Event()
        sent: list[float] = []
        thread = interrupt(delays, begin, sent)
        thread.start()  # before the first signal: a start cannot be interrupted
        try:
            begun = time.perf_counter()
            begin.set()
            VERBS[verb](work)
            whole_s = min(whole_s, time.perf_counter() - begun)
        except KeyboardInterrupt:
            interrupted += 1
        except BaseException as error:  # noqa: BLE001  it is what is looked for
            raised.append(f"{type(error).__name__}: {error}")
        while True:  # the rest of the signals
            try:
                # Not `join`: in Python 3.11 an interrupt in it marks a running thread as stopped (bpo-45274).
                while len(sent) < len(delays):
                    time.sleep(1e-3)
                time.sleep(1e-3)
                break
            except KeyboardInterrupt:
                continue
        if raised or world.judged() != before or signal.getsignal(signal.SIGINT) is not handler:
            bad += 1
            print(number, delays, raised, "changed" if world.judged() != before else "", flush=True)
    world.step(3)  # and training can go on
    print(f"{verb}: {bad} bad, {interrupted} of {times} interrupted, {whole_s:.2f} s each")
    return int(bad > 0 or interrupted < times)


def main(seed: str, *cases: str) -> int:
    failed = 0
    for case in cases:
        verb, times, signals = case.split(":")
        failed += run(verb, int(times), int(signals), int(seed))
    return failed


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
