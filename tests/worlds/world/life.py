"""One life of the production engine in a simulated world: what a plan says happens, and everything must come right.

Safety: every token is the model's, every stream ends once and for a reason that the plan explains, and books balance
after every step. Liveness: when the faults are over everything ends, the pages come back, and no thread is left.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from worlds.world.calls import Record, ask, ask_blocking
from worlds.world.device import LettersBackend, VirtualDevice
from worlds.world.disk import make_disk, open_store, restart
from worlds.world.plan import VOCABULARY, Call, Fault, Plan
from worlds.world.verdict import judge

from asyncengine.assembly.wiring import wire
from asyncengine.async_engine import AsyncEngine
from asyncengine.engine.frontend import Frontend
from asyncengine.engine_group import EngineGroup
from asyncengine.errors import EngineClosed, EngineDead
from asyncengine.events import Event, StepDone
from asyncengine.grammar.service import GrammarService
from asyncengine.info import ModelInfo
from asyncengine.step import Batch
from asyncengine.sync_engine import Engine
from asyncengine.testing.leaks import assert_nothing_held
from asyncengine.testing.world import VirtualDisk, World, simulate

PATIENCE = 500.0
"""Seconds in which something happens, where anybody waits for anything."""
REST = 100.0
"""Seconds in which an engine that has nothing to do comes to rest, and threads end after it."""
_SHARED = ("asyncengine.engine.", "asyncengine.grammar.service", "asyncengine.stream", "asyncengine.async_engine")
"""The code between callers and scheduler, which several threads run at once."""


class Life:
    """One plan, lived in one order of events."""

    def __init__(self, plan: Plan, order: int = 0, disk: VirtualDisk | None = None) -> None:
        """`order`: another one, another order in which threads and callbacks run. `disk`: what an earlier life has left
        of its prefixes."""
        self.plan, self.order = plan, order
        self.first = disk is None
        self.disk = disk if disk is not None or not plan.stored else make_disk(plan)
        self.world = World(plan.seed * 1000 + order, switching=plan.switching, stalling=plan.stalling)
        if plan.interrupted:
            files = {
                str(each.__file__) for name, each in sys.modules.items() if name.startswith(_SHARED) and each.__file__
            }
            self.world.interrupt_lines_of(files, plan.interrupted)
        self.records = {call.number: Record(call) for call in plan.calls}
        self.updates = [fault for fault in plan.faults if fault.is_update]
        self.devices = [
            VirtualDevice(self.world, setup, [f for f in plan.faults if f.engine == place and not f.is_update])
            for place, setup in enumerate(plan.setups)
        ]
        self.engines: list[AsyncEngine] = []
        self.group: EngineGroup | None = None
        self.closing_at = float("inf")
        self.wrong: list[str] = []
        """Violations that were seen where raising would not be heard."""
        slow = any(fault.kind in ("slow", "hang") for fault in plan.faults)
        self._rest = REST + slow * 2 * max(setup.config.step_hard_limit for setup in plan.setups)
        planned = [plan.close_at, *(call.at for call in plan.calls), *(fault.at for fault in plan.faults)]
        self.world.horizon = max(planned) + PATIENCE + self._rest
        self._pending = len(plan.calls) + len(self.updates)
        self._stop: asyncio.Future[None] | None = None

    def run(self) -> None:
        """Live it. Raises `AssertionError` for what is not as it must be."""
        plan, world = self.plan, self.world
        with _silent_logger():
            simulate(world, self._first_thread, shuffled=plan.shuffled, delay=plan.delay)
        judged = [problem for record in self.records.values() for problem in judge(record, self)]
        assert not (problems := [*world.complaints, *self.wrong, *judged]), "\n".join(problems)
        if self.disk is not None and self.first:
            restart(self.disk)
            Life(plan, self.order, self.disk).run()

    # ---------------------------------------------------------------- engines

    def _build(self, place: int) -> Frontend:
        setup, device = self.plan.setups[place], self.devices[place]
        self.world.sleep(setup.pace)
        info = ModelInfo(
            "fake", VOCABULARY, 10**6, (1,), "int", "cpu", setup.num_pages, setup.config.page_size, has_tokenizer=False
        )
        grammars = GrammarService(lambda: LettersBackend(self.world, setup.config.grammar_timeout), setup.config)
        prefixes = None if self.disk is None else open_store(self.world, self.disk, setup, device)
        core = wire(device, info, setup.config, clock=self, grammars=grammars, tiers=[prefixes])
        launch = core.loop.runner.launch

        def checked(batch: Batch) -> Any:
            self.note_progress()
            self._check_retire_rule(core, batch)
            return launch(batch)

        core.loop.runner.launch = checked  # type: ignore[method-assign]
        core.loop.hooks.add(partial(self._check_books, core))
        return core

    def now(self) -> float:
        """The engines' clock."""
        return self.world.now

    def _check_books(self, core: Frontend, event: Event) -> None:
        if isinstance(event, StepDone):
            with self._expecting(f"books at {self.now():.3f}"):
                core.loop.scheduler.check()

    def _check_retire_rule(self, core: Frontend, batch: Batch) -> None:
        """No page that `batch` writes may be named by somebody else's row in flight."""
        size = core.config.page_size
        for flying in (row for launched in core.loop.in_flight for row in launched.batch.rows):
            named = set(flying.pages[: -(-(flying.start + flying.num_scheduled) // size)])
            for row in batch.rows:
                written = row.pages[row.start // size : -(-(row.start + row.num_scheduled) // size)]
                if row.spec is not flying.spec and not named.isdisjoint(written):
                    self.wrong.append(f"step {batch.step} writes pages that a step in flight names")

    @contextmanager
    def _expecting(self, what: str, *known: type[Exception]) -> Iterator[None]:
        """A context in which any error but `known` ones is a violation."""
        try:
            yield
        except known:
            pass
        except Exception as error:
            self.wrong.append(f"{what}: {error!r}")

    # ---------------------------------------------------------------- who does what

    def _first_thread(self) -> None:
        plan, world = self.plan, self.world
        self.engines = [AsyncEngine(partial(self._build, n), hosted=plan.hosted) for n in range(len(plan.setups))]
        self.group = EngineGroup({str(place): engine for place, engine in enumerate(self.engines)})
        if plan.hosted:
            for engine in self.engines:
                engine.start_blocking()
        else:
            world.spawn(self._home, "home")
            world.wait_until(lambda: self._stop is not None)
        self._start_callers()
        if plan.closing == "late":
            world.wait_until(lambda: not self._pending)
            self.note_progress()
            world.sleep(self._rest)
            for place, engine in enumerate(self.engines):
                if place not in plan.deadly:
                    with self._expecting(f"engine {place} at rest"):
                        assert_nothing_held(engine.core)
        else:
            world.sleep(plan.close_at)
        self.closing_at = world.now
        self._close()
        world.wait_until(lambda: not self._pending)
        world.horizon = float("inf")
        world.sleep(self._rest)
        if world.alive:
            self.wrong.append(f"threads are left: {world.alive}")

    def _home(self) -> None:
        """The thread of owned engines and of the callers on their loop."""

        home = [call for call in self.plan.calls if call.caller == "home"]

        async def live() -> None:
            for engine in self.engines:
                await engine.start()
            tasks = [asyncio.get_running_loop().create_task(ask(self, call)) for call in home]
            self._stop = asyncio.get_running_loop().create_future()
            self.world.wake_first()
            await self._stop
            del tasks

        asyncio.run(live())
        for record in (self.records[call.number] for call in home):
            if not record.begun:  # its task was cancelled before it ran
                record.left = True
                self.note_end()

    def _start_callers(self) -> None:
        for caller in ("loop", *(["home"] if self.plan.hosted else [])):
            calls = [call for call in self.plan.calls if call.caller == caller]
            if calls:
                self.world.spawn(partial(asyncio.run, self._ask_all(calls)), f"caller-{caller}")
        for call in self.plan.calls:
            if call.caller == "thread":
                self.world.spawn(partial(ask_blocking, self, call), f"caller-{call.number}")
        for number, fault in enumerate(self.updates, 1):
            self.world.spawn(partial(self._update, number, fault), f"update-{number}")

    async def _ask_all(self, calls: list[Call]) -> None:
        await asyncio.gather(*(ask(self, call) for call in calls))

    def _close(self) -> None:
        """The end of the engines, as planned; where they are owned, their loop ends after it, or instead."""
        assert self.group is not None
        drain = self.plan.closing == "drain"
        keywords: dict[str, Any] = {"drain": drain, "timeout": self.plan.drain_timeout if drain else None}
        if self._stop is not None:
            loop, stop = self._stop.get_loop(), self._stop
            if self.plan.closing != "lost":
                asyncio.run_coroutine_threadsafe(self.group.aclose(**keywords), loop).result()
                self.world.wait_until(lambda: not self._pending)
            loop.call_soon_threadsafe(stop.set_result, None)
        elif self.plan.blocking:
            for engine in self.engines:
                Engine(engine).close(**keywords)
        else:
            asyncio.run(self.group.aclose(**keywords))

    def _update(self, number: int, fault: Fault) -> None:
        self.world.sleep(fault.at)
        known = (EngineDead,) if self.plan.closing == "lost" or fault.engine in self.plan.deadly else ()
        with self._expecting("an update", EngineClosed, *known):
            Engine(self.engines[fault.engine]).update_weights(number, mode=fault.kind)  # type: ignore[arg-type]
        self.note_end()

    # ---------------------------------------------------------------- for callers

    async def sleep(self, call: Call, seconds: float) -> None:
        """Sleep as the caller does."""
        if call.caller == "thread":
            self.world.sleep(seconds)
        else:
            await asyncio.sleep(seconds)

    def abort_after(self, seconds: float, record: Record, abort: Callable[[], object]) -> None:
        """Have another thread abort a call then."""

        def wait_and_abort() -> None:
            self.world.sleep(seconds)
            if record.ended is None:
                record.aborted = True
                abort()

        self.world.spawn(wait_and_abort, "aborter")

    def note_progress(self) -> None:
        """Something has happened: whoever waits may wait on."""
        self.world.horizon = max(self.world.horizon, self.now() + PATIENCE + self._rest)

    def note_end(self) -> None:
        """One call or update has ended, on any thread."""
        self._pending -= 1
        self.world.wake_first()


@contextmanager
def _silent_logger() -> Iterator[None]:
    """A context that keeps planned faults out of the log."""
    logger = logging.getLogger("asyncengine")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
