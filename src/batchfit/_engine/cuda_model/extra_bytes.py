"""What an operation allocates beside its results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final


@final
@dataclass(frozen=True, slots=True)
class Extra:
    """Bytes beside the results: `after[i]` live shortly after result i is there, `together` until the end.

    `plans` are like `after`, but the kernel does without where there is no room: cuDNN then takes its next
    plan. `before[i]` is there before result i is made, and until the end: what is kept is then placed beside
    it, which decides how memory falls into pieces. `outputs` corrects the bytes of results that the fake
    kernel gets wrong. A rule that takes nothing at this size says 0, so that the stream of allocations is the
    same at every size.
    """

    together: tuple[int, ...] = ()
    after: dict[int, int] = field(default_factory=dict)
    plans: dict[int, int] = field(default_factory=dict)
    before: dict[int, int] = field(default_factory=dict)
    outputs: dict[int, int] = field(default_factory=dict)
