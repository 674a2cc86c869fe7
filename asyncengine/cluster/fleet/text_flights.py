"""Texts under way whose vectors are waited for together: to one replica as one order, and back as one array."""

from __future__ import annotations

from dataclasses import dataclass

from asyncengine.cluster.fleet.wire import Order, Vectors
from asyncengine.cluster.routing import Route, RouteRequest
from asyncengine.engine.mailbox import Waiter
from asyncengine.engine.vector_window import VectorWindow
from asyncengine.outputs import FinishReason
from asyncengine.request_spec import RequestSpec
from asyncengine.scheduler import Output
from asyncengine.scheduler.messages import EndReason


@dataclass(slots=True, eq=False)
class TextFlight:
    """One window of texts, from the fleet's door to its vectors. Which replica computes it makes no difference to them:
    where that is lost, they can be computed anew elsewhere."""

    window: VectorWindow
    digest: str
    """Of the adapter's content it was promised."""
    route: Route | None = None
    """Where it is computed; None: nowhere yet."""
    begun: bool = False
    """Never: it leaves the queue when it ends."""
    left: bool = False
    """Nobody waits for it any more."""

    @property
    def key(self) -> int:
        """Ticket of its first text: its name on the wire."""
        return self.spec.ticket

    @property
    def spec(self) -> RequestSpec:
        return self.window.spec

    @property
    def tickets(self) -> list[int]:
        return [spec.ticket for spec in self.window.specs]

    @property
    def reason(self) -> FinishReason:
        """How it has ended."""
        window = self.window
        if window.failure is not None:
            return "engine_dead"
        return "stop" if window.fault is None else window.fault[1].reason or "error"

    def to_route(self, page_size: int) -> RouteRequest:
        """What the router is told: texts have no beginning in common, each is as much load as a sample."""
        return RouteRequest((), self.digest, self.spec.options.cache_salt or "", float(self.window.samples))

    def to_order(self, now: float) -> Order:
        """What its replica is told."""
        return Order(self.key, tuple(self.window.specs), self.digest, now)

    def arrive(self, news: Vectors) -> Waiter | None:
        """All that comes of it. Returns whoever must be woken."""
        return self.window.put_all(news.vectors, news.cached_tokens, news.fault)

    def end(self, reason: EndReason) -> Waiter | None:
        """The same without a replica's word."""
        return self.window.put_all(None, 0, (0, Output(self.key, reason=reason)))
