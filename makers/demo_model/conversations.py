"""The seeded stream of training and held-out conversations."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from makers.demo_model.calling import no_fit, retrieval, retry, session, single_call, two_calls, with_idle_tools
from makers.demo_model.chatting import SKILLS, chat, memory, persona
from makers.demo_model.dialogue import Conversation, Expected, assistant, user
from makers.demo_model.extracting import extract, structured_tool
from makers.demo_model.reading import passage_qa, rag_qa
from makers.demo_model.words import Words

Maker = Callable[[Words], Conversation]


def no_call(w: Words) -> Conversation:
    """Tools are offered, yet small talk or a question about a given text is answered in words."""
    if w.chance(0.4):
        return with_idle_tools(w, passage_qa(w))
    skill = w.pick(("talk", "talk", "count", "list", "joke", "story"))
    asked, answer, required = SKILLS[skill](w)
    return with_idle_tools(w, Conversation(skill, [user(asked), assistant(answer)], Expected("text", required)))


def agent(w: Words) -> Conversation:
    """Loops of calls and results: two wishes, a second try, or a search before the answer."""
    draw = w.rng.random()
    return retry(w) if draw < 0.12 else retrieval(w) if draw < 0.4 else two_calls(w)


MAKERS: dict[str, Maker] = {
    "passage": passage_qa,
    "rag": rag_qa,
    "call": single_call,
    "tool_result": session,
    "agent": agent,
    "no_fit": no_fit,
    "no_call": no_call,
    "extract": extract,
    "structured": structured_tool,
    "chat": chat,
    "persona": persona,
    "memory": memory,
}
WEIGHTS = {
    "passage": 36.0,
    "rag": 16.0,
    "call": 20.0,
    "tool_result": 6.0,
    "agent": 9.0,
    "no_fit": 8.0,
    "no_call": 5.0,
    "extract": 17.0,
    "structured": 6.0,
    "chat": 9.0,
    "persona": 5.0,
    "memory": 3.0,
}
"""Shares of the training stream; longer skills get fewer conversations."""


def make(
    skill: str, seed: int, held_out: bool = False, long: bool = False, new_phrasings: bool = False
) -> Conversation:
    """The conversation with this number; the same arguments always give the same conversation."""
    rng = random.Random(f"{skill}/{seed}/{held_out}")
    return MAKERS[skill](Words(rng, held_out, long, new_phrasings))


def stream(
    seed: int, held_out: bool = False, weights: dict[str, float] | None = None, long: float = 0.0
) -> Iterator[Conversation]:
    """An endless mix of all skills; a share ``long`` of it has long passages and many tools."""
    rng = random.Random(f"mix/{seed}/{held_out}")
    shares = weights or WEIGHTS
    names, cumulative, total = list(shares), [], 0.0
    for name in names:
        total += shares[name]
        cumulative.append(total)
    while True:
        skill = rng.choices(names, cum_weights=cumulative)[0]
        yield make(skill, rng.getrandbits(48), held_out, rng.random() < long)
