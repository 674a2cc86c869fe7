"""One record: what is written is read again, and damage of any byte is found."""

from __future__ import annotations

import io
import random

import pytest

from asyncengine.kvcache.store.record import (
    Header,
    RecordError,
    checksum,
    digests_of,
    pack_tokens,
    page_digest,
    read_records,
    root_digest,
    write_record,
)
from asyncengine.step import RecordType

FINGERPRINT = bytes(range(32))
ROOT = root_digest(FINGERPRINT, ("adapter", ""))


def make_record(tokens: list[int], buffers: list[bytes], part: RecordType = RecordType.PAGE) -> bytes:
    size, check = sum(map(len, buffers)), checksum(buffers)
    header = Header(FINGERPRINT, ROOT, pack_tokens(tokens), part, size, check)
    file = io.BytesIO()
    assert write_record(file, header, buffers) == len(file.getvalue())
    return file.getvalue()


def read(file: bytes | bytearray) -> list[tuple[Header, bytes]]:
    """Records of a file, whose payloads are read into two buffers each."""

    def halves(header: Header) -> list[memoryview]:
        payload = memoryview(bytearray(header.size))
        return [payload[: header.size // 2], payload[header.size // 2 :]]

    return [(header, b"".join(payload)) for header, payload in read_records(io.BytesIO(file), halves)]


def test_records_are_read_as_they_were_written() -> None:
    buffers = [b"keys", b"", b"values"]
    file = make_record([1, -2, 2**31 - 1], buffers) + make_record([4], [b""], RecordType.STATE)
    (first, payload), (second, nothing) = read(file)
    assert payload == b"keysvalues"
    assert nothing == b""
    assert first.tokens == pack_tokens([1, -2, 2**31 - 1])
    assert (first.fingerprint, first.parent, first.type) == (FINGERPRINT, ROOT, RecordType.PAGE)
    assert second.type is RecordType.STATE
    assert first.digest == page_digest(ROOT, first.tokens)


def test_any_changed_byte_and_any_cut_is_found() -> None:
    whole = make_record([7, 8], [b"payload"])
    rng = random.Random(1)
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] ^= rng.randrange(1, 256)
        with pytest.raises(RecordError):
            read(changed)
    for length in range(1, len(whole)):
        with pytest.raises(RecordError):
            read(whole[:length])


def test_a_digest_stands_for_everything_before_it() -> None:
    tokens = list(range(12))

    def digests(root: bytes, tokens: list[int]) -> list[bytes]:
        return [digest for _, _, digest in digests_of(root, tokens, 4)]

    same = digests(ROOT, tokens)
    assert len(same) == 3
    assert digests(ROOT, [*tokens, 99]) == same
    other = [99, *tokens[1:]]
    assert not set(digests(ROOT, other)) & set(same)
    assert digests(ROOT, [*tokens[:8], 99, 99, 99, 99])[:2] == same[:2]
    for root in (root_digest(FINGERPRINT, ("", "")), root_digest(bytes(32), ("adapter", ""))):
        assert not set(digests(root, tokens)) & set(same)


def test_tokens_are_packed_as_records_of_before_have_them() -> None:
    """Token 0 is a token like any other, beside a picture, too."""
    assert pack_tokens((0, 5)) == b"\0\0\0\0\5\0\0\0"
    assert pack_tokens((0, -5, 7)) == b"\0\0\0\0" + b"\xff" * 4 + b"\xfb" + b"\xff" * 23 + b"\7\0\0\0"


def test_pages_of_pictures_have_all_of_their_digests() -> None:
    """Ids of pictures are whole digests: two that differ in one bit, wherever it is, are two pages."""
    first = -1 - (int.from_bytes(bytes(range(200, 216))) << 32) - 7
    pages = [[5, first, 6], *([5, first ^ 1 << bit, 6] for bit in range(160)), [5, -1, 6], [5, -2, 6]]
    packed = [pack_tokens(page) for page in pages]
    assert len({*packed}) == len(pages)
    assert len({page_digest(ROOT, each) for each in packed}) == len(pages)
    file = make_record(pages[0], [b"keys"])
    ((header, _),) = read(file)
    assert header.tokens == packed[0]
    assert header.num_tokens == 3
