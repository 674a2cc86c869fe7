"""Would the fuzz notice? Each test plants one bug that a real engine had, or nearly had, and the fuzz must find it."""

from __future__ import annotations

from typing import Any

import pytest
from worlds.plants import Plant, in_place_of
from worlds.schedule_fuzz import Life

from asyncengine.errors import InvariantViolation
from asyncengine.kvcache.kv_cache import KVCache
from asyncengine.kvcache.page_group import PageGroup
from asyncengine.kvcache.radix_tree import RadixTree
from asyncengine.kvcache.retiring import Retiring
from asyncengine.scheduler.admission import Admission
from asyncengine.scheduler.roster import Roster
from asyncengine.scheduler.slots import Slots


@in_place_of(Roster, "publish")
def publish_what_was_never_computed(_: Any, self: Roster, request: Any) -> None:
    """The last sampled token has no keys and values yet, but its page goes into the cache as if it had."""
    if self.kv.prefix_caching and len(request.tokens) // self.kv.page_size > request.table.num_shared:
        computed = min(len(request.tokens), len(request.table.pages) * self.kv.page_size)
        self.kv.publish(request.table, request.tokens, computed, request.last_step)


@in_place_of(Retiring, "add")
def free_under_a_running_step(_: Any, self: Retiring[Any], thing: Any, fence: int) -> None:
    """Pages return although a launched step still names them (mini-sglang #89)."""
    self._give_back(thing)


def match_the_whole_prompt(patch: pytest.MonkeyPatch) -> None:
    """A full prefix hit leaves nothing to compute (nano-vllm #144)."""
    patch.setattr(Admission, "match_limit", lambda self, request: len(request.tokens))


@in_place_of(KVCache, "publish")
def keep_the_duplicate_page(publish: Any, self: KVCache, table: Any, *args: Any) -> None:
    """Duplicates of a page another request published first are freed, but still used (mini-sglang #142)."""
    pages = table.pages
    publish(self, table, *args)
    table.pages = pages


def forget_to_unlock(patch: pytest.MonkeyPatch) -> None:
    """A finished request keeps its prefix locked for ever."""
    patch.setattr(RadixTree, "unlock", lambda *args, **more: None)


@in_place_of(KVCache, "close")
def leak_one_page_of_who_leaves(close: Any, self: KVCache, table: Any, fence: int) -> None:
    """The last page of a request that ends is lost."""
    if len(table.own_pages()) > 1:
        table.pages = table.pages[:-1]
    close(self, table, fence)


def evict_pages_in_use(patch: pytest.MonkeyPatch) -> None:
    """Eviction ignores locks."""

    def broken(self: RadixTree, count: int) -> list[int]:
        leaves = [node for node in self.nodes() if not node.children][:count]
        for node in leaves:
            node.locks = 0
        return [self.remove(node) for node in leaves]

    patch.setattr(RadixTree, "evict", broken)
    patch.setattr(PageGroup, "num_available", property(lambda self: self.pool.num_free + self.tree.num_pages))
    patch.setattr(KVCache, "check", lambda self, tables: None)  # the tokens must show it, not only the books


@in_place_of(Roster, "preempt")
def believe_results_of_an_earlier_life(preempt: Any, self: Roster, request: Any) -> None:
    """A result launched before a preemption counts as computed after it (vLLM #41951)."""
    preempt(self, request)
    request.epoch -= 1


def hand_out_a_slot_in_flight(patch: pytest.MonkeyPatch) -> None:
    """A slot is reused while a launched step will still write its last token into it."""

    def broken(self: Slots, request: Any, fence: int) -> None:
        slot, request.slot = request.slot, -1
        self._free.append(slot)

    patch.setattr(Slots, "release", broken)
    patch.setattr(Slots, "check", lambda self, running: None)


@in_place_of(Roster, "preempt")
def forget_tokens_when_preempted(preempt: Any, self: Roster, request: Any) -> None:
    """A preempted request starts its output again."""
    preempt(self, request)
    request.tokens = request.tokens[: request.spec.prompt_len]


@in_place_of(Roster, "end_ticket")
def end_twice(end_ticket: Any, self: Roster, ticket: int, reason: Any) -> None:
    """An abort of a request that has just ended ends it again."""
    if ticket not in self.requests:
        from asyncengine.scheduler import Output

        self.outputs.append(Output(ticket, reason=reason))
    end_ticket(self, ticket, reason)


@in_place_of(Roster, "preempt")
def lose_who_is_preempted(preempt: Any, self: Roster, request: Any) -> None:
    """A preempted request is in no queue."""
    preempt(self, request)
    self.waiting.remove(request)


PLANTS = [plant for plant in [*vars().values()] if "patch" in getattr(plant, "__annotations__", ())]
"""All functions above that take a `patch`."""


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_the_fuzz_finds(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, InvariantViolation, ValueError, IndexError, KeyError)):
        live(60, depth=2)


def test_the_fuzz_finds_a_pooled_text_that_starts_from_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text of which all positions are pooled must be computed whole."""
    monkeypatch.setattr(Admission, "match_limit", lambda self, request: len(request.tokens) - 1)
    with pytest.raises(AssertionError, match="was not computed, and counts"):
        live(12, vectors=1.0)


def live(seeds: int, **kind: Any) -> None:
    for seed in range(seeds):
        Life(seed, **kind).run()
