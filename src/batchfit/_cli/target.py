"""The target of a command (`train.py:make`): loaded once, and named in the errors of its code.

Rules: what is wrong with the flags or the name is said before torch is loaded. An error of the user's code is
shown with the line it comes from; frames of libraries are left out unless they are asked for. Where a target
cannot be built here, the error says how it can be. An error that is neither the user's nor about an argument
is ours: it comes with its traceback.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, final

from batchfit import errors
from batchfit._cli.delivery import Delivery, RenderedAnswer, run_answer
from batchfit._cli.exits import Code, CommandFailed, failure_of, wrong_flag
from batchfit._engine.workload import user_errors as failure
from batchfit._engine.workload.target import Target, home_of, load_target, make_workload, parse_target

if TYPE_CHECKING:
    from batchfit._cli.progress import ProgressDisplay
    from batchfit.workload import Workload

Found = TypeVar("Found")
NO_GPU = (
    "This machine has no GPU, and none is needed: build the model on the CPU where there is none "
    '(device = "cuda" if torch.cuda.is_available() else "cpu"; model.to(device)).'
)
TOO_LARGE = (
    'A model that this machine has no memory for can be built without any: with torch.device("meta"): '
    "model = AutoModelForCausalLM.from_config(config), or your own class."
)
# How torch says that there is no GPU: a build without CUDA, no driver, no device, the wrong device number.
_NO_GPU_WORDS = (
    "not compiled with cuda",
    "no nvidia driver",
    "no cuda gpus are available",
    "no cuda-capable device",
    "torch.cuda.is_available() is false",
    "invalid device ordinal",
)


@final
@dataclass(slots=True)
class Given:
    """A target on the command line; `made_at` is the line of its code, once that is loaded."""

    target: Target
    full_traceback: bool
    made_at: str = ""

    @classmethod
    def parse(cls, text: str, arguments: Sequence[str] = (), *, full_traceback: bool) -> Given:
        """The target that `text` names, with the arguments of its script; nothing is loaded."""
        try:
            return cls(parse_target(text, arguments), full_traceback)
        except errors.TargetError as error:
            raise CommandFailed(Code.USAGE, str(error)) from None

    def load(self, *, advise: bool = False) -> Workload:
        """The workload that the target makes; `advise`: what to do about an error, where we know it."""
        try:
            loaded = load_target(self.target)
            self.made_at = loaded.line
            return make_workload(self.target, loaded)
        except errors.TargetError as error:
            raise CommandFailed(Code.USAGE, str(error)) from None
        except (Exception, SystemExit) as error:  # noqa: BLE001  the user's code may raise anything
            raise self._raised(error, self.target.text, advise=advise) from None

    def raised(self, error: BaseException, *, advise: bool = False) -> CommandFailed:
        """An error of a step, or of what a child process has loaded."""
        in_child = failure.ChildTraceback.of(error)
        loading = in_child is not None and in_child.stage == "load"
        return self._raised(
            error, self.target.text if loading else f"a step of {self.target.text}", advise=advise
        )

    def _raised(self, error: BaseException, what: str, *, advise: bool) -> CommandFailed:
        home = home_of(self.target)
        advice = _advice(error) if advise else ""
        headline = failure.headline(error, what=what, home=home, made_at=self.made_at)
        return CommandFailed(
            Code.RAISED,
            f"{headline}. {advice}" if advice else headline,
            details=failure.details(error, home=home, full=self.full_traceback),
            every_rank=True,
        )


@dataclass(frozen=True, slots=True)
class TargetCall:
    """What was typed: a target, the command's flags, where the answer goes, the target's own arguments."""

    target: str
    flags: Mapping[str, Any]
    delivery: Delivery = field(default_factory=Delivery)
    full_traceback: bool = False
    arguments: tuple[str, ...] = ()

    def given(self) -> Given:
        """The target, parsed; nothing is loaded."""
        return Given.parse(self.target, self.arguments, full_traceback=self.full_traceback)


def run_on_target(
    call: TargetCall, work: Callable[[Workload, ProgressDisplay], RenderedAnswer], *, command: str
) -> Code:
    """Load the target, let `work` answer, and deliver: how it ended.

    With a flag `ranks` both happen inside a fake process group: a target may shard its model itself.
    """
    given = call.given()

    def answer(progress: ProgressDisplay) -> RenderedAnswer:
        with _ranks(call.flags.get("ranks")):
            return load_and_work(call, given, work, progress, command=command)

    call.delivery.check()
    return run_answer(call.delivery, answer)


@contextmanager
def _ranks(ranks: int | None) -> Iterator[None]:
    if ranks is None:
        yield
        return
    from batchfit._engine.sharding.fake_ranks import fake_ranks

    with fake_ranks(ranks):
        yield


def load_and_work(
    call: TargetCall,
    given: Given,
    work: Callable[[Workload, ProgressDisplay], Found],
    progress: ProgressDisplay,
    *,
    command: str,
) -> Found:
    """Load the target and return what `work` finds; an error ends the command with its exit code."""
    progress.doing(f"loading {call.target}")
    workload = given.load(advise=True)
    with _explained(call, given, command):
        return work(workload, progress)


@contextmanager
def _explained(call: TargetCall, given: Given, command: str) -> Iterator[None]:
    """Inside, an error ends the command with its exit code; one of batchfit's own comes out as it is."""
    try:
        yield
    except (Exception, SystemExit) as error:
        failed = failure_of(error)
        if failed is not None:
            if isinstance(error, errors.UntraceableError):
                failed.every_rank = True
                if given.full_traceback or error.raised:  # what may be an error of the user's is shown as one
                    failed.details = failure.details(
                        error.__cause__ or error, home=home_of(given.target), full=given.full_traceback
                    )
            raise failed from None
        if isinstance(error, SystemExit) or failure.raised_by_step(error):
            raise given.raised(error, advise=True) from None
        # Every argument that is refused is named first: "budget must be positive, not 0".
        if isinstance(error, ValueError | TypeError) and str(error).partition(" must ")[0] in call.flags:
            raise wrong_flag(error, command) from None
        raise


def _advice(error: BaseException) -> str:
    text = str(error).lower()
    if any(words in text for words in _NO_GPU_WORDS):
        return NO_GPU
    if isinstance(error, MemoryError) or "can't allocate memory" in text or "not enough memory" in text:
        return TOO_LARGE
    return ""
