"""Vectors of texts: from a checked call to windows of requests, and back to one array.

A call is tokenized and posted window by window: a few windows are on their way at any time, so that the next step is
always full and a long list takes little memory. Each window has one waiter for all its texts.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import anyio.to_thread

from asyncengine.engine.vector_progress import ProgressBar
from asyncengine.engine.vector_window import VectorWindow
from asyncengine.errors import ContextLengthExceeded, InvalidParameter, RequestTimeout
from asyncengine.options import RequestOptions
from asyncengine.request_spec import Pooled, RequestSpec
from asyncengine.sampling_params import SamplingParams
from asyncengine.text.batches import BatchTokenizer, EncodedText

if TYPE_CHECKING:
    from asyncengine.engine.frontend import Frontend
    from asyncengine.pooling.activations import Floats

FIRST_WINDOW, MOST_WINDOW = 32, 256
"""Texts of a call's first window, which is to reach the model soon, and of a later one."""
_CHARS = 1 << 20
"""Characters of a window, at most, unless one text has more."""
_INLINE_CHARS = 4096
"""More are tokenized on a worker thread: about 1 ms of work is the most the caller's loop should notice."""
_AHEAD = 3
"""Windows of one call that are posted and not done."""
_UNREAD = SamplingParams(temperature=0.0, top_p=1.0, top_k=0, repetition_penalty=1.0)


class TokenIds(tuple[int, ...]):
    """A text that is given as token ids."""

    __slots__ = ()


Item = str | tuple[str, str] | TokenIds
"""A text, a pair of texts, or token ids."""


@dataclass(slots=True, eq=False)
class VectorCall:
    """One call: what it asks for, checked, and what has come of it so far."""

    items: Sequence[Item]
    name: str
    """What the caller calls them ("texts")."""
    wanted: RequestOptions
    label: str
    submitted: float
    width: int
    """Numbers of one vector."""
    skip: int = 0
    """Tokens of each, a prompt's, that are left out of the pooling."""
    truncate: bool = True
    progress: ProgressBar | None = None
    vectors: Floats = field(init=False)
    """[items, width]"""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    truncated: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        import numpy as np  # not before there are vectors: `import asyncengine` stays light

        self.vectors = np.zeros((len(self.items), self.width), dtype=np.float32)

    def take(self, window: VectorWindow) -> None:
        """The vectors of a window that is done. Raises what went wrong with it."""
        window.check()
        self.vectors[window.first : window.first + window.samples] = window.vectors
        self.prompt_tokens += window.num_tokens
        self.cached_tokens += window.cached_tokens
        if self.progress is not None:
            self.progress.advance(window.samples)


class VectorWork:
    """Computes the vectors of calls, for one engine whose model gives them."""

    def __init__(self, core: Frontend, pooled: Pooled, batches: BatchTokenizer | None) -> None:
        """`pooled`: of every request. `batches`: None for a model without a tokenizer."""
        self._core = core
        self._pooled = pooled
        self._batches = batches
        self._limit = core.info.max_model_len

    @property
    def batches(self) -> BatchTokenizer:
        if self._batches is None:
            raise InvalidParameter("texts", f"{self._core.info.name} has no tokenizer: pass sequences of token ids")
        return self._batches

    async def run(self, call: VectorCall) -> None:
        """Compute the call's vectors. Leaving it aborts what is on its way.

        Raises `QueueFull` if its first texts have no place in the queue (later ones wait for it), `InvalidParameter`,
        `RequestFailed`, `RequestTimeout`, `EngineClosed`, `EngineDead`.
        """
        with self._posted(call) as posted:
            for first, items in self._windows(call.items):
                prepare = partial(self._prepare, call, first, items)
                inline = sum(map(_size, items)) <= _INLINE_CHARS
                for window in prepare() if inline else await anyio.to_thread.run_sync(prepare):
                    while len(posted) >= _AHEAD:
                        await posted[0].wait()
                        call.take(posted.popleft())
                    self._post(window, posted, await self._core.enter(window, begun=bool(posted)))
            while posted:
                await posted[0].wait()
                call.take(posted.popleft())

    def run_blocking(self, call: VectorCall) -> None:
        """The same for a plain thread."""
        with self._posted(call) as posted:
            for first, items in self._windows(call.items):
                for window in self._prepare(call, first, items):
                    while len(posted) >= _AHEAD:
                        posted[0].wait_blocking()
                        call.take(posted.popleft())
                    self._post(window, posted, self._core.enter_blocking(window, begun=bool(posted)))
            while posted:
                posted[0].wait_blocking()
                call.take(posted.popleft())

    @contextmanager
    def _posted(self, call: VectorCall) -> Iterator[deque[VectorWindow]]:
        """A call's windows that are on their way: whoever leaves before they are done aborts them."""
        self._core.check_open()
        posted: deque[VectorWindow] = deque()
        left = True
        try:
            with nullcontext() if call.progress is None else call.progress:
                yield posted
            left = False
        finally:
            if left and (tickets := [ticket for window in posted for ticket in window.tickets]):
                self._core.abort_tickets(tickets)

    def _post(self, window: VectorWindow, posted: deque[VectorWindow], entered: bool) -> None:
        """In one synchronous stretch, so that nobody leaves between posting and noting it."""
        if not entered:
            raise RequestTimeout(
                f"request {window.spec.request_id}: its time was up before it had a place in the queue"
            )
        self._core.post_window(window)
        posted.append(window)

    # ---------------------------------------------------------------- texts to requests

    def _windows(self, items: Sequence[Item]) -> Iterator[tuple[int, Sequence[Item]]]:
        """(place of the first, items) of windows that the queue can hold, the first one smaller."""
        most = self._core.config.max_queued_requests or MOST_WINDOW
        begin, count = 0, min(FIRST_WINDOW, most)
        while begin < len(items):
            end = begin
            chars = 0
            while end < len(items) and end - begin < count and (end == begin or chars + _size(items[end]) <= _CHARS):
                chars += _size(items[end])
                end += 1
            yield begin, items[begin:end]
            begin, count = end, min(MOST_WINDOW, most)

    def _prepare(self, call: VectorCall, first: int, items: Sequence[Item]) -> list[VectorWindow]:
        """Tokenize `items`, the call's from `first` on. More than one window where the queue could never hold one.

        Posts nothing, so it may run on any thread. Raises `InvalidParameter` or a subclass of it, naming the text.
        """
        texts = {place: item for place, item in enumerate(items, first) if not isinstance(item, TokenIds)}
        encoded = iter(self.batches.encode(list(texts.values()), call.name, list(texts)) if texts else ())
        specs = []
        for place, item in enumerate(items, first):
            each = self._cut_ids(item) if isinstance(item, TokenIds) else next(encoded)
            self._check(call, place, each)
            specs.append(self._specify(call, each))
        limit = self._core.config.max_queued_tokens or 0
        windows: list[VectorWindow] = []
        begin = size = 0
        for place, spec in enumerate(specs):
            if limit and place > begin and size + len(spec.prompt) > limit:
                windows.append(VectorWindow(specs[begin:place], first + begin))
                begin, size = place, 0
            size += len(spec.prompt)
        return [*windows, VectorWindow(specs[begin:], first + begin)]

    def _cut_ids(self, ids: TokenIds) -> EncodedText:
        return EncodedText(list(ids[: self._limit]), cut=len(ids) > self._limit)

    def _check(self, call: VectorCall, place: int, encoded: EncodedText) -> None:
        ids, name = encoded.ids, f"{call.name}[{place}]"
        if not ids:
            raise InvalidParameter(name, "is empty, and this model's tokenizer adds nothing to it")
        if max(ids) >= self._core.info.vocab_size or min(ids) < 0:
            limit = f"must be token ids between 0 and {self._core.info.vocab_size - 1} (the vocabulary)"
            raise InvalidParameter(name, limit, next(i for i in ids if not 0 <= i < self._core.info.vocab_size))
        if encoded.cut:
            if not call.truncate:
                limit = f"is longer than the {self._limit} tokens that the model takes; truncate=True would cut it"
                raise ContextLengthExceeded(name, limit)
            call.truncated.append(place)
        if call.skip >= len(ids):
            raise InvalidParameter(name, f"is all prompt ({call.skip} tokens), which this model leaves out")

    def _specify(self, call: VectorCall, encoded: EncodedText) -> RequestSpec:
        core, options, pooled = self._core, call.wanted, self._pooled
        if call.skip or encoded.second:
            pooled = Pooled(pooled.whole, pooled.every, call.skip, encoded.second)
        timeout = core.config.request_timeout if options.timeout is None else options.timeout
        waiting = core.config.waiting_timeout
        return RequestSpec(
            core.validator.next_ticket(),
            tuple(encoded.ids),
            _UNREAD,
            len(encoded.ids),
            options,
            call.label,
            arrival=call.submitted,
            deadline=None if timeout is None else call.submitted + timeout,
            waiting_deadline=None if waiting is None else call.submitted + waiting,
            pooled=pooled,
        )

    def new_call(self, items: Sequence[Item], name: str, options: RequestOptions, width: int) -> VectorCall:
        """A call submitted now, with a label of its own if it has none. Raises `AdapterNotFound`."""
        self._core.validator.check_adapter(options.adapter)
        label = options.request_id or f"req-{secrets.token_hex(8)}"
        return VectorCall(items, name, options, label, self._core.loop.clock.now(), width)


def _size(item: Item) -> int:
    """Characters, to decide where to tokenize it."""
    if isinstance(item, str):
        return len(item)
    return 4 * len(item) if isinstance(item, TokenIds) else len(item[0]) + len(item[1])
