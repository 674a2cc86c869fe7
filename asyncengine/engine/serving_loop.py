"""The base of loops that serve requests: places in the queue, the inbox, and the mailboxes of open requests."""

from __future__ import annotations

from asyncengine.config import EngineConfig
from asyncengine.engine.backpressure import QueueLimit
from asyncengine.engine.clock import Clock, MonotonicClock
from asyncengine.engine.delivery import Delivery
from asyncengine.engine.inbox import Inbox
from asyncengine.errors import EngineClosed, EngineDead
from asyncengine.events import Hooks
from asyncengine.request_spec import RequestSpec
from asyncengine.scheduler.messages import Abort, Drain, Message, StopText
from asyncengine.seams import AdapterStore, GrammarCompiler
from asyncengine.stats import Meter
from asyncengine.text.token_table import TokenTable


class ServingLoop:
    """A loop as front ends use it. `EngineLoop` computes the requests that are posted here, a fleet's loop has other
    engines compute them."""

    noun = "engine"
    """Name of what it runs, in errors."""

    def __init__(
        self, config: EngineConfig, clock: Clock | None = None, *, grammars: GrammarCompiler | None = None,
        adapters: AdapterStore | None = None, table: TokenTable | None = None,
    ) -> None:  # fmt: skip
        self.config = config
        self.clock = clock or MonotonicClock()
        self.grammars = grammars
        self.adapters = adapters
        self.queue_limit = QueueLimit(config.max_queued_requests, config.max_queued_tokens)
        self.inbox: Inbox[Message] = Inbox()
        self.meter = Meter()
        self.hooks = Hooks()
        self.delivery = Delivery(self.clock, self.meter, self.hooks, self.end_early, table, self.inbox.post)
        self.failure: BaseException | None = None
        """The error that killed the loop, if one did."""
        self._drain: Drain | None = None

    @property
    def refuses(self) -> bool:
        """Whether new requests are turned away for a while. From any thread."""
        return False

    def have_loop(self) -> None:
        """Called before `run`: no other code will use the event loop that it runs on."""

    async def run(self) -> None:
        """Serve until drained. Never raises but for cancellation: what kills the loop is told to every stream."""
        raise NotImplementedError

    def end_early(self, message: StopText | Abort) -> None:
        """Delivery has ended a stream by itself. The loop hears of it before it does anything else for it."""
        self.let_go(message.ticket)
        self.inbox.post(message)

    def let_go(self, ticket: int) -> None:
        """Whatever ended it, the request waits for nothing and uses nothing any more."""
        if self.grammars is not None:
            self.grammars.cancel(ticket)
        if self.adapters is not None:
            self.adapters.cancel(ticket)

    def start_drain(self, drain: Drain) -> None:
        """Take no more requests. Closing again may shorten a drain, not lengthen it."""
        deadlines = [each.deadline for each in (self._drain, drain) if each is not None and each.deadline is not None]
        self._drain = Drain(min(deadlines, default=None))
        self.queue_limit.close()  # those in line for a place are refused like newcomers

    def finished(self) -> dict[str, int]:
        """Samples that have ended, by reason, with those whose time was up in line for the queue."""
        finished = dict(self.meter.finished)
        if self.queue_limit.expired:
            finished["timeout"] = finished.get("timeout", 0) + self.queue_limit.expired
        return finished

    def end_all(self) -> None:
        """Tell everybody that it has ended, and refuse what comes now."""
        self.queue_limit.close()
        unopened = [message.ticket for message in self.inbox.close() if isinstance(message, RequestSpec)]
        self.delivery.fail_all(self.make_failure, unopened)
        for part in (self.grammars, self.adapters):
            if part is not None:
                part.close()

    def make_failure(self) -> Exception:
        """The error of requests that are left when it has ended."""
        return EngineClosed(f"the {self.noun} has closed") if self.failure is None else EngineDead(self.failure)
