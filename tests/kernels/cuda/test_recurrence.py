"""Recurrences in Triton, by its interpreter: layers with them are those without: lone tokens, segments, chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.forwards import relative_error
from support.layer_options import CPU, options
from support.segments import segments_of
from torch.nn import functional

from asyncengine.execution.layers import causal_conv
from asyncengine.execution.layers.basic import NormConfig
from asyncengine.execution.layers.gated_delta import GatedDeltaConfig, learn, unit
from asyncengine.execution.layers.kimi_delta import KimiDeltaConfig
from asyncengine.execution.layers.mamba2 import Mamba2Config
from asyncengine.execution.layers.short_conv import ShortConvConfig
from asyncengine.execution.layers.states import LoneTokens, StatePools, StateStep
from asyncengine.kernels.cuda import recurrence
from asyncengine.kernels.cuda.recurrence import Recurrence

LARGE = GatedDeltaConfig(2, 4, 128, 40, 4, 1e-6)
LAYERS: dict[str, Any] = {
    "large": LARGE, "interleaved": replace(LARGE, key_dim=16, interleaved=True),
    "small": GatedDeltaConfig(3, 3, 12, 20, 3, 1e-6), "kimi": KimiDeltaConfig(3, 20, 4, 1e-6),
    "apart": GatedDeltaConfig(2, 4, 16, 24, 4, 1e-5, apart=True, most_rate=2),
    "mamba": Mamba2Config(6, 40, 10, 2, 4, 1e-5),
    "bounded mamba": Mamba2Config(4, 12, 32, 1, 4, 1e-5, norm="before gate", norm_groups=2, limits=(0.2, 0.9)),
    "mamba without a norm": Mamba2Config(4, 12, 8, 1, 2, 1e-5, norm=None, conv_bias=False, out_scale=0.3),
    "short conv": ShortConvConfig(3),
}  # fmt: skip
ROWS = [[(1, 0, 1)], [(9, 0, 2), (1, 2, 3)], [(1, 4, 4)], [(1, 5, 7)], [(1, 0, 2), (0, 2, 8)]]
NEAR = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in LAYERS), ("small", torch.bfloat16), ("bounded mamba", torch.float16)],
)
def test_layers_by_the_kernel_are_those_by_torch(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncengine.execution.layers.options.compiler_missing", lambda *_: "not here")
    own = options(dtype, plain=True)
    found = []
    for triton in (False, True):
        monkeypatch.setattr(causal_conv, "triton_missing", lambda device, triton=triton: None if triton else "no")
        layer = LAYERS[name].build(own, NormConfig(), "", 32, 0)
        assert (layer.conv.on_device is not None) == triton
        generator = torch.Generator().manual_seed(2)
        for _, slot in layer.slots():
            slot.load(torch.randn(slot.shape, generator=generator) * 0.3)
        for bias in ("step_bias", "dt_bias"):
            if hasattr(layer, bias):
                getattr(layer, bias)[0] = 40.0  # softplus is the number itself there
        pools = StatePools([layer.spec], 9, dtype, CPU)
        memory = [pool for pool in (*pools.recurrent, *pools.windows) if pool is not None]
        for pool in memory:
            pool[1:] = torch.randn(pool[1:].shape, generator=generator)
        others, alone = segments_of(ROWS).apart()
        step = StateStep(pools, others, LoneTokens(*torch.from_numpy(alone)))
        x = torch.randn(14, 32, generator=generator).to(dtype)
        found.append((layer(x, SimpleNamespace(states=step, adapters=None)), *memory))
        assert not any(pool[0].any() for pool in memory)
    for plain, made in zip(*found, strict=True):
        assert relative_error(plain.double(), made.double()) < NEAR[dtype]
    assert torch.equal(found[0][-1], found[1][-1]), "windows"


KINDS = {"large": (4, 2, 128, 40), "small": (3, 1, 12, 20), "wide": (2, 1, 16, 64)}


def moved(
    name: str,
    tokens: int,
    gate: float,
    alike: bool,
    mamba: bool,
    dtype: torch.dtype = torch.float32,
    most_rate: int = 1,
) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    """(reads, state after) of a sequence's tokens by the kernels, and by the formula in float64."""
    heads, group, key_dim, value_dim = KINDS[name]
    keys, generator = heads // group, torch.Generator().manual_seed(tokens)
    rows = torch.randn(tokens, 2 * keys * key_dim + heads * value_dim + 3, generator=generator).to(dtype)[:, 1:-2]
    if alike:
        rows = rows[:1].expand(tokens, -1).contiguous()
    learned, gates = (torch.randn(tokens, heads, generator=generator) for _ in range(2))
    learned += 9.0 * alike
    gates[5] = 3e4  # all but forgotten, by a logarithm that swallows the others' last digits
    state = torch.randn(1, heads, key_dim, value_dim, generator=generator)
    rate, bias, skip = torch.full((heads,), abs(gate)), torch.full((heads,), gate), torch.full((heads,), 0.7)
    own = Recurrence(
        heads, group, key_dim, value_dim, (0, keys * key_dim, 2 * keys * key_dim), rate, bias,
        (0.01, 5.0) if mamba else (0.0, float("inf")), skip if mamba else None, most_rate,
    )  # fmt: skip
    found = own.move(rows, learned, gates, state, None)
    query, key, value = rows.double().split([keys * key_dim, keys * key_dim, heads * value_dim], 1)
    query, key = (part.unflatten(1, (keys, key_dim)).repeat_interleave(group, 1) for part in (query, key))
    value, state, reads = value.unflatten(1, (heads, value_dim)), state.double()[0], []
    soft = functional.softplus(gates.double() + bias).clamp(*own.limits)
    for t in range(tokens):
        state = state * torch.exp(-rate * soft[t])[:, None, None]
        if mamba:
            state = state + key[t, ..., None] * (soft[t][:, None] * value[t])[:, None, :]
            reads.append((state * query[t, ..., None]).sum(-2) + skip[:, None] * value[t])
        else:
            q, k = unit(query[t]) * key_dim**-0.5, unit(key[t])
            read, state = learn(state, q, k, value[t], most_rate * learned[t].double().sigmoid())
            reads.append(read)
    return found, (torch.stack(reads), state[None])


@pytest.mark.parametrize(
    ("name", "tokens", "gate", "alike", "mamba"),
    [("large", 16, -2.0, False, False), ("small", 43, -0.1, False, False), ("wide", 50, -6.0, True, False),
     ("small", 40, 40.0, False, False), ("small", 43, -0.1, False, True), ("wide", 17, 3.0, True, True)],
)  # fmt: skip
def test_chunks_of_a_prompt_are_its_tokens_one_by_one(
    name: str, tokens: int, gate: float, alike: bool, mamba: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`gate`: keys are forgotten slowly, or at once; `alike`: all keys are one, which the state learns wholly."""
    monkeypatch.setattr(recurrence, "_CHUNK", 16)
    monkeypatch.setattr(recurrence, "_PREPARED_BYTES", 2 * 16 * 4 * 3 * 96)  # a prompt in several parts
    monkeypatch.delattr(recurrence, "_move")  # so it cannot go token by token
    for made, wanted in zip(*moved(name, tokens, gate, alike, mamba), strict=True):
        assert relative_error(wanted, made.double()) < 2e-6


def test_chunks_whose_tokens_turn_around_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrence, "_CHUNK", 16)
    monkeypatch.delattr(recurrence, "_move")
    for name, alike in (("small", False), ("wide", True)):
        for made, wanted in zip(*moved(name, 40, -0.5, alike, False, most_rate=2), strict=True):
            assert relative_error(wanted, made.double()) < 4e-6


def test_a_chunk_of_its_usual_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(recurrence, "_move")
    for made, wanted in zip(*moved("small", 40, -1.0, False, False, torch.bfloat16), strict=True):
        assert relative_error(wanted, made.double()) < 2e-6
