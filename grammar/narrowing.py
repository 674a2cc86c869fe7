"""Constraints around a grammar, or around none: matchers that remove further tokens from its masks.

They depend on the output's tokens alone, so masks are the same in any batch, behind guesses and after preemption. Where
no token would be left, the grammar's mask stays.
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

    Its `state` is an immutable value with all that a constraint has to know of an output's tokens. Subclasses define
    the transition by a token (`after`) and the tokens that are forbidden in a state (`narrow`).
    """

    def __init__(self, spec: Any, vocabulary: Vocabulary, inner: GrammarMatcher | None) -> None:
        self.spec, self.vocabulary, self.inner = spec, vocabulary, inner
        self.state: Any = ()
        self.steered_from: int | None = None

    def fresh(self) -> Self:
        return type(self)(self.spec, self.vocabulary, None if self.inner is None else self.inner.fresh())

    def after(self, state: Any, token: int) -> Any:
        """The state behind `token`."""
        raise NotImplementedError

    def narrow(self, mask: Mask, state: Any) -> None:
        """Remove the tokens that are forbidden in `state` from `mask`."""
        raise NotImplementedError

    def fill_mask(self, mask: Mask) -> None:
        if self.inner is None:
            self._allow_all(mask)
        else:
            self.inner.fill_mask(mask)
        self.narrow(mask, self.state)

    def fill_along(self, masks: Mask, drafts: Sequence[int]) -> int:
        filled = self._allow_all(masks) if self.inner is None else self.inner.fill_along(masks, drafts)
        state = self.state
        for index in range(filled):
            self.narrow(masks[index], state)
            if index < len(drafts):
                if not allows(masks[index], drafts[index]):
                    return index + 1
                state = self.after(state, drafts[index])
        return filled

    def accept(self, token: int, jump: bool = True, others: Callable[[], Sequence[int]] | None = None) -> list[int]:
        tokens = [token]
        if self.inner is not None:
            tokens = self.inner.accept(token, jump, others)
            self.steered_from = self.inner.steered_from if self.steered_from is None else self.steered_from
        for accepted in tokens:
            self.state = self.after(self.state, accepted)
        return tokens

    def may_refuse(self, ahead: int = 0) -> bool:
        return self.inner is not None and self.inner.may_refuse(ahead)

    def is_terminated(self) -> bool:
        return self.inner is not None and self.inner.is_terminated()

    def overrun(self) -> str | None:
        return None if self.inner is None else self.inner.overrun()

    def _allow_all(self, masks: Mask) -> int:
        """Allow all tokens of the vocabulary in `masks`. Returns their number."""
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
    """A constraint around that of `grammar`, which requests carry instead of it. Plain data, as a grammar is."""

    matcher: ClassVar[type[NarrowingMatcher]]
    grammar: Grammar | Narrowing | None = None


class BadWordsMatcher(NarrowingMatcher):
    """A matcher that forbids the last token of each word behind its other tokens. Its state is the last few tokens."""

    def __init__(self, spec: BadWords, vocabulary: Vocabulary, inner: GrammarMatcher | None) -> None:
        super().__init__(spec, vocabulary, inner)
        self._ends: dict[tuple[int, ...], list[int]] = {}
        """Last tokens of words by the tokens before them."""
        for word in spec.words:
            self._ends.setdefault(tuple(word[:-1]), []).append(word[-1])
        self._longest = max(map(len, self._ends), default=0)

    def after(self, state: tuple[int, ...], token: int) -> tuple[int, ...]:
        return (*state, token)[-self._longest :] if self._longest else ()

    def narrow(self, mask: Mask, state: tuple[int, ...]) -> None:
        before = mask.copy()
        for start in range(len(state) + 1):
            for token in self._ends.get(state[start:], ()):
                forbid(mask, token)
        if not mask.any():
            mask[:] = before


@dataclass(frozen=True, slots=True)
class BadWords(Narrowing):
    """Sequences of tokens that an output may not complete (vLLM's `bad_words`)."""

    matcher = BadWordsMatcher
    words: tuple[tuple[int, ...], ...]
