"""`loads(dumps(model))` is the same model, and what cannot be written down says so."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.load import dumps, loads
from pydantic import BaseModel

from asyncengine import AsyncEngine
from asyncengine.integrations.langchain import AsyncEngineLLM, ChatAsyncEngine


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
