"""Agents that speak the Responses API, against the app: python -m benchmarks.suites.agents

    [--work FOLDER] [--only codex agents-sdk]

The OpenAI Agents SDK runs its loop, whole, streamed and by `previous_response_id`, with a tool that must be called.
Codex (`codex exec`) runs a turn. The demo model knows none of Codex's tools, so the first request's `tool_choice` is
set on the way to `get_goal`, which reads nothing and runs nothing, and the second's answer to a short form; the model
is given a context of 32,768 tokens for Codex' instructions, which it can't make sense of. What is shown is that both
sides understand one another: the call is run, its result comes back, and the turn is completed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

import asyncengine
from benchmarks.suites.served import demo_server, environment, parser

CONTEXT = 32_768
LOOP = """
import asyncio, sys
from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)
cities = []

@function_tool
def get_weather(city: str) -> str:
    \"\"\"The weather of a city.\"\"\"
    cities.append(city)
    return "sunny"

async def main() -> None:
    model = OpenAIResponsesModel("demo", AsyncOpenAI(base_url=sys.argv[1], api_key="none"))
    settings = ModelSettings(tool_choice="required", temperature=0)
    agent = Agent(name="Helper", tools=[get_weather], model=model, model_settings=settings)
    first = await Runner.run(agent, "What is the weather in Paris?")
    second = await Runner.run(agent, [*first.to_input_list(), {"role": "user", "content": "And in Rome?"}])
    third = await Runner.run(agent, "And in Bern?", previous_response_id=second.last_response_id)
    streamed = Runner.run_streamed(agent, "What is the weather in Oslo?")
    kinds = [event.data.type async for event in streamed.stream_events() if event.type == "raw_response_event"]
    assert cities == ["Paris", "Rome", "Bern", "Oslo"], cities
    assert kinds.count("response.completed") == 2, kinds
    print([run.final_output for run in (first, second, third, streamed)])

asyncio.run(main())
"""
FORM = {
    "type": "json_schema",
    "name": "end",
    "schema": {
        "type": "object",
        "properties": {"done": {"type": "boolean"}},
        "required": ["done"],
        "additionalProperties": False,
    },
}


class Leading:
    """ASGI middleware that says for the model which tool it calls first, and that it ends after that."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            return await self._app(scope, receive, send)
        content, more = b"", True
        while more:
            message = await receive()
            content += message.get("body", b"")
            more = message.get("more_body", False)
        body = json.loads(content) | {"temperature": 0}
        if any(item["type"] == "function_call_output" for item in body["input"]):
            body |= {"tool_choice": "none", "text": {"format": FORM}}
        else:
            body["tool_choice"] = {"type": "function", "name": "get_goal"}
        given = [json.dumps(body).encode()]
        headers = [pair for pair in scope["headers"] if pair[0] != b"content-length"]

        async def again() -> Message:
            return {"type": "http.request", "body": given.pop(), "more_body": False} if given else await receive()

        return await self._app({**scope, "headers": headers}, again, send)


def agents_sdk(work: Path) -> bool:
    """Run the SDK's loop."""
    python = environment(work, "agents", ["openai-agents>=0.24"])
    with demo_server() as url:
        return subprocess.run([str(python), "-c", LOOP, f"{url}/v1"], check=False).returncode == 0


def codex(work: Path) -> bool:
    """Run a turn of Codex."""
    tools, home, folder = [(work / name).resolve() for name in ("codex-tools", "codex-home", "codex-folder")]
    if not (tools / "node_modules").exists():
        subprocess.run(["npm", "install", "--silent", "--no-save", "--prefix", str(tools), "@openai/codex"], check=True)
    model = (work / "long-demo").resolve()
    shutil.copytree(Path(asyncengine.__file__).parent / "demo" / "model", model, dirs_exist_ok=True)
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    for each in (home, folder):
        each.mkdir(exist_ok=True)
    with demo_server(Leading, model={"model": str(model), "max_model_len": CONTEXT}) as url:
        provider = f'name = "local"\nbase_url = "{url}/v1"\nwire_api = "responses"\n'
        chosen = 'model = "demo"\nmodel_provider = "local"\n\n[model_providers.local]\n'
        (home / "config.toml").write_text(chosen + provider)
        command = [str(tools / "node_modules/.bin/codex"), "exec", "--json", "--skip-git-repo-check", "hello"]
        ran = subprocess.run(
            command, cwd=folder, env={**os.environ, "CODEX_HOME": str(home)}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    print(ran.stdout)
    return '"turn.completed"' in ran.stdout


def main() -> int:
    flags = parser(__doc__)
    flags.add_argument("--only", nargs="+", choices=["codex", "agents-sdk"], default=["codex", "agents-sdk"])
    args = flags.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    runs = {"agents-sdk": agents_sdk, "codex": codex}
    passed = {name: runs[name](args.work) for name in args.only}
    for name, good in passed.items():
        print("passed" if good else "failed", name)
    return 0 if all(passed.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
