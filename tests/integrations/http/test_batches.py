"""Files and batches as OpenAI's own client uses them: made, read, cancelled, and gone on with after an end."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from support.held_steps import HeldSteps
from support.http_server import serving_models

from asyncengine import AsyncEngine
from asyncengine.integrations.http.rows import journal

CHATS = "/v1/chat/completions"
PATIENCE = 120.0
ENDED = ("completed", "failed", "cancelled")
ENGINES: list[AsyncEngine] = []
"""The engine of the server that runs."""


def rows(count: int, tokens: int = 3) -> bytes:
    """A file of chats. The first one names a model that is not there; the second has one token, the others `tokens`."""
    bodies = (
        {"model": "demo" if number else "missing", "max_tokens": 1 if number == 1 else tokens, "ignore_eos": True}
        for number in range(count)
    )
    hello = {"messages": [{"role": "user", "content": "hello"}]}
    made = (
        {"custom_id": f"row {number}", "method": "POST", "url": CHATS, "body": {**body, **hello}}
        for number, body in enumerate(bodies)
    )
    return b"".join(json.dumps(row).encode() + b"\n" for row in made)


@contextmanager
def served(folder: Path | None, **settings: Any) -> Iterator[str]:
    batch_dir = None if folder is None else str(folder)
    settled = {"num_threads": 1, "policy": "priority"}
    with serving_models({"demo": "demo"}, settled, batch_dir=batch_dir, **settings) as (url, engines):
        ENGINES[:] = engines.values()
        yield f"{url}/v1"


def client(url: str, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key=key, max_retries=0)


def begun(ours: openai.OpenAI, content: bytes) -> Any:
    file = ours.files.create(file=("in.jsonl", content), purpose="batch")
    assert ours.files.retrieve(file.id).bytes == len(content)
    assert ours.files.content(file.id).read() == content
    return ours.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"name": "mine"}
    )


def ended(ours: openai.OpenAI, batch: Any) -> Any:
    deadline = time.monotonic() + PATIENCE
    while batch.status not in ENDED:
        assert time.monotonic() < deadline
        time.sleep(0.05)
        batch = ours.batches.retrieve(batch.id)
    return batch


def custom_ids(content: bytes) -> list[str]:
    return sorted(json.loads(line)["custom_id"] for line in content.splitlines())


def test_a_batch_is_answered_row_by_row(tmp_path: Path) -> None:
    with served(tmp_path) as url:
        ours = client(url)
        batch = ended(ours, begun(ours, rows(5) + b"{broken\n"))
        assert (batch.status, batch.metadata) == ("completed", {"name": "mine"})
        assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (6, 4, 2)
        answers = ours.files.content(batch.output_file_id).read()
        assert custom_ids(answers) == [f"row {number}" for number in range(1, 5)]
        body = json.loads(answers.splitlines()[0])["response"]["body"]
        assert body["object"] == "chat.completion"
        assert body["usage"]["completion_tokens"] <= 3
        assert custom_ids(ours.files.content(batch.error_file_id).read()) == ["6", "row 0"]
        assert [each.id for each in ours.batches.list()] == [batch.id]
        assert {batch.input_file_id, batch.output_file_id, batch.error_file_id} == {f.id for f in ours.files.list()}
        again = ours.batches.cancel(batch.id)
        assert again.status == "completed"


def test_a_batch_is_cancelled_and_keeps_its_answers(tmp_path: Path) -> None:
    with served(tmp_path) as url:
        ours = client(url)
        HeldSteps(ENGINES[0], after=5, until_left=True)  # the batch must not end before it is cancelled
        batch = begun(ours, rows(40, 100))
        while not ours.batches.retrieve(batch.id).request_counts.completed:
            time.sleep(0.02)
        batch = ours.batches.cancel(batch.id)
        assert batch.status == "cancelled"
        assert 0 < batch.request_counts.completed < 39
        assert len(custom_ids(ours.files.content(batch.output_file_id).read())) == batch.request_counts.completed


def test_a_batch_goes_on_where_the_server_ended(tmp_path: Path) -> None:
    with served(tmp_path) as url:
        HeldSteps(ENGINES[0], after=5, until_left=True)  # the second row is answered by then, and no other
        batch = begun(client(url), rows(100, 100))
        while not client(url).batches.retrieve(batch.id).request_counts.completed:
            time.sleep(0.02)
    with served(tmp_path) as url:
        ours = client(url)
        [listed] = ours.batches.list()  # before anything of it is read again
        assert (listed.status, listed.request_counts.total) == ("in_progress", 100)
        assert (listed.request_counts.completed, listed.request_counts.failed) == (1, 1)
        output = tmp_path / f"file-{batch.id[6:-1]}0.jsonl"
        with journal(output) as done:  # as another server that is at it
            assert done
            assert {ours.batches.retrieve(batch.id).status for _ in range(5)} == {"in_progress"}
            assert done == set(custom_ids(output.read_bytes()))
        batch = ended(ours, batch)
        assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 99, 1)
        answers = custom_ids(ours.files.content(batch.output_file_id).read())
        assert answers == sorted(f"row {number}" for number in range(1, 100))


def test_each_key_sees_what_is_its_own(tmp_path: Path) -> None:
    names = {"one": {"key": "key-of-one"}, "two": {"key": "key-of-two"}}
    with served(tmp_path, api_keys=["of-operators"], keys=names) as url:
        one, two, operator = (client(url, key) for key in ("key-of-one", "key-of-two", "of-operators"))
        batch = ended(one, begun(one, rows(3)))
        assert batch.request_counts.completed == 2
        assert [each.id for each in operator.batches.list()] == [batch.id]
        assert not list(two.batches.list())
        assert not list(two.files.list())
        for ask in (two.batches.retrieve, two.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                ask(batch.id)
        with pytest.raises(openai.NotFoundError):
            two.files.content(batch.output_file_id)
        with pytest.raises(openai.NotFoundError):
            two.batches.create(input_file_id=batch.input_file_id, endpoint=CHATS, completion_window="24h")


def test_what_is_refused(tmp_path: Path) -> None:
    with served(tmp_path) as url:
        ours = client(url)
        for name in ("file-../../x", "file-" + "0" * 32, "batch"):
            with pytest.raises(openai.NotFoundError):
                ours.files.retrieve(name)
        file = ours.files.create(file=("in.jsonl", rows(1) * 2), purpose="batch")
        with pytest.raises(openai.BadRequestError, match="endpoint"):
            ours.batches.create(input_file_id=file.id, endpoint="/v1/models", completion_window="24h")  # type: ignore[arg-type]
        batch = ours.batches.create(input_file_id=file.id, endpoint=CHATS, completion_window="24h")
        batch = ended(ours, batch)
        assert batch.status == "failed"
        assert "of line 2 is another line's" in batch.errors.data[0].message
        form = {"files": {"file": ("in.jsonl", b"{}")}, "data": {"purpose": "batch"}}
        page = httpx.post(f"{url}/files", headers={"origin": "https://elsewhere.example"}, **form)
        assert (page.status_code, page.json()["error"]["param"]) == (403, "origin")
        empty = httpx.post(f"{url}/files", files={"other": ("in.jsonl", b"{}")})
        assert (empty.status_code, empty.json()["error"]["param"]) == (400, "file")


def test_without_a_folder_there_are_none() -> None:
    with served(None) as url, pytest.raises(openai.PermissionDeniedError, match="batch_dir"):
        client(url).files.list()
