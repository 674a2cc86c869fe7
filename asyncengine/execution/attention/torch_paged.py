"""Paged attention in plain torch: any device, any head size, grouped queries, windows, chunks, soft-capping, sinks.

Pool layout: per layer one key tensor [kv heads, pages, page_size, key_dim] and one value tensor alike. Head-major, so
that the pages of one (head, row) land side by side when gathered and feed a batched matrix product without another
copy; a page of one head is one contiguous piece of a few KiB, which `index_select` moves at memory speed.

Decode rows (one new token) are gathered and computed together in groups of similar length, prompt chunks one by one.
Gathering goes into a scratch buffer that is reused by all layers: fresh memory of that size would cost more in page
faults than the copy itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from asyncengine.execution.attention.base import AttentionBackend, LayerSpec, PagePool, StepView, first_seen, page_bytes
from asyncengine.execution.device.shared_gather import SharedPools
from asyncengine.execution.device.transfer import Int32Array, Int64Array, upload


def masked_attention(
    spec: LayerSpec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor,
    sinks: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """softmax(softcap(q k^T scale) + bias) v.

    query [..., Q, Dk], key [..., L, Dk], value [..., L, Dv], bias broadcastable to [..., Q, L] with 0 where a key is
    seen and -inf where not (at least one 0 per query), sinks broadcastable to [..., Q, 1]. The softmax is computed in
    float32 whatever the inputs' type, as transformers' eager attention does.
    """
    scores = torch.matmul(query * spec.scale, key.transpose(-1, -2))
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    scores = scores + bias
    if sinks is None:
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32)
    else:
        sink_column = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
        weights = torch.softmax(torch.cat((scores, sink_column), dim=-1), dim=-1, dtype=torch.float32)[..., :-1]
    return torch.matmul(weights.to(value.dtype), value)


def causal_bias(
    first_query: int, num_queries: int, first_key: int, num_keys: int, window: int | None, like: torch.Tensor,
    chunk: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """[num_queries, num_keys], 0 where query position first_query + i sees key position first_key + j, else -inf.

    dtype and device are those of `like`.
    """
    queries = torch.arange(first_query, first_query + num_queries, device=like.device)[:, None]
    keys = torch.arange(first_key, first_key + num_keys, device=like.device)[None, :]
    hidden = keys > queries
    if window is not None:
        hidden |= keys <= queries - window
    if chunk is not None:
        hidden |= keys < queries // chunk * chunk
    return torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, float("-inf"))


_SCRATCH_BYTES = 16 * 2**20
"""Gathered keys of one decode group; keeps it near the last-level cache."""
_DEVICE_SCRATCH_BYTES = 512 * 2**20
"""The same where memory is not the CPU's: there every further group costs a dozen launches in each layer."""
_PADDING_SHARE = 1.25
"""Rows join a decode group while the longest has at most this many times the pages of the shortest (plus one)."""
_SCORE_ELEMENTS = 2**24
"""Most scores written out at once for a prompt chunk of a layer with soft-capping or sinks."""


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Decode rows of similar length."""

    tokens: torch.Tensor
    """[rows] where their query is in the flat batch."""
    pages: torch.Tensor
    """[kv heads * rows * pages] index into (head, page) of the pool; padded with page 0."""
    bias: torch.Tensor
    """[rows, 1, pages * page_size] 0 or -inf."""


@dataclass(frozen=True, slots=True)
class _PromptChunk:
    """One row with more than one new token."""

    first: int
    last: int
    """Its tokens are [first, last) of the flat batch."""
    pages: torch.Tensor
    """[kv heads * pages] index into (head, page) of the pool."""
    num_keys: int
    start: int
    """Position of the first query, and of the first key gathered:"""
    first_key: int
    bias: torch.Tensor | None
    """[queries, keys]; None: queries and keys start together and no window matters, plain causal."""


@dataclass(frozen=True, slots=True)
class _GroupPlan:
    decodes: tuple[_DecodeGroup, ...]
    chunks: tuple[_PromptChunk, ...]


class TorchPagedBackend(AttentionBackend):
    """In torch operations. `num_pages` includes page 0, which stays zero."""

    name = "torch"

    def __init__(
        self, layers: Sequence[LayerSpec], num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device,
        num_window_pages: int = 0, shared: SharedPools | None = None,
    ) -> None:  # fmt: skip
        """`num_window_pages`: pages of layers with windows, if these have a pool of their own. `shared`: memory for
        pages on a CPU; None: torch's."""
        self.shared = shared
        self.num_pages, self.num_window_pages = num_pages, num_window_pages
        self.page_size = page_size
        self._two_pools = bool(num_window_pages)
        self._pages = [num_window_pages if num_window_pages and spec.windowed else num_pages for spec in layers]
        sizes = zip(layers, self._pages, strict=True)
        self.kv_bytes = sum(pages * page_bytes([spec], page_size, dtype) for spec, pages in sizes)
        self._layers = tuple(layers)
        self._dtype = dtype
        self._device = device

        def pool(heads: int, pages: int, dim: int) -> torch.Tensor:
            # not zeroed: a page is cleared when a request opens it, and untouched memory costs nothing on a CPU
            shape = heads, pages, page_size, dim
            memory = torch.empty(shape, dtype=dtype, device=device) if shared is None else shared.empty(shape, dtype)
            memory[:, 0] = 0
            return memory

        sized = list(zip(layers, self._pages, strict=True))
        self._keys = [pool(spec.num_kv_heads, pages, spec.key_dim) for spec, pages in sized]
        self._values = [
            None if spec.latent else pool(spec.num_kv_heads, pages, spec.value_dim) for spec, pages in sized
        ]
        self._scratch = [torch.empty(0, dtype=dtype, device=device) for _ in range(2)]
        self._scratch_bytes = _SCRATCH_BYTES
        if device.type != "cpu":  # bounded by the pool's size: a small pool means that memory is short
            share = max(keys.nbytes for keys in self._keys) // 4
            self._scratch_bytes = max(min(_DEVICE_SCRATCH_BYTES, share), _SCRATCH_BYTES)
        self._groups = {_group_of(spec): spec for spec in layers}
        self._plans: dict[tuple[int | None, ...], _GroupPlan] = {}
        self._kv_slots: dict[bool, torch.Tensor] = {}
        """KV slots of the step's tokens, by whether a layer has a window."""
        self._opened: dict[bool, torch.Tensor] = {}
        """Pages that a layer clears before it writes, by whether it has a window."""

    def plan(self, step: StepView) -> None:
        views = {False: step.for_others(), True: step.for_windows()}
        self._kv_slots = {windowed: view.kv_slots for windowed, view in views.items()}
        self._opened = self._opened_pages(views)
        self._plans = {group: self._plan_group(spec, views[spec.windowed]) for group, spec in self._groups.items()}

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        windowed = self._layers[layer].windowed
        slots, opened = self._kv_slots[windowed], self._opened.get(windowed)
        for pool, new in ((self._keys[layer], key), (self._values[layer], value)):
            if pool is None:
                continue
            heads, _, _, dim = pool.shape
            if opened is not None:
                pool.index_fill_(1, opened, 0)
            pool.view(heads, -1, dim).index_copy_(1, slots, new.transpose(0, 1))

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        spec = self._layers[layer]
        plan = self._plans[_group_of(spec)]
        out = query.new_empty((query.shape[0], spec.num_heads, spec.value_dim))
        for group in plan.decodes:
            out[group.tokens] = self._attend_decodes(spec, query, group)
        for chunk in plan.chunks:
            out[chunk.first : chunk.last] = self._attend_chunk(spec, query[chunk.first : chunk.last], chunk)
        return out

    def page_pools(self) -> list[PagePool]:
        """Memory of every layer's keys and values. The pages of one head are contiguous."""
        pools = []
        for spec, pages in zip(self._layers, self._pages, strict=True):
            for memory in (self._keys[spec.index], self._values[spec.index]):
                if memory is None:
                    continue
                size, of_windows = memory.nbytes // (pages * spec.num_kv_heads), self._two_pools and spec.windowed
                pools.append(PagePool(memory, size, spec.num_kv_heads, size * pages, of_windows, spec.divided))
        return pools

    def close(self) -> None:
        self._keys, self._values, self._plans = [], [], {}
        self._scratch = [torch.empty(0, dtype=self._dtype, device=self._device) for _ in range(2)]

    # -- planning (host) -----------------------------------------------------------------------------------------

    def _opened_pages(self, views: dict[bool, StepView]) -> dict[bool, torch.Tensor]:
        """The pages that this step begins but does not fill, if any. Each layer clears its own when it writes, not all
        at once here: other layers' pages may have been written by another process (pipeline parallelism).

        Attention reads whole pages and masks positions that are not written yet. A former owner's NaN there would
        survive the mask (0 * NaN), and one bad request would spoil another.
        """
        step = views[False]
        ends = step.starts + step.counts
        last_pages = ends // self.page_size
        opened = (ends % self.page_size != 0) & (last_pages * self.page_size >= step.starts)
        rows = np.flatnonzero(opened)
        if not rows.size:
            return {}
        return {
            windowed: upload(view.page_tables[rows, last_pages[rows]].astype(np.int64), self._device)
            for windowed, view in views.items()
        }

    def _plan_group(self, spec: LayerSpec, step: StepView) -> _GroupPlan:
        ends = step.starts + step.counts
        first_pages = first_seen(spec.window, spec.chunk, step.starts) // self.page_size
        num_pages = -(-ends // self.page_size) - first_pages
        one_page = spec.num_kv_heads * self.page_size * spec.key_dim * self._dtype.itemsize
        most_pages = max(self._scratch_bytes // one_page, 1)
        decodes = []
        for rows in _similar_lengths(np.flatnonzero(step.counts == 1), num_pages, most_pages):
            decodes.append(self._plan_decodes(spec, step, rows, first_pages[rows], int(num_pages[rows].max())))
        chunks = []
        for row in np.flatnonzero(step.counts > 1).tolist():
            chunks.append(self._plan_chunk(spec, step, row, int(first_pages[row]), int(num_pages[row])))
        return _GroupPlan(tuple(decodes), tuple(chunks))

    def _plan_decodes(
        self, spec: LayerSpec, step: StepView, rows: Int64Array, first_pages: Int64Array, width: int
    ) -> _DecodeGroup:
        positions = step.starts[rows]
        columns = first_pages[:, None] + np.arange(width)
        used = columns <= (positions // self.page_size)[:, None]
        tables = step.page_tables[rows[:, None], np.minimum(columns, step.page_tables.shape[1] - 1)]
        pages = np.where(used, tables, 0)
        keys = first_pages[:, None] * self.page_size + np.arange(width * self.page_size)
        hidden = (keys > positions[:, None]) | (keys < first_seen(spec.window, spec.chunk, positions)[:, None])
        bias = np.where(hidden, np.float32("-inf"), np.float32(0))
        return _DecodeGroup(
            tokens=upload(step.qo_indptr[rows], self._device),
            pages=self._pool_index(pages, spec),
            bias=upload(bias, self._device).to(self._dtype)[:, None, :],
        )

    def _plan_chunk(self, spec: LayerSpec, step: StepView, row: int, first_page: int, num_pages: int) -> _PromptChunk:
        start, count = int(step.starts[row]), int(step.counts[row])
        first = int(step.qo_indptr[row])
        first_key = first_page * self.page_size
        num_keys = start + count - first_key
        window_matters = any(most is not None and num_keys > most for most in (spec.window, spec.chunk))
        bias = None
        blocks = [(low, end) for own, low, end in step.blocks if own == row]
        if start > 0 or window_matters or blocks or any(_needs_scores(layer) for layer in self._layers):
            bias = causal_bias(start, count, first_key, num_keys, spec.window, self._scratch[0], spec.chunk)
            for low, end in blocks:
                bias[max(low - start, 0) : end - start, max(low - first_key, 0) : end - first_key] = 0
        pages = step.page_tables[row, first_page : first_page + num_pages]
        return _PromptChunk(first, first + count, self._pool_index(pages, spec), num_keys, start, first_key, bias)

    def _pool_index(self, pages: Int32Array, spec: LayerSpec) -> torch.Tensor:
        heads = np.arange(spec.num_kv_heads, dtype=np.int64)
        index = heads[:, None] * self._pages[spec.index] + pages.reshape(1, -1)
        return upload(index.reshape(-1), self._device)

    # -- computing (device) --------------------------------------------------------------------------------------

    def _gather(self, layer: int, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of `pages` as [kv heads, tokens, dim], in scratch memory valid until the next call."""
        gathered: list[torch.Tensor] = []
        for which, pool in enumerate((self._keys[layer], self._values[layer])):
            if pool is None:
                return gathered[0], gathered[0][..., -self._layers[layer].value_dim :]
            heads, _, _, dim = pool.shape
            flat = pool.view(heads * self._pages[layer], self.page_size * dim)
            need = pages.numel() * flat.shape[1]
            if self._scratch[which].numel() < need:
                self._scratch[which] = torch.empty(need, dtype=self._dtype, device=self._device)
            out = self._scratch[which][:need].view(pages.numel(), flat.shape[1])
            torch.index_select(flat, 0, pages, out=out)
            gathered.append(out.view(heads, -1, dim))
        return gathered[0], gathered[1]

    def _attend_decodes(self, spec: LayerSpec, query: torch.Tensor, group: _DecodeGroup) -> torch.Tensor:
        """[rows, heads, value dim]. The query heads of one kv head are the rows of one small matrix product."""
        key, value = self._gather(spec.index, group.pages)
        rows, heads = group.tokens.numel(), spec.num_kv_heads
        grouped = query[group.tokens].view(rows, heads, -1, spec.key_dim).transpose(0, 1)
        sinks = None if spec.sinks is None else spec.sinks.view(heads, 1, -1, 1)
        out = masked_attention(
            spec, grouped, torch.unflatten(key, 1, (rows, -1)), torch.unflatten(value, 1, (rows, -1)), group.bias, sinks
        )
        return out.transpose(0, 1).reshape(rows, spec.num_heads, spec.value_dim)

    def _attend_chunk(self, spec: LayerSpec, query: torch.Tensor, chunk: _PromptChunk) -> torch.Tensor:
        """[queries, heads, value dim] of one row."""
        key, value = (queries[:, : chunk.num_keys] for queries in self._gather(spec.index, chunk.pages))
        if not _needs_scores(spec):
            out = scaled_dot_product_attention(
                query.transpose(0, 1)[None], key[None], value[None], attn_mask=chunk.bias, is_causal=chunk.bias is None,
                scale=spec.scale, enable_gqa=spec.num_heads != spec.num_kv_heads,
            )  # fmt: skip
            return out[0].transpose(0, 1)
        assert chunk.bias is not None
        groups = spec.num_heads // spec.num_kv_heads
        block = max(_SCORE_ELEMENTS // (spec.num_heads * chunk.num_keys), 1)
        outs = []
        for begin in range(0, query.shape[0], block):
            queries = query[begin : begin + block].transpose(0, 1)
            queries = queries.reshape(spec.num_kv_heads, groups, -1, spec.key_dim)
            sinks = None if spec.sinks is None else spec.sinks.view(spec.num_kv_heads, groups, 1, 1)
            bias = chunk.bias[begin : begin + block]
            outs.append(masked_attention(spec, queries, key[:, None], value[:, None], bias, sinks).flatten(0, 1))
        return torch.cat(outs, dim=1).transpose(0, 1)


def _group_of(spec: LayerSpec) -> tuple[int | None, ...]:
    """The fields in which layers with the same index tensors and masks are equal."""
    return spec.window, spec.chunk, spec.num_kv_heads


def _needs_scores(spec: LayerSpec) -> bool:
    return spec.softcap is not None or spec.sinks is not None


def _similar_lengths(rows: Int64Array, num_pages: Int64Array, most_pages: int) -> list[Int64Array]:
    """Split `rows` into groups whose padding is small and whose padded size stays under `most_pages`."""
    groups: list[list[int]] = []
    width = 0
    for row in sorted(rows.tolist(), key=lambda row: (-int(num_pages[row]), row)):
        pages = int(num_pages[row])
        fits = bool(groups) and (len(groups[-1]) + 1) * width <= most_pages
        if not fits or width > pages * _PADDING_SHARE + 1:
            groups.append([])
            width = pages
        groups[-1].append(row)
    return [np.array(group, dtype=np.int64) for group in groups]
