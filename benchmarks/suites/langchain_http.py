"""LangChain's standard chat suites through HTTP: its clients of other APIs, against an app with the demo model.

    python -m benchmarks.suites.langchain_http [PYTEST'S ARGUMENTS]

In process the engine's own adapter passes the same suites (tests/integrations/test_langchain_standard.py); what fails
here and not there would be the app's. It needs langchain-tests and the clients: pip install langchain-tests
langchain-anthropic langchain-openai.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
from langchain_anthropic import ChatAnthropic
from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

from benchmarks.suites.served import demo_server

URL = os.environ.get("SUITE_URL", "")
"""Base URL of the app, which `main` starts."""


class OverHTTP(ChatModelIntegrationTests):
    """Abilities of the demo model, the same as in process; none of the suite's tests is changed."""

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
    def returns_usage_metadata(self) -> bool:
        return True

    @property
    def supports_model_override(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
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


class TestAnthropic(OverHTTP):
    """/v1/messages."""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatAnthropic

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "demo", "base_url": URL, "api_key": "none", "max_tokens": 40, "temperature": 0}

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True


class TestOpenAI(OverHTTP):
    """/v1/chat/completions."""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        model = {"model": "demo", "base_url": f"{URL}/v1", "api_key": "none", "stream_usage": True}
        return {**model, "max_tokens": 40, "temperature": 0}

    @property
    def structured_output_kwargs(self) -> dict[str, Any]:
        """OpenAI's client refuses every JSON text that ended with the limit, also one that the engine has closed there,
        and the demo model ends none before; calls it takes."""
        return {"method": "function_calling"}


def main() -> int:
    with demo_server(model={"adapters": {"pirate": "demo/pirate"}}) as url:
        os.environ["SUITE_URL"] = url
        # one loop: the client keeps its connections from one model object to the next
        loops = ["-o", "asyncio_default_test_loop_scope=session", "-o", "asyncio_default_fixture_loop_scope=session"]
        return int(pytest.main([__file__, "-q", "-p", "no:cacheprovider", *loops, *sys.argv[1:]]))


if __name__ == "__main__":
    sys.exit(main())
