"""Copies between host and device without waiting: a step's inputs, and its results.

Results are copied on a second stream, behind an event, so that the next step's kernels do not queue behind them; a
reader waits for a second event, on any thread.
"""

from __future__ import annotations

from typing import Any

import torch

from asyncengine.execution.device.pinned import on_device, send, upload

__all__ = ["Readback", "copy_stream", "is_plain_thread", "on_device", "send", "upload"]


_C: Any = torch._C
"""torch has no public name for the modes that a thread is in."""


def is_plain_thread(device: torch.device) -> bool:
    """Are torch's settings for this thread those of a new one? A caller's coroutine may await within a stream, a
    default device, autocast or a mode that traces operators, and all else that its event loop runs is in it, too."""
    if _C._len_torch_function_stack() or _C._len_torch_dispatch_stack() or torch.is_autocast_enabled(device.type):
        return False
    return device.type != "cuda" or torch.cuda.current_stream(device) == torch.cuda.default_stream(device)


def copy_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A stream for results; None where the device is the host.

    torch hands out the same 32 streams of a priority in turns. Graphs are captured on streams of the default priority:
    with this one, no copy of another engine can land in a stream that is being captured.
    """
    stream: Any = torch.cuda.Stream
    return None if device.type == "cpu" else stream(device, priority=-1)


class Readback:
    """The results of one step on their way to the host. `fetch` each, `send` once, `wait` before reading any.

    What is copied is kept until it has arrived: only then may its memory be reused, by a stream that
    knows nothing of this one.
    """

    def __init__(self, stream: torch.cuda.Stream | None, used: list[torch.Tensor] | None = None) -> None:
        """`stream`: where copies run; None: the device is the host. `used`: pinned arrays of `fetch_now` that are read
        no more; a runner's results share them."""
        self._stream = stream
        self._arrived: Any = None  # untyped in torch
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._used = [] if used is None else used
        self._host: torch.Tensor | None = None

    @property
    def ready(self) -> bool:
        """True: `wait` does not block."""
        return self._stream is None or (self._arrived is not None and self._arrived.query())

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """A host tensor that holds `tensor` after `wait`."""
        if self._stream is None:
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._copies.append((host, tensor))
        return host

    def fetch_now(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same for memory that the next step overwrites, always of this size: it is copied in the stream of the
        steps, into host memory that is used again after `release`."""
        if self._stream is None:
            return tensor.clone()
        self._host = self._used.pop() if self._used else torch.empty(len(tensor), dtype=tensor.dtype, pin_memory=True)
        return self._host.copy_(tensor, non_blocking=True)

    def release(self) -> None:
        """Give back the memory that `fetch_now` returned, once it has been read."""
        if self._host is not None:
            self._used.append(self._host)
        self._host = None

    def send(self) -> None:
        """Start copying, behind everything launched so far."""
        if self._stream is None:
            return
        steps = stream = torch.cuda.current_stream(self._stream.device)
        if self._copies:
            stream = self._stream
            stream.wait_stream(steps)
            with torch.cuda.stream(stream):
                for host, tensor in self._copies:
                    host.copy_(tensor, non_blocking=True)
        event: Any = torch.cuda.Event  # untyped in torch
        self._arrived = stream.record_event(event(blocking=True))  # else waiting burns a core

    def wait(self) -> None:
        """Block, without the interpreter lock, until all is here."""
        if self._arrived is not None:
            self._arrived.synchronize()
            self._copies.clear()
