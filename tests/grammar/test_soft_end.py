"""Near its budget's end an output goes on with what the model says next best, and begins nothing it cannot end well."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from support.data import cases_of
from support.grammar_walks import allowed, text_of
from support.small_vocabulary import EOS, MARK

from asyncengine.grammar import Grammar
from asyncengine.grammar.llguidance_backend import LlgTemplate, LlguidanceBackend
from asyncengine.grammar.matcher import Matcher
from asyncengine.grammar.vocabulary import Vocabulary

ROWS: dict[str, Any] = cases_of(__file__)

ITEMS = ["the name and abc", "abc and zz", "age", "name"] * 3
LIST = {"type": "array", "items": {"type": "string"}}
RECORDS = ROWS["records"]
RECORD = {"name": "abc", "age": 10, "and": "the abc"}


class Writer:
    """A model that has a text in mind, and where it may not go on with it, some tokens, the best first."""

    def __init__(self, template: LlgTemplate, wanted: str, instead: Sequence[int]) -> None:
        self.template = template
        self.vocabulary = template.backend.vocabulary
        self.wanted = wanted.encode()
        self.instead = instead

    def write(self, budget: int, *, offers: bool) -> tuple[str, bool]:
        """The output, and whether any token of it is not what the model said. `offers`: it names others."""
        matcher, wanted, tokens = Matcher(self.template, budget, "close"), self.wanted, list[int]()
        while len(tokens) < budget and not matcher.is_terminated():
            ids = [int(each) for each in allowed(self.vocabulary, matcher)]
            others = [each for each in self.instead if each in ids]
            pieces = {each: self.vocabulary.token_bytes[each] for each in ids if each < EOS}
            own = max(
                (each for each in ids if wanted and wanted.startswith(pieces.get(each, b"\0"))),
                key=lambda each: len(pieces[each]),
                default=None,
            )
            first = (others or ids)[0] if own is None else own
            (taken,) = matcher.accept(first, False, (lambda others=others: others) if offers else None)
            wanted = wanted[len(pieces[first]) :] if taken == own else b""
            tokens.append(taken)
        return text_of(self.vocabulary, tokens), matcher.steered_from is not None


def ending(vocabulary: Vocabulary) -> list[int]:
    """Tokens that end what is open."""
    return [vocabulary.by_bytes[text] for text in (b'"}', b'"]', b"]", b"}", b'"')] + [EOS]


@pytest.mark.parametrize(("schema", "value"), [(LIST, ITEMS), (RECORDS, [RECORD] * 6)])
def test_no_item_and_no_word_is_begun_for_which_there_is_no_room(
    schema: dict[str, object], value: list[object], backend: LlguidanceBackend
) -> None:
    """Each budget gives whole items, the last one perhaps cut behind a word; where the engine chooses, it does not."""
    template = backend.compile(Grammar.json_schema(schema))
    writer = Writer(template, json.dumps(value), ending(backend.vocabulary))
    cut = dict.fromkeys((True, False), 0)
    for budget in range(template.min_tokens + 3, 90):
        for offers in cut:
            found = json.loads(writer.write(budget, offers=offers)[0])
            if not found:
                continue
            assert found[:-1] == value[: len(found) - 1]
            last, whole = (json.dumps(each)[1:-1].rstrip('"') for each in (found[-1], value[len(found) - 1]))
            cut[offers] += not whole.startswith(last) or whole[len(last) :][:1].isalpha() or not last
    assert cut[True] == 0
    assert cut[False] > 2


def test_an_answer_that_may_be_text_is_text_where_a_call_has_no_room(backend: LlguidanceBackend) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    call = f"start: /[a-z ]*/ | <[{MARK}]> %json {json.dumps(schema)}"
    template = backend.compile(Grammar.lark(call))
    words = [backend.vocabulary.by_bytes[text] for text in (b"abc", b" and")]
    for budget in range(1, 10):
        matcher = Matcher(template, budget, "close")
        assert matcher.accept(MARK, False, lambda: [EOS, *words]) == [words[0]]
        assert matcher.steered_from == 0
        assert matcher.accept(EOS, False, lambda: words) == [EOS] if budget > 1 else True


def test_what_has_no_other_way_is_taken(backend: LlguidanceBackend) -> None:
    """No preference forbids what the budget allows: an item is begun if the model has nothing else to say."""
    template = backend.compile(Grammar.json_schema(LIST))
    text = '["abc","abc"]'
    writer = Writer(template, text, [])
    for budget in range(7, 12):
        found, steered = writer.write(budget, offers=True)
        assert json.loads(found)
        assert steered == (found != text)
    assert writer.write(11, offers=True) == (text, False)
