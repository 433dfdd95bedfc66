"""What a search is: an immutable value that says what to measure next and takes in what was measured.

`_find/pure/search.py` (batch sizes that fit), `_profile/pure/knee.py` (batch sizes to time) and
`_rerun/pure/rerun.py` (runs of a whole program) are such values. A driver loops: `ask`, measure, `tell`.

Rules: `ask` depends on the settings and the observations alone, so that all ranks ask for the same; `tell`
returns a new value and changes nothing; a search ends when `ask` returns None.
"""

from __future__ import annotations

from typing import Protocol, Self, TypeVar

RequestT = TypeVar("RequestT", covariant=True)
ObservationT = TypeVar("ObservationT")


class AskTell(Protocol[RequestT, ObservationT]):
    """A search with its settings and what it has observed so far."""

    @property
    def observations(self) -> tuple[ObservationT, ...]:
        """The observations so far, in order."""

    def ask(self) -> RequestT | None:
        """What to measure next; None when the search is over."""

    def tell(self, observation: ObservationT, /) -> Self:
        """The search after one more observation, whether or not `ask` asked for it."""
