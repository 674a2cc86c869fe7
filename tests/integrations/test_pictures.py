"""Pictures through both adapters, beside what the engine says of them in process."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import HumanMessage
from llama_index.core.base.llms.types import ChatMessage, ImageBlock, TextBlock
from PIL import Image
from support.picture_models import chat, picture, png, save_picture_model

from asyncengine import Engine, InvalidParameter, SamplingParams
from asyncengine.integrations.langchain import ChatAsyncEngine
from asyncengine.integrations.llama_index import AsyncEngineLLM

CONFIG: dict[str, Any] = {"dtype": "float32", "kv_cache_memory": "16MiB", "num_threads": 1, "show_progress": False}
SEEN = [picture(1), Image.new("RGB", (32, 32), "red")]
LINK = "https://example.com/cat.png"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder: Path = tmp_path_factory.mktemp("qwen3_vl")
    save_picture_model("qwen3_vl", folder)
    with Engine.from_pretrained(folder, **CONFIG) as made:
        yield made


@pytest.fixture(scope="module")
def answers(engine: Engine) -> list[str]:
    params = SamplingParams(max_tokens=8, temperature=0.0)
    made = [engine.chat(chat(image, "what?"), params).text for image in SEEN]
    assert len(set(made)) == 2
    return made


def encoded(image: Image.Image) -> str:
    return base64.b64encode(png(image)).decode()


def test_langchains_blocks_are_read(engine: Engine, answers: list[str]) -> None:
    model = ChatAsyncEngine(engine=engine, temperature=0, max_tokens=8)
    question = {"type": "text", "text": "what?"}
    for image, answer in zip(SEEN, answers, strict=True):
        url = f"data:image/png;base64,{encoded(image)}"
        for block in (
            {"type": "image", "base64": encoded(image), "mime_type": "image/png"},
            {"type": "image", "url": url},
            {"type": "image_url", "image_url": {"url": url}},
        ):
            assert model.invoke([HumanMessage([block, question])]).content == answer
    with pytest.raises(InvalidParameter, match="must be a data URL: this engine fetches nothing"):
        model.invoke([HumanMessage([{"type": "image", "url": LINK}, question])])
    assert model.profile is not None
    assert model.profile["image_inputs"] is True


def test_llama_indexs_blocks_are_read(engine: Engine, answers: list[str], tmp_path: Path) -> None:
    llm = AsyncEngineLLM(engine=engine, temperature=0, max_tokens=8)
    question = TextBlock(text="what?")
    for image, answer in zip(SEEN, answers, strict=True):
        path = tmp_path / "image.png"
        path.write_bytes(png(image))
        url = f"data:image/png;base64,{encoded(image)}"
        for block in (ImageBlock(image=png(image)), ImageBlock(path=path), ImageBlock(url=url)):
            assert llm.chat([ChatMessage([block, question])]).message.content == answer
    with pytest.raises(InvalidParameter, match="must be a data URL: this engine fetches nothing"):
        llm.chat([ChatMessage([ImageBlock(url=LINK), question])])
