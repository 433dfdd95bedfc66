"""The opcodes of pickles, those of plain values, and those that are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# What a pickle begins with: its protocol, or (0 and 1) a container, or the name of something to call.
BEGINNINGS = frozenset(b"\x80(}]c")
# What refers to things by name, or makes something that is no plain container.
REFUSED = {
    b"R": "a call (REDUCE)",
    b"b": "an object's state (BUILD)",
    b"i": "an object (INST)",
    b"o": "an object (OBJ)",
    b"\x81": "an object (NEWOBJ)",
    b"\x92": "an object (NEWOBJ_EX)",
    b"P": "a reference outside the file (PERSID)",
    b"Q": "a reference outside the file (BINPERSID)",
    b"\x82": "an extension (EXT1)",
    b"\x83": "an extension (EXT2)",
    b"\x84": "an extension (EXT4)",
    b"\x8f": "a set",
    b"\x90": "a set",
    b"\x91": "a frozenset",
    b"\x96": "a bytearray",
    b"\x97": "a buffer outside the file",
    b"\x98": "a buffer outside the file",
    b"B": "bytes",
    b"C": "bytes",
    b"\x8e": "bytes",
    b"S": "bytes",
    b"T": "bytes",
    b"U": "bytes",
    b"0": "the opcode POP",
    b"1": "the opcode POP_MARK",
    b"2": "the opcode DUP",
}
CLOSING = frozenset(b"etld")
CONSTANTS: dict[bytes, Callable[[], Any]] = {
    b"N": lambda: None,
    b"\x88": lambda: True,
    b"\x89": lambda: False,
    b"]": list,
    b")": tuple,
}
TUPLES = {b"\x85": 1, b"\x86": 2, b"\x87": 3}
SIZED = {b"X": 4, b"\x8d": 8, b"\x8b": 4}
PLAIN = (b"\x80", b"\x95", b"G", b"q", b"r", b"a", b"s")
