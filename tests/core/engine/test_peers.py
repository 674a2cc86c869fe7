"""Prefixes that peers have, of fake engines: right tokens whatever a peer says, and nobody waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from support.fake_engine import CACHE_KINDS, GREEDY, PATIENCE, SteppedExecutor, make_core, until
from support.fake_memory import FakePageMemory

from asyncengine import AsyncEngine
from asyncengine.engine import peers, prefix_store
from asyncengine.engine.peers import PeerPrefixes
from asyncengine.engine.prefix_sources import Hit
from asyncengine.outputs import Completion
from asyncengine.request_spec import Peer
from asyncengine.scheduler.restores import Wanted
from asyncengine.step import RecordType
from asyncengine.testing.leaks import assert_nothing_held

SIZE = 4
PROMPT = [2 + (7 * place) % 90 for place in range(62)]
FULL = (len(PROMPT) - 1) // SIZE
IDENTITY = {"model weights": "these"}
Answer = Callable[[bytes], Awaitable[bytes]]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of two records each, for which everybody waits."""
    monkeypatch.setattr(prefix_store, "LEAST_PATIENCE", PATIENCE)
    monkeypatch.setattr(prefix_store, "WORTH", 1e9)
    monkeypatch.setattr(peers, "ASK_SECONDS", PATIENCE)
    monkeypatch.setattr(peers, "BATCH_BYTES", 2 * SIZE * 8)


class Wire:
    """A connection between two engines: `tamper` gets the answer's maker and the question, and makes another answer."""

    def __init__(self) -> None:
        self.theirs: PeerPrefixes | None = None
        self.questions: list[dict[str, Any]] = []
        self.under_way = self.most_under_way = 0
        self.tamper: Callable[[Answer, bytes], Awaitable[bytes]] = lambda answer, question: answer(question)

    async def __call__(self, peer: Peer, question: bytes) -> bytes:
        assert self.theirs is not None
        self.questions.append(json.loads(question))
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            return await self.tamper(self.theirs.answer, question)
        finally:
            self.under_way -= 1


class Pair:
    """An engine that has computed `PROMPT`, and one that may ask it."""

    def __init__(self, there: AsyncEngine, here: AsyncEngine, wire: Wire) -> None:
        self.there, self.here, self.wire = there, here, wire
        self.peer = Peer("there", "", b"", FULL)
        """The peer that requests to the second engine name."""

    async def ask(self, prompt: list[int] = PROMPT, *, pages: int = FULL) -> Completion:
        """The second engine's answer to a prompt of which the first has so many pages."""
        self.peer = self.peer._replace(pages=pages)
        return await right(self.here, prompt)

    @property
    def restores(self) -> Any:
        return self.here.core.loop.scheduler.restores


async def right(engine: AsyncEngine, prompt: list[int]) -> Completion:
    answer = await engine.generate(prompt, GREEDY.replace(max_tokens=5, seed=0))
    if engine.core.loop.scheduler.kv.windows is None:
        executor = engine.core.loop.runner.executor  # type: ignore[attr-defined]
        assert answer.token_ids == executor.model.oracle(prompt, 5, 0, (1,)), "a wrong token"
    return answer


def engine_of(kind: str, wire: Wire, identity: dict[str, str]) -> tuple[AsyncEngine, PeerPrefixes]:
    executor = SteppedExecutor(128, SIZE, **CACHE_KINDS[kind])
    core = make_core(executor)
    prefixes = PeerPrefixes(core.loop.scheduler.kv, identity, FakePageMemory(executor), core.loop.clock, wire)
    core.loop.sources.add(prefixes)
    return AsyncEngine(lambda: core), prefixes


@contextlib.asynccontextmanager
async def pair_of(kind: str = "pages", theirs: dict[str, str] = IDENTITY) -> AsyncIterator[Pair]:
    wire = Wire()
    there, wire.theirs = engine_of(kind, wire, theirs)
    here, _ = engine_of(kind, wire, IDENTITY)
    async with there, here:
        pair = Pair(there, here, wire)
        prepare = here.core.prepare

        def told(*args: Any, **options: Any) -> Any:
            prepared = prepare(*args, **options)
            for spec in prepared.specs:
                object.__setattr__(spec, "peer", pair.peer)
            return prepared

        here.core.prepare = told  # type: ignore[method-assign]
        await right(there, PROMPT)
        yield pair
        await until(lambda: not pair.restores, "the end of all pulls")
        for engine in (there, here):
            assert_nothing_held(engine.core)


@pytest.mark.parametrize("kind", CACHE_KINDS)
async def test_a_prefix_is_had_from_a_peer(kind: str) -> None:
    async with pair_of(kind) as pair:
        expected = await right(pair.there, PROMPT)
        answer = await pair.ask()
        assert answer.token_ids == expected.token_ids
        assert answer.usage.restored_tokens == answer.usage.cached_tokens == FULL * SIZE
        first, *others = pair.wire.questions
        assert "parts" not in first
        assert len(others) == (1 if kind == "windows" else -(-sum(len(each["parts"]) for each in others) // 2))
        assert pair.wire.most_under_way == (1 if kind == "windows" else 2)
        assert pair.here.stats().restored_tokens == FULL * SIZE
        assert (await pair.ask()).usage.restored_tokens == 0  # it is here now
        assert len(pair.wire.questions) == 1 + len(others)


async def test_only_what_is_not_here_is_pulled() -> None:
    async with pair_of() as pair:
        await pair.ask(PROMPT[:26], pages=0)
        assert pair.wire.questions == []
        answer = await pair.ask()
        assert (answer.usage.cached_tokens, answer.usage.restored_tokens) == (FULL * SIZE, (FULL - 6) * SIZE)
        parts = [place for question in pair.wire.questions[1:] for _, place in question["parts"]]
        assert parts == [*range(6, FULL)]


@pytest.mark.parametrize("planned", [False, True])
async def test_a_peer_is_asked_only_where_that_is_worth_it_or_planned(planned: bool) -> None:
    async with pair_of() as pair:
        await pair.ask(PROMPT[:26], pages=6)
        pair.wire.questions.clear()
        pair.here.core.loop.sources.tiers[0].saw(SimpleNamespace(num_tokens=10**6, rows=()), 1e-9)
        pair.peer = Peer("there", "", b"", FULL, planned)
        assert (await pair.ask()).usage.restored_tokens == planned * (FULL - 6) * SIZE
        assert bool(pair.wire.questions) is planned


# ---------------------------------------------------------------- what may be wrong with a peer


def changed(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


async def flips(answer: Answer, question: bytes) -> bytes:
    said = await answer(question)
    return changed(said, len(said) - 3) if b"parts" in question else said


async def flips_a_token(answer: Answer, question: bytes) -> bytes:
    """A token of the description is another one, with a checksum that is right."""
    said = await answer(question)
    if b"parts" not in question:
        return said
    asked = json.loads(question)
    return await answer(json.dumps({**asked, "tokens": [*asked["tokens"][:-1], 1]}).encode())


async def cuts(answer: Answer, question: bytes) -> bytes:
    said = await answer(question)
    return said[: len(said) // 2] if b"parts" in question else said


async def sends_others(answer: Answer, question: bytes) -> bytes:
    """Records of the same prefix, but not those that were asked for."""
    asked = json.loads(question)
    if "parts" in asked:
        asked["parts"] = [(part, place + 1) for part, place in asked["parts"]]
    return await answer(json.dumps(asked).encode())


async def promises_too_much(answer: Answer, question: bytes) -> bytes:
    return b"9999" if b"parts" not in question else await answer(question)


async def says_nothing(answer: Answer, question: bytes) -> bytes:
    return b""


async def says_nonsense(answer: Answer, question: bytes) -> bytes:
    return b"\xff" * 1000


async def raises(answer: Answer, question: bytes) -> bytes:
    raise ConnectionError("no route")


async def fails_in_mid_transfer(answer: Answer, question: bytes) -> bytes:
    if any(place >= FULL // 2 for _, place in json.loads(question).get("parts", ())):
        raise ConnectionError("it was killed")
    return await answer(question)


@pytest.mark.parametrize(
    "tamper", [flips, flips_a_token, cuts, sends_others, says_nothing, says_nonsense, raises, fails_in_mid_transfer]
)
@pytest.mark.parametrize("kind", CACHE_KINDS)
async def test_whatever_is_wrong_with_a_peer_only_means_computing(kind: str, tamper: Any) -> None:
    async with pair_of(kind) as pair:
        pair.wire.tamper = tamper
        answer = await pair.ask()
        assert answer.token_ids == (await right(pair.there, PROMPT)).token_ids
        partly = tamper is fails_in_mid_transfer and kind == "pages"
        assert answer.usage.restored_tokens == (FULL // 2 // 2 * 2 * SIZE if partly else 0)
        asked = len(pair.wire.questions)
        other = [*PROMPT[:40], *range(20, 60)]
        await pair.ask(other)  # nobody asks it again so soon
        assert len(pair.wire.questions) == asked


async def test_a_peer_that_promises_too_much_gives_what_it_has() -> None:
    async with pair_of() as pair:
        pair.wire.tamper = promises_too_much
        answer = await pair.ask([*PROMPT[:40], *range(20, 60)], pages=15)
        assert 0 < answer.usage.restored_tokens <= 40


@pytest.mark.parametrize("lies", [False, True])
async def test_peers_of_another_fingerprint_refuse_and_are_refused(lies: bool) -> None:
    async with pair_of(theirs={"model weights": "those"}) as pair:
        theirs = pair.wire.theirs
        assert theirs is not None

        async def lie(answer: Answer, question: bytes) -> bytes:
            return await answer(json.dumps({**json.loads(question), "fingerprint": theirs.fingerprint}).encode())

        if lies:
            pair.wire.tamper = lie
        assert (await pair.ask()).usage.restored_tokens == 0
        assert len(pair.wire.questions) == (3 if lies else 1)


async def test_a_page_that_leaves_the_cache_while_it_is_copied_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of the peer's page is somebody else's when the copy is made."""
    async with pair_of() as pair:
        kv = pair.there.core.loop.scheduler.kv
        buffers = FakePageMemory.buffers
        evicted = []

        def evicting(self: FakePageMemory, part: RecordType, index: int) -> Any:
            if self._executor is pair.there.core.loop.runner.executor and not evicted:  # type: ignore[attr-defined]
                evicted.extend(kv.tree.evict(FULL + 1))
                kv.pool.give(evicted)
                for page in evicted:
                    self._executor.memory[page] = [50] * SIZE
            return buffers(self, part, index)

        monkeypatch.setattr(FakePageMemory, "buffers", evicting)
        assert (await pair.ask()).usage.restored_tokens == 0
        assert evicted


async def test_nobody_else_waits_and_the_late_compute() -> None:
    async with pair_of() as pair:
        gate = asyncio.Event()

        async def late(answer: Answer, question: bytes) -> bytes:
            if b"parts" in question:
                await gate.wait()
            return await answer(question)

        pair.wire.tamper = late
        waiting = asyncio.create_task(pair.ask())
        await until(lambda: len(pair.restores) == 1, "a pull")
        assert (await pair.ask([5, 6, 7, 8, 9, 10], pages=0)).usage.restored_tokens == 0
        for reading in pair.restores.readings.values():
            reading.until = 0.0
        assert (await pair.ask([15, 6, 7], pages=0)).usage.restored_tokens == 0
        assert (await waiting).usage.restored_tokens == 0
        assert len(pair.restores) == 1  # it still has its pages
        gate.set()


async def test_a_pull_ends_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer never answers: its pages come back all the same."""
    monkeypatch.setattr(prefix_store, "LEAST_PATIENCE", 0.05)
    async with pair_of() as pair:

        async def never(answer: Answer, question: bytes) -> bytes:
            if b"parts" in question:
                await asyncio.Event().wait()
            return await answer(question)

        pair.wire.tamper = never
        assert (await pair.ask()).usage.restored_tokens == 0
        await until(lambda: not pair.wire.under_way, "the end of its questions")


async def test_an_engine_that_closes_waits_for_no_peer() -> None:
    async with pair_of() as pair:

        async def never(answer: Answer, question: bytes) -> bytes:
            await asyncio.Event().wait()
            return b""

        pair.wire.tamper = never
        waiting = asyncio.create_task(pair.ask())
        await until(lambda: pair.wire.under_way == 1, "a question")
        waiting.cancel()
        await pair.here.aclose()
        await until(lambda: not pair.wire.under_way, "the end of the question")


async def test_other_weights_are_neither_asked_for_nor_given() -> None:
    async with pair_of() as pair:
        mine, theirs = pair.here.core.loop.sources.tiers[0], pair.wire.theirs
        assert theirs is not None
        theirs.forget()
        assert (await pair.ask()).usage.restored_tokens == 0
        mine.forget()
        asked = len(pair.wire.questions)
        assert (await pair.ask([*PROMPT[:40], *range(20, 60)])).usage.restored_tokens == 0
        assert len(pair.wire.questions) == asked
        found: list[Hit] = []
        request = SimpleNamespace(spec=SimpleNamespace(peer=pair.peer), tokens=PROMPT)
        mine.find(Wanted(request, ("", ""), len(PROMPT), 0), Hit(), found.append)  # type: ignore[arg-type]
        assert found == [Hit()]
