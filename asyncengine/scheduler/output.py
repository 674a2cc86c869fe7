"""Output of the scheduler for one request after a step: a token, an end, or both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncengine.scheduler.messages import EndReason
from asyncengine.scheduler.request import Request
from asyncengine.step import TokenLogprob

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Output(NamedTuple):
    """News of one ticket. `token` is -1 where there is none; `reason` is set exactly once, on its last output."""

    ticket: int
    token: int = -1
    plain: bool = False
    """True: a single token, not the first, without further news; consumers may take a short cut."""
    reason: EndReason | None = None
    logprob: TokenLogprob | None = None
    prompt_logprobs: tuple[int, list[TokenLogprob]] | None = None
    """(position of the first entry, entries). After a preemption the same positions come again."""
    traces: tuple[int, NDArray[Any]] | None = None
    """(position of the first entry, entries). After a preemption the same positions come again."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache at first admission (on the first token and on the last output)."""
    restored_tokens: int = 0
    """Tokens of `cached_tokens` that were read from a disk for it (on the same outputs)."""
    started_at: float | None = None
    """Clock reading of the first step (on the same outputs)."""
    predicted: tuple[int, int] = (0, 0)
    """On the last output: tokens of the caller's guess that were right, and that were computed and wrong."""
    error: Exception | str | None = None
    """An exception is for the caller to be raised as it is."""
    vector: NDArray[np.float32] | None = None
    """On the last output of a request that was asked for one, and got it."""
    steered: bool = False
    """True: `token` is the first that is not the model's own (`step.GrammarMatcher.steered_from`)."""


_PLAIN = Output(-1, plain=True)[3:]


def plain_output(ticket: int, token: int) -> Output:
    """`Output(ticket, token, True)`, in half the time."""
    return Output._make((ticket, token, True, *_PLAIN))


def with_counts(request: Request, token: int = -1, reason: EndReason | None = None, **news: Any) -> Output:
    """The first or last output of `request`, which carry its counts."""
    return Output(
        request.ticket, token, reason=reason, cached_tokens=request.cached_tokens,
        restored_tokens=request.restored_tokens, started_at=request.first_step_at, predicted=request.predicted, **news,
    )  # fmt: skip


@dataclass(slots=True)
class Counters:
    """Running totals since the start. The engine's `stats()` and the benchmarks read them."""

    steps: int = 0
    prompt_tokens: int = 0
    """Prompt tokens of admitted requests (each counted at its first admission)."""
    cached_tokens: int = 0
    """Tokens of `prompt_tokens` that were found in the prefix cache."""
    restored_tokens: int = 0
    """Tokens of `cached_tokens` that were read from a disk."""
    computed_tokens: int = 0
    """Positions computed, recomputation after preemption included."""
    generated_tokens: int = 0
    forced_tokens: int = 0
    """Tokens of `generated_tokens` that a grammar forced, so that they were not sampled."""
    passes: int = 0
    """Rows that gave tokens."""
    preemptions: int = 0
    left_queue: int = 0
    """Samples that left the waiting queue for the first time: started, or ended before."""
    left_queue_tokens: int = 0
    """Their prompt tokens."""
