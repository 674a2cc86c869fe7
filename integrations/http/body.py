"""Reading a request's body: bounded, uncompressed, strict JSON."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any, NoReturn

import anyio.to_thread
from starlette.requests import ClientDisconnect, Request

from asyncengine.integrations.http.problems import Problem

BODY_SECONDS = 120.0
"""Time for a body to arrive: its beginning is kept in memory meanwhile."""
DISCARD_SECONDS = 5.0
CLOSE = (("connection", "close"),)
INLINE_BYTES = 1 << 18
"""Longer bodies are parsed on a thread, so that streams go on meanwhile."""
MOST_STRINGS, MOST_VALUES = 1 << 19, 1 << 21
"""Limits of one body's names and texts, and of its values of any type. Parsing that many holds the interpreter for some
tenths of a second, and so does freeing them."""


async def read_json(request: Request, most: int) -> Any:
    """The body's JSON. Raises `Problem` for a body over `most` bytes, for a media type that is not JSON (Ollama's paths
    take any, but from a browser), and for invalid JSON."""
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # Ollama's own examples are curl's, which calls a body a form unless told otherwise; a browser names its page
    untyped = request.scope["path"].startswith("/api/") and not {"origin", "sec-fetch-site"} & {*request.headers}
    if media != "application/json" and not media.endswith("+json") and not untyped:
        # also what keeps other sites' pages away: a browser sends no JSON to a foreign host without asking it first
        raise Problem(415, f"the body must be application/json, not {media[:100] or 'without a type'}", "content-type")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise Problem(415, "a compressed body is not taken", "content-encoding")
    return await parse_json(await read_bytes(request, most))


async def parse_json(body: bytes) -> Any:
    """The JSON of a text. Raises `Problem`."""
    return await anyio.to_thread.run_sync(_parse, body) if len(body) > INLINE_BYTES else _parse(body)


async def read_bytes(request: Request, most: int) -> bytes:
    """The body. Raises `Problem` for one over `most` bytes, one that comes too slowly, and a client that leaves."""
    length = request.headers.get("content-length", "")
    if (
        length.isdecimal() and int(length[:20]) > most
    ):  # int() raises for thousands of digits, which are too many anyway
        raise await _too_large(request, most)
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for piece in request.stream():
                body += piece
                if len(body) > most:
                    raise await _too_large(request, most)
    except TimeoutError:
        raise Problem(408, f"the body was not there after {BODY_SECONDS:g} seconds", headers=CLOSE) from None
    except ClientDisconnect:
        raise Problem(400, "the client left before it had sent its request") from None
    return bytes(body)


async def _too_large(request: Request, most: int) -> Problem:
    """The refusal of a body, once it is read to its end, or for `DISCARD_SECONDS`: if the connection were closed while
    they still send, many clients would report a broken connection and not the answer."""
    if "expect" not in request.headers:  # "expect: 100-continue": that client has not begun to send
        with contextlib.suppress(TimeoutError, ClientDisconnect):
            async with asyncio.timeout(DISCARD_SECONDS):
                async for _ in request.stream():
                    pass
    return Problem(413, f"the body has more than {most} bytes", code="body_too_large", headers=CLOSE)


def _parse(body: bytes) -> Any:
    try:
        strings, values = (body.count(b'"') - body.count(b'\\"')) // 2, body.count(b",") + 1
        if strings > MOST_STRINGS or values > MOST_VALUES:
            limit = f"over {MOST_STRINGS} and {MOST_VALUES}"
            raise Problem(413, f"the body has {strings} strings and {values} values, {limit}", code="body_too_large")
        parsed = json.loads(body, parse_constant=_refuse)
        if b"\xed" in body or b"\\ud" in body or b"\\uD" in body:  # a surrogate, perhaps without its other half
            json.dumps(parsed, ensure_ascii=False).encode()
        return parsed
    except RecursionError:
        raise Problem(400, "the body is nested too deeply", code="invalid_json") from None
    except ValueError as error:  # wrong encodings, surrogates and integers of too many digits as well
        raise Problem(400, f"the body is no JSON: {error}"[:300], code="invalid_json") from None


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
