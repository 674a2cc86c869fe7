"""Records in a folder: append-only segments, each a file of records and an index of them, and a dictionary in memory.

    <fingerprint>-<number>.data     records (`record`), one behind the other
    <fingerprint>-<number>.index    the head of each, and where it lies; written when the records are on the disk
    <fingerprint>.lock              locked by the one process that writes records of this fingerprint

A folder may hold records of any number of fingerprints; a store sees its own alone. Only whole entries of an
index count: bytes that a process that died, or a disk without power, left behind the last one are cut off, and the
next records go there. Where the bytes of all files exceed the budget, the oldest segments go as a whole.

One thread appends; any threads read. Damage on a disk is detected before a record is used: a record counts
only if its head is the one in memory, to the last token, and its payload has the head's checksum.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import posixpath
import re
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from asyncengine.kvcache.store.disk import Disk, opened
from asyncengine.kvcache.store.record import MAGIC, Buffer, Header, RecordError, StoreCounts, checksum
from asyncengine.step import RecordType

logger = logging.getLogger("asyncengine")

MOST_RECORDS = 2_000_000
"""Records in memory, some 400 bytes each: beyond that the oldest segments go, as well."""
_SEGMENT = 256 * 2**20
"""Bytes of a segment, where the budget is large."""
_MOST_FAILURES = 3
"""Failed writes in a row after which nothing is written any more."""
_ENTRY_TAIL = struct.Struct("<QI")
"""Offset of a record, and the CRC-32 of its entry up to there."""
NAME = re.compile(r"([0-9a-f]{32})-(\d{8,})\.(data|index)")


class Entry(NamedTuple):
    """Position of a record in the folder."""

    segment: int
    offset: int
    header: Header

    @property
    def end(self) -> int:
        """Offset of the first byte behind the record."""
        return self.offset + self.header.head_size + self.header.size


Record = tuple[Header, Sequence[Buffer], Callable[[], bool]]
"""Header (its checksum does not matter), payload, and whether the payload is still what it was; asked after writing."""


class _Active:
    """The segment that records are appended to."""

    def __init__(self, number: int, data: int, index: int, data_end: int, index_end: int) -> None:
        self.number = number
        self.data, self.index = data, index
        self.data_end, self.index_end = data_end, index_end
        """Bytes of the two files that are known to be whole."""
        self.end = data_end
        """The next record goes here."""
        self.staged: list[Entry] = []
        """Records that are written, and not in the index yet."""


class SegmentStore:
    """Records of one fingerprint in a folder that exists."""

    def __init__(self, disk: Disk, folder: str, fingerprint: bytes, budget: int) -> None:
        """`budget`: bytes of all files in the folder. Raises `OSError` if the folder cannot be listed."""
        self.fingerprint = fingerprint
        self.budget = budget
        self.bytes_read = self.bytes_written = self.damaged = self.failures = 0
        self._disk, self._folder = disk, folder
        self._prefix = fingerprint.hex()[:32]
        self._segment_bytes = max(1, min(_SEGMENT, budget // 8))
        self._entries: dict[tuple[bytes, RecordType], Entry] = {}
        self._active: _Active | None = None
        self._failed_in_a_row = 0
        self._lock = self._take_lock()
        self._scan()

    @property
    def writable(self) -> bool:
        """Whether this process writes the records of this fingerprint."""
        return self._lock is not None

    @property
    def counts(self) -> StoreCounts:
        return StoreCounts(len(self._entries), self.bytes_read, self.bytes_written, self.damaged, self.failures)

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, digest: bytes, record_type: RecordType) -> Header | None:
        """Header of the record of a page's digest, as far as is known without reading it."""
        entry = self._entries.get((digest, record_type))
        return None if entry is None else entry.header

    def newest(self, count: int) -> list[Header]:
        """Headers of up to `count` records, those found or written last first."""
        return [entry.header for entry in list(self._entries.values())[: -count - 1 : -1]]

    def close(self) -> None:
        """Let others write. Idempotent."""
        self._leave_segment()
        self._unlock()

    # ---------------------------------------------------------------- reading

    def read(self, expected: Header, buffers: Sequence[memoryview]) -> bool:
        """Fill `buffers` with the payload of the record of `expected`. False: it is not there, or not whole; then the
        buffers hold anything, and it is not found again."""
        key = expected.digest, expected.type
        entry = self._entries.get(key)
        if entry is None:
            return False
        header, path = entry.header, self._path(entry.segment, "data")
        head = memoryview(bytearray(header.head_size))
        try:
            with opened(self._disk, path) as descriptor:
                count = self._disk.preadv(descriptor, [head, *buffers], entry.offset)
        except OSError as error:
            self.failures += 1
            self._entries.pop(key, None)
            logger.warning("a record of the prefix cache cannot be read: %s", error)
            return False
        whole = header.size == sum(len(buffer) for buffer in buffers) and count == len(head) + header.size
        same = whole and head == header.pack() and (header.parent, header.tokens) == (expected.parent, expected.tokens)
        if not same or checksum(buffers) != header.checksum:
            self.damaged += 1
            self._entries.pop(key, None)
            return False
        self.bytes_read += count
        return True

    # ---------------------------------------------------------------- writing

    def append(self, records: Iterable[Record]) -> int:
        """Write records that are not there yet; returns how many. When it returns they are on the disk, and found.
        Errors of the disk are counted, and nothing of their records is found."""
        try:
            count = sum(map(self._stage, records))
            self._commit()
        except OSError as error:
            self._give_up_segment(error)
            return 0
        self._failed_in_a_row = 0
        return count

    def _stage(self, record: Record) -> bool:
        """Write a record behind the last one, without an entry in the index."""
        header, buffers, is_intact = record
        if self._lock is None or (header.digest, header.type) in self._entries:
            return False
        header = header._replace(fingerprint=self.fingerprint, checksum=checksum(buffers))
        head = header.pack()
        whole = len(head) + header.size
        active = self._segment_for(whole)
        if self._disk.pwritev(active.data, [head, *buffers], active.end) < whole:
            raise OSError(errno.ENOSPC, "a record was cut short")
        if not is_intact():
            return False  # the next record is written over it
        active.staged.append(Entry(active.number, active.end, header))
        active.end += whole
        return True

    def _commit(self) -> None:
        """Enter the staged records into the index: first the records must be on the disk, or an entry could survive a
        power failure that its record does not."""
        active = self._active
        if active is None or not active.staged:
            return
        self._disk.fsync(active.data)
        heads = (entry.header.pack() + struct.pack("<Q", entry.offset) for entry in active.staged)
        entries = b"".join(head + struct.pack("<I", zlib.crc32(head)) for head in heads)
        if self._disk.pwritev(active.index, [entries], active.index_end) < len(entries):
            raise OSError(errno.ENOSPC, "an index was cut short")
        self._disk.fsync(active.index)
        self.bytes_written += active.end - active.data_end + len(entries)
        active.data_end, active.index_end = active.end, active.index_end + len(entries)
        for entry in active.staged:
            self._entries[entry.header.digest, entry.header.type] = entry
        active.staged = []

    def _segment_for(self, size: int) -> _Active:
        """The segment that a record of `size` bytes is appended to: where this one is full, a new one."""
        active = self._active
        if active is not None and (active.end + size <= self._segment_bytes or not active.end):
            return active
        self._commit()
        self._leave_segment()
        segments = self._segments()
        self._make_room(segments)
        number = 1 + max((number for _, number in segments), default=0)
        data = self._disk.open(self._path(number, "data"), create=True)
        index = self._disk.open(self._path(number, "index"), create=True)
        self._active = _Active(number, data, index, 0, 0)
        self._disk.sync_folder(self._folder)
        return self._active

    def _give_up_segment(self, error: OSError) -> None:
        """Nothing is appended to a segment in which a write failed, for any part of it may be missing. If the disk is
        full, the oldest segment makes room for a next try."""
        self.failures += 1
        self._failed_in_a_row += 1
        logger.warning("the prefix cache was not written: %s", error)
        if (active := self._active) is not None:
            with contextlib.suppress(OSError):  # what is left behind is in no index
                self._disk.ftruncate(active.data, active.data_end)
                self._disk.ftruncate(active.index, active.index_end)
            self._leave_segment()
        if error.errno == errno.ENOSPC:
            with contextlib.suppress(OSError):
                for name, number in sorted(self._segments(), key=_age)[:1]:
                    self._drop(name, number)
        if self._failed_in_a_row >= _MOST_FAILURES and self._lock is not None:
            logger.warning("the prefix cache is not written any more in this process")
            self._unlock()

    # ---------------------------------------------------------------- segments

    def _segments(self) -> dict[tuple[str, int], int]:
        """Bytes of each segment of the folder, of any fingerprint, by (fingerprint's name, number)."""
        sizes: dict[tuple[str, int], int] = {}
        for name in sorted(self._disk.listdir(self._folder)):
            match = NAME.fullmatch(name)
            if match is None:
                continue
            key = match[1], int(match[2])
            sizes[key] = sizes.get(key, 0) + self._size_of(posixpath.join(self._folder, name))
        return sizes

    def _size_of(self, path: str) -> int:
        try:
            with opened(self._disk, path) as descriptor:
                return self._disk.size(descriptor)
        except OSError:
            return 0  # dropped by another process meanwhile, or not ours

    def _make_room(self, segments: dict[tuple[str, int], int]) -> None:
        """Drop the oldest segments until another one fits. Of other fingerprints the newest stays: a process may be
        writing it."""
        newest = {name: max(number for other, number in segments if other == name) for name, _ in segments}
        total, records = sum(segments.values()), len(self._entries)
        for name, number in sorted(segments, key=_age):
            if total + self._segment_bytes <= self.budget and records < MOST_RECORDS:
                return
            if name == self._prefix or number != newest[name]:
                self._drop(name, number)
                total, records = total - segments[name, number], len(self._entries)

    def _drop(self, name: str, number: int) -> None:
        if name == self._prefix:
            self._entries = {key: entry for key, entry in self._entries.items() if entry.segment != number}
        for suffix in ("index", "data"):  # the index first: no reader looks for records that are gone
            with contextlib.suppress(OSError):
                self._disk.unlink(posixpath.join(self._folder, f"{name}-{number:08}.{suffix}"))

    def _path(self, number: int, suffix: str) -> str:
        return posixpath.join(self._folder, f"{self._prefix}-{number:08}.{suffix}")

    def _take_lock(self) -> int | None:
        descriptor = None
        try:
            descriptor = self._disk.open(posixpath.join(self._folder, f"{self._prefix}.lock"), create=True)
            if self._disk.lock(descriptor):
                return descriptor
            logger.info("another process writes this prefix cache; here it is read")
        except OSError as error:  # not ours, or a file system without locks
            logger.warning("the prefix cache is read and not written: %s", error)
        if descriptor is not None:
            self._close(descriptor)
        return None

    def _leave_segment(self) -> None:
        """Append no more to the segment that is appended to, if there is one."""
        active, self._active = self._active, None
        if active is not None:
            self._close(active.data)
            self._close(active.index)

    def _unlock(self) -> None:
        """Write no more."""
        lock, self._lock = self._lock, None
        if lock is not None:
            self._close(lock)

    def _close(self, descriptor: int) -> None:
        try:
            self._disk.close(descriptor)
        except OSError:
            self.failures += 1

    # ---------------------------------------------------------------- opening

    def _scan(self) -> None:
        """Read all indices; where this process writes, go on with the last segment if it has room."""
        numbers = sorted(number for name, number in self._segments() if name == self._prefix)
        last: tuple[int, int, int] | None = None
        for number in numbers:
            last = None
            try:
                last = self._read_index(number)
            except FileNotFoundError:
                pass  # a process died before it had made the second of the two files
            except OSError as error:
                self.failures += 1
                logger.warning("a segment of the prefix cache cannot be read: %s", error)
        if last is not None and self._lock is not None and last[1] < self._segment_bytes // 2:
            self._go_on_with(*last)

    def _read_index(self, number: int) -> tuple[int, int, int]:
        """Take the entries of a segment. Returns (number, bytes of whole records, bytes of whole entries)."""
        most = self._size_of(self._path(number, "data"))
        with opened(self._disk, self._path(number, "index")) as descriptor:
            data = read_whole(self._disk, descriptor)
        data_end = index_end = 0
        for entry, span in entries_of(number, data):
            if entry.header.fingerprint == self.fingerprint and entry.end <= most:
                self._entries[entry.header.digest, entry.header.type] = entry
                data_end, index_end = max(data_end, entry.end), span.stop
        return number, data_end, index_end

    def _go_on_with(self, number: int, data_end: int, index_end: int) -> None:
        """Append to the segment, behind its last whole record."""
        try:
            data = self._disk.open(self._path(number, "data"))
            index = self._disk.open(self._path(number, "index"))
            self._disk.ftruncate(data, data_end)
            self._disk.ftruncate(index, index_end)
        except OSError:
            return  # another one is begun
        self._active = _Active(number, data, index, data_end, index_end)


def _age(segment: tuple[str, int]) -> tuple[int, str]:
    return segment[1], segment[0]


def read_whole(disk: Disk, descriptor: int) -> bytearray:
    """The bytes of a file."""
    data = bytearray(disk.size(descriptor))
    del data[disk.preadv(descriptor, [memoryview(data)], 0) :]
    return data


def entries_of(segment: int, data: bytearray) -> Iterator[tuple[Entry, range]]:
    """Each whole entry of the index of a segment, and the bytes of `data` that it takes."""
    at = 0
    while at >= 0:
        try:
            header, end = Header.unpack(data, at)
            offset, check = _ENTRY_TAIL.unpack_from(data, end)
            whole = check == zlib.crc32(data[at : end + 8])
        except (RecordError, struct.error):  # cut off, or damaged
            whole = False
        if whole:
            after = end + _ENTRY_TAIL.size
            yield Entry(segment, offset, header), range(at, after)
            at = after
        else:
            at = data.find(MAGIC, at + 1)  # those behind it may be whole
