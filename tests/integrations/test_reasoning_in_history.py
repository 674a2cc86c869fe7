"""Reasoning of a turn that goes on, after a call of a tool, reaches the chat templates that want it back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from core.text.chats import with_template
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from llama_index.core.base.llms.types import ChatMessage, TextBlock, ThinkingBlock, ToolCallBlock

from asyncengine.integrations.langchain.messages import to_openai as from_langchain
from asyncengine.integrations.llama_index.messages import to_openai as from_llama_index

ADD = {"name": "add", "args": {"a": 1}, "id": "c1"}
LIKE_QWEN3 = """{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
<{{ m.role }}>{% if m.reasoning_content is string and loop.index0 > ns.last %}<think>{{ m.reasoning_content }}</think>
{%- endif %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}
{%- endfor -%}"""
LIKE_GPT_OSS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.thinking %}[{{ m.thinking }}]{% endif %}{{ m.content }}{% endfor %}"
)
DROPS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def langchain(first: AIMessage, again: AIMessage) -> list[Any]:
    history: list[BaseMessage] = [
        HumanMessage("1?"),
        first,
        HumanMessage("2?"),
        again,
        ToolMessage("3", tool_call_id="c1"),
    ]
    return from_langchain(history)


def kept(thoughts: str, **more: Any) -> AIMessage:
    return AIMessage("", additional_kwargs={"reasoning_content": thoughts}, **more)


def block(kind: str, thoughts: str, **more: Any) -> AIMessage:
    return AIMessage([{"type": kind, kind: thoughts}], **more)


def llama_index() -> list[Any]:
    call = ToolCallBlock(tool_call_id="c1", tool_name="add", tool_kwargs={"a": 1})
    return from_llama_index(
        [
            ChatMessage("1?"),
            ChatMessage([ThinkingBlock(content="old"), TextBlock(text="")], role="assistant"),
            ChatMessage("2?"),
            ChatMessage([ThinkingBlock(content="new"), call], role="assistant"),
            ChatMessage("3", role="tool", additional_kwargs={"tool_call_id": "c1"}),
        ]
    )


def as_it_is(name: str) -> list[Any]:
    """A list of dicts, as `engine.chat` takes it."""
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    return [
        {"role": "user", "content": "1?"},
        {"role": "assistant", "content": "", name: "old"},
        {"role": "user", "content": "2?"},
        {"role": "assistant", "content": "", name: "new", "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
    ]


HISTORIES = {
    "additional_kwargs": langchain(kept("old"), kept("new", tool_calls=[ADD])),
    "reasoning blocks": langchain(block("reasoning", "old"), block("reasoning", "new", tool_calls=[ADD])),
    "thinking blocks": langchain(block("thinking", "old"), block("thinking", "new", tool_calls=[ADD])),
    "LlamaIndex": llama_index(),
    **{name: as_it_is(name) for name in ("reasoning_content", "thinking", "reasoning")},
}


@pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES)
def test_reasoning_reaches_the_templates_that_read_it(history: Sequence[Any]) -> None:
    def rendered(template: str) -> str:
        return with_template(template).render_chat(history)

    assert rendered(LIKE_QWEN3) == "<user>1?<assistant><user>2?<assistant><think>new</think>add<tool>3"
    assert rendered(LIKE_GPT_OSS) == "<user>1?<assistant>[old]<user>2?<assistant>[new]<tool>3"
    assert rendered(DROPS) == "<user>1?<assistant><user>2?<assistant><tool>3"
