"""A minimal Llama forward pass for training on a few CPU cores.

It must compute the same logits as transformers' ``LlamaForCausalLM`` with the configuration written by
:func:`hf_config` (a test compares them).  What differs is the cost: projections that read the same input are
one matrix product, and the weights are laid out so that the optimizer sees plain 2-D matrices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    """The architecture; every field has its counterpart in a Hugging Face Llama configuration."""

    vocab_size: int = 2048
    hidden: int = 256
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    ff: int = 640
    max_positions: int = 4096
    rope_theta: float = 10000.0
    eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


DRAFT = Shape(hidden=128, layers=2, heads=2, kv_heads=1, ff=320)
"""Shape of the model that guesses for the demo model: two layers are the fewest that copy (Olsson et al. 2022)."""


def rope_tables(shape: Shape, length: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine tables of rotary positions (Su et al. 2021), ``[length, head_dim]`` each."""
    half = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angles = torch.outer(torch.arange(length, dtype=torch.float32), shape.rope_theta**-half)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions in the half-split layout that Hugging Face checkpoints use."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Layer(nn.Module):
    """Pre-norm attention and gated feed-forward block; matrices are stored ``[out, in]``."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        d, kv = shape.hidden, shape.kv_heads * shape.head_dim
        self.norm1 = nn.Parameter(torch.ones(d))
        self.norm2 = nn.Parameter(torch.ones(d))
        self.q = nn.Parameter(torch.empty(d, d))
        self.k = nn.Parameter(torch.empty(kv, d))
        self.v = nn.Parameter(torch.empty(kv, d))
        self.o = nn.Parameter(torch.empty(d, d))
        self.gate = nn.Parameter(torch.empty(shape.ff, d))
        self.up = nn.Parameter(torch.empty(shape.ff, d))
        self.down = nn.Parameter(torch.empty(d, shape.ff))

    def attention(self, x: Tensor, cos: Tensor, sin: Tensor, documents: Tensor | None) -> Tensor:
        s = self.shape
        batch, length, _ = x.shape
        kv = s.kv_heads * s.head_dim
        qkv = functional.linear(x, torch.cat((self.q, self.k, self.v)).to(x.dtype))
        q, k, v = torch.split(qkv, [s.hidden, kv, kv], dim=-1)
        q = rotate(q.view(batch, length, s.heads, s.head_dim).transpose(1, 2), cos, sin)
        k = rotate(k.view(batch, length, s.kv_heads, s.head_dim).transpose(1, 2), cos, sin)
        v = v.view(batch, length, s.kv_heads, s.head_dim).transpose(1, 2)
        out = attend(q, k, v, documents)
        return functional.linear(out.transpose(1, 2).reshape(batch, length, s.hidden), self.o.to(x.dtype))

    def feed_forward(self, x: Tensor) -> Tensor:
        gate, up = functional.linear(x, torch.cat((self.gate, self.up)).to(x.dtype)).chunk(2, dim=-1)
        return functional.linear(functional.silu(gate) * up, self.down.to(x.dtype))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, documents: Tensor | None = None) -> Tensor:
        x = x + self.attention(rms_norm(x, self.norm1, self.shape.eps), cos, sin, documents)
        return x + self.feed_forward(rms_norm(x, self.norm2, self.shape.eps))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm (Zhang & Sennrich 2019), computed in float32 as Llama does."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (scaled * weight).to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
    """Causal grouped-query attention that does not look into other documents of a packed row.

    Queries are taken in eight blocks, each against the keys up to its end, which skips most of the masked half;
    on a CPU this is more than twice as fast, forward and backward, as the fused kernel.
    """
    batch, heads, length, width = q.shape
    groups = k.shape[1]
    repeats = heads // groups
    q = (q / math.sqrt(width)).view(batch, groups, repeats, length, width)
    step = max(1, -(-length // 8))
    outputs = []
    for start in range(0, length, step):
        end = min(start + step, length)
        rows = q[:, :, :, start:end].reshape(batch * groups, repeats * (end - start), width)
        keys = k[:, :, :end].reshape(batch * groups, end, width)
        values = v[:, :, :end].reshape(batch * groups, end, width)
        scores = torch.bmm(rows, keys.transpose(1, 2)).view(batch, groups, repeats, end - start, end).float()
        seen = torch.arange(end)[None, :] <= torch.arange(start, end)[:, None]
        if documents is not None:
            same = documents[:, None, :end] == documents[:, start:end, None]
            seen = (seen[None] & same)[:, None, None]
        weights = torch.softmax(scores.masked_fill(~seen, -1e30), dim=-1).to(q.dtype)
        mixed = torch.bmm(weights.view(batch * groups, repeats * (end - start), end), values)
        outputs.append(mixed.view(batch, heads, end - start, width))
    return torch.cat(outputs, dim=2)


class Llama(nn.Module):
    """The trainable model; ``forward`` returns the final hidden states so that the loss may skip positions."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Parameter(torch.empty(shape.vocab_size, shape.hidden))
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.Parameter(torch.ones(shape.hidden))
        self.reset(seed)

    @torch.no_grad()
    def reset(self, seed: int) -> None:
        """Seeded initialisation; residual writers start at zero, so every layer starts as the identity."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
                continue
            std = 0.02 if name == "embed" else 1.0 / math.sqrt(parameter.shape[1])
            if name.endswith((".o", ".down")):
                std = 0.0
            parameter.normal_(0.0, std, generator=generator)

    def hidden_states(self, ids: Tensor, documents: Tensor | None, dtype: torch.dtype) -> Tensor:
        cos, sin = (table.to(dtype) for table in rope_tables(self.shape, ids.shape[1]))
        x = functional.embedding(ids, self.embed).to(dtype)
        for layer in self.layers:
            x = layer(x, cos, sin, documents)
        return rms_norm(x, self.norm, self.shape.eps)

    def forward(self, ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Logits in float32, ``[batch, length, vocab]``."""
        x = self.hidden_states(ids, None, dtype)
        return functional.linear(x, self.embed.to(dtype)).float()


def hf_config(shape: Shape, *, bos: int | None, eos: int, pad: int) -> dict[str, Any]:
    """The contents of config.json for these weights."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ff,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": pad,
        "use_cache": True,
        "torch_dtype": "bfloat16",
    }


def hf_state(model: Llama) -> dict[str, Tensor]:
    """The weights under their Hugging Face names; the output head is tied and therefore absent."""
    state = {"model.embed_tokens.weight": model.embed, "model.norm.weight": model.norm}
    names = {
        "norm1": "input_layernorm",
        "norm2": "post_attention_layernorm",
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "o": "self_attn.o_proj",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
    }
    for index, layer in enumerate(model.layers):
        for ours, theirs in names.items():
            state[f"model.layers.{index}.{theirs}.weight"] = getattr(layer, ours)
    return {name: tensor.detach().contiguous() for name, tensor in state.items()}
