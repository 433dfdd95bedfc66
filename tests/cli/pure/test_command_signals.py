"""SIGINT and SIGTERM of a command: noted, raised, passed over, and what they become on the way out."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
import typer

from batchfit._cli.exits import Code, CommandFailed, interrupt_code, uninterrupted
from batchfit._cli.flags import end
from batchfit._cli.signals import SIGNALS, CommandSignals, Terminated

BOTH = pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)]
)


@pytest.fixture
def signals() -> Iterator[CommandSignals]:
    """Those of a command that runs."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    signals = CommandSignals()
    signals.install()
    yield signals
    signals.uninstall()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@BOTH
def test_where_it_is_open_a_signal_raises_at_once(
    signals: CommandSignals, number: signal.Signals, error: type[BaseException]
) -> None:
    with signals.opened(), pytest.raises(error):
        send(number)


@BOTH
def test_one_that_came_before_raises_where_it_opens(
    signals: CommandSignals, number: signal.Signals, error: type[BaseException]
) -> None:
    send(number)
    with pytest.raises(error), signals.opened():
        pytest.fail("it went on")
    with signals.opened():
        pass  # once


@BOTH
def test_a_closed_part_is_done_first(
    signals: CommandSignals, number: signal.Signals, error: type[BaseException]
) -> None:
    done = []

    def closed_part() -> None:
        with signals.closed():
            send(number)
            send(number)
            done.append(1)

    with signals.opened(), pytest.raises(error):
        closed_part()
    assert done


def test_a_second_one_does_not_come_between_what_the_first_has_begun(signals: CommandSignals) -> None:
    cleaned = []

    def stopped() -> None:
        try:
            send(signal.SIGINT)
        finally:
            send(signal.SIGINT)
            cleaned.append(1)

    with signals.opened(), pytest.raises(KeyboardInterrupt):
        stopped()
    assert cleaned


def test_one_that_was_swallowed_is_no_end_of_all_others(signals: CommandSignals) -> None:
    with signals.opened():
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
        with pytest.raises(Terminated):
            send(signal.SIGTERM)


def test_one_that_comes_while_an_answer_is_delivered_changes_nothing() -> None:
    with SIGNALS.opened(), uninterrupted():
        send(signal.SIGINT)
        send(signal.SIGTERM)


def test_an_error_after_an_interrupt_that_was_handled_is_an_error() -> None:
    """What goes wrong when a partial answer is saved is no interrupt."""

    def saved_badly() -> Code:
        with pytest.raises(KeyboardInterrupt) as stop:
            send(signal.SIGINT)
        assert SIGNALS.came_out(stop.value) is stop.value
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        end(saved_badly)


def test_a_signal_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with SIGNALS.opened():
            send(signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def ended(command: object) -> int:
    with pytest.raises(typer.Exit) as stopped:
        end(command)  # type: ignore[arg-type]
    return stopped.value.exit_code


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, Code.INTERRUPTED), (signal.SIGTERM, Code.TERMINATED)]
)
def test_a_command_ends_with_the_code_of_its_signal_whatever_became_of_it(
    number: signal.Signals, code: Code
) -> None:
    def plain() -> Code:
        send(number)
        return Code.FOUND

    def half_loaded() -> Code:
        try:
            send(number)
        finally:
            raise AttributeError("module 'sympy' has no attribute 'core'")

    def of_a_step() -> Code:
        try:
            send(number)
        except KeyboardInterrupt as stop:
            raise CommandFailed(interrupt_code(stop), "interrupted after 0 trials") from None
        return Code.FOUND

    assert [ended(one) for one in (plain, half_loaded, of_a_step)] == [code] * 3


def test_an_error_of_batchfit_without_a_signal_comes_out() -> None:
    def broken() -> Code:
        raise AttributeError("of ours")

    with pytest.raises(AttributeError, match="of ours"):
        end(broken)


LOADS = """
import os, sys
from batchfit._cli.signals import SIGNALS
SIGNALS.install_for_process()
try:
    with SIGNALS.opened(), SIGNALS.loading():
        os.kill(os.getpid(), int(sys.argv[1]))
finally:
    print("asked of what is half loaded")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_while_modules_are_loaded_the_process_ends_at_once(number: signal.Signals) -> None:
    words = [sys.executable, "-c", LOADS, str(int(number))]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stdout) == (128 + number, "")
    assert ran.stderr == "error: interrupted before anything ran\n"


ENDS = """
import os, sys
from batchfit._cli import main
class Last:
    def __del__(self, kill=os.kill, process=os.getpid(), number=int(sys.argv.pop())):
        kill(process, number)
last = Last()
sys.argv[1:] = ["--version"]
main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_while_the_interpreter_ends_a_signal_changes_nothing(number: signal.Signals) -> None:
    words = [sys.executable, "-c", ENDS, str(int(number))]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.startswith("batchfit ")
