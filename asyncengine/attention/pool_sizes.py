"""How many pages there are: of all layers, or of those that see everything and of those with windows.

A model that mixes the two kinds gets two pools (`kvcache.window_books`), cut from the same bytes as one would be. Let P
be the pages of one pool for all layers, and a *sight* the pages that a running request holds of a window at a time.
Windowed layers get

- a sight for each of as many requests of two windows of tokens (of 1,024, if that is more) as fill P pages: so many of
  them, or of longer ones, run beside each other as before (of shorter ones fewer);
- at least eight sights, if they are no more than half of P;
- no more than a sight for each of `max_num_seqs`, and what a step computes;
- no less than one request needs that computes a whole step.

All else is for the layers that see everything, and holds the longer contexts. As window pages are fewer than P, the
others are more: what fitted into one pool fits into two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from asyncengine.attention.base import LayerSpec, page_bytes
from asyncengine.attention.factory import kv_budget, kv_dtype, num_pages_for
from asyncengine.config import EngineConfig

BESIDE = 3
"""Pages of a sight beside those that a window fills: it may begin and end anywhere, and one is written next."""
_WINDOWS, _TOKENS = 2, 1024
"""Requests of so many windows, and of so many tokens, are as many as they were in one pool."""
_SIGHTS = 8


class PoolSizes(NamedTuple):
    """Pages of an engine, page 0 of each pool included."""

    pages: int
    window_pages: int = 0
    """0: one pool for all layers."""
    one_pool: str | None = None
    """Why; None: there are two."""


@dataclass(frozen=True, slots=True)
class TwoPools:
    """What decides how bytes are divided among the two pools of a model."""

    page_bytes: int
    """Of layers that see everything."""
    window_page_bytes: int
    """Of those with windows."""
    sight: int
    """Pages of a window."""
    least: int
    """Pages of a window and of a whole step."""
    usual: int
    """Pages of a request of which as many run beside each other as in one pool."""
    most: int
    """More window pages are of no use."""
    longest: int
    """More pages are of no use."""

    def split(self, budget: int) -> tuple[int, int]:
        """(pages, window pages) in so many bytes, page 0 of each included; no window pages: one pool holds as much."""
        one = min(budget // (self.page_bytes + self.window_page_bytes), self.longest)
        wanted = max(one * self.sight // self.usual, min(_SIGHTS * self.sight, one // 2))
        windows = 1 + max(min(wanted, self.most), self.least)
        pages = min((budget - windows * self.window_page_bytes) // self.page_bytes, self.longest)
        if windows >= one or pages <= one:
            return one, 0
        return pages, min((budget - pages * self.page_bytes) // self.window_page_bytes, pages)

    def budget_for(self, pages: int) -> int:
        """The least bytes, in pages of one pool, in which there are so many of the layers that see everything."""
        both = self.page_bytes + self.window_page_bytes
        too_few, enough = 0, pages
        while enough - too_few > 1:
            middle = (enough + too_few) // 2
            if self.split(middle * both)[0] < pages:
                too_few = middle
            else:
                enough = middle
        return enough * both


def pool_sizes(
    layers: Sequence[LayerSpec],
    config: EngineConfig,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
    free_bytes: int,
    *,
    others: Sequence[LayerSpec] = (),
    states: bool = False,
    divide: bool = True,
) -> PoolSizes:
    """Of a model of `layers` beside which `others` have keys and values on the same pages (a draft model's). `states`:
    it keeps recurrent states. Not `divide`: rows will name pages of one pool. Raises as `num_pages_for`."""
    one = num_pages_for([*layers, *others], config, max_model_len, dtype, device, free_bytes)
    reason = why_one_pool(layers, device, states=states) if divide else "rows name pages of one pool"
    if reason is not None:
        return PoolSizes(one, 0, reason)
    pools = two_pools(layers, config, max_model_len, dtype, others=others)
    pages, windows = pools.split(kv_budget(config, device, free_bytes))
    return PoolSizes(pages, windows) if windows else PoolSizes(one, 0, "the KV cache holds no more in two pools")


def why_one_pool(layers: Sequence[LayerSpec], device: torch.device, *, states: bool = False) -> str | None:
    """Why all layers share their pages; None: those with windows have their own, if that gains anything."""
    if not any(spec.windowed for spec in layers):
        return "no layer has a window"
    if all(spec.windowed for spec in layers):
        return "every layer has a window"
    if states:
        return "the model keeps recurrent states as well"
    if device.type != "cpu":
        return "on a GPU, plans are of one pool"
    return None


def two_pools(
    layers: Sequence[LayerSpec], config: EngineConfig, max_model_len: int, dtype: torch.dtype, *,
    others: Sequence[LayerSpec] = (),
) -> TwoPools:  # fmt: skip
    """Of a model of which some `layers` have windows and some have not, as the module says."""
    size, kind = config.page_size, kv_dtype(config, dtype)
    windowed = [spec for spec in layers if spec.windowed]
    whole = [*(spec for spec in layers if not spec.windowed), *others]
    window = window_of(layers)
    ahead = min(config.most_ahead, max_model_len)
    sight = -(-(window - 1) // size) + BESIDE
    return TwoPools(
        page_bytes=page_bytes(whole, size, kind),
        window_page_bytes=page_bytes(windowed, size, kind),
        sight=sight,
        least=-(-(window - 1 + ahead) // size) + BESIDE,
        usual=-(-max(_WINDOWS * window, _TOKENS) // size),
        most=config.max_num_seqs * sight + -(-ahead // size),
        longest=config.max_num_seqs * -(-max_model_len // size) + 1,
    )


def window_of(layers: Sequence[LayerSpec]) -> int:
    """Tokens that a layer with a window sees at most, its own position included; 0: there is none."""
    return max((min(most for most in (each.window, each.chunk) if most) for each in layers if each.windowed), default=0)
