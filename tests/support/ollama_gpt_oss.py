"""gpt-oss as Ollama's own converter writes it, in its four forms of August to October 2025, for tests.

From the documented behaviour of that converter (ollama, convert/convert_gptoss.go and its history): its own names, no
kind of rotary scaling, no width of experts, "default" for the cutting of words, biases and sinks of 16 bits. Blocks of
MXFP4 were what the original checkpoint has at first, under the number 4; then ggml's, under 39.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from support.gguf_files import finish
from support.gguf_states import add_fields

FORMS = ("first", "apart", "ggml", "split")
"""Queries, keys and values fused, gate and up taking turns, raw blocks; the former apart; ggml's blocks; gate and up
apart."""
_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "model.layers": "blk",
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_out", "self_attn.sinks": "attn_sinks",
    "post_attention_layernorm": "ffn_norm", "mlp.router": "ffn_gate_inp",
}  # fmt: skip


def raw_blocks(blocks: np.ndarray) -> np.ndarray:
    """ggml's blocks [..., bytes] of MXFP4 with neighbours in a byte, as the standard has them."""
    whole = blocks.reshape(*blocks.shape[:-1], -1, 17)
    low, high = whole[..., 1:] & 15, whole[..., 1:] >> 4
    numbers = np.concatenate([low, high], axis=-1)
    packed = numbers[..., ::2] | (numbers[..., 1::2] << 4)
    return np.concatenate([whole[..., :1], packed], axis=-1).reshape(blocks.shape)


def write_ollama_gpt_oss(
    path: Path, config: Any, weights: dict[str, torch.Tensor], form: str
) -> dict[str, torch.Tensor]:
    """A model of transformers' configuration and weights; what was really written, under transformers' names."""
    writer = gguf.GGUFWriter(path, "gptoss")
    add_fields(writer, config, "gptoss")
    add_fields(writer, config.rope_parameters, "gptoss rope")
    meant = {}
    for name, tensor in weights.items():
        if ".experts." in name:
            meant[name] = _experts(writer, name, tensor.float(), form)
            continue
        stored = tensor if tensor.ndim == 1 and "norm" in name else tensor.bfloat16()
        meant[name] = stored.float()
        if form != "first" or not any(f".{part}_proj." in name for part in "qkv"):
            _add(writer, _name(name), stored)
    if form == "first":
        for layer in range(config.num_hidden_layers):
            for suffix in ("weight", "bias"):
                parts = [meant[f"model.layers.{layer}.self_attn.{part}_proj.{suffix}"] for part in "qkv"]
                _add(writer, f"blk.{layer}.attn_qkv.{suffix}", torch.cat(parts).bfloat16())
    finish(writer)
    return meant


def _name(name: str) -> str:
    for there, here in _NAMES.items():
        name = name.replace(there, here)
    return name


def _experts(writer: Any, name: str, tensor: torch.Tensor, form: str) -> torch.Tensor:
    """Both forms of a name: "...gate_up_proj" of matrices, "...gate_up_proj_bias"."""
    stem, _, part = name.rpartition(".")
    bias = part.endswith("_bias")
    here = f"{_name(stem.removesuffix('.mlp.experts'))}.ffn_{'down' if 'down' in part else 'gate_up'}_exps"
    if bias:
        halves = _halves(here, tensor.bfloat16(), form)
        for each, stored in halves:
            _add(writer, f"{each}.bias", stored)
        return tensor.bfloat16().float()
    rows = tensor.transpose(1, 2).contiguous().numpy()  # [experts, outputs, inputs]
    blocks = gguf.quantize(rows, gguf.GGMLQuantizationType.MXFP4)
    for each, stored in _halves(here, torch.from_numpy(blocks), form):
        raw = form in ("first", "apart")
        numbers = raw_blocks(stored.numpy()) if raw else np.ascontiguousarray(stored.numpy())
        writer.add_tensor(f"{each}.weight", numbers, raw_dtype=gguf.GGMLQuantizationType.MXFP4)
        if raw:
            writer.tensors[-1][f"{each}.weight"].dtype = 4
    return torch.from_numpy(np.array(gguf.dequantize(blocks, gguf.GGMLQuantizationType.MXFP4))).transpose(1, 2)


def _halves(name: str, tensor: torch.Tensor, form: str) -> list[tuple[str, torch.Tensor]]:
    if form != "split" or "gate_up" not in name:
        return [(name, tensor)]
    return [(name.replace("gate_up", part), tensor[:, index::2]) for index, part in enumerate(("gate", "up"))]


def _add(writer: Any, name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype == torch.bfloat16:
        numbers = tensor.contiguous().view(torch.uint8).numpy()
        writer.add_tensor(name, numbers, raw_dtype=gguf.GGMLQuantizationType.BF16)
    else:
        writer.add_tensor(name, tensor.contiguous().numpy())
