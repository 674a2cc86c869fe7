"""The host half of the FlashInfer backend: the arrays for its plans, and the memory that these need. It needs no GPU.

All index arrays of a step lie in one pinned int32 array. Its front is read by FlashInfer's plan on the host; the rest
goes to the device in one copy:

    host only | qo_indptr  seq_lens
    uploaded  | kv_indptr  last_page_len  batch_indices  positions  kv_indices

Pages come last, so that for a given number of rows and tokens every other part has a fixed place: a CUDA graph reads
the same addresses whatever the lengths of its sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from asyncengine.execution.attention.base import LayerSpec, StepView

_ALIGN = 4
"""Alignment of each array in int32 elements: 16 bytes."""
_HEAD_DIMS = (64, 128, 256, 512)
_LEAST_FLOAT_WORKSPACE = 128 * 2**20
_CUDA_CORE_GROUPS = (1, 2, 3)
"""Query heads per kv head for which FlashInfer's CUDA-core decode kernel exists and beats the tensor-core one."""
LONG = 128
"""Mean number of tokens per row from which a step goes to `LayerGroup.hopper`'s kernels; also the queries of one of
their tiles. They are 1.2 to 3.5 times as fast at 256 to 2,048 tokens, and 0.8 times at 16 rows of 64 (H200)."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share a plan."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    softcap: float | None
    chunk: int | None = None

    @classmethod
    def of(cls, spec: LayerSpec) -> LayerGroup:
        return cls(spec.num_heads, spec.num_kv_heads, spec.key_dim, spec.scale, spec.window, spec.softcap, spec.chunk)

    @property
    def window_left(self) -> int:
        """Keys before the query's own position that it sees, as FlashInfer declares windows; -1: all."""
        return -1 if self.window is None else self.window - 1

    @property
    def heads_per_kv_head(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def decodes_on_tensor_cores(self) -> bool:
        return self.heads_per_kv_head not in _CUDA_CORE_GROUPS or self.head_dim > 256

    def hopper(self, dtype: torch.dtype, kv_dtype: torch.dtype) -> bool:
        """Whether FlashAttention-3's kernels (Shah et al. 2024), for compute capability 9 alone, may take these layers.

        FlashInfer has them for 64 to 256 dimensions, also with windows and caps, but not for 8-bit keys with 16-bit
        queries. Each variant takes 100 seconds of 16 cores to compile, so only the common one, which was measured, is
        used.
        """
        plain = self.window is None and self.softcap is None
        return plain and self.head_dim == 128 and dtype == kv_dtype == torch.bfloat16


def why_not(layers: Sequence[LayerSpec], dtype: torch.dtype, page_size: int) -> str | None:
    """Why FlashInfer's kernels cannot run these layers, in words; None: they can."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in bfloat16 or float16, not {str(dtype).removeprefix('torch.')}"
    for spec in layers:
        if spec.chunk is not None and spec.chunk % page_size:
            return (
                f"layer {spec.index} attends to chunks of {spec.chunk} positions, no multiple of page_size={page_size}"
            )
        if spec.latent:
            return f"layer {spec.index} keeps latent vectors, which are attended to by other kernels than we call"
        if spec.key_dim != spec.value_dim:
            return f"layer {spec.index} has keys of {spec.key_dim} and values of {spec.value_dim} dimensions"
        if spec.key_dim not in _HEAD_DIMS:
            return f"layer {spec.index} has heads of {spec.key_dim} dimensions, not one of {_HEAD_DIMS}"
    return None


@dataclass(frozen=True, slots=True, eq=False)
class HostArrays:
    """One step as FlashInfer's plans take it: int32 arrays in one host array, R rows."""

    memory: torch.Tensor
    sizes: list[int]
    """Sizes of the arrays: those of `for_plans`, then the rest of `DeviceArrays`. All but the first two are uploaded.
    """
    begins: list[int]
    """Offsets of these arrays."""
    divided: bytes
    """Bytes of the page pointers (`for_plans`). As long as they are equal, a plan divides the work alike."""
    longest_query: int
    """Most tokens of a row."""

    @property
    def uploaded(self) -> torch.Tensor:
        """The arrays for the device, in the order of `DeviceArrays`."""
        return self.memory[self.begins[2] :]

    @property
    def num_pages(self) -> int:
        """Pages listed, over all rows."""
        return self.sizes[-1]

    def for_plans(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """(bounds of each row's tokens [R + 1]; its number of keys, this step's included [R]; bounds of its pages among
        all pages listed [R + 1]; tokens in its last page [R], 1 to page_size)."""
        tokens, lens, pages, last = (
            self.memory[at : at + size] for at, size in zip(self.begins[:4], self.sizes, strict=False)
        )
        return tokens, lens, pages, last


@dataclass(frozen=True, slots=True, eq=False)
class DeviceArrays:
    """The uploaded arrays on the device: views of one int32 array, R rows and T tokens."""

    kv_indptr: torch.Tensor
    """[R + 1]"""
    last_page_len: torch.Tensor
    """[R]"""
    batch_indices: torch.Tensor
    """[T] row of each token."""
    positions: torch.Tensor
    """[T] position of each token in its sequence."""
    kv_indices: torch.Tensor
    """[pages listed]; in a graph, as many as its fixed array has room for."""

    @classmethod
    def over(cls, memory: torch.Tensor, rows: int, tokens: int) -> DeviceArrays:
        """Views of `memory`, whose front is laid out for `rows` and `tokens`."""
        sizes = (rows + 1, rows, tokens, tokens)
        begins = _begins(sizes)
        indptr, last, batch, positions = (memory[at : at + size] for at, size in zip(begins, sizes, strict=False))
        return cls(indptr, last, batch, positions, memory[begins[-1] :])


def uploaded_size(rows: int, tokens: int, pages: int) -> int:
    """int32 elements of the uploaded arrays."""
    return _begins((rows + 1, rows, tokens, tokens))[-1] + pages


def host_only(rows: int) -> int:
    """int32 elements of the arrays before the uploaded ones, which only plans read."""
    return _begins((rows + 1, rows))[-1]


def pack_step(step: StepView, page_size: int, allocate: Callable[[int], torch.Tensor]) -> HostArrays:
    """Fill one host tensor of `allocate(int32 elements)` with all arrays of a step's plans."""
    rows, tokens = len(step.counts), int(step.qo_indptr[-1])
    every = row_of_token = np.arange(rows)
    positions, longest = step.starts, 1
    if tokens > rows:
        row_of_token = np.repeat(every, step.counts)
        positions = np.arange(tokens) + (step.starts - step.qo_indptr[:-1])[row_of_token]
        longest = int(step.counts.max())
    ends = step.starts + step.counts
    full = (ends - 1) // page_size
    kv_indptr = np.zeros(rows + 1, dtype=np.int64)
    np.cumsum(full + 1, out=kv_indptr[1:])
    num_pages = int(kv_indptr[-1])
    first = (every if step.slots is None else step.slots) * step.page_tables.shape[1] - kv_indptr[:-1]
    listed = step.page_tables.reshape(-1)[np.repeat(first, full + 1) + np.arange(num_pages)]
    arrays: tuple[Any, ...] = (
        step.qo_indptr, ends, kv_indptr, ends - full * page_size, row_of_token, positions, listed,
    )  # fmt: skip
    sizes = [len(array) for array in arrays]
    begins = _begins(sizes[:-1])
    memory = allocate(begins[-1] + num_pages)
    numbers = memory.numpy()
    for begin, array in zip(begins, arrays, strict=True):
        numbers[begin : begin + len(array)] = array
    return HostArrays(memory, sizes, begins, kv_indptr.tobytes(), longest)


def in_chunks(step: StepView, chunk: int | None, page_size: int) -> StepView:
    """The step for layers with chunked attention: one row for each chunk that a row's tokens lie in.

    Such a row begins where its chunk does: its positions count from there, and its pages are those of the chunk. That
    makes it plain causal attention; a row of one token stays one row. `chunk` is a multiple of `page_size`.
    """
    if chunk is None:
        return step
    ends = step.starts + step.counts
    first = step.starts // chunk
    pieces = (ends - 1) // chunk - first + 1
    row = np.repeat(np.arange(len(pieces)), pieces)
    number = first[row] + np.arange(len(row)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    starts = np.maximum(step.starts[row] - number * chunk, 0)
    counts = np.minimum(ends[row] - number * chunk, chunk) - starts
    owner, width = row if step.slots is None else step.slots[row], step.page_tables.shape[1]
    columns = number[:, None] * (chunk // page_size) + np.arange(min(chunk // page_size, width))
    return replace(
        step, starts=starts, counts=counts, qo_indptr=np.concatenate(([0], np.cumsum(counts))),
        page_tables=step.page_tables[owner[:, None], np.minimum(columns, width - 1)], slots=None,
    )  # fmt: skip


def float_workspace_bytes(groups: Sequence[LayerGroup], max_rows: int, processors: int) -> int:
    """Bytes of the workspace in which FlashInfer keeps partial results when it splits long sequences.

    The recommended 128 MiB are too little for wide models: a plan that needs more raises. Its need is bounded as in
    `PrefillPlan` of FlashInfer's scheduler.cuh: per tile of queries one float32 output and one weight for each head;
    splitting prompts makes at most two tiles per processor and kv head, a decode graph of `max_rows` rows reserves one
    tile and a bit per row.
    """
    most = _LEAST_FLOAT_WORKSPACE
    for group in groups:
        per_query = 4 * group.num_heads * (group.head_dim + 1)
        split = 2 * processors // group.num_kv_heads
        prompt = split * (128 if group.head_dim < 256 else 64)
        tile = 16 if group.heads_per_kv_head <= 16 else 64
        decode = max(split, -(-max_rows * group.heads_per_kv_head // tile) + max_rows) * tile
        most = max(most, per_query * max(prompt, decode) + 1024)
    return most


def graph_int_workspace_bytes(size: int, heads_per_kv_head: int, processors: int) -> int:
    """Bytes of the integer workspace of a decode graph's wrapper: a few indices per tile, generously.

    FlashInfer's own default of 8 MiB, on the device and pinned on the host, would come to hundreds of MiB over all
    graph sizes.
    """
    tiles = 32 * processors + size * (heads_per_kv_head // 16 + 2)
    return -(-(16 * tiles + 16 * size + 4096) // 4096) * 4096


def _begins(sizes: Sequence[int]) -> list[int]:
    """Aligned offsets of arrays of these sizes laid end to end, and the offset after the last."""
    begins = [0]
    for size in sizes:
        begins.append(begins[-1] + -(-size // _ALIGN) * _ALIGN)
    return begins
