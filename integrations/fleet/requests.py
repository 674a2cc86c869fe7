"""Requests under way, and the replicas that compute them, as the fleet's own process knows them."""

from __future__ import annotations

import asyncio
import pickle
import time
from dataclasses import dataclass, field, replace

from asyncengine.engine.delivery import OutputStream
from asyncengine.engine.vectors.batch import TextBatch
from asyncengine.integrations.fleet.messages import Command, Submit
from asyncengine.integrations.fleet.processes import Process
from asyncengine.integrations.placement.routing import Route, RouteRequest
from asyncengine.kvcache.cache_log import page_hashes
from asyncengine.request_spec import Peer, RequestSpec
from asyncengine.sampling_params import SamplingParams
from asyncengine.stats import EngineStats

_ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, top_p=1.0, top_k=0, repetition_penalty=1.0)


@dataclass(frozen=True, slots=True)
class Prefill:
    """A prompt under way at the replica that computes it for another one."""

    key: int
    """Ticket there: negative, as no request's is."""
    route: Route
    request: FleetRequest


@dataclass(slots=True, eq=False)
class FleetRequest:
    """A request under way: samples of one prompt (`streams`), or texts whose vectors are awaited together (`texts`).

    Either can be computed anew where its replica is lost: samples go on behind the tokens they have, texts begin again.
    """

    digest: str
    """Digest of the adapter that it was promised; "" for none."""
    streams: dict[int, OutputStream] = field(default_factory=dict)
    """Streams of the samples that have not ended, by sample index."""
    texts: TextBatch | None = None
    key: int = field(init=False)
    samples: int = field(init=False)
    num_tokens: int = field(init=False)
    """Prompt tokens of all samples: with `samples`, its places in the queue."""
    route: Route | None = None
    """Replica that computes it; None while it waits for one."""
    prefill: Prefill | None = None
    """Its prompt is computed elsewhere first: its own replica does not know of it yet."""
    prefilled_by: str = ""
    """Replica that has computed its prompt, until it is known how much of it was pulled from there."""
    begun: bool = False
    """True when it has left the queue: with its first token, or its end."""
    resumed: int = 0
    """Number of times it was sent elsewhere after its replica was lost."""
    left: set[int] = field(default_factory=set)
    """Tickets whose consumers have left."""
    tokens: dict[int, list[int]] = field(default_factory=dict)
    """Output so far by sample index, where the fleet resumes."""
    steered: set[int] = field(default_factory=set)
    """Indices of samples whose output is not all the model's own."""

    def __post_init__(self) -> None:
        self.key = self.spec.ticket
        self.samples = len(self.specs)
        self.num_tokens = sum(spec.prompt_len for spec in self.specs)

    @property
    def specs(self) -> list[RequestSpec]:
        """Specifications of the samples that have not ended, or of all texts."""
        if self.texts is not None:
            return list(self.texts.specs)
        return [stream.spec for stream in self.streams.values()]

    @property
    def spec(self) -> RequestSpec:
        return self.specs[0]

    def to_route(self, page_size: int) -> RouteRequest:
        """Its prompt's pages, adapter and load, for the router. Texts have no beginning in common."""
        spec, pages = self.spec, list[int]()
        salt = spec.options.cache_salt or ""
        if self.texts is None:  # a prompt's last token is never taken from a cache
            tokens = (*spec.prompt, *self.tokens.get(spec.index, ()))[:-1]
            pages = page_hashes((self.digest, salt), tokens, page_size)
        return RouteRequest(pages, self.digest, salt, float(len(self.specs)))

    def to_submit(self, now: float, peer: Peer | None = None) -> Submit:
        """The message to its replica: the specifications, the output so far, and whom to ask for the prefix."""
        have = self.tokens
        specs = [
            replace(s, resumed=tuple(have[s.index]), resumed_steered=s.index in self.steered) if s.index in have else s
            for s in self.specs
        ]
        if peer is not None:
            specs = [replace(spec, peer=peer) for spec in specs]
            if peer.planned:  # it has started
                specs = [replace(spec, waiting_deadline=None) for spec in specs]
        return Submit(self.key, tuple(specs), self.digest, now)

    def to_prefill(self, key: int, now: float, peer: Peer | None) -> Submit:
        """The message to a replica that computes its prompt and the output so far, for another one: a request of one
        token, which nobody reads."""
        spec = self.spec
        prompt = (*spec.prompt, *self.tokens.get(spec.index, ()))
        spec = RequestSpec(
            key, prompt, _ONE_TOKEN, len(prompt) + 1, replace(spec.options, prediction=None, speculation=False),
            request_id=spec.request_id, arrival=spec.arrival, deadline=spec.deadline,
            waiting_deadline=spec.waiting_deadline, peer=peer, images=spec.images,
        )  # fmt: skip
        return Submit(key, (spec,), self.digest, now)


class ReplicaHandle:
    """A replica that serves: its process, its requests, and the commands that are about to be sent to it."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.name = process.name
        self.requests: dict[int, FleetRequest] = {}
        self.prefills: dict[int, Prefill] = {}
        """Prompts that it computes for other replicas, by key."""
        self.missed = 0
        """Prompts that it has computed since one of them was pulled."""
        self.rests_until = 0.0
        """Clock reading until which it computes no more of them."""
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
        """Let `finish` look again: a request has left, or the replica is gone."""
        self._changed.set()

    async def finish(self) -> bool:
        """Wait until it has no requests and no prompts. False if it was lost before."""
        while (self.requests or self.prefills) and not self.gone:
            self._changed.clear()
            await self._changed.wait()
        return not self.gone
