"""Output of llama.cpp's converter for checkpoints whose layers are not all alike: names, settings and moved numbers.

Numbers are numpy arrays, bfloat16 as its 16 bits (`gguf_file.tensors`); what is not a matrix becomes float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

Named = Iterable[tuple[str, str, Any]]
"""Name, type and numbers of tensors."""

_ATTENTION = {
    "input_layernorm.weight": "attn_norm.weight", "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight", "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight", "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight", "post_attention_layernorm.weight": "ffn_norm.weight",
}  # fmt: skip
_MLP = {f"mlp.{name}_proj.weight": f"ffn_{name}.weight" for name in ("gate", "up", "down")}
_QWEN = {
    **_ATTENTION, **_MLP, "post_attention_layernorm.weight": "post_attention_norm.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight", "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight", "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight", "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.A_log": "ssm_a", "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
}  # fmt: skip
_LFM = {
    **_ATTENTION, "operator_norm.weight": "attn_norm.weight", "ffn_norm.weight": "ffn_norm.weight",
    "self_attn.out_proj.weight": "attn_output.weight", "self_attn.q_layernorm.weight": "attn_q_norm.weight",
    "self_attn.k_layernorm.weight": "attn_k_norm.weight", "conv.conv.weight": "shortconv.conv.weight",
    **{f"conv.{name}.bias": f"shortconv.{name}.bias" for name in ("conv", "in_proj", "out_proj")},
    "conv.in_proj.weight": "shortconv.in_proj.weight", "conv.out_proj.weight": "shortconv.out_proj.weight",
    "feed_forward.w1.weight": "ffn_gate.weight", "feed_forward.w3.weight": "ffn_up.weight",
    "feed_forward.w2.weight": "ffn_down.weight",
}  # fmt: skip
_GRANITE = {
    **_ATTENTION, "mamba.in_proj.weight": "ssm_in.weight", "mamba.conv1d.weight": "ssm_conv1d.weight",
    "mamba.conv1d.bias": "ssm_conv1d.bias", "mamba.dt_bias": "ssm_dt.bias", "mamba.A_log": "ssm_a",
    "mamba.D": "ssm_d", "mamba.norm.weight": "ssm_norm.weight", "mamba.out_proj.weight": "ssm_out.weight",
    "shared_mlp.gate.weight": "ffn_gate.weight", "shared_mlp.up.weight": "ffn_up.weight",
    "shared_mlp.output_linear.weight": "ffn_down.weight",
}  # fmt: skip
_MIXTURE = {
    **_ATTENTION, "mlp.gate.weight": "ffn_gate_inp.weight",
    **{f"mlp.experts.{name}_proj.weight": f"ffn_{name}_exps.weight" for name in ("gate", "up", "down")},
}  # fmt: skip
_OUTER = {"embed_tokens": "token_embd", "norm": "output_norm", "embedding_norm": "token_embd_norm", "lm_head": "output"}
_EXACT = ("ffn_gate_inp.weight", "ssm_conv1d.weight", "shortconv.conv.weight")
"""Matrices that stay float32."""


def single(numbers: Any) -> Any:
    """Numbers as float32."""
    return numbers if numbers.dtype == "float32" else (numbers.astype("uint32") << 16).view("float32")


class Family(NamedTuple):
    """One of llama.cpp's architectures."""

    architecture: str
    names: Mapping[str, str]
    settings: Callable[[Any, Mapping[str, Any]], None]
    moved: Callable[[Mapping[str, Any], str, Any], Any]
    """(configuration, name in a layer, numbers) -> numbers as the file has them."""
    arranged: Callable[[Named], Named] = lambda tensors: tensors
    """The checkpoint's tensors under the keys of `names`, where it has others."""


def entries(config: Mapping[str, Any], tensors: Named) -> Iterator[tuple[str, Any]]:
    """Name and numbers of each tensor of the file, float32 or the 16 bits of bfloat16."""
    family = FAMILIES[config["model_type"]]
    for name, _, numbers in family.arranged(tensors):
        if not name.startswith("model.layers."):
            outer = name.removeprefix("model.").removesuffix(".weight")
            yield f"{_OUTER[outer]}.weight", family.moved(config, name, numbers) if numbers.ndim == 1 else numbers
            continue
        _, _, layer, inner = name.split(".", 3)
        there = family.names[inner]
        found = family.moved(config, inner, numbers)
        exact = numbers.ndim == 1 or there in _EXACT
        yield f"blk.{layer}.{there}", single(found) if exact else found


def _halves(tensors: Named) -> Named:
    """Granite's gates, and what they multiply, apart."""
    for name, kind, numbers in tensors:
        if name.endswith("shared_mlp.input_linear.weight"):
            half = len(numbers) // 2
            yield name.replace("input_linear", "gate"), kind, numbers[:half]
            yield name.replace("input_linear", "up"), kind, numbers[half:]
        else:
            yield name, kind, numbers


def _stacked(tensors: Named) -> Named:
    """The experts of a layer in one tensor of each kind."""
    import numpy

    parts: dict[str, dict[int, Any]] = {}
    kinds: dict[str, str] = {}
    for name, kind, numbers in tensors:
        if ".experts." not in name:
            yield name, kind, numbers
            continue
        before, _, behind = name.partition(".experts.")
        expert, _, rest = behind.partition(".")
        whole = f"{before}.experts.{rest}"
        parts.setdefault(whole, {})[int(expert)] = numbers
        kinds[whole] = kind
    for name, found in parts.items():
        yield name, kinds[name], numpy.stack([found[expert] for expert in range(len(found))])


def _qwen_moved(config: Mapping[str, Any], name: str, numbers: Any) -> Any:
    import numpy

    if name.endswith("norm.weight") and name != "linear_attn.norm.weight":
        return single(numbers) + 1
    if name.endswith("A_log"):
        return -numpy.exp(single(numbers))
    return single(numbers) if numbers.ndim == 1 else numbers.squeeze(1) if numbers.ndim == 3 else numbers


def _plain(config: Mapping[str, Any], name: str, numbers: Any) -> Any:
    """Weights of a convolution without the dimension of one."""
    conv = numbers.ndim == 3 and numbers.shape[1] == 1
    return single(numbers) if numbers.ndim == 1 else numbers.squeeze(1) if conv else numbers


def _granite_moved(config: Mapping[str, Any], name: str, numbers: Any) -> Any:
    import numpy

    from benchmarks.peers.gguf_file import interleave

    if name.endswith("A_log"):
        return -numpy.exp(single(numbers))[:, None]
    if name == "mamba.D":
        return single(numbers)[:, None]
    if name == "mamba.norm.weight":
        return single(numbers).reshape(config["mamba_n_groups"], -1)
    heads = {"self_attn.q_proj.weight": "num_attention_heads", "self_attn.k_proj.weight": "num_key_value_heads"}
    if name in heads:
        return numpy.ascontiguousarray(interleave(numbers, config[heads[name]]))
    return _plain(config, name, numbers)


def _common(writer: Any, config: Mapping[str, Any], epsilon: str = "rms_norm_eps") -> None:
    rope = config.get("rope_parameters") or config
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_name(f"random {config['model_type']}")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_rope_dimension_count(int(dim * rope.get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    writer.add_layer_norm_rms_eps(float(config[epsilon]))
    writer.add_vocab_size(config["vocab_size"])


def _by_layer(config: Mapping[str, Any]) -> list[int]:
    """Heads of keys and values of each layer, none where it keeps a state."""
    attends = [kind in ("full_attention", "attention") for kind in config["layer_types"]]
    return [config["num_key_value_heads"] if each else 0 for each in attends]


def _qwen_settings(writer: Any, config: Mapping[str, Any]) -> None:
    if config["linear_num_key_heads"] != config["linear_num_value_heads"]:
        raise ValueError("heads of values are in another order where several belong to a head of keys: not written")
    _common(writer, config)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    recurrent = [kind == "linear_attention" for kind in config["layer_types"]]
    writer.add_array(f"{writer.arch}.attention.recurrent_layers", recurrent)
    writer.add_uint32(f"{writer.arch}.full_attention_interval", recurrent.index(False) + 1)
    writer.add_rope_dimension_sections([11, 11, 10, 0])


def _lfm_settings(writer: Any, config: Mapping[str, Any]) -> None:
    _common(writer, config, "norm_eps")
    writer.add_head_count_kv(_by_layer(config))
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_shortconv_l_cache(config["conv_L_cache"])


def _granite_settings(writer: Any, config: Mapping[str, Any]) -> None:
    _common(writer, config)
    writer.add_head_count_kv(_by_layer(config))
    writer.add_feed_forward_length(config["shared_intermediate_size"])
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_group_count(config["mamba_n_groups"])
    writer.add_ssm_inner_size(config["mamba_n_heads"] * config["mamba_d_head"])
    writer.add_ssm_time_step_rank(config["mamba_n_heads"])
    writer.add_rope_scaling_finetuned(config["position_embedding_type"] == "rope")
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])


def _mixture_settings(writer: Any, config: Mapping[str, Any]) -> None:
    _common(writer, config)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_expert_count(config.get("num_experts") or config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


FAMILIES: Mapping[str, Family] = {
    "qwen3_5_text": Family("qwen35", _QWEN, _qwen_settings, _qwen_moved),
    "lfm2": Family("lfm2", _LFM, _lfm_settings, _plain),
    "granitemoehybrid": Family("granitehybrid", _GRANITE, _granite_settings, _granite_moved, _halves),
    "qwen3_moe": Family("qwen3moe", _MIXTURE, _mixture_settings, _plain, _stacked),
}
"""Families by transformers' name."""
