"""Paged attention on the CPU by compiled kernels: bfloat16 and float32, anything a `LayerSpec` can say.

The pool's layout and the kernels are those of `kernels.cpu.attention_tiles`; here is what a step needs besides: which
thread computes which queries over which keys. Pages need no clearing: the kernels add up nothing beyond a row's own
keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from asyncengine.execution.attention import base, cpu_short
from asyncengine.execution.device.arena import Empty, ordinary
from asyncengine.execution.device.shared_gather import SharedPools
from asyncengine.execution.device.transfer import Int64Array
from asyncengine.kernels.api import PagedAttention, team
from asyncengine.kernels.api import attention_fields as fields

_BYTES = 26
"""That could be read for a cost of 1."""
_PAGE = 64
"""Tokens of a page where sequences are attended to as a whole: each begins with one of its own."""


@dataclass(frozen=True, slots=True)
class _LayerGroup:
    """Layers that share a plan."""

    window: int | None
    chunk: int | None
    first: int
    num_heads: int
    num_kv_heads: int


class CompiledBackend(base.AttentionBackend):
    """In compiled kernels. Construct it only where `compiler_missing` finds nothing missing."""

    name = "compiled"
    steady = True
    """Whether kernels are given the same addresses in every step."""

    def __init__(
        self, layers: Sequence[base.LayerSpec], num_pages: int, page_size: int, dtype: torch.dtype,
        one_pool: bool = False, num_window_pages: int = 0, shared: SharedPools | None = None,
    ) -> None:  # fmt: skip
        """`one_pool`: all layers of one shape write into the same memory, as nothing is kept from step to step.
        `num_window_pages`: of layers with windows, if they have pages of their own. `shared`: memory for pages; None:
        wherever torch puts them."""
        self.shared = shared
        self.num_pages = num_pages
        self.page_size = page_size
        self._layers = tuple(layers)
        self._dtype = dtype
        self._kernels = PagedAttention(dtype, page_size)
        known: dict[tuple[int, ...], _Memory] = {}
        empty = ordinary if shared is None else shared.empty
        self._pools = []
        for spec in layers:
            shape = (spec.num_kv_heads, spec.key_dim, spec.value_dim) if one_pool else (spec.index,)
            of_windows = bool(num_window_pages) and spec.windowed
            pages = num_window_pages if of_windows else num_pages
            if shape not in known:
                known[shape] = _Memory(spec, pages * page_size, dtype, empty)
            memory = known[shape]
            self._pools.append(_LayerPool(spec, pages, page_size, self._kernels.lanes, memory, of_windows))
        self.kv_bytes = sum(memory.bytes for memory in known.values())
        self._groups = {_group_of(spec): spec for spec in layers}
        self._plans = {group: cpu_short.StepPlan() for group in self._groups}
        self._planned = [self._plans[_group_of(spec)] for spec in layers]
        self._scratch_size = max((_scratch_bytes(spec) for spec in layers), default=0)
        self._widest = max((spec.value_dim for spec in layers), default=0)
        self._threads, self._piece = 1, 1
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._partials = torch.empty(0)

    def plan(self, step: base.StepView) -> None:
        self._threads, self._piece, workers = team.team_threads()
        if self._scratch.numel() < workers * self._scratch_size:
            self._scratch = torch.empty(workers * self._scratch_size, dtype=torch.uint8)
        near, far, rows = step.for_windows(), step, None
        if step.blocks:
            far = step.for_others()
        else:
            rows = _short_rows(step)
        for group, spec in self._groups.items():
            self._plan_group(self._plans[group], spec, near if spec.windowed else far, rows)

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self._kernels.write(_dense(key), _dense(value), self._pools[layer].address, self._planned[layer].step)

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        query = _dense(query)
        spec = self._layers[layer]
        out = query.new_empty((query.shape[0], spec.num_heads, spec.value_dim))
        size = query.element_size()
        self._attend(layer, query, query.stride(0) * size, query.stride(1) * size, out)
        return out

    def attend_merged(
        self, layer: int, qkv: torch.Tensor, heads: base.MergedHeads, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """Norms, rotation, `write` and `attend` at once. -> [tokens, heads * value dim].

        qkv [tokens, (heads + kv heads) * key dim + kv heads * value dim] contiguous, the layer's heads in order;
        cos and sin [tokens, rotary dim] contiguous in the model's type.
        """
        spec = self._layers[layer]
        query = self.write_merged(layer, qkv, heads, cos, sin)
        out = qkv.new_empty((qkv.shape[0], spec.num_heads * spec.value_dim))
        head_size = spec.key_dim * qkv.element_size()
        self._attend(layer, query, spec.num_heads * head_size, head_size, out)
        return out

    def write_merged(
        self, layer: int, qkv: torch.Tensor, heads: base.MergedHeads, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """The first three of these. -> queries [tokens, heads * key dim]."""
        spec = self._layers[layer]
        query = qkv.new_empty((qkv.shape[0], spec.num_heads * spec.key_dim))
        self._kernels.prepare_and_write(
            qkv, query, heads.q_norm, heads.k_norm, heads.epsilon, cos, sin,
            self._pools[layer].address, self._planned[layer].step,
        )  # fmt: skip
        return query

    def _attend(self, layer: int, query: torch.Tensor, token_size: int, head_size: int, out: torch.Tensor) -> None:
        address, step = self._pools[layer].address, self._planned[layer].step
        self._kernels.attend(query, token_size, head_size, out, address, step)

    def warm_up(self) -> None:
        """Compile what only steps with long contexts call."""
        if self._pools:
            self._kernels.compile_join()

    def page_pools(self) -> list[base.PagePool]:
        """Memory of every layer, keys and values: a head's pages lie one behind the other."""
        return [pool for layer in self._pools for pool in layer.page_pools()]

    def close(self) -> None:
        self._pools, self._plans, self._planned = [], {}, []
        self._scratch, self._partials = torch.empty(0, dtype=torch.uint8), torch.empty(0)

    # -- planning ------------------------------------------------------------------------------------------------

    def _plan_group(
        self, plan: cpu_short.StepPlan, spec: base.LayerSpec, step: base.StepView, rows: cpu_short.ShortRows | None
    ) -> None:
        least = self._piece // _BYTES
        if rows is not None and (work := cpu_short.short_items(spec, rows, self._threads)) is not None:
            pieces = cpu_short.short_pieces(work.costs, spec.num_kv_heads, self._threads, least)
            if pieces is not None:
                self._have_partials(spec, work.partials)
                plan.fill(
                    work, pieces, step.page_tables, step.kv_slots, self._partials, self._scratch, self._scratch_size
                )
                return
        items, joins = self._items(spec, step)
        heads = spec.num_heads // spec.num_kv_heads
        cost = (items[:, fields.END] - items[:, fields.BEGIN]) * (
            cpu_short.LOAD + heads * items[:, fields.COUNT]
        ) + cpu_short.START
        self._have_partials(spec, int(joins[:, 2].sum()))
        bounds = _even_pieces(cost, spec.num_kv_heads, self._threads, least)
        plan.refer_to(
            items, joins, bounds, step.page_tables, step.kv_slots, self._partials, self._scratch, self._scratch_size
        )

    def _have_partials(self, spec: base.LayerSpec, count: int) -> None:
        """Memory for so many partial results of one kv head each."""
        if count:
            group = spec.num_heads // spec.num_kv_heads
            need = count * spec.num_kv_heads * fields.partial_size(group, self._widest)
            if self._partials.numel() < need:
                self._partials = torch.empty(need, dtype=torch.float32)  # the default type is the whole process's

    def _items(self, spec: base.LayerSpec, step: base.StepView) -> tuple[Int64Array, Int64Array]:
        """Items to compute, [items, ITEM_FIELDS], and results to join, [joins, 3]."""
        decodes = np.flatnonzero(step.counts == 1)
        positions = step.starts[decodes]
        begins = np.maximum(base.first_seen(spec.window, spec.chunk, positions), spec.first)
        first = begins // fields.SPLIT
        parts = positions // fields.SPLIT - first + 1
        if not self._worth_splitting(spec, step, positions + 1 - begins):
            parts = np.ones_like(parts)
        which = np.repeat(np.arange(len(decodes)), parts)
        turn = np.arange(len(which)) - (np.cumsum(parts) - parts)[which]
        several = parts[which] > 1
        items = np.zeros((len(which), fields.ITEM_FIELDS), dtype=np.int64)
        items[:, fields.TOKEN] = step.qo_indptr[decodes][which]
        items[:, fields.COUNT] = 1
        items[:, fields.POSITION] = positions[which]
        items[:, fields.ROW] = decodes[which]
        from_split = (first[which] + turn) * fields.SPLIT
        items[:, fields.BEGIN] = np.maximum(begins[which], from_split)
        ends = positions[which] + 1
        items[:, fields.END] = np.where(several, np.minimum(ends, from_split + fields.SPLIT), ends)
        items[:, fields.PARTIAL] = np.where(several, np.cumsum(several) - 1, -1)
        starts = np.flatnonzero(several & (turn == 0))
        joins = np.stack((items[starts, fields.TOKEN], items[starts, fields.PARTIAL], parts[which[starts]]), axis=1)
        chunks = [_chunk_items(spec, step, row) for row in np.flatnonzero(step.counts > 1).tolist()]
        return np.concatenate((items, *chunks)), np.ascontiguousarray(joins)

    def _worth_splitting(self, spec: base.LayerSpec, step: base.StepView, keys: Int64Array) -> bool:
        """True if whole decode rows are too few or too uneven for the threads. The results are the same."""
        if len(keys) == 0 or self._threads == 1 or len(keys) < len(step.counts):
            return False
        return int(keys.max()) * self._threads * cpu_short.EVEN > int(keys.sum()) * spec.num_kv_heads


class CompiledSequences:
    """`SequenceAttention` of encoders, by the kernels of `CompiledBackend` over a pool of the step alone."""

    def __init__(self, layers: Sequence[base.LayerSpec], dtype: torch.dtype) -> None:
        self._layers, self._dtype = tuple(layers), dtype
        self._paged = CompiledBackend(self._layers, 1, _PAGE, dtype, one_pool=True)

    def plan(self, counts: Sequence[int]) -> CompiledBackend:
        """The pool grows to the longest step there was: one layer's keys and values of its tokens."""
        lengths = np.array(counts, dtype=np.int64)
        pages = -(-lengths // _PAGE)
        ends = np.cumsum(pages)
        needed = int(ends[-1])
        if needed > self._paged.num_pages:
            self._paged = CompiledBackend(self._layers, needed, _PAGE, self._dtype, one_pool=True)
        table = (ends - pages)[:, None] + np.arange(pages.max())
        bounds = np.concatenate(([0], np.cumsum(lengths)))
        places = np.arange(bounds[-1]) + np.repeat((ends - pages) * _PAGE - bounds[:-1], lengths)
        self._paged.plan(
            base.StepView(np.zeros_like(lengths), lengths, bounds, table.astype(np.int32), torch.from_numpy(places))
        )
        return self._paged


class _Memory:
    """Memory for the keys and values of `tokens` tokens. Untouched memory costs nothing."""

    def __init__(self, spec: base.LayerSpec, tokens: int, dtype: torch.dtype, empty: Empty) -> None:
        size, numbers = dtype.itemsize, tokens * spec.num_kv_heads
        # A key of an odd number of dimensions takes one more.
        self.keys = empty([numbers * (-(-spec.key_dim * size // 4) * 4) + fields.SLACK], torch.uint8)
        self.values = empty([numbers * (spec.kept_dims - spec.key_dim) * size + fields.SLACK], torch.uint8)
        self.bytes = self.keys.numel() + self.values.numel() - 2 * fields.SLACK


class _LayerPool:
    """One layer's keys and values, and its numbers for the kernels."""

    def __init__(
        self, spec: base.LayerSpec, num_pages: int, page_size: int, lanes: int, memory: _Memory, of_windows: bool
    ) -> None:
        self._memory = memory
        self._numbers = torch.tensor([spec.scale, spec.softcap or 0.0], dtype=torch.float32)
        self._sinks = None if spec.sinks is None else spec.sinks.detach().to(torch.float32).contiguous()
        self._known = np.zeros(fields.LAYER_FIELDS, dtype=np.int64)
        for field, value in (
            (fields.POOL_KEYS, memory.keys.data_ptr()),
            (fields.POOL_VALUES, 0 if spec.latent else memory.values.data_ptr()),
            (fields.PAGES, num_pages), (fields.PAGE_SIZE, page_size), (fields.LANES, lanes),
            (fields.HEADS, spec.num_heads), (fields.KV_HEADS, spec.num_kv_heads), (fields.KEY_DIM, spec.key_dim),
            (fields.VALUE_DIM, spec.value_dim), (fields.NUMBERS, self._numbers.data_ptr()),
            (fields.SINKS, 0 if self._sinks is None else self._sinks.data_ptr()), (fields.WINDOW, spec.window or 0),
            (fields.LATER, spec.later),
        ):  # fmt: skip
            self._known[field] = value
        self.address = _address(self._known)
        self._pages, self._of_windows, self._divided = num_pages, of_windows, spec.divided

    def page_pools(self) -> Iterator[base.PagePool]:
        """Memory of its keys, then of its values."""
        heads, memory = int(self._known[fields.KV_HEADS]), self._memory
        for part in (memory.keys, memory.values):
            if part.numel() == fields.SLACK:
                continue
            page_bytes = (part.numel() - fields.SLACK) // (self._pages * heads)
            yield base.PagePool(part, page_bytes, heads, self._pages * page_bytes, self._of_windows, self._divided)


def _chunk_items(spec: base.LayerSpec, step: base.StepView, row: int) -> Int64Array:
    """One prompt chunk, cut into pieces of a few queries; all of a piece are of one chunk of the layer's attention."""
    size = max(cpu_short.ROWS * spec.num_kv_heads // spec.num_heads, 1)
    count, start = int(step.counts[row]), int(step.starts[row])
    offsets = np.arange(0, count, size)
    if spec.chunk is not None:
        following = -(-(start + 1) // spec.chunk) * spec.chunk
        offsets = np.union1d(offsets, np.arange(following - start, count, spec.chunk))
    blocks = [(max(first - start, 0), end - start) for own, first, end in step.blocks if own == row]
    for bounds in blocks:
        offsets = np.union1d(offsets, [each for each in bounds if each < count])
    counts = np.diff(offsets, append=count)
    items = np.zeros((len(offsets), fields.ITEM_FIELDS), dtype=np.int64)
    items[:, fields.TOKEN] = step.qo_indptr[row] + offsets
    items[:, fields.COUNT] = counts
    items[:, fields.POSITION] = start + offsets
    items[:, fields.ROW] = row
    items[:, fields.BEGIN] = np.maximum(base.first_seen(spec.window, spec.chunk, start + offsets), spec.first)
    items[:, fields.END] = np.minimum(start + offsets + counts + spec.later, start + count)
    items[:, fields.PARTIAL] = -1
    for first, end in blocks:
        inside = (offsets >= first) & (offsets < end)
        items[inside, fields.BEYOND] = items[inside, fields.END] = start + end
    return items


def _even_pieces(cost: Int64Array, heads: int, threads: int, least: int) -> Int64Array:
    """[pieces + 1] bounds of the units of each piece, which go head by head over all items; a piece costs `least`."""
    ends = np.cumsum(cost)
    total = int(ends[-1]) * heads
    pieces = 1 if threads == 1 else max(1, min(threads * team.PER_THREAD, total // max(1, least), len(cost) * heads))
    wanted = np.arange(pieces + 1) * total // pieces
    head, rest = np.divmod(wanted, int(ends[-1]))
    return head * len(cost) + np.searchsorted(ends, rest, side="right")


def _short_rows(step: base.StepView) -> cpu_short.ShortRows | None:
    """None: a step of many tokens."""
    if step.kv_slots.numel() > cpu_short.FEW:
        return None
    return cpu_short.ShortRows(step.starts.tolist(), step.counts.tolist(), step.qo_indptr.tolist())


def _scratch_bytes(spec: base.LayerSpec) -> int:
    rows = max(cpu_short.ROWS, spec.num_heads // spec.num_kv_heads)
    turned = fields.turned_size(spec.value_dim) if spec.latent else 0
    return -(-int(fields.scratch_sizes(rows, spec.key_dim, spec.value_dim)[-1] + turned) // 4096) * 4096


def _group_of(spec: base.LayerSpec) -> _LayerGroup:
    return _LayerGroup(spec.window, spec.chunk, spec.first, spec.num_heads, spec.num_kv_heads)


def _dense(part: torch.Tensor) -> torch.Tensor:
    return part if part.stride(-1) == 1 else part.contiguous()


def _address(values: np.ndarray[Any, Any]) -> int:
    return values.__array_interface__["data"][0]
