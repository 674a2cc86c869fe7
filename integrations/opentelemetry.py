"""OpenTelemetry: a span for each request, by the semantic conventions for generative AI.

A span is made at its request's end, from the times that the engine has measured, as a child of the span that was
current where the request was made: a handler's, an agent's, LangChain's. Prompts and answers are in none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from asyncengine import AsyncEngine, Engine
from asyncengine.events import Event, RequestDone

try:
    from opentelemetry import context, propagate
    from opentelemetry.trace import SpanKind, Status, StatusCode, TracerProvider, get_current_span, get_tracer
    from opentelemetry.trace import set_span_in_context as within
except ImportError as error:
    raise ImportError('tracing needs OpenTelemetry: pip install "asyncengine[telemetry]"') from error

NANO = 1e9
FAILURES = {"error", "engine_dead", "timeout"}


def trace(
    engine: AsyncEngine | Engine, *, name: str | None = None, tracer_provider: TracerProvider | None = None
) -> Callable[[], None]:
    """Make a span of every request for text that `engine` is given from now on; the returned function ends it.

    `name`: name of the model in spans; None: its own. `tracer_provider`: None: the global one.
    """
    aengine = engine.aengine if isinstance(engine, Engine) else engine
    model = name or aengine.info.name
    tracer = get_tracer("asyncengine", tracer_provider=tracer_provider)

    def hook(event: Event) -> None:
        if not isinstance(event, RequestDone):
            return
        ended = time.time_ns()
        began = ended - int(event.timings.total * NANO)
        attributes = request_attributes(event, model)
        title = f"{attributes['gen_ai.operation.name']} {attributes['gen_ai.request.model']}"
        span = tracer.start_span(title, kind=SpanKind.INTERNAL, attributes=attributes, start_time=began)
        if span.is_recording():
            for phase, start, end in phases(event):
                at = began + int(start * NANO), began + int(end * NANO)
                tracer.start_span(phase, within(span), start_time=at[0]).end(at[1])
            if failed := FAILURES & {*event.finish_reasons}:
                span.set_attribute("error.type", min(failed))
                span.set_status(Status(StatusCode.ERROR))
        span.end(ended)

    return aengine.on_event(hook)


def request_attributes(done: RequestDone, model: str) -> dict[str, Any]:
    """The attributes of a request's span."""
    params, times = done.params, done.timings
    found = {
        "gen_ai.operation.name": "chat" if done.is_chat else "text_completion",
        "gen_ai.provider.name": "asyncengine",
        "gen_ai.request.model": done.adapter or model,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k or None,
        "gen_ai.request.seed": params.seed,
        "gen_ai.request.frequency_penalty": params.frequency_penalty,
        "gen_ai.request.presence_penalty": params.presence_penalty,
        "gen_ai.request.stop_sequences": params.stop or None,
        "gen_ai.request.choice.count": None if params.n == 1 else params.n,
        "gen_ai.response.id": done.request_id,
        "gen_ai.response.model": model,
        "gen_ai.response.finish_reasons": done.finish_reasons,
        "gen_ai.response.time_to_first_chunk": times.first_token,
        "gen_ai.usage.input_tokens": done.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": done.cached_tokens,
        "gen_ai.usage.output_tokens": done.generated_tokens,
    }
    return {name: value for name, value in found.items() if value is not None}


def phases(done: RequestDone) -> Iterator[tuple[str, float, float]]:
    """(name, start, end) of the parts of a request, in seconds since it was submitted; only those that it came to."""
    times = done.timings
    edges = {"prepare": times.prepared, "queue": times.queued, "prefill": times.first_token, "decode": times.total}
    began = 0.0
    for phase, reached in edges.items():
        if reached is not None:
            yield phase, began, reached
            began = reached
        elif phase != "prepare":  # it ended there
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
