"""What a run of a program was, by what its processes have reported: a trial, or an error of the program."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from batchfit._engine.trial.trial import TrialRequest
from batchfit._program.followed_run import FollowedRun
from batchfit._program.pure.tail import Tail
from batchfit._program.pure.template import CommandTemplate
from batchfit._program.rank_reports import Reports
from batchfit._program.run_verdict import trial_of
from batchfit.errors import ProgramError
from batchfit.results import Trial

PASS = {"kind": "first_pass", "device": "cpu", "budget_bytes": 100}
STEP = {"kind": "step", "number": 1, "step_s": 0.1, "samples": 8, "elements": 8, "passes": 1}
LEFT = {"kind": "left"}


def raised(kind: str, verdict: str = "none", **more: Any) -> dict[str, Any]:
    return {"kind": "raised", "verdict": verdict, "text": f"{kind}: it", "type": kind, "phase": None} | {
        "traceback": [],
        **more,
    }


def verdict(*events: dict[str, Any], ran: tuple[int, ...] = (), **ended: Any) -> Trial:
    run = SimpleNamespace(begun_s=time.monotonic(), tail=Tail())
    followed = FollowedRun(cast(Any, run), TrialRequest(8, steps=3), cast(Any, None), Reports(), **ended)
    for event in ({"kind": "hello"}, *events):
        followed.reports.take({"peer": 1, **event}, time.monotonic())
    return trial_of(followed, CommandTemplate(words=("python", "{}")), ran=ran)


@pytest.mark.parametrize(
    ("events", "ended", "ran", "outcome"),
    [
        ((PASS, STEP), {"reached": True}, (), "fits"),
        ((PASS, STEP), {"code": 0}, (), "fits"),
        ((PASS, raised("OutOfMemoryError", "oom")), {"code": 1}, (), "oom"),
        ((PASS, raised("RuntimeError", "ambiguous")), {"code": 1}, (4,), "oom"),
        ((PASS, LEFT), {"code": -9}, (), "killed"),
        ((PASS, STEP), {"hung": True, "waited_s": 5}, (), "timeout"),
        ((), {"code": 0}, (4,), "too_large"),
        ((raised("UnboundLocalError"),), {"code": 1}, (4,), "too_large"),
        (({**raised("ZeroDivisionError"), "kind": "handled"},), {"code": 1}, (4,), "too_large"),
    ],
)
def test_what_counts_as_a_trial(
    events: tuple[dict[str, Any], ...], ended: dict[str, Any], ran: tuple[int, ...], outcome: str
) -> None:
    assert verdict(*events, ran=ran, **ended).outcome == outcome


@pytest.mark.parametrize(
    ("events", "ended", "ran", "message"),
    [
        ((), {"code": 0}, (), "the program ended before its first step, at batch size 8"),
        (
            (PASS, {"kind": "exits", "passes": 20}),
            {"code": 0},
            (),
            "the program ended without a step of its optimizer, after 20 forward passes, at batch size 8",
        ),
        ((), {"code": 2}, (4,), "the program exited by itself with code 2 before its first step"),
        ((), {"hung": True, "waited_s": 5}, (4,), "the program took no step within 5 s"),
        ((raised("UnboundLocalError"),), {"code": 1}, (), "the program raised UnboundLocalError: it"),
        ((raised("OSError"),), {"code": 1}, (4,), "the program raised OSError: it, at batch size 8 (4 ran)"),
        ((PASS, STEP, raised("ValueError")), {"code": 1}, (4,), "the program raised ValueError: it"),
        ((PASS, raised("RuntimeError", "ambiguous")), {"code": 1}, (), "the program raised RuntimeError: it"),
        ((raised("EOFError"),), {"code": 1}, (4,), "the program asks for input, and a probe has none"),
        ((), {"not_started": "No such file"}, (), "the command could not be started: python: No such file"),
    ],
)
def test_what_is_the_programs_own_error(
    events: tuple[dict[str, Any], ...], ended: dict[str, Any], ran: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ProgramError) as caught:
        verdict(*events, ran=ran, **ended)
    assert str(caught.value).startswith(message)
