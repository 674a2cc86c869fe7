"""GGUF containers: headers checked against the size of their files, values read on demand, tensor data mapped.

    "GGUF", version, number of tensors, number of values
    values: key, type, value
    tensors: name, dimensions (innermost first), type, offset into the data
    padding to the alignment, data

Nothing in a file is trusted: every size and offset is checked before memory is allocated or an address computed.
Opening a file skips over long values, such as a tokenizer's 150,000 words; they are read on access.
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

# ggml's tensor types: block layouts, and the number form of each.

IQ4_TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True, slots=True)
class BlockType:
    """A tensor type of ggml: each block of `numbers` numbers of a row takes `nbytes` bytes.

    `form` is the number form of a quantized type, `plain` safetensors' name of an unquantized one. A type with neither
    cannot be read.
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
"""Tensor types by ggml's number for them."""
GONE: Mapping[int, str] = {number: name for name, number in _TYPES["gone"].items()}
"""Tensor types that llama.cpp itself has removed."""

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_KEY = 65_535
"""Most bytes of a key: the limit in the GGUF specification."""
MAX_VALUES = 65_536
SHORT = 4096
"""Most numbers of an array, and bytes of a string, that are read when a file is opened; longer ones on access."""
MAX_STRINGS = 2**21
"""Most strings in all arrays together: the largest tokenizers have 260,000 words and twice as many merges."""
MAX_TENSORS = 65_536
MAX_NAME = 1024
"""Most bytes of a tensor's name; llama.cpp's own limit is 64."""
MAX_ALIGNMENT = 2**20
SPLIT = re.compile(r"(?P<name>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
"""Names that llama.cpp's gguf-split gives to the files of one model: NAME-00001-of-00003.gguf."""

_DTYPES = {
    0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_HEAD, _U32, _U64 = struct.Struct("<4sIQQ"), struct.Struct("<I"), struct.Struct("<Q")


def broken(path: Path, error: object) -> ModelNotFound:
    """The error for a file that is not a complete GGUF file."""
    return ModelNotFound(f"{shorten(str(path), 500)} is not a whole GGUF file: {shorten(str(error), 300)}")


class TensorInfo(NamedTuple):
    """Type, shape (outermost dimension first) and bytes of a tensor; `offset` counts from the beginning of the file."""

    type: BlockType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class DeferredValue(NamedTuple):
    """A metadata value that is read on access: GGUF's number of its type, offset of its bytes in the file, and its
    length if it is an array, else -1."""

    value_type: int
    offset: int
    length: int


@dataclass(eq=False)
class Metadata(Mapping[str, Any]):
    """Metadata of a header: `short` values, and `long` ones (strings and arrays), which are read anew at every access.
    Raises `ModelNotFound` for a string that is not UTF-8."""

    path: Path
    data: memoryview
    short: dict[str, Any] = field(default_factory=dict)
    long: dict[str, DeferredValue] = field(default_factory=dict)

    def __iter__(self) -> Iterator[str]:
        return chain(self.short, self.long)

    def __len__(self) -> int:
        return len(self.short) + len(self.long)

    def __getitem__(self, key: str) -> Any:
        if key in self.short:
            return self.short[key]
        value_type, offset, length = self.long[key]
        if value_type != _STRING:
            return np.frombuffer(self.data, _DTYPES[value_type], length, offset).tolist()
        texts = []
        for _ in range(abs(length)):
            end = offset + 8 + _U64.unpack_from(self.data, offset)[0]
            try:
                texts.append(str(self.data[offset + 8 : end], "utf-8"))
            except UnicodeDecodeError:
                raise broken(self.path, f"its {key[:80]} is not UTF-8") from None
            offset = end
        return texts if length >= 0 else texts[0]


class GgufFile:
    """A memory-mapped file, which stays mapped as long as an array over it lives."""

    def __init__(self, path: Path) -> None:
        """Raises `ModelNotFound` for a file that is no complete GGUF file, `UnsupportedModel` for another version."""
        self.path = path
        self._mapping = _mapped(path)
        data = memoryview(self._mapping)
        magic, version, tensors, values = _HEAD.unpack_from(data)
        if magic != MAGIC:
            raise broken(path, f"it begins with {magic!r}")
        if version not in VERSIONS:
            problem = "is big-endian" if version & 0xFFFF == 0 and version else f"is version {version}"
            raise UnsupportedModel(
                f"{path}: a GGUF file that {problem}; read are the little-endian versions 2 and 3 (convert it with "
                "llama.cpp)"
            )
        for count, most, problem in ((tensors, MAX_TENSORS, "tensors"), (values, MAX_VALUES, "values")):
            if count > most:
                raise broken(path, f"its header claims {count} {problem}, at most {most}")
        self.metadata = Metadata(path, data)
        try:
            offset = _read_values(self.metadata, _HEAD.size, values)
            self.tensors = _read_tensor_infos(self.metadata, offset, tensors)
        except (struct.error, OverflowError):  # what is read would lie beyond the last byte
            raise broken(path, "it ends within its header") from None
        address = np.frombuffer(self._mapping, np.uint8).ctypes.data
        shared = {"data": (address, False), "shape": (len(data),), "typestr": "|u1", "version": 3}
        # numpy sees the memory without its read-only mark, of which torch would warn
        self.bytes: NDArray[np.uint8] = np.asarray(SimpleNamespace(mapping=self._mapping, __array_interface__=shared))

    def array(self, info: TensorInfo) -> NDArray[np.uint8]:
        """The bytes of a tensor, which must not be written to."""
        return self.bytes[info.offset : info.offset + info.nbytes]

    def release(self, first: int, last: int) -> None:
        """Let the system reclaim the whole pages within bytes [first, last); a later access reads the file again."""
        page = mmap.PAGESIZE
        begin, end = -(-first // page) * page, last // page * page
        if end > begin and hasattr(mmap, "MADV_DONTNEED"):
            self._mapping.madvise(mmap.MADV_DONTNEED, begin, end - begin)


def is_gguf(path: Path) -> bool:
    """Whether the path is a regular file with GGUF's magic number, whatever its name."""
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
        split_count = file.metadata.short.get("split.count", 1)
        if type(split_count) is not int or split_count > 1:
            raise ModelNotFound(f"{path} is part of a model of {split_count!r:.40} files, under another name")
        return (file,)
    number, count = int(name["number"]), int(name["count"])
    if not 1 <= number <= count <= 9999:
        raise ModelNotFound(f"{path.name} is no part of {count} files")
    paths = [path.with_name(f"{name['name']}-{index:05}-of-{count:05}.gguf") for index in range(1, count + 1)]
    missing = next((shard for shard in paths if not shard.exists()), None)
    if missing is not None:
        raise ModelNotFound(f"{path} is one of {count} files; missing is {missing.name}")
    files = []
    for index, shard in enumerate(paths):
        files.append(GgufFile(shard))
        stated, stated_count = (files[-1].metadata.short.get(key) for key in ("split.no", "split.count"))
        if (stated, stated_count) != (index, count):
            raise broken(shard, f"it says that it is part {stated!r:.40} (from 0) of {stated_count!r:.40}")
    actual = sum(len(file.tensors) for file in files)
    if (claimed := files[0].metadata.short.get("split.tensors.count", actual)) != actual:
        raise broken(path, f"its parts hold {actual} tensors, not {claimed!r:.40}")
    return tuple(files)


def _mapped(path: Path) -> mmap.mmap:
    """A file's bytes. Symbolic links are followed, as the hub's cache and Ollama have them, to regular files only."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ModelNotFound(f"{path} is not a regular file")
        with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):  # the path may have been replaced between the two calls
                raise ModelNotFound(f"{path} is not a regular file")
            if status.st_size < _HEAD.size:
                raise broken(path, f"it has {status.st_size} bytes")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ModelNotFound(f"{shorten(str(path), 500)} cannot be read: {shorten(str(error), 300)}") from None


def _read_text(header: Metadata, offset: int, most: int, noun: str) -> tuple[str, int]:
    """A string of at most `most` bytes that begins at `offset`, and the offset of its end. `noun`: for errors."""
    path, data = header.path, header.data
    (length,) = _U64.unpack_from(data, offset)
    if length > most:
        raise broken(path, f"it has {noun} of {length} bytes, at most {most}")
    try:
        return str(struct.unpack_from(f"{length}s", data, offset + 8)[0], "utf-8"), offset + 8 + length
    except UnicodeDecodeError:
        raise broken(path, f"it has {noun} that is not UTF-8") from None


def _read_values(header: Metadata, offset: int, count: int) -> int:
    """Read `count` values into `header`. Returns the offset of the end of the last one."""
    path, data, strings = header.path, header.data, 0
    for _ in range(count):
        key, offset = _read_text(header, offset, MAX_KEY, "a key")
        if key in header.short or key in header.long:
            raise broken(path, f"it has the key {key[:80]!r} twice")
        (value_type,), length, offset = _U32.unpack_from(data, offset), -1, offset + 4
        if value_type == _ARRAY:
            (value_type, length), offset = struct.unpack_from("<IQ", data, offset), offset + 12
        begin, number = offset, abs(length)
        if value_type == _STRING:
            strings += max(length, 0)
            if strings > MAX_STRINGS:
                raise broken(path, f"its header claims {strings} strings, at most {MAX_STRINGS}")
            # a tokenizer's words all go through this loop when a file is opened: about 0.1 microseconds each
            unpack = _U64.unpack_from
            for _ in range(number):
                offset += 8 + unpack(data, offset)[0]
        elif value_type == _ARRAY:
            raise broken(path, f"its {key[:80]} is an array of arrays")
        elif value_type in _DTYPES:
            offset += np.dtype(_DTYPES[value_type]).itemsize * number
        else:
            raise broken(path, f"its {key[:80]} is of the unknown type {value_type}")
        if offset > len(data):
            raise broken(path, "it ends within its header")
        if value_type != _STRING and number <= SHORT:
            numbers = np.frombuffer(data, _DTYPES[value_type], number, begin).tolist()
            header.short[key] = numbers if length >= 0 else numbers[0]
            continue
        header.long[key] = DeferredValue(value_type, begin, length)
        if length < 0 and offset - begin <= SHORT:
            with suppress(UnicodeDecodeError):  # it stays in `long`, where reading it raises the error
                header.short[key] = str(data[begin + 8 : offset], "utf-8")
                del header.long[key]
    return offset


def _read_tensor_infos(header: Metadata, cursor: int, count: int) -> dict[str, TensorInfo]:
    """All tensors. Their bytes must lie within the file, in the order of the header, without overlaps."""
    path, data, infos = header.path, header.data, dict[str, TensorInfo]()
    unit = header.short.get("general.alignment", 32)
    if type(unit) is not int or not 8 <= unit <= MAX_ALIGNMENT or unit & (unit - 1):
        raise broken(path, f"its general.alignment is {unit!r:.40}, not a power of two of 8 to {MAX_ALIGNMENT}")
    for _ in range(count):
        name, cursor = _read_text(header, cursor, MAX_NAME, "a tensor's name")
        shown = f"its tensor {name[:80]}"
        if name in infos:
            raise broken(path, f"it has the tensor {name[:80]!r} twice")
        (axes,) = _U32.unpack_from(data, cursor)
        if not 1 <= axes <= 4:
            raise broken(path, f"{shown} has {axes} dimensions, not 1 to 4")
        line = struct.Struct(f"<{axes}QIQ")
        *sizes, number, offset = line.unpack_from(data, cursor + 4)
        cursor += 4 + line.size
        block, elements = BLOCK_TYPES.get(number), math.prod(sizes)
        if block is None:
            gone = f"{GONE.get(number)}, which llama.cpp no longer reads"
            raise broken(path, f"{shown} is of {gone if number in GONE else f'the unknown type {number}'}")
        if not 0 < elements < 2**62:
            raise broken(path, f"{shown} has an impossible shape")
        if sizes[0] % block.numbers:
            what = f"has rows of {sizes[0]} numbers; {block.name} has blocks of {block.numbers}"
            raise broken(path, f"{shown} {what}")
        infos[name] = TensorInfo(block, tuple(sizes[::-1]), offset, elements // block.numbers * block.nbytes)
    begin, end = -(-cursor // unit) * unit, 0
    for name, info in infos.items():
        shown = f"its tensor {name[:80]}"
        if info.offset % unit:
            raise broken(path, f"{shown} begins at {info.offset}, no multiple of the alignment {unit}")
        if info.offset < end:
            raise broken(path, f"{shown} begins at {info.offset}, within or before the one ahead of it")
        end = info.offset + info.nbytes
        if begin + end > len(data):
            raise broken(path, f"it is truncated: {len(data)} bytes, {shown} ends at {begin + end}")
        infos[name] = info._replace(offset=begin + info.offset)
    return infos
