"""Texts that were posted together, and what becomes of them: one place to wait for all of their vectors."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from asyncengine.device.process import PROCESS
from asyncengine.engine.mailbox import Waiter
from asyncengine.errors import RequestFailed, RequestTimeout
from asyncengine.request_spec import RequestSpec
from asyncengine.scheduler import Output

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class VectorWindow:
    """Requests of one call that wait for vectors, and their consumer, which is woken once: when all are there, or at
    the first that will not come. The engine's thread puts, one consumer waits; as in a `Mailbox`, no wake-up is lost.
    """

    __slots__ = (
        "_born", "_left", "_places", "_waiter", "cached_tokens", "failure", "fault", "first", "num_tokens", "specs",
        "vectors",
    )  # fmt: skip

    def __init__(self, specs: Sequence[RequestSpec], first: int = 0) -> None:
        """`first`: which of the call's texts the first one is."""
        self._born = PROCESS.generation
        self._places = {spec.ticket: place for place, spec in enumerate(specs)}
        self._left = len(specs)
        self._waiter: Waiter | None = None
        self.specs = specs
        self.first = first
        self.num_tokens = sum(len(spec.prompt) for spec in specs)
        self.vectors: list[NDArray[np.float32] | None] = [None] * len(specs)
        self.cached_tokens = 0
        self.fault: tuple[int, Output] | None = None
        """(which text of the call, how it ended), of the first without a vector."""
        self.failure: Callable[[], Exception] | None = None
        """Makes what to raise where the engine died or closed."""

    @property
    def spec(self) -> RequestSpec:
        return self.specs[0]

    @property
    def samples(self) -> int:
        return len(self.specs)

    @property
    def tickets(self) -> list[int]:
        """Of those that have not ended."""
        return list(self._places)

    def time_left(self, now: Callable[[], float]) -> Callable[[], float]:
        """As of a `PreparedRequest`."""
        due = min(float("inf") if at is None else at for at in (self.spec.deadline, self.spec.waiting_deadline))
        return lambda: due - now()

    def put(self, output: Output) -> Waiter | None:
        """The last output of one of its requests. Returns whoever must be woken (see `mailbox.wake_all`)."""
        place = self._places.pop(output.ticket)
        self.vectors[place] = output.vector
        self.cached_tokens += output.cached_tokens
        self._left -= 1
        if output.vector is None and self.fault is None:
            self.fault = (self.first + place, output)
        return self._wake() if self.is_done() else None

    def put_all(
        self, vectors: NDArray[np.float32] | None, cached_tokens: int, fault: tuple[int, Output] | None
    ) -> Waiter | None:
        """The last output of all of them at once, from where they were computed. `fault` counts from this window."""
        self._places.clear()
        self._left = 0
        if vectors is not None:
            self.vectors = list(vectors)
        self.cached_tokens = cached_tokens
        if fault is not None:
            self.fault = (self.first + fault[0], fault[1])
        return self._wake()

    def fail(self, failure: Callable[[], Exception]) -> Waiter | None:
        """Nothing more will come."""
        self.failure = failure
        return self._wake()

    def _wake(self) -> Waiter | None:
        waiter, self._waiter = self._waiter, None
        return waiter

    def is_done(self) -> bool:
        """All are there, or one will not come."""
        return not self._left or self.fault is not None or self.failure is not None

    async def wait(self) -> None:
        """Until it is done. Cancelling loses nothing. Raises `WrongProcess` in a fork, where nobody puts."""
        while not self.is_done():
            PROCESS.check_unforked(self._born)
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiter = waiter
            if self.is_done():
                break
            await waiter

    def wait_blocking(self) -> None:
        """The same for a plain thread."""
        while not self.is_done():
            PROCESS.check_unforked(self._born)
            event = threading.Event()
            self._waiter = event
            if self.is_done():
                break
            event.wait()

    def check(self) -> None:
        """Raises what went wrong, if something did."""
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
        raise RequestFailed(f"{label} was aborted" if output.reason == "abort" else f"{label}: {output.error}")
