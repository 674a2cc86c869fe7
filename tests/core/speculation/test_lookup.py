"""Drafts from a text's own past and from earlier answers."""

from __future__ import annotations

from collections.abc import Sequence

from asyncengine import SamplingParams
from asyncengine.request_spec import RequestSpec
from asyncengine.speculation import DraftPlanner
from asyncengine.speculation.acceptance import AMBIGUOUS, LONG, Draft, Source
from asyncengine.speculation.costs import StepCosts
from asyncengine.speculation.lookup import BYTES_PER_TOKEN, EarlierAnswers
from asyncengine.speculation.planner import Candidate, LookupProposer

NAMESPACE = ("a",)
NO_ANSWERS = EarlierAnswers(0)


def proposer(
    prompt: Sequence[int], live: list[int], answers: EarlierAnswers = NO_ANSWERS, prediction: Sequence[int] = ()
) -> LookupProposer:
    spec = RequestSpec(0, tuple(prompt), SamplingParams(), 10_000, prediction=tuple(prediction))
    return LookupProposer(spec, live, NAMESPACE, answers)


def guess(prompt: Sequence[int], output: Sequence[int], answers: EarlierAnswers = NO_ANSWERS) -> Draft:
    live = [*prompt, *output]
    return proposer(prompt, live, answers).propose(live, 4)


def own(agreed: int, *tokens: int) -> Draft:
    return Draft(tokens, Source.OWN_TEXT, agreed)


def test_one_token_is_enough() -> None:
    assert guess([1, 2, 3, 4, 5, 6], [90, 3]) == own(1, 4, 5, 6, 4), "a text that ends repeats itself"
    assert not guess([1, 2, 3], [90, 91]).tokens


def test_the_longest_agreement_is_followed() -> None:
    assert guess([1, 2, 3, 4, 9, 2, 3, 5, 8], [1, 2, 3]).tokens[0] == 4
    assert guess([9, 2, 3, 5, 1, 2, 3, 4, 8], [9, 2, 3]).tokens[0] == 5


def test_the_agreement_says_how_sure_a_draft_is() -> None:
    assert guess([7, 1, 5, 7, 2, 5, 7, 3], [90, 7]).agreed == AMBIGUOUS
    assert guess([4, 7, 1, 5, 4, 7, 2, 6], [90, 4, 7]).agreed == AMBIGUOUS
    assert guess([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4]).agreed == 4
    assert guess([*range(20)], [*range(1, 12)]).agreed >= LONG
    assert guess([7, 1, 5, 7, 1, 6], [90, 7]).agreed == 2, "two places that go on alike"


def test_a_copy_is_followed_where_its_tokens_occur_elsewhere_too() -> None:
    """A place that has agreed for long is not left for a later one that agrees as far as the index looks."""
    again = [5, 6, 40, 41, 42, 43, 44, 45, 5, 6, 50, 51, 52, 53, 54, 55]
    live = [*again, 90, 5, 6, 40, 41]
    found = proposer(again, live)
    for place in range(4, 12):
        assert found.propose(live, 2).tokens == tuple(again[place : place + 2]), place
        live.append(again[place])


def test_the_output_is_looked_at_as_it_grows() -> None:
    live = [1, 2, 3]
    found = proposer([1, 2, 3], live)
    assert not found.propose(live, 3).tokens
    live += [50, 51, 52, 53, 50, 51]
    assert found.propose(live, 3) == own(2, 52, 53, 50)


def test_earlier_answers() -> None:
    answers = EarlierAnswers(100_000)
    answers.add(NAMESPACE, [5, 6, 7, 30])
    answers.add(NAMESPACE, [5, 6, 8, 31])
    assert guess([1, 2], [5, 6], answers) == Draft((8, 31), Source.EARLIER_ANSWER, 2), "the latest"
    assert not guess([1, 2], [90, 6], answers).tokens, "one token is not enough"
    other = LookupProposer(RequestSpec(0, (1,), SamplingParams(), 100), [1, 5, 6], ("b",), answers)
    assert not other.propose([1, 5, 6], 4).tokens, "another namespace's"


def test_the_surest_source_is_taken() -> None:
    answers = EarlierAnswers(100_000)
    answers.add(NAMESPACE, [*range(20, 40)])
    assert guess([26, 27, 99, 98], [*range(20, 28)], answers) == Draft((28, 29, 30, 31), Source.EARLIER_ANSWER, LONG)
    assert guess([*range(20, 28), 70, 71], [*range(20, 28)], answers).tokens[0] == 70, "its own text agrees as long"
    live = [1, 2, 20, 21]
    predicted = proposer([1, 2], live, answers, prediction=[20, 21, 60, 61])
    assert predicted.propose(live, 2) == Draft((60, 61), Source.PREDICTION, LONG)


def test_nothing_is_guessed_beyond_the_end() -> None:
    """A token that would end the request is sampled behind the guesses before it, and nothing follows."""
    planner = DraftPlanner(StepCosts((1.0, 1.18, 1.9)), 15)
    for stops, expected in (((), (4, 5, 6, 7)), ((6,), (4, 5)), ((99, 6, 5), (4,)), ((4,), ())):
        spec = RequestSpec(len(stops), (1, 2, 3, 4, 5, 6, 7), SamplingParams(), 10_000, stop_ids=stops)
        live = [*spec.prompt, 1, 2, 3]
        planned = planner.plan([Candidate(spec.ticket, spec, live, NAMESPACE, 4)], 1, 1)
        assert planned.get(spec.ticket, ()) == expected
        planner.forget(spec.ticket, NAMESPACE, ())


def test_answers_that_are_dropped_are_gone() -> None:
    answers = EarlierAnswers(BYTES_PER_TOKEN * 8)
    answers.add(NAMESPACE, [1, 2, 3, 4])
    answers.add(NAMESPACE, [1, 2, 5, 6])
    assert guess([80], [1, 2], answers).tokens[0] == 5
    answers.add(NAMESPACE, [7, 8, 9, 10, 11])  # the first goes, and then the second
    assert not guess([80], [1, 2], answers).tokens
    assert not guess([80], [2, 3], answers).tokens
    assert guess([80], [7, 8], answers).tokens[0] == 9
    assert answers.num_tokens == 5
    answers.clear()
    assert not guess([80], [7, 8], answers).tokens
    assert answers.num_tokens == 0
