"""Groups of models that are loaded when they are used."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncengine import EngineGroup, SamplingParams
from asyncengine.errors import AdapterNotFound, EngineClosed, InvalidParameter, WrongLoop

GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
SMALL: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 256, "grammar_backend": "none", "speculation": "off"}


# ---------------------------------------------------------------- groups


async def test_a_group_loads_when_it_is_used() -> None:
    models = {"chat": "demo", "embed": {"model": "demo-embed", "keep_alive": 0}}
    async with await EngineGroup.from_pretrained(models, keep_alive="5m", **SMALL) as group:
        assert (sorted(group), group.stats(), "chat" in group) == (["chat", "embed"], {}, True)
        with pytest.raises(EngineClosed, match="'chat' is not loaded now"):
            group["chat"]
        with pytest.raises(InvalidParameter, match="must say which: 'chat', 'embed'"):
            await group.generate("Once", GREEDY)  # nobody knows yet what they can do
        completion = await group.generate("Once", GREEDY, model="chat")
        assert len((await group.embed(["a text"], model="embed")).vectors) == 1
        assert len((await group.embed(["a text"])).vectors) == 1
        assert group.stats().keys() >= {"chat"}
        async with group.using("chat") as engine:
            assert engine is group["chat"]
            assert (await group.generate("Once", GREEDY)).token_ids == completion.token_ids
        with pytest.raises(WrongLoop):
            await asyncio.to_thread(asyncio.run, group.generate("Once", GREEDY))
    with pytest.raises(EngineClosed):
        await group.generate("Once", GREEDY)


async def test_models_that_do_not_fit_together_share_a_budget_in_turns() -> None:
    models = {"a": "demo", "b": "demo", "c": "demo"}
    with pytest.raises(InvalidParameter, match=r"memory: must be at least \d+ MiB") as refused:
        await EngineGroup.from_pretrained(models, memory="30MiB", **SMALL)
    least = int(str(refused.value).split(" MiB")[0].split()[-1]) // 3
    with pytest.raises(InvalidParameter, match="memory: must be at least"):  # there is no room even for one
        await EngineGroup.from_pretrained(models, memory=f"{least // 2}MiB", keep_alive=-1, **SMALL)
    memory = f"{least * 2 + 2}MiB"
    async with await EngineGroup.from_pretrained(models, memory=memory, keep_alive=-1, **SMALL) as group:
        for name in ("a", "b", "c", "a"):
            await group.generate("Once", GREEDY, model=name)
            taken = sum(engine.info.weight_bytes + engine.info.kv_cache_bytes for engine in group.loaded.values())
            assert taken <= (least * 2 + 2) * 2**20
        assert len(group.stats()) == 2


async def test_adapters_come_back_with_their_model() -> None:
    async with await EngineGroup.from_pretrained({"chat": "demo"}, keep_alive=0, max_loras=2, **SMALL) as group:
        assert (await group.load_adapter("pirate", "demo/pirate")).name == "pirate"
        assert group.adapter_names("chat") == ["pirate"]
        async with group.using("chat") as engine:
            said = (await engine.generate("Once", GREEDY, adapter="pirate")).token_ids
        assert said
        await group.unload_adapter("pirate")
        assert group.adapter_names("chat") == []
        with pytest.raises(AdapterNotFound):
            await group.unload_adapter("pirate")
