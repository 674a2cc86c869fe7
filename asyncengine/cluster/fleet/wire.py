"""What a fleet and its replicas tell each other. Plain data, pickled."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from asyncengine.info import ModelInfo
from asyncengine.kvcache.cache_log import CacheNews
from asyncengine.lora.naming import AdapterInfo
from asyncengine.outputs import FinishReason, LogprobEntry
from asyncengine.request_spec import RequestSpec
from asyncengine.stats import EngineStats
from asyncengine.step import TokenLogprob
from asyncengine.text import TextTokenizer

VERSION = 2
"""Of what is said here. Raise it with every change."""


@dataclass(frozen=True, slots=True)
class Hello:
    """What a replica is, before it has loaded anything."""

    release: str
    wire: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a replica has loaded: all that a fleet needs to know, so that its own machine needs no model files."""

    info: ModelInfo
    tokenizer: TextTokenizer | None
    adapters: tuple[AdapterInfo, ...]


@dataclass(frozen=True, slots=True)
class Order:
    """A request: samples of one prompt. `key` is the ticket of the first, and names the request in what comes back."""

    key: int
    specs: tuple[RequestSpec, ...]
    digest: str
    """Of the adapter's content that the request was promised; "" for none."""
    sent_at: float
    """By the clock that the times in `specs` are of."""


@dataclass(frozen=True, slots=True)
class Leave:
    """Nobody waits for these tickets any more."""

    tickets: tuple[int, ...]


Command = Order | Leave


class Piece(NamedTuple):
    """What is new of one sample: a `Chunk`."""

    sample: int
    """Its index."""
    text: str
    token_ids: list[int]
    reason: FinishReason | None = None
    logprobs: list[LogprobEntry] | None = None
    error: str | None = None


class Beginning(NamedTuple):
    """Of a request, told once with its first piece."""

    cached_tokens: int
    computing: float
    """Seconds from its first step to its first token."""
    prompt_logprobs: dict[int, TokenLogprob]


class Parcel(NamedTuple):
    """What is new of one request."""

    key: int
    pieces: list[Piece]
    beginning: Beginning | None = None
    cause: Exception | None = None
    """What its consumer raises, where that has a type of its own."""


@dataclass(slots=True)
class Delivery:
    """What is new on a replica. An empty one says that it lives."""

    parcels: list[Parcel] = field(default_factory=list)
    news: CacheNews | None = None
    stats: EngineStats | None = None
    dead: str = ""
    """What killed the engine, if something did."""
