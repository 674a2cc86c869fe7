"""A thread pool without threads: its jobs begin and end when told to, in any order, so that a run can be repeated."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

from support.fake_adapters import FakeLoader


class _Job(NamedTuple):
    future: Future[Any]
    work: Callable[[], Any]
    files: dict[str, str]
    """What the loader's "files" held when the job began: that is what it has read, however late it ends."""


class HandPool:
    """In the place of a registry's pool. At most `workers` jobs have begun and not ended."""

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
