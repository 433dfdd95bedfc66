"""The command with places for the size: what stands where, and what is refused before anything runs."""

from __future__ import annotations

import pytest

from batchfit._program.pure.template import CommandTemplate, FileSetting, isolating_flag


def template(*words: str, env: tuple[str, ...] = (), sets: tuple[str, ...] = ()) -> CommandTemplate:
    return CommandTemplate(words=words, env=env, sets=tuple(FileSetting.parse(one) for one in sets))


def test_the_size_stands_in_every_place() -> None:
    command = template("python", "train.py", "--batch-size", "{}", "--name=run-{}")
    assert command.command(64) == ["python", "train.py", "--batch-size", "64", "--name=run-64"]
    assert command.shown(64) == "python train.py --batch-size 64 --name=run-64"


def test_json_in_a_word_stays_where_the_size_has_its_name() -> None:
    command = template("train", '{"a": {}}', "data.batch_size={batch_size}", "{out}")
    assert command.command(8, out="/o") == ["train", '{"a": {}}', "data.batch_size=8", "/o"]
    assert command.shown(8, out="runs/7").endswith("data.batch_size=8 runs/7")


def test_a_variable_and_a_file_are_places_too() -> None:
    command = template("python", "t.py", "--cfg=c.yaml", env=("BATCH_SIZE",), sets=("c.yaml:train.size",))
    assert command.variables(4) == {"BATCH_SIZE": "4"}
    assert command.command(4, files={"c.yaml": "/p/c.yaml"}) == ["python", "t.py", "--cfg=/p/c.yaml"]
    assert command.shown(4) == "BATCH_SIZE=4 python t.py --cfg=c.yaml  (train.size: 4 in c.yaml)"


def test_a_word_with_a_space_is_shown_quoted() -> None:
    assert template("sh", "-c", "run {} 'it'").shown(2) == "sh -c 'run 2 '\"'\"'it'\"'\"''"


@pytest.mark.parametrize(
    ("words", "env", "sets", "message"),
    [
        ((), (), (), "the command after -- is empty"),
        (("python", "train.py", "--batch-size", "8"), (), (), "no place for the batch size"),
        (("python", "t.py"), ("A=1",), (), "env must be the name of a variable"),
        (("python", "t.py"), (), ("c.yaml:x",), "set must name a file as the command does"),
        (("torchrun", "--nnodes=2", "t.py", "{}"), (), (), "needs 2 nodes"),
        (("torchrun", "--nnodes", "1:4", "t.py", "{}"), (), (), "needs 4 nodes"),
        (("accelerate", "launch", "--num_machines", "2", "t.py", "{}"), (), (), "needs 2 nodes"),
    ],
)
def test_what_is_refused(
    words: tuple[str, ...], env: tuple[str, ...], sets: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        template(*words, env=env, sets=sets)


@pytest.mark.parametrize("text", ["config.yaml", "config.yaml:", ":train", "config.py:a", "c.yaml:a..b"])
def test_a_setting_that_names_no_place_in_a_file(text: str) -> None:
    with pytest.raises(ValueError, match="set must"):
        FileSetting.parse(text)


def test_one_node_is_no_reason() -> None:
    assert template("torchrun", "--nnodes", "1", "t.py", "{}").command(2)[-1] == "2"


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        ("python -I train.py {}", "-I"),
        ("env A=1 /usr/bin/python3.12 -u -sE -m train {}", "-sE"),
        ("python -S -c 'x'", "-S"),
        ("python -m train -I", ""),
        ("python train.py -E", ""),
        ("python -W ignore::Error -u train.py -I", ""),
        ("python -X importtime=S train.py", ""),
        ("torchrun -I train.py", ""),
    ],
)
def test_a_python_that_no_probe_can_reach(command: str, flag: str) -> None:
    assert isolating_flag(command.split()) == flag
