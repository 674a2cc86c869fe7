"""Sleep, pause and waking by requests, in vLLM's form: /sleep, /wake_up, /is_sleeping, /pause, /resume, /is_paused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from asyncengine.errors import InvalidParameter
from asyncengine.serve.models import Serving
from asyncengine.serve.problems import Problem

_MODES = {"abort": "abort", "wait": "finish", "keep": "keep"}
_LEVELS = {"1": {"weights": "keep", "cache": "drop"}, "2": {"weights": "drop", "cache": "drop"}}
"""Keywords of each level of sleep; level 0 is a pause."""
_SWITCHES = {"true": True, "false": False}


def routes(serving: Serving) -> list[Route]:
    """All paths. They stop everybody's requests, so they are served to holders of a key alone. `model` in the query
    names one; without it, all that are loaded are meant."""
    group = serving.models.group

    def model_of(request: Request, *known: str) -> str | None:
        if not serving.api_keys:
            raise Problem(403, "engines sleep and wake only where requests need a key", code="forbidden")
        for name in request.query_params:
            if name not in (*known, "model"):
                raise InvalidParameter.unknown(name, (*known, "model"))
        return request.query_params.get("model")

    async def sleep(request: Request) -> Response:
        model, mode = model_of(request, "level", "mode"), _choice(request, "mode", _MODES, "abort")
        drops = _choice(request, "level", {"0": {}, **_LEVELS}, "1")
        await (group.sleep if drops else group.pause)(model, mode=mode, **drops)
        return Response()

    async def wake_up(request: Request) -> Response:
        model, tags = model_of(request, "tags"), request.query_params.getlist("tags")
        if tags and sorted(tags) != ["kv_cache", "weights"]:
            raise InvalidParameter("tags", "must be left out, or weights and kv_cache: both wake together", tags)
        await group.wake(model)
        return Response()

    async def pause(request: Request) -> Response:
        model = model_of(request, "mode", "clear_cache")
        mode = _choice(request, "mode", _MODES, "abort")
        if _choice(request, "clear_cache", _SWITCHES, "false"):
            raise InvalidParameter("clear_cache", "cannot be: sleep drops the cache")
        await group.pause(model, mode=mode)
        return JSONResponse({"status": "paused"})

    async def resume(request: Request) -> Response:
        await group.wake(model_of(request))
        return JSONResponse({"status": "resumed"})

    def tells(name: str, *states: str) -> Any:
        async def tell(request: Request) -> Response:
            model = model_of(request)
            engines = list(group.loaded.values()) if model is None else [group[model]]
            return JSONResponse({name: all(engine.stats().state in states for engine in engines)})

        return tell

    calls = {"/sleep": sleep, "/wake_up": wake_up, "/pause": pause, "/resume": resume}
    asks = {"/is_sleeping": tells("is_sleeping", "asleep"), "/is_paused": tells("is_paused", "asleep", "paused")}
    return [
        Route(path, call, methods=[method])
        for method, paths in (("POST", calls), ("GET", asks))
        for path, call in paths.items()
    ]


def _choice(request: Request, name: str, choices: Mapping[str, Any], default: str) -> Any:
    given = request.query_params.get(name, default)
    if given not in choices:
        raise InvalidParameter(name, f"must be one of {', '.join(choices)}", given)
    return choices[given]
