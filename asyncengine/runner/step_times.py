"""Seconds of steps in which one row computes a few tokens: what guesses cost (`speculation.costs`).

Somebody waits for the model meanwhile, and a step of a gigabyte takes a twentieth of a second. So a step that takes
long is run once, and again only if it took longer than those of more and of fewer tokens allow. What was measured is
kept, beside the compiled kernels, under the name of all that a step depends on. Next time only the smallest step is
run, and one that took twice as long, of which arithmetic is the larger part: if it is as much longer as it was then,
the same holds of the others, in the unit of today. If it is somewhat more or less so, memory has become faster or
slower, or something was in the way when they were measured (compilers, behind a first load); what tokens add to the
smallest step is taken to have changed alike for all of them, and is kept.

A busy machine may give any numbers. Those that cannot be are measured once more, then left for the usual ones: what a
guess costs decides how much is guessed, no answer and no load.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from asyncengine.config import EngineConfig
from asyncengine.models.decoder import Decoder
from asyncengine.models.loading import LoadedModel
from asyncengine.speculation.costs import SIZES

logger = logging.getLogger("asyncengine")

_MEASURED = 3
_AGREE = 0.04
"""A step is run until two runs of it agree to that share, three times at most: the shortest counts."""
_BRIEF = 0.01
"""Seconds of the smallest step from which on that takes too long. What disturbs a step is less of a long one, too."""
_TELLING = 2.0
"""How much longer than the smallest step one takes that is run to see whether what was kept still holds. The largest
may take ten times as long, and says no more."""
_HOLDS = 0.15
"""By how much that step, in units of the smallest, may differ from what was kept."""
_ALIKE = 2.0
"""By what factor that which its tokens add may differ, if it is not just a disturbed run: beyond, all are measured."""
_FALLS = 1.5
"""By what factor a step may take less time than one of fewer tokens, before something was in the way of one of them."""
_USUAL = (1.0, 1.25, 1.75, 2.75, 4.75)
"""Steps of `SIZES` in the smallest, of a model whose weights are read for a millisecond and more."""
_WORTH_KEEPING = 0.1
"""Seconds of one step of each size. Small models are measured in less time than a file takes to explain."""

Run = Callable[[int], float]
"""Seconds of one step of so many tokens."""


class KeptTimes:
    """What was measured of one model, on this machine, with these kernels."""

    def __init__(self, model: LoadedModel, config: EngineConfig, threads: int) -> None:
        """Only for models of compiled kernels: they lie in the folder of those."""
        from asyncengine.kernels.cpu.cache import folder_here

        described = model.model.config if isinstance(model.model, Decoder) else type(model.model).__name__
        parts = (
            described, model.fused, sorted(model.stored.items()), str(model.dtype), model.max_model_len,
            config.page_size, threads, torch.__version__,
        )  # fmt: skip
        self._folder = folder_here()
        self._name = f"step_times-{hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}"

    def read(self) -> tuple[float, ...] | None:
        """Of all `SIZES`; None: they were never measured, or are not what they should be."""
        try:
            found = json.loads(self._folder.find(self._name) or b"null")
        except (ValueError, RecursionError):
            return None
        if not isinstance(found, list) or not all(isinstance(value, float) for value in found):
            return None
        return tuple(found) if is_sound(found) else None

    def keep(self, times: Sequence[float]) -> None:
        if sum(times) >= _WORTH_KEEPING:
            self._folder.keep(self._name, json.dumps(list(times)).encode())


def measure_steps(run: Run, kept: KeptTimes | None) -> tuple[float, ...]:
    """Seconds of steps of `SIZES` tokens, positive; `kept`: where they are looked for and put."""
    known = None if kept is None else kept.read()
    told, holds = (None, False) if known is None else _as_known(run, known)
    times = told or ()
    for _ in range(2):
        if not is_sound(times):
            times, holds = _measured(run), False
    if not is_sound(times):
        logger.info("what steps take cannot be measured here, usual times are taken: %s", times)
        unit = min((value for value in times if 0 < value < math.inf), default=_BRIEF)
        return tuple(unit * usual for usual in _USUAL)
    if kept is not None and not holds:
        kept.keep(times)
    return times


def is_sound(times: Sequence[float]) -> bool:
    """Whether `times` can be those of steps of `SIZES` tokens."""
    usable = len(times) == len(SIZES) and all(0 < value < math.inf for value in times)
    return usable and all(before <= _FALLS * value for before, value in pairwise(times))


def _as_known(run: Run, known: Sequence[float]) -> tuple[tuple[float, ...] | None, bool]:
    """The times of today, by two of them, and whether those that are known still hold; None: they have nothing to do
    with these."""
    telling = next((place for place, value in enumerate(known) if value >= _TELLING * known[0]), len(known) - 1)
    then = known[telling] / known[0]
    smallest = longer = math.inf
    for _ in range(_MEASURED):  # one of the two may have been disturbed
        smallest, longer = min(smallest, run(SIZES[0])), min(longer, run(SIZES[telling]))
        if smallest <= 0:
            return None, False
        if abs(longer / smallest / then - 1) <= _HOLDS:
            return tuple(smallest * value / known[0] for value in known), True
    added = (longer / smallest - 1) / (then - 1) if then > 1 else 0.0
    if 1 / _ALIKE <= added <= _ALIKE:
        return tuple(smallest * (1 + added * (value / known[0] - 1)) for value in known), False
    return None, False


def _measured(run: Run) -> tuple[float, ...]:
    first = run(SIZES[0])
    if first < _BRIEF:
        return tuple(shortest(run, count) for count in SIZES)
    times = [first, *map(run, SIZES[1:])]
    times[0] = min(first, run(SIZES[0]))  # all others are told in it
    for place, count in enumerate(SIZES):
        if times[place] > _allowed(times, place) * (1 + _AGREE):
            times[place] = min(times[place], run(count))
    return tuple(times)


def _allowed(times: Sequence[float], place: int) -> float:
    """The longest that a step takes, going by its neighbours. Reading weights takes the same whatever there is to be
    computed, and computing as much longer as there is more of it: drawn over tokens, times never bend down."""
    if place == 0:
        return times[1]
    if place == len(SIZES) - 1:
        return times[place - 1] * SIZES[place] / SIZES[place - 1]
    low, here, high = SIZES[place - 1 : place + 2]
    return times[place - 1] + (times[place + 1] - times[place - 1]) * (here - low) / (high - low)


def shortest(run: Run, count: int) -> float:
    """Seconds of the shortest of some runs: of two, where nothing disturbs them."""
    taken = [run(count)]
    while len(taken) < _MEASURED:
        taken.append(run(count))
        first, second = sorted(taken)[:2]
        if second <= first * (1 + _AGREE):
            break
    return min(taken)
