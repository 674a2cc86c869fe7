"""Paged attention on the CPU by compiled kernels: bfloat16 and float32, anything a `LayerSpec` can say.

The pool's layout and the kernels are those of `kernels.cpu.attention_tiles`; this file plans steps: which thread
computes which queries over which keys. Pages need no clearing, since the kernels read no key beyond a row's own.

A plan is a list of items, each some queries of a row over a range of its keys, and of joins of partial results. It is
made item by item in Python: with a few rows numpy's calls take longer than their arithmetic, and with many rows the
step takes a thousand times as long as its plan.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from asyncengine.execution.attention import base
from asyncengine.execution.attention.base import LayerSpec, StepView
from asyncengine.execution.device.arena import Empty, ordinary
from asyncengine.execution.device.shared_gather import SharedPools
from asyncengine.kernels.api import PagedAttention, team
from asyncengine.kernels.api import attention_fields as fields

ROWS = 64
"""Queries times query heads of a kv head in one item of a prompt chunk: they share a load of the keys."""
LOAD, START = 20, 1000
"""Costs of loading a key, and of starting an item; one query head times one loaded key costs 1, about a nanosecond."""
EVEN = 8
"""Decode rows are split if the longest is more than a thread's share of all keys divided by this."""


class StepRows(NamedTuple):
    """The rows of a step: for each the position of its first token, its number of tokens, and the index of its first
    token in the step; and positions that attend to each other both ways (`StepView.blocks`)."""

    starts: list[int]
    counts: list[int]
    begins: list[int]
    blocks: Sequence[tuple[int, int, int]]

    @classmethod
    def of(cls, step: StepView) -> StepRows:
        return cls(step.starts.tolist(), step.counts.tolist(), step.qo_indptr.tolist(), step.blocks)


class PlannedItems(NamedTuple):
    """Items of a plan, `fields.ITEM_FIELDS` numbers each; the cost of each item; joins, three numbers each; and the
    number of partial results."""

    items: list[int]
    costs: list[int]
    joins: list[int]
    partials: int


KeptPlan = tuple[np.ndarray[Any, Any], tuple[Any, ...]]
"""A plan's numbers, and the arrays whose addresses are among them."""


class StepPlan:
    """The plan of one group of layers, in a record for the kernels that has the same address in all steps."""

    __slots__ = ("_held", "_numbers", "step")

    def __init__(self) -> None:
        self._numbers = np.zeros(fields.STEP_FIELDS, dtype=np.int64)
        self.step: int = self._numbers.ctypes.data
        """Address of the kernels' record."""
        self._held: tuple[Any, ...] = ()
        """Arrays whose addresses are in the record, to keep them alive."""

    def kept(self) -> KeptPlan:
        """A copy, for `resume`."""
        return self._numbers.copy(), self._held

    def resume(self, kept: KeptPlan) -> None:
        self._numbers[:], self._held = kept

    def fill(
        self, work: PlannedItems, bounds: list[int], table: np.ndarray[Any, Any], slots: Any, partials: Any,
        scratch: Any, scratch_size: int,
    ) -> None:  # fmt: skip
        """Write the record. `table` int32 [rows, pages], `slots` int64 [tokens], `partials` float32 and `scratch` bytes
        must keep their addresses until the next step."""
        if not table.flags.c_contiguous or table.dtype != np.int32:
            table = np.ascontiguousarray(table, dtype=np.int32)
        lists = np.array([*work.items, *work.joins, *bounds], dtype=np.int64)
        self._held = (lists, table, slots, partials, scratch)
        items_at = lists.ctypes.data
        joins_at = items_at + 8 * len(work.items)
        self._numbers[:] = [
            items_at, len(work.costs), joins_at + 8 * len(work.joins), table.ctypes.data, table.shape[1],
            slots.data_ptr(), slots.numel(), joins_at, len(work.joins) // 3, partials.data_ptr(), scratch.data_ptr(),
            scratch_size, len(bounds) - 1,
        ]  # fmt: skip


def items_of(spec: LayerSpec, rows: StepRows, threads: int) -> PlannedItems:
    """The items of a step for layers like `spec`, to be computed by `threads` threads."""
    work = PlannedItems([], [], [], 0)
    group = spec.num_heads // spec.num_kv_heads
    decodes = [
        (row, rows.begins[row], rows.starts[row], _first_seen(spec, rows.starts[row]))
        for row, count in enumerate(rows.counts)
        if count == 1
    ]
    splits = len(decodes) == len(rows.counts) and _worth_splitting(spec, decodes, threads)
    partials = 0
    for row, token, position, begin in decodes:
        first, last = begin // fields.SPLIT, position // fields.SPLIT
        if not splits or first == last:
            work.items.extend((token, 1, position, row, begin, position + 1, -1, 0))
            work.costs.append((position + 1 - begin) * (LOAD + group) + START)
            continue
        work.joins.extend((token, partials, last - first + 1))
        for split_index in range(first, last + 1):
            low, high = max(begin, split_index * fields.SPLIT), min(position + 1, (split_index + 1) * fields.SPLIT)
            work.items.extend((token, 1, position, row, low, high, partials, 0))
            work.costs.append((high - low) * (LOAD + group) + START)
            partials += 1
    if len(decodes) < len(rows.counts):
        for row, count in enumerate(rows.counts):
            if count > 1:
                _add_chunk(spec, rows, row, work)
    return work._replace(partials=partials)


def _worth_splitting(spec: LayerSpec, decodes: Sequence[tuple[int, ...]], threads: int) -> bool:
    """Whether whole decode rows are too few or too uneven for the threads. The results are the same to the bit, as rows
    are always summed in blocks of `fields.SPLIT` keys."""
    keys = [position + 1 - begin for *_, position, begin in decodes]
    return threads > 1 and max(keys) * threads * EVEN > sum(keys) * spec.num_kv_heads


def _first_seen(spec: LayerSpec, position: int) -> int:
    """The first position that `position` sees (`base.first_seen`)."""
    first = spec.first if spec.window is None else max(position - spec.window + 1, spec.first)
    return first if spec.chunk is None else max(first, position // spec.chunk * spec.chunk)


def _add_chunk(spec: LayerSpec, rows: StepRows, row: int, work: PlannedItems) -> None:
    """Add the items of one prompt chunk, a few queries each. The queries of an item lie in one chunk of chunked
    attention, and all or none of them in a block."""
    start, count, token = rows.starts[row], rows.counts[row], rows.begins[row]
    group = spec.num_heads // spec.num_kv_heads
    size = max(ROWS * spec.num_kv_heads // spec.num_heads, 1)
    cuts = set(range(0, count, size))
    if spec.chunk is not None:
        following = -(-(start + 1) // spec.chunk) * spec.chunk
        cuts.update(range(following - start, count, spec.chunk))
    blocks = [(max(first - start, 0), end - start) for own, first, end in rows.blocks if own == row]
    cuts.update(bound for block in blocks for bound in block if bound < count)
    offsets = sorted(cuts)
    for begin, end in zip(offsets, (*offsets[1:], count), strict=True):
        low = _first_seen(spec, start + begin)
        high, beyond = min(start + end + spec.later, start + count), 0
        for first, last in blocks:
            if first <= begin < last:
                high = beyond = start + last
        work.items.extend((token + begin, end - begin, start + begin, row, low, high, -1, beyond))
        work.costs.append((high - low) * (LOAD + group * (end - begin)) + START)


def even_pieces(costs: Sequence[int], heads: int, threads: int, least: int) -> list[int]:
    """Divide the units of work, which are all items of head 0, then of head 1 ..., into pieces of equal cost, of at
    least `least` each: [pieces + 1] bounds."""
    ends, whole = [], 0
    for cost in costs:
        whole += cost
        ends.append(whole)
    total, items = whole * heads, len(costs)
    pieces = 1 if threads == 1 else team.even_count(total, max(1, least), items * heads, threads)
    bounds = []
    for piece in range(pieces + 1):
        head, rest = divmod(piece * total // pieces, whole)
        bounds.append(head * items + bisect_right(ends, rest))
    return bounds


_BYTES = 26
"""Bytes that memory delivers during a cost of 1; the team measures pieces of work in bytes."""
_PAGE = 64
"""Tokens of a page for whole sequences (`CompiledSequences`), each of which begins on a new page."""


class CompiledBackend(base.AttentionBackend):
    """In compiled kernels. Construct it only where `compiler_missing` finds nothing missing."""

    name = "compiled"
    steady = True
    """Whether kernels are given the same addresses in every step."""

    def __init__(
        self, layers: Sequence[base.LayerSpec], num_pages: int, page_size: int, dtype: torch.dtype,
        one_pool: bool = False, num_window_pages: int = 0, shared: SharedPools | None = None,
        kv_dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        """`one_pool`: all layers of one shape use the same memory, as nothing is kept from step to step.
        `num_window_pages`: pages of layers with windows, if these have a pool of their own. `shared`: memory for pages;
        None: torch's. `kv_dtype`: dtype of keys and values, `dtype` or int8; None: `dtype`."""
        self.shared = shared
        self.num_pages, self.num_window_pages = num_pages, num_window_pages
        self.page_size = page_size
        self._layers = tuple(layers)
        self._dtype = dtype
        self._kernels = PagedAttention(dtype, page_size, kv_dtype or dtype)
        memories: dict[tuple[int, ...], _Memory] = {}
        empty = ordinary if shared is None else shared.empty
        self._pools = []
        for spec in layers:
            shape = (spec.num_kv_heads, spec.key_dim, spec.value_dim) if one_pool else (spec.index,)
            of_windows = bool(num_window_pages) and spec.windowed
            pages = num_window_pages if of_windows else num_pages
            if shape not in memories:
                memories[shape] = _Memory(spec, pages * page_size, self._kernels.lanes, kv_dtype or dtype, empty)
            memory = memories[shape]
            self._pools.append(_LayerPool(spec, pages, page_size, self._kernels.lanes, memory, of_windows))
        self.kv_bytes = sum(memory.bytes for memory in memories.values())
        self._groups = {_group_of(spec): spec for spec in layers}
        self._plans = {group: StepPlan() for group in self._groups}
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
        near, far = step.for_windows(), step.for_others()
        rows = StepRows.of(step)
        others = rows._replace(blocks=far.blocks)
        for group, spec in self._groups.items():
            step, own = (near, rows) if spec.windowed else (far, others)
            work = items_of(spec, own, self._threads)
            if work.partials:  # of one kv head each
                heads = spec.num_heads // spec.num_kv_heads
                need = work.partials * spec.num_kv_heads * fields.partial_size(heads, self._widest)
                if self._partials.numel() < need:
                    self._partials = torch.empty(need, dtype=torch.float32)  # the default type is the whole process's
            bounds = even_pieces(work.costs, spec.num_kv_heads, self._threads, self._piece // _BYTES)
            self._plans[group].fill(
                work, bounds, step.page_tables, step.kv_slots, self._partials, self._scratch, self._scratch_size
            )

    def kept_plans(self) -> list[KeptPlan]:
        """Copies of the current step's plans, for `resume`."""
        return [plan.kept() for plan in self._plans.values()]

    def resume(self, kept: Sequence[KeptPlan]) -> None:
        """Plan the step of `kept_plans` again, for the same team of threads."""
        for plan, kept_plan in zip(self._plans.values(), kept, strict=True):
            plan.resume(kept_plan)

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
        """Norms, rotation, `write` and `attend` by two kernels. -> [tokens, heads * value dim].

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
        """Norms, rotation and `write`, as for `attend_merged`. -> queries [tokens, heads * key dim]."""
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
        """Compile the kernel that only steps with long contexts call."""
        if self._pools:
            self._kernels.compile_join()

    def page_pools(self) -> list[base.PagePool]:
        """Memory of every layer's keys and values. The pages of one head are contiguous."""
        return [pool for layer in self._pools for pool in layer.page_pools()]

    def close(self) -> None:
        self._pools, self._plans, self._planned = [], {}, []
        self._scratch, self._partials = torch.empty(0, dtype=torch.uint8), torch.empty(0)


_KEPT = 64
"""Most tokens of a sequence whose plan is kept for steps of this sequence alone."""


class CompiledSequences:
    """`SequenceAttention` of encoders, by the kernels of `CompiledBackend` over a pool of the step alone."""

    def __init__(self, layers: Sequence[base.LayerSpec], dtype: torch.dtype) -> None:
        self._layers, self._dtype = tuple(layers), dtype
        self._paged = CompiledBackend(self._layers, 1, _PAGE, dtype, one_pool=True)
        self._alone: dict[tuple[int, ...], list[KeptPlan]] = {}
        """Plans of steps of one short sequence, by its length and the team of threads."""

    def plan(self, counts: Sequence[int]) -> CompiledBackend:
        """Plan a step of sequences of these lengths. The pool holds one layer's keys and values of the step, and grows
        to the longest step so far."""
        key = (*counts, *team.team_threads()) if len(counts) == 1 and counts[0] <= _KEPT else ()
        if key in self._alone:
            self._paged.resume(self._alone[key])
            return self._paged
        lengths = np.array(counts, dtype=np.int64)
        pages = -(-lengths // _PAGE)
        ends = np.cumsum(pages)
        needed = int(ends[-1])
        if needed > self._paged.num_pages:
            self._paged = CompiledBackend(self._layers, needed, _PAGE, self._dtype, one_pool=True)
            self._alone.clear()
        table = (ends - pages)[:, None] + np.arange(pages.max())
        bounds = np.concatenate(([0], np.cumsum(lengths)))
        kv_slots = np.arange(bounds[-1]) + np.repeat((ends - pages) * _PAGE - bounds[:-1], lengths)
        self._paged.plan(
            base.StepView(np.zeros_like(lengths), lengths, bounds, table.astype(np.int32), torch.from_numpy(kv_slots))
        )
        if key:
            self._alone[key] = self._paged.kept_plans()
        return self._paged


class _Memory:
    """Memory for the keys and values of `tokens` tokens. Untouched memory costs nothing."""

    def __init__(self, spec: base.LayerSpec, tokens: int, lanes: int, kv_dtype: torch.dtype, empty: Empty) -> None:
        tiles, values = tokens * spec.num_kv_heads // lanes, spec.kept_dims - spec.key_dim
        sizes = fields.tile_sizes(spec.key_dim, values, lanes, kv_dtype.itemsize)
        self.keys, self.values = (empty([tiles * size + fields.SLACK], torch.uint8) for size in sizes)
        self.bytes = self.keys.numel() + self.values.numel() - 2 * fields.SLACK


class _LayerPool:
    """One layer's keys and values, and its record for the kernels."""

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
        for tensor in (memory.keys, memory.values):
            if tensor.numel() == fields.SLACK:
                continue
            page_bytes = (tensor.numel() - fields.SLACK) // (self._pages * heads)
            yield base.PagePool(tensor, page_bytes, heads, self._pages * page_bytes, self._of_windows, self._divided)


def _scratch_bytes(spec: base.LayerSpec) -> int:
    rows = max(ROWS, spec.num_heads // spec.num_kv_heads)
    turned = fields.turned_size(spec.value_dim) if spec.latent else 0
    return -(-int(fields.scratch_sizes(rows, spec.key_dim, spec.value_dim)[-1] + turned) // 4096) * 4096


def _group_of(spec: base.LayerSpec) -> tuple[int | None, ...]:
    """The fields in which layers with one plan are equal."""
    return spec.window, spec.chunk, spec.first, spec.num_heads, spec.num_kv_heads


def _dense(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _address(values: np.ndarray[Any, Any]) -> int:
    return values.__array_interface__["data"][0]
