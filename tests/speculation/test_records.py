"""Fields of a record whose names stand in the prompt."""

from __future__ import annotations

import random
from collections.abc import Sequence

from asyncengine import SamplingParams
from asyncengine.request_spec import RequestSpec
from asyncengine.speculation import DraftPlanner
from asyncengine.speculation.corrections import Counts
from asyncengine.speculation.costs import StepCosts
from asyncengine.speculation.drafter import LookupDrafter
from asyncengine.speculation.evidence import Evidence
from asyncengine.speculation.lookup import Draft, FixedIndex
from asyncengine.speculation.planner import Candidate
from asyncengine.speculation.records import Habits, Record

COMMA, BLANK, END, OPEN, COLON, NEXT = range(900, 906)
LIST = [1, COMMA, BLANK, 2, COMMA, BLANK, 3, COMMA, BLANK, 4, END]
"""Of four names, which are not listed in the answer's form."""


def record(habits: Habits, prompt: Sequence[int], output: Sequence[int]) -> Record:
    found = Record(habits, FixedIndex(prompt))
    found.learn([*prompt, *output])
    return found


def fields(*pairs: int) -> list[int]:
    found = [OPEN]
    for name, value in zip(pairs[::2], pairs[1::2], strict=True):
        found += [name, COLON, value, NEXT]
    return found


def test_the_next_name_and_what_is_behind_it() -> None:
    """Once two names have come."""
    found = record(Habits(), LIST, fields(1, 70, 2, 71))
    assert found.following(NEXT, 71, 0) == (3, COLON)
    found = record(Habits(), LIST, [*fields(1, 70, 2, 71), 3])
    assert found.following(3, NEXT, 0) == (COLON,)
    assert not found.following(71, COLON, 0)


def test_another_record_is_known_from_its_first_name_on() -> None:
    habits = Habits()
    record(habits, LIST, fields(1, 70, 2, 71))
    prompt = [80, 11, COMMA, BLANK, 12, 13, COMMA, BLANK, 14, END]
    assert record(habits, prompt, [OPEN, 11]).following(11, OPEN, 0) == (COLON,)
    assert record(habits, prompt, fields(11, 72)).following(NEXT, 72, 0) == (12, 13, COLON)
    assert not record(habits, [80, 81, 82], fields(11, 72)).following(NEXT, 72, 0)


def test_a_copy_is_no_record() -> None:
    """The same token stands between its words as between those of the prompt."""
    habits = Habits()
    record(habits, LIST, [OPEN, *LIST])
    assert habits.behind.usual is None
    assert habits.before[BLANK] == 0


def test_what_does_not_come_is_not_expected_for_ever() -> None:
    habits = Habits()
    record(habits, LIST, fields(1, 70, 2, 71))
    for _ in range(8):
        text = [*LIST, OPEN, 1]
        found = record(habits, LIST, text[len(LIST) :])
        if not found.following(1, OPEN, len(text)):
            break
        found.learn([*text, 99])
    else:
        raise AssertionError("it is still expected")


def test_a_value_is_followed_to_its_end_and_into_the_next_field() -> None:
    """The value's copy, what came where such a copy ended before, the next name, and what is behind names."""
    prompt = [*LIST, 70, 60, END, 71, 61, END, 72, 62, END]
    live = [*prompt, OPEN]
    found = LookupDrafter(RequestSpec(0, tuple(prompt), SamplingParams(), 10_000), live, (), None)
    for token in (1, COLON, 70, 60, NEXT, 2, COLON, 71, 61, NEXT, 3, COLON, 72):
        found.propose(live, 8)
        live.append(token)
    draft = found.propose(live, 8)
    assert draft.tokens == (62, NEXT, 4, COLON)
    kinds = [Evidence.TOKEN, Evidence.CORRECTED, Evidence.NAMED, Evidence.NAMED]
    assert draft.rests_on(8) == kinds
    assert found.propose(live, 3).tokens == (62, NEXT, 4)


def test_a_number_stands_in_no_quotation_marks() -> None:
    """What is behind a name is what was there the last time, if it has come before; else what is usual."""
    habits, bare = Habits(), 910
    habits.behind.add(bare)
    record(habits, LIST, [OPEN, 1, COLON, 70, NEXT, 2, COLON, 71, NEXT, 3, bare, 72, NEXT, 4, COLON])
    found = record(habits, LIST, fields(1, 70, 2, 71))
    assert found.following(NEXT, 71, 0) == (3, bare)
    assert record(habits, LIST, fields(1, 70)).following(NEXT, 70, 0) == (2, COLON)


def test_what_parts_a_value_from_the_next_name_or_ends_the_record() -> None:
    """It follows from what stands before the value, and from whether there is another name."""
    habits, bare, bare_next, close = Habits(), 910, 911, 912
    habits.behind.add(bare)
    habits.before.add(bare_next)
    start = [OPEN, 1, COLON, 70, NEXT, 2, COLON, 71, NEXT, 3]
    record(habits, LIST, [*start, COLON, 72, NEXT, 4, COLON])
    record(habits, LIST, [*start, bare, 72, bare_next, 4, COLON])
    habits.note_instead(NEXT, close)
    between = record(habits, LIST, [*start, bare])
    assert between.corrected(NEXT) == bare_next
    assert between.corrected(close) == bare_next
    last = record(habits, LIST, [*start, COLON, 72, NEXT, 4, COLON])
    assert last.corrected(NEXT) == close
    assert last.corrected(COLON) is None, "it is a value that is copied, and no name"
    assert last.corrected(60) == 60


def test_another_tenants_records_are_not_felt() -> None:
    """What one namespace has learnt is not guessed by in another; and it is gone with the outputs that are."""
    planner = DraftPlanner(StepCosts((1.0, 1.08, 1.18, 1.38, 1.9)), 7)

    def guessed(key: int, namespace: str) -> tuple[int, ...]:
        """Behind the first name of a record, whose list goes on with a comma."""
        live = [*LIST, OPEN, 1]
        spec = RequestSpec(key, tuple(LIST), SamplingParams(), 10_000)
        return planner.plan([Candidate(key, spec, live, (namespace,), 7)], 1, 1)[key]

    live = [*LIST, OPEN]
    for token in fields(1, 70, 2, 71)[1:]:
        live.append(token)
        planner.plan([Candidate(0, RequestSpec(0, tuple(LIST), SamplingParams(), 10_000), live, ("a",), 7)], 1, 1)
    assert guessed(1, "b")[0] == COMMA
    assert guessed(2, "a") == (COLON,)
    planner.clear()
    assert guessed(3, "a")[0] == COMMA


def test_sums_are_those_of_their_counts() -> None:
    """What is kept up to date change by change, beside what a look at everything finds."""
    rng = random.Random(1)
    habits, counts = Habits(), Counts()
    before, behind = habits.before, habits.behind
    for _ in range(2000):
        rng.choice((before, behind)).add(rng.randrange(12), rng.choice((1, 1, -1)))
        assert behind.usual == max(behind, key=behind.__getitem__, default=None)
        assert set(habits.begins) == {token for token in range(12) if before[token] > behind[token]}
        assert set(habits.ends) == {token for token in range(12) if behind[token] > before[token]}
    for _ in range(2000):
        guess = rng.randrange(200), rng.randrange(3)
        counts.add(guess, rng.choice((guess[0], 1000)))
        assert set(counts.doubted) == {token for (token, _), (more, _) in counts._counts.items() if more < 0}


def test_what_a_token_of_a_draft_rests_on() -> None:
    joints = ((3, Evidence.NAMED), (5, Evidence.TOKEN))
    for draft in (Draft(tuple(range(9)), Evidence.SPLIT_TOKEN, joints=joints), Draft((1, 2, 3, 4), Evidence.ALIKE)):
        found = draft.rests_on(9)
        assert [draft.rests_at(place) for place in range(len(draft.tokens))] == found


def test_what_is_learnt_is_bounded() -> None:
    counts, habits = Counts(), Habits()
    for token in range(5000):
        counts.add((token, 0), token + 1)
        habits.behind.add(token)
    assert len(counts._counts) <= 256
    assert len(counts.doubted) <= 256
    assert len(habits.behind._counts) <= 8
    assert counts.of((4999, 0)) == (-1, 5000)
