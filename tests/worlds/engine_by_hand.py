"""An engine with adapters whose loop is turned by hand: no thread, no clock, and its books checked at every turn."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from support.adapter_engine import AdapterExecutor, slots_of
from support.fake_adapters import FakeLoader
from support.fake_engine import make_core
from support.plug_points import Compiler

from asyncengine.config import EngineConfig
from asyncengine.engine.loop import Launched
from asyncengine.engine.validation import PreparedRequest
from asyncengine.errors import AdapterError
from asyncengine.lora.registry import AdapterRegistry
from asyncengine.policies import POLICIES
from asyncengine.scheduler import Output
from asyncengine.scheduler.messages import StopText
from asyncengine.step import Batch
from asyncengine.testing import FakeModel, ManualClock, Recording


class _Job(NamedTuple):
    future: Future[Any]
    work: Callable[[], Any]
    files: dict[str, str]
    """The loader's "files" as they were when the job began: that is what it has read, however late it ends."""


class HandPool(Executor):
    """A stand-in for a registry's pool. At most `workers` jobs have begun and not ended."""

    def __init__(self, loader: FakeLoader, workers: int) -> None:
        self._loader = loader
        self._workers = workers
        self._queue: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._begun: list[_Job] = []
        self.ended = 0

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._queue.append((future, lambda: work(*arguments)))
        return future

    @property
    def busy(self) -> bool:
        return bool(self._queue or self._begun)

    def turn(self, chance: random.Random) -> None:
        """Begin what workers are free for, and end one of those that have begun."""
        while self._queue and len(self._begun) < self._workers:
            future, work = self._queue.popleft()
            if future.set_running_or_notify_cancel():
                self._begun.append(_Job(future, work, dict(self._loader.contents)))
        if self._begun:
            self._end(self._begun.pop(chance.randrange(len(self._begun))))

    def _end(self, job: _Job) -> None:
        self.ended += 1
        now, self._loader.contents = self._loader.contents, job.files
        try:
            outcome = job.work()
        except BaseException as error:
            outcome = error
        if isinstance(outcome, BaseException):
            job.future.set_exception(outcome)
        else:
            job.future.set_result(outcome)
        self._loader.contents = now

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        while cancel_futures and self._queue:
            self._queue.popleft()[0].cancel()


class SizedLoader(FakeLoader):
    """Two sizes of adapters, by content."""

    def size(self, path: str) -> int:
        return 800 if len(self.contents.get(path, path)) % 2 else 400


@dataclass
class Sample:
    """One ticket: what it must answer, and what came."""

    expected: list[int]
    digest: str
    received: list[int] = field(default_factory=list)
    reason: str = ""
    error: object = None
    stopped: bool = False
    """A stop string was found in its text."""
    slots: list[int] = field(default_factory=list)
    """Adapter slots it has been in: another one after a preemption, if its own was taken."""


class EngineByHand:
    """The engine's own loop, registry and slots; files, device and callers are the test's."""

    def __init__(self, rng: random.Random, *, grammars: bool, depth: int | None) -> None:
        self.rng = rng
        num_pages, page_size = rng.choice([16, 24, 40, 100]), rng.choice([2, 4])
        self.loader = SizedLoader()
        self.room = rng.choice([1, 1, 1, 2, 4]) * 800
        passes, self.pool = rng.choice([1, 1, 3, 64]), HandPool(self.loader, rng.choice([1, 2, 4]))
        self.registry = AdapterRegistry(self.loader, max_bytes=self.room, max_passes=passes, pool=self.pool)
        self.claims, self.store = self.registry.claims, self.registry.store
        self.compiler = Compiler() if grammars else None
        self.clock = ManualClock()
        self.executor = AdapterExecutor(num_pages, page_size, FakeModel(eos_every=rng.choice([0, 20])))
        self.recording = Recording(EngineConfig(), num_pages)
        wiring: dict[str, Any] = {"adapters": self.registry, "clock": self.clock, "recorder": self.recording.record}
        self.core = make_core(
            self.executor,
            wiring={**wiring, "grammars": self.compiler},
            page_size=page_size,
            policy=rng.choice([*POLICIES]),
            max_num_seqs=rng.choice([2, 4, 16]),
            max_num_batched_tokens=rng.choice([5, 16, 64, 1000]),
            prefix_caching=rng.random() < 0.8,
            max_passes=rng.choice([1, 4, 64]),
            admission_lookahead=rng.choice([0, 3, 64]),
            preempt_every=rng.choice([None, 2, 3, 7]),
            max_steps_in_flight=depth or rng.choice([1, 2]),
            max_loras=rng.choice([1, 2, 2, 4]),
            max_queued_requests=rng.choice([None, None, 15]),
            check_every=1,
        )
        self.recording.config = self.core.config
        self.loop, self.scheduler = self.core.loop, self.core.loop.scheduler
        self.slots = slots_of(self.core)
        self.samples: dict[int, Sample] = {}
        self.open: dict[int, PreparedRequest] = {}
        """Requests with a sample that has not ended, by their first ticket."""
        self.launched: deque[Batch] = deque()
        self.outputs: list[Output] = []
        self.orphans: list[str] = []
        """Contents in memory that open requests use and no name means: they could not be read again."""
        self.watched = True
        """False: answers and ends alone must tell what is wrong."""
        taken = self.scheduler.take_outputs

        def noted() -> list[Output]:
            self.outputs += (new := taken())
            return new

        self.scheduler.take_outputs = noted  # type: ignore[method-assign]

    @property
    def busy(self) -> bool:
        return bool(self.open or self.scheduler.requests or self.launched or self.pool.busy)

    def turn(self) -> None:
        """Runs a turn of `EngineLoop.run`, except that steps are computed late: others are launched meanwhile."""
        depth = self.core.config.max_steps_in_flight
        self.loop.apply_inbox()
        batch = None
        if len(self.launched) < depth:
            batch = self.loop.schedule()
            if batch is not None:
                self.launched.append(batch)
                for row in batch.rows:
                    if (slots := self.samples[row.spec.ticket].slots)[-1:] != [row.adapter_slot]:
                        slots.append(row.adapter_slot)
                self.loop.in_flight.append(Launched(batch, None, self.clock.now()))  # type: ignore[arg-type]
        if self.scheduler.running and self.rng.random() < 0.01:  # delivery finds a stop string, or cannot decode
            ticket = self.rng.choice(list(self.scheduler.running))
            self.samples[ticket].stopped = True
            self.loop.end_early(StopText(ticket))
        self.loop.deliver()
        self._read()
        if self.watched:
            self._check_books()
        if self.launched and (batch is None or len(self.launched) >= depth or self.rng.random() < 0.3):
            self.loop.commit(self.executor.execute(self.launched.popleft()))

    def _read(self) -> None:
        """Reads what consumers get."""
        for first, prepared in list(self.open.items()):
            tickets = prepared.tickets
            for chunk in prepared.mailbox.take():
                sample = self.samples[tickets[chunk.index]]
                assert not sample.reason, "a chunk after the end"
                sample.received += chunk.token_ids
                sample.reason = chunk.finish_reason or ""
                sample.error = prepared.mailbox.cause or chunk.error
            if all(self.samples[ticket].reason for ticket in tickets):
                del self.open[first]

    # ---------------------------------------------------------------- books

    def _check_books(self) -> None:
        """All balance; whoever runs has its weights in memory; no slot is written under a step that names it."""
        self.scheduler.check()
        self.registry.check()
        self.slots.check()
        running = {digest for request in self.scheduler.running.values() if (digest := request.adapter_digest)}
        assert len(running) <= self.slots.max_loras
        open_ = [t for a in self.open.values() for t in a.tickets if not self.samples[t].reason]
        claimed = [t for t in open_ if self.samples[t].digest and not self.samples[t].stopped]
        assert sorted(self.claims.by_ticket) == sorted(claimed), "claims are those of the open requests"
        for ticket in claimed:
            assert self.claims.by_ticket[ticket].meaning.digest == self.samples[ticket].digest
            if ticket in self.scheduler.requests and ticket not in self.scheduler.adapter_queue:
                assert self.registry.get(self.samples[ticket].digest).digest == self.samples[ticket].digest
        self._check_orphans(claimed)
        for earlier, later in pairwise(self.launched):
            named = [row.adapter_slot for row in earlier.rows]
            assert not any(swap.slot in named for swap in later.swaps), f"step {later.step} swaps a slot in use"

    def _check_orphans(self, claimed: list[int]) -> None:
        named = {info.digest for info in self.registry.list()}
        here = self.store.resident
        digests = [self.samples[ticket].digest for ticket in claimed if self.samples[ticket].digest not in named]
        assert all(digest in here for digest in digests if digest in self.orphans), "dropped under its requests"
        self.orphans = [digest for digest in digests if digest in here]
        assert not any(digest in self.claims.waiting for digest in self.orphans), "waits for what waits for it to drain"

    def check_samples(self, faults: bool) -> None:
        """Each ticket came to its right end, or to one that its caller, a deadline or a fault explains."""
        for ticket, sample in self.samples.items():
            said = (
                f"ticket {ticket} ended with {sample.reason!r} ({sample.error}): {sample.received}, {sample.expected}"
            )
            if sample.reason in ("length", "stop") and not sample.stopped:
                assert sample.received == sample.expected, said
                continue
            assert sample.received == sample.expected[: len(sample.received)], said
            assert sample.reason in ("abort", "timeout") or sample.stopped or sample.reason == "error", said
            if sample.reason == "error":
                known = ticket in self.executor.fail_tickets or "too large" in str(sample.error)
                assert known or (faults and isinstance(sample.error, AdapterError) and not sample.received), said
