"""The noise scale where it is known: bias and coverage of the estimate, over many seeds. No GPU, no torch.

    python benchmarks/noise_planted.py run --out noise_planted.json     # again: goes on where it was
    python benchmarks/noise_planted.py page noise_planted.json --to page.md

Per-sample gradients are Gaussian in `DIMENSIONS` dimensions, |G|^2 = 1 and tr(Sigma) = the planted scale, so
the squared norms that the estimator is told can be drawn as they are distributed, without drawing any
gradient: with e = the batch's gradient and d_i = a microbatch's distance from it, |e|^2 is a noncentral chi
square, and the d_i are independent of e. The estimator is the library's own, told one step after the other.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from batchfit._decide.noise import NoiseReading, NoiseState, observe

SCALES = (64, 1_000, 10_000)
SHAPES = {"8x4": [8] * 4, "8x16": [8] * 16, "8x64": [8] * 64}
# The same numbers of samples in pieces of different sizes.
RAGGED = {
    "8x4": [12, 9, 7, 4],
    "8x16": [4, 12, 6, 10] * 4,
    "8x64": [3, 13, 8, 5, 11] * 12 + [8] * 4,
}
MODES = ("exact", "cheap")
DIMENSIONS = 256
STEPS, SEEDS = 300, 500
DECAY_STEPS = 100  # as in the table of the field notes (beta 0.99)


def norms(
    sizes: list[int], scale: float, steps: int, rng: np.random.Generator, mode: str
) -> list[tuple[list[float], float]]:
    """For each step the squared norms of the microbatches (or of the first one) and of the batch."""
    b = np.asarray(sizes, float)
    whole, count = b.sum(), len(sizes)
    sigma2 = scale / DIMENSIONS  # of each coordinate of one sample's gradient
    big = sigma2 / whole * rng.noncentral_chisquare(DIMENSIONS, whole / sigma2, steps)
    length = np.sqrt(big)
    if mode == "cheap":
        spread = sigma2 * (1 / b[0] - 1 / whole)
        along = rng.normal(0, np.sqrt(spread), steps)
        across = spread * rng.chisquare(DIMENSIONS - 1, steps)
        first = (length + along) ** 2 + across
        return [([float(one)], float(total)) for one, total in zip(first, big, strict=True)]
    # d_i = z_i - sum_j w_j z_j with z_i of variance sigma2 / b_i: along e, and in the other dimensions.
    z = rng.normal(0, np.sqrt(sigma2 / b)[:, None], (steps, count, DIMENSIONS))
    d = z - (b / whole) @ z if False else z - np.einsum("i,sid->sd", b / whole, z)[:, None, :]
    d[:, :, 0] += length[:, None]
    squares = np.einsum("sid,sid->si", d, d)
    return [([float(one) for one in row], float(total)) for row, total in zip(squares, big, strict=True)]


def one_seed(sizes: list[int], scale: float, steps: int, mode: str, seed: int, decay: int) -> NoiseReading:
    rng = np.random.default_rng([seed, len(sizes), int(scale), mode == "cheap", sizes[0]])
    state = NoiseState(decay_samples=decay * sum(sizes))
    for some, total in norms(sizes, scale, steps, rng, mode):
        state = state.told(observe(sizes, some, total))
    return state.reading()
