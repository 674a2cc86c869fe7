"""The plan of a layer's heads, of configurations alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from asyncengine.execution.layers.attention import AttentionConfig, plan_heads
from asyncengine.execution.layers.basic import NormConfig
from asyncengine.execution.layers.rotary import RotaryConfig

CONFIG = AttentionConfig(num_heads=8, num_kv_heads=2, head_dim=16, scale=0.25)
PAIRS, EXACT = RotaryConfig((1.0,), style="interleaved"), RotaryConfig((1.0,), exact=True)
RMS, LAYER = NormConfig(), NormConfig("layer")
QUERY, KEY, VALUE = CONFIG.qkv
BOTH = ("norm", "rotate")


@pytest.mark.parametrize(
    ("fields", "given", "expected"),
    [
        ({}, {}, {"form": "own", "rows": (64, 16, 16), "changes": (), "apart": (), "fused": ("rotate",), "gate": "",
                  "merges": True, "interleaved": False, "norms": (), "value_norm": None, "key_dim": 16,
                  "matrices": ((QUERY, 128), (KEY, 32), (VALUE, 32))}),
        ({"rotary": None}, {"rotary": None}, {"fused": (), "merges": True}),
        # the merged projection
        ({"output_gate": True}, {}, {"rows": (128, 16, 16), "gate": "number",
                                     "matrices": ((QUERY, 256), (KEY, 32), (VALUE, 32))}),
        ({"lone_gate": "g"}, {}, {"rows": (64, 16, 16, 4), "gate": "head",
                                  "matrices": ((QUERY, 128), (KEY, 32), (VALUE, 32), ("g", 8))}),
        ({"qkv": ("all",)}, {}, {"form": "own", "rows": (64, 16, 16), "matrices": (("all", 192),)}),
        ({"qkv": ("all",), "qkv_by_head": True}, {}, {"form": "by_head", "rows": (96,), "matrices": (("all", 192),)}),
        ({"qkv": (QUERY, KEY)}, {}, {"rows": (64, 16), "changes": ("make_values",)}),
        ({"qkv": (QUERY,), "keys_of": 0, "head_norm": RMS, "value_norm": RMS}, {},
         {"form": "queries", "rows": (64,), "changes": (), "merges": False, "fused": BOTH, "value_norm": None,
          "norms": ((RMS, "self_attn.q_norm", 16, 0),), "matrices": ((QUERY, 128),)}),
        # changes of it
        ({"clip": 8.0, "value_norm": RMS}, {"rotary": RotaryConfig((1.0,), query_growth=(0.1, 8))},
         {"changes": ("clip", "scale_queries", "make_values"), "value_norm": RMS}),
        ({"alibi": (0.5,) * 8}, {"rotary": RotaryConfig((), style="alibi")},
         {"changes": ("add_positions",), "key_dim": 20, "fused": (), "merges": True}),
        # norms of heads that the kernel of attention takes along, and others
        ({"head_norm": RMS}, {}, {"apart": (), "fused": BOTH,
                                  "norms": ((RMS, "self_attn.q_norm", 16, 0), (RMS, "self_attn.k_norm", 16, 0))}),
        ({"head_norm": RMS}, {"float32_norms": False}, {"apart": ("norm",), "fused": ("rotate",)}),
        ({"head_norm": LAYER}, {}, {"apart": ("norm",), "fused": ("rotate",)}),
        ({"head_norm": RMS, "norm_scope": "each"}, {}, {"apart": ("norm",), "fused": ("rotate",), "norms": (
            (RMS, "self_attn.q_norm", 16, 8), (RMS, "self_attn.k_norm", 16, 2))}),
        ({"head_norm": RMS, "norm_scope": "whole"}, {}, {"apart": ("norm",), "fused": ("rotate",), "norms": (
            (RMS, "self_attn.q_norm", 128, 0), (RMS, "self_attn.k_norm", 32, 0))}),
        # rotation that it cannot do
        ({"head_norm": RMS}, {"rotary": PAIRS}, {"apart": BOTH, "fused": (), "merges": True, "interleaved": False}),
        ({"head_norm": RMS}, {"rotary": PAIRS, "kernels": "torch"}, {"apart": BOTH, "merges": False}),
        ({"head_norm": RMS}, {"rotary": PAIRS, "kernels": "cuda"}, {"fused": BOTH, "interleaved": True}),
        ({"head_norm": RMS}, {"rotary": EXACT, "float32": False}, {"apart": BOTH, "merges": True}),
        ({"head_norm": RMS}, {"rotary": EXACT}, {"fused": BOTH, "merges": True}),
        ({"head_norm": RMS}, {"rotary": EXACT, "float32": False, "kernels": "cuda"}, {"fused": BOTH, "merges": True}),
        ({"head_norm": RMS, "norm_after_rotation": True}, {}, {"apart": ("rotate", "norm"), "fused": ()}),
        # heads of one rank of two
        ({"head_norm": RMS}, {"ranks": 2}, {"form": "own", "rows": (64, 16, 16), "fused": BOTH,
                                            "matrices": ((QUERY, 128), (KEY, 32), (VALUE, 32))}),
        ({"head_norm": RMS, "norm_scope": "whole", "clip": 8.0}, {"ranks": 2},
         {"form": "all_norms", "changes": (), "apart": (), "fused": ("rotate",)}),
    ],
)  # fmt: skip
def test_plans(fields: dict[str, Any], given: dict[str, Any], expected: dict[str, Any]) -> None:
    settings = {"rotary": RotaryConfig((1.0,)), "kernels": "compiled", **given}
    plan = plan_heads(replace(CONFIG, **fields), **settings)
    assert {name: getattr(plan, name) for name in expected} == expected
    ranks = given.get("ranks", 1)
    assert (plan.config.num_heads, plan.config.num_kv_heads) == (8 // ranks, 2 // ranks)
    assert (plan.query_size, plan.kv_size) == (128 // ranks, 32 // ranks)
