"""A fleet whose replicas are engines in this process, each on a thread of its own: a `RayCluster` without Ray."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from support.fake_engine import PATIENCE, until
from support.held_steps import HeldSteps

from asyncengine import EngineConfig
from asyncengine.errors import FleetError
from asyncengine.integrations.fleet import Fleet, FleetConfig, connection, frontend
from asyncengine.integrations.fleet.connection import Connection, new_context
from asyncengine.integrations.fleet.processes import Cluster, Process
from asyncengine.integrations.fleet.replica import Replica

ENGINE: dict[str, Any] = {
    "num_threads": 1, "kv_cache_memory": "32MiB", "show_progress": False, "dtype": "float32", "check_every": 1,
}  # fmt: skip


class LocalProcess(Process):
    """A replica on a thread. `lose` kills it; while `speaks` is not set its network is down."""

    def __init__(self, name: str, node: str, silence_limit: float, context: Any) -> None:
        self.name, self.node = name, node
        self.loop = asyncio.new_event_loop()
        self.replica = Replica()
        self.calls: list[str] = []
        self.killed = False
        self.speaks = asyncio.Event()
        self.speaks.set()
        self.held: HeldSteps | None = None
        self.connection = Connection(self, "127.0.0.1", silence_limit, context)
        self._updates = self.connection.updates
        self.connection.updates = self._received  # type: ignore[method-assign]
        self._gone = threading.Event()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def hold(self, after: int = 0) -> None:
        """Let its engine make so many steps, and then none before `release`: what runs there then is not at its end
        when it is lost."""
        self.held = HeldSteps(self.replica.engine, after)

    def release(self) -> None:
        if self.held is not None:
            self.held.release()

    def lose(self) -> None:
        self._gone.set()
        self.release()
        self.cut()
        self.replica.outbox.post()

    def cut(self) -> None:
        """Break its connections."""
        self.loop.call_soon_threadsafe(self.replica.tasks.cancel)

    def _check(self) -> None:
        if self._gone.is_set():
            raise FleetError(f"replica {self.name} was lost: killed by the test")

    async def _here(self, work: Any) -> Any:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))

    async def ask(self, method: str, arguments: bytes) -> bytes:
        self._check()
        self.calls.append(method)
        return await self._here(self.replica.answer(method, arguments))

    def post_by_ray(self, commands: bytes) -> None:
        if not self._gone.is_set():
            asyncio.run_coroutine_threadsafe(self.replica.post(commands), self.loop)

    async def updates_by_ray(self) -> AsyncGenerator[bytes, None]:
        self.calls.append("updates by Ray")
        source = self.replica.updates()
        with contextlib.suppress(StopAsyncIteration):
            while True:
                yield await self._here(anext(source))

    async def _received(self) -> AsyncGenerator[bytes, None]:
        async with contextlib.aclosing(self._updates()) as updates:
            async for update in updates:
                self._check()
                await self.speaks.wait()
                yield update

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


class LocalCluster(Cluster[LocalProcess]):
    """Processes on threads. `room`: replicas that fit at once."""

    def __init__(self, config: FleetConfig, name: str) -> None:
        super().__init__(config, name)
        assert isinstance(config.replicas, int)
        self.replicas = config.replicas
        self._context = new_context()
        self.room = 100
        self.head = True
        self.scores: dict[str, float] = {}
        """Scores of keeping replicas; others have 1."""
        self.processes = self._processes
        self.ever: list[LocalProcess] = []

    def prepare(self, model: str, config: EngineConfig) -> None:
        pass

    def spawn(self) -> LocalProcess:
        if len(self.processes) >= self.room:
            raise FleetError("no node has room")
        name, node = f"{self.name}/{next(self._serial)}", f"node-{len(self.ever)}"
        process = LocalProcess(name, node, self.config.silence_limit, self._context)
        self.processes[name] = process
        self.ever.append(process)
        return process

    def hold(self, after: int = 0) -> None:
        """Hold all that are there now."""
        for process in list(self.processes.values()):
            process.hold(after)

    def release(self) -> None:
        for process in list(self.processes.values()):
            process.release()

    def busiest(self, fleet: Fleet) -> LocalProcess:
        loads = fleet.stats().loads
        return self.processes[max(loads, key=lambda name: loads[name])]

    async def settle(self, fleet: Fleet) -> None:
        """Wait until neither the fleet nor a replica holds anything of a request."""
        dispatcher = fleet.core.fleet.dispatcher  # type: ignore[attr-defined]

        def holds() -> bool:  # its loop is another thread's: one after the other goes
            stats, loop = fleet.stats(), dispatcher.loop
            return any((
                *stats.requests.values(), *stats.loads.values(), loop.by_ticket, dispatcher.waiting,
                loop.delivery.streams, dispatcher.router.index.expected, loop.queue_limit.waiting,
            ))  # fmt: skip

        await until(lambda: not holds(), "a fleet without requests")
        for process in list(self.processes.values()):
            loop = process.replica.engine.core.loop
            await until(
                lambda of=loop: not (of.scheduler.requests or of.in_flight or of.delivery.streams), "an empty replica"
            )
            pages = process.replica.engine.stats().pages
            assert pages.free + pages.cached == pages.total

    def removal_scores(self) -> dict[str, float]:
        return {name: self.scores.get(name, 1.0) for name in self.processes}

    def head_answers(self) -> bool:
        return self.head

    def close(self) -> None:
        super().close()
        if self._context is not None:
            self._context.destroy(linger=0)


async def replaced(fleet: Fleet, replicas: int) -> None:
    """Wait until the fleet has so many replicas again."""
    await until(lambda: len(fleet.stats().loads) == replicas, "a replacement")


async def start_local_fleet(
    monkeypatch: Any, replicas: int = 3, model: str = "demo", *,
    kind: type[LocalCluster] = LocalCluster, **settings: Any,
) -> tuple[Fleet, LocalCluster]:  # fmt: skip
    """A started fleet of a bundled model. `settings` of the fleet and of its engines. A machine that stands still for
    seconds makes it neither lose a replica nor give up a connection."""
    made: list[LocalCluster] = []

    def cluster(config: FleetConfig, name: str) -> LocalCluster:
        made.append(kind(config, name))
        return made[0]

    monkeypatch.setattr(frontend, "open_cluster", cluster)
    monkeypatch.setattr(connection, "OPEN_SECONDS", PATIENCE)
    settings = {**ENGINE, "replicas": replicas, "silence_limit": PATIENCE, **settings}
    fleet = Fleet._unstarted(model, None, settings, hosted=True)
    await fleet.start()
    return fleet, made[0]


@contextlib.asynccontextmanager
async def local_fleet(
    monkeypatch: Any, replicas: int = 3, **settings: Any
) -> AsyncIterator[tuple[Fleet, LocalCluster]]:
    """`start_local_fleet`, closed at the end."""
    fleet, cluster = await start_local_fleet(monkeypatch, replicas, **settings)
    async with fleet:
        yield fleet, cluster
