"""Paged attention on the CPU by compiled kernels: bfloat16 and float32, anything a `LayerSpec` can say.

The pool's layout and the kernels are those of `kernels.cpu.attention_tiles`; here is what a step needs besides: which
thread computes which queries over which keys. Pages need no clearing: the kernels add up nothing beyond a row's own
keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from asyncengine.execution.attention import base, cpu_plan
from asyncengine.execution.device.arena import Empty, ordinary
from asyncengine.execution.device.shared_gather import SharedPools
from asyncengine.kernels.api import PagedAttention, team
from asyncengine.kernels.api import attention_fields as fields

_BYTES = 26
"""That could be read for a cost of 1."""
_PAGE = 64
"""Tokens of a page where sequences are attended to as a whole: each begins with one of its own."""


class CompiledBackend(base.AttentionBackend):
    """In compiled kernels. Construct it only where `compiler_missing` finds nothing missing."""

    name = "compiled"
    steady = True
    """Whether kernels are given the same addresses in every step."""

    def __init__(
        self, layers: Sequence[base.LayerSpec], num_pages: int, page_size: int, dtype: torch.dtype,
        one_pool: bool = False, num_window_pages: int = 0, shared: SharedPools | None = None,
        kept: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        """`one_pool`: all layers of one shape write into the same memory, as nothing is kept from step to step.
        `num_window_pages`: of layers with windows, if they have pages of their own. `shared`: memory for pages; None:
        wherever torch puts them. `kept`: the type of keys and values, `dtype` or int8."""
        self.shared = shared
        self.num_pages = num_pages
        self.page_size = page_size
        self._layers = tuple(layers)
        self._dtype = dtype
        self._kernels = PagedAttention(dtype, page_size, kept or dtype)
        known: dict[tuple[int, ...], _Memory] = {}
        empty = ordinary if shared is None else shared.empty
        self._pools = []
        for spec in layers:
            shape = (spec.num_kv_heads, spec.key_dim, spec.value_dim) if one_pool else (spec.index,)
            of_windows = bool(num_window_pages) and spec.windowed
            pages = num_window_pages if of_windows else num_pages
            if shape not in known:
                known[shape] = _Memory(spec, pages * page_size, self._kernels.lanes, kept or dtype, empty)
            memory = known[shape]
            self._pools.append(_LayerPool(spec, pages, page_size, self._kernels.lanes, memory, of_windows))
        self.kv_bytes = sum(memory.bytes for memory in known.values())
        self._groups = {_group_of(spec): spec for spec in layers}
        self._plans = {group: cpu_plan.StepPlan() for group in self._groups}
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
        rows = cpu_plan.StepRows.of(step)
        others = rows._replace(blocks=far.blocks)
        for group, spec in self._groups.items():
            step, own = (near, rows) if spec.windowed else (far, others)
            work = cpu_plan.items_of(spec, own, self._threads)
            if work.partials:  # of one kv head each
                heads = spec.num_heads // spec.num_kv_heads
                need = work.partials * spec.num_kv_heads * fields.partial_size(heads, self._widest)
                if self._partials.numel() < need:
                    self._partials = torch.empty(need, dtype=torch.float32)  # the default type is the whole process's
            bounds = cpu_plan.even_pieces(work.costs, spec.num_kv_heads, self._threads, self._piece // _BYTES)
            self._plans[group].fill(
                work, bounds, step.page_tables, step.kv_slots, self._partials, self._scratch, self._scratch_size
            )

    def kept_plans(self) -> list[cpu_plan.KeptPlan]:
        """Copies of the plans of a step, to be planned again at no cost."""
        return [plan.kept() for plan in self._plans.values()]

    def resume(self, kept: Sequence[cpu_plan.KeptPlan]) -> None:
        """Plan the step of `kept_plans` again, for the same team."""
        for plan, own in zip(self._plans.values(), kept, strict=True):
            plan.resume(own)

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


_KEPT = 64
"""Tokens of sequences up to which the plan of one alone is kept."""


class CompiledSequences:
    """`SequenceAttention` of encoders, by the kernels of `CompiledBackend` over a pool of the step alone."""

    def __init__(self, layers: Sequence[base.LayerSpec], dtype: torch.dtype) -> None:
        self._layers, self._dtype = tuple(layers), dtype
        self._paged = CompiledBackend(self._layers, 1, _PAGE, dtype, one_pool=True)
        self._alone: dict[tuple[int, ...], list[cpu_plan.KeptPlan]] = {}
        """Plans of short sequences that were steps of their own, by their tokens and the team."""

    def plan(self, counts: Sequence[int]) -> CompiledBackend:
        """The pool grows to the longest step there was: one layer's keys and values of its tokens."""
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
        places = np.arange(bounds[-1]) + np.repeat((ends - pages) * _PAGE - bounds[:-1], lengths)
        self._paged.plan(
            base.StepView(np.zeros_like(lengths), lengths, bounds, table.astype(np.int32), torch.from_numpy(places))
        )
        if key:
            self._alone[key] = self._paged.kept_plans()
        return self._paged


class _Memory:
    """Memory for the keys and values of `tokens` tokens. Untouched memory costs nothing."""

    def __init__(self, spec: base.LayerSpec, tokens: int, lanes: int, kept: torch.dtype, empty: Empty) -> None:
        tiles, values = tokens * spec.num_kv_heads // lanes, spec.kept_dims - spec.key_dim
        sizes = fields.tile_sizes(spec.key_dim, values, lanes, kept.itemsize)
        self.keys, self.values = (empty([tiles * size + fields.SLACK], torch.uint8) for size in sizes)
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


def _scratch_bytes(spec: base.LayerSpec) -> int:
    rows = max(cpu_plan.ROWS, spec.num_heads // spec.num_kv_heads)
    turned = fields.turned_size(spec.value_dim) if spec.latent else 0
    return -(-int(fields.scratch_sizes(rows, spec.key_dim, spec.value_dim)[-1] + turned) // 4096) * 4096


def _group_of(spec: base.LayerSpec) -> tuple[int | None, ...]:
    """The fields in which layers with one plan are equal."""
    return spec.window, spec.chunk, spec.first, spec.num_heads, spec.num_kv_heads


def _dense(part: torch.Tensor) -> torch.Tensor:
    return part if part.stride(-1) == 1 else part.contiguous()


def _address(values: np.ndarray[Any, Any]) -> int:
    return values.__array_interface__["data"][0]
