from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.base.llms.types import AudioBlock, ChatMessage, CitableBlock, DocumentBlock, ImageBlock, TextBlock
from support.data import cases_of

from asyncengine.errors import InvalidParameter
from asyncengine.integrations.llama_index.messages import to_openai


@pytest.mark.parametrize(("given", "expected"), cases_of(__file__)["messages"])
def test_one_message(given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert to_openai([ChatMessage.model_validate(given)]) == [expected]


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
