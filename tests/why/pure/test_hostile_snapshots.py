"""500 damaged or hostile snapshots: an answer, or an error of one line; nothing is run either way."""

from __future__ import annotations

import pickle
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from snapshot_cases import PLANTED, expanding, h200_value

from batchfit._why.why import explain_oom
from batchfit.errors import ResultFileError

_RUNS = ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "pickle.find_class", "socket.connect")
_heard: list[str] = []


def _hear(event: str, _: Any) -> None:
    if event in _RUNS:
        _heard.append(event)


@pytest.fixture(scope="module", autouse=True)
def audited() -> None:
    sys.addaudithook(_hear)  # it cannot be taken away; it only notes


def valid_files() -> list[bytes]:
    values = [PLANTED[name]().snapshot() for name in ("fragmentation", "optimizer state", "other process")]
    values += [expanding().snapshot(), h200_value("fragmentation")]
    return [pickle.dumps(value, protocol) for value in values for protocol in (2, 4)]


def damaged(data: bytes, chance: random.Random) -> bytes:
    """A file with some bytes changed, cut out, put in, swapped or repeated; or its end missing."""
    changed = bytearray(data)
    for _ in range(chance.choice([1, 1, 2, 5, 20])):
        at, length = chance.randrange(len(changed)), chance.choice([1, 1, 2, 8, 200])
        what = chance.randrange(6)
        if what == 0:
            changed[at] = chance.randrange(256)
        elif what == 1:
            del changed[at : at + length]
        elif what == 2:
            changed[at:at] = chance.randbytes(length)
        elif what == 3:
            changed[at:at] = changed[at : at + length]
        elif what == 4:
            other = chance.randrange(len(changed))
            changed[at], changed[other] = changed[other], changed[at]
        else:
            # An opcode that calls, names or makes something.
            changed[at] = chance.choice(b"cR\x81\x93bioQP\x82(etu0112")
        if len(changed) < 2:
            break
    if chance.random() < 0.15:
        del changed[chance.randrange(len(changed)) :]
    return bytes(changed)


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 10))], ids=lambda n: f"part{n}"
)
def test_a_damaged_file_is_an_answer_or_one_line(part: int, tmp_path: Path) -> None:
    chance = random.Random(part)
    files = valid_files()
    path = tmp_path / "damaged.pickle"
    said: list[str] = []
    for _ in range(50):
        path.write_bytes(damaged(chance.choice(files), chance))
        try:
            str(explain_oom(path, what_if=False))
        except ResultFileError as error:
            said.append(str(error))
    for line in said:
        assert "\n" not in line
        assert line.startswith(str(path))
        assert len(line) < 500
    assert len(said) > 20  # the others say what they still hold
    assert not _heard


ENTRY = {"action": "alloc", "addr": 1, "size": 2, "stream": 0, "time_us": 3, "frames": []}
BLOCK = {"address": 4096, "size": 512, "requested_size": 500, "state": "active_allocated"}
SEGMENT = {"device": 0, "address": 4096, "total_size": 512, "stream": 0, "blocks": [BLOCK]}
SHARED = [ENTRY]

WRONG = {
    "a list of numbers": [1, 2],
    "a text": "snapshot",
    "no segments": {"device_traces": [[ENTRY]]},
    "segments that are a number": {"segments": 7},
    "segments that are numbers": {"segments": [1]},
    "traces that are a number": {"segments": [], "device_traces": 7},
    "a trace that is a number": {"segments": [], "device_traces": [7]},
    "an entry that is a number": {"segments": [], "device_traces": [[ENTRY, 7]]},
    "an entry elsewhere": {"segments": [], "device_traces": [[ENTRY]], "more": [dict(ENTRY)]},
    "a trace twice": {"segments": [], "device_traces": [SHARED, SHARED]},
    "entries before traces": {"first": dict(ENTRY), "segments": [], "device_traces": [[dict(ENTRY)]]},
    "a negative size": {"segments": [], "device_traces": [[{**ENTRY, "size": -1}]]},
    "a size that is no number": {"segments": [], "device_traces": [[{**ENTRY, "size": "2"}]]},
    "a size that is a fraction": {"segments": [], "device_traces": [[{**ENTRY, "size": 2.5}]]},
    "a huge size": {"segments": [], "device_traces": [[{**ENTRY, "size": 2**60}]]},
    "a huge address": {"segments": [], "device_traces": [[{**ENTRY, "addr": 2**70}]]},
    "a time that is a text": {"segments": [], "device_traces": [[{**ENTRY, "time_us": "now"}]]},
    "a stack that is a number": {"segments": [], "device_traces": [[{**ENTRY, "frames": 7}]]},
    "a stack of numbers": {"segments": [], "device_traces": [[{**ENTRY, "frames": [7]}]]},
    "a frame without a line": {
        "segments": [],
        "device_traces": [[{**ENTRY, "frames": [{"filename": "a.py", "line": "x", "name": "f"}]}]],
    },
    "a pool that is a text": {"segments": [], "device_traces": [[{**ENTRY, "pool_id": "x"}]]},
    "blocks that are numbers": {"segments": [{**SEGMENT, "blocks": [1]}]},
    "blocks that are no list": {"segments": [{**SEGMENT, "blocks": {}}]},
    "a block in no state": {"segments": [{**SEGMENT, "blocks": [{**BLOCK, "state": "gone"}]}]},
    "a block of no size": {"segments": [{**SEGMENT, "blocks": [{**BLOCK, "size": None}]}]},
    "a segment of another size": {"segments": [{**SEGMENT, "total_size": 9}]},
    "a block in no segment": {"segments": [], "block": dict(BLOCK)},
    "a segment elsewhere": {"segments": [], "more": [dict(SEGMENT)]},
    "a segment twice": {"segments": [SEGMENT, SEGMENT]},
    "a device that is a text": {"segments": [{**SEGMENT, "device": "0"}]},
    "nothing at all": {"segments": [], "device_traces": []},
    "many devices": {"segments": [], "device_traces": [[] for _ in range(5000)]},
    "sizes beyond any sum": {
        "segments": [{**SEGMENT, "total_size": 2**61, "blocks": [{**BLOCK, "size": 2**61}]}] * 1
        + [
            {**SEGMENT, "address": n, "total_size": 2**61, "blocks": [{**BLOCK, "size": 2**61}]}
            for n in range(8)
        ],
        "device_traces": [[dict(ENTRY)]],
    },
}


@pytest.mark.parametrize("name", WRONG)
def test_a_file_that_is_no_snapshot_says_why(name: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.pickle"
    path.write_bytes(pickle.dumps(WRONG[name]))
    with pytest.raises(ResultFileError) as refused:
        explain_oom(path)
    assert "\n" not in str(refused.value)
    assert "wrong.pickle" in str(refused.value)


def test_text_of_a_stranger_reaches_no_terminal_as_it_is(tmp_path: Path) -> None:
    frame = {"filename": "/x/\x1b[31mred.py", "line": 1, "name": "f\x1b]0;title\x07" + "x" * 9000}
    value = {
        "segments": [SEGMENT],
        "device_traces": [[{**ENTRY, "frames": [frame]}]],
        "batchfit": {"batch": {"\x1b[2J": "\x07" * 9000}, "torch": "\x1bc", "step": -1, "rank": "x"},
    }
    path = tmp_path / "escape.pickle"
    path.write_bytes(pickle.dumps(value))
    found = explain_oom(path)
    assert "\x1b" not in str(found) + found.to_json().encode().decode("unicode-escape")
    assert max(map(len, str(found).splitlines())) <= 80
    assert found.step is None
    assert found.rank is None


def test_a_file_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(ResultFileError, match="No such file"):
        explain_oom(tmp_path / "none.pickle")
    with pytest.raises(ResultFileError, match="directory"):
        explain_oom(tmp_path)
    with pytest.raises(ValueError, match="not an empty list"):
        explain_oom([])
