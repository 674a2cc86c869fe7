"""Models with states as llama.cpp's converter writes them: changes of each tensor, the way back, and the header."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from support.data import cases_of

HEADERS: dict[str, dict[str, str]] = cases_of(__file__)
"""Values of headers by the names of the writer's methods, and fields of configurations that they are."""

STATES = {
    "qwen3_next": "qwen3next", "mamba2": "mamba2", "falcon_h1": "falcon-h1", "nemotron_h": "nemotron_h",
    "kimi_linear": "kimi-linear", "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe", "lfm2": "lfm2",
    "lfm2_moe": "lfm2moe", "granitemoehybrid": "granitehybrid",
}  # fmt: skip
Back = Callable[[list[torch.Tensor]], torch.Tensor]
Moved = tuple[list[tuple[str, torch.Tensor]], Back]
"""Names and tensors as the converter writes them; and the tensor that they were before."""


def paired(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    return tensor.view(heads, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape).contiguous()


def halved(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    return tensor.view(heads, -1, 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape).contiguous()


def only(found: list[torch.Tensor]) -> torch.Tensor:
    return found[0]


def moved_state(config: Any, name: str, tensor: torch.Tensor, legacy: bool) -> Moved:
    if config.model_type.startswith("qwen3_5"):
        return _qwen35(config, name, tensor)
    if name.endswith("A_log"):
        moved = -tensor.exp()
        wide = moved if config.model_type in ("qwen3_next", "kimi_linear") else moved.view(-1, 1)
        return [(name, wide)], lambda found: (-found[0]).log().view(tensor.shape)
    if name.endswith(("conv1d.weight", "conv.conv.weight")):
        shape = (1, len(tensor), 1, tensor.shape[-1]) if config.model_type == "kimi_linear" else (len(tensor), -1)
        return [(name, tensor.view(shape))], lambda found: found[0].view(tensor.shape)
    if config.model_type.startswith("lfm2"):
        return [(name, tensor)], only
    if name.endswith(".D"):
        return [(name, tensor.view(-1, 1))], lambda found: found[0].flatten()
    return {"qwen3_next": _qwen, "falcon_h1": _falcon, "kimi_linear": _kimi, "granitemoehybrid": _granite}.get(
        config.model_type, _mamba
    )(config, name, tensor, legacy)


def _qwen35(config: Any, name: str, tensor: torch.Tensor) -> Moved:
    """Heads of values, which lie in turns of the heads of keys."""
    if name.endswith("shared_expert_gate.weight"):
        return [(name, tensor.squeeze(0))], lambda found: found[0].unsqueeze(0)
    if name.endswith("norm.weight") and "linear_attn.norm" not in name:
        return [(name, tensor + 1)], lambda found: found[0] - 1
    if ".linear_attn." not in name or name.endswith("linear_attn.norm.weight"):
        return [(name, tensor)], only
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    size = config.linear_value_head_dim
    if name.endswith("out_proj.weight"):
        return [
            (name, _turns(tensor.T, keys, values, size).T)
        ], lambda found: _turns(found[0].T, values // keys, values, size).T
    stays = 2 * keys * config.linear_key_head_dim if "in_proj_qkv" in name or "conv1d" in name else 0
    size = 1 if name.endswith(("A_log", "dt_bias", "in_proj_a.weight", "in_proj_b.weight")) else size

    def turned(found: torch.Tensor, groups: int) -> torch.Tensor:
        return torch.cat((found[:stays], _turns(found[stays:], groups, values, size)))

    moved = turned(tensor.squeeze(1) if "conv1d" in name else tensor, keys)
    decay = name.endswith("A_log")

    def back(found: list[torch.Tensor]) -> torch.Tensor:
        return turned((-found[0]).log() if decay else found[0], values // keys).view(tensor.shape)

    return [(name, -moved.exp() if decay else moved)], back


def _turns(rows: torch.Tensor, groups: int, heads: int, size: int) -> torch.Tensor:
    """Heads that lie group by group, one of each group in turn."""
    split = rows.reshape(groups, heads // groups, size, *rows.shape[1:])
    return split.transpose(0, 1).reshape(rows.shape)


def _qwen(config: Any, name: str, tensor: torch.Tensor, legacy: bool) -> Moved:
    if name.endswith("norm.weight") and "linear_attn.norm" not in name:
        return [(name, tensor + 1)], lambda found: found[0] - 1
    if name.endswith("shared_expert_gate.weight"):
        return [(name, tensor.squeeze(0))], lambda found: found[0].unsqueeze(0)
    if "in_proj_qkvz" not in name:
        return [(name, tensor)], only
    layer = name.split(".")[2]
    if legacy:
        return [(f"blk.{layer}.ssm_in.weight", tensor)], only
    keys, size = config.linear_num_key_heads, config.linear_key_head_dim
    inner = config.linear_num_value_heads * config.linear_value_head_dim // keys
    sizes = [size, size, inner, inner]
    kinds = tensor.view(keys, sum(sizes), -1).split(sizes, dim=1)
    qkv = torch.cat([kind.reshape(-1, tensor.shape[1]) for kind in kinds[:3]])

    def back(found: list[torch.Tensor]) -> torch.Tensor:
        parts = [*found[0].split([keys * each for each in sizes[:3]]), found[1]]
        return torch.cat([part.view(keys, -1, tensor.shape[1]) for part in parts], dim=1).view(tensor.shape)

    z = kinds[3].reshape(-1, tensor.shape[1])
    return [(f"blk.{layer}.attn_qkv.weight", qkv), (f"blk.{layer}.attn_gate.weight", z)], back


def _mamba(config: Any, name: str, tensor: torch.Tensor, legacy: bool) -> Moved:
    if name.endswith("mixer.norm.weight"):
        return [(name, tensor.view(config.n_groups, -1))], lambda found: found[0].flatten()
    if ".experts." in name:
        return [(name.replace("backbone", "model").replace("mixer", "mlp"), tensor)], only
    if "q_proj" in name or "k_proj" in name:
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        return [(name, paired(tensor, heads))], lambda found: halved(found[0], heads)
    return [(name, tensor)], only


def _falcon(config: Any, name: str, tensor: torch.Tensor, legacy: bool) -> Moved:
    if name.endswith("mamba.norm.weight"):
        return [(name, tensor.view(config.mamba_n_groups, -1))], lambda found: found[0].flatten()
    into = config.attention_in_multiplier
    gate, down = config.mlp_multipliers
    factors = {
        "down_proj": down, "gate_proj": gate, "k_proj": config.key_multiplier * into, "q_proj": into, "v_proj": into,
        "o_proj": config.attention_out_multiplier, "out_proj": config.ssm_out_multiplier,
        "lm_head": config.lm_head_multiplier, "embed_tokens": config.embedding_multiplier,
    }  # fmt: skip
    part = name.split(".")[-2]
    factor = torch.tensor(factors.get(part, 1.0))
    if part == "in_proj":
        states = config.mamba_n_groups * config.mamba_d_state
        sizes = torch.tensor([config.mamba_d_ssm, config.mamba_d_ssm, states, states, config.mamba_n_heads])
        each = torch.tensor(config.ssm_multipliers) * config.ssm_in_multiplier
        factor = each.repeat_interleave(sizes)[:, None]
    # the table has the whole name of this norm, so that its files lack the suffix
    there = f"blk.{name.split('.')[2]}.ffn_norm" if "pre_ff_layernorm" in name else name
    return [(there, tensor * factor)], lambda found: found[0] / factor


def _kimi(config: Any, name: str, tensor: torch.Tensor, legacy: bool) -> Moved:
    if name.endswith("kv_b_proj.weight"):
        sizes = [config.qk_nope_head_dim, config.v_head_dim]
        keys, values = tensor.view(config.num_attention_heads, sum(sizes), -1).split(sizes, dim=1)
        parts = [(name.replace("kv_b", "k_b"), keys.transpose(1, 2)), (name.replace("kv_b", "v_b"), values)]
        return parts, lambda found: torch.cat((found[0].transpose(1, 2), found[1]), dim=1).view(tensor.shape)
    if not name.startswith("model.layers."):
        return [(name, tensor)], only
    layer = name.split(".")[2]
    if ".experts." in name:
        kind = {"w1": "gate", "w2": "down", "w3": "up"}[name.split(".")[-2]]
        return [(f"blk.{layer}.ffn_{kind}_exps.weight", tensor)], only
    dense = config.mlp_layer_types[int(layer)] == "dense"  # transformers saves it under the mixture's name
    return [(name.replace("block_sparse_moe", "mlp") if dense else name, tensor)], only


def _granite(config: Any, name: str, tensor: torch.Tensor, legacy: bool) -> Moved:
    """Gates and what they multiply lie apart; gguf's table does not have their names."""
    if name.endswith("mamba.norm.weight"):
        return [(name, tensor.reshape(config.mamba_n_groups, -1))], lambda found: found[0].flatten()
    if "_linear." not in name:
        return _mamba(config, name, tensor, legacy)
    layer, kind = name.split(".")[2], "" if not config.num_local_experts else "_shexp" if "shared" in name else "_exps"
    if name.endswith("input_linear.weight"):
        parts = zip(("gate", "up"), tensor.chunk(2, dim=-2), strict=True)
        return [(f"blk.{layer}.ffn_{part}{kind}.weight", half) for part, half in parts], lambda found: torch.cat(
            found, dim=-2
        )
    return [(f"blk.{layer}.ffn_down{kind}.weight", tensor)], only


def add_fields(writer: Any, config: Any, kind: str) -> None:
    """Write fields of a configuration under the names of `HEADERS`; none is what a configuration does not have, and of
    several tokens that end there is no list."""
    get = config.get if isinstance(config, dict) else partial(getattr, config)
    for name, fields in HEADERS.get(kind, {}).items():
        values = [get(field, None) for field in fields.split(" or ")]
        for value in values:
            if value is not None and not isinstance(value, list):
                getattr(writer, f"add_{name}")(value)


def state_header(writer: Any, config: Any) -> None:
    """Its values of mixtures and states, by the names that the families' configurations share."""
    get = lambda *names: next((getattr(config, name) for name in names if getattr(config, name, None)), 0)  # noqa: E731
    add_fields(writer, config, "states")
    writer.add_context_length(get("max_position_embeddings") or 2**20)
    epsilon = get("rms_norm_eps", "layer_norm_epsilon", "norm_eps")
    # Nemotron's converter finds the other name
    (writer.add_layer_norm_eps if config.model_type == "nemotron_h" else writer.add_layer_norm_rms_eps)(epsilon)
    if kernel := get("linear_conv_kernel_dim", "mamba_d_conv", "conv_kernel"):
        writer.add_ssm_conv_kernel(kernel)
    headers = {"qwen": _qwen_header, "kimi": _kimi_header, "lfm2": _lfm_header}
    headers.get(config.model_type[:4], _mamba_header)(writer, config)
    experts = get("num_experts") or (get("n_routed_experts") if writer.arch == "nemotron_h_moe" else 0)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(get("num_experts_per_tok"))
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if config.model_type == "mamba2":
        writer.add_feed_forward_length(0)
        writer.add_head_count(0)
        return
    writer.add_head_count(config.num_attention_heads)
    if config.model_type != "nemotron_h":
        writer.add_feed_forward_length(get("intermediate_size"))
    if config.model_type != "kimi_linear":
        dim = get("head_dim") or config.hidden_size // config.num_attention_heads
        writer.add_key_length(dim)
        writer.add_value_length(dim)


def _qwen_header(writer: Any, config: Any) -> None:
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(config.head_dim * rope.get("partial_rotary_factor", 1.0)))
    add_fields(writer, config, "qwen")
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    key = f"{writer.arch}.attention.recurrent_layers"
    writer.add_array(key, [kind == "linear_attention" for kind in config.layer_types])


def _lfm_header(writer: Any, config: Any) -> None:
    heads = config.num_key_value_heads
    writer.add_head_count_kv([heads if kind == "full_attention" else 0 for kind in config.layer_types])
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_shortconv_l_cache(config.conv_L_cache)
    if config.model_type == "lfm2_moe":
        writer.add_leading_dense_block_count(config.num_dense_layers)


def _mamba_header(writer: Any, config: Any) -> None:
    get = lambda *names: next(getattr(config, name) for name in names if getattr(config, name, None))  # noqa: E731
    heads = get("mamba_num_heads", "mamba_n_heads", "num_heads")
    dim = get("mamba_head_dim", "mamba_d_head", "head_dim")
    writer.add_ssm_state_size(get("ssm_state_size", "mamba_d_state", "state_size"))
    writer.add_ssm_group_count(get("n_groups", "mamba_n_groups"))
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(heads * dim)
    if config.model_type == "falcon_h1":
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if config.model_type == "nemotron_h":
        _nemotron_header(writer, config)
    if config.model_type == "granitemoehybrid":
        _granite_header(writer, config)


def _granite_header(writer: Any, config: Any) -> None:
    heads = config.num_key_value_heads
    writer.add_head_count_kv([heads if kind == "full_attention" else 0 for kind in config.layer_types])
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_scaling_finetuned(config.position_embedding_type == "rope")
    add_fields(writer, config, "granite")
    if config.num_local_experts:
        add_fields(writer, config, "granitehybrid mixture")


def _nemotron_header(writer: Any, config: Any) -> None:
    kinds, heads = config.layers_block_type, config.num_key_value_heads
    moe = writer.arch == "nemotron_h_moe"
    width = config.moe_intermediate_size if moe else config.intermediate_size
    writer.add_head_count_kv([heads if kind == "full_attention" else 0 for kind in kinds])
    writer.add_feed_forward_length([width if kind in ("mlp", "moe") else 0 for kind in kinds])
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads + 2)  # says nothing
    add_fields(writer, config, writer.arch)


def _kimi_header(writer: Any, config: Any) -> None:
    kinds, rank, rope = config.layer_types, config.kv_lora_rank, config.qk_rope_head_dim
    writer.add_head_count_kv([1 if kind == "full_attention" else 0 for kind in kinds])
    add_fields(writer, config, writer.arch)
    writer.add_key_length(rank + rope)
    writer.add_key_length_mla(config.qk_nope_head_dim + rope)
    writer.add_leading_dense_block_count(config.mlp_layer_types.count("dense"))
