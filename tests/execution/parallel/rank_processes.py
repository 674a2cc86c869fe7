"""Engines over several processes, and what they leave behind."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import psutil

from asyncengine import AsyncEngine

SETTINGS: dict[str, Any] = {
    "dtype": "float32", "num_threads": 2, "show_progress": False, "max_num_batched_tokens": 48, "max_num_seqs": 4,
    "speculation_costs": (0.001, 0.001, 0.001), "adapters": {"pirate": "demo/pirate"}, "preempt_every": 9,
}  # fmt: skip


async def load(size: int = 2, setting: str = "tensor_parallel", **settings: Any) -> AsyncEngine:
    given = {**SETTINGS, setting: size, "kv_cache_memory": 2**23, **settings}
    return await AsyncEngine.from_pretrained("demo", **given)


def ranks() -> list[psutil.Process]:
    """Other ranks of engines of this process."""
    return [each for each in psutil.Process().children() if "rank_worker" in " ".join(each.cmdline())]


def mapped() -> list[str]:
    """Shared memory of ranks that this process holds, but for what nobody refers to any more."""
    gc.unfreeze()  # what other files' tests left may be frozen, tests/conftest.py
    gc.collect()
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    links = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
    return [line for line in [*maps.splitlines(), *links] if "asyncengine-ranks" in line]
