"""A budget of thoughts: after so many tokens of them their end mark is written, and the answer follows.

The mark is forced as a grammar forces text that leaves no choice: behind the last token that fits where tokens may come
unsampled, else as the only token that its masks allow. Where that happens depends on the output's tokens alone, so it
repeats. A grammar of the whole output, thoughts included, stays in force under it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from asyncengine.grammar.spec import Grammar
from asyncengine.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    from asyncengine.grammar.shared_masks import Mask
    from asyncengine.seams import GrammarMatcher


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """The budget of one output's thoughts, and how these begin and end. It stands in the place of a grammar."""

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
    grammar: Grammar | None = None
    """The grammar of the whole output."""


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


class ThinkingMatcher:
    """A `GrammarMatcher` that holds an output to a `ThinkingBudget`, and to the grammar of `inner` if there is one."""

    def __init__(self, budget: ThinkingBudget, vocabulary: Vocabulary, inner: GrammarMatcher | None) -> None:
        self._budget = budget
        self._vocabulary = vocabulary
        self._inner = inner
        self.steered_from: int | None = None
        self._start, self._end = budget.start.encode(), budget.end.encode()
        self._closing = tuple(vocabulary.tokenize(budget.closing))
        head = vocabulary.tokenize(budget.start) if budget.channels else []
        self._barred = (head[0], head[1]) if {*head[:1]} & vocabulary.special_ids else None
        """The token that begins a message's header, and the one that would make more thoughts of it."""
        self._place = self._due(_Place("open" if budget.is_open else "before"))

    def fresh(self) -> ThinkingMatcher:
        return ThinkingMatcher(self._budget, self._vocabulary, None if self._inner is None else self._inner.fresh())

    def fill_mask(self, mask: Mask) -> None:
        if self._inner is None:
            self._allow_all(mask)
        else:
            self._inner.fill_mask(mask)
        self._narrow(mask, self._place)

    def fill_along(self, masks: Mask, drafts: Sequence[int]) -> int:
        filled = self._allow_all(masks) if self._inner is None else self._inner.fill_along(masks, drafts)
        place = self._place
        for number in range(filled):
            self._narrow(masks[number], place)
            if number < len(drafts):
                if not _allows(masks[number], drafts[number]):
                    return number + 1
                place = self._after(place, drafts[number])
        return filled

    def accept(self, token: int, jump: bool = True, others: Callable[[], Sequence[int]] | None = None) -> list[int]:
        tokens = self._take(token, jump, others)
        while jump and self._place.forced and not self.is_terminated() and self._fits(self._place.forced[0]):
            tokens += self._take(self._place.forced[0], jump, None)
        return tokens

    def may_refuse(self, ahead: int = 0) -> bool:
        return self._inner is not None and self._inner.may_refuse(ahead)

    def is_terminated(self) -> bool:
        return self._inner is not None and self._inner.is_terminated()

    def overrun(self) -> str | None:
        return None if self._inner is None else self._inner.overrun()

    def _take(self, token: int, jump: bool, others: Callable[[], Sequence[int]] | None) -> list[int]:
        tokens = [token]
        if self._inner is not None:
            tokens = self._inner.accept(token, jump, others)
            self.steered_from = self._inner.steered_from if self.steered_from is None else self.steered_from
        for taken in tokens:
            self._place = self._after(self._place, taken)
        return tokens

    def _fits(self, token: int) -> bool:
        """Whether the grammar lets `token` come next. It does not within a character."""
        mask = np.zeros(self._vocabulary.mask_words, np.int32)
        self.fill_mask(mask)
        return _allows(mask, token)

    def _allow_all(self, masks: Mask) -> int:
        """Allow all tokens of the vocabulary in some masks. Returns how many these are."""
        masks[:] = -1
        if rest := self._vocabulary.vocab_size % 32:
            masks[..., -1] = (1 << rest) - 1
        return len(masks)

    def _narrow(self, mask: Mask, place: _Place) -> None:
        """Leave of a mask at `place` what the budget allows."""
        words = mask.view(np.uint32)
        if place.forced and _allows(mask, place.forced[0]):
            words[:] = 0
            words[place.forced[0] >> 5] = 1 << (place.forced[0] & 31)
        elif self._barred is not None and place.last == self._barred[0] and place.thoughts >= self._budget.max_tokens:
            words[self._barred[1] >> 5] &= ~np.uint32(1 << (self._barred[1] & 31))

    def _after(self, place: _Place, token: int) -> _Place:
        """The place behind `token`."""
        stage, tail, thoughts, forced, _ = place
        if stage == "over" and not forced:
            return place
        forced = forced[1:] if forced and forced[0] == token else ()
        table = self._vocabulary.token_bytes
        tail += table[token] if token < len(table) else b""
        if stage == "open":
            if self._end in tail:
                stage, tail = "before" if self._budget.channels else "over", tail.partition(self._end)[2]
            else:
                tail, thoughts = tail[-len(self._end) :], thoughts + 1
        elif stage == "before":
            if self._start in tail:
                stage, tail = "open", tail.partition(self._start)[2]
            elif self._budget.channels:
                tail = tail[-len(self._start) :]
            elif not self._start.startswith(tail.lstrip()):
                stage = "over"
        return self._due(_Place(stage, tail, thoughts, forced, token))

    def _due(self, place: _Place) -> _Place:
        """`place`, with what must come next if the budget is spent there: of the mark what is not yet written."""
        if place.stage != "open" or place.forced or place.thoughts < self._budget.max_tokens:
            return place
        spelled = [self._vocabulary.token_bytes[token] for token in self._closing]
        begun = range(len(spelled) - 1, 0, -1)
        first = next((count for count in begun if place.tail.endswith(b"".join(spelled[:count]))), 0)
        return place._replace(forced=self._closing[first:])


def _allows(mask: Mask, token: int) -> bool:
    return bool(int(mask.view(np.uint32)[token >> 5]) >> (token & 31) & 1)
