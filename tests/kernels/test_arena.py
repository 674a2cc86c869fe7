"""Memory of weights in huge pages."""

from __future__ import annotations

import gc
import mmap
import re

import pytest
import torch

from asyncengine.kernels.arena import Arena

_LINE = 64


def test_pieces_are_aligned_and_apart() -> None:
    arena = Arena()
    shapes = [(100, 1000), (3,), (700, 333), (40_000_000,), (128, 512)]
    made = [arena.empty(shape, torch.bfloat16).fill_(place + 1) for place, shape in enumerate(shapes)]
    for place, (tensor, shape) in enumerate(zip(made, shapes, strict=True)):
        assert tensor.shape == torch.Size(shape)
        assert tensor.is_contiguous()
        assert tensor.dtype == torch.bfloat16
        assert bool((tensor == place + 1).all())
        assert tensor.data_ptr() % _LINE == 0


def test_zeros_are_zeros() -> None:
    arena = Arena()
    arena.empty((300_000,), torch.uint8).fill_(7)
    assert not arena.zeros((300_000,), torch.uint8).any()
    assert not arena.zeros((3,), torch.uint8).any()


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="huge pages are asked for on Linux")
def test_the_system_is_asked_for_huge_pages_and_gets_them_back() -> None:
    tensor = Arena().empty((2**22,), torch.uint8).fill_(1)
    assert "hg" in _flags(tensor.data_ptr())
    address = tensor.data_ptr()
    del tensor
    gc.collect()
    assert "hg" not in _flags(address)


def _flags(address: int) -> str:
    """What the system says of the mapping that holds `address`; empty: there is none."""
    found = False
    with open("/proc/self/smaps", encoding="utf-8") as lines:
        for line in lines:
            bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
            if bounds is not None:
                found = int(bounds[1], 16) <= address < int(bounds[2], 16)
            elif found and line.startswith("VmFlags:"):
                return line
    return ""
