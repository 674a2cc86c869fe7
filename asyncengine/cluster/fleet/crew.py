"""The fleet's replicas: started, listened to, replaced, retired. All but `recruit` runs on the fleet's loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import time
from collections.abc import Collection, Coroutine
from typing import TYPE_CHECKING, Any

import anyio.to_thread

from asyncengine import __version__
from asyncengine.cluster.fleet import wire
from asyncengine.cluster.fleet.adapters import FleetAdapters
from asyncengine.cluster.fleet.carrier import Carrier, ReplicaProcess
from asyncengine.cluster.fleet.flights import Flight
from asyncengine.cluster.fleet.settings import FleetConfig
from asyncengine.cluster.fleet.text_flights import TextFlight
from asyncengine.cluster.fleet.wire import Hello, Loaded
from asyncengine.config import EngineConfig
from asyncengine.errors import EngineError, FleetError
from asyncengine.lora.naming import AdapterInfo
from asyncengine.stats import EngineStats

if TYPE_CHECKING:
    from asyncengine.cluster.fleet.loop import FleetLoop

logger = logging.getLogger("asyncengine")

HELLO_SECONDS = 60.0
"""Until a new process must have said what it is: it imports torch."""
STOP_SECONDS = 5.0
"""That a replica gets to close its engine."""
RETRY_SECONDS = 1.0
"""Between two attempts to replace a lost replica."""
HEAD_SECONDS = 1.0
"""Between two looks at the head of the cluster; it is gone when it does not answer twice."""
LOOK_SECONDS = 0.5
"""Between two looks at clocks: silent replicas, deadlines of what has no replica. While the fleet's own loop stands
still for longer it does not listen, and blames nobody for silence."""
HOPELESS = 5
"""Attempts, one after the other, that a fleet without any replica makes before it gives up."""


class Member:
    """A replica that serves, and what it has to do."""

    def __init__(self, host: ReplicaProcess) -> None:
        self.host = host
        self.flights: dict[int, Flight | TextFlight] = {}
        self.stats: EngineStats | None = None
        self.heard_at = time.monotonic()
        self.closing = False
        """It takes no more requests, and is not replaced."""
        self.gone = False
        self.reader: asyncio.Task[None] | None = None
        self._settled: asyncio.Event = asyncio.Event()

    @property
    def name(self) -> str:
        return self.host.name

    def settle(self) -> None:
        """A request has left it."""
        if not self.flights:
            self._settled.set()

    async def settled(self) -> bool:
        """Until it has no requests. False: it was lost before."""
        while self.flights and not self.gone:
            self._settled.clear()
            await self._settled.wait()
        return not self.gone


class Crew:
    """Every replica of one fleet."""

    def __init__(self, carrier: Carrier, model: str, config: EngineConfig, settings: FleetConfig) -> None:
        self.carrier = carrier
        self.members: dict[str, Member] = {}
        self.adapters: FleetAdapters | None = None
        self.first_adapters: dict[str, str] = {}
        """Digests by name, as the first replicas have read them."""
        self.target = settings.replicas
        self.lost = 0
        self._model, self._config, self._settings = model, config, settings
        self._recruits: list[ReplicaProcess] = []
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._ending = False
        self._looked_at = 0.0
        self._changing = asyncio.Lock()
        """One change of size, round of restarts or adapter at a time."""

    # ---------------------------------------------------------------- starting

    async def recruit(self) -> list[Loaded]:
        """Start as many replicas as the fleet is to begin with, side by side. Raises what loading raises."""
        await anyio.to_thread.run_sync(self.carrier.prepare, self._model, self._config)
        for _ in range(self.target):
            self._recruits.append(await anyio.to_thread.run_sync(self.carrier.spawn))
        return list(await asyncio.gather(*(self._load(host) for host in self._recruits)))

    async def _load(self, host: ReplicaProcess) -> Loaded:
        hello: Hello = await host.call("hello", timeout=HELLO_SECONDS)
        mine = Hello(__version__, wire.VERSION)
        if hello != mine:
            raise FleetError(
                f"version skew: this program has asyncengine {mine.release} (wire {mine.wire}), node {host.node[:8]} "
                f"has {hello.release} (wire {hello.wire}): install the same one everywhere"
            )
        config = self._config
        pinned: tuple[str, ...] = ()
        if self.adapters is not None:  # names may have come and gone since the first replicas loaded
            known = self.adapters.list()
            config = config.replace(adapters={info.name: self._path_of(info) for info in known})
            pinned = tuple(info.name for info in known if info.pinned)
        loaded: Loaded = await host.call("start", self._model, config, pinned, timeout=self._settings.start_timeout)
        return loaded

    async def _catch_up(self, host: ReplicaProcess, loaded: Loaded) -> None:
        """Adapters that the others were given while it loaded."""
        here = {info.name for info in loaded.adapters}
        limit = self._settings.start_timeout
        while self.adapters is not None and (new := [i for i in self.adapters.list() if i.name not in here]):
            for info in new:
                await host.call("load_adapter", info.name, self._path_of(info), info.pinned, timeout=limit)
                here.add(info.name)

    def _path_of(self, info: AdapterInfo) -> str:
        """Where a replica finds it: as the configuration says it, if it is still that one; "demo/..." lies elsewhere on
        every machine."""
        given = dict(self._config.adapters).get(info.name)
        return given if given is not None and self.first_adapters.get(info.name) == info.digest else info.path

    def begin(self, loop: FleetLoop) -> None:
        """The recruits take up their work."""
        self._fleet = loop
        recruits, self._recruits = self._recruits, []
        for host in recruits:
            self._join(host)
        self.do(self._watch_head())

    def _join(self, host: ReplicaProcess) -> None:
        member = Member(host)
        self.members[member.name] = member
        member.reader = self.do(self._listen(member))
        self._fleet.joined(member)

    async def _start(self) -> None:
        """One more replica. Raises `FleetError`, or what loading raises."""
        host = await anyio.to_thread.run_sync(self.carrier.spawn)
        try:
            await self._catch_up(host, await self._load(host))
        except BaseException:
            await self._end_process(host)
            raise
        if self._ending:
            await self._end_process(host)
            return
        self._join(host)

    def do(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Work of its own on the fleet's loop, which ends with the fleet."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))
        return task

    # ---------------------------------------------------------------- serving and losing

    async def _listen(self, member: Member) -> None:
        """Take what the replica has to say, until it is gone."""
        reason = f"replica {member.name} ended by itself"
        try:
            async with contextlib.aclosing(member.host.link.deliveries()) as told:
                async for data in told:
                    news: wire.Delivery = pickle.loads(data)
                    member.heard_at = self._fleet.clock.now()
                    member.stats = news.stats or member.stats
                    self._fleet.took(member, news)
        except FleetError as error:
            reason = str(error)
        except Exception as error:
            logger.exception("a delivery of %s was not understood", member.name)
            reason = f"a delivery of replica {member.name} was not understood: {error!r}"
        if not member.gone:
            self._lose(member, reason)

    def check_silence(self, now: float) -> None:
        """A replica that says nothing is lost, whatever its process does."""
        away, self._looked_at = max(0.0, now - self._looked_at - LOOK_SECONDS), now
        for member in list(self.members.values()):
            member.heard_at = min(now, member.heard_at + away)
            silent = now - member.heard_at
            if silent > self._settings.silence_limit and not member.gone:
                self._lose(member, f"replica {member.name} said nothing for {silent:.1f} s")
                if member.reader is not None:
                    member.reader.cancel()

    async def _watch_head(self) -> None:
        """Without it nothing can be replaced, and Ray ends the program: say so while there is time."""
        missed = 0
        while missed < 2:
            await asyncio.sleep(HEAD_SECONDS)
            answers = await anyio.to_thread.run_sync(self.carrier.head_answers)
            missed = 0 if answers else missed + 1
        self._fleet.die(FleetError("the head of the Ray cluster is gone"))

    def _lose(self, member: Member, reason: str) -> None:
        logger.warning("%s", reason)
        member.gone = True
        del self.members[member.name]
        self.lost += 1
        self._fleet.lost(member, reason)
        member.settle()
        self.do(self._end_process(member.host, lost=True))
        if not member.closing and not self._ending:
            self.do(self._replace())

    async def _replace(self) -> None:
        """Somebody in the place of a lost replica, however long it takes."""
        attempts = 0
        while not self._ending and len(self.members) < self.target:
            try:
                await self._start()
                await self._let_go()  # the fleet may have been made smaller, or larger by others, meanwhile
                return
            except (EngineError, OSError) as error:
                attempts += 1
                logger.warning("a lost replica is not replaced yet: %s", error)
                if attempts >= HOPELESS and not self.members:
                    self._fleet.die(FleetError(f"every replica is lost, and none can be started: {error}"))
                    return
            await asyncio.sleep(RETRY_SECONDS)

    async def _end_process(self, host: ReplicaProcess, *, lost: bool = False) -> None:
        await anyio.to_thread.run_sync(lambda: self.carrier.end(host, lost=lost))

    # ---------------------------------------------------------------- changing

    async def scale(self, target: int) -> None:
        """As many replicas as `target`, from now on. Streams of those that go are finished first."""
        async with self._changing:
            self.target = target
            while len(self.members) < target:
                await self._start()
            await self._let_go()

    async def _let_go(self) -> None:
        """Retire whoever is one too many: first where fewest are wanted, of equals the least busy."""
        if sum(not member.closing for member in self.members.values()) <= self.target:
            return
        scores = await anyio.to_thread.run_sync(self.carrier.removal_scores)
        loads = self._fleet.router.loads()
        staying = [member for member in self.members.values() if not member.closing]
        staying.sort(key=lambda member: (scores.get(member.name, 0.0), loads[member.name]))
        surplus = staying[: max(0, len(staying) - self.target)]
        await asyncio.gather(*(self._retire(member) for member in surplus))

    async def restart(self) -> None:
        """Every replica anew, one after the other: the new one first where there is room for both."""
        async with self._changing:
            for member in list(self.members.values()):
                if member.gone:
                    continue  # lost meanwhile, and replaced
                try:
                    await self._start()
                except FleetError as error:
                    if len(self.members) == 1:
                        raise FleetError(f"the only replica is not ended before there is another: {error}") from error
                    await self._retire(member)
                    await self._start()
                else:
                    await self._retire(member)
            while len(self.members) < self.target:  # one was lost and replaced meanwhile, and let go as one too many
                await self._start()

    async def _retire(self, member: Member) -> None:
        """Give it nothing more, let it finish, end it."""
        if member.gone:
            return
        member.closing = True
        self._fleet.router.close(member.name)
        if not await member.settled():
            return
        member.gone = True
        del self.members[member.name]
        self._fleet.left(member)
        await self._stop(member)
        await self._end_process(member.host)
        if member.reader is not None:
            member.reader.cancel()

    async def _stop(self, member: Member) -> None:
        with contextlib.suppress(EngineError):  # it is ended by force next
            await member.host.call("stop", timeout=STOP_SECONDS)

    async def on_all(self, method: str, *arguments: Any, but: Collection[str] = ()) -> dict[str, Any]:
        """What every replica answers, by name, but those of the names `but`. One that is lost meanwhile does not
        count."""
        members = [member for member in self.members.values() if member.name not in but]
        limit = self._settings.start_timeout
        answers = await asyncio.gather(
            *(member.host.call(method, *arguments, timeout=limit) for member in members), return_exceptions=True
        )
        for member, answer in zip(members, answers, strict=True):
            if isinstance(answer, BaseException) and not member.gone:
                raise answer
        pairs = zip(members, answers, strict=True)
        return {member.name: answer for member, answer in pairs if not isinstance(answer, BaseException)}

    async def load_adapter(self, adapters: FleetAdapters, name: str, path: str, pinned: bool) -> AdapterInfo:
        """On every replica; those that come later have it from the start."""
        async with self._changing:
            found: dict[str, AdapterInfo] = {}
            while any(member not in found for member in self.members):  # one may join meanwhile
                found |= await self.on_all("load_adapter", name, path, pinned, but=found)
            infos = list(found.values())
            if not infos:
                raise FleetError("no replica is there to load an adapter")
            if len({info.digest for info in infos}) > 1:
                raise FleetError(f"the files of adapter {name} differ from node to node")
            adapters.set(infos[0])
            return infos[0]

    # ---------------------------------------------------------------- the end

    async def end(self) -> None:
        """Leave no process behind."""
        self._ending = True
        members = list(self.members.values())
        for member in members:
            member.gone = True
            member.settle()
        await asyncio.gather(*(self._stop(member) for member in members))
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await anyio.to_thread.run_sync(self.carrier.close)
