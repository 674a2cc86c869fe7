"""Would the adapter fuzz notice? Each test plants one bug of adapters, and answers and ends alone must show it."""

from __future__ import annotations

from typing import Any

import pytest
from support.long import LONG
from worlds.adapter_fuzz import AdapterLife
from worlds.plants import Plant, in_place_of

from asyncengine.engine.loop_client import LoopClient
from asyncengine.errors import AdapterNotFound, EngineError
from asyncengine.lora.admission import AdapterSlots
from asyncengine.lora.claims import Calls, Claims, HostStore
from asyncengine.lora.registry import AdapterRegistry
from asyncengine.scheduler.admission import Admission
from asyncengine.scheduler.roster import Roster
from asyncengine.scheduler.slots import Slots
from asyncengine.seams import AdapterDone
from asyncengine.step import AdapterSwap

# ---------------------------------------------------------------- slots


def lose_a_swap(patch: pytest.MonkeyPatch) -> None:
    """A slot keeps the first adapter it has held."""
    take = AdapterSlots.take_swaps
    filled: dict[int, list[int]] = {}

    def broken(self: AdapterSlots) -> tuple[AdapterSwap, ...]:
        known = filled.setdefault(id(self), [])
        swaps = tuple(swap for swap in take(self) if swap.slot not in known)
        known += [swap.slot for swap in swaps]
        return swaps

    patch.setattr(AdapterSlots, "take_swaps", broken)


def swap_one_step_late(patch: pytest.MonkeyPatch) -> None:
    take = AdapterSlots.take_swaps
    late: dict[int, tuple[AdapterSwap, ...]] = {}

    def broken(self: AdapterSlots) -> tuple[AdapterSwap, ...]:
        swaps, late[id(self)] = late.get(id(self), ()), take(self)
        return swaps

    patch.setattr(AdapterSlots, "take_swaps", broken)


def release_before_the_step_retires(patch: pytest.MonkeyPatch) -> None:
    release = Slots.release
    patch.setattr(Slots, "release", lambda self, request, fence: release(self, request, 0))


def keep_the_old_slot_after_preemption(patch: pytest.MonkeyPatch) -> None:
    acquire, release = Slots.acquire, Slots.release
    old: dict[int, int] = {}

    def released(self: Slots, request: Any, fence: int) -> None:
        old[id(request)] = request.adapter_slot
        release(self, request, fence)

    def acquired(self: Slots, request: Any, running: Any) -> None:
        acquire(self, request, running)
        if request.preemptions and request.adapter_digest:
            request.adapter_slot = old[id(request)]

    patch.setattr(Slots, "release", released)
    patch.setattr(Slots, "acquire", acquired)


@in_place_of(Roster, "preempt")
def keep_the_adapter_of_who_is_preempted(preempt: Any, self: Roster, request: Any) -> None:
    """Its slot is taken once more at every admission."""
    if request.adapter_digest:
        self.slots.adapters.admit(request.adapter_digest, [])  # type: ignore[union-attr]
    preempt(self, request)


@in_place_of(AdapterSlots, "release")
def evict_an_adapter_in_use(release: Any, self: AdapterSlots, digest: str) -> None:
    """Only one of several requests keeps its slot."""
    users = self._users.get(digest, 0)
    if users > 1:
        self._idle[digest] = None
    release(self, digest)


# ---------------------------------------------------------------- cache


def share_prefixes_across_adapters(patch: pytest.MonkeyPatch) -> None:
    namespace = Admission.namespace
    patch.setattr(Admission, "namespace", lambda self, request: ("", *namespace(self, request)[1:]))


# ---------------------------------------------------------------- claims and memory


@in_place_of(AdapterRegistry, "start")
def let_go_when_the_adapter_is_there(start: Any, self: AdapterRegistry, ticket: int, done: AdapterDone) -> None:
    """The claim ends when the request leaves the adapter queue: what it will copy may be dropped under it."""

    def told(ticket: int, outcome: str | Exception) -> None:
        done(ticket, outcome)
        self.cancel(ticket)

    start(self, ticket, told)


def hold_nothing(patch: pytest.MonkeyPatch) -> None:
    """A granted claim does not keep its content in memory."""
    patch.setattr(HostStore, "hold", lambda self, digest: None)
    patch.setattr(HostStore, "let_go", lambda self, digest: None)


@in_place_of(Claims, "remove")
def forget_claims_of_who_leaves(remove: Any, self: Claims, ticket: int) -> str | None:
    """One that leaves before its adapter is in memory gives nothing back."""
    claim = self.by_ticket.get(ticket)
    return remove(self, ticket) if claim is None or claim.granted else None


def claim_for_the_first_sample_only(patch: pytest.MonkeyPatch) -> None:
    claim = AdapterRegistry.claim
    patch.setattr(AdapterRegistry, "claim", lambda self, tickets, name: claim(self, tickets[:1], name))


@in_place_of(Claims, "reloaded")
def tell_only_the_first_that_a_load_failed(
    reloaded: Any, self: Claims, digest: str, adapter: Any, error: Any, calls: Calls
) -> None:
    reloaded(self, digest, adapter, error, every := Calls())
    calls += every[:1]


@in_place_of(AdapterRegistry, "get")
def copy_what_the_name_means_now(get: Any, self: AdapterRegistry, digest: str) -> Any:
    """Requests that claimed the old content get the new one."""
    adapter = get(self, digest)
    now = self._names.get(adapter.name)
    return adapter if now is None else self.store.resident.get(now.digest, adapter)


@in_place_of(AdapterRegistry, "stays")
def drop_replaced_content_under_its_requests(_: Any, self: AdapterRegistry, digest: str) -> bool:
    return any(of.pinned for of in self._names.values() if of.digest == digest)


@in_place_of(AdapterRegistry, "_load")
def let_the_first_load_win(
    load: Any, self: AdapterRegistry, name: str, read: Any, path: str, pinned: bool, order: int
) -> Any:
    return load(self, name, read, path, pinned, 10**6 - order)


@in_place_of(AdapterRegistry, "unload")
def bring_back_what_was_unloaded(unload: Any, self: AdapterRegistry, name: str, *, wait: bool = False) -> Any:
    """A load that was asked for before the unload and ends after it takes effect."""
    gone = unload(self, name, wait=wait)
    self._changed_by.pop(name, None)
    return gone


@in_place_of(Claims, "reloaded")
def take_changed_files_for_the_same(
    reloaded: Any, self: Claims, digest: str, adapter: Any, error: Any, calls: Calls
) -> None:
    """An adapter that is read again goes under the digest that was asked for, whatever its content is."""
    if adapter is None or error is None:
        return reloaded(self, digest, adapter, error, calls)
    real = adapter.digest
    object.__setattr__(adapter, "digest", digest)
    reloaded(self, digest, adapter, None, calls)
    object.__setattr__(adapter, "digest", real)  # what its weights really are
    return None


def hold_up_those_who_must_drain(patch: pytest.MonkeyPatch) -> None:
    """Once a claim that waits for memory has been passed often enough, nobody is granted before it: not even those
    whose content cannot leave memory because they claim it, and no name means it any more."""
    pump, stays = Claims.pump, AdapterRegistry.stays

    def broken(self: Claims, calls: Any) -> Any:
        registry, victims = self.stays.__self__, self._store.victims  # type: ignore[attr-defined]

        def real(need: int, keeps: Any, leaves: Any = None) -> Any:
            return victims(need, lambda digest: stays(registry, digest), leaves)

        with pytest.MonkeyPatch.context() as within:
            within.setattr(self, "stays", lambda digest: False)
            within.setattr(self._store, "victims", real)
            return pump(self, calls)

    patch.setattr(Claims, "pump", broken)


@in_place_of(LoopClient, "post")
def keep_the_places_of_who_is_refused_late(post: Any, self: LoopClient, group: Any) -> None:
    try:
        post(self, group)
    except AdapterNotFound:
        self.loop.queue_limit.leave(-group.samples, -group.num_tokens)
        raise


SELDOM_SHOWN: list[Plant] = [
    release_before_the_step_retires,
    drop_replaced_content_under_its_requests,
    hold_up_those_who_must_drain,
]
"""The fake device copies in order with its steps, files can be read again, and one who leaves ends a deadlock."""
PLANTS = [
    plant
    for plant in [*vars().values()]
    if "patch" in getattr(plant, "__annotations__", ()) and plant not in SELDOM_SHOWN
]
"""The other functions above that take a `patch`."""
SELDOM_MET: list[Plant] = [bring_back_what_was_unloaded]
"""Bugs that the short form of the random lives does not meet. It finds all others: half of them suffice here."""
SHORT = [plant for place, plant in enumerate(PLANTS) if place % 2 == 0 or plant in SELDOM_MET]


@pytest.mark.parametrize("plant", PLANTS if LONG else SHORT, ids=lambda plant: plant.__name__)
def test_the_answers_show(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, EngineError, KeyError)):
        live(watched=False)


@pytest.mark.parametrize("plant", SELDOM_SHOWN, ids=lambda plant: plant.__name__)
def test_the_books_show(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, EngineError)):
        live(watched=True)


FIRST = (24, 29, 16)
"""Lives that show what others seldom do: they are lived first, to be quick."""


def live(watched: bool, seeds: int = 60) -> None:
    for seed in (*FIRST, *range(seeds)):
        life = AdapterLife(seed, depth=2)
        life.watched = watched
        life.run()
