"""One prefix as a stream of records: what was written is filled in again, and nothing else passes for it."""

from __future__ import annotations

import io
import random
from collections.abc import Sequence
from typing import Any

import pytest
from support.data import cases_of

from asyncengine.kvcache.store.prefix_stream import PrefixReader, write_prefix
from asyncengine.kvcache.store.record import RecordError
from asyncengine.step import RecordType

ROWS: dict[str, Any] = cases_of(__file__)

SIZE = 4
TOKENS = list(range(5, 17))
IDENTITY = {"model weights": "w" * 64, "dtype": "float32", "page size": "4"}
NAMESPACE = ("", "")
SIZES = {RecordType.PAGE: 24, RecordType.WINDOW: 10, RecordType.STATE: 7}
PLACES = [
    (RecordType.PAGE, 0, 3), (RecordType.PAGE, 1, 5), (RecordType.PAGE, 2, 4), (RecordType.WINDOW, 2, 1),
    (RecordType.STATE, 2, 2),
]  # fmt: skip


class Memory:
    """Numbers of each part in two buffers each."""

    layout = "test"

    def __init__(self, seed: int = 0) -> None:
        rng = random.Random(seed)
        self.data = {part: [bytearray(rng.randbytes(size)) for _ in range(9)] for part, size in SIZES.items()}

    def nbytes(self, part: RecordType) -> int:
        return SIZES[part]

    def buffers(self, part: RecordType, index: int) -> Sequence[memoryview]:
        data = memoryview(self.data[part][index])
        return [data[:5], data[5:]]

    def filled(self, part: RecordType, index: int, buffers: Sequence[memoryview]) -> None:
        assert b"".join(buffers) == self.data[part][index]


def written(memory: Memory, intact: int = 99) -> bytes:
    stream, copies = io.BytesIO(), iter(range(intact))
    write_prefix(
        stream, IDENTITY, NAMESPACE, TOKENS, SIZE, PLACES, memory, lambda: next(copies, None) is not None
    )  # fmt: skip
    return stream.getvalue()


def read(data: bytes | bytearray, places: list[tuple[RecordType, int, int]], memory: Memory) -> None:
    reader = PrefixReader(io.BytesIO(data))
    reader.check(IDENTITY, NAMESPACE, SIZE)
    assert reader.tokens == TOKENS
    reader.fill(places, memory, SIZE, lambda: None)


def test_what_was_written_is_filled_in_wherever_it_is_wanted() -> None:
    source, memory, before = Memory(1), Memory(2), Memory(2)
    wanted = [(part, place, number + 3) for part, place, number in PLACES[1:]]
    read(written(source), wanted, memory)
    filled = {(part, number): source.data[part][number - 3] for part, _, number in wanted}
    for part, rows in memory.data.items():
        for number, row in enumerate(rows):
            assert row == filled.get((part, number), before.data[part][number])


def test_any_changed_byte_and_any_cut_is_refused() -> None:
    whole, rng = written(Memory(1)), random.Random(3)
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] ^= rng.randrange(1, 256)
        with pytest.raises(RecordError):
            read(changed, PLACES, Memory())
    for length in range(len(whole)):
        with pytest.raises(RecordError):
            read(whole[:length], PLACES, Memory())


@pytest.mark.parametrize(("changes", "namespace", "said"), ROWS["a_refusal_names_what_differs"])
def test_a_refusal_names_what_differs(changes: dict[str, str], namespace: list[str], said: str) -> None:
    reader = PrefixReader(io.BytesIO(written(Memory())))
    with pytest.raises(RecordError, match=f"was computed with {said}"):
        reader.check({**IDENTITY, **changes}, (*namespace,), SIZE)


def test_a_page_that_leaves_the_cache_meanwhile_is_not_written_as_if_it_were_there() -> None:
    with pytest.raises(RecordError, match="left the cache"):
        written(Memory(), intact=2)


def test_reading_ends_when_it_is_given_up() -> None:
    reader, calls = PrefixReader(io.BytesIO(written(Memory()))), iter(range(2))
    with pytest.raises(StopIteration):
        reader.fill(PLACES, Memory(), SIZE, lambda: next(calls))


def test_records_of_another_layout_are_refused_before_memory_is_touched() -> None:
    class Wider(Memory):
        def nbytes(self, part: RecordType) -> int:
            return SIZES[part] + 1

    with pytest.raises(RecordError, match="does not belong"):
        read(written(Memory()), PLACES, Wider())
