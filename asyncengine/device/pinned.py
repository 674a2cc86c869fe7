"""Pinned host arrays, their copies to the device, and events: what is done outside of tensor arithmetic.

What a plan needs is one small object, so that the host half of a GPU backend can be tested where there is no GPU.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

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

    It goes through pinned memory of torch's caching allocator, which gives that to nobody else before the copy is done:
    `host` may change at once. From pageable memory a copy would wait for the device.
    """
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def upload(array: np.ndarray[tuple[int, ...], np.dtype[Any]], device: torch.device) -> torch.Tensor:
    """`array` on `device`, as `send` does it."""
    return send(torch.from_numpy(array), device)


class Event(Protocol):
    """A mark in the device's stream."""

    def record(self) -> None:
        """Put the mark behind all work queued so far."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has passed the mark."""
        ...


class DeviceMemory(Protocol):
    """What a plan needs of the device. Copies are queued in the current stream; nothing here waits for them."""

    device: torch.device

    def host(self, count: int) -> torch.Tensor:
        """A fresh int32 host array that can be copied without waiting."""
        ...

    def reserve(self, count: int) -> torch.Tensor:
        """A zeroed int32 device array."""
        ...

    def upload(self, source: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        """Queue a copy of `source` (of `host`) to a fresh device array, or to the front of `into`; returns the copy."""
        ...

    def event(self) -> Event:
        """A new event, not recorded yet."""
        ...

    def processors(self) -> int:
        """Streaming multiprocessors of the device."""
        ...


class _CudaEvent:
    """Recorded in the current stream of its device, whichever device is current."""

    def __init__(self, device: torch.device) -> None:
        kind: Any = torch.cuda.Event  # untyped in torch
        self._event = kind()
        self._device = device

    def record(self) -> None:
        self._event.record(torch.cuda.current_stream(self._device))

    def synchronize(self) -> None:
        self._event.synchronize()


class CudaMemory:
    """`DeviceMemory` of a CUDA device.

    Host arrays come from torch's pinned allocator, which hands memory out again only after the copies that read it
    have run; so arrays are made anew each time instead of being reused, and no copy can race with the next step.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def host(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.int32, pin_memory=True)

    def reserve(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int32, device=self.device)

    def upload(self, source: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        if into is None:
            return source.to(self.device, non_blocking=True)
        target = into[: source.numel()]
        target.copy_(source, non_blocking=True)
        return target

    def event(self) -> Event:
        return _CudaEvent(self.device)

    def processors(self) -> int:
        return int(torch.cuda.get_device_properties(self.device).multi_processor_count)
