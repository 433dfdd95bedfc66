"""Ctrl-C at any instant: a KeyboardInterrupt, the state as before, and a process that lives."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from warm import run_python

from batchfit._engine.device.interrupts import Interrupts, safe_point

PROGRAM = Path(__file__).parents[2] / "support" / "interrupted.py"
# Verb, times, signals each time.
QUICK = ("predict:2:2", "explain:2:1", "find:4:2")
LONG = ("predict:150:1", "explain:150:1", "find:100:2", "profile:60:2", "predict:60:2")


def interrupted(seed: int, *cases: str) -> None:
    ran = run_python(str(PROGRAM), str(seed), *cases, timeout_s=280)
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"


def test_an_interrupt_at_any_instant_changes_nothing() -> None:
    """All verbs in one process, whose import of torch takes longer than they do."""
    interrupted(int.from_bytes(os.urandom(4), "big"), *QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("case", LONG)
def test_many_interrupts_at_any_instant_change_nothing(case: str) -> None:
    interrupted(0, case)


def ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(100):  # until the interpreter has looked
        time.sleep(0)


def test_it_waits_until_the_block_is_done_and_comes_once() -> None:
    handler, done = signal.getsignal(signal.SIGINT), []
    with pytest.raises(KeyboardInterrupt), Interrupts():  # noqa: PT012
        ctrl_c()
        ctrl_c()
        done.append(1)
    assert done == [1]
    assert signal.getsignal(signal.SIGINT) is handler


def test_where_it_is_open_it_comes_at_once_and_a_second_one_waits_for_the_cleaning_up() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), Interrupts() as interrupts:  # noqa: PT012
        try:
            with interrupts.opened():
                ctrl_c()
                done.append("not stopped")
        finally:
            ctrl_c()
            done.append("cleaned up")
    assert done == ["cleaned up"]


def test_a_second_one_waits_in_blocks_that_are_open_all_the_time() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), Interrupts(is_open=True):  # noqa: PT012
        try:
            ctrl_c()
        finally:
            ctrl_c()
            done.append("cleaned up")
    assert done == ["cleaned up"]


def test_one_that_the_program_catches_leaves_the_next_one_as_it_is() -> None:
    caught = 0
    with Interrupts(is_open=True):
        for _ in range(2):
            try:
                ctrl_c()
            except KeyboardInterrupt:
                caught += 1
    assert caught == 2


def test_a_handler_of_the_programs_own_gets_it_and_may_go_on() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with Interrupts():
            ctrl_c()
            assert seen == []
        assert seen == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_safe_point_hands_it_to_a_handler_that_was_set_within_a_block() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupts():
            signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
            with Interrupts():
                ctrl_c()
                assert seen == []
                safe_point()
                assert seen == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_in_another_thread_nothing_is_touched() -> None:
    handler = signal.getsignal(signal.SIGINT)
    inside: list[object] = []

    def look() -> None:
        with Interrupts():
            inside.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert inside == [handler]
