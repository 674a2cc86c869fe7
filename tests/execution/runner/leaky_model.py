"""A made-up decoder that keeps states: two layers that leak, one that attends. Small, random, and quick to build."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from support.layer_options import CPU, options

from asyncengine.config import EngineConfig
from asyncengine.execution.layers.attention import AttentionConfig
from asyncengine.execution.layers.basic import NormConfig
from asyncengine.execution.layers.mlp import MLPConfig
from asyncengine.execution.layers.states import Slots, StateSpec, advance_segments
from asyncengine.execution.layers.step import StepContext
from asyncengine.execution.layers.stored import TensorSlot
from asyncengine.execution.models.decoder import Decoder, DecoderConfig, LayerConfig
from asyncengine.execution.models.families.common import default_rotary
from asyncengine.execution.models.loading import LoadedModel
from asyncengine.execution.runner.building import build_runner
from asyncengine.execution.runner.model_runner import ModelRunner

VOCAB, WIDTH = 120, 32


@dataclass(frozen=True)
class LeakyConfig:
    """A layer that adds up what it sees, forgets a part of it with every token, and looks back by one token."""

    keep: float

    def build(self, layer_options: Any, norm: Any, prefix: str, width: int, index: int) -> LeakyLayer:
        return LeakyLayer(self.keep, width, index)


class LeakyLayer:
    kernel = None

    def __init__(self, keep: float, width: int, index: int) -> None:
        self.keep, self.index = keep, index
        self.spec = StateSpec((width,), (width, 1))

    def __call__(self, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        out = torch.empty_like(x)

        def advance(
            tokens: slice | torch.Tensor, states: torch.Tensor, windows: torch.Tensor, slots: Slots | None
        ) -> tuple[torch.Tensor, torch.Tensor]:
            sources: Any = slice(None) if slots is None else slots[0]
            state, before = states[sources].clone(), windows[sources, :, 0].clone()
            made = []
            for own in torch.unflatten(x[tokens], 0, (len(state), -1)).unbind(1):
                state = state * self.keep + own
                made.append(state + 3 * before)
                before = own.clone()
            out[tokens] = torch.stack(made, 1).flatten(0, 1)
            if slots is not None:
                states[slots[1]], windows[slots[1]] = state, before[:, :, None]
            return state, before[:, :, None]

        assert step.states is not None
        advance_segments(step.states, self.index, advance)
        return out

    def linears(self) -> list[Any]:
        return []

    def norms(self) -> list[Any]:
        return []

    @property
    def nbytes(self) -> int:
        return 0

    def slots(self) -> Iterator[tuple[str, TensorSlot]]:
        yield from ()


def leaky_runner(**settings: Any) -> ModelRunner:
    """Pages of 4 tokens. The same weights every time."""
    config = EngineConfig(**{"page_size": 4, "kv_cache_memory": "1MiB", "attention_backend": "torch", **settings})
    attends = AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=16, scale=0.25)
    mlp = MLPConfig(48, "silu")
    model = Decoder(
        DecoderConfig(
            VOCAB, WIDTH,
            (
                LayerConfig(None, mlp, LeakyConfig(0.9)), LayerConfig(attends, mlp),
                LayerConfig(None, mlp, LeakyConfig(0.5)),
            ),
            NormConfig(), rotary=(default_rotary(10000.0, 16),),
        ),
        options(plain=True), 256,
    )  # fmt: skip
    random = torch.Generator().manual_seed(3)
    for slot in model.slots().values():
        slot.load(
            torch.randn(slot.shape, generator=random) * (0.2 if len(slot.shape) > 1 else 0.02) + (len(slot.shape) == 1)
        )
    loaded = LoadedModel(
        name="leaky", path="leaky", folder=Path(), model=model, hf_config=None, vocab_size=VOCAB,
        input_vocab_size=VOCAB, max_model_len=256, dtype=torch.float32, device=CPU, layers=model.specs,
        weights_bytes=model.nbytes, unsteady=model.unsteady, states=model.states,
    )  # fmt: skip
    return build_runner(loaded, config).runner
