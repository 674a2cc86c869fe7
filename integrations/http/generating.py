"""Endpoints that generate: a dialect reads the body, an engine streams the answer, the dialect writes it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from functools import partial

import anyio.to_thread
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from asyncengine.async_engine import AsyncEngine
from asyncengine.errors import InvalidParameter, naming
from asyncengine.integrations.beams import beam_search
from asyncengine.integrations.http.answer import Answer, AnswerWriter
from asyncengine.integrations.http.body import read_json
from asyncengine.integrations.http.fields import Fields
from asyncengine.integrations.http.models import Serving, Target
from asyncengine.integrations.http.several import Beams, Prompt, Several
from asyncengine.integrations.http.turn import ALL, Answered, Turn
from asyncengine.sampling_params import SamplingParams
from asyncengine.stream import TokenStream

IGNORED = "x-asyncengine-ignored"
"""Header that lists the fields of a request that changed nothing."""

BODY = "asyncengine.body"
"""Key of a request's scope that holds its parsed body, where that was read before the endpoint was chosen."""
MakeWriter = Callable[[Turn, Answered], AnswerWriter]
Headers = tuple[tuple[str, str], ...]
Endpoint = Callable[[Request], Awaitable[Response | Answer]]


def routed(served: Mapping[str, Endpoint]) -> list[Route]:
    """Routes of endpoints by their methods and paths, such as "GET /version"."""
    pairs = [(name.split(), endpoint) for name, endpoint in served.items()]
    return [Route(path, endpoint, methods=[method]) for (method, path), endpoint in pairs]


def generating(serving: Serving, read: Callable[[Fields], Turn], writer: MakeWriter) -> Endpoint:
    """The endpoint of a dialect whose requests need nothing but their body."""

    async def endpoint(request: Request) -> Answer:
        fields = await read_fields(request, serving)
        return await answer(serving, writer, read(fields), fields)

    return endpoint


async def read_fields(request: Request, serving: Serving) -> Fields:
    """The fields of a request's body. Raises `Problem` and `InvalidParameter`."""
    body = request.scope.pop(BODY) if BODY in request.scope else await read_json(request, serving.max_body)
    return Fields(body, strict=serving.strict)


async def count(serving: Serving, turn: Turn, fields: Fields) -> int:
    """The tokens of a turn's prompt. A long one is counted on a thread. Raises as `answer`."""
    with await serving.models.acquire(turn.model) as target:
        grant(turn, target, fields)
        arguments = turn.messages or (), turn.chat.get("tools"), turn.chat.get("template_kwargs")
        return await anyio.to_thread.run_sync(target.engine.count_tokens, *arguments)


async def answer(serving: Serving, writer: MakeWriter, turn: Turn, fields: Fields) -> Answer:
    """The response to a turn; the engine begins when it is sent. Raises `Problem` and `InvalidParameter`."""
    target = await serving.models.acquire(turn.model)
    with naming(fields.names), ExitStack() as undo:
        undo.callback(target.release)
        grant(turn, target, fields)
        if turn.grammar is not None:
            turn.params["grammar"] = await anyio.to_thread.run_sync(turn.grammar)
        params = SamplingParams(**turn.params)
        answer_id = secrets.token_hex(16)
        stream, engine = start(target, turn, params, answer_id), target.engine
        answered = Answered(
            answer_id, target.name, int(time.time()),
            lambda: [stream.prompt_token_ids] if isinstance(stream, TokenStream) else stream.prompts,
            engine.token_texts, partial(engine.detokenize, skip_special_tokens=False), lambda: stream.timings,
            lambda: stream.usage, lambda: stream.prompt_logprobs if isinstance(stream, Several) else [],
        )  # fmt: skip
        ignored = ((IGNORED, ", ".join(fields.ignored)[:1000]),) if fields.ignored else ()
        reply = Answer(
            stream, writer(turn, answered), streaming=turn.stream, samples=params.n * max(1, len(turn.prompts)),
            token_ids=bool(turn.extra.get("return_ids")), headers=(*identified(answer_id), *ignored),
            release=target.release, names=fields.names,
            facts={"id": answer_id, "model": target.base, "adapter": target.adapter, "streamed": turn.stream},
        )  # fmt: skip
        undo.pop_all()  # from here on the answer releases the model
        return reply


def identified(request_id: str) -> Headers:
    """Headers that name a request, as OpenAI's and Anthropic's clients look for them."""
    return ("x-request-id", request_id), ("request-id", f"req_{request_id}")


def grant(turn: Turn, target: Target, fields: Fields) -> None:
    """Set the fields of a turn that depend on its model: the vocabulary's size for `ALL`, and the template variables
    that the turn wishes for, as far as the template reads them and the request has not set them itself. Raises
    `InvalidParameter` for a wish that changes nothing, where `fields` are strict."""
    template_kwargs = turn.chat.get("template_kwargs", {})
    for field, variables in turn.wishes.items() if isinstance(template_kwargs, Mapping) else ():
        read = {name: variables[name] for name in variables if name in target.engine.info.template_variables}
        template_kwargs = {name: value for name, value in read.items() if name not in turn.chat} | template_kwargs
        if not read and field != turn.budget_field:
            fields.skip(field)
    turn.chat |= {"template_kwargs": template_kwargs} if template_kwargs else {}
    if turn.params.get("top_logprobs") == ALL:
        turn.params["top_logprobs"] = target.engine.info.vocab_size
    if turn.budget_field and not target.engine.info.reasons:  # the engine refuses a budget for a model without thoughts
        turn.chat.pop("max_thinking_tokens", None)


def start(target: Target, turn: Turn, params: SamplingParams, request_id: str) -> TokenStream | Several | Beams:
    """The engine's stream of a turn. Raises `InvalidParameter` for options that it does not have."""
    options = {"adapter": target.adapter, "request_id": request_id, **turn.options}
    engine = target.engine
    if turn.messages is not None:
        return engine.stream_chat(turn.messages, params, **options, **turn.chat)
    encode = partial(_encoded, engine, turn)
    if turn.length_penalty is not None:
        how = {"width": params.n, "length_penalty": turn.length_penalty, **options}
        if params.max_tokens is not None:
            how["max_tokens"] = params.max_tokens
        return Beams(turn.prompts, encode, partial(beam_search, engine, **how))
    plain = turn.special_tokens and not turn.prompt_limit
    open_stream = partial(engine.stream, params=params, **options)
    return Several(turn.prompts, open_stream, params.n, None if plain else encode)


def _encoded(engine: AsyncEngine, turn: Turn, prompt: Prompt) -> list[int]:
    """Token ids of a prompt, cut as the turn has it. Raises `InvalidParameter` for a limit beyond the context."""
    ids = engine.tokenize(prompt, add_special_tokens=turn.special_tokens) if isinstance(prompt, str) else prompt
    room = max(1, engine.info.max_model_len - (turn.params.get("max_tokens") or 1))
    if turn.prompt_limit > room:
        limit = f"must be at most {room}, what the context leaves beside max_tokens"
        raise InvalidParameter("truncate_prompt_tokens", limit, turn.prompt_limit)
    most = room if turn.prompt_limit == -1 else turn.prompt_limit or len(ids)
    return ids[:most] if turn.cut_side == "right" else ids[-most:]
