"""`sleep` and `wake` of engines with real models: memory goes back to the system, and answers are the same after."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from support.checkpoints import Checkpoint
from support.fake_engine import PATIENCE
from support.long import LONG
from support.panels import use_panels

from asyncengine import AsyncEngine, ModelNotFound, SamplingParams, UnsupportedModel
from asyncengine.engine import prefix_store
from asyncengine.testing import assert_nothing_held
from benchmarks.loading import write
from benchmarks.random_model import SHAPES

PROMPTS = [[3 + i, *range(7, 40), 5] for i in range(4)]
PARAMS = SamplingParams(max_tokens=8, temperature=0.8, seed=3, logprobs=True, top_logprobs=3, ignore_eos=True)
FORMS: list[tuple[str, str, Any]] = [
    ("qwen3", "bfloat16", None), ("llama", "float32", None), ("qwen3", "float32", "int8"),
    ("llama", "bfloat16", "int4"), ("qwen3moe", "float32", None), ("qwen3next", "float32", None),
]  # fmt: skip
SOME = [*((*form, True) for form in (*FORMS[::2], FORMS[-1])), (*FORMS[1], False)]
"""Cases of the short form: one of each kind of form with panels, and one without. Forms in 4 bits are rewritten by
test_weight_updates.py."""


def engine_on(folder: Path, **settings: Any) -> Any:
    usual = {"kv_cache_memory": "4MB", "num_threads": 1, "show_progress": False}
    return AsyncEngine.from_pretrained(folder, **{**usual, **settings})


async def answers(engine: AsyncEngine) -> list[Any]:
    found = await asyncio.gather(*(engine.generate(prompt, PARAMS) for prompt in PROMPTS))
    return [(each.token_ids, each.logprobs) for each in found]


@pytest.mark.parametrize(
    ("name", "dtype", "quantization", "panels"),
    [(*form, panels) for panels in (True, False) for form in FORMS] if LONG else SOME,
)
async def test_after_waking_answers_are_those_of_a_fresh_engine(
    name: str, dtype: str, quantization: Any, panels: bool, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of every form come back, with states and a mixture: from the files, and from tensors given then."""
    pytest.importorskip("numba")
    use_panels(panels, monkeypatch)
    settings = {"dtype": dtype, "quantization": quantization}
    other = load_file(checkpoint(name, seed=1) / "model.safetensors")
    async with (
        await engine_on(checkpoint(name), **settings) as live,
        await engine_on(checkpoint(name, seed=1), **settings) as fresh,
    ):
        before = await answers(live)
        await live.sleep(cache="keep")
        await live.wake()
        assert await answers(live) == before
        running = asyncio.create_task(live.generate(PROMPTS[1], PARAMS.replace(max_tokens=60)))
        await live.sleep(mode="keep")
        assert live.stats().pages.cached == 0
        await live.wake()
        assert await answers(live) == before
        whole = await live.generate(PROMPTS[1], PARAMS.replace(max_tokens=60))
        assert (await running).token_ids == whole.token_ids
        await live.sleep()
        assert await live.wake(other) == 1
        assert await answers(live) == await answers(fresh) != before
        assert_nothing_held(live.core)


async def test_adapters_stay_and_a_draft_model_comes_back() -> None:
    """The demo model runs in float32, in which everything is compiled."""
    settings: dict[str, Any] = {"adapters": {"a": "demo/pirate"}, "draft_model": "demo/draft", "dtype": "float32"}
    settings |= {"speculation_costs": (1.0, 1.0002, 1.0008), "draft_costs": (1e-6,) * 3}  # so that it is asked
    params = SamplingParams(max_tokens=24, temperature=0)
    async with await engine_on(Path("demo"), **settings) as engine:

        async def say(text: str, adapter: str | None = None) -> list[int]:
            return (await engine.chat([{"role": "user", "content": text}], params, adapter=adapter)).token_ids

        before = [await say("Tell me a story.", name) for name in (None, "a")]
        await engine.sleep()
        await engine.wake()
        assert [await say("Tell me a story.", name) for name in (None, "a")] == before
        assert before[0] != before[1]
        guesses = engine.stats().speculation
        await say("What is the capital of Norway?")
        more = engine.stats().speculation
        assert guesses is not None
        assert more is not None
        assert more.accepted_by_model > guesses.accepted_by_model


async def test_made_up_weights_are_made_up_again(checkpoint: Checkpoint) -> None:
    async with await engine_on(checkpoint("llama"), load_format="dummy") as engine:
        before = await answers(engine)
        await engine.sleep()
        await engine.wake()
        assert await answers(engine) == before


async def test_a_checkpoint_that_has_gone_leaves_it_asleep(tmp_path: Path) -> None:
    write(tmp_path / "model", SHAPES["small"] | {"num_hidden_layers": 1, "vocab_size": 256})
    async with await engine_on(tmp_path / "model", dtype="float32") as engine:
        before = await answers(engine)
        await engine.sleep()
        (tmp_path / "model").rename(tmp_path / "elsewhere")
        with pytest.raises(ModelNotFound):
            await engine.wake()
        assert engine.stats().state == "asleep"
        assert await engine.wake(tmp_path / "elsewhere") == 1
        assert await answers(engine) == before


async def test_the_stored_cache_is_found_after_sleep(
    tmp_path: Path, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages that were not written yet when the engine fell asleep are written first."""
    monkeypatch.setattr(prefix_store, "LEAST_PATIENCE", PATIENCE)
    settings = {"kv_cache_dir": str(tmp_path / "kv"), "page_size": 16, "dtype": "float32"}
    async with await engine_on(checkpoint("llama"), **settings) as engine:
        store = engine.core.loop.sources.tiers[0]
        store.rates = store.rates._replace(read=1e12, compute=1.0)
        before = await engine.generate(PROMPTS[0], PARAMS)
        await engine.sleep()
        await engine.wake()
        store.rates = store.rates._replace(read=1e12, compute=1.0)
        after = await engine.generate(PROMPTS[0], PARAMS)
        assert after.usage.restored_tokens >= 16
        assert (after.token_ids, after.logprobs) == (before.token_ids, before.logprobs)


async def test_weights_that_no_update_could_write_are_not_dropped(checkpoint: Checkpoint) -> None:
    async with await engine_on(checkpoint("llama"), fuse=False) as engine:
        with pytest.raises(UnsupportedModel, match="runs through transformers"):
            await engine.sleep()
        before = await answers(engine)
        await engine.sleep(weights="keep")
        await engine.wake()
        assert await answers(engine) == before


def resident() -> int:
    """Bytes of this process that are in memory."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("dtype", "tied"), [("bfloat16", False), *LONG * [("float32", True)]])
async def test_memory_goes_back_to_the_system(dtype: str, tied: bool, tmp_path: Path) -> None:
    """Sleep frees at least 95 % of weights and of what was written of the cache, again in each cycle; nothing stays
    behind."""
    write(tmp_path, SHAPES["small"] | {"tie_word_embeddings": tied, "num_hidden_layers": 4})
    async with await engine_on(tmp_path, dtype=dtype, kv_cache_memory="64MB") as engine:
        sizes = []
        for cycle in range(3):
            await asyncio.gather(*(engine.generate([cycle, i, *range(250)], PARAMS) for i in range(8)))
            pages, used = engine.stats().pages, resident()
            await engine.sleep()
            sizes.append(resident())
            cache = engine.info.kv_cache_bytes * (pages.total - pages.free) // pages.total
            assert cache > 4 << 20
            assert used - sizes[-1] > 0.95 * (engine.info.weight_bytes + cache), cycle
            await engine.wake()
        assert sizes[-1] - sizes[1] < engine.info.weight_bytes / 2  # what one more cycle would leave, and then some
