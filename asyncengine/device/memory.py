"""How much memory is free: the machine's, the container's or the accelerator's."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from asyncengine.errors import OutOfMemory

_Made = TypeVar("_Made")

_SAID_WITHOUT_MEMORY = (
    "can't allocate memory",  # torch on CPU
    "CUDA error: out of memory",  # the driver's own allocations: modules, events, graphs
    "CUDA out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
_KERNEL_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""Sizes of oneDNN's own cache of compiled kernels and of the one that torch keeps beside it."""
_KERNELS = 128


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be taken on `device` without swapping or being killed."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    found = [value for value in (_system_free(), _cgroup_free()) if value is not None]
    return min(found) if found else 2**62


def is_out_of_memory(error: BaseException) -> bool:
    """Did an allocation fail, on whatever device and in whichever library?"""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(said in str(error) for said in _SAID_WITHOUT_MEMORY)


def release_cached(device: torch.device) -> None:
    """Give back what allocators keep for later: torch's on an accelerator, the C library's (glibc) elsewhere."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif sys.platform.startswith("linux"):
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def in_words(work: Callable[[], _Made], device: torch.device, what: str, helps: str) -> _Made:
    """`work()`. Where memory does not suffice for it, `OutOfMemory` says that `what` does not fit, and what `helps`.

    What `work` had taken by then is free again when the error arrives: it does not carry the frames that held it.
    """
    try:
        return work()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        told = str(error).strip().split("\n")[0]
    release_cached(device)
    free = free_bytes(device) / 2**20
    raise OutOfMemory(f"{what} does not fit on {device}, where {free:.0f} MiB are free now: {told} {helps}")


def bound_kernel_caches() -> None:
    """Keep fewer compiled CPU kernels than torch's default of 1,024 in each of two caches, unless the environment says.

    There is a kernel for every layer shape and number of tokens, a continuous batch has another number of tokens in
    every step, and each takes up to a megabyte: on mixed requests a nine-megabyte model grew by a gigabyte. With 128 it
    grows by 0.25 and is no slower. Read by torch at its first product; later changes have no effect.
    """
    for name in _KERNEL_CACHES:
        os.environ.setdefault(name, str(_KERNELS))


def _system_free() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):  # not known on this platform
        return None


def _cgroup_free() -> int | None:
    """What the container's limit leaves (cgroup v2, then v1); reclaimable page cache counts as free."""
    root = Path("/sys/fs/cgroup")
    for limit, usage, stat in (
        (root / "memory.max", root / "memory.current", root / "memory.stat"),
        (root / "memory/memory.limit_in_bytes", root / "memory/memory.usage_in_bytes", root / "memory/memory.stat"),
    ):
        try:
            most = limit.read_text().strip()
            if most == "max":
                return None
            cache = [int(line.split()[1]) for line in stat.read_text().splitlines() if line.startswith("inactive_file")]
            return max(int(most) - int(usage.read_text()) + (cache[0] if cache else 0), 0)
        except (OSError, ValueError):
            continue
    return None
