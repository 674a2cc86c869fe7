"""Files that are there whole or not at all, and locks of files."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """A file for this user alone (0600) that takes the name `path` when it is written and on the disk. Until then its
    name begins with a dot and ends as `path`'s does."""
    unfinished = path.with_name(f".{secrets.token_hex(8)}{path.suffix}")
    try:
        with os.fdopen(os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink()
        raise


def locked(descriptor: int) -> bool:
    """Take the lock of an open file until it is closed, or the process ends. False: another process has it.
    Windows has no such lock that lets its holder write: there it is always taken."""
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
