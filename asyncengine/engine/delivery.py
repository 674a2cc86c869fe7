"""Delivery of scheduler outputs into mailboxes: detokenize, look for stop strings, put, wake.

Text is made here and only here; the scheduler knows token ids, consumers know text. A stop string ends the stream at
once; the scheduler hears of it by a `StopText` message and drops the request before the next step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from asyncengine.engine.clock import Clock
from asyncengine.engine.mailbox import Mailbox, Waiter, wake_all
from asyncengine.engine.vectors.batch import TextBatch
from asyncengine.events import Hooks, RequestDone
from asyncengine.outputs import Chunk, FinishReason, LogprobEntry
from asyncengine.request_spec import RequestSpec
from asyncengine.scheduler import Output
from asyncengine.scheduler.messages import Abort, Resume, StopText, Suspend
from asyncengine.stats import Meter
from asyncengine.step import TokenLogprob
from asyncengine.text.stop_strings import StopStringMatcher
from asyncengine.text.streams import Stream
from asyncengine.text.token_table import TokenTable


@dataclass(slots=True, eq=False)
class OutputStream:
    """The engine's end of one sample: the mailbox of its outputs, and the text state between tokens."""

    spec: RequestSpec
    mailbox: Mailbox
    detokenizer: Stream | None = None
    stops: StopStringMatcher | None = None
    num_tokens: int = 0
    last_token_at: float = 0.0

    def advance(self, token: int, left_out: bool) -> tuple[str, bool]:
        """Text that `token` adds, and whether a stop string is complete with it."""
        self.num_tokens += 1
        if self.detokenizer is None or left_out:
            return "", False
        text = self.detokenizer.push((token,))
        if self.stops is None or not text:
            return text, False
        text, matched = self.stops.push(text, armed=self.num_tokens > self.spec.params.min_tokens)
        return text, matched is not None

    @property
    def stop(self) -> str | None:
        """The stop string that has ended the text."""
        return None if self.stops is None else self.stops.matched

    def rest(self) -> str:
        """Text held back until the end."""
        text = "" if self.detokenizer is None else self.detokenizer.finish()
        if self.stops is None:
            return text
        text, matched = self.stops.push(text)
        return text if matched is not None else text + self.stops.finish()


Receiver = OutputStream | TextBatch
"""Takes the outputs of one request, or those of a batch of texts."""


class Delivery:
    """Every open stream of one engine, by ticket. Lives on the engine's loop."""

    def __init__(
        self, clock: Clock, meter: Meter, hooks: Hooks, post: Callable[[StopText | Abort], object],
        table: TokenTable | None = None, pause: Callable[[Suspend | Resume], object] = lambda message: None,
    ) -> None:  # fmt: skip
        """`post`: told before the consumer when a stream ends here and not by the scheduler. `pause`: told, from any
        thread, when a consumer has too much unread, and when it reads again."""
        self.streams: dict[int, Receiver] = {}
        self.expected: dict[int, Receiver] = {}
        """Receivers that are posted and not opened yet. Posters add to it, from any thread."""
        self.weight_version = 0
        """Version of the weights that give what is delivered."""
        self._clock = clock
        self._meter = meter
        self._hooks = hooks
        self._post = post
        self._table = table
        self._pause = pause

    def open(self, ticket: int) -> None:
        """The engine takes up the request: from here on it has outputs."""
        self.streams[ticket] = self.expected[ticket]
        del self.expected[ticket]

    def change_weights(self, version: int) -> None:
        """Note that all tokens of the old weights have been delivered; the weights of `version` give the next ones."""
        for stream in self.streams.values():
            if isinstance(stream, OutputStream):
                self._note_version(stream)
        self.weight_version = version

    def _note_version(self, stream: OutputStream) -> None:
        """Count the tokens since the last update for the current version of the weights."""
        versions, index = stream.mailbox.weight_versions, stream.spec.index
        runs = versions.get(index, ())
        new = stream.num_tokens - sum(count for _, count in runs)
        if new:
            versions[index] = (*runs, (self.weight_version, new))

    def prepared(self, ticket: int) -> None:
        """Note that a grammar or an adapter that the request waited for is ready."""
        if (receiver := self.streams.get(ticket)) is not None:
            receiver.mailbox.prepared_at = self._clock.now()

    def deliver(self, outputs: list[Output]) -> None:
        """Put all outputs of a step, then wake all consumers. Outputs of streams that have ended are dropped."""
        if not outputs:
            return
        now = self._clock.now()
        waiters: list[Waiter] = []
        gaps: list[float] = []
        streams = self.streams
        for output in outputs:
            stream = streams.get(output.ticket)
            if stream is None:
                continue
            if isinstance(stream, TextBatch):
                waiter = self._put_vector(stream, output, now)
                if waiter is not None:
                    waiters.append(waiter)
                continue
            try:
                if output.plain and stream.num_tokens and stream.stops is None:  # nearly every output
                    stream.num_tokens += 1
                    gaps.append(now - stream.last_token_at)
                    stream.last_token_at = now
                    token = output.token
                    detokenizer = stream.detokenizer
                    text = "" if detokenizer is None else detokenizer.push((token,))
                    waiter = stream.mailbox.put_token(text, token, stream.spec.index)
                else:
                    chunk = self._chunk(stream, output, now, gaps)
                    if chunk is None:
                        continue
                    waiter = stream.mailbox.put(chunk)
            except Exception as error:  # a decoder's fault is the fault of one row
                if output.reason is None:
                    self._post(Abort(output.ticket))
                self._close(stream, output, "error")
                fault = f"the text could not be decoded: {error!r}"
                waiter = stream.mailbox.put(Chunk("", [], "error", stream.spec.index, error=fault))
            if waiter is not None:
                waiters.append(waiter)
            mailbox = stream.mailbox
            mailbox.num_put = num_put = mailbox.num_put + 1
            limit = mailbox.limit
            if limit is not None and num_put - mailbox.num_taken >= limit and output.reason is None:
                mailbox.suspend(output.ticket, self._suspend, self._resume)
        self._meter.inter_token.extend(gaps)
        if waiters:
            wake_all(waiters)

    def _suspend(self, ticket: int) -> None:
        self._pause(Suspend(ticket))

    def _resume(self, ticket: int) -> None:
        self._pause(Resume(ticket, self._clock.now()))

    def _put_vector(self, batch: TextBatch, output: Output, now: float) -> Waiter | None:
        """Give a text's vector, or the reason that it has none, to its batch."""
        del self.streams[output.ticket]
        if output.vector is not None:
            self._meter.first_token.append(now - batch.spec.arrival)
        self._meter.count_end(output.reason or "error")
        return batch.put(output)

    def _chunk(self, stream: OutputStream, output: Output, now: float, gaps: list[float]) -> Chunk | None:
        """The chunk of an output that is not plain; None if it has nothing for the stream yet."""
        token, reason = output.token, output.reason
        if output.prompt_logprobs is not None:
            start, entries = output.prompt_logprobs
            stream.mailbox.prompt_logprobs.update(enumerate(entries, start))
            return None
        if output.traces is not None:
            stream.mailbox.traces.append((stream.spec.index, *output.traces))
            return None
        text, held_back = "", "" if stream.stops is None else stream.stops.held
        steered_from = len(held_back) if output.steered else None
        end: FinishReason | None = reason
        left_out = reason is not None and token in stream.spec.stop_ids and not stream.spec.params.include_stop
        if token >= 0:
            if stream.num_tokens:
                gaps.append(now - stream.last_token_at)
            else:
                self._first_token(stream, output, now)
            stream.last_token_at = now
            text, stopped = stream.advance(token, left_out)
            if stopped:
                end = "stop"
                if reason is None:
                    self._post(StopText(output.ticket))
            elif reason is not None:
                text += stream.rest()
        elif reason is not None:
            text = stream.rest()
        if end == "length" and stream.stop is not None:  # the stop string was found in the text held back until the end
            end = "stop"
        if end is not None:
            self._close(stream, output, end)  # before the chunk is put: its reader may read these counts at once
        logprobs = None if output.logprob is None else [self._entry(output.logprob, ends=left_out)]
        error = output.error
        if isinstance(error, Exception):
            stream.mailbox.cause, error = error, str(error)
        stop = stream.stop if end == "stop" else None
        ids, index = [] if token < 0 else [token], stream.spec.index
        return Chunk(text, ids, end, index, logprobs, error, stop=stop, steered_from=steered_from)

    def _entry(self, logprob: TokenLogprob, ends: bool = False) -> LogprobEntry:
        table = self._table
        return LogprobEntry(
            logprob.token_id, "" if table is None else table.token_text(logprob.token_id), logprob.logprob,
            b"" if table is None else table.token_bytes(logprob.token_id),
            tuple(self._entry(TokenLogprob(*alternative)) for alternative in logprob.top), ends,
        )  # fmt: skip

    def _first_token(self, stream: OutputStream, output: Output, now: float) -> None:
        mailbox = stream.mailbox
        if mailbox.first_token_at is None:
            mailbox.first_token_at = now
            mailbox.started_at = output.started_at
            mailbox.cached_tokens, mailbox.restored_tokens = output.cached_tokens, output.restored_tokens
        elif stream.spec.is_question:
            mailbox.cached_tokens += output.cached_tokens
            mailbox.restored_tokens += output.restored_tokens
        self._meter.first_token.append(now - stream.spec.arrival)

    def _close(self, stream: OutputStream, output: Output, reason: FinishReason) -> None:
        mailbox = stream.mailbox
        if mailbox.started_at is None:
            mailbox.started_at = output.started_at
            mailbox.cached_tokens, mailbox.restored_tokens = output.cached_tokens, output.restored_tokens
        right, wrong = output.predicted
        mailbox.predicted = (mailbox.predicted[0] + right, mailbox.predicted[1] + wrong)
        self._note_version(stream)
        mailbox.weight_versions.setdefault(stream.spec.index, ((self.weight_version, 0),))
        self.count_end(stream, reason)
        del self.streams[output.ticket]

    def count_end(self, stream: OutputStream, reason: FinishReason) -> None:
        """Count the end of a sample. With the last of its request, observers hear of that."""
        self._meter.count_end(reason)
        mailbox, spec = stream.mailbox, stream.spec
        mailbox.ended += (reason,)
        mailbox.generated += stream.num_tokens
        mailbox.prompt_tokens = spec.prompt_len + (mailbox.prompt_tokens if spec.is_question else 0)
        if self._hooks and len(mailbox.ended) == spec.members:
            timings = mailbox.timings(spec.arrival, self._clock.now())
            done = RequestDone(
                spec.request_id, mailbox.is_chat, spec.options.adapter, spec.params, mailbox.ended,
                mailbox.prompt_tokens, mailbox.cached_tokens, mailbox.generated, timings, spec.options.session,
                mailbox.away,
            )  # fmt: skip
            self._hooks.emit(done, mailbox.context)

    def fail_all(self, failure: Callable[[], Exception], unopened: list[int]) -> None:
        """End every stream, and those of the tickets posted but never opened, with reason "engine_dead", once.

        `failure` makes the error that each consumer raises.
        """
        receivers = [*self.streams.values(), *(self.expected[ticket] for ticket in unopened)]
        self.streams.clear()
        self.expected.clear()
        error = str(failure())
        waiters: list[Waiter | None] = []
        for receiver in receivers:  # a batch stands here once for each of its texts
            if isinstance(receiver, TextBatch):
                self._meter.count_end("engine_dead")
                waiters.append(receiver.fail(failure))
                continue
            self.count_end(receiver, "engine_dead")
            receiver.mailbox.failure = failure
            try:
                text = receiver.rest()
            except Exception:  # this may be what killed the engine; every consumer must get the error all the same
                text = ""
            waiters.append(receiver.mailbox.put(Chunk(text, [], "engine_dead", receiver.spec.index, error=error)))
        wake_all(waiter for waiter in waiters if waiter is not None)
