"""Torch's settings of a thread that is somebody else's, for whoever is to launch kernels on it."""

from __future__ import annotations

from typing import Any

import torch

_C: Any = torch._C
"""torch has no public name for the modes that a thread is in."""


def is_plain_thread(device: torch.device) -> bool:
    """Are torch's settings for this thread those of a new one? A caller's coroutine may await within a stream, a
    default device, autocast or a mode that traces operators, and all else that its event loop runs is in it, too."""
    if _C._len_torch_function_stack() or _C._len_torch_dispatch_stack() or torch.is_autocast_enabled(device.type):
        return False
    return device.type != "cuda" or torch.cuda.current_stream(device) == torch.cuda.default_stream(device)
