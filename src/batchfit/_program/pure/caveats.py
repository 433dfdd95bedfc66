"""The caveats of a command's answer: what its first steps, all that was run, did not show."""

from __future__ import annotations

LATER = "may need more memory"


def caveats_of_runs(steps: int, *, whole: bool, evaluation: bool, only_evaluates: bool) -> tuple[str, ...]:
    """What is to be known of an answer whose runs took so many steps.

    `whole`: the program ended by itself. `evaluation`: passes without gradients of a module that trains were
    among them. `only_evaluates`: a step is a forward pass.
    """
    if whole or not steps:
        return ()
    noun = "forward pass" if only_evaluates else "optimizer step"
    plural = f"{noun}es" if only_evaluates else f"{noun}s"
    first = f"first {steps} {plural} were" if steps > 1 else f"first {noun} was"
    said = [f"only the {first} run: a later one {LATER}"]
    if not (evaluation or only_evaluates):
        said.append(f"no evaluation was seen: one that comes later {LATER}")
    return tuple(said)
