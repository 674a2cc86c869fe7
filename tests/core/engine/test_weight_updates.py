"""`update_weights` on the fake runner: its modes, its refusals, its end, and leaving it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.fake_engine import executor_of, greedy, idle, in_thread, make_core, make_engine, posted, until
from support.threads import no_new_engine_thread

from asyncengine import (
    AsyncEngine,
    Completion,
    Engine,
    EngineClosed,
    EngineDead,
    InvalidParameter,
    UnsupportedModel,
    WrongLoop,
)
from asyncengine.errors import ModelNotFound
from asyncengine.scheduler.messages import UpdateWeights
from asyncengine.testing import Recording, assert_nothing_held

from .updatable import Updatable, answer, prompt, replayed


def engine_of(**settings: Any) -> AsyncEngine:
    return make_engine(executor=Updatable(128, 4), **settings)


def asked(engine: AsyncEngine) -> bool:
    """An update was posted: whatever is posted from now on comes after it."""
    loop = engine.core.loop
    return bool(loop.scheduler.roster.weights.pending) or any(
        isinstance(message, UpdateWeights) for message in posted(engine)
    )


@pytest.mark.parametrize("depth", [1, 2])
async def test_requests_before_and_after(depth: int):
    """The former end first, with the weights that they were submitted to; the latter wait."""
    async with engine_of(max_steps_in_flight=depth) as engine:
        executor_of(engine).hold(after=3)
        old = [asyncio.create_task(engine.generate(prompt(i), greedy(20 + i))) for i in range(6)]
        await until(executor_of(engine).entered.is_set)
        update = asyncio.create_task(engine.update_weights(5))  # type: ignore[arg-type]
        await until(lambda: asked(engine))
        executor_of(engine).release()
        new = [asyncio.create_task(engine.generate(prompt(i), greedy(20 + i))) for i in range(6)]
        await update
        assert all(task.done() for task in old)
        assert not any(task.done() for task in new)
        for i in range(6):
            assert (await old[i]).token_ids == answer(prompt(i), 20 + i)
            assert (await new[i]).token_ids == answer(prompt(i), 20 + i, 5)
        await idle(engine)
        assert_nothing_held(engine.core)


async def test_recompute_takes_those_that_run_along():
    async with engine_of() as engine:
        executor_of(engine).hold(after=8)
        running = asyncio.create_task(engine.generate(prompt(0), greedy(400)))
        await until(executor_of(engine).entered.is_set)
        update = asyncio.create_task(engine.update_weights(5, mode="recompute"))  # type: ignore[arg-type]
        await until(lambda: asked(engine))
        executor_of(engine).release()
        await update
        assert not running.done()
        found = (await running).token_ids
        kept = next(count for count in range(400) if found[count] != answer(prompt(0), 400)[count])
        assert kept >= 6
        assert found[kept:] == answer([*prompt(0), *found[:kept]], 400 - kept, 5)


async def versions_under_load(kind: str, depth: int) -> None:
    """Each run of tokens that an answer says to be of a version is what the weights of that version give."""
    numbers = {0: 0, 1: 5, 7: 6, 8: 9}
    async with engine_of(max_steps_in_flight=depth, max_num_seqs=4) as engine:
        running: list[asyncio.Task[Completion]] = []
        for version, number in list(numbers.items())[1:]:
            seen = engine.stats().generated_tokens
            running += [
                asyncio.create_task(engine.generate(prompt(len(running) + i), greedy(60 + 9 * i))) for i in range(4)
            ]
            several = asyncio.create_task(engine.generate(prompt(20), greedy(60, n=3)))
            await until(lambda seen=seen: engine.stats().generated_tokens > seen + 20)  # type: ignore[misc]
            told = 7 if version == 7 else None
            given = await engine.update_weights(number, mode=kind, version=told)  # type: ignore[arg-type]
            assert given == version, "one more than before, unless it is told"
        done = await asyncio.gather(*running)
        mixed = 0
        for i, one in [*enumerate(done), *((20, sample) for sample in (await several).samples)]:
            runs, at = one.weight_versions, 0
            assert one.weight_version == runs[-1][0]
            assert sum(count for _, count in runs) == len(one.token_ids)
            assert [version for version, _ in runs] == sorted({version for version, _ in runs})
            mixed += len(runs) > 1
            for version, count in runs if i < 20 else ():  # samples but the first have seeds of their own
                known = [*prompt(i), *one.token_ids[:at]]
                assert one.token_ids[at : at + count] == answer(known, count, numbers[version]), (i, runs)
                at += count
        assert bool(mixed) == (kind == "recompute")
        assert done[0].weight_versions == done[0].samples[0].weight_versions
        late = await engine.generate(prompt(0), greedy(9))
        assert (late.weight_version, late.weight_versions) == (8, ((8, 9),))
        for wrong in (-1, 1.5, "7", True):
            with pytest.raises(InvalidParameter, match="version"):
                await engine.update_weights(3, version=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("mode", ["wait", "recompute"])
async def test_answers_say_which_weights_gave_them(mode: str, depth: int):
    await versions_under_load(mode, depth)


async def test_an_answer_of_no_token_has_the_version_of_its_end():
    async with engine_of() as engine:
        await engine.update_weights(5, version=40)  # type: ignore[arg-type]
        scored = await engine.generate(prompt(0), greedy(0, prompt_logprobs=True))
        assert (scored.weight_version, scored.weight_versions) == (40, ((40, 0),))


async def test_a_refused_update_changes_nothing():
    async with engine_of() as engine:
        with pytest.raises(ModelNotFound, match=r"lacks the tensor model\.norm\.weight"):
            await engine.update_weights("missing")
        with pytest.raises(InvalidParameter, match="mode: must be one of 'wait', 'recompute'"):
            await engine.update_weights(1, mode="abort")  # type: ignore[arg-type]
        assert (await engine.generate(prompt(0), greedy(9))).token_ids == answer(prompt(0), 9)


async def test_what_fails_while_it_writes_ends_the_engine():
    """Some weights may be new by then: nobody may be answered by a mixture."""
    async with engine_of() as engine:
        with pytest.raises(EngineDead, match="the file is gone"):
            await engine.update_weights("vanishes")
        with pytest.raises(EngineDead, match="the file is gone"):
            await engine.generate(prompt(0), greedy(9))


@pytest.mark.parametrize("drain", [True, False])
async def test_closing_ends_an_update_that_waits(drain: bool):
    with no_new_engine_thread():
        engine = engine_of()
        await engine.start()
        executor_of(engine).hold()
        old = asyncio.create_task(engine.generate(prompt(0), greedy(5)))
        await until(executor_of(engine).entered.is_set)
        update = asyncio.create_task(engine.update_weights(5))  # type: ignore[arg-type]
        await until(lambda: bool(engine.core.loop.updates))
        closing = asyncio.create_task(engine.aclose(drain=drain))
        await asyncio.sleep(0)
        executor_of(engine).release()
        with pytest.raises(EngineClosed):
            await update
        await asyncio.gather(old, closing, return_exceptions=True)
        with pytest.raises(EngineClosed):
            await engine.update_weights(6)  # type: ignore[arg-type]


async def test_a_blocking_call():
    async with engine_of() as owned:
        with pytest.raises(WrongLoop):
            Engine(owned).update_weights(5)  # type: ignore[arg-type]
    engine = engine_of(hosted=True)
    await engine.start()
    await in_thread(lambda: Engine(engine).update_weights(5))  # type: ignore[arg-type]
    assert (await engine.generate(prompt(0), greedy(9))).token_ids == answer(prompt(0), 9, 5)
    await engine.aclose()


async def test_one_that_cannot_be_updated_says_so():
    async with make_engine() as engine:
        with pytest.raises(UnsupportedModel, match="cannot be exchanged"):
            await engine.update_weights({})


async def test_a_recording_replays_with_its_updates(tmp_path: Any):
    told: list[tuple[str, Any]] = []
    core = make_core(Updatable(64, 4), wiring={"recorder": lambda *entry: told.append(entry)})
    async with AsyncEngine(lambda: core) as engine:
        tasks = [asyncio.create_task(engine.generate(prompt(i), greedy(30))) for i in range(3)]
        await until(lambda: engine.stats().generated_tokens > 3)
        await engine.update_weights(5, mode="recompute")  # type: ignore[arg-type]
        found = [(await task).token_ids for task in tasks]
    assert replayed(Recording(core.config, 64, told).save(tmp_path / "a.jsonl")) == found
