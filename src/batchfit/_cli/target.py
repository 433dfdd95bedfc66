"""The target of a command (`train.py:make`): loaded once, and named in the errors of its code.

Rules: what is wrong with the name is said before torch is loaded. An error of the user's code is shown with
the line it comes from; frames of libraries are left out unless they are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from batchfit import errors
from batchfit._cli.exits import Code, CommandFailed
from batchfit._engine.workload import user_errors as failure
from batchfit._engine.workload.target import Target, home_of, load_target, make_workload, parse_target

if TYPE_CHECKING:
    from batchfit.workload import Workload


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


def _advice(error: BaseException) -> str:
    text = str(error).lower()
    if any(words in text for words in _NO_GPU_WORDS):
        return NO_GPU
    if isinstance(error, MemoryError) or "can't allocate memory" in text or "not enough memory" in text:
        return TOO_LARGE
    return ""
