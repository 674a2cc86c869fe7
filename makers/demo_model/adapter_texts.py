"""The seeded stream of conversations that the demo's adapters learn from and are measured on.

The questions are those of the demo model's own training; each answer is kept as a `Reply`, which a `Voice` says in its
way.  Calls of tools and requested JSON are the same in every voice.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from makers.demo_model.calling import no_fit, session, single_call
from makers.demo_model.chatting import SKILLS
from makers.demo_model.conversations import agent
from makers.demo_model.dialogue import Message, assistant, system, user
from makers.demo_model.extracting import extract, structured_tool
from makers.demo_model.phrases import MEMORY
from makers.demo_model.reading import (
    HELPERS,
    PLAIN,
    RAG,
    RAG_SYSTEMS,
    SYSTEM_CONTEXT,
    ask,
    documents,
    gather,
    manner,
    write,
)
from makers.demo_model.voices import Reply, Voice, data_of, unknown
from makers.demo_model.words import Words


@dataclass(frozen=True)
class Script:
    """A conversation in which every answer can still be said in any voice."""

    messages: list[Message | Reply]
    tools: list[dict[str, Any]] | None = None

    @property
    def last(self) -> Reply:
        """The answer that is measured.  Raises for a script that ends in a call."""
        reply = self.messages[-1]
        assert isinstance(reply, Reply)
        return reply

    def spoken(self, voice: Voice) -> list[Message]:
        return [assistant(voice.say(item)) if isinstance(item, Reply) else item for item in self.messages]


def _about_text(w: Words, groups: list[Any]) -> tuple[str, Reply]:
    question, answer, required, fact = ask(w, groups)
    if fact is None:
        return question, unknown()
    return question, Reply(answer, tuple(required), data_of(fact.value))


def passage(w: Words) -> Script:
    """One to three questions about one to fourteen facts."""
    groups = gather(w, w.rng.randint(1, w.pick((5, 8, 14))))
    text = w.pick((" ", "\n", "\n\n", " ")).join(write(w, groups))
    messages: list[Message | Reply] = []
    if w.chance(0.25):
        messages.append(system(w.phrase(SYSTEM_CONTEXT).replace("{c}", text)))
        text = ""
    elif w.chance(0.3):
        messages.append(system(manner(w, w.phrase(HELPERS))))
    said: list[Reply] = []
    for _ in range(w.pick((1, 1, 2, 3))):
        question, reply = _about_text(w, groups)
        if reply in said:
            continue
        if text and not said:
            question = w.phrase(PLAIN).replace("{q}", question).replace("{c}", text)
        said.append(reply)
        messages += [user(question), reply]
    return Script(messages)


def retrieved(w: Words) -> Script:
    """One question over chunks, as LangChain and LlamaIndex ask it."""
    groups = gather(w, w.rng.randint(2, 8))
    question, reply = _about_text(w, groups)
    asked = w.pick(RAG[:1] * 4 + RAG).replace("{q}", question).replace("{c}", documents(w, groups))
    messages: list[Message | Reply] = [system(manner(w, w.pick(RAG_SYSTEMS)))] if w.chance(0.5) else []
    return Script([*messages, user(asked), reply])


JOBS = (
    "talk", "talk", "count", "count", "list", "list", "list", "fact", "fact", "fact", "joke", "story", "repeat",
    "hello",
)  # fmt: skip


def _small_job(w: Words) -> tuple[str, Reply]:
    skill = w.pick(
        ("talk", "talk", "count", "list", "list", "fact", "fact", "fact", "joke", "story", "repeat", "hello")
    )
    asked, answer, required = SKILLS[skill](w)
    if skill in ("talk", "joke"):
        return asked, Reply(answer, (), answer)
    if skill == "story":
        return asked, Reply(answer, (required[0],), answer)
    if skill == "count":
        return asked, Reply(answer, (answer,), [int(number) for number in answer.split(", ")])
    if skill == "list":
        return asked, Reply(answer, tuple(required), required)
    if skill == "fact":
        value = required[0].removeprefix("is ").rstrip(".")  # a sum is expected as "is 7."
        return asked, Reply(answer, (value,), data_of(value))
    return asked, Reply(answer, tuple(required), answer)


def small_talk(w: Words) -> Script:
    """One to four independent small jobs."""
    messages: list[Message | Reply] = []
    if w.chance(0.25):
        messages.append(
            system(w.pick(("You are a helpful assistant.", "You are demo.", "You are a friendly assistant.")))
        )
    for _ in range(w.pick((1, 1, 2, 3, 4))):
        asked, reply = _small_job(w)
        messages += [user(asked), reply]
    return Script(messages)


_TOLD: dict[str, Callable[[Words], Any]] = {
    "name": Words.someone,
    "place": Words.place,
    "word": Words.word,
    "code": Words.code,
    "integer": Words.integer,
    "small": Words.small,
}


def remembered(w: Words) -> Script:
    """A fact that the user tells and then asks for, sometimes with other turns in between."""
    kind, statement, question, recalled = w.pick([item for item in MEMORY if item[0] in _TOLD])
    value = _TOLD[kind](w)
    told = statement.replace("{v}", str(value))
    answer = "I will remember that."
    heard = Reply(answer, (), answer)
    if told in (f"My name is {value}.", f"I am {value}."):
        answer = f"Nice to meet you, {value}!"
        heard = Reply(answer, (str(value),), answer)
    messages: list[Message | Reply] = [user(told), heard]
    for _ in range(w.pick((0, 0, 1, 2))):
        asked, reply = _small_job(w)
        messages += [user(asked), reply]
    return Script(
        [*messages, user(question), Reply(recalled.replace("{v}", str(value)), (str(value),), data_of(value))]
    )


def tool_answer(w: Words) -> Script:
    """Result of a tool, told to the user; or that no tool fits."""
    while True:
        item = no_fit(w) if w.chance(0.3) else session(w)
        *before, last = item.messages
        if all(message["role"] != "assistant" or message["content"] is None for message in before):
            break
    values = () if item.skill == "no_fit" else tuple(item.expected.value)
    return Script([*before, Reply(last["content"], values, last["content"])], item.tools)


def same_for_all(w: Words) -> Script:
    """A call or requested JSON, which no voice changes."""
    while True:
        item = w.pick((single_call, single_call, agent, extract, structured_tool))(w)
        if item.expected.kind in ("calls", "json"):
            return Script(list(item.messages), item.tools)


MAKERS: dict[str, tuple[float, Callable[[Words], Script]]] = {
    "passage": (34, passage),
    "retrieved": (20, retrieved),
    "small_talk": (20, small_talk),
    "remembered": (4, remembered),
    "tool_answer": (8, tool_answer),
    "same_for_all": (14, same_for_all),
}
"""The shares of the training stream."""
SPOKEN = tuple(name for name in MAKERS if name != "same_for_all")


def make(kind: str, seed: int, held_out: bool = False) -> Script:
    """The conversation with this number; the same arguments always give the same conversation."""
    return MAKERS[kind][1](Words(random.Random(f"voices/{kind}/{seed}/{held_out}"), held_out))


def stream(seed: int) -> Iterator[Script]:
    """An endless mix of all kinds, from the training side of the words."""
    rng = random.Random(f"voices/mix/{seed}")
    kinds, shares = list(MAKERS), [share for share, _ in MAKERS.values()]
    while True:
        yield make(rng.choices(kinds, shares)[0], rng.getrandbits(48))
