"""Constructing is cheap, copies share one engine, and the last of them gives it back."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from langchain_core.load import dumps
from langchain_core.messages import HumanMessage
from pydantic import ValidationError

from asyncengine import AsyncEngine, Engine, EngineHandle, shared_engine
from asyncengine.integrations.langchain import (
    AsyncEngineDecisions,
    AsyncEngineEmbeddings,
    AsyncEngineLLM,
    AsyncEngineReranker,
    ChatAsyncEngine,
)
from asyncengine.integrations.llama_index import AsyncEngineEmbedding, AsyncEngineRelevance, AsyncEngineRerank
from asyncengine.integrations.llama_index import AsyncEngineLLM as LlamaIndexLLM

from .conftest import CONFIG

CLASSES: list[Any] = [ChatAsyncEngine, AsyncEngineLLM, LlamaIndexLLM]
OWN = {**CONFIG, "max_num_seqs": 3}
"""Settings of an engine that no other test shares."""


def ask(model: Any) -> Any:
    return model.complete("Hello") if isinstance(model, LlamaIndexLLM) else model.invoke("Hello")


@pytest.mark.parametrize("kind", CLASSES)
def test_keep_alive_is_checked_copied_and_not_for_an_explicit_engine(kind: Any, handle: EngineHandle) -> None:
    for wrong in (-1, "long", float("nan")):
        with pytest.raises(ValidationError, match="keep_alive"):
            kind(model="m", keep_alive=wrong)
    with pytest.raises(ValidationError, match="keep_alive"):
        kind(engine=handle, keep_alive=5)
    model = kind(model="m", keep_alive=5)
    assert [twin._engines().keep_alive for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)))] == [5, 5]
    model.keep_alive = 6
    assert model._engines().keep_alive == 6


AT_EXIT = """
from asyncengine.integrations.langchain import ChatAsyncEngine
for seats in (2, 3):
    ChatAsyncEngine(model="demo", max_tokens=2, keep_alive=1e6, max_num_seqs=seats).invoke("Hello")
"""


def test_an_engine_that_is_kept_does_not_keep_the_program() -> None:
    done = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")


async def test_an_explicit_engine_is_used_and_left_open(model_path: str) -> None:
    async with await AsyncEngine.from_pretrained(model_path, hosted=True, **CONFIG) as engine:
        handle = shared_engine(model_path, **CONFIG)
        for kind, given in itertools.product(CLASSES, (engine, Engine(engine), handle)):
            model = kind(engine=given, temperature=0, max_tokens=2)
            assert model.model == ""
            ask(model)
            twin = copy.deepcopy(model)
            assert twin.engine is given
            assert model.model_name
            del model, twin
            gc.collect()
        assert engine.alive
        assert not handle.closed
        handle.close()


async def test_an_owned_engine_is_awaited_on_its_own_loop(model_path: str) -> None:
    from asyncengine.errors import WrongLoop

    async with await AsyncEngine.from_pretrained(model_path, **CONFIG) as engine:
        chat = ChatAsyncEngine(engine=engine, temperature=0, max_tokens=4)
        answer = await chat.ainvoke("Hello")
        assert answer.usage_metadata["output_tokens"] == 4  # type: ignore[index]
        with pytest.raises(WrongLoop):
            chat.invoke("Hello")
        with pytest.raises(WrongLoop):  # threads would wait, and this one for them
            chat.batch(["Hello", "You"])
        with pytest.raises(WrongLoop):
            chat.generate([[HumanMessage("Hello")], [HumanMessage("You")]])


@pytest.mark.parametrize("kind", CLASSES)
def test_names_of_the_model(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kind(model_name="a").model == "a"
    assert kind(model=Path("some") / "folder").model == str(Path("some") / "folder")
    monkeypatch.setenv("ASYNCENGINE_MODEL", "b")
    assert kind().model == "b"
    assert kind(model="c", adapter="tuned").model_name == "tuned"


def test_secrets_and_engines_stay_out_of_texts(handle: EngineHandle) -> None:
    chat = ChatAsyncEngine(engine=handle, api_key="s3cret")
    named = ChatAsyncEngine(model="a-model", api_key="s3cret")
    for text in (repr(chat), str(chat.model_dump()), str(chat._identifying_params), dumps(named)):
        assert "s3cret" not in text
        assert "EngineHandle" not in text


WITHOUT = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("langchain_core", "langchain") or name.startswith("llama_index.core"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
import asyncengine.integrations
assert not any(name.startswith(("langchain", "llama_index")) for name in sys.modules), "a framework was imported"
import importlib
for module in ("langchain", "llama_index"):
    try:
        importlib.import_module("asyncengine.integrations." + module)
    except ImportError as error:
        print(error)
"""


def test_without_the_framework_the_error_names_the_extra() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=True, timeout=100)
    errors = done.stdout.splitlines()
    assert len(errors) == 2
    for error, extra in zip(errors, ("langchain", "llama-index"), strict=True):
        assert f'pip install "asyncengine[{extra}]"' in error


def test_conventional_module_names_export_the_same_classes() -> None:
    folder = Path(__file__).parents[2] / "integrations"
    for name, expected in (
        (
            "langchain_asyncengine",
            {
                "AsyncEngineDecisions": AsyncEngineDecisions,
                "AsyncEngineEmbeddings": AsyncEngineEmbeddings,
                "AsyncEngineLLM": AsyncEngineLLM,
                "AsyncEngineReranker": AsyncEngineReranker,
                "ChatAsyncEngine": ChatAsyncEngine,
            },
        ),
        ("llama_index_llms_asyncengine", {"AsyncEngineLLM": LlamaIndexLLM}),
        ("llama_index_embeddings_asyncengine", {"AsyncEngineEmbedding": AsyncEngineEmbedding}),
        (
            "llama_index_postprocessor_asyncengine",
            {"AsyncEngineRelevance": AsyncEngineRelevance, "AsyncEngineRerank": AsyncEngineRerank},
        ),
    ):
        names: dict[str, Callable[..., Any]] = {}
        exec((folder / name / "__init__.py").read_text(), names)
        assert {key: names.get(key) or names["__getattr__"](key) for key in names["__all__"]} == expected  # type: ignore[attr-defined]
    assert not list(folder.glob("llama_index_*/llama_index"))


@pytest.mark.parametrize("kind", CLASSES)
def test_a_model_object_made_in_each_call_loads_the_model_once(kind: Any, model_path: str) -> None:
    """A request handler makes them so: the engine stays for a while without any."""
    engines = []
    for _ in range(3):
        model = kind(model=model_path, engine_config=OWN, max_tokens=2)
        ask(model)
        engines.append(model.get_engine().aengine)
        del model
        gc.collect()
    assert len(set(map(id, engines))) == 1
    assert engines[0].alive
    ask(kind(model=model_path, engine_config=OWN, max_tokens=2, keep_alive=0))  # the last one says how long
    gc.collect()
    assert not engines[0].alive
