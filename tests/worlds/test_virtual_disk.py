"""The virtual disk does what a real one may. That it finds who relies on more, kvcache/store/test_segments.py tells."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable

import pytest

from asyncengine.testing.world.disk import SECTOR, ProcessDied, VirtualDisk


def outcomes(work: Callable[[VirtualDisk], object], *, power_failed: bool = True) -> set[object]:
    """Everything that a new process may find at /a/f, over many seeds; None: no file."""
    found: set[object] = set()
    for seed in range(60):
        disk = VirtualDisk(random.Random(seed))
        work(disk)
        disk.restart(power_failed=power_failed)
        try:
            descriptor = disk.open("/a/f")
        except FileNotFoundError:
            found.add(None)
        else:
            found.add(disk.pread(descriptor, 10**6, 0))
    return found


def write(disk: VirtualDisk, data: bytes, path: str = "/a/f") -> int:
    descriptor = disk.open(path, create=True)
    disk.pwrite(descriptor, data, 0)
    return descriptor


def test_what_was_not_synced_may_be_torn_or_gone() -> None:
    two = b"x" * SECTOR + b"y" * SECTOR

    def unsynced(disk: VirtualDisk) -> None:
        write(disk, two)
        disk.sync_folder("/a")

    assert outcomes(unsynced) == {b"", two, two[:SECTOR], bytes(SECTOR) + two[SECTOR:]}
    assert outcomes(unsynced, power_failed=False) == {two}

    def unnamed(disk: VirtualDisk) -> None:
        disk.fsync(write(disk, two))

    assert outcomes(unnamed) == {None, two}


def test_what_was_synced_stays() -> None:
    def synced(disk: VirtualDisk) -> None:
        disk.fsync(write(disk, b"new", "/a/tmp"))
        disk.sync_folder("/a")
        disk.rename("/a/tmp", "/a/f")
        disk.sync_folder("/a")

    assert outcomes(synced) == {b"new"}

    def replaced(disk: VirtualDisk) -> None:
        disk.fsync(write(disk, b"old"))
        disk.fsync(write(disk, b"new", "/a/tmp"))
        disk.sync_folder("/a")
        disk.rename("/a/tmp", "/a/f")

    assert outcomes(replaced) == {b"old", b"new"}

    def removed(disk: VirtualDisk) -> None:
        disk.fsync(write(disk, b"old"))
        disk.sync_folder("/a")
        disk.unlink("/a/f")

    assert outcomes(removed) == {b"old", None}


def test_a_failed_sync_loses_what_it_should_have_kept() -> None:
    def failed(disk: VirtualDisk) -> None:
        descriptor = write(disk, b"x")
        disk.sync_folder("/a")
        disk.sync_fails_at = disk.calls + 1
        with pytest.raises(OSError, match="Input/output"):
            disk.fsync(descriptor)
        assert disk.pread(descriptor, 9, 0) == b"x"
        disk.fsync(descriptor)  # says nothing of it

    assert outcomes(failed) == {b"", b"x"}


def test_a_full_disk_cuts_a_write_short_then_refuses() -> None:
    disk = VirtualDisk(random.Random(1), capacity=5)
    descriptor = disk.open("/a/f", create=True, exclusive=True)
    assert disk.pwrite(descriptor, b"abcdefgh", 0) == 5
    with pytest.raises(OSError, match="No space") as caught:
        disk.pwrite(descriptor, b"x", 5)
    assert caught.value.errno == errno.ENOSPC
    assert disk.pwrite(descriptor, b"AB", 0) == 2
    disk.ftruncate(descriptor, 1)
    assert disk.pread(descriptor, 9, 0) == b"A"


def test_a_process_dies_in_the_midst_of_a_write() -> None:
    left = set()
    for seed in range(40):
        disk = VirtualDisk(random.Random(seed))
        descriptor = write(disk, b"")
        disk.dies_at = disk.calls + 1
        with pytest.raises(ProcessDied):
            disk.pwrite(descriptor, b"abc", 0)
        with pytest.raises(ProcessDied):
            disk.pread(descriptor, 1, 0)
        disk.restart(power_failed=False)
        left.add(disk.pread(disk.open("/a/f"), 9, 0))
    assert left == {b"", b"a", b"ab", b"abc"}


def test_errors_are_those_of_a_real_disk() -> None:
    disk = VirtualDisk(random.Random(1))
    with pytest.raises(FileNotFoundError):
        disk.open("/a/f")
    descriptor = disk.open("/a/f", create=True)
    with pytest.raises(FileExistsError):
        disk.open("/a/f", create=True, exclusive=True)
    with pytest.raises(FileNotFoundError):
        disk.rename("/a/g", "/a/h")
    disk.close(descriptor)
    with pytest.raises(OSError, match="Bad file descriptor"):
        disk.pread(descriptor, 1, 0)
    assert disk.listdir("/a") == ["f"]
    disk.unlink("/a/f")
    with pytest.raises(FileNotFoundError):
        disk.unlink("/a/f")
    assert disk.listdir("/a") == []
