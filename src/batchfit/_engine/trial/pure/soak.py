"""Whether an allocator repeats itself: then a stability check (soak) has shown all that more steps could.

A caching allocator does what its free blocks and the requests say, nothing else. Where a step ends with every
block where it was some steps before, and the steps since have asked for the same as those before them, what
follows is the same again, for as long as the program asks for the same.

Rules:
- Five steps in a row are each what the step a round before was, and none of all these has retried: a program
  may do something every few steps, and two small steps alike say nothing about the large one after them.
- At least ten steps. Eight models, replayed at 255 sizes near the end of their memory, repeat after ten
  at 248 of them, and after twelve at the latest.
- What a step leaves is not enough to go by: samples of other lengths ask for other memory, and all of it may
  be gone when the step ends. What was asked for counts too, to the byte: a block may be larger than that.
- Every kind of step in the last ten belongs to the round, the first two of a program apart: a branch that is
  taken at random comes again, and six steps without it in a row are no rare thing.
- Every optimizer has moved its parameters in the round. One that waits, for gradients that are added up over
  sixteen steps or for a scaler that skips the first ones, has not even made its state yet.
"""

from __future__ import annotations

from collections.abc import Sequence

from batchfit._engine.device.pure.allocator_state import AllocatorState

SOAK_STEPS = 25  # of a soak, where nobody says otherwise
LEAST = 10  # steps, before it may end
_LONGEST = 5  # steps in a round, and how many have to be alike


def allocator_repeats(marks: Sequence[AllocatorState]) -> bool:
    """Whether the last steps repeat those before them.

    >>> def after(step: int, layout: int) -> AllocatorState:
    ...     return AllocatorState(layout, retries=0, requests=7 * step, requested_bytes=900 * step)
    >>> allocator_repeats([after(step, layout=min(step, 4)) for step in range(10)])
    True
    >>> allocator_repeats([after(step, layout=step) for step in range(10)])
    False
    """
    if len(marks) < LEAST or not _shows_all(marks):
        return False
    return any(_repeats(marks, steps) for steps in range(1, _LONGEST + 1))


def _shows_all(marks: Sequence[AllocatorState]) -> bool:
    """Whether the last five steps, a round or more, have all kinds of steps among the last ten."""
    seen = {_kind(marks, at) for at in range(len(marks) - _LONGEST, len(marks))}
    return all(_kind(marks, at) in seen for at in range(max(2, len(marks) - LEAST), len(marks)))


def _repeats(marks: Sequence[AllocatorState], steps: int) -> bool:
    """Whether each of the last steps was the one `steps` before it again."""
    before = len(marks) - 1 - _LONGEST - steps  # the mark at which the first of all these began
    return (
        before >= 0
        and marks[-1].retries == marks[before].retries
        and all(
            marks[at].layout == marks[at - steps].layout and _kind(marks, at) == _kind(marks, at - steps)
            for at in range(len(marks) - _LONGEST, len(marks))
        )
        and all(now != then for now, then in zip(marks[-1].updates, marks[-1 - steps].updates, strict=True))
    )


def _kind(marks: Sequence[AllocatorState], at: int) -> tuple[int, int, tuple[bool, ...]]:
    """What the step that ended at a mark asked for, and which optimizers moved in it."""
    after, before = marks[at], marks[at - 1]
    moved = tuple(now != then for now, then in zip(after.updates, before.updates, strict=True))
    return after.requests - before.requests, after.requested_bytes - before.requested_bytes, moved
