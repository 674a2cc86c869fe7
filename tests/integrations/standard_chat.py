"""LangChain's standard chat suite on the bundled model, for every way of structured output.

Skipped are image, PDF, audio and video inputs (this engine reads text), and the benchmark that replays recorded network
traffic.
"""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_tests.integration_tests import ChatModelIntegrationTests

from asyncengine import EngineHandle
from asyncengine.integrations.langchain import ChatAsyncEngine


class OnTheDemoModel(ChatModelIntegrationTests):
    """What this chat model declares; none of the suite's tests is changed."""

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def loaded(cls, demo: EngineHandle) -> None:
        """The engine, which outlives the model object of each test, has the adapter that some of them ask for."""
        demo.get().load_adapter("pirate", "demo/pirate")

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatAsyncEngine

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "demo", "temperature": 0, "seed": 7, "max_tokens": 40}

    @property
    def has_tool_calling(self) -> bool:
        return True

    @property
    def has_tool_choice(self) -> bool:
        return True

    @property
    def has_structured_output(self) -> bool:
        return True

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True

    @property
    def returns_usage_metadata(self) -> bool:
        return True

    @property
    def supports_model_override(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        """A LoRA adapter's name."""
        return "pirate"

    @property
    def supported_usage_metadata_details(self) -> dict[Any, Any]:
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> Any:
        model = self.chat_model_class(**self.chat_model_params)
        prompt = "A long prefix that the second call finds in the cache. " * 4
        model.invoke(prompt)
        if not stream:
            return model.invoke(prompt)
        full = None
        for chunk in model.stream(prompt):
            full = chunk if full is None else full + chunk
        return full
