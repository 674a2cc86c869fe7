"""docs/troubleshooting.md quotes messages as the source writes them: a message that changed there changes here."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
GAP = "\0"
"""The placeholder in a message for a part that differs."""


def quoted() -> list[str]:
    """The first cell of each row."""
    return re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


def parts(node: ast.expr) -> list[str]:
    """The texts that an expression may give, as far as the source says."""
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else [GAP]
    if isinstance(node, ast.JoinedStr):
        return ["".join(choice) for choice in product(*(parts(value) for value in node.values))]
    if isinstance(node, ast.FormattedValue):
        return parts(node.value)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [left + right for left in parts(node.left) for right in parts(node.right)]
    if isinstance(node, ast.IfExp):
        return [*parts(node.body), *parts(node.orelse)]
    return [GAP]


def messages_in(source: str) -> Iterator[str]:
    """Each text of the source, and those of each call joined as `InvalidParameter` joins field and limit."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and len(node.args) > 1:
            for choice in product(*(parts(argument)[:3] for argument in node.args[:3])):
                yield ": ".join(choice)
        elif isinstance(node, (ast.JoinedStr, ast.Constant, ast.BinOp)):
            yield from parts(node)


@cache
def sources() -> frozenset[str]:
    """The text of each file of the package."""
    folders = [ROOT / folder for folder in ("asyncengine", "grammar", "lora", "integrations")]
    paths = [path for folder in folders for path in folder.rglob("*.py") if not path.is_symlink()]
    return frozenset(path.read_text(encoding="utf-8") for path in paths)


@cache
def messages(source: str) -> frozenset[str]:
    """The messages of a file, `%s` and its like as gaps, and any white space as one blank."""
    found = [text for text in messages_in(source) if len(text) > 8]
    return frozenset(" ".join(re.sub(r"%[-.0-9]*[a-z]", GAP, text).split()) for text in found)


def says(message: str, quote: str) -> bool:
    """True if the message has the words of the quotation, in order; where it has `...`, anything may stand."""
    at = 0
    for words in filter(None, (part.strip() for part in quote.split("..."))):
        found = message.find(words, at)
        if found < 0:
            return False
        at = found + len(words)
    return True


@pytest.mark.parametrize("quote", quoted())
def test_the_source_says_so(quote: str) -> None:
    assert max(map(len, quote.split("..."))) >= 8, "too few words to look for"
    longest = max(re.findall(r"\w+", quote), key=len)
    near = [source for source in sources() if longest in source]
    assert any(says(message, quote) for source in near for message in messages(source)), "no message reads so"


def test_there_are_many() -> None:
    assert len(quoted()) > 50
    assert len(set(quoted())) == len(quoted())


def test_other_words_are_found_out() -> None:
    """The comparison itself: gaps, joined fields, both branches, and words that nobody wrote."""
    source = "raise InvalidParameter('prompt', f'has {n} tokens' + (' now' if n else '!'))"
    found = messages(source)
    assert any(says(message, "prompt: has ... tokens now") for message in found)
    assert any(says(message, "prompt: has ... tokens!") for message in found)
    assert not any(says(message, "prompt: has ... letters") for message in found)
