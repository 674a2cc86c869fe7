"""A fleet whose replicas are engines in this process, each on a thread of its own: what Ray carries, without Ray."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import pickle
import threading
from collections.abc import AsyncGenerator
from typing import Any

from support.held_steps import HeldSteps

from asyncengine import EngineConfig
from asyncengine.cluster.fleet import Fleet, FleetConfig, door
from asyncengine.cluster.fleet.carrier import ReplicaProcess
from asyncengine.cluster.fleet.link import Link, new_context
from asyncengine.cluster.fleet.replica import Replica, unpacked
from asyncengine.device.process import LoadAttempt
from asyncengine.errors import FleetError

ENGINE: dict[str, Any] = {
    "num_threads": 1, "kv_cache_memory": "32MiB", "show_progress": False, "dtype": "float32", "check_every": 1,
}  # fmt: skip


class LocalHost:
    """As `ReplicaProcess`. `lose` makes it a killed process; while `speaks` is not set it is a network that is down."""

    def __init__(self, name: str, node: str, silence_limit: float, context: Any) -> None:
        self.name, self.node = name, node
        self.loop = asyncio.new_event_loop()
        self.replica = Replica()
        self.calls: list[str] = []
        self.killed = False
        self.speaks = asyncio.Event()
        self.speaks.set()
        self.held: HeldSteps | None = None
        self.link = Link(self, "127.0.0.1", silence_limit, context)
        self._listen = self.link.deliveries
        self.link.deliveries = self._heard  # type: ignore[method-assign]
        self._gone = threading.Event()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def hold(self, after: int = 0) -> None:
        """Its engine lets so many steps pass, and then none before `release`: what runs there then is not at its end
        when it is lost."""
        self.held = HeldSteps(self.replica.engine, after)

    def release(self) -> None:
        if self.held is not None:
            self.held.release()

    def lose(self) -> None:
        self._gone.set()
        self.release()
        self.cut()
        self.loop.call_soon_threadsafe(self.replica._outbox.wake)

    def cut(self) -> None:
        """Break its connection."""
        if self.replica._linked is not None:
            self.loop.call_soon_threadsafe(self.replica._linked.cancel)

    def _check(self) -> None:
        if self._gone.is_set():
            raise FleetError(f"replica {self.name} was lost: killed by the test")

    async def _here(self, work: Any) -> Any:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))

    async def call(self, method: str, *arguments: Any, timeout: float) -> Any:
        self._check()
        self.calls.append(method)
        return unpacked(await self._here(self.replica.answer(method, pickle.dumps(arguments))))

    def carry(self, commands: bytes) -> None:
        if not self._gone.is_set():
            asyncio.run_coroutine_threadsafe(self.replica.post(commands), self.loop)

    async def carried(self) -> AsyncGenerator[bytes, None]:
        self.calls.append("deliveries by Ray")
        source = self.replica.deliveries()
        while True:
            try:
                item = await self._here(anext(source))
            except StopAsyncIteration:
                return
            yield item

    async def _heard(self) -> AsyncGenerator[bytes, None]:
        async with contextlib.aclosing(self._listen()) as told:
            async for item in told:
                self._check()
                await self.speaks.wait()
                yield item

    def kill(self) -> None:
        if self.killed:
            return
        self.killed = True
        self._gone.set()
        self.release()
        asyncio.run_coroutine_threadsafe(self.replica.stop(), self.loop).result(120)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(120)
        self.loop.close()


class LocalCarrier:
    """As `Carrier`. `room`: replicas that fit at once."""

    def __init__(self, config: FleetConfig, name: str, *, connected: bool) -> None:
        self.name = name
        self._config = config
        self._context = new_context() if connected else None
        self.room = 100
        self.head = True
        self.scores: dict[str, float] = {}
        """The worth of keeping replicas, as tests say; others have 1."""
        self.hosts: dict[str, LocalHost] = {}
        self.ever: list[LocalHost] = []
        self._serial = itertools.count()

    def prepare(self, model: str, config: EngineConfig) -> None:
        pass

    def spawn(self) -> ReplicaProcess:
        if len(self.hosts) >= self.room:
            raise FleetError("no node has room")
        name, node = f"{self.name}/{next(self._serial)}", f"node-{len(self.ever)}"
        host = LocalHost(name, node, self._config.silence_limit, self._context)
        self.hosts[host.name] = host
        self.ever.append(host)
        return host  # type: ignore[return-value]

    def hold(self, after: int = 0) -> None:
        """All that are there now."""
        for host in list(self.hosts.values()):
            host.hold(after)

    def release(self) -> None:
        for host in list(self.hosts.values()):
            host.release()

    def removal_scores(self) -> dict[str, float]:
        return {name: self.scores.get(name, 1.0) for name in self.hosts}

    def head_answers(self) -> bool:
        return self.head

    def end(self, host: Any, *, lost: bool = False) -> None:
        self.hosts.pop(host.name, None)
        host.kill()

    def close(self) -> None:
        for host in list(self.hosts.values()):
            self.end(host)
        if self._context is not None:
            self._context.destroy(linger=0)


async def local_fleet(
    monkeypatch: Any, replicas: int = 3, model: str = "demo", *, connected: bool = True, **settings: Any
) -> tuple[Fleet, LocalCarrier]:
    """A started fleet of a bundled model. `connected`: over connections to its replicas, else by calls as Ray
    carries them. `settings` of the fleet and of its engines."""
    made: list[LocalCarrier] = []

    def carrier(config: FleetConfig, name: str) -> LocalCarrier:
        made.append(LocalCarrier(config, name, connected=connected))
        return made[0]

    monkeypatch.setattr(door, "Carrier", carrier)
    ours = {name: value for name, value in settings.items() if name in FleetConfig.names()}
    theirs = {name: value for name, value in settings.items() if name not in ours}
    attempt, config = LoadAttempt(), EngineConfig(**{**ENGINE, **theirs})
    fleet_config = FleetConfig(replicas=replicas, **ours)
    fleet = Fleet(lambda: door.open_fleet(model, config, fleet_config, attempt), hosted=True, attempt=attempt)
    await fleet.start()
    return fleet, made[0]
