"""Requests of those who run a server: load and unload models in the form of llama.cpp's router, and in vLLM's form load
and unload adapters, have engines sleep, pause, wake and forget the prefix cache (SGLang's /flush_cache, too)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from asyncengine.config import parse_keep_alive
from asyncengine.errors import InvalidParameter
from asyncengine.integrations.http.fields import TABLES, Fields
from asyncengine.integrations.http.generating import read_fields, routed
from asyncengine.integrations.http.models import Serving
from asyncengine.integrations.http.problems import Problem

_MODES = {"abort": "abort", "wait": "finish", "keep": "keep"}
"""Values of vLLM's `mode`, and the engine's: what becomes of running requests."""
_LEVELS: Mapping[str, Mapping[str, Any]] = {
    "0": {}, "1": {"weights": "keep", "cache": "drop"}, "2": {"weights": "drop", "cache": "drop"}
}  # fmt: skip
"""Keywords of each level of sleep; level 0 is a pause."""


def routes(serving: Serving) -> list[Route]:
    """All paths of those who run a server."""
    return [*model_routes(serving), *adapter_routes(serving), *sleep_routes(serving)]


def model_routes(serving: Serving) -> list[Route]:
    """Paths to load and unload models, which answer when that is done. Without keys they are served to everybody, as
    any request loads its model."""
    models = serving.models

    async def change(table: str, request: Request) -> Response:
        if serving.keys and not serving.may_operate(request.scope):
            raise Problem(403, "models are loaded and unloaded with an operator's key", code="forbidden")
        body = (await read_fields(request, serving)).read(TABLES[table])["own"]
        base = models.described(body["model"])["root"]
        if table == "models_unload":
            await models.group.unload(base)
        else:
            if "keep_alive" in body:
                models.group.keep(base, parse_keep_alive("keep_alive", body["keep_alive"]))
            (await models.acquire(body["model"])).release()
        return JSONResponse({"success": True, **models.described(body["model"])})

    return routed({f"POST /models/{action}": partial(change, f"models_{action}") for action in ("load", "unload")})


def adapter_routes(serving: Serving) -> list[Route]:
    """Paths of adapters, which read folders of this machine and so are served to holders of a key, or where it is
    allowed; and SGLang's, by which a client closes a session."""

    async def read(request: Request, table: str) -> dict[str, Any]:
        if not (serving.may_operate(request.scope) or serving.allow_adapters):
            raise Problem(403, "adapters are loaded where requests need a key or with allow_adapters", code="forbidden")
        return (await read_fields(request, serving)).read(TABLES[table])["own"]

    async def load(request: Request) -> Response:
        body = await read(request, "load_lora_adapter")
        name, again = body["lora_name"], body.get("load_inplace", False)
        await serving.models.load_adapter(name, body["lora_path"], body.get("model"), again=again)
        return PlainTextResponse(f"Success: LoRA adapter {name!r} added successfully.")

    async def unload(request: Request) -> Response:
        body = await read(request, "unload_lora_adapter")
        await serving.models.unload_adapter(body["lora_name"], body.get("model"))
        return PlainTextResponse(f"Success: LoRA adapter {body['lora_name']!r} removed successfully.")

    async def close_session(request: Request) -> Response:
        body = (await read_fields(request, serving)).read(TABLES["close_session"])["own"]
        for engine in serving.models.group.loaded.values():
            engine.session(body["session_id"]).close()
        return JSONResponse({"session_id": body["session_id"]})

    served = {"v1/load_lora_adapter": load, "v1/unload_lora_adapter": unload, "close_session": close_session}
    return routed({f"POST /{path}": endpoint for path, endpoint in served.items()})


def sleep_routes(serving: Serving) -> list[Route]:
    """Paths of sleep and of the prefix cache. They stop or slow everybody's requests, so they are served to holders of
    a key alone. `model` in the query names one; without it, all that are loaded are meant."""
    group = serving.models.group

    def read(request: Request, table: str = "asleep") -> dict[str, Any]:
        if not serving.may_operate(request.scope):
            raise Problem(403, "engines sleep, wake and forget only where requests need a key", code="forbidden")
        return Fields(dict(request.query_params)).read(TABLES[table])["own"]

    async def sleep(request: Request) -> Response:
        args = read(request, "sleep")
        drop = _LEVELS[args.get("level", "1")]
        await (group.sleep if drop else group.pause)(args.get("model"), mode=_MODES[args.get("mode", "abort")], **drop)
        return Response()

    async def wake_up(request: Request) -> Response:
        args, tags = read(request, "wake_up"), request.query_params.getlist("tags")
        if tags and sorted(tags) != ["kv_cache", "weights"]:
            raise InvalidParameter("tags", "must be left out, or weights and kv_cache: both wake together", tags)
        await group.wake(args.get("model"))
        return Response()

    async def pause(request: Request) -> Response:
        args = read(request, "pause")
        await group.pause(args.get("model"), mode=_MODES[args.get("mode", "abort")])
        return JSONResponse({"status": "paused"})

    async def resume(request: Request) -> Response:
        await group.wake(read(request).get("model"))
        return JSONResponse({"status": "resumed"})

    async def reset(request: Request) -> Response:
        args = read(request, "reset_prefix_cache")
        counts_by_model = await group.reset_prefix_cache(args.get("namespace"), model=args.get("model"))
        return JSONResponse({name: counts._asdict() for name, counts in counts_by_model.items()})

    def tells(name: str, *states: str) -> Any:
        async def tell(request: Request) -> Response:
            model = read(request).get("model")
            engines = list(group.loaded.values()) if model is None else [group[model]]
            return JSONResponse({name: all(engine.stats().state in states for engine in engines)})

        return tell

    return routed({
        "POST /sleep": sleep, "POST /wake_up": wake_up, "POST /pause": pause, "POST /resume": resume,
        "POST /reset_prefix_cache": reset, "POST /flush_cache": reset,
        "GET /is_sleeping": tells("is_sleeping", "asleep"), "GET /is_paused": tells("is_paused", "asleep", "paused"),
    })  # fmt: skip
