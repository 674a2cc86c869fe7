"""What came where something else was guessed: a copied text is put into another form, and always in the same way.

`name, city` in a request becomes `"name": ..., "city": ...` in the answer: each copy of a name ends where its source
goes on with a comma, and a colon comes instead. So the next copy is followed up to the comma, and with the colon there.
The second blank of a copy is told from the first: a name may have one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from asyncengine.speculation.evidence import Evidence
from asyncengine.speculation.lookup import NOTHING, Draft

if TYPE_CHECKING:
    from asyncengine.speculation.records import Record

_KINDS = 256
_MOST = 4
"""Times in a row after which it does not matter how often a guess was right, or wrong."""
_COPY = 12
"""Tokens back to which a copy is followed, to its beginning."""

_Guess = tuple[int, int]
"""(token, how many of it the copy has before)."""


class Counts:
    """Of guesses: how much more often each was right than wrong, and what came instead the last time it was wrong."""

    def __init__(self) -> None:
        self._counts: dict[_Guess, tuple[int, int]] = {}
        """The latest last."""
        self.doubted: dict[int, int] = {}
        """Token -> guesses of it that were wrong more often than right; of tokens that have any."""

    def of(self, guess: _Guess) -> tuple[int, int]:
        return self._counts.get(guess) or (0, guess[0])

    def add(self, guess: _Guess, token: int) -> None:
        """`token` came."""
        counts = self._counts
        before, instead = counts.pop(guess, (0, guess[0]))
        if guess[0] == token:
            more = before + 1 if before < _MOST else _MOST
        else:
            more, instead = (before - 1 if before > -_MOST else -_MOST), token
        counts[guess] = more, instead
        if (more < 0) != (before < 0):
            self._doubt(guess[0], 1 if more < 0 else -1)
        if len(counts) > _KINDS:
            oldest = next(iter(counts))
            if counts.pop(oldest)[0] < 0:
                self._doubt(oldest[0], -1)

    def _doubt(self, token: int, more: int) -> None:
        count = self.doubted.pop(token, 0) + more
        if count:
            self.doubted[token] = count


class Corrections:
    """Of one request: compares drafts with what became of them, and mends later ones."""

    def __init__(self, start: int, others: Counts | None = None) -> None:
        """`start`: where the output begins. `others`: what earlier requests have learnt, and this one adds to."""
        self._start = start
        self._draft: Draft = NOTHING
        self._begin = 0
        """Where the last draft begins in the text."""
        self._copied: list[int] | None = None
        """The last tokens before that place, from where their copy began; None: nobody has asked yet."""
        self._record: Record | None = None
        self._counts = Counts() if others is None else others
        self._starts: dict[int, None] = {}
        """Tokens that came instead of others: a copy begins behind one."""

    def learn(self, tokens: Sequence[int]) -> None:
        """`tokens`: the text now, beginning with that of the last `mend`."""
        if not self._draft.tokens:
            return
        copied, add = self._copy_before(tokens), self._counts.add
        for guess, token in zip(self._draft.tokens, tokens[self._begin :], strict=False):
            known = guess, copied.count(guess)
            if guess != token:
                self._starts[token] = None
                more, instead = self._counts.of(known)
                if more < 0 and instead != token and self._record is not None:
                    self._record.note_instead(instead, token)
            add(known, token)
            if guess != token:
                break  # what was guessed behind it was guessed for another text
            copied.append(token)
        self._draft = NOTHING

    def mend(self, draft: Draft, tokens: Sequence[int], record: Record) -> Draft:
        """`draft` of what follows `tokens`, up to where something else is to be expected; `record`: as far as it knows
        these."""
        self._draft, self._begin, self._copied, self._record = draft, len(tokens), None, record
        doubted = self._counts.doubted
        if doubted.keys().isdisjoint(draft.tokens):
            return draft
        copied = self._copy_before(tokens)
        for place, token in enumerate(draft.tokens):
            if token in doubted:
                before = copied.count(token) + draft.tokens[:place].count(token)
                more, instead = self._counts.of((token, before))
                comes = record.corrected(instead) if more < 0 else None
                if comes is not None:
                    return draft.joined(place, (comes,), Evidence.CORRECTED)
        return draft

    def _copy_before(self, tokens: Sequence[int]) -> list[int]:
        """The last tokens before the draft, from where their copy began."""
        if self._copied is None:
            found = self._copied = [*tokens[max(self._start, self._begin - _COPY) : self._begin]]
            starts = self._starts
            for place in range(len(found), 0, -1):
                if found[place - 1] in starts:
                    del found[:place]
                    break
        return self._copied
