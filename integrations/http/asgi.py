"""The ASGI app: the endpoint of each path, the middleware around them, and the responses to errors."""

from __future__ import annotations

import secrets
import tomllib
from collections.abc import Callable, Collection, Mapping
from functools import partial
from importlib import resources

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

import asyncengine
from asyncengine.errors import QueueFull
from asyncengine.integrations.http import batches, decisions, keys, metrics, ollama, operating, responses, vectors
from asyncengine.integrations.http.answer import Answer
from asyncengine.integrations.http.body import read_json
from asyncengine.integrations.http.dialects import anthropic_messages, completions, openai_chat
from asyncengine.integrations.http.fields import Fields
from asyncengine.integrations.http.generating import BODY, Endpoint, count, generating, identified, read_fields, routed
from asyncengine.integrations.http.models import Serving
from asyncengine.integrations.http.problems import Problem, problem_of
from asyncengine.integrations.http.requests import Requests, facts_of, path_of

# Checks that a request must pass, and the refusal of one that does not.

Check = Callable[[HTTPConnection], Problem | None]
"""The reason to refuse a connection; None if it may pass."""


async def guarded(check: Check, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Call `app`, unless the check refuses the connection: then send the refusal."""
    problem = None if scope["type"] == "lifespan" else check(HTTPConnection(scope))
    app = app if problem is None else refusal(HTTPConnection(scope), problem)
    await app(scope, receive, send)


def check_host(hosts: Collection[str], connection: HTTPConnection) -> Problem | None:
    """Refuse a request to another host name, which keeps DNS rebinding out: a web page's own host name, made to resolve
    to this machine, would have browsers treat this server as the page's."""
    host = connection.headers.get("host", "").lower()
    if (host if host.endswith("]") else host.rpartition(":")[0] or host) in hosts:
        return None
    return Problem(403, f"a server without a key answers to {', '.join(sorted(hosts))} only", "host", "wrong_host")


def refusal(connection: HTTPConnection, problem: Problem) -> JSONResponse:
    """The response that tells a problem, in the shape of the path's dialect."""
    request_id = secrets.token_hex(16)
    facts = facts_of(connection.scope)
    facts |= {"id": facts.get("id", request_id), "error": problem.code or "refused"}
    content = openai_chat.error(problem)
    if is_anthropics(connection):
        content = anthropic_messages.error(problem, f"req_{request_id}")
    if path_of(connection.scope).startswith("/api/"):
        content = {"error": problem.message}
    if path_of(connection.scope) in ("/pooling", "/score", "/classify") and problem.status in (400, 404):
        content["error"]["type"] = "NotFoundError" if problem.status == 404 else "BadRequestError"  # vLLM's names
    return JSONResponse(content, problem.status, headers=dict((*identified(request_id), *problem.headers)))


def is_anthropics(connection: HTTPConnection) -> bool:
    """Whether a client of Anthropic's API asks: by its path, or by the header that it sends with every request."""
    return "anthropic-version" in connection.headers or path_of(connection.scope).startswith("/v1/messages")


_PAGE = tomllib.loads((resources.files(__package__) / "page.toml").read_text(encoding="utf-8"))
"""Types of the page's files, and their headers."""


def make_app(serving: Serving) -> Starlette:
    """The app of `asyncengine.integrations.http.app`."""
    served = routes(serving)
    serving.requests.paths |= {route.endpoint: route.path for route in served if isinstance(route, Route)}
    middleware = [Middleware(lambda app: partial(serving.requests.run, app))]
    if serving.cors:  # before keys: a browser asks without one whether it may ask
        middleware.append(Middleware(CORSMiddleware, serving.cors, ("GET", "POST", "DELETE"), ("*",)))
    checks: list[Check] = [partial(keys.check, serving.keys)] if serving.keys else []
    if serving.hosts is not None and not serving.keys:
        checks = [partial(check_host, frozenset(serving.hosts))]
    middleware += [Middleware(partial(partial, guarded, check)) for check in checks]  # which get the app
    if serving.telemetry:
        from asyncengine.integrations.opentelemetry import TraceContext, trace

        serving.models.watch(lambda name, engine: trace(engine, name=name))
        middleware.append(Middleware(TraceContext))
    # Starlette raises an exception again after its own handler of `Exception` has answered it: so a middleware answers
    refused = partial(_refused, serving.requests)
    middleware.append(Middleware(ExceptionMiddleware, {Exception: refused}))
    app = Starlette(routes=served, middleware=middleware, exception_handlers={HTTPException: refused})
    app.state.models = serving.models
    return app


def routes(serving: Serving) -> list[BaseRoute]:
    """Every path of the app."""

    async def count_tokens(request: Request) -> Response:
        fields = await read_fields(request, serving)
        turn = anthropic_messages.read(fields, counting=True)
        return JSONResponse({"input_tokens": await count(serving, turn, fields)})

    invocable = vectors.routes(serving)
    invocable += routed({
        "POST /v1/chat/completions": generating(serving, openai_chat.read, openai_chat.Writer),
        "POST /v1/completions": generating(serving, completions.read, completions.Writer),
        "POST /v1/messages": generating(serving, anthropic_messages.read, anthropic_messages.Writer),
        "POST /v1/messages/count_tokens": count_tokens,
    })  # fmt: skip

    async def models(request: Request) -> Response:
        """All models, in the shape of the client that asks."""
        rows = serving.models.listing()
        listed = anthropic_messages.model_list(rows) if is_anthropics(request) else {"object": "list", "data": rows}
        return JSONResponse(listed)

    async def model(request: Request) -> Response:
        row = serving.models.described(request.path_params["name"])
        return JSONResponse(anthropic_messages.model_object(row) if is_anthropics(request) else row)

    async def health(_request: Request) -> Response:
        if serving.models.draining_until is not None:  # so that balancers send no more, while answers end
            return JSONResponse({"status": "draining"}, 503)
        alive, loaded = serving.models.group.alive, serving.models.group.loaded
        resting = {name: state for name, engine in loaded.items() if (state := engine.stats().state) != "awake"}
        status = {"status": "ok" if alive else "dead"}
        return JSONResponse({**status, "states": resting} if resting else status, 200 if alive else 503)

    async def version(_request: Request) -> Response:
        return JSONResponse({"version": asyncengine.__version__})

    async def load(_request: Request) -> Response:
        """Requests that are computed or wait, as vLLM and balancers call it."""
        counts = [engine.stats().requests for engine in serving.models.group.loaded.values()]
        return JSONResponse({"server_load": sum(sum(by_state.values()) for by_state in counts)})

    endpoints = {route.path: route.endpoint for route in invocable}
    served: dict[str, Endpoint] = {"POST /invocations": partial(_invoke, serving, endpoints), "GET /version": version}
    served |= {"GET /load": load, "GET /health": health}
    # of two paths to one endpoint, logs and metrics name the last
    served |= {"GET /models": models, "GET /v1/models": models, "GET /v1/models/{name:path}": model}
    served |= {f"GET /{'' if name == 'index.html' else name}": _file(name) for name in _PAGE["types"]}
    every: list[BaseRoute] = [*invocable, *routed(served)]
    for module in (responses, ollama, decisions, batches, metrics, operating):
        every += module.routes(serving)
    return every


async def _invoke(serving: Serving, endpoints: Mapping[str, Endpoint], request: Request) -> Response | Answer:
    """Answer at the one path that Amazon SageMaker knows: the endpoint is chosen by the request's fields, and by its
    model's task."""
    paths = {"task": "/pooling", "query": "/rerank", **dict.fromkeys(("queries", "text_1", "data_1"), "/score")}
    paths |= {"prompt": "/v1/completions", "input": "/v1/embeddings", "messages": "/v1/chat/completions"}
    instead = {"embed": {"/v1/chat/completions": "/v1/embeddings"}, "classify": {"/v1/embeddings": "/classify"}}
    body = request.scope[BODY] = await read_json(request, serving.max_body)
    fields = Fields(body)
    name = fields.peek("model")
    task = serving.models.described(name)["task"] if isinstance(name, str) else ""
    path = next((paths[field] for field in paths if fields.peek(field) is not None), "/v1/chat/completions")
    return await endpoints[instead.get(task, {}).get(path, path)](request)


def _file(name: str) -> Endpoint:
    """The endpoint of a file of the page. Addresses in it are relative: the app may be mounted anywhere."""
    content = (resources.files("asyncengine.integrations.http") / "page" / name).read_bytes()

    async def file(_request: Request) -> Response:
        return Response(content, media_type=_PAGE["types"][name], headers=_PAGE["headers"])

    return file


async def _refused(requests: Requests, connection: HTTPConnection, error: Exception) -> Response:
    """The answer to a request that failed before anything was sent."""
    if connection.scope["type"] != "http":
        raise error
    if isinstance(error, HTTPException):
        message = f"{connection.scope['method']} {connection.url.path[:200]}: {error.detail}"
        return refusal(connection, Problem(error.status_code, message, headers=tuple((error.headers or {}).items())))
    problem = problem_of(error)
    if isinstance(error, QueueFull):
        seconds = requests.retry_after(facts_of(connection.scope).get("model"), error.waiting)
        problem.headers = (("retry-after", str(seconds)),)
    return refusal(connection, problem)
