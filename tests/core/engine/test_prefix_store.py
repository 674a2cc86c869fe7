"""The durable prefix cache of a fake engine: right tokens whatever the disk does, and nobody waits for it."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from support.fake_engine import CACHE_KINDS, GREEDY, PATIENCE, make_core, until
from support.fake_memory import FakePageMemory
from worlds.plants import Bug, bugs

from asyncengine import AsyncEngine, EngineConfig
from asyncengine.engine import prefix_store
from asyncengine.engine.prefix_sources import Hit
from asyncengine.engine.prefix_store import PrefixStore, Rates
from asyncengine.kvcache import KVCache
from asyncengine.kvcache.store.record import Header, digests_of
from asyncengine.kvcache.store.segments import SegmentStore
from asyncengine.outputs import Completion
from asyncengine.scheduler.restores import Wanted
from asyncengine.step import RecordType
from asyncengine.testing import FakeExecutor
from asyncengine.testing.leaks import assert_nothing_held
from asyncengine.testing.replay import Recording, replay
from asyncengine.testing.world import ProcessDied, VirtualDisk

from .updatable import Updatable

SIZE = 4
FINGERPRINT = b"f" * 32
PROMPT = [2 + (7 * place) % 90 for place in range(30)]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_store, "LEAST_PATIENCE", PATIENCE)


class Disk:
    """A virtual disk for several threads. Where a process would die in a call, all later ones fail."""

    def __init__(self, disk: VirtualDisk | None = None) -> None:
        self.disk = disk or VirtualDisk(random.Random(1))
        self.gate = threading.Event()
        self.gate.set()
        """A gate that reads of records wait for."""
        self.at_gate = threading.Event()
        """Set once a read has come to it."""
        self._calls = threading.Lock()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if name == "preadv" and threading.current_thread().name.startswith("asyncengine-reads"):
                self.at_gate.set()
                assert self.gate.wait(PATIENCE)
            with self._calls:
                try:
                    return getattr(self.disk, name)(*args, **options)
                except ProcessDied:
                    raise OSError("the process is dead") from None

        return call

    @property
    def files(self) -> dict[str, Any]:
        return self.disk.files


def engine_on(
    disk: Disk, kind: str = "pages", pages: int = 128, recorder: Any = None, **settings: Any
) -> AsyncEngine:  # fmt: skip
    def load() -> Any:
        executor = Updatable(pages, SIZE, **CACHE_KINDS[kind])
        try:
            prefixes = PrefixStore(SegmentStore(disk, "/kv", FINGERPRINT, 10**6), FakePageMemory(executor), SIZE)
        except OSError:  # with a real disk it would not have started
            prefixes = None
        return make_core(executor, wiring={"tiers": [prefixes], "recorder": recorder}, **settings)

    return AsyncEngine(load, hosted=True)


async def ask(engine: AsyncEngine, prompt: list[int], most: int = 5, **options: Any) -> Completion:
    answer = await engine.generate(prompt, GREEDY.replace(max_tokens=most, seed=0), **options)
    if engine.core.loop.scheduler.kv.windows is None:
        executor = engine.core.loop.runner.executor  # type: ignore[attr-defined]
        assert answer.token_ids == executor.model.oracle(prompt, most, 0, (1,)), "a wrong token"
    return answer


async def lived(disk: Disk, kind: str, prompts: list[list[int]]) -> list[Completion]:
    async with engine_on(disk, kind) as engine:
        answers = [await ask(engine, prompt) for prompt in prompts]
        assert_nothing_held(engine.core)
    return answers


@pytest.mark.parametrize("kind", CACHE_KINDS)
async def test_an_engine_starts_from_what_another_has_left(kind: str) -> None:
    disk, prompts = Disk(), [PROMPT, [*PROMPT[:17], *range(20, 40)], [*PROMPT, *range(50, 70)]]
    without = await lived(Disk(), kind, prompts)
    first = await lived(disk, kind, prompts)
    assert all(answer.usage.restored_tokens == 0 for answer in first)
    second = await lived(disk, kind, prompts)
    assert [each.token_ids for each in second] == [each.token_ids for each in without]
    assert second[0].usage.restored_tokens == second[0].usage.cached_tokens == 28
    assert second[2].usage.restored_tokens > 0


@pytest.mark.parametrize("kind", CACHE_KINDS)
async def test_simultaneous_requests_share_one_reading(kind: str) -> None:
    disk, prompts = Disk(), [[*PROMPT[:20], *range(number, number + 9)] for number in range(10, 20)]
    await lived(disk, kind, [PROMPT])
    async with engine_on(disk, kind) as engine:
        disk.gate.clear()
        asked = [asyncio.create_task(ask(engine, prompt)) for prompt in prompts]
        await until(
            lambda: len(engine.core.loop.scheduler.restores.queue) == len(prompts) if kind != "states" else True
        )
        disk.gate.set()
        answers = await asyncio.gather(*asked)
        restored = [answer.usage.restored_tokens for answer in answers]
        assert restored.count(restored[0]) == len(prompts)
        if kind != "states":  # nobody has left a state where these part
            assert restored[0] == 20
            assert engine.stats().stored.bytes_read < 20 * 500


async def test_only_who_wants_the_same_next_page_shares_a_reading() -> None:
    """A request that has only its first token in common reads for itself."""
    disk, other = Disk(), [PROMPT[0], *range(40, 60)]
    await lived(disk, "pages", [PROMPT, other])
    async with engine_on(disk) as engine:
        disk.gate.clear()
        asked = [asyncio.create_task(ask(engine, prompt)) for prompt in (PROMPT, other)]
        readings = engine.core.loop.scheduler.restores.readings
        await until(lambda: sum(len(each.waiting) for each in list(readings.values())) == 2)
        assert len(readings) == 2
        disk.gate.set()
        answers = await asyncio.gather(*asked)
        assert [answer.usage.restored_tokens for answer in answers] == [28, 20]


async def test_nobody_else_waits_and_the_late_compute() -> None:
    disk = Disk()
    await lived(disk, "pages", [PROMPT])
    async with engine_on(disk) as engine:
        disk.gate.clear()
        disk.at_gate.clear()
        waiting = asyncio.create_task(ask(engine, PROMPT))
        await until(disk.at_gate.is_set)  # else a reader that comes late sees that nobody waits, and ends
        await until(lambda: engine.stats().requests["restore_queue"] == 1)
        assert (await ask(engine, [5, 6, 7, 8, 9, 10])).usage.restored_tokens == 0
        scheduler = engine.core.loop.scheduler
        assert len(scheduler.restores) == 1
        for reading in scheduler.restores.readings.values():
            reading.until = 0.0
        assert (await ask(engine, [15, 6, 7])).usage.restored_tokens == 0
        assert (await waiting).usage.restored_tokens == 0
        assert len(scheduler.restores) == 1  # it still has its pages
        disk.gate.set()
        await until(lambda: not scheduler.restores)
        assert_nothing_held(engine.core)
        assert engine.core.loop.sources.tiers[0].rates.read is not None  # as slow as it was


@pytest.mark.parametrize("kind", CACHE_KINDS)
async def test_whoever_leaves_meanwhile_leaves_nothing_behind(kind: str) -> None:
    disk = Disk()
    await lived(disk, kind, [PROMPT])
    async with engine_on(disk, kind) as engine:
        disk.gate.clear()
        leaver = asyncio.create_task(ask(engine, PROMPT))
        await until(lambda: engine.stats().requests["restore_queue"] == 1)
        leaver.cancel()
        await until(lambda: engine.stats().requests["restore_queue"] == 0)
        engine.core.loop.scheduler.check()
        disk.gate.set()
        await until(lambda: not engine.core.loop.scheduler.restores)
        await ask(engine, PROMPT)
        assert_nothing_held(engine.core)


async def test_other_weights_wait_for_readings_and_end_the_store() -> None:
    disk = Disk()
    await lived(disk, "pages", [PROMPT])
    async with engine_on(disk) as engine:
        core = engine.core
        executor = core.loop.runner.executor  # type: ignore[attr-defined]
        disk.gate.clear()
        waiting = asyncio.create_task(engine.generate(PROMPT, GREEDY.replace(max_tokens=5, seed=0)))
        await until(lambda: engine.stats().requests["restore_queue"] == 1)
        update = asyncio.create_task(engine.update_weights(7, mode="recompute"))
        await until(lambda: core.loop.scheduler.roster.weights.stop_steps)
        disk.gate.set()
        await update
        assert (await waiting).token_ids == executor.model.oracle(PROMPT, 5, 0, (1,))
        written = engine.stats().stored.bytes_written
        assert (await ask(engine, [9, *PROMPT])).usage.restored_tokens == 0
    assert core.loop.sources.tiers[0].store.counts.bytes_written == written


async def test_reading_must_be_worth_it() -> None:
    disk = Disk()
    await lived(disk, "pages", [PROMPT])
    async with engine_on(disk) as engine:
        prefixes = engine.core.loop.sources.tiers[0]
        prefixes.rates = Rates(read=100.0, compute=1000.0)
        assert (await ask(engine, PROMPT)).usage.restored_tokens == 0
    async with engine_on(disk) as engine:
        engine.core.loop.sources.tiers[0].rates = Rates(read=1e9, compute=1000.0)
        assert (await ask(engine, PROMPT)).usage.restored_tokens == 28


async def test_running_requests_get_the_pages_that_a_reading_has() -> None:
    """The pool holds one such request, which neither ends in an error nor waits for ever."""
    disk = Disk()
    await lived(disk, "pages", [PROMPT])
    async with engine_on(disk, pages=12, max_num_batched_tokens=8) as engine:
        answers = await asyncio.gather(*(ask(engine, prompt, 8) for prompt in ([3, 4], PROMPT, [5, 6], PROMPT[:25])))
        assert all(answer.finish_reason == "length" for answer in answers)
        assert_nothing_held(engine.core)


@pytest.mark.parametrize("kind", ["pages", "states", "windows"])
async def test_a_recording_with_readings_replays(kind: str) -> None:
    disk = Disk()
    await lived(disk, kind, [PROMPT])
    recording = Recording(EngineConfig(page_size=SIZE), 128, num_states=12 if kind == "states" else 0)
    recording.windows = ((9, 0),) if kind == "windows" else ()
    engine = engine_on(disk, kind, recorder=recording.record)
    async with engine:
        answers = await asyncio.gather(*(ask(engine, prompt) for prompt in (PROMPT, [*PROMPT[:21], 3, 4, 5])))
    assert sum(answer.usage.restored_tokens for answer in answers) >= 28
    executor = FakeExecutor(128, SIZE, **CACHE_KINDS[kind])
    outputs = replay(recording, executor, restore=FakePageMemory(executor).restore)
    tokens = [[each.token for each in outputs if each.ticket == ticket and each.token >= 0] for ticket in (1, 2)]
    assert sorted(tokens) == sorted(answer.token_ids for answer in answers)


def test_a_reading_of_windows_needs_those_in_sight() -> None:
    store = SegmentStore(VirtualDisk(random.Random(1)), "/kv", FINGERPRINT, 10**6)
    executor = FakeExecutor(20, SIZE, CACHE_KINDS["window pages"]["model"], num_window_pages=20)
    prefixes, plain = (PrefixStore(store, FakePageMemory(executor), SIZE) for _ in range(2))
    prefixes.attach(KVCache(20, SIZE, windows=executor.windows, num_window_pages=20))
    plain.attach(KVCache(20, SIZE))
    root = prefixes.root(("", ""))
    assert root is not None
    for place, (parent, packed, _) in enumerate(digests_of(root, PROMPT, SIZE)):
        for part in (RecordType.PAGE, RecordType.WINDOW):
            if part is RecordType.PAGE or place in (2, 3, 5):
                store.append([(Header(FINGERPRINT, parent, packed, part, 3, 0), [b"abc"], lambda: True)])
    # behind page 4 one sees pages 2 and 3; behind page 6, pages 3 to 5, of which the fourth is missing
    found: list[Hit] = []
    for store, cached in ((prefixes, 0), (prefixes, 16), (prefixes, 20), (plain, 0)):
        request: Any = SimpleNamespace(tokens=PROMPT, keys=PROMPT)
        store.find(Wanted(request, ("", ""), 29, cached), Hit(), found.append)
    assert [hit.pages for hit in found] == [4, 0, 6, 7]


# ---------------------------------------------------------------- what disks do


async def live(seed: int) -> int:
    """Two processes, one behind the other, on a disk that fails at any point; then the power fails, or bits flip.
    Every token is checked. Returns the tokens that the second one restored."""
    rng = random.Random(seed)
    disk = Disk(VirtualDisk(rng, capacity=rng.choice([None, None, 4000])))
    disk.disk.dies_at = rng.choice([None, rng.randrange(1, 60)])
    kind = rng.choice(["pages", "states", "windows"])
    heads = [[rng.randrange(2, 90) for _ in range(rng.choice([8, 16, 33]))] for _ in range(3)]
    prompts = [[*rng.choice(heads), *(rng.randrange(2, 90) for _ in range(6))] for _ in range(8)]
    restored = 0
    for _ in range(2):
        async with engine_on(disk, kind, pages=rng.choice([24, 60])) as engine:
            answers = await asyncio.gather(*(ask(engine, prompt) for prompt in prompts))
            restored += sum(answer.usage.restored_tokens for answer in answers)
            assert_nothing_held(engine.core)
        disk.disk.restart(power_failed=rng.random() < 0.6)
        disk.disk.flip_bits(rng.choice([0, 0, 3, 300]))
    return restored


async def live_all(count: int) -> list[int]:
    return [await live(seed) for seed in range(count)]


async def test_whatever_the_disk_does_every_token_is_right() -> None:
    restored = await live_all(25)
    assert sum(count > 0 for count in restored) > 5


@pytest.mark.parametrize("bug", bugs("prefixes"), ids=lambda bug: bug.name)
async def test_planted_bugs_are_found(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    bug.plant(monkeypatch)
    with pytest.raises(Exception, match=r"wrong token|nobody wrote|starts at"):
        await live_all(200)
