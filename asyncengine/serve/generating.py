"""Endpoints that generate: a dialect reads the body, an engine streams the answer, the dialect writes it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Protocol

import anyio.to_thread
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from asyncengine.sampling_params import SamplingParams
from asyncengine.serve.answer import Answer, AnswerWriter
from asyncengine.serve.body import read_json
from asyncengine.serve.fields import Fields
from asyncengine.serve.models import Target
from asyncengine.serve.problems import Problem, problem_of
from asyncengine.serve.several import Several
from asyncengine.serve.state import Serving
from asyncengine.serve.turn import Answered, Turn
from asyncengine.stream import TokenStream

IGNORED = "x-asyncengine-ignored"
"""Header that lists the fields of a request that changed nothing."""


class Dialect(Protocol):
    """A module of `serve.dialects`."""

    @property
    def Writer(self) -> Callable[[Turn, Answered], AnswerWriter]: ...  # noqa: N802
    def read(self, fields: Fields) -> Turn: ...
    def error(self, problem: Problem) -> dict[str, Any]: ...


Headers = tuple[tuple[str, str], ...]
Endpoint = Callable[[Request], Awaitable[Response | Answer]]


def generating(serving: Serving, dialect: Dialect) -> Endpoint:
    """The endpoint of a dialect whose requests need nothing but their body."""

    async def endpoint(request: Request) -> Answer:
        fields = await read_fields(request, serving)
        return await answer(serving, dialect, dialect.read(fields), fields)

    return reporting(endpoint, dialect.error)


async def read_fields(request: Request, serving: Serving) -> Fields:
    """The fields of a request's body. Raises `Problem` and `InvalidParameter`."""
    return Fields(await read_json(request, serving.max_body), strict=serving.strict)


async def answer(
    serving: Serving,
    dialect: Dialect,
    turn: Turn,
    fields: Fields,
    writer: Callable[..., AnswerWriter] | None = None,
    *,
    request_id: str = "",
    headers: Headers = (),
) -> Answer:
    """The response to a turn, with these `headers` too: nothing runs before it is sent. `writer`: another one than the
    dialect's own. `request_id`: empty: a new one.

    Raises `Problem` and `InvalidParameter`.
    """
    target = await serving.models.acquire(turn.model)
    try:
        grant(turn, target, fields)
        if turn.grammar is not None:
            turn.params["grammar"] = await anyio.to_thread.run_sync(turn.grammar)
        params = SamplingParams(**turn.params)
        answer_id = request_id or secrets.token_hex(16)
        stream, engine = start(target, turn, params, answer_id), target.engine
        answered = Answered(
            answer_id, target.name, int(time.time()), lambda: prompts_of(stream), engine.token_texts, engine.detokenize
        )
        headers = (*headers, ("x-request-id", answered.id))
        if fields.ignored:
            headers = (*headers, (IGNORED, ", ".join(fields.ignored)[:1000]))
        return Answer(
            stream,
            (writer or dialect.Writer)(turn, answered),
            dialect.error,
            streaming=turn.stream,
            samples=params.n * max(1, len(turn.prompts)),
            token_ids=bool(turn.extra.get("token_ids")),
            headers=headers,
            release=target.release,
        )
    except BaseException:
        target.release()
        raise


def grant(turn: Turn, target: Target, fields: Fields) -> None:
    """Set the template variables that a turn wishes for, as far as the model's template reads them and the request has
    not set them itself. Raises `InvalidParameter` for a wish that changes nothing, where `fields` are strict."""
    given = turn.chat.get("template_kwargs", {})
    for field, variables in turn.wishes.items() if isinstance(given, Mapping) else ():
        read = {name: variables[name] for name in variables if name in target.engine.info.template_variables}
        given = {name: value for name, value in read.items() if name not in turn.chat} | given
        if not read:
            fields.skip(field)
    turn.chat |= {"template_kwargs": given} if given else {}


def start(target: Target, turn: Turn, params: SamplingParams, request_id: str) -> TokenStream | Several:
    """The engine's stream of a turn. Raises `InvalidParameter` for options that it does not have."""
    options = {"adapter": target.adapter, "request_id": request_id, **turn.options}
    if turn.messages is not None:
        return target.engine.stream_chat(turn.messages, params, **options, **turn.chat)
    engine = target.engine
    encode = None if turn.special_tokens else partial(engine.tokenize, add_special_tokens=False)
    return Several(turn.prompts, lambda prompt: engine.stream(prompt, params, **options), params.n, encode)


def prompts_of(stream: TokenStream | Several) -> list[tuple[int, ...]]:
    """Token ids of the prompts of a stream, as far as it is submitted."""
    return stream.prompts if isinstance(stream, Several) else [stream.prompt_token_ids]


def reporting(endpoint: Endpoint, render: Callable[[Problem], dict[str, Any]], headers: Headers = ()) -> Endpoint:
    """The endpoint with every error made a response of the dialect's shape, with these `headers` too."""

    async def reported(request: Request) -> Response | Answer:
        try:
            return await endpoint(request)
        except Exception as error:
            problem = problem_of(error)
            return JSONResponse(render(problem), problem.status, headers=dict((*headers, *problem.headers)))

    return reported
