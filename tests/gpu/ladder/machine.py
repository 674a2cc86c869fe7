"""The machine, and what it can do at best: the copy bandwidth and matrix rate that others are measured by."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from asyncengine.execution.attention.flashinfer import load_flashinfer

from .session import Session

BANDWIDTH = "copy bandwidth"
PACKAGES = ("asyncengine", "torch", "transformers", "flashinfer-python", "nvidia-cutlass-dsl", "triton", "numpy")
_ROUNDS, _REPEATS = 3, 20


def run(session: Session) -> None:
    session.facts.update(facts(session))
    if session.device.type == "cuda":
        session.line(flashinfer_missing() or f"FlashInfer {session.facts['flashinfer-python']}")
    size, width = (2**31, 8192) if session.device.type == "cuda" else (2**24, 128)
    source = torch.ones(size, dtype=torch.uint8, device=session.device)
    target = torch.empty_like(source)
    rate = 2 * size / seconds_of(lambda: target.copy_(source), session.device)
    session.figure(BANDWIDTH, rate / 1e9, "GB/s", note="bytes read plus bytes written by a device copy")
    left, right = torch.randn((2, width, width), device=session.device).to(torch.bfloat16)
    rate = 2 * width**3 / seconds_of(lambda: torch.mm(left, right), session.device)
    session.figure("bf16 matrix rate", rate / 1e12, "TFLOP/s")


def flashinfer_missing() -> str | None:
    """Say why FlashInfer cannot be imported; None: it can."""
    if importlib.util.find_spec("flashinfer") is None:
        return "flashinfer is not installed: pip install 'asyncengine[cuda]'"
    try:
        load_flashinfer()
    except Exception as error:  # it touches compilers, drivers and the home directory on import
        return f"importing flashinfer failed: {type(error).__name__}: {error}"
    return None


def facts(session: Session) -> dict[str, Any]:
    """Everything that a figure is worth nothing without."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    driver = Path("/proc/driver/nvidia/version")
    found: dict[str, Any] = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), "seed": session.seed, "quick": session.quick,
        "device": str(session.device), "python": platform.python_version(), "platform": platform.platform(),
        "cpus": len(os.sched_getaffinity(0)), "cuda": torch.version.cuda or "none",
        "driver": driver.read_text(encoding="utf-8").partition("\n")[0] if driver.exists() else "unknown",
        "ninja": shutil.which("ninja") or "missing",
        "nvcc": shutil.which("nvcc", path=f"{home}/bin{os.pathsep}{os.environ.get('PATH', os.defpath)}") or "missing",
    }  # fmt: skip
    if session.device.type == "cuda":
        properties = torch.cuda.get_device_properties(session.device)
        found |= {
            "device": properties.name, "memory": f"{properties.total_memory / 2**30:.0f} GiB",
            "capability": f"{properties.major}.{properties.minor}", "processors": properties.multi_processor_count,
        }  # fmt: skip
    installed = {each.metadata["Name"]: each.version for each in importlib.metadata.distributions()}
    return found | {name: installed.get(name, "not installed") for name in PACKAGES}


def seconds_of(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one `work` on the device, by the best of a few rounds, after a warm-up."""
    work()
    best = float("inf")
    for _ in range(_ROUNDS):
        wait_for(device)
        began = time.perf_counter()
        for _ in range(_REPEATS):
            work()
        wait_for(device)
        best = min(best, (time.perf_counter() - began) / _REPEATS)
    return best


def wait_for(device: torch.device) -> None:
    """Until the device has done all that was queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
