"""Each row of docs/problems.md names a test that exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "problems.md").read_text(encoding="utf-8")
ROWS = [line for line in TEXT.splitlines() if re.match(r"\| (?!asked|--)", line) and not line.startswith("|--")]
HELD = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def test_there_are_rows() -> None:
    assert len(ROWS) >= 20
    assert "## Not yet" in TEXT


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[2:50])
def test_a_test_holds_it(row: str) -> None:
    _, asked, here, held, _ = re.split(r"(?<!\\)\|", row)
    assert asked.strip()
    assert here.strip()
    named = HELD.findall(held)
    assert named, "a row without a test belongs under Not yet"
    for path, name in named:
        source = (ROOT / path).read_text(encoding="utf-8")
        assert re.search(rf"^ *(async )?def {name}\(", source, re.MULTILINE), f"{path} has no {name}"
