"""The protocol of `Microbatcher` under DDP: every interleaving of 2 and 3 ranks, failures at every point.

Each rank is a small machine that does what `_engine/data_parallel/ddp.py` and
`_engine/optimizer_step/step.py` do, one visible act at a time: work alone, cast a vote, wait for the verdict,
take part in a collective, end. The checker runs all orders in which the ranks can act. It looks for a state
in which nobody can act and somebody has not ended (a deadlock), for ranks that took different branches, and
for a collective that not all of them issued.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations_with_replacement
from typing import Any

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from batchfit._engine.data_parallel.pure.protocol import (
    Settled,
    StepVote,
    Vote,
    settle,
    settle_attempt,
    settle_ready,
    settle_zeros,
)

# What a rank does, as a generator: it yields an act and is sent its result.
#   ("vote", name, value) -> everybody's values;  ("reduce", what) -> None;  ("leave", why) -> None
# It returns how it ended. A collective or a vote ends only once all ranks have come to it.
Rank = Iterator[Any]


def batch(number: int, script: dict[str, Any]) -> Any:
    """One batch: `script` says what happens to this rank in its own work."""
    if script["work"] == "interrupted":
        yield ("leave", "Ctrl-C")
        return "interrupted"
    failed = script["work"] == "error"
    mine = (
        Vote(error="bug") if failed else Vote("", script["weight"], 3, script["new"], syncs=script["syncs"])
    )
    votes = yield ("vote", "batch", mine)
    if votes is None:
        return "missing"
    settled = settle(votes)
    if settled.action == "zeros":
        errors = yield ("vote", "zeros", script["zeros"])
        if errors is None:
            return "missing"
        settled = settle_zeros(errors, settled)
    if settled.action == "reduce":
        yield ("reduce", settled.reduces)
    return settled.action


def step(number: int, script: dict[str, Any]) -> Any:
    """One optimizer step."""
    if script["work"] == "interrupted":
        yield ("leave", "Ctrl-C")
        return "interrupted"
    oom = script["work"] == "oom"
    mine = StepVote("bug", oom) if script["work"] in ("error", "oom") else StepVote("", False, script["copy"])
    votes = yield ("vote", "step", mine)
    if votes is None:
        return "missing"
    action, copied = settle_ready(votes), script["copy"]
    if action == "protect":
        fails = not script["copy"] and script["copy_fails"]
        copied = not fails
        votes = yield ("vote", "step", StepVote("no room", True) if fails else StepVote("", False, True))
        if votes is None:
            return "missing"
        action = settle_ready(votes)
    if action == "fail":
        return "fail"
    if not any(vote.protected for vote in votes):
        if script["tries"][0]:
            yield ("leave", "cut off")
            return "cut off"
        return "moved"
    assert copied, "a step that others may take back has nothing to go back to here"
    for tries in (1, 2):
        error = script["tries"][tries - 1]
        votes = yield ("vote", "step", StepVote(error, error == "oom", True))
        if votes is None:
            return "missing"
        action = settle_attempt(votes, attempts=tries)
        if action != "retry":
            return "moved" if action == "done" else "fail"
    raise AssertionError("a third try")


def explore(make: Callable[[int, Any], Rank], scripts: tuple[Any, ...]) -> set[tuple[str, ...]]:
    """Run every order of acts; how the ranks ended in each of them.

    Ranks are deterministic, so a state is how many acts of each have been answered, and whether it waits.
    """
    ends: set[tuple[str, ...]] = set()
    seen: set[Any] = set()
    waiting = [()]
    while waiting:
        order = waiting.pop()
        state, options, end = replay(make, scripts, order)
        if state in seen:
            continue
        seen.add(state)
        if not options:
            assert None not in end, f"deadlock: {scripts}, {order}, {end}"
            ends.add(end)
        waiting += [(*order, rank) for rank in options]
    return ends


def replay(make: Any, scripts: Any, order: tuple[int, ...]) -> tuple[Any, list[int], Any]:
    """The state after these ranks have acted in turn, who can act next, and how ranks have ended so far."""
    count = len(scripts)
    ranks = [make(number, script) for number, script in enumerate(scripts)]
    acts: list[Any] = []
    ends: list[str | None] = [None] * count
    left: set[int] = set()
    rooms: list[dict[int, Any]] = []  # one a vote or collective: what each rank brought
    at = [0] * count  # the room that each rank is at

    def resume(rank: int, answer: Any) -> None:
        try:
            acts[rank] = ranks[rank].send(answer)
        except StopIteration as stop:
            acts[rank], ends[rank] = None, stop.value

    for rank in range(count):
        acts.append(None)
        resume(rank, None)
    entered = [False] * count
    for rank in order:
        kind = acts[rank][0]
        if kind == "leave":
            left.add(rank)
            resume(rank, None)
            continue
        if not entered[rank]:  # bring what it has
            while len(rooms) <= at[rank]:
                rooms.append({})
            rooms[at[rank]][rank] = acts[rank]
            entered[rank] = True
            continue
        room = rooms[at[rank]]
        entered[rank] = False
        at[rank] += 1
        if len(room) == count:
            names = {one[:2] if one[0] == "vote" else one for one in room.values()}
            assert len(names) == 1, f"ranks are out of step: {room}"
            values = [room[one][2] for one in range(count)] if kind == "vote" else None
            resume(rank, values)
        else:
            resume(rank, None)  # somebody has left, and that is the verdict
    options = []
    for rank in range(count):
        if acts[rank] is None:
            continue
        kind = acts[rank][0]
        complete = entered[rank] and (
            len(rooms[at[rank]]) == count or (kind == "vote" and left - set(rooms[at[rank]]))
        )
        if kind == "leave" or not entered[rank] or complete:
            options.append(rank)
    state = (tuple(at), tuple(entered), tuple(left), tuple(ends))
    return state, options, tuple(ends)


WORKS = ("fine", "error", "interrupted")


def batch_scripts() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"work": work, "weight": 1.0, "new": 7, "syncs": True, "zeros": ""} for work in WORKS[1:]
    ]
    for weight, new in ((1.0, 7), (0.0, 0), (2.0, 3)):
        for zeros in ("", "no room") if new != 7 else ("",):
            found.append({"work": "fine", "weight": weight, "new": new, "syncs": True, "zeros": zeros})
    found.append({"work": "fine", "weight": 1.0, "new": 7, "syncs": False, "zeros": ""})
    return found


def step_scripts() -> list[dict[str, Any]]:
    usual = {"copy": False, "copy_fails": False, "tries": ("", "")}
    found = [{"work": work, **usual} for work in ("error", "oom", "interrupted")]
    for copy, fails in ((False, False), (False, True), (True, False)):
        for tries in (("", ""), ("oom", ""), ("oom", "oom"), ("bug", "")):
            found.append({"work": "fine", "copy": copy, "copy_fails": fails, "tries": tries})
    return found


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("kind", ["batch", "step"])
def test_no_deadlock_and_one_branch(kind: str, world_size: int) -> None:
    make, scripts = (batch, batch_scripts()) if kind == "batch" else (step, step_scripts())
    # All ranks do the same, so who is who does not matter.
    for chosen in combinations_with_replacement(scripts, world_size):
        ends = explore(make, chosen)
        assert len(ends) == 1, f"the outcome depends on the order: {chosen}, {ends}"
        (end,) = ends
        alone = {"interrupted", "cut off", "missing"}
        branches = {one for one in end if one not in alone}
        if kind == "step" and "cut off" in end:
            # Nobody could be asked to go back: those who stepped hear of it at their next agreement.
            assert branches <= {"moved"}, (chosen, end)
            continue
        assert len(branches) <= 1, (chosen, end)
        if "interrupted" in end:
            assert branches <= set(), (chosen, end)


# what the votes decide

sets = st.integers(0, 7)


@st.composite
def votes(draw: st.DrawFn) -> list[Vote]:
    count = draw(st.integers(1, 5))
    found = []
    for _ in range(count):
        waiting = draw(sets)
        found.append(
            Vote(
                draw(st.sampled_from(["", "", "", "bug"])),
                draw(st.sampled_from([0.0, 1.0, 2.5])),
                draw(st.sampled_from([3, 3, 3, 2])),
                draw(sets),
                waiting,
                draw(sets) & ~waiting,
                draw(st.sampled_from([True, True, True, False])),
            )
        )
    return found


@examples(300)
@given(votes())
def test_what_follows_from_votes(held: list[Vote]) -> None:
    settled = settle([Vote.from_json(vote.to_json()) for vote in held])
    assert settled == settle(held)
    if any(vote.error for vote in held):
        assert settled.action == "fail"
        assert [rank for rank, _ in settled.failed] == [r for r, vote in enumerate(held) if vote.error]
    elif settled.action == "fail":
        assert settled.why
    elif settled.action in ("reduce", "zeros"):
        assert all(vote.syncs for vote in held)
        # every gradient that any rank holds and nobody has reduced is summed, and no other
        for bit in range(3):
            wanted = any((vote.new | vote.waiting) >> bit & 1 for vote in held)
            assert bool(settled.reduces >> bit & 1) == wanted
        lacks = any(settled.reduces & ~vote.new for vote in held)
        assert (settled.action == "zeros") == lacks
        assert settled.total == sum(vote.weight for vote in held)
    elif settled.action == "nothing":
        assert sum(vote.weight for vote in held) == 0
    else:
        assert settled.action == "keep"
        assert not any(vote.syncs for vote in held)


def test_a_usual_vote_is_short() -> None:
    assert Vote("", 8.0, 200, (1 << 200) - 1).to_json() == {"weight": 8.0, "parameters": 200}


def test_ranks_that_are_out_of_step_learn_how() -> None:
    assert "different numbers of parameters ([3, 2])" in settle([Vote("", 1, 3, 7), Vote("", 1, 2, 3)]).why
    assert "inside no_sync() ([1])" in settle([Vote("", 1, 3, 7), Vote("", 1, 3, 7, syncs=False)]).why
    mixed = [Vote("", 1, 3, 7, waiting=1), Vote("", 1, 3, 7, reduced=1)]
    assert "call zero_grad alike" in settle(mixed).why
    assert settle_zeros(["", "no room"], Settled("zeros", 7, 1.0)).failed == ((1, "no room"),)


def test_ranks_that_left_out_a_step_are_apart() -> None:
    votes = [Vote(weight=1.0, parameters=2, new=3, steps=steps) for steps in (4, 3, 4)]
    settled = settle(votes)
    assert settled.action == "apart"
    assert "rank 0 4, rank 1 3, rank 2 4" in settled.why
    assert settle([Vote.from_json(vote.to_json()) for vote in votes]) == settled
    assert settle([*votes, Vote(error="mine")]).action == "fail"  # who has given up comes first
    assert settle([Vote(weight=1.0, parameters=2, new=3, steps=4)] * 2).action == "reduce"


def test_a_batch_without_any_gradient_is_refused() -> None:
    assert settle([Vote(weight=1.0, parameters=2)] * 2).action == "fail"
    assert settle([Vote(weight=1.0, parameters=2), Vote(weight=1.0, parameters=2, new=1)]).action == "zeros"
