"""A dead engine says so to every stream once; a fault of one row harms nobody else (contract 10, 12)."""

from __future__ import annotations

import asyncio
import logging

import pytest
from support.fake_engine import PATIENCE, executor_of, greedy, idle, in_thread, make_engine, oracle, until
from support.plug_points import Compiler, Letters

from asyncengine import EngineConfig
from asyncengine.errors import EngineDead, InvalidParameter, RequestFailed
from asyncengine.events import EngineDied, Event, StepDone, StepSlow

HOSTINGS = [pytest.param(False, id="owned"), pytest.param(True, id="hosted")]


@pytest.mark.parametrize("hosted", HOSTINGS)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("cause", [RuntimeError("device lost"), StopIteration("x"), MemoryError()], ids=repr)
async def test_a_runner_that_raises_ends_every_stream_once(hosted: bool, depth: int, cause: Exception):
    async with make_engine(hosted=hosted, max_steps_in_flight=depth, max_num_seqs=3) as engine:
        seen: list[Event] = []
        engine.on_event(seen.append)
        executor = executor_of(engine)
        executor.hold()
        streams = [engine.stream([2 + i, 3], greedy(6, n=1 + i % 2)) for i in range(8)]
        for stream in streams:
            await stream.__aenter__()
        executor.failure = cause
        executor.release()
        errors = []
        for i, stream in enumerate(streams):
            chunks = []
            with pytest.raises(EngineDead) as raised:  # noqa: PT012
                async for chunk in stream:
                    chunks.append(chunk)
            errors.append(raised.value)
            assert [c.finish_reason for c in chunks] == ["engine_dead"] * (1 + i % 2)
            assert "engine died" in (chunks[-1].error or "")
        assert len(set(map(id, errors))) == len(errors), "each consumer gets an error of its own"
        assert not engine.alive
        with pytest.raises(EngineDead):
            await engine.generate([2, 3], greedy(2))
        assert not engine.abort("x")
        assert engine.stats().finished == {"engine_dead": 12}
        assert sum(isinstance(event, EngineDied) for event in seen) == 1
        await engine.aclose()


@pytest.mark.parametrize("hosted", HOSTINGS)
async def test_the_hard_limit_ends_the_engine_loudly(hosted: bool, caplog):
    async with make_engine(hosted=hosted, step_soft_limit=0.01, step_hard_limit=0.05) as engine:
        executor = executor_of(engine)
        executor.hold()
        try:
            with caplog.at_level(logging.WARNING, "asyncengine"), pytest.raises(EngineDead, match="ran for over"):
                await engine.generate([2, 3], greedy(3))
            assert not engine.alive
            assert "the engine died" in caplog.text
        finally:
            executor.release()


@pytest.mark.parametrize("hosted", HOSTINGS)
@pytest.mark.parametrize("depth", [1, 2])
async def test_a_loss_elsewhere_ends_streams_while_the_device_hangs(hosted: bool, depth: int):
    """A GPU's kernel hangs so when it waits for a rank that is gone. Its late result is delivered to nobody."""
    async with make_engine(hosted=hosted, max_steps_in_flight=depth) as engine:
        executor = executor_of(engine)
        executor.hold()
        stream = engine.stream([2, 3], greedy(300))
        await stream.__aenter__()
        await until(lambda: bool(engine.core.loop.in_flight))
        await in_thread(lambda: engine.core.loop.fail(RuntimeError("rank 1 was killed")))
        try:
            async with asyncio.timeout(PATIENCE / 2):  # the step is held for longer
                with pytest.raises(EngineDead, match="rank 1 was killed"):
                    await stream.result()
            assert not engine.alive
        finally:
            executor.release()


@pytest.mark.parametrize("hosted", HOSTINGS)
async def test_the_soft_limit_reports_what_runs_and_harms_nothing(hosted: bool):
    async with make_engine(hosted=hosted, step_soft_limit=0.01) as engine:
        slow: list[StepSlow] = []
        engine.on_event(lambda event: slow.append(event) if isinstance(event, StepSlow) else None)
        executor_of(engine).hold()
        stream = engine.stream([2, 3, 4], greedy(3))
        await stream.__aenter__()
        await until(lambda: bool(slow))
        executor_of(engine).release()
        assert (await stream.result()).token_ids == oracle(engine, [2, 3, 4], 3)
        assert slow[0].step == 1
        assert "1 rows, 3 tokens, longest context 3" in slow[0].plan


async def test_a_hook_that_raises_harms_nobody(caplog):
    async with make_engine() as engine:
        seen: list[Event] = []

        def broken(event: Event) -> None:
            raise ValueError("hook")

        remove = engine.on_event(broken)
        engine.on_event(seen.append)
        with caplog.at_level(logging.ERROR, "asyncengine"):
            done = await engine.generate([2, 3], greedy(5))
        assert done.token_ids == oracle(engine, [2, 3], 5)
        assert sum(isinstance(event, StepDone) for event in seen) == len(done.token_ids)
        assert caplog.text.count("an event hook failed") == 1, "not at every step"
        remove()
        with pytest.raises(InvalidParameter, match="hook: must be callable, got 3"):
            engine.on_event(3)  # type: ignore[arg-type]


async def test_a_consumer_whose_loop_is_gone_does_not_hurt_the_engine():
    async with make_engine(hosted=True) as engine:
        executor = executor_of(engine)
        executor.hold()
        kept = []

        def abandon() -> None:
            loop = asyncio.new_event_loop()
            stream = engine.stream([2, 3], greedy(9))
            kept.append(loop.create_task(stream.result()))
            for _ in range(3):
                loop.run_until_complete(asyncio.sleep(0))
            loop.close()

        await in_thread(abandon)
        other = engine.stream([4, 5], greedy(9))
        await other.__aenter__()
        executor.release()
        assert (await other.result()).token_ids == oracle(engine, [4, 5], 9)
        await idle(engine)
        assert engine.alive
        kept[0]._log_destroy_pending = False


async def test_a_decoder_that_raises_ends_its_request_only():
    async with make_engine() as engine:
        broken, fine = engine.stream([2, 3], greedy(9, ignore_eos=True)), engine.stream([4, 5], greedy(9))
        await broken.__aenter__()
        await fine.__aenter__()
        stream = next(iter(engine.core.loop.delivery.expected.values()))

        class Broken:
            def push(self, tokens) -> str:
                if stream.num_tokens > 2:
                    raise ValueError("no such piece")
                return ""

            def finish(self) -> str:
                raise ValueError("no such piece")

        stream.detokenizer = Broken()
        with pytest.raises(RequestFailed, match="no such piece"):
            await broken.result()
        assert (await fine.result()).token_ids == oracle(engine, [4, 5], 9)
        await idle(engine)
        assert engine.stats().finished["error"] == 1


async def test_a_broken_decoder_does_not_keep_a_dying_engine_from_telling_everybody():
    async with make_engine() as engine:
        executor_of(engine).hold()
        streams = [engine.stream([2 + i, 3], greedy(9)) for i in range(3)]
        for stream in streams:
            await stream.__aenter__()
        await in_thread(executor_of(engine).entered.wait)

        class Broken:
            def finish(self) -> str:
                raise ValueError

        next(iter(engine.core.loop.delivery.streams.values())).detokenizer = Broken()
        executor_of(engine).failure = RuntimeError("device lost")
        executor_of(engine).release()
        for stream in streams:
            with pytest.raises(EngineDead):
                await stream.result()


# -------------------------------------------------------------------- grammars through the whole engine


async def test_grammar_requests_run_constrained_and_others_proceed():
    compiler = Compiler()
    async with make_engine(wiring={"grammars": compiler}) as engine:
        async with engine.stream([2, 3], greedy(20, grammar=Letters([10, 11], 5))) as constrained:
            done = await engine.generate([4, 5], greedy(6))
            assert done.token_ids == oracle(engine, [4, 5], 6)
            compiler.finish(1)
            result = await constrained.result()
        assert result.finish_reason == "stop"
        assert len(result.token_ids) == 5
        assert set(result.token_ids) <= {10, 11}
    assert compiler.closed


@pytest.mark.parametrize("way", ["abort", "timeout"])
async def test_whatever_ends_a_request_cancels_its_compilation(way: str):
    compiler = Compiler()
    async with make_engine(wiring={"grammars": compiler}) as engine:
        timeout = 0.02 if way == "timeout" else None
        async with engine.stream([2, 3], greedy(20, grammar=Letters([10], 5)), timeout=timeout) as stream:
            await until(lambda: compiler.started == [1])
            if way == "abort":
                stream.abort()
            assert (await stream.result()).finish_reason == way
        assert not compiler.pending
        await idle(engine)


async def test_a_grammar_that_fails_to_compile_is_the_requests_error():
    compiler = Compiler()
    async with make_engine(wiring={"grammars": compiler}) as engine:
        async with engine.stream([2, 3], greedy(20, grammar=Letters([10], 5))) as stream:
            await until(lambda: compiler.started == [1])
            await in_thread(lambda: compiler.finish(1, ValueError("state explosion")))
            with pytest.raises(RequestFailed, match="state explosion"):
                await stream.result()
        assert engine.alive


async def test_a_compiler_that_cannot_even_start_is_the_requests_error():
    class Broken(Compiler):
        def start(self, ticket, order, done) -> None:
            raise OSError("no more processes")

    async with make_engine(wiring={"grammars": Broken()}) as engine:
        with pytest.raises(RequestFailed, match="no more processes"):
            await engine.generate([2, 3], greedy(5, grammar=Letters([10], 5)))
        assert engine.alive


def test_an_engine_on_uvloop_without_uvloop_is_refused_by_name(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InvalidParameter, match="uvloop: needs the package"):
        make_engine(hosted=True, uvloop=True).start_blocking()
    assert EngineConfig(uvloop=True).uvloop
