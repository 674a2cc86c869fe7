"""Rotation by transformers' frequencies, of halves and of neighbours, from the table and beyond it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from support.layer_options import CPU

from asyncengine.execution.layers import rotary as rotary_module
from asyncengine.execution.layers.rotary import Angles, Rotary, RotaryConfig, rotate
from asyncengine.execution.models.families.common import rotary_of

ORIGINAL = 64
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": ORIGINAL,
    },
    "longrope": {
        "factor": 4.0, "short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [2.0 + i for i in range(8)],
        "original_max_position_embeddings": ORIGINAL,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [ORIGINAL // 2, 4 * ORIGINAL])
def test_angles_are_transformers(kind: str, length: int) -> None:
    """Frequencies that depend on the length of a sequence are set for the longest that may come."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = hf.LlamaConfig(
        hidden_size=64, num_attention_heads=4, rope_parameters={"rope_type": kind, "rope_theta": 1e4, **KINDS[kind]},
        max_position_embeddings=ORIGINAL if kind == "dynamic" else 4 * ORIGINAL,
    )  # fmt: skip
    positions = torch.arange(length)
    expected = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    for dtype in (torch.float32, torch.bfloat16):
        found = Rotary(rotary_of(config, length), length, dtype, CPU)(positions)
        for left, right in zip(found[:2], expected, strict=True):
            # transformers' sum for "dynamic" is of a tensor
            most = 0.0 if kind != "dynamic" else 1e-4 if dtype == torch.float32 else 2**-8
            torch.testing.assert_close(left, right[0].to(dtype), rtol=0.0, atol=most)


@pytest.mark.parametrize("style", ["halves", "interleaved"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_beyond_the_table_angles_are_those_of_a_larger_one(
    style: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RotaryConfig(tuple((10000.0 ** -torch.linspace(0, 1, 8)).tolist()), 1.3, style)
    whole = Rotary(config, 300, dtype, CPU)
    monkeypatch.setattr(rotary_module, "_TABLE", 50)
    short = Rotary(config, 300, dtype, CPU)
    for count in (1, 7, 100):  # rows are copied by a kernel, or by torch
        for first in (0, 43, 50, 200):
            positions = torch.arange(first, first + count)
            for left, right in zip(short(positions)[:2], whole(positions)[:2], strict=True):
                assert torch.equal(left, right)
                assert left.shape == (count, 16)


@pytest.mark.parametrize("style", ["halves", "interleaved"])
@pytest.mark.parametrize("dim", [16, 12], ids=["whole heads", "partial"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_is_a_complex_product(style: Any, dim: int, dtype: torch.dtype) -> None:
    """Dimensions i and i + dim / 2, or 2 i and 2 i + 1, are one complex number; those after `dim` stay."""
    config = RotaryConfig(tuple((100.0 ** -torch.linspace(0, 1, dim // 2)).tolist()), 1.0, style)
    assert config.dim == dim
    positions = torch.tensor([0, 3, 40])
    angles = Rotary(config, 64, dtype, CPU)(positions)
    x = torch.randn(3, 2, 16).to(dtype)
    kept = x.clone()
    turned = x[..., :dim].double()
    pairs = turned.unflatten(-1, (-1, 2)) if style == "interleaved" else turned.unflatten(-1, (2, -1)).transpose(-1, -2)
    frequencies = torch.tensor(config.frequencies, dtype=torch.float64)
    by = torch.polar(torch.ones(()).double(), positions[:, None].double() * frequencies)[:, None]
    done = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * by)
    done = done if style == "interleaved" else done.transpose(-1, -2)
    expected = torch.cat((done.flatten(-2), x[..., dim:].double()), -1)
    found = rotate(x, angles)
    assert found.dtype == dtype
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), expected, rtol=4 * unit, atol=8 * unit)
    assert torch.equal(found[..., dim:], x[..., dim:])
    assert torch.equal(x, kept)


def test_no_tokens_have_no_angles() -> None:
    angles = Rotary(RotaryConfig((1.0, 0.1)), 8, torch.float32, CPU)(torch.arange(0))
    assert isinstance(angles, Angles)
    assert angles.cos.shape == (0, 4)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_positions_with_three_axes(interleaved: bool, dtype: torch.dtype) -> None:
    """Angles are those of Qwen2.5-VL and Qwen3-VL in transformers; axes that are alike turn as one position."""
    if interleaved:
        module: Any = hf.models.qwen3_vl.modeling_qwen3_vl.Qwen3VLTextRotaryEmbedding
        config: Any = hf.Qwen3VLConfig().text_config
        sections = [12, 10, 10]
    else:
        module = hf.models.qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VLRotaryEmbedding
        config, sections = hf.Qwen2_5_VLConfig().text_config, [8, 12, 12]
    config.hidden_size, config.num_attention_heads, config.head_dim = 256, 4, 64
    config.rope_parameters |= {"mrope_section": sections, "rope_type": "default", "rope_theta": 1e4}
    rotary = Rotary(rotary_of(config, 512), 512, dtype, CPU)
    axes = torch.stack([torch.full((9,), 40), 40 + torch.arange(9) // 3, 40 + torch.arange(9) % 3])
    found = rotary(torch.arange(9), axes)
    cos, sin = module(config)(torch.zeros(1, dtype=dtype), axes[:, None])
    assert torch.equal(found.cos, cos[0])
    assert torch.equal(found.sin, sin[0])
    text = torch.arange(300, 320)
    assert all(map(torch.equal, rotary(text)[:2], rotary(text, text.expand(3, -1))[:2]))
