"""One prefix as a stream of records, for a file or for another engine: a description, then what its pages hold.

The first record (`RecordType.ABOUT`) has the tokens of the prefix, its adapter and what it was computed with, as JSON;
its parent is the root digest of its namespace. The records of pages, window pages and the state follow in any order.
A reader fills memory that no request uses yet, and makes it findable when all of it is there.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import BinaryIO

from asyncengine.kvcache.radix_tree import Namespace
from asyncengine.kvcache.store import record
from asyncengine.seams import PageMemory
from asyncengine.step import RecordType

_MOST_ABOUT = 64 * 2**20
"""Bytes of a description, at most."""
_SHOWN, _BEGINNING = 40, 12
"""Characters of a value that a message shows; of a longer one, a digest, the first few."""

Addresses = Iterable[tuple[RecordType, int, int]]
"""(type of record, index of its page in the prefix, index in the memory of that type)."""


def write_prefix(
    stream: BinaryIO, identity: record.Identity, namespace: Namespace, tokens: Sequence[int], page_size: int,
    addresses: Addresses, memory: PageMemory, is_intact: Callable[[], bool],
) -> None:  # fmt: skip
    """Write the records at `addresses` of `tokens`, full pages. `is_intact`: whether no page copied so
    far was evicted while it was copied; otherwise `RecordError` is raised."""
    fingerprint = record.fingerprint_of(identity)
    root = record.root_digest(fingerprint, namespace)
    about = json.dumps({"identity": dict(identity), "adapter": namespace[0], "tokens": list(tokens)}).encode()
    record.write_record(
        stream, record.Header(fingerprint, root, b"", RecordType.ABOUT, len(about), record.checksum([about])), [about]
    )
    chain = list(record.digests_of(root, tokens, page_size))
    for type_, index, slot in addresses:
        buffers = memory.buffers(type_, slot)
        head = record.Header(fingerprint, *chain[index][:2], type_, memory.nbytes(type_), record.checksum(buffers))
        record.write_record(stream, head, buffers)
        if not is_intact():
            raise record.RecordError("the prefix left the cache while it was copied")


class PrefixReader:
    """A prefix that is read from a stream: first its description, then, by `fill`, what its pages hold."""

    def __init__(self, stream: BinaryIO) -> None:
        """Read the description. Raises `RecordError`."""
        self._memory: PageMemory | None = None
        self._left: dict[tuple[RecordType, bytes], int] = {}
        self._records = record.read_records(stream, self._buffers_for)
        first = next(self._records, None)
        if first is None:
            raise record.RecordError("is empty")
        self._header, payload = first
        try:
            about = json.loads(b"".join(payload))
            self.identity: dict[str, str] = dict(about["identity"])
            self.adapter: str = about["adapter"]
            """Digest of the adapter; "": none."""
            self.tokens: list[int] = [int(token) for token in about["tokens"]]
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            raise record.RecordError("does not begin with the description of a prefix") from None

    def check(self, identity: record.Identity, namespace: Namespace, page_size: int) -> None:
        """Raise `RecordError`, which names all that differs, unless the prefix was computed as an engine of `identity`
        computes those of `namespace`."""
        theirs, ours = {**self.identity, "adapter": self.adapter}, {**identity, "adapter": str(namespace[0])}
        differ = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
        if differ:
            differences = [f"{name} ({_shown(theirs.get(name))}, here {_shown(ours.get(name))})" for name in differ]
            raise record.RecordError(f"was computed with another {', another '.join(differences)}")
        if self._header.parent != record.root_digest(record.fingerprint_of(identity), namespace):
            raise record.RecordError("was computed with another cache_salt")
        if not self.tokens or len(self.tokens) % page_size:
            raise record.RecordError("describes no full pages")

    def fill(self, addresses: Addresses, memory: PageMemory, page_size: int, go_on: Callable[[], object]) -> None:
        """Read the records of `addresses` into `memory`, and the rest of the stream. Raises `RecordError` where one of
        them is missing or any record is damaged, and whatever `go_on` raises, which is called after each record. After
        an error the content of that memory is undefined."""
        try:
            digests = [digest for _, _, digest in record.digests_of(self._header.parent, self.tokens, page_size)]
        except (struct.error, OverflowError):
            raise record.RecordError("has tokens that are none") from None
        self._memory, self._left = memory, {(type_, digests[index]): slot for type_, index, slot in addresses}
        for header, buffers in self._records:
            slot = self._left.pop((header.type, header.digest), None)
            if slot is not None:
                memory.filled(header.type, slot, buffers)
            go_on()
        if self._left:
            raise record.RecordError(f"{len(self._left)} of its records are missing")

    def _buffers_for(self, header: record.Header) -> Sequence[memoryview]:
        if (header.type is RecordType.ABOUT) is not (self._memory is None) or (
            header.size > _MOST_ABOUT if self._memory is None else header.size != self._memory.nbytes(header.type)
        ):
            raise record.RecordError("has a record that does not belong there")
        slot = self._left.get((header.type, header.digest))
        if self._memory is None or slot is None:
            return [memoryview(bytearray(header.size))]
        return self._memory.buffers(header.type, slot)


def _shown(value: object) -> str:
    """A value of an identity for people; "" stands for none."""
    text = str(value or "none")
    return text if len(text) <= _SHOWN else f"{text[:_BEGINNING]}..."
