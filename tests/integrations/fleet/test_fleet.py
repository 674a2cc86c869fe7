"""A fleet as one engine: same answers, whatever becomes of its replicas. Without Ray: the replicas are threads here
(`support.local_fleet`); tests/integrations/fleet/test_fleet_on_ray.py has real ones."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.data import cases_of
from support.fake_engine import PATIENCE, posted, until
from support.local_fleet import ENGINE, LocalProcess, local_fleet, replaced, start_local_fleet
from support.long import LONG
from support.tiny_models import make_checkpoint

from asyncengine import (
    AdapterNotFound,
    AsyncEngine,
    Completion,
    ContextLengthExceeded,
    Engine,
    EngineClosed,
    EngineDead,
    FleetError,
    InvalidParameter,
    QueueFull,
    RequestFailed,
    SamplingParams,
)
from asyncengine.demo import resolve_adapter
from asyncengine.grammar import Grammar
from asyncengine.integrations.fleet import Fleet, FleetConfig
from asyncengine.integrations.fleet.replica import Replica

ROWS: dict[str, Any] = cases_of(__file__)

LEAVERS = 100 if LONG else 40
TEXTS = [f"Question {number}: what is the capital of the country numbered {number * 7}?" for number in range(12)]
NEEDS_ZMQ = 'needs pyzmq: pip install "asyncengine[cluster]"'
SAMPLED = SamplingParams(max_tokens=40, temperature=1.0, seed=7, ignore_eos=True)


@pytest.fixture(scope="module")
def alone() -> Iterator[AsyncEngine]:
    with Engine.from_pretrained("demo", **ENGINE) as engine:
        yield engine.aengine


@pytest.fixture(scope="module")
def right(alone: AsyncEngine) -> dict[str, list[int]]:
    """One engine's answer to each text."""
    return {text: Engine(alone).generate(text, SAMPLED).token_ids for text in TEXTS}


def same(one: Completion, other: Completion) -> None:
    """The same but for times, labels and what the caches had."""
    assert (one.text, one.token_ids) == (other.text, other.token_ids)
    assert (one.finish_reason, one.stop) == (other.finish_reason, other.stop)
    assert [sample.token_ids for sample in one.samples] == [sample.token_ids for sample in other.samples]
    assert one.logprobs == other.logprobs
    assert one.tool_calls == other.tool_calls or len(one.tool_calls) == len(other.tool_calls)
    assert one.usage.completion_tokens == other.usage.completion_tokens
    assert one.usage.prompt_tokens == other.usage.prompt_tokens


async def test_everything_an_engine_does(monkeypatch: pytest.MonkeyPatch, alone: AsyncEngine) -> None:
    async with local_fleet(monkeypatch, replicas=2, speculation_costs=(1.0, 1.02, 1.08)) as (fleet, cluster):
        assert replace(fleet.info, no_logits_processors=None) == alone.info
        assert fleet.count_tokens("hello") == alone.count_tokens("hello")
        for params in (
            SAMPLED,
            SamplingParams(max_tokens=12, temperature=0, logprobs=True, top_logprobs=2, prompt_logprobs=True),
            SamplingParams(max_tokens=12, n=3, seed=5, temperature=1.0),
            SamplingParams(max_tokens=40, temperature=0, grammar=Grammar.regex("[a-f]{5,9}")),
            SamplingParams(max_tokens=60, seed=1, temperature=1.5, stop=("a", "e")),
        ):
            one, other = await fleet.generate(TEXTS[0], params), await alone.generate(TEXTS[0], params)
            same(one, other)
            assert one.prompt_logprobs == other.prompt_logprobs
        chat = [{"role": "user", "content": "Hello!"}]
        same(await fleet.chat(chat, seed_free()), await alone.chat(chat, seed_free()))
        long = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        predicted = await fleet.chat(chat, long, prediction=(await alone.chat(chat, long)).text)
        assert predicted.usage.accepted_prediction_tokens > 20
        chunks = [chunk async for chunk in fleet.stream_chat(chat, seed_free())]
        assert "".join(chunk.text for chunk in chunks) == (await alone.chat(chat, seed_free())).text
        assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["stop"]
        assert Engine(fleet).generate("The", SamplingParams(max_tokens=3, temperature=0)).token_ids
        with pytest.raises(ContextLengthExceeded):
            await fleet.generate("x", SamplingParams(max_tokens=10**9))
        with pytest.raises(AdapterNotFound, match="nobody"):
            await fleet.generate("x", adapter="nobody")
        with pytest.raises(InvalidParameter, match="logits_processors: cannot be had: requests go to other"):
            await fleet.generate("x", SamplingParams(logits_processors=[min]))
        await cluster.settle(fleet)
        told = lambda: fleet.stats().generated_tokens > 100 and len(fleet.stats().replicas) == 2  # noqa: E731
        await until(told, "the replicas' figures")
        stats = fleet.stats()
        assert stats.finished["length"] >= 2
        assert stats.first_token.count
        assert sum(each.total for each in (s.pages for s in (await fleet.replica_stats()).values())) > 0
    with pytest.raises(EngineClosed):
        await fleet.generate("x")
    assert all(process.killed for process in cluster.ever)


async def test_a_reset_of_the_prefix_cache_is_one_of_all_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    async with local_fleet(monkeypatch, replicas=2) as (fleet, cluster):
        await asyncio.gather(*(fleet.generate(text, SAMPLED, cache_salt="tenant") for text in TEXTS))
        engines = [process.replica.engine for process in cluster.processes.values()]
        await cluster.settle(fleet)
        own = [engine.stats().pages.cached for engine in engines]
        assert all(own)
        assert await fleet.reset_prefix_cache("other") == (0, 0)
        assert await fleet.reset_prefix_cache("tenant") == (sum(own), 0)
        assert await fleet.reset_prefix_cache() == (0, 0)


async def test_a_session_is_one_at_all_replicas_and_goes_where_it_was(
    monkeypatch: pytest.MonkeyPatch, alone: AsyncEngine
) -> None:
    async with local_fleet(monkeypatch, replicas=2) as (fleet, cluster):
        rosters = [p.replica.engine.core.loop.scheduler.roster for p in cluster.processes.values()]

        def known(name: str) -> list[Any]:
            return [each.sessions._branches[name] for each in rosters if name in each.sessions._branches]

        async with fleet.session("talk") as session:
            for text in TEXTS[:3]:  # of other beginnings, while the load is even
                assert (await session.generate(text, SAMPLED)).text == (await alone.generate(text, SAMPLED)).text
            (branches,) = known("talk")
            before = branches.back
            session.waiting(60.0)
            await until(lambda: branches.back > before + 50e6)
        await until(lambda: not known("talk"))


async def test_decisions_are_those_of_one_engine(monkeypatch: pytest.MonkeyPatch, alone: AsyncEngine) -> None:
    """To the bit, each on one replica where its questions share the state; their usage counts what all of them found.
    Where a replica is lost, its decisions are made by the other one, and those whose callers have left are not."""
    questions = {f"q{number}": {"type": "noul", "instructions": f"Is it number {number}?"} for number in range(12)}
    states = ["A mail. " * 20 + text for text in TEXTS]
    expected = [(await alone.decide(state, questions)).answers for state in states]
    async with local_fleet(monkeypatch, replicas=2, on_loss="resume") as (fleet, cluster):
        made = await asyncio.gather(*(fleet.decide(state, questions) for state in states))
        assert [each.answers for each in made] == expected
        stats = (await fleet.replica_stats()).values()
        assert all(each.prompt_tokens for each in stats)
        assert sum(each.usage.prompt_tokens for each in made) == sum(each.prompt_tokens for each in stats)
        assert sum(each.usage.cached_tokens for each in made) == sum(each.cached_tokens for each in stats) > 0
        cluster.hold()
        leaver, *stayers = [asyncio.ensure_future(fleet.decide(state, questions)) for state in states]
        await until(lambda: all(fleet.stats().loads.values()), "decisions at both replicas")
        leaver.cancel()
        cluster.busiest(fleet).lose()
        cluster.release()
        assert [each.answers for each in await asyncio.gather(*stayers)] == expected[1:]
        assert fleet.stats().resumed
        await cluster.settle(fleet)


def seed_free() -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=30)


async def test_leavers_leave_nothing(monkeypatch: pytest.MonkeyPatch, right: dict[str, list[int]]) -> None:
    rng = random.Random(3)
    fleet, cluster = await start_local_fleet(monkeypatch, replicas=3)

    async def visit(number: int) -> None:
        text, stays = TEXTS[number % len(TEXTS)], rng.randrange(-20, 40)
        tokens: list[int] = []
        async with fleet.stream(text, SAMPLED) as stream:
            async for chunk in stream:
                tokens += chunk.token_ids
                if 0 < stays <= len(tokens):
                    break
        assert tokens == right[text][: len(tokens)]
        assert len(tokens) == 40 or 0 < stays <= len(tokens)

    async with fleet:
        await asyncio.gather(*(visit(number) for number in range(LEAVERS)))
        await cluster.settle(fleet)  # else what leavers have left would take the steps that are let pass
        cluster.hold(after=2)
        stream = fleet.stream(TEXTS[0], SAMPLED, request_id="mine")
        await anext(stream)
        assert fleet.abort("mine")
        ending = asyncio.ensure_future(stream.result())
        engines = [process.replica.engine for process in cluster.processes.values()]
        # it waits behind a held step, or one of those that pass has taken it already
        await until(lambda: ending.done() or any(map(posted, engines)), "its abort where it is computed")
        cluster.release()
        assert (await ending).finish_reason == "abort"
        await cluster.settle(fleet)


async def test_a_lost_replica_ends_its_own_streams_and_is_replaced(
    monkeypatch: pytest.MonkeyPatch, alone: AsyncEngine, right: dict[str, list[int]]
) -> None:
    fleet, cluster = await start_local_fleet(monkeypatch, replicas=3)
    async with fleet:
        cluster.hold(after=3)
        streams = {text: fleet.stream(text, SAMPLED) for text in TEXTS}
        for stream in streams.values():
            await stream.__aenter__()
        await until(lambda: sum(fleet.stats().loads.values()) == len(TEXTS), "all on their way")
        lost, doomed = cluster.busiest(fleet), max(fleet.stats().loads.values())
        await until(lambda: lost.held is not None and lost.held.reached.is_set(), "answers in the middle")
        lost.lose()
        cluster.release()
        ended = await asyncio.gather(*(stream.result() for stream in streams.values()), return_exceptions=True)
        dead = [outcome for outcome in ended if isinstance(outcome, EngineDead)]
        assert len(dead) == doomed > 0
        assert isinstance(dead[0].cause, FleetError)
        assert "was lost" in str(dead[0])
        for text, outcome in zip(streams, ended, strict=True):
            assert isinstance(outcome, EngineDead) or outcome.token_ids == right[text]
        await replaced(fleet, 3)
        assert fleet.stats().lost == 1
        same(await fleet.generate(TEXTS[0], SAMPLED), await alone.generate(TEXTS[0], SAMPLED))
        await cluster.settle(fleet)


RESUMED = {
    "seeded": SAMPLED,
    "unseeded": SamplingParams(max_tokens=40, temperature=0, ignore_eos=True),
    "penalties": SAMPLED.replace(presence_penalty=1.5, frequency_penalty=0.7, repetition_penalty=1.3),
    "samples": SAMPLED.replace(n=3),
    "logprobs": SAMPLED.replace(logprobs=True, prompt_logprobs=True),
    "stop strings": SAMPLED.replace(stop=("qqqq", "the end of it all"), min_tokens=30),
    "grammar": SamplingParams(max_tokens=45, temperature=1.0, seed=3, grammar=Grammar.regex("[a-z ]{40}[0-9]{3}")),
}


async def test_a_lost_replicas_requests_go_on_elsewhere_exactly(
    monkeypatch: pytest.MonkeyPatch, alone: AsyncEngine
) -> None:
    """Each kind of request, its replica lost in the middle: the rest is what it would have been."""
    async with local_fleet(monkeypatch, replicas=2, on_loss="resume") as (fleet, cluster):
        for kind, params in RESUMED.items():
            resumed = fleet.stats().resumed
            cluster.hold(after=3)
            stream = fleet.stream(TEXTS[0], params)
            await anext(stream)
            cluster.busiest(fleet).lose()
            cluster.release()
            one, other = await stream.result(), await alone.generate(TEXTS[0], params)
            same(one, other)
            assert one.prompt_logprobs == other.prompt_logprobs, kind
            assert fleet.stats().resumed > resumed, kind
            await replaced(fleet, 2)
        await cluster.settle(fleet)


async def test_scaling_and_restarting_drop_no_stream(
    monkeypatch: pytest.MonkeyPatch, right: dict[str, list[int]]
) -> None:
    """Three ask all the time: each replica has some, and the machine has time to load others."""
    fleet, cluster = await start_local_fleet(monkeypatch, replicas=1)
    done = asyncio.Event()

    async def keep_asking(text: str) -> int:
        count = 0
        while not done.is_set():
            assert (await fleet.generate(text, SAMPLED)).token_ids == right[text]
            count += 1
        return count

    async with fleet:
        asking = [asyncio.create_task(keep_asking(text)) for text in TEXTS[:3]]
        await fleet.scale(2)
        assert len(cluster.processes) == 2
        before = set(cluster.processes)
        await fleet.restart()
        assert len(cluster.processes) == 2
        assert not before & set(cluster.processes)
        cluster.room = 2  # no room for both: the old one goes first
        await fleet.restart()
        await fleet.scale(1)
        assert len(cluster.processes) == 1
        cluster.room = 1
        with pytest.raises(FleetError, match="only replica"):
            await fleet.restart()
        done.set()
        assert min(await asyncio.gather(*asking)) >= 1
        assert fleet.stats().lost == 0
        await cluster.settle(fleet)


async def test_who_goes_is_said_by_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The load of a replica alone does not decide who goes: it decides among equals."""
    async with local_fleet(monkeypatch, replicas=4) as (fleet, cluster):
        first, second, third, fourth = cluster.processes
        cluster.hold()
        asking = asyncio.create_task(fleet.generate(TEXTS[0], SAMPLED))
        await until(lambda: sum(fleet.stats().loads.values()) > 0)
        busy = cluster.busiest(fleet).name
        idle = [name for name in (first, second, third, fourth) if name != busy]
        cluster.scores = {busy: 0.25, idle[0]: 0.5}
        cluster.release()
        await fleet.scale(3)
        assert {*cluster.processes} == {*idle}
        await fleet.scale(2)
        assert {*cluster.processes} == {*idle[1:]}
        assert (await asking).finish_reason == "length"


async def test_a_full_fleet_pushes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async with local_fleet(monkeypatch, replicas=1, max_num_seqs=1, max_queued_requests=2) as (fleet, cluster):
        cluster.hold()
        asking = [asyncio.create_task(fleet.generate(text, SAMPLED)) for text in TEXTS]
        refusals = len(TEXTS) - 3  # one runs, two wait
        await until(lambda: sum(task.done() for task in asking) >= refusals, "refusals")
        cluster.release()
        outcomes = await asyncio.gather(*asking, return_exceptions=True)
        assert all(isinstance(outcome, (Completion, QueueFull)) for outcome in outcomes)
        await cluster.settle(fleet)


async def test_closing_drains_or_aborts(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, _ = await start_local_fleet(monkeypatch, replicas=1)
    stream = fleet.stream(TEXTS[0], SAMPLED)
    await anext(stream)
    await fleet.aclose(drain=True)
    assert (await stream.result()).finish_reason == "length"
    fleet, _ = await start_local_fleet(monkeypatch, replicas=1)
    stream = fleet.stream(TEXTS[0], SAMPLED)
    await anext(stream)
    await fleet.aclose()
    assert (await stream.result()).finish_reason in ("abort", "length")


async def test_an_adapter_is_also_where_a_replica_was_about_to_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """The replacement is not asked while it loads, and what it was told to load is older than the adapter."""
    loading, go_on = threading.Event(), threading.Event()
    call = LocalProcess.call

    async def held(self: LocalProcess, method: str, *arguments: Any, timeout: float) -> Any:
        answer = await call(self, method, *arguments, timeout=timeout)
        if method == "start":
            loading.set()
            await asyncio.to_thread(go_on.wait)
        return answer

    async with local_fleet(monkeypatch, replicas=2) as (fleet, cluster):
        first, _ = cluster.ever
        monkeypatch.setattr(LocalProcess, "call", held)
        first.lose()
        await until(loading.is_set, "a replacement that loads")
        await fleet.load_adapter("pirate", resolve_adapter("demo/pirate", None))
        go_on.set()
        await replaced(fleet, 2)
        assert len(cluster.ever) == 3
        assert all(process.replica.engine.adapters() for process in cluster.processes.values())


async def test_adapters_are_everywhere(monkeypatch: pytest.MonkeyPatch, alone: AsyncEngine) -> None:
    path = resolve_adapter("demo/pirate", None)
    chat = [{"role": "user", "content": "Hello!"}]
    await alone.load_adapter("pirate", path)
    wanted = await alone.chat(chat, seed_free(), adapter="pirate")
    async with local_fleet(monkeypatch, replicas=2) as (fleet, cluster):
        info = await fleet.load_adapter("pirate", path)
        assert fleet.adapters() == (info,)
        same(await fleet.chat(chat, seed_free(), adapter="pirate"), wanted)
        await fleet.scale(3)  # who comes later has it too
        assert all(process.replica.engine.adapters() for process in cluster.processes.values())
        await fleet.unload_adapter("pirate", wait=True)
        assert fleet.adapters() == ()
        assert not any(process.replica.engine.adapters() for process in cluster.processes.values())
        with pytest.raises(AdapterNotFound):
            await fleet.chat(chat, adapter="pirate")


async def test_what_cannot_go_on_exactly_ends_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """The adapter is not there any more where the request would go on."""
    adapters = {"pirate": "demo/pirate"}
    async with local_fleet(monkeypatch, replicas=2, on_loss="resume", adapters=adapters) as (fleet, cluster):
        cluster.hold(after=3)
        stream = fleet.stream(TEXTS[0], SAMPLED, adapter="pirate")
        await anext(stream)
        busy = cluster.busiest(fleet)
        (other,) = (process for process in cluster.processes.values() if process is not busy)
        await other.call("unload_adapter", "pirate", timeout=120)
        busy.lose()
        cluster.release()
        with pytest.raises(EngineDead, match="no other could go on: adapter: its content has changed"):
            await stream.result()
        await replaced(fleet, 2)
        await cluster.settle(fleet)


async def test_a_fleet_made_smaller_while_one_is_replaced_is_as_small_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    async with local_fleet(monkeypatch, replicas=2) as (fleet, cluster):
        next(iter(cluster.processes.values())).lose()
        await until(lambda: len(cluster.ever) == 3, "a replacement that has begun")
        await fleet.scale(1)
        await until(lambda: len(cluster.processes) == 1, "a fleet of one")
        assert (await fleet.generate(TEXTS[0], SAMPLED)).token_ids


async def test_a_node_with_another_release_is_named_and_nothing_of_it_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, cluster = await start_local_fleet(monkeypatch, replicas=1)

    async def hello(replica: Replica) -> tuple[str, int]:
        return "0.0.1", 1

    async with fleet:
        monkeypatch.setattr(Replica, "hello", hello)
        said = r"version skew: this program has asyncengine .*, node node-1 has 0\.0\.1 \(wire 1\): install the same"
        with pytest.raises(FleetError, match=said):
            await fleet.scale(2)
        assert len(cluster.processes) == 1
        assert cluster.ever[1].killed
        assert (await fleet.generate(TEXTS[0], SAMPLED)).token_ids
    with pytest.raises(FleetError, match=said.replace("node-1", "node-0")):
        await start_local_fleet(monkeypatch, replicas=1)


async def test_a_replica_that_says_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    async with local_fleet(monkeypatch, replicas=1) as (fleet, cluster):
        settings = fleet.core.fleet.manager._settings
        cluster.hold(after=3)
        stream = fleet.stream(TEXTS[0], SAMPLED)
        await anext(stream)
        (process,) = cluster.processes.values()
        process.speaks.clear()
        object.__setattr__(settings, "silence_limit", 1.0)  # now alone: others may be late on a busy machine
        with pytest.raises(EngineDead, match="said nothing"):
            await stream.result()
        object.__setattr__(settings, "silence_limit", PATIENCE)
        await replaced(fleet, 1)
        assert (await fleet.generate("The", SAMPLED)).token_ids


async def test_what_has_no_replica_waits_and_then_the_fleet_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncengine.integrations.fleet.replicas.RETRY_SECONDS", 0.01)
    async with local_fleet(monkeypatch, replicas=1, on_loss="resume") as (fleet, cluster):
        cluster.hold(after=3)
        stream = fleet.stream(TEXTS[0], SAMPLED)
        await anext(stream)
        cluster.room = 0
        (process,) = cluster.processes.values()
        process.lose()
        with pytest.raises((EngineDead, RequestFailed), match="none can be started"):
            await stream.result()
        with pytest.raises(EngineDead):
            await fleet.generate("x")


async def test_a_head_that_is_gone_ends_the_fleet_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncengine.integrations.fleet.replicas.HEAD_SECONDS", 0.05)
    async with local_fleet(monkeypatch, replicas=1) as (fleet, cluster):
        cluster.hold(after=3)
        stream = fleet.stream(TEXTS[0], SAMPLED)
        await anext(stream)
        cluster.head = False
        with pytest.raises(EngineDead, match="the head of the Ray cluster is gone"):
            await stream.result()
        cluster.release()
        with pytest.raises(EngineDead, match="head"):
            await fleet.generate("x")
    assert all(process.killed for process in cluster.ever)


async def test_a_fleet_that_stood_still_blames_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A laptop that slept, a debugger: whatever the replicas said meanwhile has not been read yet."""
    async with local_fleet(monkeypatch, replicas=1, silence_limit=3.0) as (fleet, cluster):
        await fleet.generate("The", SAMPLED)
        loop, (process,) = fleet.core.fleet.runs_on.result(), cluster.processes.values()

        def stand_still() -> None:
            process.speaks.clear()
            time.sleep(3.2)
            loop.call_later(0.2, process.speaks.set)

        loop.call_soon_threadsafe(stand_still)
        assert (await fleet.generate(TEXTS[0], SAMPLED)).token_ids
        assert fleet.stats().lost == 0


async def test_a_connection_that_breaks_between_two_who_live_is_a_lost_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fleet cannot tell what was lost with the connection. The replica's streams go on elsewhere, and what is left
    of it is ended."""
    pytest.importorskip("zmq", reason=NEEDS_ZMQ)
    async with local_fleet(monkeypatch, replicas=2, on_loss="resume") as (fleet, cluster):
        right = {text: (await fleet.generate(text, SAMPLED)).token_ids for text in TEXTS}
        cluster.hold(after=3)
        streams = {text: fleet.stream(text, SAMPLED) for text in TEXTS}
        for stream in streams.values():
            await stream.__aenter__()
        await until(lambda: sum(fleet.stats().loads.values()) == len(TEXTS), "all on their way")
        cut = cluster.busiest(fleet)
        await until(lambda: cut.held is not None and cut.held.reached.is_set(), "answers in the middle")
        cut.cut()
        cluster.release()
        assert {text: (await stream.result()).token_ids for text, stream in streams.items()} == right
        assert fleet.stats().lost == 1
        assert fleet.stats().resumed > 0
        await until(lambda: cut.killed and len(fleet.stats().loads) == 2, "a replacement")


async def test_without_connections_ray_s_calls_are_used(
    monkeypatch: pytest.MonkeyPatch, alone: AsyncEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """Ray carries all from the first request on, which was submitted while the connection was being made."""
    zmq = pytest.importorskip("zmq", reason=NEEDS_ZMQ)

    async def listen(replica: Replica, address: str, fleet_key: bytes) -> tuple[int, bytes]:
        return 1, zmq.curve_keypair()[0]

    right = [(await alone.generate(text, SAMPLED)).token_ids for text in TEXTS]
    monkeypatch.setattr(Replica, "listen", listen)
    async with local_fleet(monkeypatch, replicas=2) as (fleet, cluster):
        answers = await asyncio.gather(*(fleet.generate(text, SAMPLED) for text in TEXTS))
        assert [answer.token_ids for answer in answers] == right
        by_ray = lambda: sum("updates by Ray" in process.calls for process in cluster.processes.values())  # noqa: E731
        await until(lambda: by_ray() == 2, "updates of both by Ray")
        assert caplog.text.count("Ray carries all") == 2


@pytest.mark.parametrize(
    ("settings", "field"), [*ROWS["settings_are_refused_by_name"], ({"num_cpus": float("nan")}, "num_cpus")]
)
def test_settings_are_refused_by_name(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidParameter, match=field):
        FleetConfig(**settings)


async def test_unknown_settings_are_refused_before_anything_starts() -> None:
    with pytest.raises(InvalidParameter, match="replicas"):
        await Fleet.from_pretrained("demo", replica=3)
    with pytest.raises(InvalidParameter, match="hosted"):
        await Fleet.from_pretrained("demo", hosted=False)


async def test_experts_come_from_whichever_replicas_computed_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A request whose replica was lost in the middle has them all as well."""
    folder = str(make_checkpoint("qwen3moe", tmp_path / "model"))
    params, prompt = SAMPLED.replace(return_routed_experts=True, n=2), list(range(5, 40))
    with Engine.from_pretrained(folder, **ENGINE) as engine:
        expected = engine.generate(prompt, params)
    async with local_fleet(monkeypatch, replicas=2, model=folder, on_loss="resume") as (fleet, cluster):
        for lost in (False, True):
            cluster.hold(after=3)
            stream = fleet.stream(prompt, params)
            await anext(stream)
            if lost:
                cluster.busiest(fleet).lose()
            cluster.release()
            found = await stream.result()
            for one, other in zip(found.samples, expected.samples, strict=True):
                assert one.token_ids == other.token_ids
                assert np.array_equal(one.routed_experts, other.routed_experts)
            await replaced(fleet, 2)
        assert fleet.stats().resumed
