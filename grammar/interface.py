"""The interface of a compiler of grammars, for the engine. `step.GrammarMatcher` is its result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from asyncengine.sampling_params import OnBudget
from asyncengine.step import GrammarMatcher


class GrammarCompiler(Protocol):
    """The grammar queue's worker: compiles off the event loop and reports through `done`."""

    def check(self, grammar: Any, budget: int, on_budget: OnBudget) -> Any:
        """Check a grammar at submit, on any thread, and return what to compile. Refuses what can be seen to be wrong
        at once.

        Raises `GrammarError`, `BudgetTooSmall`, `QueueFull`.
        """
        ...

    def text_check(self, grammar: Any) -> Callable[[str], str | None] | None:
        """The check that finds the fault of a finished text, where compiling `grammar` (as `check` returned it)
        enforces only a part; None where it enforces all."""
        ...

    def start(self, ticket: int, order: GrammarOrder, done: GrammarDone) -> None:
        """Begin compiling for `ticket`; call `done(ticket, matcher or error)` once, from any thread."""
        ...

    def cancel(self, ticket: int) -> None:
        """Forget `ticket`: its request waits no more. Idempotent."""
        ...

    def close(self) -> None: ...


class GrammarOrder(NamedTuple):
    """An order of a request to the compiler."""

    grammar: Any
    """The result of `check`."""
    budget: int
    """Output tokens at most."""
    on_budget: OnBudget


GrammarDone = Callable[[int, GrammarMatcher | Exception], None]
