"""Host memory and device slots together, on the fake runner: files that load slowly or not at all, and leavers."""

from __future__ import annotations

import queue
import random

import pytest
from support.fake_adapters import FakeLoader
from support.fake_engine import Steps
from support.long import LONG

from asyncengine.errors import AdapterError
from asyncengine.lora.admission import AdapterSlots
from asyncengine.lora.registry import AdapterRegistry
from asyncengine.scheduler.messages import AdapterReady

ADAPTERS = [f"adapter {i}" for i in range(64)]


class Engine:
    """An engine that does wiring's work: claim at submit, start when taken up, post what comes back, cancel at last."""

    def __init__(self, room: int, slots: int, seed: int) -> None:
        self.loader = FakeLoader()
        self.registry = AdapterRegistry(self.loader, max_bytes=room * self.loader.nbytes, max_passes=32)
        self.slots = AdapterSlots(slots, self.registry.get)
        self.steps = Steps(adapters=self.slots, pages=600, max_num_seqs=16, max_passes=32, check_every=50)
        self.inbox: queue.SimpleQueue[AdapterReady] = queue.SimpleQueue()
        self.chance = random.Random(seed)
        self.digests: dict[int, str] = {}
        self.alive: dict[int, None] = {}

    def submit(self, name: str) -> int:
        ticket = len(self.digests) + 1  # the one `steps` draws next
        self.digests[ticket] = digest = self.registry.claim([ticket], name)
        prompt = [2 + self.chance.randrange(60), 3, 4]
        drawn = self.steps.add(prompt, self.chance.randrange(1, 9), adapter=digest, adapter_loading=True)
        assert drawn == ticket
        self.alive[ticket] = None
        self.registry.start(ticket, self.done)
        return ticket

    def done(self, ticket: int, outcome: str | Exception) -> None:
        failed = isinstance(outcome, Exception)
        self.inbox.put(AdapterReady(ticket, error=outcome) if failed else AdapterReady(ticket, outcome))

    def turn(self) -> None:
        self.hear(wait=False)
        batch = self.steps.step()
        for ticket in [ticket for ticket in self.alive if ticket in self.steps.ended]:
            del self.alive[ticket]
            self.registry.cancel(ticket)
        if batch is None and self.alive and not self.steps.launched and not self.steps.scheduler.waiting:
            self.hear(wait=True)
        for row in batch.rows if batch is not None else ():
            assert self.slots.resident[self.digests[row.spec.ticket]] == row.adapter_slot

    def hear(self, wait: bool) -> None:
        while wait or not self.inbox.empty():
            self.steps.apply(self.inbox.get(timeout=120))
            wait = False


@pytest.mark.parametrize(("room", "slots"), [*LONG * [(64, 4), (8, 4)], (2, 4), (1, 1)])
def test_a_thousand_requests_over_64_adapters(room: int, slots: int):
    engine = Engine(room, slots, seed=room)
    for name in ADAPTERS:
        engine.registry.load(name, name).result(120)
    left = 1000
    while left or engine.alive:
        for _ in range(min(left, engine.chance.choice([0, 2, 6]))):
            skewed = min(int(engine.chance.expovariate(0.15)), 63)
            engine.submit(ADAPTERS[skewed if engine.chance.random() < 0.7 else engine.chance.randrange(64)])
            left -= 1
        if engine.alive and engine.chance.random() < 0.2:  # somebody leaves
            engine.steps.abort(engine.chance.choice(list(engine.alive)))
        engine.turn()
    engine.registry.check()
    engine.slots.check()
    assert len(engine.steps.ended) == 1000
    assert all(reason in ("length", "abort") for reason in engine.steps.ended.values())
    assert not engine.slots.in_use
    infos = engine.registry.list()
    assert all(info.requests == 0 for info in infos)
    assert sum(info.nbytes for info in infos if info.in_memory) <= room * engine.loader.nbytes
    for info in infos:
        engine.registry.unload(info.name).result(120)
    assert engine.registry.list() == ()
    engine.steps.assert_right([t for t, reason in engine.steps.ended.items() if reason == "length"])
    engine.registry.close()


def test_a_load_that_fails_under_way_ends_those_who_wait_for_it_only():
    engine = Engine(room=1, slots=2, seed=0)
    for name in ADAPTERS[:3]:
        engine.registry.load(name, name).result(120)
    engine.loader.contents[ADAPTERS[0]] = "bad"
    lost = [engine.submit(ADAPTERS[0]) for _ in range(3)]
    fine = [engine.submit(name) for name in ADAPTERS[1:3]]
    while engine.alive:
        engine.turn()
    for ticket in lost:
        assert engine.steps.ended[ticket] == "error"
        assert isinstance(engine.steps.errors[ticket], AdapterError)
    engine.steps.assert_right(fine)
    assert not engine.slots.in_use
    engine.registry.close()
