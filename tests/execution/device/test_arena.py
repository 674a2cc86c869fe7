"""Memory of weights in huge pages."""

from __future__ import annotations

import ctypes
import gc
import mmap
import re
import threading

import pytest
import torch

from asyncengine.execution.device.arena import Arena, populate_memory

_LINE = 64
_ON_LINUX = pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="huge pages are asked for on Linux")


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


@_ON_LINUX
def test_the_system_is_asked_for_huge_pages_and_gets_them_back() -> None:
    tensor = Arena().empty((2**22,), torch.uint8).fill_(1)
    assert "hg" in _flags(tensor.data_ptr())
    address = tensor.data_ptr()
    del tensor
    gc.collect()
    assert "hg" not in _flags(address)


@_ON_LINUX
@pytest.mark.parametrize("threads", [1, 3])
def test_memory_is_found_before_anybody_writes(threads: int) -> None:
    """All of what was given out, whatever block it is in, and nothing of it is written to."""
    arena = Arena()
    pieces = [arena.empty((size,), torch.uint8) for size in (2**16, 7 * 2**20 + 5, 2**26)]
    pieces[1].fill_(7)
    parts = arena.regions()
    assert resident(pieces[2]) == 0.0
    told: list[None] = []
    populate_memory(parts, threads, lambda: told.append(None))
    assert len(told) == len(parts)
    if min(map(resident, pieces)) < 1.0:
        pytest.skip("this kernel finds no memory ahead (Linux 5.14)")
    assert bool((pieces[1] == 7).all())
    assert not pieces[2].any()


@_ON_LINUX
def test_what_is_not_given_out_or_gone_is_not_found() -> None:
    arena = Arena()
    assert arena.regions() == []
    gone = arena.empty((2**26,), torch.uint8)
    small = arena.empty((2**20,), torch.uint8)
    del gone
    gc.collect()
    parts = arena.regions()
    assert [(part.address, part.size) for part in parts] == [(small.data_ptr(), small.nbytes)]
    populate_memory([], 2, lambda: None)


@_ON_LINUX
def test_who_is_told_may_end_it() -> None:
    """A load that is given up ends the search for its memory."""
    arena = Arena()
    held = arena.empty((2**27,), torch.uint8)
    told: list[None] = []

    def given_up() -> None:
        told.append(None)
        raise KeyboardInterrupt

    parts, before = arena.regions(), set(threading.enumerate())
    assert len(parts) > 1
    with pytest.raises(KeyboardInterrupt):
        populate_memory(parts, 1, given_up)
    assert len(told) == 1
    assert held.nbytes == sum(part.size for part in parts)
    assert set(threading.enumerate()) <= before  # those of other tests may end meanwhile


def resident(tensor: torch.Tensor) -> float:
    """The share of its pages that the system has found memory for."""
    first = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    size = tensor.data_ptr() + tensor.nbytes - first
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(first), ctypes.c_size_t(size), pages) == 0
    return sum(page & 1 for page in pages) / len(pages)


def _flags(address: int) -> str:
    """The system's flags of the mapping that holds `address`; empty: there is none."""
    found = False
    with open("/proc/self/smaps", encoding="utf-8") as lines:
        for line in lines:
            bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
            if bounds is not None:
                found = int(bounds[1], 16) <= address < int(bounds[2], 16)
            elif found and line.startswith("VmFlags:"):
                return line
    return ""
