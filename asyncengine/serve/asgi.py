"""The ASGI app: which path is served by what."""

from __future__ import annotations

from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from asyncengine.serve import adapters, messages, metrics, responses, sleeping, vectors, web_page
from asyncengine.serve.dialects import anthropic_messages, completions, openai_chat
from asyncengine.serve.generating import generating
from asyncengine.serve.problems import Problem, problem_of
from asyncengine.serve.security import RequireHost, RequireKey, path_of
from asyncengine.serve.state import Serving


def make_app(serving: Serving) -> Starlette:
    """The app of `asyncengine.serve.app`."""
    middleware = list[Middleware]()
    if serving.cors:  # before keys: a browser asks without one whether it may ask
        middleware.append(Middleware(CORSMiddleware, serving.cors, ("GET", "POST", "DELETE"), ("*",)))
    if serving.hosts is not None and not serving.api_keys:
        middleware.append(Middleware(RequireHost, serving.hosts, error_for))
    if serving.api_keys:
        middleware.append(Middleware(RequireKey, serving.api_keys, error_for))
    if serving.telemetry:
        from asyncengine.integrations.opentelemetry import TraceContext, trace

        serving.models.watch(lambda name, engine: trace(engine, name=name))
        middleware.append(Middleware(TraceContext))
    return Starlette(
        routes=routes(serving),
        middleware=middleware,
        exception_handlers={HTTPException: _not_found, Exception: _failed},
    )


def routes(serving: Serving) -> list[BaseRoute]:
    """Every path of the app."""
    return [
        Route("/v1/chat/completions", generating(serving, openai_chat), methods=["POST"]),
        *responses.routes(serving),
        *messages.routes(serving),
        Route("/v1/completions", generating(serving, completions), methods=["POST"]),
        *vectors.routes(serving),
        Route("/v1/models", _models(serving), methods=["GET"]),
        Route("/v1/models/{name:path}", _models(serving), methods=["GET"]),
        Route("/health", _health(serving), methods=["GET"]),
        *metrics.routes(serving),
        *web_page.routes(),
        *adapters.routes(serving),
        *sleeping.routes(serving),
    ]


def error_for(path: str, problem: Problem) -> dict[str, Any]:
    """The error object of the dialect that is spoken at a path."""
    return anthropic_messages.error(problem) if path.startswith("/v1/messages") else openai_chat.error(problem)


def _models(serving: Serving) -> Any:
    """All models, or the one of the path, in the shape of the client that asks."""

    async def models(request: Request) -> Response:
        name, anthropics = request.path_params.get("name"), "anthropic-version" in request.headers
        try:
            if name is not None:
                row = serving.models.described(name)
                return JSONResponse(anthropic_messages.model_object(name) if anthropics else row)
        except Problem as problem:
            refused = anthropic_messages.error(problem) if anthropics else openai_chat.error(problem)
            return JSONResponse(refused, problem.status)
        rows = serving.models.listing()
        listed = anthropic_messages.model_list([row["id"] for row in rows])
        return JSONResponse(listed if anthropics else {"object": "list", "data": rows})

    return models


def _health(serving: Serving) -> Any:
    async def health(_request: Request) -> Response:
        alive, loaded = serving.models.alive, serving.models.loaded
        resting = {name: state for name, each in loaded.items() if (state := each.stats().state) != "awake"}
        status = {"status": "ok" if alive else "dead"}
        return JSONResponse({**status, "states": resting} if resting else status, 200 if alive else 503)

    return health


async def _not_found(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    problem = Problem(error.status_code, f"{request.method} {request.url.path[:200]}: {error.detail}")
    return JSONResponse(error_for(path_of(request.scope), problem), error.status_code, headers=error.headers)


async def _failed(request: Request, error: Exception) -> Response:
    problem = problem_of(error)
    return JSONResponse(error_for(path_of(request.scope), problem), problem.status)
