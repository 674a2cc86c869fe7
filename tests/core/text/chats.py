"""A template, messages and helpers the chat tests share."""

from __future__ import annotations

from typing import Any

import pytest
from core.text.tokenizer_zoo import byte_level, fast

from asyncengine.errors import InvalidParameter
from asyncengine.text.tokenizer import TextTokenizer

CHATML = """{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}
<|im_end|>{% endfor %}{% if tools %}TOOLS{{ tools | tojson }}{% endif %}
{%- if enable_thinking is defined and not enable_thinking %}NOTHINK{% endif %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
USER = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
Chat = list[dict[str, Any]]


def with_template(template: str | dict[str, str] | None, **settings: Any) -> TextTokenizer:
    hf = fast(byte_level(qwen=True), bos_token="<s>", eos_token="<|im_end|>")
    hf.chat_template = template
    return TextTokenizer(hf, **settings)


def refuse(tokenizer: TextTokenizer, messages: object, **more: Any) -> InvalidParameter:
    with pytest.raises(InvalidParameter) as caught:
        tokenizer.render_chat(messages, **more)  # type: ignore[arg-type]
    return caught.value
