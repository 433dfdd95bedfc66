"""A command of a sweep: knobs in their places, and the measures that it prints."""

from __future__ import annotations

from typing import Any

import pytest

from batchfit._program.pure.swept_command import SweptCommand, filled, measures_in
from batchfit._sweep.pure.grid import GridError

EXP = "python exp.py --batch_size {} --max_crops {max_crops}"


def test_seed_002s_scripts_are_one_line() -> None:
    command = SweptCommand.of(EXP, measure="command")
    command.check(("max_crops",), {"max_crops": 12})
    shown = command.template({"max_crops": 12}).command(64)
    assert shown == ["python", "exp.py", "--batch_size", "64", "--max_crops", "12"]
    assert command.measurement({"max_crops": 12}).command(19)[3:] == ["19", "--max_crops", "12"]
    assert command.said()["command"] == "python exp.py --batch_size '{}' --max_crops '{max_crops}'"


def test_values_are_written_as_json_has_them_and_text_without_quotes() -> None:
    words = ("{a}", "x={b},{c}", "{d}", "{}")
    values = {"a": True, "b": 1.5, "c": "a b", "d": {"k": [1]}}
    assert filled(words, values) == ("true", "x=1.5,a b", '{"k": [1]}', "{}")


def test_the_size_may_come_by_a_variable_or_a_file() -> None:
    command = SweptCommand.of("./t.sh {k} c.yaml", env="SIZE", sets=["c.yaml:a.b"], measure="m.py {k}")
    command.check(("k",), {"k": 1})
    assert command.template({"k": 1}).variables(8) == {"SIZE": "8"}
    assert command.measurement({"k": 1}).sets == ()  # the measurement is not given that file


@pytest.mark.parametrize(
    ("given", "knobs", "message"),
    [
        ({"command": ""}, (), "command must be a command, as text or as a list"),
        ({"command": 3}, (), "command must be a command"),
        ({"command": "python 'x {}"}, (), "command must be a command as a shell reads it, not .*No closing"),
        ({"command": "python t.py"}, (), "the command has no place for the batch size"),
        ({"command": EXP, "env": 3}, (), "env must be text"),
        ({"command": EXP, "measure": "python m.py"}, ("max_crops",), "no place for the batch size"),
        ({"command": EXP}, ("max_crop",), r"must have a place \{max_crop\}.*did you mean max_crops"),
        ({"command": EXP + " {out}"}, ("out",), "must not be called 'out'"),
    ],
)
def test_what_is_refused(given: dict[str, Any], knobs: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SweptCommand.of(**given).check(knobs, dict.fromkeys(knobs, 1))


def test_a_knob_without_a_place_names_the_knob() -> None:
    with pytest.raises(GridError) as caught:
        SweptCommand.of(EXP).check(("top_k",), {"top_k": 1})
    assert caught.value.place == ("knobs", "top_k")


def test_the_last_json_object_counts() -> None:
    assert measures_in(['{"a": 1}', "step 3", ' {"a": 2}\n', "{not json}", "[1]"]) == {"a": 2}
    assert measures_in(["accuracy 0.9"]) is None
