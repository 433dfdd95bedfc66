"""The value of the pytest fixture `peak_memory`: compares a step of a test with the test's baseline.

Rules: the baseline of a test goes by the test's name; a second call in a test has a number. A test without a
baseline is compared with nothing: its own `assert` counts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, final

from batchfit._charts.check_page import verdict
from batchfit._check.baseline_file import records_in
from batchfit._check.check import check_with
from batchfit._check.pure.options import CheckOptions
from batchfit._units import format_bytes, parse_bytes
from batchfit.results import MemoryCheck
from batchfit.workload import Workload


@final
class PeakMemory(int):
    """Bytes at the peak of a step, which compare with text such as "20GiB"; `check` is what they are from."""

    check: MemoryCheck

    @classmethod
    def of(cls, check: MemoryCheck) -> PeakMemory:
        found = cls(check.peak_bytes)
        found.check = check
        return found

    def __lt__(self, other: int | str) -> bool:
        return int(self) < _bytes(other)

    def __le__(self, other: int | str) -> bool:
        return int(self) <= _bytes(other)

    def __gt__(self, other: int | str) -> bool:
        return int(self) > _bytes(other)

    def __ge__(self, other: int | str) -> bool:
        return int(self) >= _bytes(other)

    def __repr__(self) -> str:
        """As pytest shows it where an `assert` fails: with the lines that hold the most."""
        lines = [f"{format_bytes(one.peak_bytes)} {one.name}" for one in self.check.holders[:3]]
        return f"<peak {format_bytes(int(self))} in {self.check.peak_phase}: {', '.join(lines)}>"


def _bytes(other: int | str) -> int:
    return parse_bytes(other, name="the other side") if isinstance(other, str) else int(other)


@final
class MemoryOfTest:
    """Measures the peak memory of workloads for one test."""

    def __init__(
        self,
        *,
        test: str,
        path: Path,
        max_increase: str,
        update: bool,
        fail: Callable[[str], NoReturn],
    ) -> None:
        self._test = test
        self._path = path
        self._max_increase = max_increase
        self._update = update
        self._fail = fail
        self._calls = 0

    def __call__(
        self,
        workload: Workload | Callable[[int], object],
        *,
        batch_size: int,
        gpu: str | None = None,
        max_increase: int | str | None = None,
    ) -> PeakMemory:
        """The peak of a step at a batch size; the test fails where its baseline is exceeded."""
        self._calls += 1
        name = self._test if self._calls == 1 else f"{self._test} {self._calls}"
        known = self._update or name in records_in(self._path)
        options: dict[str, Any] = {"batch_size": batch_size, "gpu": gpu, "update": self._update}
        options["baseline"] = self._path if known else None
        options["max_increase"] = self._max_increase if max_increase is None else max_increase
        check = check_with(workload, CheckOptions(**options), name=name)
        if not check.passed:
            # pytest's summary shows the first line alone: without the verdict, which it says itself.
            self._fail(str(check).removeprefix(f"{verdict(check)}\n"))
        return PeakMemory.of(check)
