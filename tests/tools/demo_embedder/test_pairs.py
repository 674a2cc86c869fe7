"""The texts the embedder learns from: forms of verbs, meanings told in other words, and what is kept from training."""

from __future__ import annotations

import itertools
import random

import pytest

from tools.demo_embedder.lexicon import DOMAINS, MOODS, PEOPLE, QUALITIES, SCENES, TIMES
from tools.demo_embedder.pairs import MAKERS, batch, stream
from tools.demo_embedder.reworded import Telling, neighbor, situation
from tools.demo_embedder.verbs import gerund, participle, past, upon
from tools.demo_model.words import Words


@pytest.mark.parametrize(
    ("verb", "doing", "did", "done"),
    [
        ("repair", "repairing", "repaired", "repaired"),
        ("switch off", "switching off", "switched off", "switched off"),
        ("drive", "driving", "drove", "driven"),
        ("swap out", "swapping out", "swapped out", "swapped out"),
        ("try", "trying", "tried", "tried"),
        ("dye", "dyeing", "dyed", "dyed"),
        ("scrub", "scrubbing", "scrubbed", "scrubbed"),
        ("leave ~ standing", "leaving ~ standing", "left ~ standing", "left standing"),
        ("take care of", "taking care of", "took care of", "taken care of"),
    ],
)
def test_forms_of_verbs(verb: str, doing: str, did: str, done: str) -> None:
    assert (gerund(verb), past(verb), participle(verb)) == (doing, did, done)


def test_objects_stand_where_they_belong() -> None:
    assert upon("leave ~ standing", "the car") == "leave the car standing"
    assert upon(participle("put ~ in the oven", keep=True), "a cake") == "put a cake in the oven"
    assert upon(past("fill up"), "my van") == "filled up my van"


def test_a_word_stands_for_one_meaning_where_it_could_be_taken_for_another() -> None:
    """Of one domain's things, of its deeds, and of each list: else a query would have two right answers."""
    lists = [*(d.things for d in DOMAINS), *(d.deeds for d in DOMAINS), PEOPLE, QUALITIES, MOODS, SCENES, TIMES]
    for meanings in lists:
        words = [word for meaning in meanings for word in meaning.words]
        assert len(words) == len(set(words)), [word for word in words if words.count(word) > 1]
        assert all(len(meaning.words) > 1 for meaning in meanings)
        assert all(word for word in words)


def test_the_same_seed_gives_the_same_pairs() -> None:
    first, again, other = (list(itertools.islice(stream(seed), 20)) for seed in (3, 3, 4))
    assert first == again
    assert first != other


def test_what_is_held_out_is_never_trained_on() -> None:
    """Words are the same on both sides; which deed is done to which thing is not."""
    sides = []
    for held_out in (False, True):
        w = Words(random.Random(5), held_out)
        drawn = [situation(w) for _ in range(3000)]
        drawn += [neighbor(w, of) for of in drawn[:500]]
        sides.append({(of.deed.key, of.thing.key) for of in drawn})
    train, test = sides
    assert not train & test
    assert {deed for deed, _ in test} <= {deed for deed, _ in train}


def test_a_second_telling_has_other_words() -> None:
    w = Words(random.Random(1), held_out=True)
    for _ in range(100):
        about = situation(w)
        first = Telling(w, about)
        first.document()
        second = Telling(w, about, besides=first.said)
        second.query()
        shared = [key for key, word in second.said.items() if word == first.said.get(key)]
        assert not shared


@pytest.mark.parametrize("skill", MAKERS)
def test_no_two_pairs_of_a_batch_answer_each_other(skill: str) -> None:
    pairs = batch(stream(9, skill=skill), 64)
    assert len({pair.key for pair in pairs}) == 64
    assert all(pair.query and pair.text for pair in pairs)
    assert not [pair for pair in pairs if "{" in pair.query + pair.text or "~" in pair.query + pair.text]
