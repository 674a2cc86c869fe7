"""Paged attention by compiled kernels, for one dtype and one size of pages: the forms that serve these are chosen here.

Layers and steps are addresses of the records that `attention_fields` describes; sizes of steps in memory are in bytes.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from asyncengine.kernels.cpu import attention, attention_write
from asyncengine.kernels.cpu.attention_tiles import LANES
from asyncengine.kernels.cpu.jit import kind_of
from asyncengine.kernels.cpu.team import use_team
from asyncengine.kernels.cpu.vectors import cpu_has


class PagedAttention:
    """The calls of one backend, by the team of the calling thread."""

    def __init__(self, dtype: torch.dtype, page_size: int) -> None:
        self.lanes = math.gcd(page_size, max(LANES))
        """Tokens of a page that lie side by side."""
        pairs = dtype == torch.bfloat16 and self.lanes == max(LANES) and cpu_has("avx512bf16")
        self._kind: Any = kind_of(dtype)
        self._form: Any = LANES[self.lanes]
        self._operand: Any = np.uint16(0) if pairs else np.float32(0)

    def write(self, key: torch.Tensor, value: torch.Tensor, layer: int, step: int) -> None:
        """Put key [tokens, kv heads, key dim] and value alike, heads contiguous, into their pages."""
        size = key.element_size()
        attention_write.write(
            key.data_ptr(), key.stride(0) * size, key.stride(1) * size, value.data_ptr(), value.stride(0) * size,
            value.stride(1) * size, layer, step, self._kind, use_team(),
        )  # fmt: skip

    def prepare_and_write(
        self, qkv: torch.Tensor, query: torch.Tensor, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None,
        epsilon: float, cos: torch.Tensor, sin: torch.Tensor, layer: int, step: int,
    ) -> None:  # fmt: skip
        """Norms and rotation of a merged projection; queries to `query`, keys and values into their pages."""
        attention_write.prepare_and_write(
            qkv.data_ptr(), query.data_ptr(), 0 if q_norm is None else q_norm.data_ptr(),
            0 if k_norm is None else k_norm.data_ptr(), epsilon, cos.data_ptr(), sin.data_ptr(), cos.shape[-1], layer,
            step, self._kind, use_team(),
        )  # fmt: skip

    def attend(
        self, query: torch.Tensor, token_size: int, head_size: int, out: torch.Tensor, layer: int, step: int
    ) -> None:
        """out [tokens, heads, value dim] of queries whose tokens and heads lie so many bytes apart."""
        attention.attend(
            query.data_ptr(), token_size, head_size, out.data_ptr(), layer, step, self._kind, self._form, self._operand,
            use_team(),
        )  # fmt: skip

    def compile_join(self) -> None:
        """Compile what only steps with long contexts call."""
        attention.compile_join(self._kind)
