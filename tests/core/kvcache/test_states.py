"""Slots of recurrent states: who has which, what is given up for what, and that the books find what is planted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from asyncengine.errors import InvariantViolation
from asyncengine.kvcache import KVCache, PageTable
from asyncengine.kvcache.retiring import Retiring

SIZE = 4


def books(num_states: int = 6, pages: int = 64, *, prefix_caching: bool = True) -> KVCache:
    return KVCache(pages, SIZE, prefix_caching=prefix_caching, num_states=num_states)


class Run:
    """One request that is run by hand: its whole prompt in one step."""

    def __init__(self, kv: KVCache, tokens: list[int], step: int, *, shared: bool = True) -> None:
        assert kv.states is not None
        self.kv, self.tokens, self.step = kv, tokens, step
        self.table: PageTable = kv.open(("", ""), tokens, len(tokens) - 1)
        self.start = self.table.num_shared * SIZE
        self.started = kv.take_state(self.table, len(tokens), shared=shared)
        if not self.started:
            kv.close(self.table, 0)
            return
        assert kv.grow(self.table, len(tokens))
        assert self.table.state is not None
        self.use = kv.states.use(self.table.state, self.start, len(tokens), step)

    def retire(self) -> None:
        assert self.kv.states is not None
        assert self.table.state is not None
        self.kv.retire(self.step)
        self.kv.publish(self.table, self.tokens, len(self.tokens), self.step)
        self.kv.states.settle(self.use.saves, self.table.state, self.table.node, SIZE)

    def end(self) -> None:
        """The last that runs."""
        self.kv.check([self.table])
        self.retire()
        self.kv.check([self.table])
        self.kv.close(self.table, self.step)
        self.kv.check([])


def test_a_state_of_more_than_is_published_hangs_on_no_page() -> None:
    """It has taken in tokens behind the last page, from which it would be a wrong start."""
    kv = books()
    run = Run(kv, [1, 2, 3, 4, 5, 6, 7, 8, 9], 1)
    assert [position for position, _ in run.use.saves] == [8]
    kv.retire(1)
    kv.publish(run.table, run.tokens, 4, 1)
    assert kv.states is not None
    assert run.table.state is not None
    free = kv.states.counts(1).free
    kv.states.settle(run.use.saves, run.table.state, run.table.node, SIZE)
    assert kv.states.snapshot_of(run.table.node) is None
    assert kv.states.counts(1).free == free + 1
    kv.check([run.table])


def test_the_earlier_turns_of_a_chat_go_first() -> None:
    """With plain LRU one long chat keeps all of its turns fresh, and others lose their ends (SGLang #36935)."""
    kv = books(num_states=7, pages=200)
    step = 0
    chats = [[100 + chat] * 5 for chat in range(4)]
    found = 0
    for turn in range(6):
        for index, chat in enumerate(chats):
            step += 1
            run = Run(kv, chat, step)
            found += run.start
            assert run.start == (len(chat) - 9 if turn else 0)
            run.end()
            chats[index] = chat + [1] * 8
    assert found


def hang_it_elsewhere(kv: KVCache, run: Run) -> None:
    (snapshot,) = kv.states.snapshots.values()  # type: ignore[union-attr]
    snapshot.node.state = 0
    snapshot.node.parent.state = snapshot.slot  # type: ignore[union-attr]


PLANTS: dict[str, Callable[[Any, Any], object]] = {
    "a lost slot": lambda kv, run: kv.states.pool.take(1),
    "a shared slot": lambda kv, run: setattr(run.table.state, "slot", next(iter(kv.states.snapshots))),
    "a snapshot of another page": hang_it_elsewhere,
    "a forgotten reader": lambda kv, run: setattr(kv.states, "reading", Retiring(lambda snapshot: None)),
    "a slot that is being saved": lambda kv, run: kv.states.saving.clear(),
}


@pytest.mark.parametrize("name", PLANTS)
def test_the_check_finds(name: str) -> None:
    kv = books(num_states=9)
    Run(kv, [1] * 9, 1).end()
    run = Run(kv, [1] * 14, 2)
    assert run.use.source
    assert run.use.saves
    PLANTS[name](kv, run)
    with pytest.raises(InvariantViolation):
        kv.check([run.table])
