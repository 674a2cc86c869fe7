"""A batch of texts, which are posted together for one call, with one wait for all of its vectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from asyncengine.engine.mailbox import Mailbox, Waiter
from asyncengine.errors import RequestFailed, RequestTimeout
from asyncengine.outputs import Chunk
from asyncengine.request_spec import RequestSpec
from asyncengine.scheduler import Output

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


_DONE = Chunk("", [], "stop")


class TextBatch:
    """Requests of one call that wait for vectors. Their consumer waits at a mailbox and is woken once: when all vectors
    are there, or at the first one that fails."""

    __slots__ = ("_indices", "cached_tokens", "failure", "fault", "first", "mailbox", "num_tokens", "specs", "vectors")

    def __init__(self, specs: Sequence[RequestSpec], first: int = 0) -> None:
        """`first`: index of the batch's first text among the texts of the call."""
        self._indices = {spec.ticket: index for index, spec in enumerate(specs)}
        self.mailbox = Mailbox()
        self.specs = specs
        self.first = first
        self.num_tokens = sum(spec.prompt_len for spec in specs)
        self.vectors: list[NDArray[np.float32] | None] = [None] * len(specs)
        self.cached_tokens = 0
        self.fault: tuple[int, Output] | None = None
        """(index in the call, last output) of the first text that ended without a vector."""
        self.failure: Callable[[], Exception] | None = None
        """Makes the error to raise where the engine died or closed."""

    @property
    def spec(self) -> RequestSpec:
        return self.specs[0]

    @property
    def samples(self) -> int:
        return len(self.specs)

    @property
    def tickets(self) -> list[int]:
        """The tickets of the texts that have not ended."""
        return list(self._indices)

    @property
    def receivers(self) -> dict[int, TextBatch]:
        """The receiver of the outputs of each ticket: the batch itself."""
        return dict.fromkeys(self._indices, self)

    def put(self, output: Output) -> Waiter | None:
        """Take the last output of one text. Returns the waiter to wake, if any (see `mailbox.wake_all`)."""
        index = self._indices.pop(output.ticket)
        self.vectors[index] = output.vector
        self.cached_tokens += output.cached_tokens
        if output.vector is None and self.fault is None:
            self.fault = (self.first + index, output)
        return None if self._indices and self.fault is None else self.mailbox.put(_DONE)

    def put_all(
        self, vectors: NDArray[np.float32] | None, cached_tokens: int, fault: tuple[int, Output] | None
    ) -> Waiter | None:
        """Take the outputs of all texts at once: `vectors` [texts, width], or `fault`, whose index counts in this
        batch. Returns the waiter to wake, if any."""
        self._indices.clear()
        if vectors is not None:
            self.vectors = list(vectors)
        self.cached_tokens = cached_tokens
        if fault is not None:
            self.fault = (self.first + fault[0], fault[1])
        return self.mailbox.put(_DONE)

    def fail(self, failure: Callable[[], Exception]) -> Waiter | None:
        """End the wait with the error that `failure` makes. Returns the waiter to wake, if any."""
        self.failure = failure
        return self.mailbox.put(_DONE)

    async def wait(self) -> None:
        """Wait until it is done. Raises the error that it ended with: the engine's, or that of its first text without a
        vector; and `WrongProcess` in a fork, where no engine runs. Cancelling loses nothing."""
        await self.mailbox.receive()
        self._check()

    def wait_blocking(self) -> None:
        """Wait as `wait` does, on a plain thread."""
        self.mailbox.receive_blocking()
        self._check()

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure()
        if self.fault is None:
            return
        index, output = self.fault
        label = f"request {self.spec.request_id}: text {index}"
        if isinstance(output.error, Exception):
            raise output.error
        if output.reason == "timeout":
            raise RequestTimeout(f"{label} was not done in time")
        aborted = f"{label} was aborted" + (f": {output.error}" if output.error else "")
        raise RequestFailed(aborted if output.reason == "abort" else f"{label}: {output.error}")
