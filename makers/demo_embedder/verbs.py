"""The forms of English verbs, as far as the lexicon needs them."""

from __future__ import annotations

_IRREGULAR = {
    "buy": "bought", "sell": "sold", "choose": "chosen", "find": "found", "take": "taken", "lose": "lost",
    "drive": "driven", "get": "got", "leave": "left", "set": "set", "shut": "shut", "throw": "thrown",
    "put": "put", "send": "sent", "keep": "kept", "make": "made", "bring": "brought", "hand": "handed",
    "freeze": "frozen", "cut": "cut", "feed": "fed", "give": "given", "teach": "taught", "breed": "bred",
    "grow": "grown", "wear": "worn", "sew": "sewn", "pay": "paid", "lay": "laid", "speak": "spoken",
    "tell": "told", "begin": "begun", "lead": "led", "run": "run", "quit": "quit", "build": "built",
    "draw": "drawn", "go": "gone", "have": "had", "be": "been", "tear": "torn", "knock": "knocked", "hold": "held",
    "spot": "spotted", "swap": "swapped", "reset": "reset",
}  # fmt: skip
"""Participles that do not end in -ed, or double a letter."""
_PAST = {
    "chosen": "chose", "taken": "took", "driven": "drove", "thrown": "threw", "frozen": "froze", "given": "gave",
    "grown": "grew", "worn": "wore", "sewn": "sewed", "spoken": "spoke", "begun": "began", "run": "ran",
    "drawn": "drew", "gone": "went", "been": "was", "torn": "tore",
}  # fmt: skip
_DOUBLES = frozenset({
    "get", "set", "shut", "put", "cut", "quit", "run", "swap", "trim", "chop", "spot", "drag",
    "begin", "plan", "stop", "knit", "scrub", "top", "transmit", "reset", "fit",
})  # fmt: skip
"""Verbs whose last letter doubles before -ing and -ed."""
_VOWELS = "aeiou"


def _split(phrase: str) -> tuple[str, str]:
    head, _, rest = phrase.partition(" ")
    return head, f" {rest}" if rest else ""


def _regular(verb: str) -> str:
    if verb in _DOUBLES:
        return f"{verb}{verb[-1]}ed"
    if verb.endswith("e"):
        return f"{verb}d"
    if verb.endswith("y") and verb[-2] not in _VOWELS:
        return f"{verb[:-1]}ied"
    return f"{verb}ed"


def participle(phrase: str, keep: bool = False) -> str:
    """ "switch on" -> "switched on", "leave ~ standing" -> "left standing" unless the object's place is to be kept."""
    return _participle(phrase if keep else phrase.replace(" ~", ""))


def _participle(phrase: str) -> str:
    head, rest = _split(phrase)
    return _IRREGULAR.get(head, _regular(head)) + rest


def past(phrase: str) -> str:
    """ "drive" -> "drove"."""
    head, rest = _split(_participle(phrase))
    return _PAST.get(head, head) + rest


def gerund(phrase: str) -> str:
    """ "take care of" -> "taking care of"."""
    head, rest = _split(phrase)
    if head in _DOUBLES:
        head += head[-1]
    elif head.endswith("e") and head not in ("be", "see", "dye"):
        head = head[:-1]
    return f"{head}ing{rest}"


def upon(phrase: str, thing: str) -> str:
    """The phrase with its object: "leave ~ standing" -> "leave the car standing"."""
    return phrase.replace("~", thing) if "~" in phrase else f"{phrase} {thing}"
