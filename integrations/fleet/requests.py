"""The fleet's records of requests under way, and of the replicas that compute them."""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from asyncengine.assembly.relay import RelayedRequest, RelayLoop
from asyncengine.cache_news import page_hashes
from asyncengine.integrations.fleet.messages import Command, Submit
from asyncengine.integrations.fleet.processes import Process
from asyncengine.integrations.placement.routing import Route, RouteRequest
from asyncengine.request_spec import Peer, RequestSpec
from asyncengine.sampling_params import SamplingParams
from asyncengine.stats import EngineStats

_PREFILL_PARAMS = SamplingParams(max_tokens=1, temperature=0.0, top_p=1.0, top_k=0, repetition_penalty=1.0)


@dataclass(frozen=True, slots=True)
class Prefill:
    """A prompt under way at the replica that computes it for another one."""

    key: int
    """Its ticket at that replica: negative, so that it differs from all requests'."""
    route: Route
    request: FleetRequest


class FleetRequest(RelayedRequest):
    """A request under way. It can go to another replica if its own is lost: samples go on behind the tokens they have,
    texts to embed begin again."""

    def __init__(
        self, loop: RelayLoop, specs: Sequence[RequestSpec], digest: str, resumes: bool,
        forget: Callable[[FleetRequest], None],
    ) -> None:  # fmt: skip
        super().__init__(loop, specs, keep_tokens=resumes)
        self.digest = digest
        """Digest of the adapter that it has claimed; "" for none."""
        self._forget = forget
        self.route: Route | None = None
        """Replica that computes it; None while it waits for one."""
        self.prefill: Prefill | None = None
        """Set while another replica computes its prompt; its own does not have the request yet."""
        self.prefilled_by = ""
        """Name of the replica that has computed its prompt, until `settle` has counted it; "" for none."""
        self.resumed = 0
        """Number of times it was sent elsewhere after its replica was lost."""
        self.left: set[int] = set()
        """Tickets whose consumers have left."""

    def ended(self) -> None:
        self._forget(self)

    def to_route(self, page_size: int) -> RouteRequest:
        """Its prompt's pages, adapter and load, for the router. Texts to embed have no pages: they share no prefix."""
        spec, pages = self.spec, list[int]()
        salt = spec.options.cache_salt or ""
        if self.texts is None:  # a prompt's last token is never taken from a cache
            tokens = (*spec.prompt, *self.tokens.get(spec.index, ()))[:-1]
            pages = page_hashes((self.digest, salt), tokens, page_size)
        return RouteRequest(pages, self.digest, spec.options.session or salt, float(len(self.specs)))

    def to_submit(self, now: float, peer: Peer | None = None) -> Submit:
        """The message to its replica: the specifications, the output so far, and the peer to ask for the prefix."""
        have = self.tokens
        specs = [
            replace(s, resumed=tuple(have[s.index]), resumed_steered=s.index in self.steered) if s.index in have else s
            for s in self.specs
        ]
        if peer is not None:
            specs = [replace(spec, peer=peer) for spec in specs]
            if peer.planned:  # it has begun: the peer computed its prompt, so no waiting limit applies
                specs = [replace(spec, waiting_deadline=None) for spec in specs]
        return Submit(self.key, tuple(specs), self.digest, now)

    def to_prefill(self, key: int, now: float, peer: Peer | None) -> Submit:
        """The message to a replica that computes its prompt and the output so far for another one: a request for one
        token, which is discarded."""
        spec = self.spec
        prompt = (*spec.prompt, *self.tokens.get(spec.index, ()))
        spec = RequestSpec(
            key, prompt, _PREFILL_PARAMS, len(prompt) + 1, replace(spec.options, prediction=None, speculation=False),
            request_id=spec.request_id, arrival=spec.arrival, deadline=spec.deadline,
            waiting_deadline=spec.waiting_deadline, peer=peer,
        )  # fmt: skip
        return Submit(key, (spec,), self.digest, now)


class ReplicaHandle:
    """A replica that serves: its process, its requests, and the commands that wait to be sent to it."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.name = process.name
        self.requests: dict[int, FleetRequest] = {}
        self.prefills: dict[int, Prefill] = {}
        """Prompts that it computes for other replicas, by key."""
        self.missed = 0
        """Prompts in a row that it has computed for others in vain."""
        self.rests_until = 0.0
        """Clock reading until which it computes no prompts for others."""
        self.commands: list[Command] = []
        self.peer: Peer | None = None
        """The address at which other replicas ask it for prefixes; None: it is not known to all of them yet."""
        self.stats: EngineStats | None = None
        self.heard_at = time.monotonic()
        self.closing = False
        """True if it takes no more requests, and will not be replaced."""
        self.gone = False
        self.reader: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    def send_commands(self) -> None:
        """Send all commands in one message, without waiting."""
        if self.commands:
            commands, self.commands = self.commands, []
            self.process.connection.post(pickle.dumps(commands))

    def notify(self) -> None:
        """Let `finish` check again: a request has left, or the replica is gone."""
        self._changed.set()

    async def finish(self) -> bool:
        """Wait until it has no requests and no prompts. False if it was lost before."""
        while (self.requests or self.prefills) and not self.gone:
            self._changed.clear()
            await self._changed.wait()
        return not self.gone
