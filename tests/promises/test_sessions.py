"""Sessions: answers to the bit as without, pages that come back, tools whose times are measured, names and limits."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from support.tiny_models import VOCAB, make_checkpoint

from asyncengine import AsyncEngine, Engine, EngineClosed, InvalidParameter, SamplingParams, Session
from asyncengine.options import MAX_SESSION_NAME
from benchmarks.agents import simulate

SETTINGS: dict[str, Any] = {
    "dtype": "float32", "num_threads": 1, "show_progress": False, "page_size": 16, "kv_cache_memory": "256KiB",
    "check_every": 1, "max_num_seqs": 8,
}  # fmt: skip
PARAMS = SamplingParams(max_tokens=5, temperature=0.9, seed=3, ignore_eos=True)
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ABOUT = {"name": "weather", "description": "The weather in a city.", "parameters": CITY}
WEATHER = {"type": "function", "function": ABOUT}
ASK = [{"role": "user", "content": "What is the weather in Oslo?"}]


def passed(engine: AsyncEngine) -> tuple[int, int]:
    """Pages that no request is expected to start from, and all that are cached."""
    tree = engine.core.loop.scheduler.kv.tree
    return tree.num_passed, tree.num_pages


async def settled(engine: AsyncEngine) -> None:
    await engine.generate([5, 6], PARAMS)  # behind all that was posted


async def chatter(engine: AsyncEngine, seed: int, session: Session | None) -> list[list[int]]:
    """The answers to turns of a chat that sometimes edits its last message, or begins anew."""
    rng, said = random.Random(seed), []
    calls: Any = engine if session is None else session
    history = [7, 8, 9] * 8
    for _ in range(8):
        prompt = [*history, *(rng.randrange(3, VOCAB) for _ in range(rng.randrange(4, 24)))][-180:]
        answer = await calls.generate(prompt, PARAMS)
        said.append(answer.token_ids)
        seconds = rng.choice((0.01, 5.0, None))
        if session is not None and seconds is not None:
            session.waiting(seconds)
        history = rng.choice(([*prompt, *answer.token_ids], [*prompt, *answer.token_ids], history, history[:24]))
    return said


@pytest.mark.parametrize("family", ["llama", "qwen3.5", "gemma3"])
async def test_answers_are_those_without_sessions(tmp_path: Path, family: str) -> None:
    make_checkpoint(family, tmp_path)
    async with await AsyncEngine.from_pretrained(tmp_path, **SETTINGS) as engine:
        alone = await asyncio.gather(*(chatter(engine, seed, None) for seed in range(6)))
        await engine.reset_prefix_cache()
        sessions = [engine.session() for _ in range(6)]
        assert alone == await asyncio.gather(*(chatter(engine, n, each) for n, each in enumerate(sessions)))
        for session in sessions:
            session.close()
            session.close()
        await settled(engine)
        tips = [node for node in engine.core.loop.scheduler.kv.tree.nodes() if node.tips]
        assert not tips


async def test_closing_gives_back_what_a_session_and_its_children_computed() -> None:
    async with await AsyncEngine.from_pretrained("demo", show_progress=False) as engine:
        async with engine.session() as session:
            await session.generate("A river flows through the town, and a mill stands on it.", PARAMS)
            child = session.child()
            for stream in child.fork("A river flows through the town, and nobody knows its name.", 2, PARAMS):
                await stream.result()
            async with session.stream("A bridge leads over the river to the market in the town.", PARAMS) as stream:
                await anext(aiter(stream))
            await settled(engine)
            assert passed(engine)[0] < passed(engine)[1]
        await settled(engine)
        assert child.closed
        assert passed(engine)[0] == passed(engine)[1]


async def test_tools_are_measured_and_waits_told() -> None:
    async with await AsyncEngine.from_pretrained("demo", show_progress=False) as engine:
        params = SamplingParams(temperature=0, max_tokens=60)
        branches = engine.core.loop.scheduler.roster.sessions._branches
        async with engine.session("tools") as session:
            for _ in range(2):
                answer = await session.chat(ASK, params, tools=[WEATHER])
                assert answer.finish_reason == "tool_calls"
                told = branches["tools"].back
                await asyncio.sleep(0.05)
            await settled(engine)
            assert branches["tools"].back > told  # what the first call took is known
            assert 0.05 <= engine.core.tool_waits.seconds["weather"] < 60


def test_an_engine_that_blocks_has_sessions() -> None:
    with Engine.from_pretrained("demo", show_progress=False) as engine, engine.session("mine", ttl=60) as session:
        said = session.generate("The capital of Norway is", PARAMS)
        assert said.token_ids == engine.generate("The capital of Norway is", PARAMS, session="mine").token_ids
        assert "mine" in repr(session)


async def test_what_is_malformed_is_refused_by_name() -> None:
    engine = AsyncEngine(lambda attempt: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(EngineClosed):
        engine.session()
    async with await AsyncEngine.from_pretrained("demo", show_progress=False) as engine:
        for field, call in (
            ("name", lambda: engine.session("")),
            ("ttl", lambda: engine.session(ttl=0)),
            ("seconds", lambda: engine.session().waiting(-1)),
        ):
            with pytest.raises(InvalidParameter, match=rf"^{field}: "):
                call()
        for name in (7, "x" * (MAX_SESSION_NAME + 1)):
            with pytest.raises(InvalidParameter, match=r"^session: "):
                await engine.generate("Hello", session=name)  # type: ignore[arg-type]


def test_agents_find_what_they_need_in_the_memory_that_they_need() -> None:
    """In the shape of public traces (`benchmarks.agents`) sessions find as much as if nothing were ever evicted, in no
    more pages than are wanted at a time, and every token is right."""
    whole, live = simulate(3, 100_000, True)
    lru, sessions = simulate(3, live, False)[0], simulate(3, live, True, exact=True)[0]
    assert sessions.hits > whole.hits - 0.002
    assert lru.hits < whole.hits - 0.008
