"""Fakes for what the scheduler and the engine know only by protocol: grammars and adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from asyncengine.sampling_params import OnBudget
from asyncengine.seams import GrammarOrder


class Letters:
    """A grammar for tests: exactly `length` tokens, all of them in `allowed`. Counts what is done to it."""

    def __init__(self, allowed: Iterable[int], length: int) -> None:
        self.allowed = tuple(allowed)
        self.length = length
        self.advanced: list[int] = []
        self.fills = 0
        self.fail_at: int | None = None
        self.steered_from: int | None = None

    def fill_mask(self, mask: Any) -> None:
        self.fills += 1
        words = mask.view(np.uint32)
        for token in self.allowed:
            words[token // 32] |= np.uint32(1 << (token % 32))

    def may_refuse(self, ahead: int) -> bool:
        return False

    def accept(self, token_id: int, jump: bool = True, others: Any = None) -> list[int]:
        if self.fail_at == len(self.advanced):
            raise RuntimeError("matcher broke")
        assert token_id in self.allowed, token_id
        self.advanced.append(token_id)
        return [token_id]

    def fresh(self) -> Letters:
        equal = Letters(self.allowed, self.length)
        equal.fail_at = self.fail_at
        return equal

    def overrun(self) -> str | None:
        return None

    def is_terminated(self) -> bool:
        return len(self.advanced) >= self.length


class Compiler:
    """A grammar compiler that compiles when told to."""

    def __init__(self) -> None:
        self.pending: dict[int, Any] = {}
        self.cancelled: list[int] = []
        self.started: list[int] = []
        self.closed = False
        self.refuse: Exception | None = None
        self._done: dict[int, Callable[[int, Any], None]] = {}

    def check(self, grammar: Any, budget: int, on_budget: OnBudget) -> Any:
        if self.refuse is not None:
            raise self.refuse
        return grammar

    def text_check(self, grammar: Any) -> None:
        return None

    def start(self, ticket: int, order: GrammarOrder, done: Callable[[int, Any], None]) -> None:
        self.started.append(ticket)
        self.pending[ticket] = order.grammar
        self._done[ticket] = done

    def finish(self, ticket: int, outcome: Any = None) -> None:
        """End a compilation: the grammar itself is the matcher, unless `outcome` says otherwise."""
        grammar = self.pending.pop(ticket)
        self._done.pop(ticket)(ticket, grammar if outcome is None else outcome)

    def cancel(self, ticket: int) -> None:
        self.cancelled.append(ticket)
        self.pending.pop(ticket, None)

    def close(self) -> None:
        self.closed = True
