"""Texts that grammars of every kind take, and others that they do not."""

from __future__ import annotations

from typing import Any

import pytest
from support.data import cases_of

from asyncengine.grammar import Grammar

from .oracle import accepts

ROWS: list[Any] = cases_of(__file__)["rows"]


@pytest.mark.parametrize(
    ("kind", "of", "options", "right", "wrong"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS]
)
def test_texts(kind: str, of: Any, options: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    grammar = getattr(Grammar, kind)(of, **options)
    assert [text for text in right if not accepts(grammar, text)] == []
    assert [text for text in wrong if accepts(grammar, text)] == []
