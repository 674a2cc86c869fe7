"""The client of an engine's loop: places in its queue, requests posted and aborted. Everything from any thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from typing import TYPE_CHECKING

from asyncengine.engine.process import PROCESS
from asyncengine.engine.serving_loop import ServingLoop
from asyncengine.engine.validation import PreparedRequest
from asyncengine.engine.vectors.batch import TextBatch
from asyncengine.errors import EngineAsleep, EngineClosed, EngineDead
from asyncengine.scheduler.messages import Abort, Drain

if TYPE_CHECKING:
    from asyncengine.lora.registry import AdapterRegistry


class LoopClient:
    """Posts requests to one engine's loop: the samples of a prompt, or a batch of texts."""

    def __init__(self, loop: ServingLoop, adapters: AdapterRegistry | None = None) -> None:
        self.loop = loop
        self.closing = False
        self._adapters = adapters
        self._born = PROCESS.generation

    # ---------------------------------------------------------------- in

    async def enter(self, group: PreparedRequest | TextBatch, *, begun: bool = False) -> bool:
        """Take places in the queue for all requests of `group`: at once, or as soon as some are free if so configured.
        False: a deadline came first. `begun`: `group` continues a call that has entered before; it waits in any case.

        Raises `QueueFull`, `EngineAsleep`, `EngineClosed`, `EngineDead`.
        """
        if self._enter_now(group, begun):
            return True
        with self._closed_or_dead():
            return await self.loop.queue_limit.enter_when_free(group.samples, group.num_tokens, self._patience(group))

    def enter_blocking(self, group: PreparedRequest | TextBatch, *, begun: bool = False) -> bool:
        """Take places as `enter` does, on a plain thread."""
        if self._enter_now(group, begun):
            return True
        with self._closed_or_dead():
            return self.loop.queue_limit.enter_blocking(group.samples, group.num_tokens, self._patience(group))

    def _enter_now(self, group: PreparedRequest | TextBatch, begun: bool) -> bool:
        """Take places at once. False: the caller has to wait for them."""
        if self.loop.refuses and not begun:
            raise EngineAsleep("the engine is asleep or paused, and takes no requests meanwhile: try again later")
        if begun or self.loop.config.when_full == "wait":
            return False
        with self._closed_or_dead():
            self.loop.queue_limit.enter(group.samples, group.num_tokens)
        return True

    def _patience(self, group: PreparedRequest | TextBatch) -> Callable[[], float]:
        """Seconds that are left until the first deadline of `group`; infinity without one."""
        start_by, now = group.spec.start_by, self.loop.clock.now
        return lambda: start_by - now()

    def post(self, group: PreparedRequest | TextBatch, alone: bool = False) -> None:
        """Hand `group`, which has its places in the queue, to the loop. One synchronous stretch: no cancellation can
        come between registering a request and posting it. `alone`: it may be computed at once.

        Raises `EngineClosed`, `EngineDead`, and `AdapterNotFound` if its adapter was unloaded meanwhile.
        """
        self._claim_adapter(group)
        tickets = group.tickets
        if self.loop.hooks:
            group.mailbox.context = copy_context()
        self.loop.delivery.expected.update(group.receivers)
        if (alone and self.loop.compute_now(group.specs)) or self.loop.inbox.post(*group.specs):
            return
        for ticket in tickets:
            self.loop.delivery.expected.pop(ticket, None)
            if self._adapters is not None:
                self._adapters.cancel(ticket)
        self.check_open()
        raise EngineClosed("the engine is closed")

    def _claim_adapter(self, group: PreparedRequest | TextBatch) -> None:
        """Claim the adapter's content, no earlier than the requests are certain to be posted: a caller that leaves
        before leaves no claim behind."""
        name = group.spec.options.adapter
        if name is None or self._adapters is None:
            return
        try:
            with self._closed_or_dead():
                self._adapters.claim(group.tickets, name)
        except EngineClosed:
            raise
        except BaseException:
            self.loop.queue_limit.leave(group.samples, group.num_tokens)
            raise

    # ---------------------------------------------------------------- out

    def abort_tickets(self, tickets: list[int]) -> None:
        """Abort these requests. Posting to a closed inbox changes nothing: its streams have ended."""
        if self._born == PROCESS.generation:  # in a fork the inbox is a copy without a reader, its lock perhaps held
            self.loop.inbox.post(*(Abort(ticket) for ticket in tickets))

    def abort(self, request_id: str) -> bool:
        """Abort every unfinished request labelled `request_id`. True if there was one."""
        delivery = self.loop.delivery  # in this order: a receiver goes from the first into the second
        receivers = [*list(delivery.expected.items()), *list(delivery.streams.items())]
        tickets = list({ticket: None for ticket, receiver in receivers if receiver.spec.request_id == request_id})
        self.abort_tickets(tickets)
        return bool(tickets)

    def start_closing(self, drain: bool, timeout: float | None) -> None:
        """Take no more requests; finish those there are (`drain`, for at most `timeout` seconds) or abort them."""
        self.closing = True
        now = self.loop.clock.now()
        deadline = (None if timeout is None else now + timeout) if drain else now
        self.loop.inbox.post(Drain(deadline))

    # ---------------------------------------------------------------- open?

    def check_open(self) -> None:
        """Raises `EngineDead` or `EngineClosed` if the engine takes no requests, `WrongProcess` in a fork."""
        self.check_process()
        if self.loop.failure is not None:
            raise EngineDead(self.loop.failure)
        if self.closing:
            raise EngineClosed("the engine is closed or draining: it takes no more requests")

    def check_process(self) -> None:
        """Raises `WrongProcess` in a fork of the engine's process."""
        PROCESS.check_unforked(self._born)

    @contextmanager
    def _closed_or_dead(self) -> Iterator[None]:
        """Raise `EngineDead` in place of `EngineClosed` where the engine closed because it died."""
        try:
            yield
        except EngineClosed:
            self.check_open()
            raise
