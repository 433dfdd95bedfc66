"""Recognises BatchNorm's refusal of a single sample."""

from __future__ import annotations


def needs_two_samples(error: BaseException) -> bool:
    """Whether a step failed because batch normalization cannot train on one value per channel."""
    return "Expected more than 1 value per channel" in str(error)  # torch's own words
