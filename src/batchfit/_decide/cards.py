"""The cards that a prediction can be made for: usable bytes, and what changes memory there.

Rules: `usable_bytes` is what a program's tensors can have once the driver and the CUDA context have taken
theirs. A card that we have not measured says so (`measured=False`): its memory is the figure that its driver
reports, less what a context took on the card that we did measure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

GIB = 2**30
MIB = 2**20
_CONTEXT = 560 * MIB  # an H200 after the first kernel, torch 2.11


@final
@dataclass(frozen=True, slots=True)
class Card:
    """One kind of GPU."""

    name: str
    usable_bytes: int
    capability: tuple[int, int]
    multiprocessors: int
    threads_per_multiprocessor: int = 2048
    measured: bool = False

    @property
    def blas_bytes(self) -> int:
        """What cuBLAS keeps for each thread that uses it (at::cuda::getChosenWorkspaceSize)."""
        return 32 * MIB if self.capability >= (9, 0) else 8 * MIB + 128 * 1024

    @property
    def blas_lt_bytes(self) -> int:
        """What cuBLASLt keeps beside it."""
        return MIB

    @property
    def prefers_cudnn_attention(self) -> bool:
        """torch puts cuDNN's attention first on Hopper and on B200s, not on RTX cards."""
        return self.capability[0] in (9, 10)


def _card(
    name: str,
    gib: float,
    capability: tuple[int, int],
    multiprocessors: int,
    threads: int = 2048,
    *,
    measured: bool = False,
) -> Card:
    return Card(name, round(gib * GIB) - _CONTEXT, capability, multiprocessors, threads, measured)


CARDS = {
    card.name: card
    for card in (
        _card("b200", 178.4, (10, 0), 148),
        _card("h200", 139.8, (9, 0), 132, measured=True),
        _card("h100", 79.1, (9, 0), 132),
        _card("gh200", 94.5, (9, 0), 132),
        _card("a100-80gb", 79.1, (8, 0), 108),
        _card("a100-40gb", 39.4, (8, 0), 108),
        _card("l40s", 44.4, (8, 9), 142, 1536),
        _card("l4", 22.0, (8, 9), 58, 1536),
        _card("a10g", 22.0, (8, 6), 80, 1536),
        _card("a6000", 47.4, (8, 6), 84, 1536),
        _card("rtx6000-ada", 47.4, (8, 9), 142, 1536),
        _card("rtx5090", 31.4, (12, 0), 170, 1536),
        _card("rtx4090", 23.6, (8, 9), 128, 1536),
        _card("rtx3090", 23.7, (8, 6), 82, 1536),
        _card("v100-32gb", 31.7, (7, 0), 80),
        _card("v100-16gb", 15.8, (7, 0), 80),
        _card("t4", 14.6, (7, 5), 40, 1024),
    )
}
DEFAULT = CARDS["h200"]  # whose rules are measured: taken where no card is named


def card_named(name: str) -> Card:
    """The card of that name, however it is written: "H100", "a100_80gb", "RTX 4090"."""
    if not isinstance(name, str):
        raise TypeError(f"gpu must be the name of a card, not {name!r}")
    plain = "".join(letter for letter in name.lower() if letter.isalnum())
    for known, card in CARDS.items():
        if plain in (known.replace("-", ""), "nvidia" + known.replace("-", "")):
            return card
    if plain in ("a100", "v100"):
        both = [known for known in CARDS if known.startswith(plain)]
        raise ValueError(f"gpu must say how much memory it has ({' or '.join(both)}), not {name!r}")
    raise ValueError(
        f"gpu must be one of {', '.join(CARDS)}, not {name!r}; --budget takes any number of bytes"
    )
