"""A budget for reasoning: after `max_tokens` tokens of it the end mark is written, and the answer follows.

The mark is forced as a grammar forces text: appended behind the last token where jump-forward is on, else as the only
token that the masks allow. A grammar of the whole output, reasoning included, stays in force under it.
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


class _State(NamedTuple):
    """The state of an output before, in or behind its reasoning."""

    stage: str
    """"before" reasoning that may come, "open" in it, or "over" behind it."""
    tail: bytes = b""
    """The end of the text, as far as it may be a part of the next mark."""
    thoughts: int = 0
    """Tokens of reasoning so far."""
    forced: tuple[int, ...] = ()
    """Tokens that must come next."""
    last: int = -1


class ThinkingMatcher(NarrowingMatcher):
    """A matcher that forces the end of reasoning."""

    def __init__(self, budget: ThinkingBudget, vocabulary: Vocabulary, inner: GrammarMatcher | None) -> None:
        super().__init__(budget, vocabulary, inner)
        self._start, self._end = budget.start.encode(), budget.end.encode()
        self._closing = tuple(vocabulary.tokenize(budget.closing))
        head = vocabulary.tokenize(budget.start) if budget.channels else []
        self._barred = (head[0], head[1]) if {*head[:1]} & vocabulary.special_ids else None
        """The token that begins a message's header, and the one behind it that would begin more reasoning."""
        self.state = self._due(_State("open" if budget.is_open else "before"))

    def accept(self, token: int, jump: bool = True, others: Callable[[], Sequence[int]] | None = None) -> list[int]:
        tokens = super().accept(token, jump, others)
        while jump and self.state.forced and not self.is_terminated():
            self.fill_mask(mask := np.zeros(self.vocabulary.mask_words, np.int32))
            if not allows(mask, self.state.forced[0]):
                break  # inside a character of several tokens, which the grammar has to complete first
            tokens += super().accept(self.state.forced[0], jump)
        return tokens

    def narrow(self, mask: Mask, state: _State) -> None:
        if state.forced and allows(mask, state.forced[0]):
            mask[:] = 0
            mask.view(np.uint32)[state.forced[0] >> 5] = 1 << (state.forced[0] & 31)
        elif self._barred is not None and state.last == self._barred[0] and state.thoughts >= self.spec.max_tokens:
            forbid(mask, self._barred[1])

    def after(self, state: _State, token: int) -> _State:
        stage, tail, thoughts, forced, _ = state
        if stage == "over" and not forced:
            return state
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
        return self._due(_State(stage, tail, thoughts, forced, token))

    def _due(self, state: _State) -> _State:
        """`state`, and once the budget is spent the tokens to force: those of the end mark that are not yet written."""
        if state.stage != "open" or state.forced or state.thoughts < self.spec.max_tokens:
            return state
        mark_bytes = [self.vocabulary.token_bytes[token] for token in self._closing]
        begun = range(len(mark_bytes) - 1, 0, -1)
        first = next((count for count in begun if state.tail.endswith(b"".join(mark_bytes[:count]))), 0)
        return state._replace(forced=self._closing[first:])


@dataclass(frozen=True, slots=True)
class ThinkingBudget(Narrowing):
    """The budget of one output's reasoning, and the marks around that."""

    matcher = ThinkingMatcher
    max_tokens: int
    """Most tokens between the marks."""
    start: str
    end: str
    closing: str
    """The text that is forced; it begins with `end`."""
    is_open: bool = False
    """The prompt ends inside the reasoning. Else the output may begin with its start mark."""
    channels: bool = False
    """Reasoning is messages of a channel (gpt-oss): several may come, which share the budget."""
