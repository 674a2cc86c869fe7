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
        own = (await read_fields(request, serving)).read(TABLES[table])["own"]
        base = models.described(own["model"])["root"]
        if table == "models_unload":
            await models.group.unload(base)
        else:
            if "keep_alive" in own:
                models.group.keep(base, parse_keep_alive("keep_alive", own["keep_alive"]))
            (await models.acquire(own["model"])).release()
        return JSONResponse({"success": True, **models.described(own["model"])})

    return routed({f"POST /models/{what}": partial(change, f"models_{what}") for what in ("load", "unload")})


def adapter_routes(serving: Serving) -> list[Route]:
    """Paths of adapters, which read folders of this machine and so are served to holders of a key, or where it is
    allowed; and SGLang's, by which a client closes a session."""

    async def read(request: Request, table: str) -> dict[str, Any]:
        if not (serving.may_operate(request.scope) or serving.allow_adapters):
            raise Problem(403, "adapters are loaded where requests need a key or with allow_adapters", code="forbidden")
        return (await read_fields(request, serving)).read(TABLES[table])["own"]

    async def load(request: Request) -> Response:
        own = await read(request, "load_lora_adapter")
        name, again = own["lora_name"], own.get("load_inplace", False)
        await serving.models.load_adapter(name, own["lora_path"], own.get("model"), again=again)
        return PlainTextResponse(f"Success: LoRA adapter {name!r} added successfully.")

    async def unload(request: Request) -> Response:
        own = await read(request, "unload_lora_adapter")
        await serving.models.unload_adapter(own["lora_name"], own.get("model"))
        return PlainTextResponse(f"Success: LoRA adapter {own['lora_name']!r} removed successfully.")

    async def close_session(request: Request) -> Response:
        own = (await read_fields(request, serving)).read(TABLES["close_session"])["own"]
        for engine in serving.models.group.loaded.values():
            engine.session(own["session_id"]).close()
        return JSONResponse({"session_id": own["session_id"]})

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
        own = read(request, "sleep")
        drops = _LEVELS[own.get("level", "1")]
        await (group.sleep if drops else group.pause)(own.get("model"), mode=_MODES[own.get("mode", "abort")], **drops)
        return Response()

    async def wake_up(request: Request) -> Response:
        own, tags = read(request, "wake_up"), request.query_params.getlist("tags")
        if tags and sorted(tags) != ["kv_cache", "weights"]:
            raise InvalidParameter("tags", "must be left out, or weights and kv_cache: both wake together", tags)
        await group.wake(own.get("model"))
        return Response()

    async def pause(request: Request) -> Response:
        own = read(request, "pause")
        await group.pause(own.get("model"), mode=_MODES[own.get("mode", "abort")])
        return JSONResponse({"status": "paused"})

    async def resume(request: Request) -> Response:
        await group.wake(read(request).get("model"))
        return JSONResponse({"status": "resumed"})

    async def reset(request: Request) -> Response:
        own = read(request, "reset_prefix_cache")
        found = await group.reset_prefix_cache(own.get("namespace"), model=own.get("model"))
        return JSONResponse({name: each._asdict() for name, each in found.items()})

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
