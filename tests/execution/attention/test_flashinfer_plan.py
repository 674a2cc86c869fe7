"""The host half: what a step's index arrays hold, where they lie, and how much workspace is enough."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from asyncengine.execution.attention.base import LayerSpec
from asyncengine.execution.attention.flashinfer_plan import (
    LayerGroup,
    float_workspace_bytes,
    graph_int_workspace_bytes,
    why_not,
)

SPEC = LayerSpec(index=0, num_heads=8, num_kv_heads=2, key_dim=128, value_dim=128, scale=0.1)
MIB = 2**20


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (replace(SPEC, chunk=500), "layer 0 attends to chunks of 500 positions, no multiple of page_size=16"),
        (replace(SPEC, value_dim=64), "keys of 128 and values of 64"),
        (replace(SPEC, key_dim=96, value_dim=96), "heads of 96 dimensions"),
    ],
)
def test_what_cannot_run_is_said(layer: LayerSpec, words: str) -> None:
    fine = [replace(SPEC, index=1), replace(SPEC, chunk=512), replace(SPEC, sinks=torch.zeros(8))]
    assert why_not(fine, torch.bfloat16, 16) is None
    assert words in str(why_not([SPEC, layer], torch.float16, 16))
    assert "float32" in str(why_not([SPEC], torch.float32, 16))


def test_float_workspace_holds_what_the_scheduler_of_flashinfer_asks() -> None:
    """Its formulas (PrefillPlan in scheduler.cuh) written out for an H200 of 132 processors."""

    def asked(heads: int, kv_heads: int, dim: int, tiles: int, tile: int) -> int:
        return heads * tiles * tile * dim * 4 + heads * tiles * tile * 4 + 32

    small = LayerGroup(16, 8, 128, 0.1, None, None)
    assert float_workspace_bytes([small], 256, 132) == 128 * MIB
    for heads, kv_heads, dim in ((32, 4, 128), (64, 8, 128), (28, 4, 128), (32, 8, 256), (64, 2, 64), (8, 1, 256)):
        group = LayerGroup(heads, kv_heads, dim, 0.1, None, None)
        for rows in (1, 256, 1024):
            found = float_workspace_bytes([small, group], rows, 132)
            assert found >= asked(heads, kv_heads, dim, 264 // kv_heads, 128 if dim < 256 else 64)
            tile = 16 if heads // kv_heads <= 16 else 64
            tiles = max(264 // kv_heads, -(-rows * (heads // kv_heads) // tile) + rows - 1)
            assert found >= asked(heads, kv_heads, dim, tiles, tile)
    assert float_workspace_bytes([LayerGroup(32, 4, 128, 0.1, None, None)], 1, 132) > 128 * MIB


def test_integer_workspace_of_graphs_is_enough_and_small() -> None:
    for size in (1, 8, 256, 1024):
        for group in (1, 8, 32):
            found = graph_int_workspace_bytes(size, group, 132)
            tiles = max(264, -(-size * group // 16) + size)
            assert found >= 13 * tiles + 8 * (size + 1) + 256
            assert found >= 13 * 16 * 132 + 256, "the CUDA-core kernel, sixteen blocks a processor"
            assert found < MIB // 4
            assert found % 16 == 0
