from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.base.llms.types import (
    AudioBlock,
    CacheControl,
    CachePoint,
    ChatMessage,
    CitableBlock,
    DocumentBlock,
    ImageBlock,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)

from asyncengine.errors import InvalidParameter
from asyncengine.integrations.llama_index.messages import to_openai

AS_OPENAI = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def call_block(arguments: dict[str, Any] | str) -> ToolCallBlock:
    return ToolCallBlock(tool_call_id="c1", tool_name="add", tool_kwargs=arguments)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (ChatMessage("hi"), {"role": "user", "content": "hi"}),
        (ChatMessage("hi", role="system"), {"role": "system", "content": "hi"}),
        (ChatMessage("hi", role=MessageRole.DEVELOPER), {"role": "system", "content": "hi"}),
        (ChatMessage("hi", role=MessageRole.MODEL), {"role": "assistant", "content": "hi"}),
        (ChatMessage("hi", role=MessageRole.CHATBOT), {"role": "assistant", "content": "hi"}),
        (ChatMessage("hi", additional_kwargs={"name": "ann"}), {"role": "user", "content": "hi", "name": "ann"}),
        (ChatMessage(None, role="assistant"), {"role": "assistant", "content": ""}),
        (
            ChatMessage("3", role="tool", additional_kwargs={"tool_call_id": "c1"}),
            {"role": "tool", "content": "3", "tool_call_id": "c1"},
        ),
        (ChatMessage("3", role="function"), {"role": "tool", "content": "3"}),
        (
            ChatMessage(
                [TextBlock(text="a"), CachePoint(cache_control=CacheControl(type="ephemeral")), TextBlock(text="b")]
            ),
            {"role": "user", "content": "a\nb"},
        ),
        (
            ChatMessage([ThinkingBlock(content="hm"), TextBlock(text="a"), call_block({"a": 1})], role="assistant"),
            {"role": "assistant", "content": "a", "reasoning_content": "hm", "tool_calls": [AS_OPENAI]},
        ),
        (
            ChatMessage([call_block('{"a": 1}')], role="assistant", additional_kwargs={"tool_calls": [AS_OPENAI]}),
            {"role": "assistant", "content": "", "tool_calls": [AS_OPENAI]},
        ),
        (
            ChatMessage("a", role="assistant", additional_kwargs={"tool_calls": [AS_OPENAI]}),
            {"role": "assistant", "content": "a", "tool_calls": [AS_OPENAI]},
        ),
        (
            ChatMessage([CitableBlock(title="t", source="s", content=[TextBlock(text="cited")])]),
            {"role": "user", "content": "cited"},
        ),
    ],
)
def test_one_message(given: ChatMessage, expected: dict[str, Any]) -> None:
    assert to_openai([given]) == [expected]


@pytest.mark.parametrize(
    ("block", "kind"),
    [
        (AudioBlock(audio=b"AAAA", format="wav"), "audio"),
        (DocumentBlock(data=b"AAAA", document_mimetype="application/pdf"), "document"),
        (CitableBlock(title="t", source="s", content=[DocumentBlock(data=b"AAAA")]), "document"),
        (ImageBlock(), "ImageBlock without"),
    ],
)
def test_what_is_not_text_is_refused_by_place_and_kind(block: Any, kind: str) -> None:
    with pytest.raises(InvalidParameter, match=kind) as caught:
        to_openai([ChatMessage("fine"), ChatMessage([block])])
    assert caught.value.field == "messages[1].content"


def test_pictures_keep_their_place_and_are_read_by_the_engine(tmp_path: Path) -> None:
    raw, url = b"\x89PNG\r\n", "data:image/png;base64,iVBORw0K/+=="
    path = tmp_path / "a.png"
    path.write_bytes(raw)
    file = io.BytesIO(raw)
    file.read()
    images = [ImageBlock(image=raw), ImageBlock(image=file), ImageBlock(path=path), ImageBlock(url=url)]
    cited = CitableBlock(title="t", source="s", content=[ImageBlock(path=path)])
    text = TextBlock(text="so")
    (made,) = to_openai([ChatMessage([images[0], text, *images[1:], cited])])
    sources = ["data:;base64,iVBORw0K", raw, path, url, path]
    parts = [{"type": "image", "image": source} for source in sources]
    assert made == {"role": "user", "content": [parts[0], {"type": "text", "text": "so"}, *parts[1:]]}
    with pytest.raises(InvalidParameter, match=r"messages\[0\].content: content of type 'image'"):
        to_openai([ChatMessage([images[0]], role="assistant")])
