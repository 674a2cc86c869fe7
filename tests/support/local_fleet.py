"""A fleet whose replicas are engines in this process, each on a thread of its own: what Ray carries, without Ray."""

from __future__ import annotations

import asyncio
import itertools
import pickle
import threading
from collections.abc import AsyncIterator
from typing import Any

from asyncengine import EngineConfig
from asyncengine.cluster.fleet import Fleet, FleetConfig, door
from asyncengine.cluster.fleet.carrier import ReplicaProcess
from asyncengine.cluster.fleet.replica import Replica, unpacked
from asyncengine.device.process import LoadAttempt
from asyncengine.errors import FleetError

ENGINE: dict[str, Any] = {
    "num_threads": 1, "kv_cache_memory": "32MiB", "show_progress": False, "dtype": "float32", "check_every": 1,
}  # fmt: skip


class LocalHost:
    """As `ReplicaProcess`. `lose` makes it a killed process; while `speaks` is not set it is a network that is down."""

    def __init__(self, name: str, node: str) -> None:
        self.name, self.node = name, node
        self.loop = asyncio.new_event_loop()
        self.replica = Replica()
        self.calls: list[str] = []
        self.killed = False
        self.speaks = asyncio.Event()
        self.speaks.set()
        self._gone = threading.Event()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def lose(self) -> None:
        self._gone.set()
        self.loop.call_soon_threadsafe(self.replica._outbox.wake)

    def _check(self) -> None:
        if self._gone.is_set():
            raise FleetError(f"replica {self.name} was lost: killed by the test")

    async def _here(self, work: Any) -> Any:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))

    async def call(self, method: str, *arguments: Any, timeout: float) -> Any:
        self._check()
        self.calls.append(method)
        return unpacked(await self._here(self.replica.answer(method, pickle.dumps(arguments))))

    def post(self, commands: bytes) -> None:
        if not self._gone.is_set():
            asyncio.run_coroutine_threadsafe(self.replica.post(commands), self.loop)

    async def deliveries(self) -> AsyncIterator[bytes]:
        source = self.replica.deliveries()
        while True:
            try:
                item = await self._here(anext(source))
            except StopAsyncIteration:
                return
            self._check()
            await self.speaks.wait()
            yield item

    async def gone(self) -> bool:
        return False  # only its deliveries tell

    def kill(self) -> None:
        if self.killed:
            return
        self.killed = True
        self._gone.set()
        asyncio.run_coroutine_threadsafe(self.replica.stop(), self.loop).result(20)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(20)
        self.loop.close()


class LocalCarrier:
    """As `Carrier`. `room`: replicas that fit at once."""

    def __init__(self, config: FleetConfig, name: str) -> None:
        self.name = name
        self.room = 100
        self.head = True
        self.hosts: dict[str, LocalHost] = {}
        self.ever: list[LocalHost] = []
        self._serial = itertools.count()

    def prepare(self, model: str, config: EngineConfig) -> None:
        pass

    def spawn(self) -> ReplicaProcess:
        if len(self.hosts) >= self.room:
            raise FleetError("no node has room")
        host = LocalHost(f"{self.name}/{next(self._serial)}", f"node-{len(self.ever)}")
        self.hosts[host.name] = host
        self.ever.append(host)
        return host  # type: ignore[return-value]

    def head_answers(self) -> bool:
        return self.head

    def end(self, host: Any, *, lost: bool = False) -> None:
        self.hosts.pop(host.name, None)
        host.kill()

    def close(self) -> None:
        for host in list(self.hosts.values()):
            self.end(host)


async def local_fleet(monkeypatch: Any, replicas: int = 3, **settings: Any) -> tuple[Fleet, LocalCarrier]:
    """A started fleet of the demo model. `settings` of the fleet and of its engines."""
    made: list[LocalCarrier] = []

    def carrier(config: FleetConfig, name: str) -> LocalCarrier:
        made.append(LocalCarrier(config, name))
        return made[0]

    monkeypatch.setattr(door, "Carrier", carrier)
    ours = {name: value for name, value in settings.items() if name in FleetConfig.names()}
    theirs = {name: value for name, value in settings.items() if name not in ours}
    attempt, config = LoadAttempt(), EngineConfig(**{**ENGINE, **theirs})
    fleet_config = FleetConfig(replicas=replicas, **ours)
    fleet = Fleet(lambda: door.open_fleet("demo", config, fleet_config, attempt), hosted=True, attempt=attempt)
    await fleet.start()
    return fleet, made[0]
