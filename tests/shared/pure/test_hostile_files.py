"""Files that nobody should write: each gives one line that names the file and what is wrong with it."""

from __future__ import annotations

import copy
import json
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import batchfit
from batchfit._config_files import parse_json
from batchfit._engine.store.sqlite import FILE_NAME, Store
from batchfit._find.pure.search import Search
from batchfit._find.resume import Kept, ResumeFile
from batchfit.errors import ResultFileError
from batchfit.results import FitResult

DATA = Path(__file__).parents[2] / "data" / "report"
SEARCH = Search(budget_bytes=2**30)
KEPT = json.loads(Kept(search=SEARCH, trials=(), settings={}, elapsed_s=1.0).to_json())
SCHEDULES: list[dict[str, Any]] = [
    {"type": "step", "step_size": 20, "gamma": 2, "max_batch_size": 2048},
    {"type": "milestone", "milestones": "0:256 20:512"},
    {"type": "cosine", "final_batch_size": 512, "over": 10, "start": 1},
]
ODD: list[Any] = [
    None, True, [], {}, "", "x", -1, 0, 1e308, float("nan"), float("inf"), [[1]], {"a": 1}, 10**30, "\x00",
]  # fmt: skip


def schedule(path: Path) -> object:
    return batchfit.load_schedule(path)


def resumed(path: Path) -> object:
    return ResumeFile(path).read(SEARCH, {})


def reported(path: Path) -> object:
    return batchfit.report(path, path.with_suffix(".html"))


READERS: dict[str, tuple[Callable[[Path], object], list[dict[str, Any]]]] = {
    "schedule.json": (schedule, SCHEDULES),
    "schedule.yaml": (schedule, SCHEDULES),
    "resume.json": (resumed, [KEPT]),
    "result.json": (reported, [json.loads((DATA / f"{n}.json").read_text()) for n in ("fit", "sweep")]),
}


def refused_in_one_line(read: Callable[[Path], object], path: Path) -> None:
    with pytest.raises((ValueError, ResultFileError)) as caught:
        read(path)
    said = str(caught.value)
    assert path.name in said, said
    assert "\n" not in said, said


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("levels", [150, 2000, 100_000])
@pytest.mark.parametrize("brackets", ["[]", '{"a":}'])
def test_what_is_nested_too_deeply(name: str, levels: int, brackets: str, tmp_path: Path) -> None:
    read, examples = READERS[name]
    opening, closing = brackets[:-1], brackets[-1]
    deep = opening * levels + ("1" if closing == "}" else "") + closing * levels
    path = tmp_path / name
    path.write_text(json.dumps({**examples[0], "type": "@", "kind": "@"}).replace('"@"', deep))
    refused_in_one_line(read, path)


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("text", ["1" * 5000, "\x00", "[", '{"a": ', "", "null", "[1]", '{"a": 1}'])
def test_what_is_no_document(name: str, text: str, tmp_path: Path) -> None:
    if name == "resume.json" and not text:
        pytest.skip("an empty file is one that was just made")
    path = tmp_path / name
    path.write_text(text)
    refused_in_one_line(READERS[name][0], path)


@pytest.mark.parametrize("kind", [["step"], {"step": 1}, 1, None, [], "stepp"])
def test_a_schedule_whose_type_is_no_text(kind: object, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="type must be"):
        batchfit.load_schedule(json.dumps({**SCHEDULES[0], "type": kind}))


@pytest.mark.parametrize("name", READERS)
def test_any_mutation_is_read_or_refused_in_one_line(name: str, tmp_path: Path) -> None:
    read, examples = READERS[name]
    chance = random.Random(name)
    path = tmp_path / name
    for _ in range(150):
        path.write_text(mutated(json.loads(json.dumps(chance.choice(examples))), chance))
        try:
            read(path)
        except (ValueError, ResultFileError) as error:
            assert "\n" not in str(error), path.read_text()  # noqa: PT017  some of them are still right


def mutated(data: Any, chance: random.Random) -> str:
    for _ in range(chance.choice([1, 2, 4])):
        holder, key = data, None
        while isinstance(holder, dict | list) and holder and (key is None or chance.random() < 0.6):
            inner = holder if key is None else holder[key]
            if not isinstance(inner, dict | list) or not inner:
                break
            holder, key = inner, chance.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))
        if key is not None:
            holder[key] = copy.deepcopy(chance.choice(ODD))
    text = json.dumps(data)
    return text[: chance.randrange(len(text))] if chance.random() < 0.1 else text


def test_a_store_with_any_byte_changed_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "batchfit")
    fit = FitResult.from_json((DATA / "fit.json").read_text())
    store, path = Store(tmp_path), tmp_path / FILE_NAME
    for number in range(4):
        store.put(f"key {number}", fit)
    whole, chance = path.read_bytes(), random.Random(1)
    for _ in range(200):
        changed = bytearray(whole)
        for _ in range(chance.choice([1, 3, 20])):
            changed[chance.randrange(len(changed))] = chance.randrange(256)
        path.write_bytes(changed[: chance.randrange(len(changed))] if chance.random() < 0.1 else changed)
        store.get("key 1")
        store.state()
        store.put("key 9", fit)


def test_json_of_a_hundred_levels_is_read() -> None:
    assert parse_json("[" * 100 + "]" * 100)
    with pytest.raises(ValueError, match="nested more than 100 deep"):
        parse_json("[" * 101 + "]" * 101)
