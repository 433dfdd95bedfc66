"""Ranks in step: all take the same branch, nobody is asked for what it cannot do, and no one waits for ever.

The automaton below is a rank as `_engine.data_parallel.fsdp_models` runs it; every interleaving of two and
three ranks is run, with a failure of every kind at every point.
"""

from __future__ import annotations

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from batchfit._engine.data_parallel.pure.protocol import Offer, PassVote, settle_offers, settle_pass

offers = st.builds(
    Offer,
    error=st.sampled_from(["", "", "", "KeyError: x"]),
    microbatches=st.integers(0, 5),
    weight=st.floats(0, 9),
    rehearsed=st.booleans(),
    spare=st.booleans(),
)
tried = st.builds(
    PassVote,
    outcome=st.sampled_from(["ran", "ran", "oom", "raised"]),
    text=st.just("why"),
    is_reset=st.sampled_from([True, True, False]),
)


@given(st.lists(offers, min_size=1, max_size=6))
@settings(max_examples=300, deadline=None)
def test_the_number_of_microbatches_is_enough_for_all(votes: list[Offer]) -> None:
    agreed = settle_offers(votes)
    if any(vote.error for vote in votes):
        assert agreed.action == "fail"
        assert agreed.failed == tuple((rank, vote.error) for rank, vote in enumerate(votes) if vote.error)
        return
    assert not agreed.failed
    if agreed.action == "run":
        assert agreed.count == max(vote.microbatches for vote in votes) > 0
        assert agreed.total == sum(vote.weight for vote in votes) > 0
        assert agreed.rehearse == (not all(vote.rehearsed for vote in votes))
        assert not agreed.rehearse or all(vote.spare for vote in votes)
    elif agreed.action == "fail":
        assert "no sample that counts" in agreed.why
        assert not all(vote.spare for vote in votes)
    else:
        assert not (any(vote.weight for vote in votes) and any(vote.microbatches for vote in votes))


@given(st.lists(tried, min_size=1, max_size=6))
@settings(max_examples=300, deadline=None)
def test_a_try_is_kept_only_if_it_ran_on_all(votes: list[PassVote]) -> None:
    action = settle_pass(votes)
    assert (action == "keep") == all(vote.outcome == "ran" and vote.is_reset for vote in votes)
    if action == "retry":
        assert any(vote.outcome == "oom" for vote in votes)
        assert all(vote.is_reset for vote in votes)
    if action == "fail":
        assert not any(vote.outcome == "oom" for vote in votes)
    assert (action == "stuck") == (not all(vote.is_reset for vote in votes))


def explore(world_size: int, faults: tuple[tuple[int, int], ...], collectives: int, serves: bool) -> set[str]:
    """All ends of a batch: each rank works through its collectives and its vote, in every order.

    `faults[rank]`: (at which collective it fails, 0 for never; kind 0 memory, 1 a bug), in its first try.
    A collective, like a vote, ends only when all have come to it. Not `serves`: who fails goes to its vote.
    """
    ends: set[str] = set()
    # (rank's place, its outcome): place k < collectives waits to enter k; place `collectives` is the vote
    start = tuple((0, "ran") for _ in range(world_size)), 0
    waiting, seen = [start], {start}
    while waiting:
        ranks, attempt = waiting.pop()
        if all(place == collectives for place, _ in ranks):
            action = settle_pass([PassVote(outcome, "why") for _, outcome in ranks])  # type: ignore[arg-type]
            if action != "retry":
                ends.add(action)
                continue
            following = [(tuple((0, "ran") for _ in range(world_size)), attempt + 1)]
        else:
            following = []
            for rank, (place, outcome) in enumerate(ranks):
                at, kind = faults[rank]
                if place < collectives and outcome == "ran" and attempt == 0 and at == place + 1:
                    failed = "raised" if kind else "oom"
                    changed = list(ranks)
                    changed[rank] = (place if serves else collectives, failed)
                    following.append((tuple(changed), attempt))
            if not following and len({place for place, _ in ranks}) == 1:  # all are at the same collective
                following.append((tuple((place + 1, outcome) for place, outcome in ranks), attempt))
            if not following:
                ends.add("deadlock")
        for one in following:
            if one not in seen:
                seen.add(one)
                waiting.append(one)
    return ends


def test_every_failure_at_every_point_ends_in_one_decision() -> None:
    for world_size, collectives in ((2, 4), (3, 3)):
        points = [(at, kind) for at in range(1, collectives + 1) for kind in (0, 1)]
        for faults in product([(0, 0), *points], repeat=world_size):
            ends = explore(world_size, faults, collectives, serves=True)
            memory = any(at and kind == 0 for at, kind in faults)
            bug = any(at and kind for at, kind in faults)
            assert ends == ({"keep"} if memory or not bug else {"fail"}), faults


def test_a_rank_that_does_not_stand_in_leaves_the_others_waiting() -> None:
    assert explore(2, ((2, 0), (0, 0)), 4, serves=False) == {"deadlock"}
