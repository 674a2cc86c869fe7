"""Situations (somebody does something to a thing), told in one choice of words and asked about in another."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from makers.demo_embedder.lexicon import DOMAINS, MOODS, PEOPLE, QUALITIES, SCENES, TIMES, Domain, Meaning
from makers.demo_embedder.verbs import gerund, participle, past, upon
from makers.demo_model import words as lists
from makers.demo_model.facts import upper
from makers.demo_model.words import Words, in_held_out

HEADINGS = (
    "How to {do}: a short guide.", "{doing} takes some practice.", "This page is about {doing}.", "Notes on {doing}.",
    "Anybody can learn to {do}.", "You want to {do}?", "A few words on {doing}.", "The {thing} has to be {done}.",
    "We show how the {thing} is {done}.", "Before you {do}, read this.", "What to know when you {do}.",
    "Here you learn to {do}.", "The {thing} can be {done} by anybody.", "Instructions for {doing}.",
)  # fmt: skip
FILLERS = (
    "You need about {n} minutes.", "It takes a {tool} and some patience.", "A {person} can help you.", "Do it {time}.",
    "Ask a {person} before you begin.", "It costs about {n} euros.", "A {tool} and a {tool2} are useful here.",
    "Start with the {tool}.", "Take your time, and be careful.", "The work is {quality}.",
    "It can be done {time}.", "See also chapter {n}.", "A {quality} {tool} is all that it takes.",
    "Read the rules first.", "This was written by {name}.", "Call {name} if anything goes wrong.",
)  # fmt: skip
EVENTS = (
    "{who} {did}{scene}.", "{scene_first}{who} {did}.", "The {thing} was {done} by {who}{scene}.",
    "{who} wanted to {do}{scene}.", "They saw how {who} {did}{scene}.", "{who} has {done_it}{scene}.",
)  # fmt: skip
EVENT_FILLERS = (
    "Nobody had seen it coming.", "It was {time}.", "{name} was there as well.", "The {tool} was {quality}.",
    "A {person} looked on.", "Afterwards there was {food}.", "It took {n} minutes.", "The day was {weather}.",
    "Later {name} told everybody about it.", "A {quality} {tool} lay on the table.",
)  # fmt: skip
QUESTIONS = (
    "How do I {do}?", "How can I {do}?", "What is the best way to {do}?", "I want to {do}.", "tips for {doing}",
    "{doing}", "advice on {doing}", "Is it hard to {do}?", "help with {doing}", "How is a {thing} {done}?", "{do}",
    "how to {do}", "What should I know before I {do}?", "Can you tell me how to {do}?",
)  # fmt: skip
ABOUT_EVENTS = (
    "Who {did}{scene}?", "{who} {did}{scene}", "Did {who} {do}{scene}?", "Was the {thing} {done} by {who}?",
    "the {thing} {done} by {who}", "The {thing} was {done} by {who}.", "{who} {did}.",
    "When did {who} {do}?",
)  # fmt: skip


@dataclass(frozen=True)
class Situation:
    """Subject of a text, in meanings. Without a person: a matter of general interest; with one: an event."""

    domain: Domain
    deed: Meaning
    thing: Meaning
    quality: Meaning | None = None
    person: Meaning | None = None
    mood: Meaning | None = None
    scene: Meaning | None = None

    @property
    def key(self) -> str:
        parts = (self.deed, self.thing, self.quality, self.person, self.mood, self.scene)
        return "/".join("" if part is None else part.key for part in parts)

    def belongs_to(self, w: Words) -> bool:
        """The pair of verb and object decides on the side of the split: its words are known, their meeting is new."""
        return in_held_out(f"{self.deed.key} {self.thing.key}") == w.held_out


def situation(w: Words) -> Situation:
    """One of this side of the split."""
    event = w.chance(0.35)
    while True:
        domain = w.pick(DOMAINS)
        drawn = Situation(
            domain,
            w.pick(domain.deeds),
            w.pick(domain.things),
            w.pick(QUALITIES) if w.chance(0.3) else None,
            w.pick(PEOPLE) if event else None,
            w.pick(MOODS) if event and w.chance(0.3) else None,
            w.pick(SCENES) if event and w.chance(0.7) else None,
        )
        if drawn.belongs_to(w):
            return drawn


def neighbor(w: Words, of: Situation) -> Situation:
    """The same but for one meaning: what somebody who counts common words would take for it."""
    changes: list[Callable[[], Situation]] = [
        lambda: dataclasses.replace(of, deed=w.pick(of.domain.deeds)),
        lambda: dataclasses.replace(of, thing=w.pick(of.domain.things)),
    ]
    if of.person is not None:
        changes.append(lambda: dataclasses.replace(of, person=w.pick(PEOPLE)))
    if of.quality is not None:
        changes.append(lambda: dataclasses.replace(of, quality=w.pick(QUALITIES)))
    for _ in range(100):
        other = w.pick(changes)()
        if other.key != of.key and other.belongs_to(w):
            return other
    return situation(w)


class Telling:
    """One choice of words for a situation. With `besides` (another telling's words), other words than those, as far
    as there are others."""

    def __init__(self, w: Words, about: Situation, besides: Mapping[str, str] | None = None) -> None:
        self.w, self.about, self.said = w, about, dict[str, str]()
        self._besides = besides or {}

    def document(self) -> str:
        """A heading or an event, and sentences that could stand anywhere."""
        w = self.w
        event = self.about.person is not None
        sentences = [self.fill(w.pick(EVENTS if event else HEADINGS))]
        for _ in range(w.rng.randint(0, 3)):
            place = w.rng.randint(0 if event else 1, len(sentences))
            sentences.insert(place, self.fill(w.pick(EVENT_FILLERS if event else FILLERS)))
        return " ".join(sentences)

    def query(self) -> str:
        text = self.fill(self.w.phrase(QUESTIONS if self.about.person is None else ABOUT_EVENTS))
        return text if self.w.chance(0.8) else text.lower().rstrip("?.")

    def fill(self, template: str) -> str:
        """The template with this situation's words; what is not of the situation is drawn."""
        w, of = self.w, self.about
        thing = self._thing()
        deed = self._word(of.deed)
        with_article = f"{w.pick(('the', 'the', 'a', 'my') if of.person is None else ('the', 'the', 'a'))} {thing}"
        scene = "" if of.scene is None or w.chance(0.2) else self._word(of.scene)
        text = template.format(
            do=upon(deed, with_article),
            doing=upon(gerund(deed), with_article),
            did=upon(past(deed), with_article),
            done_it=upon(participle(deed, keep=True), with_article),
            done=participle(deed),
            thing=thing,
            who=self._person(),
            scene=f" {scene}" if scene else "",
            scene_first=f"{upper(scene)} " if scene else "",
            **self._strangers(),
        )
        return upper(text) if w.chance(0.95) else text

    def _thing(self) -> str:
        name = self._word(self.about.thing)
        return name if self.about.quality is None else f"{self._word(self.about.quality)} {name}"

    def _person(self) -> str:
        of = self.about
        if of.person is None:
            return ""
        name = self._word(of.person)
        if of.mood is not None:
            name = f"{self._word(of.mood)} {name}"
        return f"{self.w.pick(('the', 'a'))} {name}"

    def _word(self, meaning: Meaning) -> str:
        if meaning.key not in self.said:
            self.said[meaning.key] = meaning.word(self.w.rng, self._besides.get(meaning.key))
        return self.said[meaning.key]

    def _strangers(self) -> dict[str, str]:
        w = self.w
        return {
            "n": str(w.integer(2, 500)),
            "tool": w.pick(lists.THINGS),
            "tool2": w.pick(lists.THINGS),
            "food": w.pick(lists.FOODS),
            "weather": w.pick(lists.WEATHER),
            "name": w.someone(),
            "person": w.pick(PEOPLE).word(w.rng),
            "quality": w.pick(QUALITIES).word(w.rng),
            "time": w.pick(TIMES).word(w.rng),
        }
