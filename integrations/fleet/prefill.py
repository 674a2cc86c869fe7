"""Prompts that one replica computes for another, whose decode steps they would delay (DistServe, Splitwise 2024).

A long prompt of a request to a "decode" replica goes first, as a request of one token, to a replica that the router
chooses for it. When that has answered, the request is sent to its own replica, which pulls the pages from there as any
others that a peer has (`engine.peers`): verified, and computed where they are not to be had. Nothing is locked: pages
that the cache has given away meanwhile are computed again, like those of a replica that is lost in between.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping

from asyncengine.integrations.fleet.messages import Abort
from asyncengine.integrations.fleet.requests import FleetRequest, Prefill, ReplicaHandle
from asyncengine.integrations.placement.routing import Route, Router
from asyncengine.request_output import RequestOutput
from asyncengine.request_spec import Peer

MOST_MISSED = 3
"""Prompts, one after the other, that were computed for others in vain, as these have not had the pages: enough to think
that they cannot."""
REST_SECONDS = 30.0
"""Seconds for which a replica then computes none."""


class Prefills:
    """Prompts of one fleet under way at other replicas than their requests'. Lives on the fleet's loop."""

    def __init__(
        self, now: Callable[[], float], router: Router, replicas: Mapping[str, ReplicaHandle], page_size: int,
        least: int,
    ) -> None:  # fmt: skip
        """`least`: tokens of a prompt that its own replica must lack."""
        self._now, self._router, self._replicas = now, router, replicas
        self._page_size, self._least = page_size, -(-least // page_size)
        self._keys = itertools.count(-1, -1)
        self.pulled = 0
        """Prompts that were pulled by the replicas that they were computed for."""
        self.failed: Counter[str] = Counter()
        """Others, by reason: the replica that computed it was "lost", has "refused" it, or its pages were "missing"."""

    def assign(self, request: FleetRequest) -> Prefill | None:
        """Assign a request's prompt to the replica that is to compute it. None: its own is."""
        route = request.route
        assert route is not None
        if request.texts is not None or self._replicas[route.replica].peer is None:
            return None
        params = request.spec.params
        if params.prompt_logprobs or params.return_routed_experts:  # a prefix from elsewhere has none
            return None
        now = self._now()
        ready = [name for name, each in self._replicas.items() if each.peer is not None and each.rests_until <= now]
        found = self._router.assign_prefill(route, self._least, ready)
        if found is None:
            return None
        request.prefill = prefill = Prefill(next(self._keys), found, request)
        self._replicas[found.replica].prefills[prefill.key] = prefill
        return prefill

    def release(self, request: FleetRequest) -> ReplicaHandle | None:
        """Take a request's prompt from the replica that computes it, if there is one, and return that."""
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
            replica.commands.append(Abort(prefill.key))
        request.prefilled_by = ""

    def receive(self, replica: ReplicaHandle, output: RequestOutput) -> tuple[FleetRequest, Peer | None] | None:
        """Take the output of a prompt. A request is returned that can go to its own replica now, with the peer that has
        its prefix, if one does."""
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
        """Take all prompts from a replica that is gone: the requests, whose own replicas compute them."""
        requests = [prefill.request for prefill in replica.prefills.values()]
        for request in requests:
            self.release(request)
            self.failed["lost"] += 1
        return requests

    def settle(self, request: FleetRequest, route: Route, cached_tokens: int) -> None:
        """A request has begun at its own replica, which had so many tokens of it then."""
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
