"""The fleet's replicas: started, read, replaced when lost, added and removed. Runs on the fleet's loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
from collections.abc import Callable, Collection, Sequence
from typing import Any

import anyio.to_thread

from asyncengine import AdapterInfo, __version__
from asyncengine.config import EngineConfig
from asyncengine.engine.peers import Tasks
from asyncengine.errors import EngineError, FleetError
from asyncengine.integrations.fleet.dispatcher import Dispatcher
from asyncengine.integrations.fleet.messages import VERSION, Loaded, Update
from asyncengine.integrations.fleet.processes import Cluster, Process
from asyncengine.integrations.fleet.requests import ReplicaHandle
from asyncengine.integrations.fleet.settings import FleetConfig
from asyncengine.integrations.placement.routing import Role
from asyncengine.request_spec import Peer

logger = logging.getLogger("asyncengine")

HELLO_SECONDS = 60.0
"""Seconds until a new process must have told its version: it imports torch."""
STOP_SECONDS = 5.0
"""Seconds that a replica gets to close its engine."""
RETRY_SECONDS = 1.0
"""Seconds between two attempts to replace a lost replica."""
HEAD_SECONDS = 1.0
"""Seconds between two checks of the Ray cluster's head, which is gone when it fails to answer twice in a row."""
CHECK_SECONDS = 0.5
"""Seconds between two checks of silent replicas and deadlines. Time for which the fleet's own loop stands still beyond
that does not count as a replica's silence."""
MAX_ATTEMPTS = 5
"""Attempts, one after the other, after which a fleet without any replica gives up."""


async def start_replicas(
    cluster: Cluster[Any], model: str, config: EngineConfig, settings: FleetConfig
) -> list[tuple[Process, Loaded]]:
    """Start as many replicas as a fleet is to begin with, side by side. Raises what loading raises."""
    await anyio.to_thread.run_sync(cluster.prepare, model, config)
    processes = [await anyio.to_thread.run_sync(cluster.spawn) for _ in range(cluster.replicas)]
    loading = (load_replica(process, model, config, settings.start_timeout) for process in processes)
    return list(zip(processes, await asyncio.gather(*loading), strict=True))


async def load_replica(process: Process, model: str, config: EngineConfig, timeout: float) -> Loaded:
    """Load the model in a new process. Raises `FleetError` for one with another release, and what loading raises."""
    release, version = await process.call("hello", timeout=HELLO_SECONDS)
    if (release, version) != (__version__, VERSION):
        raise FleetError(
            f"version skew: this program has asyncengine {__version__} (wire {VERSION}), node {process.node[:8]} "
            f"has {release} (wire {version}): install the same one everywhere"
        )
    return await process.call("start", model, *await process.settings(config), timeout=timeout)


class ReplicaManager:
    """Starts, replaces and ends the replicas of one fleet."""

    def __init__(
        self, cluster: Cluster[Any], model: str, config: EngineConfig, settings: FleetConfig,
        first: Sequence[tuple[Process, Loaded]], dispatcher: Dispatcher,
    ) -> None:  # fmt: skip
        """`config`: that of each replica's engine. `first`: replicas that `start_replicas` has started."""
        self.cluster = cluster
        self.target = cluster.replicas
        self._model, self._config, self._settings = model, config, settings
        self._dispatcher = dispatcher
        self._first = first
        self._tasks = Tasks()
        self._keys: dict[str, bytes] = {}
        """Public keys of the replicas that share prefixes, by name."""
        self._admitting = asyncio.Lock()
        self._ending = False
        self._checked_at = 0.0
        self._changing = asyncio.Lock()
        """Held by one change of size, round of restarts or new adapter at a time."""

    # ---------------------------------------------------------------- starting

    async def begin(self, on_death: Callable[[BaseException], None]) -> None:
        """Let the first replicas take requests. `on_death` is called when the fleet cannot serve any more."""
        self._on_death = on_death
        roles = self._settings.roles_of(len(self._first))
        introductions = [self._join(process, role) for (process, _), role in zip(self._first, roles, strict=True)]
        self._tasks.start(self._watch_head())
        if "prefill" in roles:  # no prompt goes to another replica before they know each other
            await asyncio.gather(*filter(None, introductions))

    async def _start(self, role: Role = "both") -> None:
        """Start one more replica. Raises `FleetError`, or what loading raises."""
        process = await anyio.to_thread.run_sync(self.cluster.spawn)
        try:
            adapters = self._dispatcher.adapters  # names may have come and gone since the first replicas loaded
            paths = {info.name: self._path_of(info) for info in adapters.list()}
            config = self._config.replace(adapters=paths)
            loaded = await load_replica(process, self._model, config, self._settings.start_timeout)
            there = {(info.name, info.pinned) for info in loaded.adapters}
            while missing := [info for info in adapters.list() if (info.name, info.pinned) not in there]:
                for info in missing:
                    arguments = info.name, self._path_of(info), info.pinned
                    await process.call("load_adapter", *arguments, timeout=self._settings.start_timeout)
                    there.add((info.name, info.pinned))
        except BaseException:
            await self._end_process(process)
            raise
        if self._ending:  # `end` ran while this one loaded: its list of replicas lacks it
            await self._end_process(process)
        else:
            self._join(process, role)

    def _path_of(self, info: AdapterInfo) -> str:
        """Path of an adapter for a replica's node: the configuration's, if its content is unchanged, as "demo/..."
        resolves to another folder on each machine; else the folder that it was loaded from."""
        configured = dict(self._config.adapters).get(info.name)
        unchanged = any((info.name, info.digest) == (first.name, first.digest) for first in self._first[0][1].adapters)
        return configured if configured is not None and unchanged else info.path

    def _join(self, process: Process, role: Role) -> asyncio.Task[None] | None:
        """Let a replica take requests. Returns the task that introduces it to the others, if prefixes are shared."""
        replica = ReplicaHandle(process)
        replica.reader = self._tasks.start(self._read(replica))
        self._dispatcher.add(replica, role)
        return self._tasks.start(self._introduce(replica)) if self._settings.share_prefixes else None

    async def _introduce(self, replica: ReplicaHandle) -> None:
        """Let a replica and the others ask each other for prefixes. If that fails, it computes its own."""
        limit = self._settings.start_timeout
        try:
            address = replica.process.connection.address
            peer = Peer(replica.name, *await replica.process.call("share", address, timeout=limit))
            self._keys[replica.name] = peer.key
            await self._admit()  # before any request names it as a peer, or others as its peers
            replica.peer = peer
        except Exception as error:
            logger.info("replica %s shares no prefixes: %s", replica.name, error)

    async def _admit(self) -> None:
        """Tell every replica which ones may ask it. Calls that wait for others raise."""
        async with self._admitting:
            self._keys = {r.name: self._keys[r.name] for r in self._replicas if r.name in self._keys}
            await self.call_all("admit", list(self._keys.values()))

    async def _exclude(self) -> None:
        """End the calls that wait for prefixes of replicas that are gone."""
        if self._settings.share_prefixes:
            with contextlib.suppress(EngineError):  # the next replica that joins admits anew
                await self._admit()

    # ---------------------------------------------------------------- reading and losing

    async def _read(self, replica: ReplicaHandle) -> None:
        """Take the replica's updates until it is gone."""
        reason = f"replica {replica.name} ended by itself"
        try:
            async with contextlib.aclosing(replica.process.connection.updates()) as updates:
                async for data in updates:
                    update: Update = pickle.loads(data)
                    replica.heard_at = self._dispatcher.clock.now()
                    replica.stats = update.stats or replica.stats
                    self._dispatcher.receive(replica, update)
        except FleetError as error:
            reason = str(error)
        except Exception as error:
            logger.exception("an update of %s was not understood", replica.name)
            reason = f"an update of replica {replica.name} was not understood: {error!r}"
        if not replica.gone:
            self._lose(replica, reason)

    def check_silence(self) -> None:
        """Lose replicas that have sent no update for `silence_limit`, even if their processes live."""
        now = self._dispatcher.clock.now()
        away, self._checked_at = max(0.0, now - self._checked_at - CHECK_SECONDS), now
        for replica in list(self._dispatcher.replicas.values()):
            replica.heard_at = min(now, replica.heard_at + away)
            silent = now - replica.heard_at
            if silent > self._settings.silence_limit and not replica.gone:
                self._lose(replica, f"replica {replica.name} said nothing for {silent:.1f} s")
                if replica.reader is not None:
                    replica.reader.cancel()

    async def _watch_head(self) -> None:
        """Die when the head is gone: nothing can be replaced, and Ray ends the program a minute later."""
        missed = 0
        while missed < 2:
            await asyncio.sleep(HEAD_SECONDS)
            answers = await anyio.to_thread.run_sync(self.cluster.head_answers)
            missed = 0 if answers else missed + 1
        self._on_death(FleetError("the head of the Ray cluster is gone"))

    def _lose(self, replica: ReplicaHandle, reason: str) -> None:
        logger.warning("%s", reason)
        replica.gone = True
        role = self._dispatcher.router.roles()[replica.name]
        self._dispatcher.lose(replica, reason)
        replica.notify()
        self._tasks.start(self._exclude())
        self._tasks.start(self._replace(replica, role))

    async def _replace(self, lost: ReplicaHandle, role: Role) -> None:
        """End a lost replica's process, which frees its resources, and start a new one, with any number of attempts,
        unless it was being retired."""
        await self._end_process(lost.process, lost=True)
        if lost.closing:
            return
        attempts = 0
        while not self._ending and len(self._replicas) < self.target:
            try:
                await self._start(role)
                await (
                    self._remove_surplus()
                )  # `scale` may have changed the target, or another task the number, meanwhile
                return
            except (EngineError, OSError) as error:
                attempts += 1
                logger.warning("a lost replica is not replaced yet: %s", error)
                if attempts >= MAX_ATTEMPTS and not self._replicas:
                    self._on_death(FleetError(f"every replica is lost, and none can be started: {error}"))
                    return
            await asyncio.sleep(RETRY_SECONDS)

    async def _end_process(self, process: Process, *, lost: bool = False) -> None:
        await anyio.to_thread.run_sync(lambda: self.cluster.end(process, lost=lost))

    # ---------------------------------------------------------------- changing

    @property
    def _replicas(self) -> Collection[ReplicaHandle]:
        return self._dispatcher.replicas.values()

    async def scale(self, target: int) -> None:
        """Have `target` replicas from now on. Those that go finish their streams first."""
        async with self._changing:
            self.target = target
            while len(self._replicas) < target:
                await self._start()
            await self._remove_surplus()

    async def _remove_surplus(self) -> None:
        """Retire replicas beyond the target: the lowest removal scores first, of equals the least loaded. One that
        takes requests stays."""
        if sum(not replica.closing for replica in self._replicas) <= self.target:
            return
        scores = await anyio.to_thread.run_sync(self.cluster.removal_scores)
        loads, roles = self._dispatcher.router.loads(), self._dispatcher.router.roles()
        staying = [replica for replica in self._replicas if not replica.closing]
        staying.sort(key=lambda replica: (scores.get(replica.name, 0.0), loads[replica.name]))
        last = next((replica for replica in reversed(staying) if roles[replica.name] != "prefill"), staying[-1])
        staying.sort(key=lambda replica: replica is last)
        surplus = staying[: max(0, len(staying) - self.target)]
        await asyncio.gather(*(self._retire(replica) for replica in surplus))

    async def restart(self) -> None:
        """Start every replica anew, one after the other: the new one first where there is room for both."""
        async with self._changing:
            for replica in list(self._replicas):
                if replica.gone:
                    continue  # lost meanwhile, and replaced
                role = self._dispatcher.router.roles()[replica.name]
                try:
                    await self._start(role)
                except FleetError as error:
                    if len(self._replicas) == 1:
                        raise FleetError(f"the only replica is not ended before there is another: {error}") from error
                    await self._retire(replica)
                    await self._start(role)
                else:
                    await self._retire(replica)
            while len(self._replicas) < self.target:  # one was lost and replaced meanwhile, then removed as surplus
                await self._start()

    async def _retire(self, replica: ReplicaHandle) -> None:
        """Give a replica no more requests, let it finish those it has, and end it."""
        if replica.gone:
            return
        replica.closing = True
        self._dispatcher.router.close(replica.name)
        if not await replica.finish():
            return
        replica.gone = True
        self._dispatcher.remove(replica)
        self._tasks.start(self._exclude())
        await self._stop(replica)
        await self._end_process(replica.process)
        if replica.reader is not None:
            replica.reader.cancel()

    async def _stop(self, replica: ReplicaHandle) -> None:
        with contextlib.suppress(EngineError):  # it is ended by force next
            await replica.process.call("stop", timeout=STOP_SECONDS)

    async def call_all(self, method: str, *arguments: Any, but: Collection[str] = ()) -> dict[str, Any]:
        """Call a method of every replica but those named `but`. Returns answers by name, without replicas that were
        lost meanwhile. Raises the first error."""
        replicas = [replica for replica in self._replicas if replica.name not in but]
        limit = self._settings.start_timeout
        calls = (replica.process.call(method, *arguments, timeout=limit) for replica in replicas)
        answers = dict(zip(replicas, await asyncio.gather(*calls, return_exceptions=True), strict=True))
        for replica, answer in answers.items():
            if isinstance(answer, BaseException) and not replica.gone:
                raise answer
        return {r.name: answer for r, answer in answers.items() if not isinstance(answer, BaseException)}

    async def load_adapter(self, name: str, path: str, pinned: bool) -> AdapterInfo:
        """Load an adapter on every replica; those that start later load it, too. Raises `FleetError` where its files
        differ from node to node."""
        async with self._changing:
            infos: dict[str, AdapterInfo] = {}
            while any(replica.name not in infos for replica in self._replicas):  # one may join meanwhile
                infos |= await self.call_all("load_adapter", name, path, pinned, but=infos)
            if not infos:
                raise FleetError("no replica is there to load an adapter")
            info, *rest = infos.values()
            if any(another.digest != info.digest for another in rest):
                raise FleetError(f"the files of adapter {name} differ from node to node")
            self._dispatcher.adapters.set(info)
            return info

    # ---------------------------------------------------------------- the end

    async def end(self) -> None:
        """End all replicas, and leave no process behind."""
        self._ending = True
        replicas = list(self._replicas)
        for replica in replicas:
            replica.gone = True
            replica.notify()
        await asyncio.gather(*(self._stop(replica) for replica in replicas))
        await self._tasks.end()
        await anyio.to_thread.run_sync(self.cluster.close)
