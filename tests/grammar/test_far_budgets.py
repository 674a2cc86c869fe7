"""Nothing the budget allows is forbidden (contract line 15): long texts, hard patterns, and limits of the library."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import jsonschema
import pytest
from support.grammar_walks import text_of, walk
from support.tables import table

from asyncengine.config import EngineConfig
from asyncengine.errors import GrammarError
from asyncengine.grammar import Grammar
from asyncengine.grammar.llguidance_backend import LlgTemplate, LlguidanceBackend
from asyncengine.grammar.matcher import Matcher
from asyncengine.grammar.service import GrammarService
from asyncengine.grammar.vocabulary import Vocabulary
from asyncengine.seams import GrammarOrder


def note(**limits: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"note": {"type": "string", **limits}}, "additionalProperties": False}


def compiled(vocabulary: Vocabulary, schema: dict[str, Any]) -> LlgTemplate:
    return LlguidanceBackend(vocabulary).compile(Grammar.json_schema(schema))


def write(vocabulary: Vocabulary, matcher: Matcher, text: str, budget: int) -> list[int]:
    """Sample `text` token by token, then whatever steering says, until the output ends or the budget is spent."""
    output: list[int] = []
    for token in vocabulary.tokenize(text):
        output += matcher.accept(token, jump=False)
        if len(output) == budget or matcher.is_terminated() or matcher.steered_from is not None:
            break
    return output


def finish(vocabulary: Vocabulary, matcher: Matcher, output: list[int], budget: int) -> dict[str, Any]:
    """Fill the rest of the budget at random; what is left must be complete."""
    rest, _ = walk(vocabulary, matcher, budget - len(output), random.Random(3), jump=False)
    assert matcher.overrun() is None
    made: dict[str, Any] = json.loads(text_of(vocabulary, [*output, *rest]))
    return made


@pytest.mark.parametrize("least", [600, 2_000])
def test_a_long_text_is_not_forbidden_where_the_budget_allows_it(vocabulary: Vocabulary, least: int) -> None:
    """The way out of it is as long as it is: once 512 bytes were all that was looked for, and `{}` the only output."""
    schema, budget = note(minLength=least), least + 60
    matcher = Matcher(compiled(vocabulary, schema), budget, "close")
    text = '{"note":"' + "the quick brown fox " * 40
    output = write(vocabulary, matcher, text[:600], budget)
    assert matcher.steered_from is None
    made = finish(vocabulary, matcher, output, budget)
    assert made["note"].startswith("the quick")
    jsonschema.validate(made, schema)


def test_a_long_text_that_does_not_fit_is_not_begun(vocabulary: Vocabulary) -> None:
    for least, budget in ((9_000, 1_700), (600, 100), (60_000, 700)):
        matcher = Matcher(compiled(vocabulary, note(minLength=least)), budget, "close")
        output = write(vocabulary, matcher, '{"note":"the', budget)
        assert matcher.steered_from is not None, least
        assert finish(vocabulary, matcher, output, budget) == {}


HARD = table(__file__, "far budgets")


@pytest.mark.parametrize("name", HARD)
def test_what_has_an_output_is_not_called_impossible(vocabulary: Vocabulary, name: str) -> None:
    schema = HARD[name]
    template = compiled(vocabulary, schema)
    for budget in (template.min_tokens, template.min_tokens + 30, template.min_tokens + 400):
        matcher = Matcher(template, budget, "close")
        jsonschema.validate(finish(vocabulary, matcher, [], budget), schema)


EXPENSIVE = note(pattern="a.{1000}b")
"""The library follows some letters of it, then has "too many expressions"."""
LETTERS = '{"note":"' + "".join(random.Random(1).choice("ab") for _ in range(3000))

GOOD = '{"note":"a' + "c" * 1000 + 'b"}'


class Served:
    """A compile service that is asked for one grammar again and again."""

    def __init__(self, vocabulary: Vocabulary, grammar: Grammar) -> None:
        self.service = GrammarService(lambda: LlguidanceBackend(vocabulary), EngineConfig())
        self.grammar = grammar
        self.asked = 0

    async def matcher(self, budget: int) -> Matcher:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        self.asked += 1
        order = GrammarOrder(self.service.check(self.grammar, budget, "close"), budget, "close")
        self.service.start(
            self.asked, order, lambda ticket, outcome: loop.call_soon_threadsafe(answer.set_result, outcome)
        )
        outcome = await answer
        if isinstance(outcome, Exception):
            raise outcome
        assert isinstance(outcome, Matcher)
        return outcome


async def test_a_limit_of_the_library_that_one_output_hits_is_not_for_others(vocabulary: Vocabulary) -> None:
    """Shared state breaks without a word: others refused every token, and so did the compiled grammar ever after."""
    served = Served(vocabulary, Grammar.json_schema(EXPENSIVE))
    try:
        beside = await served.matcher(1500)
        begun = write(vocabulary, beside, GOOD[:40], 1500)
        hit = await served.matcher(4000)
        with pytest.raises(GrammarError, match="too many expressions"):
            write(vocabulary, hit, LETTERS, 4000)
        begun += write(vocabulary, beside, GOOD[40:], 1500)
        assert text_of(vocabulary, begun) == GOOD
        for _ in range(3):
            after = await served.matcher(1500)
            assert text_of(vocabulary, write(vocabulary, after, GOOD, 1500)) == GOOD
            assert finish(vocabulary, await served.matcher(20), [], 20) == {}
    finally:
        served.service.close()


async def test_a_search_that_hits_the_librarys_limit_costs_nobody_a_token(vocabulary: Vocabulary) -> None:
    served = Served(vocabulary, Grammar.json_schema(note(pattern="^([ab]{1,9}c?){300}[ab]*a[ab]{900}$")))
    try:
        for _ in range(5):
            matcher = await served.matcher(3000)
            begun = write(vocabulary, matcher, '{"note":"abab', 3000)
            assert matcher.steered_from is None
            assert len(begun) > 5
    finally:
        served.service.close()


def test_where_no_way_is_known_the_output_goes_on(vocabulary: Vocabulary) -> None:
    """An output that the model ends is complete; one that its budget ends is an error, never passed off as complete."""
    schema = note(pattern="^(?i:\u00e9|x){200}end$")  # of such cases the library alone knows
    template = compiled(vocabulary, schema)
    good = '{"note":"' + "x" * 200 + 'end"}'
    matcher = Matcher(template, 1000, "close")
    output = write(vocabulary, matcher, good, 1000)
    assert (text_of(vocabulary, output), matcher.steered_from, matcher.overrun()) == (good, None, None)

    cut = Matcher(template, 300, "close")
    write(vocabulary, cut, '{"note":"' + "x" * 150, 300)
    assert cut.steered_from is None
    assert "budget" in (cut.overrun() or "")
