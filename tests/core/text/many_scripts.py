"""Texts of many scripts, and random ones made of their characters, to compare tokenizers by."""

from __future__ import annotations

import random
from collections.abc import Iterator

from support.tables import table

TEXTS = table(__file__, "many scripts")
"""Each family's words, digits, spaces, marks, and what its tokenizer might take for a special token."""

POOLS = [
    " ", "  ", "\n", "\r\n", "\t", "'s", "'LL", "don't", "_", "/", "\\", "<|im_end|>", "<tool>", "<s>", "▁", "ab",
    "The", "iOS",
    *"aZé\u0300\u0301бЯωΑאع\u064eक\u094dก\u0e31一龦㐀あア가ᄀ😀\u200d\ufe0f09٥²Ⅷ½",
    *".,!?;:'\"()[]{}<>@#$%^&*-+=|~`…。，।،—“\u00a0\u3000\u200b\u2028\u0085\x00\x0b\x1f\x7f\ue000\ufffd\U00020000𝐀",
]  # fmt: skip


def random_texts(seed: int, count: int) -> Iterator[str]:
    """Strings made of the pools' pieces, of single characters of all planes, and of runs."""
    rng = random.Random(seed)
    for _ in range(count):
        parts = []
        for _ in range(rng.randrange(1, 14)):
            kind = rng.random()
            if kind < 0.75:
                parts.append(rng.choice(POOLS))
            elif kind < 0.9:
                parts.append(rng.choice(POOLS) * rng.choice((2, 3, 4, 7, 17, 33)))
            else:
                code = rng.randrange(0x110000)
                parts.append("" if 0xD800 <= code < 0xE000 else chr(code))
        yield "".join(parts)
