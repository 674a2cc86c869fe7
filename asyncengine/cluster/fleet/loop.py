"""The fleet's loop, in the place of an `EngineLoop`: a router and replicas lie between requests and mailboxes.

    inbox ──▶ dispatcher ──Submit──▶ replica (an engine on some machine)
                 │  ▲                   │
    mailboxes ◀──┘  └──────Update───────┘ (output, pages cached and evicted, statistics)

It has everything that a `Frontend` and a `ThreadHost` use of an engine's loop, so that validation, chats,
back-pressure, streams and blocking calls are the engine's own code. One task is the only writer.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Future

from asyncengine.cluster.fleet.dispatcher import Dispatcher
from asyncengine.cluster.fleet.replicas import CHECK_SECONDS, ReplicaManager
from asyncengine.config import EngineConfig
from asyncengine.errors import EngineClosed, EngineDead
from asyncengine.events import EngineDied
from asyncengine.grammar.interface import GrammarCompiler
from asyncengine.request_spec import RequestSpec
from asyncengine.scheduler.messages import Drain

logger = logging.getLogger("asyncengine")


class FleetLoop:
    """The fleet's only task: `run` serves until the fleet is closed."""

    refuses = False
    """It never sleeps."""

    def __init__(
        self, config: EngineConfig, dispatcher: Dispatcher, manager: ReplicaManager, grammars: GrammarCompiler | None
    ) -> None:
        self.config, self.dispatcher, self.manager, self.grammars = config, dispatcher, manager, grammars
        self.clock, self.inbox, self.meter = dispatcher.clock, dispatcher.inbox, dispatcher.meter
        self.delivery, self.queue_limit = dispatcher.delivery, dispatcher.queue_limit
        self.hooks = dispatcher.hooks
        self.failure: BaseException | None = None
        self.runs_on: Future[asyncio.AbstractEventLoop] = Future()
        """The event loop that it runs on, once its replicas can be asked."""
        self.runs_on.set_running_or_notify_cancel()  # one impatient caller must not cancel it for all
        self._drain: Drain | None = None

    def have_loop(self) -> None:
        """Do nothing: an `EngineLoop` would compute on the event loop where that is its own."""

    async def run(self) -> None:
        """Serve until drained. Raises nothing but cancellation."""
        try:
            self.manager.begin(self._die)
            self.runs_on.set_result(asyncio.get_running_loop())
            while self.failure is None and not self._is_drained():
                self._take_messages()
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
                self.runs_on.set_exception(self._make_failure())
            if self.failure is not None:
                self.hooks.emit(EngineDied(self.failure))
            await self._shut_down()

    def _take_messages(self) -> None:
        messages = self.inbox.take()
        self.dispatcher.take([message for message in messages if not isinstance(message, Drain)])
        for drain in messages:
            if isinstance(drain, Drain):
                deadlines = [each.deadline for each in (self._drain, drain) if each is not None]
                self._drain = Drain(min((at for at in deadlines if at is not None), default=None))
                self.queue_limit.close()

    def _is_drained(self) -> bool:
        if self._drain is None:
            return False
        if self._drain.deadline is not None and self.clock.now() >= self._drain.deadline:
            self.dispatcher.abort_all()
        return not (self.dispatcher.requests or self.delivery.expected)

    def _die(self, error: BaseException) -> None:
        self.failure = self.failure or error
        self.inbox.post()

    async def _shut_down(self) -> None:
        self.queue_limit.close()
        unopened = [message.ticket for message in self.inbox.close() if isinstance(message, RequestSpec)]
        self.delivery.fail_all(self._make_failure, unopened)
        self.dispatcher.adapters.close()
        if self.grammars is not None:
            self.grammars.close()
        await self.manager.end()

    def _make_failure(self) -> Exception:
        return EngineClosed("the fleet has closed") if self.failure is None else EngineDead(self.failure)
