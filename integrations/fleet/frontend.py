"""The fleet's loop, and its frontend, which is an engine's `Frontend` before that; and the making of both."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

from asyncengine import AdapterInfo
from asyncengine.assembly.relay import RelayLoop
from asyncengine.assembly.served_model import ServedModel
from asyncengine.config import EngineConfig
from asyncengine.demo import bundled_name, resolve_model
from asyncengine.engine.frontend import Frontend
from asyncengine.errors import AdapterError, EngineClosed, FleetError
from asyncengine.events import EngineDied
from asyncengine.integrations.fleet.adapters import FleetAdapters
from asyncengine.integrations.fleet.dispatcher import Dispatcher
from asyncengine.integrations.fleet.one_machine import OneMachine, runs_here
from asyncengine.integrations.fleet.processes import Cluster
from asyncengine.integrations.fleet.ray_cluster import RayCluster
from asyncengine.integrations.fleet.replicas import CHECK_SECONDS, ReplicaManager, start_replicas
from asyncengine.integrations.fleet.settings import FleetConfig
from asyncengine.integrations.fleet.stats import FleetStats, fleet_stats
from asyncengine.seams import GrammarCompiler

logger = logging.getLogger("asyncengine")


class FleetLoop(RelayLoop):
    """The fleet's only task: `run` serves until the fleet is closed. A router and replicas lie between inbox and
    mailboxes, where an engine has a scheduler and a device.

        inbox ──▶ dispatcher ──Submit──▶ replica (an engine on some machine)
                     │  ▲                   │
        mailboxes ◀──┘  └──────Update───────┘ (output, pages cached and evicted, statistics)

    One task is the only writer.
    """

    noun = "fleet"

    def __init__(
        self, config: EngineConfig, settings: FleetConfig, page_size: int, adapters: FleetAdapters,
        grammars: GrammarCompiler | None, manage: Callable[[Dispatcher], ReplicaManager],
    ) -> None:  # fmt: skip
        store: Any = adapters  # it has what comes before an engine's loop
        super().__init__(config, store, grammars)
        self.dispatcher = Dispatcher(self, settings, page_size, adapters)
        self.manager = manage(self.dispatcher)
        self.runs_on: Future[asyncio.AbstractEventLoop] = Future()
        """The event loop that it runs on, once its replicas can be asked."""
        self.runs_on.set_running_or_notify_cancel()  # one impatient caller must not cancel it for all

    async def run(self) -> None:
        """Serve until drained. Raises nothing but cancellation."""
        try:
            self.manager.begin(self._die)
            self.runs_on.set_result(asyncio.get_running_loop())
            while self.failure is None and not self._is_drained():
                self.dispatcher.take()
                for replica in self.dispatcher.replicas.values():
                    replica.send_commands()
                if not self._is_drained():
                    await self.inbox.wait(CHECK_SECONDS)
                    self.manager.check_silence()
                    self.dispatcher.expire()
        except BaseException as error:
            self.failure = self.failure or error
            if not isinstance(error, Exception):
                raise
            logger.exception("the fleet died")
        finally:
            if not self.runs_on.done():
                self.runs_on.set_exception(self.make_failure())
            if self.failure is not None:
                self.hooks.emit(EngineDied(self.failure))
            self.end_all()
            await self.manager.end()

    def _is_drained(self) -> bool:
        if self._drain is None:
            return False
        if self._drain.deadline is not None and self.clock.now() >= self._drain.deadline:
            self.dispatcher.abort_all()
        return not (self.dispatcher.requests or self.delivery.expected)

    def _die(self, error: BaseException) -> None:
        self.failure = self.failure or error
        self.inbox.post()


T = TypeVar("T")


class FleetFrontend(Frontend):
    """Text and requests in, streams out, as of one engine."""

    @property
    def fleet(self) -> FleetLoop:
        loop: Any = self.loop
        return cast(FleetLoop, loop)

    def stats(self) -> FleetStats:
        """See `FleetStats`."""
        return fleet_stats(self.fleet.dispatcher, self.started_at)

    # ---------------------------------------------------------------- adapters

    def load_adapter(self, name: str, path: str | os.PathLike[str], pinned: bool) -> Future[AdapterInfo]:
        """Load an adapter on every replica: `path` must lead to the same files on each node.

        Raises `AdapterError`, `FleetError`.
        """
        self.client.check_open()
        try:
            folder = os.fspath(path)
            folder = os.path.abspath(folder) if os.path.isdir(folder) else folder
        except TypeError:
            raise AdapterError("path", "must be the path of an adapter's folder", path) from None
        return self.on_fleet(self.fleet.manager.load_adapter(name, folder, pinned))

    def take_adapter(self, name: str, path: object, tensors: object, config: object) -> Future[AdapterInfo]:
        """Refuse tensors: they would have to go to every replica that is started later, too."""
        raise AdapterError("tensors", "cannot be given to a fleet: save the adapter where all nodes read it", name)

    def unload_adapter(self, name: str, wait: bool) -> Future[None]:
        """Unload an adapter everywhere when no request uses it. Raises `AdapterNotFound`, `AdapterInUse`."""
        self.client.check_open()
        unused = self.fleet.dispatcher.adapters.forget(name, wait)

        async def unload() -> None:
            await asyncio.wrap_future(unused)
            await self.fleet.manager.call_all("unload_adapter", name)

        return self.on_fleet(unload())

    def on_fleet(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the fleet's loop, from any thread. Raises `EngineClosed`."""
        runs_on = self.fleet.runs_on
        if not runs_on.done() or runs_on.exception() is not None or runs_on.result().is_closed():
            work.close()
            raise EngineClosed("the fleet is closed")
        return asyncio.run_coroutine_threadsafe(work, runs_on.result())

    def discard(self) -> None:
        """End what was started, of a fleet that will not be served."""
        self.fleet.dispatcher.adapters.close()
        if self.fleet.grammars is not None:
            self.fleet.grammars.close()
        self.fleet.manager.cluster.close()


def open_cluster(settings: FleetConfig, name: str) -> Cluster[Any]:
    """The machines on which a fleet has its processes. Raises `FleetError`, `InvalidParameter`."""
    return OneMachine(settings, name) if runs_here(settings) else RayCluster(settings, name)


def open_fleet(
    model: str | os.PathLike[str], config: EngineConfig, settings: FleetConfig, check: Callable[[], None]
) -> FleetFrontend:
    """Start all replicas, where `open_cluster` has them, and make what stands before them. Blocks until the last has
    loaded. `check` raises once the attempt is given up.

    Raises `FleetError`, `InvalidParameter`, and what loading a model raises.
    """
    path = resolve_model(model)
    shipped = bundled_name(path) or path  # the bundled ones lie where each replica is installed
    cluster = open_cluster(settings, settings.name or f"fleet-{secrets.token_hex(4)}")
    try:
        check()
        settings.roles_of(cluster.replicas)  # refused before anything is loaded
        theirs = config.replace(  # replicas are sent text alone: towers would take memory in vain
            max_queued_requests=None, max_queued_tokens=None, when_full="error", show_progress=False, uvloop=False,
            images="off",
        )  # fmt: skip
        first = asyncio.run(start_replicas(cluster, shipped, theirs, settings))
        check()
        served = _common_model([loaded.model for _, loaded in first])
        adapters: Any = FleetAdapters(first[0][1].adapters)  # it has what a validator asks of an `AdapterStore`

        def make_loop(grammars: GrammarCompiler | None) -> FleetLoop:
            manage = partial(ReplicaManager, cluster, shipped, theirs, settings, first)
            return FleetLoop(config, settings, served.info.page_size, adapters, grammars, manage)

        return served.open(FleetFrontend, make_loop, config, adapters)
    except BaseException:
        cluster.close()
        raise


def _common_model(loaded: list[ServedModel]) -> ServedModel:
    """The model that all replicas serve. Raises `FleetError` if they have loaded different ones."""
    first, *others = (each.info for each in loaded)
    if any((other.vocab_size, other.page_size) != (first.vocab_size, first.page_size) for other in others):
        raise FleetError("the replicas have not loaded the same model: do all nodes have the same files?")
    return replace(loaded[0], info=replace(first, max_model_len=min(each.info.max_model_len for each in loaded)))
