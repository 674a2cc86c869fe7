"""The chat templates that come with the engine, and `chat_template=` as a text, a file and a name."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from support.tables import table

from asyncengine.config import CHAT_TEMPLATES, EngineConfig
from asyncengine.errors import InvalidParameter
from asyncengine.text.chat_template import ChatTemplate

CHAT = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yes?"},
    {"role": "user", "content": "Bye"},
]
HEAD = "<|start_header_id|>{}<|end_header_id|>\n\n"
WRITTEN = table(__file__, "written by known templates")


class Special:
    """The special tokens of a tokenizer."""

    special_tokens_map: Any = MappingProxyType({"bos_token": "<s>", "eos_token": "</s>"})


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_the_formats(name: str) -> None:
    """With a system's message and without; a chat of one question; as a name in the settings."""
    text = EngineConfig(chat_template=name).chat_template
    assert text is not None
    template = ChatTemplate(Special(), text)
    for chat, written in zip((CHAT, CHAT[1:2]), WRITTEN[name], strict=True):
        assert template.render(chat, max_chars=1000, variables={}, add_generation_prompt=True) == written


def test_a_text_a_file_and_neither(tmp_path: Path) -> None:
    """A file is read when the settings are made: what is in it then is what they are."""
    text = "{{ messages[0].content }}!"
    file = tmp_path / "my.jinja"
    file.write_text(text, encoding="utf-8")
    config = EngineConfig(chat_template=file)  # type: ignore[arg-type]
    file.unlink()
    assert config == EngineConfig(chat_template=text) == config.replace(max_num_seqs=256)
    for wrong in ("chatmll", "", 5, str(file)):
        with pytest.raises(
            InvalidParameter, match=r"chat_template: must be a Jinja template, a file with one, or a name"
        ):
            EngineConfig(chat_template=wrong)  # type: ignore[arg-type]
