"""What is guessed by looking back, and what it rests on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from asyncengine import SamplingParams
from asyncengine.request_spec import RequestSpec
from asyncengine.speculation import DraftPlanner
from asyncengine.speculation.costs import StepCosts
from asyncengine.speculation.drafter import LookupDrafter
from asyncengine.speculation.evidence import Evidence
from asyncengine.speculation.lookup import Draft
from asyncengine.speculation.planner import Candidate
from asyncengine.speculation.store import BYTES_PER_TOKEN, OutputStore

NAMESPACE = ("a",)
COMMA, COLON, END = 900, 901, 902


def drafter(
    prompt: Sequence[int], live: list[int], store: OutputStore | None = None, prediction: Sequence[int] | None = None
) -> LookupDrafter:
    spec = RequestSpec(0, tuple(prompt), SamplingParams(), 10_000)
    if prediction is not None:
        spec = dataclasses.replace(spec, options=dataclasses.replace(spec.options, prediction=tuple(prediction)))
    return LookupDrafter(spec, live, NAMESPACE, store)


def guess(prompt: Sequence[int], output: Sequence[int], store: OutputStore | None = None) -> Draft:
    live = [*prompt, *output]
    return drafter(prompt, live, store).propose(live, 4)


def test_one_token_is_enough() -> None:
    assert guess([1, 2, 3, 4, 5, 6], [90, 3]) == Draft((4, 5, 6, 4), Evidence.TOKEN)  # a text that ends repeats


def test_the_longest_agreement_is_followed() -> None:
    assert guess([1, 2, 3, 4, 9, 2, 3, 5, 8], [1, 2, 3]).tokens[0] == 4
    assert guess([9, 2, 3, 5, 1, 2, 3, 4, 8], [9, 2, 3]).tokens[0] == 5


def test_what_it_rests_on() -> None:
    assert guess([7, 1, 5, 7, 2, 5, 7, 3], [90, 7]).evidence is Evidence.SPLIT_TOKEN
    assert guess([7, 1, 5, 7, 1, 6], [90, 7]).evidence is Evidence.ALIKE_TOKEN
    assert guess([4, 7, 1, 5, 4, 7, 1, 6], [90, 4, 7]).evidence is Evidence.ALIKE
    assert guess([4, 7, 1, 5, 4, 7, 2, 6], [90, 4, 7]).evidence is Evidence.SPLIT
    assert guess([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4]).evidence is Evidence.FEW
    assert guess([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6]).evidence is Evidence.LONG
    assert not guess([1, 2, 3], [90, 91]).tokens


def test_a_list_goes_on_where_it_was_left() -> None:
    """Of all commas in the prompt, the one behind the word that came last."""
    prompt = [1, COMMA, 2, COMMA, 3, COMMA, 4, END]
    live = [*prompt, 80, 2]
    found = drafter(prompt, live)
    assert found.propose(live, 1).tokens == (COMMA,)
    live.append(COMMA)
    assert found.propose(live, 2) == Draft((3, COMMA), Evidence.PAIR)
    live += [81, 82, 3]
    found.propose(live, 1)
    live += [COMMA]
    assert found.propose(live, 1).tokens == (4,)


def test_the_next_of_a_list_in_another_form() -> None:
    """Behind a value stands a comma as behind the names in the list: it goes on behind the name that was found last."""
    prompt = [1, COMMA, 2, COMMA, 3, COMMA, 4, END]
    live = [*prompt, 80, 2]
    found = drafter(prompt, live)
    found.propose(live, 1)
    live += [81, 82, COMMA]
    assert found.propose(live, 1) == Draft((3,), Evidence.NEXT)


def test_a_copy_in_another_form_is_mended() -> None:
    """Names in a prompt are followed by commas, in the answer by colons."""
    prompt = [1, 11, COMMA, 2, 12, COMMA, 3, 13, COMMA, 4, END]
    live = [*prompt, 80, 1]
    found = drafter(prompt, live)
    assert found.propose(live, 3).tokens == (11, COMMA, 2)
    live += [11, COLON, 70, 2]
    assert found.propose(live, 3) == Draft((12, COLON), Evidence.TOKEN, joints=((1, Evidence.CORRECTED),))
    live += [12, COLON, 71, 3, 13]
    assert found.propose(live, 3) == Draft((COLON,), Evidence.CORRECTED)
    # and it may change its mind
    live += [COMMA, 72, 1, 11]
    for _ in range(3):
        found.propose(live, 3)
        live += [COMMA, 72, 1, 11]
    assert found.propose(live, 1).tokens == (COMMA,)


def test_outputs_of_others() -> None:
    store = OutputStore(100_000)
    for last in (30, 30, 31):
        store.add(NAMESPACE, [5, 6, 7, last])
    split = ((2, Evidence.THEIR_SPLIT),)
    assert guess([1, 2], [90, 5], store) == Draft((6, 7, 31), Evidence.THEIR_ALIKE, joints=split)
    assert guess([1, 2], [5, 6], store).evidence is Evidence.THEIR_ALIKE
    assert guess([1, 2], [6, 7], store) == Draft((31,), Evidence.THEIR_SPLIT)
    assert not drafter([1], live := [1, 5, 6], OutputStore(100_000)).propose(live, 4).tokens


def test_outputs_of_others_are_followed_from_one_to_the_next() -> None:
    """Each token as it came the last time behind the two before it: the frame of a record, whatever its values were."""
    store = OutputStore(100_000)
    store.add(NAMESPACE, [5, 6, 40, 7, 8, 41])
    store.add(NAMESPACE, [90, 6, 50, 7, 91, 51])
    found = guess([1, 2], [5, 6], store)
    assert found == Draft((40, 7, 8), Evidence.THEIR_PAIR), "that all stand becomes unlikely"
    store.add(NAMESPACE, [80, 40, 7, 9, 9])
    joints = ((2, Evidence.THEIR_SPLIT),)
    assert guess([1, 2], [5, 6], store) == Draft((40, 7, 9), Evidence.THEIR_PAIR, joints=joints), (
        "the latest behind both"
    )
    store = OutputStore(100_000)
    store.add(NAMESPACE, [*range(20, 30)])
    joints = ((1, Evidence.THEIR_LONG),)
    assert guess([1, 2], [*range(20, 25)], store) == Draft((25, 26, 27, 28), Evidence.THEIR_PAIR, joints=joints)


def test_an_output_that_comes_again_is_followed_to_its_end() -> None:
    """Where two tokens of it stand several times in it, the place that was right until now goes on."""
    store = OutputStore(100_000)
    again = [5, 6, 40, 41, 42, 43, 5, 6, 50, 51, 52, 53, 5, 6, 60, 61]
    store.add(NAMESPACE, again)
    live = [1, 2, 5, 6]
    found = drafter([1, 2], live, store)
    assert found.propose(live, 2).tokens == (60, 61), "where they stood last"
    for place in range(2, len(again) - 2):
        live.append(again[place])
        draft = found.propose(live, 3)
        if place >= 8:
            assert draft.tokens == tuple(again[place + 1 : place + 4]), place


def test_a_token_of_the_output_alone_promises_little() -> None:
    assert guess([1, 2, 3], [70, 80, 71, 82, 70]).evidence is Evidence.WRITTEN
    assert guess([1, 70, 3], [80, 71, 82, 70]).evidence is Evidence.TOKEN


def test_places_that_part() -> None:
    """They go on alike for two tokens, and the third is a matter of chance."""
    prompt = [4, 7, 1, 2, 5, 6, 4, 7, 1, 2, 8, 9]
    assert guess(prompt, [90, 4, 7]) == Draft((1, 2, 8, 9), Evidence.ALIKE, joints=((2, Evidence.PARTED),))
    live = [*prompt, 90, 4, 7]
    found = drafter(prompt, live)
    assert found.propose(live, 4).rests_on(4)[:3] == [Evidence.ALIKE, Evidence.ALIKE, Evidence.PARTED]


def test_nothing_is_guessed_beyond_the_end() -> None:
    """What would end a request is sampled behind the guesses before it, and nothing follows."""
    planner = DraftPlanner(StepCosts((1.0, 1.08, 1.18, 1.38, 1.9)), 15)
    for stops, expected in (((), (4, 5, 6, 7)), ((6,), (4, 5)), ((99, 6, 5), (4,)), ((4,), ())):
        spec = RequestSpec(len(stops), (1, 2, 3, 4, 5, 6, 7), SamplingParams(), 10_000, stop_ids=stops)
        live = [*spec.prompt, 1, 2, 3]
        planned = planner.plan([Candidate(spec.ticket, spec, live, NAMESPACE, 4)], 1, 1)
        assert planned.get(spec.ticket, ()) == expected
        planner.forget(spec.ticket, NAMESPACE, ())


def test_what_is_dropped_is_gone() -> None:
    store = OutputStore(BYTES_PER_TOKEN * 8)
    store.add(NAMESPACE, [1, 2, 3, 4])
    store.add(NAMESPACE, [1, 2, 5, 6])
    assert guess([80], [1, 2], store).tokens[0] == 5
    store.add(NAMESPACE, [7, 8, 9, 10, 11])  # the first goes, and then the second
    assert not guess([80], [1, 2], store).tokens
    assert not guess([80], [90, 3], store).tokens
    assert guess([80], [90, 8], store).tokens[0] == 9
    assert store.num_tokens == 5
