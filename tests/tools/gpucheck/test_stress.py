"""The storm passes on a sound engine, and a planted leak of each kind is found."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncengine.kvcache import KVCache
from tools.gpucheck import stress
from tools.gpucheck.families import families, make_checkpoint
from tools.gpucheck.reference import Reference
from tools.gpucheck.report import CheckFailed
from tools.gpucheck.session import Settings

CPU = Settings("cpu", "torch", quick=True, seed=4)
COUNT = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = next(family for family in families() if family.name == "qwen3").make(True)
    return make_checkpoint(config, tmp_path_factory.mktemp("stress") / "model", torch.bfloat16, 4)


async def storm(folder: Path, memory: Any = lambda: 0, reference: Reference | None = None) -> str:
    return await stress.storm(CPU, folder, COUNT, memory, reference)


async def test_a_sound_engine_passes(folder: Path) -> None:
    found = await storm(folder, reference=Reference(folder, torch.bfloat16, torch.device("cpu")))
    assert "left early" in found
    assert "preemptions" in found


async def test_a_leaked_page_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = KVCache.close
    times = iter(range(10**6))

    def leaky(self: KVCache, table: Any, fence: int) -> None:
        closed(self, table, fence)
        if next(times) == 20:
            self.pool.take(1)

    monkeypatch.setattr(KVCache, "close", leaky)
    with pytest.raises(CheckFailed, match="the books do not balance"):
        await storm(folder)


async def test_growing_device_memory_is_found(folder: Path) -> None:
    sizes = iter((10 * 2**20, 14 * 2**20))
    with pytest.raises(CheckFailed, match=r"changed by 4\.0 MiB over 40 requests"):
        await storm(folder, lambda: next(sizes))


async def test_wrong_tokens_in_the_storm_are_found(folder: Path, tmp_path: Path) -> None:
    config = next(family for family in families() if family.name == "qwen3").make(True)
    other = make_checkpoint(config, tmp_path / "other", torch.bfloat16, 5)
    with pytest.raises(CheckFailed, match="outputs differ"):
        await storm(folder, reference=Reference(other, torch.bfloat16, torch.device("cpu")))


@pytest.fixture
def stray() -> Iterator[None]:
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name="asyncengine-stray", daemon=True)
    thread.start()
    yield
    done.set()
    thread.join()


async def test_a_thread_left_behind_is_found(stray: None) -> None:
    with pytest.raises(CheckFailed, match="asyncengine-stray"):
        await stress.threads_ended(set(), patience=0.02)
    await stress.threads_ended(stress.engine_threads(), patience=0.02)
