"""`EngineBase`: the calls that `AsyncEngine` and `Engine` have in common, as they wait for nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from asyncengine.cache_news import KVEventBatch
from asyncengine.checks import as_switch
from asyncengine.engine.frontend import Frontend
from asyncengine.engine.snapshot import list_requests, prefix_runs
from asyncengine.events import Event
from asyncengine.info import ModelInfo
from asyncengine.lora.adapter import AdapterInfo
from asyncengine.options import ChatMessages, ToolSpecs
from asyncengine.session import Session
from asyncengine.stats import EngineStats, PrefixRun, RequestInfo


class EngineBase(ABC):
    """Calls that are answered at once, on any thread."""

    @property
    @abstractmethod
    def core(self) -> Frontend:
        """The front end of the running engine. Raises `EngineClosed` before it has started."""

    @property
    def info(self) -> ModelInfo:
        """The loaded model."""
        return self.core.info

    def stats(self) -> EngineStats:
        """A snapshot of requests, pages, rates and times. From any thread."""
        return self.core.stats()

    def requests(self) -> tuple[RequestInfo, ...]:
        """Every request that has not ended, in order of arrival. From any thread; a fleet lists none."""
        return list_requests(self.core.loop)

    def prefix_tree(self, most: int = 500) -> tuple[PrefixRun, ...]:
        """The prefix cache as runs of pages, level by level, `most` of them. From any thread; a fleet has none here."""
        return prefix_runs(self.core.loop, most)

    def cache_events(self, buffer: int = 10_000) -> AsyncIterator[KVEventBatch]:
        """Stream what the prefix cache stores and drops, in vLLM's form: first what it has when the stream is first
        read, then every change, until the engine closes. On any event loop.

        `buffer`: batches that may wait to be read. More are dropped, and the next one says how many were `lost` and
        tells all there is. Raises `InvalidParameter`, also for a fleet and without `prefix_caching`, `EngineClosed`,
        and, on reading, `EngineDead`.
        """
        return self.core.cache_events(buffer)

    def adapters(self) -> tuple[AdapterInfo, ...]:
        """Every loaded adapter, by name. From any thread."""
        return self.core.list_adapters()

    def on_event(self, hook: Callable[[Event], None]) -> Callable[[], None]:
        """Call `hook` on the engine's loop with each event; it must return at once. The result ends it."""
        return self.core.loop.hooks.add(hook)

    def abort(self, request_id: str) -> bool:
        """Abort every unfinished request labelled `request_id`. True if there was one. From any thread."""
        return self.core.client.abort(request_id)

    def session(self, name: str | None = None, *, ttl: float | None = None) -> Session:
        """A session of many requests, for `with` or `async with`, whose branches in the prefix cache are its own.

        `name`: what any request's `session` may say; None: a fresh one. `ttl`: seconds after its last request at which
        it is closed; None: when it is the one longest unused of over 4,096. Raises `InvalidParameter`, `EngineClosed`.
        """
        return Session(cast("Any", self), name, ttl)

    def count_tokens(
        self, text: str | ChatMessages, tools: ToolSpecs | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> int:  # fmt: skip
        """Length in tokens of a prompt or a chat, before sending it; `template_kwargs` as in `ChatRequest`."""
        return len(self.core.tokens(text, tools, template_kwargs))

    def tokenize(
        self, text: str | ChatMessages, *, tools: ToolSpecs | None = None,
        template_kwargs: Mapping[str, Any] | None = None, add_special_tokens: bool | None = None,
    ) -> list[int]:  # fmt: skip
        """Token ids of a text, or of a chat as the model would see it.

        `add_special_tokens`: those that the tokenizer puts around a text; None: around a text, and not around a chat,
        whose template writes them. Takes long for long texts: call it off the event loop. Raises `InvalidParameter`.
        """
        return self.core.tokens(text, tools, template_kwargs, add_special_tokens)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids; ids that only pad the model's vocabulary have none. Raises `InvalidParameter`, also
        for ids beyond it."""
        tokenizer, known = self.core.tokenizer_of(token_ids)
        return tokenizer.decode(known, as_switch("skip_special_tokens", skip_special_tokens))

    def token_texts(self, token_ids: Iterable[int]) -> list[str]:
        """The text of each token alone, as logprobs have it: U+FFFD stands where it is not whole characters. Raises as
        `detokenize`."""
        tokenizer, known = self.core.tokenizer_of(token_ids)
        return [tokenizer.table.token_text(token) for token in known]
