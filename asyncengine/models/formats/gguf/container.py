"""GGUF containers: headers checked against the size of their files, values read on demand, tensor data mapped.

    "GGUF", version, number of tensors, number of values
    values: key, type, value
    tensors: name, dimensions (innermost first), type, offset into the data
    padding to the alignment, data

Nothing in a file is believed: whatever a header says is checked before memory is taken or an address formed. Opening
only walks over the values: a tokenizer of 150,000 words is an array of strings among them.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import stat
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncengine.errors import ModelNotFound, UnsupportedModel, shorten
from asyncengine.models.formats.gguf.blocks import BLOCK_TYPES, GONE, BlockType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_KEY = 65_535
"""Bytes of a key, as the specification has it."""
MAX_VALUES = 65_536
MAX_STRINGS = 2**21
"""Strings of all arrays together: the largest tokenizers have 260,000 words and twice as many merges."""
MAX_TENSORS = 65_536
MAX_NAME = 1024
"""Bytes of a tensor's name; llama.cpp's own limit is 64."""
MAX_ALIGNMENT = 2**20
SPLIT = re.compile(r"(?P<name>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
"""Names that llama.cpp's gguf-split gives to the files of one model: NAME-00001-of-00003.gguf."""

_DTYPES = {
    0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


def broken(path: Path, error: object) -> ModelNotFound:
    """The error for a file that is no whole GGUF file."""
    return ModelNotFound(f"{shorten(str(path), 500)} is not a whole GGUF file: {shorten(str(error), 300)}")


class TensorPlace(NamedTuple):
    """The type, shape (outermost dimension first) and bytes of a tensor; `offset` counts from the file's beginning."""

    kind: BlockType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class _Value(NamedTuple):
    """The type of a value, the offset of its bytes, and its length if it is an array, else -1."""

    kind: int
    at: int
    length: int


class Metadata(Mapping[str, Any]):
    """The keys and values of a header. Arrays come as lists, made anew each time: keep one that you need twice.

    Raises `ModelNotFound` for text that is not UTF-8.
    """

    def __init__(self, path: Path, data: memoryview, values: dict[str, _Value]) -> None:
        self._path, self._data, self._values = path, data, values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, key: str) -> Any:
        kind, at, length = self._values[key]
        if kind != _STRING:
            numbers = np.frombuffer(self._data, _DTYPES[kind], abs(length), at).tolist()
            return numbers if length >= 0 else numbers[0]
        texts = []
        for _ in range(abs(length)):
            end = at + 8 + _U64.unpack_from(self._data, at)[0]
            try:
                texts.append(str(self._data[at + 8 : end], "utf-8"))
            except UnicodeDecodeError:
                raise broken(self._path, f"its {key[:80]} is not UTF-8") from None
            at = end
        return texts if length >= 0 else texts[0]

    def single(self, key: str) -> Any:
        """A value that is no array; None if it is missing."""
        return None if key not in self._values or self._values[key].length >= 0 else self[key]

    def length(self, key: str) -> int:
        """The length of an array, without reading it; 0 if the key is missing or no array."""
        return max(self._values[key].length, 0) if key in self._values else 0


class GgufFile:
    """A mapped file. Its memory stays mapped as long as an array of it is held."""

    def __init__(self, path: Path) -> None:
        """Raises `ModelNotFound` for what is no whole GGUF file, `UnsupportedModel` for another version of one."""
        self.path = path
        self._mapping = _mapped(path)
        self.bytes: NDArray[np.uint8] = np.asarray(_Writable(self._mapping))
        self.metadata, self.tensors = _Reader(path, memoryview(self._mapping)).read()

    def array(self, place: TensorPlace) -> NDArray[np.uint8]:
        """The bytes of a tensor, which must not be written to."""
        return self.bytes[place.offset : place.offset + place.nbytes]

    def release(self, first: int, last: int) -> None:
        """Let the system take back the whole pages of bytes [first, last); they are read from the file if touched."""
        page = mmap.PAGESIZE
        begin, end = -(-first // page) * page, last // page * page
        if end > begin and hasattr(mmap, "MADV_DONTNEED"):
            self._mapping.madvise(mmap.MADV_DONTNEED, begin, end - begin)

    def whole(self, key: str, default: int) -> int:
        """A whole number of the header. Raises `ModelNotFound` if the value is something else."""
        found = self.metadata.single(key) if key in self.metadata else default
        if isinstance(found, bool) or not isinstance(found, int):
            raise broken(self.path, f"its {key} is no whole number")
        return found


def is_gguf(path: Path) -> bool:
    """True for a regular file that begins as a GGUF file does, whatever its name."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return False
        with path.open("rb") as stream:
            return stream.read(4) == MAGIC
    except OSError:
        return False


def open_files(path: Path) -> tuple[GgufFile, ...]:
    """A model's files, the one with the header first; `path` may be any of them. Raises `ModelNotFound`."""
    name = SPLIT.fullmatch(path.name)
    if name is None or name["count"] == "00001":
        file = GgufFile(path)
        if (count := file.whole("split.count", 1)) > 1:
            raise ModelNotFound(f"{path} is part of a model of {count} files, under another name")
        return (file,)
    number, count = int(name["number"]), int(name["count"])
    if not 1 <= number <= count <= 9999:
        raise ModelNotFound(f"{path.name} is no part of {count} files")
    paths = [path.with_name(f"{name['name']}-{each:05}-of-{count:05}.gguf") for each in range(1, count + 1)]
    missing = next((part for part in paths if not part.exists()), None)
    if missing is not None:
        raise ModelNotFound(f"{path} is one of {count} files; missing is {missing.name}")
    files = []
    for index, part in enumerate(paths):
        files.append(GgufFile(part))
        stated, of = files[-1].whole("split.no", -1), files[-1].whole("split.count", -1)
        if (stated, of) != (index, count):
            raise broken(part, f"it says that it is part {stated + 1} of {of}")
    held = sum(len(file.tensors) for file in files)
    if (claimed := files[0].whole("split.tensors.count", -1)) not in (-1, held):
        raise broken(path, f"its parts hold {held} tensors, not {claimed}")
    return tuple(files)


class _Writable:
    """The memory of a mapping as numpy sees it without its read-only mark, of which torch would warn."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self.mapping = mapping
        address = np.frombuffer(mapping, np.uint8).ctypes.data
        self.__array_interface__: dict[str, Any] = {
            "data": (address, False), "shape": (len(mapping),), "typestr": "|u1", "version": 3,
        }  # fmt: skip


def _mapped(path: Path) -> mmap.mmap:
    """A file's bytes. Symbolic links are followed, as the hub's cache and Ollama have them, to regular files only."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ModelNotFound(f"{path} is not a regular file")
        with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):  # it may have become another between the two calls
                raise ModelNotFound(f"{path} is not a regular file")
            if status.st_size < 24:
                raise broken(path, f"it has {status.st_size} bytes")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ModelNotFound(f"{shorten(str(path), 500)} cannot be read: {shorten(str(error), 300)}") from None


class _Reader:
    """A header, read from its beginning. Every method raises `ModelNotFound` for what cannot be."""

    def __init__(self, path: Path, data: memoryview) -> None:
        self.path, self.data, self.at, self.end = path, data, 0, len(data)

    def read(self) -> tuple[Metadata, dict[str, TensorPlace]]:
        """The values and tensors of a file."""
        if self.data[:4] != MAGIC:
            raise broken(self.path, f"it begins with {bytes(self.data[:4])!r}")
        self.at = 4
        version = self._u32()
        if version not in VERSIONS:
            what = "is big-endian" if version & 0xFFFF == 0 and version else f"is version {version}"
            raise UnsupportedModel(
                f"{self.path}: a GGUF file that {what}; read are the little-endian versions 2 and 3 (convert it with "
                "llama.cpp)"
            )
        tensors, values = self._u64(), self._u64()
        if tensors > MAX_TENSORS:
            raise broken(self.path, f"its header claims {tensors} tensors, at most {MAX_TENSORS}")
        if values > MAX_VALUES:
            raise broken(self.path, f"its header claims {values} values, at most {MAX_VALUES}")
        metadata = Metadata(self.path, self.data, self._values(values))
        unit = metadata.single("general.alignment") if "general.alignment" in metadata else 32
        if isinstance(unit, bool) or not isinstance(unit, int) or not 8 <= unit <= MAX_ALIGNMENT or unit & (unit - 1):
            shown = shorten(repr(unit), 40)
            raise broken(self.path, f"its general.alignment is {shown}, not a power of two of 8 to {MAX_ALIGNMENT}")
        return metadata, self._places(tensors, unit)

    def _skip(self, count: int) -> None:
        if count > self.end - self.at:
            raise broken(self.path, "it ends within its header")
        self.at += count

    def _u32(self) -> int:
        self._skip(4)
        return int(_U32.unpack_from(self.data, self.at - 4)[0])

    def _u64(self) -> int:
        self._skip(8)
        return int(_U64.unpack_from(self.data, self.at - 8)[0])

    def _text(self, most: int, what: str) -> str:
        length = self._u64()
        if length > most:
            raise broken(self.path, f"it has {what} of {length} bytes, at most {most}")
        self._skip(length)
        try:
            return str(self.data[self.at - length : self.at], "utf-8")
        except UnicodeDecodeError:
            raise broken(self.path, f"it has {what} that is not UTF-8") from None

    def _values(self, count: int) -> dict[str, _Value]:
        found: dict[str, _Value] = {}
        strings = 0
        for _ in range(count):
            key = self._text(MAX_KEY, "a key")
            if key in found:
                raise broken(self.path, f"it has the key {key[:80]!r} twice")
            kind, length = self._u32(), -1
            if kind == _ARRAY:
                kind, length = self._u32(), self._u64()
            found[key] = _Value(kind, self.at, length)
            if kind == _STRING:
                strings += max(length, 0)
                if strings > MAX_STRINGS:
                    raise broken(self.path, f"its header claims {strings} strings, at most {MAX_STRINGS}")
                self._skip_strings(abs(length))
            elif kind == _ARRAY:
                raise broken(self.path, f"its {key[:80]} is an array of arrays")
            elif kind in _DTYPES:
                self._skip(np.dtype(_DTYPES[kind]).itemsize * abs(length))
            else:
                raise broken(self.path, f"its {key[:80]} is of the unknown type {kind}")
        return found

    def _skip_strings(self, count: int) -> None:
        # a tokenizer's words all go through this loop when a file is opened: about 0.1 microseconds each
        if count > (self.end - self.at) // 8:
            raise broken(self.path, "it ends within its header")
        data, at, end, unpack = self.data, self.at, self.end, _U64.unpack_from
        for _ in range(count):
            if at + 8 > end:
                break
            at += 8 + unpack(data, at)[0]
        if at > end:
            raise broken(self.path, "it ends within its header")
        self.at = at

    def _places(self, count: int, alignment: int) -> dict[str, TensorPlace]:
        """Every tensor, its bytes within the file, one after the other, none in another's."""
        found: dict[str, TensorPlace] = {}
        for _ in range(count):
            name = self._text(MAX_NAME, "a tensor's name")
            if name in found:
                raise broken(self.path, f"it has the tensor {name[:80]!r} twice")
            found[name] = self._place(name[:80])
        begin = -(-self.at // alignment) * alignment
        end = 0
        for name, place in found.items():
            at = f"its tensor {name[:80]} begins at {place.offset}"
            if place.offset % alignment:
                raise broken(self.path, f"{at}, no multiple of the alignment {alignment}")
            if place.offset < end:
                raise broken(self.path, f"{at}, within or before the one ahead of it")
            end = place.offset + place.nbytes
            if begin + end > self.end:
                raise broken(
                    self.path, f"it is truncated: {self.end} bytes, its tensor {name[:80]} ends at {begin + end}"
                )
            found[name] = place._replace(offset=begin + place.offset)
        return found

    def _place(self, name: str) -> TensorPlace:
        """A tensor's line of the header; the offset still counts from the beginning of the data."""
        axes = self._u32()
        if not 1 <= axes <= 4:
            raise broken(self.path, f"its tensor {name} has {axes} dimensions, not 1 to 4")
        shape = tuple(self._u64() for _ in range(axes))[::-1]
        number, offset = self._u32(), self._u64()
        kind = BLOCK_TYPES.get(number)
        if kind is None:
            what = (
                f"{GONE[number]}, which llama.cpp no longer reads" if number in GONE else f"the unknown type {number}"
            )
            raise broken(self.path, f"its tensor {name} is of {what}")
        elements = math.prod(shape)
        if not 0 < elements < 2**62:
            raise broken(self.path, f"its tensor {name} has an impossible shape")
        if shape[-1] % kind.numbers:
            raise broken(
                self.path,
                f"its tensor {name} has rows of {shape[-1]} numbers; {kind.name} has blocks of {kind.numbers}",
            )
        return TensorPlace(kind, shape, offset, elements // kind.numbers * kind.nbytes)
