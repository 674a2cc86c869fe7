"""Named keys: limits of their own, what their holders may do, and figures by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient
from support.data import cases_of
from support.http_server import request_log, serving_models

from asyncengine.errors import InvalidParameter
from asyncengine.integrations.http import app, keys
from asyncengine.integrations.http.keys import Key, KeySettings, keys_of

ROWS: dict[str, Any] = cases_of(__file__)

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "temperature": 0}
KEYS: dict[str, dict[str, Any]] = ROWS["keys"]


@pytest.fixture
def url() -> Iterator[str]:
    with serving_models({"demo": "demo"}, {"kv_cache_memory": "16MiB"}, api_keys=["plain"], keys=KEYS) as (found, _):
        yield found


def ask(url: str, key: str, path: str = "/v1/chat/completions", **headers: str) -> httpx.Response:
    return httpx.post(url + path, json=CHAT, headers={"authorization": f"Bearer {key}", **headers}, timeout=60)


def test_each_key_has_its_own_limits(url: str) -> None:
    with request_log() as lines:
        assert [ask(url, "s").status_code for _ in range(3)] == [200, 200, 429]
        late = ask(url, "s", **{"anthropic-version": "2023-06-01"})
        assert (late.status_code, late.json()["error"]["type"]) == (429, "rate_limit_error")
        assert 0 < int(late.headers["retry-after"]) <= 30
        first = ask(url, "b")
        lines(5)  # its tokens are counted behind its answer
        then = ask(url, "b")
        assert (first.status_code, then.status_code) == (200, 429), "the first had more than 5 tokens"
        assert "brief" in then.json()["error"]["message"]
        assert first.json()["usage"]["total_tokens"] > 5
        assert [ask(url, key).status_code for key in ("f", "o", "plain", "none")] == [200, 200, 200, 401]
        told = lines(10)
    assert [each.get("key") for each in told] == ["slow"] * 4 + ["brief"] * 2 + ["free", "boss", None, None]
    text = httpx.get(f"{url}/metrics", headers={"x-api-key": "s"}).text
    assert 'asyncengine:keys_total{key="slow",what="requests"} 4.0' in text
    assert 'asyncengine:keys_total{key="slow",what="refused"} 2.0' in text
    assert f'asyncengine:keys_total{{key="free",what="completion_tokens"}} {CHAT["max_tokens"]:.1f}' in text
    assert 'key=""' not in text


def test_only_operators_stop_others(url: str) -> None:
    for path in ("/pause", "/profile", "/v1/load_lora_adapter", "/models/load", "/models/unload"):
        refused = ask(url, "f", path)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden"), path
    for key in ("o", "plain"):
        assert ask(url, key, "/pause").status_code == 200
        assert ask(url, key, "/resume").status_code == 200
        made = httpx.post(f"{url}/models/load", json={"model": "demo"}, headers={"x-api-key": key}, timeout=60)
        assert (made.status_code, made.json()["status"]) == (200, {"value": "loaded"})
        made = httpx.post(f"{url}/models/unload", json={"model": "demo"}, headers={"x-api-key": key}, timeout=60)
        assert (made.status_code, made.json()["error"]["param"]) == (400, "model"), "it was loaded at the start"


def test_a_bucket_is_filled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(keys.time, "monotonic", lambda: now[0])
    key = Key("a", KeySettings(key="k", requests_per_minute=3, tokens_per_minute=600))
    assert [key.admit() for _ in range(3)] == [None] * 3
    refused = key.admit()
    assert refused is not None
    assert (refused.status, refused.headers) == (429, (("retry-after", "20"),))
    now[0] += 20
    assert key.admit() is None
    now[0] += 3600
    key.charge({"prompt_tokens": 500, "completion_tokens": 250})
    refused = key.admit()
    assert refused is not None
    assert "600 tokens a minute" in refused.message
    assert dict(refused.headers)["retry-after"] == "16", "151 tokens at ten a second"
    now[0] += 16
    assert key.admit() is None, "an hour fills no more than a minute's worth"
    assert key.counts == {"requests": 7, "refused": 2, "prompt_tokens": 500, "completion_tokens": 250}


def test_limits_hold_on_a_websocket() -> None:
    from asyncengine.testing import FakeChat

    shown, kinds = {"authorization": "Bearer w"}, list[tuple[str, int | None]]()
    served = app(FakeChat(["one", "two"]), keys={"ws": {"key": "w", "requests_per_minute": 1}})
    with TestClient(served) as client, client.websocket_connect("/v1/responses", headers=shown) as socket:
        for _ in range(2):
            socket.send_json({"type": "response.create", "input": "hello"})
            while (event := socket.receive_json())["type"] not in ("response.completed", "error"):
                pass
            kinds.append((event["type"], event.get("status")))
    assert kinds == [("response.completed", None), ("error", 429)]


@pytest.mark.parametrize(("unnamed", "named", "words"), ROWS["wrong_keys_are_refused"])
def test_wrong_keys_are_refused(unnamed: list[str], named: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidParameter, match=words):
        keys_of(unnamed, named)
