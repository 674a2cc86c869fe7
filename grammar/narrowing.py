"""Constraints around a grammar, or around none: matchers that leave of its masks what else is allowed.

What they leave depends on the output's tokens alone, so it is the same in any company, behind guesses and after
preemption. Where they would leave nothing the grammar stands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from asyncengine.grammar.spec import Grammar
from asyncengine.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    from asyncengine.grammar.shared_masks import Mask
    from asyncengine.seams import GrammarMatcher


class NarrowingMatcher:
    """A `GrammarMatcher` around that of a grammar, if there is one.

    Its `place` is all that a constraint has to know of an output's tokens, a value. A constraint says how a token moves
    it (`after`), and what may not come there (`narrow`).
    """

    def __init__(self, spec: Any, vocabulary: Vocabulary, inner: GrammarMatcher | None) -> None:
        self.spec, self.vocabulary, self.inner = spec, vocabulary, inner
        self.place: Any = ()
        self.steered_from: int | None = None

    def fresh(self) -> Self:
        return type(self)(self.spec, self.vocabulary, None if self.inner is None else self.inner.fresh())

    def after(self, place: Any, token: int) -> Any:
        """The place behind `token`."""
        raise NotImplementedError

    def narrow(self, mask: Mask, place: Any) -> None:
        """Take what may not come at `place` out of `mask`."""
        raise NotImplementedError

    def fill_mask(self, mask: Mask) -> None:
        if self.inner is None:
            self._allow_all(mask)
        else:
            self.inner.fill_mask(mask)
        self.narrow(mask, self.place)

    def fill_along(self, masks: Mask, drafts: Sequence[int]) -> int:
        filled = self._allow_all(masks) if self.inner is None else self.inner.fill_along(masks, drafts)
        place = self.place
        for number in range(filled):
            self.narrow(masks[number], place)
            if number < len(drafts):
                if not allows(masks[number], drafts[number]):
                    return number + 1
                place = self.after(place, drafts[number])
        return filled

    def accept(self, token: int, jump: bool = True, others: Callable[[], Sequence[int]] | None = None) -> list[int]:
        tokens = [token]
        if self.inner is not None:
            tokens = self.inner.accept(token, jump, others)
            self.steered_from = self.inner.steered_from if self.steered_from is None else self.steered_from
        for taken in tokens:
            self.place = self.after(self.place, taken)
        return tokens

    def may_refuse(self, ahead: int = 0) -> bool:
        return self.inner is not None and self.inner.may_refuse(ahead)

    def is_terminated(self) -> bool:
        return self.inner is not None and self.inner.is_terminated()

    def overrun(self) -> str | None:
        return None if self.inner is None else self.inner.overrun()

    def _allow_all(self, masks: Mask) -> int:
        """Allow all tokens of the vocabulary in some masks. Returns how many these are."""
        masks[:] = -1
        if rest := self.vocabulary.vocab_size % 32:
            masks[..., -1] = (1 << rest) - 1
        return len(masks)


def allows(mask: Mask, token: int) -> bool:
    return bool(int(mask.view(np.uint32)[token >> 5]) >> (token & 31) & 1)


def forbid(mask: Mask, token: int) -> None:
    mask.view(np.uint32)[token >> 5] &= ~np.uint32(1 << (token & 31))


@dataclass(frozen=True, slots=True, kw_only=True)
class Narrowing:
    """A constraint around that of `grammar`, in whose place it stands. Plain data, as a grammar is."""

    matcher: ClassVar[type[NarrowingMatcher]]
    grammar: Grammar | Narrowing | None = None


class BadWordsMatcher(NarrowingMatcher):
    """A matcher that forbids the last token of each word behind the others. Its place is the last few tokens."""

    def __init__(self, spec: BadWords, vocabulary: Vocabulary, inner: GrammarMatcher | None) -> None:
        super().__init__(spec, vocabulary, inner)
        self._ends: dict[tuple[int, ...], list[int]] = {}
        """Last tokens of words by what comes before them."""
        for word in spec.words:
            self._ends.setdefault(tuple(word[:-1]), []).append(word[-1])
        self._longest = max(map(len, self._ends), default=0)

    def after(self, place: tuple[int, ...], token: int) -> tuple[int, ...]:
        return (*place, token)[-self._longest :] if self._longest else ()

    def narrow(self, mask: Mask, place: tuple[int, ...]) -> None:
        before = mask.copy()
        for start in range(len(place) + 1):
            for token in self._ends.get(place[start:], ()):
                forbid(mask, token)
        if not mask.any():
            mask[:] = before


@dataclass(frozen=True, slots=True)
class BadWords(Narrowing):
    """Sequences of tokens that an output may not complete (vLLM's `bad_words`)."""

    matcher = BadWordsMatcher
    words: tuple[tuple[int, ...], ...]
