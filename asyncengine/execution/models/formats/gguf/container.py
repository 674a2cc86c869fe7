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
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import resources
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncengine.errors import ModelNotFound, UnsupportedModel, shorten
from asyncengine.execution.layers.stored import Below, NumberForm
from asyncengine.execution.models.formats.float_formats import MX_FORM

# ggml's tensor types: block layouts, and the forms of their numbers.

IQ4_TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type of tensors: blocks of `numbers` numbers of a row take `nbytes` bytes.

    `form` is that of a quantized type and `plain` the name that safetensors has for a type of plain numbers; a type
    with neither is not read.
    """

    name: str
    numbers: int
    nbytes: int
    form: NumberForm | None = None
    plain: str | None = None


def _quantized(name: str, numbers: int, nbytes: int, bits: int, group: int, below: Below = "middle") -> BlockType:
    table, block = IQ4_TABLE if below == "table" else (), 0 if numbers == group else numbers
    return BlockType(name, numbers, nbytes, NumberForm(bits, group, below, block, table=table))


_TYPES = tomllib.loads((resources.files(__package__) / "block_types.toml").read_text(encoding="utf-8"))
BLOCK_TYPES: Mapping[int, BlockType] = {
    **{number: BlockType(name, 1, nbytes, plain=name) for name, (number, nbytes) in _TYPES["plain"].items()},
    **{number: _quantized(name, *given) for name, (number, *given) in _TYPES["quantized"].items()},
    **{number: BlockType(name, count, nbytes, MX_FORM) for name, (number, count, nbytes) in _TYPES["mxfp4"].items()},
    **{number: BlockType(name, *sizes) for name, (number, *sizes) in _TYPES["unread"].items()},
}
"""Types by their number in files."""
GONE: Mapping[int, str] = {number: name for name, number in _TYPES["gone"].items()}
"""Types that llama.cpp itself no longer reads."""

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_KEY = 65_535
"""Bytes of a key, as the specification has it."""
MAX_VALUES = 65_536
SHORT = 4096
"""Numbers of an array, and bytes of a text, that are read when a file is opened."""
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
_HEAD, _U32, _U64 = struct.Struct("<4sIQQ"), struct.Struct("<I"), struct.Struct("<Q")


def broken(path: Path, error: object) -> ModelNotFound:
    """The error for a file that is no whole GGUF file."""
    return ModelNotFound(f"{shorten(str(path), 500)} is not a whole GGUF file: {shorten(str(error), 300)}")


class TensorPlace(NamedTuple):
    """The type, shape (outermost dimension first) and bytes of a tensor; `offset` counts from the file's beginning."""

    kind: BlockType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Long(NamedTuple):
    """The type of a value that is read when it is asked for, the offset of its bytes, and its length if it is an array,
    else -1."""

    kind: int
    at: int
    length: int


@dataclass(eq=False)
class Metadata(Mapping[str, Any]):
    """The keys and values of a header: `short` ones, and `long` ones, which are read anew each time they are asked for:
    texts, and arrays of texts and of numbers. Raises `ModelNotFound` for text that is not UTF-8."""

    path: Path
    data: memoryview
    short: dict[str, Any] = field(default_factory=dict)
    long: dict[str, Long] = field(default_factory=dict)

    def __iter__(self) -> Iterator[str]:
        return chain(self.short, self.long)

    def __len__(self) -> int:
        return len(self.short) + len(self.long)

    def __getitem__(self, key: str) -> Any:
        if key in self.short:
            return self.short[key]
        kind, at, length = self.long[key]
        if kind != _STRING:
            return np.frombuffer(self.data, _DTYPES[kind], length, at).tolist()
        texts = []
        for _ in range(abs(length)):
            end = at + 8 + _U64.unpack_from(self.data, at)[0]
            try:
                texts.append(str(self.data[at + 8 : end], "utf-8"))
            except UnicodeDecodeError:
                raise broken(self.path, f"its {key[:80]} is not UTF-8") from None
            at = end
        return texts if length >= 0 else texts[0]


class GgufFile:
    """A mapped file. Its memory stays mapped as long as an array of it is held."""

    def __init__(self, path: Path) -> None:
        """Raises `ModelNotFound` for what is no whole GGUF file, `UnsupportedModel` for another version of one."""
        self.path = path
        self._mapping = _mapped(path)
        data = memoryview(self._mapping)
        magic, version, tensors, values = _HEAD.unpack_from(data)
        if magic != MAGIC:
            raise broken(path, f"it begins with {magic!r}")
        if version not in VERSIONS:
            what = "is big-endian" if version & 0xFFFF == 0 and version else f"is version {version}"
            raise UnsupportedModel(
                f"{path}: a GGUF file that {what}; read are the little-endian versions 2 and 3 (convert it with "
                "llama.cpp)"
            )
        for count, most, what in ((tensors, MAX_TENSORS, "tensors"), (values, MAX_VALUES, "values")):
            if count > most:
                raise broken(path, f"its header claims {count} {what}, at most {most}")
        self.metadata = Metadata(path, data)
        try:
            at = _read_values(self.metadata, _HEAD.size, values)
            self.tensors = _read_places(self.metadata, at, tensors)
        except (struct.error, OverflowError):  # what is read would lie beyond the last byte
            raise broken(path, "it ends within its header") from None
        address = np.frombuffer(self._mapping, np.uint8).ctypes.data
        shared = {"data": (address, False), "shape": (len(data),), "typestr": "|u1", "version": 3}
        # numpy sees the memory without its read-only mark, of which torch would warn
        self.bytes: NDArray[np.uint8] = np.asarray(SimpleNamespace(mapping=self._mapping, __array_interface__=shared))

    def array(self, place: TensorPlace) -> NDArray[np.uint8]:
        """The bytes of a tensor, which must not be written to."""
        return self.bytes[place.offset : place.offset + place.nbytes]

    def release(self, first: int, last: int) -> None:
        """Let the system take back the whole pages of bytes [first, last); they are read from the file if touched."""
        page = mmap.PAGESIZE
        begin, end = -(-first // page) * page, last // page * page
        if end > begin and hasattr(mmap, "MADV_DONTNEED"):
            self._mapping.madvise(mmap.MADV_DONTNEED, begin, end - begin)


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
        parts = file.metadata.short.get("split.count", 1)
        if type(parts) is not int or parts > 1:
            raise ModelNotFound(f"{path} is part of a model of {parts!r:.40} files, under another name")
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
        stated, of = (files[-1].metadata.short.get(key) for key in ("split.no", "split.count"))
        if (stated, of) != (index, count):
            raise broken(part, f"it says that it is part {stated!r:.40} (from 0) of {of!r:.40}")
    held = sum(len(file.tensors) for file in files)
    if (claimed := files[0].metadata.short.get("split.tensors.count", held)) != held:
        raise broken(path, f"its parts hold {held} tensors, not {claimed!r:.40}")
    return tuple(files)


def _mapped(path: Path) -> mmap.mmap:
    """A file's bytes. Symbolic links are followed, as the hub's cache and Ollama have them, to regular files only."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ModelNotFound(f"{path} is not a regular file")
        with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):  # it may have become another between the two calls
                raise ModelNotFound(f"{path} is not a regular file")
            if status.st_size < _HEAD.size:
                raise broken(path, f"it has {status.st_size} bytes")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ModelNotFound(f"{shorten(str(path), 500)} cannot be read: {shorten(str(error), 300)}") from None


def _read_text(header: Metadata, at: int, most: int, what: str) -> tuple[str, int]:
    """A text of at most so many bytes, and where it ends."""
    path, data = header.path, header.data
    (length,) = _U64.unpack_from(data, at)
    if length > most:
        raise broken(path, f"it has {what} of {length} bytes, at most {most}")
    try:
        return str(struct.unpack_from(f"{length}s", data, at + 8)[0], "utf-8"), at + 8 + length
    except UnicodeDecodeError:
        raise broken(path, f"it has {what} that is not UTF-8") from None


def _read_values(header: Metadata, at: int, count: int) -> int:
    """Read so many values into `header`. The end of the last one."""
    path, data, strings = header.path, header.data, 0
    for _ in range(count):
        key, at = _read_text(header, at, MAX_KEY, "a key")
        if key in header.short or key in header.long:
            raise broken(path, f"it has the key {key[:80]!r} twice")
        (kind,), length, at = _U32.unpack_from(data, at), -1, at + 4
        if kind == _ARRAY:
            (kind, length), at = struct.unpack_from("<IQ", data, at), at + 12
        begin, number = at, abs(length)
        if kind == _STRING:
            strings += max(length, 0)
            if strings > MAX_STRINGS:
                raise broken(path, f"its header claims {strings} strings, at most {MAX_STRINGS}")
            # a tokenizer's words all go through this loop when a file is opened: about 0.1 microseconds each
            unpack = _U64.unpack_from
            for _ in range(number):
                at += 8 + unpack(data, at)[0]
        elif kind == _ARRAY:
            raise broken(path, f"its {key[:80]} is an array of arrays")
        elif kind in _DTYPES:
            at += np.dtype(_DTYPES[kind]).itemsize * number
        else:
            raise broken(path, f"its {key[:80]} is of the unknown type {kind}")
        if at > len(data):
            raise broken(path, "it ends within its header")
        if kind != _STRING and number <= SHORT:
            numbers = np.frombuffer(data, _DTYPES[kind], number, begin).tolist()
            header.short[key] = numbers if length >= 0 else numbers[0]
            continue
        header.long[key] = Long(kind, begin, length)
        if length < 0 and at - begin <= SHORT:
            with suppress(UnicodeDecodeError):  # an error for whoever asks for it
                header.short[key] = str(data[begin + 8 : at], "utf-8")
                del header.long[key]
    return at


def _read_places(header: Metadata, at: int, count: int) -> dict[str, TensorPlace]:
    """Every tensor, its bytes within the file, one after the other, none in another's."""
    path, data, found = header.path, header.data, dict[str, TensorPlace]()
    unit = header.short.get("general.alignment", 32)
    if type(unit) is not int or not 8 <= unit <= MAX_ALIGNMENT or unit & (unit - 1):
        raise broken(path, f"its general.alignment is {unit!r:.40}, not a power of two of 8 to {MAX_ALIGNMENT}")
    for _ in range(count):
        name, at = _read_text(header, at, MAX_NAME, "a tensor's name")
        shown = f"its tensor {name[:80]}"
        if name in found:
            raise broken(path, f"it has the tensor {name[:80]!r} twice")
        (axes,) = _U32.unpack_from(data, at)
        if not 1 <= axes <= 4:
            raise broken(path, f"{shown} has {axes} dimensions, not 1 to 4")
        line = struct.Struct(f"<{axes}QIQ")
        *sizes, number, offset = line.unpack_from(data, at + 4)
        at += 4 + line.size
        kind, elements = BLOCK_TYPES.get(number), math.prod(sizes)
        if kind is None:
            gone = f"{GONE.get(number)}, which llama.cpp no longer reads"
            raise broken(path, f"{shown} is of {gone if number in GONE else f'the unknown type {number}'}")
        if not 0 < elements < 2**62:
            raise broken(path, f"{shown} has an impossible shape")
        if sizes[0] % kind.numbers:
            what = f"has rows of {sizes[0]} numbers; {kind.name} has blocks of {kind.numbers}"
            raise broken(path, f"{shown} {what}")
        found[name] = TensorPlace(kind, tuple(sizes[::-1]), offset, elements // kind.numbers * kind.nbytes)
    begin, end = -(-at // unit) * unit, 0
    for name, place in found.items():
        shown = f"its tensor {name[:80]}"
        if place.offset % unit:
            raise broken(path, f"{shown} begins at {place.offset}, no multiple of the alignment {unit}")
        if place.offset < end:
            raise broken(path, f"{shown} begins at {place.offset}, within or before the one ahead of it")
        end = place.offset + place.nbytes
        if begin + end > len(data):
            raise broken(path, f"it is truncated: {len(data)} bytes, {shown} ends at {begin + end}")
        found[name] = place._replace(offset=begin + place.offset)
    return found
