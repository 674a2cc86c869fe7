"""A virtual disk: files in memory that lose, tear, reorder and corrupt what a real disk may.

The rules are POSIX's at their worst. A write is in the page cache until `fsync` of its file has returned; a name that
was made, moved or removed, until `sync_folder` has. When the power fails, any part of what was not synced may be on the
disk, in sectors and in any order; what lies before a later write reads as zeros. When only the process dies, the page
cache survives. Sources: Pillai et al. (OSDI 2014), on what file systems really keep; SQLite's test VFS.
"""

from __future__ import annotations

import errno
import os
import posixpath
import random
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

SECTOR = 512
"""Bytes that are written whole or not at all."""


class ProcessDied(BaseException):
    """The process died in this call. Not an `Exception`, so that no handler catches it."""


class _File:
    """One file's content, as its readers see it and as the disk has it."""

    def __init__(self) -> None:
        self.seen = bytearray()
        self.stable = bytearray()
        self.pending: list[tuple[int, bytes | None]] = []
        """Writes since the last sync: where, and what; None: the file was cut there."""


class _Renaming(NamedTuple):
    """A change of names: `old` is gone, `new` is this file."""

    old: str | None
    new: str | None
    file: _File

    def apply(self, names: dict[str, _File]) -> None:
        if self.old is not None and names.get(self.old) is self.file:
            del names[self.old]
        if self.new is not None:
            names[self.new] = self.file


class VirtualDisk:
    """Files by path. Errors are `OSError`s with the number that a real disk would give."""

    def __init__(self, rng: random.Random, *, capacity: int | None = None) -> None:
        """`capacity`: bytes of all files; a write that does not fit is cut short, then refused with ENOSPC."""
        self.capacity = capacity
        self.calls = 0
        """Calls so far that change something."""
        self.dies_at: int | None = None
        """The number of the call in which the process dies; None: it lives."""
        self.sync_fails_at: int | None = None
        """The number of a call that, if it is a `fsync`, fails with EIO: what it should have synced is dropped, as on
        Linux, and a second `fsync` says nothing of it."""
        self._rng = rng
        self._dead = False
        self.files: dict[str, _File] = {}
        self._stable_names: dict[str, _File] = {}
        self._renamings: list[_Renaming] = []
        """Changes of names since the last sync of their folders."""
        self._open: dict[int, _File] = {}
        self._locks: dict[int, _File] = {}
        """Locked files by the descriptors that hold their locks."""

    def open(self, path: str, *, create: bool = False, exclusive: bool = False) -> int:
        """A descriptor of the file at `path`, which is made if it is not there (`create`). Raises `FileNotFoundError`,
        `FileExistsError` if it must be new (`exclusive`)."""
        self._check_alive()
        if exclusive and path in self.files:
            raise _error(errno.EEXIST, path)
        if create and path not in self.files:
            self._begin_change()
            self._rename(None, path, _File())
        descriptor = max(self._open, default=2) + 1
        self._open[descriptor] = self._named(path)
        return descriptor

    def close(self, descriptor: int) -> None:
        """Close it. Nothing is synced by that."""
        self._opened(descriptor)
        del self._open[descriptor]
        self._locks.pop(descriptor, None)

    def lock(self, descriptor: int) -> bool:
        """Take the file's lock until it is closed, or the process dies. False: it is taken."""
        file = self._opened(descriptor)
        if any(other is file for other in self._locks.values()):
            return False
        self._locks[descriptor] = file
        return True

    def size(self, descriptor: int) -> int:
        return len(self._opened(descriptor).seen)

    def pread(self, descriptor: int, size: int, offset: int) -> bytes:
        """Up to `size` bytes from `offset` on."""
        return bytes(self._opened(descriptor).seen[offset : offset + size])

    def preadv(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill `buffers` one behind the other; the number of bytes that there were."""
        data = self.pread(descriptor, sum(map(len, buffers)), offset)
        start = 0
        for buffer in buffers:
            chunk = data[start : start + len(buffer)]
            buffer[: len(chunk)] = chunk
            start += len(buffer)
        return len(data)

    def pwritev(self, descriptor: int, buffers: Sequence[bytes | bytearray | memoryview], offset: int) -> int:
        """`pwrite` of all `buffers`, one behind the other."""
        return self.pwrite(descriptor, b"".join(buffers), offset)

    def pwrite(self, descriptor: int, data: bytes, offset: int) -> int:
        """The number of bytes written at `offset`, which may be fewer than there are. Raises ENOSPC."""
        file = self._opened(descriptor)
        dies = self._begin_change(dies_here=False)
        if self.capacity is not None:
            room = self.capacity - sum(len(other.seen) for other in self.files.values())
            data = data[: max(0, len(file.seen) + room - offset)]
            if not data:
                raise _error(errno.ENOSPC)
        if dies:
            data = data[: self._rng.randrange(len(data) + 1)]
        _write(file.seen, offset, data)
        file.pending.append((offset, data))
        if dies:
            self._die()
        return len(data)

    def ftruncate(self, descriptor: int, size: int) -> None:
        """Cut the file, or make it longer by zeros."""
        file = self._opened(descriptor)
        self._begin_change()
        _write(file.seen, size, None)
        file.pending.append((size, None))

    def fsync(self, descriptor: int) -> None:
        """Return when the file's content is on the disk (its name: `sync_folder`). Raises EIO."""
        file = self._opened(descriptor)
        dies = self._begin_change(dies_here=False)
        if dies or self.calls == self.sync_fails_at:
            self._settle_some(file)
            if dies:
                self._die()
            raise _error(errno.EIO)
        for offset, data in file.pending:
            _write(file.stable, offset, data)
        file.pending.clear()

    def listdir(self, folder: str) -> list[str]:
        """Names of the files in a folder, in no order that means anything."""
        self._check_alive()
        names = [posixpath.basename(path) for path in self.files if posixpath.dirname(path) == folder]
        self._rng.shuffle(names)
        return names

    def rename(self, old: str, new: str) -> None:
        """Call a file `new`, in the place of one of that name, if there is one. Raises `FileNotFoundError`."""
        file = self._named(old)
        self._begin_change()
        self._rename(old, new, file)

    def unlink(self, path: str) -> None:
        """Remove a file. Raises `FileNotFoundError`."""
        file = self._named(path)
        self._begin_change()
        self._rename(path, None, file)

    def sync_folder(self, folder: str) -> None:
        """Return when the names in a folder are on the disk."""
        self._check_alive()
        self._begin_change()
        within = [change for change in self._renamings if folder in map(posixpath.dirname, filter(None, change[:2]))]
        for change in within:
            change.apply(self._stable_names)
        self._renamings = [change for change in self._renamings if change not in within]

    # ---------------------------------------------------------------- what goes wrong

    def restart(self, *, power_failed: bool) -> None:
        """Begin a new process, which finds the old one's writes, or, if the power failed, what the disk has."""
        self._dead, self.dies_at, self.sync_fails_at = False, None, None
        self._open.clear()
        self._locks.clear()
        if not power_failed:
            return
        for change in self._renamings:
            if self._rng.random() < 0.5:
                change.apply(self._stable_names)
        self._renamings.clear()
        self.files = dict(self._stable_names)
        for file in dict.fromkeys(self.files.values()):
            self._settle_some(file)
            file.seen[:] = file.stable

    def flip_bits(self, count: int) -> None:
        """Flip `count` bits of random files, as a failing disk does."""
        full = [file for file in self.files.values() if file.seen]
        for _ in range(count if full else 0):
            file = self._rng.choice(full)
            offset, bit = self._rng.randrange(len(file.seen)), 1 << self._rng.randrange(8)
            for content in (file.seen, file.stable):
                if offset < len(content):
                    content[offset] ^= bit

    def _settle_some(self, file: _File) -> None:
        """Bring some sectors of what was not synced to the disk, in any order, and lose the rest."""
        pieces: list[tuple[int, bytes | None]] = []
        for offset, data in file.pending:
            pieces += [(offset, None)] if data is None else _sectors(offset, data)
        kept = [piece for piece in pieces if self._rng.random() < 0.5]
        if self._rng.random() < 0.5:
            self._rng.shuffle(kept)
        for offset, data in kept:
            _write(file.stable, offset, data)
        file.pending.clear()

    # ---------------------------------------------------------------- inside

    def _rename(self, old: str | None, new: str | None, file: _File) -> None:
        self._renamings.append(_Renaming(old, new, file))
        self._renamings[-1].apply(self.files)

    def _begin_change(self, dies_here: bool = True) -> bool:
        """Count one call. Whether the process dies in it; `dies_here`: at once."""
        self.calls += 1
        if dies_here and self.calls == self.dies_at:
            self._die()
        return self.calls == self.dies_at

    def _die(self) -> None:
        self._dead = True
        raise ProcessDied(f"in call {self.calls}")

    def _check_alive(self) -> None:
        if self._dead:
            raise ProcessDied("the process is dead")

    def _opened(self, descriptor: int) -> _File:
        self._check_alive()
        if descriptor not in self._open:
            raise _error(errno.EBADF)
        return self._open[descriptor]

    def _named(self, path: str) -> _File:
        self._check_alive()
        if path not in self.files:
            raise _error(errno.ENOENT, path)
        return self.files[path]


def _error(number: int, path: str | None = None) -> OSError:
    return OSError(number, os.strerror(number), path)


def _sectors(offset: int, data: bytes) -> list[tuple[int, bytes | None]]:
    """A write in pieces, none of which crosses a sector's boundary."""
    end = offset + len(data)
    cuts = sorted({offset, end, *range(-(-offset // SECTOR) * SECTOR, end, SECTOR)})
    return [(start, data[start - offset : stop - offset]) for start, stop in pairwise(cuts)]


def _write(content: bytearray, offset: int, data: bytes | None) -> None:
    """Write `data` there; None: the content ends there."""
    content.extend(bytes(max(0, offset - len(content))))
    if data is None:
        del content[offset:]
    else:
        content[offset : offset + len(data)] = data
