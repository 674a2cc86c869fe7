"""Moving acceptance rates of drafted tokens, by source and by how well the source agreed.

The chance that a drafted token is right depends on where the draft comes from and on how many tokens before it agree
with the text there. Both are known before anything is drafted, so the rates are kept per (source, level of agreement):
a prior, moved by what became of earlier drafts of the namespace, moved by what became of this request's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from itertools import accumulate
from operator import mul
from typing import NamedTuple


class Source(IntEnum):
    """Origin of a draft."""

    OWN_TEXT = 0
    EARLIER_ANSWER = 1
    PREDICTION = 2
    MODEL = 3


AMBIGUOUS = 0
"""Agreement of a draft whose places in the text go on in different ways."""
LONG = 6
"""Agreeing tokens from which on more of them say nothing more."""
_LEVELS = (0, 1, 2, 3, 3, 3, *[4] * 32)
"""Level of agreement by number of agreeing tokens before a draft, 0 to `LONG`, and in it."""
_PRIORS = (
    (0.30, 0.60, 0.72, 0.85, 0.93),
    (0.20, 0.20, 0.40, 0.70, 0.85),
    (0.40, 0.60, 0.75, 0.90, 0.95),
    (0.60, 0.60, 0.60, 0.60, 0.60),
)
"""Share of right tokens by source and level, measured on answers that quote, edit, extract and answer from passages."""
_PRIOR_WEIGHTS = (1.0, 1.0, 1.0, 8.0)
"""Weight of each source's prior, in drafted tokens: what a model guesses is not a matter of one text."""
_MEMORY = 0.99
"""Factor by which a drafted token makes earlier ones count less: texts change."""
_RECOVERY = 0.998
"""Factor by which an unused draft makes earlier ones count less, so that a useless source is tried again, seldom."""
_PATIENCE = 3
"""Useless drafts in a row after which a source has to wait."""
_LONGEST_WAIT = 256
"""Steps that a useless source waits, at most."""


class Draft(NamedTuple):
    """A guess of the next tokens."""

    tokens: tuple[int, ...]
    source: Source
    agreed: int
    """Tokens before the draft that agree with its source, at most `LONG`; `AMBIGUOUS` where it is not sure."""


NOTHING = Draft((), Source.OWN_TEXT, AMBIGUOUS)


def prior(draft: Draft) -> float:
    """Chance that the first token is right, before anything of its kind was drafted; 0: there is none."""
    return _PRIORS[draft.source][_LEVELS[draft.agreed]] if draft.tokens else 0.0


class Acceptance:
    """Acceptance of one request's drafts, or of a whole namespace's. A function of tokens alone, so replays agree."""

    __slots__ = ("_misses", "_parent", "_right", "_tried", "_waits")

    def __init__(self, parent: Acceptance | None = None) -> None:
        """`parent`: the namespace's, which a new request starts from; None: this is a namespace's own."""
        self._parent = parent
        self._tried = [[0.0] * len(levels) for levels in _PRIORS]
        self._right = [[0.0] * len(levels) for levels in _PRIORS]
        self._misses = [0] * len(_PRIORS)
        self._waits = [0] * len(_PRIORS)

    def is_waiting(self, source: Source) -> bool:
        """Whether the source has been useless and must wait before it is tried again."""
        return self._waits[source] > 0 or (self._parent is not None and self._parent.is_waiting(source))

    def chances(self, draft: Draft, count: int) -> list[float]:
        """Chance of each of the first `count` tokens to be right with all before it; none while the source waits."""
        if self.is_waiting(draft.source):
            return []
        rates, last = self._rates(draft.source), draft.agreed + min(count, len(draft.tokens))
        return list(accumulate([rates[level] for level in _LEVELS[draft.agreed : last]], mul))

    def _rates(self, source: Source) -> list[float]:
        """Share of right tokens by level of agreement."""
        usual = _PRIORS[source] if self._parent is None else self._parent._rates(source)
        weight = _PRIOR_WEIGHTS[source]
        counts = zip(usual, self._right[source], self._tried[source], strict=True)
        return [(rate * weight + right) / (weight + tried) for rate, right, tried in counts]

    def learn(self, draft: Draft, drafted: int, accepted: int) -> None:
        """Take in that the first `accepted` of `drafted` tokens were right; those behind a wrong one say nothing."""
        if self._parent is not None:
            self._parent.learn(draft, drafted, accepted)
        source = draft.source
        tried, right = self._tried[source], self._right[source]
        for index, level in enumerate(_LEVELS[draft.agreed : draft.agreed + min(drafted, accepted + 1)]):
            tried[level] = tried[level] * _MEMORY + 1
            right[level] = right[level] * _MEMORY + (index < accepted)
        self._misses[source] = 0 if accepted else self._misses[source] + 1
        # a namespace is patient for longer than a request: it waits for all of its requests
        over = self._misses[source] - _PATIENCE * (1 if self._parent is not None else 4)
        self._waits[source] = min(_LONGEST_WAIT, 2**over) if over > 0 else 0

    def rest(self, source: Source) -> None:
        """Take in that a step passed in which a draft of this source was not worth its time."""
        if self._parent is not None:
            self._parent.rest(source)
        self._waits[source] = max(0, self._waits[source] - 1)
        for counts in (self._tried[source], self._right[source]):
            counts[:] = [count * _RECOVERY for count in counts]


def best_prefix(chances: Sequence[float], costs: Sequence[float], expected: float) -> tuple[int, float]:
    """Number of drafted tokens that yields the most tokens per time, and the gain over none.

    `chances`: of each token to be right with all before it. `costs`: of the step with 0, 1, 2, ... of them.
    `expected`: tokens of the step without any.
    """
    plain = expected / costs[0]
    best, count = plain, 0
    for number, chance in enumerate(chances, 1):
        expected += chance
        if expected / costs[number] > best:
            best, count = expected / costs[number], number
    return count, best / plain
