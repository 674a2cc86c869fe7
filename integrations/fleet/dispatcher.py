"""The fleet's requests: each is sent to the replica that the router chooses, and its output put into its mailbox."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import groupby
from typing import Any

from asyncengine.config import RequestSettings
from asyncengine.engine.backpressure import QueueLimit
from asyncengine.engine.clock import Clock
from asyncengine.engine.delivery import Delivery, OutputStream
from asyncengine.engine.inbox import Inbox
from asyncengine.engine.mailbox import Waiter, wake_all
from asyncengine.engine.vectors.batch import TextBatch
from asyncengine.errors import EngineDead, FleetError
from asyncengine.events import Hooks
from asyncengine.integrations.fleet.adapters import FleetAdapters
from asyncengine.integrations.fleet.messages import Command, RequestOutput, Update
from asyncengine.integrations.fleet.prefill import Prefills
from asyncengine.integrations.fleet.requests import FleetRequest, ReplicaHandle
from asyncengine.integrations.fleet.settings import FleetConfig
from asyncengine.integrations.placement.routing import Role, Route, Router
from asyncengine.outputs import Chunk, FinishReason
from asyncengine.request_spec import Peer, RequestSpec
from asyncengine.scheduler import Output
from asyncengine.scheduler.messages import Abort
from asyncengine.stats import Meter


class Dispatcher:
    """All requests of one fleet. Lives on the fleet's loop; nothing here waits."""

    def __init__(
        self, config: RequestSettings, settings: FleetConfig, clock: Clock, page_size: int, adapters: FleetAdapters
    ) -> None:
        self.clock, self.adapters = clock, adapters
        self.queue_limit = QueueLimit(config.max_queued_requests, config.max_queued_tokens)
        self.inbox: Inbox[Any] = Inbox()
        """Inbox of the fleet's loop. Posting nothing wakes that, to send commands and to see whether it may end."""
        self.meter = Meter()
        self.hooks = Hooks()
        self.delivery = Delivery(clock, self.meter, self.hooks, lambda message: None)
        """Receivers of the outputs of open requests, by ticket: streams and batches of texts."""
        self.router = Router(settings.weights)
        self.replicas: dict[str, ReplicaHandle] = {}
        """Replicas that serve, by name."""
        self.prefills = Prefills(clock, self.router, self.replicas, page_size, settings.min_prefill_tokens)
        self.requests: dict[int, FleetRequest] = {}
        self.lost = self.resumed = self.matched_pages = 0
        self._resumes = settings.on_loss == "resume"
        self._page_size = page_size
        self.by_ticket: dict[int, FleetRequest] = {}
        self.waiting: dict[int, FleetRequest] = {}
        """Requests that no replica could take, in order."""

    # ---------------------------------------------------------------- to replicas

    def take(self, messages: Iterable[RequestSpec | Abort]) -> None:
        """Take up new requests and aborts, in order. Samples of one request are posted together."""
        for _, each in groupby(messages, key=_group):
            first, *others = each
            if isinstance(first, Abort):
                self._abort(first.ticket)
                continue
            specs = [first, *(spec for spec in others if isinstance(spec, RequestSpec))]
            digest, streams = self.adapters.claimed(first.ticket), dict[int, OutputStream]()
            for spec in specs:
                self.delivery.open(spec.ticket)
                receiver = self.delivery.streams[spec.ticket]
                if not isinstance(receiver, TextBatch):
                    streams[spec.index] = receiver
                elif receiver.spec is spec:  # the first text stands for all
                    self._start(FleetRequest(digest, texts=receiver))
            if streams:
                self._start(FleetRequest(digest, streams))

    def _start(self, request: FleetRequest) -> None:
        self.requests[request.key] = request
        self.by_ticket.update({spec.ticket: request for spec in request.specs})
        self._send(request)

    def _send(self, request: FleetRequest) -> None:
        """Submit it to the replica that the router chooses, or let it wait for one."""
        request.route = self.router.assign(request.to_route(self._page_size))
        if request.route is None:
            self.waiting[request.key] = request
            return
        self.matched_pages += request.route.matched
        self.replicas[request.route.replica].requests[request.key] = request
        prefill = self.prefills.assign(request)
        if prefill is None:
            self._submit(request)
            return
        submit = request.to_prefill(prefill.key, self.clock.now(), self._peer_for(prefill.route))
        self._post(prefill.route.replica, submit)

    def _submit(self, request: FleetRequest, peer: Peer | None = None) -> None:
        """Send it to its replica. `peer`: the one that has computed its prompt."""
        assert request.route is not None
        submit = request.to_submit(self.clock.now(), peer or self._peer_for(request.route))
        self._post(request.route.replica, submit)

    def _peer_for(self, route: Route) -> Peer | None:
        """The replica that has most of a request's prefix, if the one that computes it has less."""
        if self.replicas[route.replica].peer is None:
            return None
        for name, pages in self.router.holders(route).items():
            if (peer := self.replicas[name].peer) is not None:
                return peer._replace(pages=pages)
        return None

    def _post(self, replica: str, command: Command) -> None:
        self.replicas[replica].commands.append(command)
        self.inbox.post()

    def _abort(self, ticket: int) -> None:
        """End what its consumer has left: on its replica, which answers, or here where it has none."""
        request = self.by_ticket.get(ticket)
        if request is None:
            return
        request.left.add(ticket)
        if request.route is None or request.prefill is not None:  # no replica knows of it
            self.end(request, "abort", tickets={ticket})
        else:
            self._post(request.route.replica, Abort(ticket))

    def abort_all(self) -> None:
        """End every request at once, on its replica and here."""
        for request in list(self.requests.values()):
            if request.route is not None:
                for spec in request.specs:
                    self._post(request.route.replica, Abort(spec.ticket))
            self.end(request, "abort")

    def expire(self) -> None:
        """End requests that wait for a replica beyond their deadlines; a replica ends its own."""
        now = self.clock.now()
        for request in list(self.waiting.values()):
            spec = request.spec
            due = (spec.deadline, None if request.begun else spec.waiting_deadline)
            if any(at is not None and at <= now for at in due):
                self.end(request, "timeout")

    # ---------------------------------------------------------------- replicas

    def add(self, replica: ReplicaHandle, role: Role = "both") -> None:
        """Let a replica take requests from now on, those that wait first."""
        self.replicas[replica.name] = replica
        self.router.add(replica.name, role)
        waiting, self.waiting = self.waiting, {}
        for request in waiting.values():
            self._send(request)

    def remove(self, replica: ReplicaHandle) -> None:
        """Forget a replica that has finished its requests."""
        del self.replicas[replica.name]
        self.router.remove(replica.name)

    def lose(self, replica: ReplicaHandle, reason: str) -> None:
        """Forget a replica that is gone: its requests go on elsewhere, or end."""
        requests = [(request, request.prefill is None) for request in replica.requests.values()]
        for request, _ in requests:
            self._release(request)
        prefilled = self.prefills.lose(replica)
        self.remove(replica)
        self.lost += 1
        for request in prefilled:
            self._submit(request)
        for request, sent in requests:
            left = request.left.intersection(spec.ticket for spec in request.specs)
            if left:
                self.end(request, "abort", tickets=left)
            if request.key not in self.requests:
                continue
            if not sent:  # its prompt was computed elsewhere: nothing is lost
                self._send(request)
            elif self._resumes:
                request.resumed += 1
                self.resumed += 1
                self._send(request)
            else:
                self._fail(request, reason)
        self.inbox.post()

    # ---------------------------------------------------------------- to consumers

    def receive(self, replica: ReplicaHandle, update: Update) -> None:
        """Hand on everything new on a replica. Raises `FleetError` if its engine has died."""
        if update.cache_news is not None:
            self.router.update(replica.name, update.cache_news)
        waiters: list[Waiter] = []
        for output in update.outputs:
            request = replica.requests.get(output.key)
            # requests of an engine that died are not over: they may go on elsewhere
            if update.dead and _reason(output) == "engine_dead":
                continue
            if request is not None:
                self._receive(request, output, waiters)
            elif (prefilled := self.prefills.receive(replica, output)) is not None:
                self._submit(*prefilled)
        wake_all(waiters)
        if update.dead:
            raise FleetError(f"the engine of replica {replica.name} died: {update.dead}")

    def _receive(self, request: FleetRequest, output: RequestOutput, waiters: list[Waiter]) -> None:
        now = self.clock.now()
        if request.texts is not None:
            if output.vectors is not None:
                self.meter.first_token.append(now - request.spec.arrival)
            waiter = request.texts.put_all(output.vectors, output.cached_tokens, output.fault)
            reason = "stop" if output.fault is None else output.fault[1].reason or "error"
            self._close(request, request.specs, reason)
            waiters += [] if waiter is None else [waiter]
            return
        mailbox = next(iter(request.streams.values())).mailbox
        if output.computing is not None and request.route is not None:
            self.prefills.settle(request, request.route, output.cached_tokens)
        if output.computing is not None and mailbox.started_at is None:
            mailbox.cached_tokens, mailbox.restored_tokens = output.cached_tokens, output.restored_tokens
            mailbox.started_at, mailbox.first_token_at = now - output.computing, now
            mailbox.prompt_logprobs.update(output.prompt_logprobs)
            self.meter.first_token.append(now - request.spec.arrival)
        (right, wrong), (more_right, more_wrong) = mailbox.predicted, output.predicted
        mailbox.predicted = right + more_right, wrong + more_wrong
        mailbox.routed_experts += output.routed_experts
        self._leave_queue(request)
        if output.cause is not None:
            if request.resumed:  # it would have gone on, and cannot
                self._fail(request, f"its replica was lost, and no other could go on: {output.cause}")
                return
            mailbox.cause = output.cause
        for chunk in output.chunks:
            stream = request.streams.get(chunk.index)
            if stream is not None:
                self._put(request, stream, chunk, now, waiters)

    def _put(
        self, request: FleetRequest, stream: OutputStream, chunk: Chunk, now: float, waiters: list[Waiter]
    ) -> None:
        tokens = chunk.token_ids
        if tokens:
            if stream.num_tokens:
                self.meter.inter_token.append((now - stream.last_token_at) / len(tokens))
            stream.num_tokens += len(tokens)
            stream.last_token_at = now
            if self._resumes:
                request.tokens.setdefault(chunk.index, []).extend(tokens)
            if chunk.steered_from is not None:
                request.steered.add(chunk.index)
        if chunk.finish_reason is not None:
            self._close(request, [stream.spec], chunk.finish_reason)
        waiter = stream.mailbox.put(chunk)
        if waiter is not None:
            waiters.append(waiter)

    def end(
        self, request: FleetRequest, reason: FinishReason, *, tickets: Collection[int] | None = None, error: str = ""
    ) -> None:
        """End a request, or its samples of these `tickets`, without a replica's word."""
        waiters: list[Waiter] = []
        if request.texts is not None:
            output = Output(request.key, reason="abort" if reason == "abort" else "timeout")
            self._receive(request, RequestOutput(request.key, fault=(0, output)), waiters)
        for stream in list(request.streams.values()):
            if tickets is None or stream.spec.ticket in tickets:
                self._put(request, stream, Chunk("", [], reason, stream.spec.index, error=error or None), 0.0, waiters)
        wake_all(waiters)

    def _fail(self, request: FleetRequest, reason: str) -> None:
        """End a request with `EngineDead`, whose cause says why."""

        def failure() -> EngineDead:
            return EngineDead(FleetError(reason))

        if request.texts is not None:
            waiter = request.texts.fail(failure)
            self._close(request, request.specs, "engine_dead")
            wake_all([] if waiter is None else [waiter])
            return
        next(iter(request.streams.values())).mailbox.failure = failure
        self.end(request, "engine_dead", error=str(failure()))

    def _close(self, request: FleetRequest, specs: Iterable[RequestSpec], reason: FinishReason) -> None:
        """Forget samples or texts that have ended, and with the last the request, before its consumer hears of it."""
        self._leave_queue(request)
        for spec in specs:
            stream = request.streams.pop(spec.index, None)
            del self.by_ticket[spec.ticket]
            self.delivery.streams.pop(spec.ticket, None)
            self.adapters.cancel(spec.ticket)
            if stream is None:
                self.meter.count_end(reason)
            else:
                self.delivery.count_end(stream, reason)
        if not request.streams:
            self._release(request)
            del self.requests[request.key]
            self.waiting.pop(request.key, None)
            self.inbox.post()

    def _leave_queue(self, request: FleetRequest) -> None:
        if not request.begun:
            request.begun = True
            self.queue_limit.leave(request.samples, request.num_tokens)

    def _release(self, request: FleetRequest) -> None:
        """Take a request from its replica, and its prompt from another one."""
        self.prefills.cancel(request)
        route, request.route = request.route, None
        if route is not None:
            self.router.release(route)
            replica = self.replicas[route.replica]
            del replica.requests[request.key]
            replica.notify()


def _group(message: RequestSpec | Abort) -> object:
    """Key that the messages of one request's samples share."""
    return message.group if isinstance(message, RequestSpec) and message.group is not None else (message.ticket,)


def _reason(output: RequestOutput) -> FinishReason | None:
    return output.chunks[-1].finish_reason if output.chunks else None
