"""What a GGUF file's header says beside the tensors: keys and values, read when somebody asks for one.

A tokenizer of 150,000 words is an array of strings in here. Opening a file only walks over it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from asyncengine.errors import ModelNotFound, shorten

MAX_KEY = 65_535
"""Bytes of a key, as the specification has it."""
MAX_VALUES = 65_536
MAX_STRINGS = 2**21
"""Strings of all arrays together: the largest tokenizers have 260,000 words and twice as many merges."""

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_DTYPES = {
    0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


class Broken(ValueError):
    """What is wrong with a file's bytes, in words."""


def broken(path: Path, error: object) -> ModelNotFound:
    return ModelNotFound(f"{shorten(str(path), 500)} is not a whole GGUF file: {shorten(str(error), 300)}")


class _Place(NamedTuple):
    kind: int
    at: int
    """Of the value's bytes; of a string's, of its length."""
    length: int
    """Of an array; -1: no array."""


class Cursor:
    """A place in a header that moves on. Raises `Broken` at the end of the file."""

    def __init__(self, data: memoryview, at: int = 0) -> None:
        self.data, self.at, self.end = data, at, len(data)

    def skip(self, count: int) -> None:
        if count > self.end - self.at:
            raise Broken("it ends within its header")
        self.at += count

    def u32(self) -> int:
        self.skip(4)
        return int(_U32.unpack_from(self.data, self.at - 4)[0])

    def u64(self) -> int:
        self.skip(8)
        return int(_U64.unpack_from(self.data, self.at - 8)[0])

    def text(self, most: int, what: str) -> str:
        length = self.u64()
        if length > most:
            raise Broken(f"it has {what} of {length} bytes, at most {most}")
        self.skip(length)
        try:
            return str(self.data[self.at - length : self.at], "utf-8")
        except UnicodeDecodeError:
            raise Broken(f"it has {what} that is not UTF-8") from None


class Metadata(Mapping[str, Any]):
    """Keys and values. Arrays come as lists, made anew each time; whoever needs one twice keeps it.

    Raises `ModelNotFound` for text that is none.
    """

    def __init__(self, path: Path, data: memoryview, places: dict[str, _Place]) -> None:
        self._path, self._data, self._places = path, data, places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, key: str) -> Any:
        kind, at, count = self._places[key]
        if count < 0:
            if kind == _STRING:
                return self._text(key, at)[0]
            return struct.unpack_from("<" + _NUMBERS[kind], self._data, at)[0]
        if kind != _STRING:
            return np.frombuffer(self._data, _DTYPES[kind], count, at).tolist()
        found = []
        for _ in range(count):
            text, at = self._text(key, at)
            found.append(text)
        return found

    def single(self, key: str) -> Any:
        """A value that is no array; None if it is not there."""
        return None if key not in self._places or self._places[key].length >= 0 else self[key]

    def length(self, key: str) -> int:
        """Elements of an array, without reading it; 0 if it is not there or no array."""
        return max(self._places[key].length, 0) if key in self._places else 0

    def _text(self, key: str, at: int) -> tuple[str, int]:
        length = _U64.unpack_from(self._data, at)[0]
        try:
            return str(self._data[at + 8 : at + 8 + length], "utf-8"), at + 8 + length
        except UnicodeDecodeError:
            raise broken(self._path, f"its {key[:80]} is not UTF-8") from None


def read_metadata(path: Path, cursor: Cursor, count: int) -> Metadata:
    """`count` keys and values from where the cursor is. Raises `Broken`."""
    if count > MAX_VALUES:
        raise Broken(f"its header claims {count} values, at most {MAX_VALUES}")
    places: dict[str, _Place] = {}
    strings = 0
    for _ in range(count):
        key = cursor.text(MAX_KEY, "a key")
        if key in places:
            raise Broken(f"it has the key {key[:80]!r} twice")
        kind, elements = cursor.u32(), -1
        if kind == _ARRAY:
            kind, elements = cursor.u32(), cursor.u64()
        places[key] = _Place(kind, cursor.at, elements)
        if kind == _STRING:
            strings += max(elements, 0)
            if strings > MAX_STRINGS:
                raise Broken(f"its header claims {strings} strings, at most {MAX_STRINGS}")
            _skip_strings(cursor, 1 if elements < 0 else elements)
        elif kind == _ARRAY:
            raise Broken(f"its {key[:80]} is an array of arrays")
        elif kind in _NUMBERS:
            cursor.skip(struct.calcsize("<" + _NUMBERS[kind]) * (1 if elements < 0 else elements))
        else:
            raise Broken(f"its {key[:80]} is of the unknown type {kind}")
    return Metadata(path, cursor.data, places)


def _skip_strings(cursor: Cursor, count: int) -> None:
    """The one loop that a tokenizer's words go through when a file is opened: about 0.1 microseconds each."""
    if count > (cursor.end - cursor.at) // 8:
        raise Broken("it ends within its header")
    data, at, end, unpack = cursor.data, cursor.at, cursor.end, _U64.unpack_from
    for _ in range(count):
        if at + 8 > end:
            break
        at += 8 + unpack(data, at)[0]
    if at > end:
        raise Broken("it ends within its header")
    cursor.at = at
