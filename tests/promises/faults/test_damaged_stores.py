"""Folders of prefixes in which a byte has changed or the end of a file is missing: whoever reads them answers right.

`ASYNCENGINE_LONG=34` damages a thousand.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from support.fake_engine import GREEDY, PATIENCE, make_core
from support.fake_memory import FakePageMemory
from support.long import TIMES

from asyncengine import AsyncEngine
from asyncengine.engine import prefix_store
from asyncengine.engine.prefix_store import PrefixStore
from asyncengine.kvcache.store import segments
from asyncengine.kvcache.store.disk import SystemDisk
from asyncengine.kvcache.store.segments import SegmentStore
from asyncengine.testing import FakeExecutor
from asyncengine.testing.leaks import assert_nothing_held

DAMAGES = 30 * TIMES
PROMPTS = [[2 + (7 * place + number) % 90 for place in range(30 + number)] for number in range(3)]
FULL = sum((len(prompt) - 1) // 4 * 4 for prompt in PROMPTS)


async def ask_all(folder: Path) -> tuple[int, PrefixStore]:
    """Tokens that an engine on `folder` restored for all prompts, whose answers are right; and its store, closed."""
    executor = FakeExecutor(128, 4, num_states=12)
    store = PrefixStore(SegmentStore(SystemDisk(), str(folder), b"f" * 32, 10**6), FakePageMemory(executor), 4)
    restored = 0
    async with AsyncEngine(lambda: make_core(executor, wiring={"tiers": [store]}), hosted=True) as engine:
        for prompt in PROMPTS:
            answer = await engine.generate(prompt, GREEDY.replace(max_tokens=5, seed=0))
            assert answer.token_ids == executor.model.oracle(prompt, 5, 0, (1,)), "a wrong token"
            restored += answer.usage.restored_tokens
        assert_nothing_held(engine.core)
    return restored, store


def damage(folder: Path, rng: random.Random) -> None:
    """Change a byte of a file, or cut it off there."""
    file = rng.choice([path for path in sorted(folder.iterdir()) if path.stat().st_size])
    data = bytearray(file.read_bytes())
    place = rng.randrange(len(data))
    if rng.random() < 0.7:
        data[place] ^= 1 << rng.randrange(8)
    else:
        del data[place:]
    file.write_bytes(data)


async def live(pristine: Path, folder: Path, seed: int) -> int:
    """Damage a copy of a folder; what an engine restores from it at first. The next one restores all: it was mended."""
    shutil.copytree(pristine, folder)
    damage(folder, random.Random(seed))
    restored, store = await ask_all(folder)
    assert not store.store.counts.failures
    assert (await ask_all(folder))[0] >= restored
    shutil.rmtree(folder)
    return restored


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_store, "LEAST_PATIENCE", PATIENCE)


async def test_damaged_folders_give_no_wrong_token(tmp_path: Path) -> None:
    (tmp_path / "pristine").mkdir()
    await ask_all(tmp_path / "pristine")
    found = [await live(tmp_path / "pristine", tmp_path / "copy", seed) for seed in range(DAMAGES)]
    assert max(found) == FULL  # a damage that concerns nobody
    assert min(found) < FULL
    cost = [FULL - each for each in found if each < FULL]
    print(f"{len(cost)} of {DAMAGES} damages cost something, on average {sum(cost) / len(cost):.0f} of {FULL} tokens")


async def live_all(folder: Path, lives: int) -> None:
    (folder / "pristine").mkdir()
    await ask_all(folder / "pristine")
    for seed in range(lives):
        await live(folder / "pristine", folder / "copy", seed)


async def test_a_checksum_not_looked_at_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "checksum", lambda buffers: 0)
    with pytest.raises(Exception, match=r"wrong token|nobody wrote|starts at"):
        await live_all(tmp_path, 300)
