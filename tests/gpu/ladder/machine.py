"""The machine, and what it can do at best: the copy bandwidth and matrix rate that others are measured by."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from asyncengine.kernels.compile_ahead import usable_cpus

from .session import Session, flashinfer_missing

BANDWIDTH = "copy bandwidth"
MATRIX_RATE = "bf16 matrix rate"
PACKAGES = ("asyncengine", "torch", "transformers", "flashinfer-python", "nvidia-cutlass-dsl", "triton", "numpy")
_ROUNDS = 3


def run(session: Session) -> None:
    session.report.facts.update(facts(session))
    if session.device.type == "cuda":
        session.line(flashinfer())
    size, width = (2**31, 8192) if session.device.type == "cuda" else (2**24, 128)
    session.figure(
        BANDWIDTH, copy_bandwidth(session.device, size) / 1e9, "GB/s",
        note="bytes read plus bytes written by a device copy",
    )  # fmt: skip
    session.figure(MATRIX_RATE, matrix_rate(session.device, width) / 1e12, "TFLOP/s")


def flashinfer() -> str:
    """Its version, or why it cannot be used, and compilers that it lacks."""
    if (missing := flashinfer_missing()) is not None:
        return missing
    lacking = [name for name, path in compilers().items() if path is None]
    note = f"; no {' and no '.join(lacking)}: kernels that are not in its cache cannot be compiled" if lacking else ""
    return f"FlashInfer {importlib.metadata.version('flashinfer-python')}{note}"


def compilers() -> dict[str, str | None]:
    """Compilers that FlashInfer uses, and the paths where it looks for them."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    folders = [os.environ.get("PATH", os.defpath), "/usr/local/cuda/bin"]
    nvcc = shutil.which("nvcc", path=f"{home}/bin") if home else shutil.which("nvcc", path=os.pathsep.join(folders))
    return {"ninja": shutil.which("ninja"), "nvcc": nvcc}


def facts(session: Session) -> dict[str, Any]:
    """Everything that a figure is worth nothing without."""
    found: dict[str, Any] = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "seed": session.settings.seed,
        "quick": session.settings.quick,
        "device": str(session.device),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": usable_cpus(),
        "cuda": torch.version.cuda or "none",
        "driver": driver_version(),
    }
    if session.device.type == "cuda":
        properties = torch.cuda.get_device_properties(session.device)
        found["device"] = properties.name
        found["memory"] = f"{properties.total_memory / 2**30:.0f} GiB"
        found["capability"] = f"{properties.major}.{properties.minor}"
        found["processors"] = properties.multi_processor_count
    found.update({name: path or "missing" for name, path in compilers().items()})
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def driver_version(file: Path = Path("/proc/driver/nvidia/version")) -> str:
    """Version of the kernel module; "unknown" where it does not say."""
    try:
        words = file.read_text(encoding="utf-8").splitlines()[0].split()
    except (OSError, IndexError):
        return "unknown"
    return next((word for word in words if word[0].isdigit() and "." in word), "unknown")


def copy_bandwidth(device: torch.device, size: int, repeat: int = 20) -> float:
    """Bytes per second, read and written, of copying `size` bytes on the device; the best of a few rounds."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / seconds_of(lambda: target.copy_(source), device, repeat)


def matrix_rate(device: torch.device, size: int, repeat: int = 20) -> float:
    """Floating-point operations per second of a square bfloat16 product."""
    left = torch.randn((size, size), device=device).to(torch.bfloat16)
    right = torch.randn((size, size), device=device).to(torch.bfloat16)
    out = torch.empty_like(left)
    return 2 * size**3 / seconds_of(lambda: torch.mm(left, right, out=out), device, repeat)


def seconds_of(work: Callable[[], Any], device: torch.device, repeat: int) -> float:
    """Seconds of one `work` on the device, by the best of a few rounds of `repeat`, after a warm-up."""
    work()
    best = float("inf")
    for _ in range(_ROUNDS):
        wait_for(device)
        began = time.perf_counter()
        for _ in range(repeat):
            work()
        wait_for(device)
        best = min(best, (time.perf_counter() - began) / repeat)
    return best


def wait_for(device: torch.device) -> None:
    """Until the device has done all that was queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
