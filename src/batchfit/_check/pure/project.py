"""What `[tool.batchfit.check]` in `pyproject.toml` says: the targets of a project, and their limits.

    [tool.batchfit.check]
    max-increase = "2%"
    targets = ["train.py:workload", { target = "evaluate.py:workload", max-peak = "20GiB" }]

Rules: keys are the flags of `batchfit check`; what stands beside a target goes before what stands for all. A
key that is not known is an error.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

from batchfit._check.pure.options import CheckOptions
from batchfit._options import flags_in

TABLE = "[tool.batchfit.check]"
_KEYS = tuple(name.replace("_", "-") for name, _, _ in flags_in(CheckOptions) if name != "update")


@final
@dataclass(frozen=True, slots=True)
class ProjectChecks:
    """The targets of a project, each with all flags for it, and the flags for those that are not listed."""

    targets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    shared: Mapping[str, Any] = field(default_factory=dict)

    def flags_of(self, target: str) -> dict[str, Any]:
        """The flags for a target, in the list or not."""
        return dict(self.targets.get(target, self.shared))


def read_project(text: str, *, name: str) -> ProjectChecks:
    """The checks in the text of a `pyproject.toml`."""
    try:
        data: Any = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{name} must be TOML, and is not: {error}") from None
    for part in ("tool", "batchfit", "check"):
        data = data.get(part, {}) if isinstance(data, dict) else {}
    if not isinstance(data, dict):
        raise ValueError(f"{TABLE} in {name} must be a table, not {data!r:.80}")
    listed = data.get("targets", [])
    if not isinstance(listed, list):
        raise ValueError(f"targets of {TABLE} in {name} must be a list, not {listed!r:.80}")
    shared = _flags({key: value for key, value in data.items() if key != "targets"}, name, "targets")
    targets: dict[str, dict[str, Any]] = {}
    for one in listed:
        entry = {"target": one} if isinstance(one, str) else one
        target = entry.get("target") if isinstance(entry, dict) else None
        if not isinstance(target, str):
            raise ValueError(f"each of targets of {TABLE} in {name} must name a target, not {one!r:.80}")
        if target in targets:
            raise ValueError(f"targets of {TABLE} in {name} must name {target!r} once, not twice")
        flags = _flags({key: value for key, value in entry.items() if key != "target"}, name, "target")
        targets[target] = _checked({**shared, **flags}, f"{target} in {TABLE} of {name}")
    return ProjectChecks(targets, _checked(shared, f"{TABLE} in {name}"))


def _flags(table: Mapping[str, Any], name: str, also: str) -> dict[str, Any]:
    for key in table:
        if key not in _KEYS:
            known = ", ".join((also, *_KEYS))
            raise ValueError(f"{TABLE} in {name} must have keys among {known}, not {key!r}")
    return {key.replace("-", "_"): value for key, value in table.items()}


def _checked(flags: dict[str, Any], where: str) -> dict[str, Any]:
    """The flags, which must be options by themselves: what is wrong is then no flag that was typed."""
    try:
        CheckOptions(**flags)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{error} ({where})") from None
    return flags
