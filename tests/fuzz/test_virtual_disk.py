"""The virtual disk does what a real one may, and finds it out if a log relies on what none promises."""

from __future__ import annotations

import errno
import random
import struct
import zlib
from collections.abc import Callable

import pytest

from asyncengine.testing.world.disk import SECTOR, ProcessDied, VirtualDisk

ENTRY = struct.Struct("<QQII")


class Log:
    """A toy store: values in one file, and in another where each of them lies, which is written after it."""

    index_first = False
    looks_at_checksums = True

    def __init__(self, disk: VirtualDisk) -> None:
        self.disk = disk
        self.data, self.index = disk.open("/log/data", create=True), disk.open("/log/index", create=True)
        disk.sync_folder("/log")
        self.end = disk.size(self.data)
        self.entries = disk.size(self.index) // ENTRY.size

    def put(self, value: bytes) -> None:
        steps = [self._put_data, self._put_index]
        for step in reversed(steps) if self.index_first else steps:
            step(value)
        self.end += len(value)
        self.entries += 1

    def _put_data(self, value: bytes) -> None:
        if self.disk.pwrite(self.data, value, self.end) < len(value):
            raise OSError(errno.ENOSPC, "cut short")
        self.disk.fsync(self.data)

    def _put_index(self, value: bytes) -> None:
        entry = ENTRY.pack(self.end, len(value), zlib.crc32(value), 0)
        entry = entry[:-4] + struct.pack("<I", zlib.crc32(entry))
        if self.disk.pwrite(self.index, entry, self.entries * ENTRY.size) < len(entry):
            raise OSError(errno.ENOSPC, "cut short")
        self.disk.fsync(self.index)

    def values(self) -> list[bytes]:
        found = []
        for place in range(self.entries):
            entry = self.disk.pread(self.index, ENTRY.size, place * ENTRY.size)
            offset, size, checksum, own = ENTRY.unpack(entry)
            if own != zlib.crc32(entry[:-4] + bytes(4)):
                continue
            value = self.disk.pread(self.data, size, offset)
            if not self.looks_at_checksums or zlib.crc32(value) == checksum:
                found.append(value)
        return found


def live(kind: type[Log], seed: int, *, flips: int = 0) -> None:
    """Values are put until the process dies; who comes after it reads no other ones, and all that were there."""
    rng = random.Random(seed)
    disk = VirtualDisk(rng, capacity=rng.choice([None, 5000]))
    disk.dies_at = rng.randrange(1, 60)
    put: list[bytes] = []
    done = 0
    try:
        log = kind(disk)
        while True:
            put.append(rng.randbytes(rng.choice([1, 100, SECTOR, 3000])))
            try:
                log.put(put[-1])
            except OSError:
                break
            done = len(put)
    except ProcessDied:
        pass
    power_failed = rng.random() < 0.7
    disk.restart(power_failed=power_failed)
    disk.flip_bits(flips)
    found = kind(disk).values()
    assert set(found) <= set(put), "a value that nobody put"
    if not flips:
        assert set(put[:done]) <= set(found), "a value is lost that was there"


@pytest.mark.parametrize("seed", range(4))
def test_a_careful_log_survives_everything(seed: int) -> None:
    for each in range(150):
        live(Log, seed * 1000 + each)
        live(Log, seed * 1000 + each, flips=5)


def test_order_alone_is_enough_where_no_bits_flip() -> None:
    careful = type("Trusting", (Log,), {"looks_at_checksums": False})
    for seed in range(300):
        live(careful, seed)


def find(kind: type[Log], **options: int) -> None:
    for seed in range(500):
        live(kind, seed, **options)


def test_an_index_written_before_its_data_is_found() -> None:
    hasty = type("Hasty", (Log,), {"looks_at_checksums": False, "index_first": True})
    with pytest.raises(AssertionError, match="nobody put"):
        find(hasty)


def test_a_checksum_not_looked_at_is_found() -> None:
    trusting = type("Trusting", (Log,), {"looks_at_checksums": False})
    with pytest.raises(AssertionError, match="nobody put"):
        find(trusting, flips=5)


def test_a_log_that_does_not_sync_its_folder_is_found() -> None:
    class Forgetful(Log):
        def __init__(self, disk: VirtualDisk) -> None:
            disk.sync_folder = lambda folder: None  # type: ignore[method-assign]
            super().__init__(disk)

    with pytest.raises(AssertionError, match="is lost"):
        find(Forgetful)


# ---------------------------------------------------------------- the rules


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
