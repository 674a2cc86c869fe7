"""Kernels for CPUs, compiled from Python when an engine first needs them (numba), then cached on disk.

The kernels' modules import numba and are themselves imported only where `compiler_missing` finds nothing missing.
"""

from __future__ import annotations

import importlib.util

import torch


def compiler_missing(dtype: torch.dtype, device: torch.device) -> str | None:
    """Why compiled kernels cannot serve tensors of this type here; None: they can."""
    if device.type != "cpu":
        return f"compiled kernels run on the CPU, not on {device.type}"
    if dtype not in (torch.bfloat16, torch.float32):
        return f"compiled kernels read bfloat16 and float32, not {str(dtype).removeprefix('torch.')}"
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed"
    return None
