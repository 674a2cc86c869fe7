"""The tokenizers of real size that the grammar tests use are themselves right."""

from __future__ import annotations

import pytest
from support.big_tokenizers import ADDED, LARGE, SMALL, big_tokenizer

TEXTS = [
    "Hello, world! It's 12345 o'clock.\n\n  Indented\ttext",
    '{"name": "Zürich", "values": [1, 2.5e-8, null], "日本語": "🙂👨‍👩‍👧"}',
    "def run(x):\n    return x ** 2  # привет\r\n",
    " \n \t  ",
    "\u0001\u007f\u2028e\u0301",
]


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_vocabulary(size: int) -> None:
    made = big_tokenizer(size)
    assert len(made.token_bytes) == len(set(made.token_bytes)) == size
    assert {bytes([byte]) for byte in range(256)} <= set(made.token_bytes)
    assert not set(made.eos_ids) - set(made.special_ids)
    for text in TEXTS:
        ids = made.encode(text)
        assert made.decode(ids) == text.encode()
        assert made.encode(text.encode()) == ids
        assert len(ids) < len(text.encode())
    assert made.decode(made.encode(b"\xff\x80 x")) == b"\xff\x80 x"
    assert made.added["<tool_call>"] not in made.encode("<tool_call>")


def test_transformers_tokenizes_alike() -> None:
    """The size is SMALL: LARGE takes seconds and differs in nothing but its length."""
    made = big_tokenizer(SMALL)
    assert len(made.hf) == SMALL
    for text in TEXTS:
        assert made.hf.encode(text) == made.encode(text)
        assert made.hf.decode(made.encode(text)) == text
    for name, token in made.added.items():
        assert made.hf.encode(name) == [token]
        assert made.hf.decode([token], skip_special_tokens=True) == (name if name in ADDED else "")
    assert made.hf.eos_token_id == made.eos_ids[0]
