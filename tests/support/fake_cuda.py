"""`torch.cuda`'s streams, events and graphs without a device: names, order, and what must not be done meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

CUDA = torch.device("cuda", 0)


class FakeStream:
    """Streams of one number are one stream."""

    def __init__(self, cuda: FakeCuda, number: int) -> None:
        self.cuda, self.number = cuda, number
        self.device = CUDA

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FakeStream) and other.number == self.number

    def __hash__(self) -> int:
        return self.number

    def wait_stream(self, other: FakeStream) -> None:
        self.cuda.log.append(f"{self.number} waits for {other.number}")

    def record_event(self, event: Any = None) -> Any:
        return event


class FakeEvent:
    def __init__(self, blocking: bool = False) -> None:
        self.blocking = blocking
        self.waited = 0

    def synchronize(self) -> None:
        self.waited += 1

    def query(self) -> bool:
        return self.waited > 0


class FakeGraph:
    """`torch.cuda.CUDAGraph`."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda

    def capture_begin(self, pool: Any, capture_error_mode: str, **_: Any) -> None:
        assert capture_error_mode == "thread_local"
        self.cuda.capturing += 1
        assert self.cuda.capturing == 1, "two captures at once"
        self.cuda.log.append(f"capture on {self.cuda.current().number}")

    def capture_end(self) -> None:
        self.cuda.capturing -= 1
        if self.cuda.broken:
            raise RuntimeError("operation failed due to a previous error during capture")


class FakeCuda:
    """A replacement of `torch.cuda`. Streams come from a pool of `streams` numbers, in turns; 0 is the first of all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, streams: int = 32) -> None:
        self.log: list[str] = []
        self.made = 0
        self.capturing = 0
        self.broken = False
        self._streams = streams
        self._current = threading.local()
        replaced = {
            "Stream": self.stream, "Event": FakeEvent, "CUDAGraph": lambda: FakeGraph(self), "stream": self.on,
            "current_stream": lambda *_: self.current(), "set_stream": self.set, "synchronize": self.synchronize,
            "empty_cache": lambda: None, "graph_pool_handle": lambda: (0, 1),
        }  # fmt: skip
        for name, value in replaced.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)

    def stream(self, device: Any = None, priority: int = 0) -> FakeStream:
        self.made += 1
        return FakeStream(self, (self.made - 1) % self._streams + 1 - 100 * priority)

    def current(self) -> FakeStream:
        return getattr(self._current, "stream", FakeStream(self, 0))

    def set(self, stream: FakeStream) -> None:
        self._current.stream = stream

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        before = self.current()
        self.set(stream)
        yield  # like torch's, whose exit is not reached when a capture cannot be ended
        self.set(before)

    def synchronize(self, *_: Any) -> None:
        assert not self.capturing, "the whole device is waited for while somebody captures"
