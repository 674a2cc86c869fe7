"""LangChain: which LoRA adapter answers, how a call says so, and what is told about it."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import get_usage_metadata_callback
from langchain_core.exceptions import ModelInvalidRequestError, ModelNotFoundError
from langchain_core.messages import HumanMessage
from langchain_core.runnables import ConfigurableField, RunnableParallel

from asyncengine import EngineHandle, SamplingParams, shared_engine
from asyncengine.errors import AdapterError, AdapterNotFound, InvalidParameter
from asyncengine.integrations.langchain import AsyncEngineLLM, ChatAsyncEngine

from .conftest import CONFIG, LONG, TOKENS, Watch, added

Make = Callable[..., ChatAsyncEngine]
HELLO = [{"role": "user", "content": "Hello"}]
NAMES = (None, "first", "second")
OWN = {**CONFIG, "max_num_seqs": 5}
"""Settings of an engine that no other test shares."""

pytestmark = pytest.mark.usefixtures("loaded_adapters")


async def test_every_way_to_choose_an_adapter(make_chat: Make, answers: dict[str | None, str]) -> None:
    base, first = make_chat(max_tokens=TOKENS), make_chat(max_tokens=TOKENS, adapter="first")
    asked: list[tuple[str | None, Any]] = [
        (None, base.invoke("Hello")),
        (None, first.invoke("Hello", model=base.model)),
        (None, first.invoke("Hello", adapter=base.model)),
        (None, first.invoke("Hello", adapter=None)),
        ("first", first.invoke("Hello")),
        ("first", base.bind(model="first").invoke("Hello")),
        ("first", base.bind(adapter="first").invoke("Hello")),
        ("second", first.invoke("Hello", model="second")),
        ("second", await first.ainvoke("Hello", model="second")),
        ("second", added(list(first.stream("Hello", model="second")))),
        ("second", added([chunk async for chunk in first.astream("Hello", model="second")])),
        ("second", first.batch(["Hello", "Hi"], model="second")[0]),
        ("second", (await base.bind(model="second").abatch(["Hello", "Hi"]))[0]),
    ]
    for name, answer in asked:
        assert answer.content == answers[name]
        assert answer.response_metadata["model_name"] == (name or base.model)


async def test_adapters_share_a_batch(make_chat: Make, answers: dict[str | None, str], watch: Watch) -> None:
    """At once, through objects that name different adapters and through bindings of one."""
    chats = {name: make_chat(max_tokens=TOKENS, adapter=name) for name in NAMES}
    bound = {name: chats[None].bind(**({"model": name} if name else {})) for name in NAMES}
    anchor = asyncio.create_task(make_chat(**LONG).ainvoke("Hello"))
    await watch.until_running(1)
    watch.hold(steps=1, until=lambda: watch.num_requests == 7)  # no step from here on before all six have come
    together = asyncio.create_task(watch.until_running(7))
    calls = [asyncio.ensure_future(chat.ainvoke("Hello")) for chat in [*chats.values(), *bound.values()]]
    await together
    anchor.cancel()
    watch.release()
    mixed = await asyncio.gather(*calls)
    assert [message.content for message in mixed] == 2 * [answers[name] for name in NAMES]
    parallel = RunnableParallel({str(name): chat for name, chat in bound.items()}).invoke("Hello")
    assert {name: message.content for name, message in parallel.items()} == {str(n): answers[n] for n in NAMES}


async def test_text_completion_takes_adapters_too(handle: EngineHandle, make_llm: Callable[..., Any]) -> None:
    params = SamplingParams(temperature=0, max_tokens=TOKENS)
    text = handle.get().generate("Once", params, adapter="first").text
    base, first = make_llm(max_tokens=TOKENS), make_llm(max_tokens=TOKENS, adapter="first")
    assert first.invoke("Once") == base.bind(model="first").invoke("Once") == text
    assert base.invoke("Once") == first.invoke("Once", model=base.model) != text
    assert "".join([piece async for piece in base.astream("Once", model="first")]) == text
    assert (await base.agenerate(["Once"], adapter="first")).llm_output["model_name"] == "first"


def test_the_cache_tells_adapters_apart(make_chat: Make, answers: dict[str | None, str], watch: Watch) -> None:
    """However the choice is written: a field, `model=` or `adapter=` on top of it."""
    cache = InMemoryCache()
    chats = {name: make_chat(max_tokens=TOKENS, cache=cache, adapter=name) for name in NAMES}
    base = chats[None].model
    asked = []
    for _ in range(2):
        for own, chat in chats.items():
            assert chat.invoke("Hello").content == answers[own]
            assert chat.invoke("Hello", model=base).content == answers[None]
            assert chat.invoke("Hello", adapter=base).content == answers[None]
            for name in ("first", "second"):
                assert chat.invoke("Hello", model=name).content == answers[name]
                assert chat.invoke("Hello", adapter=name).content == answers[name]
        asked.append(watch.ended("length"))
    assert asked[0] == asked[1] > 0, "the second round comes from the cache"


@pytest.mark.parametrize("kind", [ChatAsyncEngine, AsyncEngineLLM])
def test_cache_keys(kind: Any) -> None:
    """A key says which base model, which adapters it was given, and which one answers."""

    def key(fields: dict[str, Any], **kwargs: Any) -> str:
        # What both base classes make of their parameters.
        return str(sorted({**kind(**{"model": "m", **fields})._identifying_params, **kwargs}.items()))

    different = [
        key({}),
        key({"model": "n"}),
        key({"adapter": "a"}),
        key({"adapter": "b"}),
        key({}, model="a"),
        key({"adapter": "b"}, model="a"),
        key({"adapter": "b"}, model="m"),
        key({"model": "n"}, model="a"),
        key({"adapters": {"a": "somewhere"}}, model="a"),
        key({"adapters": {"a": "elsewhere"}}, model="a"),
    ]
    assert len({*different}) == len(different)


def test_objects_with_equal_engine_settings_share_the_engine(
    model_path: str, adapter_folders: dict[str, str], answers: dict[str | None, str]
) -> None:
    """Whichever adapter they name; adapters given at construction are loaded with the model."""
    probe = shared_engine(model_path, **OWN, adapters=adapter_folders)
    fields: dict[str, Any] = {"model": model_path, "engine_config": OWN, "adapters": adapter_folders, "temperature": 0}
    chats = [ChatAsyncEngine(**fields, adapter=name, max_tokens=TOKENS) for name in NAMES]
    assert not probe.loaded
    assert [chat.invoke("Hello").content for chat in chats] == [answers[name] for name in NAMES]
    engines = {id(chat.get_engine().aengine) for chat in chats}
    assert engines == {id(probe.get().aengine)}
    assert [info.name for info in chats[0].get_engine().adapters()] == ["first", "second"]
    probe.get().close()
    probe.close()


def test_adapters_are_found_in_a_folder(
    model_path: str, adapter_folders: dict[str, str], answers: dict[str | None, str], tmp_path: Path
) -> None:
    """And nowhere else: a link that leaves it is passed over, and a path outside is refused."""
    shutil.copytree(adapter_folders["first"], tmp_path / "inside")
    (tmp_path / "outside").symlink_to(adapter_folders["second"])
    chat = ChatAsyncEngine(
        model=model_path, engine_config=OWN, adapter_root=tmp_path, adapter="inside", temperature=0, max_tokens=TOKENS
    )
    assert chat.invoke("Hello").content == answers["first"]
    engine = chat.get_engine()
    assert [info.name for info in engine.adapters()] == ["inside"]
    with pytest.raises(AdapterError, match="leaves the folder"):
        engine.load_adapter("other", adapter_folders["second"])
    assert engine.load_adapter("later", "inside").digest == engine.adapters()[0].digest
    engine.close()


async def test_loading_and_replacing_while_serving(
    make_chat: Make, adapter_folders: dict[str, str], answers: dict[str | None, str]
) -> None:
    chat = make_chat(max_tokens=TOKENS, adapter="new")
    with pytest.raises(AdapterNotFound):
        chat.invoke("Hello")
    info = chat.get_engine().load_adapter("new", adapter_folders["first"])
    assert info.name == "new"
    assert chat.invoke("Hello").content == answers["first"]
    engine = await chat.aget_engine()
    await engine.load_adapter("new", adapter_folders["second"])
    assert (await chat.ainvoke("Hello")).content == answers["second"]
    await engine.unload_adapter("new")
    with pytest.raises(ModelNotFoundError, match="new"):
        await chat.ainvoke("Hello")


def test_a_configurable_adapter(make_chat: Make, answers: dict[str | None, str]) -> None:
    chat = make_chat(max_tokens=TOKENS).configurable_fields(adapter=ConfigurableField(id="voice"))
    assert chat.invoke("Hello").content == answers[None]
    for name in ("first", "second"):
        answer = chat.invoke("Hello", {"configurable": {"voice": name}})
        assert (answer.content, answer.response_metadata["model_name"]) == (answers[name], name)


def test_structured_output_keeps_the_adapter(make_chat: Make) -> None:
    schema = {"title": "Size", "type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    for kwargs, expected in (({}, "first"), ({"model": "second"}, "second")):
        structured = make_chat(max_tokens=TOKENS, adapter="first").with_structured_output(
            schema, include_raw=True, **kwargs
        )
        result = structured.invoke("Hello")
        assert result["raw"].response_metadata["model_name"] == expected
        assert isinstance(result["parsed"]["n"], int)


async def test_an_unknown_adapter_is_refused_by_name(make_chat: Make) -> None:
    chat = make_chat(max_tokens=2)
    for error in (ModelNotFoundError, AdapterNotFound):
        for choice in ({"model": "nobody"}, {"adapter": "nobody"}):
            with pytest.raises(error, match="nobody"):
                chat.invoke("Hello", **choice)
            with pytest.raises(error, match="'first', 'second'"):
                await chat.ainvoke("Hello", **choice)
            with pytest.raises(error, match="nobody"):
                list(chat.stream("Hello", **choice))
            with pytest.raises(error, match="nobody"):
                [chunk async for chunk in chat.astream("Hello", **choice)]


def test_a_call_that_names_two_adapters_is_refused(make_chat: Make) -> None:
    with pytest.raises(ModelInvalidRequestError, match="adapter: contradicts model='first'"):
        make_chat().invoke("Hello", model="first", adapter="second")
    assert make_chat(max_tokens=2).invoke("Hello", model="first", adapter="first").content


def test_engine_settings_that_contradict_are_refused(handle: EngineHandle) -> None:
    with pytest.raises(ValueError, match="adapters: is given twice"):
        ChatAsyncEngine(model="m", adapters={"a": "x"}, engine_config={"adapters": {"a": "y"}})
    with pytest.raises(ValueError, match="adapter_root: must be left out where engine is given"):
        ChatAsyncEngine(engine=handle, adapter_root="x")
    with pytest.raises(InvalidParameter, match="model"):
        ChatAsyncEngine(model="m").invoke("Hello", model_kwargs={"model": "a"})


def test_an_adapter_that_cannot_be_loaded_fails_the_first_call(model_path: str, tmp_path: Path) -> None:
    chat = ChatAsyncEngine(model=model_path, engine_config=OWN, adapters={"a": tmp_path / "nowhere"}, adapter="a")
    with pytest.raises(ModelInvalidRequestError, match=r"path: is no folder \(adapter 'a'\)"):
        chat.invoke("Hello")


def test_what_tracers_and_counters_are_told(make_chat: Make) -> None:
    chat = make_chat(max_tokens=4, adapter="first")
    base = chat.model
    told = [{}, {"model": "second"}, {"adapter": "second"}, {"model": base}, {"adapter": None}]
    names = [chat._get_ls_params(**kwargs)["ls_model_name"] for kwargs in told]
    assert names == ["first", "second", "second", base, base]
    with get_usage_metadata_callback() as callback:
        chat.invoke("Hello")
        chat.invoke("Hello", model="second")
        chat.invoke("Hello", model=base)
    assert {name: usage["output_tokens"] for name, usage in callback.usage_metadata.items()} == {
        "first": 4, "second": 4, base: 4,
    }  # fmt: skip
    assert chat.profile is not None
    assert chat.profile["name"] == "first"
    result = chat.generate([[HumanMessage("Hello")], [HumanMessage("Hi")]], model="second")
    assert result.llm_output is not None
    assert result.llm_output["model_name"] == "second"


def test_the_demo_model_keeps_its_name_behind_a_handle() -> None:
    handle = shared_engine("demo")
    chat = ChatAsyncEngine(engine=handle)
    assert chat._call(None, {"model": "demo"}).keywords.get("adapter") is None
    assert chat.model_name == "demo"
    handle.close()
