"""Pins of an engine as its callers see them: how much may be pinned, and who has pinned what."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from asyncengine.engine.loop import EngineLoop
from asyncengine.engine.threads import INLINE_CHARS
from asyncengine.engine.validation import PreparedRequest
from asyncengine.errors import InvalidParameter
from asyncengine.options import ChatMessages, Prompt, RequestOptions, ToolSpecs
from asyncengine.sampling_params import SamplingParams
from asyncengine.scheduler.messages import PinPrefix, UnpinPrefix
from asyncengine.stream import TokenStream

if TYPE_CHECKING:
    from asyncengine.engine.frontend import Frontend

StartStream = Callable[[Callable[[float], PreparedRequest], int, SamplingParams | None, RequestOptions], TokenStream]
"""Makes the stream of a request that a function prepares, given the characters of its text."""


class Pinning:
    """Takes and gives up pins, from any thread. At most half of the cache is pinned, each prompt counted by itself."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._pages: dict[int, int] = {}
        """Pages of each pinned prompt by the ticket of the request that computes it."""

    def take(self, ticket: int, num_tokens: int) -> None:
        """Pin the prompt of `ticket`, which is about to be posted, and has so many tokens. Raises `InvalidParameter`
        where more would be pinned than may be."""
        if not isinstance(self._loop, EngineLoop):
            raise InvalidParameter("pin", "is of one engine, and this is a fleet of several")
        kv = self._loop.scheduler.kv
        if not kv.prefix_caching:
            raise InvalidParameter("pin", "needs prefix_caching=True")
        pages, most = num_tokens // kv.page_size, kv.pool.capacity // 2
        with self._lock:
            pinned = sum(self._pages.values())
            if pinned + pages > most:
                most, pinned = most * kv.page_size, pinned * kv.page_size
                limit = f"half of the KV cache: {most} tokens, of which {pinned} are taken"
                raise InvalidParameter(
                    "prefix", f"has {num_tokens} tokens, and all that is pinned takes at most {limit}"
                )
            if kv.states is not None and len(self._pages) >= kv.states.capacity // 2:
                limit = f"{len(self._pages)} prefixes are pinned: of a model with recurrent states that is the most"
                raise InvalidParameter("pin", limit)
            self._pages[ticket] = pages
        self._loop.inbox.post(PinPrefix(ticket))

    def release(self, ticket: int) -> None:
        """Unpin the prompt of `ticket`. An engine that has ended has unpinned all."""
        with self._lock:
            self._pages.pop(ticket, None)
        self._loop.inbox.post(UnpinPrefix(ticket))


@asynccontextmanager
async def pinned(
    frontend: Frontend, stream: StartStream, prefix: Prompt | ChatMessages, tools: ToolSpecs | None,
    options: RequestOptions,
) -> AsyncIterator[int]:  # fmt: skip
    """Compute a prefix with a request of one token, which pins it when it ends; gives its number of tokens."""
    tickets: list[int] = []

    def prepare(at: float) -> PreparedRequest:
        tokens = frontend.prefix(prefix, tools)
        prepared = frontend.prepare(tokens, SamplingParams(max_tokens=1), options, at)
        frontend.pinning.take(prepared.spec.ticket, len(tokens))
        tickets.append(prepared.spec.ticket)
        return prepared

    try:
        async with stream(prepare, INLINE_CHARS + 1, None, options) as running:  # on a thread, whatever its length
            usage = (await running.result()).usage
        yield usage.prompt_tokens
    finally:
        for ticket in tickets:
            frontend.pinning.release(ticket)
