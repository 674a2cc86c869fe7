"""What runs on the other machines: one engine in a process of its own, as a fleet's replica. Knows no Ray.

Its methods are called from afar. Requests come as specifications that the fleet has checked, and are posted to the
engine as they are; what the engine makes of them goes out through one outbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from asyncengine import AsyncEngine, EngineConfig, __version__
from asyncengine.cluster.fleet import wire
from asyncengine.cluster.fleet.link import LinkEnd
from asyncengine.cluster.fleet.outbox import Outbox, OutboxSlot, OutboxWindow
from asyncengine.cluster.fleet.wire import Hello, Leave, Loaded, Order
from asyncengine.engine.validation import PreparedRequest
from asyncengine.errors import AdapterNotFound, EngineError, FleetError
from asyncengine.lora.naming import AdapterInfo
from asyncengine.request_spec import RequestSpec
from asyncengine.stats import EngineStats

logger = logging.getLogger("asyncengine")

BEAT = 0.5
"""Seconds after which a replica says that it lives, if it has nothing else to say."""
FIGURES = 0.1
"""Seconds between two times that it tells its figures while it works; making them takes milliseconds."""


class Replica:
    """One engine. All of it runs on one event loop."""

    def __init__(self) -> None:
        self._outbox = Outbox()
        self._engine: AsyncEngine | None = None
        self._stopped = False
        self._linked: asyncio.Task[None] | None = None
        self._stats_at = 0.0
        self._untold = True
        """Something has happened since the last figures."""

    # ---------------------------------------------------------------- called from afar

    async def answer(self, method: str, arguments: bytes) -> bytes:
        """Call `method` and return (True, its result) or (False, what it raises): errors keep their types."""
        try:
            outcome = (True, await getattr(self, method)(*pickle.loads(arguments)))
        except Exception as error:
            outcome = (False, error)
        try:
            return pickle.dumps(outcome)
        except Exception as error:
            return pickle.dumps((False, FleetError(f"a replica's answer cannot be sent: {error!r} ({outcome[1]!r})")))

    async def hello(self) -> Hello:
        return Hello(__version__, wire.VERSION)

    async def listen(self, address: str, door_key: bytes) -> tuple[int, bytes]:
        """The port at which the owner of this public key may give orders and take deliveries, instead of calling `post`
        and `deliveries`; and the public key by which it knows this end. Raises `OSError`."""
        end = LinkEnd(address, door_key)
        self._linked = asyncio.create_task(self._serve(end))
        # However it ends, and be it before it began: the door then knows that nothing more comes.
        self._linked.add_done_callback(lambda done: end.close())
        return end.port, end.public_key

    async def start(self, model: str, config: EngineConfig, pinned: tuple[str, ...]) -> Loaded:
        """Load. Raises what loading raises."""
        engine = await AsyncEngine.from_pretrained(model, config=config)
        kv = engine.core.loop.scheduler.kv
        kv.keep_log(kv.pool.capacity)
        self._engine = engine
        for name in pinned:
            await engine.load_adapter(name, dict(config.adapters)[name], pinned=True)
        desk = engine.core.desk
        vectors = None if desk is None else desk.model
        return Loaded(engine.info, engine.core.tokenizer, engine.adapters(), vectors)

    async def load_adapter(self, name: str, path: str, pinned: bool) -> AdapterInfo:
        return await self.engine.load_adapter(name, path, pinned=pinned)

    async def unload_adapter(self, name: str) -> None:
        await self.engine.unload_adapter(name, wait=True)

    async def stats(self) -> EngineStats:
        return self.engine.stats()

    async def stop(self) -> None:
        """End everything there is, and the deliveries."""
        if self._engine is not None:
            await self._engine.aclose()
        self._stopped = True
        self._outbox.wake()
        if self._linked is not None:
            self._linked.cancel()
            await asyncio.gather(self._linked, return_exceptions=True)

    async def post(self, commands: bytes) -> None:
        """Take orders, in order. What is wrong with one is told in a delivery, not here."""
        self._take(commands)

    async def deliveries(self) -> AsyncIterator[bytes]:
        """What is new, as often as the fleet takes it."""
        while not self._stopped:
            await self._outbox.wait(FIGURES if self._untold else BEAT)
            yield pickle.dumps(self._delivery())

    # ---------------------------------------------------------------- here

    @property
    def engine(self) -> AsyncEngine:
        if self._engine is None:
            raise FleetError("the replica has loaded no model")
        return self._engine

    def _take(self, commands: bytes) -> None:
        for command in pickle.loads(commands):
            if isinstance(command, Leave):
                self.engine.core.abort_tickets(list(command.tickets))
            elif command.specs[0].pooled is not None:
                self._take_texts(command)
            else:
                self._take_order(command)

    async def _serve(self, end: LinkEnd) -> None:
        try:
            await end.run(self._take, self.deliveries())
        except Exception:  # the door must not wait for what was not understood
            logger.exception("a replica's connection is given up")

    def _take_order(self, order: Order) -> None:
        core, first = self.engine.core, order.specs[0]
        slot = OutboxSlot(order.key, self._outbox)
        try:
            core.check_open()
            self._check_adapter(first, order.digest)
            specs = [_rebased(spec, core.loop.clock.now(), order.sent_at) for spec in order.specs]
            streams = tuple(core.validator.reopen(spec, slot) for spec in specs)
            core.loop.queue_limit.enter(len(specs), len(specs) * first.prompt_len)
            core.post(PreparedRequest(streams, slot))
        except Exception as error:
            known = error if isinstance(error, EngineError) else FleetError(f"the replica took no order: {error!r}")
            self._outbox.refuse(order.key, [spec.index for spec in order.specs], known)

    def _take_texts(self, order: Order) -> None:
        core, first = self.engine.core, order.specs[0]
        try:
            core.check_open()
            self._check_adapter(first, order.digest)
            specs = [_rebased(spec, core.loop.clock.now(), order.sent_at) for spec in order.specs]
            window = OutboxWindow(order.key, specs, self._outbox)
            core.loop.queue_limit.enter(window.samples, window.num_tokens)
            core.post_window(window)
        except Exception as error:
            known = error if isinstance(error, EngineError) else FleetError(f"the replica took no texts: {error!r}")
            self._outbox.refuse_texts(order.key, known)

    def _check_adapter(self, spec: RequestSpec, digest: str) -> None:
        """The name may mean something else by now, or not here yet."""
        name = spec.options.adapter
        if name is None:
            return
        found = next((info.digest for info in self.engine.adapters() if info.name == name), None)
        if found != digest:
            raise AdapterNotFound("adapter", "its content has changed while the request was on its way", name)

    def _delivery(self) -> wire.Delivery:
        core = self.engine.core
        delivery = wire.Delivery(self._outbox.take(), self._outbox.take_vectors())
        delivery.news = core.loop.scheduler.kv.news() or None
        now = asyncio.get_running_loop().time()
        self._untold = self._untold or bool(delivery.parcels or delivery.vectors)
        if now >= self._stats_at + (FIGURES if self._untold else BEAT * 0.9):
            with contextlib.suppress(RuntimeError):  # a table that another thread is changing: next time
                delivery.stats, self._stats_at, self._untold = self.engine.stats(), now, False
        if core.loop.failure is not None:
            delivery.dead = repr(core.loop.failure)
        return delivery


def _rebased(spec: RequestSpec, now: float, sent_at: float) -> RequestSpec:
    """With times of this clock. One that goes on has begun: what waits for a beginning does not apply to it."""

    def here(moment: float | None) -> float | None:
        return None if moment is None else moment - sent_at + now

    return replace(
        spec,
        arrival=now if spec.resumed else spec.arrival - sent_at + now,
        deadline=here(spec.deadline),
        waiting_deadline=None if spec.resumed else here(spec.waiting_deadline),
    )


def unpacked(answer: Any) -> Any:
    """The result in an `answer`. Raises what the method raised."""
    fine, value = pickle.loads(answer)
    if fine:
        return value
    raise value
