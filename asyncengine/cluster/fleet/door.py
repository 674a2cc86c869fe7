"""The fleet's front door: that of an engine, before a `FleetLoop`; and how both are made."""

from __future__ import annotations

import asyncio
import os
import secrets
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from asyncengine.cluster.fleet.adapters import FleetAdapters
from asyncengine.cluster.fleet.carrier import Carrier
from asyncengine.cluster.fleet.crew import Crew
from asyncengine.cluster.fleet.loop import FleetLoop
from asyncengine.cluster.fleet.settings import FleetConfig
from asyncengine.cluster.fleet.stats import FleetStats, summed
from asyncengine.cluster.fleet.wire import Loaded
from asyncengine.config import EngineConfig
from asyncengine.device.process import LoadAttempt
from asyncengine.engine.clock import MonotonicClock
from asyncengine.engine.frontend import Frontend
from asyncengine.engine.grammar_wiring import make_grammars, make_planner
from asyncengine.engine.validation import RequestValidator
from asyncengine.engine.vector_desk import VectorDesk
from asyncengine.engine.wiring import bundled_name, resolve_model
from asyncengine.errors import AdapterError, EngineClosed, FleetError
from asyncengine.lora.naming import AdapterInfo
from asyncengine.stats import EngineStats, Summary, ThreadStats

if TYPE_CHECKING:
    from asyncengine.chat import ChatPlanner


class FleetDoor(Frontend):
    """Text and requests in, streams out, as of one engine."""

    def __init__(
        self, fleet: FleetLoop, validator: RequestValidator, loaded: Loaded, planner: ChatPlanner | None
    ) -> None:
        loop: Any = fleet  # it answers to all that a front door asks of an engine's loop
        registry: Any = fleet.adapters
        super().__init__(loop, validator, loaded.tokenizer, validator.info, planner, registry)
        self.fleet = fleet

    def stats(self) -> FleetStats:
        """See `FleetStats`."""
        fleet = self.fleet
        members = list(fleet.crew.members.values())
        each = {member.name: member.stats for member in members if member.stats is not None}
        return FleetStats(
            **summed(each, self._own()),  # type: ignore[arg-type]
            replicas=each,
            loads=dict(fleet.router.loads()),
            lost=fleet.crew.lost,
            resumed=fleet.resumed,
            matched_pages=fleet.matched_pages,
        )

    def _own(self) -> EngineStats:
        """What is measured here; zeros for the rest."""
        from asyncengine.kvcache import PageCounts

        fleet, meter = self.fleet, self.fleet.meter
        flights = list(fleet.flights.values())
        running = sum(flight.begun for flight in flights)
        finished = dict(meter.finished)
        if fleet.queue_limit.expired:
            finished["timeout"] = finished.get("timeout", 0) + fleet.queue_limit.expired
        none = Summary.of(())
        return EngineStats(
            requests={"waiting": len(flights) - running, "running": running, "grammar_queue": 0, "adapter_queue": 0},
            finished=finished,
            pages=PageCounts(0, 0, 0, 0, 0, 0),
            prompt_tokens=0,
            cached_tokens=0,
            generated_tokens=0,
            forced_tokens=0,
            computed_tokens=0,
            passes=0,
            preemptions=0,
            steps=0,
            first_token=Summary.of(list(meter.first_token)),
            inter_token=Summary.of(list(meter.inter_token)),
            step=none,
            loop_lag=none,
            uptime=fleet.clock.now() - self.started_at,
            adapters=fleet.adapters.counts(),
            threads=ThreadStats(),
        )

    # ---------------------------------------------------------------- adapters

    def load_adapter(self, name: str, path: str | os.PathLike[str], pinned: bool) -> Future[AdapterInfo]:
        """On every replica: `path` must lead to the same files on each node. Raises `AdapterError`, `FleetError`."""
        self.check_open()
        try:
            folder = os.fspath(path)
            folder = os.path.abspath(folder) if os.path.isdir(folder) else folder
        except TypeError:
            raise AdapterError("path", "must be the path of an adapter's folder", path) from None
        fleet = self.fleet
        return self.on_fleet(fleet.crew.load_adapter(fleet.adapters, name, folder, pinned))

    def unload_adapter(self, name: str, wait: bool) -> Future[None]:
        """Raises `AdapterNotFound`, `AdapterInUse`."""
        self.check_open()
        unused = self.fleet.adapters.forget(name, wait)

        async def unload() -> None:
            await asyncio.wrap_future(unused)
            await self.fleet.crew.on_all("unload_adapter", name)

        return self.on_fleet(unload())

    def on_fleet(self, work: Any) -> Future[Any]:
        """Run a coroutine on the fleet's loop, from anywhere. Raises `EngineClosed`."""
        runs_on = self.fleet.runs_on
        if not runs_on.done() or runs_on.exception() is not None or runs_on.result().is_closed():
            work.close()
            raise EngineClosed("the fleet is closed")
        return asyncio.run_coroutine_threadsafe(work, runs_on.result())

    def discard(self) -> None:
        """Nobody will serve this fleet."""
        self.fleet.adapters.close()
        if self.fleet.grammars is not None:
            self.fleet.grammars.close()
        self.fleet.crew.carrier.close()


def open_fleet(
    model: str | os.PathLike[str], config: EngineConfig, settings: FleetConfig, attempt: LoadAttempt
) -> FleetDoor:
    """Connect, start all replicas, and make what stands before them. Blocking: until the last has loaded.

    Raises `FleetError`, `InvalidParameter`, and what loading a model raises.
    """
    path = resolve_model(model)
    shipped = bundled_name(path) or path  # the bundled ones lie where each replica is installed
    name = settings.name or f"fleet-{secrets.token_hex(4)}"
    carrier = Carrier(settings, name)
    try:
        attempt.check()
        theirs = config.replace(
            max_queued_requests=None, max_queued_tokens=None, when_full="error", show_progress=False, uvloop=False
        )
        crew = Crew(carrier, shipped, theirs, settings)
        loaded = asyncio.run(crew.recruit())
        attempt.check()
        return _wire(crew, loaded, config, settings)
    except BaseException:
        carrier.close()
        raise


def _wire(crew: Crew, loaded: list[Loaded], config: EngineConfig, settings: FleetConfig) -> FleetDoor:
    first, clock = loaded[0], MonotonicClock()
    for other in loaded[1:]:
        if (other.info.vocab_size, other.info.page_size) != (first.info.vocab_size, first.info.page_size):
            raise FleetError("the replicas have not loaded the same model: do all nodes have the same files?")
    info = replace(first.info, max_model_len=min(each.info.max_model_len for each in loaded))
    adapters = FleetAdapters(first.adapters)
    crew.adapters = adapters
    crew.first_adapters = {adapter.name: adapter.digest for adapter in first.adapters}
    grammars = make_grammars(first.tokenizer, info.eos_token_ids, info.vocab_size, config)
    planner = make_planner(first.tokenizer, grammars, config)
    fleet = FleetLoop(config, settings, crew, clock, info.page_size, grammars=grammars, adapters=adapters)
    validator = RequestValidator(config, info, clock, first.tokenizer, grammars, adapters)
    door = FleetDoor(fleet, validator, first, planner)
    door.desk = None if first.vectors is None else VectorDesk(door, first.vectors)
    return door
