"""The number of pages that a pool gets, and the refusals when there are too few."""

from __future__ import annotations

import pytest
import torch

from asyncengine.config import EngineConfig
from asyncengine.errors import InvalidParameter, OutOfMemory
from asyncengine.execution.attention.base import LayerSpec
from asyncengine.execution.models.memory.caches import num_pages_for

LAYERS = [LayerSpec(index, 8, 4, 64, 64, 0.125) for index in range(2)]
PAGE = 2 * 4 * 128 * 16 * 2  # layers * kv heads * (key + value) * tokens * bytes
GIB = 2**30
CPU = torch.device("cpu")


def pages(free: int, device: torch.device = CPU, length: int = 4096, **fields: object) -> int:
    return num_pages_for(LAYERS, EngineConfig.from_dict(fields), length, torch.bfloat16, device, free)


def test_a_share_of_free_memory() -> None:
    assert pages(GIB) == GIB // 4 // PAGE
    assert pages(GIB, torch.device("cuda")) == (GIB - int(GIB * 0.15)) // PAGE


def test_of_a_large_gpu_a_fixed_amount_is_kept_back() -> None:
    assert pages(100 * GIB, torch.device("cuda"), length=409600) == 96 * GIB // PAGE


def test_on_cpu_at_most_four_gib() -> None:
    assert pages(100 * GIB, length=40960) == 4 * GIB // PAGE


def test_no_more_than_all_requests_can_fill() -> None:
    assert pages(100 * GIB, max_num_seqs=3) == 3 * 4096 // 16 + 1


def test_given_bytes() -> None:
    assert pages(GIB, kv_cache_memory="64MiB") == 64 * 2**20 // PAGE


@pytest.mark.parametrize(
    ("text", "size"),
    [("1TiB", 2**40), ("2 gib", 2**31), ("1.5PB", 1500 * 10**12), ("1pib", 2**50), ("3tb", 3 * 10**12),
     ("1e3KB", 10**6), (" 512mib ", 2**29), ("7kib", 7168), ("5MB", 5 * 10**6), ("99b", 99), ("1234", 1234)],
)  # fmt: skip
def test_every_unit_in_any_case(text: str, size: int) -> None:
    assert EngineConfig(kv_cache_memory=text).kv_cache_memory == size


@pytest.mark.parametrize("text", ["1EiB", "2G", "0.4", "-1GB", "inf", "nanB", "GiB", "", "1 2GiB", "8192PiB", "1e999"])
def test_what_is_no_size_is_refused_with_the_units(text: str) -> None:
    with pytest.raises(InvalidParameter, match=r"kv_cache_memory: must be .* B, KB, .*, PB, KiB, .*, TiB, PiB"):
        EngineConfig(kv_cache_memory=text)


def test_more_than_free_is_refused_with_numbers() -> None:
    with pytest.raises(OutOfMemory, match="2048 MiB, but only 1024 MiB are free"):
        pages(GIB, kv_cache_memory="2GiB")


def test_too_little_is_refused_with_numbers() -> None:
    with pytest.raises(OutOfMemory, match=r"pages of 16 tokens \(32 KiB each\); at least 17 are needed"):
        pages(16 * PAGE)
    with pytest.raises(OutOfMemory, match="at least 2 are needed"):
        pages(GIB, kv_cache_memory=PAGE)
    assert pages(GIB, kv_cache_memory=2 * PAGE) == 2
