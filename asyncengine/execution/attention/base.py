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
"""More positions than a sequence has."""


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
    """No position sees one before this one; only compiled kernels know it."""
    softcap: float | None = None
    """Scores become softcap * tanh(score / softcap) before masking (Gemma 2)."""
    both: bool = False
    """True in an encoder: a position sees later ones as well, and a window reaches as far to either side."""
    sinks: torch.Tensor | None = None
    """[num_heads] logits that take part in the softmax and carry no value (gpt-oss)."""
    divided: bool = False
    """Its heads are the share of one of several processes; the others have as many each."""
    latent: bool = False
    """Values are the last `value_dim` numbers of the keys, and nothing else is kept of them (DeepSeek V2). One kv head.
    """

    positions: bool = False
    """Keys hold positions (ALiBi), which are exact in the model's type alone."""

    @property
    def kept_dims(self) -> int:
        """Numbers that are kept of a token for each kv head."""
        return self.key_dim if self.latent else self.key_dim + self.value_dim

    @property
    def windowed(self) -> bool:
        """True: what is far behind is seen by no later position."""
        return bool(self.window or self.chunk)

    @property
    def later(self) -> int:
        """The number of later positions that one sees at most."""
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
    """Positions in the pool of the layers with windows, like `kv_slots`."""
    blocks: tuple[tuple[int, int, int], ...] = ()
    """(row, first, end): positions [first, end) of a row attend to each other both ways (pictures of Gemma 3); those
    before the row's `start` have been. Not longer than a window, and never in graphs."""
    near_blocks: bool = False
    """They do so in layers with windows alone (Gemma 4)."""
    slots: Int64Array | None = None
    """[rows] which of `page_tables` each row has, where these are of more than the step's rows: in graphs."""

    def for_windows(self) -> StepView:
        """The view that layers with windows are given."""
        if self.window_tables is None or self.window_slots is None:
            return self
        return replace(self, page_tables=self.window_tables, kv_slots=self.window_slots)

    def for_others(self) -> StepView:
        """The view that layers without windows are given."""
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
    """Other processes have as many pieces each (`LayerSpec.divided`)."""


class StepAttention(Protocol):
    """The operations that a layer calls in a step that was planned."""

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store this step's key [tokens, kv heads, key dim] and value [tokens, kv heads, value dim]; of latent layers
        the key alone."""

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """query [tokens, heads, key dim] -> [tokens, heads, value dim], over the keys and values written so far."""


class AttentionBackend(StepAttention):
    """Paged attention for one model on one device. Not thread-safe: one step at a time."""

    name: str
    shared: SharedPools | None = None
    """Memory in which its pages lie, if that of several processes; there is room for states, too."""
    graphs = False
    """Whether `write` and `attend` may be captured in a CUDA graph, as `FlashInferBackend`'s."""
    num_pages: int
    """Page 0 included."""
    page_size: int
    num_window_pages: int = 0
    """Pages of layers with windows, page 0 included; 0: all layers have the same."""
    kv_bytes: int
    """Bytes of the KV pool."""

    @abstractmethod
    def plan(self, step: StepView) -> None:
        """Host work and uploads of one step, before the forward or the replay: once per group of equal layers.

        On a CPU the arrays of `step` are also those of later steps: nothing looks at them once the forward is done.
        Never part of a graph; `write` and `attend` after it only launch work on the device.
        """

    def page_pools(self) -> Sequence[PagePool]:
        """Memory of every layer's keys and values. Nothing where it is not the host's."""
        return ()

    @abstractmethod
    def close(self) -> None:
        """Free the pool."""


def first_seen(window: int | None, chunk: int | None, positions: Int64Array) -> Int64Array:
    """The first position that each of `positions` sees."""
    first = np.zeros_like(positions) if window is None else np.maximum(positions - window + 1, 0)
    return first if chunk is None else np.maximum(first, positions // chunk * chunk)


def page_bytes(layers: Sequence[LayerSpec], page_size: int, dtype: torch.dtype) -> int:
    """Bytes one page takes over all layers, keys and values. In int8 both have a float32 scale for each token."""
    scales = 8 if dtype == torch.int8 else 0
    return sum(spec.num_kv_heads * (spec.kept_dims * dtype.itemsize + scales) for spec in layers) * page_size
