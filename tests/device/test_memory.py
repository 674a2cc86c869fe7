"""What loading does about memory that nobody asked for."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref

import pytest
import torch

from asyncengine.device.memory import in_words, is_out_of_memory
from asyncengine.errors import OutOfMemory
from asyncengine.layers.weight_forms import can_reorder

PROBE = """
import torch
from asyncengine.device.memory import bound_kernel_caches
from asyncengine.layers.weight_forms import OneDnnWeight

def resident():
    return int(open("/proc/self/status").read().split("VmRSS:")[1].split()[0])

bound_kernel_caches()
layers = [OneDnnWeight(96 + 32 * i, 128, torch.float32) for i in range(3)]
for layer in layers:
    layer.load(0, torch.randn(layer.outputs, 128))
before = resident()
with torch.inference_mode():
    for rows in range(1, 500):
        for layer in layers:
            layer.multiply(torch.ones(rows, 128), None)
print(resident() - before)
"""


def growth(**environment: str) -> int:
    """KiB that products of 1,500 different shapes leave behind."""
    inherited = {key: value for key, value in os.environ.items() if "CACHE_CAPACITY" not in key}
    run = subprocess.run(
        [sys.executable, "-c", PROBE], env={**inherited, **environment}, capture_output=True, text=True, check=True
    )
    return int(run.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_compiled_kernels_do_not_pile_up_unless_the_user_wants_them() -> None:
    if not can_reorder(torch.float32, torch.device("cpu")):
        pytest.skip("torch has no oneDNN here")
    much = growth(ONEDNN_PRIMITIVE_CACHE_CAPACITY="1024", LRU_CACHE_CAPACITY="1024")
    assert growth() < much / 2


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (MemoryError(), True),
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
