"""Several models behind one door, with one budget of memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest
from support.data import cases_of

from asyncengine import AsyncEngine, EngineGroup, SamplingParams
from asyncengine.errors import EngineClosed, InvalidParameter, ModelNotFound

GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
SMALL: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 256, "grammar_backend": "none", "speculation": "off"}


@pytest.fixture
async def group() -> AsyncIterator[EngineGroup]:
    models = {"chat": "demo", "embed": "demo-embed"}
    async with await EngineGroup.from_pretrained(models, **SMALL) as group:
        yield group


async def test_who_is_meant_follows_from_the_work(group: EngineGroup) -> None:
    completion = await group.generate("Once", GREEDY)
    assert completion.token_ids == (await group["chat"].generate("Once", GREEDY)).token_ids
    with group.session() as session:
        assert completion.token_ids == (await session.generate("Once", GREEDY)).token_ids
    by_name = await group.embed(["a text"], model="embed")
    assert (await group.embed(["a text"])).vectors.tobytes() == by_name.vectors.tobytes()
    assert sorted(group) == ["chat", "embed"]
    assert set(group.stats()) == {"chat", "embed"}
    with pytest.raises(InvalidParameter, match=r"model: .*none of 'chat', 'embed' was made to rerank"):
        await group.rerank("q", ["d"])
    with pytest.raises(InvalidParameter, match=r"model: .*'chat', 'embed'"):
        await group.generate("Once", GREEDY, model="chta")


async def test_two_that_can_do_it_must_be_told_apart() -> None:
    async with await EngineGroup.from_pretrained({"a": "demo", "b": "demo"}, **SMALL) as group:
        with pytest.raises(InvalidParameter, match="must say which: 'a', 'b' can generate"):
            await group.generate("Once", GREEDY)
        stream = group.stream("Once", GREEDY, model="b")
        tokens = [token async for chunk in stream for token in chunk.token_ids]
        assert tokens == (await group.generate("Once", GREEDY, model="a")).token_ids
        assert group.alive
        await group["a"].aclose()
        assert not group.alive
        assert (await group.generate("Once", GREEDY, model="b")).token_ids == tokens  # one engine's end is its own
    with pytest.raises(EngineClosed):
        await group.generate("Once", GREEDY, model="b")


async def test_one_budget_is_divided() -> None:
    """Engines together stay within the budget, and an engine that can use little has all that it can use."""
    models = {"small": {"model": "demo", "max_num_seqs": 1}, "large": {"model": "demo", "max_model_len": 1024}}
    settings = {**SMALL, "max_num_seqs": 64}
    async with await EngineGroup.from_pretrained(models, memory="96MiB", **settings) as group:
        infos = {name: engine.info for name, engine in group.items()}
        taken = sum(info.weight_bytes + info.kv_cache_bytes for info in infos.values())
        assert taken <= 96 * 2**20
        assert taken > 0.5 * 96 * 2**20
        assert infos["small"].num_pages == 256 // infos["small"].page_size + 1
        assert infos["large"].kv_cache_bytes > infos["small"].kv_cache_bytes


async def test_what_an_engine_was_given_it_keeps() -> None:
    models = {"told": {"model": "demo", "kv_cache_memory": "1MiB"}, "other": "demo"}
    async with await EngineGroup.from_pretrained(models, memory="200MiB", **SMALL) as group:
        assert group["told"].info.kv_cache_bytes <= 2**20
        assert group["other"].info.num_pages == 4 * 256 // group["other"].info.page_size + 1


@pytest.mark.parametrize(("models", "settings", "complaint"), cases_of(__file__))
async def test_what_cannot_be_is_refused_by_name(models: Any, settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidParameter, match=complaint):
        await EngineGroup.from_pretrained(models, **settings)


async def test_a_model_that_does_not_load_leaves_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[AsyncEngine] = []
    start = AsyncEngine.start

    async def seen(engine: AsyncEngine) -> None:
        await start(engine)
        loaded.append(engine)

    monkeypatch.setattr(AsyncEngine, "start", seen)
    with pytest.raises(ModelNotFound):
        await EngineGroup.from_pretrained({"chat": "demo", "other": "/nowhere/at/all"}, **SMALL)
    assert len(loaded) == 1
    assert not loaded[0].alive


async def test_a_load_that_is_cancelled_leaves_none_behind() -> None:
    with anyio.move_on_after(0.05) as scope:
        await EngineGroup.from_pretrained({"chat": "demo", "other": "demo"}, **SMALL)
    assert scope.cancelled_caught
