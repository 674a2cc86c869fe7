"""Kernels for NVIDIA GPUs, written in Triton (Tillet et al. 2019) and compiled when an engine first needs them.

The kernels' modules import triton and are themselves imported only where `triton_missing` finds nothing missing. Tests
run them on the CPU by Triton's interpreter (`TRITON_INTERPRET=1`), against torch's operations.
"""

from __future__ import annotations

import importlib.util

import torch


def triton_missing(device: torch.device) -> str | None:
    """Why Triton kernels cannot run on this device; None: they can."""
    if device.type != "cuda":
        return f"Triton kernels run on NVIDIA GPUs, not on {device.type}"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return None
