"""From the chunks of a request to what its consumer sees: merged chunks while it runs, the completion at its end."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

from asyncengine.engine.validation import PreparedRequest
from asyncengine.errors import RequestFailed
from asyncengine.outputs import Chunk, Completion, Sample, Timings, Usage

if TYPE_CHECKING:
    from asyncengine.chat import ChatReader


class Assembler:
    """Merges waiting chunks into one for the reader, and all chunks into the completion. Pure."""

    def __init__(self, prepared: PreparedRequest, now: Callable[[], float]) -> None:
        self.prepared = prepared
        self._now = now
        self._chunks: list[Chunk] = []
        self._open = len(prepared.streams)
        self._reader: ChatReader | None = None
        if prepared.plan is not None and prepared.plan.make_parser is not None:
            from asyncengine.chat import ChatReader

            self._reader = ChatReader(prepared.plan.make_parser, len(prepared.streams))
        self._ended_at = 0.0
        self.finished = False

    def feed(self, chunks: list[Chunk]) -> list[Chunk]:
        """`chunks` with each run of chunks of the same sample merged into one."""
        merged = chunks if len(chunks) == 1 else _merge(chunks)
        self.keep(merged)
        return merged

    def keep(self, chunks: list[Chunk]) -> None:
        """Take in `chunks` for the completion."""
        self._chunks += chunks
        for chunk in chunks:
            if self._reader is not None:
                self._reader.read(chunk)
            if chunk.finish_reason is not None:
                self._open -= 1
                if not self._open:
                    self.finished = True
                    self._ended_at = self._now()
                    chunk.usage = self.usage

    @property
    def usage(self) -> Usage:
        generated = sum(len(chunk.token_ids) for chunk in self._chunks)
        thought = 0 if self._reader is None else self._reader.reasoning_tokens
        mailbox = self.prepared.mailbox
        return Usage(self.prepared.spec.prompt_len, generated, mailbox.cached_tokens, thought, *mailbox.predicted)

    def failure(self) -> Exception | None:
        """What `result()` raises, if the request failed."""
        for chunk in self._chunks:
            if chunk.finish_reason == "engine_dead":
                return self.prepared.mailbox.failure()
            if chunk.finish_reason == "error":
                return self.prepared.mailbox.cause or RequestFailed(
                    f"request {self.prepared.spec.request_id}: {chunk.error}"
                )
        return None

    def completion(self) -> Completion:
        """The finished request. Call once `finished`."""
        spec, mailbox = self.prepared.spec, self.prepared.mailbox
        samples = [self._sample(index) for index in range(len(self.prepared.streams))]
        prompt_logprobs = None
        if spec.params.prompt_logprobs:
            prompt_logprobs = [mailbox.prompt_logprobs.get(i) for i in range(spec.prompt_len)]

        def since(moment: float | None) -> float | None:
            return None if moment is None else moment - spec.arrival

        return Completion(
            text=samples[0].text,
            token_ids=samples[0].token_ids,
            finish_reason=samples[0].finish_reason,
            usage=self.usage,
            timings=Timings(since(mailbox.started_at), since(mailbox.first_token_at), self._ended_at - spec.arrival),
            request_id=spec.request_id,
            logprobs=samples[0].logprobs,
            prompt_logprobs=prompt_logprobs,
            samples=samples,
            tool_calls=samples[0].tool_calls,
            reasoning=samples[0].reasoning,
            schema_error=samples[0].schema_error,
            broken_calls=samples[0].broken_calls,
        )

    def _sample(self, index: int) -> Sample:
        chunks = [chunk for chunk in self._chunks if chunk.index == index]
        last = chunks[-1]
        text = "".join(chunk.text for chunk in chunks)
        return Sample(
            text=text,
            token_ids=[token for chunk in chunks for token in chunk.token_ids],
            finish_reason=last.finish_reason or "abort",
            logprobs=[entry for chunk in chunks for entry in chunk.logprobs or ()] or None,
            error=last.error,
            tool_calls=[] if self._reader is None else self._reader.calls(index),
            reasoning="".join(chunk.reasoning for chunk in chunks),
            schema_error=None if last.finish_reason == "tool_calls" else self._schema_error(text),
            broken_calls=[] if self._reader is None else self._reader.broken_calls(index),
        )

    def _schema_error(self, text: str) -> str | None:
        check = self.prepared.check_text
        return None if check is None else check(text)


def _merge(chunks: list[Chunk]) -> list[Chunk]:
    """One chunk for each run of chunks of the same sample."""
    merged: list[Chunk] = []
    for _, group in itertools.groupby(chunks, key=lambda chunk: chunk.index):
        run = list(group)
        last = run[-1]
        logprobs = [entry for chunk in run for entry in chunk.logprobs or ()]
        merged.append(
            Chunk(
                "".join(chunk.text for chunk in run),
                [token for chunk in run for token in chunk.token_ids],
                last.finish_reason,
                last.index,
                logprobs or None,
                last.error,
            )
        )
    return merged
