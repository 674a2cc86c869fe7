"""The token budget of one step."""

from __future__ import annotations


class TokenBudget:
    """Hands out at most `max_num_batched_tokens` positions to one step.

    A prompt gets at most `threshold` of them, so that one long prompt cannot make everybody else's step slow (vLLM's
    `long_prefill_token_threshold`). Whether it shares its step with others is known when nobody else is admitted: then
    `rest` gives it all.
    """

    __slots__ = ("left", "threshold")

    def __init__(self, total: int, threshold: int | None) -> None:
        self.left = total
        self.threshold = threshold

    def grant(self, wanted: int) -> int:
        """How many of `wanted` positions this request may compute now (0 if the step is full). Takes nothing."""
        if wanted > 1 and self.threshold is not None:
            wanted = min(wanted, self.threshold)
        return min(wanted, self.left)

    def rest(self, wanted: int) -> int:
        """How many of `wanted` more a request gets that has the step for itself. Takes nothing."""
        return min(wanted, self.left)

    def take(self, count: int) -> None:
        self.left -= count

    def give_back(self, count: int) -> None:
        self.left += count
