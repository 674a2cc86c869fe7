"""Cores and memory nodes as /sys tells of them, their division among processes, and what the kernel makes of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from asyncengine.execution.device.topology import MemoryNode, Share, divide, memory_nodes

GIB = 2**30


def machine(system: Path, nodes: dict[int, str], online: str, cores: list[str], memory: int = GIB) -> Path:
    """Files of the kernel: `nodes` with their CPUs, CPUs `online`, and the CPUs of each core."""
    for number, cpus in nodes.items():
        folder = system / f"node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cpus}\n")
        (folder / "meminfo").write_text(f"Node {number} MemTotal:  {memory // 1024} kB\nNode {number} MemFree: 5 kB\n")
    (system / "cpu").mkdir(parents=True)
    (system / "cpu/online").write_text(f"{online}\n")
    for core in cores:
        for cpu in core.split(","):
            topology = system / f"cpu/cpu{cpu}/topology"
            topology.mkdir(parents=True)
            (topology / "core_cpus_list").write_text(f"{core}\n")
    return system


def test_two_nodes_of_cores_with_two_threads_each(tmp_path: Path) -> None:
    """Most servers number their cores so: the second threads come last, and nodes take turns where firmware says so."""
    system = machine(tmp_path, {0: "0,2,4,6", 1: "1,3,5,7"}, "0-7", ["0,4", "1,5", "2,6", "3,7"])
    nodes = memory_nodes(system, range(8))
    assert nodes == [MemoryNode(0, ((0, 4), (2, 6)), GIB), MemoryNode(1, ((1, 5), (3, 7)), GIB)]
    each = [Share(((0, 4), (2, 6)), (0,), GIB), Share(((1, 5), (3, 7)), (1,), GIB)]
    assert divide(nodes, None) == divide(nodes, 2) == each
    assert each[1].cpus == {1, 3, 5, 7}
    assert divide(nodes, 1) == [Share(((0, 4), (2, 6), (1, 5), (3, 7)), (0, 1), 2 * GIB)]
    first, both, last = divide(nodes, 3)
    assert [first.cores, both.cores, last.cores] == [((0, 4),), ((2, 6),), ((1, 5), (3, 7))]
    assert [share.cores for share in divide(nodes, 5)] == [((0, 4),), ((2, 6),), ((1, 5),), ((3, 7),), ((0, 4),)]


def test_only_what_this_process_may_use(tmp_path: Path) -> None:
    """A control group or `taskset` leaves some CPUs, and halves of cores."""
    system = machine(tmp_path, {0: "0,2,4,6", 1: "1,3,5,7"}, "0-7", ["0,4", "1,5", "2,6", "3,7"])
    assert memory_nodes(system, {5, 1, 3}) == [MemoryNode(1, ((1, 5), (3,)), GIB)]
    assert memory_nodes(system, {2, 7}) == [MemoryNode(0, ((2,),), GIB), MemoryNode(1, ((7,),), GIB)]


def test_one_node_has_no_number_and_no_files_are_one_node(tmp_path: Path) -> None:
    assert memory_nodes(machine(tmp_path / "one", {0: "0-1"}, "0-1", []), {0, 1}) == [
        MemoryNode(None, ((0,), (1,)), GIB)
    ]
    assert memory_nodes(tmp_path / "none", {4, 2}) == [MemoryNode(None, ((2,), (4,)))]
    assert divide(memory_nodes(tmp_path / "none", {4, 2}), None) == [Share(((2,), (4,)))]


BOUND = """
import ctypes, os, sys, threading
from asyncengine.execution.device.topology import Share, bind, memory_nodes
cpu = min(os.sched_getaffinity(0))

def work():
    bind(Share(((cpu,),), (0,)))
    os.system(f"{sys.executable} -c '{sys.argv[1]}'")

thread = threading.Thread(target=work)
thread.start()
thread.join()
print(len(os.sched_getaffinity(0)))
"""
SEEN = 'import os; print(len(os.sched_getaffinity(0)), any("bind:0" in line for line in open("/proc/self/numa_maps")))'


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system binds nothing")
def test_what_a_bound_thread_starts_is_bound_and_other_threads_are_not() -> None:
    run = subprocess.run([sys.executable, "-c", BOUND, SEEN], capture_output=True, text=True, check=True)
    cpus, memory, others = run.stdout.split()
    assert (cpus, others) == ("1", str(len(os.sched_getaffinity(0))))
    assert (
        memory == "True"
        or "memory is not bound to nodes [0]" in run.stderr
        or not Path("/proc/self/numa_maps").exists()
    )
