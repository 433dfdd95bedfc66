"""How many floating-point operations a second a device can do at most, by precision.

Rules: dense matrix figures from the makers' data sheets, without sparsity; a device or a precision that is
not in the table has no share, rather than a guessed one.
"""

from __future__ import annotations

# Part of the device's name (lower case) -> precision -> TFLOP/s. The first part that matches counts.
_PEAKS: tuple[tuple[str, dict[str, float]], ...] = (
    ("b200", {"bf16": 2250, "fp16": 2250, "tf32": 1125, "fp32": 75}),
    ("gh200", {"bf16": 989.4, "fp16": 989.4, "tf32": 494.7, "fp32": 66.9}),
    ("h200", {"bf16": 989.4, "fp16": 989.4, "tf32": 494.7, "fp32": 66.9}),
    ("h100 pcie", {"bf16": 756, "fp16": 756, "tf32": 378, "fp32": 51.2}),
    ("h100 nvl", {"bf16": 835, "fp16": 835, "tf32": 417.5, "fp32": 60}),
    ("h100", {"bf16": 989.4, "fp16": 989.4, "tf32": 494.7, "fp32": 66.9}),
    ("a100", {"bf16": 312, "fp16": 312, "tf32": 156, "fp32": 19.5}),
    ("l40s", {"bf16": 362, "fp16": 362, "tf32": 183, "fp32": 91.6}),
    ("l4", {"bf16": 121, "fp16": 121, "tf32": 60, "fp32": 30.3}),
    ("a10g", {"bf16": 70, "fp16": 70, "tf32": 35, "fp32": 31.2}),
    ("rtx a6000", {"bf16": 154.8, "fp16": 154.8, "tf32": 77.4, "fp32": 38.7}),
    ("rtx 6000 ada", {"bf16": 364.2, "fp16": 364.2, "tf32": 182.1, "fp32": 91.1}),
    ("rtx 5090", {"bf16": 209.5, "fp16": 209.5, "tf32": 104.8, "fp32": 104.8}),
    ("rtx 4090", {"bf16": 165.2, "fp16": 165.2, "tf32": 82.6, "fp32": 82.6}),
    ("rtx 3090", {"bf16": 71, "fp16": 71, "tf32": 35.6, "fp32": 35.6}),
    ("v100", {"fp16": 125, "fp32": 15.7}),
    ("t4", {"fp16": 65, "fp32": 8.1}),
)


def peak_flops(device_model: str, precision: str) -> float | None:
    """The most operations a second of that device in that precision; None where it is not known.

    >>> peak_flops("NVIDIA H200", "bf16")
    989400000000000.0
    """
    words = device_model.lower().replace("-", " ")
    for part, peaks in _PEAKS:
        if f" {part} " in f" {words} " or (" " in part and part in words):
            peak = peaks.get(precision)
            return None if peak is None else peak * 1e12
    return None
