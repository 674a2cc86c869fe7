"""The processes that compute one model together with the engine's own (tensor parallelism), as the engine sees them:
started, spoken to, watched, ended.

The engine's process is rank 0. It alone schedules and samples; before each forward pass it tells the others the pass's
inputs, and all compute it (`rank_worker`), exchanging results through shared memory (`device.shared_gather`). Each
other rank has two sockets: by one it is told what to do, in order; nothing is said on the other, whose end tells either
side that the other is gone, however it died. They are programs of their own, not forks and not `multiprocessing`'s,
which would run the caller's main module again.
"""

from __future__ import annotations

import json
import os
import pickle
import queue
import select
import socket
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from asyncengine.device.shared_gather import SharedGather, make_memory, missing
from asyncengine.errors import InvalidParameter
from asyncengine.kernels.compile_process import can_start
from asyncengine.runner.step_inputs import StepInputs
from asyncengine.step import RecordPart

_START = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "  # Ctrl-C is for the engine, which ends us
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from asyncengine.runner.rank_worker import main; main(*map(int, sys.argv[2:]))"
)
_MOMENT = 5.0
"""Seconds in which a process that was told to end should be gone."""


class _Rank(NamedTuple):
    """One other process."""

    rank: int
    program: subprocess.Popen[bytes]
    orders: Connection
    life: socket.socket


class Ranks:
    """Ranks 1 .. size - 1 of one model. They hold nothing before `begin`."""

    def __init__(self, size: int) -> None:
        """Raises `InvalidParameter` where there can be none."""
        reason = missing()
        if reason is None and not can_start():
            reason = "needs a program that is Python as such, which can start others"
        if reason is not None:
            raise InvalidParameter("tensor_parallel", reason, size)
        self.size = size
        memory = make_memory()
        others: list[_Rank] = []
        try:
            self.gather = SharedGather(memory, 0, size)
            for rank in range(1, size):
                others.append(_start(memory, rank, size))
        except BaseException:
            _end(others)
            raise
        finally:
            os.close(memory)
        self._others, self._sending = others, threading.Lock()
        self._closing = threading.Event()
        self._end = weakref.finalize(self, _end, others, self._closing)
        self._lost: queue.SimpleQueue[weakref.WeakMethod[Callable[[Exception], None]]] = queue.SimpleQueue()
        arguments = others, self.gather, self._closing, self._lost
        self._watcher = threading.Thread(target=_watch, args=arguments, name="asyncengine-ranks", daemon=True)
        self._watcher.start()

    def send(self, kind: str, *content: Any) -> None:
        """Tell all of them one thing, in order with everything else. From any thread. Raises `RuntimeError` if one is
        gone."""
        message = pickle.dumps((kind, content), pickle.HIGHEST_PROTOCOL)
        with self._sending, self._heard():
            for other in self._others:
                other.orders.send_bytes(message)

    def send_page(self, part: RecordPart, index: int, buffers: Sequence[memoryview]) -> None:
        """Tell all of them what a page or a state was filled with here."""
        self.send("page", part, index, [bytes(buffer) for buffer in buffers])

    def answers(self) -> list[Any]:
        """One answer of each, to the last thing that asks for one. Raises `RuntimeError` if one is gone, and what went
        wrong in one of them."""
        with self._heard():
            found = [other.orders.recv() for other in self._others]
        for answer in found:
            if isinstance(answer, BaseException):
                raise answer
        return found

    @contextmanager
    def _heard(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, OSError) as error:
            raise RuntimeError(self.gather.lost or "another rank of the model is gone") from error

    @contextmanager
    def computing(self, inputs: StepInputs) -> Iterator[None]:
        """Within, this process computes a forward pass that all others compute as well. One that fails here cannot be
        made again: the others are in the midst of it."""
        self.send("forward", inputs.packed())
        try:
            yield
        except BaseException as error:
            self.gather.break_off(f"rank 0 failed in a step: {error!r}")
            traceback.clear_frames(error.__traceback__)  # whoever keeps the error would keep shared memory
            if isinstance(error, Exception):
                raise RuntimeError(self.gather.lost) from error
            raise

    def along(self, own: Callable[[], None], kind: str, *content: Any) -> Callable[[], None]:
        """A function that calls `own` and has the others do the same by a message, and ends when all have."""

        def run() -> None:
            self.send(kind, *content)
            own()
            self.answers()

        return run

    def tell(self, failed: Callable[[Exception], None]) -> None:
        """Have a method `failed` called with an error, on another thread, once one of them is gone, while its object
        lives."""
        self._lost.put(weakref.WeakMethod(failed))

    def close(self) -> None:
        """End them, and wait until they are gone. Not while a pass is computed. Idempotent."""
        self._end()
        self._watcher.join()
        self.gather.close()


def _start(memory: int, rank: int, size: int) -> _Rank:
    """Start one process. Raises `OSError`."""
    (orders, its_orders), (life, its_life) = socket.socketpair(), socket.socketpair()
    with its_orders, its_life:
        given = its_orders.fileno(), its_life.fileno(), memory
        paths = json.dumps([os.path.abspath(path) for path in sys.path])
        try:
            program = subprocess.Popen(
                [sys.executable, "-P", "-c", _START, paths, *map(str, (rank, size, os.getpid(), *given))],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=given,
            )  # fmt: skip
        except BaseException:
            orders.close()
            life.close()
            raise
    return _Rank(rank, program, Connection(orders.detach()), life)


def _watch(
    others: Sequence[_Rank], gather: SharedGather, closing: threading.Event,
    listeners: queue.SimpleQueue[weakref.WeakMethod[Callable[[Exception], None]]],
) -> None:  # fmt: skip
    """Until the first of them is gone: then nobody waits for it, and `listeners` hear of it."""
    poll = select.poll()
    for other in others:
        poll.register(other.life, select.POLLIN)
    ended = {number for number, _ in poll.poll()}
    if closing.is_set():
        return
    for other in others:
        if other.life.fileno() in ended:
            last = other.life.recv(2**16).decode(errors="replace")
            process = f"rank {other.rank} of the model (process {other.program.pid})"
            gather.break_off(f"{process} failed: {last}" if last else f"{process} was killed or has ended")
    while not listeners.empty():
        if (failed := listeners.get()()) is not None:
            failed(RuntimeError(gather.lost))


def _end(others: Sequence[_Rank], closing: threading.Event | None = None) -> None:
    """The end of a life socket ends its process at once, whatever it is doing."""
    if closing is not None:
        closing.set()
    for other in others:
        with suppress(OSError):
            other.life.shutdown(socket.SHUT_RDWR)
        other.orders.close()
    for other in others:
        try:
            other.program.wait(_MOMENT)
        except subprocess.TimeoutExpired:
            other.program.kill()
            other.program.wait()
        other.life.close()
