"""Spans of requests: what they say, and whose children they are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import httpx
import pytest
from opentelemetry import context
from opentelemetry import trace as otel
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from starlette.applications import Starlette
from support.fake_engine import executor_of, greedy, make_engine
from support.http_server import serving_thread

from asyncengine import DEMO_EMBEDDER, DEMO_RERANKER, AsyncEngine, Engine, EngineDead, RequestTimeout, SamplingParams
from asyncengine.events import RequestDone
from asyncengine.grammar import Grammar
from asyncengine.integrations.http import app
from asyncengine.integrations.opentelemetry import trace

TIMES = ("duration", "time_to_first_chunk", "time_per_output_chunk")
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
        yield engine


@pytest.fixture
def traced(demo: Engine) -> Iterator[Engine]:
    stop = trace(demo, tracer_provider=PROVIDER)
    yield demo
    stop()


def spans() -> tuple[list[ReadableSpan], dict[str, ReadableSpan]]:
    """(spans of requests, the parts of the last one by name), of everything that has ended."""
    done = SPANS.get_finished_spans()
    whole = [span for span in done if "gen_ai.provider.name" in (span.attributes or {})]
    parts = [span for span in done if span.parent and span.parent.span_id == whole[-1].context.span_id]
    return whole, {span.name: span for span in parts}


def test_a_chat_by_the_conventions(traced: Engine) -> None:
    params = SamplingParams(max_tokens=9, temperature=0.5, seed=3, n=2, stop=("@@",), top_k=7)
    done = traced.chat([{"role": "user", "content": "hello"}], params, request_id="mine")
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
        "gen_ai.usage.cache_write.input_tokens": 0,
        "gen_ai.usage.output_tokens": done.usage.completion_tokens,
    }
    assert list(parts) == ["queue", "prefill", "decode"]
    edges = [span.start_time, *(part.end_time for part in parts.values())]
    assert edges == sorted(edges)
    assert edges[-1] == pytest.approx(span.end_time, abs=1000)
    assert [part.start_time for part in parts.values()] == edges[:-1]
    assert span.status.status_code is StatusCode.UNSET


def test_a_session_is_a_conversation_and_its_waits_for_tools_are_told(traced: Engine) -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    weather = {"name": "weather", "description": "The weather in a city.", "parameters": parameters}
    question = [{"role": "user", "content": "What is the weather in Oslo?"}]
    with traced.session("talk") as session:
        for _ in range(2):
            session.chat(question, greedy(40), tools=[{"type": "function", "function": weather}])
    first, second = (dict(span.attributes or {}) for span in spans()[0])
    assert first["gen_ai.conversation.id"] == second["gen_ai.conversation.id"] == "talk"
    assert "asyncengine.session.away" not in first
    assert 0 < second["asyncengine.session.away"] < 60  # type: ignore[operator]


def test_a_grammar_is_a_part_of_its_own(traced: Engine) -> None:
    traced.generate("hello", SamplingParams(max_tokens=30, grammar=Grammar.regex("[a-f]{3}")))
    [span], parts = spans()
    assert span.name == "text_completion demo"
    assert list(parts) == ["prepare", "queue", "prefill", "decode"]


async def test_the_callers_span_is_the_parent(traced: Engine) -> None:
    async def call(name: str) -> None:
        with TRACER.start_as_current_span(name):
            await traced.aengine.generate("hello", SamplingParams(max_tokens=3), request_id=name)

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


def points(reader: InMemoryMetricReader) -> dict[tuple[str, str], tuple[float, dict[str, object]]]:
    """(sum, attributes) of each metric, by its name in `gen_ai.client` and its operation. Each was recorded with one
    set of attributes."""
    found = {}
    data = reader.get_metrics_data()
    for resource in [] if data is None else data.resource_metrics:
        for metric in (metric for scope in resource.scope_metrics for metric in scope.metrics):
            for point in metric.data.data_points:
                by = dict(point.attributes)
                name = f"{metric.name.removeprefix('gen_ai.client.')} {by.get('error.type', '')}".strip()
                key = name, str(by["gen_ai.operation.name"])
                assert key not in found
                found[key] = getattr(point, "sum", None) or getattr(point, "value", 0), by
    return found


def test_metrics_of_text(demo: Engine) -> None:
    reader = InMemoryMetricReader()
    stop = trace(demo, tracer_provider=PROVIDER, meter_provider=MeterProvider([reader]))
    prompt = "Metrics are counted once, in full pages. " * 9
    ends = list[RequestDone]()
    forget = demo.aengine.on_event(lambda event: ends.append(event) if isinstance(event, RequestDone) else None)
    one = demo.generate(prompt, SamplingParams(max_tokens=5, ignore_eos=True, n=2))
    other = demo.generate(prompt, SamplingParams(max_tokens=4, ignore_eos=True))
    stop()
    forget()
    found = points(reader)
    length, full = one.usage.prompt_tokens, one.usage.prompt_tokens // 16 * 16
    assert other.usage.cached_tokens == full
    assert {name: value for (name, _), (value, _) in found.items() if "tokens" in name} == {
        "inference.operation.input_tokens": 2 * length,
        "inference.operation.output_tokens": 14,
        "inference.usage.input_tokens": 2 * length,
        "inference.usage.output_tokens": 14,
        "inference.usage.cache_read.input_tokens": one.usage.cached_tokens + full,
        "inference.usage.cache_write.input_tokens": full - one.usage.cached_tokens,
    }
    by = {
        "gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "asyncengine",
        "gen_ai.request.model": "demo", "gen_ai.response.model": "demo",
    }  # fmt: skip
    times, both = {name: found[f"inference.{name}", "text_completion"] for name in TIMES}, [end.timings for end in ends]
    assert all(attributes == by for _, attributes in times.values())
    assert found["inference.usage.output_tokens", "text_completion"][1] == by | {"gen_ai.token.modality": "text"}
    assert times["duration"][0] == pytest.approx(sum(each.total for each in both))
    assert times["time_to_first_chunk"][0] == pytest.approx(sum(each.first_token or 0 for each in both))
    gaps = [(each.total - (each.first_token or 0)) / later for each, later in zip(both, (4, 3), strict=True)]
    assert times["time_per_output_chunk"][0] == pytest.approx(sum(gaps))


@pytest.mark.parametrize("model", [DEMO_EMBEDDER, DEMO_RERANKER])
async def test_vectors_and_scores(model: str) -> None:
    reader = InMemoryMetricReader()
    async with await AsyncEngine.from_pretrained(model, show_progress=False) as engine:
        trace(engine, name="mine", tracer_provider=PROVIDER, meter_provider=MeterProvider([reader]))
        if model == DEMO_EMBEDDER:
            answer: Any = await engine.embed(["one", "two words"], dimensions=8, request_id="mine")
            name, more = "embeddings", {"gen_ai.embeddings.dimension.count": 8}
        else:
            answer = await engine.rerank("two", ["one", "two words"], request_id="mine")
            name, more = "rerank", {}
        [span], parts = spans()
        with pytest.raises(RequestTimeout):
            await (engine.embed if name == "embeddings" else partial(engine.rerank, "two"))(["one"], timeout=1e-9)
    assert not parts
    assert span.name == f"{name} mine"
    assert dict(span.attributes or {}) == more | {
        "gen_ai.operation.name": name,
        "gen_ai.provider.name": "asyncengine",
        "gen_ai.request.model": "mine",
        "gen_ai.response.id": "mine",
        "gen_ai.response.model": "mine",
        "asyncengine.texts": 2,
        "gen_ai.usage.input_tokens": answer.usage.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": answer.usage.cached_tokens,
    }
    assert (spans()[0][-1].attributes or {})["error.type"] == "RequestTimeout"
    found, tokens = points(reader), answer.usage.prompt_tokens
    if name == "embeddings":
        assert found.keys() == {
            (f"embeddings.{metric}", name)
            for metric in ("duration", "duration RequestTimeout", "operation.input_tokens")
        }
        assert found["embeddings.operation.input_tokens", name][0] == tokens
    else:
        assert found["inference.usage.input_tokens", name][0] == tokens
        assert ("inference.duration", name) in found
    assert spans()[0][-1].status.status_code is StatusCode.ERROR


def test_what_is_counted_around_is_not_counted_again(demo: Engine) -> None:
    """Spans of the request by LangChain's instrumentations: no tokens. Metrics are left to those that make them."""
    reader = InMemoryMetricReader()
    meters = MeterProvider([reader])
    params = SamplingParams(max_tokens=2)

    def usage_of_last() -> bool:
        return "gen_ai.usage.input_tokens" in (spans()[0][-1].attributes or {})

    for usage in (None, True, False):
        stop = trace(demo, usage=usage, tracer_provider=PROVIDER, meter_provider=meters)
        for around in (
            {"gen_ai.operation.name": "chat"}, {"openinference.span.kind": "LLM"},
            {"langfuse.observation.type": "generation"},
        ):  # fmt: skip
            with TRACER.start_as_current_span("by another", attributes=around):
                demo.generate("hello", params)
            assert usage_of_last() == (usage is True)
        with TRACER.start_as_current_span("agent", attributes={"gen_ai.operation.name": "invoke_agent"}):
            demo.generate("hello", params)
        assert usage_of_last() == (usage is not False)
        token = context.attach(context.set_value("suppress_language_model_instrumentation", True))
        demo.generate("hello", params)
        context.detach(token)
        assert usage_of_last() == (usage is True)
        before = len(SPANS.get_finished_spans())
        token = context.attach(context.set_value("suppress_instrumentation", True))
        demo.generate("hello", params)
        context.detach(token)
        assert len(SPANS.get_finished_spans()) == before
        stop()
    count, _ = points(reader)["inference.usage.output_tokens", "text_completion"]
    assert count == 2 * 3 * 3, "not within a span or a context of an instrumentation that makes them"


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
