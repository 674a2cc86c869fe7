"""The guesses of an EAGLE-3 head are those of the published form, whatever the steps in which a text was computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.drive import prompts
from support.eagle_models import DRAFTED, HEAD, LAYERS, MODEL, VOCAB, Tensors, head_tensors, model_tensors, save
from support.mtp_models import check_chain, read_and_guess

from asyncengine.config import EngineConfig
from asyncengine.execution.models.checkpoint import open_checkpoint
from asyncengine.execution.models.eagle import headed
from asyncengine.execution.models.loading import load_model
from asyncengine.execution.runner.building import build_runner

(TEXT,) = prompts([23], VOCAB - 1)


def turned(x: torch.Tensor, rates: torch.Tensor) -> torch.Tensor:
    """The first dimensions of x [positions, heads, dims] rotated, halves of them being pairs."""
    angles = torch.arange(len(x))[:, None, None] * rates
    first, second, rest = x.split([len(rates), len(rates), x.shape[-1] - 2 * len(rates)], dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def norm(weight: torch.Tensor, x: torch.Tensor, epsilon: float = 1e-6) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight


def layer(
    tensors: Tensors, prefix: str, stream: torch.Tensor, x: torch.Tensor, base: float, eps: float
) -> torch.Tensor:
    """The stream behind a layer of attention that reads x, and a gated feed-forward part."""

    def linear(name: str, given: torch.Tensor) -> torch.Tensor:
        return given @ tensors[f"{prefix}{name}.weight"].T

    count = len(x)
    query, key, value = (linear(f"self_attn.{name}_proj", x).view(count, -1, 16) for name in "qkv")
    rates = base ** (-torch.arange(8) / 8)
    query, key = turned(query, rates), turned(key, rates).repeat_interleave(2, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) / 4
    scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), float("-inf"))
    mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value.repeat_interleave(2, 1))
    stream = stream + linear("self_attn.o_proj", mixed.flatten(1))
    x = norm(tensors[f"{prefix}post_attention_layernorm.weight"], stream, eps)
    gated = torch.nn.functional.silu(linear("mlp.gate_proj", x)) * linear("mlp.up_proj", x)
    return stream + linear("mlp.down_proj", gated)


class Oracle:
    """The model's streams and the head in plain torch, over a whole text at once, in float64."""

    def __init__(self, model: Tensors, head: Tensors, taps: tuple[int, ...], normed: bool) -> None:
        self.model, self.head = ({name: each.double() for name, each in part.items()} for part in (model, head))
        self.taps, self.normed = taps, normed

    def features(self, tokens: list[int]) -> torch.Tensor:
        stream, kept = self.model["model.embed_tokens.weight"][tokens], []
        for index in range(LAYERS):
            kept.append(stream)
            prefix = f"model.layers.{index}."
            x = norm(self.model[f"{prefix}input_layernorm.weight"], stream)
            stream = layer(self.model, prefix, stream, x, 10000.0, 1e-6)
        kept.append(stream)
        return torch.cat([kept[each] for each in self.taps], dim=-1) @ self.head["fc.weight"].T

    def run(self, hidden: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits over the model's tokens, what further guesses take for hidden states) of (hidden[i], tokens[i])."""
        table = self.model["model.embed_tokens.weight"]
        own = norm(self.head["midlayer.hidden_norm.weight"], hidden, 1e-5)
        embedded = norm(self.head["midlayer.input_layernorm.weight"], table[tokens], 1e-5)
        stream, x = own if self.normed else hidden, torch.cat((embedded, own), dim=-1)
        stream = layer(self.head, "midlayer.", stream, x, 5000.0, 1e-5)
        made = norm(self.head["norm.weight"], stream, 1e-5) @ self.head["lm_head.weight"].T
        logits = made.new_full((len(made), VOCAB), -torch.inf)
        logits[:, torch.arange(DRAFTED) + self.head["d2t"].long()] = made
        return logits, stream


def speculators(content: dict[str, Any], tensors: Tensors, ids: list[int]) -> tuple[dict[str, Any], Tensors]:
    """The same head as vLLM's speculators write it."""
    inner = {name: value for name, value in content.items() if name not in ("draft_vocab_size", "architectures")}
    said = {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": DRAFTED,
        "norm_before_residual": True, "eagle_aux_hidden_state_layer_ids": ids, "transformer_layer_config": inner,
    }  # fmt: skip
    return said, {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("form", ["authors", "specforge", "speculators"])
def test_guesses_are_those_of_the_form(form: str, tmp_path: Path) -> None:
    """A prompt in chunks, decode steps, and steps with drafts of which some are wrong; then a chain of guesses."""
    tensors, head = model_tensors(), head_tensors()
    content, written, taps = dict(HEAD), dict(head), (2, LAYERS // 2, LAYERS - 3)
    if form == "authors":
        written["embed_tokens.weight"] = tensors["model.embed_tokens.weight"]  # which is the model's
    elif form == "specforge":
        content["eagle_config"], taps = {"eagle_aux_hidden_state_layer_ids": [0, 3, 7]}, (1, 4, 8)
    else:
        content, written = speculators(content, written, [1, 5, 6])
        taps = (1, 5, 6)
    folder = str(save(tmp_path / "model", MODEL, tensors))
    beside = str(save(tmp_path / "head", content, written))
    config = EngineConfig(dtype="float32", kv_cache_memory="4MiB", page_size=4, max_num_seqs=4, show_progress=False)
    config = config.replace(draft_model=beside)
    source = headed(open_checkpoint(folder), open_checkpoint(beside, drafts=True))
    runner = build_runner(load_model(folder, config, checkpoint=source), config).runner
    oracle = Oracle(tensors, head, taps, form == "speculators")
    check_chain(read_and_guess(runner, TEXT), oracle.run, oracle.features(TEXT[:14]), TEXT[1:15])
    runner.close()
