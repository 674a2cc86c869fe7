"""Pinned host arrays, their copies to the device, and events: the work outside of tensor arithmetic.

What a plan needs is one small object, so that the host half of a GPU backend can be tested where there is no GPU.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Whatever names no device, streams and graphs above all, means this one. Each thread has a current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def send(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`host` on `device`, behind what is queued there and without waiting for it; on CPU the same memory.

    It goes through pinned memory of torch's caching allocator, which does not reuse it before the copy is done:
    `host` may change at once. From pageable memory a copy would wait for the device.
    """
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def upload(array: np.ndarray[tuple[int, ...], np.dtype[Any]], device: torch.device) -> torch.Tensor:
    """`array` on `device`, as `send` does it."""
    return send(torch.from_numpy(array), device)


def is_hopper(device: torch.device) -> bool:
    """Whether this is a GPU of compute capability 9: some kernels are compiled for that alone."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


class Event:
    """A mark in the current stream of its device, whichever device is current."""

    def __init__(self, device: torch.device) -> None:
        kind: Any = torch.cuda.Event  # untyped in torch
        self._event = kind()
        self._device = device

    def record(self) -> None:
        """Put the mark behind all work queued so far."""
        self._event.record(torch.cuda.current_stream(self._device))

    def synchronize(self) -> None:
        """Wait until the device has passed the mark."""
        self._event.synchronize()


class CudaMemory:
    """The operations on the memory of a CUDA device that a plan needs. Copies are queued in the current stream; nothing
    here waits for them. Tests have a stand-in on a CPU.

    Host arrays come from torch's pinned allocator, which hands memory out again only after the copies that read it
    have run; so arrays are made anew each time instead of being reused, and no copy can race with the next step.
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
"""Pinned arrays that are used in turns."""


class FixedInputs:
    """Device memory at a fixed address that one copy a step fills anew, from pinned arrays used in turns.

    A pinned array is written again once the copy that read it has run: an event behind each copy says when.
    """

    def __init__(self, memory: CudaMemory, count: int, kept: int = 0) -> None:
        """`count`: int32 elements sent at most. `kept`: those before them in `device`, which no copy touches."""
        self._memory = memory
        with torch.inference_mode(False):  # written in place inside of inference mode and outside
            self.device = memory.reserve(kept + count)
            """int32 [kept + count]"""
            self.sent = self.device[kept:]
            """The part that is sent: int32 [count]."""
            self._hosts = [memory.host(count) for _ in range(_TURNS)]
        self.used = 0
        """Elements that were sent last."""
        self._copied: list[Event | None] = [None] * _TURNS
        self._turn = 0

    def take(self) -> torch.Tensor:
        """The pinned int32 array that `send` will copy next; what it holds is arbitrary."""
        self._turn = (self._turn + 1) % len(self._hosts)
        copied = self._copied[self._turn]
        if copied is not None:
            copied.synchronize()
        return self._hosts[self._turn]

    def send(self, count: int) -> None:
        """Queue the copy of the first `count` elements of what was taken last."""
        self._memory.upload(self._hosts[self._turn][:count], into=self.sent)
        self.used = count
        copied = self._copied[self._turn] or self._memory.event()
        copied.record()
        self._copied[self._turn] = copied
