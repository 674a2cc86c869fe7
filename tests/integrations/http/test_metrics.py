"""Metrics beside what the clients themselves have counted, and the names that dashboards look for."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from support.data import cases_of
from support.fake_engine import greedy, make_engine
from support.http_server import serving_thread

from asyncengine import AsyncEngine
from asyncengine.integrations.http import app
from asyncengine.integrations.http.metrics import Metrics
from asyncengine.integrations.http.models import Models, Serving

ROWS: dict[str, Any] = cases_of(__file__)

QUESTION = [{"role": "user", "content": "hello"}]
ON_DASHBOARDS = ROWS["on_dashboards"]
PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
"""The header with which Prometheus 2 asks."""
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    @asynccontextmanager
    async def two() -> AsyncIterator[Starlette]:
        demo = AsyncEngine.from_pretrained("demo", show_progress=False, speculation="lookup")
        async with await demo as engine, make_engine() as other:
            yield app({"demo": engine, "other": other})

    with serving_thread(two) as found:
        yield found


def scrape(url: str) -> Samples:
    answer = httpx.get(f"{url}/metrics", headers={"accept": PROMETHEUS})
    assert answer.headers["content-type"].startswith("text/plain; version=")
    samples: Samples = {}
    for family in text_string_to_metric_families(answer.text):
        assert family.documentation, family.name
        for sample in family.samples:
            key = sample.name, tuple(sorted(sample.labels.items()))
            assert key not in samples, f"{key} is there twice"
            samples[key] = sample.value
    return samples


def test_they_say_what_the_clients_have_counted(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    before = scrape(url)
    written = read = cached = 0
    for n, most in ((1, 5), (3, 8), (1, 1)):
        answer = client.chat.completions.create(
            model="demo", messages=QUESTION, n=n, max_tokens=most, extra_body={"ignore_eos": True}
        )
        assert answer.usage is not None
        written += answer.usage.completion_tokens
        read += answer.usage.prompt_tokens
        assert answer.usage.prompt_tokens_details is not None
        cached += answer.usage.prompt_tokens_details.cached_tokens or 0
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="demo", messages=QUESTION, temperature=-1)

    after = scrape(url)

    def grown(name: str, **labels: str) -> float:
        labels |= {"model_name": "demo", "engine": "0"}
        key = name, tuple(sorted(labels.items()))
        return after[key] - before.get(key, 0)

    assert written == 5 + 3 * 8 + 1
    assert grown("vllm:generation_tokens_total") == grown("vllm:request_generation_tokens_sum") == written
    assert grown("vllm:request_prompt_tokens_sum") == read
    assert grown("vllm:prefix_cache_hits_total") >= cached
    assert grown("vllm:request_success_total", finished_reason="length") == 5, "one for each sample"
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert grown(f"vllm:{name}_count") == 3, "one for each request"
    assert grown("vllm:request_time_per_output_token_seconds_count") == 2, "one token has no gap"
    assert grown("vllm:inter_token_latency_seconds_count") == written - 5, "all but each sample's first"
    total = grown("vllm:e2e_request_latency_seconds_sum")
    parts = ("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds")
    assert sum(grown(f"vllm:{part}_sum") for part in parts) == pytest.approx(total)
    assert grown("vllm:num_requests_running") == 0
    assert grown("vllm:request_params_max_tokens_bucket", le="5.0") == 2


def test_the_names_that_dashboards_look_for_are_there_and_explained(url: str) -> None:
    seen = scrape(url)
    names = {name for name, labels in seen if ("model_name", "demo") in labels}
    assert set(ON_DASHBOARDS) <= names
    assert {"other"} <= {value for _, labels in seen for label, value in labels if label == "model_name"}
    page = (Path(__file__).parents[3] / "docs" / "howto" / "metrics.md").read_text(encoding="utf-8")
    families = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name, _ in seen}
    assert [name for name in sorted(families) if name not in page] == []


def test_a_profile_needs_a_key_and_is_a_file_for_perfetto(url: str) -> None:
    refused = httpx.post(f"{url}/profile", json={"steps": 3})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")

    @asynccontextmanager
    async def locked() -> AsyncIterator[Starlette]:
        async with make_engine() as engine:
            yield app({"fake": engine}, api_keys=["the key"])

    with serving_thread(locked) as other, httpx.Client(base_url=other) as client:
        assert client.post("/profile", json={}).status_code == 401
        client.headers["x-api-key"] = "the key"
        for body, param in (({"steps": 0}, "steps"), ({"folder": "/tmp"}, "folder"), ({"model": "none"}, "model")):
            wrong = client.post("/profile", json=body)
            assert wrong.status_code in (400, 404)
            assert wrong.json()["error"]["param"] == param
        trace = client.post("/profile", json={"timeout": 0.05, "model": "fake"})
        assert trace.headers["content-type"] == "application/json"
        assert "traceEvents" in trace.json()


async def test_a_model_that_comes_back_goes_on_with_its_histograms() -> None:
    async with make_engine() as engine, make_engine() as again:
        registry, metrics = CollectorRegistry(), Metrics(Serving(Models({"demo": engine})))
        registry.register(metrics)
        metrics.observe("demo", again)
        for each in (engine, again):
            await each.generate([2, 3], greedy(2))
        text = generate_latest(registry).decode()
    assert 'vllm:e2e_request_latency_seconds_count{engine="0",model_name="demo"} 2.0' in text
