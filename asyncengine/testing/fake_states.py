"""Recurrent states without a model: a state is how many tokens it has taken in, and a hash of them.

What a device would not notice raises: a source that is not the state of the position where a row starts, a slot that
one row writes and another one reads or writes in the same step, a snapshot that is not of the row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from asyncengine.step import Row

State = tuple[int, int]
"""(tokens taken in, their hash)"""

FIRST: State = (0, 0x811C9DC5)
LOST: State = (-1, 0)


def after(state: State, tokens: Sequence[int]) -> State:
    """The state `state` becomes by `tokens`."""
    count, value = state
    for token in tokens:
        value = ((value ^ (token + 1)) * 0x100000001B3 + 1) & 0xFFFFFFFFFFFFFFFF
    return count + len(tokens), value


class FakeStates:
    """Slots of states. `strict`: False leaves it to the tokens to show what is wrong."""

    def __init__(self, num_slots: int) -> None:
        self.slots: list[State | None] = [FIRST, *[None] * (num_slots - 1)]
        self.strict = True

    def advance(self, rows: Sequence[Row], context: Callable[[Row], list[int]], lost: Sequence[int] = ()) -> None:
        """One step. `context`: the tokens that a row attends to, those it computes included. `lost`: rows that are left
        with anything, and so are those that build on them."""
        if self.strict:
            self._check(rows)
        states = [self._read(row) for row in rows]  # rows may run in any order: all read what was there before
        for index, (row, before) in enumerate(zip(rows, states, strict=True)):
            tokens, use = context(row), row.state
            assert use is not None
            if index in lost or before == LOST:
                for slot in (use.slot, *(slot for _, slot in use.saves)):
                    self.slots[slot] = LOST
                continue
            if self.strict and before != after(FIRST, tokens[: row.start]):
                raise AssertionError(
                    f"row {row.spec.ticket} starts at {row.start}, but slot {use.source} holds {before}"
                )
            for position, slot in (*use.saves, (len(tokens), use.slot)):
                self.slots[slot] = after(before, tokens[row.start : position])

    def forget(self) -> None:
        """Forget all states, as if none had been written."""
        self.slots[1:] = [None] * (len(self.slots) - 1)

    def difference(self, row: Row, tokens: Sequence[int]) -> int:
        """0 if the state after `row` is that of `tokens`; else something that depends on what it is instead."""
        assert row.state is not None
        count, value = self.slots[row.state.slot] or FIRST
        expected = after(FIRST, tokens)
        return (value ^ expected[1]) + abs(count - expected[0])

    def _read(self, row: Row) -> State:
        if row.state is None:
            raise AssertionError(f"row {row.spec.ticket} says nothing of its state")
        return self.slots[row.state.source] or FIRST

    def _check(self, rows: Sequence[Row]) -> None:
        writers: dict[int, int] = {}
        for row in rows:
            use = row.state
            assert use is not None
            ticket, at = row.spec.ticket, row.start
            for position, _ in use.saves:
                if not at < position <= row.start + row.num_scheduled:
                    raise AssertionError(f"row {ticket} takes a snapshot at {position}, outside of itself")
                at = position
            for slot in (use.slot, *(slot for _, slot in use.saves)):
                if not 0 < slot < len(self.slots):
                    raise AssertionError(f"row {ticket} writes state slot {slot}")
                if slot in writers:
                    raise AssertionError(f"rows {writers[slot]} and {ticket} both write state slot {slot}")
                writers[slot] = ticket
        for row in rows:
            use = row.state
            assert use is not None
            if use.source != use.slot and use.source in writers:
                raise AssertionError(f"row {row.spec.ticket} reads state slot {use.source}, which this step writes")
            if self.slots[use.source] is None:
                raise AssertionError(f"row {row.spec.ticket} reads state slot {use.source}, which nobody wrote")
