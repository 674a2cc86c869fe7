"""`Fleet`: many engines, on one machine or many, with the methods of one."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any, Self, TypeVar

import anyio.to_thread

from asyncengine.async_engine import AsyncEngine
from asyncengine.checks import as_integer, check_known
from asyncengine.config import EngineConfig, engine_config
from asyncengine.engine.threads import finished
from asyncengine.errors import FleetError, InvalidParameter
from asyncengine.integrations.fleet.frontend import FleetFrontend, open_fleet
from asyncengine.integrations.fleet.settings import MAX_REPLICAS, FleetConfig
from asyncengine.integrations.fleet.stats import FleetStats
from asyncengine.integrations.placement.routing import Role

T = TypeVar("T")


class Fleet(AsyncEngine):
    """Replicas of one engine behind the methods of one engine.

        async with await Fleet.from_pretrained("Qwen/Qwen3-0.6B", replicas=3, address="head:6379") as fleet:
            completion = await fleet.chat([{"role": "user", "content": "Hello!"}])

    Everything an `AsyncEngine` does it does: the same signatures, errors and outputs; `Engine(fleet)` blocks, and
    LangChain and LlamaIndex take `engine=fleet`. Requests go where their prefix is cached; leaving one frees its
    compute on its replica. It is always hosted: any loop and thread may call it. docs/howto/fleet.md says more.
    """

    @classmethod
    async def from_pretrained(
        cls, model: str | os.PathLike[str], *, config: EngineConfig | None = None, hosted: bool = True, **settings: Any
    ) -> Self:
        """Start `replicas` engines, on this machine or on a Ray cluster, and load the model in each. `settings` are
        fields of `FleetConfig` and of `EngineConfig`; the limits of the queue are the fleet's as a whole.

        Raises `FleetError` (Ray is missing, the head does not answer, no node has room, versions differ),
        `InvalidParameter`, and what loading raises on a replica.
        """
        if hosted is not True:
            raise InvalidParameter("hosted", "a fleet always is", hosted)
        fleet = cls._unstarted(model, config, settings, hosted)
        try:
            await fleet.start()
        except BaseException:
            fleet._stop_serving()
            raise
        return fleet

    @staticmethod
    def _loader(
        model: str | os.PathLike[str], config: EngineConfig | None, settings: Mapping[str, Any]
    ) -> Callable[[Any], FleetFrontend]:
        fleet_fields = FleetConfig.__dataclass_fields__
        check_known(settings, [*fleet_fields, *EngineConfig.__dataclass_fields__])
        fleet, engine = ({n: v for n, v in settings.items() if (n in fleet_fields) is mine} for mine in (True, False))
        load = partial(open_fleet, model, engine_config(config, engine), FleetConfig(**fleet))
        return lambda attempt: load(attempt.check)

    async def start(self) -> None:
        """Start as an `AsyncEngine` does; then the replicas can be asked."""
        await super().start()
        await asyncio.wrap_future(self._frontend.fleet.runs_on)

    def start_blocking(self) -> None:
        """Start from a plain thread."""
        super().start_blocking()
        self._frontend.fleet.runs_on.result()

    @property
    def _frontend(self) -> FleetFrontend:
        """Raises `EngineClosed` before it has started."""
        core = self.core
        if not isinstance(core, FleetFrontend):
            raise FleetError("a fleet is made by from_pretrained")
        return core

    def stats(self) -> FleetStats:
        """A snapshot: all replicas together, and each. From any thread."""
        return self._frontend.stats()

    async def replica_stats(self) -> Mapping[str, Any]:
        """Statistics of each replica as of now, by name (`stats` has the last that it sent). Raises `FleetError`."""
        return await self._on_fleet(self._frontend.fleet.manager.call_all("stats"))

    async def _on_fleet(self, work: Coroutine[Any, Any, T]) -> T:
        return await finished(self._frontend.on_fleet(work))

    async def kill_one(self) -> str:
        """End the process of the busiest replica as a crash would, to see what becomes of its requests. Its name."""

        async def kill() -> str:
            replicas = self._frontend.fleet.dispatcher.replicas.values()
            busiest = max(replicas, key=lambda replica: len(replica.requests) + len(replica.prefills))
            await anyio.to_thread.run_sync(busiest.process.kill)
            return busiest.name

        return await self._on_fleet(kill())

    async def scale(self, replicas: int) -> None:
        """Have `replicas` replicas from now on. No stream is dropped: replicas that go finish what they have.

        Raises `FleetError` if no node has room for one more; those that were started stay.
        """
        target = as_integer("replicas", replicas, 1, MAX_REPLICAS)
        await self._on_fleet(self._frontend.fleet.manager.scale(target))

    async def set_role(self, replica: str, role: Role) -> None:
        """Give the replica of this name (`stats().roles` has all) the role "prefill", "decode" or "both" from now on.
        Requests under way end where they are.

        Raises `InvalidParameter` for an unknown replica or role, and for "prefill" where no other one takes requests.
        """

        async def change() -> None:
            self._frontend.fleet.dispatcher.router.set_role(replica, role)

        await self._on_fleet(change())

    async def restart(self) -> None:
        """Start every replica anew, one after the other (after new files of model or program). No stream is dropped.

        Where no node has room for one more, a replica ends before the next one starts. Raises `FleetError`.
        """
        await self._on_fleet(self._frontend.fleet.manager.restart())
