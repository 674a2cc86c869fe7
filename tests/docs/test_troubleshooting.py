"""docs/troubleshooting.md quotes messages as the source writes them: a message that changed there changes here."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
QUOTED = re.findall(r"^\| `([^`]+)` \|", PAGE, re.MULTILINE)


def joined(source: str) -> str:
    """The source with its texts put together as Python does, and fields and limits as `InvalidParameter` does."""
    source = re.sub(r"""["'](\s*\n|\s*\+\s*\()\s*[rf]*["']""", "", source).replace("\\'", "'").replace('\\"', '"')
    return re.sub(r"""["']?,\s*[rf]*["']""", ": ", re.sub(r"\{[^{}]*\}|%[-.0-9]*[a-z]", "\0", source))


@cache
def sources() -> list[str]:
    """The text of each file of the package."""
    folders = [ROOT / folder for folder in ("asyncengine", "grammar", "lora", "integrations")]
    return [joined(path.read_text("utf-8")) for folder in folders for path in folder.rglob("*.py")]


@pytest.mark.parametrize("quote", QUOTED)
def test_the_source_says_so(quote: str) -> None:
    """In one file, in order; where a quotation has `...`, anything may stand."""
    words = [re.escape(part.strip()) for part in quote.split("...") if part.strip()]
    assert max(map(len, words)) >= 8, "too few words to look for"
    assert any(re.search(".*?".join(words), source, re.DOTALL) for source in sources()), "no message reads so"


def test_there_are_many() -> None:
    assert len({*QUOTED}) == len(QUOTED) > 50
