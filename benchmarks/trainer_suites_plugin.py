"""pytest plug-in of trainer_suites.py: every Trainer that a test makes is given to `adapt`, and noted.

Rules
- It is loaded by name (`-p trainer_suites_plugin`) into the suite of another repository. The environment
  says what to do: TRAINER_SUITES_MODE (plain, adapted, cut), TRAINER_SUITES_OUT (a file for the notes) and
  TRAINER_SUITES_ONLY (such a file of another run: only tests that passed there run). With
  TRAINER_SUITES_UNLOGGED batchfit's own entries do not reach `log_history`: what else would fail?
- A name that the installed library no longer has (TRAINER_SUITES_GONE) is a stand-in that fails when it
  is called, so that the other tests of its file run.
- A trainer is adapted at the end of its construction, as a user would: `trainer = adapt(Trainer(...))`. One
  that `adapt` refuses goes on without, and the refusal is noted with the test.
- `cut`: the search and every Microbatcher stop at TRAINER_SUITES_SAMPLES, so that nearly every batch is cut,
  those of evaluations too.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

MODE = os.environ.get("TRAINER_SUITES_MODE", "plain")
OUT = os.environ.get("TRAINER_SUITES_OUT")
SAMPLES = int(os.environ.get("TRAINER_SUITES_SAMPLES", "1"))
ONLY = os.environ.get("TRAINER_SUITES_ONLY")
UNLOGGED = os.environ.get("TRAINER_SUITES_UNLOGGED") == "1"
GONE = [name for name in os.environ.get("TRAINER_SUITES_GONE", "").split(",") if name]
HUB = os.environ.get("TRAINER_SUITES_HUB")

_MOST_TEXT = 400
_noted: dict[str, dict[str, Any]] = {}
_now: dict[str, Any] = {}  # of the test that runs


def _new_notes() -> dict[str, Any]:
    return {"adapted": 0, "refused": [], "trainings": 0, "batches": 0, "cut": 0}


def adapt_at_construction() -> None:
    """Let each Trainer be adapted when its outermost `__init__` has returned."""
    import transformers

    from batchfit.integrations.transformers import BatchfitMixin, adapt
    from batchfit.integrations.transformers.run import TrainerRun

    wrapped: set[type] = set()

    def finish(trainer: Any) -> None:
        if isinstance(trainer, BatchfitMixin):
            return
        options = {"search": {"max_size": SAMPLES}} if MODE == "cut" else {}
        try:
            adapt(trainer, **options)
        except Exception as error:  # noqa: BLE001 - of any kind: it is the result
            _now.setdefault("refused", []).append(f"{type(error).__name__}: {error}"[:_MOST_TEXT])
        else:
            _now["adapted"] = _now.get("adapted", 0) + 1

    def wrap(kind: Any) -> None:
        plain = kind.__init__

        @functools.wraps(plain)
        def init(self: Any, *given: Any, **named: Any) -> None:
            table = vars(self)
            is_outermost = "_trainer_suites_inside" not in table
            table["_trainer_suites_inside"] = True
            try:
                plain(self, *given, **named)
            finally:
                if is_outermost:
                    del table["_trainer_suites_inside"]
            if is_outermost:
                finish(self)

        kind.__init__ = init
        wrapped.add(kind)

    def new(cls: Any, *given: Any, **named: Any) -> Any:
        for kind in cls.__mro__:
            is_trainer = issubclass(kind, transformers.Trainer) and kind is not BatchfitMixin
            if is_trainer and "__init__" in vars(kind) and kind not in wrapped:
                wrap(kind)
        return object.__new__(cls)

    transformers.Trainer.__new__ = new  # type: ignore[method-assign]

    begin, logged = BatchfitMixin._inner_training_loop, TrainerRun.logged

    @functools.wraps(begin)
    def counted(self: Any, *given: Any, **named: Any) -> Any:
        _now["trainings"] = _now.get("trainings", 0) + 1
        return begin(self, *given, **named)

    @functools.wraps(logged)
    def noted(self: Any, report: Any) -> Any:
        _now["batches"] = _now.get("batches", 0) + 1
        _now["cut"] = _now.get("cut", 0) + (len(report.microbatch_sizes) > 1)
        return logged(self, report)

    BatchfitMixin._inner_training_loop = counted  # type: ignore[method-assign]
    TrainerRun.logged = noted  # type: ignore[method-assign]


def cut_always() -> None:
    """Let no Microbatcher run more than a few samples at once."""
    import batchfit

    plain = batchfit.Microbatcher.__init__

    @functools.wraps(plain)
    def init(self: Any, *given: Any, **named: Any) -> None:
        named["microbatch_size"] = min(named.get("microbatch_size") or SAMPLES, SAMPLES)
        plain(self, *given, **named)

    batchfit.Microbatcher.__init__ = init  # type: ignore[method-assign]


def _reason(report: Any) -> str:
    """Where and with what a test failed, in a line."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        text = " ".join(str(crash.message).split())
        return f"{Path(crash.path).name}:{crash.lineno}: {text}"[:_MOST_TEXT]
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])[:_MOST_TEXT]
    return " ".join(str(report.longrepr).split())[-_MOST_TEXT:]


def pytest_sessionstart(session: pytest.Session) -> None:
    for name in GONE:  # not earlier: set when this module is loaded, they are gone when tests are collected
        stand_in_for(name)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if ONLY is None:
        return
    before = json.loads(Path(ONLY).read_text())
    kept = [one for one in items if before.get(one.nodeid, {}).get("outcome") == "passed"]
    config.hook.pytest_deselected(items=[one for one in items if one not in kept])
    items[:] = kept


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    _now.clear()
    _now.update(_new_notes())
    result = yield
    _noted.setdefault(item.nodeid, {"outcome": "passed"}).update(_now)
    _write()
    return result


def pytest_runtest_logreport(report: Any) -> None:
    one = _noted.setdefault(report.nodeid, {"outcome": "passed"})
    one["seconds"] = round(one.get("seconds", 0.0) + report.duration, 2)
    if report.failed:
        one.update(outcome="failed", reason=_reason(report))
    elif report.skipped and one["outcome"] == "passed":
        one.update(outcome="skipped", reason=_reason(report))


def pytest_collectreport(report: Any) -> None:
    if report.failed:
        _noted[report.nodeid] = {"outcome": "failed", "reason": _reason(report), **_new_notes()}

    _write()


def _write() -> None:
    """After each test, so that a run that is cut short leaves what it has."""
    if OUT is not None:
        Path(OUT).write_text(json.dumps(_noted, indent=1))


def log_nothing() -> None:
    """Keep batchfit's own entries out of `log_history`."""
    from batchfit.integrations.transformers.callback import TrainingCallback

    TrainingCallback._write = lambda self: self._trainer._batchfit.logs.clear()  # type: ignore[method-assign]


def stand_in_for(gone: str) -> None:
    """Let a name that a library no longer has ("package.module:name") be imported; it fails when called."""
    module, _, name = gone.partition(":")
    holder = importlib.import_module(module)

    def missing(*given: Any, **named: Any) -> Any:
        if name.startswith("is_"):  # asked for a package, while tests are collected
            return False
        raise NotImplementedError(f"the installed {module} has no {name}")

    if not hasattr(holder, name):
        setattr(holder, name, missing)


if HUB is not None:
    import trainer_suites_hub

    trainer_suites_hub.serve(Path(HUB))
if MODE != "plain":
    adapt_at_construction()
if MODE == "cut":
    cut_always()
if UNLOGGED:
    log_nothing()
