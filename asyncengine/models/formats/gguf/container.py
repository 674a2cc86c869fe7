"""One GGUF file: its header checked against its size, its data mapped.

    "GGUF", version, number of tensors, number of values
    values: key, type, value
    tensors: name, dimensions (innermost first), type, offset into the data
    padding to the alignment, data

Nothing in a file is believed: whatever a header says is checked before memory is taken or an address formed.
"""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncengine.errors import ModelNotFound, UnsupportedModel, shorten
from asyncengine.models.formats.gguf.blocks import BLOCK_TYPES, GONE, BlockType
from asyncengine.models.formats.gguf.metadata import Broken, Cursor, Metadata, broken, read_metadata

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_TENSORS = 65_536
MAX_NAME = 1024
"""Bytes of a tensor's name; llama.cpp's own limit is 64."""
MAX_ALIGNMENT = 2**20


class TensorPlace(NamedTuple):
    """One tensor of a file."""

    kind: BlockType
    shape: tuple[int, ...]
    """Outermost first, as torch has it."""
    offset: int
    """Of its first byte in the file."""
    nbytes: int


class GgufFile:
    """A mapped file. Its memory stays mapped as long as an array of it is held."""

    def __init__(self, path: Path) -> None:
        """Raises `ModelNotFound` for what is no whole GGUF file, `UnsupportedModel` for another version of one."""
        self.path = path
        self.bytes, self._mapping = _mapped(path)
        try:
            self.metadata, self.tensors = _read_header(memoryview(self._mapping), path)
        except Broken as error:
            raise broken(path, error) from None

    def array(self, place: TensorPlace) -> NDArray[np.uint8]:
        """The bytes of a tensor: not to be written."""
        return self.bytes[place.offset : place.offset + place.nbytes]

    def release(self, first: int, last: int) -> None:
        """Let the system take back the whole pages of bytes [first, last); they are read from the file if touched."""
        page = mmap.PAGESIZE
        begin, end = -(-first // page) * page, last // page * page
        if end > begin and hasattr(mmap, "MADV_DONTNEED"):
            self._mapping.madvise(mmap.MADV_DONTNEED, begin, end - begin)


def is_gguf(path: Path) -> bool:
    """Whether a regular file begins as a GGUF file does, whatever its name."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return False
        with path.open("rb") as stream:
            return stream.read(4) == MAGIC
    except OSError:
        return False


class _Mapped:
    """Memory of a mapping for numpy, which would call it read-only and make torch warn of it."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self.mapping = mapping
        view = np.frombuffer(mapping, np.uint8)
        self.__array_interface__: dict[str, Any] = {
            "data": (view.ctypes.data, False), "shape": view.shape, "typestr": "|u1", "version": 3,
        }  # fmt: skip


def _mapped(path: Path) -> tuple[NDArray[np.uint8], mmap.mmap]:
    """A file's bytes. Symbolic links are followed, as the hub's cache and Ollama have them, to regular files only."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ModelNotFound(f"{path} is not a regular file")
        with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise ModelNotFound(f"{path} is not a regular file")
            if found.st_size < 24:
                raise broken(path, f"it has {found.st_size} bytes")
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ModelNotFound(f"{shorten(str(path), 500)} cannot be read: {shorten(str(error), 300)}") from None
    return np.asarray(_Mapped(mapping)), mapping


def _read_header(data: memoryview, path: Path) -> tuple[Metadata, dict[str, TensorPlace]]:
    if data[:4] != MAGIC:
        raise Broken(f"it begins with {bytes(data[:4])!r}")
    cursor = Cursor(data, 4)
    version = cursor.u32()
    if version not in VERSIONS:
        what = "is big-endian" if version & 0xFFFF == 0 and version else f"is version {version}"
        raise UnsupportedModel(
            f"{path}: a GGUF file that {what}; read are the little-endian versions 2 and 3 (convert it with llama.cpp)"
        )
    tensors, values = cursor.u64(), cursor.u64()
    if tensors > MAX_TENSORS:
        raise Broken(f"its header claims {tensors} tensors, at most {MAX_TENSORS}")
    metadata = read_metadata(path, cursor, values)
    return metadata, _read_places(cursor, tensors, _alignment(metadata))


def _alignment(metadata: Metadata) -> int:
    found = metadata.single("general.alignment") if "general.alignment" in metadata else 32
    if isinstance(found, bool) or not isinstance(found, int) or not 8 <= found <= MAX_ALIGNMENT or found & (found - 1):
        raise Broken(f"its general.alignment is {shorten(repr(found), 40)}, not a power of two of 8 to {MAX_ALIGNMENT}")
    return found


def _read_places(cursor: Cursor, count: int, alignment: int) -> dict[str, TensorPlace]:
    """Every tensor, its bytes within the file, one after the other, none in another's."""
    found: dict[str, TensorPlace] = {}
    for _ in range(count):
        name = cursor.text(MAX_NAME, "a tensor's name")
        if name in found:
            raise Broken(f"it has the tensor {name[:80]!r} twice")
        found[name] = _read_place(cursor, name[:80])
    begin = -(-cursor.at // alignment) * alignment
    end = 0
    for name, place in found.items():
        if place.offset % alignment:
            raise Broken(f"its tensor {name[:80]} begins at {place.offset}, no multiple of the alignment {alignment}")
        if place.offset < end:
            raise Broken(f"its tensor {name[:80]} begins at {place.offset}, within or before the one ahead of it")
        end = place.offset + place.nbytes
        if begin + end > cursor.end:
            raise Broken(f"it is truncated: {cursor.end} bytes, its tensor {name[:80]} ends at {begin + end}")
        found[name] = place._replace(offset=begin + place.offset)
    return found


def _read_place(cursor: Cursor, name: str) -> TensorPlace:
    """A tensor's line of the header; the offset still counts from the beginning of the data."""
    axes = cursor.u32()
    if not 1 <= axes <= 4:
        raise Broken(f"its tensor {name} has {axes} dimensions, not 1 to 4")
    shape = tuple(cursor.u64() for _ in range(axes))[::-1]
    number, offset = cursor.u32(), cursor.u64()
    kind = BLOCK_TYPES.get(number)
    if kind is None:
        what = f"{GONE[number]}, which llama.cpp no longer reads" if number in GONE else f"the unknown type {number}"
        raise Broken(f"its tensor {name} is of {what}")
    elements = 1
    for size in shape:
        elements *= size
        if not 0 < elements < 2**62:
            raise Broken(f"its tensor {name} has an impossible shape")
    if shape[-1] % kind.numbers:
        raise Broken(f"its tensor {name} has rows of {shape[-1]} numbers; {kind.name} has blocks of {kind.numbers}")
    return TensorPlace(kind, shape, offset, elements // kind.numbers * kind.nbytes)
