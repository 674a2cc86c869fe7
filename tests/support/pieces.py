"""A stand-in for CUDA graphs in pieces: the work runs again, on a thread that stops where one piece ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue

import torch


class _Thread:
    """The work of all pieces of one size; whoever replays a piece lets it run on to that one's end."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.work = work
        self.cuts = 0
        self.running: threading.Thread | None = None
        self._go: SimpleQueue[None] = SimpleQueue()
        self._stopped: SimpleQueue[BaseException | None] = SimpleQueue()

    def replay(self, piece: int, last: bool) -> None:
        if piece == 0:
            assert self.running is None, "the last piece of the step before was not replayed"
            self.running = threading.Thread(target=self._run, daemon=True)
            self.running.start()
        assert self.running is not None
        self._go.put(None)
        error = self._stopped.get()
        if last:
            self.running.join()
            self.running = None
        if error is not None:
            raise error

    def _run(self) -> None:
        self._go.get()
        try:
            with torch.inference_mode():
                self.work()
            self._stopped.put(None)
        except BaseException as error:
            self._stopped.put(error)

    def cut(self) -> None:
        """Called where a piece ends."""
        self._stopped.put(None)
        self._go.get()


class _Piece:
    def __init__(self, owner: ThreadedPieces, thread: _Thread, number: int) -> None:
        self.owner, self.thread, self.number = owner, thread, number

    def replay(self) -> None:
        self.owner.replays += 1
        self.thread.replay(self.number, self.number == self.thread.cuts)


class _Capture:
    """A `PieceCapture`."""

    def __init__(self, owner: ThreadedPieces, thread: _Thread) -> None:
        self.owner, self.thread = owner, thread
        self.pieces: list[_Piece] = []

    def cut(self) -> None:
        if threading.current_thread() is self.thread.running:
            self.thread.cut()
        else:
            self.end()

    def end(self) -> None:
        self.thread.cuts = len(self.pieces)
        self.pieces.append(_Piece(self.owner, self.thread, self.thread.cuts))


class ThreadedPieces:
    """`prompt_graphs.Pieces`."""

    def __init__(self) -> None:
        self.captured = 0
        self.replays = 0

    @contextmanager
    def __call__(self, work: Callable[[], None]) -> Iterator[_Capture]:
        work()
        capture = _Capture(self, _Thread(work))
        yield capture
        capture.end()
        self.captured += len(capture.pieces)
