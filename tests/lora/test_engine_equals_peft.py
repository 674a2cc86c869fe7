"""The whole engine with adapters from disk against peft over transformers: same tokens, whoever shares the batch."""

from __future__ import annotations

import asyncio
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.adapter_engine import slots_of
from support.data import cases_of
from support.long import LONG
from support.lora_zoo import Zoo, quiet, random_prompts
from support.tiny_models import make_checkpoint, make_model

from asyncengine import AdapterError, AsyncEngine, SamplingParams

from .lora_engine import assert_given_back, load

peft = pytest.importorskip("peft")

FAMILIES = ["llama", "gemma2", "phi3", "qwen3moe", "youtu"]
WANT = 6
PROMPTS = random_prompts([37, 37])
"""Prompts longer than two pages and than the window of families that have one; the first two pages are the same."""
GREEDY = SamplingParams(max_tokens=WANT, temperature=0, ignore_eos=True)
NAMES = [None, *(f"a{index}" for index in range(8))]

SETTINGS: dict[str, dict[str, Any]] = cases_of(__file__)


@pytest.fixture(scope="module")
def zoos(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return cache(lambda family: Zoo(family, tmp_path_factory.mktemp(family)))


async def answers(engine: AsyncEngine, jobs: list[tuple[str | None, list[int]]]) -> list[list[int]]:
    made = await asyncio.gather(*(engine.generate(prompt, GREEDY, adapter=name) for name, prompt in jobs))
    return [completion.token_ids for completion in made]


@pytest.mark.parametrize("family", FAMILIES)
async def test_greedy_equals_peft(family: str, zoos: Any) -> None:
    """Eight adapters and the base model: each alone, and all mixed under a setting; in the long form under each."""
    zoo = zoos(family)
    jobs = [(name, prompt) for prompt in PROMPTS for name in NAMES]
    expected = [zoo.answer(name, prompt, WANT) for name, prompt in jobs]
    assert len({tuple(tokens) for tokens in expected}) > len(expected) - 3, "equality means something"
    titles = [*SETTINGS, *SETTINGS][FAMILIES.index(family) % 4 :][: 4 if LONG else 1]
    for title in titles:
        async with await load(zoo, adapters=zoo.paths, **SETTINGS[title]) as engine:
            assert await answers(engine, jobs) == expected, title
            stats = engine.stats()
            assert (stats.preemptions > 0) == ("preempted" in title)
            assert (stats.cached_tokens > 0) == ("no cache" not in title)
            assert slots_of(engine.core).copies >= 8
            assert stats.adapters["in_memory"] == 8 if "memory" not in title else stats.adapters["in_memory"] < 8
            await assert_given_back(engine)
            if title.startswith("chunks of 1"):
                alone = [(await answers(engine, [job]))[0] for job in jobs[:9:2]]
                assert alone == expected[:9:2], "alone"


async def test_the_matrix_of_keys_and_values_of_latent_vectors_takes_none(tmp_path: Path) -> None:
    """It is multiplied with queries, and with what they have read (docs/models.md); transformers' modules take one."""
    config = peft.LoraConfig(r=4, target_modules=["kv_b_proj", "o_proj"])
    with quiet():
        peft.get_peft_model(make_model("youtu"), config).save_pretrained(tmp_path / "adapter")
    base = make_checkpoint("youtu", tmp_path / "model")
    settings = {"kv_cache_memory": "4MB", "dtype": "float32", "num_threads": 1, "max_loras": 1}
    async with await AsyncEngine.from_pretrained(base, **settings) as engine:
        with pytest.raises(AdapterError, match=r"kv_b_proj.*|no such module"):
            await engine.load_adapter("one", tmp_path / "adapter")
    async with await AsyncEngine.from_pretrained(base, fuse=False, **settings) as engine:
        await engine.load_adapter("one", tmp_path / "adapter")
