"""Cores and memory nodes of this machine, and shares of them to which threads and processes are bound.

Linux tells both under /sys/devices/system (its documentation: admin-guide/cputopology, ABI/stable/sysfs-devices-node).
Elsewhere there is one node with all cores, and nothing is bound.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import re
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

logger = logging.getLogger("asyncengine")

_SYSTEM = Path("/sys/devices/system")
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237, "riscv64": 237, "ppc64le": 261, "s390x": 269}
"""Numbers of the system call by architecture: the C library has no function for it, and libnuma is seldom there."""
_MPOL_BIND = 2

Core = tuple[int, ...]
"""Numbers of the logical CPUs of one core that this process may use."""


class MemoryNode(NamedTuple):
    """Memory, and the cores for which it is near."""

    number: int | None
    """Number by which the kernel knows it; None where there is but one."""
    cores: tuple[Core, ...]
    memory: int = 0
    """Bytes of it, used or free; 0: it has none, or the system does not tell."""


class Share(NamedTuple):
    """Cores that one process gets, and the memory near them."""

    cores: tuple[Core, ...]
    nodes: tuple[int, ...] = ()
    """Memory nodes of these cores; none where there is but one, or none with memory."""
    memory: int = 0
    """Bytes of these nodes."""

    @property
    def cpus(self) -> set[int]:
        return {cpu for core in self.cores for cpu in core}


def memory_nodes(system: Path = _SYSTEM, usable: Collection[int] | None = None) -> list[MemoryNode]:
    """Memory nodes with cores that this thread may use, by number. `usable`: its logical CPUs, if not as the kernel
    says (control groups and `taskset` restrict them)."""
    if usable is None:
        usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    here = set(usable)
    with suppress(OSError):
        here &= _listed(system / "cpu/online")
    folders = {int(path.name[4:]): path for path in (system / "node").glob("node[0-9]*")}
    found = []
    for number, folder in sorted(folders.items()):
        with suppress(OSError):
            if cpus := here & _listed(folder / "cpulist"):
                known = number if len(folders) > 1 else None
                found.append(MemoryNode(known, _cores(system, cpus), _memory(folder)))
    return found or [MemoryNode(None, _cores(system, here))]


def divide(nodes: Sequence[MemoryNode], shares: int | None) -> list[Share]:
    """Cores in `shares` equal parts, neighbours together; None: a share for each node. Of more shares than cores, each
    has one core that others have as well."""
    if shares is None:
        return [_share([(node, core) for core in node.cores]) for node in nodes]
    cores = [(node, core) for node in nodes for core in node.cores]
    if shares > len(cores):
        return [_share([cores[index % len(cores)]]) for index in range(shares)]
    ends = [index * len(cores) // shares for index in range(shares + 1)]
    return [_share(cores[begin:end]) for begin, end in pairwise(ends)]


def bind(share: Share) -> None:
    """Bind this thread to the share: its steps to these cores, and what it allocates to their memory. So are all
    threads and processes that it starts from now on. What the kernel denies is logged, and left out: memory that a
    bound thread writes to first is on its node anyway, as long as that has room."""
    if hasattr(os, "sched_setaffinity"):
        try:
            os.sched_setaffinity(0, share.cpus)
        except OSError as error:
            logger.warning("threads are not bound to CPUs %s: %s", sorted(share.cpus), error)
    if share.nodes and (reason := bind_memory(share.nodes)):
        logger.warning("memory is not bound to nodes %s: %s", list(share.nodes), reason)


def bind_memory(nodes: Collection[int]) -> str | None:
    """Have what this thread allocates come from these nodes alone. The reason for which it does not; None: it does."""
    call = _SET_MEMPOLICY.get(platform.machine()) if sys.platform == "linux" else None
    if call is None:
        return "this system has no such call"
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (max(nodes) // bits + 1))()
    for node in nodes:
        mask[node // bits] |= 1 << node % bits
    length = ctypes.c_ulong(len(mask) * bits + 1)  # the kernel takes off one
    refused = ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(call), ctypes.c_long(_MPOL_BIND), mask, length)
    return os.strerror(ctypes.get_errno()) if refused else None


def _share(cores: Sequence[tuple[MemoryNode, Core]]) -> Share:
    near = [node for node in dict.fromkeys(node for node, _ in cores) if node.number is not None and node.memory]
    numbers = tuple(node.number for node in near if node.number is not None)
    return Share(tuple(core for _, core in cores), numbers, sum(node.memory for node in near))


def _cores(system: Path, cpus: set[int]) -> tuple[Core, ...]:
    """The logical CPUs by cores, in order."""
    found: dict[Core, None] = {}
    for cpu in sorted(cpus):
        core = {cpu}
        for name in ("thread_siblings_list", "core_cpus_list"):  # the newer name says the same
            with suppress(OSError):
                core |= _listed(system / f"cpu/cpu{cpu}/topology/{name}") & cpus
        found[tuple(sorted(core))] = None
    return tuple(found)


def _listed(path: Path) -> set[int]:
    """Numbers in a file of the form "0-3,8". Raises `OSError`."""
    ranges = [part.split("-") for part in path.read_text(encoding="ascii").strip().split(",") if part]
    return {number for ends in ranges for number in range(int(ends[0]), int(ends[-1]) + 1)}


def _memory(folder: Path) -> int:
    with suppress(OSError):
        if found := re.search(r"MemTotal:\s*(\d+) kB", (folder / "meminfo").read_text(encoding="ascii")):
            return int(found[1]) * 1024
    return 0
