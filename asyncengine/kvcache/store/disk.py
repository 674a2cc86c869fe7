"""The calls to an operating system that a store makes, so that tests can make them fail (`testing.world.disk`)."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

from asyncengine.files import locked
from asyncengine.kvcache.store.record import Buffer

_MOST_BUFFERS = 512
"""Buffers of one call; POSIX promises 16, Linux and macOS take 1024."""


class Disk(Protocol):
    """Files of a folder. Every call raises `OSError`."""

    def open(self, path: str, *, create: bool = False) -> int:
        """A descriptor of a file, for reading and, if that is allowed, writing; made if it is not there (`create`)."""

    def close(self, descriptor: int, /) -> None: ...

    def size(self, descriptor: int) -> int: ...

    def preadv(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill `buffers` one behind the other; the number of bytes that there were."""

    def pwritev(self, descriptor: int, buffers: Sequence[Buffer], offset: int) -> int:
        """Write `buffers` one behind the other; the number of bytes written, which may be fewer than there are."""

    def ftruncate(self, descriptor: int, size: int, /) -> None: ...

    def fsync(self, descriptor: int, /) -> None: ...

    def lock(self, descriptor: int) -> bool:
        """Take the file's lock until it is closed. False: another process has it."""

    def listdir(self, folder: str, /) -> list[str]: ...

    def unlink(self, path: str, /) -> None: ...

    def sync_folder(self, folder: str) -> None:
        """Return when the names in a folder are on the disk."""


class SystemDisk:
    """`Disk` of this machine. Files are the user's alone (0600); those of others are refused, and so are links."""

    close = staticmethod(os.close)
    ftruncate = staticmethod(os.ftruncate)
    fsync = staticmethod(os.fsync)
    listdir = staticmethod(os.listdir)
    unlink = staticmethod(os.unlink)
    lock = staticmethod(locked)

    def open(self, path: str, *, create: bool = False) -> int:
        flags = os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
        try:
            descriptor = os.open(path, flags | os.O_RDWR | (os.O_CREAT if create else 0), 0o600)
        except OSError as error:
            if create or error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            descriptor = os.open(path, flags | os.O_RDONLY)
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
            os.close(descriptor)
            raise PermissionError(errno.EPERM, "not a file that only this user can write", path)
        return descriptor

    def size(self, descriptor: int) -> int:
        return os.fstat(descriptor).st_size

    def preadv(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        return _in_chunks(partial(os.preadv, descriptor), buffers, offset)

    def pwritev(self, descriptor: int, buffers: Sequence[Buffer], offset: int) -> int:
        return _in_chunks(partial(os.pwritev, descriptor), buffers, offset)

    def sync_folder(self, folder: str) -> None:
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def opened(disk: Disk, path: str, *, create: bool = False) -> Iterator[int]:
    """A descriptor of a file, which is closed behind the block. Raises `OSError`."""
    descriptor = disk.open(path, create=create)
    try:
        yield descriptor
    finally:
        disk.close(descriptor)


def _in_chunks(transfer: Callable[[Sequence[Any], int], int], buffers: Sequence[Buffer], offset: int) -> int:
    """Bytes that `transfer` of (buffers, offset) reads or writes, of as many buffers at once as the system takes."""
    done = 0
    for start in range(0, len(buffers), _MOST_BUFFERS):
        chunk = buffers[start : start + _MOST_BUFFERS]
        count = transfer(chunk, offset + done)
        done += count
        if count < sum(len(buffer) for buffer in chunk):
            break
    return done
