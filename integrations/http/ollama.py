"""Endpoints of Ollama's API: /api/chat and /api/generate, vectors, and listings of models."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import anyio.to_thread
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from asyncengine.config import parse_keep_alive
from asyncengine.errors import naming
from asyncengine.info import CHAT_SAMPLING
from asyncengine.integrations.http.answer import Answer
from asyncengine.integrations.http.dialects import ollama as dialect
from asyncengine.integrations.http.dialects.completions import read_prompts
from asyncengine.integrations.http.fields import TABLES, Fields, Values
from asyncengine.integrations.http.generating import Endpoint, answer, read_fields, routed
from asyncengine.integrations.http.models import Serving, Target
from asyncengine.integrations.http.problems import Problem
from asyncengine.integrations.http.turn import Answered, Turn
from asyncengine.integrations.http.vectors import Result, computing, rows_text

VERSION = "0.33.0"
"""The version of Ollama whose API this is: clients refuse servers that they take for too old."""
NEVER = "9999-12-31T23:59:59Z"
FAMILY = "asyncengine"
ABILITIES = ("completion", "tools", "vision", "thinking", "embedding")
"""Abilities that Ollama has a word for."""


def routes(serving: Serving) -> list[Route]:
    """Paths of Ollama's API."""

    async def version(_request: Request) -> Response:
        return JSONResponse({"version": VERSION})

    async def tags(_request: Request) -> Response:
        return JSONResponse({"models": [_listed(serving, row) for row in serving.models.listing()]})

    async def running(_request: Request) -> Response:
        rows = [row for row in serving.models.listing() if row["loaded"]]
        return JSONResponse({"models": [_listed(serving, row) | _running(serving, row["root"]) for row in rows]})

    async def show(request: Request) -> Response:
        body = (await read_fields(request, serving)).read(TABLES["ollama_show"])["own"]
        return JSONResponse(_shown(serving, serving.models.described(body.get("model") or body.get("name", ""))))

    async def pull(request: Request) -> Response:
        """Say that a model is there, or what would fetch it: a server has the models that it was started with."""
        body = (await read_fields(request, serving)).read(TABLES["ollama_pull"])["own"]
        name = body.get("model") or body.get("name", "")
        try:
            serving.models.described(name)
        except Problem as problem:
            problem.message += f"; nothing is downloaded: `asyncengine serve {name[:100]}` does, if the hub has it"
            raise
        lines = [{"status": "pulling manifest"}] * body.get("stream", True) + [{"status": "success"}]
        return Response("".join([json.dumps(line) + "\n" for line in lines]), media_type=dialect.LINES)

    return routed({
        "GET /api/version": version, "GET /api/tags": tags, "GET /api/ps": running,
        "POST /api/chat": _generating(serving, lambda fields, _templated: dialect.read_chat(fields)),
        "POST /api/generate": _generating(serving, dialect.read_generate),
        "POST /api/embed": computing(serving, _embed, "embed", "ollama_embed"),
        "POST /api/embeddings": computing(serving, _embed, "embed", "ollama_embeddings"),
        "POST /api/show": show, "POST /api/pull": pull,
    })  # fmt: skip


def _generating(serving: Serving, read: Callable[[Fields, bool], Turn]) -> Endpoint:
    """The endpoint of a generating path. `read` makes a turn of a request's fields, told whether the model has a chat
    template. A request without a prompt loads its model, or unloads it (`keep_alive` 0)."""

    async def endpoint(request: Request) -> Response | Answer:
        fields = await read_fields(request, serving)
        name = fields.peek("model")
        row = serving.models.described(name) if isinstance(name, str) else {}
        turn = read(fields, "chat" in (row.get("capabilities") or ("chat",)))
        keep, asks = turn.extra["keep_alive"], turn.messages or turn.prompts
        seconds = None if keep is None else parse_keep_alive("keep_alive", keep)
        if asks or row["loaded"] or seconds != 0:
            if seconds is not None and (not serving.keys or serving.may_operate(request.scope)):
                serving.models.group.keep(row["root"], seconds)
            if asks:
                return await answer(serving, dialect.Writer, turn, fields)
            (await serving.models.acquire(turn.model)).release()
        writer = dialect.Writer(turn, Answered("", turn.model or "", 0))
        line = writer.piece(ended={"done_reason": "unload" if seconds == 0 else "load"})
        return Response(json.dumps(line) + "\n", media_type=dialect.LINES)

    return endpoint


async def _embed(values: Values, target: Target) -> Result:
    body, begun = values["own"], time.perf_counter()
    name = "input" if "input" in body else "prompt"
    with naming({"prompt": name, "texts": name}):
        how = {"truncate": body.get("truncate", True), "adapter": target.adapter, **values["options"]}
        embeddings = await target.engine.embed(read_prompts(body[name]), show_progress=False, **how)
    rows = (vector.tolist() for vector in embeddings.vectors)
    if name == "prompt":  # the older form, of one text
        return {"embedding": next(rows)}, embeddings.truncated, embeddings.usage
    total = int((time.perf_counter() - begun) * dialect.NANO)
    head = {"model": target.name, "total_duration": total, "prompt_eval_count": embeddings.usage.prompt_tokens}
    return await anyio.to_thread.run_sync(rows_text, head, "embeddings", rows), embeddings.truncated, embeddings.usage


# -------------------------------------------------------------------- models


def _listed(serving: Serving, row: Mapping[str, Any]) -> dict[str, Any]:
    """Ollama's object of a model, from OpenAI's. What only a loaded model tells is empty until then."""
    engine, name = serving.models.group.loaded.get(row["root"]), row["id"]
    stored = [] if engine is None else [*engine.info.stored.values(), engine.info.dtype]
    details = {
        "parent_model": row["parent"] or "", "format": "", "family": FAMILY, "families": [FAMILY], "parameter_size": "",
        "quantization_level": Counter(stored).most_common(1)[0][0] if stored else "",
    }  # fmt: skip
    modified = datetime.fromtimestamp(row["created"], UTC).isoformat().replace("+00:00", "Z")
    return {
        "name": name, "model": name, "modified_at": modified, "size": engine.info.weight_bytes if engine else 0,
        "digest": hashlib.sha256(name.encode()).hexdigest(), "details": details,
    }  # fmt: skip


def _running(serving: Serving, name: str) -> dict[str, Any]:
    """Memory of a loaded model, and the time at which it will be unloaded."""
    info = serving.models.group.loaded[name].info
    size = info.weight_bytes + info.kv_cache_bytes + info.num_states * info.state_bytes
    on_device = 0 if info.device == "cpu" else size
    left = serving.models.group.closes_in(name)
    end = NEVER if left is None else (datetime.now(UTC) + timedelta(seconds=left)).isoformat().replace("+00:00", "Z")
    return {"size": size, "size_vram": on_device, "expires_at": end, "context_length": info.max_model_len}


def _shown(serving: Serving, row: Mapping[str, Any]) -> dict[str, Any]:
    engine, listed = serving.models.group.loaded.get(row["root"]), _listed(serving, row)
    defaults = engine.info.chat_defaults if engine is not None and row["task"] == "generate" else {}
    defaults = {name: defaults[name] for name in CHAT_SAMPLING if name in defaults}
    sizes = {"context_length": row["max_model_len"], "embedding_length": engine.info.dimensions if engine else 0}
    able = row["capabilities"] or ["embedding" if row["task"] == "embed" else "completion"]
    return {
        "modelfile": "", "template": "", "parameters": "\n".join(f"{key} {value}" for key, value in defaults.items()),
        "details": listed["details"], "modified_at": listed["modified_at"],
        "model_info": {
            "general.architecture": FAMILY, **{f"{FAMILY}.{key}": value for key, value in sizes.items() if value},
        },
        "capabilities": [name for name in ABILITIES if name in able],
    }  # fmt: skip
