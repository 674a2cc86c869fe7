"""The memory of this machine that is free for a model: its host's, and that of each accelerator."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from asyncengine.device.memory import free_bytes


@dataclass(frozen=True, slots=True)
class Machine:
    """Bytes that are free now."""

    host_free: int
    devices_free: tuple[int, ...] = ()
    """Free bytes of each CUDA device, by index."""


def this_machine() -> Machine:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return Machine(
        free_bytes(torch.device("cpu")), tuple(free_bytes(torch.device("cuda", index)) for index in range(count))
    )
