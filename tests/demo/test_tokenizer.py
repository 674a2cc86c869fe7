"""The tokenizer must give back any text, and keep words and digits in the same tokens everywhere."""

from __future__ import annotations

import random
from typing import Any

import pytest
from transformers import AutoTokenizer

from asyncengine.demo import MODEL_PATH

TEXTS = (
    "",
    " ",
    "plain text",
    "  two spaces,\ttabs \r\n and\n\n\nlines  ",
    '{"a": {"b": ["c", "d"], "e": -12.5}, "f": null, "g": ""}',
    "😀👩‍👩‍👧‍👦🏳️‍🌈 你好，世界 ひらがなカタカナ мир ελλάδα العربية 한국어 é é ñ",
    "\x00\x01\x7f\u200b\ufeff\U0010ffff",
    "<tool_call>\n{}\n</tool_call><think></think>",
    "snake_case camelCase x1y2 don't e.g. http://a.b/c?d=e&f#g",
    "' , . ! n't 's 're clean up",
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL_PATH)


def round_trip(tokenizer: Any, text: str) -> str:
    return str(tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)))


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back(tokenizer: Any, text: str) -> None:
    assert round_trip(tokenizer, text) == text


def test_random_text_comes_back(tokenizer: Any) -> None:
    rng = random.Random(3)
    for _ in range(300):
        points = [rng.randrange(0x110000) if rng.random() < 0.5 else rng.randrange(0x250) for _ in range(20)]
        text = "".join(chr(point) for point in points if not 0xD800 <= point < 0xE000)
        assert round_trip(tokenizer, text) == text


def test_a_word_has_the_same_tokens_everywhere(tokenizer: Any) -> None:
    word = tokenizer.encode("Zorvek", add_special_tokens=False)
    for text in ('"Zorvek"', " Zorvek ", '{"name": "Zorvek"}', "\nZorvek,"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert any(ids[start : start + len(word)] == word for start in range(len(ids)))


def test_digits_are_single_tokens(tokenizer: Any) -> None:
    assert len(tokenizer.encode("-2048", add_special_tokens=False)) == 5


def test_special_tokens(tokenizer: Any) -> None:
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token == "<|endoftext|>"
    ids = tokenizer.encode("<|im_start|>x<tool_call><|im_end|>", add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "x<tool_call>"
    assert len(tokenizer) == 2048
