"""OpenAI's own tests of its Python client against the app: python -m benchmarks.suites.openai_python

    [--source FOLDER --work FOLDER] [TESTS ...]

The tests call every method with every parameter, sync and async, and compare every field of every response with its
type, with strict validation. They are written for a mock server that answers anything, so their ids name nothing and
some of their values exclude each other. What a real server can't take is put right on the way (`MENDED`, a reason
each); the responses come back as the app wrote them. TESTS: files below tests/; by default those of what is served.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import Mapping
from typing import Any

import httpx
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from benchmarks.suites.served import demo_server, environment, parser, run, sdist

DROP, FRESH = object(), object()
"""A field that is taken out, and one that gets the id of a response that there is."""
NEEDED = frozenset(("input",))
"""Fields that are put in where they are missing, and stay as they are where they are given."""
TESTS = [
    f"tests/api_resources/{part}"
    for part in (
        "test_responses.py", "responses", "chat/test_completions.py", "test_completions.py", "test_embeddings.py",
        "test_models.py",
    )
]  # fmt: skip
GIVEN_TWICE = "previous_response_id and conversation exclude each other; conversations are not kept here"
NO_INPUT = "a request without an input: a real server has nothing to answer"
NO_SUCH = "an id that names nothing: it becomes that of a response made for the test"
NO_TOKEN = 'a bias of "foo", which is no token id'
NO_ROOM = "0 tokens to answer in"
MENDED: Mapping[str, Mapping[str, tuple[Any, str]]] = {
    r"/v1/responses(/compact|/input_tokens)?": {
        "input": ("hello", NO_INPUT),
        "previous_response_id": (FRESH, NO_SUCH),
        "conversation": (DROP, GIVEN_TWICE),
        "prompt": (DROP, "a prompt template: they are not kept here"),
        "personality": (DROP, "a manner of OpenAI's own models, which only input_tokens names"),
    },
    "/v1/chat/completions": {
        "logit_bias": (DROP, NO_TOKEN),
        "max_tokens": (16, NO_ROOM),
        "max_completion_tokens": (16, NO_ROOM),
    },
    "/v1/completions": {
        "logit_bias": (DROP, NO_TOKEN),
        "best_of": (1, "0 samples to choose from, and n is 1"),
        "suffix": (DROP, "text is written at the end, not in the middle"),
        "echo": (DROP, "with logprobs: the first token of a prompt has a null for its score, which the types lack"),
    },
    "/v1/embeddings": {
        "encoding_format": ("float", "base64, which the client asks for itself and its strict validation then refuses")
    },
}
"""Fields of bodies by their paths: what they become, and why."""
LEFT_OUT = {
    ("test_models.py", "Models", "delete"): "no model is deleted by a client",
    ("chat/test_completions.py", "Completions", "retrieve"): "chats are not stored (responses are)",
    ("chat/test_completions.py", "Completions", "update"): "chats are not stored",
    ("chat/test_completions.py", "Completions", "list"): "chats are not stored",
    ("chat/test_completions.py", "Completions", "delete"): "chats are not stored",
}
DESELECTED: Mapping[str, str] = {
    f"tests/api_resources/{file}::Test{kind}{group}::test_{way}_{call}": reason
    for (file, group, call), reason in LEFT_OUT.items()
    for kind in ("", "Async")
    for way in ("method", "raw_response", "streaming_response")
}
"""Tests that are left out, with the reason."""
IDS = re.compile(r"/v1/responses/(resp_677efb5139a88190b512bc3fef8e535d|response_id)(?=/|$)")


class Mending:
    """ASGI middleware that puts requests right before the app sees them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://app")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        if IDS.match(scope["path"]):
            scope = {**scope, "path": IDS.sub(f"/v1/responses/{await self._made()}", scope["path"])}
            scope["query_string"] = scope["query_string"].replace(b"limit=0", b"limit=1")  # the API's own least is 1
        for path, mended in MENDED.items():
            if scope["method"] == "POST" and re.fullmatch(path, scope["path"]):
                return await self._mended(mended, scope, receive, send)
        return await self._app(scope, receive, send)

    async def _mended(self, mended: Mapping[str, tuple[Any, str]], scope: Scope, receive: Receive, send: Send) -> None:
        content = bytearray()
        while (message := await receive())["type"] == "http.request":
            content += message.get("body", b"")
            if not message.get("more_body"):
                break
        body = json.loads(content or b"{}")
        for name, (value, _) in mended.items():
            if name not in body and name not in NEEDED:
                continue
            if value is DROP:
                del body[name]
            elif name not in NEEDED:
                body[name] = await self._made() if value is FRESH else value
            else:
                body.setdefault(name, value)
        text = json.dumps(body).encode()
        kept = [pair for pair in scope["headers"] if pair[0] not in (b"content-length", b"content-type")]
        headers = [*kept, (b"content-length", str(len(text)).encode()), (b"content-type", b"application/json")]
        given: list[Message] = [{"type": "http.request", "body": text, "more_body": False}]

        async def again() -> Message:
            return given.pop() if given else await receive()

        await self._app({**scope, "headers": headers}, again, send)

    async def _made(self) -> str:
        """The id of a response that has ended, and that was made in the background: one that can be streamed again."""
        body = {"input": "hello", "max_output_tokens": 1, "background": True}
        made = (await self._client.post("/v1/responses", json=body)).raise_for_status().json()
        while made["status"] in ("queued", "in_progress"):
            await asyncio.sleep(0.001)  # nothing else here lets the engine run
            made = (await self._client.get(f"/v1/responses/{made['id']}")).raise_for_status().json()
        return str(made["id"])


def main() -> int:
    flags = parser(__doc__)
    flags.add_argument("--version", default="3.57.0", help="that of the client")
    flags.add_argument("tests", nargs="*", default=TESTS)
    args = flags.parse_args()
    folder = sdist(args.source, "openai", args.version, args.work)
    python = environment(
        args.work,
        "openai-python",
        [f"{folder}[aiohttp]", "pytest>=9", "pytest-asyncio>=1.4", "rich", "inline-snapshot"],
    )
    for test, reason in DESELECTED.items():
        print(f"left out: {test}: {reason}")
    command = [str(python), "-m", "pytest", "-q", "-o", "addopts=--tb=short", "-p", "no:cacheprovider", *args.tests]
    command += [f"--deselect={test}" for test in DESELECTED]
    with demo_server(Mending) as url:
        return run(command, cwd=folder, env={**os.environ, "TEST_API_BASE_URL": f"{url}/v1"})


if __name__ == "__main__":
    sys.exit(main())
