"""The interface of a grammar library: templates compiled once, states copied from them, and a way to the nearest end.

One library implements it: `llguidance_backend`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.int32]
"""Packed bitmask of allowed tokens, shape [ceil(vocab / 32)], lowest bit first."""
JointFill = Callable[[Mask, Mapping[int, Any]], set[int]]
"""(masks [masks, words], mask -> state) -> the masks that were filled; `State.fill` says what is wrong with others."""


class State(Protocol):
    """The state of one output in its grammar. One thread at a time."""

    @property
    def joint_fill(self) -> JointFill | None:
        """A call that fills masks of several states at once, the same of all that it takes; None: there is none."""
        ...

    def fill(self, mask: Mask) -> None:
        """Write every word of `mask`: the tokens that may come next, end-of-sequence ids where the output may end.

        Raises `GrammarError` if the library gave up (a limit was hit).
        """
        ...

    def consume(self, token: int) -> bool:
        """Move past `token`. False, and nothing changed, if it is not allowed here. Raises as `fill`."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` consumed, end-of-sequence included."""
        ...

    def forced(self) -> list[int]:
        """Tokens that must come next, in the tokenization the tokenizer itself would choose; [] where there is a
        choice. Nothing is consumed. Never an end-of-sequence id."""
        ...

    def is_accepting(self) -> bool:
        """The output may end here."""
        ...

    def is_terminated(self) -> bool:
        """The output is complete and nothing but its end may follow."""
        ...


class Closing(Protocol):
    """The nearest complete output known from where one output stands. Moves along with the `State`.

    Invariant: `cost` tokens, beginning with `first()`, lead to a complete output. It may exceed the true minimum only
    where the grammar is too rich to search; where that hid any way at all from it, `cost` is beyond all budgets and
    `first()` raises `GrammarError`.
    """

    @property
    def cost(self) -> int:
        """Tokens to a complete output, end-of-sequence not counted; 0 where the output may end here."""
        ...

    def first(self) -> int:
        """The next token on the way; an end-of-sequence id where `cost` is 0."""
        ...

    def advance(self, token: int, at_most: int) -> bool:
        """Move past `token` if a completion of at most `at_most` tokens is known from there, or if there may be one and
        `at_most` is far from 0. Else False, unmoved."""
        ...


class Template(Protocol):
    """A compiled grammar, shared by all requests that use it."""

    @property
    def nbytes(self) -> int:
        """Memory it holds, roughly."""
        ...

    @property
    def min_tokens(self) -> int:
        """Tokens of the shortest complete output known, end-of-sequence not counted."""
        ...

    @property
    def refined(self) -> bool:
        """`refine` has been called, or would find nothing shorter."""
        ...

    def refine(self) -> None:
        """Look for a shorter output: for a budget below `min_tokens`. Takes up to a tenth of a second. One thread at a
        time; requests may be served meanwhile."""
        ...

    def new_state(self) -> State:
        """A state at the beginning. Raises `GrammarError` if the template is broken: compile it again."""
        ...

    def new_closing(self) -> Closing: ...
