"""What a fleet and its replicas tell each other. Plain data, pickled."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from asyncengine.engine.vector_desk import VectorModel
from asyncengine.info import ModelInfo
from asyncengine.kvcache.cache_log import CacheNews
from asyncengine.lora.naming import AdapterInfo
from asyncengine.outputs import FinishReason, LogprobEntry
from asyncengine.request_spec import RequestSpec
from asyncengine.scheduler import Output
from asyncengine.stats import EngineStats
from asyncengine.step import TokenLogprob
from asyncengine.text import TextTokenizer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

VERSION = 5
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
    vectors: VectorModel | None = None
    """Of a model that gives vectors or scores."""


@dataclass(frozen=True, slots=True)
class Order:
    """Samples of one prompt, or texts whose vectors are wanted. `key` is the ticket of the first, and names the order
    in what comes back."""

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


class Vectors(NamedTuple):
    """All that comes of an order of texts: their vectors, or what ended the first that has none."""

    key: int
    vectors: NDArray[np.float32] | None
    """[texts, width]"""
    cached_tokens: int = 0
    fault: tuple[int, Output] | None = None
    """(which text, how it ended)"""


@dataclass(slots=True)
class Delivery:
    """What is new on a replica. An empty one says that it lives."""

    parcels: list[Parcel] = field(default_factory=list)
    vectors: list[Vectors] = field(default_factory=list)
    news: CacheNews | None = None
    stats: EngineStats | None = None
    dead: str = ""
    """What killed the engine, if something did."""
