"""Slots of recurrent states: who has which, what is given up for what, and that the books find what is planted."""

from __future__ import annotations

from collections.abc import Callable

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


def test_a_prompt_leaves_a_snapshot_at_its_last_full_page_and_the_next_one_starts_there() -> None:
    kv = books()
    first = Run(kv, [1, 2, 3, 4, 5, 6, 7, 8, 9], 1)
    assert first.use.source == 0
    assert [position for position, _ in first.use.saves] == [8]
    first.end()
    again = Run(kv, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 2)
    assert (again.start, again.use.source) == (8, first.use.saves[0][1])
    assert not again.use.saves
    again.end()
    counts = kv.state_counts([])
    assert (counts.snapshots, counts.hits, counts.free) == (1, 1, 4)


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


def test_where_ways_part_a_snapshot_is_left_for_the_third() -> None:
    kv = books()
    common = [1, 2, 3, 4]
    Run(kv, [*common, 5, 5, 5, 5, 5], 1).end()
    second = Run(kv, [*common, 6, 6, 6, 6, 6], 2)
    assert (second.start, [position for position, _ in second.use.saves]) == (0, [4, 8])
    second.end()
    third = Run(kv, [*common, 7, 7, 7, 7, 7], 3)
    assert (third.start, [position for position, _ in third.use.saves]) == (4, [8])
    third.end()


def test_a_state_that_ends_on_a_page_becomes_its_snapshot() -> None:
    kv = books()
    Run(kv, [1, 2, 3, 4, 5, 6, 7, 8], 1).end()
    counts = kv.state_counts([])
    assert (counts.snapshots, counts.free) == (2, 3)  # behind 4, where a second like it could start, and behind 8
    longer = Run(kv, [1, 2, 3, 4, 5, 6, 7, 8, 9], 2)
    assert longer.start == 8
    longer.end()


def test_who_runs_takes_the_slot_of_the_least_recently_used_snapshot() -> None:
    kv = books(num_states=4)
    prompts = [[start] * 5 for start in (10, 20, 30)]
    Run(kv, prompts[0], 1).end()
    Run(kv, prompts[1], 2).end()
    Run(kv, prompts[0], 3).end()  # the first is the one that was used last
    running = [Run(kv, prompts[2], 4, shared=False), Run(kv, [40] * 5, 4, shared=False)]
    assert all(run.started for run in running)
    tables = [run.table for run in running]
    assert kv.state_counts(tables).evictions == 1
    kv.check(tables)
    assert kv.peek(("", ""), prompts[0], 4) == 4
    assert kv.peek(("", ""), prompts[1], 4) == 0


def test_the_only_slot_is_taken_over_by_who_starts_from_it() -> None:
    kv = books(num_states=2)
    first = Run(kv, [1, 1, 1, 1], 1)
    assert not first.use.saves, "a snapshot has no right to the slot of who runs"
    first.end()
    again = Run(kv, [1, 1, 1, 1, 2, 2], 2)
    assert (again.start, again.use.source, again.use.slot) == (4, 1, 1)
    again.end()


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


def test_without_a_cache_nothing_outlives_the_samples_of_one_prompt() -> None:
    kv = books(prefix_caching=False)
    first = Run(kv, [1] * 9, 1)
    first.retire()
    second = Run(kv, [1] * 9, 2)
    assert second.start == 8
    kv.close(first.table, 1)
    second.end()
    assert kv.state_counts([]).free == 5


def test_slots_and_pages_return_when_the_last_step_that_names_them_has_retired() -> None:
    kv = books(2, prefix_caching=False)
    run = Run(kv, [1] * 9, 3)
    kv.close(run.table, 3)
    kv.retire(2)
    assert not kv.can_start
    assert kv.anything_retiring
    with pytest.raises(InvariantViolation, match="in flight"):
        kv.clear()
    kv.retire(3)
    assert kv.can_start
    kv.clear()


def test_a_state_is_not_taken_back() -> None:
    kv = books()
    run = Run(kv, [1] * 9, 1)
    assert kv.states is not None
    assert run.table.state is not None
    with pytest.raises(InvariantViolation, match="starts at 8, but its state is that of position 9"):
        kv.states.use(run.table.state, 8, 9, 2)


def lose_one(kv: KVCache, run: Run) -> None:
    kv.states.pool.take(1)  # type: ignore[union-attr]


def share_one(kv: KVCache, run: Run) -> None:
    run.table.state.slot = next(iter(kv.states.snapshots))  # type: ignore[union-attr]


def hang_it_elsewhere(kv: KVCache, run: Run) -> None:
    (snapshot,) = kv.states.snapshots.values()  # type: ignore[union-attr]
    snapshot.node.state = 0
    snapshot.node.parent.state = snapshot.slot  # type: ignore[union-attr]


def forget_a_reader(kv: KVCache, run: Run) -> None:
    kv.states.reading = Retiring(lambda snapshot: None)  # type: ignore[union-attr]


def keep_what_is_saved(kv: KVCache, run: Run) -> None:
    kv.states.saving.clear()  # type: ignore[union-attr]


@pytest.mark.parametrize("plant", [lose_one, share_one, hang_it_elsewhere, forget_a_reader, keep_what_is_saved])
def test_the_check_finds(plant: Callable[[KVCache, Run], None]) -> None:
    kv = books(num_states=9)
    Run(kv, [1] * 9, 1).end()
    run = Run(kv, [1] * 14, 2)
    assert run.use.source
    assert run.use.saves
    plant(kv, run)
    with pytest.raises(InvariantViolation):
        kv.check([run.table])


@pytest.mark.parametrize("plant", [lose_one, keep_what_is_saved])
def test_the_cheap_check_finds(plant: Callable[[KVCache, Run], None]) -> None:
    kv = books(num_states=9)
    run = Run(kv, [1] * 14, 1)
    plant(kv, run)
    with pytest.raises(InvariantViolation, match="state slots do not add up"):
        kv.check_sums([run.table])


def saves(kv: KVCache) -> list[PageTable]:
    return [Run(kv, [1] * 14, 1).table]


def retires(kv: KVCache) -> list[PageTable]:
    run = Run(kv, [1] * 3, 1)  # no page of it is full: nothing is saved
    kv.close(run.table, 1)
    return []


def reads(kv: KVCache) -> list[PageTable]:
    Run(kv, [1] * 9, 1).end()
    run = Run(kv, [1] * 9, 2)
    assert (bool(run.use.source), run.use.saves) == (True, ())
    return [run.table]


@pytest.mark.parametrize("begin", [saves, retires, reads])
def test_an_idle_engine_waits_for_no_step(begin: Callable[[KVCache], list[PageTable]]) -> None:
    kv = books()
    tables = begin(kv)
    kv.check_sums(tables)
    with pytest.raises(InvariantViolation, match=r"state slots .* none is in flight"):
        kv.check_sums(tables, idle=True)
