"""LangChain's own standard suites, none of their tests changed but that of serialization, which no class outside of
LangChain's own table can pass.

Skipped are image, PDF, audio and video inputs (this engine reads text), and the benchmark that replays recorded network
traffic. The other methods of structured output are in test_langchain_structured."""

from __future__ import annotations

from typing import Any, ClassVar
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
    chat_model_class = ChatAsyncEngine
    chat_model_params: ClassVar[dict[str, Any]] = {"model": "a-model"}
    init_from_env_params = {"ASYNCENGINE_MODEL": "from-the-environment"}, {}, {"model": "from-the-environment"}

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

    chat_model_class = ChatAsyncEngine
    chat_model_params: ClassVar[dict[str, Any]] = {
        "model": "demo", "temperature": 0, "seed": 7, "max_tokens": 40, "model_kwargs": {"on_budget": "offer"},
    }  # fmt: skip
    """The bundled model knows no jokes, and writes on for ever: what the engine closes is taken for its own."""

    has_tool_calling = True
    has_tool_choice = True
    has_structured_output = True
    supports_json_mode = True
    supports_anthropic_inputs = True
    returns_usage_metadata = True
    supports_model_override = True
    model_override_value = "pirate"
    """A LoRA adapter's name."""

    supported_usage_metadata_details: ClassVar[dict[str, list[str]]] = {
        "invoke": ["cache_read_input"], "stream": ["cache_read_input"],
    }  # fmt: skip

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
