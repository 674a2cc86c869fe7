"""The fleet's loop: what `EngineLoop` is to one engine. Specifications come in, chunks go out into mailboxes; between
them lie a router and replicas.

    inbox ──take──▶ router.assign ──▶ Order ──post──▶ replica (an engine on some machine)
                        ▲                                │
    mailboxes ◀── chunks ◀──────── Delivery ◀────────────┘ (parcels, pages published and evicted, figures)

It answers to all that a front door (`Frontend`) and a host (`ThreadHost`) ask of an engine's loop, so that everything
before it is the same code: validation, chats, back-pressure, streams, blocking calls. One task is the only writer.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
from concurrent.futures import Future
from typing import Any

from asyncengine.cluster.fleet.adapters import FleetAdapters
from asyncengine.cluster.fleet.crew import LOOK_SECONDS, Crew, Member
from asyncengine.cluster.fleet.flights import Flight
from asyncengine.cluster.fleet.settings import FleetConfig
from asyncengine.cluster.fleet.text_flights import TextFlight
from asyncengine.cluster.fleet.wire import Command, Delivery, Leave, Parcel, Piece
from asyncengine.cluster.routing import Router
from asyncengine.config import EngineConfig
from asyncengine.engine import delivery
from asyncengine.engine.backpressure import QueueLimit
from asyncengine.engine.clock import Clock
from asyncengine.engine.delivery import OutputStream
from asyncengine.engine.inbox import Inbox
from asyncengine.engine.mailbox import Waiter, wake_all
from asyncengine.errors import EngineClosed, EngineDead, FleetError
from asyncengine.events import EngineDied, Hooks
from asyncengine.grammar.interface import GrammarCompiler
from asyncengine.outputs import Chunk, FinishReason
from asyncengine.request_spec import RequestSpec
from asyncengine.scheduler.messages import Abort, Drain
from asyncengine.stats import Meter

logger = logging.getLogger("asyncengine")

_LOOK = object()
"""A message that says nothing: look whether it is time to end."""


class FleetLoop:
    """The actor. `run` is the whole fleet."""

    def __init__(
        self,
        config: EngineConfig,
        settings: FleetConfig,
        crew: Crew,
        clock: Clock,
        page_size: int,
        *,
        grammars: GrammarCompiler | None,
        adapters: FleetAdapters,
    ) -> None:
        self.config, self.settings = config, settings
        self.crew = crew
        self.clock = clock
        self.grammars, self.adapters = grammars, adapters
        self.queue_limit = QueueLimit(config.max_queued_requests, config.max_queued_tokens)
        self.inbox: Inbox[Any] = Inbox()
        self.meter = Meter()
        self.delivery = delivery.Delivery(clock, self.meter, lambda message: None)
        """Holds the open streams, by ticket."""
        self.hooks = Hooks()
        self.failure: BaseException | None = None
        self.runs_on: Future[asyncio.AbstractEventLoop] = Future()
        """The event loop that it runs on, once its replicas are there to be asked."""
        self.runs_on.set_running_or_notify_cancel()  # one impatient caller must not cancel it for all
        self.router = Router(settings.weights)
        self.flights: dict[int, Flight | TextFlight] = {}
        self.resumed = self.matched_pages = 0
        self._page_size = page_size
        self._by_ticket: dict[int, Flight | TextFlight] = {}
        self._homeless: dict[int, Flight | TextFlight] = {}
        """Those that no replica could take, in order."""
        self._outgoing: dict[str, list[Command]] = {}
        self._drain: Drain | None = None

    def have_loop(self) -> None:
        """The event loop is nobody else's, which changes nothing: others compute."""

    async def run(self) -> None:
        """Serve until drained. Never raises but for cancellation."""
        try:
            self.crew.begin(self)
            self.runs_on.set_result(asyncio.get_running_loop())
            while self.failure is None and not self._drained():
                self._apply_inbox()
                self._flush()
                if not self._drained():
                    await self.inbox.wait(LOOK_SECONDS)
                    self._look_at_the_clock()
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

    def die(self, error: BaseException) -> None:
        """Nothing can be served any more."""
        self.failure = self.failure or error
        self.look()

    def look(self) -> None:
        """Something has changed: see whether it is time to end."""
        self.inbox.post(_LOOK)

    # ---------------------------------------------------------------- in

    def _apply_inbox(self) -> None:
        group: list[OutputStream] = []
        for message in self.inbox.take():
            if isinstance(message, RequestSpec):
                self.delivery.open(message.ticket)
                if message.pooled is not None:
                    self._depart_texts(message)
                    continue
                if group and (message.group is None or message.group != group[0].spec.group):
                    self._depart(group)
                    group = []
                group.append(self.delivery.streams[message.ticket])
                continue
            if group:
                self._depart(group)
                group = []
            match message:
                case Abort(ticket):
                    self._abort(ticket)
                case Drain():
                    self._drain = message if self._drain is None else _sooner(self._drain, message)
                    self.queue_limit.close()
        if group:
            self._depart(group)

    def _depart(self, streams: list[OutputStream]) -> None:
        """A request has come in: all its samples."""
        flight = Flight.of(streams, self.adapters.claimed(streams[0].spec.ticket))
        self.flights[flight.key] = flight
        self._by_ticket.update({stream.spec.ticket: flight for stream in streams})
        self._send(flight)

    def _depart_texts(self, spec: RequestSpec) -> None:
        """The first text of a window stands for all: they are posted together."""
        window = self.delivery.windows.get(spec.ticket)
        if window is None or window.spec is not spec:
            return
        flight = TextFlight(window, self.adapters.claimed(spec.ticket))
        self.flights[flight.key] = flight
        self._by_ticket.update(dict.fromkeys(flight.tickets, flight))
        self._send(flight)

    def _send(self, flight: Flight | TextFlight) -> None:
        """To the replica that the router chooses, or into the line for one."""
        flight.route = self.router.assign(flight.to_route(self._page_size))
        if flight.route is None:
            self._homeless[flight.key] = flight
            return
        self.matched_pages += flight.route.matched
        member = self.crew.members[flight.route.replica]
        member.flights[flight.key] = flight
        self._tell(member.name, flight.to_order(self.clock.now()))

    def _tell(self, replica: str, command: Command) -> None:
        self._outgoing.setdefault(replica, []).append(command)

    def _flush(self) -> None:
        """One call for each replica, whatever there is to say."""
        outgoing, self._outgoing = self._outgoing, {}
        for name, commands in outgoing.items():
            member = self.crew.members.get(name)
            if member is not None:
                member.host.link.post(pickle.dumps(commands))

    def _abort(self, ticket: int) -> None:
        """Its consumer has left. The replica ends it; where there is none, it ends here."""
        flight = self._by_ticket.get(ticket)
        if isinstance(flight, TextFlight):
            flight.left = True
            if flight.route is None:
                self._end_texts(flight, flight.end("abort"))
            else:
                self._tell(flight.route.replica, Leave((ticket,)))
            return
        stream = self.delivery.streams.get(ticket)
        if flight is None or stream is None:
            return
        flight.left.add(stream.spec.index)
        if flight.route is None:
            self._end_here(flight, [stream.spec.index], "abort")
        else:
            self._tell(flight.route.replica, Leave((ticket,)))

    # ---------------------------------------------------------------- replicas

    def joined(self, member: Member) -> None:
        """It has loaded, and takes requests from now on."""
        self.router.add(member.name)
        waiting, self._homeless = self._homeless, {}
        for flight in waiting.values():
            self._send(flight)
        self._flush()

    def took(self, member: Member, news: Delivery) -> None:
        """A replica says what is new. Raises `FleetError` if that is its engine's end."""
        if news.news is not None:
            self.router.update(member.name, news.news)
        waiters: list[Waiter] = []
        for parcel in news.parcels:
            flight = member.flights.get(parcel.key)
            if isinstance(flight, Flight) and not (news.dead and parcel.pieces[-1].reason == "engine_dead"):
                self._open_parcel(flight, parcel, waiters)
        wake_all(waiters)
        for vectors in news.vectors:
            texts = member.flights.get(vectors.key)
            if isinstance(texts, TextFlight):
                self._end_texts(texts, texts.arrive(vectors))
        if news.dead:
            raise FleetError(f"the engine of replica {member.name} died: {news.dead}")

    def lost(self, member: Member, reason: str) -> None:
        """A replica is gone: its requests end, or go on elsewhere."""
        flights = list(member.flights.values())
        member.flights.clear()
        for flight in flights:
            self._release(flight)
        self.router.remove(member.name)
        for flight in flights:
            if isinstance(flight, TextFlight):
                self._lose_texts(flight, reason)
                continue
            self._end_here(flight, [index for index in flight.streams if index in flight.left], "abort")
            if not flight.streams:
                continue
            if self.settings.on_loss == "resume":
                flight.resumed += 1
                self.resumed += 1
                self._send(flight)
            else:
                self._fail(flight, FleetError(reason))
        self._flush()
        self.look()

    def _lose_texts(self, flight: TextFlight, reason: str) -> None:
        if flight.left:
            self._end_texts(flight, flight.end("abort"))
        elif self.settings.on_loss == "resume":
            self.resumed += 1
            self._send(flight)
        else:
            self._end_texts(flight, flight.window.fail(lambda: EngineDead(FleetError(reason))))

    def left(self, member: Member) -> None:
        """A replica has ended as it was asked to, with no request left."""
        self.router.remove(member.name)

    # ---------------------------------------------------------------- out

    def _open_parcel(self, flight: Flight, parcel: Parcel, waiters: list[Waiter]) -> None:
        mailbox, now = flight.mailbox, self.clock.now()
        if parcel.beginning is not None and mailbox.started_at is None:
            mailbox.cached_tokens, computing, entries = parcel.beginning
            mailbox.started_at, mailbox.first_token_at = now - computing, now
            mailbox.prompt_logprobs.update(entries)
            self.meter.first_token.append(now - flight.spec.arrival)
        self._leave_queue(flight)
        if parcel.cause is not None:
            if flight.resumed:  # it would have gone on, and cannot
                self._fail(flight, FleetError(f"its replica was lost, and no other could go on: {parcel.cause}"))
                return
            mailbox.cause = parcel.cause
        for piece in parcel.pieces:
            stream = flight.streams.get(piece.sample)
            if stream is not None:
                self._put(flight, stream, piece, now, waiters)

    def _put(self, flight: Flight, stream: OutputStream, piece: Piece, now: float, waiters: list[Waiter]) -> None:
        index, text, tokens, reason, logprobs, error = piece
        if tokens:
            if stream.num_tokens:
                self.meter.inter_token.append((now - stream.last_token_at) / len(tokens))
            stream.num_tokens += len(tokens)
            stream.last_token_at = now
            if self.settings.on_loss == "resume":
                flight.tokens.setdefault(index, []).extend(tokens)
        if reason is not None:
            self._close(flight, stream, reason)
        waiter = stream.mailbox.put(Chunk(text, tokens, reason, index, logprobs, error))
        if waiter is not None:
            waiters.append(waiter)

    def _close(self, flight: Flight, stream: OutputStream, reason: FinishReason) -> None:
        """One sample has ended; with the last, the request."""
        ticket = stream.spec.ticket
        self._leave_queue(flight)
        if len(flight.streams) == 1:  # before its consumer hears of it
            self._forget(flight)
        del flight.streams[stream.spec.index]
        self._by_ticket.pop(ticket, None)
        self.delivery.streams.pop(ticket, None)
        self.adapters.cancel(ticket)
        self.meter.count_end(reason)

    def _end_texts(self, flight: TextFlight, waiter: Waiter | None) -> None:
        """All of a window has ended; its consumer hears of it last."""
        window = flight.window
        self.queue_limit.leave(window.samples, window.num_tokens)
        self._forget(flight)
        for ticket in flight.tickets:
            self._by_ticket.pop(ticket, None)
            self.delivery.windows.pop(ticket, None)
            self.adapters.cancel(ticket)
            self.meter.count_end(flight.reason)
        if flight.reason == "stop":
            self.meter.first_token.append(self.clock.now() - flight.spec.arrival)
        if waiter is not None:
            wake_all([waiter])

    def _forget(self, flight: Flight | TextFlight) -> None:
        """It is no request any more."""
        self._release(flight)
        del self.flights[flight.key]
        self._homeless.pop(flight.key, None)
        if self._drain is not None:
            self.look()

    def _leave_queue(self, flight: Flight) -> None:
        if not flight.begun:
            flight.begun = True
            self.queue_limit.leave(flight.samples, flight.samples * flight.spec.prompt_len)

    def _release(self, flight: Flight | TextFlight) -> None:
        """It is nowhere any more."""
        route, flight.route = flight.route, None
        if route is None:
            return
        self.router.release(route)
        member = self.crew.members.get(route.replica)
        if member is not None:
            member.flights.pop(flight.key, None)
            member.settle()

    def _end_here(self, flight: Flight, indices: list[int], reason: FinishReason, error: str | None = None) -> None:
        """End samples without a replica's word."""
        waiters: list[Waiter] = []
        for index in indices:
            self._put(flight, flight.streams[index], Piece(index, "", [], reason, None, error), 0.0, waiters)
        wake_all(waiters)

    def _fail(self, flight: Flight, cause: FleetError) -> None:
        flight.mailbox.failure = lambda: EngineDead(cause)
        self._end_here(flight, list(flight.streams), "engine_dead", str(EngineDead(cause)))

    # ---------------------------------------------------------------- clocks and the end

    def _look_at_the_clock(self) -> None:
        now = self.clock.now()
        self.crew.check_silence(now)
        for flight in list(self._homeless.values()):
            spec = flight.spec
            due = [at for at in (spec.deadline, None if flight.begun else spec.waiting_deadline) if at is not None]
            if not due or min(due) > now:
                continue
            if isinstance(flight, TextFlight):
                self._end_texts(flight, flight.end("timeout"))
            else:
                self._end_here(flight, list(flight.streams), "timeout")
        if self._drain is not None and self._drain.deadline is not None and now >= self._drain.deadline:
            self._abort_all()

    def _abort_all(self) -> None:
        for flight in list(self.flights.values()):
            if isinstance(flight, TextFlight):
                if flight.route is not None:
                    self._tell(flight.route.replica, Leave(tuple(flight.tickets)))
                self._end_texts(flight, flight.end("abort"))
                continue
            if flight.route is not None:
                self._tell(flight.route.replica, Leave(tuple(s.spec.ticket for s in flight.streams.values())))
            self._end_here(flight, list(flight.streams), "abort")

    def _drained(self) -> bool:
        if self._drain is None:
            return False
        if self._drain.deadline is not None and self.clock.now() >= self._drain.deadline:
            self._abort_all()
        return not self.flights and not self.delivery.expected and not self.delivery.windows

    async def _shut_down(self) -> None:
        self.queue_limit.close()
        unopened = [message.ticket for message in self.inbox.close() if isinstance(message, RequestSpec)]
        self.delivery.fail_all(self._make_failure, unopened)
        self.adapters.close()
        if self.grammars is not None:
            self.grammars.close()
        await self.crew.end()

    def _make_failure(self) -> Exception:
        return EngineClosed("the fleet has closed") if self.failure is None else EngineDead(self.failure)


def _sooner(known: Drain, new: Drain) -> Drain:
    deadlines = [drain.deadline for drain in (known, new) if drain.deadline is not None]
    return Drain(min(deadlines, default=None))
