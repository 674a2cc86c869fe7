"""Models that are loaded when they are used and closed when they are not."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import pytest
from support.fake_engine import until

from asyncengine import shared_engine
from asyncengine.config import parse_keep_alive
from asyncengine.engine.on_demand import OnDemand, OnDemandModel
from asyncengine.errors import EngineClosed, InvalidParameter, ModelNotFound, OutOfMemory

FOREVER = parse_keep_alive("keep_alive", -1)


class Loaded:
    """An engine that does nothing."""

    class Info:
        task = "generate"

    info = Info()

    def __init__(self, closed: Callable[[], None]) -> None:
        self.alive = True
        self._closed = closed

    async def aclose(self, *, drain: bool) -> None:
        assert drain
        self.alive = False
        self._closed()


class Loads:
    """A record of loads and closings, in order. Loads wait for `gate`, and raise what `failures` has for them."""

    def __init__(self) -> None:
        self.happened: list[str] = []
        self.begun: Counter[str] = Counter()
        self.gate = asyncio.Event()
        self.gate.set()
        self.failures: dict[str, list[Exception]] = {}

    def model(self, name: str, size: int = 0, keep_alive: float = FOREVER) -> OnDemandModel:
        async def load() -> Any:
            self.begun[name] += 1
            await self.gate.wait()
            if waiting := self.failures.get(name):
                raise waiting.pop()
            self.happened.append(f"+{name}")
            return Loaded(lambda: self.happened.append(f"-{name}"))

        return OnDemandModel(name, load, keep_alive, size=size)

    @asynccontextmanager
    async def demand(self, *models: OnDemandModel, budget: int | None = None) -> AsyncIterator[OnDemand]:
        found = OnDemand(models, budget)
        try:
            with anyio.fail_after(60):
                yield found
        finally:
            await found.aclose()


async def settled() -> None:
    """Everything that can run without anybody's doing has run."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_model_is_loaded_once_for_all_who_wait() -> None:
    loads = Loads()
    loads.gate.clear()
    async with loads.demand(loads.model("a"), loads.model("b")) as demand:
        waiting = [asyncio.create_task(demand.acquire("a")) for _ in range(5)]
        await settled()
        waiting[0].cancel()  # one who leaves costs the others nothing
        loads.gate.set()
        assert len({id(engine) for engine in await asyncio.gather(*waiting[1:])}) == 1
        assert loads.happened == ["+a"]
        assert waiting[0].cancelled()
        assert demand.models["a"].users == 4


async def test_others_go_on_while_one_loads() -> None:
    loads = Loads()
    async with loads.demand(loads.model("a"), loads.model("b")) as demand:
        await demand.acquire("a")
        loads.gate.clear()
        slow = asyncio.create_task(demand.acquire("b"))
        await settled()
        assert (await demand.acquire("a")).alive
        assert not slow.done()


async def test_it_goes_when_nobody_needs_it_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    loads = Loads()
    timers: list[tuple[float, asyncio.TimerHandle, Callable[[], None]]] = []
    loop = asyncio.get_running_loop()
    later = loop.call_later

    def call_later(delay: float, call: Any, *args: Any) -> asyncio.TimerHandle:
        if getattr(call, "__name__", "") != "_start_unloading":
            return later(delay, call, *args)
        timers.append((delay, later(10_000, call, *args), partial(call, *args)))
        return timers[-1][1]

    monkeypatch.setattr(loop, "call_later", call_later)
    async with loads.demand(loads.model("a", keep_alive=300), loads.model("b")) as demand:
        for _ in range(2):
            await demand.acquire("a")
        demand.release("a")
        assert not timers  # it still has a user
        demand.release("a")
        await demand.acquire("a")
        assert timers.pop()[1].cancelled()  # it was used again in time
        demand.release("a")
        delay, timer, unload = timers.pop()
        assert (delay, timer.cancelled()) == (300, False)
        unload()
        await settled()
        assert loads.happened == ["+a", "-a"]
        assert (await demand.acquire("a")).alive
        await demand.acquire("b")
        demand.release("b")
        assert not timers  # -1: it stays


async def test_who_comes_while_it_closes_waits_for_the_next_load() -> None:
    loads = Loads()
    async with loads.demand(loads.model("a", keep_alive=0)) as demand:
        await demand.acquire("a")
        demand.release("a")
        await settled()
        assert (await demand.acquire("a")).alive
        assert loads.happened == ["+a", "-a", "+a"]


async def test_the_idle_one_that_was_used_longest_ago_makes_room() -> None:
    loads, time = Loads(), asyncio.get_running_loop().time
    async with loads.demand(*(loads.model(name, 40) for name in "abc"), budget=100) as demand:
        for name in "aba":
            await demand.acquire(name)
            demand.release(name)
            released = time()
            await until(lambda at=released: time() > at)  # type: ignore[misc]
        await demand.acquire("c")
        assert loads.happened == ["+a", "+b", "-b", "+c"]


async def test_busy_ones_take_turns() -> None:
    """One waits for the users of another, and whoever comes for that one meanwhile waits for its next load."""
    loads = Loads()
    async with loads.demand(loads.model("a", 60), loads.model("b", 60), budget=100) as demand:
        await demand.acquire("a")
        b = asyncio.create_task(demand.acquire("b"))
        await settled()
        again = asyncio.create_task(demand.acquire("a"))
        await settled()
        assert loads.happened == ["+a"]
        demand.release("a")
        await b
        await settled()
        assert not again.done()
        assert loads.happened == ["+a", "-a", "+b"]
        demand.release("b")
        await again
        assert loads.happened == ["+a", "-a", "+b", "-b", "+a"]


async def test_nobody_makes_room_for_one_who_has_left() -> None:
    loads = Loads()
    async with loads.demand(loads.model("a", 60), loads.model("b", 60), loads.model("c", 60), budget=100) as demand:
        await demand.acquire("a")
        b, c = (asyncio.create_task(demand.acquire(name)) for name in "bc")
        await settled()
        c.cancel()
        demand.release("a")
        await b
        demand.release("b")
        await settled()
        assert loads.begun == {"a": 1, "b": 1}
        assert demand.loaded.keys() == {"b"}


async def test_a_failed_load_is_told_to_all_who_waited_and_tried_again() -> None:
    loads = Loads()
    loads.failures["a"] = [ModelNotFound("no a")]
    async with loads.demand(loads.model("a", 60), loads.model("b", 60), budget=100) as demand:
        failed = await asyncio.gather(*(demand.acquire("a") for _ in range(3)), return_exceptions=True)
        assert [str(error) for error in failed] == ["no a"] * 3
        assert loads.begun["a"] == 1
        assert (await demand.acquire("b")).alive  # what it would have taken is free again
        demand.release("b")
        assert (await demand.acquire("a")).alive


async def test_without_a_budget_idle_ones_go_when_memory_ends() -> None:
    loads = Loads()
    async with loads.demand(*(loads.model(name) for name in "abc")) as demand:
        for name in "ab":
            await demand.acquire(name)
        demand.release("b")
        loads.failures["c"] = [OutOfMemory("too large"), OutOfMemory("too large")]
        with pytest.raises(OutOfMemory):
            await demand.acquire("c")
        assert loads.happened == ["+a", "+b", "-b"]  # the one in use stays
        assert (await demand.acquire("c")).alive


async def test_one_that_has_died_is_loaded_anew() -> None:
    loads = Loads()
    async with loads.demand(loads.model("a")) as demand:
        engine: Any = await demand.acquire("a")
        engine.alive = False
        again = asyncio.create_task(demand.acquire("a"))
        await settled()
        assert not again.done()
        demand.release("a")
        assert (await again) is not engine


async def test_closing_ends_loads_and_those_who_wait() -> None:
    loads = Loads()
    loads.gate.clear()
    async with loads.demand(loads.model("a")) as demand:
        waiting = asyncio.create_task(demand.acquire("a"))
        await settled()
        await demand.aclose()
        with pytest.raises(EngineClosed):
            await waiting
        with pytest.raises(EngineClosed):
            await demand.acquire("a")


# ---------------------------------------------------------------- groups


@pytest.mark.parametrize("wrong", [-2, "long", "5 d", True, float("nan"), "1e9", [1], "9999999999h"])
def test_a_keep_alive_that_is_no_time_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidParameter, match="keep_alive: must be seconds"):
        parse_keep_alive("keep_alive", wrong)
    with pytest.raises(InvalidParameter, match=r"^keep_alive: "):
        shared_engine("m", keep_alive=wrong)


@pytest.mark.parametrize(
    ("given", "seconds"),
    [(0, 0), (2.5, 2.5), ("90", 90), ("5m", 300), ("1h", 3600), ("-1", FOREVER), (FOREVER, FOREVER)],
)
def test_times_in_words(given: Any, seconds: float) -> None:
    assert parse_keep_alive("keep_alive", given) == seconds
