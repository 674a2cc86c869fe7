"""The service of `embed`, `rerank` and `classify`: a call is checked, its texts go through the engine in batches, and
its vectors become an answer.

A call is tokenized and posted batch by batch: a few batches are on their way at any time, so that the next step is
always full and a long list takes little memory.
"""

from __future__ import annotations

import asyncio
import operator
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import anyio.to_thread

from asyncengine.checks import as_integer, as_switch, as_text, check_unicode
from asyncengine.engine.loop_client import LoopClient
from asyncengine.engine.threads import INLINE_CHARS
from asyncengine.engine.validation import RequestValidator
from asyncengine.engine.vectors.batch import TextBatch
from asyncengine.engine.vectors.pair_templates import PairTemplate
from asyncengine.errors import ContextLengthExceeded, InvalidParameter, RequestTimeout
from asyncengine.events import VectorsDone
from asyncengine.options import RequestOptions
from asyncengine.outputs import Classification, Classifications, Embeddings, Ranked, Ranking, Usage
from asyncengine.pooling_spec import PoolingSpec, Task
from asyncengine.progress import counted
from asyncengine.request_spec import Pooled, RequestSpec
from asyncengine.text.batches import BatchTokenizer, EncodedText
from asyncengine.text.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from asyncengine.activations import Floats

Answer = TypeVar("Answer")
FIRST_BATCH, MAX_BATCH = 32, 256
"""Texts of a call's first batch, which is to reach the model soon, and of a later one."""
MAX_BATCH_CHARS = 1 << 20
"""Characters of a batch, unless one text has more."""
MAX_BATCHES = 3
"""Batches of one call that are posted and not done."""


class TokenIds(tuple[int, ...]):
    """A text that is given as token ids."""

    __slots__ = ()


Item = str | tuple[str, str] | TokenIds


@dataclass(frozen=True, slots=True, eq=False)
class VectorModel:
    """A model that gives vectors or scores, as its files describe it."""

    spec: PoolingSpec
    width: int
    """Numbers that the runner gives for each text."""
    template: PairTemplate | None = None
    """The text around a pair, for a reranker that is a text generator."""


@dataclass(slots=True, eq=False)
class VectorCall(Generic[Answer]):
    """One checked call, and its results so far."""

    task: Task
    items: Sequence[Item]
    name: str
    """The parameter that `items` came in ("texts"), for error messages."""
    request_options: RequestOptions
    label: str
    """The caller's request id, or a fresh one."""
    submitted: float
    """Clock reading."""
    vectors: Floats
    """[items, width]"""
    finish: Callable[[VectorCall[Answer]], Answer]
    """Makes the answer once all vectors are there."""
    truncate: bool
    dimensions: int | None = None
    skip: int = 0
    """First tokens of each text, those of a prompt, that are left out of the pooling."""
    show_progress: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    truncated: list[int] = field(default_factory=list)
    """Indices of the texts that were cut."""

    @property
    def outcome(self) -> tuple[Usage, tuple[int, ...]]:
        """(token counts, indices of the texts that were cut), as every answer reports them."""
        return Usage(self.prompt_tokens, 0, self.cached_tokens), tuple(self.truncated)


class VectorService:
    """Serves the calls of one engine whose model gives vectors or scores. From any thread."""

    def __init__(
        self, client: LoopClient, validator: RequestValidator, tokenizer: TextTokenizer | None, model: VectorModel
    ) -> None:
        self.model = model
        self._client = client
        self._config = client.loop.config
        self._validator = validator
        self._info = info = validator.info
        self._pooled = Pooled(model.spec.whole, model.spec.every)
        self._arriving: set[VectorCall[Any]] = set()
        """Calls that have come and not begun yet, on any loop."""
        self._batch_tokenizer: BatchTokenizer | None = None
        if tokenizer is not None:
            frame = None if model.template is None else model.template.frame
            self._batch_tokenizer = BatchTokenizer(tokenizer, info.max_model_len, model.spec.lower_case, frame)

    @property
    def _tokenizer(self) -> BatchTokenizer:
        if self._batch_tokenizer is None:
            raise InvalidParameter("texts", f"{self._info.name} has no tokenizer: pass sequences of token ids")
        return self._batch_tokenizer

    # ---------------------------------------------------------------- calls, checked

    def embed(
        self, texts: Any, prompt_name: str | None, prompt: str | None, dimensions: int | None,
        normalize: bool | None, truncate: bool, show_progress: bool | None, options: RequestOptions,
    ) -> VectorCall[Embeddings]:  # fmt: skip
        """A call for vectors. Raises `InvalidParameter`, `AdapterNotFound`."""
        spec = self.model.spec
        if dimensions is not None:
            as_integer("dimensions", dimensions, 1, self.model.width)
        normalize = spec.normalize if normalize is None else as_switch("normalize", normalize)
        items = _items("texts", texts, _text_or_ids, "must be a str or a sequence of token ids")
        if prefix := self._prompt(prompt_name, prompt):
            for index, item in enumerate(items):
                if isinstance(item, str):
                    items[index] = prefix + item
                elif prompt_name is not None or prompt is not None:
                    raise InvalidParameter(f"texts[{index}]", "is token ids, before which no prompt can be put")

        def finish(call: VectorCall[Embeddings]) -> Embeddings:
            from asyncengine.activations import shortened

            return Embeddings(shortened(call.vectors, dimensions, normalize), *call.outcome)

        call = self._call("embed", items, "texts", truncate, options, finish)
        call.dimensions = dimensions or self.model.width
        if prefix and not spec.include_prompt:
            call.skip = self._tokenizer.prompt_length(prefix)
        wanted = self._config.show_progress if show_progress is None else show_progress
        call.show_progress = wanted and len(items) > 1
        return call

    def rerank(
        self, query: Any, documents: Any, top_n: int | None, instruction: str | None, truncate: bool, activation: bool,
        options: RequestOptions,
    ) -> VectorCall[Ranking]:  # fmt: skip
        """A call for the scores of documents. Raises `InvalidParameter`, `AdapterNotFound`."""
        check_unicode("query", as_text("query", query))
        if top_n is not None:
            as_integer("top_n", top_n, 1)
        if instruction is not None and not isinstance(instruction, str):
            raise InvalidParameter("instruction", "must be a str or None", instruction)
        check_unicode("instruction", instruction or "")
        if isinstance(documents, str):
            raise InvalidParameter("documents", "must be a list of str, not one str", documents)
        documents = _items("documents", documents, lambda one: one if isinstance(one, str) else None, "must be a str")
        template = self.model.template
        if instruction is not None and (template is None or template.instruction is None):
            raise InvalidParameter("instruction", f"is nothing that {self._info.name} reads", instruction)
        if template is None:
            query = self._prompt(None, None) + query
        pairs = [(query, text) if template is None else template.pair(query, text, instruction) for text in documents]

        def finish(call: VectorCall[Ranking]) -> Ranking:
            scores = [row[0] for row in self._scores(call, activation)]
            order = sorted(range(len(scores)), key=lambda index: -scores[index])[:top_n]
            return Ranking([Ranked(index, scores[index], documents[index]) for index in order], *call.outcome)

        return self._call("rerank", pairs, "documents", truncate, options, finish)

    def classify(
        self, texts: Any, truncate: bool, activation: bool, options: RequestOptions
    ) -> VectorCall[Classifications]:  # fmt: skip
        """A call for labels. Raises `InvalidParameter`, `AdapterNotFound`."""
        template, labels = self.model.template, self.model.spec.labels

        def read(text: Any) -> Item | None:
            if isinstance(text, (tuple, list)) and len(text) == 2 and all(isinstance(half, str) for half in text):
                return (text[0], text[1]) if template is None else template.pair(text[0], text[1], None)
            return text if isinstance(text, str) and template is None else None

        def finish(call: VectorCall[Classifications]) -> Classifications:
            results = []
            for row in self._scores(call, activation):
                best = max(range(len(row)), key=lambda index: row[index])
                results.append(Classification(labels[best], row[best], dict(zip(labels, row, strict=True))))
            return Classifications(results, *call.outcome)

        limit = "must be a str or a pair of them"
        if template is not None:
            limit = "must be a pair of str: a query and a document"
        return self._call("classify", _items("texts", texts, read, limit), "texts", truncate, options, finish)

    def _scores(self, call: VectorCall[Any], activation: bool) -> list[list[float]]:
        """The scores of each text, behind the model's activation or before it."""
        from asyncengine.activations import activate

        name = self.model.spec.activation if as_switch("activation", activation) else "identity"
        return activate(name, call.vectors).tolist() if call.items else []

    def _prompt(self, name: str | None, prompt: str | None) -> str:
        """The text before each text: the caller's, the model's of that name, or the model's default. May be empty."""
        if prompt is not None:
            if not isinstance(prompt, str):
                raise InvalidParameter("prompt", "must be a str or None", prompt)
            check_unicode("prompt", prompt)
            if name is not None:
                raise InvalidParameter("prompt", "cannot go with a prompt_name")
            return prompt
        prompts, default = self.model.spec.prompts, self.model.spec.default_prompt
        if name is None:
            return "" if default is None else prompts[default]
        if not isinstance(name, str) or name not in prompts:
            names = ", ".join(map(repr, prompts)) or "none"
            raise InvalidParameter("prompt_name", f"is none of the prompts of {self._info.name}: {names}", name)
        return prompts[name]

    def _call(
        self, task: Task, items: Sequence[Item], name: str, truncate: bool, options: RequestOptions,
        finish: Callable[[VectorCall[Answer]], Answer],
    ) -> VectorCall[Answer]:  # fmt: skip
        """A call submitted now, with a request id of its own if it has none. Raises `AdapterNotFound`."""
        import numpy as np  # not before there are vectors: `import asyncengine` stays light

        as_switch("truncate", truncate)
        self._validator.check_adapter(options.adapter)
        label = options.request_id or f"req-{secrets.token_hex(8)}"
        vectors = np.zeros((len(items), self.model.width), dtype=np.float32)
        return VectorCall(task, items, name, options, label, self._client.loop.clock.now(), vectors, finish, truncate)

    # ---------------------------------------------------------------- calls, computed

    async def run(self, call: VectorCall[Answer]) -> Answer:
        """Compute the call's vectors and make its answer. Cancelling aborts the batches under way.

        Raises `QueueFull` if its first texts have no place in the queue (later ones wait for it), `InvalidParameter`,
        `RequestFailed`, `RequestTimeout`, `EngineClosed`, `EngineDead`.
        """
        with self._posting(call) as (posted, take):
            alone = await self._arrive(call)
            for indices in self._split(call.items):
                prepare = partial(self._prepare, call, indices)
                inline = sum(_size(call.items[index]) for index in indices) <= INLINE_CHARS
                for batch in prepare() if inline else await anyio.to_thread.run_sync(prepare):
                    while len(posted) >= MAX_BATCHES:
                        await posted[0].wait()
                        take()
                    self._post(batch, posted, await self._client.enter(batch, begun=bool(posted)), alone)
            while posted:
                await posted[0].wait()
                take()
        return call.finish(call)

    async def _arrive(self, call: VectorCall[Any]) -> bool:
        """Let the loop's other tasks go first. True: none of them has made a call meanwhile, with which it should share
        steps, so that it may be computed at once."""
        self._arriving.add(call)
        try:
            await asyncio.sleep(0)
        finally:
            self._arriving.discard(call)
        return not self._arriving

    def run_blocking(self, call: VectorCall[Answer]) -> Answer:
        """Compute the call as `run` does, on a plain thread."""
        with self._posting(call) as (posted, take):
            for indices in self._split(call.items):
                for batch in self._prepare(call, indices):
                    while len(posted) >= MAX_BATCHES:
                        posted[0].wait_blocking()
                        take()
                    self._post(batch, posted, self._client.enter_blocking(batch, begun=bool(posted)), alone=True)
            while posted:
                posted[0].wait_blocking()
                take()
        return call.finish(call)

    @contextmanager
    def _posting(self, call: VectorCall[Any]) -> Iterator[tuple[deque[TextBatch], Callable[[], None]]]:
        """(the call's batches on their way, a function that takes the oldest once it is done). Leaving the block by an
        error or a cancellation aborts them. Observers hear of its end."""
        self._client.check_open()
        posted: deque[TextBatch] = deque()
        failure: str | None = None
        try:
            with counted("embedding", len(call.items)) if call.show_progress else nullcontext() as advance:

                def take() -> None:
                    batch = posted.popleft()
                    call.vectors[batch.first : batch.first + batch.samples] = batch.vectors
                    call.prompt_tokens += batch.num_tokens
                    call.cached_tokens += batch.cached_tokens
                    if advance is not None:
                        advance(batch.samples)

                yield posted, take
        except BaseException as error:
            failure = type(error).__name__
            if tickets := [ticket for batch in posted for ticket in batch.tickets]:
                self._client.abort_tickets(tickets)
            raise
        finally:
            loop = self._client.loop
            if loop.hooks:
                adapter, seconds = call.request_options.adapter, loop.clock.now() - call.submitted
                counts = len(call.items), call.prompt_tokens, call.cached_tokens, seconds
                loop.hooks.emit(VectorsDone(call.label, call.task, adapter, *counts, call.dimensions, failure))

    def _post(self, batch: TextBatch, posted: deque[TextBatch], entered: bool, alone: bool = False) -> None:
        """Post and note a batch, in one synchronous stretch: no cancellation can come between the two."""
        if not entered:
            label = f"request {batch.spec.request_id}"
            raise RequestTimeout(f"{label}: its time was up before it had a place in the queue")
        self._client.post(batch, alone)
        posted.append(batch)

    def _split(self, items: Sequence[Item]) -> Iterator[range]:
        """Indices of the texts of one batch after another; the queue can hold each, and the first one is smaller."""
        limit = self._config.max_queued_requests or MAX_BATCH
        begin, count = 0, min(FIRST_BATCH, limit)
        while begin < len(items):
            end, chars = begin + 1, _size(items[begin])
            while end < min(begin + count, len(items)) and chars + _size(items[end]) <= MAX_BATCH_CHARS:
                chars += _size(items[end])
                end += 1
            yield range(begin, end)
            begin, count = end, min(MAX_BATCH, limit)

    def _prepare(self, call: VectorCall[Any], indices: range) -> list[TextBatch]:
        """Tokenize these texts of the call. More than one batch where the queue could never hold all their tokens.

        Posts nothing, so it may run on any thread. Raises `InvalidParameter` or a subclass of it, naming the text.
        """
        texts = {index: item for index in indices if not isinstance(item := call.items[index], TokenIds)}
        encoded = iter(self._tokenizer.encode(list(texts.values()), call.name, list(texts)) if texts else ())
        groups: list[list[RequestSpec]] = [[]]
        limit, size = self._config.max_queued_tokens, 0
        for index in indices:
            item = call.items[index]
            spec = self._specify(call, index, self._cut(item) if isinstance(item, TokenIds) else next(encoded))
            size += spec.prompt_len
            if limit and groups[-1] and size > limit:
                groups.append([])
                size = spec.prompt_len
            groups[-1].append(spec)
        firsts = accumulate(map(len, groups), initial=indices.start)
        return [TextBatch(specs, first) for specs, first in zip(groups, firsts, strict=False)]

    def _cut(self, ids: TokenIds) -> EncodedText:
        limit = self._info.max_model_len
        return EncodedText(list(ids[:limit]), cut=len(ids) > limit)

    def _specify(self, call: VectorCall[Any], index: int, text: EncodedText) -> RequestSpec:
        """The request of one text. Raises `InvalidParameter` for a text that the model cannot take."""
        name, pooled = f"{call.name}[{index}]", self._pooled
        if call.skip or text.second:
            pooled = replace(pooled, skip=call.skip, second=text.second)
        request = self._validator.prepare_text(name, text.ids, call.request_options, call.label, call.submitted, pooled)
        if text.cut:
            if not call.truncate:
                limit = f"is longer than the {self._info.max_model_len} tokens that the model takes"
                raise ContextLengthExceeded(name, f"{limit}; truncate=True would cut it")
            call.truncated.append(index)
        return request


# -------------------------------------------------------------------- input


def _items(name: str, texts: Any, read: Callable[[Any], Item | None], limit: str) -> list[Item]:
    """The texts of a list (or the one str) as `read` takes them. Raises `InvalidParameter` with `limit` for the first
    of which it makes None."""
    if isinstance(texts, (bytes, Mapping)) or not isinstance(texts, Iterable):
        raise InvalidParameter(name, "must be a str or a list of texts", texts)
    items: list[Item] = []
    for index, text in enumerate([texts] if isinstance(texts, str) else texts):
        item = read(text)
        if item is None:
            raise InvalidParameter(f"{name}[{index}]", limit, text)
        items.append(item)
    return items


def _text_or_ids(text: Any) -> Item | None:
    """A text, or one that is given as numbers; whether the model has these is checked later."""
    if isinstance(text, str):
        return text
    try:
        return None if isinstance(text, (bytes, Mapping)) else TokenIds(operator.index(token) for token in text)
    except TypeError:
        return None


def _size(item: Item) -> int:
    """Characters of a text, roughly: they say where to tokenize it."""
    if isinstance(item, str):
        return len(item)
    return 4 * len(item) if isinstance(item, TokenIds) else len(item[0]) + len(item[1])
