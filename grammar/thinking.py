"""A budget of thoughts: after so many tokens of them their end mark is written, and the answer follows.

The mark is forced as a grammar forces text that leaves no choice: behind the last token that fits where tokens may come
unsampled, else as the only token that its masks allow. A grammar of the whole output, thoughts included, stays in force
under it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from asyncengine.grammar.narrowing import Narrowing, NarrowingMatcher, allows, forbid
from asyncengine.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    from asyncengine.grammar.shared_masks import Mask
    from asyncengine.seams import GrammarMatcher


class _Place(NamedTuple):
    """A place of an output before, in or behind its thoughts."""

    stage: str
    """"before" thoughts that may come, "open", or "over"."""
    tail: bytes = b""
    """The end of the text, as far as it may be a part of the next mark."""
    thoughts: int = 0
    """Tokens of these so far."""
    forced: tuple[int, ...] = ()
    """Tokens that must come next."""
    last: int = -1


class ThinkingMatcher(NarrowingMatcher):
    """A matcher that forces the end of thoughts."""

    def __init__(self, budget: ThinkingBudget, vocabulary: Vocabulary, inner: GrammarMatcher | None) -> None:
        super().__init__(budget, vocabulary, inner)
        self._start, self._end = budget.start.encode(), budget.end.encode()
        self._closing = tuple(vocabulary.tokenize(budget.closing))
        head = vocabulary.tokenize(budget.start) if budget.channels else []
        self._barred = (head[0], head[1]) if {*head[:1]} & vocabulary.special_ids else None
        """The token that begins a message's header, and the one that would make more thoughts of it."""
        self.place = self._due(_Place("open" if budget.is_open else "before"))

    def accept(self, token: int, jump: bool = True, others: Callable[[], Sequence[int]] | None = None) -> list[int]:
        tokens = super().accept(token, jump, others)
        while jump and self.place.forced and not self.is_terminated():
            self.fill_mask(mask := np.zeros(self.vocabulary.mask_words, np.int32))
            if not allows(mask, self.place.forced[0]):
                break  # within a character, which a grammar holds together
            tokens += super().accept(self.place.forced[0], jump)
        return tokens

    def narrow(self, mask: Mask, place: _Place) -> None:
        if place.forced and allows(mask, place.forced[0]):
            mask[:] = 0
            mask.view(np.uint32)[place.forced[0] >> 5] = 1 << (place.forced[0] & 31)
        elif self._barred is not None and place.last == self._barred[0] and place.thoughts >= self.spec.max_tokens:
            forbid(mask, self._barred[1])

    def after(self, place: _Place, token: int) -> _Place:
        stage, tail, thoughts, forced, _ = place
        if stage == "over" and not forced:
            return place
        forced = forced[1:] if forced and forced[0] == token else ()
        table = self.vocabulary.token_bytes
        tail += table[token] if token < len(table) else b""
        if stage == "open":
            if self._end in tail:
                stage, tail = "before" if self.spec.channels else "over", tail.partition(self._end)[2]
            else:
                tail, thoughts = tail[-len(self._end) :], thoughts + 1
        elif stage == "before":
            if self._start in tail:
                stage, tail = "open", tail.partition(self._start)[2]
            elif self.spec.channels:
                tail = tail[-len(self._start) :]
            elif not self._start.startswith(tail.lstrip()):
                stage = "over"
        return self._due(_Place(stage, tail, thoughts, forced, token))

    def _due(self, place: _Place) -> _Place:
        """`place`, with what must come next if the budget is spent there: of the mark what is not yet written."""
        if place.stage != "open" or place.forced or place.thoughts < self.spec.max_tokens:
            return place
        spelled = [self.vocabulary.token_bytes[token] for token in self._closing]
        begun = range(len(spelled) - 1, 0, -1)
        first = next((count for count in begun if place.tail.endswith(b"".join(spelled[:count]))), 0)
        return place._replace(forced=self._closing[first:])


@dataclass(frozen=True, slots=True)
class ThinkingBudget(Narrowing):
    """The budget of one output's thoughts, and how these begin and end."""

    matcher = ThinkingMatcher
    max_tokens: int
    """Most tokens between the marks."""
    start: str
    end: str
    closing: str
    """The text that is forced; it begins with `end`."""
    is_open: bool = False
    """The prompt has begun the thoughts. Else the output may, at its beginning."""
    channels: bool = False
    """Thoughts are messages of a channel: more may follow, all of which share the budget, until it is spent."""
