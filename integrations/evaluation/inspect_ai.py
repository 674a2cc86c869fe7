"""Inspect's models over an engine of this process: `inspect eval TASK --model asyncengine/demo`.

Inspect finds this module by its entry point. A request is one of OpenAI's chats, in the forms that Inspect has for
its own providers, and is answered by the server's app without a port.
"""

from __future__ import annotations

from typing import Any

from inspect_ai import model as inspect_model
from inspect_ai.model import _openai as openai_forms
from inspect_ai.tool import ToolChoice, ToolInfo
from starlette.applications import Starlette

from asyncengine import EngineConfig, shared_engine
from asyncengine.errors import RequestFailed
from asyncengine.integrations.http import app
from asyncengine.integrations.http.rows import post


@inspect_model.modelapi(name="asyncengine")
class AsyncEngineAPI(inspect_model.ModelAPI):  # type: ignore[misc]
    """Inspect's provider; the model's arguments (`-M`) are fields of `EngineConfig`."""

    def __init__(
        self, model_name: str, base_url: str | None = None, api_key: str | None = None,
        config: inspect_model.GenerateConfig | None = None, **settings: Any,
    ) -> None:  # fmt: skip
        super().__init__(model_name, base_url, api_key, [], config or inspect_model.GenerateConfig())
        self._handle = shared_engine(model_name, **settings)
        self._app: Starlette | None = None
        self._most: int = settings.get("max_num_seqs", EngineConfig.max_num_seqs)

    def max_connections(self) -> int:
        """The number of requests that the engine runs at a time."""
        return self._most

    async def generate(
        self, input: list[inspect_model.ChatMessage], tools: list[ToolInfo], tool_choice: ToolChoice,
        config: inspect_model.GenerateConfig,
    ) -> inspect_model.ModelOutput:  # fmt: skip
        """Answer a chat. Raises `RequestFailed` for a request that is refused."""
        engine = await self._handle.aget()
        self._app = self._app or app(engine)
        body = openai_forms.openai_completion_params(engine.info.name, config, bool(tools))
        body |= {"messages": await inspect_model.messages_to_openai(input), **body.pop("extra_body", {})}
        if config.top_k is not None:
            body["top_k"] = config.top_k
        if tools:
            body["tools"] = openai_forms.openai_chat_tools(tools)
            body["tool_choice"] = openai_forms.openai_chat_tool_choice(tool_choice)
        answer = await post(self._app, "/v1/chat/completions", body)
        if answer["status_code"] == 200:
            return await inspect_model.model_output_from_openai(answer["body"])
        error = answer["body"]["error"]
        if error.get("code") == "context_length_exceeded":
            return inspect_model.ModelOutput.from_content(self.model_name, error["message"], "model_length")
        raise RequestFailed(error["message"])
