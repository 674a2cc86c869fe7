"""Figures for operators: /metrics in Prometheus' form, /stats in JSON, and /profile.

Metrics that mean what they mean in vLLM have its names, so that its dashboards show them; the others begin with
"asyncengine:". Counts are read from `stats()` when somebody asks. Histograms are fed once for each request,
at its end: nothing is done for a token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate
from tempfile import TemporaryDirectory
from typing import Any

from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from asyncengine.async_engine import AsyncEngine
from asyncengine.events import Event, RequestDone
from asyncengine.integrations.http.fields import TABLES
from asyncengine.integrations.http.generating import read_fields
from asyncengine.integrations.http.models import Serving
from asyncengine.integrations.http.problems import Problem
from asyncengine.kvcache import PageCounts
from asyncengine.stats import EngineStats, Summary

LABELS = ["model_name", "engine"]
"""Labels of vLLM's metrics. An engine here is one of its own, numbered 0 in its model."""
PLAIN = "text/plain; version=0.0.4; charset=utf-8"
"""The form that is written, whatever Prometheus asks for: in other forms the library writes "vllm_" for "vllm:"."""
SECONDS = tuple(float(f"{digit}e{power}") for power in range(-4, 4) for digit in (1, 2.5, 5))
TOKENS = tuple(float(f"{digit}e{power}") for power in range(7) for digit in (1, 2, 5))
HISTOGRAMS: Mapping[str, tuple[str, Sequence[float]]] = {
    "vllm:time_to_first_token_seconds": ("Submit to first token.", SECONDS),
    "vllm:inter_token_latency_seconds": ("A request's mean gap, counted for each of its gaps.", SECONDS),
    "vllm:request_time_per_output_token_seconds": ("A request's mean gap, counted once.", SECONDS),
    "vllm:e2e_request_latency_seconds": ("Submit to end.", SECONDS),
    "vllm:request_queue_time_seconds": ("Submit to first step, but for waiting for a grammar or adapter.", SECONDS),
    "vllm:request_inference_time_seconds": ("First step to end.", SECONDS),
    "vllm:request_prefill_time_seconds": ("First step to first token.", SECONDS),
    "vllm:request_decode_time_seconds": ("First token to end.", SECONDS),
    "asyncengine:request_preparation_time_seconds": ("Waiting for a grammar or an adapter.", SECONDS),
    "vllm:request_prompt_tokens": ("Tokens of prompts.", TOKENS),
    "vllm:request_generation_tokens": ("Tokens of answers.", TOKENS),
    "vllm:request_params_max_tokens": ("The parameter max_tokens, where it was given.", TOKENS),
    "vllm:request_params_n": ("The parameter n.", (1.0, 2.0, 5.0, 10.0, 20.0)),
}
Family = tuple[type[CounterMetricFamily] | type[GaugeMetricFamily], str, str, Callable[[EngineStats], Any]]
COUNT, GAUGE = CounterMetricFamily, GaugeMetricFamily


def _guesses(field: str) -> Callable[[EngineStats], Any]:
    return lambda stats: getattr(stats.speculation, field, None)


FAMILIES: Mapping[str, Family] = {
    "vllm:num_requests_running": (GAUGE, "", "Requests in the running batch.", lambda s: s.requests["running"]),
    "vllm:num_requests_waiting": (
        GAUGE, "", "Requests that have not begun, with those whose grammar or adapter is not there.",
        lambda s: sum(s.requests.values()) - s.requests["running"],
    ),
    "vllm:num_requests_waiting_by_reason": (
        GAUGE, "reason", "The same: capacity, their turn has not come; deferred, a grammar or an adapter is not there.",
        lambda s: {
            "capacity": s.requests["waiting"], "deferred": s.requests["grammar_queue"] + s.requests["adapter_queue"]
        },
    ),
    "vllm:kv_cache_usage_perc": (
        GAUGE, "", "Share of pages that requests use, 0 to 1.",
        lambda s: 1 - (s.pages.free + s.pages.cached) / s.pages.total if s.pages.total else 0.0,
    ),
    "vllm:request_success": (COUNT, "finished_reason", "Ended samples.", lambda s: _reasons(s.finished)),
    "vllm:prompt_tokens": (COUNT, "", "Tokens of prompts.", lambda s: s.prompt_tokens),
    "vllm:prompt_tokens_cached": (COUNT, "", "Tokens of prompts that were cached.", lambda s: s.cached_tokens),
    "vllm:generation_tokens": (COUNT, "", "Generated tokens.", lambda s: s.generated_tokens),
    "vllm:prefix_cache_queries": (COUNT, "", "Prompt tokens looked up in the prefix cache.", lambda s: s.prompt_tokens),
    "vllm:prefix_cache_hits": (COUNT, "", "Prompt tokens found there.", lambda s: s.cached_tokens),
    "asyncengine:prefix_tokens_restored": (COUNT, "", "Cached tokens read from a disk.", lambda s: s.restored_tokens),
    "asyncengine:prefix_bytes_read": (COUNT, "", "Bytes of stored prefixes read.", lambda s: s.stored.bytes_read),
    "asyncengine:prefix_bytes_written": (COUNT, "", "Bytes of prefixes stored.", lambda s: s.stored.bytes_written),
    "asyncengine:images_encoded": (COUNT, "", "Pictures encoded.", lambda s: s.images.encoded),
    "asyncengine:image_cache_hits": (COUNT, "", "Uses of pictures that were encoded.", lambda s: s.images.hits),
    "asyncengine:image_cache_bytes": (GAUGE, "", "Bytes of encoded pictures.", lambda s: s.images.nbytes),
    "vllm:num_preemptions": (COUNT, "", "Requests that lost their pages for a while.", lambda s: s.preemptions),
    "vllm:spec_decode_num_drafts": (COUNT, "", "Rows that had guesses.", _guesses("rows")),
    "vllm:spec_decode_num_draft_tokens": (COUNT, "", "Tokens guessed.", _guesses("drafted")),
    "vllm:spec_decode_num_accepted_tokens": (COUNT, "", "Guesses that came true.", _guesses("accepted")),
    "vllm:spec_decode_num_accepted_tokens_per_pos": (
        COUNT, "position", "The same by place in their row.",
        lambda s: {str(place): count for place, count in enumerate(s.speculation.by_position if s.speculation else ())},
    ),
    "asyncengine:steps": (COUNT, "", "Forward passes.", lambda s: s.steps),
    "asyncengine:computed_tokens": (COUNT, "", "Positions computed.", lambda s: s.computed_tokens),
    "asyncengine:forced_tokens": (COUNT, "", "Tokens that a grammar left no choice about.", lambda s: s.forced_tokens),
    "asyncengine:requests": (GAUGE, "state", "Requests.", lambda s: s.requests),
    "asyncengine:pages": (GAUGE, "state", "Pages of the KV cache.", lambda s: _states(s.pages)),
    "asyncengine:window_pages": (GAUGE, "state", "Pages of layers with windows.", lambda s: _states(s.window_pages)),
    "asyncengine:step_seconds": (GAUGE, "quantile", "Launch to result of the last 4096.", lambda s: _quantiles(s.step)),
    "asyncengine:loop_lag_seconds": (
        GAUGE, "quantile", "Lateness of timers on the engine's loop.", lambda s: _quantiles(s.loop_lag)
    ),
    "asyncengine:threads": (GAUGE, "", "Threads of the last step.", lambda s: s.threads.now),
    "asyncengine:uptime_seconds": (GAUGE, "", "Seconds since the engine started.", lambda s: s.uptime),
}  # fmt: skip
"""Families by name: kind, label besides the model's, help text, value (None: there is none), or values by label."""


class Histogram:
    """Counts of values by bucket. Written on an engine's loop, read from anywhere."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def show(self, family: HistogramMetricFamily, model: str) -> None:
        """Add the samples of one model."""
        bounds = [*map(str, self._bounds), "+Inf"]
        family.add_metric([model, "0"], list(zip(bounds, accumulate(self._counts), strict=True)), self._sum)


class Metrics(Collector):
    """All metrics of one app."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._histograms: dict[str, dict[str, Histogram]] = {}
        """Histograms by model, then by name. A model that is loaded again goes on with its own."""
        serving.models.watch(self.observe)

    def observe(self, model: str, engine: AsyncEngine) -> None:
        fresh = {name: Histogram(bounds) for name, (_, bounds) in HISTOGRAMS.items()}
        own = self._histograms.setdefault(model, fresh)

        def hook(event: Event) -> None:
            if isinstance(event, RequestDone):
                for name, value, times in observations(event):
                    own[name].add(value, times)

        engine.on_event(hook)

    def collect(self) -> Iterator[Metric]:
        """Every family, with the samples of each model."""
        each = {name: engine.stats() for name, engine in self._serving.models.group.loaded.items()}
        for name, (kind, label, text, read) in FAMILIES.items():
            family = kind(name, text, labels=[*LABELS, label] if label else LABELS)
            for model, stats in each.items():
                found = read(stats)
                for value, number in found.items() if label else (() if found is None else (("", found),)):
                    family.add_metric([model, "0", value] if label else [model, "0"], number)
            yield family
        answered = COUNT("http_requests", "HTTP requests, refused ones too.", labels=["handler", "method", "status"])
        for labels, number in list(self._serving.requests.counts.items()):
            answered.add_metric(labels, number)
        yield answered
        for name, (text, _) in HISTOGRAMS.items():
            histogram = HistogramMetricFamily(name, text, labels=LABELS)
            for model, own in list(self._histograms.items()):
                own[name].show(histogram, model)
            yield histogram


def observations(done: RequestDone) -> Iterator[tuple[str, float, int]]:
    """(histogram, value, how often it is counted) of one request that has ended."""
    times, params = done.timings, done.params
    yield "vllm:e2e_request_latency_seconds", times.total, 1
    yield "vllm:request_prompt_tokens", done.prompt_tokens, 1
    yield "vllm:request_generation_tokens", done.generated_tokens, 1
    yield "vllm:request_params_n", params.n, 1
    if params.max_tokens is not None:
        yield "vllm:request_params_max_tokens", params.max_tokens, 1
    if times.prepared is not None:
        yield "asyncengine:request_preparation_time_seconds", times.prepared, 1
    if times.queued is None:
        return
    yield "vllm:request_queue_time_seconds", times.queued - (times.prepared or 0.0), 1
    yield "vllm:request_inference_time_seconds", times.total - times.queued, 1
    if times.first_token is None:
        return
    yield "vllm:time_to_first_token_seconds", times.first_token, 1
    yield "vllm:request_prefill_time_seconds", times.first_token - times.queued, 1
    decoding = times.total - times.first_token
    yield "vllm:request_decode_time_seconds", decoding, 1
    gaps = done.generated_tokens - params.n  # samples are generated side by side, each has a first token
    if gaps > 0:
        mean = decoding * params.n / gaps
        yield "vllm:request_time_per_output_token_seconds", mean, 1
        yield "vllm:inter_token_latency_seconds", mean, gaps


def _states(counts: PageCounts) -> Mapping[str, int]:
    return {name: number for name, number in asdict(counts).items() if name != "total"}


def _quantiles(summary: Summary) -> Mapping[str, float]:
    return {"0.5": summary.p50, "0.9": summary.p90, "0.99": summary.p99}


def _reasons(finished: Mapping[str, int]) -> Mapping[str, int]:
    """Ended samples by vLLM's reasons, and by ours where it has none: an answer that calls tools is a stop there."""
    ends = {"stop": 0, "length": 0, "abort": 0, **finished}
    ends["stop"] += ends.pop("tool_calls", 0)
    return ends


def routes(serving: Serving) -> list[Route]:
    """The paths /metrics, /stats and /profile."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Metrics(serving))

    async def metrics(_request: Request) -> Response:
        text = await run_in_threadpool(generate_latest, registry)  # takes milliseconds, and streams go on
        return Response(text, media_type=PLAIN)

    async def stats(_request: Request) -> Response:
        loaded = serving.models.group.loaded
        return JSONResponse(
            {name: {"task": engine.info.task, **asdict(engine.stats())} for name, engine in loaded.items()}
        )

    async def profile(request: Request) -> Response:
        if not serving.api_keys:
            raise Problem(403, "a profile is made where requests need a key, or in process", code="forbidden")
        fields = await read_fields(request, serving)
        values = fields.read(TABLES["profile"])
        with await serving.models.acquire(values["own"].get("model")) as target:
            engine = target.engine  # which may close under the profile, and ends it then
        with TemporaryDirectory() as folder:
            path = await engine.profile(folder, **values["options"])
            return Response(await run_in_threadpool(path.read_bytes), media_type="application/json")

    return [
        Route("/metrics", metrics, methods=["GET"]),
        Route("/stats", stats, methods=["GET"]),
        Route("/profile", profile, methods=["POST"]),
    ]
