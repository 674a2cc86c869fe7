"""The format of a record: what one page, window page or state holds, the tokens that it stands for, and its parent.

A record is a head and a payload. All numbers are little-endian:

    4s  magic "AEKV"          H   version of the format      H   type: 1 page, 2 window page, 3 state, 4 about
    I   words of tokens n     I   CRC-32 of the payload      Q   bytes of the payload
    32s fingerprint           32s digest of the parent       n i (int32) tokens of this page
    I   CRC-32 of all of the head before it
    payload: the buffers of `PageMemory`, one behind the other

The **digest** of a page is the SHA-256 of its parent's digest and its own tokens; that of a first page's parent is
`root_digest`, of a fingerprint and a namespace. So a digest stands for a model, an adapter and all tokens up to there,
and the digest that is computed from a prompt's own tokens finds only what was computed for the same ones. A state has
the digest of the page whose last token it has taken in. The **fingerprint** is everything else that the numbers depend
on, by name (`Identity`; `execution.models.identity`).
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

from asyncengine.step import RecordType

VERSION = 1
_HEAD = struct.Struct("<4sHHIIQ32s32s")
_CRC = struct.Struct("<I")
MAGIC = b"AEKV"
_MOST_TOKENS = 2**16
"""int32 words of a page's tokens, at most."""
_MOST_BYTES = 2**40
PICTURE_WORDS = 6
"""int32 words of a picture's id behind the -1 that announces it."""

Buffer = bytes | bytearray | memoryview
Identity = Mapping[str, str]
"""Values, or digests of them, of all that keys, values and states depend on beside tokens and adapter, by name."""


@dataclass(frozen=True, slots=True)
class StoreCounts:
    """Figures of a durable prefix cache, since the start. All 0: there is none."""

    records: int = 0
    """Records that can be found now."""
    bytes_read: int = 0
    bytes_written: int = 0
    damaged: int = 0
    """Records that were not what they had to be, and not used."""
    failures: int = 0
    """Reads and writes that an operating system refused."""


class RecordError(ValueError):
    """A record is cut off, damaged, or of another format. The message says which."""


class Header(NamedTuple):
    """Everything about a record but its payload."""

    fingerprint: bytes
    """32 bytes."""
    parent: bytes
    """Digest of the page before, 32 bytes."""
    tokens: bytes
    """Tokens of the page, as `pack_tokens` packs them."""
    type: RecordType
    size: int
    """Bytes of the payload."""
    checksum: int
    """`checksum` of the payload."""

    @property
    def digest(self) -> bytes:
        """Digest of the page that it belongs to."""
        return page_digest(self.parent, self.tokens)

    @property
    def head_size(self) -> int:
        """Bytes of the head of the record."""
        return _HEAD.size + len(self.tokens) + _CRC.size

    @property
    def num_tokens(self) -> int:
        """Tokens of the page."""
        words = struct.unpack(f"<{len(self.tokens) // 4}i", self.tokens)
        if min(words, default=0) >= 0:
            return len(words)
        count = at = 0
        while at < len(words):
            at += 1 if words[at] >= 0 else 1 + PICTURE_WORDS
            count += 1
        return count

    def pack(self) -> bytes:
        """The head of the record."""
        count, fields = len(self.tokens) // 4, (self.fingerprint, self.parent)
        head = _HEAD.pack(MAGIC, VERSION, self.type, count, self.checksum, self.size, *fields) + self.tokens
        return head + _CRC.pack(zlib.crc32(head))

    @classmethod
    def unpack(cls, data: Buffer, offset: int = 0) -> tuple[Header, int]:
        """(header, offset behind it) of the head at `offset`. Raises `RecordError`."""
        view = memoryview(data)
        if len(view) - offset < _HEAD.size:
            raise RecordError("the head of a record is cut off")
        magic, version, number, count, check, size, fingerprint, parent = _HEAD.unpack_from(view, offset)
        if magic != MAGIC or version != VERSION:
            raise RecordError(f"not a record of format {VERSION}")
        end = offset + _HEAD.size + 4 * count
        if count > _MOST_TOKENS or size > _MOST_BYTES or len(view) < end + _CRC.size:
            raise RecordError("the tokens of a record are cut off")
        if _CRC.unpack_from(view, end)[0] != zlib.crc32(view[offset:end]):
            raise RecordError("the head of a record is damaged")
        if number not in tuple(RecordType):
            raise RecordError(f"a record of unknown type {number}")
        tokens = bytes(view[offset + _HEAD.size : end])
        return cls(fingerprint, parent, tokens, RecordType(number), size, check), end + _CRC.size


def fingerprint_of(identity: Identity) -> bytes:
    """Digest of an identity, 32 bytes."""
    return hashlib.sha256(json.dumps(dict(identity), sort_keys=True).encode()).digest()


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Tokens as int32, little-endian. An id of a picture (`asyncengine.images`), which is negative and has some 160
    bits, is -1 and 24 bytes."""
    if min(tokens, default=0) >= 0:
        return struct.pack(f"<{len(tokens)}i", *tokens)
    return b"".join(
        struct.pack("<i", token)
        if token >= 0
        else struct.pack("<i", -1) + token.to_bytes(4 * PICTURE_WORDS, "little", signed=True)
        for token in tokens
    )


def page_digest(parent: bytes, tokens: bytes) -> bytes:
    """Digest of a page of packed `tokens` behind the page of digest `parent`."""
    return hashlib.sha256(parent + tokens).digest()


def root_digest(fingerprint: bytes, namespace: tuple[Hashable, ...]) -> bytes:
    """The parent's digest of first pages of a namespace (adapter's content, cache salt)."""
    return hashlib.sha256(b"root" + fingerprint + repr(namespace).encode()).digest()


def digests_of(root: bytes, tokens: Sequence[int], page_size: int) -> Iterator[tuple[bytes, bytes, bytes]]:
    """(parent's digest, packed tokens, digest) of each full page of `tokens`, in order."""
    parent = root
    for start in range(0, len(tokens) - page_size + 1, page_size):
        packed = pack_tokens(tokens[start : start + page_size])
        digest = page_digest(parent, packed)
        yield parent, packed, digest
        parent = digest


def checksum(buffers: Iterable[Buffer]) -> int:
    """CRC-32 of the buffers, one behind the other."""
    value = 0
    for buffer in buffers:
        value = zlib.crc32(buffer, value)
    return value


def write_record(file: BinaryIO, header: Header, buffers: Iterable[Buffer]) -> int:
    """Write a record to a file that is open for writing; returns its bytes."""
    head = header.pack()
    file.write(head)
    for buffer in buffers:
        file.write(buffer)
    return len(head) + header.size


def read_records(
    file: BinaryIO, buffers: Callable[[Header], Sequence[memoryview]]
) -> Iterator[tuple[Header, Sequence[memoryview]]]:
    """Each record of a file from where it stands to its end, checked, with its payload in what `buffers` gave for its
    header. Raises `RecordError` at the first that is not whole, or does not fit its buffers."""
    while head := file.read(_HEAD.size):
        if len(head) == _HEAD.size:
            head += file.read(4 * min(_HEAD.unpack(head)[3], _MOST_TOKENS) + _CRC.size)
        header, _ = Header.unpack(head)
        payload = buffers(header)
        if sum(map(len, payload)) != header.size:
            raise RecordError("the payload of a record has another size than it should")
        if sum(file.readinto(buffer) for buffer in payload) < header.size:  # type: ignore[attr-defined]
            raise RecordError("the payload of a record is cut off")
        if checksum(payload) != header.checksum:
            raise RecordError("the payload of a record is damaged")
        yield header, payload
