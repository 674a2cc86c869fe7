"""A folder of segments, on a disk that does what disks may: no wrong byte is ever read, and whole ones are found."""

from __future__ import annotations

import errno
import random
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncengine.kvcache.store import segments
from asyncengine.kvcache.store.disk import SystemDisk
from asyncengine.kvcache.store.record import Header, digests_of, root_digest
from asyncengine.kvcache.store.segments import Record, SegmentStore
from asyncengine.step import RecordType
from asyncengine.testing.world import ProcessDied, VirtualDisk

FINGERPRINT, OTHER = b"f" * 32, b"g" * 32
ROOT = root_digest(FINGERPRINT, ("", ""))


def headers(count: int, first: int = 0) -> list[Header]:
    """Headers of a chain of pages of one token."""
    found = digests_of(ROOT, range(first, first + count), 1)
    return [Header(FINGERPRINT, parent, tokens, RecordType.PAGE, 0, 0) for parent, tokens, _ in found]


def record(header: Header, payload: bytes, intact: Callable[[], bool] = lambda: True) -> Record:
    half = len(payload) // 2
    return header._replace(size=len(payload)), [payload[:half], payload[half:]], intact


def read(store: SegmentStore, header: Header) -> bytes | None:
    """The payload that is found for `header`."""
    known = store.find(header.digest, header.type)
    if known is None:
        return None
    payload = bytearray(known.size)
    return bytes(payload) if store.read(header, [memoryview(payload)]) else None


def live(seed: int, *, flips: int = 0) -> None:
    """A process writes until it dies; the next one finds what was written, nothing else, and goes on."""
    rng = random.Random(seed)
    disk = VirtualDisk(rng, capacity=rng.choice([None, None, 9000]))
    chain = headers(40)
    payloads = [rng.randbytes(rng.choice([1, 100, 512, 3000])) for _ in chain]
    done: set[int] = set()
    place = 0
    for _ in range(3):
        disk.dies_at = disk.calls + rng.randrange(1, 40)
        if rng.random() < 0.2:
            disk.sync_fails_at = disk.calls + rng.randrange(1, 30)
        try:
            store = SegmentStore(disk, "/kv", FINGERPRINT, rng.choice([10**6, 30_000]))
            assert store.writable
            while place < len(chain):
                batch = range(place, min(len(chain), place + rng.choice([1, 3])))
                place = batch.stop
                if store.append([record(chain[each], payloads[each]) for each in batch]) == len(batch):
                    done.update(batch)
        except ProcessDied:
            pass
        disk.restart(power_failed=rng.random() < 0.6)
        disk.flip_bits(flips)
        store = SegmentStore(disk, "/kv", FINGERPRINT, 10**6)
        found = [read(store, header) for header in chain]
        assert all(each in (payload, None) for each, payload in zip(found, payloads, strict=True)), "a wrong payload"
        if not flips:
            assert not store.damaged, "the index names a record that is not whole"
            lost = [each for each in sorted(done) if found[each] is None]
            assert not lost or disk.capacity is not None or dropped(store), "a record is lost that was there"
        store.close()


def dropped(store: SegmentStore) -> bool:
    """True if old segments have made room."""
    return min((entry.segment for entry in store._entries.values()), default=2) > 1


@pytest.mark.parametrize("seed", range(4))
def test_no_wrong_byte_is_read_and_no_whole_record_lost(seed: int) -> None:
    for each in range(60):
        live(seed * 1000 + each)
        live(seed * 1000 + each, flips=5)


def _only_of_indices(fsync: Callable[[VirtualDisk, int], None]) -> Callable[[VirtualDisk, int], None]:
    def hasty(self: VirtualDisk, descriptor: int) -> None:
        path = next(path for path, file in self.files.items() if file is self._open[descriptor])
        if path.endswith("index"):
            fsync(self, descriptor)

    return hasty


@pytest.mark.parametrize(
    ("owner", "name", "value", "flips", "violation"),
    [
        # checksums keep its records from being used; here it is noticed that the index names them
        (VirtualDisk, "fsync", _only_of_indices(VirtualDisk.fsync), 0, "names a record that is not whole"),
        (segments, "checksum", lambda buffers: 0, 5, "a wrong payload"),
        (VirtualDisk, "sync_folder", lambda self, folder: None, 0, "a record is lost"),
    ],
    ids=["an index written before its records", "a checksum not looked at", "a folder that is not synced"],
)
def test_lives_find(owner: Any, name: str, value: Any, flips: int, violation: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(owner, name, value)
    with pytest.raises(AssertionError, match=violation):
        all(live(seed, flips=flips) is None for seed in range(300))


def test_tokens_are_compared_and_not_only_their_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = headers(1)[0], headers(1, first=5)[0]
    disk = VirtualDisk(random.Random(1))
    store = SegmentStore(disk, "/kv", FINGERPRINT, 10**6)
    assert store.append([record(one, b"one")]) == 1
    monkeypatch.setattr(Header, "digest", property(lambda self: b"the same"))
    store = SegmentStore(VirtualDisk(random.Random(1)), "/kv", FINGERPRINT, 10**6)
    assert store.append([record(one, b"one")]) == 1
    assert read(store, other) is None
    assert store.damaged == 1


def reopened(store: SegmentStore, disk: VirtualDisk | SystemDisk, folder: str = "/kv") -> SegmentStore:
    store.close()
    return SegmentStore(disk, folder, store.fingerprint, store.budget)


def test_one_process_writes_and_others_read() -> None:
    disk = VirtualDisk(random.Random(1))
    writer = SegmentStore(disk, "/kv", FINGERPRINT, 10**6)
    one, two = headers(2)
    writer.append([record(one, b"one")])
    reader = SegmentStore(disk, "/kv", FINGERPRINT, 10**6)
    assert not reader.writable
    assert read(reader, one) == b"one"
    assert reader.append([record(two, b"two")]) == 0
    other = SegmentStore(disk, "/kv", OTHER, 10**6)
    assert other.writable
    assert len(other) == 0
    writer.close()
    assert SegmentStore(disk, "/kv", FINGERPRINT, 10**6).writable


def test_the_oldest_segments_go_first_and_whole() -> None:
    disk = VirtualDisk(random.Random(1))
    foreign = SegmentStore(disk, "/kv", OTHER, 40_000)
    for each in headers(4):
        foreign.append([record(each, bytes(3000))])
    foreign.close()
    store = SegmentStore(disk, "/kv", FINGERPRINT, 40_000)
    chain = headers(60)
    for each in chain:
        assert store.append([record(each, bytes(1000))]) == 1
    found = [read(store, header) is not None for header in chain]
    assert found == sorted(found), "a younger record went before an older one"
    assert 20 < sum(found) < 60
    assert [read(reopened(store, disk), header) is not None for header in chain] == found
    others = SegmentStore(disk, "/kv", OTHER, 40_000)
    kept = [read(others, header) is not None for header in headers(4)]
    assert kept == sorted(kept), "a younger segment of another fingerprint went before an older one"
    assert kept[0] < kept[-1], "its newest, which its process may be writing, went"
    assert sum(map(len, (file.seen for file in disk.files.values()))) <= 40_000


def test_a_full_disk_and_a_broken_one_end_nothing() -> None:
    disk = VirtualDisk(random.Random(1), capacity=20_000)
    store = SegmentStore(disk, "/kv", FINGERPRINT, 10**6)
    chain = headers(30)
    wrote = [store.append([record(each, bytes(1000))]) for each in chain]
    assert 0 in wrote
    assert store.failures >= 1
    assert not store.damaged
    disk.capacity = 0
    for each in headers(9, first=100):
        store.append([record(each, bytes(1000))])
    assert not store.writable


def test_only_three_failures_in_a_row_end_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = VirtualDisk(random.Random(1))
    store = SegmentStore(disk, "/kv", FINGERPRINT, 10**6)
    fails = iter([True, True, False, False, True, True, True])
    fsync = disk.fsync

    def failing(descriptor: int) -> None:
        if next(fails):
            raise OSError(errno.EIO, "broken")
        fsync(descriptor)

    monkeypatch.setattr(disk, "fsync", failing)
    found = [(store.append([record(each, b"1")]), store.writable) for each in headers(6)]
    assert found == [(0, True), (0, True), (1, True), (0, True), (0, True), (0, False)]


def test_files_are_the_user_s_own(tmp_path: Path) -> None:
    store = SegmentStore(SystemDisk(), str(tmp_path), FINGERPRINT, 10**6)
    one, two = headers(2)
    store.append([record(one, b"one" * 1000), record(two, b"two")])
    store = reopened(store, SystemDisk(), str(tmp_path))
    assert read(store, one) == b"one" * 1000
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}
    for path in tmp_path.glob("*.data"):
        path.chmod(0o666)
    assert read(store, one) is None
    assert store.failures == 1
    link = tmp_path / "link"
    link.symlink_to(next(tmp_path.glob("*.index")))
    with pytest.raises(OSError, match="symbolic links"):
        SystemDisk().open(str(link))
