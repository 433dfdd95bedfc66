"""Who is notified of the microbatches of a pass, as it runs."""

from __future__ import annotations

from typing import Protocol, final


class PassWatch(Protocol):
    """Who wants to know what each microbatch takes."""

    def begin(self, index: int) -> None: ...

    def end(self, index: int) -> None: ...


@final
class _Nobody:
    """Who wants to know nothing."""

    def begin(self, index: int) -> None: ...

    def end(self, index: int) -> None: ...


NOBODY = _Nobody()
