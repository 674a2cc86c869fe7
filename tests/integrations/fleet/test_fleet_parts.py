"""Parts of a fleet by themselves: statistics, resuming behind given output, messages, adapters, frameworks."""

from __future__ import annotations

import inspect
import json
import pickle
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from support.fake_engine import Steps
from support.local_fleet import LocalCluster, local_fleet, start_local_fleet

from asyncengine import EngineConfig, errors
from asyncengine.assembly.relay import Outbox, RelayMailbox
from asyncengine.errors import AdapterInUse, AdapterNotFound, GrammarError
from asyncengine.integrations.cli import demo
from asyncengine.integrations.cli.demo import Show
from asyncengine.integrations.fleet import Fleet, frontend
from asyncengine.integrations.fleet.adapters import FleetAdapters
from asyncengine.integrations.fleet.stats import sum_stats
from asyncengine.kvcache import PageCounts, StateCounts
from asyncengine.kvcache.store.record import StoreCounts
from asyncengine.lora.adapter import AdapterInfo
from asyncengine.outputs import Chunk, Usage
from asyncengine.scheduler.messages import GrammarReady
from asyncengine.stats import EngineStats, SpeculationStats, Summary, ThreadStats

# ---------------------------------------------------------------- figures


def test_nothing_that_an_engine_reports_is_left_out_of_a_fleet_s_figures() -> None:
    none = Summary.of(())
    own = EngineStats({}, {}, PageCounts(*[0] * 6), *[0] * 8, none, none, none, none, 0.0)
    guesses = SpeculationStats(2, 5, 3, (2, 1)), SpeculationStats(1, 1, 1, (1,), 1, 1)
    first, second = (
        replace(
            own,
            states=StateCounts(free=free, total=9),
            threads=threads,
            speculation=guessed,
            steps=free,
            stored=StoreCounts(bytes_read=free),
        )
        for free, threads, guessed in zip(
            (4, 5), (ThreadStats(1, 2, 0.5), ThreadStats(3, 4, 0.9)), guesses, strict=True
        )
    )
    found = sum_stats({"a": first, "b": second, "c": own}, own)
    assert set(found) == {item.name for item in fields(EngineStats)}
    assert found["steps"] == 9
    assert found["states"] == StateCounts(free=9, total=18)
    assert found["stored"] == StoreCounts(bytes_read=9)
    assert found["speculation"] == SpeculationStats(3, 6, 4, (3, 1), 1, 1)
    assert found["threads"] == ThreadStats(5, 7, pytest.approx((0.5 + 3 * 0.9 + 1) / 5))
    assert sum_stats({}, own)["speculation"] is None
    assert sum_stats({}, own)["threads"] == ThreadStats()


# ---------------------------------------------------------------- resuming


@pytest.mark.parametrize("settings", [{}, {"preempt_every": 3}, {"max_steps_in_flight": 2}])
def test_a_request_goes_on_behind_the_output_it_has(settings: dict[str, int]) -> None:
    for have in range(12):
        steps = Steps(**settings)
        prompt = list(range(2, 11))
        whole = steps.executor.model.oracle(prompt, 12, 0, ())
        ticket = steps.add(prompt, 12, resumed=tuple(whole[:have]))
        steps.run()
        assert steps.tokens[ticket] == whole[have:]
        assert steps.ended[ticket] == "length"
        steps.assert_empty()


class Picky:
    """A matcher that takes these tokens."""

    steered_from: int | None = None

    def __init__(self, takes: list[int]) -> None:
        self.takes = takes

    def accept(self, token: int, jump: bool = True) -> list[int]:
        if not self.takes or token != self.takes[0]:
            raise GrammarError("grammar", f"token {token} is not allowed here")
        return [self.takes.pop(0)]


def test_a_grammar_catches_up_with_the_output_or_ends_the_request() -> None:
    steps = Steps()
    fine = steps.add([2, 3], 8, needs_grammar=True, resumed=(5, 6), resumed_steered=True)
    wrong = steps.add([2, 3], 8, needs_grammar=True, resumed=(5, 9))
    matcher: Any = Picky([5, 6, 7])
    steps.apply(GrammarReady(fine, matcher))
    assert matcher.takes == [7]
    assert matcher.steered_from == 0  # the engine that was lost had closed it
    refusing: Any = Picky([5, 6, 7])
    steps.apply(GrammarReady(wrong, refusing))
    assert steps.ended == {wrong: "error"}
    assert "token 9 is not allowed" in str(steps.errors[wrong])


# ---------------------------------------------------------------- the wire


def every_error() -> list[type[errors.EngineError]]:
    found = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.EngineError)]
    assert len(found) > 20
    return found


@pytest.mark.parametrize("kind", every_error())
def test_errors_travel_as_what_they_are(kind: type[errors.EngineError]) -> None:
    code = getattr(kind.__init__, "__code__", None)  # those without a constructor of their own take a message
    made: dict[str, Any] = {
        "field": "max_tokens", "limit": "must be >= 1", "value": -1, "features": [("not", "/a")],
        "cause": ValueError("x"), "message": "what it says",
    }  # fmt: skip
    names = [] if code is None else code.co_varnames[1 : code.co_argcount]
    error = kind(**{name: made[name] for name in names if name in made}) if names else kind("what it says")
    other = pickle.loads(pickle.dumps(error))
    assert type(other) is kind
    assert str(other) == str(error)
    assert {name: str(value) for name, value in vars(other).items()} == {n: str(v) for n, v in vars(error).items()}


def test_an_update_merges_what_waits() -> None:
    outbox = Outbox()
    mailbox = RelayMailbox(7, outbox)
    for count in range(1000):
        mailbox.put(Chunk(f"{count},", [count]))
    mailbox.put(Chunk("b", [1], "stop", 1))
    mailbox.started_at, mailbox.first_token_at, mailbox.cached_tokens = 1.0, 1.5, 32
    assert outbox.take() == [mailbox]  # once
    output = pickle.loads(pickle.dumps(mailbox.take_output()))
    one, two = output.chunks
    assert one.token_ids == list(range(1000))
    assert one.text == "".join(f"{count}," for count in range(1000))
    assert (two.index, two.text, two.finish_reason) == (1, "b", "stop")
    assert (output.cached_tokens, output.computing) == (32, 0.5)
    full = Chunk("c", [2], "stop", 1, [], "why", Usage(1, 2), [], "because", "END")
    copy = pickle.loads(pickle.dumps(full))
    assert [getattr(copy, name) for name in Chunk.__slots__] == [getattr(full, name) for name in Chunk.__slots__]
    mailbox.put(full)
    assert outbox.take() == [mailbox]
    assert mailbox.take_output().computing is None  # told once


def test_adapters_are_claimed_and_forgotten() -> None:
    info = AdapterInfo("a", "/a", "digest", 8, 100, (), False, True, 0)
    store = FleetAdapters([info])
    assert store.claim([1, 2], "a") == "digest"
    assert store.list()[0].requests == 2
    with pytest.raises(AdapterInUse, match="2 requests"):
        store.forget("a", wait=False)
    gone = store.forget("a", wait=True)
    with pytest.raises(AdapterNotFound):
        store.claim([3], "a")
    store.cancel(1)
    assert not gone.done()
    store.cancel(2)
    assert gone.done()


# ---------------------------------------------------------------- in front of it


async def test_frameworks_take_a_fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    langchain = pytest.importorskip("asyncengine.integrations.langchain")
    llama_index = pytest.importorskip("asyncengine.integrations.llama_index")
    async with local_fleet(monkeypatch, replicas=2) as (fleet, _):
        model = langchain.ChatAsyncEngine(engine=fleet, temperature=0, max_tokens=12)
        wanted = (await fleet.chat([{"role": "user", "content": "What is the capital of Norway?"}])).text
        assert (await model.ainvoke("What is the capital of Norway?")).content.startswith(wanted[:10])
        assert model.invoke("What is the capital of Norway?").content.startswith(wanted[:10])
        llm = llama_index.AsyncEngineLLM(engine=fleet, temperature=0, max_tokens=12)
        assert str(await llm.acomplete("The")) == str(llm.complete("The"))
        assert "".join([piece.delta async for piece in await llm.astream_complete("The")])


async def test_the_fleets_demo_tells_its_story(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    async def local(cls: type[Fleet], model: str, *, config: EngineConfig, **settings: Any) -> Fleet:
        assert model == "demo"
        return (await start_local_fleet(monkeypatch, **settings))[0]

    monkeypatch.setattr(Fleet, "from_pretrained", classmethod(local))
    monkeypatch.setattr(demo, "LONG", demo.LONG.replace(max_tokens=100))
    summary = await demo.fleet_story(Show(), EngineConfig(), 2, 10)
    assert json.loads(json.dumps(summary)) == summary
    assert summary["loss"]["same"] == summary["loss"]["of"] == 12
    assert sum(summary["streams"]["shares"]) == 10
    cached = summary["prefixes"]["cached_tokens"]
    assert cached[0] == 0 < min(cached[1:])
    shown = capsys.readouterr().out
    for title in ("1  10 streams", "2  A prefix", "3  A replica is killed", "12 of 12 are"):
        assert title in shown


async def test_replicas_of_different_models_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the difference, and replicas that were started are ended."""
    made: list[LocalCluster] = []
    start = frontend.start_replicas

    async def start_two(cluster: Any, *arguments: Any) -> Any:
        made.append(cluster)
        first, second = await start(cluster, *arguments)
        object.__setattr__(second[1].model.info, "vocab_size", 17)
        return [first, second]

    monkeypatch.setattr(frontend, "start_replicas", start_two)
    with pytest.raises(errors.FleetError, match="not loaded the same model"):
        await start_local_fleet(monkeypatch, replicas=2)
    assert all(process.killed for process in made[0].ever)
