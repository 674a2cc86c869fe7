"""An engine's account of its tokens: ids of texts and chats, texts of ids, and the prompt of a stream."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from asyncengine import Engine, InvalidParameter, SamplingParams

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.from_pretrained("demo", show_progress=False) as engine:
        yield engine


@pytest.mark.parametrize("tools", [None, [TOOL]])
def test_a_chats_ids_are_those_that_the_model_sees(engine: Engine, tools: list[dict[str, object]] | None) -> None:
    ids = engine.tokenize(CHAT, tools=tools)
    assert len(ids) == engine.count_tokens(CHAT, tools)
    with engine.stream_chat(CHAT, SamplingParams(max_tokens=1), tools=tools) as stream:
        assert stream.prompt_token_ids == tuple(ids)


def test_template_variables_are_told_and_taken(engine: Engine) -> None:
    open_end = engine.tokenize([*CHAT, {"role": "assistant", "content": "Hi"}], template_kwargs={
        "add_generation_prompt": False, "continue_final_message": True})  # fmt: skip
    assert engine.detokenize(open_end, skip_special_tokens=False).endswith("Hi")
    for name in engine.info.template_variables:
        engine.tokenize(CHAT, template_kwargs={name: None})
    assert engine.tokenize(CHAT, template_kwargs={"no_such_variable": 1}) == engine.tokenize(CHAT)  # a wish
    with pytest.raises(InvalidParameter, match="chat_template"):
        engine.tokenize(CHAT, template_kwargs={"chat_template": "x"})


def test_ids_and_texts_are_each_others(engine: Engine) -> None:
    special = engine.info.eos_token_ids[0]
    ids = [*engine.tokenize("Naïve 你好", add_special_tokens=False), special]
    assert engine.detokenize(ids) == "Naïve 你好"
    name = engine.detokenize(ids, skip_special_tokens=False).removeprefix("Naïve 你好")
    assert name
    assert engine.token_texts(ids)[-1] == name
    assert "".join(engine.token_texts(engine.tokenize("plain", add_special_tokens=False))) == "plain"
    for wrong in ("1", None, 1.5, True):
        with pytest.raises(InvalidParameter, match="token_ids"):
            engine.token_texts([wrong])  # type: ignore[list-item]
    highest = engine.info.vocab_size - 1
    for unknown in (-1, highest + 1, 10**30):
        for call in (engine.token_texts, engine.detokenize):
            with pytest.raises(InvalidParameter, match=f"token_ids: must be between 0 and {highest}, got {unknown}"):
                call([1, unknown])
    with pytest.raises(InvalidParameter, match="token_ids: must be a sequence"):
        engine.token_texts(5)  # type: ignore[arg-type]
    with pytest.raises(InvalidParameter, match="add_special_tokens"):
        engine.tokenize("a", add_special_tokens=1)  # type: ignore[arg-type]
