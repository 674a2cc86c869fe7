"""LangChain's own standard suites. Tool calling and structured output are declared absent: this version has neither."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from asyncengine import EngineHandle
from asyncengine.integrations.langchain import ChatAsyncEngine

from .conftest import CONFIG


class TestUnit(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatAsyncEngine

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "a-model"}

    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        return {"ASYNCENGINE_MODEL": "from-the-environment"}, {}, {"model": "from-the-environment"}

    @property
    def has_tool_calling(self) -> bool:
        return False

    @property
    def has_structured_output(self) -> bool:
        return False


class TestIntegration(ChatModelIntegrationTests):
    model_path: str

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def use_tiny_model(cls, model_path: str, handle: EngineHandle) -> None:
        cls.model_path = model_path

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatAsyncEngine

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": self.model_path, "engine_config": CONFIG, "max_tokens": 16, "temperature": 0}

    @property
    def has_tool_calling(self) -> bool:
        return False

    @property
    def has_structured_output(self) -> bool:
        return False

    @property
    def supports_model_override(self) -> bool:
        return False

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
