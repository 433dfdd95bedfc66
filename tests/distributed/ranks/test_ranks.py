"""Ranks agree, or every one of them says why not: real processes, 2 and 3 of them, under a hard time-out."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from launch import run_ranks, values
from torch_private import default_store, process_groups

from batchfit._engine.distributed import consensus as meetings
from batchfit._engine.distributed import ranks as ranks_module
from batchfit._engine.distributed.ranks import Ranks
from batchfit.errors import RankMissingError, RanksDisagreeError

gloo = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo: torch.distributed without it"
)
PATIENCE_S = 1.0  # the time-out of ranks that must give up in a test


def told(act: Callable[[], Any]) -> list[Any]:
    """`["value", what it returned]` or `[name of the error, its words, the ranks it says are missing]`."""
    try:
        return ["value", act()]
    except (RankMissingError, RanksDisagreeError) as error:
        text = "\n".join([str(error), *getattr(error, "__notes__", [])])
        return [type(error).__name__, text, list(getattr(error, "missing", ()))]


# one process


def test_one_process_answers_itself() -> None:
    ranks = Ranks.current()
    assert (ranks.rank, ranks.world_size, ranks.is_main) == (0, 1, True)
    assert ranks.any(True, doing="x") is True
    assert ranks.any(False, doing="x") is False
    assert ranks.minimum(7, doing="x") == 7
    ranks.same({"a": (1, 2)}, doing="x")
    # a value looks the same whether it travelled or not
    assert ranks.gather({"a": (1, 2)}, doing="x") == [{"a": [1, 2]}]
    ranks.leave("nobody listens")
    assert ranks.minimum(1, doing="x") == 1


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf")])
def test_a_time_out_must_be_positive(timeout_s: float) -> None:
    with pytest.raises(ValueError, match="timeout_s must be positive, not"):
        Ranks.current(timeout_s)


@pytest.mark.parametrize("timeout_s", [True, "5", None])
def test_a_time_out_must_be_a_number(timeout_s: Any) -> None:
    with pytest.raises(TypeError, match="timeout_s must be a number of seconds, not"):
        Ranks.current(timeout_s)


def test_wrong_values_are_refused_before_anyone_is_asked() -> None:
    ranks = Ranks.current()
    with pytest.raises(TypeError, match="flag must be a bool, not 1"):
        ranks.any(1, doing="x")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"value must be an integer, not 1\.5"):
        ranks.minimum(1.5, doing="x")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="value must be an integer, not True"):
        ranks.minimum(True, doing="x")
    with pytest.raises(TypeError, match="value must be JSON"):
        ranks.gather({1, 2}, doing="x")
    with pytest.raises(ValueError, match="doing must say what is being agreed on, not ''"):
        ranks.same(1, doing="")


def test_ranks_are_named_in_runs() -> None:
    assert meetings.name_of([3]) == "rank 3"
    assert meetings.name_of([0, 1, 2, 5, 7, 8]) == "ranks 0-2, 5, 7-8"
    assert ranks_module.who_holds(["24", "32", "32"]) == "rank 0 holds 24, ranks 1-2 hold 32"
    assert len(ranks_module.who_holds(["x" * 5000, "y"])) < 300


# the races, with the store in hand


def meeting(store: dist.Store, rank: int, world_size: int = 2) -> meetings.StoreConsensus:
    made = meetings.StoreConsensus(store, rank=rank, world_size=world_size)
    made.generation = 0  # these live in one process, where each would count as another group
    return made


ENTRY = json.dumps({"call": "any", "doing": "x", "value": True})


@gloo
def test_a_time_out_at_the_moment_when_the_last_one_comes_names_nobody() -> None:
    store = dist.HashStore()
    store.set("batchfit/0/0/0", ENTRY)  # rank 0 has come and is about to publish
    verdict = json.dumps({"entries": [{"value": 1}, {"value": 2}]})
    timer = threading.Timer(0.3, lambda: store.set("batchfit/0/0/verdict", verdict))
    timer.start()
    found = meeting(store, rank=1).exchange(ENTRY, "x", 0.01)
    timer.join()
    assert found == [{"value": 1}, {"value": 2}]


@gloo
def test_rank_0_that_came_but_never_publishes_is_the_missing_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meetings, "_FAREWELL_S", 0.1)
    store = dist.HashStore()
    store.set("batchfit/0/0/0", ENTRY)
    with pytest.raises(RankMissingError) as caught:
        meeting(store, rank=1).exchange(ENTRY, "x", 0.01)
    assert caught.value.missing == (0,)


@gloo
def test_a_verdict_that_came_first_wins_over_a_time_out() -> None:
    """Rank 1 sees nobody, gives up, and loses the race against rank 0's verdict: it takes that one."""

    class Racing(dist.HashStore):
        def compare_set(self, key: str, expected: str, desired: str) -> bytes:
            dist.HashStore.compare_set(self, key, "", json.dumps({"entries": [{"value": 1}]}))
            return dist.HashStore.compare_set(self, key, expected, desired)

    assert meeting(Racing(), rank=1).exchange(ENTRY, "x", 0.01) == [{"value": 1}]


@gloo
def test_rank_0_hears_at_once_that_another_has_given_up() -> None:
    store = dist.HashStore()
    gave_up = json.dumps({"missing": [2], "doing": "x", "timeout_s": 1.0, "why": ""})
    store.set("batchfit/0/0/verdict", gave_up)
    said: list[tuple[int, ...]] = []

    def wait() -> None:
        with pytest.raises(RankMissingError) as caught:
            meeting(store, rank=0, world_size=3).exchange(ENTRY, "x", 15)
        said.append(caught.value.missing)

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join(8)
    heard = list(said)
    thread.join()
    assert heard == [(2,)]


@gloo
def test_rank_0_keeps_the_store_until_the_last_verdict_is_read() -> None:
    store = dist.HashStore()
    store.set("batchfit/0/0/1", ENTRY)
    main = meeting(store, rank=0)
    main.exchange(ENTRY, "x", 20)
    closing = threading.Thread(target=main.close)
    closing.start()
    closing.join(0.3)
    assert closing.is_alive(), "rank 1 has not read the verdict yet"
    store.delete_key("batchfit/0/0/1")  # what rank 1 does once it has
    closing.join(4)
    assert not closing.is_alive()


@gloo
def test_rank_0_does_not_wait_for_ever_for_one_that_never_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meetings, "_FAREWELL_S", 0.1)
    store = dist.HashStore()
    store.set("batchfit/0/0/1", ENTRY)
    main = meeting(store, rank=0)
    main.exchange(ENTRY, "x", 20)
    main.close()
    assert store.check(["batchfit/0/0/1"]), "it has not been read, and yet we are here"


@gloo
def test_rank_0_lingers_after_naming_the_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    main = meeting(dist.HashStore(), rank=0)
    with pytest.raises(RankMissingError):
        main.exchange(ENTRY, "x", 0.01)
    begun = time.monotonic()
    main.close()
    assert time.monotonic() - begun >= 10 * meetings.LONGEST_PAUSE_S  # the others look that often


@gloo
@examples(25)
@given(delays_ms=st.lists(st.lists(st.integers(0, 6), min_size=3, max_size=3), min_size=1, max_size=6))
def test_any_timing_gives_the_same_answers_to_all(delays_ms: list[list[int]]) -> None:
    store = dist.HashStore()
    found: dict[int, list[Any]] = {}

    def live(rank: int) -> None:
        ours = Ranks(meeting(store, rank, world_size=3), timeout_s=20)
        answers = []
        for number, delays in enumerate(delays_ms):
            time.sleep(delays[rank] / 1000)
            answers.append(ours.gather([number, rank], doing=f"round {number}"))
        found[rank] = answers

    threads = [threading.Thread(target=live, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    expected = [[[number, rank] for rank in range(3)] for number in range(len(delays_ms))]
    assert found == dict.fromkeys(range(3), expected)
    assert store.num_keys() == 1, "only the last verdict is left"


# agreement


def agree(rank: int) -> Any:
    ranks = Ranks.current(30)
    assert (ranks.rank, ranks.world_size, ranks.is_main) == (rank, dist.get_world_size(), rank == 0)
    last = ranks.world_size - 1
    found = [
        ranks.any(rank == last, doing="one of them"),
        ranks.any(False, doing="none of them"),
        ranks.minimum(10 - rank, doing="smallest"),
        ranks.gather({"rank": rank, "text": "é", "big": 2**70 + rank}, doing="all"),
        told(lambda: ranks.same("24GiB", doing="budget")),
        told(lambda: ranks.same("24GiB" if rank else "32GiB", doing="budget")),
        ranks.minimum(rank, doing="and it goes on"),
    ]
    groups = len(process_groups())
    assert groups == 1, "no group is made for a decision"
    return found


@gloo
@pytest.mark.parametrize(
    ("world_size", "store"), [pytest.param(2, "tcp", marks=pytest.mark.slow), (3, "tcp"), (2, "file")]
)
def test_all_ranks_hold_the_same_answer(world_size: int, store: str) -> None:
    found = values(run_ranks(agree, world_size=world_size, store=store))
    assert all(one == found[0] for one in found)
    others = "rank 1 holds" if world_size == 2 else "ranks 1-2 hold"
    assert found[0] == [
        True,
        False,
        10 - (world_size - 1),
        [{"rank": rank, "text": "é", "big": 2**70 + rank} for rank in range(world_size)],
        ["value", None],
        [
            "RanksDisagreeError",
            f'all ranks must hold the same budget, but rank 0 holds "32GiB", {others} "24GiB"',
            [],
        ],
        0,
    ]


def slip(rank: int) -> Any:
    ranks = Ranks.current(30)
    found = [
        told(lambda: ranks.any(True, doing="trial 3") if rank == 0 else ranks.minimum(1, doing="budget")),
        told(lambda: ranks.any(True, doing=f"trial {min(rank, 1)}")),
        told(lambda: ranks.any(True, doing="x") if rank else ranks.gather(True, doing="x")),
    ]
    return [*found, ranks.minimum(rank + 2, doing="in step again")]


@gloo
def test_ranks_out_of_step_are_reported_and_get_no_numbers() -> None:
    found = values(run_ranks(slip, world_size=3))
    assert found[0] == found[1] == found[2]
    calls, words, verbs, after = found[0]
    assert calls[0] == words[0] == verbs[0] == "RanksDisagreeError"
    assert "rank 0 is at any(doing='trial 3'), ranks 1-2 are at minimum(doing='budget')" in calls[1]
    assert "rank 0 is at any(doing='trial 0'), ranks 1-2 are at any(doing='trial 1')" in words[1]
    assert "gather(doing='x')" in verbs[1]
    assert after == 2


def many_rounds(rank: int) -> Any:
    ranks = Ranks.current(30)
    store = default_store()
    for number in range(20):
        ranks.minimum(number, doing="warm-up")
    before = (threading.active_count(), len(os.listdir("/proc/self/fd")))
    ranks.gather(0, doing="all have counted")
    keys_before = store.num_keys()
    ranks.gather(0, doing="all have looked")
    for number in range(1000):
        found = ranks.minimum(number * 2 + rank, doing=f"round {number}")
        if found != number * 2:
            raise AssertionError(f"round {number} gave {found}")
    after = (threading.active_count(), len(os.listdir("/proc/self/fd")))
    assert before == after
    ranks.gather(0, doing="all have counted")
    # a rank deletes its entry a moment after the verdict: those of one round may still be on their way out
    return store.num_keys() - keys_before


@gloo
def test_a_thousand_rounds_leave_nothing_behind() -> None:
    grown = values(run_ranks(many_rounds, world_size=2))
    assert all(abs(keys) <= 4 for keys in grown), grown


# missing ranks


def sleeper(rank: int, who: int) -> Any:
    ranks = Ranks.current(PATIENCE_S)
    ranks.any(False, doing="all are here")
    if rank == who:
        time.sleep(2.5 * PATIENCE_S)
    first = told(lambda: ranks.any(False, doing="trial 3"))
    begun = time.monotonic()
    second = told(lambda: Ranks.current(60).minimum(1, doing="something else"))
    return [first, second, time.monotonic() - begun < PATIENCE_S]


@gloo
@pytest.mark.parametrize(
    ("who", "store"),
    [pytest.param(0, "tcp", marks=pytest.mark.slow), (2, "file")],  # a TCP store would end with rank 0
)
def test_a_rank_that_sleeps_is_named_on_every_rank_and_stays_out(who: int, store: str) -> None:
    found = values(run_ranks(sleeper, world_size=3, args=(who,), store=store))
    text = f"rank {who} did not answer within 1 s while all ranks had to agree on trial 3"
    for first, second, at_once in found:  # the one that comes late learns that it was given up
        assert first[0] == "RankMissingError"
        assert first[1].startswith(text)
        assert first[2] == [who]
        assert second == first, "refused with the same error"
        assert at_once, "refused without waiting again"


def dies(rank: int, who: int, how: str) -> Any:
    ranks = Ranks.current(PATIENCE_S)
    ranks.any(False, doing="all are here")
    if rank == who:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ZeroDivisionError("an error of the user's")
    return told(lambda: ranks.minimum(1, doing="trial 3"))


@gloo
@pytest.mark.parametrize("how", ["killed", "raised"])
def test_a_rank_that_died_is_named_on_every_other(how: str) -> None:
    outcomes = run_ranks(dies, world_size=3, args=(2, how))
    if how == "killed":
        assert outcomes[2].exitcode == -signal.SIGKILL
    else:
        assert outcomes[2].error == "ZeroDivisionError"
    for one in values(outcomes[:2]):
        assert one[0] == "RankMissingError"
        assert one[2] == [2]


@gloo
@pytest.mark.slow
def test_two_missing_ranks_are_both_named() -> None:
    outcomes = run_ranks(sleeps_with_many, world_size=3)
    assert values(outcomes)[0][2] == [1, 2]
    assert "ranks 1, 2 did not answer" in outcomes[0].value[1]


def sleeps_with_many(rank: int) -> Any:
    ranks = Ranks.current(PATIENCE_S)
    ranks.any(False, doing="all are here")
    if rank:
        time.sleep(2 * PATIENCE_S)
    return told(lambda: ranks.any(False, doing="trial 3"))


@gloo
def test_the_death_of_the_rank_that_keeps_the_store_names_it_at_once() -> None:
    outcomes = run_ranks(store_keeper_dies, world_size=3, timeout_s=20)
    assert outcomes[0].exitcode == -signal.SIGKILL
    for one in values(outcomes[1:]):
        assert one[0] == "RankMissingError"
        assert one[2] == [0]
        assert "the store of the process group" in one[1]


def store_keeper_dies(rank: int) -> Any:
    ranks = Ranks.current(50)  # longer than the launcher waits: the loss itself must end the wait
    ranks.any(False, doing="all are here")
    time.sleep(0.2)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return told(lambda: ranks.minimum(1, doing="trial 3"))


def uneven(rank: int) -> Any:
    # rank 1 gives up first; rank 2 comes after that but well before rank 0 would have given up
    ranks = Ranks.current({0: 30.0, 1: PATIENCE_S, 2: 30.0}[rank])
    ranks.any(False, doing="all are here")
    if rank == 2:
        time.sleep(2 * PATIENCE_S)
    return told(lambda: ranks.any(False, doing="trial 3"))


@gloo
def test_the_first_to_give_up_decides_for_all() -> None:
    found = values(run_ranks(uneven, world_size=3, store="file", timeout_s=20))
    assert found[0] == found[1] == found[2]
    assert found[0][0] == "RankMissingError"
    assert found[0][2] == [2]


def leaves(rank: int, who: int) -> Any:
    ranks = Ranks.current(50)
    ranks.any(False, doing="all are here")
    if rank == who:
        ranks.leave("ValueError: no such column")
        ranks.leave("twice is once")
        found = told(lambda: ranks.any(False, doing="trial 3"))
        time.sleep(1.0)  # the others must hear of it while this rank is still alive: not by its end
        return found
    return told(lambda: ranks.any(False, doing="trial 3"))


@gloo
@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_leaves_frees_the_others_at_once(who: int) -> None:
    found = values(run_ranks(leaves, world_size=3, args=(who,), timeout_s=20))
    for one in found:
        assert one[0] == "RankMissingError"
        assert one[2] == [who]
        assert f"rank {who} has left: ValueError: no such column" in one[1]
        assert "twice" not in one[1]


# the life of a group


def interrupted(rank: int, who: int) -> Any:
    ranks = Ranks.current(50)
    ranks.any(False, doing="all are here")
    if rank != who:
        time.sleep(1.0)
        default_store().set(f"come/{rank}", "yes")
        return told(lambda: [ranks.any(False, doing="trial 3"), ranks.any(False, doing="trial 4")])

    def ring(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        ranks.any(False, doing="trial 3")
    except KeyboardInterrupt:
        before_the_other_came = not default_store().check([f"come/{1 - who}"])
        ranks.leave("KeyboardInterrupt")
        time.sleep(1.5)  # the other must hear of it, not stumble over the end of this process
        return before_the_other_came
    return "not interrupted"


@gloo
@pytest.mark.parametrize("who", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_ctrl_c_ends_the_wait_and_the_others_hear_of_it(who: int) -> None:
    found = values(run_ranks(interrupted, world_size=2, args=(who,), timeout_s=20))
    assert found[who] is True
    assert found[1 - who][0] == "RankMissingError"
    assert found[1 - who][2] == [who]
    assert f"rank {who} has left: KeyboardInterrupt" in found[1 - who][1]


def again(rank: int, folder: str) -> Any:
    # one store for several groups, as under torchrun: entries of an earlier group lie about in the later one
    store = dist.FileStore(f"{folder}/kept", 2)
    found = []
    for number in range(3):
        dist.init_process_group("gloo", store=dist.PrefixStore(f"{number}", store), rank=rank, world_size=2)
        same_place = dist.PrefixStore("same", store)
        process_groups()[dist.group.WORLD] = ("gloo", same_place)
        ranks = Ranks.current(20)
        assert Ranks.current().consensus is ranks.consensus
        if number == 1 and rank == 1:
            time.sleep(0.5)  # rank 0 would read the entries of group 0 meanwhile
        found.append(ranks.gather([number, rank], doing="which group"))
        dist.barrier()
        dist.destroy_process_group()
        assert ranks.consensus is not None
        assert ranks.consensus.store is None, "the store is let go with its group"
        with pytest.raises(Exception, match="the process group of these ranks has ended"):
            ranks.gather(1, doing="too late")
    return found


@gloo
def test_a_new_group_does_not_read_the_entries_of_the_old(tmp_path: Any) -> None:
    found = values(run_ranks(again, world_size=2, args=(str(tmp_path),), group=False))
    assert found[0] == found[1] == [[[number, 0], [number, 1]] for number in range(3)]


def main_leaves_first(rank: int) -> Any:
    ranks = Ranks.current(20)
    ranks.any(False, doing="all are here")
    if rank == 0:
        time.sleep(0.5)  # by now the other looks only every 20 ms
    return ranks.gather(rank, doing="the last word")


@gloo
@pytest.mark.slow
def test_rank_0_may_end_right_after_the_last_agreement() -> None:
    for _ in range(3):
        assert values(run_ranks(main_leaves_first, world_size=2)) == [[0, 1], [0, 1]]


def pretends(rank: int) -> Any:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    ranks = Ranks.current(5)
    return [ranks.world_size, ranks.gather("alone", doing="tracing")]


@gloo
def test_a_fake_group_has_nobody_to_ask() -> None:
    assert values(run_ranks(pretends, world_size=1, group=False)) == [[1, ["alone"]]]


def test_the_launcher_kills_what_hangs_and_says_so() -> None:
    outcomes = run_ranks(hangs, world_size=2, group=False, timeout_s=2)
    assert [outcome.killed_by_us for outcome in outcomes] == [False, True]
    assert outcomes[0].value == "done"


def hangs(rank: int) -> Any:
    if rank == 1:
        time.sleep(1000)
    return json.loads('"done"')
