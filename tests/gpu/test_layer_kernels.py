"""Triton kernels of layers on a real GPU, compiled, against torch's operations there in float32."""

from __future__ import annotations

import pytest
import torch
from gpu.engines import captured
from support.few_row_products import check_products
from torch.nn.functional import rms_norm

from asyncengine.execution.attention.base import MergedHeads

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
DTYPES = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def on_the_device() -> None:
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")


def near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found.float(), wanted.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 1024), (300, 4096), (3, 40)])
def test_norms(rows: int, width: int, dtype: torch.dtype) -> None:
    from asyncengine.kernels.cuda.qk_norm_rope import add_rms_norm
    from asyncengine.kernels.cuda.qk_norm_rope import rms_norm as by_kernel

    x, branch = (torch.randn(rows, width, device="cuda", dtype=dtype) for _ in range(2))
    weight = torch.rand(width, device="cuda") + 0.5
    near(by_kernel(x, weight, 1e-6), rms_norm(x.float(), (width,), weight, 1e-6))
    total, normed = add_rms_norm(x, branch, 0.5, weight, 1e-6)
    near(total, x.float() + branch.float() * 0.5)
    near(normed, rms_norm(total.float(), (width,), weight, 1e-6))


@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "rotary"), [(16, 8, 128, 128), (6, 2, 64, 20), (4, 1, 256, 0)])
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(("tokens", "style"), [(1, "halves"), (77, "halves"), (77, "interleaved")])
def test_heads(
    tokens: int, style: str, norm: bool, heads: int, kv_heads: int, dim: int, rotary: int, kept: torch.dtype
) -> None:
    from asyncengine.execution.layers.rotary import Angles, rotate
    from asyncengine.kernels.cuda.qk_norm_rope import angles, prepare_and_write

    dtype, page = torch.bfloat16, 16
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim, device="cuda", dtype=dtype) * 20
    weights = [torch.rand(dim, device="cuda") + 0.5 for _ in range(2)]
    own = MergedHeads(heads, kv_heads, dim, dim, *(weights if norm else [None, None]), 1e-6, style == "interleaved")
    frequencies = 1e4 ** -(torch.arange(rotary // 2, device="cuda") / max(rotary // 2, 1))
    positions = torch.arange(tokens, device="cuda") * 977
    cos, sin = torch.zeros(2, tokens, 0, device="cuda")
    if rotary:
        cos, sin = angles(positions, frequencies, 1.1, style == "interleaved", torch.float32)
        turn = positions.float()[:, None] * frequencies
        turn = turn.repeat(1, 2) if style == "halves" else turn.repeat_interleave(2, dim=1)
        torch.testing.assert_close(cos, turn.cos() * 1.1, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(sin, turn.sin() * 1.1, rtol=1e-5, atol=1e-5)
    pool = torch.zeros(12, 2, page, kv_heads, dim, device="cuda", dtype=dtype).to(kept)
    slots = torch.randperm(11 * page, device="cuda")[:tokens] + page
    found = prepare_and_write(qkv, own, cos, sin, slots, pool)
    query, key, value = (
        part.unflatten(1, (-1, dim)).float() for part in qkv.split([heads * dim, *[kv_heads * dim] * 2], 1)
    )
    if norm:
        query, key = (rms_norm(part, (dim,), own, 1e-6) for part, own in zip((query, key), weights, strict=True))
    query, key = (rotate(part, Angles(cos, sin, style)) for part in (query, key))
    near(found, query.to(dtype))
    for which, part in enumerate((key, value)):
        stored = pool[slots // page, which, slots % page].float()
        if kept == dtype:
            near(stored, part.to(dtype))
        else:
            torch.testing.assert_close(stored, part.clamp(-448, 448), rtol=1 / 15, atol=2**-9)
    assert not pool[0].float().any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 3, 4])
@pytest.mark.parametrize(("outputs", "inputs"), [(1024, 3072), (20, 328), (64, 4096), (8, 12288)])
def test_products_of_few_rows(outputs: int, inputs: int, rows: int, dtype: torch.dtype) -> None:
    check_products(outputs, inputs, rows, dtype, 2e-2, "cuda")


def test_a_chain_in_a_graph_reads_what_was_written_before() -> None:
    """Kernels that begin early wait for those before them: each replay gives what the launches gave one by one."""
    from asyncengine.kernels.cuda.few_rows import few_rows
    from asyncengine.kernels.cuda.qk_norm_rope import add_rms_norm, rms_norm

    weights = [torch.randn(1024, 1024, device="cuda").bfloat16() / 32 for _ in range(24)]
    ones, x = torch.ones(1024, device="cuda"), torch.randn(2, 1024, device="cuda").bfloat16()

    def chain() -> torch.Tensor:
        h, y = x, rms_norm(x, ones, 1e-6)
        for weight in weights:
            h, y = add_rms_norm(h, few_rows(y, weight, None), 1.0, ones, 1e-6)
        return y

    chain()
    graph, replayed = captured(chain)
    for _ in range(5):
        x.copy_(torch.randn(2, 1024, device="cuda"))
        graph.replay()
        slow = x.clone()
        h, y = slow, rms_norm(slow, ones, 1e-6)
        for weight in weights:
            torch.cuda.synchronize()
            h, y = add_rms_norm(h, few_rows(y, weight, None), 1.0, ones, 1e-6)
        assert torch.equal(replayed, y)
