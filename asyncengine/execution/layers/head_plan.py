"""The plan of one layer's heads: which steps lie between its merged projection and attention, and who does them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from asyncengine.execution.layers.rotary import RotaryConfig

if TYPE_CHECKING:
    from asyncengine.execution.layers.attention import AttentionConfig


@dataclass(frozen=True, slots=True)
class HeadPlan:
    """The consequences of a layer's configuration, the number of ranks and the kernels; no tensor is asked."""

    rows: tuple[int, ...]
    """Rows of the merged projection for each kv head, block by block: queries (and gates), keys, values."""
    config: AttentionConfig
    """The layer's, with the heads that one rank has."""
    norms_of_all_heads: bool
    """Norms go over the heads of all ranks, so that a rank's own are taken behind them."""
    rotates_apart: bool
    """Rotation, and norms of heads, are kernels of their own before attention."""
    norms_apart: bool
    """Norms of heads are kernels of their own before attention."""
    merges: bool
    """One kernel of the attention backend prepares the merged projection."""
    interleaved: bool
    """That kernel rotates pairs (2 i, 2 i + 1)."""
    makes_values: bool
    """Values are not what the projection gives: they are normed, or are the keys before norm and rotation."""

    @property
    def query_size(self) -> int:
        """Numbers of all queries of a token."""
        return self.config.num_heads * self.config.head_dim

    @property
    def kv_size(self) -> int:
        """Numbers of all keys of a token; values have as many."""
        return self.config.num_kv_heads * self.config.head_dim


def plan_heads(
    config: AttentionConfig, rotary: RotaryConfig | None, *, kernels: str, ranks: int = 1, float32: bool = True,
    float32_norms: bool = True,
) -> HeadPlan:  # fmt: skip
    """The plan of a layer whose rotation is `rotary` (None: it rotates nothing).

    `kernels`: the name of the layer kernels ("compiled", "torch" or "cuda"). `ranks`: the number of processes among
    which the heads are divided. `float32`: the model's type is that; `float32_norms`: the weights of its norms are.
    """
    group, dim = config.num_heads // config.num_kv_heads, config.head_dim
    queries_alone = config.keys_of is not None
    blocks = 1 if queries_alone else 2 if len(config.qkv) == 2 else 3
    rows = (group * dim * (2 if config.output_gate else 1), dim, dim)[:blocks]
    interleaved = rotary is not None and rotary.style == "interleaved"
    exact = rotary is not None and rotary.exact and not float32
    # compiled attention rotates halves, by cosines in the model's type, and its norms come before
    rotates_apart = config.norm_after_rotation or ((interleaved or exact) and kernels != "cuda")
    norm = config.head_norm
    fusable = norm is not None and config.norm_scope == "head" and norm.kind == "rms" and float32_norms
    own = replace(config, num_heads=config.num_heads // ranks, num_kv_heads=config.num_kv_heads // ranks)
    return HeadPlan(
        rows=rows,
        config=config if ranks == 1 else own,
        norms_of_all_heads=ranks > 1 and norm is not None and config.norm_scope == "whole",
        rotates_apart=rotates_apart,
        norms_apart=norm is not None and (rotates_apart or not fusable),
        merges=not queries_alone and (kernels == "compiled" or not rotates_apart),
        interleaved=interleaved and not rotates_apart,
        makes_values=(config.value_norm is not None and not queries_alone) or len(config.qkv) == 2,
    )
