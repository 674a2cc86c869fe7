"""The plan of a layer's heads, of configurations alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from asyncengine.execution.layers.attention import AttentionConfig, plan_heads
from asyncengine.execution.layers.basic import NormConfig
from asyncengine.execution.layers.rotary import RotaryConfig

CONFIG = AttentionConfig(num_heads=8, num_kv_heads=2, head_dim=16, scale=0.25)
NORMED = replace(CONFIG, head_norm=NormConfig())
HALVES, PAIRS = RotaryConfig((1.0,)), RotaryConfig((1.0,), style="interleaved")
EXACT = RotaryConfig((1.0,), exact=True)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (CONFIG, (64, 16, 16)),
        (replace(CONFIG, output_gate=True), (128, 16, 16)),
        (replace(CONFIG, qkv=("self_attn.q_proj", "self_attn.k_proj")), (64, 16)),
        (replace(CONFIG, keys_of=0), (64,)),
    ],
)
def test_rows_of_the_merged_projection(config: AttentionConfig, expected: tuple[int, ...]) -> None:
    assert plan_heads(config, HALVES, kernels="torch").rows == expected


@pytest.mark.parametrize(
    ("rotary", "kernels", "float32", "apart", "interleaved"),
    [
        (None, "compiled", True, False, False),
        (HALVES, "compiled", False, False, False),
        (PAIRS, "compiled", True, True, False),
        (PAIRS, "cuda", True, False, True),
        (EXACT, "compiled", False, True, False),
        (EXACT, "compiled", True, False, False),
        (EXACT, "cuda", False, False, False),
    ],
)
def test_rotation_is_apart_where_attention_cannot_do_it(
    rotary: RotaryConfig | None, kernels: str, float32: bool, apart: bool, interleaved: bool
) -> None:
    plan = plan_heads(NORMED, rotary, kernels=kernels, float32=float32)
    assert (plan.rotates_apart, plan.norms_apart, plan.interleaved) == (apart, apart, interleaved)
    assert plan.merges == (kernels == "compiled" or not apart)
    behind = plan_heads(replace(NORMED, norm_after_rotation=True), rotary, kernels=kernels, float32=float32)
    assert behind.rotates_apart
    assert behind.norms_apart


@pytest.mark.parametrize(
    ("fields", "float32_norms", "apart"),
    [
        ({}, True, False),
        ({}, False, True),
        ({"head_norm": NormConfig("layer")}, True, True),
        ({"norm_scope": "each"}, True, True),
        ({"norm_scope": "whole"}, True, True),
        ({"head_norm": None}, False, False),
    ],
)
def test_norms_that_one_kernel_can_take_along(fields: dict[str, Any], float32_norms: bool, apart: bool) -> None:
    plan = plan_heads(replace(NORMED, **fields), HALVES, kernels="compiled", float32_norms=float32_norms)
    assert plan.norms_apart == apart


def test_a_rank_has_its_part_of_the_heads() -> None:
    plan = plan_heads(replace(NORMED, norm_scope="whole"), HALVES, kernels="compiled", ranks=2)
    assert (plan.config.num_heads, plan.config.num_kv_heads) == (4, 1)
    assert (plan.query_size, plan.kv_size) == (64, 16)
    assert plan.norms_of_all_heads
    assert not plan_heads(NORMED, HALVES, kernels="compiled", ranks=2).norms_of_all_heads


def test_layers_without_keys_or_values_of_their_own() -> None:
    queries = plan_heads(replace(CONFIG, keys_of=0, value_norm=NormConfig()), HALVES, kernels="compiled")
    assert not queries.merges
    assert not queries.makes_values
    keys = plan_heads(replace(CONFIG, qkv=("self_attn.q_proj", "self_attn.k_proj")), HALVES, kernels="compiled")
    assert keys.makes_values
