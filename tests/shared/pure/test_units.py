"""Bytes as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchfit._engine.sizing.pure.sizes import oom_in_short
from batchfit._units import format_bytes, in_use_bytes, parse_bytes, requested_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (1, 1),
        ("1024", 1024),
        ("24G", 24 * 2**30),
        ("512m", 512 * 2**20),
        ("512 B", 512),
        ("1KB", 1000),
        ("1kib", 1024),
        ("800MiB", 800 * 2**20),
        ("24GB", 24 * 10**9),
        ("24 GiB", 24 * 2**30),
        ("1.5GiB", 3 * 2**29),
        ("0.5 TiB", 2**39),
        ("2tb", 2 * 10**12),
        ("  7 MB ", 7 * 10**6),
    ],
)
def test_parse(text: int | str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "text", ["24 gigs", "", "GiB", "1.5", "-1GiB", "1e9", "1 GiB!", "24Gi", "0x10", "1..5GiB", "1GiB\n2GiB"]
)
def test_text_that_cannot_be_read_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="limit must be") as caught:
        parse_bytes(text, name="limit")
    assert repr(text) in str(caught.value)


def test_a_small_number_without_a_unit_has_lost_it() -> None:
    with pytest.raises(ValueError, match="budget '32' is 32 bytes: did you mean '32GiB'"):
        parse_bytes("32")


def test_what_an_oom_says_of_itself() -> None:
    virtual = (
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 1.53 MiB. This is virtual memory on the "
        "CPU, no GPU is involved: it has a total capacity of 4.00 MiB of which 0.89 MiB is free; live"
    )
    assert requested_bytes(virtual) == round(1.53 * 2**20)
    assert in_use_bytes(virtual) == 4 * 2**20 - round(0.89 * 2**20)
    assert oom_in_short(virtual) == "OOM at a request of 1.53 MiB; retrying"
    real = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which"
    assert in_use_bytes(real) is None
    assert requested_bytes("CUBLAS_STATUS_ALLOC_FAILED") is None
    assert oom_in_short("CUBLAS_STATUS_ALLOC_FAILED") == "CUBLAS_STATUS_ALLOC_FAILED"


@pytest.mark.parametrize("value", [0, -5, "0", "0GiB", "0.0GiB"])
def test_nothing_is_no_budget(value: int | str) -> None:
    with pytest.raises(ValueError, match=r"budget must be positive, not"):
        parse_bytes(value)


@pytest.mark.parametrize("value", [True, 1.5, None, b"1GiB", [1]])
def test_another_type_is_named(value: object) -> None:
    with pytest.raises(TypeError, match="budget must be bytes or text") as caught:
        parse_bytes(value)  # type: ignore[arg-type]
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (10 * 1024, "10.0 KiB"),
        (25555055411, "23.8 GiB"),
        (2**40, "1024.0 GiB"),
        (-(2**30), "-1.00 GiB"),
    ],
)
def test_format(count: int, text: str) -> None:
    assert format_bytes(count) == text


@given(st.integers(1, 2**50))
def test_what_is_printed_reads_back_within_its_digits(count: int) -> None:
    assert parse_bytes(format_bytes(count)) == pytest.approx(count, rel=0.006)
