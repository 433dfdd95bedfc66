"""The reader of pickles: plain values come out as pickle itself reads them, everything else is refused."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import struct
import subprocess
import sys
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from batchfit._why.pure import pickle_reader
from batchfit._why.pure.pickle_reader import PickleReader, PickleRefused
from batchfit._why.pure.snapshot import read_snapshot


def read(data: bytes) -> Any:
    """A pickle without any folding."""
    return PickleReader(
        io.BytesIO(data),
        fold_items=lambda items: None,
        fold_dict=lambda held: held,
        fold_list=lambda items: None,
    ).load()


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    lambda inner: (
        st.lists(inner, max_size=8)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=6), inner, max_size=8)
        | st.tuples(inner, inner)
        | st.tuples(inner, inner, inner, inner)
    ),
    max_leaves=30,
)


@examples(200)
@given(plain, st.integers(0, pickle.HIGHEST_PROTOCOL))
def test_plain_values_are_read_as_pickle_reads_them(value: Any, protocol: int) -> None:
    outer = {"held": [value]}
    assert read(pickle.dumps(outer, protocol)) == outer


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_shared_parts_and_long_lists(protocol: int) -> None:
    """Over 256 memo entries, more items than one batch of the pickler, parts that occur again."""
    names = [f"name {n}" for n in range(700)]
    frame = {"filename": "train.py", "line": 70_000, "name": "step"}
    value = {
        "names": names,
        "again": [names, names[:5], *([frame] * 1001)],
        "pairs": [(0, n) for n in range(2500)],
        "large": {str(n): -n for n in range(1003)},
    }
    assert read(pickle.dumps(value, protocol)) == value


class _Runs:
    """What an attacker's pickle asks for."""

    def __init__(self, call: Callable[..., Any], *arguments: Any) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> Any:
        return self.call, self.arguments


class _Point:
    def __init__(self) -> None:
        self.x = 1


def _both(value: Any) -> list[bytes]:
    return [pickle.dumps(value, protocol) for protocol in (0, 2, 4)]


NAMED = [
    *((data, "system") for data in _both({"segments": _Runs(os.system, "touch pwned")})),
    *((data, "eval") for data in _both([_Runs(eval, "1/0")])),
    *((data, "OrderedDict") for data in _both(OrderedDict(a=1))),
    *((data, "_Point") for data in _both({"device_traces": [_Point()]})[1:]),
    *((data, "Decimal") for data in _both(Decimal("1"))),
    *((data, "Fraction") for data in _both([Fraction(1, 2)])),
    *((data, "getattr") for data in _both(_Runs(getattr, "a", "b"))),
    (b"(ios\nsystem\n.", "os.system"),
    (b"cos\nsystem\n(S'x'\ntR.", "os.system"),
    (b"\x80\x02cposix\nsystem\nq\x00.", "posix.system"),
    (b"\x80\x04\x8c\x05posix\x8c\x06system\x93.", "posix.system"),
    (b"\x80\x02(K\x01o.", "OBJ"),
    (b"\x80\x02}K\x01b.", "BUILD"),
    (b"\x80\x02K\x01)R.", "REDUCE"),
    (b"\x80\x02K\x01)\x81.", "NEWOBJ"),
    (b"\x80\x04K\x01)}\x92.", "NEWOBJ_EX"),
    (b"\x80\x02\x82\x01.", "EXT1"),
    (b"\x80\x02\x83\x01\x00.", "EXT2"),
    (b"\x80\x02\x84\x01\x00\x00\x00.", "EXT4"),
    (b"(Pother\n.", "PERSID"),
    (b"\x80\x02K\x01Q.", "BINPERSID"),
    (b"\x80\x05\x97.", "a buffer"),
    (pickle.dumps(b"bytes", 4), "bytes"),
    (pickle.dumps(bytearray(b"more"), 5), "bytearray"),
    (pickle.dumps({1, 2}, 4), "a set"),
    (pickle.dumps(frozenset([1]), 4), "frozenset"),
    (b"\x80\x02]2.", "DUP"),
    (b"\x80\x02]0.", "POP"),
    (b"\x80\x02(1.", "POP_MARK"),
    (b"\x80\x02S'text'\n.", "bytes"),
    (b"\x80\x09N.", "protocol 9"),
    (b"\x80\x02\xff.", "unknown opcode"),
]


@pytest.mark.parametrize(("data", "name"), NAMED, ids=[f"{n}-{name}" for n, (_, name) in enumerate(NAMED)])
def test_what_is_not_plain_is_refused_by_its_name(
    data: bytes, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PickleRefused) as refused:
        read(data)
    assert name in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.iterdir())  # "touch pwned"


def bombs(many: int) -> dict[str, bytes]:
    """Files that ask for much more than they are; `many` is a count above what is allowed at once."""
    return {
        "a memo entry far out": b"\x80\x02]r\xff\xff\xff\x7f.",
        "a memo entry far out, as text": b"(p99999999999\n.",
        "a string of 4 EiB": b"\x80\x04\x8d" + struct.pack("<Q", 2**62) + b"x.",
        "a string of 4 GiB": b"\x80\x02X\xff\xff\xff\xffx.",
        "a string that is not there": b"\x80\x02X\x00\x00\x20\x00x.",
        "a number of 2 GiB": b"\x80\x02\x8b\xff\xff\xff\x7fx.",
        "a number of 255 bytes": b"\x80\x02\x8a\xff" + b"\x01" * 255 + b".",
        "a number of many digits": b"(I" + b"9" * 60_000 + b"\n.",
        "an endless line": b"(V" + b"x" * 300_000,
        "marks": b"\x80\x02" + b"(" * many + b".",
        "lists in lists": b"\x80\x02" + b"]" * many + b"a" * (many - 1) + b".",
        "dicts": b"\x80\x02](" + b"}" * many + b"e.",
        "many nothings": b"\x80\x02](" + b"N" * many + b"e.",
        "batches of nothings": b"\x80\x02]" + (b"(" + b"N" * (many // 8) + b"e") * 20 + b".",
        "memo entries": b"\x80\x04N" + b"\x94" * (2 * many) + b".",
        "dicts that stay": b"\x80\x02]" + (b"(" + b"}" * (many // 8) + b"e") * 60 + b".",
        "unknown memo entries": b"\x80\x02h\x07.",
        "keys that are lists": b"\x80\x02}]]s.",
        "keys that are numbers": b"\x80\x02}(" + b"".join(b"K%cN" % n for n in range(9)) + b"u.",
        "one value too many": b"\x80\x02NN.",
        "no value": b"\x80\x02.",
        "an open mark": b"\x80\x02(N.",
        "items of a number": b"\x80\x02K\x01(Ne.",
        "an item of a number": b"\x80\x02K\x01Na.",
        "an item of nothing": b"\x80\x02a.",
        "no mark": b"\x80\x02u.",
        "half an item": b"\x80\x02}(X\x01\x00\x00\x00au.",
        "nothing": b"",
        "text": b"this is no pickle\n",
        "an archive of torch.save": b"PK\x03\x04" + bytes(100),
        "gzip without an end": gzip.compress(bytes(1000))[:20],
        "gzip with damage": b"\x1f\x8b" + bytes(50),
        "gzip of dicts": gzip.compress(b"\x80\x02](" + b"}" * (4 * many) + b"e.", 1),
    }


SMALL = 2**14


@pytest.mark.parametrize("name", bombs(8))
def test_a_bomb_is_refused_in_little_memory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With limits of a sixty-fourth: what is allowed at once is then about 16,000 objects."""
    for limit in ("_MOST_WAITING", "_SPARE_OBJECTS", "_SPARE_ITEMS", "CHUNK_BYTES"):
        monkeypatch.setattr(pickle_reader, limit, SMALL)
    data = bombs(8 * SMALL)[name]
    tracemalloc.start()
    try:
        with pytest.raises(PickleRefused) as refused:
            read_snapshot(io.BytesIO(data))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert "\n" not in str(refused.value)
    assert peak < 10 * 2**20


@pytest.mark.slow
def test_bombs_of_full_size_stay_within_500_mib() -> None:
    """In a process of its own, which is killed beyond: 4 million objects, lists and memo entries."""
    code = (
        "import io, resource, sys\n"
        "from batchfit._why.pure.pickle_reader import PickleRefused\n"
        "from batchfit._why.pure.snapshot import read_snapshot\n"
        "from test_pickle_reader import bombs\n"
        "files = bombs(8 * 2**20)\n"
        "now = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (now + 500 * 2**20,) * 2)\n"
        "for name, data in files.items():\n"
        "    try:\n"
        "        read_snapshot(io.BytesIO(data))\n"
        "    except PickleRefused:\n"
        "        continue\n"
        "    sys.exit(name)\n"
    )
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    ran = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr


def test_a_list_in_itself_is_only_a_list() -> None:
    itself: list[Any] = []
    itself.append(itself)
    found = read(pickle.dumps(itself))
    assert found[0] is found


def test_nothing_is_looked_up_while_a_file_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The standard unpickler is not there either: neither it nor an import takes part."""
    monkeypatch.setitem(sys.modules, "pickle", None)
    monkeypatch.setattr("builtins.__import__", _no_import)
    assert read(b"\x80\x02}X\x01\x00\x00\x00aK\x05s.") == {"a": 5}


def _no_import(name: str, *rest: Any) -> Any:
    raise AssertionError(f"{name} was imported")
