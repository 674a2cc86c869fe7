"""LangChain's own standard suites, none of their tests changed. Serialization is skipped: LangChain admits no
third-party class.

The suite's other methods of structured output are in files of their own."""

from __future__ import annotations

from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_tests.unit_tests import ChatModelUnitTests

from asyncengine.integrations.langchain import ChatAsyncEngine

from .standard_chat import OnTheDemoModel


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


class TestIntegration(OnTheDemoModel):
    """Structured output by its default, "json_schema"."""
