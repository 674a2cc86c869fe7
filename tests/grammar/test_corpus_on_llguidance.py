"""The corpus straight against llguidance, byte by byte: is the corpus right, what is lost, what gets through."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from support.schema_check import Checker

from .bytes_tokenizer import END, Bytes
from .corpus import LOOSE, NARROW, Case, Difference, compilable, corpus, invalid_texts, valid_texts

WHITESPACE = r"( |\n[ \t]{0,40})"
COMPLAINTS = {
    "oneOf": "oneOf constraints are not supported",
    "pattern": "regex",
    "format": "Unknown format",
    "patternProperties": "not disjoint",
    "minProperties": "min/maxProperties only supported",
    "number": "Failed to generate regex",
    "unsatisfiable": "Unsatisfiable schema",
}
"""What llguidance says for a mark; the name of an unimplemented keyword otherwise."""


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(Bytes()), n_vocab=END + 1, eos_token=[END], slices=[])


def compiled(tokenizer: LLTokenizer, schema: dict[str, Any]) -> LLMatcher:
    grammar = LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": WHITESPACE})
    return LLMatcher(tokenizer, grammar, log_level=0)


def accepts(matcher: LLMatcher, text: str) -> bool:
    """Every byte is allowed in its place, and the output may end after the last."""
    matcher.reset()
    data = list(text.encode())
    taken = matcher.try_consume_tokens(data)
    assert not matcher.is_error(), matcher.get_error()
    return bool(taken == len(data) and matcher.is_accepting())


def named(cases: Sequence[Case | Difference]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=[case.name for case in cases])


def test_the_corpus_is_large_and_its_names_are_unique() -> None:
    cases = corpus()
    repeated = [name for name, count in Counter(case.name for case in cases).items() if count > 1]
    assert not repeated
    assert len(compilable()) >= 400
    assert sum(len(case.valid) for case in cases) >= 1000
    assert [case.name for case in compilable() if not case.valid] == []
    without = [case.name for case in compilable() if not invalid_texts(case)]
    assert not without


def test_the_corpus_is_the_same_in_every_run() -> None:
    from .corpus.randomised import random_cases

    once, again = ([json.dumps([case.schema, case.valid, case.invalid]) for case in random_cases(12)] for _ in range(2))
    assert once == again
    assert once == [json.dumps([c.schema, c.valid, c.invalid]) for c in corpus() if c.category == "random"][:12]


@named([case for case in corpus() if not case.refused])
def test_valid_is_accepted_and_invalid_is_refused(tokenizer: LLTokenizer, case: Case) -> None:
    matcher = compiled(tokenizer, case.schema)
    assert not matcher.is_error(), matcher.get_error()
    lost = [text for text in valid_texts(case) if not accepts(matcher, text)]
    assert not lost, "valid, but refused"
    let_through = [text for text in invalid_texts(case) if accepts(matcher, text)]
    assert not let_through, "invalid, but accepted"


@named([case for case in corpus() if case.refused])
def test_what_cannot_be_enforced_is_refused_by_name(tokenizer: LLTokenizer, case: Case) -> None:
    matcher = compiled(tokenizer, case.schema)
    keyword = case.llguidance.removeprefix("refuses:")
    assert matcher.is_error(), "llguidance has learnt this: take the mark off the case"
    assert COMPLAINTS.get(keyword, f'"{keyword}"') in matcher.get_error()


@named(LOOSE)
def test_known_faults_of_llguidance(tokenizer: LLTokenizer, case: Difference) -> None:
    """A failure means that llguidance was mended: take the entry out, and what the engine does about it."""
    assert Checker(case.schema).text_fault(case.text) is not None
    assert accepts(compiled(tokenizer, case.schema), case.text)


@named(NARROW)
def test_known_narrowings_of_llguidance(tokenizer: LLTokenizer, case: Difference) -> None:
    assert Checker(case.schema).text_fault(case.text) is None
    assert not accepts(compiled(tokenizer, case.schema), case.text)
