"""Requests in files: each row is answered by the endpoint that it names, by calling the app in process.

The file of answers is the journal: a row that has its line there is done, even if the process was killed after it.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import secrets
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from starlette.types import ASGIApp, Message

from asyncengine.batches import as_completed
from asyncengine.errors import InvalidParameter, RequestFailed
from asyncengine.files import locked
from asyncengine.integrations.http.fields import PATHS, TABLES, as_object
from asyncengine.integrations.http.requests import KEY

ENDPOINTS = tuple(path for path, table in PATHS.items() if "priority" in TABLES[table])
"""Paths that a row may name: those whose requests have a priority."""
LEAST_PRIORITY = 2**31 - 1
"""The priority of a row that sets none: below all requests of clients that wait."""
BUSY_SECONDS, BUSY_TRIES = 1.0, 3600
"""Seconds after which a row that met a full queue is sent again, and how often it is sent before that is its answer."""


class Row(NamedTuple):
    """One request of a file."""

    custom_id: str
    url: str = ""
    body: Mapping[str, Any] = {}
    fault: str = ""
    """The reason why the row is no valid request; empty for a valid one."""


def read_rows(
    path: Path, done: Collection[str], *, template: str | None = None, common: Mapping[str, Any] | None = None
) -> Iterator[Row]:
    """The rows of a file that are not `done`, in OpenAI's batch form or as bodies alone. `template`: makes a user's
    message of the fields of a row that has neither a body nor messages. `common`: fields of every body, below the
    row's own.

    Raises `InvalidParameter` for a custom_id that is there twice.
    """
    seen = set[str]()
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                row = _row(str(number), line, template, common or {})
                if row.custom_id in seen:
                    raise InvalidParameter("custom_id", f"of line {number} is another line's, too", row.custom_id)
                seen.add(row.custom_id)
                if row.custom_id not in done:
                    yield row


def _row(row_id: str, line: bytes, template: str | None, common: Mapping[str, Any]) -> Row:
    try:
        fields = dict(as_object("row", json.loads(line)))
        # /invocations chooses the endpoint by the fields
        row_id, url, body = str(fields.pop("custom_id", row_id)), "/invocations", fields
        if "body" in fields:
            url, body = str(fields.get("url")), dict(as_object("body", fields["body"]))
            if fields.get("method", "POST") != "POST" or url not in ENDPOINTS:
                raise InvalidParameter("url", f"must be POST and one of {', '.join(ENDPOINTS)}", url)
        elif template is not None and "messages" not in fields:
            body = {"messages": [{"role": "user", "content": _filled(template, fields)}]}
        if body.get("stream"):
            raise InvalidParameter("stream", "is not served in a batch")
        return Row(row_id, url, {"priority": LEAST_PRIORITY, **common, **body})
    except (ValueError, RecursionError) as error:  # of JSON
        refused = isinstance(error, InvalidParameter)
        return Row(row_id, fault=str(error) if refused else f"row: cannot be read: {error}")


def _filled(template: str, fields: Mapping[str, Any]) -> str:
    """The template with a row's fields. Raises `InvalidParameter`."""
    try:
        return template.format_map(fields)
    except KeyError as error:
        raise InvalidParameter("template", "names a field that the row has not", error.args[0]) from error
    except (LookupError, ValueError, AttributeError, TypeError) as error:
        raise InvalidParameter("template", f"cannot be filled: {error}", template) from error


def count_rows(path: Path) -> int:
    """Number of the rows of a file."""
    with path.open("rb") as file:
        return sum(1 for line in file if line.strip())


@contextmanager
def journal(path: Path) -> Iterator[set[str]]:
    """Ids of the rows that a file of answers has; the file is locked against other processes within the block. The last
    line is cut off where it was not written to its end.

    Raises `BlockingIOError` where another process holds the lock, `InvalidParameter` for a file that has other lines.
    """
    done, end = set[str](), 0
    with path.open("a+b") as file:
        if not locked(file.fileno()):
            raise BlockingIOError(errno.EWOULDBLOCK, "another run writes its answers there", str(path))
        file.seek(0)
        for line in file:
            if line.endswith(b"\n"):
                try:
                    done.add(json.loads(line)["custom_id"])
                except (ValueError, LookupError, TypeError):
                    raise InvalidParameter("output", "holds other things than answers to rows", str(path)) from None
                end += len(line)
        file.truncate(end)
        yield done


async def answer_rows(
    send: Callable[[str, Mapping[str, Any]], Awaitable[dict[str, Any]]], rows: Iterator[Row],
    outputs: tuple[Path, Path], in_flight: int, on_answer: Callable[[bool], object],
) -> None:  # fmt: skip
    """Answer `rows`, `in_flight` at a time, and append the answers to `outputs`: those of status 200 to the first, the
    others to the second, which may be the same. `send`: as `post`, of a path and a body. `on_answer` is called with
    whether it was 200.

    Raises `RequestFailed` where the app takes no more requests: the rows without an answer may be sent again.
    """

    async def ask(row: Row) -> dict[str, Any]:
        entry: dict[str, Any] = {"id": f"batch_req_{secrets.token_hex(16)}", "custom_id": row.custom_id}
        if row.fault:
            return entry | {"response": None, "error": {"code": "invalid_request", "message": row.fault}}
        for _ in range(BUSY_TRIES):
            answer = await send(row.url, row.body)
            if answer["status_code"] != 429:  # else other requests have filled the queue
                break
            await asyncio.sleep(BUSY_SECONDS)
        if answer["status_code"] == 503:
            raise RequestFailed(f"row {row.custom_id}: {answer['body']['error']['message']}")
        return entry | {"response": answer, "error": None}

    files = [os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600) for path in outputs]
    try:
        async with aclosing(as_completed(rows, ask, in_flight)) as answers:
            async for _, answer in answers:
                if isinstance(answer, Exception):
                    raise answer
                answered = answer["response"] is not None and answer["response"]["status_code"] == 200
                line = json.dumps(answer, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
                # in one call: only the last line of a process that is killed can be torn
                if os.write(files[not answered], line) < len(line):
                    raise OSError(errno.ENOSPC, "an answer was cut short")
                on_answer(answered)
    finally:
        for file in files:
            os.fsync(file)
            os.close(file)


async def post(
    app: ASGIApp, path: str, body: Mapping[str, Any], *, host: str = "localhost", key: object = None
) -> dict[str, Any]:
    """The app's answer to a request of this program itself: "status_code", "request_id", and "body", which is JSON.
    `host`: a host name that the app accepts. `key`: the `Key` that is charged for it."""
    content = [json.dumps(body).encode()]
    head, chunks = dict[str, Any](), list[bytes]()
    scope = {
        "type": "http", "http_version": "1.1", "method": "POST", "scheme": "http", "path": path,
        "raw_path": path.encode(), "root_path": "", "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"host", host.encode())],
        **({} if key is None else {KEY: key}),
    }  # fmt: skip

    async def receive() -> Message:
        if not content:
            await asyncio.Event().wait()  # this client never leaves
        return {"type": "http.request", "body": content.pop()}

    async def take(message: Message) -> None:
        head.update(message)
        chunks.append(message.get("body", b""))

    await app(scope, receive, take)
    request_id = dict(head["headers"]).get(b"x-request-id", b"").decode()
    return {"status_code": head["status"], "request_id": request_id, "body": json.loads(b"".join(chunks))}
