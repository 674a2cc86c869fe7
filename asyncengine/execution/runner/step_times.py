"""Seconds of steps in which one row computes a few tokens, measured at the first load of a process: what drafts cost.

A busy machine may give any numbers. Those that cannot be are measured once more, then left for usual ones: they decide
how much is drafted, no answer and no load.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise

from asyncengine.step import MEASURED_SIZES

logger = logging.getLogger("asyncengine")

_MAX_RUNS = 3
_AGREE = 0.04
"""Share by which two runs of a step may differ to be believed."""
_BRIEF = 0.01
"""Seconds of the smallest step below which each is run until two runs agree. Somebody waits for the model, and what
disturbs a step is a smaller part of a long one: those are run once, and again only if they look disturbed."""
_MAX_FALL = 1.5
"""Factor by which a step may take less time than one of fewer tokens, before one of the two was disturbed."""
_USUAL = (1.0, 1.75, 4.75)
"""Steps of `MEASURED_SIZES`, in the smallest, that are assumed where nothing can be measured."""

_MAX_KEPT = 64
_kept: dict[Hashable, tuple[float, ...]] = {}
"""Measured times of this process by what they follow from, so that a model loaded again is not measured again."""

Run = Callable[[int], float]
"""Seconds of one step of so many tokens."""


def measure_steps(run: Run, key: Hashable = None) -> tuple[float, ...]:
    """Positive seconds of steps of `MEASURED_SIZES` tokens. `key`: what they follow from in this process, of which they
    are measured once; None: they are measured anew."""
    if key is not None and key in _kept:
        return _kept[key]
    times: tuple[float, ...] = ()
    for _ in range(2):
        times = _measured(run)
        if is_sound(times):
            if key is not None:
                _kept[key] = times
                for oldest in list(_kept)[:-_MAX_KEPT]:
                    _kept.pop(oldest, None)
            return times
    logger.info("step times cannot be measured here, usual ones are taken: %s", times)
    unit = min((value for value in times if 0 < value < math.inf), default=_BRIEF)
    return tuple(unit * usual for usual in _USUAL)


def is_sound(times: Sequence[float]) -> bool:
    """Whether `times` can be those of steps of `MEASURED_SIZES` tokens."""
    usable = len(times) == len(MEASURED_SIZES) and all(0 < value < math.inf for value in times)
    return usable and all(before <= _MAX_FALL * value for before, value in pairwise(times))


def _measured(run: Run) -> tuple[float, ...]:
    first = run(MEASURED_SIZES[0])
    if first < _BRIEF:
        return tuple(shortest(run, count) for count in MEASURED_SIZES)
    smallest, middle, largest = first, run(MEASURED_SIZES[1]), run(MEASURED_SIZES[2])
    smallest = min(smallest, run(MEASURED_SIZES[0]))  # all others are told in it
    # reading weights takes the same whatever there is to compute, and computing grows with the tokens: drawn over
    # tokens, times never bend down
    share = (MEASURED_SIZES[1] - MEASURED_SIZES[0]) / (MEASURED_SIZES[2] - MEASURED_SIZES[0])
    if middle > (smallest + (largest - smallest) * share) * (1 + _AGREE):
        middle = min(middle, run(MEASURED_SIZES[1]))
    if largest > middle * MEASURED_SIZES[2] / MEASURED_SIZES[1] * (1 + _AGREE):
        largest = min(largest, run(MEASURED_SIZES[2]))
    return smallest, middle, largest


def shortest(run: Run, count: int) -> float:
    """Seconds of the shortest of some runs: of two, where nothing disturbs them."""
    taken = [run(count)]
    while len(taken) < _MAX_RUNS:
        taken.append(run(count))
        first, second = sorted(taken)[:2]
        if second <= first * (1 + _AGREE):
            break
    return min(taken)


def least_chance(costs: Sequence[float], draft_costs: Sequence[float]) -> float:
    """The chance of all its guesses being right below which a draft model should stop guessing.

    One more guess brings a token with that chance at most, and costs a step of the draft model and a place in the
    verifying step. Both arguments are seconds of steps of `MEASURED_SIZES` tokens.
    """
    place = max(0.0, costs[1] - costs[0]) / (MEASURED_SIZES[1] - MEASURED_SIZES[0])
    return min(1.0, (draft_costs[0] + place) / costs[0])
