"""Self-attention: projections, norms of heads, rotation; keys, values and scores are the attention backend's.

Which steps lie between a layer's merged projection and attention, and who does them, is its `HeadPlan`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from asyncengine.execution.attention.base import LayerSpec, MergedHeads
from asyncengine.execution.layers.basic import Linear, Norm, NormConfig, Part
from asyncengine.execution.layers.kernels import Activation
from asyncengine.execution.layers.options import LayerOptions
from asyncengine.execution.layers.rotary import Angles, RotaryConfig, rotate
from asyncengine.execution.layers.sharded import even_cuts, gathered, share_of
from asyncengine.execution.layers.step import StepContext
from asyncengine.execution.layers.stored import TensorSlot


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """One layer's attention, with the checkpoint's names for its matrices."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rotary: int | None = 0
    """Index among the decoder's rotary embeddings; None: this layer rotates nothing."""
    window: int | None = None
    """Sliding window: position p sees positions (p - window, p]. None: all up to p."""
    chunk: int | None = None
    """Chunk length: position p sees no position before its own chunk (Llama 4). None: it does."""
    both: bool = False
    """True in an encoder: later positions are attended to as well, and a window reaches as far to either side."""
    softcap: float | None = None
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """One name: the checkpoint has them in one matrix. Two: values are keys before norm and rotation (Gemma 4)."""
    qkv_by_head: bool = False
    """The one matrix has, for each kv head, its queries, its key and its value (Falcon 40B, BLOOM)."""
    keys_of: int | None = None
    """An earlier layer whose keys and values this one attends to: it has queries only (Gemma 4)."""
    out: str = "self_attn.o_proj"
    qkv_bias: bool = False
    out_bias: bool = False
    transposed: bool = False
    head_norm: NormConfig | None = None
    """The norm of each head's queries and keys."""
    norm_names: tuple[str, str] = ("self_attn.q_norm", "self_attn.k_norm")
    """With "{}" where the checkpoint has one tensor for each head (StableLM)."""
    norm_scope: Literal["head", "each", "whole"] = "head"
    """Over a head's dimensions, with one weight for all heads or one for each; or over all heads at once (OLMo 2)."""
    value_norm: NormConfig | None = None
    """The norm of each head's values (Gemma 4)."""
    norm_after_rotation: bool = False
    """Hunyuan."""
    sinks: str | None = None
    """A logit of each head that takes part in the softmax and carries no value (gpt-oss)."""
    clip: float | None = None
    """Queries, keys and values are clamped to [-clip, clip] (OLMo 1)."""
    first: int = 0
    """No position sees one before this one."""
    inputs: int | None = None
    """Numbers of what it reads, if not those of the model's stream (EAGLE-3)."""
    lone_gate: str | None = None
    """A further matrix gives each head a number whose sigmoid is multiplied with what it attends to (LFM3)."""
    alibi: tuple[float, ...] | None = None
    """A slope of each head: scores grow by it with each position of the key (Press et al. 2022). `rotary` is then one
    in the style "alibi"."""
    output_gate: bool = False
    """The query projection gives each head's queries and, behind them, as many numbers whose sigmoid is multiplied with
    what that head attends to (Qwen3-Next)."""


def _merged_parts(config: AttentionConfig, prefix: str, rows: Sequence[int]) -> list[Part]:
    """Matrices of the checkpoint of which the merged projection consists."""
    sizes = [config.num_kv_heads * each for each in rows]
    if len(config.qkv) == 1:
        sizes = [sum(sizes)]
    names = config.qkv if config.lone_gate is None else (*config.qkv, config.lone_gate)
    return [Part(prefix + name, size) for name, size in zip(names, sizes, strict=True)]


class HeadGate:
    """Gates of heads: what each attends to is multiplied by the sigmoid of as many further projections.

    It takes a projection apart whose first part is, head by head, queries [dim] and gates [dim]; all [T, ...]. `lone`:
    its last part is a gate for each head.
    """

    def __init__(self, options: LayerOptions, heads: int, dim: int, lone: bool) -> None:
        self.heads, self.dim, self._lone, self._joined = heads, dim, lone, options.kernels.joined
        self.kernels: Any = None
        """The module of compiled kernels, on a CPU; None: torch does it."""
        if options.compiled:
            from asyncengine.kernels.api import operations

            self.kernels = operations

    def split(self, projected: torch.Tensor) -> torch.Tensor:
        """The projection without the gates: queries, and what stands behind them."""
        if self._lone:
            return self._joined(projected[:, : -self.heads])
        if self.kernels is not None:
            return self.kernels.split_queries(projected, self.heads, self.dim)
        size = self.heads * self.dim
        queries = projected[:, : 2 * size].view(-1, self.heads, 2, self.dim)[:, :, 0]
        return torch.cat((queries.flatten(1), projected[:, 2 * size :]), dim=1)

    def multiply(self, attended: torch.Tensor, projected: torch.Tensor) -> torch.Tensor:
        """`attended` [T, heads * dim] times the sigmoid of the gates, rounded once."""
        if self.kernels is not None:
            return self.kernels.gate_heads(attended, projected, self.heads, self.dim, self._lone)
        if self._lone:
            gates = projected[:, -self.heads :].repeat_interleave(self.dim, 1)
            return (attended.float() * gates.float().sigmoid()).to(attended.dtype)
        gates = projected[:, : 2 * self.heads * self.dim].view(-1, self.heads, 2, self.dim)[:, :, 1].flatten(1)
        return (attended.float() * gates.float().sigmoid()).to(attended.dtype)


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
    rows = (sum(rows),) if config.qkv_by_head else rows
    rows = rows if config.lone_gate is None else (*rows, group)
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


class Attention:
    """x [T, width] -> [T, width]. `index` is the place of its keys and values in the attention backend, `rotary` its
    rotation."""

    def __init__(
        self, options: LayerOptions, config: AttentionConfig, prefix: str, width: int, index: int,
        rotary: RotaryConfig | None,
    ) -> None:  # fmt: skip
        self.index = index
        self._whole, dim, cuts = config, config.head_dim, even_cuts(options.ranks, config.num_kv_heads)
        self.plan = plan = plan_heads(
            config, rotary, kernels=options.kernels.name, ranks=1 if cuts is None else len(cuts) - 1,
            float32=options.dtype == torch.float32, float32_norms=options.norm_dtype == torch.float32,
        )  # fmt: skip
        columns = config.num_heads // config.num_kv_heads * dim
        self.share = share_of(options.ranks, cuts, plan.rows, columns)
        """This rank's heads, whose keys and values it keeps; None: it has all of them."""
        self.config = plan.config
        """With the heads that are here."""
        self.qkv = Linear(
            options, _merged_parts(config, prefix, plan.rows), config.inputs or width, bias=config.qkv_bias,
            transposed=config.transposed, share=None if plan.norms_of_all_heads else self.share,
        )  # fmt: skip
        self.out = Linear(
            options, [Part(prefix + config.out, width)], config.num_heads * dim, bias=config.out_bias,
            transposed=config.transposed,
        )  # fmt: skip
        self.norms = None if config.head_norm is None else self._make_norms(options, prefix)
        self._slopes = None if config.alibi is None else self._slope_columns(options, config.alibi)
        key_dim = dim if self._slopes is None else dim + self._slopes.shape[1]
        self.merged = self._merged(key_dim) if plan.merges else None
        """Description of how one kernel prepares the merged projection for attention; None: none can."""
        self.value_norm: Norm | None = None
        if config.value_norm is not None and config.keys_of is None:
            self.value_norm = Norm(options, config.value_norm, f"{prefix}self_attn.v_norm", dim)
        self._sinks_path = f"{prefix}{config.sinks}"
        self._sinks = None if config.sinks is None else options.zeros(config.num_heads, dtype=torch.float32)
        sinks = (
            self._sinks if self._sinks is None or self.share is None else self._sinks[self.share.part(config.num_heads)]
        )
        own = self.config
        self.spec = LayerSpec(
            index=index, num_heads=own.num_heads, num_kv_heads=own.num_kv_heads, key_dim=key_dim, value_dim=dim,
            scale=config.scale, window=config.window, chunk=config.chunk, first=config.first, softcap=config.softcap,
            both=config.both, sinks=sinks, divided=self.share is not None, positions=self._slopes is not None,
        )  # fmt: skip
        gated, lone = config.output_gate or config.lone_gate is not None, config.lone_gate is not None
        self.gate = HeadGate(options, own.num_heads, dim, lone) if gated else None
        self._kernels: Any = options.kernels
        self.clip: Activation | None = None
        if config.clip is not None:
            limit = options.zeros(1, dtype=torch.float32).fill_(config.clip)
            self.clip = options.kernels.activation("clip", limit)

    def _slope_columns(self, options: LayerOptions, slopes: tuple[float, ...]) -> torch.Tensor:
        """[heads, 4] that further columns of queries hold, so that their products with those of keys, which "alibi"
        angles are, make slope * position: of each slope and of what rounding it leaves, for 256 positions and one."""
        exact = torch.tensor(slopes, dtype=torch.float64, device=options.device) / self._whole.scale
        first = exact.to(options.dtype)
        parts = [part for each in (first, (exact - first).to(options.dtype)) for part in (256 * each, each)]
        whole = torch.stack(parts, dim=1)
        return whole if self.share is None else whole[self.share.part(len(slopes))].contiguous()

    def _make_norms(self, options: LayerOptions, prefix: str) -> tuple[Norm, ...]:
        """Norms of queries and of keys, or of queries alone."""
        config = self._whole
        counts = (config.num_heads, config.num_kv_heads)[: 1 if config.keys_of is not None else 2]
        names = zip(config.norm_names, counts, strict=False)
        return tuple(self._norm(options, prefix + name, heads) for name, heads in names)

    def _norm(self, options: LayerOptions, path: str, heads: int) -> Norm:
        """`heads`: of all ranks."""
        config = self.config
        assert config.head_norm is not None
        if config.norm_scope == "whole":
            return Norm(options, config.head_norm, path, heads * config.head_dim)
        if config.norm_scope == "head":
            return Norm(options, config.head_norm, path, config.head_dim)
        kept = None if self.share is None else self.share.part(heads)
        return Norm(options, config.head_norm, path, config.head_dim, heads, kept)

    def _merged(self, key_dim: int) -> MergedHeads:
        config, interleaved = self.config, self.plan.interleaved
        counts = (config.num_heads, config.num_kv_heads, key_dim, config.head_dim)
        if self.norms is None or self.plan.norms_apart:
            return MergedHeads(*counts, interleaved=interleaved)
        query, key = self.norms
        return MergedHeads(*counts, query.weight, key.weight, query.config.epsilon, interleaved)

    def __call__(self, x: torch.Tensor, step: StepContext, angles: Angles) -> torch.Tensor:
        """`angles`: those of this layer's rotation."""
        projected = self._projected(x, step)
        if self.gate is None:
            attended = self._attended(projected, step, angles)
        else:
            attended = self._attended(self.gate.split(projected), step, angles)
            attended = self.gate.multiply(attended, projected)
        return self.out(gathered(self.share, attended), step.adapters)

    def write(self, x: torch.Tensor, step: StepContext, angles: Angles) -> None:
        """Keep the keys and values of x, to which others attend later; of layers without adapters, in one process."""
        qkv = x.new_zeros(len(x), self.qkv.outputs)
        self.qkv.weight.multiply_from(self.qkv.outputs - 2 * self.plan.kv_size, x, self.qkv.bias, qkv)
        qkv = qkv if self.gate is None else self.gate.split(qkv)
        write_merged: Any = None if self.merged is None else getattr(step.backend, "write_merged", None)
        if write_merged is not None:
            write_merged(self.index, qkv, self.merged, *self._prepare_in_place(qkv, angles))
            return
        _, key, value = self.prepare(qkv, angles)
        step.backend.write(self.index, key, value)

    def _projected(self, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        """The merged projection of the heads that are here."""
        projected = self.qkv(x, step.adapters)
        if self.config.qkv_by_head:
            return self._by_kind(projected if self.share is None or self.qkv.local else self.share.columns(projected))
        if self.share is None or self.qkv.local:
            return projected
        if self.plan.norms_of_all_heads:
            projected = projected if self.clip is None else self.clip(projected)
            size = self._whole.head_dim
            self._norm_in_place(projected, self._whole.num_heads * size, self._whole.num_kv_heads * size)
        return self.share.columns(projected)

    def _by_kind(self, projected: torch.Tensor) -> torch.Tensor:
        """Queries, keys and values of all heads side by side, of those of each kv head."""
        heads = torch.unflatten(projected, 1, (self.config.num_kv_heads, -1))
        sizes = [self.plan.query_size // self.config.num_kv_heads, self.config.head_dim, self.config.head_dim]
        parts = (self._kernels.joined(part).flatten(1) for part in torch.split(heads, sizes, dim=-1))
        return self._kernels.joined(*parts)

    def _attended(self, qkv: torch.Tensor, step: StepContext, angles: Angles) -> torch.Tensor:
        """[T, heads * dim] of the merged projection."""
        if self.clip is not None and not self.plan.norms_of_all_heads:
            qkv = self.clip(qkv)
        if angles.query_scale is not None:  # rotation is linear
            qkv = self._kernels.scale_rows(qkv, angles.query_scale, self.plan.query_size)
        if self.config.keys_of is not None:
            return step.backend.attend(self.index, self._query(qkv, angles)).flatten(1)
        if self.plan.makes_values:
            qkv = self._with_values(qkv)
        if self._slopes is not None:
            qkv = self._with_positions(qkv, self._slopes, angles.cos)
            angles = angles._replace(cos=angles.cos[:, :0], sin=angles.sin[:, :0])
        attend_merged: Any = None if self.merged is None else getattr(step.backend, "attend_merged", None)
        if attend_merged is not None:
            cos, sin = self._prepare_in_place(qkv, angles)
            return attend_merged(self.index, qkv, self.merged, cos, sin)
        query, key, value = self.prepare(qkv, angles)
        step.backend.write(self.index, key, value)
        return step.backend.attend(self.index, query).flatten(1)

    def prepare(self, qkv: torch.Tensor, angles: Angles) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [T, heads, dim], keys and values [T, kv heads, dim] of the merged projection [T, all]."""
        config = self.config
        counts, key_dim = (config.num_heads, config.num_kv_heads), self.spec.key_dim
        query, key, value = torch.split(qkv, [*(count * key_dim for count in counts), self.plan.kv_size], dim=-1)
        if not config.norm_after_rotation:
            query, key = self._normed(query, key)
        query, key = (part.reshape(len(part), -1, key_dim) for part in (query, key))
        value = value.reshape(len(value), -1, config.head_dim)
        if config.rotary is not None:
            query, key = rotate(query, angles), rotate(key, angles)
        if config.norm_after_rotation:
            query, key = self._normed(query, key)
        return query, key, value

    def _with_positions(self, qkv: torch.Tensor, slopes: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The projection with `slopes` [heads, 4] behind each query and `positions` [T, 4] behind each key."""
        config, joined, size = self.config, self._kernels.joined, self.plan.query_size
        query, key, value = torch.split(qkv, [size, self.plan.kv_size, self.plan.kv_size], dim=-1)
        query = joined(torch.unflatten(query, 1, (config.num_heads, -1)), slopes.expand(len(qkv), -1, -1))
        own = positions[:, None].expand(-1, config.num_kv_heads, -1)
        key = joined(torch.unflatten(key, 1, (config.num_kv_heads, -1)), own)
        return joined(query.flatten(1), key.flatten(1), value)

    def _normed(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys [T, all heads' dims] or [T, heads, dim], in the same shapes."""
        if self.norms is None or self.plan.norms_of_all_heads:
            return query, key
        if self.config.norm_scope == "whole":
            return self.norms[0](query), self.norms[1](key)
        dim = self.config.head_dim
        apart = (part.reshape(len(part), -1, dim) for part in (query, key))
        normed = [norm(part) for norm, part in zip(self.norms, apart, strict=True)]
        return normed[0].reshape(query.shape), normed[1].reshape(key.shape)

    def _prepare_in_place(self, qkv: torch.Tensor, angles: Angles) -> tuple[torch.Tensor, torch.Tensor]:
        """Do what `attend_merged` does not have in it, and give the cosines and sines that it rotates by."""
        config, after = self.config, self.config.norm_after_rotation
        if self.plan.norms_apart and not after and not self.plan.norms_of_all_heads:
            self._norm_in_place(qkv, self.plan.query_size, self.plan.kv_size)
        if not self.plan.rotates_apart:
            return angles.cos, angles.sin
        heads = config.num_heads + config.num_kv_heads
        interleaved = angles.style == "interleaved"
        self._kernels.rotate_heads(qkv, angles.cos, angles.sin, heads, config.head_dim, interleaved)
        if self.plan.norms_apart and after:
            self._norm_in_place(qkv, self.plan.query_size, self.plan.kv_size)
        return angles.cos[:, :0], angles.sin[:, :0]

    def _norm_in_place(self, qkv: torch.Tensor, query_size: int, kv_size: int) -> None:
        for norm, first, size in zip(self.norms or (), (0, query_size), (query_size, kv_size), strict=False):
            self._norm_columns(qkv, norm, first, size)

    def _norm_columns(self, qkv: torch.Tensor, norm: Norm, first: int, size: int) -> None:
        groups = size // norm.weight.shape[-1]
        if self._kernels.name == "compiled":
            centred = norm.config.kind == "layer"
            self._kernels.norm_heads(qkv, norm.weight, norm.bias, first, groups, norm.config.epsilon, centred)
        else:
            part = qkv[:, first : first + size]
            part.copy_(norm(part.reshape(len(part), groups, -1)).flatten(1))

    def _query(self, projected: torch.Tensor, angles: Angles) -> torch.Tensor:
        """Queries [T, heads, dim] of a layer without keys."""
        config = self.config
        query = projected.view(len(projected), -1, config.head_dim)
        if self.norms is not None:
            query = self.norms[0](query)
        if config.rotary is None or self._kernels.name != "compiled":
            return query if config.rotary is None else rotate(query, angles)
        interleaved = angles.style == "interleaved"
        self._kernels.rotate_heads(
            query.flatten(1), angles.cos, angles.sin, config.num_heads, config.head_dim, interleaved
        )  # fmt: skip
        return query

    def _with_values(self, qkv: torch.Tensor) -> torch.Tensor:
        """The projection with values as they are written: normed, and those of the keys where it has none."""
        if len(self.config.qkv) == 2:
            qkv = self._kernels.joined(qkv, qkv[:, self.plan.query_size :])
        if self.value_norm is not None:
            self._norm_columns(qkv, self.value_norm, self.plan.query_size + self.plan.kv_size, self.plan.kv_size)
        return qkv

    def linears(self) -> list[Linear]:
        return [self.qkv, self.out]

    def slots(self) -> Iterator[tuple[str, TensorSlot]]:
        """Tensors of the checkpoint that it takes, by name."""
        parts: list[Linear | Norm] = [self.qkv, self.out, *(self.norms or ())]
        for part in parts:
            yield from part.slots()
        if self._sinks is not None:
            yield self._sinks_path, TensorSlot.into(self._sinks)
