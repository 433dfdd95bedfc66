"""The table of cards: names as people write them, and figures that cannot be right by accident."""

from __future__ import annotations

import pytest

from batchfit._decide.cards import CARDS, DEFAULT, GIB, MIB, card_named


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("h100", "h100"),
        ("H100", "h100"),
        ("NVIDIA H200", "h200"),
        ("a100_80gb", "a100-80gb"),
        ("A100 40GB", "a100-40gb"),
        ("RTX 4090", "rtx4090"),
        ("rtx-6000 ada", "rtx6000-ada"),
        ("T4", "t4"),
    ],
)
def test_a_card_is_found_however_it_is_written(written: str, name: str) -> None:
    assert card_named(written) is CARDS[name]


@pytest.mark.parametrize("name", list(CARDS))
def test_every_card_is_found_by_its_own_name(name: str) -> None:
    assert card_named(name).name == name


@pytest.mark.parametrize("family", ["a100", "V100"])
def test_a_family_asks_which(family: str) -> None:
    with pytest.raises(ValueError, match=rf"gpu must say how much memory it has \({family.lower()}-\d+gb or"):
        card_named(family)


@pytest.mark.parametrize("written", ["", "h1000", "80GiB", "cuda:0"])
def test_an_unknown_card_lists_the_known(written: str) -> None:
    with pytest.raises(ValueError, match=r"gpu must be one of b200, h200, .*, not ") as refused:
        card_named(written)
    assert repr(written) in str(refused.value)
    assert all(name in str(refused.value) for name in CARDS)


@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
def test_a_card_leaves_less_than_its_name_says(card: object) -> None:
    """The memory in a name ("80gb") is what is printed on the box: a program gets less, but not by much."""
    boxes = {"h200": 141, "h100": 80, "b200": 192, "gh200": 96, "l40s": 48, "l4": 24, "a10g": 24, "t4": 16}
    boxes |= {"a6000": 48, "rtx6000-ada": 48, "rtx5090": 32, "rtx4090": 24, "rtx3090": 24}
    known = CARDS[card.name]  # type: ignore[attr-defined]
    digits = known.name.rpartition("-")[2].removesuffix("gb")
    box = boxes.get(known.name) or int(digits)
    assert 0.85 * box * 1e9 < known.usable_bytes < box * GIB


def test_only_what_was_measured_says_so() -> None:
    assert [name for name, card in CARDS.items() if card.measured] == ["h200"]
    assert DEFAULT.measured


def test_what_hopper_does_otherwise() -> None:
    assert CARDS["h100"].blas_bytes == 32 * MIB
    assert CARDS["a100-80gb"].blas_bytes == 8 * MIB + 128 * 1024
    assert CARDS["h100"].prefers_cudnn_attention
    assert not CARDS["rtx4090"].prefers_cudnn_attention
