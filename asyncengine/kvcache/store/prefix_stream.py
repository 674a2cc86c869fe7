"""One prefix as a stream of records, for a file or for another engine: a description, then what its pages hold.

The first record (`RecordPart.ABOUT`) has the tokens of the prefix, its adapter and what it was computed with, as JSON;
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
from asyncengine.step import RecordPart

_MOST_ABOUT = 64 * 2**20
"""Bytes of a description, at most."""
_SHOWN, _BEGINNING = 40, 12
"""Characters of a value that a message shows; of a longer one, a digest, the first few."""

Places = Iterable[tuple[RecordPart, int, int]]
"""(part, place of its page among those of the prefix, number in the memory of that part)."""


def write_prefix(
    stream: BinaryIO, identity: record.Identity, namespace: Namespace, tokens: Sequence[int], page_size: int,
    places: Places, memory: PageMemory, is_intact: Callable[[], bool],
) -> None:  # fmt: skip
    """Write what `places` name of `tokens`, full pages. `is_intact`: whether what was copied until now was still what
    it had been; else it raises `RecordError`."""
    fingerprint = record.fingerprint_of(identity)
    root = record.root_digest(fingerprint, namespace)
    about = json.dumps({"identity": dict(identity), "adapter": namespace[0], "tokens": list(tokens)}).encode()
    record.write_record(
        stream, record.Header(fingerprint, root, b"", RecordPart.ABOUT, len(about), record.checksum([about])), [about]
    )
    chain = list(record.digests_of(root, tokens, page_size))
    for part, place, number in places:
        buffers = memory.buffers(part, number)
        head = record.Header(fingerprint, *chain[place][:2], part, memory.nbytes(part), record.checksum(buffers))
        record.write_record(stream, head, buffers)
        if not is_intact():
            raise record.RecordError("the prefix left the cache while it was copied")


class PrefixReader:
    """A prefix that is read from a stream: first its description, then, by `fill`, what its pages hold."""

    def __init__(self, stream: BinaryIO) -> None:
        """Read the description. Raises `RecordError`."""
        self._memory: PageMemory | None = None
        self._left: dict[tuple[RecordPart, bytes], int] = {}
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
            said = [f"{name} ({_shown(theirs.get(name))}, here {_shown(ours.get(name))})" for name in differ]
            raise record.RecordError(f"was computed with another {', another '.join(said)}")
        if self._header.parent != record.root_digest(record.fingerprint_of(identity), namespace):
            raise record.RecordError("was computed with another cache_salt")
        if not self.tokens or len(self.tokens) % page_size:
            raise record.RecordError("describes no full pages")

    def fill(self, places: Places, memory: PageMemory, page_size: int, go_on: Callable[[], object]) -> None:
        """Read what `places` name into `memory`, and the rest of the stream. Raises `RecordError` where one of them is
        not there, or any record is not whole, and what `go_on`, called after each, raises. The memory holds anything
        then."""
        try:
            digests = [digest for _, _, digest in record.digests_of(self._header.parent, self.tokens, page_size)]
        except (struct.error, OverflowError):
            raise record.RecordError("has tokens that are none") from None
        self._memory, self._left = memory, {(part, digests[place]): number for part, place, number in places}
        for header, buffers in self._records:
            number = self._left.pop((header.part, header.digest), None)
            if number is not None:
                memory.filled(header.part, number, buffers)
            go_on()
        if self._left:
            raise record.RecordError(f"{len(self._left)} of its records are missing")

    def _buffers_for(self, header: record.Header) -> Sequence[memoryview]:
        if (header.part is RecordPart.ABOUT) is not (self._memory is None) or (
            header.size > _MOST_ABOUT if self._memory is None else header.size != self._memory.nbytes(header.part)
        ):
            raise record.RecordError("has a record that does not belong there")
        number = self._left.get((header.part, header.digest))
        if self._memory is None or number is None:
            return [memoryview(bytearray(header.size))]
        return self._memory.buffers(header.part, number)


def _shown(value: object) -> str:
    """A value of an identity for people; "" stands for none."""
    text = str(value or "none")
    return text if len(text) <= _SHOWN else f"{text[:_BEGINNING]}..."
