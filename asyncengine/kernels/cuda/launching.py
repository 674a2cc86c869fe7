"""How kernels are launched."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


@cache
def early(device: torch.device) -> dict[str, Any]:
    """Options of a kernel that may begin before the one before it has ended (programmatic dependent launch).

    It must wait (`gdc_wait`) before it touches what earlier kernels write or read; until then it may read weights.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0):
        return {"pdl": True, "launch_pdl": True}
    return {"pdl": False}
