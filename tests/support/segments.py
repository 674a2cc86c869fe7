"""Steps of state layers, by hand: which tokens belong to which row, and where states come from and go to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from support.teams import team_of

from asyncengine.execution.layers.states import StatePools, StateSegments, StateStep
from asyncengine.execution.layers.step import StepContext

Part = tuple[int, int, int]
"""(tokens, source, target)."""


def segments_of(rows: Sequence[Sequence[Part]]) -> StateSegments:
    """Segments of each row, whose tokens stand one after another in the step."""
    bounds, flat, token = [0], [], 0
    for row in rows:
        for tokens, source, target in row:
            flat.append((token, token + tokens, source, target))
            token += tokens
        bounds.append(len(flat))
    begins, ends, sources, targets = np.array(flat, dtype=np.int64).reshape(-1, 4).T.copy()
    return StateSegments(np.array(bounds, dtype=np.int64), begins, ends, sources, targets)


def forward(layer: Any, x: torch.Tensor, rows: Sequence[Sequence[Part]], pools: StatePools) -> torch.Tensor:
    """Outputs of a layer for inputs [tokens, width] of these rows; it keeps its states in `pools`."""
    backend: Any = None
    step = StepContext(torch.arange(len(x)), backend, states=StateStep(pools, segments_of(rows)))
    with torch.inference_mode():
        found: torch.Tensor = layer(x, step)
    return found


def memory_of(pools: StatePools) -> list[torch.Tensor]:
    """States and windows of one layer."""
    return [pool for pool in (*pools.recurrent, *pools.windows) if pool is not None]


def assert_same_bits(
    run: Callable[[torch.Tensor, Sequence[Sequence[Part]], StatePools], torch.Tensor],
    make_pools: Callable[[], StatePools],
    x: torch.Tensor,
    cut: int,
) -> None:
    """`run(inputs, rows, pools)` gives one sequence's inputs x [tokens, width] the same bits in any chunks, and in
    company by a team: results, states and windows. A snapshot after `cut` tokens is the state of a sequence that ends
    there. Pools need slots up to 18."""
    count, whole, early = len(x), make_pools(), make_pools()
    expected = run(x, [[(count, 0, 1)]], whole)
    run(x[:cut], [[(cut, 0, 1)]], early)
    for chunk in (1, 7, 16, 33):
        pools = make_pools()
        made = [run(part, [[(len(part), int(place > 0), 1)]], pools) for place, part in enumerate(x.split(chunk))]
        assert torch.equal(torch.cat(made), expected), f"chunk {chunk}"
        for own, complete in zip(memory_of(pools), memory_of(whole), strict=True):
            assert torch.equal(own[1], complete[1]), f"chunk {chunk}"
    pools = make_pools()
    rows: list[list[Part]] = [[(4, 0, 2), (5, 2, 2)], [(cut, 0, 5), (0, 5, 6), (count - cut, 6, 3)]]
    rows += [[(1, 0, slot)] for slot in range(7, 19)]
    with team_of(3):
        company = run(torch.cat((x[:9], x, *[x[:1]] * 12)), rows, pools)
    assert torch.equal(company, torch.cat((expected[:9], expected, *[expected[:1]] * 12)))
    for own, complete, first in zip(memory_of(pools), memory_of(whole), memory_of(early), strict=True):
        assert torch.equal(own[3], complete[1])
        assert torch.equal(own[5], first[1])
        assert torch.equal(own[6], first[1])
        assert not own[0].any()
