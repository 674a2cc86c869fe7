"""Pages and states of the fake executor as bytes, for a store of prefixes."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from asyncengine.scheduler.restores import RestoreOrder
from asyncengine.step import RecordType
from asyncengine.testing.fake_runner import FIRST, FakeExecutor, after

_STATE = struct.Struct("<qQ")
_NOTHING = (-2, 0)
"""A state that nobody wrote."""


class FakePageMemory:
    """`PageMemory` of a `FakeExecutor`: its integers, as int64. Buffers are copies."""

    layout = "fake"

    def __init__(self, executor: FakeExecutor) -> None:
        self._executor = executor
        self._page = struct.Struct(f"<{executor.page_size}q")

    def nbytes(self, record_type: RecordType) -> int:
        return _STATE.size if record_type is RecordType.STATE else self._page.size

    def buffers(self, record_type: RecordType, index: int) -> Sequence[memoryview]:
        if record_type is RecordType.STATE:
            data = _STATE.pack(*(self._slots[index] or _NOTHING))
        else:
            data = self._page.pack(*self._pages(record_type)[index])
        half = len(data) // 2
        copy = memoryview(bytearray(data))
        return [copy[:half], copy[half:]]

    def filled(self, record_type: RecordType, index: int, buffers: Sequence[memoryview]) -> None:
        data = b"".join(buffers)
        if record_type is RecordType.STATE:
            state = _STATE.unpack(data)
            self._slots[index] = None if state == _NOTHING else state
        else:
            self._pages(record_type)[index] = list(self._page.unpack(data))

    def restore(self, order: RestoreOrder) -> None:
        """Fill what `order` names with what the tokens stand for, as a disk that has all of it would."""
        size = self._executor.page_size
        for part, pages in ((RecordType.PAGE, order.pages), (RecordType.WINDOW, order.windows)):
            for place, page in pages:
                self._pages(part)[page] = order.tokens[place * size : (place + 1) * size]
        if order.slot:
            self._slots[order.slot] = after(FIRST, order.tokens)

    def _pages(self, record_type: RecordType) -> list[list[int]]:
        return self._executor.memory if record_type is RecordType.PAGE else self._executor.window_memory

    @property
    def _slots(self) -> list[tuple[int, int] | None]:
        assert self._executor.states is not None
        return self._executor.states.slots
