"""LangChain's own standard suites, none of their tests changed but that of serialization, which no class outside of
LangChain's own table can pass.

Skipped are image, PDF, audio and video inputs (this engine reads text), and the benchmark that replays recorded network
traffic. The other methods of structured output are in test_langchain_structured."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.load import dumps, loads
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests
from pydantic import BaseModel

from asyncengine import AsyncEngine, EngineHandle
from asyncengine.integrations.langchain import AsyncEngineLLM, ChatAsyncEngine


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

    @pytest.fixture
    def snapshot(self) -> Any:
        """Only reading the written form back may fail here."""
        return lambda name: mock.ANY

    @pytest.mark.xfail(
        raises=ValueError,
        reason="the test loads with allowed_objects='all', which admits nothing but the classes of "
        "langchain_core.load.mapping: others must be named in allowed_objects",
        strict=True,
    )
    def test_serdes(self, model: BaseChatModel, snapshot: Any) -> None:
        super().test_serdes(model, snapshot)


class TestIntegration(ChatModelIntegrationTests):
    """The suite's tests with what this chat model declares; none is changed. Structured output is by its default."""

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def loaded(cls, demo: EngineHandle) -> None:
        """The engine, which outlives the model object of each test, has the adapter that some of them ask for."""
        demo.get().load_adapter("pirate", "demo/pirate")

    @pytest.fixture
    def vcr(self) -> None:
        """Recorded network traffic, of which there is none: the test that asks for it skips itself."""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatAsyncEngine

    @property
    def chat_model_params(self) -> dict[str, Any]:
        """The bundled model knows no jokes, and writes on for ever: what the engine closes is taken for its own."""
        offered = {"on_budget": "offer"}
        return {"model": "demo", "temperature": 0, "seed": 7, "max_tokens": 40, "model_kwargs": offered}

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


def again(model: Any) -> Any:
    kinds = [ChatAsyncEngine, AsyncEngineLLM]
    return loads(dumps(model), allowed_objects=kinds, valid_namespaces=["langchain_asyncengine"])


def test_an_engine_of_ones_own_is_not_written_down() -> None:
    model = ChatAsyncEngine(engine=AsyncEngine(pytest.fail))
    with pytest.raises(NotImplementedError, match="doesn't implement serialization"):
        again(model)


@pytest.mark.parametrize("kind", [ChatAsyncEngine, AsyncEngineLLM])
@pytest.mark.parametrize("name", ["max_completion_tokens", "max_new_tokens"])
def test_names_of_other_classes(kind: Any, name: str) -> None:
    assert kind(model="a-model", **{name: 5}).max_tokens == 5
    model = kind(model="a-model", max_tokens=9)
    assert model._call(None, {name: 5}).params.max_tokens == 5
    assert kind(model="a-model", max_tokens=9, model_kwargs={name: 5})._call(None, {}).params.max_tokens == 5
    with pytest.raises(ValueError, match=f"{name}: contradicts another value of max_tokens"):
        model._call(None, {"max_tokens": 4, name: 5})


def test_cache_keys_tell_grammars_of_one_name_apart() -> None:
    """LangChain's own key of a serializable model would be the class's name."""

    def named(kind: Any) -> type[BaseModel]:
        return type("Answer", (BaseModel,), {"__annotations__": {"x": kind}})

    keys = [ChatAsyncEngine(model="a-model", grammar=named(kind))._get_llm_string() for kind in (int, str)]
    assert keys[0] != keys[1]
