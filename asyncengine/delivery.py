"""From scheduler outputs to mailboxes: detokenize, look for stop strings, put, wake.

Text is made here and only here; the scheduler knows token ids, consumers know text. A stop string ends the stream at
once; the scheduler hears of it by a `StopText` message and drops the request before the next step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from asyncengine.clock import Clock
from asyncengine.mailbox import Item, Mailbox, Waiter, wake_all
from asyncengine.messages import Message, StopText
from asyncengine.outputs import FinishReason
from asyncengine.scheduler import Output
from asyncengine.stats import Meter
from asyncengine.text import Detokenizer, StopStringMatcher


@dataclass(slots=True, eq=False)
class OutputStream:
    """The engine's end of one sample: where its outputs go, and the text state between tokens."""

    index: int
    mailbox: Mailbox
    arrival: float
    request_id: str
    stop_ids: frozenset[int] = frozenset()
    """Ids whose text is left out when one of them ends the output."""
    detokenizer: Detokenizer | None = None
    stops: StopStringMatcher | None = None
    min_tokens: int = 0
    num_tokens: int = 0
    last_token_at: float = 0.0

    def advance(self, token: int, ends: bool) -> tuple[str, bool]:
        """Text that `token` adds, and whether a stop string is complete with it."""
        self.num_tokens += 1
        if self.detokenizer is None or (ends and token in self.stop_ids):
            return "", False
        text = self.detokenizer.push((token,))
        if self.stops is None or not text:
            return text, False
        text, matched = self.stops.push(text, armed=self.num_tokens > self.min_tokens)
        return text, matched is not None

    def rest(self) -> str:
        """Text held back until the end."""
        text = "" if self.detokenizer is None else self.detokenizer.finish()
        if self.stops is None:
            return text
        text, matched = self.stops.push(text)
        return text if matched is not None else text + self.stops.finish()


class Delivery:
    """Every open stream of one engine, by ticket. Lives on the engine's loop."""

    def __init__(self, clock: Clock, meter: Meter, post: Callable[[Message], object]) -> None:
        self.streams: dict[int, OutputStream] = {}
        self.last_ticket = 0
        """Tickets are opened in order; larger ones are still on their way."""
        self._clock = clock
        self._meter = meter
        self._post = post

    def open(self, ticket: int, stream: OutputStream) -> None:
        self.streams[ticket] = stream
        self.last_ticket = max(self.last_ticket, ticket)

    def deliver(self, outputs: list[Output]) -> None:
        """Put all outputs of a step, then wake all consumers. Outputs of streams that have ended are dropped."""
        if not outputs:
            return
        now = self._clock.now()
        waiters: list[Waiter] = []
        streams = self.streams
        gaps: list[float] = []
        for output in outputs:
            stream = streams.get(output.ticket)
            if stream is None:
                continue
            item = self._item(stream, output, now, gaps)
            if item is None:
                continue
            waiter = stream.mailbox.put(item)
            if waiter is not None:
                waiters.append(waiter)
        self._meter.inter_token.extend(gaps)
        if waiters:
            wake_all(waiters)

    def _item(self, stream: OutputStream, output: Output, now: float, gaps: list[float]) -> Item | None:
        ticket, token, reason, logprob, prompt_logprobs, *_ = output
        if prompt_logprobs is not None:
            start, entries = prompt_logprobs
            stream.mailbox.prompt_logprobs.update(enumerate(entries, start))
            return None
        text, end = "", reason  # type: str, FinishReason | None
        if token >= 0:
            if stream.num_tokens:
                gaps.append(now - stream.last_token_at)
            else:
                self._first_token(stream, output, now)
            stream.last_token_at = now
            text, stopped = stream.advance(token, reason is not None)
            if stopped:
                end = "stop"
                if reason is None:
                    self._post(StopText(ticket))
            elif reason is not None:
                text += stream.rest()
        elif reason is not None:
            text = stream.rest()
        if end is not None:
            self._close(ticket, stream, output, end)
        return Item(stream.index, text, token, logprob, end, output.error)

    def _first_token(self, stream: OutputStream, output: Output, now: float) -> None:
        mailbox = stream.mailbox
        if mailbox.first_token_at is None:
            mailbox.first_token_at = now
            mailbox.started_at = output.started_at
            mailbox.cached_tokens = output.cached_tokens
        self._meter.first_token.append(now - stream.arrival)

    def _close(self, ticket: int, stream: OutputStream, output: Output, reason: FinishReason) -> None:
        if stream.mailbox.started_at is None:
            stream.mailbox.started_at = output.started_at
            stream.mailbox.cached_tokens = output.cached_tokens
        self._meter.count_end(reason)
        del self.streams[ticket]

    def fail_all(self, cause: BaseException) -> None:
        """End every open stream with reason "engine_dead", once."""
        self._end_all(list(self.streams.values()), cause)
        self.streams.clear()

    def fail(self, stream: OutputStream, cause: BaseException) -> None:
        """The same for a stream that was posted but never opened."""
        self._end_all([stream], cause)

    def _end_all(self, streams: list[OutputStream], cause: BaseException) -> None:
        waiters = []
        for stream in streams:
            stream.mailbox.failure = cause
            self._meter.count_end("engine_dead")
            waiter = stream.mailbox.put(Item(stream.index, stream.rest(), reason="engine_dead", error=str(cause)))
            if waiter is not None:
                waiters.append(waiter)
        wake_all(waiters)
