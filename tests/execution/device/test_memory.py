"""Memory that kernels keep, errors of allocations that fail, and bytes that the system and its limits leave free."""

from __future__ import annotations

import errno
import re
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from support import forked

from asyncengine.errors import OutOfMemory
from asyncengine.execution.device import memory
from asyncengine.execution.device.memory import free_bytes, in_words, is_out_of_memory, limited_by

CPU = torch.device("cpu")
GIB = 2**30


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (MemoryError(), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),  # a file that cannot be mapped
        (OSError(errno.ENOENT, "No such file"), False),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."), True),
        (torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be ..."), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"), True),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"), False),
        (ValueError("CUDA out of memory"), False),
    ],
)
def test_what_failing_allocations_say(error: Exception, verdict: bool) -> None:
    assert is_out_of_memory(error) is verdict


def test_other_errors_keep_their_own_words() -> None:
    def work() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        in_words(work, torch.device("cpu"), "it", "Nothing helps.")
    assert in_words(lambda: 3, torch.device("cpu"), "it", "") == 3


def test_an_error_in_words_holds_nothing() -> None:
    class Large:
        pass

    kept: list[weakref.ref[Large]] = []

    def work() -> None:
        held = Large()
        kept.append(weakref.ref(held))
        raise MemoryError

    with pytest.raises(OutOfMemory, match=r"the model does not fit on cpu, where .* Take less\.") as raised:
        in_words(work, torch.device("cpu"), "the model", "Take less.")
    assert kept[0]() is None, "whoever tries again with less while the error is handled has to have the memory"
    assert raised.value.__traceback__ is not None


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine of 8 free GiB without limits; the folder of its control groups."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=8 * GIB))
    monkeypatch.setattr(memory, "_process_limits", lambda: iter(()))
    monkeypatch.setattr(memory, "_OWN_GROUPS", tmp_path / "own")
    roots = zip((tmp_path / "v2", tmp_path / "v1"), memory._GROUPS, strict=True)
    monkeypatch.setattr(memory, "_GROUPS", tuple((root, *names) for root, (_, *names) in roots))
    return tmp_path


def limit(group: Path, files: tuple[str, str, str], most: str, used: int, cache: int) -> None:
    group.mkdir(parents=True)
    (group / files[0]).write_text(most + "\n")
    (group / files[1]).write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"anon 5\n{files[2]} {cache}\n")


V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def test_what_is_free_is_what_the_system_says(machine: Path) -> None:
    """All systems that psutil knows are read so; only Linux has /proc/meminfo."""
    assert free_bytes(CPU) == 8 * GIB
    assert limited_by(CPU) == ""


@pytest.mark.parametrize(
    ("own", "limited"),
    [
        ("0::/a/b", "v2/a/b"),  # its own group
        ("0::/a/b", "v2/a"),  # one above it
        ("0::/a/b", "v2"),  # a container's root, where the path is the host's
        ("4:cpu,memory:/c", "v1/c"),
        ("4:cpu,memory:/c", "v1"),
        (None, "v2"),  # /proc is not there
        (None, "v1"),
    ],
)
def test_control_groups_limit_what_is_free(own: str | None, limited: str, machine: Path) -> None:
    """Page cache that can be taken back is free. "max" and numbers beyond the machine limit nothing."""
    if own is not None:
        (machine / "own").write_text(f"7:pids:/x\n{own}\n")
    limit(machine / limited, V2 if limited.startswith("v2") else V1, str(3 * GIB), 2 * GIB, GIB // 2)
    assert free_bytes(CPU) == 3 * GIB // 2
    assert limited_by(CPU) == " (this process's control group leaves no more)"


_LIMITED = """
import resource, sys, torch
from asyncengine.execution.device.memory import free_bytes, in_words
from asyncengine.errors import OutOfMemory
cpu = torch.device("cpu")
before = free_bytes(cpu)
kind, field = getattr(resource, sys.argv[1]), sys.argv[2]
used = next(line.split()[1] for line in open("/proc/self/status") if line.startswith(field))
resource.setrlimit(kind, (int(used) * 1024 + int(sys.argv[3]), resource.getrlimit(kind)[1]))
print(min(before, 1 << 50), free_bytes(cpu))
try:
    in_words(lambda: torch.ones(1 << 40), cpu, "the model", "Take less.")
except OutOfMemory as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems keep to these limits only in part")
@pytest.mark.parametrize(("kind", "field", "flag"), [("RLIMIT_AS", "VmSize:", "-v"), ("RLIMIT_DATA", "VmData:", "-d")])
def test_the_limits_of_a_process_limit_what_is_free(kind: str, field: str, flag: str) -> None:
    """An address space that is nearly used up has no room for a model, however much memory the machine has; some is
    left here, or Python itself might find none for what it does next."""
    numbers, error = forked.run(_LIMITED, kind, field, str(16 * 2**20)).splitlines()
    before, free = map(int, numbers.split())
    assert before > 0
    assert free <= 16 * 2**20
    assert re.match(
        rf"the model does not fit on cpu, where \d+ MiB are free now \(ulimit {flag} leaves no more\): ", error
    )
