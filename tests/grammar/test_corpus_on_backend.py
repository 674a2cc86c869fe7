"""The corpus through the engine's own backend and a real tokenizer: nothing valid is refused, nothing invalid taken."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from support.big_tokenizers import SMALL
from support.long import LONG

from asyncengine.errors import GrammarError
from asyncengine.grammar import Grammar
from asyncengine.grammar.llguidance_backend import LlgTemplate, LlguidanceBackend
from asyncengine.grammar.vocabulary import Vocabulary

from .corpus import LOOSE, NARROW, Difference, compilable, corpus, invalid_texts, valid_texts
from .corpus.randomised import random_cases
from .schema_check import Checker
from .torture import real_vocabulary

MENDED = {
    "pattern_not_quote", "pattern_not_backslash", "pattern_file_name", "key_pattern_not_quote", "escaped_key",
    "escaped_key_after_plain", "escaped_key_of_pattern", "leap_day", "leap_day_and_time", "long_host",
}  # fmt: skip
"""Cases with texts that llguidance lets through and our lowering does not."""

REFUSED = {"refused/uniqueItems_06", "pydantic/Labels", *(f"refused/pattern_{number}" for number in range(28, 31))}
"""Schemas that llguidance refuses and the lowering does, too; all others it makes it take, with the same meaning."""


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return real_vocabulary(SMALL)


def takes(template: LlgTemplate, vocabulary: Vocabulary, text: str) -> bool:
    """The output may be `text`, in the tokens the tokenizer cuts it into, and end there."""
    state = template.new_state()
    return all(state.consume(token) for token in vocabulary.tokenize(text)) and state.is_accepting()


def test_the_corpus_is_large_and_the_same_in_every_run() -> None:
    cases = corpus()
    repeated = [name for name, count in Counter(case.name for case in cases).items() if count > 1]
    assert not repeated
    assert len(compilable()) >= 400
    assert sum(len(case.valid) for case in cases) >= 1000
    assert [case.name for case in compilable() if not case.valid] == []
    again = [json.dumps([case.schema, case.valid, case.invalid]) for case in random_cases(12)]
    assert again == [json.dumps([c.schema, c.valid, c.invalid]) for c in cases if c.category == "random"][:12]


@pytest.mark.parametrize("part", range(4) if LONG else (1, 3))
def test_every_valid_text_is_taken_and_every_invalid_one_refused(
    part: int, backend: LlguidanceBackend, vocabulary: Vocabulary
) -> None:
    wrong = []
    for case in compilable()[part::4]:
        template = backend.compile(Grammar.json_schema(case.schema))
        wrong += [(case.name, "refused", text) for text in valid_texts(case) if not takes(template, vocabulary, text)]
        invalid = invalid_texts(case)
        assert invalid, case.name
        wrong += [(case.name, "taken", text) for text in invalid if takes(template, vocabulary, text)]
    assert wrong == []


def test_a_way_to_the_end_stays_known_along_every_valid_text(
    backend: LlguidanceBackend, vocabulary: Vocabulary
) -> None:
    """With budget to spare no token of a valid output is ever replaced."""
    for case in compilable()[::7]:
        template = backend.compile(Grammar.json_schema(case.schema))
        closing = template.new_closing()
        tokens = vocabulary.tokenize(valid_texts(case)[0])
        assert all(closing.advance(token, 4000) for token in tokens), case.name
        assert closing.first() in vocabulary.eos_ids


def refusal(backend: LlguidanceBackend, grammar: Grammar) -> GrammarError | None:
    try:
        backend.compile(grammar)
    except GrammarError as error:
        return error
    return None


def test_what_is_refused_is_refused_with_a_reason(backend: LlguidanceBackend, vocabulary: Vocabulary) -> None:
    """Compiling what llguidance refuses either says why, by name, or works because the lowering knows a way. The cases
    are made here: as parameters they would be made in each process that only looks for tests."""
    cases = [case for case in corpus() if case.refused]
    assert len(cases) > 40
    for case in cases:
        grammar = Grammar.json_schema(case.schema)
        if case.name not in REFUSED and not case.name.startswith("refused/impossible"):
            template = backend.compile(grammar)
            assert all(takes(template, vocabulary, text) for text in valid_texts(case)), case.name
            assert not any(takes(template, vocabulary, text) for text in invalid_texts(case)), case.name
            continue
        refused = refusal(backend, grammar)
        assert refused is not None, case.name
        assert refused.field == "grammar"
        assert len(str(refused)) < 700


def test_holes_and_narrowings_of_the_library(backend: LlguidanceBackend, vocabulary: Vocabulary) -> None:
    """Texts that llguidance lets through against the schema, but for those that our lowering stops; and valid ones
    that it does not write. A failure here means that the library was mended: take the entry out of `corpus.known`."""

    def taken(cases: list[Difference]) -> set[str]:
        templates = {case.name: backend.compile(Grammar.json_schema(case.schema)) for case in cases}
        return {case.name for case in cases if takes(templates[case.name], vocabulary, case.text)}

    assert all(Checker(case.schema).text_fault(case.text) for case in LOOSE)
    assert not any(Checker(case.schema).text_fault(case.text) for case in NARROW)
    assert taken(LOOSE) == {case.name for case in LOOSE} - MENDED
    assert taken(NARROW) == set()
