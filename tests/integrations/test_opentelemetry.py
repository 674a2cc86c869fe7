"""Spans of requests: what they say, and whose children they are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import httpx
import pytest
from opentelemetry import trace as otel
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from starlette.applications import Starlette
from support.fake_engine import executor_of, greedy, make_engine
from support.http_server import serving_thread

from asyncengine import AsyncEngine, Engine, EngineDead, SamplingParams
from asyncengine.grammar import Grammar
from asyncengine.integrations.http import app
from asyncengine.integrations.opentelemetry import trace

SPANS = InMemorySpanExporter()
PROVIDER = TracerProvider()
PROVIDER.add_span_processor(SimpleSpanProcessor(SPANS))
TRACER = PROVIDER.get_tracer("the test")
TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture(autouse=True)
def none_before() -> None:
    SPANS.clear()


@pytest.fixture(scope="module")
def demo() -> Iterator[Engine]:
    with Engine.from_pretrained("demo", show_progress=False) as engine:
        trace(engine, tracer_provider=PROVIDER)
        yield engine


def spans() -> tuple[list[ReadableSpan], dict[str, ReadableSpan]]:
    """(spans of requests, the parts of the last one by name), of everything that has ended."""
    done = SPANS.get_finished_spans()
    whole = [span for span in done if "gen_ai.operation.name" in (span.attributes or {})]
    parts = [span for span in done if span.parent and span.parent.span_id == whole[-1].context.span_id]
    return whole, {span.name: span for span in parts}


def test_a_chat_by_the_conventions(demo: Engine) -> None:
    params = SamplingParams(max_tokens=9, temperature=0.5, seed=3, n=2, stop=("@@",), top_k=7)
    done = demo.chat([{"role": "user", "content": "hello"}], params, request_id="mine")
    [span], parts = spans()
    assert (span.name, span.kind, span.parent) == ("chat demo", otel.SpanKind.INTERNAL, None)
    found = dict(span.attributes or {})
    assert found == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "asyncengine",
        "gen_ai.request.model": "demo",
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": found["gen_ai.request.top_p"],
        "gen_ai.request.top_k": 7,
        "gen_ai.request.seed": 3,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.stop_sequences": ("@@",),
        "gen_ai.request.choice.count": 2,
        "gen_ai.response.id": "mine",
        "gen_ai.response.model": "demo",
        "gen_ai.response.finish_reasons": tuple(sample.finish_reason for sample in done.samples),
        "gen_ai.response.time_to_first_chunk": done.timings.first_token,
        "gen_ai.usage.input_tokens": done.usage.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": done.usage.cached_tokens,
        "gen_ai.usage.output_tokens": done.usage.completion_tokens,
    }
    assert list(parts) == ["queue", "prefill", "decode"]
    edges = [span.start_time, *(part.end_time for part in parts.values())]
    assert edges == sorted(edges)
    assert edges[-1] == pytest.approx(span.end_time, abs=1000)
    assert [part.start_time for part in parts.values()] == edges[:-1]
    assert span.status.status_code is StatusCode.UNSET


def test_a_grammar_is_a_part_of_its_own(demo: Engine) -> None:
    demo.generate("hello", SamplingParams(max_tokens=30, grammar=Grammar.regex("[a-f]{3}")))
    [span], parts = spans()
    assert span.name == "text_completion demo"
    assert list(parts) == ["prepare", "queue", "prefill", "decode"]


async def test_the_callers_span_is_the_parent(demo: Engine) -> None:
    async def call(name: str) -> None:
        with TRACER.start_as_current_span(name):
            await demo.aengine.generate("hello", SamplingParams(max_tokens=3), request_id=name)

    await asyncio.gather(call("one"), call("two"))
    callers = {span.name: span.context.span_id for span in SPANS.get_finished_spans() if span.name in ("one", "two")}
    for span in spans()[0]:
        assert span.parent is not None
        assert span.parent.span_id == callers[str((span.attributes or {})["gen_ai.response.id"])]


async def test_a_failure_is_one_and_parts_that_it_did_not_come_to_are_missing() -> None:
    async with make_engine() as engine:
        stop = trace(engine, name="mine", tracer_provider=PROVIDER)
        await engine.generate([2, 3], greedy(3), timeout=1e-9)
        [span], parts = spans()
        assert (span.name, span.status.status_code) == ("text_completion mine", StatusCode.ERROR)
        assert (span.attributes or {})["error.type"] == "timeout"
        assert list(parts) == ["queue"]
        executor_of(engine).failure = RuntimeError("device lost")
        with pytest.raises(EngineDead):
            await engine.generate([2, 3], greedy(3))
        assert (spans()[0][1].attributes or {})["error.type"] == "engine_dead"
    async with make_engine() as engine:
        stop = trace(engine, tracer_provider=PROVIDER)
        stop()
        await engine.generate([2, 3], greedy(3))
        assert len(spans()[0]) == 2


def test_over_http_the_clients_trace_goes_on(demo: Engine) -> None:
    otel.set_tracer_provider(PROVIDER)

    @asynccontextmanager
    async def traced() -> AsyncIterator[Starlette]:
        async with await AsyncEngine.from_pretrained("demo", show_progress=False) as engine:
            yield app({"mine": engine}, telemetry=True)

    with serving_thread(traced) as url:
        for stream in (False, True):
            body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3, "stream": stream}
            headers = {"traceparent": f"00-{TRACE}-{CALLER}-01"}
            httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers).raise_for_status()
        httpx.post(f"{url}/v1/chat/completions", json=body).raise_for_status()
    whole, _ = spans()
    assert [span.name for span in whole] == ["chat mine"] * 3
    assert [span.parent and f"{span.parent.span_id:016x}" for span in whole] == [CALLER, CALLER, None]
    assert [f"{span.context.trace_id:032x}" == TRACE for span in whole] == [True, True, False]
