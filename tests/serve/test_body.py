"""Reading bodies: those of many items are parsed so that other threads run, and mean the same."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from asyncengine.serve import body
from asyncengine.serve.problems import Problem

VALUE = {"a": [1, -2.5e3, 'é "\\ \u2028 😀', None, True, {"b": {}, "c": []}], "": [[[]]]}


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "WHOLE_BYTES", 0)
    monkeypatch.setattr(body, "WHOLE_ITEMS", -1)


@pytest.mark.usefixtures("in_pieces")
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_a_body_in_pieces_means_the_same(encoding: str) -> None:
    assert body._parse(json.dumps(VALUE, ensure_ascii=False).encode(encoding)) == VALUE
    assert body._parse(json.dumps(VALUE, indent=1).encode(encoding)) == VALUE


@pytest.mark.usefixtures("in_pieces")
@pytest.mark.parametrize(
    "text", [b"", b"{", b'{"a":NaN}', b"[1,]", b"[1] 2", b'{"a" 1}', b"\xff", b'["\\ud800"]', b"[" * 9**5]
)
def test_what_is_no_json_is_refused_in_pieces_too(text: bytes) -> None:
    with pytest.raises(Problem) as refused:
        body._parse(text)
    assert refused.value.status == 400


def test_other_threads_run_while_a_body_of_many_items_is_parsed() -> None:
    many = json.dumps({f"k{index}": [index] for index in range(100_000)}).encode()
    assert len(many) > body.WHOLE_BYTES
    turns, done = 0, threading.Event()

    def parse() -> None:
        body._parse(many)
        done.set()

    thread: Any = threading.Thread(target=parse)
    thread.start()
    while not done.wait(0.001):
        turns += 1
    thread.join()
    assert turns >= 10, "the interpreter was held"
