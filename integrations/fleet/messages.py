"""Messages between a fleet and its replicas: plain data, pickled."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from asyncengine import AdapterInfo
from asyncengine.assembly.served_model import ServedModel
from asyncengine.cache_news import CacheNews
from asyncengine.request_output import RequestOutput
from asyncengine.request_spec import RequestSpec
from asyncengine.stats import EngineStats

VERSION = 15
"""Number of this protocol. Raise it with every change."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """All that a fleet needs to know of a loaded model, so that its own machine needs no model files."""

    model: ServedModel
    adapters: tuple[AdapterInfo, ...]


@dataclass(frozen=True, slots=True)
class Submit:
    """A request to a replica: samples of one prompt, or texts whose vectors are awaited together."""

    key: int
    """Ticket of the first sample or text, which names the request in `RequestOutput`."""
    specs: tuple[RequestSpec, ...]
    digest: str
    """Digest of the adapter that the request has claimed; "" for none."""
    sent_at: float
    """Reading of the clock by which the times in `specs` were taken."""


class Tell(NamedTuple):
    """A message to a replica's engine (`Outbox.tell`)."""

    message: Any


Command = Submit | Tell | int
"""A request, a message, or the ticket of a sample, a text or a prompt to abort."""


@dataclass(slots=True)
class Update:
    """Everything new on a replica. An empty one says that it lives."""

    outputs: list[RequestOutput] = field(default_factory=list)
    cache_news: CacheNews | None = None
    stats: EngineStats | None = None
    dead: str = ""
    """Error that ended the engine; "" while it lives."""
