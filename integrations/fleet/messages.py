"""Messages between a fleet and its replicas: plain data, pickled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from asyncengine import AdapterInfo
from asyncengine.engine.vectors.service import VectorModel
from asyncengine.info import ModelInfo
from asyncengine.kvcache.cache_log import CacheNews
from asyncengine.outputs import Chunk
from asyncengine.request_spec import RequestSpec
from asyncengine.scheduler import Output
from asyncengine.scheduler.messages import Abort
from asyncengine.stats import EngineStats
from asyncengine.step import TokenLogprob
from asyncengine.text.tokenizer import TextTokenizer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

VERSION = 8
"""Number of this protocol. Raise it with every change."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """All that a fleet needs to know of a loaded model, so that its own machine needs no model files."""

    info: ModelInfo
    tokenizer: TextTokenizer | None
    adapters: tuple[AdapterInfo, ...]
    vectors: VectorModel | None = None
    """None for a model that writes text."""


@dataclass(frozen=True, slots=True)
class Submit:
    """A request to a replica: samples of one prompt, or texts whose vectors are awaited together."""

    key: int
    """Ticket of the first sample or text, which names the request in `RequestOutput`."""
    specs: tuple[RequestSpec, ...]
    digest: str
    """Digest of the adapter that the request was promised; "" for none."""
    sent_at: float
    """Reading of the clock by which the times in `specs` were taken."""


Command = Submit | Abort


class RequestOutput(NamedTuple):
    """Everything new of one request."""

    key: int
    chunks: Sequence[Chunk] = ()
    computing: float | None = None
    """Seconds from the first step to the first token; given once, with the first chunk."""
    cached_tokens: int = 0
    restored_tokens: int = 0
    prompt_logprobs: Mapping[int, TokenLogprob] = {}
    """Log-probabilities by prompt position, given once as well."""
    routed_experts: Sequence[tuple[int, int, NDArray[np.integer]]] = ()
    """`Mailbox.routed_experts` since the last output."""
    predicted: tuple[int, int] = (0, 0)
    """Tokens of the caller's prediction that were right, and that were wrong, since the last output."""
    cause: Exception | None = None
    """Error that its consumer raises, where that has a type of its own."""
    vectors: NDArray[np.float32] | None = None
    """Vectors [texts, width] of all texts."""
    fault: tuple[int, Output] | None = None
    """Index and last output of the first text that has no vector."""


@dataclass(slots=True)
class Update:
    """Everything new on a replica. An empty one says that it lives."""

    outputs: list[RequestOutput] = field(default_factory=list)
    cache_news: CacheNews | None = None
    stats: EngineStats | None = None
    dead: str = ""
    """Error that ended the engine; "" while it lives."""
