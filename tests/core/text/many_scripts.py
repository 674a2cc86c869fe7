"""Texts of many scripts, and random ones made of their characters, to compare tokenizers by."""

from __future__ import annotations

import random
from collections.abc import Iterator

TEXTS = [
    "", " ", "  ", "   ", " " * 40, "\t", "\n", "\n\n\n", "\r\n", "\r\n\r\n x", "\t \n \r", "a", " a", "  a", "a ",
    "The quick brown fox doesn't stop; it's 'RE-run'. We'Ve they'LL I'm I'D 'tis don’t",
    "3 33 333 3333 33333 333333 1,234,567.89 0x1F 1e-9 ٣٤٥ ½²①Ⅷ 零一 12½34",
    "camelCase PascalCase SCREAMING_SNAKE HTTPServer iPhone12Pro a1B2c3",
    "def f(x):\n\treturn {'a': [1, 2], \"b\": x**2}  # comment\n\n\n    if x != y and (z >= 0):\n        pass\n",
    "<html><body class=\"a\">&nbsp;</body></html>\n<!-- x -->\n```py\nprint(f\"{x!r:>10}\")\n```",
    "Grüße, żółć, señor, naïve, Ångström, İstanbul, ŉ ǅ ǈ",
    "e\u0301tude A\u030angstro\u0308m n\u0303 ṩ s\u0323\u0307 한 Å Ω ﬁ Ａ ½",
    "Широкая Электрификация, їжак; Ελληνικά πόλης",
    "مرحبا بالعالم، كيف\u064e حال\u064fك؟ یک ۔ ש\u05b8\u05c1לו\u05b9ם עולם",
    "नमस\u094dत\u0947 द\u0941न\u093fय\u093e। ব\u09be\u0982ল\u09be தம\u0bbfழ\u0bcd త\u0c46ల\u0c41గ\u0c41",
    "สว\u0e31สด\u0e35ชาวโลก ក\u17b6ន\u17cbត\u17c2 გამარჯობა Հայ",
    "你好，世界。今天天气很好！日本語のテキスト、ひらがなとカタカナ。我想在apple工作1314151天～",
    "한국어 문장, 안녕하세요! 👩\u200d👩\u200d👧\u200d👦 🏳\ufe0f\u200d🌈 🇩🇪 👍🏽 ✅ 🦙",
    "zero\u200bwidth\u200c\u200d\ufeff non\u00a0breaking\u2003em\u3000wide\u2028line\u2029par\u0085next\u00adsoft",
    "\x00\x01\x02\x07\x0b\x0c\x1b[0m\x7f\x80\x9f \ue000\uf8ff \ufffd\uffff \U000e0001 \U0010ffff \U00020000\U0002a6df",
    "!!!???...---===###```~~~^^^$$$+++<<<>>>|||@@@&&&***\\\\\\///%%%", "…。，、।۔، (‘’“”—–)",
    "▁ a▁b ▁▁c", "<|im_start|>user\nhi<|im_end|>\n <tool> x</tool><s>[INST] a[/INST]</s> <0x41> [PAD9]",
]  # fmt: skip
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
