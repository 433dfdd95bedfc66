"""A reader of pickles that runs nothing: containers, numbers and strings, and everything else is refused.

A pickle is a program. `pickle.load` runs what a file asks for, and takes what memory it asks for; a memory
snapshot comes from another machine, or from a stranger's bug report.

Rules:
- The opcodes of plain containers, numbers and strings are known here. Any other is refused: one that names
  something with that name, the others with their own. Nothing is imported and nothing is called.
- Keys are strings: no file can make a dict slow by the numbers that it chooses.
- The file is read once, in chunks. What is folded (`fold_dict`) leaves the objects, so that a file of
  gigabytes does not become objects of ten times its size.
- Memory is bounded by the bytes that were read: what costs a byte in the file and much more here (containers,
  memo entries, items of lists) is counted at each chunk. A declared length takes nothing before its bytes
  are there.
"""

from __future__ import annotations

import re
import struct
import sys
from collections.abc import Callable
from typing import IO, Any, final

from batchfit._why.pure.opcodes import BEGINNINGS, CLOSING, CONSTANTS, PLAIN, REFUSED, SIZED, TUPLES

CHUNK_BYTES = 2**20
# No opcode but a string or a stack of `_GETS` is longer.
_GUARD_BYTES = 2**16
_LONGEST_STRING = 2**22
_MOST_STRINGS = 2**20
_STRINGS_BYTES = 2**28
_DEEPEST = 1_000
_LONGEST_INTEGER = 16  # bytes, or as many digits and a few more in text
_MOST_WAITING = 2**20  # objects that are in no container yet
# What may be there beside what the file's own bytes account for.
_SPARE_OBJECTS = 4 * 2**20
_SPARE_ITEMS = 2**20
# A list of 2 to 999 memo entries, as stacks are after their first frames; picklers write 1,000 at a time, so
# that a list with fewer is complete.
_GETS = re.compile(rb"\((?:h.|j.{4}){1,999}e", re.DOTALL)
_GET = re.compile(rb"h(.)|j(.{4})", re.DOTALL)
# A remembered dict of three items, keys and strings from the memo: a frame, again.
_FRAME = re.compile(rb"\x94\(((?:(?:h.|j.{4})(?:h.|j.{4}|K.|M.{2}|J.{4})){3})u", re.DOTALL)
_PART = re.compile(rb"h(.)|j(.{4})|K(.)|M(.{2})|J(.{4})", re.DOTALL)


class PickleRefused(ValueError):
    """A pickle that is not read; says why, in one line."""


@final
class PickleReader:
    """Reads one pickle from a stream.

    `fold_dict` gets each dict when its items are in and answers what stands in its place, and `fold_list`
    each complete list of memo entries.
    """

    def __init__(
        self,
        stream: IO[bytes],
        *,
        fold_items: Callable[[list[Any]], Any],
        fold_dict: Callable[[dict[str, Any]], Any],
        fold_list: Callable[[tuple[Any, ...]], Any],
    ) -> None:
        self._stream = stream
        self._fold_items = fold_items
        self._fold_dict = fold_dict
        self._fold_list = fold_list
        self._data = b""
        self._before = 0  # bytes of the file that lie before `_data`
        self._ended = False
        self._memo: list[Any] = []
        self._strings: dict[str, str] = {}
        self._strings_bytes = 0
        self._tuples: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        self._gets: dict[bytes, Any] = {}
        self._items = 0
        self._objects = _objects_now()

    def load(self) -> Any:
        """The value that the pickle holds; a dict or list that was folded is what it was folded to."""
        try:
            return self._run()
        except PickleRefused:
            raise
        except (IndexError, struct.error):
            raise PickleRefused("it is cut short, or no pickle") from None
        except (TypeError, AttributeError, ValueError, OverflowError) as error:
            raise PickleRefused(f"it is damaged ({error})") from None

    def _run(self) -> Any:  # one function: a call per opcode would double the time
        memo = self._memo
        stack: list[Any] = []
        marked: list[list[Any]] = []
        data, pos, limit = self._refilled(0, stack)
        if data[0] not in BEGINNINGS:
            raise PickleRefused("it is no pickle")
        unpack = struct.Struct("<I").unpack_from
        unpack_signed = struct.Struct("<i").unpack_from
        while True:
            if pos > limit:
                data, pos, limit = self._refilled(pos, stack)
            op = data[pos]
            pos += 1
            if op == 0x68:  # BINGET
                stack.append(memo[data[pos]])
                pos += 1
            elif op == 0x6A:  # LONG_BINGET
                stack.append(memo[unpack(data, pos)[0]])
                pos += 4
            elif op == 0x4B:  # BININT1
                stack.append(data[pos])
                pos += 1
            elif op == 0x94:  # MEMOIZE
                memo.append(stack[-1])
            elif op == 0x28:  # MARK
                if stack and stack[-1] == [] and (found := _GETS.match(data, pos - 1)) is not None:
                    self._close_gets(stack, data[pos : found.end() - 1])
                    pos = found.end()
                    continue
                if len(marked) == _DEEPEST:
                    raise PickleRefused(f"it nests more than {_DEEPEST:,} containers")
                marked.append(stack)
                stack = []
            elif op == 0x7D:  # EMPTY_DICT
                found = _FRAME.match(data, pos)
                folded = None if found is None else self._frame(found[1])
                if found is None or folded is None:
                    stack.append({})
                    continue
                memo.append(folded)
                stack.append(folded)
                pos = found.end()
            elif op == 0x75:  # SETITEMS
                items, stack = stack, marked.pop()
                self._set_items(stack, items)
            elif op == 0x4A:  # BININT
                stack.append(unpack_signed(data, pos)[0])
                pos += 4
            elif op == 0x8A:  # LONG1
                size = data[pos]
                if size > _LONGEST_INTEGER:
                    raise PickleRefused(f"a number of {size} bytes")
                stack.append(int.from_bytes(data[pos + 1 : pos + 1 + size], "little", signed=True))
                pos += 1 + size
            elif op == 0x8C:  # SHORT_BINUNICODE
                size = data[pos]
                stack.append(self._string(data[pos + 1 : pos + 1 + size]))
                pos += 1 + size
            elif op == 0x4D:  # BININT2
                stack.append(data[pos] | data[pos + 1] << 8)
                pos += 2
            elif op in CLOSING:
                items, stack = stack, marked.pop()
                self._close(op, stack, items)
            elif op == 0x2E:  # STOP
                return self._result(stack, marked)
            else:
                pos = self._rare(op, pos, stack)
                data, limit = self._data, self._limit
            if pos > len(data):
                raise IndexError

    # -- bytes

    def _refilled(self, pos: int, stack: list[Any]) -> tuple[bytes, int, int]:
        """The bytes from `pos` on with one more chunk: (bytes, 0, up to where an opcode may begin)."""
        self._before += pos
        self._check_bounds(len(stack))
        more = b"" if self._ended else self._stream.read(CHUNK_BYTES)
        self._ended = not more
        self._data = self._data[pos:] + more
        return self._data, 0, self._limit

    @property
    def _limit(self) -> int:
        return len(self._data) if self._ended else len(self._data) - _GUARD_BYTES

    def _take(self, pos: int, size: int) -> bytes:
        """`size` bytes at `pos`, read as they come: a length that the file does not have takes nothing."""
        while len(self._data) - pos < size and not self._ended:
            more = self._stream.read(CHUNK_BYTES)
            self._ended = not more
            self._data += more
        if len(self._data) - pos < size:
            raise IndexError
        return self._data[pos : pos + size]

    def _line(self, pos: int) -> tuple[bytes, int]:
        """The text up to the end of the line (protocol 0), and what follows."""
        end = self._data.find(b"\n", pos, pos + _GUARD_BYTES)
        if end < 0:
            if len(self._data) - pos >= _GUARD_BYTES:
                raise PickleRefused("a line without an end")
            raise IndexError
        return self._data[pos:end], end + 1

    def _check_bounds(self, waiting: int) -> None:
        """Refuse what takes much more memory than it has bytes."""
        read = self._before
        if waiting > _MOST_WAITING:
            raise PickleRefused("more than a million objects that are in no container")
        if len(self._memo) > _SPARE_ITEMS + read // 4:
            raise PickleRefused("more memo entries than objects")
        if self._items > _SPARE_ITEMS + read // 2:
            raise PickleRefused("lists of more items than the file has room for")
        if _objects_now() - self._objects > _SPARE_OBJECTS + read // 64:
            raise PickleRefused("more objects than a snapshot has")

    # -- values

    def _string(self, raw: bytes) -> str:
        text = raw.decode("utf-8", "replace")
        known = self._strings.get(text)
        if known is None:
            self._strings_bytes += len(raw)
            if len(self._strings) == _MOST_STRINGS or self._strings_bytes > _STRINGS_BYTES:
                raise PickleRefused("more different strings than a snapshot has")
            known = self._strings[text] = text
        return known

    def _tuple(self, items: tuple[Any, ...]) -> tuple[Any, ...]:
        """One object for equal tuples of numbers, such as the pool of each entry."""
        if len(items) > 4 or not all(type(one) is int for one in items):
            return items
        if len(self._tuples) > _GUARD_BYTES:
            return items
        return self._tuples.setdefault(items, items)

    def _result(self, stack: list[Any], marked: list[list[Any]]) -> Any:
        if marked or len(stack) != 1:
            raise PickleRefused("it is damaged (it does not hold one value)")
        return stack[0]

    # -- containers

    def _set_items(self, stack: list[Any], items: list[Any]) -> None:
        held = stack[-1]
        if held == {}:
            folded = self._fold_items(items)
            if folded is not None:
                self._replace(stack, held, folded)
                return
        if type(held) is not dict or len(items) % 2:
            raise PickleRefused("it is damaged (items of what is no dict)")
        keys = items[::2]
        for key in keys:
            if type(key) is not str:
                raise PickleRefused(f"a key that is no string ({_shown(key)})")
        held.update(zip(keys, items[1::2], strict=True))
        folded = self._fold_dict(held)
        if folded is not held:
            self._replace(stack, held, folded)

    def _replace(self, stack: list[Any], held: Any, folded: Any) -> None:
        """What stands for a folded container, on the stack and in the memo."""
        stack[-1] = folded
        memo = self._memo
        for index in range(len(memo) - 1, max(len(memo) - 65, -1), -1):
            if memo[index] is held:
                memo[index] = folded
                return
        if held:
            held.clear()  # it stays in the memo, empty

    def _close_gets(self, stack: list[Any], key: bytes) -> None:
        """A whole list of memo entries: equal bytes are equal lists."""
        folded = self._gets.get(key)
        held = stack[-1]
        if folded is None:
            memo = self._memo
            items = tuple(
                memo[short[0] if short else int.from_bytes(long, "little")]
                for short, long in _GET.findall(key)
            )
            folded = self._fold_list(items)
            if folded is None:
                self._items += len(items)
                held.extend(items)
                return
            self._gets[key] = folded
        self._replace(stack, held, folded)

    def _frame(self, key: bytes) -> Any:
        """What a small dict was folded to; None where it is another dict. Equal bytes are equal dicts."""
        folded = self._gets.get(key)
        if folded is None:
            memo, items = self._memo, []
            for short, long, *numbers in _PART.findall(key):
                if short or long:
                    items.append(memo[short[0] if short else int.from_bytes(long, "little")])
                    continue
                number = next(one for one in numbers if one)
                items.append(int.from_bytes(number, "little", signed=len(number) == 4))
            if "filename" not in items[::2] or any(type(one) is not str for one in items[::2]):
                return None
            held = dict(zip(items[::2], items[1::2], strict=True))
            folded = self._fold_dict(held)
            if folded is held:
                return None
            self._gets[key] = folded
        return folded

    def _close(self, op: int, stack: list[Any], items: list[Any]) -> None:
        if op == 0x65:  # APPENDS
            if type(stack[-1]) is not list:
                raise PickleRefused("it is damaged (items of what is no list)")
            self._items += len(items)
            stack[-1].extend(items)
        elif op == 0x74:  # TUPLE
            self._items += len(items)
            stack.append(self._tuple(tuple(items)))
        elif op == 0x6C:  # LIST
            self._items += len(items)
            stack.append(items)
        else:  # DICT
            stack.append({})
            self._set_items(stack, items)

    # -- what is not often there

    def _rare(self, op: int, pos: int, stack: list[Any]) -> int:
        code = bytes((op,))
        known = CONSTANTS.get(code)
        if known is not None:
            stack.append(known())
            return pos
        count = TUPLES.get(code)
        if count is not None:
            if len(stack) < count:
                raise IndexError
            stack[-count:] = [self._tuple(tuple(stack[-count:]))]
            return pos
        if code in SIZED:
            return self._sized(code, pos, stack)
        if code in b"IFLVpg":
            return self._text(code, pos, stack)
        if code in PLAIN:
            return self._plain(code, pos, stack)
        raise PickleRefused(self._refusal(code, pos, stack))

    def _plain(self, code: bytes, pos: int, stack: list[Any]) -> int:
        if code == b"\x80":  # PROTO
            if self._data[pos] > 5:
                raise PickleRefused(f"pickle protocol {self._data[pos]}, of which 0 to 5 are known")
            return pos + 1
        if code == b"\x95":  # FRAME: only how much to read at a time
            return pos + 8
        if code == b"G":  # BINFLOAT
            stack.append(struct.unpack(">d", self._take(pos, 8))[0])
            return pos + 8
        if code == b"q":
            self._put(self._data[pos], stack)
            return pos + 1
        if code == b"r":
            self._put(int.from_bytes(self._take(pos, 4), "little"), stack)
            return pos + 4
        if code == b"a":
            value = stack.pop()
            if type(stack[-1]) is not list:
                raise PickleRefused("it is damaged (an item of what is no list)")
            self._items += 1
            stack[-1].append(value)
        else:  # SETITEM
            value, key = stack.pop(), stack.pop()
            self._set_items(stack, [key, value])
        return pos

    def _sized(self, code: bytes, pos: int, stack: list[Any]) -> int:
        """A string or a number behind its length."""
        width = SIZED[code]
        size = int.from_bytes(self._take(pos, width), "little")
        pos += width
        if code == b"\x8b":  # LONG4
            if size > _LONGEST_INTEGER:
                raise PickleRefused(f"a number of {size:,} bytes")
            stack.append(int.from_bytes(self._take(pos, size), "little", signed=True))
        else:
            if size > _LONGEST_STRING:
                raise PickleRefused(f"a string of {size:,} bytes")
            stack.append(self._string(self._take(pos, size)))
        return pos + size

    def _text(self, code: bytes, pos: int, stack: list[Any]) -> int:
        """The opcodes of protocol 0, which end at the end of a line."""
        line, pos = self._line(pos)
        if code in b"IL" and len(line) > 3 * _LONGEST_INTEGER:
            raise PickleRefused(f"a number of {len(line):,} digits")
        if code == b"I" and line in (b"00", b"01"):
            stack.append(line == b"01")
        elif code in b"IL":
            stack.append(int(line.rstrip(b"L")))
        elif code == b"F":
            stack.append(float(line))
        elif code == b"V":
            stack.append(self._string(line.decode("raw-unicode-escape").encode("utf-8", "replace")))
        elif code == b"p":
            self._put(int(line), stack)
        else:
            stack.append(self._memo[int(line)] if int(line) >= 0 else self._memo[len(self._memo)])
        return pos

    def _put(self, index: int, stack: list[Any]) -> None:
        """Picklers number what they remember from 0 on; another number would take memory for nothing."""
        if not 0 <= index <= len(self._memo):
            raise PickleRefused(f"memo entry {index:,} after {len(self._memo):,}")
        if index == len(self._memo):
            self._memo.append(stack[-1])
        else:
            self._memo[index] = stack[-1]

    def _refusal(self, code: bytes, pos: int, stack: list[Any]) -> str:
        if code == b"c":  # GLOBAL
            module, pos = self._line(pos)
            name, _ = self._line(pos)
            return f"the name {_shown(f'{module.decode()}.{name.decode()}')}"
        if code == b"i":  # INST
            module, pos = self._line(pos)
            name, _ = self._line(pos)
            return f"an object of {_shown(f'{module.decode()}.{name.decode()}')}"
        if code == b"\x93" and len(stack) > 1:  # STACK_GLOBAL
            return f"the name {_shown(f'{stack[-2]}.{stack[-1]}')}"
        return REFUSED.get(code, f"an unknown opcode ({code!r})")


def _shown(value: object) -> str:
    """A value of a stranger's file, in one short line."""
    text = value if isinstance(value, str) else type(value).__name__
    text = repr(value) if type(value) in (int, float) else text
    return "".join(c if c.isprintable() else "?" for c in text[:80])


def _objects_now() -> int:
    """How many small objects this interpreter holds."""
    count = getattr(sys, "getallocatedblocks", None)
    return count() if count is not None else 0
