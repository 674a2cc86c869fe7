"""The FlashInfer backend on a real GPU: what the quick form of gpucheck leaves out.

Skipped without an NVIDIA GPU or without `asyncengine[cuda]`. The first run on a machine compiles kernels for minutes.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.attention_pair import Pair, prepare

from asyncengine.execution.attention.base import LayerSpec
from asyncengine.execution.attention.flashinfer import FlashInferBackend
from asyncengine.execution.attention.flashinfer_plan import LayerGroup, float_workspace_bytes
from asyncengine.execution.device.pinned import is_hopper

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("flashinfer") is None,
    reason="needs an NVIDIA GPU and asyncengine[cuda]",
)

BASE = LayerSpec(index=0, num_heads=8, num_kv_heads=4, key_dim=128, value_dim=128, scale=0.09)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def make(layers: list[LayerSpec], device: torch.device, dtype: torch.dtype, **changes: Any) -> FlashInferBackend:
    options: dict[str, Any] = {"max_rows": 64, "max_pages_per_row": 64, **changes}
    return FlashInferBackend(layers, 600, options.pop("page_size", 16), dtype, device, **options)


@pytest.mark.parametrize("heads", [8, 16, 32])
def test_long_prompts_on_hopper(heads: int, device: torch.device) -> None:
    """FlashAttention-3's kernels compute whole prompts, parts of pages, and chunks behind others."""
    if not is_hopper(device):
        pytest.skip("needs compute capability 9")
    layers = [replace(BASE, num_heads=heads), replace(BASE, index=1, num_heads=heads, window=21)]
    backend = make(layers, device, torch.bfloat16, max_pages_per_row=100)
    backend.warm_up()
    assert backend._long[LayerGroup.of(layers[0])] is not backend._prefill[LayerGroup.of(layers[0])]
    assert backend._long[LayerGroup.of(layers[1])] is backend._prefill[LayerGroup.of(layers[1])]
    pair = Pair(backend, layers, 3, dtype=torch.bfloat16, device=device, most=1600)
    for parts in ([(0, 128)], [(1, 129), (2, 900)], [(0, 1000)], [(1, 1), (2, 1), (0, 257)], [(0, 1), (1, 1)]):
        assert pair.step(parts) < 0.06, parts


def test_eight_bit_keys_and_values(device: torch.device) -> None:
    backend = make([BASE], device, torch.bfloat16, kv_dtype=torch.float8_e4m3fn)
    pair = Pair(backend, [BASE], 2, dtype=torch.bfloat16, device=device)
    assert pair.step([(0, 60), (1, 3)]) < 0.5
    assert pair.step([(0, 1), (1, 1)]) < 0.5


@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 4), (64, 8), (28, 4), (16, 8)])
def test_workspace_is_enough_for_long_prompts_and_wide_graphs(heads: int, kv_heads: int, device: torch.device) -> None:
    """Plans that split: FlashInfer raises when a workspace is too small."""
    spec = replace(BASE, num_heads=heads, num_kv_heads=kv_heads)
    backend = make([spec], device, torch.bfloat16, max_rows=256, max_pages_per_row=40)
    fixed = prepare(backend, 256)
    pair = Pair(backend, [spec], 1, dtype=torch.bfloat16, device=device, most=9500)
    for chunk in (8192, 512, 64):
        pair.plan([(0, chunk)])
        pair.advance([(0, chunk)])
    pair.fixed, pair.lengths = fixed, [600]
    pair.plan([(0, 1)] * 1, padded=256)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    assert backend._workspace.numel() == float_workspace_bytes([LayerGroup.of(spec)], 256, processors)
