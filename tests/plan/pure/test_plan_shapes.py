"""Models by their names."""

from __future__ import annotations

import pytest

from batchfit._plan.pure.shapes import SHAPES, format_parameters, model_lines, shape_named
from batchfit.errors import TargetError


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("qwen3-8b", "Qwen/Qwen3-8B"),
        ("meta-llama/Meta-Llama-3-8B", "meta-llama/Llama-3.1-8B"),
        ("Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B"),
        ("gpt2", "openai-community/gpt2"),
        ("google/gemma-2-2b-it", "google/gemma-2-2b"),
    ],
)
def test_a_model_is_found_however_it_is_written(written: str, name: str) -> None:
    if "Meta-" in written:
        with pytest.raises(TargetError, match=r"Close names: .*Llama-3"):
            shape_named(written)
    else:
        assert shape_named(written).name == name


def test_every_model_is_found_by_its_own_name_and_names_are_unique() -> None:
    assert len({one.name.lower() for one in SHAPES}) == len(SHAPES) >= 50
    for one in SHAPES:
        assert shape_named(one.name) is one
        assert shape_named(one.short_name) is one
        assert one.parameters > 0
        assert one.kind


def test_an_unknown_name_says_how_to_go_on() -> None:
    with pytest.raises(TargetError, match=r"config\.json") as raised:
        shape_named("someone/their-own-model")
    assert "--list-models" in str(raised.value)


def test_the_list_has_every_model() -> None:
    assert len(model_lines()) == len(SHAPES)
    assert (format_parameters(124_439_808), format_parameters(8_030_261_248)) == ("124M", "8.0B")
