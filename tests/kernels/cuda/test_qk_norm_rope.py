"""Norms of heads, rotation and writing to pages in one Triton kernel, against torch, in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import rms_norm

from asyncengine.execution.attention.base import MergedHeads
from asyncengine.execution.layers.rotary import Angles, Rotary, RotaryConfig, rotate
from asyncengine.kernels.cuda.qk_norm_rope import angles, prepare_and_write

FORMS: dict[str, dict[str, Any]] = {
    "Qwen3": {"heads": 4, "kv_heads": 2, "dim": 64, "rotary": 64, "norm": True},
    "Llama": {"heads": 6, "kv_heads": 2, "dim": 32, "rotary": 32},
    "one kv head": {"heads": 4, "kv_heads": 1, "dim": 256, "rotary": 256, "norm": True},
    "partial": {"heads": 2, "kv_heads": 2, "dim": 64, "rotary": 32, "norm": True},
    "partial, no power of two": {"heads": 3, "kv_heads": 1, "dim": 64, "rotary": 20},
    "no rotation": {"heads": 2, "kv_heads": 2, "dim": 32, "rotary": 0},
    "norm alone": {"heads": 2, "kv_heads": 2, "dim": 32, "rotary": 0, "norm": True},
    "interleaved": {"heads": 3, "kv_heads": 1, "dim": 64, "rotary": 24, "norm": True, "style": "interleaved"},
    "wide rows": {"heads": 2, "kv_heads": 1, "dim": 32, "rotary": 32, "gap": 24},
}
PAGES, PAGE = 7, 4


def compare(
    heads: int, kv_heads: int, dim: int, rotary: int, *, norm: bool = False, gap: int = 0,
    style: str = "halves", dtype: torch.dtype = torch.float32, tokens: int = 5,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(queries, pool) of the kernel and of torch. The last token's slot is that of padding."""
    width = (heads + 2 * kv_heads) * dim
    qkv = torch.randn(tokens, width + gap).to(dtype)[:, :width]
    weights = [torch.rand(dim) + 0.5 for _ in range(2)] if norm else [None, None]
    own = MergedHeads(heads, kv_heads, dim, dim, *weights, epsilon=1e-6, interleaved=style == "interleaved")
    turn = torch.rand(tokens, rotary // 2) * 6
    turn = turn.repeat(1, 2) if style == "halves" else turn.repeat_interleave(2, dim=1)
    cos, sin = turn.cos().to(dtype), turn.sin().to(dtype)
    slots = torch.randperm((PAGES - 1) * PAGE)[:tokens] + PAGE
    slots[-1:] = 0
    pool = torch.zeros(PAGES, 2, PAGE, kv_heads, dim, dtype=dtype)
    wanted = pool.clone()
    found = prepare_and_write(qkv, own, cos, sin, slots, pool)
    query, key, value = qkv.float().split([heads * dim, kv_heads * dim, kv_heads * dim], dim=-1)
    query, key = (part.unflatten(1, (-1, dim)) for part in (query, key))
    if norm:
        query, key = (rms_norm(part, (dim,), own, 1e-6) for part, own in zip((query, key), weights, strict=True))
    query, key = (rotate(part, Angles(cos.float(), sin.float(), style)) for part in (query, key))
    for which, part in enumerate((key, value.unflatten(1, (-1, dim)))):
        wanted[slots // PAGE, which, slots % PAGE] = part.to(dtype)
    return found, query.to(dtype), pool, wanted


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_equals_torch(form: str, dtype: torch.dtype) -> None:
    found, query, pool, wanted = compare(**FORMS[form], dtype=dtype)
    limits = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(found, query, **limits)
    torch.testing.assert_close(pool, wanted, **limits)


def test_eight_bits_saturate() -> None:
    """Numbers that the type has: the interpreter rounds to it without carrying."""
    kept = torch.float8_e4m3fn
    qkv = torch.randn(3, 4 * 32).to(kept).bfloat16()
    qkv[1] = -1e4
    pool, none = torch.zeros(1, 2, PAGE, 1, 32).to(kept), torch.empty(3, 0)
    found = prepare_and_write(qkv, MergedHeads(2, 1, 32, 32), none, none, torch.tensor([2, 3, 1]), pool)
    assert torch.equal(found.flatten(1), qkv[:, :64])
    stored = pool[0].transpose(0, 1).flatten(1).float()
    assert torch.equal(stored[[2, 3, 1]], qkv[:, 64:].float().clamp(-448, 448))
    assert not stored[0].any()


@pytest.mark.parametrize("style", ["halves", "interleaved"])
@pytest.mark.parametrize("pairs", [0, 1, 6, 32])
def test_angles(style: Any, pairs: int) -> None:
    config = RotaryConfig(tuple((torch.rand(pairs) ** 3).tolist()), scaling=1.2, style=style)
    positions = torch.tensor([0, 1, 7, 4000, 130_000])
    rotary = Rotary(config, 8, torch.bfloat16, torch.device("cpu"))
    wanted = rotary(positions)[:2]
    frequencies = torch.tensor(config.frequencies)
    for dtype in (torch.float32, torch.bfloat16):
        found = angles(positions, frequencies, 1.2, style == "interleaved", dtype)
        for one, other in zip(found, wanted, strict=True):
            assert one.dtype == dtype
            torch.testing.assert_close(one.float(), other.float(), rtol=1e-2, atol=1e-2)
    assert angles(positions[:0], frequencies, 1.0, False, torch.float32)[0].shape == (0, 2 * pairs)
