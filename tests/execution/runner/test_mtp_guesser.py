"""The head's guesses are those of the published formula, whatever the steps in which a text was computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.drive import prompts
from support.mtp_models import VOCAB, check_chain, random_tensors, read_and_guess, save, structure_of, turned

from asyncengine.config import EngineConfig
from asyncengine.execution.layers.latent_attention import LatentAttentionConfig
from asyncengine.execution.models.decoder import Decoder
from asyncengine.execution.models.loading import load_model
from asyncengine.execution.runner.building import build_runner

FAMILIES = ("glm4_moe", "deepseek_v3", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
(TEXT,) = prompts([23], VOCAB - 1)


class Oracle:
    """The head in plain torch: entries of (hidden state, next token's embedding), one causal layer, the output layer.

    Attention and feed-forward parts of one layer are written out; rotation is by the position of the hidden state.
    """

    def __init__(self, family: str, tensors: dict[str, torch.Tensor]) -> None:
        self.structure, self.tensors = structure_of(family), tensors
        assert self.structure.mtp is not None
        self.config = self.structure.mtp

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight = self.tensors[f"{name}.weight"] + self.structure.norm.offset
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.structure.norm.epsilon) * weight

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.tensors[f"{name}.weight"].T
        return y + self.tensors[f"{name}.bias"] if f"{name}.bias" in self.tensors else y

    def merged(self, hidden: torch.Tensor, tokens: list[int]) -> torch.Tensor:
        embedded = self.tensors[f"{self.structure.embedding}.weight"][tokens]
        both = self.norm(self.config.token_norm, embedded), self.norm(self.config.hidden_norm, hidden)
        return self.linear(self.config.projection, torch.cat(both, dim=-1))

    def attend(self, prefix: str, x: torch.Tensor) -> torch.Tensor:
        own = self.config.layers[0].attention
        assert own is not None
        if isinstance(own, LatentAttentionConfig):
            return self.attend_to_latent(prefix, x, own)
        count, dim = len(x), own.head_dim
        query, key, value = (self.linear(prefix + name, x).view(count, -1, dim) for name in own.qkv)
        gate = None
        if own.output_gate:
            query, gate = query.view(count, own.num_heads, 2, dim).unbind(2)
        if own.head_norm is not None:
            query, key = self.norm(prefix + own.norm_names[0], query), self.norm(prefix + own.norm_names[1], key)
        if own.rotary is not None:
            rates = torch.tensor(self.structure.rotary[own.rotary].frequencies)
            query, key = turned(query, rates), turned(key, rates)
        group = own.num_heads // own.num_kv_heads
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", query, key) * own.scale
        scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), float("-inf"))
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)
        mixed = mixed if gate is None else mixed * gate.sigmoid()
        return self.linear(prefix + own.out, mixed.flatten(1))

    def attend_to_latent(self, prefix: str, x: torch.Tensor, own: LatentAttentionConfig) -> torch.Tensor:
        """The same over keys and values that are made of latent vectors, of which pairs of neighbours are rotated."""
        path, count, rates = f"{prefix}self_attn.", len(x), torch.tensor(self.structure.rotary[0].frequencies)
        query = self.linear(f"{path}q_b_proj", self.norm(f"{path}q_a_layernorm", self.linear(f"{path}q_a_proj", x)))
        query, turning = query.view(count, own.num_heads, -1).split([own.own_dim, own.shared_dim], dim=-1)
        latent, shared = self.linear(f"{path}kv_a_proj_with_mqa", x).split([own.rank, own.shared_dim], dim=-1)
        made = self.linear(f"{path}kv_b_proj", self.norm(f"{path}kv_a_layernorm", latent))
        key, value = made.view(count, own.num_heads, -1).split([own.own_dim, own.value_dim], dim=-1)

        def apart(one: torch.Tensor) -> torch.Tensor:
            return turned(torch.cat((one[..., ::2], one[..., 1::2]), dim=-1), rates)

        scores = torch.einsum("qhd,khd->hqk", query, key)
        scores = scores + torch.einsum("qhd,kd->hqk", apart(turning), apart(shared[:, None])[:, 0])
        scores = (scores * own.scale).masked_fill(torch.ones(count, count).triu(1).bool(), float("-inf"))
        return self.linear(f"{path}o_proj", torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).flatten(1))

    def feed(self, prefix: str, x: torch.Tensor) -> torch.Tensor:
        """A gated mixture with a shared expert, by DeepSeek V3's router or by softmax; or one gated part."""
        if f"{prefix}mlp.gate.weight" not in self.tensors:
            return self.gated(f"{prefix}mlp.", x)
        logits = self.linear(f"{prefix}mlp.gate", x)
        correction = self.tensors.get(f"{prefix}mlp.gate.e_score_correction_bias")
        scores = logits.softmax(-1) if correction is None else logits.sigmoid()
        chosen = (scores if correction is None else scores + correction).topk(2).indices
        weights = scores.gather(1, chosen)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for row in range(len(x)):
            for weight, expert in zip(weights[row], chosen[row].tolist(), strict=True):
                out[row] += weight * self.gated(f"{prefix}mlp.experts.{expert}.", x[row])
        if f"{prefix}mlp.shared_expert_gate.weight" in self.tensors:
            gate = self.linear(f"{prefix}mlp.shared_expert_gate", x).sigmoid()
            return out + gate * self.gated(f"{prefix}mlp.shared_expert.", x)
        return out + self.gated(f"{prefix}mlp.shared_experts.", x)

    def gated(self, prefix: str, x: torch.Tensor) -> torch.Tensor:
        up, gate = self.linear(f"{prefix}up_proj", x), self.linear(f"{prefix}gate_proj", x)
        return self.linear(f"{prefix}down_proj", torch.nn.functional.silu(gate) * up)

    def run(self, hidden: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits, what further guesses take for hidden states) of entries (hidden[i], tokens[i])."""
        prefix, stream = self.config.layer.format(0), self.merged(hidden, tokens)
        stream = stream + self.attend(prefix, self.norm(f"{prefix}input_layernorm", stream))
        stream = stream + self.feed(prefix, self.norm(f"{prefix}post_attention_layernorm", stream))
        x = self.norm(self.config.final_norm, stream)
        return self.linear(self.structure.head, x), x if self.config.chains_normed else stream


@pytest.mark.parametrize("family", FAMILIES)
def test_guesses_are_those_of_the_formula(family: str, tmp_path: Path) -> None:
    """A prompt in chunks, decode steps, and steps with drafts of which some are wrong; then a chain of guesses."""
    tensors = random_tensors(family)
    folder = save(tmp_path / "model", family, tensors)
    config = EngineConfig(dtype="float32", kv_cache_memory="4MiB", page_size=4, max_num_seqs=4, show_progress=False)
    runner = build_runner(load_model(str(folder), config), config).runner
    model = runner.model
    assert isinstance(model, Decoder)
    assert model.mtp is not None
    model.mtp.output = None  # the formula has no copy in 4 bits
    states: list[torch.Tensor] = []
    keep = model.hidden_states

    def noted(ids: torch.Tensor, step: Any, *others: Any) -> torch.Tensor:
        states.append(keep(ids, step, *others))
        return states[-1]

    model.hidden_states = noted  # type: ignore[method-assign]
    seen = read_and_guess(runner, TEXT)
    hidden = torch.cat((states[0], states[1], states[2], states[3][:3], states[4]))
    check_chain(seen, Oracle(family, tensors).run, hidden, TEXT[1:15])
    runner.close()
