"""Attention whose keys and values come of a latent vector (DeepSeek-AI 2024, "DeepSeek-V2"), without rotation.

Keys and values are made of the latent vector before they are written, so that the pages hold them as those of any other
attention: the memory that the latent vector would save is not saved. Each head's key is its own part and one that all
heads share; values are shorter than keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from asyncengine.execution.attention.base import LayerSpec
from asyncengine.execution.layers.basic import Linear, Norm, NormConfig, Part
from asyncengine.execution.layers.options import LayerOptions
from asyncengine.execution.layers.rotary import Angles
from asyncengine.execution.layers.sharded import even_cuts, gathered, share_of
from asyncengine.execution.layers.step import StepContext
from asyncengine.execution.layers.stored import TensorSlot


@dataclass(frozen=True, slots=True)
class LatentAttentionConfig:
    """One layer's attention, with the checkpoint's names for its matrices."""

    num_heads: int
    rank: int
    """Numbers of the latent vector."""
    own_dim: int
    """Numbers of a head's key that are its own ..."""
    shared_dim: int
    """... and what all heads share."""
    value_dim: int
    scale: float
    norm: NormConfig
    """The norm of the latent vector."""
    prefix: str = "self_attn."
    rotary: int | None = None
    """It rotates nothing."""
    keys_of: int | None = None
    """Its keys are not another layer's."""
    window: int | None = None
    chunk: int | None = None


class LatentAttention:
    """x [T, width] -> [T, width]. `index` is the place of its keys and values in the attention backend."""

    gate = None
    merged = None
    """Its projections are not merged as compiled attention would have them."""

    def __init__(
        self, options: LayerOptions, config: LatentAttentionConfig, prefix: str, width: int, index: int
    ) -> None:
        self.config, self.index, self._kernels = config, index, options.kernels
        heads, path = config.num_heads, prefix + config.prefix
        key_dim = config.own_dim + config.shared_dim
        self._sizes = [heads * key_dim, config.rank, config.shared_dim]
        latent = Part(f"{path}kv_a_proj_with_mqa", config.rank + config.shared_dim)
        own = config.own_dim + config.value_dim
        self.share = share_of(options.ranks, even_cuts(options.ranks, heads), [own], config.value_dim)
        """This rank's heads, whose keys and values it keeps; None: it has all of them."""
        self.qkv = Linear(options, [Part(f"{path}q_proj", heads * key_dim), latent], width)
        self.norm = Norm(options, config.norm, f"{path}kv_a_layernorm", config.rank)
        self.norms = (self.norm,)
        self.expand = Linear(options, [Part(f"{path}kv_b_proj", heads * own)], config.rank, share=self.share)
        self.out = Linear(options, [Part(f"{path}o_proj", width)], heads * config.value_dim)
        self._heads = slice(0, heads) if self.share is None else self.share.part(heads)
        heads = self._heads.stop - self._heads.start
        self.spec = LayerSpec(
            index=index, num_heads=heads, num_kv_heads=heads, key_dim=key_dim, value_dim=config.value_dim,
            scale=config.scale, divided=self.share is not None,
        )  # fmt: skip

    def __call__(self, x: torch.Tensor, step: StepContext, angles: Angles) -> torch.Tensor:
        config, tokens, heads = self.config, len(x), self.spec.num_heads
        projected = self.qkv(x, step.adapters)[:, : sum(self._sizes)]
        query, latent, shared = torch.split(projected, self._sizes, dim=-1)
        expanded = self.expand(self.norm(self._kernels.joined(latent)), step.adapters)[
            :, : self.expand.parts[0].outputs
        ]
        if self.share is not None and not self.expand.local:
            expanded = self.share.columns(expanded)
        own, value = torch.split(expanded.view(tokens, heads, -1), [config.own_dim, config.value_dim], dim=-1)
        key = self._kernels.joined(own, shared[:, None].expand(-1, heads, -1))
        step.backend.write(self.index, key, value)
        query = query.reshape(tokens, config.num_heads, -1)[:, self._heads]
        attended = step.backend.attend(self.index, query).flatten(1)
        return self.out(gathered(self.share, attended), step.adapters)

    def linears(self) -> list[Linear]:
        return [self.qkv, self.expand, self.out]

    def slots(self) -> Iterator[tuple[str, TensorSlot]]:
        """Tensors of the checkpoint that it takes, by name."""
        parts: list[Linear | Norm] = [*self.linears(), self.norm]
        for part in parts:
            yield from part.slots()
