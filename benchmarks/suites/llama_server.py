"""llama.cpp's tests of its server against the app: python -m benchmarks.suites.llama_server [--source FOLDER] [TESTS]

--source: llama.cpp's tools/server/tests. The tests start a server for each test; here the command that they start asks
this process for one (`START`), which opens an app on the port, over the bundled models, until the command is ended.
Paths without /v1, which llama.cpp serves too, lead to those with it. The tests compare much with the texts of certain
checkpoints and ask for much that only llama.cpp has: `LEFT_OUT` names those, with a reason each.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import stat
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from asyncengine import AsyncEngine
from asyncengine.integrations.http import app
from benchmarks.suites.served import environment, parser, source

START = """#!{python}
import json, signal, socket, sys
with socket.create_connection(("127.0.0.1", {port})) as line:
    signal.signal(signal.SIGTERM, lambda *_: line.shutdown(socket.SHUT_WR))
    line.sendall(json.dumps(sys.argv[1:]).encode() + b"\\n")
    line.recv(1)  # until the server is closed: the next one has the same port
"""
FILES = (
    "test_basic.py", "test_chat_completion.py", "test_compat_anthropic.py", "test_compat_oai_responses.py",
    "test_embedding.py", "test_rerank.py", "test_security.py",
    "test_template.py", "test_tokenize.py", "test_tool_call.py",
)  # fmt: skip
NEEDED = ("aiohttp", "pytest", "pytest-xdist", "filelock", "numpy", "openai", "prometheus-client", "requests", "wget")
CHAT, ANTHROPIC, SECURITY = "test_chat_completion.py::", "test_compat_anthropic.py::", "test_security.py::"
LEFT_OUT: Mapping[str, tuple[str, ...]] = {
    "compares with the text or the tokens of a certain checkpoint": (
        f"{CHAT}test_chat_completion[", f"{CHAT}test_chat_completion_cached_tokens",
        f"{CHAT}test_chat_completion_stream",
        f"{CHAT}test_chat_completion_with_openai_library", "test_compat_oai_responses.py::test_responses_with_openai",
        "test_embedding.py::test_embedding_usage", "test_rerank.py::test_rerank_usage[Which city",
        "test_tokenize.py::test_tokenize_with_bos",
    ),
    "the first delta has an empty text, as OpenAI's own has, and no null": (
        f"{CHAT}test_logprobs_stream", "test_tool_call.py::test_completion_without_tool_call_fast",
    ),
    "needs a template of llama.cpp's, set by a flag": (
        f"{CHAT}test_chat_template", "test_template.py", f"{ANTHROPIC}test_anthropic_thinking_history",
    ),
    "a path that llama.cpp alone has": (
        f"{CHAT}test_apply_chat_template", f"{CHAT}test_chat_completions_token_count",
        "test_basic.py::test_server_props",
        "test_basic.py::test_server_slots", "test_basic.py::test_load_split_model",
        "test_embedding.py::test_embedding_pooling_none",
        f"{SECURITY}test_correct_api_key", f"{SECURITY}test_cors_proxy",
    ),
    "a field that llama.cpp alone has": (
        f"{CHAT}test_chat_completion_with_timings_per_token", f"{CHAT}test_return_progress",
        f"{CHAT}test_verbose_debug",
        "test_compat_oai_responses.py::test_responses_stream_with_llama_telemetry",
        "test_basic.py::test_server_model_aliases_and_tags",
    ),
    "a form of input that llama.cpp alone has": (
        *(f"test_embedding.py::test_embedding_mixed_input[input{number}-" for number in (3, 7, 8, 9, 10)),
        "test_embedding.py::test_embedding_content_text_same_as_string",
    ),
    "a flag of llama.cpp's: size of the context, several addresses, no page, no CORS but for some": (
        f"{CHAT}test_context_size_exceeded", "test_basic.py::test_server_multiple_addresses",
        "test_basic.py::test_no_ui",
    ),
    "pages of other sites are not let in: there are no CORS headers": (f"{SECURITY}test_cors_o",),
    "the page is another one": (f"{SECURITY}test_access_static_assets",),
    "the demo model reads no pictures": (
        f"{ANTHROPIC}test_anthropic_vision", f"{ANTHROPIC}test_anthropic_tool_result_with_image",
        f"{SECURITY}test_local_media_file",
    ),
    "refused here, by name: no messages at all": (f"{ANTHROPIC}test_anthropic_empty_messages",),
    "taken here: two answers in a row": (f"{CHAT}test_invalid_chat_completion_req[messages7]",),
    "the error has other words: it says by how much, and what would help": (
        "test_embedding.py::test_embedding_error_prompt_too_long",
    ),
}  # fmt: skip
"""Tests by the reason for which they are left out; a name stands for all its parameters."""


class Prefixed:
    """ASGI middleware that leads paths without /v1 to those with it."""

    def __init__(self, served: ASGIApp) -> None:
        self._served = served

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] in ("/chat/completions", "/completions", "/models", "/responses"):
            scope = {**scope, "path": "/v1" + scope["path"]}
        await self._served(scope, receive, send)


class Servers:
    """Apps over the same engines, one for each command that the tests start."""

    def __init__(self, engines: Mapping[str, AsyncEngine]) -> None:
        self._engines = dict(engines)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve as the flags on the line say, until the command at its other end has ended."""
        flags = argparse.ArgumentParser()
        for name in ("--port", "--host", "--alias", "--api-key"):
            flags.add_argument(name)
        flags.add_argument("--embedding", action="store_true")
        flags.add_argument("--reranking", action="store_true")
        given, _ = flags.parse_known_args(json.loads(await reader.readline()))
        kind = "reranker" if given.reranking else "embedder" if given.embedding else "demo"
        name = given.alias or kind
        keys = [given.api_key] if given.api_key else []
        made = Prefixed(app({name: self._engines[kind]}, aliases={"*": name}, api_keys=keys))
        server = uvicorn.Server(
            uvicorn.Config(
                made,
                host=given.host.partition(",")[0],
                port=int(given.port),
                log_level="error",
                timeout_graceful_shutdown=1,
            )
        )
        serving = asyncio.create_task(_until_exit(server))
        with contextlib.suppress(ConnectionError):
            await reader.read()
        server.should_exit = True
        await serving
        writer.close()


async def _until_exit(server: uvicorn.Server) -> None:
    try:
        await server.serve()
    except SystemExit:  # so uvicorn says that a port is taken
        print("the port is taken", file=sys.stderr)


async def run(python: Path, folder: Path, tests: list[str]) -> int:
    with tempfile.TemporaryDirectory() as work:
        settings: dict[str, Any] = {"show_progress": False}
        async with (
            await AsyncEngine.from_pretrained("demo", **settings) as demo,
            await AsyncEngine.from_pretrained("demo-embed", **settings) as embedder,
            await AsyncEngine.from_pretrained("demo-rerank", **settings) as reranker,
        ):
            servers = Servers({"demo": demo, "embedder": embedder, "reranker": reranker})
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            line = await asyncio.start_server(servers.serve, "127.0.0.1", 0)
            command = Path(work) / "llama-server"
            command.write_text(START.format(python=sys.executable, port=line.sockets[0].getsockname()[1]))
            command.chmod(command.stat().st_mode | stat.S_IXUSR)
            names = [name for left_out in LEFT_OUT.values() for name in left_out]
            testing = await asyncio.create_subprocess_exec(
                python, "-m", "pytest", "-q", "--tb=short", "-m", "not slow", "-p", "no:cacheprovider",
                *[f"--deselect=unit/{name}" for name in names], *tests,
                cwd=folder,
                env={**os.environ, "LLAMA_SERVER_BIN_PATH": str(command), "PORT": str(port)},
            )  # fmt: skip
            try:
                return await testing.wait()
            finally:
                with contextlib.suppress(ProcessLookupError):
                    testing.kill()


def main() -> int:
    flags = parser(__doc__)
    flags.add_argument("--python", type=Path, help="a Python that has what the tests need")
    flags.add_argument("tests", nargs="*", default=[f"unit/{name}" for name in FILES])
    args = flags.parse_args()
    folder = source(args.source, "ggml-org/llama.cpp", "master", args.work)
    folder = folder if (folder / "unit").is_dir() else folder / "tools" / "server" / "tests"
    python = args.python or environment(args.work, "llama-server", NEEDED)
    for reason, names in LEFT_OUT.items():
        print(f"left out: {reason}:", *names)
    return asyncio.run(run(python, folder, args.tests))


if __name__ == "__main__":
    sys.exit(main())
