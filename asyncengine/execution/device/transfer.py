"""Copies between host and device without waiting: a step's inputs, and its results.

Results are copied on a second stream, behind an event, so that the next step's kernels do not queue behind them; a
reader waits for a second event, on any thread.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

# Pinned host arrays, their copies to the device, and events. `CudaMemory` is all that a GPU backend's planning uses of
# CUDA, so that it can be tested without a GPU.

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Context in which this is the thread's current CUDA device, which streams and graphs use implicitly."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def send(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of `host` on `device`, queued in the current stream without waiting; on a CPU the same memory.

    It goes through pinned memory of torch's caching allocator, which does not reuse that before the copy is done, so
    `host` may change at once. A copy from pageable memory would wait for the device.
    """
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def upload(array: np.ndarray[tuple[int, ...], np.dtype[Any]], device: torch.device) -> torch.Tensor:
    """`array` on `device`, as `send` does it."""
    return send(torch.from_numpy(array), device)


def is_hopper(device: torch.device) -> bool:
    """Whether this is a GPU of compute capability 9, for which some kernels are compiled."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


class Event:
    """A mark in the current stream of its device, whichever device is current."""

    def __init__(self, device: torch.device) -> None:
        event_type: Any = torch.cuda.Event  # untyped in torch
        self._event = event_type()
        self._device = device

    def record(self) -> None:
        """Put the mark behind all work queued so far."""
        self._event.record(torch.cuda.current_stream(self._device))

    def synchronize(self) -> None:
        """Wait until the device has passed the mark."""
        self._event.synchronize()


class CudaMemory:
    """Memory operations of a CUDA device for plans. Copies are queued in the current stream without waiting. Tests have
    a stand-in on a CPU.

    Host arrays come from torch's pinned allocator, which reuses memory only after the copies that read it have run:
    every step takes a fresh array, and no copy can race with the next step.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def host(self, count: int) -> torch.Tensor:
        """A fresh int32 host array that can be copied without waiting."""
        return torch.empty(count, dtype=torch.int32, pin_memory=True)

    def reserve(self, count: int) -> torch.Tensor:
        """A zeroed int32 device array."""
        return torch.zeros(count, dtype=torch.int32, device=self.device)

    def upload(self, source: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        """Queue a copy of `source` (of `host`) to a fresh device array, or to the front of `into`; returns the copy."""
        if into is None:
            return source.to(self.device, non_blocking=True)
        target = into[: source.numel()]
        target.copy_(source, non_blocking=True)
        return target

    def event(self) -> Event:
        """A new event, not recorded yet."""
        return Event(self.device)

    def processors(self) -> int:
        """Streaming multiprocessors of the device."""
        return int(torch.cuda.get_device_properties(self.device).multi_processor_count)

    def hopper(self) -> bool:
        return is_hopper(self.device)


_TURNS = 3
"""Number of pinned arrays that are used in turn."""


class FixedInputs:
    """Device memory at a fixed address that one copy fills in each step, from pinned arrays used in turn.

    A pinned array is written again only after the event behind the copy that read it.
    """

    def __init__(self, memory: CudaMemory, count: int, kept: int = 0) -> None:
        """`count`: most int32 elements of a copy. `kept`: elements of `device` before these, which no copy touches."""
        self._memory = memory
        with torch.inference_mode(False):  # written in place inside of inference mode and outside
            self.device = memory.reserve(kept + count)
            """int32 [kept + count]"""
            self.sent = self.device[kept:]
            """int32 [count], the elements that copies fill."""
            self._hosts = [memory.host(count) for _ in range(_TURNS)]
        self._copied: list[Event | None] = [None] * _TURNS
        self._turn = 0

    def take(self) -> torch.Tensor:
        """The pinned int32 array that `send` will copy next, uninitialised."""
        self._turn = (self._turn + 1) % len(self._hosts)
        copied = self._copied[self._turn]
        if copied is not None:
            copied.synchronize()
        return self._hosts[self._turn]

    def send(self, count: int) -> None:
        """Queue the copy of the first `count` elements of the array that was taken last."""
        self._memory.upload(self._hosts[self._turn][:count], into=self.sent)
        copied = self._copied[self._turn] or self._memory.event()
        copied.record()
        self._copied[self._turn] = copied


_C: Any = torch._C
"""torch has no public name for the modes that a thread is in."""


def is_plain_thread(device: torch.device) -> bool:
    """Whether torch's settings of this thread are those of a new thread. If a caller's coroutine awaits within a
    stream, a default device, autocast or a mode that traces operators, everything else on its event loop runs in it."""
    if _C._len_torch_function_stack() or _C._len_torch_dispatch_stack() or torch.is_autocast_enabled(device.type):
        return False
    return device.type != "cuda" or torch.cuda.current_stream(device) == torch.cuda.default_stream(device)


def copy_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A stream for results; None if the device is the host.

    torch reuses 32 streams of each priority. Graphs are captured on streams of the default priority: with a high one
    here, no copy of another engine can land in a stream that is being captured.
    """
    stream: Any = torch.cuda.Stream
    return None if device.type == "cpu" else stream(device, priority=-1)


class Readback:
    """The results of one step on their way to the host: `fetch` each, `send` once, `wait` before reading any.

    Device tensors are referenced until they have been copied: another stream could reuse their memory before.
    """

    def __init__(self, stream: torch.cuda.Stream | None, used: list[torch.Tensor] | None = None) -> None:
        """`stream`: where copies run; None: the device is the host. `used`: free pinned arrays for `fetch_now`, which a
        runner's steps share."""
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
        """The same for memory that the next step overwrites, and that always has this size: it is copied in the steps'
        own stream, into host memory that is reused after `release`."""
        if self._stream is None:
            return tensor.clone()
        self._host = self._used.pop() if self._used else torch.empty(len(tensor), dtype=tensor.dtype, pin_memory=True)
        return self._host.copy_(tensor, non_blocking=True)

    def release(self) -> None:
        """Free the memory that `fetch_now` returned, once it has been read."""
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
        """Block, without the interpreter lock, until all results have arrived."""
        if self._arrived is not None:
            self._arrived.synchronize()
            self._copies.clear()
