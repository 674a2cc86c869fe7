"""Survey of a folder of records without a model: which records there are and whether they are whole; and their removal.

Engines may read and write the folder meanwhile: segments that one of them writes are surveyed, and never removed.
"""

from __future__ import annotations

import contextlib
import posixpath
from dataclasses import dataclass

from asyncengine.kvcache.store.disk import Disk, opened
from asyncengine.kvcache.store.record import checksum
from asyncengine.kvcache.store.segments import NAME, Entry, entries_of, read_whole
from asyncengine.step import RecordType


@dataclass(slots=True)
class ModelRecords:
    """Records of one fingerprint: of one model, in one form, with one set of settings."""

    fingerprint: str
    """First 32 hexadecimal digits of it, with which the names of its files begin."""
    segments: int = 0
    bytes: int = 0
    """Bytes of its files."""
    records: int = 0
    """Records that the indices name."""
    tokens: int = 0
    """Tokens of the pages among them."""
    damaged: int = 0
    """Records that are not whole, and index entries that cannot be read. Engines use none of them."""
    unreadable: int = 0
    """Files that an operating system does not let this user read."""
    being_written: bool = False
    """An engine has it open for writing."""


def survey(disk: Disk, folder: str, *, verify: bool = False) -> list[ModelRecords]:
    """Records of each fingerprint in `folder`, by name. `verify`: every record is read, and its checksum looked at;
    without it only the indices are. Raises `OSError` if the folder cannot be listed."""
    models: dict[str, ModelRecords] = {}
    for prefix, number in _segments(disk, folder):
        if prefix not in models:
            models[prefix] = ModelRecords(
                prefix, being_written=_is_locked(disk, posixpath.join(folder, f"{prefix}.lock"))
            )
        model = models[prefix]
        model.segments += 1
        try:
            _survey_segment(disk, posixpath.join(folder, f"{prefix}-{number}"), model, verify)
        except FileNotFoundError:
            continue  # dropped meanwhile, or its process died before it had made both files
        except OSError:
            model.unreadable += 1
    return list(models.values())


def clear(disk: Disk, folder: str) -> tuple[int, list[str]]:
    """Remove all segments but those of fingerprints that an engine writes now. Returns the number of bytes removed, and
    the names of the fingerprints that stay. Raises `OSError` for what cannot be removed."""
    removed, kept = 0, []
    segments = _segments(disk, folder)
    for prefix in sorted({prefix for prefix, _ in segments}):
        # The lock is held until all is gone, and its file stays: two engines could lock two files of that name.
        with opened(disk, posixpath.join(folder, f"{prefix}.lock"), create=True) as lock:
            if not disk.lock(lock):
                kept.append(prefix)
                continue
            for number in [number for other, number in segments if other == prefix]:
                for suffix in ("index", "data"):  # the index first: no reader looks for records that are gone
                    path = posixpath.join(folder, f"{prefix}-{number}.{suffix}")
                    with contextlib.suppress(FileNotFoundError), opened(disk, path) as descriptor:
                        size = disk.size(descriptor)
                        disk.unlink(path)
                        removed += size
    return removed, kept


def _segments(disk: Disk, folder: str) -> list[tuple[str, str]]:
    names = filter(None, map(NAME.fullmatch, disk.listdir(folder)))
    return sorted({(name[1], name[2]) for name in names})


def _is_locked(disk: Disk, path: str) -> bool:
    """Whether an engine holds the lock. It is tried for a moment: an engine that starts right then would only read."""
    try:
        with opened(disk, path) as descriptor:
            return not disk.lock(descriptor)
    except OSError:  # no lock file, or a file system without locks: no engine writes
        return False


def _survey_segment(disk: Disk, path: str, model: ModelRecords, verify: bool) -> None:
    with opened(disk, f"{path}.index") as index, opened(disk, f"{path}.data") as data:
        written = read_whole(disk, index)
        size = disk.size(data)
        model.bytes += size + len(written)
        whole = 0
        for entry, span in entries_of(0, written):
            model.records += 1
            whole += len(span)
            if entry.end > size or (verify and not _is_whole(disk, data, entry)):
                model.damaged += 1
            elif entry.header.type is RecordType.PAGE:
                model.tokens += entry.header.num_tokens
        if whole < len(written) and not model.being_written:  # else the end may be about to be written
            model.damaged += 1


def _is_whole(disk: Disk, data: int, entry: Entry) -> bool:
    head = entry.header.pack()
    record = memoryview(bytearray(len(head) + entry.header.size))
    count = disk.preadv(data, [record], entry.offset)
    whole = count == len(record) and record[: len(head)] == head
    return whole and checksum([record[len(head) :]]) == entry.header.checksum
