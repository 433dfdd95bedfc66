"""`batchfit find -- python train.py --batch-size {}`: from a command to an answer.

Rules: as in `find`; what is wrong with the command is said before anything is started. Trials are always in
processes of their own, so `--isolate` changes nothing, and options that need the workload here are refused.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from batchfit._cli.commands.find import SearchJob, options_of, run_job, show_device
from batchfit._cli.delivery import Delivery
from batchfit._cli.exits import Code, CommandFailed, failure_of, wrong_flag
from batchfit._cli.output import check_writable
from batchfit._program.pure.stored_name import StoredName
from batchfit._program.pure.template import CommandTemplate, FileSetting

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from batchfit._cli.progress import ProgressDisplay
    from batchfit._cli.search_watch import SearchWatch
    from batchfit._find.pure.options import FindOptions


@dataclass(frozen=True, slots=True)
class ProgramCall:
    """What was typed: the command after `--`, places of the size besides it, flags, where the answer goes."""

    words: tuple[str, ...]
    env: Sequence[str]
    sets: Sequence[str]
    flags: Mapping[str, Any]
    delivery: Delivery

    def template(self, command: str, *, may_be_fixed: bool = False) -> CommandTemplate:
        """The command with its places; a wrong one is refused."""
        try:
            sets = tuple(FileSetting.parse(text) for text in self.sets)
            return CommandTemplate(
                words=self.words, env=tuple(self.env), sets=sets, may_be_fixed=may_be_fixed
            )
        except ValueError as error:
            raise wrong_flag(error, command) from None


def find_in_program(call: ProgramCall) -> Code:
    """Find the largest size that the program can run with; the flags are options of `find_batch_size`."""
    from pathlib import Path

    if call.flags.get("resume") is not None:
        check_writable(Path(call.flags["resume"]), name="resume")
    template = call.template("find")
    options, stored = program_options(call.flags, "find")
    call.delivery.check()
    job = program_job(template, options, stored)
    return run_job(job, as_json=call.delivery.as_json, output=call.delivery.output)


def program_job(template: CommandTemplate, options: FindOptions, stored: StoredName | None) -> SearchJob:
    """The search over a command's sizes, to be run."""

    def trials(watch: SearchWatch, progress: ProgressDisplay) -> Any:
        from batchfit._program.find import program_trials
        from batchfit._program.trials import ProgramTarget

        target = ProgramTarget(
            template=template,
            on_device=partial(show_device, job, watch, progress),
            on_step=watch.step,
        )
        own = program_trials(target, options, stored)
        watch.caveats_of = own.caveats
        return own

    job = SearchJob(
        what=template.shown_template(),
        make=_no_workload,
        explain=_unexplained,
        options=options,
        trials=trials,
        modules=("batchfit._program.find", "batchfit._program.trials"),
        use=template.shown,
    )
    return job


def program_options(flags: Mapping[str, Any], command: str) -> tuple[FindOptions, StoredName | None]:
    """The options of a search over a command, and how its answer is remembered; wrong ones are refused."""
    # Checked as those of a workload here: in a child there is nothing to make a key from, and here there is.
    options_of({**flags, "isolate": False, "timeout_s": None})
    options = options_of({**flags, "isolate": True, "store": False, "key": None, "fresh": False})
    key, fresh = flags.get("key"), flags.get("fresh", False)
    return options, None if key is None and not flags.get("store") else StoredName(key=key, fresh=fresh)


@contextmanager
def known_failures(command: str, flags: Mapping[str, Any]) -> Iterator[None]:
    """Inside, an error of batchfit's and a refused argument end the command with their exit codes."""
    try:
        yield
    except Exception as error:
        failed = failure_of(error)
        if failed is not None:
            raise failed from None
        if isinstance(error, ValueError) and str(error).partition(" must ")[0] in (*flags, "set"):
            raise wrong_flag(error, command) from None
        raise


def _no_workload() -> NoReturn:
    raise AssertionError("a program is no workload")


def _unexplained(error: BaseException) -> CommandFailed:
    return CommandFailed(Code.RAISED, f"{type(error).__name__}: {error}")
