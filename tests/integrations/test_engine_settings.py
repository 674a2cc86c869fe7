"""Every setting of an engine is a keyword of every adapter class, and a misspelt one is named with the right one."""

from __future__ import annotations

import copy
import pickle
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from langchain_core.load import dumps, loads
from llama_index.core.schema import BaseComponent
from pydantic import BaseModel, ValidationError
from support.data import cases_of

from asyncengine import EngineConfig, EngineHandle, shared_engine
from asyncengine.errors import InvalidParameter
from asyncengine.integrations.engine_source import EngineChoice
from asyncengine.integrations.langchain import (
    AsyncEngineDecisions,
    AsyncEngineEmbeddings,
    AsyncEngineLLM,
    AsyncEngineReranker,
    ChatAsyncEngine,
)
from asyncengine.integrations.llama_index import (
    AsyncEngineEmbedding,
    AsyncEngineFaithfulnessEvaluator,
    AsyncEngineMultiSelector,
    AsyncEngineRelevance,
    AsyncEngineRerank,
)
from asyncengine.integrations.llama_index import AsyncEngineLLM as LlamaIndexLLM

from .conftest import CONFIG

ROWS: dict[str, Any] = cases_of(__file__)

WRITERS: list[Any] = [ChatAsyncEngine, AsyncEngineLLM, LlamaIndexLLM]
EVERY: list[Any] = [
    *WRITERS,
    AsyncEngineEmbeddings,
    AsyncEngineReranker,
    AsyncEngineEmbedding,
    AsyncEngineRerank,
    AsyncEngineDecisions,
    AsyncEngineMultiSelector,
    AsyncEngineRelevance,
    AsyncEngineFaithfulnessEvaluator,
]
NAMES = {each.name for each in fields(EngineConfig)}
GIVEN: dict[str, Any] = {"quantization": "int4", "num_threads": 1, "max_model_len": 512, "device": "cpu"}


def spec(model: Any) -> Any:
    """The key by which the model object's engine is shared: the model's name and all settings."""
    return model._engines()._engine.spec


@pytest.mark.parametrize("kind", EVERY)
def test_every_setting_is_a_field(kind: Any) -> None:
    assert set(kind.model_fields) >= NAMES
    changed = {"adapters": {"a": "b"}, "quantization": "int8", "max_model_len": 77, "adapter_root": Path("x")}
    assert spec(kind(model="m", **changed)) == shared_engine("m", **changed).spec


@pytest.mark.parametrize("kind", EVERY)
def test_settings_that_are_equal_however_they_are_given_share_an_engine(kind: Any) -> None:
    by_name = kind(model="m", **GIVEN)
    for other in (
        {"engine_config": GIVEN},
        {"engine_config": EngineConfig(**GIVEN)},
        {**GIVEN, "engine_config": GIVEN},
    ):
        assert spec(kind(model="m", **other)) == spec(by_name)
    assert spec(by_name) == shared_engine("m", **GIVEN).spec
    assert spec(by_name) != spec(kind(model="m", **{**GIVEN, "max_model_len": 513}))
    by_name.max_model_len = 513
    assert spec(by_name) == spec(kind(model="m", **{**GIVEN, "max_model_len": 513}))


@pytest.mark.parametrize("kind", WRITERS)
def test_settings_reach_the_engine(kind: Any, model_path: str) -> None:
    model = kind(model=model_path, **CONFIG, max_model_len=128, max_tokens=2)
    other = kind(model=model_path, engine_config={**CONFIG, "max_model_len": 128}, temperature=0)
    assert model.get_engine().info.max_model_len == 128
    assert other.get_engine().aengine is model.get_engine().aengine
    assert (model.max_model_len, other.max_model_len) == (128, None)


@pytest.mark.parametrize("kind", EVERY)
def test_a_setting_with_two_values_is_refused(kind: Any, handle: EngineHandle) -> None:
    with pytest.raises(ValidationError, match=r"max_model_len: is given twice: .*, got 5"):
        kind(model="m", max_model_len=5, engine_config={"max_model_len": 6})
    with pytest.raises(ValidationError, match="max_num_seqs: is given twice"):  # although it is the engine's default
        kind(model="m", max_num_seqs=256, engine_config=EngineConfig(max_num_seqs=6))
    with pytest.raises(ValidationError, match="quantization: must be left out where engine is given"):
        kind(engine=handle, quantization="int4")


@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize(
    ("given", "said"),
    [
        *ROWS["wrong_settings_are_named"],
        ({"config": EngineConfig()}, "config: unknown parameter; did you mean 'engine_config'"),
        ({"draft_model": Path("x"), "speculation": "off"}, "draft_model: needs speculation"),
    ],
)
def test_wrong_settings_are_named(kind: Any, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        kind(model="m", **given)


@pytest.mark.parametrize("kind", WRITERS)
def test_misspelt_names_of_what_is_generated(kind: Any, handle: EngineHandle) -> None:
    with pytest.raises(ValidationError, match="temprature: unknown parameter; did you mean 'temperature'"):
        kind(model="m", temprature=0)
    with pytest.raises(ValidationError, match=r"ignore_eos: .* pass model_kwargs={'ignore_eos': \.\.\.}"):
        kind(model="m", ignore_eos=True)
    for given, said in (
        ({"max_token": 5}, "max_token: unknown parameter; did you mean 'max_tokens'"),
        ({"respons_format": {}}, "respons_format: unknown parameter; did you mean 'response_format'"),
        ({"enable_thinkng": True}, "enable_thinkng: unknown parameter; did you mean 'enable_thinking'"),
        ({"thinking": True}, "thinking: unknown parameter; did you mean 'template_kwargs'"),
        ({"max_model_len": 5}, "max_model_len: is a setting of the engine"),
        ({"num_ctx": 5}, "num_ctx: is a setting of the engine: pass max_model_len="),
    ):
        with pytest.raises(InvalidParameter, match=said):
            ask(kind(engine=handle), **given)


def ask(model: Any, **keywords: Any) -> Any:
    return (
        model.complete("Hello", **keywords) if isinstance(model, LlamaIndexLLM) else model.invoke("Hello", **keywords)
    )


@pytest.mark.parametrize("kind", EVERY)
def test_copies_keep_the_settings(kind: Any) -> None:
    model = kind(model="m", **GIVEN, adapters={"a": Path("b")})
    copies = [copy.copy(model), copy.deepcopy(model), model.model_copy(), pickle.loads(pickle.dumps(model))]
    if issubclass(kind, BaseComponent):
        copies += [kind.from_dict(model.to_dict()), kind.from_json(model.to_json())]
    else:
        copies += [kind(**model.model_dump())]
    if issubclass(kind, ChatAsyncEngine | AsyncEngineLLM):
        copies += [loads(dumps(model), allowed_objects=[kind], valid_namespaces=["langchain_asyncengine"])]
    for twin in copies:
        assert spec(twin) == spec(model)
        assert (twin.quantization, twin.adapters, twin.max_num_seqs) == ("int4", {"a": "b"}, None)
    assert spec(model.model_copy(update={"quantization": "int8"}))[1].quantization == "int8"


def test_texts_of_model_objects_say_what_was_set() -> None:
    for kind in EVERY:
        text = repr(kind(model="m", quantization="int4"))
        assert "quantization='int4'" in text
        assert "max_num_seqs" not in text
        assert "switch_interval" not in text


@pytest.mark.parametrize("kind", EVERY)
def test_no_field_of_a_framework_is_taken_for_a_setting(kind: Any) -> None:
    """A new setting must not hide one of theirs, nor the other way round."""
    theirs = [base for base in kind.__mro__ if issubclass(base, BaseModel) and not issubclass(base, EngineChoice)]
    theirs = [base for base in theirs if not issubclass(EngineChoice, base)]
    assert not NAMES & {name for base in theirs for name in base.model_fields}
    own = {name for name in kind.__annotations__ if name in NAMES}
    assert kind.setting_names == NAMES - own


def test_a_progress_bar_of_embeddings_is_no_setting() -> None:
    shown = AsyncEngineEmbeddings(model="m", show_progress=True)
    assert spec(shown) == spec(AsyncEngineEmbeddings(model="m"))
    quiet = AsyncEngineEmbeddings(model="m", show_progress=True, engine_config={"show_progress": False})
    assert spec(quiet)[1].show_progress is False
