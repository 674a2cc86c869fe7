"""The division of a KV cache's bytes between layers that see everything and those with windows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from asyncengine.config import EngineConfig
from asyncengine.execution.attention.base import LayerSpec, page_bytes
from asyncengine.execution.models.memory.caches import (
    PoolSizes,
    num_pages_for,
    pool_sizes,
    two_pools,
    why_one_pool,
    window_of,
)
from asyncengine.kvcache import KVCache

CPU = torch.device("cpu")
GIB = 2**30


def layers(count: int, full_every: int, **window: int) -> list[LayerSpec]:
    spec = LayerSpec(0, 8, 4, 64, 64, 0.125)
    return [replace(spec, index=index, **({} if (index + 1) % full_every == 0 else window)) for index in range(count)]


GEMMA = layers(12, 6, window=1024)
GPT_OSS = layers(12, 2, window=128)
LLAMA = layers(12, 4, chunk=8192)
KINDS = {"gemma": GEMMA, "gpt-oss": GPT_OSS, "llama4": LLAMA}


def sizes(specs: list[LayerSpec], memory: int = GIB, length: int = 131_072, **fields: object) -> PoolSizes:
    config = EngineConfig.from_dict({"kv_cache_memory": memory, **fields})
    return pool_sizes(specs, config, length, torch.bfloat16, CPU, 100 * GIB)


def pages_of_one(specs: list[LayerSpec], memory: int = GIB, length: int = 131_072, **fields: object) -> int:
    config = EngineConfig.from_dict({"kv_cache_memory": memory, **fields})
    return num_pages_for(specs, config, length, torch.bfloat16, CPU, 100 * GIB)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "settings", [{}, {"max_num_seqs": 2}, {"max_num_batched_tokens": 64}, {"page_size": 4}], ids=str
)
@pytest.mark.parametrize("memory", [2**23, 2**25, 2**28, GIB, 16 * GIB])
def test_no_less_than_in_one_pool(kind: str, memory: int, settings: dict[str, object]) -> None:
    """Bytes are not exceeded; the longest request that fitted fits; and a cache of these sizes can run it alone."""
    specs, config = KINDS[kind], EngineConfig.from_dict(settings)
    found, before = sizes(specs, memory, **settings), pages_of_one(specs, memory, **settings)
    whole, near = ([spec for spec in specs if spec.windowed == windowed] for windowed in (False, True))
    taken = [page_bytes(part, config.page_size, torch.bfloat16) for part in (whole, near)]
    if not found.window_pages:
        assert found.pages == before
        assert found.one_pool is not None
        return
    assert found.pages * taken[0] + found.window_pages * taken[1] <= memory
    assert found.pages > before
    assert found.window_pages <= found.pages
    windows = [(spec.window or 0, spec.chunk or 0) for spec in specs]
    kv = KVCache(
        found.pages,
        config.page_size,
        windows=windows,
        num_window_pages=found.window_pages,
        most_ahead=config.most_ahead,
    )
    assert kv.windows is not None
    assert kv.windows.lookback.span == window_of(specs) - 1
    assert kv.windows.most_alone >= config.most_ahead  # no prompt is computed in smaller chunks than before
    assert kv.longest > before * config.page_size - config.page_size


@pytest.mark.parametrize("kind", KINDS)
def test_requests_of_two_windows_run_beside_each_other_as_before(kind: str) -> None:
    specs, memory = KINDS[kind], 16 * GIB
    found, before = sizes(specs, memory), pages_of_one(specs, memory)
    shape = two_pools(specs, EngineConfig(), 131_072, torch.bfloat16)
    for tokens in (max(2 * window_of(specs), 1024), 65_536, 131_072):
        each = -(-tokens // 16)
        now = min((found.pages - 1) // each, (found.window_pages - 1) // min(each, shape.span))
        assert now >= min((before - 1) // each, 256)


def test_the_bytes_for_a_number_of_pages() -> None:
    shape = two_pools(GEMMA, EngineConfig(), 131_072, torch.bfloat16)
    both = shape.page_bytes + shape.window_page_bytes
    for pages in (10, 500, 5000, 50_000):
        budget = shape.budget_for(pages)
        assert shape.split(budget)[0] >= pages > shape.split(budget - both)[0]
        assert budget <= pages * both


@pytest.mark.parametrize(
    ("specs", "settings", "reason"),
    [
        (layers(4, 1), {}, "no layer has a window"),
        (layers(4, 9, window=64), {}, "every layer has a window"),
        (GEMMA, {"states": True}, "the model keeps recurrent states as well"),
        (GEMMA, {"device": torch.device("cuda")}, "on a GPU, plans are of one pool"),
    ],
    ids=["none", "all", "states", "gpu"],
)
def test_why_there_is_one_pool(specs: list[LayerSpec], settings: dict, reason: str) -> None:
    device = settings.get("device", CPU)
    assert why_one_pool(specs, device, states=settings.get("states", False)) == reason


def test_a_draft_models_pages_are_those_that_see_everything() -> None:
    config, draft = EngineConfig(kv_cache_memory=GIB), layers(4, 9, window=64)
    found = pool_sizes(GEMMA, config, 131_072, torch.bfloat16, CPU, 100 * GIB, others=draft)
    whole = page_bytes([*draft, *(spec for spec in GEMMA if not spec.windowed)], 16, torch.bfloat16)
    near = page_bytes([spec for spec in GEMMA if spec.windowed], 16, torch.bfloat16)
    assert found.window_pages
    assert GIB - near < found.pages * whole + found.window_pages * near <= GIB
