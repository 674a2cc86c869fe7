"""Self-attention: projections, norms of heads, and rotation. Keys, values and scores belong to the attention backend.

A layer's `HeadPlan` says which steps lie between its merged projection and attention, and which kernel does each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch

from asyncengine.execution.attention.base import LayerSpec, MergedHeads
from asyncengine.execution.layers.basic import Linear, Matrix, Norm, NormConfig, named_norm
from asyncengine.execution.layers.kernels import Activation
from asyncengine.execution.layers.options import LayerOptions
from asyncengine.execution.layers.rotary import Angles, RotaryConfig, rotate
from asyncengine.execution.layers.sharded import even_cuts, gathered, local_slice, share_of
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
    """Name of a further matrix that gives each head a gate: its sigmoid multiplies the head's output (LFM3)."""
    alibi: tuple[float, ...] | None = None
    """A slope of each head: scores grow by it with each position of the key (Press et al. 2022). `rotary` is then one
    in the style "alibi"."""
    output_gate: bool = False
    """The query projection gives each head's queries, followed by equally many gates, whose sigmoid multiplies the
    head's output (Qwen3-Next)."""

    def build(
        self, options: LayerOptions, rotaries: Sequence[RotaryConfig], prefix: str, width: int, index: int
    ) -> Attention:
        """The layer. `rotaries`: the decoder's; the rest as for `Attention`."""
        cuts = even_cuts(options.ranks, self.num_kv_heads)
        plan = plan_heads(
            self, None if self.rotary is None else rotaries[self.rotary], kernels=options.kernels.name,
            ranks=1 if cuts is None else len(cuts) - 1, float32=options.dtype == torch.float32,
            float32_norms=options.norm_dtype == torch.float32,
        )  # fmt: skip
        return FORMS[plan.form](options, self, plan, prefix, width, index)


class HeadGate:
    """Gates of heads: attention's output is multiplied by the sigmoid of gates from the same projection.

    The projection [T, ...] begins with queries [dim] and gates [dim] of each head in turn; with `lone`, it ends with
    one gate for each head instead.
    """

    def __init__(self, options: LayerOptions, heads: int, dim: int, lone: bool) -> None:
        self.heads, self.dim, self._lone, self._joined = heads, dim, lone, options.kernels.joined
        self.kernels: Any = None
        """The module of compiled kernels, on a CPU; None: torch does it."""
        if options.compiled:
            from asyncengine.kernels.api import operations

            self.kernels = operations

    def split(self, projected: torch.Tensor) -> torch.Tensor:
        """The projection without the gates: queries, keys and values."""
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
        else:
            gates = projected[:, : 2 * self.heads * self.dim].view(-1, self.heads, 2, self.dim)[:, :, 1].flatten(1)
        return (attended.float() * gates.float().sigmoid()).to(attended.dtype)


@dataclass(frozen=True, slots=True)
class HeadPlan:
    """The computation of a layer's heads, as it follows from its configuration, the number of ranks and the kernels
    alone; no tensor is looked at."""

    form: Literal["own", "by_head", "all_norms", "queries"]
    """The layer's class, by its name in `FORMS`."""
    config: AttentionConfig
    """The layer's, with the heads that one rank has."""
    matrices: tuple[Matrix, ...]
    """Matrices of the merged projection, named without the layer's prefix, with the outputs of all ranks together."""
    rows: tuple[int, ...]
    """Rows of the merged projection for each kv head, block by block: queries (and gates), keys, values."""
    gate: Literal["", "number", "head"]
    """Whether each number, or each head, of attention's output has a gate; "": there are no gates."""
    changes: tuple[str, ...]
    """Changes of the projection without its gates, in this order, by their names in `Attention.CHANGES`."""
    apart: tuple[str, ...]
    """Steps of queries and keys ("norm", "rotate") that separate kernels do, in this order, before ..."""
    fused: tuple[str, ...]
    """... these steps, which the attention backend's kernel does if `merges`."""
    merges: bool
    """Whether one kernel of the attention backend prepares the merged projection."""
    interleaved: bool
    """Whether that kernel rotates pairs (2 i, 2 i + 1)."""
    norms: tuple[tuple[NormConfig, str, int, int], ...]
    """Norms of queries and of keys, or of queries alone: (configuration, name without the layer's prefix, width, rows:
    the heads of all ranks if each has a weight, 0 if one weight serves all heads)."""
    value_norm: NormConfig | None
    key_dim: int
    """Numbers of a head's key, with its positions (ALiBi)."""

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
    queries_alone, norm, alibi = config.keys_of is not None, config.head_norm, config.alibi is not None
    all_norms = ranks > 1 and norm is not None and config.norm_scope == "whole"
    interleaved = rotary is not None and rotary.style == "interleaved"
    exact = rotary is not None and rotary.exact and not float32
    # compiled attention can only rotate halves, by cosines in the model's dtype, and only after norms
    rotates_apart = config.norm_after_rotation or ((interleaved or exact) and kernels != "cuda")
    fusable = norm is not None and config.norm_scope == "head" and norm.kind == "rms" and float32_norms
    turns = ("rotate", "norm") if config.norm_after_rotation else ("norm", "rotate")
    had = {"norm": norm is not None and not all_norms, "rotate": rotary is not None and not alibi}
    is_apart = {"norm": rotates_apart or not fusable, "rotate": rotates_apart}
    value_norm = None if queries_alone else config.value_norm
    changes = {
        "clip": config.clip is not None and not all_norms,
        "scale_queries": rotary is not None and rotary.query_growth is not None,
        "make_values": value_norm is not None or len(config.qkv) == 2,
        "add_positions": alibi,
    }
    local = replace(config, num_heads=config.num_heads // ranks, num_kv_heads=config.num_kv_heads // ranks)
    rows, matrices = _projection(config)
    return HeadPlan(
        form="queries" if queries_alone else "by_head" if config.qkv_by_head else "all_norms" if all_norms else "own",
        config=config if ranks == 1 else local,
        matrices=matrices,
        rows=rows,
        gate="number" if config.output_gate else "" if config.lone_gate is None else "head",
        changes=tuple(change for change, wanted in changes.items() if wanted),
        apart=tuple(turn for turn in turns if had[turn] and is_apart[turn]),
        fused=tuple(turn for turn in turns if had[turn] and not is_apart[turn]),
        merges=not queries_alone and (kernels == "compiled" or not rotates_apart),
        interleaved=interleaved and not rotates_apart,
        norms=() if norm is None else tuple(_norms(config, norm))[: 1 if queries_alone else 2],
        value_norm=value_norm,
        key_dim=config.head_dim + 4 * alibi,
    )


def _projection(config: AttentionConfig) -> tuple[tuple[int, ...], tuple[Matrix, ...]]:
    """(rows for each kv head, matrices) of the merged projection, as in `HeadPlan`."""
    group, dim = config.num_heads // config.num_kv_heads, config.head_dim
    blocks = 1 if config.keys_of is not None else 2 if len(config.qkv) == 2 else 3
    rows = (group * dim * (2 if config.output_gate else 1), dim, dim)[:blocks]
    rows = (sum(rows),) if config.qkv_by_head else rows
    lone = () if config.lone_gate is None else (config.lone_gate,)
    sizes = (*([sum(rows)] if len(config.qkv) == 1 else rows), *(group for _ in lone))
    named = zip((*config.qkv, *lone), sizes, strict=True)
    return (*rows, *(group for _ in lone)), tuple(Matrix(name, config.num_kv_heads * size) for name, size in named)


def _norms(config: AttentionConfig, norm: NormConfig) -> Iterator[tuple[NormConfig, str, int, int]]:
    scope, dim = config.norm_scope, config.head_dim
    for name, heads in zip(config.norm_names, (config.num_heads, config.num_kv_heads), strict=True):
        yield norm, name, heads * dim if scope == "whole" else dim, heads if scope == "each" else 0


class Attention:
    """x [T, width] -> [T, width]. `index`: number of its keys and values in the attention backend."""

    def __init__(
        self, options: LayerOptions, config: AttentionConfig, plan: HeadPlan, prefix: str, width: int, index: int
    ) -> None:
        """`config`: with the heads of all ranks; `plan` was made of it."""
        self.index, self.plan = index, plan
        self._kernels: Any = options.kernels
        dim, local, heads = config.head_dim, plan.config, config.num_heads
        columns = heads // config.num_kv_heads * dim
        self.share = share_of(options.ranks, even_cuts(options.ranks, config.num_kv_heads), plan.rows, columns)
        """This rank's heads, whose keys and values it stores; None: it has all of them."""
        self.config = local
        """The configuration with this rank's heads."""
        matrices = [Matrix(prefix + matrix.path, matrix.outputs) for matrix in plan.matrices]
        self.qkv = Linear(
            options, matrices, config.inputs or width, bias=config.qkv_bias, transposed=config.transposed,
            share=None if plan.form == "all_norms" else self.share,
        )  # fmt: skip
        self.out = Linear(
            options, [Matrix(prefix + config.out, width)], heads * dim, bias=config.out_bias,
            transposed=config.transposed,
        )  # fmt: skip
        self.norms = tuple(
            Norm(options, norm, prefix + name, dims, rows, self.share) for norm, name, dims, rows in plan.norms
        )
        self.value_norm = named_norm(options, plan.value_norm, f"{prefix}self_attn.v_norm", dim)
        self._slopes = None if config.alibi is None else self._slope_columns(options, config.alibi)
        self.merged = self._merged() if plan.merges else None
        """Description of the merged projection for the backend's kernel that prepares it; None: no kernel can."""
        self._sinks_path = f"{prefix}{config.sinks}"
        self._sinks = None if config.sinks is None else options.zeros(heads, dtype=torch.float32)
        self.spec = LayerSpec(
            index=index, num_heads=local.num_heads, num_kv_heads=local.num_kv_heads, key_dim=plan.key_dim,
            value_dim=dim, scale=config.scale, window=config.window, chunk=config.chunk, first=config.first,
            softcap=config.softcap,
            both=config.both, sinks=None if self._sinks is None else self._sinks[local_slice(self.share, heads)],
            divided=self.share is not None, positions=self._slopes is not None,
        )  # fmt: skip
        self.gate = HeadGate(options, local.num_heads, dim, plan.gate == "head") if plan.gate else None
        self.clip: Activation | None = None
        if config.clip is not None:
            limit = options.zeros(1, dtype=torch.float32).fill_(config.clip)
            self.clip = options.kernels.activation("clip", limit)
        self._changes = [self.CHANGES[change] for change in plan.changes]

    def _slope_columns(self, options: LayerOptions, slopes: tuple[float, ...]) -> torch.Tensor:
        """[heads, 4] numbers appended to queries, whose product with the "alibi" angles appended to keys is slope *
        position. Each slope is split into its rounded value and the remainder, each for whole 256s of positions and for
        the rest, so that the product is exact in any dtype."""
        exact = torch.tensor(slopes, dtype=torch.float64, device=options.device) / self.config.scale
        first = exact.to(options.dtype)
        columns = [column for slope in (first, (exact - first).to(options.dtype)) for column in (256 * slope, slope)]
        return torch.stack(columns, dim=1)[local_slice(self.share, len(slopes))].contiguous()

    def _merged(self) -> MergedHeads:
        local, plan = self.config, self.plan
        counts = (local.num_heads, local.num_kv_heads, plan.key_dim, local.head_dim)
        if "norm" not in plan.fused:
            return MergedHeads(*counts, interleaved=plan.interleaved)
        query, key = self.norms
        return MergedHeads(*counts, query.weight, key.weight, query.config.epsilon, plan.interleaved)

    def __call__(self, x: torch.Tensor, step: StepContext, angles: Angles) -> torch.Tensor:
        """[T, width] of x [T, width]. `angles`: of this layer's rotation."""
        projected = self._projected(x, step)
        if self.gate is None:
            attended = self._attended(projected, step, angles)
        else:
            attended = self._attended(self.gate.split(projected), step, angles)
            attended = self.gate.multiply(attended, projected)
        return self.out(gathered(self.share, attended), step.adapters)

    def _projected(self, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        """The merged projection of this rank's heads."""
        return self.qkv.local_outputs(x, step.adapters)

    def _attended(self, qkv: torch.Tensor, step: StepContext, angles: Angles) -> torch.Tensor:
        """Attention's output [T, heads * dim] of the merged projection without gates."""
        qkv, angles = self._changed(qkv, angles)
        attend_merged: Any = None if self.merged is None else getattr(step.backend, "attend_merged", None)
        if attend_merged is not None:
            return attend_merged(self.index, qkv, self.merged, *self._prepare_in_place(qkv, angles))
        query, key, value = self._prepare(qkv, angles)
        step.backend.write(self.index, key, value)
        return step.backend.attend(self.index, query).flatten(1)

    def write(self, x: torch.Tensor, step: StepContext, angles: Angles) -> None:
        """Store the keys and values of x without attending. Only for layers without adapters, in one process."""
        qkv = x.new_zeros(len(x), self.qkv.outputs)
        self.qkv.weight.multiply_from(self.qkv.outputs - 2 * self.plan.kv_size, x, self.qkv.bias, qkv)
        qkv, angles = self._changed(qkv if self.gate is None else self.gate.split(qkv), angles)
        write_merged: Any = None if self.merged is None else getattr(step.backend, "write_merged", None)
        if write_merged is not None:
            write_merged(self.index, qkv, self.merged, *self._prepare_in_place(qkv, angles))
            return
        _, key, value = self._prepare(qkv, angles)
        step.backend.write(self.index, key, value)

    def _changed(self, qkv: torch.Tensor, angles: Angles) -> tuple[torch.Tensor, Angles]:
        """The projection after the plan's changes, and the angles for its rotation."""
        for change in self._changes:
            qkv, angles = change(self, qkv, angles)
        return qkv, angles

    def _scale_queries(self, qkv: torch.Tensor, angles: Angles) -> tuple[torch.Tensor, Angles]:
        """Multiply queries by the factors of their positions; before rotation, which is linear."""
        if angles.query_scale is not None:
            qkv = self._kernels.scale_rows(qkv, angles.query_scale, self.plan.query_size)
        return qkv, angles

    def _make_values(self, qkv: torch.Tensor, angles: Angles) -> tuple[torch.Tensor, Angles]:
        """Norm the values. A layer without value projection uses its keys before norm and rotation as values."""
        if len(self.config.qkv) == 2:
            qkv = self._kernels.joined(qkv, qkv[:, self.plan.query_size :])
        if self.value_norm is not None:
            self.value_norm.norm_columns(qkv, self.plan.query_size + self.plan.kv_size, self.plan.kv_size)
        return qkv, angles

    def _add_positions(self, qkv: torch.Tensor, angles: Angles) -> tuple[torch.Tensor, Angles]:
        """Append slopes [heads, 4] to each query, and positions [T, 4], which are the "alibi" angles, to each key."""
        assert self._slopes is not None
        config, joined, size = self.config, self._kernels.joined, self.plan.query_size
        query, key, value = torch.split(qkv, [size, self.plan.kv_size, self.plan.kv_size], dim=-1)
        query = joined(torch.unflatten(query, 1, (config.num_heads, -1)), self._slopes.expand(len(qkv), -1, -1))
        positions = angles.cos[:, None].expand(-1, config.num_kv_heads, -1)
        key = joined(torch.unflatten(key, 1, (config.num_kv_heads, -1)), positions)
        unrotated = angles._replace(cos=angles.cos[:, :0], sin=angles.sin[:, :0])
        return joined(query.flatten(1), key.flatten(1), value), unrotated

    CHANGES: ClassVar[Mapping[str, Any]] = {
        "clip": lambda self, qkv, angles: (self.clip(qkv), angles),
        "scale_queries": _scale_queries, "make_values": _make_values, "add_positions": _add_positions,
    }  # fmt: skip

    def _prepare(self, qkv: torch.Tensor, angles: Angles) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [T, heads, dim], keys and values [T, kv heads, dim] of the merged projection [T, all]."""
        local, plan = self.config, self.plan
        sizes = [local.num_heads * plan.key_dim, local.num_kv_heads * plan.key_dim, plan.kv_size]
        query, key, value = torch.split(qkv, sizes, dim=-1)
        query, key = (x.reshape(len(x), -1, plan.key_dim) for x in (query, key))
        for turn in (*plan.apart, *plan.fused):
            if turn == "norm":
                query, key = (norm.of_heads(x) for norm, x in zip(self.norms, (query, key), strict=True))
            else:
                query, key = rotate(query, angles), rotate(key, angles)
        return query, key, value.reshape(len(value), -1, local.head_dim)

    def _prepare_in_place(self, qkv: torch.Tensor, angles: Angles) -> tuple[torch.Tensor, torch.Tensor]:
        """Do the steps that `attend_merged` does not do. Returns the cosines and sines for its rotation."""
        local, plan = self.config, self.plan
        for turn in plan.apart:
            if turn == "norm":
                self._norm_columns(qkv, plan.query_size, plan.kv_size)
            else:
                heads, interleaved = local.num_heads + local.num_kv_heads, angles.style == "interleaved"
                self._kernels.rotate_heads(qkv, angles.cos, angles.sin, heads, local.head_dim, interleaved)
                angles = angles._replace(cos=angles.cos[:, :0], sin=angles.sin[:, :0])
        return angles.cos, angles.sin

    def _norm_columns(self, qkv: torch.Tensor, query_size: int, kv_size: int) -> None:
        query, key = self.norms
        query.norm_columns(qkv, 0, query_size)
        key.norm_columns(qkv, query_size, kv_size)

    def linears(self) -> list[Linear]:
        return [self.qkv, self.out]

    def slots(self) -> Iterator[tuple[str, TensorSlot]]:
        """Tensors of the checkpoint that it takes, by name."""
        layers: list[Linear | Norm] = [self.qkv, self.out, *self.norms]
        for layer in layers:
            yield from layer.slots()
        if self._sinks is not None:
            yield self._sinks_path, TensorSlot.into(self._sinks)


class ByHeadAttention(Attention):
    """Attention whose projection has, for each kv head, its queries, its key and its value."""

    def _projected(self, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        heads = torch.unflatten(super()._projected(x, step), 1, (self.config.num_kv_heads, -1))
        sizes = [self.plan.query_size // self.config.num_kv_heads, self.config.head_dim, self.config.head_dim]
        blocks = (self._kernels.joined(block).flatten(1) for block in torch.split(heads, sizes, dim=-1))
        return self._kernels.joined(*blocks)


class AllNormsAttention(Attention):
    """Attention whose norms cover all ranks' heads: each rank computes the whole projection, and takes its heads."""

    def _projected(self, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        assert self.share is not None
        projected = self.qkv(x, step.adapters)
        projected = projected if self.clip is None else self.clip(projected)
        self._norm_columns(projected, *(norm.width for norm in self.norms))
        return self.share.columns(projected)


class QueryAttention(Attention):
    """Attention of a layer without keys: it attends to those of an earlier layer."""

    def _attended(self, qkv: torch.Tensor, step: StepContext, angles: Angles) -> torch.Tensor:
        query, angles = self._changed(qkv, angles)
        query = query.view(len(query), -1, self.config.head_dim)
        for turn in (*self.plan.apart, *self.plan.fused):
            query = self.norms[0].of_heads(query) if turn == "norm" else self._kernels.rotated(query, angles)
        return step.backend.attend(self.index, query).flatten(1)


FORMS: Mapping[str, type[Attention]] = {
    "own": Attention, "by_head": ByHeadAttention, "all_norms": AllNormsAttention, "queries": QueryAttention,
}  # fmt: skip
