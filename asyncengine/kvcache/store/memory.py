"""The memory that records are copied from and read into."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from asyncengine.kvcache.store.record import RecordPart


class PageMemory(Protocol):
    """Pages, window pages and states of an executor, as bytes. Used by several threads, each page by one at a time."""

    layout: str
    """The order of the bytes and their types, in words: a record is of use only where it is the same."""

    def nbytes(self, part: RecordPart) -> int:
        """Bytes of one page, window page or state; 0: there are none."""
        ...

    def buffers(self, part: RecordPart, index: int) -> Sequence[memoryview]:
        """The bytes of the page, window page or state `index`: the memory itself, or a copy."""
        ...

    def filled(self, part: RecordPart, index: int, buffers: Sequence[memoryview]) -> None:
        """What `buffers` gave has been filled with other content."""
        ...
