"""The chat template must render every shape of message that clients send."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import AutoTokenizer

from asyncengine.demo import MODEL_PATH
from tools.demo_model.conversations import MAKERS, make
from tools.demo_model.dialogue import parse_calls

TOOL = {
    "type": "function",
    "function": {
        "name": "größe",
        "description": "Gibt <die> Größe.",
        "parameters": {"type": "object", "properties": {}},
    },
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL_PATH)


def render(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))


def test_plain_conversation(tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    text = render(tokenizer, messages, add_generation_prompt=True)
    assert text == "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_no_system_message(tokenizer: Any) -> None:
    assert render(tokenizer, [{"role": "user", "content": "Hi"}]) == "<|im_start|>user\nHi<|im_end|>\n"


def test_several_system_messages(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "A"},
        {"role": "developer", "content": "B"},
        {"role": "user", "content": "Hi"},
        {"role": "system", "content": "C"},
    ]
    text = render(tokenizer, messages)
    assert text.startswith("<|im_start|>system\nA\n\nB<|im_end|>\n<|im_start|>user\n")
    assert text.endswith("<|im_start|>system\nC<|im_end|>\n")


@pytest.mark.parametrize("content", [None, "", [], [{"type": "text", "text": ""}]])
def test_empty_content(tokenizer: Any, content: Any) -> None:
    assert render(tokenizer, [{"role": "user", "content": content}]) == "<|im_start|>user\n<|im_end|>\n"


def test_content_blocks(tokenizer: Any) -> None:
    blocks = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    assert render(tokenizer, [{"role": "user", "content": blocks}]) == "<|im_start|>user\na b<|im_end|>\n"


def test_tools_keep_their_characters(tokenizer: Any) -> None:
    text = render(tokenizer, [{"role": "user", "content": "Hi"}], tools=[TOOL])
    assert json.dumps(TOOL["function"], ensure_ascii=False) in text
    assert text.count("<tools>") == 1


@pytest.mark.parametrize(
    "arguments", [{"x": 'é "q" 😀', "n": -3}, json.dumps({"x": 'é "q" 😀', "n": -3}, ensure_ascii=False)]
)
def test_calls_are_rendered_as_they_are_parsed(tokenizer: Any, arguments: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None, "tool_calls": [call, call]}]
    text = render(tokenizer, messages).split("<|im_start|>assistant\n")[1]
    assert parse_calls(text) == [["f", {"x": 'é "q" 😀', "n": -3}]] * 2
    assert text.endswith("</tool_call><|im_end|>\n")


def test_results_share_one_turn(tokenizer: Any) -> None:
    messages = [
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": [{"type": "text", "text": "2"}]},
        {"role": "user", "content": "ok"},
    ]
    text = render(tokenizer, messages)
    assert text == (
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>user\nok<|im_end|>\n"
    )


@pytest.mark.parametrize("skill", MAKERS)
def test_prompt_is_a_prefix_of_the_training_text(tokenizer: Any, skill: str) -> None:
    for seed in range(10):
        item = make(skill, seed)
        prompt = render(tokenizer, item.prompt, tools=item.tools, add_generation_prompt=True)
        assert render(tokenizer, item.messages, tools=item.tools).startswith(prompt)
