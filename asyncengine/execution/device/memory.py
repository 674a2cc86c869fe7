"""Free memory of the machine, the container or the accelerator, and errors for want of it."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import psutil
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
_OWN_GROUPS = Path("/proc/self/cgroup")
_GROUPS = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Layouts of control groups, second and first version: root, files of limit and usage, entry of reclaimable cache."""


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on `device` without swapping, an error or being killed."""
    return _least_free(device)[0]


def limited_by(device: torch.device) -> str:
    """The limit that leaves less free than the machine has, as text to follow a number of bytes; "" if none does."""
    return _least_free(device)[1]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error is a failed allocation, on any device and in any library."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or getattr(error, "errno", None) == errno.ENOMEM:
        return True
    return isinstance(error, RuntimeError) and any(said in str(error) for said in _SAID_WITHOUT_MEMORY)


def release_cached(device: torch.device) -> None:
    """Give back the free memory that allocators cache: torch's on a GPU, the C library's (glibc) elsewhere."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif sys.platform.startswith("linux"):
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def in_words(work: Callable[[], _Made], device: torch.device, subject: str, helps: str) -> _Made:
    """`work()`. If it runs out of memory, `OutOfMemory` says that `subject` does not fit, and what `helps`.

    The original error is not chained: its frames would keep the memory that `work` had allocated.
    """
    try:
        return work()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error).strip().split("\n")[0]
    release_cached(device)
    free, limit = _least_free(device)
    raise OutOfMemory(
        f"{subject} does not fit on {device}, where {free / 2**20:.0f} MiB are free now{limit}: {reason} {helps}"
    )


def bound_kernel_caches() -> None:
    """Keep fewer compiled oneDNN kernels than torch's default of 1,024 in each of two caches, unless the environment
    sets the sizes.

    There is a kernel for every layer shape and number of tokens, continuous batching changes the number of tokens in
    every step, and a kernel takes up to a megabyte: on mixed requests a nine-megabyte model grew by a gigabyte. With
    128 it grows by 0.25 GB and is no slower. Torch reads the sizes at its first product; later changes do nothing.
    """
    for name in _KERNEL_CACHES:
        os.environ.setdefault(name, str(_KERNELS))


def _least_free(device: torch.device) -> tuple[int, str]:
    """Free bytes, and the limit that makes them fewer than the machine has."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]), ""
    group = " (this process's control group leaves no more)"
    return min([(_machine_free(), ""), *_process_limits(), *((free, group) for free in _control_groups())])


def _machine_free() -> int:
    try:
        return int(psutil.virtual_memory().available)
    except OSError:  # Linux without /proc, as in a bare chroot
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _process_limits() -> Iterator[tuple[int, str]]:
    """Bytes that each set limit (`ulimit -v`, `-d`) leaves this process, with words for the limit."""
    try:
        import resource
    except ImportError:  # Windows
        return
    for limit, flag, field in ((resource.RLIMIT_AS, "v", "vms"), (resource.RLIMIT_DATA, "d", "data")):
        most = resource.getrlimit(limit)[0]
        if most != resource.RLIM_INFINITY:
            try:
                used = getattr(psutil.Process().memory_info(), field, 0)
            except (OSError, psutil.Error):  # no /proc
                used = 0
            yield max(most - used, 0), f" (ulimit -{flag} leaves no more)"


def _control_groups() -> Iterator[int]:
    """Bytes that each limit of this process's control groups leaves (v2 and v1): of its own group and of those above
    it, as far as a container sees them. Page cache that can be reclaimed counts as free."""
    try:
        lines = _OWN_GROUPS.read_text(encoding="utf-8").splitlines()
    except OSError:  # without /proc, the limits of the container's root group may still be readable
        lines = ["0::/", "0:memory:/"]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, limit, usage, cache = _GROUPS[1 if controllers else 0]
        own_group = root / path.lstrip("/")
        for group in [own_group, *own_group.parents][: len(own_group.parts) - len(root.parts) + 1]:
            try:
                stat = dict(entry.split() for entry in (group / "memory.stat").read_text(encoding="utf-8").splitlines())
                used = int((group / usage).read_text(encoding="utf-8")) - int(stat.get(cache, 0))
                yield max(int((group / limit).read_text(encoding="utf-8")) - used, 0)
            except (OSError, ValueError):  # no such group in this container, or "max"
                continue
