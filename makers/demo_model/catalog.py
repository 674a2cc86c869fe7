"""Tools as data, and made-up ones with generic requests.

Each tool knows how to draw its arguments, how a user may ask for it, what it may return and how to report that.
"""

# ruff: noqa: SIM905 - a word list is easier to read and to extend as text

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from makers.demo_model import words as lists
from makers.demo_model.facts import spoken
from makers.demo_model.words import Words

Draw = Callable[[Words], Any]


@dataclass(frozen=True)
class Param:
    """One argument; ``choices`` makes it an enumeration."""

    name: str
    kind: str
    draw: Draw
    about: str = ""
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Tool:
    """A tool as the user sees it; templates name the parameters in braces and the result as ``{r}``."""

    name: str
    about: str
    params: tuple[Param, ...]
    requests: tuple[str, ...]
    returns: Draw
    report: str = "The result is {r}."
    topic: str = ""


def string(w: Words, plain: Draw, foreign: float = 0.2) -> str:
    """A string argument, sometimes outside ASCII so that copying is learnt byte by byte."""
    return w.foreign() if w.chance(foreign) else str(plain(w))


def integer(name: str, about: str = "", draw: Draw = Words.signed) -> Param:
    return Param(name, "integer", draw, about)


def number(w: Words) -> str:
    return str(w.signed())


def done(w: Words) -> str:
    return w.pick(("ok", "done", "success", f"id {w.integer()}", f"{w.code()}"))


_PARAM_NAMES = (
    "name city text query id count x y n value key title amount size path color user item label code limit place "
    "message number word start end left right first second target source owner group"
).split()


def invented(w: Words) -> Tool:
    """A tool nobody has seen: a verb and a noun, with zero to four generic parameters."""
    noun = w.pick(lists.THINGS) if w.chance(0.4) else w.mine(lambda: w.syllables(1, 3))
    verb = w.pick(lists.VERBS)
    name = w.pick((f"{verb}_{noun}", f"{verb}_{noun}", f"{noun}_{verb}", noun, f"{verb}{noun.capitalize()}"))
    names = w.rng.sample(_PARAM_NAMES, w.pick((0, 1, 1, 1, 2, 2, 3, 4)))
    params = tuple(_any_param(w, key if w.chance(0.8) else w.mine(lambda: w.syllables(1, 2))) for key in names)
    style = w.rng.randrange(4)
    pieces = [_piece(w, style, param) for param in params]
    said = ", ".join(pieces) if style >= 2 or len(pieces) > 2 else " and ".join(pieces)
    tool_name = w.chance(0.5)
    if not params:
        requests = (
            f"{verb.capitalize()} the {noun}.",
            f"Please {verb} the {noun}.",
            f"Call {name}.",
            f"Use {name}.",
            f"Can you {verb} the {noun}?",
        )
    elif tool_name:
        requests = (
            f"Call {name} with {said}.",
            f"Use the {name} tool with {said}.",
            f"Run {name} with {said}",
            f"Use {name}: {said}",
            f"Please call the tool {name} with {said}.",
        )
    else:
        requests = (
            f"{verb.capitalize()} the {noun} with {said}.",
            f"Please {verb} the {noun} for {said}.",
            f"{verb.capitalize()} a {noun}: {said}",
            f"Can you {verb} the {noun} with {said}?",
            f"I want to {verb} the {noun} with {said}.",
        )
    about = w.pick(
        (f"{verb.capitalize()} the {noun}.", f"{verb.capitalize()} a {noun}.", f"Tool to {verb} the {noun}.")
    )
    returns: Draw = w.pick((number, done, Words.word, Words.text, Words.foreign, Words.name))
    return Tool(name, about, params, requests, returns, topic=noun)


def _any_param(w: Words, name: str) -> Param:
    kind = w.pick(
        ("integer", "integer", "integer", "string", "string", "string", "string", "number", "boolean", "array")
    )
    if kind == "integer":
        return integer(name)
    if kind == "number":
        return Param(name, "number", Words.decimal)
    if kind == "boolean":
        return Param(name, "boolean", lambda w: w.chance(0.5))
    if kind == "array":
        return Param(name, "array", lambda w: [w.word() for _ in range(w.rng.randint(1, 4))])
    plain: Draw = w.pick((Words.word, Words.name, Words.place, Words.text, Words.code))
    return Param(name, "string", lambda w: string(w, plain, 0.35))


def _piece(w: Words, style: int, param: Param) -> str:
    quoted = param.kind == "string" and w.chance(0.3)
    value = f'"{{{param.name}}}"' if quoted else f"{{{param.name}}}"
    return (f"{param.name} {value}", f"the {param.name} {value}", f"{param.name} = {value}", f"{param.name}: {value}")[
        style
    ]


def fill(template: str, arguments: dict[str, Any], result: str = "") -> str:
    """The template with arguments as a person writes them."""
    for key, value in arguments.items():
        said = spoken(value)
        if isinstance(value, bool):
            said = ("on" if value else "off") if key == "on" else str(value).lower()
        template = template.replace(f"{{{key}}}", said)
    return template.replace("{r}", result)
