"""Weights in a file as they lie in memory, packed for the kernels, which all processes of a machine map.

    <folder>/<key>.packed      a header, then the memory of an `Arena`; each part of it begins with a huge page

The key is a digest of all that these bytes follow from: the content of the checkpoint's files, the code, the CPU's
features, and for each tensor its name, its place in the file and its stored form. A file is written once, under the
folder's lock, and has its name when it is on the disk whole: whoever is killed on the way leaves one without. It is
mapped privately: what is written there later, by an update of the weights, is this process's own.

The system holds such pages once for everybody (as llama.cpp's mapped GGUF files), and drops them when memory is short.
A checkpoint itself is not mapped: whoever writes it anew in place would change, or end, a running model.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import mmap
import os
import shutil
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from asyncengine.execution.device.arena import MappedPart
from asyncengine.execution.layers.options import LayerOptions
from asyncengine.execution.layers.stored import TensorSlot
from asyncengine.execution.models.description import ModelDescription
from asyncengine.execution.models.identity import digest_of, digest_of_code, machine, stamp_of, versions, weights_digest
from asyncengine.files import written_whole
from asyncengine.kernels.api import cache_root

logger = logging.getLogger("asyncengine")

_LEAST = 2**25
"""Bytes of weights from which a file pays: fewer are packed in a tenth of a second."""
_ALIGNED = 2**21
"""Bytes of a huge page, of which the system may map a file's."""
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
"""Flags of Linux' mmap that Python has no names for."""


class PackedFile:
    """The file of one model's weights, which need not be there yet."""

    def __init__(self, path: Path, parts: list[MappedPart], most: int, sources: Sequence[Path]) -> None:
        """`parts`: the memory that it is mapped to. `most`: bytes of all files in its folder. `sources`: the
        checkpoint's files."""
        self.path, self._most, self._sources = path, most, sources
        self._stamps = [stamp_of(source) for source in sources]
        self._parts, self._size = [], _ALIGNED
        for part in parts:
            self._parts.append((part, self._size))
            self._size += -(-part.size // _ALIGNED) * _ALIGNED

    @property
    def _header(self) -> bytes:
        return hashlib.sha256(f"{self.path.stem} {self._size}".encode()).digest()

    def place(self, address: int) -> int | None:
        """The byte of the file that is mapped there; None: none is."""
        found = ((part, begin) for part, begin in self._parts if 0 <= address - part.address < part.size)
        return next((begin + address - part.address for part, begin in found), None)

    def map(self) -> bool:
        """Put the file's pages in the place of the memory. False: there is no such file that is whole, so that the
        memory has to be filled."""
        try:
            file = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:
            return False
        try:
            found = os.fstat(file)
            owned = found.st_uid in (os.geteuid(), 0) and not found.st_mode & 0o022
            if not (owned and stat.S_ISREG(found.st_mode) and found.st_size == self._size):
                return False
            header = self._header
            if os.pread(file, len(header), 0) != header:
                return False
            with suppress(OSError):
                os.utime(file)  # the files used last are kept longest
            return all(_map(file, begin, part) for part, begin in self._parts)
        finally:
            os.close(file)

    def write(self) -> bool:
        """Write the memory into the file, unless somebody else has meanwhile, and map it: now it is everybody's. False:
        it cannot be, or the checkpoint has been written since its digest was made."""
        try:
            with _locked(self.path.parent):
                if [stamp_of(source) for source in self._sources] != self._stamps:
                    return False
                if not self.map():
                    self._make_room()
                    with written_whole(self.path) as file:
                        file.write(self._header)
                        for part, begin in self._parts:
                            file.seek(begin)
                            file.write((ctypes.c_char * part.size).from_address(part.address))
                        file.truncate(self._size)
                return self.map()
        except OSError as error:
            _say(self.path.parent, str(error))
            return False

    def _make_room(self) -> None:
        """Remove what others were killed over while they had the lock, and the oldest files beyond the most bytes.
        Raises `OSError` where the disk would be nearly full."""
        folder, room = self.path.parent, self._most - self._size
        for left in folder.glob(".*.packed"):
            left.unlink(missing_ok=True)
        for file in sorted(folder.glob("[!.]*.packed"), key=lambda file: file.stat().st_mtime, reverse=True):
            room -= file.stat().st_size
            if room < 0:
                file.unlink(missing_ok=True)
        free = shutil.disk_usage(folder).free
        if free < 2 * self._size:
            raise OSError(f"they take {self._size >> 20} MiB, and {free >> 20} MiB of the disk are free")


def packed_file(
    described: ModelDescription, slots: Mapping[str, TensorSlot], names: Mapping[str, str], options: LayerOptions,
    kept_in: str | bool | None, most: int,
) -> tuple[PackedFile | None, dict[str, str]]:  # fmt: skip
    """The file for the weights of `slots`, and the tensors that are not in it, in the form of `names`: the slot of each
    of the checkpoint's. None: none is kept, since the settings, the size, the device or the folder are against it.
    `kept_in`: the setting `weight_cache_dir`. `most`: bytes of all files there."""
    parts = options.memory.parts()
    if kept_in is None or not _LEAST <= sum(part.size for part in parts) <= most - _ALIGNED:
        return None, dict(names)
    folder = Path()
    try:
        folder = _folder_of(kept_in)
        file = PackedFile(folder, parts, most, described.checkpoint.files)
        held: dict[str, list[object]] = {}
        for name, slot in names.items():
            begins = [file.place(tensor.data_ptr()) for tensor in slots[slot].memory]
            if begins and None not in begins:
                shapes = [(tuple(tensor.shape), str(tensor.dtype)) for tensor in slots[slot].memory]
                held[name] = [slot, begins, shapes, slots[slot].shape, repr(slots[slot].takes)]
        weights = weights_digest(described.checkpoint.files, folder)
        model = [weights, str(described.dtype), described.bits, options.kernels.name]
        ranks = options.ranks and (options.ranks.rank, options.ranks.size)
        code = [digest_of_code(), *versions(), *machine(steady=True), _kernels(options)]
        key = digest_of([held, [part.size for part in parts], model, ranks, repr(described.structure), code])
        file.path = folder / f"{key[:32]}.packed"
    except (OSError, RuntimeError) as error:
        _say(folder, str(error))
        return None, dict(names)
    return file, {name: slot for name, slot in names.items() if name not in held}


def _kernels(options: LayerOptions) -> str:
    """The CPU that kernels are compiled for, which numba's own settings may say."""
    if not options.compiled:
        return ""
    from numba.core.registry import cpu_target

    from asyncengine.kernels.api import UNIT

    return f"{cpu_target.target_context.codegen().magic_tuple()} {UNIT}"


def _folder_of(setting: str | bool) -> Path:
    """The folder, made for this user alone if it is not there. Raises `OSError` where others could put into it what
    this process would believe, `RuntimeError` without a home."""
    root = cache_root(os.environ, sys.platform) / "weights" if isinstance(setting, bool) else Path(setting)
    folder = root.expanduser()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid not in (os.geteuid(), 0) or found.st_mode & 0o022:
        raise PermissionError(f"{folder} belongs to somebody else, or others may write to it")
    return folder


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """While it is entered, nobody else writes packed files there; the lock of a process that is killed is free."""
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _map(file: int, begin: int, part: MappedPart) -> bool:
    """Map the file from `begin` on over a part of memory. False: the system cannot."""
    call = ctypes.CDLL(None).mmap
    address, size, number, offset = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_long
    call.restype, call.argtypes = address, [address, size, number, number, number, offset]
    rights, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED | _MAP_NORESERVE
    return bool(call(part.address, part.size, rights, flags, file, begin) == part.address)


def _say(folder: Path, reason: str) -> None:
    logger.warning(
        "packed weights are not kept in %s, so every load packs them and no two processes share them: %s (see "
        "weight_cache_dir)", folder, reason,
    )  # fmt: skip
