"""Requests that an engine in another process computes: the loop here, to which callers post them, and the outbox
there, from which their output comes back as `RequestOutput`s, each with everything new of one request."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import groupby

from asyncengine.config import EngineConfig
from asyncengine.engine.assembler import merge
from asyncengine.engine.delivery import OutputStream
from asyncengine.engine.frontend import Frontend
from asyncengine.engine.inbox import Inbox
from asyncengine.engine.mailbox import Mailbox, Waiter, wake_all
from asyncengine.engine.serving_loop import ServingLoop
from asyncengine.engine.validation import PreparedRequest
from asyncengine.engine.vectors.batch import TextBatch
from asyncengine.outputs import Chunk, FinishReason
from asyncengine.request_output import RequestOutput
from asyncengine.request_spec import RequestSpec
from asyncengine.scheduler import Output
from asyncengine.scheduler.messages import Abort, Drain, Message, SessionEvent
from asyncengine.seams import AdapterStore, GrammarCompiler


class RelayLoop(ServingLoop):
    """A loop that has other engines compute its requests. It passes on merged chunks, which hold their text
    already, where an engine's own loop delivers tokens."""

    def __init__(self, config: EngineConfig, adapters: AdapterStore, grammars: GrammarCompiler | None) -> None:
        super().__init__(config, grammars=grammars, adapters=adapters)
        self.by_ticket: dict[int, RelayedRequest] = {}
        """Requests of the tickets that have not ended."""
        self.waiters: list[Waiter] = []
        """Consumers that have something new, and sleep."""

    def take(self) -> Iterator[list[RequestSpec] | int | SessionEvent]:
        """Everything that was posted, in order: the samples of a request or the texts of a batch, which are open from
        here on, tickets whose consumers have left, and news of sessions. A drain begins when it is met."""
        for _, group in groupby(self.inbox.take(), key=_group):
            messages = list(group)
            specs = [message for message in messages if isinstance(message, RequestSpec)]
            for spec in specs:
                self.delivery.open(spec.ticket)
            receivers = [self.delivery.streams[spec.ticket] for spec in specs]
            # the first text of a batch stands for all, which are posted together
            if any(not isinstance(receiver, TextBatch) or receiver.spec is specs[0] for receiver in receivers):
                yield specs
            for message in messages:
                if isinstance(message, Abort):
                    yield message.ticket
                elif isinstance(message, SessionEvent):
                    yield message
                elif isinstance(message, Drain):
                    self.start_drain(message)

    def wake(self) -> None:
        """Wake the consumers of everything that was handed on, with one call for each of their event loops."""
        waiters, self.waiters = self.waiters, []
        wake_all(waiters)


class RelayedRequest:
    """A request under way: samples of one prompt (`streams`), or texts whose vectors are awaited together (`texts`)."""

    def __init__(self, loop: RelayLoop, specs: Sequence[RequestSpec], *, keep_tokens: bool) -> None:
        """`specs`: as `RelayLoop.take` gives them. `keep_tokens`: it can be resumed elsewhere."""
        self.loop, self._keep_tokens = loop, keep_tokens
        self.streams: dict[int, OutputStream] = {}
        """Streams of the samples that have not ended, by sample index."""
        self.texts: TextBatch | None = None
        for spec in specs:
            receiver = loop.delivery.streams[spec.ticket]
            if isinstance(receiver, TextBatch):
                self.texts = receiver
            else:
                self.streams[spec.index] = receiver
        self.key = self.spec.ticket
        self.samples = len(self.specs)
        self.num_tokens = sum(spec.prompt_len for spec in self.specs)
        """Prompt tokens of all samples: with `samples`, its places in the queue."""
        self.begun = False
        """True when it has left the queue: with its first token, or its end."""
        self.tokens: dict[int, list[int]] = {}
        """Output so far by sample index, where it is kept."""
        self.steered: set[int] = set()
        """Indices of samples whose output is not all the model's own."""
        loop.by_ticket.update(dict.fromkeys([spec.ticket for spec in self.specs], self))

    @property
    def specs(self) -> list[RequestSpec]:
        """Specifications of the samples that have not ended, or of all texts."""
        if self.texts is not None:
            return list(self.texts.specs)
        return [stream.spec for stream in self.streams.values()]

    @property
    def spec(self) -> RequestSpec:
        return self.specs[0]

    def ended(self) -> None:
        """Called when the last of it has ended, before its consumer hears of that."""

    def receive(self, output: RequestOutput) -> None:
        """Hand on everything new. `RelayLoop.wake` wakes the consumer."""
        meter, now = self.loop.meter, self.loop.clock.now()
        if self.texts is not None:
            if output.vectors is not None:
                meter.first_token.append(now - self.spec.arrival)
            waiter = self.texts.put_all(output.vectors, output.cached_tokens, output.fault)
            self._close(self.specs, "stop" if output.fault is None else output.fault[1].reason or "error")
            self._wake(waiter)
            return
        mailbox = next(iter(self.streams.values())).mailbox
        if mailbox.started_at is None or self.spec.is_question:
            mailbox.cached_tokens, mailbox.restored_tokens = output.cached_tokens, output.restored_tokens
        if output.computing is not None and mailbox.started_at is None:
            mailbox.started_at, mailbox.first_token_at = now - output.computing, now
            mailbox.prompt_logprobs.update(output.prompt_logprobs)
            meter.first_token.append(now - self.spec.arrival)
        (right, wrong), (more_right, more_wrong) = mailbox.predicted, output.predicted
        mailbox.predicted = right + more_right, wrong + more_wrong
        mailbox.traces += output.traces
        self._leave_queue()
        mailbox.cause = output.cause or mailbox.cause
        for chunk in output.chunks:
            if (stream := self.streams.get(chunk.index)) is not None:
                self._put(stream, chunk, now)

    def _put(self, stream: OutputStream, chunk: Chunk, now: float) -> None:
        tokens = chunk.token_ids
        if tokens:
            if stream.num_tokens:
                self.loop.meter.inter_token.append((now - stream.last_token_at) / len(tokens))
            stream.num_tokens += len(tokens)
            stream.last_token_at = now
            if self._keep_tokens:
                self.tokens.setdefault(chunk.index, []).extend(tokens)
            if chunk.steered_from is not None:
                self.steered.add(chunk.index)
        if chunk.finish_reason is not None:
            self._close([stream.spec], chunk.finish_reason)
        self._wake(stream.mailbox.put(chunk))

    def _wake(self, waiter: Waiter | None) -> None:
        if waiter is not None:
            self.loop.waiters.append(waiter)

    def end(self, reason: FinishReason, *, tickets: Collection[int] | None = None, error: str = "") -> None:
        """End it, or its samples of these `tickets`, without the other engine's word."""
        if self.texts is not None:
            output = Output(self.key, reason="abort" if reason == "abort" else "timeout")
            self.receive(RequestOutput(self.key, fault=(0, output)))
        for stream in list(self.streams.values()):
            if tickets is None or stream.spec.ticket in tickets:
                self._put(stream, Chunk("", [], reason, stream.spec.index, error=error or None), 0.0)
        self.loop.wake()

    def fail(self, failure: Callable[[], Exception]) -> None:
        """End it with reason "engine_dead"; `failure` makes the error that its consumer raises."""
        if self.texts is not None:
            waiter = self.texts.fail(failure)
            self._close(self.specs, "engine_dead")
            self._wake(waiter)
            self.loop.wake()
            return
        next(iter(self.streams.values())).mailbox.failure = failure
        self.end("engine_dead", error=str(failure()))

    def _close(self, specs: Iterable[RequestSpec], reason: FinishReason) -> None:
        """Forget samples or texts that have ended, before their consumer hears of it."""
        loop = self.loop
        self._leave_queue()
        for spec in specs:
            stream = self.streams.pop(spec.index, None)
            del loop.by_ticket[spec.ticket]
            loop.delivery.streams.pop(spec.ticket, None)
            loop.let_go(spec.ticket)
            if stream is None:
                loop.meter.count_end(reason)
            else:
                loop.delivery.count_end(stream, reason)
        if not self.streams:
            self.ended()

    def _leave_queue(self) -> None:
        if not self.begun:
            self.begun = True
            self.loop.queue_limit.leave(self.samples, self.num_tokens)


class RelayMailbox(Mailbox):
    """A request's mailbox that puts itself into the outbox when it has something new."""

    __slots__ = ("_begun", "_noted", "_outbox", "key")

    def __init__(self, key: int, outbox: Outbox) -> None:
        super().__init__()
        self.key = key
        self._outbox = outbox
        self._noted = self._begun = False

    def put(self, chunk: Chunk) -> Waiter | None:
        super().put(chunk)
        if not self._noted:
            self._noted = True
            self._outbox.post(self)
        return None

    def take_output(self) -> RequestOutput:
        """Everything new."""
        self._noted = False
        output = RequestOutput(
            self.key, merge(self.take()), predicted=self.predicted, traces=self.traces,
            cached_tokens=self.cached_tokens, restored_tokens=self.restored_tokens, cause=self.cause,
        )  # fmt: skip
        self.predicted, self.traces = (0, 0), []
        if self._begun or self.started_at is None:
            return output
        self._begun = True
        at = self.started_at if self.first_token_at is None else self.first_token_at
        return output._replace(computing=at - self.started_at, prompt_logprobs=self.prompt_logprobs)


class _RelayBatch(TextBatch):
    """Texts of one request, which go into the outbox together when the last of them has ended."""

    __slots__ = ("_outbox", "key")

    def __init__(self, key: int, specs: Sequence[RequestSpec], outbox: Outbox) -> None:
        super().__init__(specs)
        self.key = key
        self._outbox = outbox

    def put(self, output: Output) -> Waiter | None:
        super().put(output)
        if not self.tickets:
            vectors = None
            if self.fault is None:
                import numpy as np

                vectors = np.stack([vector for vector in self.vectors if vector is not None])
            self._outbox.post(
                RequestOutput(self.key, cached_tokens=self.cached_tokens, vectors=vectors, fault=self.fault)
            )
        return None


class Outbox(Inbox[RelayMailbox | RequestOutput]):
    """Output of the requests that another process has an engine here compute. An idle reader `wait`s for it."""

    def submit(self, frontend: Frontend, key: int, specs: Sequence[RequestSpec]) -> None:
        """Post a checked request to the engine; its outputs have this `key`. Raises what the engine refuses it with."""
        request: TextBatch | PreparedRequest
        if specs[0].pooled is not None:
            request = _RelayBatch(key, specs, self)
        else:
            mailbox = RelayMailbox(key, self)
            request = PreparedRequest(tuple(frontend.validator.reopen(spec, mailbox) for spec in specs), mailbox)
        frontend.loop.queue_limit.enter(request.samples, request.num_tokens)
        frontend.client.post(request)

    def tell(self, frontend: Frontend, event: SessionEvent) -> None:
        """Post news of a session to the engine, whose clock is another."""
        frontend.loop.inbox.post(event._replace(at=frontend.loop.clock.now()))

    def take_outputs(self) -> list[RequestOutput]:
        """Everything new, of each request once."""
        return [item if isinstance(item, RequestOutput) else item.take_output() for item in self.take()]


def _group(message: Message) -> tuple[int, ...]:
    if isinstance(message, RequestSpec):
        return (message.ticket if message.group is None else message.group,)
    return (0, id(message))
