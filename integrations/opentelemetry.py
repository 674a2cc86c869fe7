"""OpenTelemetry: a span and metrics of each request, by its conventions for generative AI 0.1.0.

A span is made at its request's end, from the times that the engine has measured, as a child of the span that was
current where the request was made: a handler's, an agent's, LangChain's. Prompts and answers are in none.
"""

from __future__ import annotations

import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from importlib import resources
from operator import attrgetter
from typing import Any

from asyncengine import AsyncEngine, Engine
from asyncengine.events import Event, RequestDone, VectorsDone

try:
    from opentelemetry import context, propagate
    from opentelemetry.metrics import MeterProvider, get_meter
    from opentelemetry.trace import SpanKind, Status, StatusCode, TracerProvider, get_current_span, get_tracer
    from opentelemetry.trace import set_span_in_context as within
except ImportError as error:
    raise ImportError('tracing needs OpenTelemetry: pip install "asyncengine[telemetry]"') from error

NANO = 1e9
FAILURES = {"error", "engine_dead", "timeout"}
NAMES = tomllib.loads((resources.files(__package__) / "opentelemetry.toml").read_text(encoding="utf-8"))
BOUNDARIES = {"s": [0.01 * 2**n for n in range(14)], "{token}": [4**n for n in range(14)]}
SUPPRESS_ALL, SUPPRESS_MODEL = "suppress_instrumentation", "suppress_language_model_instrumentation"
"""Keys of a context by which other libraries' instrumentations suppress those of the libraries that they call."""


def trace(
    engine: AsyncEngine | Engine, *, name: str | None = None, usage: bool | None = None,
    tracer_provider: TracerProvider | None = None, meter_provider: MeterProvider | None = None,
) -> Callable[[], None]:  # fmt: skip
    """Make spans and metrics of all requests to `engine` from now on, until the returned function is called.

    `name`: name of the model in them; None: its own. `usage`: whether spans have token counts; None: unless the span
    around them has. `tracer_provider`, `meter_provider`: None: the global ones.
    """
    aengine = engine.aengine if isinstance(engine, Engine) else engine
    model, info = name or aengine.info.name, aengine.info
    page_size = info.page_size if aengine.core.config.prefix_caching else None
    tracer = get_tracer("asyncengine", tracer_provider=tracer_provider)
    metrics = Metrics(meter_provider, "unknown" if info.no_images is None else "text")

    def hook(event: Event) -> None:
        if not isinstance(event, RequestDone | VectorsDone) or context.get_value(SUPPRESS_ALL):
            return
        if isinstance(event, RequestDone):
            seconds, attributes, timeline = event.timings.total, request_attributes(event, model), [*phases(event)]
        else:
            seconds, attributes, timeline = event.seconds, vectors_attributes(event, model), []
        ended = time.time_ns()
        began = ended - int(seconds * NANO)
        used = token_counts(event, page_size)
        parent: Mapping[str, Any] = getattr(get_current_span(), "attributes", None) or {}
        if not context.get_value(SUPPRESS_MODEL) and parent.get("gen_ai.operation.name") not in NAMES["calls"]:
            metrics.record(event, attributes, used)
        counted = any(parent.get(key) in values for key, values in NAMES["counting"].items())
        if usage or (usage is None and not counted and not context.get_value(SUPPRESS_MODEL)):
            attributes |= {f"gen_ai.usage.{count}": value for count, value in used.items()}
        title = f"{attributes['gen_ai.operation.name']} {attributes['gen_ai.request.model']}"
        span = tracer.start_span(title, kind=SpanKind.INTERNAL, attributes=attributes, start_time=began)
        if span.is_recording():
            for phase, start, end in timeline:
                edges = began + int(start * NANO), began + int(end * NANO)
                tracer.start_span(phase, within(span), start_time=edges[0]).end(edges[1])
            if "error.type" in attributes:
                span.set_status(Status(StatusCode.ERROR))
        span.end(ended)

    return aengine.on_event(hook)


class Metrics:
    """Instruments of the conventions."""

    def __init__(self, provider: MeterProvider | None, modality: str) -> None:
        """`modality`: that of prompts' tokens, "text" or "unknown"."""
        meter = get_meter("asyncengine", meter_provider=provider)
        self._histograms = {
            name: meter.create_histogram(
                f"gen_ai.client.{name}", unit, explicit_bucket_boundaries_advisory=BOUNDARIES[unit]
            )
            for unit, names in NAMES["metrics"].items()
            for name in names
        }
        self._counters = {
            name: meter.create_counter(f"gen_ai.client.inference.usage.{name}", "{token}") for name in NAMES["usage"]
        }
        self._modality = modality

    def record(self, done: RequestDone | VectorsDone, attributes: Mapping[str, Any], used: Mapping[str, int]) -> None:
        """Record a request by the attributes of its span, and its token counts."""
        keys = ("gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model", "gen_ai.response.model")
        by = {key: attributes[key] for key in keys}
        ended = by | {key: attributes[key] for key in ("error.type",) if key in attributes}
        operation = "embeddings" if by["gen_ai.operation.name"] == "embeddings" else "inference"
        if isinstance(done, RequestDone):
            times = done.timings
            self._histograms["inference.duration"].record(times.total, ended)
            if times.first_token is not None:
                self._histograms["inference.time_to_first_chunk"].record(times.first_token, by)
                if (later := done.generated_tokens / len(done.finish_reasons) - 1) > 0:
                    per_token = (times.total - times.first_token) / later
                    self._histograms["inference.time_per_output_chunk"].record(per_token, by)
            self._histograms["inference.operation.output_tokens"].record(done.generated_tokens, by)
        else:
            self._histograms[f"{operation}.duration"].record(done.seconds, ended)
        self._histograms[f"{operation}.operation.input_tokens"].record(done.prompt_tokens, by)
        for name, count in used.items() if operation == "inference" else ():
            modality = "text" if name == "output_tokens" else self._modality
            self._counters[name].add(count, by | {"gen_ai.token.modality": modality})


def token_counts(done: RequestDone | VectorsDone, page_size: int | None) -> dict[str, int]:
    """Token counts by the conventions' names. `page_size`: tokens of a page of the prefix cache; None without one."""
    usage = {"input_tokens": done.prompt_tokens, "cache_read.input_tokens": done.cached_tokens}
    if isinstance(done, RequestDone):
        usage["output_tokens"] = done.generated_tokens
        if page_size is not None and done.timings.first_token is not None:  # the whole prompt was computed
            usage["cache_write.input_tokens"] = max(0, done.prompt_tokens // page_size * page_size - done.cached_tokens)
    return usage


def request_attributes(done: RequestDone, model: str) -> dict[str, Any]:
    """The attributes of the span of a request for text, but for its token counts."""
    params, failed = done.params, FAILURES & {*done.finish_reasons}
    return table_attributes("request", done, {
        "gen_ai.operation.name": "chat" if done.is_chat else "text_completion",
        "gen_ai.request.model": done.adapter or model,
        "gen_ai.request.top_k": params.top_k or None,
        "gen_ai.request.stop_sequences": params.stop or None,
        "gen_ai.request.choice.count": None if params.n == 1 else params.n,
        "gen_ai.response.model": model,
        "error.type": min(failed, default=None),
    })  # fmt: skip


def vectors_attributes(done: VectorsDone, model: str) -> dict[str, Any]:
    """The attributes of the span of a call for vectors, but for its token counts. The conventions have no operation
    for reranking and classifying: theirs is named after the call."""
    called = "embeddings" if done.call == "embed" else done.call
    models = {"gen_ai.request.model": done.adapter or model, "gen_ai.response.model": model}
    return table_attributes("vectors", done, {"gen_ai.operation.name": called, **models})


def table_attributes(table: str, done: RequestDone | VectorsDone, more: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes of a table of opentelemetry.toml and `more`, without those that are None, and the provider's name."""
    values = {name: attrgetter(path)(done) for name, path in NAMES[table].items()}
    attributes = {name: value for name, value in {**values, **more}.items() if value is not None}
    return {"gen_ai.provider.name": "asyncengine", **attributes}


def phases(done: RequestDone) -> Iterator[tuple[str, float, float]]:
    """(name, start, end) of the phases that a request has reached, in seconds since it was submitted."""
    times = done.timings
    edges = {"prepare": times.prepared, "queue": times.queued, "prefill": times.first_token, "decode": times.total}
    began = 0.0
    for phase, reached in edges.items():
        if reached is not None:
            yield phase, began, reached
            began = reached
        elif phase != "prepare":  # the request ended in this phase
            yield phase, began, times.total
            return


class TraceContext:
    """ASGI middleware that takes the caller's trace from a request's headers (`traceparent`), unless an outer one has
    begun a span for it."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        if "headers" not in scope or get_current_span().get_span_context().is_valid:
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        token = context.attach(propagate.extract(headers))
        try:
            await self._app(scope, receive, send)
        finally:
            context.detach(token)
