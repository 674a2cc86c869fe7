"""Things with named fields, and sentences and questions about them.

Passages, extraction texts, tool schemas and remembered facts are all made from these tables, so that one skill
helps the others.  A predicate completes the sentence "<subject> <predicate>."; the first one is also the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from makers.demo_model import words as lists
from makers.demo_model.words import Words

Draw = Callable[[Words], Any]


@dataclass(frozen=True)
class Field:
    """One property: JSON key and type, how to draw it, how to say it and how to ask for it."""

    key: str
    kind: str
    draw: Draw
    predicates: tuple[str, ...]
    questions: tuple[str, ...]
    negative: tuple[str, ...] = ()


@dataclass(frozen=True)
class Entity:
    """A kind of thing; ``subject`` draws what it is called and ``label`` is the JSON key of that name."""

    kind: str
    label: str
    subject: Draw
    pronouns: tuple[str, ...]
    fields: tuple[Field, ...]


@dataclass(frozen=True)
class Fact:
    """One stated property of one thing."""

    subject: str
    field: Field
    value: Any
    entity: Entity

    def predicate(self, w: Words) -> str:
        options = self.field.negative if self.value is False else self.field.predicates
        return fill(w.pick(options), self)

    def sentence(self, w: Words) -> str:
        return f"{self.subject} {self.predicate(w)}."

    def question(self, w: Words) -> str:
        return fill(w.phrase(self.field.questions), self)

    def answer(self) -> str:
        """The full-sentence answer."""
        options = self.field.negative if self.value is False else self.field.predicates
        opening = "" if self.field.kind != "boolean" else "Yes, " if self.value else "No, "
        return f"{opening}{self.subject} {fill(options[0], self)}."

    def short(self) -> str:
        """The bare value."""
        return ("Yes" if self.value else "No") if self.field.kind == "boolean" else spoken(self.value)


def spoken(value: Any) -> str:
    """A value as it stands in a sentence."""
    if isinstance(value, list):
        items = [str(item) for item in value]
        return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"
    return str(value)


def fill(template: str, fact: Fact) -> str:
    return template.replace("{n}", fact.subject).replace("{v}", spoken(fact.value))


def generic(w: Words) -> Fact:
    """A fact about an attribute that no table knows: "The <attribute> of <thing> is <value>."."""
    key = w.pick(lists.ATTRIBUTES) if w.chance(0.6) else w.mine(lambda: w.syllables(1, 2))
    draws: tuple[Draw, ...] = (
        Words.word,
        Words.name,
        Words.place,
        Words.integer,
        Words.code,
        Words.foreign,
        Words.text,
    )
    subject = w.pick(
        (
            f"the {w.pick(lists.THINGS)}",
            f"the {w.pick(lists.ADJECTIVES)} {w.pick(lists.THINGS)}",
            w.name(),
            f"the {w.word()}",
            w.foreign(),
        )
    )
    field = Field(
        key,
        "string",
        w.pick(draws),
        (f"has the {key} {{v}}",),
        (
            f"What is the {key} of {{n}}?",
            f"What {key} does {{n}} have?",
            f"Which {key} does {{n}} have?",
            f"Tell me the {key} of {{n}}.",
            f"What is {{n}}'s {key}?",
        ),
    )
    return Fact(subject, field, field.draw(w), Entity("thing", "name", Words.name, ("It",), (field,)))


def describe(w: Words, entity: Entity, count: int, subject: str | None = None) -> list[Fact]:
    """Up to ``count`` different facts about one new thing."""
    subject = subject or str(entity.subject(w))
    fields = w.rng.sample(entity.fields, min(count, len(entity.fields)))
    return [Fact(subject, field, field.draw(w), entity) for field in fields]


def upper(text: str) -> str:
    """The text with a capital first letter, as at the start of a sentence."""
    return text[:1].upper() + text[1:]


def prose(w: Words, facts: list[Fact]) -> str:
    """The facts as running text: separate sentences, pronouns, or predicates joined by commas and "and"."""
    sentences: list[str] = []
    index = 0
    while index < len(facts):
        fact = facts[index]
        group = [fact]
        while index + len(group) < len(facts) and len(group) < 3 and facts[index + len(group)].subject == fact.subject:
            if not w.chance(0.4):
                break
            group.append(facts[index + len(group)])
        repeated = index > 0 and facts[index - 1].subject == fact.subject
        subject = w.pick(fact.entity.pronouns) if repeated and w.chance(0.5) else fact.subject
        said = [item.predicate(w) for item in group]
        joined = said[0] if len(said) == 1 else f"{', '.join(said[:-1])} and {said[-1]}"
        sentences.append(upper(f"{subject} {joined}."))
        index += len(group)
    return " ".join(sentences)
