"""Compiled operations of layers between their products, of tensors; each is described where it is written."""

from __future__ import annotations

from asyncengine.kernels.cpu.activation import activation_id, elementwise, gelu_and_mul, gelu_tanh_and_mul, silu_and_mul
from asyncengine.kernels.cpu.gather import RowCopies, joined
from asyncengine.kernels.cpu.head_gate import gate_heads, split_queries
from asyncengine.kernels.cpu.head_products import multiply_heads, rows_of_head
from asyncengine.kernels.cpu.norm import add_layer_norm, add_rms_norm, layer_norm, norm_heads, rms_norm
from asyncengine.kernels.cpu.norm import fits as layer_norm_fits
from asyncengine.kernels.cpu.qk_norm_rope import rotate_heads
from asyncengine.kernels.cpu.scaling import (
    add,
    add_both,
    add_gated,
    add_scaled,
    scale_each,
    scale_rows,
    scaled_rows,
    widened,
)

GATED = {"silu": silu_and_mul, "gelu_tanh": gelu_tanh_and_mul, "gelu": gelu_and_mul}
"""Activations that come with a product, by name."""

__all__ = [
    "GATED", "RowCopies", "activation_id", "add", "add_both", "add_gated", "add_layer_norm", "add_rms_norm",
    "add_scaled", "elementwise", "gate_heads", "joined", "layer_norm", "layer_norm_fits", "multiply_heads",
    "norm_heads", "rms_norm", "rotate_heads", "rows_of_head", "scale_each", "scale_rows", "scaled_rows",
    "split_queries", "widened",
]  # fmt: skip
