"""The FlashInfer backend on a real GPU: every path of its kernels, and what long prompts need.

Skipped without an NVIDIA GPU or without `asyncengine[cuda]`. The first run on a machine compiles kernels for minutes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from gpu.engines import CASES
from gpu.families import NEEDS_FLASHINFER
from support.attention_pair import Pair, Parts, prepare

from asyncengine.execution.attention.base import LayerSpec
from asyncengine.execution.attention.flashinfer import FlashInferBackend
from asyncengine.execution.attention.flashinfer_plan import LayerGroup, float_workspace_bytes
from asyncengine.execution.device.transfer import is_hopper
from asyncengine.execution.runner.graphs import CudaCapture

pytestmark = NEEDS_FLASHINFER

BASE = LayerSpec(index=0, num_heads=8, num_kv_heads=4, key_dim=128, value_dim=128, scale=0.09)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def make(layers: list[LayerSpec], device: torch.device, dtype: torch.dtype, **changes: Any) -> FlashInferBackend:
    options: dict[str, Any] = {"max_rows": 64, "max_pages_per_row": 64, **changes}
    return FlashInferBackend(layers, 600, options.pop("page_size", 16), dtype, device, **options)


TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.06, torch.float16: 0.01}
"""Largest error of an output that averages values of standard deviation 1."""
_MOST = 400
_ROWS = 6


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of layer, or several in one model. Those that differ in dimensions, type, window or soft cap compile
    kernels of their own."""

    name: str
    heads: list[Any]
    """Query heads, kv heads, and what else the specification has, of each layer."""
    dim: int = 128
    dtype: str = "bfloat16"
    stored: str | None = None
    page_sizes: tuple[int, ...] = (16,)
    page_size: int = 16
    """Page size of this case, one of those."""

    @property
    def layers(self) -> list[LayerSpec]:
        sizes = {"key_dim": self.dim, "value_dim": self.dim, "scale": self.dim**-0.5}
        return [
            replace(BASE, num_heads=count, num_kv_heads=kv, **{**sizes, **(more[0] if more else {})})
            for count, kv, *more in self.heads
        ]

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype | None]:
        """Type of queries, and that of the pool if it is another."""
        return getattr(torch, self.dtype), None if self.stored is None else getattr(torch, self.stored)


CASES_OF_LAYERS = [Case(**each) for each in CASES["attention"]]


def flashinfer_backend(case: Case, device: torch.device) -> FlashInferBackend:
    pages = 1 + _ROWS * -(-_MOST // case.page_size)
    return FlashInferBackend(
        case.layers, pages, case.page_size, case.dtypes[0], device, max_rows=64,
        max_pages_per_row=-(-_MOST // case.page_size), kv_dtype=case.dtypes[1],
    )  # fmt: skip


@pytest.mark.parametrize(
    "case", [replace(case, page_size=size) for case in CASES_OF_LAYERS for size in case.page_sizes],
    ids=lambda case: f"{case.name}, pages of {case.page_size}",
)  # fmt: skip
def test_kernels_give_what_torch_gives(case: Case, device: torch.device) -> None:
    """Compare prompts, chunks, mixed steps, decodes over page boundaries and padded decodes in graphs with torch."""
    tested, (dtype, stored) = flashinfer_backend(case, device), case.dtypes
    pair = Pair(tested, case.layers, _ROWS, dtype=dtype, device=device, stored=stored, most=_MOST)
    errors: dict[str, float] = {}

    def step(kind: str, parts: Parts) -> None:
        errors[kind] = max(errors.get(kind, 0.0), pair.step(parts))

    try:
        step("prompts", [(0, 3), (1, 130), (3, 17)])
        step("decodes", [(1, 1), (0, 1), (3, 1)])
        step("mixed", [(2, 9), (1, 1), (0, 70), (3, 1), (5, 2)])
        step("a chunk", [(1, 190)])
        step("mixed", [(4, 33), (2, 1)])
        for _ in range(18):
            step("decodes", [(row, 1) for row in (3, 2, 1, 5, 0, 4)])
        captured = CudaCapture()
        for size in (8, 2):
            pair.capture(size, captured)
        for turn in range(18):
            rows, size = [([5, 0, 2, 1, 3], 8), ([4], 2), ([0, 1, 2, 3, 4, 5], 8)][turn % 3]
            errors["graphs"] = max(errors.get("graphs", 0.0), pair.replay(rows, size))
    finally:
        pair.close()
    assert max(errors.values()) <= TOLERANCE[dtype], errors


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
