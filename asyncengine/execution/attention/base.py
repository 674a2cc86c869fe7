"""The interface of attention backends, and the facts about layers and steps that a backend is given.

A backend owns the KV pool and its memory layout; no other code reads or writes KV memory. Per step the runner calls
`plan` once; then each layer of the model calls `write` and `attend` once, in layer order.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch

from asyncengine.execution.device.shared_gather import SharedPools
from asyncengine.execution.device.transfer import Int32Array, Int64Array

_FAR = 2**40
"""A number larger than any position."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerSpec:
    """Everything about one layer's attention that does not change between steps."""

    index: int
    num_heads: int
    num_kv_heads: int
    """Divides `num_heads`; query head h reads kv head h // (num_heads // num_kv_heads)."""
    key_dim: int
    value_dim: int
    scale: float
    """Scores are q . k * scale."""
    window: int | None = None
    """Sliding window: position p sees positions (p - window, p]. None: all up to p."""
    chunk: int | None = None
    """Position p sees none before its own chunk, which begins at p // chunk * chunk (Llama 4). None: it sees all."""
    first: int = 0
    """No position sees positions before this one (MTP heads); only compiled kernels support it."""
    softcap: float | None = None
    """Scores become softcap * tanh(score / softcap) before masking (Gemma 2)."""
    both: bool = False
    """True in an encoder: a position sees later ones as well, and a window reaches as far to either side."""
    sinks: torch.Tensor | None = None
    """[num_heads] logits that take part in the softmax and carry no value (gpt-oss)."""
    divided: bool = False
    """Its heads are one rank's share of the layer's; other ranks have as many each."""
    latent: bool = False
    """Values are the last `value_dim` numbers of the keys, and are not stored themselves (DeepSeek V2). One kv head."""

    positions: bool = False
    """Keys hold positions (ALiBi), which are exact in the model's type alone."""

    @property
    def kept_dims(self) -> int:
        """Numbers that are kept of a token for each kv head."""
        return self.key_dim if self.latent else self.key_dim + self.value_dim

    @property
    def windowed(self) -> bool:
        """Whether later positions stop seeing a position at some distance, so that its pages can be freed."""
        return bool(self.window or self.chunk)

    @property
    def later(self) -> int:
        """The most later positions that a position sees."""
        if not self.both:
            return 0
        return _FAR if self.window is None else self.window - 1


@dataclass(frozen=True, slots=True, eq=False)
class StepView:
    """One step, flattened: row r owns tokens [qo_indptr[r], qo_indptr[r + 1]). Host arrays unless said otherwise."""

    starts: Int64Array
    """[rows] position of each row's first token in its sequence."""
    counts: Int64Array
    """[rows] tokens of each row in this step, >= 1."""
    qo_indptr: Int64Array
    """[rows + 1] prefix sums of `counts`."""
    page_tables: Int32Array
    """[rows, most pages of a row]; row r uses the first ceil((start + count) / page_size), the rest is arbitrary."""
    kv_slots: torch.Tensor
    """Device, int64 [tokens]: page * page_size + offset where each token's key and value go."""
    window_tables: Int32Array | None = None
    """Page tables in the pool of the layers with windows, like `page_tables`; entries that a row's tokens do not see
    are arbitrary. None: all layers have one pool."""
    window_slots: torch.Tensor | None = None
    """KV slots in the pool of the layers with windows, like `kv_slots`."""
    blocks: tuple[tuple[int, int, int], ...] = ()
    """(row, first, end): positions [first, end) of a row attend to each other both ways (pictures of Gemma 3); some of
    them may precede the row's `start`. Not longer than a window, and never in graphs."""
    near_blocks: bool = False
    """Blocks apply only to layers with windows (Gemma 4)."""
    slots: Int64Array | None = None
    """[rows] index of each row's table in `page_tables`, if these have tables of all slots (in graphs)."""

    def for_windows(self) -> StepView:
        """The view for layers with windows."""
        if self.window_tables is None or self.window_slots is None:
            return self
        return replace(self, page_tables=self.window_tables, kv_slots=self.window_slots)

    def for_others(self) -> StepView:
        """The view for layers without windows."""
        return replace(self, blocks=()) if self.near_blocks else self


@dataclass(frozen=True, slots=True, eq=False)
class MergedHeads:
    """The layout of a row of a merged projection of queries, keys and values, with the norms and rotation it goes
    through."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    q_norm: torch.Tensor | None = None
    """[key_dim] float32 weight of an RMS norm of each query head, contiguous. None: no norm."""
    k_norm: torch.Tensor | None = None
    epsilon: float = 0.0
    interleaved: bool = False
    """Pairs that are rotated are (2 i, 2 i + 1), not (i, i + dim / 2); only on a GPU."""


class PagePool(NamedTuple):
    """Memory of one layer's keys or values: bytes of page p begin at p * `page_bytes` of each of its `pieces`, which
    are `stride` bytes apart."""

    memory: torch.Tensor
    """Contiguous, on the host."""
    page_bytes: int
    pieces: int
    stride: int
    of_windows: bool
    """Its pages are window pages."""
    divided: bool = False
    """Other ranks have as many pieces each (`LayerSpec.divided`)."""


class StepAttention(Protocol):
    """The operations that layers call in a planned step."""

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store this step's key [tokens, kv heads, key dim] and value [tokens, kv heads, value dim]. Latent layers
        store the key only."""

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """query [tokens, heads, key dim] -> [tokens, heads, value dim], over the keys and values written so far."""


class AttentionBackend(StepAttention):
    """Paged attention for one model on one device. Not thread-safe: one step at a time."""

    name: str
    shared: SharedPools | None = None
    """Memory of its pages if several ranks share it, with room for recurrent states."""
    graphs = False
    """Whether `write` and `attend` may be captured in a CUDA graph."""
    num_pages: int
    """Page 0 included."""
    page_size: int
    num_window_pages: int = 0
    """Pages of the layers with windows, page 0 included; 0: all layers share one pool."""
    kv_bytes: int
    """Bytes of the KV pool."""

    @abstractmethod
    def plan(self, step: StepView) -> None:
        """Do the host work and uploads of one step, before the forward or the replay: once per group of equal layers.

        On a CPU later steps reuse the arrays of `step`: none may be read after the forward. Never part of a graph;
        `write` and `attend` after it only launch work on the device.
        """

    def page_pools(self) -> Sequence[PagePool]:
        """Memory of every layer's keys and values; empty if it is not on the host."""
        return ()

    @abstractmethod
    def close(self) -> None:
        """Free the pool."""


def first_seen(window: int | None, chunk: int | None, positions: Int64Array) -> Int64Array:
    """The first position that each of `positions` sees."""
    first = np.zeros_like(positions) if window is None else np.maximum(positions - window + 1, 0)
    return first if chunk is None else np.maximum(first, positions // chunk * chunk)


def page_bytes(layers: Sequence[LayerSpec], page_size: int, dtype: torch.dtype) -> int:
    """Bytes of one page's keys and values over all layers. In int8 both have a float32 scale for each token."""
    scales = 8 if dtype == torch.int8 else 0
    return sum(spec.num_kv_heads * (spec.kept_dims * dtype.itemsize + scales) for spec in layers) * page_size
