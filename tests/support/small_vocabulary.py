"""A small vocabulary with tokens that cross every boundary JSON has, special tokens and two ends of sequence."""

from __future__ import annotations

from asyncengine.grammar.vocabulary import Vocabulary

PIECES = (
    '{"', '":', '": ', '","', '", "', '"}', '"]', "}}", "]}", "},", '"},{"', "[]", "{}", '""', ", ", "null", "true",
    "false", "name", "age", "the", " and", "ing", "10", "00", "123", ".5", "-1", "\n    ", "日", "é", "</", "think",
    ">", '{"name', 'e":', "abc", "zz",
)  # fmt: skip
EOS = 256 + len(PIECES)
MARK = EOS + 1
"""A special token, `<|mark|>`."""
SECOND_EOS = EOS + 2
TOKENS = [*(bytes([i]) for i in range(256)), *(p.encode() for p in PIECES), b"<eos>", b"<|mark|>", b"<eos2>"]
LOGITS = len(TOKENS) + 13
"""The model's vocabulary is padded."""


def small_vocabulary() -> Vocabulary:
    return Vocabulary(TOKENS, [EOS, SECOND_EOS], [MARK], LOGITS)
