"""GGUF files of tiny hybrids, as llama.cpp's converter writes them: what it does to each tensor, and back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import torch
from support.gguf_files import _single, _stored

ARCHITECTURES = {
    "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe", "lfm2": "lfm2", "lfm2_moe": "lfm2moe",
}  # fmt: skip
_EXPERTS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
Kinds = Callable[[str, torch.Tensor], str]


def write_hybrid(
    path: Path, config: Any, weights: dict[str, torch.Tensor], kind_of: Kinds = lambda name, tensor: "F32",
    change: Callable[[Any], object] = lambda writer: None,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """What was really written, under transformers' names; `kind_of` as for `write_gguf`. `change`: told of the writer
    before it writes."""
    architecture = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, architecture)
    _common(writer, config)
    (_lfm if architecture.startswith("lfm") else _qwen)(writer, config)
    number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    table = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    written = {}
    for name, tensor in _single(weights).items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        moved, back = _moved(config, name, tensor.float())
        there = _name(table, name)
        plain = moved.ndim == 1 or there.endswith(("_norm.weight", ".bias", "conv1d.weight", "shortconv.conv.weight"))
        kind = "F32" if plain else kind_of(there, moved)
        stored, meant = _stored(moved.contiguous().numpy(), kind)
        writer.add_tensor(there, stored, raw_dtype=gguf.GGMLQuantizationType[kind])
        written |= _apart(config, name, back(meant))
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


def _name(table: Any, name: str) -> str:
    given = name.replace("dt_bias", "dt_proj.bias").replace("expert_bias", "expert_bias.bias")
    if ".feed_forward.experts." in given:
        for old, new in _EXPERTS.items():
            given = given.replace(old, new).removeprefix("model.")
    if name.endswith("A_log"):
        return str(table.get_name(given))
    found = table.get_name(given, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return str(found)


def _apart(config: Any, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    if ".experts." not in name:
        return {name: tensor}
    if ".feed_forward." in name:
        for old, new in _EXPERTS.items():
            name = name.replace(old, new)
    return {name.replace(".experts.", f".experts.{index}."): part for index, part in enumerate(tensor)}


def _moved(config: Any, name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """The tensor as the converter writes it, and how what was written comes back."""
    if ".conv.conv.weight" in name:
        return tensor.squeeze(1), lambda found: found.unsqueeze(1)
    if "shared_expert_gate" in name:
        return tensor.squeeze(0), lambda found: found.unsqueeze(0)
    if config.model_type.startswith("lfm"):
        return tensor, lambda found: found
    if name.endswith("norm.weight") and "linear_attn.norm" not in name:
        return tensor + 1, lambda found: found - 1
    if ".linear_attn." not in name or name.endswith("linear_attn.norm.weight"):
        return tensor, lambda found: found
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    size, before = config.linear_value_head_dim, 2 * keys * config.linear_key_head_dim
    if name.endswith("out_proj.weight"):
        return _turns(tensor.T, keys, values, size).T, lambda found: _turns(found.T, values // keys, values, size).T
    stays = before if "in_proj_qkv" in name or "conv1d" in name else 0
    size = 1 if name.endswith(("A_log", "dt_bias", "in_proj_a.weight", "in_proj_b.weight")) else size

    def turned(found: torch.Tensor, groups: int) -> torch.Tensor:
        return torch.cat((found[:stays], _turns(found[stays:], groups, values, size)))

    if "conv1d" in name:
        return turned(tensor.squeeze(1), keys), lambda found: turned(found, values // keys).unsqueeze(1)
    if name.endswith("A_log"):
        return -turned(tensor, keys).exp(), lambda found: (-turned(found, values // keys)).log()
    return turned(tensor, keys), lambda found: turned(found, values // keys)


def _turns(rows: torch.Tensor, groups: int, heads: int, size: int) -> torch.Tensor:
    """Heads that lie group by group, one of each group in turn."""
    split = rows.reshape(groups, heads // groups, size, *rows.shape[1:])
    return split.transpose(0, 1).reshape(rows.shape)


def _common(writer: Any, config: Any) -> None:
    rope = config.rope_parameters
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(dim * rope.get("partial_rotary_factor", 1.0)))
    writer.add_layer_norm_rms_eps(getattr(config, "rms_norm_eps", None) or config.norm_eps)
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    if getattr(config, "num_experts", None):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def _qwen(writer: Any, config: Any) -> None:
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_feed_forward_length(getattr(config, "intermediate_size", 0) or 0)
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    key = f"{writer.arch}.attention.recurrent_layers"
    writer.add_array(key, [kind == "linear_attention" for kind in config.layer_types])
    writer.add_rope_dimension_sections([11, 11, 10, 0])
    if getattr(config, "shared_expert_intermediate_size", None):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def _lfm(writer: Any, config: Any) -> None:
    heads = config.num_key_value_heads
    writer.add_head_count_kv([heads if kind == "full_attention" else 0 for kind in config.layer_types])
    writer.add_shortconv_l_cache(config.conv_L_cache)
    writer.add_feed_forward_length(config.intermediate_size)
    if config.model_type == "lfm2_moe":
        writer.add_leading_dense_block_count(config.num_dense_layers)
