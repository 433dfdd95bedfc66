"""The caching allocator's settings, as torch 2.13 reads them (PYTORCH_CUDA_ALLOC_CONF).

Rules: a key that is not known is ignored, as torch's own list grows; a value that torch refuses is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MIB = 2**20
OWN_SEGMENT = 10 * MIB  # from here on a request has a segment of its own
# Divisions are set for each power of two from 1 MiB to 32 GiB; what lies outside takes the nearest.
DIVISION_STEPS = 16
_SETTING = re.compile(r"(\w+)\s*:\s*(\[[^\]]*\]|[^,\[\]]+)")


@dataclass(frozen=True, slots=True)
class AllocatorSettings:
    """Allocator settings that change what fits (PYTORCH_CUDA_ALLOC_CONF).

    >>>
    AllocatorSettings.from_environment("expandable_segments:True,max_split_size_mb:128").max_split_size_bytes
    134217728
    """

    expandable_segments: bool = False
    max_split_size_bytes: int | None = None
    # Nothing, one number for all sizes, or 16: one for each power of two from 1 MiB on. 0 and 1 mean none.
    roundup_power2_divisions: tuple[int, ...] = ()
    garbage_collection_threshold: float = 0.0
    large_segment_bytes: int = 20 * MIB
    max_non_split_rounding_bytes: int | None = None  # None: as large_segment_bytes
    # Whether the capacity is a cap (a memory fraction below 1, set by key or by call) or the GPU's memory.
    capped: bool = False

    def __post_init__(self) -> None:
        # What PyTorch refuses too. With it, a free block of max_split_size or more is always a whole segment.
        large, split = self.large_segment_bytes, self.max_split_size_bytes
        if large <= OWN_SEGMENT or large % MIB:
            raise ValueError(f"large_segment_bytes must be whole MiB, more than 10, not {large!r}")
        if split is not None and (split < large or split % MIB):
            raise ValueError(f"max_split_size_bytes must be whole MiB, at least {large}, not {split!r}")
        rounding = self.max_non_split_rounding_bytes
        if rounding is not None and rounding < large:
            raise ValueError(f"max_non_split_rounding_bytes must be at least {large}, not {rounding!r}")
        divisions = self.roundup_power2_divisions
        if len(divisions) not in (0, 1, DIVISION_STEPS) or any(n < 0 or n & (n - 1) for n in divisions):
            raise ValueError(
                f"roundup_power2_divisions must be 0, 1 or {DIVISION_STEPS} powers of two, not {divisions!r}"
            )
        threshold = self.garbage_collection_threshold
        if not 0.0 <= threshold < 1.0:
            raise ValueError(f"garbage_collection_threshold must be from 0 to below 1, not {threshold!r}")

    @classmethod
    def from_environment(cls, text: str) -> AllocatorSettings:
        """The rules that a value of PYTORCH_CUDA_ALLOC_CONF sets; other keys are passed over."""
        found = {key: value.strip() for key, value in _SETTING.findall(text)}
        try:
            return cls(
                expandable_segments=found.get("expandable_segments") == "True",
                max_split_size_bytes=_parse_mib(found.get("max_split_size_mb")),
                roundup_power2_divisions=_parse_divisions(found.get("roundup_power2_divisions", "[]")),
                garbage_collection_threshold=float(found.get("garbage_collection_threshold", 0.0)),
                large_segment_bytes=_parse_mib(found.get("large_segment_size_mb")) or 20 * MIB,
                max_non_split_rounding_bytes=_parse_mib(found.get("max_non_split_rounding_mb")),
                capped=float(found.get("per_process_memory_fraction", 1.0)) < 1.0,
            )
        except ValueError as error:
            raise ValueError(
                f"allocator settings must be what PyTorch takes, not {text!r}: {error}"
            ) from None


def _parse_mib(text: str | None) -> int | None:
    return None if text is None else int(text) * MIB


def _parse_divisions(text: str) -> tuple[int, ...]:
    """`"4"`, or `"[256:1,512:2,>:4]"`: a list goes by size in MiB, each entry for its power of two alone."""
    if not text.startswith("["):
        return (int(text),)
    entries = [entry.split(":") for entry in re.sub(r"\s", "", text[1:-1]).split(",") if entry]
    divisions = [0] * DIVISION_STEPS
    last = 0
    for position, (size, count) in enumerate(entries):
        if size == ">":  # all sizes above the entry before it
            divisions[last + 1 :] = [int(count)] * (DIVISION_STEPS - last - 1)
            continue
        last = min(int(size).bit_length() - 1, DIVISION_STEPS - 1)
        if position == 0:  # the first entry is for all smaller sizes too
            divisions[:last] = [int(count)] * last
        divisions[last] = int(count)
    return tuple(divisions) if entries else ()
