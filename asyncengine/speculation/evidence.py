"""What a guess rests on: how likely it is right follows from that, before anybody has tried one."""

from __future__ import annotations

from enum import IntEnum


class Evidence(IntEnum):
    """Where the tokens of a draft come from, and how well that place fits."""

    SPLIT_TOKEN = 0
    """The last token stands elsewhere, and goes on there in several ways."""
    SPLIT = 1
    """The last few tokens stand elsewhere, and go on there in several ways."""
    TOKEN = 2
    """The last token stands in one place."""
    PAIR = 3
    """The last two tokens stand in one place."""
    FEW = 4
    """The last three to five do."""
    LONG = 5
    """Six or more do."""
    ALIKE_TOKEN = 6
    """The last token stands in several places, and goes on in the same way."""
    ALIKE = 7
    """The last few tokens do."""
    CHANGED = 8
    """The output has left its caller's prediction with its last token, which may stand for one of the prediction's."""
    RESUMED = 9
    """It left it, and its last token stands in the prediction near by."""
    FOLLOWED = 10
    """The last few tokens are as predicted."""
    MODEL = 11
    """A draft model guesses."""
    NEXT = 12
    """The last token stands right behind a place where an earlier part of the output was found: it goes on there."""
    CORRECTED = 13
    """Where this was guessed before, something else came."""
    NAMED = 14
    """The prompt names the next field of a record, or what comes stands behind each name (`records`)."""
    WRITTEN = 15
    """The last token stands in one place, which is in the output: what comes behind it there is seldom repeated."""
    PARTED = 16
    """Places that went on in the same way part here."""
    THEIR_SPLIT_TOKEN = 17
    """The same of earlier outputs as SPLIT_TOKEN; and so on."""
    THEIR_SPLIT = 18
    THEIR_TOKEN = 19
    THEIR_PAIR = 20
    """The last two to five tokens stand in one place of them."""
    THEIR_LONG = 21
    THEIR_ALIKE = 22


USUAL: tuple[float, ...] = (
    0.1, 0.35, 0.65, 0.72, 0.83, 0.93, 0.78, 0.93, 0.4, 0.6, 0.9, 0.75, 0.45, 0.5, 0.8,
    0.05, 0.3, 0.05, 0.2, 0.3, 0.42, 0.8, 0.92,
)  # fmt: skip
"""Share of tokens that are right, by evidence: of answers that quote, extract, and answer from passages."""
_ONWARD = {
    Evidence.SPLIT_TOKEN: Evidence.PAIR, Evidence.SPLIT: Evidence.FEW, Evidence.TOKEN: Evidence.PAIR,
    Evidence.PAIR: Evidence.FEW, Evidence.FEW: Evidence.LONG, Evidence.ALIKE_TOKEN: Evidence.ALIKE,
    Evidence.CHANGED: Evidence.RESUMED, Evidence.RESUMED: Evidence.FOLLOWED, Evidence.NEXT: Evidence.PAIR,
    Evidence.WRITTEN: Evidence.PAIR, Evidence.PARTED: Evidence.FEW,
}  # fmt: skip
AFTER = tuple(_ONWARD.get(evidence, evidence) for evidence in Evidence)
"""What a draft's next token rests on, when this one is right: the place fits better by it."""


LONG = 6
"""Tokens from which on it does not matter how many more agree."""


def of_places(agreed: int, places: int, alike: bool) -> Evidence:
    """Of `places` (one or more) that have `agreed` tokens before them in common with the text, and go on `alike`."""
    if not alike:
        return Evidence.SPLIT_TOKEN if agreed < 2 else Evidence.SPLIT
    if places > 1:
        return Evidence.ALIKE_TOKEN if agreed < 2 else Evidence.ALIKE
    if agreed < 3:
        return Evidence.TOKEN if agreed < 2 else Evidence.PAIR
    return Evidence.FEW if agreed < LONG else Evidence.LONG
