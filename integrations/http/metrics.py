"""Figures for operators: /metrics in Prometheus' form, /stats, /requests and /prefix_tree in JSON, and /profile.

Metrics that mean what they mean in vLLM have its names, so that its dashboards show them; the others begin with
"asyncengine:". Counts are read from `stats()` when somebody asks. Histograms are fed once for each request,
at its end: nothing is done for a token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib import resources
from itertools import accumulate
from operator import attrgetter
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from asyncengine.async_engine import AsyncEngine
from asyncengine.events import Event, RequestDone, StepDone
from asyncengine.integrations.http.fields import TABLES
from asyncengine.integrations.http.generating import Endpoint, read_fields, routed
from asyncengine.integrations.http.models import Serving
from asyncengine.integrations.http.problems import Problem
from asyncengine.kvcache import PageCounts
from asyncengine.stats import EngineStats, Summary

LABELS = ["model_name", "engine"]
"""Labels of vLLM's metrics. An engine here is one of its own, numbered 0 in its model."""
PLAIN = "text/plain; version=0.0.4; charset=utf-8"
"""The format that is written, whatever Prometheus accepts: in others the library writes "vllm_" for "vllm:"."""
SECONDS = tuple(float(f"{digit}e{power}") for power in range(-4, 4) for digit in (1, 2.5, 5))
TOKENS = tuple(float(f"{digit}e{power}") for power in range(7) for digit in (1, 2, 5))
BOUNDS: Mapping[str, Sequence[float]] = {"seconds": SECONDS, "tokens": TOKENS, "samples": (1.0, 2.0, 5.0, 10.0, 20.0)}
"""Bounds of the buckets of histograms, by the unit of what they count."""
STEPS = 120
"""Most steps that are kept and shown of each model."""
FAMILY_TYPES = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}


class Row(NamedTuple):
    """A line of metrics.txt, which explains them."""

    name: str
    type: str
    value: str
    label: str
    text: str


_LINES = (resources.files(__package__) / "metrics.txt").read_text(encoding="utf-8").splitlines()
_ROWS = [Row(*map(str.strip, line.split("|"))) for line in _LINES if line and line[0] != ";"]
FAMILIES = [row for row in _ROWS if row.type in FAMILY_TYPES]
HISTOGRAMS = [row for row in _ROWS if row.type in BOUNDS]


def computed(stats: EngineStats) -> dict[str, Any]:
    """Values that metrics.txt names and `EngineStats` has no field for, by name."""
    requests, pages = stats.requests, stats.pages
    ends = {"stop": 0, "length": 0, "abort": 0, **stats.finished}
    ends["stop"] += ends.pop("tool_calls", 0)  # vLLM calls an answer that calls tools a stop
    deferred = requests["grammar_queue"] + requests["adapter_queue"]
    return {
        "waiting": sum(requests.values()) - requests["running"],
        "waiting_by_reason": {"capacity": requests["waiting"], "deferred": deferred},
        "pages_in_use": 1 - (pages.free + pages.cached) / pages.total if pages.total else 0.0,
        "ended": ends,
    }


def values_of(row: Row, stats: EngineStats) -> Mapping[str, float]:
    """The values of a metric by its label, "" where it has no label; empty for a feature that the engine lacks."""
    value: Any = computed(stats).get(row.value, stats)
    for name in row.value.split(".") if value is stats else ():
        value = value[name] if isinstance(value, Mapping) else None if value is None else getattr(value, name)
    match value:
        case None:
            return {}
        case Summary():
            return {"0.5": value.p50, "0.9": value.p90, "0.99": value.p99}
        case PageCounts():
            return {name: number for name, number in asdict(value).items() if name != "total"}
        case tuple():
            return {str(position): count for position, count in enumerate(value)}
    return value if row.label else {"": value}


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
        self.steps: dict[str, deque[StepDone]] = {}
        """The last steps of each model that is loaded or was."""
        serving.models.watch(self.observe)

    def observe(self, model: str, engine: AsyncEngine) -> None:
        fresh = {row.name: Histogram(BOUNDS[row.type]) for row in HISTOGRAMS}
        histograms, steps = self._histograms.setdefault(model, fresh), deque[StepDone](maxlen=STEPS)
        self.steps[model] = steps

        def hook(event: Event) -> None:
            if isinstance(event, RequestDone):
                for name, value, times in observations(event):
                    histograms[name].add(value, times)
            elif isinstance(event, StepDone):
                steps.append(event)

        engine.on_event(hook)

    def collect(self) -> Iterator[Metric]:
        """Every family, with the samples of each model."""
        stats_of = {name: engine.stats() for name, engine in self._serving.models.group.loaded.items()}
        for row in FAMILIES:
            family = FAMILY_TYPES[row.type](row.name, row.text, labels=[*LABELS, row.label] if row.label else LABELS)
            for model, stats in stats_of.items():
                for value, number in values_of(row, stats).items():
                    family.add_metric([model, "0", value] if row.label else [model, "0"], number)
            yield family
        answered = CounterMetricFamily(
            "http_requests", "HTTP requests, refused ones too.", labels=["handler", "method", "status"]
        )
        for values, number in list(self._serving.requests.counts.items()):
            answered.add_metric(values, number)
        yield answered
        keyed = CounterMetricFamily("asyncengine:keys", "What is asked with named keys.", labels=["key", "what"])
        for key in self._serving.keys:
            for unit, count in list(key.counts.items()) if key.name else ():
                keyed.add_metric([key.name, unit], count)
        yield keyed
        for row in HISTOGRAMS:
            histogram = HistogramMetricFamily(row.name, row.text, labels=LABELS)
            for model, histograms in list(self._histograms.items()):
                histograms[row.name].show(histogram, model)
            yield histogram


def observations(done: RequestDone) -> Iterator[tuple[str, float, int]]:
    """(histogram, value, how often it is counted) of one request that has ended."""
    for row in HISTOGRAMS:
        numbers = [attrgetter(path)(done) for path in row.value.split(" - ") if path]
        if numbers and None not in numbers:
            yield row.name, numbers[0] - sum(numbers[1:]), 1
    times, samples = done.timings, done.params.n
    if times.queued is not None:
        yield "vllm:request_queue_time_seconds", times.queued - (times.prepared or 0.0), 1
    gaps = done.generated_tokens - samples  # the first token of each sample follows none
    if times.first_token is not None and gaps > 0:
        mean = (times.total - times.first_token) * samples / gaps
        yield "vllm:request_time_per_output_token_seconds", mean, 1
        yield "vllm:inter_token_latency_seconds", mean, gaps


def routes(serving: Serving) -> list[Route]:
    """Paths of metrics and profiles, and the one by which an operator stops another client's request."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector := Metrics(serving))

    async def metrics(_request: Request) -> Response:
        text = await run_in_threadpool(generate_latest, registry)  # takes milliseconds, and streams go on
        return Response(text, media_type=PLAIN)

    async def stats(_request: Request) -> Response:
        loaded = serving.models.group.loaded.items()
        return JSONResponse({name: {"task": engine.info.task, **asdict(engine.stats())} for name, engine in loaded})

    async def requests(_request: Request) -> Response:
        """All requests and the last steps, without a word of a prompt or an answer."""
        listed = {}
        for name, engine in serving.models.group.loaded.items():
            steps = list(collector.steps.get(name, ()))
            listed[name] = {"requests": list(map(asdict, engine.requests())), "steps": list(map(asdict, steps))}
        return JSONResponse(listed)

    async def stop(request: Request) -> Response:
        if not serving.may_operate(request.scope) and (serving.keys or serving.hosts is None):
            raise Problem(403, "requests are stopped by an operator's key, or on this machine", code="forbidden")
        name = request.path_params["id"]
        if not [engine for engine in serving.models.group.loaded.values() if engine.abort(name)]:
            raise Problem(404, f"no request {name[:100]!r} is running or waiting", "id", "request_not_found")
        return JSONResponse({"id": name, "stopped": True})

    async def prefix_tree(_request: Request) -> Response:
        runs = {name: engine.prefix_tree() for name, engine in serving.models.group.loaded.items()}
        return JSONResponse({name: [run._asdict() for run in tree_runs] for name, tree_runs in runs.items()})

    async def profile(request: Request) -> Response:
        if not serving.may_operate(request.scope):
            raise Problem(403, "a profile is made where requests need a key, or in process", code="forbidden")
        values = (await read_fields(request, serving)).read(TABLES["profile"])
        with await serving.models.acquire(values["own"].get("model")) as target:
            engine = target.engine  # released before the profile ends: unloading the model ends the profile, too
        with TemporaryDirectory() as folder:
            path = await engine.profile(folder, **values["options"])
            return Response(await run_in_threadpool(path.read_bytes), media_type="application/json")

    readers = {"metrics": metrics, "stats": stats, "requests": requests, "prefix_tree": prefix_tree}
    served: dict[str, Endpoint] = {f"GET /{name}": tell for name, tell in readers.items()}
    return routed({**served, "DELETE /requests/{id}": stop, "POST /profile": profile})
