"""Assembly of a request's chunks for its consumer: merged chunks while it runs, the completion at its end."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from asyncengine.engine.validation import PreparedRequest
from asyncengine.errors import RequestFailed
from asyncengine.outputs import Chunk, Completion, LogprobEntry, Sample, Timings, Usage
from asyncengine.step import TokenLogprob

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from asyncengine.grammar.chat import ChatReader


class _Output:
    """The output of one sample so far. Chunks are not kept: one object a token would make the garbage collector
    traverse the whole heap again and again, which stops an engine of many streams."""

    __slots__ = ("last", "logprobs", "reasoning", "steered_from", "texts", "token_ids")

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[LogprobEntry] = []
        self.reasoning: list[str] = []
        self.last: Chunk | None = None
        """The one that ended it."""
        self.steered_from: int | None = None


class Assembler:
    """Merges waiting chunks into one for the reader, and all chunks into the completion. Pure."""

    def __init__(
        self, prepared: PreparedRequest, now: Callable[[], float],
        called: Callable[[Sequence[str]], object] | None = None,
    ) -> None:  # fmt: skip
        """`called`: told the names of the tools that the answer calls, when it has ended."""
        self.prepared = prepared
        self._called = called
        self._now = now
        self._outputs = [_Output() for _ in prepared.streams]
        self._failed: Chunk | None = None
        self._open = len(prepared.streams)
        self._reader: ChatReader | None = None
        if prepared.plan is not None and prepared.plan.make_parser is not None:
            from asyncengine.grammar.chat import ChatReader

            offers = prepared.spec.params.on_budget == "offer"
            self._reader = ChatReader(prepared.plan.make_parser, len(prepared.streams), offers)
            prepared.mailbox.joins = prepared.plan.thinking is None
        self._ended_at = 0.0
        self.finished = False

    def feed(self, chunks: list[Chunk]) -> list[Chunk]:
        """`chunks` with each run of chunks of the same sample merged into one, unless their tokens are counted."""
        merged = chunks if len(chunks) == 1 or not self.prepared.mailbox.joins else merge(chunks)
        self.keep(merged)
        return merged

    def keep(self, chunks: list[Chunk]) -> None:
        """Take in `chunks` for the completion."""
        for chunk in chunks:
            output = self._outputs[chunk.index]
            if self._reader is not None:
                self._reader.read(chunk)
                self.prepared.mailbox.joins |= not self._reader.thinking
                if chunk.reasoning:
                    output.reasoning.append(chunk.reasoning)
            if chunk.steered_from is not None and output.steered_from is None:
                output.steered_from = sum(map(len, output.texts)) + chunk.steered_from
            chunk.steered_from = output.steered_from
            if chunk.text:
                output.texts.append(chunk.text)
            output.token_ids += chunk.token_ids
            if chunk.logprobs:
                output.logprobs += chunk.logprobs
            if chunk.finish_reason is not None:
                self._end(output, chunk)

    def _end(self, output: _Output, chunk: Chunk) -> None:
        output.last = chunk
        if self._failed is None and chunk.finish_reason in ("engine_dead", "error"):
            self._failed = chunk
        self._open -= 1
        if not self._open:
            self.finished = True
            self._ended_at = self._now()
            chunk.usage = self.usage
            calls = [] if self._reader is None else self._reader.calls(0)
            if calls and self._called is not None:
                self._called([call.name for call in calls])

    @property
    def usage(self) -> Usage:
        generated = sum(len(output.token_ids) for output in self._outputs)
        thought = 0 if self._reader is None else self._reader.reasoning_tokens
        mailbox = self.prepared.mailbox
        cached, restored = mailbox.cached_tokens, mailbox.restored_tokens
        prepared = self.prepared
        prompts = prepared.num_tokens if prepared.spec.is_question else prepared.spec.prompt_len
        return Usage(prompts, generated, cached, thought, *mailbox.predicted, restored)

    @property
    def timings(self) -> Timings:
        ended_at = self._ended_at if self.finished else self._now()
        return self.prepared.mailbox.timings(self.prepared.spec.arrival, ended_at)

    @property
    def prompt_logprobs(self) -> list[TokenLogprob | None] | None:
        """`Completion.prompt_logprobs`, all of them from the first chunk on."""
        spec, by_position = self.prepared.spec, self.prepared.mailbox.prompt_logprobs
        return [by_position.get(i) for i in range(spec.prompt_len)] if spec.params.prompt_logprobs else None

    def failure(self) -> Exception | None:
        """The error that `result()` raises, if the request failed."""
        failed, mailbox = self._failed, self.prepared.mailbox
        if failed is None:
            return None
        if failed.finish_reason == "engine_dead":
            return mailbox.failure()
        return mailbox.cause or RequestFailed(f"request {self.prepared.spec.request_id}: {failed.error}")

    def completion(self) -> Completion:
        """The finished request. Call once `finished`."""
        samples = [self._sample(index) for index in range(len(self.prepared.streams))]
        return Completion(
            **{field.name: getattr(samples[0], field.name) for field in fields(Sample)},
            usage=self.usage, timings=self.timings, request_id=self.prepared.spec.request_id,
            prompt_logprobs=self.prompt_logprobs, samples=samples,
        )  # fmt: skip

    def _sample(self, index: int) -> Sample:
        output = self._outputs[index]
        last, text, check = output.last, "".join(output.texts), self.prepared.check_text
        reason = None if last is None else last.finish_reason
        traces, params = self._traces(index, len(output.token_ids)), self.prepared.spec.params
        return Sample(
            text=text, token_ids=output.token_ids, finish_reason=reason or "abort", logprobs=output.logprobs or None,
            error=None if last is None else last.error,
            tool_calls=[] if self._reader is None else self._reader.calls(index), reasoning="".join(output.reasoning),
            schema_error=None if check is None or reason == "tool_calls" else check(text),
            broken_calls=[] if self._reader is None else self._reader.calls(index, broken=True),
            stop=None if last is None else last.stop,
            steered_from=None if output.steered_from is None else min(output.steered_from, len(text)),
            weight_versions=self.prepared.mailbox.weight_versions.get(index, ((0, len(output.token_ids)),)),
            routed_experts=traces if params.return_routed_experts else None,
            hidden_states=traces if params.return_hidden_states else None,
        )  # fmt: skip

    def _traces(self, index: int, generated: int) -> NDArray[Any] | None:
        """Experts or hidden states of a sample: the prompt's of sample 0, which alone computes them, and its own.

        Of a position that was computed twice, the first counts: it gave the token behind it.
        """
        spec, traces = self.prepared.spec, self.prepared.mailbox.traces
        first, end = spec.params.traced_from or 0, spec.prompt_len + generated - 1
        if not traces or end <= first:
            return None
        import numpy as np  # not at the top: `--help` imports this module, and needs no numpy

        result, seen = np.empty((end - first, *traces[0][2].shape[1:]), traces[0][2].dtype), np.zeros(end - first, bool)
        for sample, start, entries in reversed(traces):
            if sample not in (0, index):
                continue
            last = min(end if sample == index else spec.prompt_len - 1, start + len(entries))
            begin = max(start, first)
            if begin < last:
                result[begin - first : last - first] = entries[begin - start : last - start]
                seen[begin - first : last - first] = True
        return result if seen.all() else None


def merge(chunks: list[Chunk]) -> list[Chunk]:
    """One chunk for each run of chunks of the same sample."""
    merged: list[Chunk] = []
    for _, group in itertools.groupby(chunks, key=lambda chunk: chunk.index):
        run = list(group)
        last = run[-1]
        logprobs = [entry for chunk in run for entry in chunk.logprobs or ()]
        steered = (
            sum(len(before.text) for before in run[:index]) + chunk.steered_from
            for index, chunk in enumerate(run)
            if chunk.steered_from is not None
        )
        merged.append(
            Chunk(
                "".join(chunk.text for chunk in run),
                [token for chunk in run for token in chunk.token_ids],
                last.finish_reason,
                last.index,
                logprobs or None,
                last.error,
                stop=last.stop,
                steered_from=next(steered, None),
            )
        )
    return merged
