"""llama.cpp's kimi-linear: layers of Kimi Delta Attention beside attention by a latent vector.

Source: llama.cpp's conversion/kimi_linear.py (what was done), src/models/kimi-linear.cpp (what a header leaves to the
reader: weights of experts always come to one, and nothing is rotated).
"""

from __future__ import annotations

from collections.abc import Mapping

from asyncengine.errors import ModelNotFound
from asyncengine.models.formats.gguf import names
from asyncengine.models.formats.gguf.architecture import Architecture, Fields
from asyncengine.models.formats.gguf.header import Header
from asyncengine.models.formats.gguf.names import TensorName
from asyncengine.models.formats.gguf.undo import Undo

_SPARSE = "block_sparse_moe."
_LAYER = {
    **names.LLAMA,
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    **{f"ssm_conv1d_{name}": f"self_attn.{name}_conv1d" for name in "qkv"},
    "ssm_f_a": "self_attn.f_a_proj",
    "ssm_f_b": "self_attn.f_b_proj",
    "ssm_g_a": "self_attn.g_a_proj",
    "ssm_g_b": "self_attn.g_b_proj",
    "ssm_beta": "self_attn.b_proj",
    "ssm_a": "self_attn.A_log",
    "ssm_dt": "self_attn.dt_bias",
    "ssm_norm": "self_attn.o_norm",
    "ffn_gate_inp": f"{_SPARSE}gate",
    "exp_probs_b": f"{_SPARSE}gate.e_score_correction_bias",
    "ffn_gate_exps": f"{_SPARSE}experts.{{}}.w1",
    "ffn_up_exps": f"{_SPARSE}experts.{{}}.w3",
    "ffn_down_exps": f"{_SPARSE}experts.{{}}.w2",
    **{f"ffn_{name}_shexp": f"{_SPARSE}shared_experts.{name}_proj" for name in ("gate", "up", "down")},
}
"""`joins` puts the parts of kv_b_proj together, which llama.cpp has apart."""
_MOST = 2**20
"""Numbers of all heads."""


def _kimi(header: Header) -> Fields:
    heads = header.of_layers("attention.head_count_kv")
    if not heads:
        raise ModelNotFound(
            f"{header.path}: {header.architecture}.attention.head_count_kv must say which layers attend"
        )
    dense = header.whole("leading_dense_block_count", 0)
    count, dim = header.whole("attention.head_count", zeros=True), header.whole("kda.head_dim")
    shared = header.whole("rope.dimension_count")
    key, value = header.whole("attention.key_length_mla"), header.whole("attention.value_length_mla")
    if key <= shared or not value or not dim or count * max(key, value, dim) > _MOST:
        raise ModelNotFound(
            f"{header.path}: {header.architecture} has {count} heads with keys of {key}, values of {value} and "
            f"states of {dim} numbers, of which {shared} of a key are shared"
        )
    return {
        "layer_types": ["full_attention" if each else "linear_attention" for each in heads],
        "mlp_layer_types": ["dense" if index < dense else "sparse" for index in range(len(heads))],
        "num_key_value_heads": count,
        "linear_num_heads": count,
        "linear_head_dim": dim,
        "linear_conv_kernel_dim": header.whole("ssm.conv_kernel"),
        "kv_lora_rank": header.whole("attention.kv_lora_rank"),
        "qk_rope_head_dim": shared,
        "qk_nope_head_dim": key - shared,
        "v_head_dim": value,
        "num_local_experts": header.whole("expert_count"),
        "num_experts_per_tok": header.whole("expert_used_count"),
        "moe_intermediate_size": header.whole("expert_feed_forward_length"),
        "n_shared_experts": header.whole("expert_shared_count", 0),
        "routed_scaling_factor": header.real("expert_weights_scale", 1.0),
        "norm_topk_prob": True,
        "n_group": header.whole("expert_group_count", 1),
        "topk_group": header.whole("expert_group_used_count", 1),
    }


def _undo(header: Header, name: TensorName) -> Undo | None:
    if name.stem.startswith("ssm_conv1d"):
        return Undo(shape="taps")
    return Undo(decay=True, shape="heads") if name.stem == "ssm_a" else None


KIMI: Mapping[str, Architecture] = {
    "kimi-linear": Architecture(
        "kimi_linear", "KimiLinearForCausalLM", _LAYER, hybrid=True, attention="latent", undo=_undo, more=_kimi
    ),
}  # fmt: skip
"""By `general.architecture`."""
