"""The store of responses: what stays in it, and what goes."""

from __future__ import annotations

import json
from typing import Any

from asyncengine.integrations.http.responses import ResponseStore


def response(name: str, previous: str | None = None) -> dict[str, Any]:
    return {"id": name, "previous_response_id": previous, "output": []}


def test_it_takes_no_more_than_it_may() -> None:
    store = ResponseStore(100_000)
    for number in range(1000):
        store.put(response(f"r{number}"), [{"text": "x" * 5000}])
        assert 0 < store.used <= 100_000
    assert store.get("r999") is not None
    assert store.get("r0") is None
    used = store.used
    store.put(response("r999"), [{"text": "x" * 5000}])
    assert store.used == used, "it is replaced"
    store.put(response("large"), [{"text": "x" * 200_000}])
    assert store.get("large") is None
    for number in range(1000):
        store.delete(f"r{number}")
    assert store.used == 0


def test_one_that_is_used_outlives_one_that_is_not() -> None:
    store = ResponseStore(20_000)
    for name in ("a", "b"):
        store.put(response(name), [{"text": "x" * 5000}])
    assert store.get("a") is not None
    store.put(response("c"), [{"text": "x" * 8000}])
    assert [name for name in "abc" if store.get(name)] == ["a", "c"]


def test_a_chain_is_read_oldest_first_and_only_whole() -> None:
    store = ResponseStore(1 << 20)
    for number in range(5000):
        store.put(response(str(number), str(number - 1) if number else None), [])
        if number < 3:
            chain = store.chain(str(number))
            assert chain is not None
            assert [json.loads(each.response)["id"] for each in chain] == [str(n) for n in range(number + 1)]
    assert store.chain("4999") is None  # its first ones had to go
    assert store.chain("nobody") is None
    assert store.chain(None) == []


def test_items_get_ids_of_their_own() -> None:
    store = ResponseStore(1 << 20)
    store.put(response("r"), [{"text": "a"}, {"id": "mine", "text": "b"}])
    found = store.get("r")
    assert found is not None
    assert [item["id"] for item in json.loads(found.items)] == ["item_r_0", "mine"]
