"""Prompts apart from decodes: the same answers as one engine's, whatever becomes of a replica that computes them."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from support.data import cases_of
from support.fake_engine import PATIENCE, until
from support.local_fleet import ENGINE, LocalCluster, LocalProcess, local_fleet, replaced
from support.long import LONG
from support.tiny_models import make_checkpoint

from asyncengine import AsyncEngine, Engine, EngineConfig, EngineDead, InvalidParameter, SamplingParams
from asyncengine.engine import peers
from asyncengine.execution.device import shared_gather
from asyncengine.grammar import Grammar
from asyncengine.integrations.fleet import Fleet, FleetConfig
from asyncengine.integrations.fleet.dispatcher import MOST_MISSED
from asyncengine.integrations.fleet.frontend import OneMachine
from asyncengine.integrations.fleet.replica import Replica
from asyncengine.integrations.placement.routing import Role
from asyncengine.request_spec import Peer

ROWS: dict[str, Any] = cases_of(__file__)

pytest.importorskip("zmq", reason='needs pyzmq: pip install "asyncengine[cluster]"')

PROMPT = [100 + (7 * place) % 300 for place in range(200)]
FULL = (len(PROMPT) - 1) // 16 * 16
PARAMS = SamplingParams(max_tokens=6, temperature=1.0, seed=3, logprobs=True, ignore_eos=True)
APART: dict[str, Any] = {"replicas": 2, "roles": ("prefill", "decode"), "min_prefill_tokens": 64}
Alone = Callable[[list[int]], Any]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait for a peer's answer lasts long enough on a busy machine as well. Each answer has one record."""
    monkeypatch.setattr(peers, "PLANNED_SECONDS", PATIENCE)
    monkeypatch.setattr(peers, "BATCH_BYTES", 1)


def prompt_of(number: int, tokens: int = len(PROMPT)) -> list[int]:
    """A prompt that no other number has the first page of."""
    return [100 + (7 * place + number * (place < 8)) % 300 for place in range(tokens)]


def scores(answer: Any) -> list[list[tuple[int, float]]]:
    return [[(each.token_id, each.logprob) for each in sample.logprobs] for sample in answer.samples]


def dispatcher_of(fleet: Fleet) -> Any:
    return fleet.core.fleet.dispatcher  # type: ignore[attr-defined]


async def acquainted(fleet: Fleet) -> None:
    """Wait until both replicas may ask each other."""
    there = dispatcher_of(fleet).replicas
    await until(lambda: len(there) == 2 and all(each.peer for each in there.values()), "acquaintance")


def process_of(fleet: Fleet, cluster: LocalCluster, role: str) -> LocalProcess:
    return cluster.processes[next(name for name, its in fleet.stats().roles.items() if its == role)]


@pytest.fixture(scope="module")
def alone() -> Iterator[Alone]:
    """Scores of one engine's answer to a prompt."""
    with Engine.from_pretrained("demo", **ENGINE) as engine:
        yield lambda prompt: scores(engine.generate(prompt, PARAMS))


# ---------------------------------------------------------------- the same answers


@pytest.mark.parametrize(("model", "dtype"), [("demo", "bfloat16"), ("lfm2", "float32"), ("mistral", "float32")])
async def test_one_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: str, dtype: str) -> None:
    """Replicas with roles answer as one engine: with attention, with recurrent states (a hybrid), and with windows."""
    path, prompt = model, PROMPT
    if model != "demo":
        make_checkpoint(model, tmp_path)
        path, prompt = str(tmp_path), [2 + 7 * place % 50 for place in range(len(PROMPT))]
    async with await AsyncEngine.from_pretrained(path, **{**ENGINE, "dtype": dtype}) as engine:
        right = scores(await engine.generate(prompt, PARAMS))
    async with local_fleet(monkeypatch, model=path, **APART, dtype=dtype) as (fleet, cluster):
        answer = await fleet.generate(prompt, PARAMS)
        assert scores(answer) == right
        assert answer.usage.restored_tokens == FULL
        assert fleet.stats().prefilled == 1
        await cluster.settle(fleet)


async def test_one_answer_to_whatever_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some requests are not sent on to a prefiller: a decoder computes what is short, cached or scored."""
    settings: dict[str, Any] = {"adapters": {"pirate": "demo/pirate"}}
    calls: list[tuple[SamplingParams, dict[str, Any]]] = [
        (PARAMS, {"adapter": "pirate"}),
        (PARAMS, {"cache_salt": "a", "priority": 3, "timeout": PATIENCE}),
        (PARAMS.replace(n=2), {}),
        (PARAMS.replace(grammar=Grammar.regex("[a-f]{5,9}"), max_tokens=20, ignore_eos=False), {"cache_salt": "b"}),
    ]
    scored = PARAMS.replace(prompt_logprobs=True)
    async with await AsyncEngine.from_pretrained("demo", **ENGINE, **settings) as engine:
        right = [await engine.generate(PROMPT, params, **options) for params, options in [*calls, (scored, {})]]
    async with local_fleet(monkeypatch, **APART, **settings) as (fleet, cluster):
        await acquainted(fleet)
        answers = [fleet.generate(PROMPT, params, **options) for params, options in calls]
        made = await asyncio.gather(*answers)
        assert [scores(one) for one in made] == [scores(other) for other in right[:-1]]
        pulled = [one.usage.restored_tokens for one in made].count(FULL)
        missed = len(calls) - pulled  # a decoder that gets no answer in time computes
        assert missed <= 1, fleet.stats().prefills_failed
        assert fleet.stats().prefilled == pulled
        decoder = process_of(fleet, cluster, "decode").replica.engine
        await until(lambda: decoder.stats().pages.cached >= FULL // 16 * len(calls), "its cache")
        await until(lambda: sum(dispatcher_of(fleet).router.index.num_pages(1 << bit) for bit in range(2)) > 60, "news")
        assert (await fleet.generate([*PROMPT, 7], PARAMS)).usage.restored_tokens == 0, "it is there"
        assert (await fleet.generate(prompt_of(1, 60), PARAMS)).usage.restored_tokens == 0, "it is short"
        answer = await fleet.generate(PROMPT, scored)
        assert (scores(answer), answer.prompt_logprobs) == (scores(right[-1]), right[-1].prompt_logprobs)
        assert fleet.stats().prefilled == pulled
        assert sum(fleet.stats().prefills_failed.values()) <= missed
        await cluster.settle(fleet)


async def test_roles_change_while_it_runs(monkeypatch: pytest.MonkeyPatch, alone: Alone) -> None:
    right = [alone(prompt_of(number)) for number in range(6)]
    async with local_fleet(monkeypatch, replicas=2, min_prefill_tokens=64) as (fleet, cluster):
        await acquainted(fleet)
        first, second = fleet.stats().roles
        turns: list[tuple[Role, Role]] = [
            ("both", "both"),
            ("prefill", "decode"),
            ("decode", "decode"),
            ("decode", "prefill"),
        ]
        for number, roles in enumerate(turns):
            before = fleet.stats().prefilled
            for name, role in ((first, "both"), (second, roles[1]), (first, roles[0])):
                await fleet.set_role(name, role)  # type: ignore[arg-type]
            assert fleet.stats().roles == {first: roles[0], second: roles[1]}
            assert scores(await fleet.generate(prompt_of(number), PARAMS)) == right[number]
            assert fleet.stats().prefilled - before == ("prefill" in roles), roles
        cluster.hold()
        waiting = asyncio.create_task(fleet.generate(prompt_of(5), PARAMS))
        prefills = dispatcher_of(fleet).replicas[second].prefills
        await until(lambda: bool(prefills), "a prompt on its way")
        await fleet.set_role(second, "both")
        cluster.release()
        assert scores(await waiting) == right[5]
        await fleet.set_role(first, "prefill")
        with pytest.raises(InvalidParameter, match='role: must be "decode" or "both"'):
            await fleet.set_role(second, "prefill")
        with pytest.raises(InvalidParameter, match="replica: must be one of"):
            await fleet.set_role("nobody", "decode")
        await cluster.settle(fleet)


@pytest.mark.skipif(shared_gather.missing() is not None, reason=str(shared_gather.missing()))
async def test_replicas_of_one_rank_and_of_several_exchange_prompts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Pages and states of two ranks are pulled by one and the other way round."""
    make_checkpoint("qwen3.5", tmp_path)
    path, prompts = str(tmp_path), [[2 + (7 * place + number) % 50 for place in range(200)] for number in range(2)]
    async with await AsyncEngine.from_pretrained(path, **ENGINE) as engine:
        right = [scores(await engine.generate(prompt, PARAMS)) for prompt in prompts]
    load, ranks = Replica.start, itertools.cycle((2, 1))

    async def start(replica: Replica, model: str, config: EngineConfig, key: bytes) -> Any:
        return await load(replica, model, config.replace(tensor_parallel=next(ranks)), key)

    monkeypatch.setattr(Replica, "start", start)
    async with local_fleet(monkeypatch, model=path, **APART) as (fleet, cluster):
        await acquainted(fleet)
        sizes = [each.replica.engine.info.tensor_parallel for each in cluster.processes.values()]
        assert sorted(sizes) == [1, 2]
        for turn, prompt in enumerate(prompts):
            answer = await fleet.generate(prompt, PARAMS)
            assert scores(answer) == right[turn]
            assert answer.usage.restored_tokens == FULL
            assert fleet.stats().prefilled == turn + 1
            first, second = fleet.stats().roles
            for name, role in ((first, "decode"), (second, "prefill")):
                await fleet.set_role(name, role)  # type: ignore[arg-type]
        await cluster.settle(fleet)


@pytest.mark.parametrize(
    ("settings", "said"),
    [*ROWS["what_makes_no_sense_is_refused"], ({"roles": ("decode",) * 3}, "roles: must be at most 2")],
)
async def test_what_makes_no_sense_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidParameter, match=said):
        await Fleet.from_pretrained("demo", replicas=2, address="local", **settings)


# ---------------------------------------------------------------- whoever leaves or is lost


async def test_leavers_and_deadlines_while_a_prompt_is_computed_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    async with local_fleet(monkeypatch, **APART) as (fleet, cluster):
        await acquainted(fleet)
        there, here = process_of(fleet, cluster, "prefill"), process_of(fleet, cluster, "decode")
        there.hold()
        streams = [fleet.stream(prompt_of(number), PARAMS.replace(n=number)) for number in (1, 2)]
        for stream in streams:
            await stream.__aenter__()
        prefills = dispatcher_of(fleet).replicas[there.name].prefills
        await until(lambda: len(prefills) == 2, "prompts on their way")
        for stream in streams:
            await stream.aclose()
        await until(lambda: not prefills, "what leaves at once")
        assert not here.replica.engine.core.loop.scheduler.requests  # type: ignore[attr-defined]
        late = asyncio.create_task(fleet.generate(prompt_of(3), PARAMS, timeout=0.1))
        await until(lambda: bool(prefills) or late.done(), "another prompt on its way, or its end")
        await asyncio.sleep(0.1)
        there.release()
        assert (await late).finish_reason == "timeout"
        await cluster.settle(fleet)
        # the prompt's replica refuses what is late, if the request's own does not end it before
        assert fleet.stats().prefilled == 0
        assert fleet.stats().prefills_failed in ({}, {"refused": 1})


async def test_prompts_go_on_where_they_belong_when_their_replica_is_lost(
    monkeypatch: pytest.MonkeyPatch, alone: Alone
) -> None:
    """The replica is lost while it computes them, and while it stands by; the one that takes its place has its role."""
    right = [alone(prompt_of(number)) for number in range(3)]
    async with local_fleet(monkeypatch, **APART) as (fleet, cluster):
        await acquainted(fleet)
        there = process_of(fleet, cluster, "prefill")
        there.hold()
        answers = [asyncio.create_task(fleet.generate(prompt_of(number), PARAMS)) for number in range(3)]
        await until(lambda: len(dispatcher_of(fleet).replicas[there.name].prefills) == 3, "prompts on their way")
        there.lose()
        assert [scores(answer) for answer in await asyncio.gather(*answers)] == right
        assert fleet.stats().prefills_failed == {"lost": 3}
        await acquainted(fleet)
        assert sorted(fleet.stats().roles.values()) == ["decode", "prefill"]
        assert (await fleet.generate(prompt_of(4), PARAMS)).usage.restored_tokens == FULL
        await cluster.settle(fleet)


async def test_a_decoder_that_is_lost_has_not_begun_what_is_computed_elsewhere(
    monkeypatch: pytest.MonkeyPatch, alone: Alone
) -> None:
    right = alone(PROMPT)
    async with local_fleet(monkeypatch, **APART) as (fleet, cluster):
        await acquainted(fleet)
        there, here = process_of(fleet, cluster, "prefill"), process_of(fleet, cluster, "decode")
        there.hold()
        waiting = asyncio.create_task(fleet.generate(PROMPT, PARAMS))
        await until(lambda: bool(dispatcher_of(fleet).replicas[there.name].prefills), "a prompt on its way")
        here.hold(after=3)
        short = fleet.stream(prompt_of(1, 20), PARAMS.replace(max_tokens=20))
        await anext(short)
        here.lose()
        with pytest.raises(EngineDead):
            await short.result()
        there.release()
        assert scores(await waiting) == right, "where it was computed: there is no other"
        await replaced(fleet, 2)
        await cluster.settle(fleet)


async def test_pages_that_do_not_come_are_computed_and_after_some_nobody_is_asked(
    monkeypatch: pytest.MonkeyPatch, alone: Alone
) -> None:
    """Pages may be evicted or of another fingerprint, or their prompt is refused."""
    prompts = [prompt_of(number) for number in range(MOST_MISSED + 2)]
    right = [alone(prompt) for prompt in prompts]
    async with local_fleet(monkeypatch, **APART) as (fleet, cluster):
        await acquainted(fleet)
        there, here = process_of(fleet, cluster, "prefill"), process_of(fleet, cluster, "decode")
        with monkeypatch.context() as patch:
            patch.setattr(there.replica.engine.core.client, "check_open", Mock(side_effect=ValueError("not now")))
            assert scores(await fleet.generate(prompts[0], PARAMS)) == right[0]
        assert fleet.stats().prefills_failed == {"refused": 1}
        prefixes = here.replica.engine.core.loop.sources.tiers[0]  # type: ignore[attr-defined]
        call, asked = prefixes.call, list[bytes]()

        async def say_nothing(peer: Peer, question: bytes) -> bytes:
            asked.append(question)
            return b""

        prefixes.call = say_nothing
        for number in range(1, MOST_MISSED + 2):
            assert scores(await fleet.generate(prompts[number], PARAMS)) == right[number]
        assert fleet.stats().prefills_failed == {"refused": 1, "missing": MOST_MISSED}
        assert len(asked) == MOST_MISSED
        prefixes.call = call
        dispatcher_of(fleet).replicas[there.name].rests_until = 0.0
        assert (await fleet.generate(prompt_of(9), PARAMS)).usage.restored_tokens == FULL
        await cluster.settle(fleet)


# ---------------------------------------------------------------- killed in mid-transfer


class MixedCluster(LocalCluster):
    """The second replica is a thread here; others, which may be killed, are processes."""

    def __init__(self, config: FleetConfig, name: str) -> None:
        super().__init__(config, name)
        self._machine = OneMachine(FleetConfig(replicas=2), f"{name}/process")

    def spawn(self) -> Any:
        if len(self.ever) == 1:
            return super().spawn()
        process: Any = self._machine.spawn()
        self.processes[process.name] = process
        self.ever.append(process)
        return process


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
async def test_prompts_are_exact_when_their_replica_is_killed_in_mid_transfer(
    monkeypatch: pytest.MonkeyPatch, alone: Alone
) -> None:
    requests, kills = (200, 10) if LONG else (4, 1)
    rng = random.Random(5)
    prompts = [prompt_of(number, rng.randrange(100, 400)) for number in range(requests)]
    right = [alone(prompt) for prompt in prompts]
    async with local_fleet(monkeypatch, **APART, kind=MixedCluster) as (fleet, cluster):
        here, kill_at, killed = process_of(fleet, cluster, "decode"), [0], list[int]()
        await acquainted(fleet)
        prefixes = here.replica.engine.core.loop.sources.tiers[0]  # type: ignore[attr-defined]
        call: Callable[[Peer, bytes], Awaitable[bytes]] = prefixes.call

        async def call_or_kill(peer: Peer, question: bytes) -> bytes:
            if b'"parts"' in question and kill_at[0]:
                kill_at[0] -= 1
                if not kill_at[0]:
                    victim: Any = process_of(fleet, cluster, "prefill")
                    killed.append(victim.child.program.pid)
                    os.kill(killed[-1], signal.SIGKILL)
            return await call(peer, question)

        prefixes.call = call_or_kill
        some, turn = requests // kills, asyncio.Semaphore(4)

        async def check(number: int) -> None:
            async with turn:
                answer = await asyncio.wait_for(fleet.generate(prompts[number], PARAMS), PATIENCE / 2)
            assert scores(answer) == right[number]

        for begun in range(0, requests, some):
            await acquainted(fleet)
            kill_at[0] = rng.randrange(2, 6 * some)  # a prompt has six pages or more
            await asyncio.gather(*(check(number) for number in range(begun, begun + some)))
        assert len(killed) == kills
        stats = fleet.stats()
        assert stats.lost == kills
        assert kills <= sum(stats.prefills_failed.values())
        assert stats.prefilled + sum(stats.prefills_failed.values()) <= requests
        print(stats.prefilled, stats.prefills_failed)  # of interest in the long form
