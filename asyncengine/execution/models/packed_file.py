"""Cache file of weights as they lie in memory, packed for the kernels, which all processes of a machine map.

    <folder>/<key>.packed      a header, then the regions of an `Arena`, each at a multiple of a huge page

The key is a digest of all that these bytes depend on: the content of the checkpoint's files, the code, the CPU's
features, and for each tensor its name, its offset in the file and its stored form. A file is written under the folder's
lock and renamed to its final name once it is complete on disk, so that a killed writer leaves none that could be read.
It is mapped copy-on-write: an update of the weights changes this process's pages alone.

The page cache holds such pages once for all processes (as for llama.cpp's mapped GGUF files), and drops them if memory
is short. The checkpoint itself is not mapped: overwriting it in place would change, or crash, a running model.
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

from asyncengine.execution.device.arena import MappedRegion
from asyncengine.execution.layers.options import LayerOptions
from asyncengine.execution.layers.stored import TensorSlot
from asyncengine.execution.models.description import ModelDescription
from asyncengine.execution.models.identity import digest_of, digest_of_code, machine, stamp_of, versions, weights_digest
from asyncengine.files import written_whole
from asyncengine.kernels.api import cache_root

logger = logging.getLogger("asyncengine")

_LEAST = 2**25
"""Least bytes of weights for a file: fewer are packed in a tenth of a second."""
_ALIGNED = 2**21
"""Bytes of a huge page. Regions are aligned to it so that the system may map the file in huge pages."""
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
"""Flags of Linux's mmap that Python's `mmap` module does not define."""


class PackedFile:
    """The cache file of one model's weights, which need not exist yet."""

    def __init__(self, path: Path, regions: list[MappedRegion], most: int, sources: Sequence[Path]) -> None:
        """`regions`: the memory that the file is mapped to. `most`: limit in bytes of all files in its folder.
        `sources`: the checkpoint's files."""
        self.path, self._most, self._sources = path, most, sources
        self._stamps = [stamp_of(source) for source in sources]
        self._regions, self._size = [], _ALIGNED
        for region in regions:
            self._regions.append((region, self._size))
            self._size += -(-region.size // _ALIGNED) * _ALIGNED

    @property
    def _header(self) -> bytes:
        return hashlib.sha256(f"{self.path.stem} {self._size}".encode()).digest()

    def offset_of(self, address: int) -> int | None:
        """The offset in the file of a byte in memory; None if the byte lies in none of the regions."""
        offsets = ((region, begin) for region, begin in self._regions if 0 <= address - region.address < region.size)
        return next((begin + address - region.address for region, begin in offsets), None)

    def map(self) -> bool:
        """Map the file over the regions. False if there is no complete, trusted file, so that the caller must fill the
        memory."""
        try:
            file = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:
            return False
        try:
            status = os.fstat(file)
            # a file that another user could write might hold any weights
            owned = status.st_uid in (os.geteuid(), 0) and not status.st_mode & 0o022
            if not (owned and stat.S_ISREG(status.st_mode) and status.st_size == self._size):
                return False
            header = self._header
            if os.pread(file, len(header), 0) != header:
                return False
            with suppress(OSError):
                os.utime(file)  # `_make_room` removes the files that were used longest ago
            return all(_map(file, begin, region) for region, begin in self._regions)
        finally:
            os.close(file)

    def write(self) -> bool:
        """Write the memory into the file, unless another process has done so meanwhile, and map it, so that its pages
        are shared. False if that fails, or if the checkpoint has changed since its digest was computed."""
        try:
            with _locked(self.path.parent):
                if [stamp_of(source) for source in self._sources] != self._stamps:
                    return False
                # another process may have written it while this one waited for the lock
                if not self.map():
                    self._make_room()
                    with written_whole(self.path) as file:
                        file.write(self._header)
                        for region, begin in self._regions:
                            file.seek(begin)
                            file.write((ctypes.c_char * region.size).from_address(region.address))
                        file.truncate(self._size)
                return self.map()
        except OSError as error:
            _say(self.path.parent, str(error))
            return False

    def _make_room(self) -> None:
        """Remove unfinished files of killed writers, and the least recently used files beyond the limit. Raises
        `OSError` if the disk would become nearly full."""
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
    """The cache file for the weights of `slots`, and those of `names` that it does not hold. `names`: the slot of each
    of the checkpoint's tensors. The file is None if settings, size, device or folder do not allow one.
    `kept_in`: the setting `weight_cache_dir`. `most`: limit in bytes of all files there."""
    regions = options.memory.regions()
    if kept_in is None or not _LEAST <= sum(region.size for region in regions) <= most - _ALIGNED:
        return None, dict(names)
    folder = Path()
    try:
        folder = _folder_of(kept_in)
        file = PackedFile(folder, regions, most, described.checkpoint.files)
        packed: dict[str, list[object]] = {}
        for name, slot in names.items():
            begins = [file.offset_of(tensor.data_ptr()) for tensor in slots[slot].memory]
            if begins and None not in begins:
                shapes = [(tuple(tensor.shape), str(tensor.dtype)) for tensor in slots[slot].memory]
                packed[name] = [slot, begins, shapes, slots[slot].shape, repr(slots[slot].takes)]
        weights = weights_digest(described.checkpoint.files, folder)
        model = [weights, str(described.dtype), described.bits, options.kernels.name]
        ranks = options.ranks and (options.ranks.rank, options.ranks.size)
        code = [digest_of_code(), *versions(), *machine(steady=True), _kernels(options)]
        key = digest_of([packed, [region.size for region in regions], model, ranks, repr(described.structure), code])
        file.path = folder / f"{key[:32]}.packed"
    except (OSError, RuntimeError) as error:
        _say(folder, str(error))
        return None, dict(names)
    return file, {name: slot for name, slot in names.items() if name not in packed}


def _kernels(options: LayerOptions) -> str:
    """The CPU that kernels are compiled for, which numba's settings can override, and the kernels' unit of packing."""
    if not options.compiled:
        return ""
    from numba.core.registry import cpu_target

    from asyncengine.kernels.api import UNIT

    return f"{cpu_target.target_context.codegen().magic_tuple()} {UNIT}"


def _folder_of(setting: str | bool) -> Path:
    """The folder, created for this user alone if it does not exist. Raises `OSError` if other users could place files
    there that this process would trust, `RuntimeError` for a user without a home."""
    root = cache_root(os.environ, sys.platform) / "weights" if isinstance(setting, bool) else Path(setting)
    folder = root.expanduser()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o022:
        raise PermissionError(f"{folder} belongs to somebody else, or others may write to it")
    return folder


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Exclusive lock on writing packed files in the folder. The system frees the lock of a killed process."""
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _map(file: int, begin: int, region: MappedRegion) -> bool:
    """Map the file from offset `begin` on over a region of memory. False if the system refuses."""
    call = ctypes.CDLL(None).mmap
    address, size, number, offset = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_long
    call.restype, call.argtypes = address, [address, size, number, number, number, offset]
    rights, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED | _MAP_NORESERVE
    return bool(call(region.address, region.size, rights, flags, file, begin) == region.address)


def _say(folder: Path, reason: str) -> None:
    logger.warning(
        "packed weights are not kept in %s, so every load packs them and no two processes share them: %s (see "
        "weight_cache_dir)", folder, reason,
    )  # fmt: skip
