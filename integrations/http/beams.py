"""Beam search over HTTP: `Beams` takes the place of a stream where the likeliest outputs are searched for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import chain

import anyio.to_thread

from asyncengine.beams import Beam
from asyncengine.errors import RequestFailed, naming
from asyncengine.integrations.http.several import Prompt
from asyncengine.outputs import Completion, Sample, Timings, Usage


class Beams:
    """The likeliest outputs of each prompt, best first: as much of a stream as whole answers need."""

    def __init__(
        self, prompts: Sequence[Prompt], encode: Callable[[Prompt], list[int]],
        search: Callable[[list[int]], Awaitable[list[Beam]]],
    ) -> None:  # fmt: skip
        """`encode`: makes ids of a prompt, on a thread."""
        self._given, self._encode, self._search = prompts, encode, search
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
        self.prompts = [await anyio.to_thread.run_sync(self._encode, prompt) for prompt in self._given]
        self._task = asyncio.gather(*map(self._search, self.prompts))
        if self._left:
            self._task.cancel()
        try:
            with naming({"width"}, "n"):
                found = chain(*await self._task)
        except asyncio.CancelledError:
            if not self._left:
                raise
            raise RequestFailed("the search was left before it ended") from None
        samples = [Sample(beam.text, list(beam.token_ids), "stop" if beam.ended else "length") for beam in found]
        self.usage = Usage(sum(map(len, self.prompts)), sum(len(sample.token_ids) for sample in samples))
        self.timings = Timings(None, None, time.monotonic() - self._begun)
        first = samples[0]
        return Completion(
            first.text, first.token_ids, first.finish_reason, usage=self.usage, timings=self.timings, request_id="",
            samples=samples,
        )  # fmt: skip
