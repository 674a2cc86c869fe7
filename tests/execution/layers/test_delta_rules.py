"""The gated delta rule and Kimi Delta Attention: both forms compute them, to the same bits in any chunk, company and
team."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from support.layer_options import CPU, fill, options
from support.segments import assert_same_bits, segments_of
from torch.nn import functional

from asyncengine.execution.layers.gated_delta import GatedDelta, GatedDeltaConfig
from asyncengine.execution.layers.kimi_delta import KimiDelta, KimiDeltaConfig
from asyncengine.execution.layers.norm import NormConfig
from asyncengine.execution.layers.states import StatePools, StateStep

pytest.importorskip("numba")
DTYPES = [torch.float32, torch.bfloat16]
LARGE = GatedDeltaConfig(2, 4, 128, 176, 4, 1e-6)
"""Value heads of eight vectors, of two, and of one."""
SMALL = GatedDeltaConfig(3, 3, 12, 20, 3, 1e-6, interleaved=True)
"""Columns that fill no vector."""
CONFIGS = {
    "large": LARGE, "small": SMALL, "interleaved": replace(LARGE, interleaved=True),
    "kimi large": KimiDeltaConfig(2, 176, 4, 1e-6), "kimi small": KimiDeltaConfig(3, 20, 3, 1e-6),
}  # fmt: skip
WIDTH = 32
Layer = GatedDelta | KimiDelta


def make_layer(config: GatedDeltaConfig | KimiDeltaConfig, dtype: torch.dtype, plain: bool = False) -> Layer:
    generator = torch.Generator().manual_seed(3)
    layer = config.build(options(dtype), NormConfig(), "", WIDTH, 0)
    tensors = {
        name: torch.randn(slot.shape, generator=generator) / WIDTH**0.5 * (WIDTH if name.endswith("_log") else 4)
        for name, slot in layer.slots()
    }
    fill(layer, tensors)
    if plain:
        layer.kernel = None
    return layer


def run(layer: Layer, x: torch.Tensor, rows: Any, pools: StatePools) -> torch.Tensor:
    with torch.inference_mode():
        return layer.mix(x, StateStep(pools, segments_of(rows)))


def pools_of(layer: Layer, dtype: torch.dtype) -> StatePools:
    return StatePools([layer.spec], 19, dtype, CPU)


def projections(layer: Layer, tokens: int, dtype: torch.dtype) -> torch.Tensor:
    if isinstance(layer, KimiDelta):
        width = sum(layer.config.projections.values()) + 2 * layer.config.size
    else:
        width = layer.inputs.outputs
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(tokens)).to(dtype)


def gated_exactly(layer: GatedDelta, projected: torch.Tensor) -> torch.Tensor:
    """Outputs in float64, by the paper's rule, of one sequence from its beginning."""
    config, group = layer.config, layer.config.value_heads // layer.config.key_heads
    q, k, v, z, b, a = (projected.double()[:, kind] for kind in layer.kinds)
    inputs = functional.pad(torch.cat((q, k, v), 1).T[None], (config.taps - 1, 0))
    weight = layer.conv.weight.double().T[:, None]
    mixed = functional.silu(functional.conv1d(inputs, weight, groups=len(weight)))[0].T
    q, k, v = mixed.split([q.shape[1], k.shape[1], v.shape[1]], 1)
    q, k = (functional.normalize(part.view(len(q), -1, config.key_dim), dim=-1) for part in (q, k))
    q, k = (part.repeat_interleave(group, 1) for part in (q * config.key_dim**-0.5, k))
    v, z = (part.view(len(q), -1, config.value_dim) for part in (v, z))
    decay = torch.exp(-layer.rate.double() * functional.softplus(a + layer.dt_bias.double()))
    state = torch.zeros(layer.spec.recurrent, dtype=torch.float64)
    found = []
    for token in range(len(q)):
        eye = torch.eye(config.key_dim, dtype=torch.float64)
        key, rate = k[token], b[token].sigmoid()
        forget = eye - rate[:, None, None] * key[:, :, None] * key[:, None]
        state = decay[token][:, None, None] * forget @ state + (rate[:, None] * key)[:, :, None] * v[token][:, None]
        read = (state * q[token][:, :, None]).sum(1)
        found.append((functional.rms_norm(read, (config.value_dim,), layer.norm.weight.double(), config.epsilon)
                      * functional.silu(z[token])).flatten())  # fmt: skip
    return torch.stack(found)


def kimi_exactly(layer: KimiDelta, projected: torch.Tensor) -> torch.Tensor:
    """Outputs in float64, by the paper's S = (I - b k k^T) diag(a) S + b k v^T, of one sequence from its beginning."""
    config, x = layer.config, projected.double()
    size, heads, dim = config.size, config.heads, config.head_dim
    inputs = functional.pad(x[:, : 3 * size].T[None], (config.taps - 1, 0))
    weight = layer.conv.weight.double().T[:, None]
    mixed = functional.silu(functional.conv1d(inputs, weight, groups=len(weight)))[0].T
    q, k, v = (part.view(-1, heads, dim) for part in mixed.split(size, 1))
    q, k = functional.normalize(q, dim=-1) * dim**-0.5, functional.normalize(k, dim=-1)
    learn = x[:, 3 * size : 3 * size + heads].sigmoid()
    gate, forget = (part.view(-1, heads, dim) for part in x[:, -2 * size :].split(size, 1))
    keep = torch.exp(
        -layer.rate.double()[:, None] * functional.softplus(forget + layer.dt_bias.double().view(heads, dim))
    )
    state = torch.zeros(heads, dim, dim, dtype=torch.float64)
    found = []
    for token in range(len(q)):
        rate, key = learn[token][:, None, None], k[token][:, :, None]
        erase = torch.eye(dim, dtype=torch.float64) - rate * key * key.mT
        state = erase @ (keep[token][:, :, None] * state) + rate * key * v[token][:, None]
        read = (state * q[token][:, :, None]).sum(1)
        normed = functional.rms_norm(read, (dim,), layer.norm.weight.double(), config.epsilon)
        found.append((normed * gate[token].sigmoid()).flatten())
    return torch.stack(found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
def test_computes_the_rule(name: str, plain: bool, dtype: torch.dtype) -> None:
    layer = make_layer(CONFIGS[name], dtype, plain)
    x = projections(layer, 40, dtype)
    exactly: Any = gated_exactly if isinstance(layer, GatedDelta) else kimi_exactly
    found, wanted = run(layer, x, [[(40, 0, 1)]], pools_of(layer, dtype)), exactly(layer, x)
    error = float((found.double() - wanted).abs().max() / wanted.abs().max())
    assert error < (2e-6 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "plain"), [*((name, False) for name in CONFIGS), ("small", True), ("kimi small", True)]
)
def test_chunks_company_and_teams_change_no_bit(name: str, plain: bool, dtype: torch.dtype) -> None:
    layer = make_layer(CONFIGS[name], dtype, plain)
    assert_same_bits(partial(run, layer), partial(pools_of, layer, dtype), projections(layer, 71, dtype), 45)
