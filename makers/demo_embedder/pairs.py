"""Pairs of a query and the text that answers it, from a seeded generator.

They come in groups whose members are easily taken for each other: two passages about one thing, situations that
differ in one meaning. All pairs of a batch are each other's wrong answers, so these are what there is to learn.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from makers.demo_embedder.reworded import Situation, Telling, neighbor, situation
from makers.demo_model import facts as f
from makers.demo_model.entities import BOOK, COMPANY, ENTITIES, EVENT, MACHINE, PERSON, PRODUCT
from makers.demo_model.words import Words


@dataclass(frozen=True)
class Pair:
    """`key` is the same for pairs whose texts would answer each other's queries."""

    query: str
    text: str
    key: str
    symmetric: bool = False
    """Two texts that say the same: neither is a question about the other."""


Maker = Callable[[Words], list[Pair]]

MENTIONS = {
    "town": ((PERSON, "city"), (EVENT, "place"), (COMPANY, "headquarters"), (MACHINE, "region")),
    "person": ((BOOK, "author"), (EVENT, "host"), (COMPANY, "ceo"), (PRODUCT, "owner"), (MACHINE, "admin")),
    "company": ((PERSON, "employer"), (PRODUCT, "maker")),
}
"""Sentences that name a thing in texts about other things."""


def fact_pairs(w: Words) -> list[Pair]:
    """Two passages about one thing, perhaps one about another that mentions it, and a question for each."""
    entity = w.pick(ENTITIES)
    known = f.describe(w, entity, w.rng.randint(2, 6))
    half = len(known) // 2 if w.chance(0.7) else len(known)
    parts = [part for part in (known[:half], known[half:]) if part]
    if entity.kind in MENTIONS and w.chance(0.3):
        parts.append(_mention(w, w.pick(MENTIONS[entity.kind]), known[0].subject))
    return [_about(w, part) for part in parts]


def _mention(w: Words, where: tuple[f.Entity, str], name: str) -> list[f.Fact]:
    entity, key = where
    drawn = f.describe(w, entity, w.rng.randint(1, 3))
    field = next(field for field in entity.fields if field.key == key)
    others = [fact for fact in drawn if fact.field.key != key]
    return [dataclasses.replace(drawn[0], field=field, value=name), *others]


def _about(w: Words, known: list[f.Fact]) -> Pair:
    asked = w.pick(known)
    draw = w.rng.random()
    if draw < 0.75:
        query = asked.question(w)
    elif draw < 0.9:
        query = f"{asked.subject} {asked.field.key.replace('_', ' ')}"
    else:
        query = asked.sentence(w)
    shown = list(known)
    w.rng.shuffle(shown)
    return Pair(query, f.prose(w, shown), f"{asked.subject} {asked.field.key}")


def generic(w: Words) -> f.Fact:
    """An attribute that no table knows, in letters that the tokenizer knows."""
    while True:
        fact = f.generic(w)
        if f"{fact.subject} {fact.field.key} {fact.value}".isascii():
            return fact


def other_pairs(w: Words) -> list[Pair]:
    """Attributes of things and names: two of one thing, two things of one attribute."""
    first, second, third = generic(w), generic(w), generic(w)
    second = dataclasses.replace(second, subject=first.subject)
    if first.field.key != third.field.key:
        third = dataclasses.replace(third, field=first.field)
    known = {f"{fact.subject} {fact.field.key}": fact for fact in (first, second, third)}
    return [Pair(fact.question(w), _among(w, fact), key) for key, fact in known.items()]


def _among(w: Words, fact: f.Fact) -> str:
    """The fact, perhaps with sentences about other things around it."""
    sentences = [generic(w).sentence(w) for _ in range(w.rng.choice((0, 0, 1, 2)))]
    plain = f"The {fact.field.key} of {fact.subject} is {f.spoken(fact.value)}."
    said = plain if w.chance(0.5) else fact.sentence(w)
    sentences.insert(w.rng.randint(0, len(sentences)), said)
    return f.upper(" ".join(sentences))


def keyword_pairs(w: Words) -> list[Pair]:
    """A text, and some of its rare words as somebody would type them into a search box."""
    facts = [generic(w) for _ in range(w.rng.randint(1, 3))]
    entity = w.pick(ENTITIES)
    facts += f.describe(w, entity, w.rng.randint(1, 3))
    text = f.prose(w, facts)
    rare = [fact.subject for fact in facts] + [f.spoken(fact.value) for fact in facts]
    count = min(len(rare), w.rng.choice((1, 2, 2, 3)))
    query = " ".join(w.rng.sample(rare, count))
    return [Pair(query if w.chance(0.5) else query.lower(), text, text)]


def reworded_pairs(w: Words) -> list[Pair]:
    """A situation and neighbors of it, each told in one choice of words and asked about in another."""
    about = situation(w)
    found = {about.key: about}
    for _ in range(3):
        other = neighbor(w, about)
        found.setdefault(other.key, other)
    return [_told(w, each) for each in found.values()]


def _told(w: Words, about: Situation) -> Pair:
    telling = Telling(w, about)
    text = telling.document()
    asking = Telling(w, about, besides=telling.said if w.held_out or w.chance(0.85) else None)
    if w.held_out or w.chance(0.8):
        return Pair(asking.query(), text, about.key)
    return Pair(asking.document(), text, about.key, symmetric=True)


MAKERS: dict[str, tuple[float, Maker]] = {
    "facts": (0.2, fact_pairs),
    "others": (0.2, other_pairs),
    "keywords": (0.45, keyword_pairs),
    "reworded": (0.15, reworded_pairs),
}
"""Kinds of pairs to learn, and their shares of the groups; groups of keywords are the smallest, one pair each."""


def stream(seed: int | str, held_out: bool = False, skill: str | None = None) -> Iterator[list[Pair]]:
    """Groups without end, the same for the same seed; of one skill, or mixed."""
    rng = random.Random(f"pairs/{seed}")
    w = Words(rng, held_out)
    names = list(MAKERS)
    shares = [share for share, _ in MAKERS.values()]
    while True:
        name = skill or rng.choices(names, shares)[0]
        yield MAKERS[name][1](w)


def batch(groups: Iterator[list[Pair]], count: int) -> list[Pair]:
    """`count` pairs, no two of which would answer each other."""
    found: dict[str, Pair] = {}
    while len(found) < count:
        for pair in next(groups):
            found.setdefault(pair.key, pair)
    return list(found.values())[:count]
