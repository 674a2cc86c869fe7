"""Attention over latent vectors (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1), from which keys and values are made.

Pages hold one vector for each token: numbers that all heads' keys share, rotated or not, and behind them the normed
latent vector. Keys and values are never made. A head's query times the matrix of its keys is compared with latent
vectors, and the matrix of its values is multiplied with what the head has read of them: so all heads are queries of one
kv head, whose values are the last numbers of its keys. Prompts are computed in the same way: a token has the same bits
however its prompt was cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from asyncengine.errors import UnsupportedModel
from asyncengine.execution.attention.base import LayerSpec
from asyncengine.execution.layers.basic import Linear, Matrix, Norm, NormConfig
from asyncengine.execution.layers.options import LayerOptions
from asyncengine.execution.layers.rotary import Angles, RotaryConfig
from asyncengine.execution.layers.sharded import even_cuts, gathered, share_of
from asyncengine.execution.layers.step import StepContext
from asyncengine.execution.layers.stored import StoredMatrix, TensorSlot, Weighted, dense
from asyncengine.execution.layers.weight_forms import PackedWeight


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
    """The index among the decoder's rotary embeddings of the one of the shared numbers; None: they are not rotated."""
    query_rank: int | None = None
    """Numbers of a latent vector that queries are made of; None: they are made of the layer's input."""
    keys_of: int | None = None
    """Its keys are not another layer's."""
    window: int | None = None
    chunk: int | None = None
    first: int = 0
    """The first position that is attended to."""

    def build(
        self, options: LayerOptions, rotaries: Sequence[RotaryConfig], prefix: str, width: int, index: int
    ) -> LatentAttention:
        """The layer, as `AttentionConfig.build` makes one."""
        return LatentAttention(options, self, prefix, width, index)


class HeadProducts(Weighted):
    """x [T, heads, inputs + behind] -> [T, heads, behind + outputs]: each head's inputs by a matrix of its own, and
    before them the numbers behind these as they are. Matrices have the model's type, whatever others are rounded to."""

    def __init__(self, options: LayerOptions, heads: int, outputs: int, inputs: int) -> None:
        plain = replace(options, bits=None, forms={}, ranks=None)
        self.shape, self._each = (heads, outputs, inputs), outputs
        self._multiply: Any = None
        if plain.compiled:
            from asyncengine.kernels.api import operations

            self._multiply, self._each = operations.multiply_heads, operations.rows_of_head(outputs)
        self.weight = plain.weight(heads * self._each, inputs)

    def load(self, head: int, matrix: torch.Tensor) -> None:
        """Take a head's matrix [outputs, inputs]."""
        self.weight.load(head * self._each, matrix)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        heads, outputs, inputs = self.shape
        weight: Any = self.weight
        if isinstance(weight, PackedWeight):
            return self._multiply(x, weight.weight, outputs, inputs)
        matrices = weight.weight.view(heads, self._each, inputs)[:, :outputs]
        made = torch.matmul(x[..., :inputs].transpose(0, 1), matrices.transpose(1, 2)).transpose(0, 1)
        return torch.cat((x[..., inputs:], made), dim=-1)


class LatentAttention:
    """x [T, width] -> [T, width]. `index` is the place of its latent vectors in the attention backend."""

    merged = None
    """Its projections are not merged as compiled attention would have them."""

    def __init__(
        self, options: LayerOptions, config: LatentAttentionConfig, prefix: str, width: int, index: int
    ) -> None:
        if config.rank % 2 or config.shared_dim % 2:
            raise UnsupportedModel(f"latent vectors of {config.rank} and {config.shared_dim} numbers: must be even")
        self.config, self.index = config, index
        self._kernels: Any = options.kernels
        heads, path = config.num_heads, prefix + config.prefix
        key_dim, rank = config.own_dim + config.shared_dim, config.query_rank
        self._path = f"{path}kv_b_proj.weight"
        self._sizes = [rank or heads * key_dim, config.rank, config.shared_dim]
        latent = Matrix(f"{path}kv_a_proj_with_mqa", config.rank + config.shared_dim)
        query = Matrix(f"{path}q_a_proj", rank) if rank else Matrix(f"{path}q_proj", heads * key_dim)
        self.share = share_of(options.ranks, even_cuts(options.ranks, heads), [key_dim], config.value_dim)
        """This rank's heads; None: it has all of them. Latent vectors are the same in all ranks."""
        self.qkv = Linear(options, [query, latent], width)
        self.norm = Norm(options, config.norm, f"{path}kv_a_layernorm", config.rank)
        self.norms: tuple[Norm, ...] = (self.norm,)
        self.queries: Linear | None = None
        if rank:
            self.norms = (self.norm, Norm(options, config.norm, f"{path}q_a_layernorm", rank))
            self.queries = Linear(options, [Matrix(f"{path}q_b_proj", heads * key_dim)], rank, share=self.share)
        self.out = Linear(options, [Matrix(f"{path}o_proj", width)], heads * config.value_dim)
        self._heads = slice(0, heads) if self.share is None else self.share.local_slice(heads)
        heads = self._heads.stop - self._heads.start
        self.products = (
            HeadProducts(options, heads, config.rank, config.own_dim),
            HeadProducts(options, heads, config.value_dim, config.rank),
        )
        """Products of queries before they are compared, and of what was read."""
        self.spec = LayerSpec(
            index=index, num_heads=heads, num_kv_heads=1, key_dim=config.shared_dim + config.rank,
            value_dim=config.rank, scale=config.scale, first=config.first, latent=True,
        )  # fmt: skip

    def __call__(self, x: torch.Tensor, step: StepContext, angles: Angles) -> torch.Tensor:
        projected = self.qkv(x, step.adapters)[:, : sum(self._sizes)]
        query_input, latent, shared = torch.split(projected, self._sizes, dim=-1)
        joined, heads, key_dim = self._kernels.joined, self.spec.num_heads, self.config.own_dim + self.config.shared_dim
        self._keep(latent, shared, step, angles)
        if self.queries is None:
            query = torch.unflatten(query_input, 1, (self.config.num_heads, -1))[:, self._heads]
        else:
            query = self.queries.local_outputs(self.norms[1](joined(query_input)), step.adapters)[:, : heads * key_dim]
            query = torch.unflatten(query, 1, (heads, -1))
        attended = step.backend.attend(self.index, self._rotated(self.products[0](query), angles))
        return self.out(gathered(self.share, self.products[1](attended).flatten(1)), step.adapters)

    def write(self, x: torch.Tensor, step: StepContext, angles: Angles) -> None:
        """Keep the latent vectors of x, to which others attend later; of layers without adapters, in one process."""
        made = x.new_zeros(len(x), self.qkv.outputs)
        self.qkv.weight.multiply_from(self._sizes[0], x, self.qkv.bias, made)
        _, latent, shared = torch.split(made[:, : sum(self._sizes)], self._sizes, dim=-1)
        self._keep(latent, shared, step, angles)

    def _keep(self, latent: torch.Tensor, shared: torch.Tensor, step: StepContext, angles: Angles) -> None:
        joined = self._kernels.joined
        key = self._rotated(joined(shared, self.norm(joined(latent)))[:, None], angles)
        step.backend.write(self.index, key, key)

    def _rotated(self, x: torch.Tensor, angles: Angles) -> torch.Tensor:
        """x [T, heads, shared dim + rank] with its shared numbers rotated, perhaps in place."""
        return x if self.config.rotary is None else self._kernels.rotated(x, angles)

    def _load(self, tensor: torch.Tensor | StoredMatrix) -> None:
        """Take the matrix of all heads' keys and values [heads * (own dim + value dim), rank]."""
        whole = tensor if isinstance(tensor, torch.Tensor) else dense(tensor)
        each = torch.unflatten(whole, 0, (self.config.num_heads, -1))[self._heads]
        for head, matrix in enumerate(each):
            self.products[0].load(head, matrix[: self.config.own_dim].T)
            self.products[1].load(head, matrix[self.config.own_dim :])

    def linears(self) -> list[Linear]:
        return [self.qkv, *([] if self.queries is None else [self.queries]), self.out]

    def slots(self) -> Iterator[tuple[str, TensorSlot]]:
        """Tensors of the checkpoint that it takes, by name."""
        layers: list[Linear | Norm] = [*self.linears(), *self.norms]
        for layer in layers:
            yield from layer.slots()
        config = self.config
        shape = (config.num_heads * (config.own_dim + config.value_dim), config.rank)
        memory = [tensor for product in self.products for tensor in product.weight.tensors()]
        yield self._path, TensorSlot(shape, self._load, memory=memory)
