"""`batchfit check`: the peak of targets against their baselines, by source line.

Rules: flags are keywords of `check_memory`; what is not given comes from `[tool.batchfit.check]` in the
`pyproject.toml` of the current folder. Without TARGET all targets of that table are checked, one after the
other; one that fails, or cannot be traced, does not keep the others from being checked.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchfit._charts.check_page import check_error_markdown, check_lines
from batchfit._charts.text_charts import Line
from batchfit._check.pure.options import BASELINE, CheckOptions
from batchfit._check.pure.project import TABLE, ProjectChecks, read_project
from batchfit._cli.delivery import RenderedAnswer, run_answer
from batchfit._cli.exits import Code, CommandFailed, wrong_flag
from batchfit._cli.progress import ProgressDisplay
from batchfit._cli.target import Given, TargetCall, load_and_work

if TYPE_CHECKING:
    from batchfit.results import MemoryCheck
    from batchfit.workload import Workload

_PROJECT = Path("pyproject.toml")


@dataclass(frozen=True, slots=True)
class TargetCheck:
    """A target to check, parsed, and how."""

    call: TargetCall
    given: Given
    options: CheckOptions

    @property
    def name(self) -> str:
        """What it is called in the baseline."""
        return " ".join([self.call.target, *(["--", *self.call.arguments] if self.call.arguments else [])])


@dataclass(frozen=True, slots=True)
class BrokenTarget:
    """One of several targets that could not be checked."""

    name: str
    failed: CommandFailed

    @property
    def json(self) -> str:
        """`{"kind": "check_error", "name": ..., "error": ...}`."""
        found = {"kind": "check_error", "name": self.name, "error": self.failed.text}
        return json.dumps(found, indent=2, ensure_ascii=False)

    def lines(self, width: int) -> list[Line]:
        """That it could not be checked, and why."""
        why = textwrap.wrap(f"{self.name}: {self.failed.text}", width, break_on_hyphens=False)
        details = self.failed.details.splitlines()
        return [[("NOT CHECKED", "warn")], *([(one, "")] for one in [*details, *why])]


def check_targets(call: TargetCall) -> Code:
    """Check a target, or without one (an empty text) all targets of the project."""
    wanted = _wanted(call)

    def answer(progress: ProgressDisplay) -> RenderedAnswer:
        if len(wanted) == 1:
            return rendered([_checked(wanted[0], progress)])
        checks, broken = [], []
        for one in wanted:
            try:
                checks.append(_checked(one, progress))
            except CommandFailed as failed:
                broken.append(BrokenTarget(one.name, failed))
        return rendered(checks, broken)

    call.delivery.check()
    return run_answer(call.delivery, answer)


def _wanted(call: TargetCall) -> list[TargetCheck]:
    """What to check; wrong flags and targets need no torch."""
    project = project_checks()
    targets = [call.target] if call.target else list(project.targets)
    if not targets:
        raise CommandFailed(
            Code.USAGE, f"give a TARGET (file.py:name), or name targets under {TABLE} in {_PROJECT}"
        )
    found = []
    for target in targets:
        one = replace(call, target=target)
        found.append(TargetCheck(one, one.given(), options_of(call.flags, project.flags_of(target))))
    return found


def project_checks() -> ProjectChecks:
    """What `pyproject.toml` here says."""
    try:
        text = _PROJECT.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ProjectChecks()
    except (OSError, UnicodeDecodeError) as error:
        raise CommandFailed(Code.USAGE, f"{_PROJECT}: {getattr(error, 'strerror', None) or error}") from None
    try:
        return read_project(text, name=str(_PROJECT))
    except ValueError as error:
        raise CommandFailed(Code.USAGE, str(error)) from None


def options_of(
    flags: Mapping[str, Any], of_project: Mapping[str, Any], *, needs_size: bool = True
) -> CheckOptions:
    """What was typed, then what the project says, then what is usual."""
    typed = {name: value for name, value in flags.items() if value is not None}
    merged = {**of_project, **typed}
    try:
        options = CheckOptions(**merged)
        if options.baseline is None:
            # A highest peak alone can be checked without a baseline.
            needed = options.update or options.max_peak is None or Path(BASELINE).exists()
            options = replace(options, baseline=BASELINE if needed else None)
        has_size = options.batch_size is not None or options.budget is not None
        if options.baseline is None and needs_size and not has_size:
            raise ValueError("batch_size must be given where there is no baseline, not None")
    except (ValueError, TypeError) as error:
        raise wrong_flag(error, "check") from None
    return options


def _checked(one: TargetCheck, progress: ProgressDisplay) -> MemoryCheck:
    def work(workload: Workload, progress: ProgressDisplay) -> MemoryCheck:
        from batchfit._check.check import check_with
        from batchfit._check.old_program import retraced

        progress.doing(f"tracing {one.call.target}")
        path = one.options.baseline
        again = None
        if path is not None and not one.options.update:
            again = partial(
                retraced,
                path=Path(path),
                name=one.name,
                target=one.call.target,
                arguments=one.call.arguments,
            )
        return check_with(workload, one.options, name=one.name, retrace=again, made=made)

    from batchfit._check.optimizer_lines import OptimizerLines

    made = OptimizerLines()
    with made.noting():
        return load_and_work(one.call, one.given, work, progress, command="check")


def rendered(checks: Sequence[MemoryCheck], broken: Sequence[BrokenTarget] = ()) -> RenderedAnswer:
    """The checks, ready to go out: one as its JSON, several as a list, with those that failed at its end."""
    texts = [*(one.to_json() for one in checks), *(one.json for one in broken)]
    code = Code.FOUND if all(one.passed for one in checks) else Code.MORE_MEMORY
    parts = [one.to_markdown() for one in checks]
    parts += [check_error_markdown(one.name, one.failed.text) for one in broken]
    return RenderedAnswer(
        json=texts[0] if len(texts) == 1 else "[\n" + ",\n".join(texts) + "\n]",
        lines=lambda width, plain: _lines(checks, broken, width, plain=plain),
        markdown="\n".join(parts),
        code=broken[0].failed.code if broken else code,
    )


def _lines(
    checks: Sequence[MemoryCheck], broken: Sequence[BrokenTarget], width: int, *, plain: bool
) -> list[Line]:
    screens = [check_lines(one, width=width, plain=plain) for one in checks]
    screens += [one.lines(width) for one in broken]
    between: list[Line] = [[]]
    return [line for number, screen in enumerate(screens) for line in (between if number else []) + screen]
