"""The fleet's requests: each is sent to the replica that the router chooses, and its output put into its mailbox."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping

from asyncengine.assembly.relay import RelayLoop
from asyncengine.errors import EngineDead, FleetError
from asyncengine.integrations.fleet.adapters import FleetAdapters
from asyncengine.integrations.fleet.messages import Command, Tell, Update
from asyncengine.integrations.fleet.requests import FleetRequest, Prefill, ReplicaHandle
from asyncengine.integrations.fleet.settings import FleetConfig
from asyncengine.integrations.placement.routing import Role, Route, Router
from asyncengine.request_output import RequestOutput
from asyncengine.request_spec import Peer

# Prompts that one replica computes for another, whose decode steps they would delay (DistServe, Splitwise 2024).

MOST_MISSED = 3
"""Consecutive prompts that a replica computed for others which then did not have the pages: enough to conclude that
they cannot pull from it."""
REST_SECONDS = 30.0
"""Seconds for which such a replica computes no prompts for others."""


class Prefills:
    """Prompts of one fleet that are computed by other replicas than their requests'. Lives on the fleet's loop."""

    def __init__(
        self, now: Callable[[], float], router: Router, replicas: Mapping[str, ReplicaHandle], page_size: int,
        least: int,
    ) -> None:  # fmt: skip
        """`least`: fewest tokens of a prompt that its own replica must lack for another one to compute it."""
        self._now, self._router, self._replicas = now, router, replicas
        self._page_size, self._least = page_size, -(-least // page_size)
        self._keys = itertools.count(-1, -1)
        self.pulled = 0
        """Prompts that were pulled by the replicas that they were computed for."""
        self.failed: Counter[str] = Counter()
        """Others, by reason: the replica that computed it was "lost", has "refused" it, or its pages were "missing"."""

    def assign(self, request: FleetRequest) -> Prefill | None:
        """Assign a request's prompt to another replica. None if its own is to compute it."""
        route = request.route
        assert route is not None
        if request.texts is not None or request.spec.images or self._replicas[route.replica].peer is None:
            return None  # pages of texts and of pictures go to no other replica
        params = request.spec.params
        if params.prompt_logprobs or params.traced_from is not None:  # a prefix from elsewhere has none
            return None
        now = self._now()
        ready = [name for name, each in self._replicas.items() if each.peer is not None and each.rests_until <= now]
        route_to = self._router.assign_prefill(route, self._least, ready)
        if route_to is None:
            return None
        request.prefill = prefill = Prefill(next(self._keys), route_to, request)
        self._replicas[route_to.replica].prefills[prefill.key] = prefill
        return prefill

    def release(self, request: FleetRequest) -> ReplicaHandle | None:
        """Take a request's prompt from the replica that computes it. Returns that replica, or None without one."""
        prefill, request.prefill = request.prefill, None
        if prefill is None:
            return None
        self._router.release(prefill.route)
        replica = self._replicas[prefill.route.replica]
        del replica.prefills[prefill.key]
        replica.notify()
        return replica

    def cancel(self, request: FleetRequest) -> None:
        """Stop computing a request's prompt elsewhere: it is not waited for any more."""
        prefill, replica = request.prefill, self.release(request)
        if prefill is not None and replica is not None:
            replica.commands.append(prefill.key)
        request.prefilled_by = ""

    def receive(self, replica: ReplicaHandle, output: RequestOutput) -> tuple[FleetRequest, Peer | None] | None:
        """Take the output of a prompt. Returns the request if it can go to its own replica now, with the peer that has
        its prefix, or None for a peer that failed; None if there is nothing to do yet."""
        prefill = replica.prefills.get(output.key)
        reason = next((chunk.finish_reason for chunk in output.chunks if chunk.finish_reason), None)
        if prefill is None or reason is None:
            return None
        request = prefill.request
        self.release(request)
        if reason not in ("length", "stop") or replica.peer is None:
            self.failed["refused"] += 1
            return request, None
        request.prefilled_by = replica.name
        return request, replica.peer._replace(pages=len(prefill.route.request.pages), planned=True)

    def lose(self, replica: ReplicaHandle) -> list[FleetRequest]:
        """Take all prompts from a replica that is gone. Returns their requests, whose own replicas compute them."""
        requests = [prefill.request for prefill in replica.prefills.values()]
        for request in requests:
            self.release(request)
            self.failed["lost"] += 1
        return requests

    def settle(self, request: FleetRequest, route: Route, cached_tokens: int) -> None:
        """Count a prefill as pulled or missing: its request has begun at its own replica, with `cached_tokens`."""
        name, request.prefilled_by = request.prefilled_by, ""
        if not name:
            return
        replica = self._replicas.get(name)
        if cached_tokens >= len(route.request.pages) * self._page_size:
            self.pulled += 1
            missed = 0
        else:
            self.failed["missing"] += 1
            missed = 0 if replica is None else replica.missed + 1
        if replica is not None:
            replica.missed = missed % MOST_MISSED
            if missed == MOST_MISSED:
                replica.rests_until = self._now() + REST_SECONDS


class Dispatcher:
    """All requests of one fleet. Lives on the fleet's loop; nothing here waits."""

    def __init__(self, loop: RelayLoop, settings: FleetConfig, page_size: int, adapters: FleetAdapters) -> None:
        self.loop, self.clock, self.adapters = loop, loop.clock, adapters
        self.router = Router(settings.weights)
        self.replicas: dict[str, ReplicaHandle] = {}
        """Replicas that serve, by name."""
        self.prefills = Prefills(self.clock.now, self.router, self.replicas, page_size, settings.min_prefill_tokens)
        self.requests: dict[int, FleetRequest] = {}
        self.lost = self.resumed = self.matched_pages = 0
        self._resumes = settings.on_loss == "resume"
        self._page_size = page_size
        self.waiting: dict[int, FleetRequest] = {}
        """Requests that no replica could take, in order."""

    # ---------------------------------------------------------------- to replicas

    def take(self) -> None:
        """Take up new requests, aborts and news of sessions, in order."""
        for item in self.loop.take():
            if isinstance(item, int):
                self._abort(item)
                continue
            if not isinstance(item, list):  # news of a session, which may have branches at several
                for replica in self.replicas:
                    self._post(replica, Tell(item))
                continue
            request = FleetRequest(self.loop, item, self.adapters.claimed(item[0].ticket), self._resumes, self._forget)
            self.requests[request.key] = request
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
        self.loop.inbox.post()

    def _abort(self, ticket: int) -> None:
        """End a sample or text whose consumer has left: on its replica, which answers, or here where it has none."""
        request = self.loop.by_ticket.get(ticket)
        if not isinstance(request, FleetRequest):
            return
        request.left.add(ticket)
        if request.route is None or request.prefill is not None:  # no replica knows of it
            request.end("abort", tickets={ticket})
        else:
            self._post(request.route.replica, ticket)

    def abort_all(self) -> None:
        """End every request at once, on its replica and here."""
        for request in list(self.requests.values()):
            if request.route is not None:
                for spec in request.specs:
                    self._post(request.route.replica, spec.ticket)
            request.end("abort")

    def expire(self) -> None:
        """End requests that wait for a replica beyond their deadlines; a replica ends its own."""
        now = self.clock.now()
        for request in list(self.waiting.values()):
            spec = request.spec
            due = (spec.deadline, None if request.begun else spec.waiting_deadline)
            if any(at is not None and at <= now for at in due):
                request.end("timeout")

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
                request.end("abort", tickets=left)
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
        self.loop.inbox.post()

    # ---------------------------------------------------------------- to consumers

    def receive(self, replica: ReplicaHandle, update: Update) -> None:
        """Take a replica's update: pages to the router, outputs to their requests. Raises `FleetError` if its engine
        has died."""
        if update.cache_news is not None:
            self.router.update(replica.name, update.cache_news)
        for output in update.outputs:
            request = replica.requests.get(output.key)
            # requests of an engine that died are not over: they may go on elsewhere
            if update.dead and output.chunks and output.chunks[-1].finish_reason == "engine_dead":
                continue
            if request is not None:
                self._receive(request, output)
            elif (prefilled := self.prefills.receive(replica, output)) is not None:
                self._submit(*prefilled)
        self.loop.wake()
        if update.dead:
            raise FleetError(f"the engine of replica {replica.name} died: {update.dead}")

    def _receive(self, request: FleetRequest, output: RequestOutput) -> None:
        if output.computing is not None and request.route is not None:
            self.prefills.settle(request, request.route, output.cached_tokens)
        if output.cause is not None and request.resumed:  # e.g. its adapter differs on the replica that resumes it
            self._fail(request, f"its replica was lost, and no other could go on: {output.cause}")
        else:
            request.receive(output)

    def _fail(self, request: FleetRequest, reason: str) -> None:
        """End a request with `EngineDead`, whose cause says why."""
        request.fail(lambda: EngineDead(FleetError(reason)))

    def _forget(self, request: FleetRequest) -> None:
        """Forget a request that has ended, before its consumer hears of that."""
        self._release(request)
        del self.requests[request.key]
        self.waiting.pop(request.key, None)
        self.loop.inbox.post()

    def _release(self, request: FleetRequest) -> None:
        """Take a request from its replica, and its prompt from another one."""
        self.prefills.cancel(request)
        route, request.route = request.route, None
        if route is not None:
            self.router.release(route)
            replica = self.replicas[route.replica]
            del replica.requests[request.key]
            replica.notify()
