"""Everything that can be posted to an engine. The scheduler's world changes only by these, between steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from asyncengine.step import GrammarMatcher, RowSpec


@dataclass(frozen=True, slots=True)
class Generate:
    """One sample to generate. A request with n samples posts n of these at once, `group` = ticket of the first."""

    spec: RowSpec
    prompt: tuple[int, ...]
    max_total: int
    """Prompt plus output tokens, at most; fits the model and the KV cache (checked at submit)."""
    arrival: float
    """Clock reading at submit."""
    priority: int = 0
    adapter: str = ""
    adapter_loading: bool = False
    salt: str = ""
    group: int | None = None
    needs_grammar: bool = False
    deadline: float | None = None
    waiting_deadline: float | None = None
    inter_token_timeout: float | None = None


@dataclass(frozen=True, slots=True)
class Abort:
    """The consumer of `ticket` has left. Unknown and finished tickets are ignored."""

    ticket: int


@dataclass(frozen=True, slots=True)
class StopText:
    """The text of `ticket` is complete (a stop string matched); its request ends with reason "stop"."""

    ticket: int


@dataclass(frozen=True, slots=True)
class GrammarReady:
    """The grammar of `ticket` compiled, or failed with `error`: that ends the one request.

    An error that is an exception is what the caller's call raises.
    """

    ticket: int
    matcher: GrammarMatcher | None = None
    error: Exception | str | None = None


@dataclass(frozen=True, slots=True)
class AdapterReady:
    """The adapter of `ticket` is in host memory, or could not be loaded."""

    ticket: int
    error: Exception | str | None = None


@dataclass(frozen=True, slots=True)
class Drain:
    """No more requests will come. `deadline`: clock reading at which what still runs is aborted; None: never."""

    deadline: float | None = None


Message = Generate | Abort | StopText | GrammarReady | AdapterReady | Drain

EndReason = Literal["stop", "length", "abort", "timeout", "error"]
"""Why the scheduler ended a request."""
