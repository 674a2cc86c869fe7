"""Experts that each row goes to, and their weights: scores, groups, choice and normalisation in one pass.

Of equal scores the expert with the lowest number is taken. A row's choice depends on that row alone.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from asyncengine.kernels.cpu.activation import exponential
from asyncengine.kernels.cpu.jit import allocates, array, inline, pointer, serial_in_order, with_gil

_AT_ONCE = 2**13
"""Scores up to which the interpreter's lock is kept: some ten microseconds."""
_NONE = np.float32(-np.inf)


class RouteSettings(NamedTuple):
    """The settings by which scores become weights."""

    experts: int
    chosen: int
    """Experts of a row."""
    sigmoid: bool
    """Scores are sigmoids of the logits; else their softmax."""
    groups: int
    """Equal groups of the experts, of which a row uses those `kept` with the largest sum of their two best."""
    kept: int
    normalised: bool
    """Weights of a row are divided by their sum, or by `least` if that is larger."""
    least: float
    scale: float
    """A factor of the weights."""
    spread: float = -1.0
    """The spread of sparsemixer (`layers.routing.RouterConfig`); below 0: scores are of all logits."""
    by_best: bool = False
    """Groups are compared by their best score alone."""


def route(
    logits: torch.Tensor, correction: torch.Tensor | None, by_expert: torch.Tensor | None, settings: RouteSettings
) -> tuple[torch.Tensor, torch.Tensor]:
    """(experts int64 [rows, chosen], their weights float32 alike), best first; logits float32 [rows, at least experts].

    `correction` float32 [experts] is added to scores where experts are chosen, and not to weights; weights are
    multiplied by `by_expert`, float32 alike. All contiguous.
    """
    rows, columns = logits.shape
    ids = torch.empty((rows, settings.chosen), dtype=torch.int64)
    weights = torch.empty((rows, settings.chosen), dtype=torch.float32)
    run = _route_few if rows * columns <= _AT_ONCE else route_rows
    run(
        logits.data_ptr(), 0 if correction is None else correction.data_ptr(),
        0 if by_expert is None else by_expert.data_ptr(), ids.data_ptr(), weights.data_ptr(), rows, columns,
        settings.experts, settings.chosen, settings.sigmoid, settings.groups, settings.kept, settings.by_best,
        settings.normalised, np.float32(settings.least), np.float32(settings.scale), np.float32(settings.spread),
    )  # fmt: skip
    return ids, weights


@serial_in_order
@allocates
def route_rows(
    logits: int, correction: int, by_expert: int, ids: int, weights: int, rows: int, columns: int, experts: int,
    chosen: int, sigmoid: bool, groups: int, kept: int, by_best: bool, normalised: bool, least: np.float32,
    scale: np.float32, spread: np.float32,
) -> None:  # fmt: skip
    """`route` by address."""
    single = np.float32(0)
    row_logits = array(pointer(logits, single), (rows, columns))
    corrections = array(pointer(correction, single), (experts,))
    factors = array(pointer(by_expert, single), (experts,))
    chosen_ids = array(pointer(ids, np.int64(0)), (rows, chosen))
    shares = array(pointer(weights, single), (rows, chosen))
    scores, choice = np.empty(experts, np.float32), np.empty(experts, np.float32)
    by_group = np.empty(groups, np.float32)
    for row in range(rows):
        if spread >= 0:
            _mix_sparsely(row_logits[row, :experts], chosen_ids[row], shares[row], spread)
            continue
        _score(row_logits[row], scores, experts, sigmoid)
        for expert in range(experts):
            choice[expert] = scores[expert] + corrections[expert] if correction != 0 else scores[expert]
        if kept < groups:
            _keep_groups(choice, by_group, experts // groups, kept, by_best)
        total = np.float32(0)
        for rank in range(chosen):
            best = _take_best(choice, chosen_ids[row], rank)
            shares[row, rank] = scores[best]
            total += scores[best]
        for rank in range(chosen):
            share = shares[row, rank]
            if normalised:
                share /= max(total, least)
            share *= scale
            shares[row, rank] = share * factors[chosen_ids[row, rank]] if by_expert != 0 else share


_route_few = with_gil(route_rows)


@inline
def _mix_sparsely(
    logits: NDArray[np.float32], taken: NDArray[np.int64], shares: NDArray[np.float32], spread: np.float32
) -> None:
    """One expert after the other, each with its share among those that are left and near it (`layers.routing`)."""
    for rank in range(len(taken)):
        largest, total = logits[_take_best(logits, taken, rank)], np.float32(0)
        for expert in range(len(logits)):
            near = not (largest - logits[expert]) / max(abs(logits[expert]), largest) > np.float32(2) * spread
            for earlier in range(rank):
                near = near and taken[earlier] != expert
            if near:
                total += exponential(logits[expert] - largest)
        shares[rank] = np.float32(1) / total


@inline
def _score(logits: NDArray[np.float32], scores: NDArray[np.float32], experts: int, sigmoid: bool) -> None:
    if sigmoid:
        for expert in range(experts):
            scores[expert] = np.float32(1) / (np.float32(1) + exponential(-logits[expert]))
        return
    largest = logits[0]
    for expert in range(experts):
        largest = max(largest, logits[expert])
    total = np.float32(0)
    for expert in range(experts):
        scores[expert] = exponential(logits[expert] - largest)
        total += scores[expert]
    for expert in range(experts):
        scores[expert] /= total


@inline
def _take_best(choice: NDArray[np.float32], taken: NDArray[np.int64], rank: int) -> int:
    """The expert with the largest value that is not among the first `rank` of `taken`, to which it is added.

    NaN is never larger than another value, but the first free expert is taken whatever its value: there is always one.
    """
    best = -1
    for expert in range(len(choice)):
        free = True
        if not (best < 0 or choice[expert] > choice[best]):
            continue
        for earlier in range(rank):
            free = free and taken[earlier] != expert
        if free:
            best = expert
    taken[rank] = best
    return best


@inline
def _keep_groups(
    choice: NDArray[np.float32], by_group: NDArray[np.float32], size: int, kept: int, by_best: bool
) -> None:
    """Set all experts of `choice` to -inf but those of the `kept` best groups."""
    for group in range(len(by_group)):
        first, second = _NONE, _NONE
        for expert in range(group * size, (group + 1) * size):
            value = choice[expert]
            if value > first:
                first, second = value, first
            elif value > second:
                second = value
        by_group[group] = first if by_best else first + second
    best = np.empty(kept, np.int64)
    for rank in range(kept):
        _take_best(by_group, best, rank)
    for group in range(len(by_group)):
        stays = False
        for rank in range(kept):
            stays = stays or best[rank] == group
        if not stays:
            for expert in range(group * size, (group + 1) * size):
                choice[expert] = _NONE
