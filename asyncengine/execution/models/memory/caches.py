"""Sizes of the caches: pages of keys and values, and slots for recurrent states.

A model with layers of full attention and layers with sliding windows gets two pools of pages (`kvcache.page_group`),
which together take the bytes of a single pool. Let P be the pages of a single pool for all layers, and a *span* the
pages that a running request holds of a window at a time. Windowed layers get

- a span for each request, if P pages were filled by requests of two windows of tokens (at least 1,024): as many
  requests of this length, or longer, run concurrently as in a single pool (of shorter ones fewer);
- at least eight spans, if they are no more than half of P;
- at most a span for each of `max_num_seqs`, plus the pages that a step writes;
- at least the pages of one request that fills a whole step.

The other layers get the rest, which holds longer contexts: as window pages are fewer than P, these pages are more than
P, so that requests that fit into a single pool also fit into two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from asyncengine.config import EngineConfig
from asyncengine.errors import InvalidParameter, OutOfMemory
from asyncengine.execution.attention.base import LayerSpec, page_bytes
from asyncengine.execution.attention.factory import kv_dtype
from asyncengine.execution.device.memory import limited_by
from asyncengine.execution.layers.states import StateSpec

MODEST_TOKENS = 256
"""A pool that cannot hold one request of this length (or of the model's whole context, if less) is refused."""
_SHARE, _CPU_CAP = 0.25, 4 * 2**30
"""Default share of free memory for a cache, and on a CPU its limit in bytes (the machine has other work)."""
_CUDA_KEPT_BACK = (0.15, 4 * 2**30)
"""Share or bytes, whichever is less, of the memory beside the largest step that a GPU's pool leaves free: for CUDA
graphs, adapters that are loaded later, and fragmentation in torch's allocator."""
_BARE_PAGES = 2**17
"""Most pages of a model without attention, unless one request needs more. They hold no keys and values, and only count
the tokens of requests."""
_EDGES = 3
"""Pages of a span beyond those that a window fills: it may begin and end within pages, and one is written next."""
_APART = 2**16
"""Most bytes of padding between two tensors of a cache."""
_WINDOWS, _TOKENS, _SPANS = 2, 1024, 8
"""Windows and least tokens of the requests, and least number of spans, in the rules above."""


class PoolSizes(NamedTuple):
    """Pages of an engine's pools, including page 0 of each."""

    pages: int
    window_pages: int = 0
    """Pages of the windowed layers' pool; 0 if all layers share one pool."""
    one_pool: str | None = None
    """Reason for a single pool; None if there are two."""


@dataclass(frozen=True, slots=True)
class TwoPools:
    """Division of bytes between the pool of the layers with full attention and that of the layers with windows."""

    page_bytes: int
    window_page_bytes: int
    span: int
    """Pages that a running request holds of a window."""
    least: int
    """Least window pages: those of a request that fills a whole step."""
    usual: int
    """Pages of the request length from which on as many requests run concurrently as in a single pool."""
    most: int
    """Most window pages that could be used."""
    longest: int
    """Most pages that could be used."""

    def split(self, budget: int) -> tuple[int, int]:
        """(pages, window pages) in `budget` bytes, with page 0 of each; no window pages if one pool holds as much."""
        one = min(budget // (self.page_bytes + self.window_page_bytes), self.longest)
        wanted = max(one * self.span // self.usual, min(_SPANS * self.span, one // 2))
        # page 0 of a pool is never given to a request
        windows = 1 + max(min(wanted, self.most), self.least)
        pages = min((budget - windows * self.window_page_bytes) // self.page_bytes, self.longest)
        if windows >= one or pages <= one:
            return one, 0
        return pages, min((budget - pages * self.page_bytes) // self.window_page_bytes, pages)

    def budget_for(self, pages: int) -> int:
        """The least bytes, a multiple of a page of all layers, that hold `pages` of the layers with full attention."""
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
    layers: Sequence[LayerSpec], config: EngineConfig, max_model_len: int, dtype: torch.dtype, device: torch.device,
    free_bytes: int, *, others: Sequence[LayerSpec] = (), states: bool = False, divide: bool = True,
) -> PoolSizes:  # fmt: skip
    """Pages for a model with `layers`. `others`: layers of a draft model on the same pages. `states`: the model keeps
    recurrent states. `divide=False`: rows have page tables of a single pool. Raises as `num_pages_for`."""
    one = num_pages_for([*layers, *others], config, max_model_len, dtype, device, free_bytes)
    reason = why_one_pool(layers, device, states=states) if divide else "rows name pages of one pool"
    if reason is not None:
        return PoolSizes(one, 0, reason)
    pools = two_pools(layers, config, max_model_len, dtype, others=others)
    pages, windows = pools.split(_kv_budget(config.kv_cache_memory, device, free_bytes))
    return PoolSizes(pages, windows) if windows else PoolSizes(one, 0, "the KV cache holds no more in two pools")


def num_pages_for(
    layers: Sequence[LayerSpec], config: EngineConfig, max_model_len: int, dtype: torch.dtype, device: torch.device,
    free_bytes: int,
) -> int:  # fmt: skip
    """Pages of one pool, including page 0.

    They fill `kv_cache_memory` if given; else a share of `free_bytes`, at most the pages of `max_num_seqs` requests of
    `max_model_len` tokens, and on a CPU at most 4 GiB. Without layers, pages only count the tokens of requests.

    Raises `OutOfMemory` with the numbers if a request of modest length would not fit, or if `kv_cache_memory` is more
    than is free.
    """
    size = page_bytes(layers, config.page_size, kv_dtype(config.kv_cache_dtype, dtype))
    per_request = -(-max_model_len // config.page_size)
    if not layers:
        return min(config.max_num_seqs * per_request, max(per_request, _BARE_PAGES)) + 1
    budget = _kv_budget(config.kv_cache_memory, device, free_bytes)
    pages = min(budget // size, config.max_num_seqs * per_request + 1)
    least = modest_pages(config.page_size, max_model_len) if config.kv_cache_memory is None else 2
    if pages < least:
        raise OutOfMemory(
            f"the KV cache gets {_mib(budget)}, which is {pages} pages of {config.page_size} tokens "
            f"({size / 1024:.0f} KiB each); at least {least} are needed"
        )
    return pages


def modest_pages(page_size: int, max_model_len: int) -> int:
    """Pages of the smallest pool that is not refused, including page 0."""
    return -(-min(MODEST_TOKENS, max_model_len) // page_size) + 1


def _kv_budget(kv_cache_memory: int | str | None, device: torch.device, free_bytes: int) -> int:
    """Bytes that keys and values may take. Raises `OutOfMemory` if `kv_cache_memory` is more than is free."""
    assert kv_cache_memory is None or isinstance(kv_cache_memory, int)
    if kv_cache_memory is not None:
        _check_free("kv_cache_memory", kv_cache_memory, device, free_bytes)
        return kv_cache_memory
    if device.type == "cpu":
        return min(int(free_bytes * _SHARE), _CPU_CAP)
    share, most = _CUDA_KEPT_BACK
    return free_bytes - min(int(free_bytes * share), most)


def why_one_pool(layers: Sequence[LayerSpec], device: torch.device, *, states: bool = False) -> str | None:
    """Why all layers must share one pool; None if layers with windows may have their own."""
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
    """The division for a model in which some of `layers` have windows and others do not."""
    size, kv_type = config.page_size, kv_dtype(config.kv_cache_dtype, dtype)
    windowed = [spec for spec in layers if spec.windowed]
    whole = [*(spec for spec in layers if not spec.windowed), *others]
    window = window_of(layers)
    ahead = min(config.most_ahead, max_model_len)
    span = -(-(window - 1) // size) + _EDGES
    return TwoPools(
        page_bytes=page_bytes(whole, size, kv_type), window_page_bytes=page_bytes(windowed, size, kv_type), span=span,
        least=-(-(window - 1 + ahead) // size) + _EDGES, usual=-(-max(_WINDOWS * window, _TOKENS) // size),
        most=config.max_num_seqs * span + -(-ahead // size),
        longest=config.max_num_seqs * -(-max_model_len // size) + 1,
    )  # fmt: skip


def window_of(layers: Sequence[LayerSpec]) -> int:
    """Most tokens that a layer with a window attends to, its own position included; 0 if no layer has a window."""
    return max((min(most for most in (each.window, each.chunk) if most) for each in layers if each.windowed), default=0)


def state_bytes(specs: Sequence[StateSpec], dtype: torch.dtype) -> int:
    """Bytes of one sequence's recurrent states, all layers together."""
    return sum(spec.nbytes(dtype) for spec in specs)


def room_for(
    layers: Sequence[LayerSpec], states: Sequence[StateSpec], pages: int, window_pages: int, num_states: int,
    page_size: int, dtype: torch.dtype,
) -> int:  # fmt: skip
    """Upper bound of the bytes of these caches in one process, for any backend's layout."""
    of_windows = window_pages or pages
    kept = sum((of_windows if spec.windowed else pages) * page_bytes([spec], page_size, dtype) for spec in layers)
    # backends may pad keys of few dimensions to twice their size, and tensors to an alignment
    return 2 * kept + num_states * state_bytes(states, dtype) + 2 * (len(layers) + len(states)) * _APART


def num_states_for(
    specs: Sequence[StateSpec], state_memory: int | str | None, max_num_seqs: int, dtype: torch.dtype,
    device: torch.device, free_bytes: int,
) -> int:  # fmt: skip
    """Slots for recurrent states, including slot 0; 0 if the model has none.

    They fill `state_memory` if given; else a share of `free_bytes`, at most enough for `max_num_seqs` running requests
    and as many snapshots, and on a CPU at most 4 GiB. Raises `InvalidParameter` for a `state_memory` that holds no
    request (which takes two slots: slot 0 is memory too), `OutOfMemory` if that is not free, or the share holds none.
    """
    size = state_bytes(specs, dtype)
    if not size:
        return 0
    assert state_memory is None or isinstance(state_memory, int)
    if state_memory is None:
        budget = int(free_bytes * _SHARE)
        if device.type == "cpu":
            budget = min(budget, _CPU_CAP)
        if budget < 2 * size:
            raise OutOfMemory(
                f"recurrent states get {_mib(budget)}, and one takes {size / 2**20:.1f} MiB; two are needed"
            )
        return min(budget // size, 2 * max_num_seqs + 1)
    if state_memory < 2 * size:
        raise InvalidParameter(
            "state_memory", f"one state takes {size} bytes, and a request needs two: at least {2 * size}", state_memory
        )
    _check_free("state_memory", state_memory, device, free_bytes)
    return state_memory // size


def _check_free(setting: str, asked: int, device: torch.device, free_bytes: int) -> None:
    if asked > free_bytes:
        raise OutOfMemory(
            f"{setting} asks for {_mib(asked)}, but only {_mib(free_bytes)} are free on {device}{limited_by(device)}"
        )


def _mib(count: int) -> str:
    return f"{count / 2**20:.0f} MiB"
