"""Several prompts answered as one request: `Several` is a stream over the streams of all of them, and `Beams` takes its
place where the likeliest outputs are searched for."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Self

import anyio.to_thread

from asyncengine.errors import RequestFailed, naming
from asyncengine.integrations.beams import Beam
from asyncengine.outputs import Chunk, Completion, Sample, Timings, Usage
from asyncengine.step import TokenLogprob
from asyncengine.stream import TokenStream

Prompt = str | list[int]


class Several:
    """A stream over one `TokenStream` for each prompt, with `samples` samples of each.

    Sample s of prompt p is number `p * samples + s`. All are submitted before the first is read, in order, so that they
    share steps and pages; if one is refused, all end. An error about one of several prompts names it.
    """

    def __init__(
        self, prompts: Sequence[Prompt], open_stream: Callable[[Prompt], TokenStream], samples: int,
        encode: Callable[[Prompt], list[int]] | None = None,
    ) -> None:  # fmt: skip
        """`encode`: tokenizes a prompt, on a thread; None: the engine does, with its defaults."""
        self._prompts, self._open_stream, self._samples = prompts, open_stream, samples
        self._encode = encode
        self._left = False
        self._streams: list[TokenStream] = []
        self._reading: dict[asyncio.Future[Chunk | None], int] = {}
        self._ready: deque[Chunk] = deque()

    @property
    def prompts(self) -> list[tuple[int, ...]]:
        """Token ids of all prompts that are submitted."""
        return [stream.prompt_token_ids for stream in self._streams]

    @property
    def prompt_logprobs(self) -> list[list[TokenLogprob | None]]:
        """Scores of all prompts, those of each from its first chunk on; none where they are not asked for."""
        return [stream.prompt_logprobs or [] for stream in self._streams]

    @property
    def usage(self) -> Usage | None:
        """Token counts so far, of all prompts together."""
        return added([stream.usage for stream in self._streams])

    @property
    def timings(self) -> Timings | None:
        """Times so far: to the first step and the first token of the first prompt, and to the end of all."""
        measured = [timings for stream in self._streams if (timings := stream.timings) is not None]
        return replace(measured[0], total=max(timing.total for timing in measured)) if measured else None

    def abort(self) -> None:
        """Leave all streams."""
        self._left = True
        for stream in self._streams:
            stream.abort()

    async def __aenter__(self) -> Self:
        try:
            for number, prompt in enumerate(self._prompts):
                with naming({"prompt": f"prompt[{number}]" if len(self._prompts) > 1 else "prompt"}):
                    await self._submit(prompt)
        except BaseException:
            self.abort()
            raise
        return self

    async def _submit(self, prompt: Prompt) -> None:
        if self._encode is not None:
            prompt = await anyio.to_thread.run_sync(self._encode, prompt)
        if self._left:
            raise RequestFailed("the stream was left before it started")
        self._streams.append(self._open_stream(prompt))
        await self._streams[-1].__aenter__()

    async def __aexit__(self, *raised: object) -> None:
        self.abort()
        for task in self._reading:
            task.cancel()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        if not self._reading and not self._ready:
            for number in range(len(self._streams)):
                self._read(number)
        while not self._ready:
            if not self._reading:
                raise StopAsyncIteration
            await asyncio.wait(self._reading, return_when=asyncio.FIRST_COMPLETED)
            for task in [pending for pending in self._reading if pending.done()]:
                number, chunk = self._reading.pop(task), task.result()
                if chunk is not None:
                    chunk.index += number * self._samples
                    self._ready.append(chunk)
                    self._read(number)
        return self._ready.popleft()

    def _read(self, number: int) -> None:
        task = asyncio.ensure_future(anext(self._streams[number], None))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen, also if others failed first
        self._reading[task] = number

    async def result(self) -> Completion:
        """All completions as one: samples and logprobs of the prompts in order."""
        async with self:
            completions = [await stream.result() for stream in self._streams]
        first = completions[0]
        scored = [completion.prompt_logprobs for completion in completions if completion.prompt_logprobs is not None]
        return replace(
            first, usage=self.usage or first.usage, timings=self.timings or first.timings,
            prompt_logprobs=[entry for completion in scored for entry in completion] if scored else None,
            samples=[sample for completion in completions for sample in completion.samples],
        )  # fmt: skip


def added(usages: Sequence[Usage | None]) -> Usage | None:
    """Token counts of several requests together."""
    counted = [usage for usage in usages if usage is not None]
    if not counted:
        return None
    return Usage(*(sum(getattr(usage, name) for usage in counted) for name in Usage.__slots__))


class Beams:
    """The likeliest outputs of each prompt, best first. It has those methods of a stream that whole answers need."""

    def __init__(
        self, prompts: Sequence[Prompt], encode: Callable[[Prompt], list[int]],
        search: Callable[[list[int]], Awaitable[list[Beam]]],
    ) -> None:  # fmt: skip
        """`encode`: tokenizes a prompt, on a thread."""
        self._inputs, self._encode, self._search = prompts, encode, search
        self._begun, self._left = time.monotonic(), False
        self._task: asyncio.Future[list[list[Beam]]] | None = None
        self.prompts: list[list[int]] = []
        """Token ids of all prompts, as soon as they are searched."""
        self.usage: Usage | None = None
        self.timings: Timings | None = None

    def abort(self) -> None:
        """Leave all searches."""
        self._left = True
        if self._task is not None:
            self._task.cancel()

    async def result(self) -> Completion:
        """The outputs of the prompts in order. Raises as `beam_search`, and `RequestFailed` once it is left."""
        self.prompts = [await anyio.to_thread.run_sync(self._encode, prompt) for prompt in self._inputs]
        self._task = asyncio.gather(*map(self._search, self.prompts))
        if self._left:  # `abort` was called while prompts were tokenized, and had no task to cancel
            self._task.cancel()
        try:
            with naming({"width": "n"}):
                beams = chain(*await self._task)
        except asyncio.CancelledError:
            if not self._left:
                raise
            raise RequestFailed("the search was left before it ended") from None
        samples = [Sample(beam.text, list(beam.token_ids), "stop" if beam.ended else "length") for beam in beams]
        self.usage = Usage(sum(map(len, self.prompts)), sum(len(sample.token_ids) for sample in samples))
        self.timings = Timings(None, None, time.monotonic() - self._begun)
        first = samples[0]
        return Completion(
            first.text, first.token_ids, first.finish_reason, usage=self.usage, timings=self.timings, request_id="",
            samples=samples,
        )  # fmt: skip
