"""GGUF files of tiny hybrids, as llama.cpp's converter writes them: what it does to each tensor, and back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import torch
from support.gguf_files import _halved, _paired, _single, _stored

ARCHITECTURES = {
    "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe", "lfm2": "lfm2", "lfm2_moe": "lfm2moe",
    "granitemoehybrid": "granitehybrid",
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
    {"lfm": _lfm, "qwe": _qwen, "gra": _granite}[architecture[:3]](writer, config)
    number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    table = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    written = {}
    granite = architecture == "granitehybrid"
    for name, tensor in (_gates_apart(weights) if granite else _single(weights)).items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        moved, back = _moved(config, name, tensor.float())
        there = (_granite_name(config, name) if granite else None) or _name(table, name)
        plain = moved.ndim == 1 or there.endswith(("_norm.weight", ".bias", "conv1d.weight", "shortconv.conv.weight"))
        kind = "F32" if plain else kind_of(there, moved)
        stored, meant = _stored(moved.contiguous().numpy(), kind)
        writer.add_tensor(there, stored, raw_dtype=gguf.GGMLQuantizationType[kind])
        written |= {name: back(meant)} if granite else _apart(config, name, back(meant))
    if granite:
        written = _gates_together(written)
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
    if config.model_type == "granitemoehybrid":
        return _granite_moved(config, name, tensor)
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


def _gates_apart(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Granite's gates, and what they multiply, under names of their own; experts as older checkpoints call them."""
    found = {}
    for there, tensor in weights.items():
        name = there.replace("experts.gate_up_proj", "input_linear.weight")
        name = name.replace("experts.down_proj", "output_linear.weight").replace("router.weight", "router.layer.weight")
        if name.endswith("input_linear.weight"):
            for part, half in zip(("gate", "up"), tensor.chunk(2, dim=-2), strict=True):
                found[name.replace("input_linear", f"{part}_linear")] = half.contiguous()
        else:
            found[name] = tensor
    return found


def _gates_together(written: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {}
    for name, tensor in written.items():
        if ".gate_linear." in name:
            other = written[name.replace("gate_linear", "up_linear")]
            found[name.replace("gate_linear", "input_linear")] = torch.cat((tensor, other), dim=-2)
        elif ".up_linear." not in name:
            found[name] = tensor
    return found


def _granite_name(config: Any, name: str) -> str | None:
    """What gguf's table does not have: the converter names these by itself."""
    layer, _, inner = name.removeprefix("model.layers.").partition(".")
    kind = "" if not config.num_local_experts else "_shexp" if "shared_mlp" in inner else "_exps"
    for part, there in (("gate_linear", "ffn_gate"), ("up_linear", "ffn_up"), ("output_linear", "ffn_down")):
        if f"{part}.weight" in inner:
            return f"blk.{layer}.{there}{kind}.weight"
    return f"blk.{layer}.ssm_d" if inner == "mamba.D" else None


def _granite_moved(
    config: Any, name: str, tensor: torch.Tensor
) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    if name.endswith("conv1d.weight"):
        return tensor.squeeze(1), lambda found: found.unsqueeze(1)
    if name.endswith("A_log"):
        return -tensor.exp().unsqueeze(-1), lambda found: (-found.squeeze(-1)).log()
    if name.endswith("mamba.D"):
        return tensor.unsqueeze(-1), lambda found: found.squeeze(-1)
    if name.endswith("mamba.norm.weight"):
        return tensor.reshape(config.mamba_n_groups, -1), lambda found: found.flatten()
    if "q_proj" in name or "k_proj" in name:
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        return _paired(tensor, heads), lambda found: _halved(found, heads)
    return tensor, lambda found: found


def _granite(writer: Any, config: Any) -> None:
    heads = config.num_key_value_heads
    writer.add_head_count_kv([heads if kind == "full_attention" else 0 for kind in config.layer_types])
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_ssm_conv_kernel(config.mamba_d_conv)
    writer.add_ssm_state_size(config.mamba_d_state)
    writer.add_ssm_group_count(config.mamba_n_groups)
    writer.add_ssm_inner_size(config.mamba_n_heads * config.mamba_d_head)
    writer.add_ssm_time_step_rank(config.mamba_n_heads)
    writer.add_rope_scaling_finetuned(config.position_embedding_type == "rope")
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)
    if config.num_local_experts:
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
