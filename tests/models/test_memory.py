"""What loading does about memory that nobody asked for."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from asyncengine.models.linears import can_pack

PROBE = """
import torch
from asyncengine.models.linears import FastLinear
from asyncengine.models.memory import bound_kernel_caches

def resident():
    return int(open("/proc/self/status").read().split("VmRSS:")[1].split()[0])

bound_kernel_caches()
layers = [FastLinear(torch.randn(96 + 32 * i, 128), None, pack=True) for i in range(3)]
before = resident()
with torch.inference_mode():
    for rows in range(1, 500):
        for layer in layers:
            layer(torch.ones(rows, 128))
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
    import torch

    if not can_pack(torch.float32, torch.device("cpu")):
        pytest.skip("torch has no oneDNN here")
    much = growth(ONEDNN_PRIMITIVE_CACHE_CAPACITY="1024", LRU_CACHE_CAPACITY="1024")
    assert growth() < much / 2
