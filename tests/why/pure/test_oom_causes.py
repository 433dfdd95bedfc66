"""Planted causes are told apart: in what an H200 wrote, and in replays of our model of the allocator."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from snapshot_cases import (
    PLANTED,
    RECORDED,
    OutOfMemory,
    Recording,
    at,
    expanding,
    fragmented,
    h200,
    h200_value,
    train,
)

from batchfit._engine.allocator.caching import MIB, AllocatorSettings
from batchfit._why.pure.snapshot import StackFrame
from batchfit._why.pure.stacks import StackTable
from batchfit._why.why import explain_oom
from batchfit.results import OomExplanation

# What each recording of the H200 must name: the line of the program that was planted in it.
LINES = {
    "leak": "snapshots_gpu.py:38 forward",
    "long batch": "snapshots_gpu.py:47 batch: 192.0 KiB, 32 times",
    "fragmentation": "480.0 MiB of the 900.0 MiB reserved",
    "optimizer state": "snapshots_gpu.py:87 optimizer_state",
    "other process": "at least 4.88 GiB of the GPU",
    "too large": "at most 128.0 MiB were missing",
}
MODELLED = {
    "leak": "model.py:21 forward",
    "long batch": "data.py:52 make_batch: 6.00 MiB, 6 times",
    "fragmentation": "were asked for as one block",
    "optimizer state": "train.py:56 train",
    "other process": "at least 5.15 GiB of the GPU",
    "too large": "were live when",
}


@pytest.mark.parametrize("cause", RECORDED)
def test_what_an_h200_died_of(cause: str) -> None:
    found = explain_oom(h200(cause))
    assert [one.name for one in found.causes] == [cause]
    assert LINES[cause] in found.causes[0].evidence
    assert found.causes[0].advice
    assert not any("does not reproduce" in one for one in found.unseen)  # the replay does


@pytest.mark.parametrize("cause", PLANTED)
def test_what_a_modelled_gpu_died_of(cause: str, tmp_path: Path) -> None:
    found = explain_oom(PLANTED[cause]().write(tmp_path / "oom.pickle"))
    assert [one.name for one in found.causes] == [cause]
    assert (MODELLED[cause] if cause != "leak" else "train.py:53 train") in found.causes[0].evidence
    assert not any("does not reproduce" in one for one in found.unseen)


@pytest.mark.parametrize("cause", RECORDED)
def test_the_parts_add_up_to_what_pytorch_counted(cause: str) -> None:
    found = explain_oom(h200(cause), what_if=False)
    value = h200_value(cause)
    live = sum(
        block["requested_size"]
        for segment in value["segments"]
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    )
    assert found.live_bytes == live
    assert found.reserved_bytes == sum(one["total_size"] for one in value["segments"])
    for parts in (found.kinds, found.modules, found.lines):
        assert sum(one.peak_bytes for one in parts) == live
        assert sum(one.share for one in parts) == pytest.approx(1)
    free = sum(one["total_size"] - one["active_size"] for one in value["segments"])
    assert found.fragmented_bytes + found.cached_bytes == free
    assert sum(found.timeline[-1].kinds.values()) == live
    assert max(sum(one.kinds.values()) for one in found.timeline) == found.peak_bytes
    oom = value["device_traces"][0][-1]
    assert (found.requested_bytes, found.free_bytes) == (oom["size"], oom["device_free"])


def test_a_leak_says_how_much_per_step_and_where() -> None:
    found = explain_oom(h200("leak"), what_if=False)
    assert found.steps == 25
    assert [(one.name, one.steps, one.of_steps) for one in found.growth] == [
        ("snapshots_gpu.py:38 forward", 23, 23),
        ("snapshots_gpu.py:43 loss_of", 23, 23),
    ]
    assert "loss.item()" in found.causes[0].advice
    # SGD has no state, and one step's gradients and weights are no leak.
    assert not any("backward" in one.name or "59" in one.name for one in found.growth)


@pytest.mark.parametrize("cause", [one for one in RECORDED if one != "leak"])
def test_nothing_else_leaks(cause: str, tmp_path: Path) -> None:
    assert not explain_oom(h200(cause), what_if=False).growth
    assert not explain_oom(PLANTED[cause]().write(tmp_path / "oom.pickle"), what_if=False).growth


def test_the_long_batch_is_set_against_the_steps_before_it() -> None:
    last = explain_oom(h200("long batch"), what_if=False).last_step
    assert last is not None
    assert (last.number, last.name) == (9, "snapshots_gpu.py:47 batch")
    assert last.size == 32 * last.typical_size == 12 * 2048 * 8
    assert last.grew_bytes > 10 * last.longest_bytes


def test_memory_of_others_is_exact_where_the_gpu_is_known() -> None:
    found = explain_oom(h200("other process"), gpu="h200", what_if=False)
    assert found.total_bytes is not None
    assert found.free_bytes is not None
    assert found.outside_bytes == found.total_bytes - found.reserved_bytes - found.free_bytes
    assert found.causes[0].evidence.startswith(
        "139.0 GiB" if found.outside_bytes > 138.95 * 2**30 else "138."
    )
    # A GPU that is full of our own blocks is full of nobody else's.
    assert explain_oom(h200("too large"), budget="1GiB", what_if=False).outside_bytes is None


def test_a_setting_is_advised_only_where_the_replay_grants_the_request(tmp_path: Path) -> None:
    path = fragmented().write(tmp_path / "oom.pickle")
    found = explain_oom(path)
    granted = [one.setting for one in found.settings if one.fits]
    assert granted
    assert granted[0] in found.causes[0].advice
    # The same program, run under that setting, gets through; under one that does not help it does not.
    refused = [one.setting for one in found.settings if not one.fits]
    for setting in (*granted, *refused):
        if setting in granted:
            with pytest.raises(AssertionError, match="the program fits"):
                fragmented(AllocatorSettings.from_environment(setting))
        else:
            fragmented(AllocatorSettings.from_environment(setting))
    without = explain_oom(path, what_if=False)
    assert not without.settings
    assert "PYTORCH_CUDA_ALLOC_CONF" not in without.causes[0].advice


def test_a_snapshot_that_was_taken_later_is_explained_at_its_oom(tmp_path: Path) -> None:
    """Written when the exception is handled, much has been freed since: the moment is rebuilt."""
    device = PLANTED["leak"]()
    at_once = explain_oom(device.write(tmp_path / "now.pickle"))
    for address in list(device.live)[10:]:
        device.free(address)
    device.device.empty_cache()
    device.alloc(MIB, at(70))
    later = explain_oom(device.write(tmp_path / "later.pickle"))
    assert [one.name for one in later.causes] == ["leak"]
    for name in ("live_bytes", "reserved_bytes", "lines", "kinds", "growth", "requested_bytes", "settings"):
        assert getattr(later, name) == getattr(at_once, name), name
    assert later.fragmented_bytes == at_once.fragmented_bytes
    assert later.cached_bytes == at_once.cached_bytes
    assert any("entries after the OOM" in one for one in later.unseen)


def test_a_history_that_begins_in_the_middle(tmp_path: Path) -> None:
    """The ring of the history has lost its beginning: what was live then has no stack, and is counted."""
    device = PLANTED["leak"]()
    whole = explain_oom(device.write(tmp_path / "whole.pickle"), what_if=False)
    value = device.snapshot()
    value["device_traces"] = [device.trace[60:]]
    path = tmp_path / "ring.pickle"
    path.write_bytes(pickle.dumps(value))
    found = explain_oom(path)
    assert found.live_bytes == whole.live_bytes
    assert found.peak_bytes == whole.peak_bytes
    assert [one.name for one in found.causes] == ["leak"]
    # Weights were made before it: the segments know their stacks.
    assert [one.name for one in found.kinds][:2] == ["weights", "optimizer"]


def test_a_snapshot_without_a_history_says_what_is_live(tmp_path: Path) -> None:
    value = PLANTED["too large"]().snapshot()
    for name, changed in (
        ("none", {**value, "device_traces": [[]]}),
        ("segments", value["segments"]),
        ("no_oom", {**value, "device_traces": [value["device_traces"][0][:-1]]}),
    ):
        path = tmp_path / f"{name}.pickle"
        path.write_bytes(pickle.dumps(changed))
        found = explain_oom(path)
        assert found.requested_bytes is None
        assert not found.causes
        assert found.live_bytes > 30 * MIB
        assert "no OOM" in str(found)


LIBRARIES = "/home/me/.venv/lib/python3.11/site-packages/"
RELU = StackFrame(f"{LIBRARIES}torch/nn/functional.py", 1693, "relu")
LOSS = StackFrame(f"{LIBRARIES}transformers/loss/loss_utils.py", 42, "fixed_cross_entropy")
TRAINER = StackFrame(f"{LIBRARIES}transformers/trainer.py", 1598, "train")
MINE = StackFrame("/home/me/train.py", 9, "main")
HOOK = StackFrame("/home/me/train.py", 30, "compute_loss")


@pytest.mark.parametrize(
    ("stack", "line"),
    [
        ((RELU, LOSS, MINE), "train.py:9 main"),
        ((RELU, LOSS, TRAINER, MINE), "loss_utils.py:42 fixed_cross_entropy"),
        ((RELU, LOSS, HOOK, TRAINER, MINE), "train.py:30 compute_loss"),
        ((RELU, LOSS), "loss_utils.py:42 fixed_cross_entropy"),
        ((RELU,), "functional.py:1693 relu"),
    ],
)
def test_the_call_of_a_trainer_is_nobody_s_line(stack: tuple[StackFrame, ...], line: str) -> None:
    assert StackTable([stack], has_stacks=True).line(0) == line


def test_a_history_without_stacks_still_has_its_figures(tmp_path: Path) -> None:
    value = PLANTED["fragmentation"]().snapshot()
    for entry in value["device_traces"][0]:
        del entry["frames"]
    path = tmp_path / "bare.pickle"
    path.write_bytes(pickle.dumps(value))
    found = explain_oom(path)
    assert [one.name for one in found.causes] == ["fragmentation"]
    assert any("no stacks" in one for one in found.unseen)
    assert found.lines[0].name.startswith("train.py:51")  # the blocks have theirs


def test_expandable_segments_are_read_with_their_pages(tmp_path: Path) -> None:
    device = expanding()
    actions = {entry["action"] for entry in device.trace}
    assert {"segment_map", "segment_unmap", "free_requested", "free_completed", "oom"} <= actions
    found = explain_oom(device.write(tmp_path / "oom.pickle"))
    assert found.reserved_bytes == device.device.reserved_bytes
    assert found.awaiting_bytes == 30 * MIB
    assert "expandable_segments:True" not in [one.setting for one in found.settings]  # it is on


def test_fewer_samples_are_counted_where_the_batch_is_known(tmp_path: Path) -> None:
    path = PLANTED["too large"]().write(tmp_path / "oom.pickle")
    found = explain_oom(path, batch_size=32)
    assert found.fewer_samples is not None
    assert 0 < found.fewer_samples < 32
    assert f"{found.fewer_samples} samples fewer" in found.causes[0].advice
    # So many fewer samples, and the request is granted.
    device = Recording(40 * MIB)
    with pytest.raises(OutOfMemory):
        train(device, scale=lambda step: 1 - found.fewer_samples / 32)  # type: ignore[operator]
    assert device.trace[-1]["size"] != found.requested_bytes


def test_several_ranks_are_explained_by_the_first_that_died(tmp_path: Path) -> None:
    ranks = []
    for rank in range(4):
        device = PLANTED["leak"]() if rank == 2 else _survivor()
        value = device.snapshot()
        value["batchfit"] = {"rank": rank, "step": 17, "batch": {"ids": "int64 (8, 512)"}, "batch_size": 8}
        path = tmp_path / f"oom_rank{rank}.pickle"
        path.write_bytes(pickle.dumps(value))
        ranks.append(path)
    found = explain_oom(ranks, what_if=False)
    assert (found.rank, found.step, found.batch_size) == (2, 17, 8)
    assert [one.rank for one in found.ranks] == [0, 1, 2, 3]
    assert [one.has_oom for one in found.ranks] == [False, False, True, False]
    assert "oom_rank2.pickle" in str(found)
    assert "int64 (8, 512)" in str(found)


def _survivor() -> Recording:
    device = Recording(160 * MIB)
    train(device, steps=10)
    return device


def test_the_answer_goes_to_json_and_back() -> None:
    found = explain_oom(h200("leak"), what_if=False)
    assert OomExplanation.from_json(found.to_json()) == found
    assert found.summary in str(found).replace("\n", " ")
    assert "<svg" in found._repr_html_()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"budget": "much"}, "budget must be"),
        ({"gpu": "toaster"}, "gpu must be"),
        ({"batch_size": 0}, "batch_size must be"),
        ({"what_if": 1}, "what_if must be"),
    ],
)
def test_wrong_arguments_come_before_any_reading(given: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        explain_oom("no such file", **given)


def test_settings_of_the_snapshot_are_the_ones_replayed() -> None:
    """A snapshot with expandable segments on is replayed with them."""
    from batchfit._why.pure.replayed_settings import settings_of

    assert settings_of({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"}) == AllocatorSettings(
        max_split_size_bytes=128 * MIB
    )
    assert settings_of({"expandable_segments": True}) == replace(
        AllocatorSettings(), expandable_segments=True
    )
    assert settings_of({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:x"}) == AllocatorSettings()
