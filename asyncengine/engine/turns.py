"""Turns that a caller asks for between two steps: other weights, sleep, and waking."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

from asyncengine.cache_news import PrefixCacheReset
from asyncengine.errors import EngineClosed, EngineError, InvalidParameter
from asyncengine.stats import EngineState


class WeightUpdate(NamedTuple):
    """Weights that have been looked at and wait for their turn; or an end of sleep, with or without them."""

    write: Callable[[], None] | None
    """None: the engine wakes on the weights that it has, or had."""
    done: Future[int]
    version: int | None = None
    """The version that the new weights are to have; None: the next number."""
    again: Callable[[], None] | None = None
    """Writes the weights that there are from now on once more, from files; None: they came from elsewhere."""
    partial: bool = False
    wakes: bool = False


class Sleep(NamedTuple):
    """No step runs, and what was dropped is not in memory."""

    done: Future[None]
    release: Callable[[], None] | None = None
    """Gives memory back; None: all is kept."""
    weights: bool = False
    """Whether weights are dropped."""
    cache: bool = False
    refuses: bool = False
    """Whether requests are turned away, rather than wait."""

    def joined(self, before: Sleep | None) -> Sleep:
        """The state of an engine that falls asleep, having been in the state `before`."""
        if before is None:
            return self
        weights, cache = self.weights or before.weights, self.cache or before.cache
        return self._replace(weights=weights, cache=cache, refuses=self.refuses or before.refuses)

    @property
    def state(self) -> EngineState:
        """The word for it."""
        return "asleep" if self.weights or self.cache else "paused"


class CacheReset(NamedTuple):
    """A reset of the prefix cache, which takes its turn as soon as its message is read."""

    done: Future[PrefixCacheReset]


Turn = WeightUpdate | Sleep | CacheReset


def refusal(
    turn: WeightUpdate | Sleep, sleep: Sleep | None, again: Callable[[], None] | None, *, closes: bool
) -> EngineError | None:
    """Why a turn cannot be taken in the state `sleep`; None: it can. `again`: as in `WeightUpdate`. `closes`: the
    engine takes no more requests."""
    if isinstance(turn, Sleep):
        return EngineClosed("the engine closes: it does not sleep") if closes else None
    without = sleep is not None and sleep.weights
    if without and turn.partial:
        return InvalidParameter("partial", "cannot be, as the other weights were dropped: give all of them")
    if without and turn.write is None and again is None:
        return InvalidParameter("weights", "must be given: those that were dropped came from tensors, not from files")
    return None
