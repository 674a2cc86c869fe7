"""Virtual locks, events, queues and threads: the parts of `threading`, `queue` and `time` that an engine uses."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf
from typing import Any

from asyncengine.testing.world.kernel import Strand, World


class _Line:
    """Threads that wait for something to change."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._strands: list[Strand] = []

    def wait(self, until: float, release: Callable[[], object] = lambda: None) -> None:
        """Until woken, or `until`. The lock that guards the line is released when this thread stands in it, so that no
        wake-up in between is missed."""
        world, strand = self._world, self._world.current
        self._strands.append(strand)
        try:
            release()
            while strand in self._strands and world.now < until:
                world.block(until)
        finally:
            if strand in self._strands:
                self._strands.remove(strand)

    def wake(self, most: int | None = None) -> None:
        woken = self._strands[:most]
        del self._strands[:most]
        for strand in woken:
            self._world.wake(strand)


class _Primitive:
    """The common part: a world, and a line of those who wait."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._line = _Line(world)
        world.pause()

    def _until(self, timeout: float | None, blocking: bool = True) -> float:
        if not blocking:
            return -inf
        return inf if timeout is None or timeout < 0 else self._world.now + timeout


class VirtualLock(_Primitive):
    """A lock; `reentrant`: its owner may take it again."""

    def __init__(self, world: World, reentrant: bool = False) -> None:
        super().__init__(world)
        self._reentrant = reentrant
        self._owner: Strand | None = None
        self._count = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        world = self._world
        world.pause()
        if self._reentrant and self._owner is world.current:
            self._count += 1
            return True
        until = self._until(timeout, blocking)
        while self._owner is not None and not world.ending:
            if world.now >= until:
                return False
            self._line.wait(until)
        self._owner, self._count = world.current, 1
        return True

    def release(self) -> None:
        self._count -= 1
        if not self._count:
            self._owner = None
            self._line.wake()
            self._world.pause()

    def release_all(self) -> None:
        """Release it however often it was taken."""
        self._count = 1
        self.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


class VirtualCondition(VirtualLock):
    """A condition variable, which is its own lock."""

    def __init__(self, world: World) -> None:
        super().__init__(world, reentrant=True)
        self._waiters = _Line(world)

    def wait(self, timeout: float | None = None) -> bool:
        until, count = self._until(timeout), self._count
        try:
            self._waiters.wait(until, self.release_all)
        finally:
            self.acquire()
            self._count = count
        return self._world.now < until

    def notify(self, n: int = 1) -> None:
        self._waiters.wake(n)

    def notify_all(self) -> None:
        self._waiters.wake()


class VirtualEvent(_Primitive):
    """An event."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._world.pause()
        self._set = True
        self._line.wake()
        self._world.pause()

    def wait(self, timeout: float | None = None) -> bool:
        self._world.pause()
        until = self._until(timeout)
        while not self._set and self._world.now < until:
            self._line.wait(until)
        return self._set


class VirtualQueue(_Primitive):
    """An unbounded queue, as `queue.SimpleQueue`; without items, a semaphore."""

    def __init__(self, world: World, count: int = 0) -> None:
        super().__init__(world)
        self._items: deque[Any] = deque([None] * count)

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._line.wake(1)
        self._world.pause()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        self._world.pause()
        until = self._until(timeout, block)
        while not self._items:
            if self._world.now >= until:
                raise queue.Empty
            self._line.wait(until)
        return self._items.popleft()

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        try:
            self.get(blocking, timeout)
        except queue.Empty:
            return False
        return True

    def release(self) -> None:
        self.put(None)


class VirtualThread(_Primitive):
    """A thread, as `threading.Thread`."""

    def __init__(
        self, world: World, target: Callable[..., object] = lambda: None, name: str = "", args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None, daemon: bool | None = None,
    ) -> None:  # fmt: skip
        super().__init__(world)
        self._work: Callable[[], object] | None = partial(target, *args, **(kwargs or {}))
        self._strand: Strand | None = None
        self._ended = False
        self.name = name

    @property
    def ident(self) -> int | None:
        return None if self._strand is None else self._strand.number

    def start(self) -> None:
        self._strand = self._world.spawn(self._run, self.name)
        self._strand.thread = self
        self._world.pause()

    def _run(self) -> None:
        work, self._work = self._work, None
        assert work is not None
        try:
            work()
        finally:
            del work
            self._ended = True
            self._line.wake()

    def is_alive(self) -> bool:
        return self._strand is not None and not self._ended

    def join(self, timeout: float | None = None) -> None:
        until = self._until(timeout)
        while self.is_alive() and self._world.now < until and not self._world.ending:
            self._line.wait(until)


class VirtualModule:
    """A module that has the world's things under some names, for the threads of the world."""

    def __init__(self, world: World, real: Any, **virtual: Callable[..., Any]) -> None:
        self._real = real
        for name, make in virtual.items():
            setattr(self, name, world.either(make, getattr(real, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def virtual_modules(world: World) -> dict[str, VirtualModule]:
    """The modules `threading`, `queue` and `time` of a world."""

    def now() -> float:
        return world.now

    return {
        "threading": VirtualModule(
            world,
            threading,
            Condition=partial(VirtualCondition, world),
            Event=partial(VirtualEvent, world),
            Lock=partial(VirtualLock, world),
            RLock=partial(VirtualLock, world, reentrant=True),
            Semaphore=partial(VirtualQueue, world),
            Thread=partial(VirtualThread, world),
            current_thread=lambda: world.current.thread or threading.current_thread(),
            get_ident=lambda: world.current.number,
            stack_size=lambda size=0: 0,
        ),
        "queue": VirtualModule(world, queue, SimpleQueue=partial(VirtualQueue, world)),
        "time": VirtualModule(world, time, monotonic=now, perf_counter=now, time=now, sleep=world.sleep),
    }
