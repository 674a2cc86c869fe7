"""Rotation by transformers' frequencies, of halves and of neighbours, from the table and beyond it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from support.layer_options import CPU

from asyncengine.execution.layers import rotary as rotary_module
from asyncengine.execution.layers.rotary import Rotary, RotaryConfig
from asyncengine.execution.models.families.common import rotary_of


@pytest.mark.parametrize("style", ["halves", "interleaved"])
def test_beyond_the_table_angles_are_those_of_a_larger_one(style: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = RotaryConfig(tuple((10000.0 ** -torch.linspace(0, 1, 8)).tolist()), 1.3, style)
    whole = Rotary(config, 300, torch.float32, CPU)
    monkeypatch.setattr(rotary_module, "_TABLE", 50)
    short = Rotary(config, 300, torch.float32, CPU)
    for count in (1, 7, 100):  # rows are copied by a kernel, or by torch
        for first in (0, 43, 50, 200):
            positions = torch.arange(first, first + count)
            for left, right in zip(short(positions)[:2], whole(positions)[:2], strict=True):
                assert torch.equal(left, right)


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
