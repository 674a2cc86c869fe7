"""Between host and device without waiting: what a step sends, and how its results come back.

Host memory that is sent is pinned and comes from torch's caching allocator, which gives it to nobody else before the
copy is done. Results are copied on a stream of their own, behind an event, so that the next step's kernels do not queue
behind them; whoever wants them waits for a second event, on any thread.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch


def upload(array: np.ndarray[tuple[int, ...], np.dtype[Any]], device: torch.device) -> torch.Tensor:
    """`array` on `device`; on CPU the same memory."""
    host = torch.from_numpy(array)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def copy_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A stream for results; None where the device is the host."""
    stream: Any = torch.cuda.Stream
    return None if device.type == "cpu" else stream(device)


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Whatever names no device, streams and graphs above all, means this one."""
    return nullcontext() if device.type == "cpu" else torch.cuda.device(device)


class Readback:
    """The results of one step on their way to the host. `fetch` each, `send` once, `wait` before reading any."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        """`stream`: where copies run; None: the device is the host."""
        self._stream = stream
        self._arrived: torch.cuda.Event | None = None
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def ready(self) -> bool:
        """True: `wait` does not block."""
        return self._stream is None

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """A host tensor that holds `tensor` after `wait`."""
        if self._stream is None:
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._copies.append((host, tensor))
        return host

    def send(self) -> None:
        """Start copying, behind everything launched so far."""
        if self._stream is None:
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            for host, tensor in self._copies:
                host.copy_(tensor, non_blocking=True)
                tensor.record_stream(self._stream)
        self._copies.clear()
        self._arrived = self._stream.record_event()

    def wait(self) -> None:
        """Block, without the interpreter lock, until all is here."""
        if self._arrived is not None:
            self._arrived.synchronize()
