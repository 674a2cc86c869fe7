"""Endpoints of OpenAI's files and batches: a file of requests is uploaded, answered row by row, and its answers read.

Every object is a JSON file in one folder, beside the content of files. A batch whose server has ended goes on when the
next server of that folder is asked for it.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import time
from email import message_from_bytes
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio.to_thread
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from asyncengine.checks import as_choice
from asyncengine.errors import InvalidParameter, RequestFailed
from asyncengine.files import written_whole
from asyncengine.integrations.http.body import read_bytes
from asyncengine.integrations.http.fields import TABLES
from asyncengine.integrations.http.generating import read_fields, routed
from asyncengine.integrations.http.models import Serving
from asyncengine.integrations.http.problems import Problem
from asyncengine.integrations.http.requests import KEY
from asyncengine.integrations.http.rows import ENDPOINTS, answer_rows, count_rows, journal, post, read_rows

Object = dict[str, Any]
IN_FLIGHT = 256
"""Rows of one batch that are in memory and computed at a time."""


class _Batches:
    """Files and batches of one server; a task works on each batch in progress."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._tasks: dict[str, tuple[asyncio.Task[None], Object]] = {}

    def _path(self, name: str) -> Path:
        if (folder := self._serving.batch_dir) is None:
            raise Problem(403, "files are kept where the server has a batch_dir", code="forbidden")
        Path(folder).mkdir(parents=True, exist_ok=True)
        return Path(folder, name)

    def _save(self, record: Object) -> Object:
        with written_whole(self._path(f"{record['id']}.json")) as file:
            file.write(json.dumps(record).encode())
        return record

    def _find(self, request: Request, object_type: str, object_id: str) -> Object:
        """The stored object of that id. Raises `Problem` for an unknown id, and for another key's object."""
        path = self._path(f"{object_id}.json")
        exists = re.fullmatch(f"{object_type}[-_][0-9a-f]{{32}}", object_id) and path.exists()
        if not exists or not _may_see(request, record := dict(json.loads(path.read_bytes()))):
            raise Problem(404, f"there is no {object_type} {object_id[:100]!r}", "id", "not_found")
        return record

    def listing(self, object_type: str) -> Any:
        """The endpoint that lists all objects of a type ("file" or "batch"), newest first."""

        async def listed(request: Request) -> Response:
            every = [json.loads(path.read_bytes()) for path in self._path("").glob(f"{object_type}[-_]*.json")]
            shown = sorted((obj for obj in every if _may_see(request, obj)), key=lambda obj: -obj["created_at"])
            return JSONResponse({"object": "list", "data": shown, "has_more": False})

        return listed

    # ---------------------------------------------------------------- files

    def _add_file(self, file_id: str, name: str, purpose: str, owner: str) -> Object:
        """Make the object of a file whose content is stored."""
        size, now = self._path(f"{file_id}.jsonl").stat().st_size, int(time.time())
        file = {"id": file_id, "object": "file", "bytes": size, "created_at": now, "filename": name, "purpose": purpose}
        return self._save({**file, "status": "processed", "owner": owner})

    async def upload(self, request: Request) -> Response:
        origin = request.headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != request.headers.get("host"):
            # a browser sends a form to any host without asking it first
            raise Problem(403, "a page of another site uploads nothing", "origin", "forbidden")
        file_id = f"file-{secrets.token_hex(16)}"
        path = self._path(f"{file_id}.jsonl")  # a server without a folder refuses before it reads
        body = await read_bytes(request, self._serving.max_body)
        form = _form_fields(request.headers.get("content-type", ""), body)
        name, content = form.get("file", ("", b""))
        if not name:
            raise InvalidParameter("file", "is missing: a file in a form, multipart/form-data")
        await anyio.to_thread.run_sync(path.write_bytes, content)
        purpose = form.get("purpose", ("", b"batch"))[1].decode("utf-8", "replace")
        return JSONResponse(self._add_file(file_id, name, purpose, _owner(request)))

    async def file(self, request: Request) -> Response:
        return JSONResponse(self._find(request, "file", request.path_params["id"]))

    async def content(self, request: Request) -> Response:
        return FileResponse(self._path(f"{self._find(request, 'file', request.path_params['id'])['id']}.jsonl"))

    # ---------------------------------------------------------------- batches

    async def create(self, request: Request) -> Response:
        body = (await read_fields(request, self._serving)).read(TABLES["batches"])["own"]
        self._find(request, "file", body["input_file_id"])
        as_choice("endpoint", body["endpoint"], ENDPOINTS)
        now, counts = int(time.time()), {"total": 0, "completed": 0, "failed": 0}
        return self._shown(request, self._save({
            "id": f"batch_{secrets.token_hex(16)}", "object": "batch", "completion_window": "24h", **body,
            "status": "in_progress", "created_at": now, "in_progress_at": now, "request_counts": counts, "errors": None,
            "output_file_id": None, "error_file_id": None, "owner": _owner(request),
        }))  # fmt: skip

    async def retrieve(self, request: Request) -> Response:
        return self._shown(request, self._find(request, "batch", request.path_params["id"]))

    async def cancel(self, request: Request) -> Response:
        await self.retrieve(request)
        task, batch = self._tasks.get(request.path_params["id"], (None, {}))
        if task is not None:
            batch |= {"status": "cancelling", "cancelling_at": int(time.time())}
            task.cancel()
            await asyncio.wait((task,))
        return await self.retrieve(request)

    def _shown(self, request: Request, batch: Object) -> Response:
        """The batch as it is now; one that has not ended goes on."""
        if batch["status"] == "in_progress" and batch["id"] not in self._tasks:
            task = asyncio.create_task(self._work(request.app, batch))
            task.add_done_callback(lambda _: self._tasks.pop(batch["id"]))
            self._tasks[batch["id"]] = task, batch
        return JSONResponse(self._tasks[batch["id"]][1] if batch["id"] in self._tasks else batch)

    async def _work(self, app: ASGIApp, batch: Object) -> None:
        """Answer all rows of a batch that have no answer yet. Where the server ends first it stays as it is."""
        counts, status, serving = batch["request_counts"], "completed", self._serving
        key = next((key for key in serving.keys if key.name == batch["owner"]), None)
        send = partial(post, app, host=next(iter(serving.hosts or ()), "localhost"), key=key)
        ids = {name: f"file-{batch['id'][6:-1]}{end}" for end, name in enumerate(("output", "error"))}
        source, answers, errors = (self._path(f"{each}.jsonl") for each in (batch["input_file_id"], *ids.values()))

        def on_answer(answered: bool) -> None:
            counts["completed" if answered else "failed"] += 1

        try:
            with journal(answers) as done, journal(errors) as refused:
                counts |= {"total": count_rows(source), "completed": len(done), "failed": len(refused)}
                self._save(batch)  # the next server shows these counts before it has read the files, and those below
                try:
                    await answer_rows(send, read_rows(source, done | refused), (answers, errors), IN_FLIGHT, on_answer)
                finally:
                    self._save(batch)
        except (RequestFailed, BlockingIOError):  # this server ends, or another one of the folder holds the journal
            return
        except asyncio.CancelledError:
            if batch["status"] != "cancelling":
                raise
            status = "cancelled"
        except (InvalidParameter, OSError) as error:
            fault = {"code": "invalid_file", "message": str(error), "param": None, "line": None}
            status, batch["errors"] = "failed", {"object": "list", "data": [fault]}
        for name, path in (("output", answers), ("error", errors)):
            if path.exists() and path.stat().st_size:
                self._add_file(ids[name], f"{batch['id']}_{name}.jsonl", "batch_output", batch["owner"])
                batch[f"{name}_file_id"] = ids[name]
        self._save(batch | {"status": status, f"{status}_at": int(time.time())})


def routes(serving: Serving) -> list[Route]:
    """Paths of files and batches."""
    api = _Batches(serving)
    return routed({
        "POST /v1/files": api.upload, "GET /v1/files": api.listing("file"), "GET /v1/files/{id}": api.file,
        "GET /v1/files/{id}/content": api.content, "POST /v1/batches": api.create,
        "GET /v1/batches": api.listing("batch"), "GET /v1/batches/{id}": api.retrieve,
        "POST /v1/batches/{id}/cancel": api.cancel,
    })  # fmt: skip


def _owner(request: Request) -> str:
    """Name of the key that a request has shown; empty for one without a name, and without keys."""
    return request.scope[KEY].name if KEY in request.scope else ""


def _may_see(request: Request, record: Object) -> bool:
    return KEY not in request.scope or request.scope[KEY].operator or record["owner"] == _owner(request)


def _form_fields(content_type: str, body: bytes) -> dict[str, tuple[str, bytes]]:
    """(file name, content) of each field of a form (multipart/form-data, RFC 7578), by the field's name."""
    boundary = message_from_bytes(b"content-type: " + content_type.encode("latin-1", "replace")).get_boundary()
    fields = dict[str, tuple[str, bytes]]()
    for section in (b"\r\n" + body).split(f"\r\n--{boundary}".encode())[1:-1]:
        head, _, content = section.partition(b"\r\n\r\n")
        about = message_from_bytes(head.strip())
        fields[str(about.get_param("name", "", "content-disposition"))] = about.get_filename() or "", content
    return fields
