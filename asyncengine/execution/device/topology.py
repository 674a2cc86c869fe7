"""Cores and NUMA nodes of this machine, and shares of them to which threads and processes are bound.

Linux lists both under /sys/devices/system (its documentation: admin-guide/cputopology, ABI/stable/sysfs-devices-node).
On other systems there is one node with all cores, and nothing is bound.
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
    """A NUMA node: memory, and the cores that are near it."""

    number: int | None
    """The kernel's number of the node; None if the machine has one node."""
    cores: tuple[Core, ...]
    memory: int = 0
    """Bytes of its memory, used or free; 0: it has none, or the size is unknown."""


class Share(NamedTuple):
    """Cores that one process gets, and the memory near them."""

    cores: tuple[Core, ...]
    nodes: tuple[int, ...] = ()
    """Numbers of these cores' nodes that have memory; empty if the machine has one node."""
    memory: int = 0
    """Bytes of these nodes."""

    @property
    def cpus(self) -> set[int]:
        return {cpu for core in self.cores for cpu in core}


def memory_nodes(system: Path = _SYSTEM, usable: Collection[int] | None = None) -> list[MemoryNode]:
    """Nodes with cores that this thread may use, by number. `usable`: logical CPUs; None: those of the thread's
    affinity, which control groups and `taskset` restrict."""
    if usable is None:
        usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    usable_cpus = set(usable)
    with suppress(OSError):
        usable_cpus &= _listed(system / "cpu/online")
    folders = {int(path.name[4:]): path for path in (system / "node").glob("node[0-9]*")}
    nodes = []
    for number, folder in sorted(folders.items()):
        with suppress(OSError):
            if cpus := usable_cpus & _listed(folder / "cpulist"):
                node_number = number if len(folders) > 1 else None
                nodes.append(MemoryNode(node_number, _cores(system, cpus), _memory(folder)))
    return nodes or [MemoryNode(None, _cores(system, usable_cpus))]


def divide(nodes: Sequence[MemoryNode], shares: int | None) -> list[Share]:
    """Divide the cores into `shares` equal shares of neighbours; None: one share for each node. With more shares than
    cores, each share has one core, and some have the same."""
    if shares is None:
        return [_share([(node, core) for core in node.cores]) for node in nodes]
    cores = [(node, core) for node in nodes for core in node.cores]
    if shares > len(cores):
        return [_share([cores[index % len(cores)]]) for index in range(shares)]
    ends = [index * len(cores) // shares for index in range(shares + 1)]
    return [_share(cores[begin:end]) for begin, end in pairwise(ends)]


def bind(share: Share) -> None:
    """Bind this thread to the share's cores, and its allocations to their memory; threads and processes that it starts
    from now on inherit both. If the kernel denies one, that is logged and skipped: memory that a bound thread writes to
    first comes from its node anyway, as long as that has room."""
    if hasattr(os, "sched_setaffinity"):
        try:
            os.sched_setaffinity(0, share.cpus)
        except OSError as error:
            logger.warning("threads are not bound to CPUs %s: %s", sorted(share.cpus), error)
    if share.nodes and (reason := bind_memory(share.nodes)):
        logger.warning("memory is not bound to nodes %s: %s", list(share.nodes), reason)


def bind_memory(nodes: Collection[int]) -> str | None:
    """Restrict this thread's allocations to these nodes. Returns why that failed; None: it is done."""
    call = _SET_MEMPOLICY.get(platform.machine()) if sys.platform == "linux" else None
    if call is None:
        return "this system has no such call"
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (max(nodes) // bits + 1))()
    for node in nodes:
        mask[node // bits] |= 1 << node % bits
    length = ctypes.c_ulong(len(mask) * bits + 1)  # the kernel reads one bit less than this length
    refused = ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(call), ctypes.c_long(_MPOL_BIND), mask, length)
    return os.strerror(ctypes.get_errno()) if refused else None


def _share(cores: Sequence[tuple[MemoryNode, Core]]) -> Share:
    near = [node for node in dict.fromkeys(node for node, _ in cores) if node.number is not None and node.memory]
    numbers = tuple(node.number for node in near if node.number is not None)
    return Share(tuple(core for _, core in cores), numbers, sum(node.memory for node in near))


def _cores(system: Path, cpus: set[int]) -> tuple[Core, ...]:
    """The logical CPUs `cpus` grouped by core, in order."""
    cores: dict[Core, None] = {}
    for cpu in sorted(cpus):
        siblings = {cpu}
        for name in ("thread_siblings_list", "core_cpus_list"):  # old and new name of the same file
            with suppress(OSError):
                siblings |= _listed(system / f"cpu/cpu{cpu}/topology/{name}") & cpus
        cores[tuple(sorted(siblings))] = None
    return tuple(cores)


def _listed(path: Path) -> set[int]:
    """Numbers in a file of the form "0-3,8". Raises `OSError`."""
    ranges = [interval.split("-") for interval in path.read_text(encoding="ascii").strip().split(",") if interval]
    return {number for ends in ranges for number in range(int(ends[0]), int(ends[-1]) + 1)}


def _memory(folder: Path) -> int:
    with suppress(OSError):
        if match := re.search(r"MemTotal:\s*(\d+) kB", (folder / "meminfo").read_text(encoding="ascii")):
            return int(match[1]) * 1024
    return 0
